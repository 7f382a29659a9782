//! Attention with row work on its result: which kernel, how it is launched, what it is given.

use deuteron_codegen::body::{Access, ArgSpec, Body, Expr, Exprs, Stage};
use deuteron_codegen::cuda::{Policy, RowConfig};
use deuteron_codegen::kernel::Source;
use deuteron_codegen::linear::earlier_sums;
use deuteron_graph::{BinaryOp, ReduceOp};

use super::super::rows::{self, refusal as rows_refusal};
use super::*;
use crate::rows::{AttentionRows, AttentionRowsLaunch, LoweredAttentionRows};

/// `s = r + o`, `y = s * sum(s)`: the residual is the first argument, attention's result the second.
fn epilogue(dtype: Dtype, cols: usize) -> Body {
    let mut exprs = Exprs::default();
    let (r, o) = (exprs.make(Expr::Load(0)), exprs.make(Expr::Load(1)));
    let sum = exprs.make(Expr::Binary(BinaryOp::Add, r, o));
    let all = exprs.make(Expr::RowValue(0));
    let scaled = exprs.make(Expr::Binary(BinaryOp::Mul, sum, all));
    let spec = |written| ArgSpec { dtype, access: Access::Row, written };
    Body {
        cols,
        args: vec![spec(false), spec(false), spec(true), spec(true)],
        exprs: exprs.finish(),
        row_values: 1,
        stages: vec![
            Stage::RowReduce { op: ReduceOp::Sum, value: sum, into: 0 },
            Stage::Store { value: sum, arg: 2 },
            Stage::Store { value: scaled, arg: 3 },
        ],
        ..Body::default()
    }
}

/// Rows of `joined` heads, row after row: sequences, then groups of heads, then queries.
fn in_rows(kernel: &AttentionKernel, [batch, heads, queries, keys]: [usize; 4], joined: usize) -> AttentionShape {
    let cols = joined * kernel.width;
    let group = if heads == joined { kernel.width } else { queries * kernel.width };
    let o = HeadStrides { batch: heads * queries * kernel.width, head: group, position: cols };
    AttentionShape { o, ..shape([batch, heads, queries, keys]) }
}

fn rows_launch(kernel: &AttentionRows<Body>, shape: AttentionShape, offset: usize) -> AttentionRowsLaunch {
    let cols = kernel.epilogue.cols;
    let rows = shape.batch * shape.heads * shape.queries * kernel.attention.width / cols;
    let mut args = lowered(&kernel.attention, shape, offset).args;
    args.truncate(kernel.operands());
    let base = args[0].base;
    for spec in kernel.epilogue.args.iter().enumerate().filter(|(arg, _)| *arg != kernel.result).map(|(_, spec)| spec) {
        let leading = vec![(rows, cols)];
        args.push(ArgBinding { base, dtype: spec.dtype, written: spec.written, offset, leading, table_rows: 0 });
    }
    AttentionRowsLaunch { args, shape, axes: Vec::new() }
}

struct Made {
    variant: ForwardVariant,
    config: RowConfig,
    text: String,
    grids: Grids,
}

/// A kernel whose rows are the last block's.
fn make(attention: AttentionKernel, sizes: [usize; 4], joined: usize, offset: usize, arch: Arch) -> Made {
    let epilogue = epilogue(attention.dtype, joined * attention.width);
    let shape = in_rows(&attention, sizes, joined);
    assert_eq!(attention.joined(&shape, epilogue.cols), Some(joined));
    let kernel = AttentionRows { attention, epilogue, result: 1, norm: None };
    let launch = rows_launch(&kernel, shape, offset);
    let lowered = LoweredAttentionRows { kernel, launch };
    let target = CudaTarget::new(arch, 132);
    assert_eq!(rows::exchange(&lowered, &target), None);
    let variant = rows::choose(&lowered, &target);
    let mut earlier = lowered.clone();
    earlier.kernel.epilogue = earlier_sums(&earlier.kernel.epilogue).body;
    let config = rows::last_block_rows(&earlier, &variant, &rows::epilogue_launch(&earlier), &target).config;
    let made = rows::kernel(lowered, &target);
    let shown = RowConfig { resident: 0, ..config.clone() };
    assert_eq!(made.launch.variant().name, format!("{variant}; rows by the last of {joined} heads, {shown}"));
    let grids = grids(&made);
    let Source::Cuda(source) = made.source else { panic!("{}", made.source) };
    Made { variant, config, text: source.text, grids }
}

#[test]
fn the_kernel_is_that_of_attention_alone_but_for_hopper() {
    let causal = kernel(Dtype::Bf16, AttentionMask::Causal);
    let variant = |kernel, sizes, joined, offset, arch| make(kernel, sizes, joined, offset, arch).variant;
    let tall = ForwardVariant::Tensor(Tiles { warps: 4, atoms: 2, keys: 64, blocks: 2 });
    let low = ForwardVariant::Tensor(Tiles { warps: 4, atoms: 1, keys: 64, blocks: 2 });
    let (many, few) = ([8, 12, 1024, 1024], [1, 12, 200, 200]);
    assert_eq!([Arch::Sm80, Arch::Sm90a].map(|arch| variant(causal, many, 12, 0, arch)), [tall; 2]);
    assert_eq!([Arch::Sm80, Arch::Sm90a].map(|arch| variant(causal, few, 12, 0, arch)), [low; 2]);
    let plain = ForwardVariant::Plain;
    assert_eq!(variant(causal, many, 12, 0, Arch::Sm75), plain);
    assert_eq!(variant(causal, many, 12, 4, Arch::Sm80), plain);
    assert_eq!(variant(kernel(Dtype::F32, AttentionMask::Full), many, 12, 0, Arch::Sm90a), plain);
}

#[test]
fn few_queries_are_refused() {
    let causal = kernel(Dtype::Bf16, AttentionMask::Causal);
    let refused = |queries| rows_refusal(&causal, &shape([1, 12, queries, 100])).is_some();
    assert_eq!([1, 8, 9, 1000].map(refused), [true, true, false, false]);
    assert!(rows_refusal(&AttentionKernel { scale: f32::NAN, ..causal }, &shape([1, 12, 100, 100])).is_some());
}

/// Attention's parameter with its result in the workspace, the counters, then the arguments of what follows.
#[test]
fn a_launch_is_one_grid_with_counters_of_its_own() {
    let causal = kernel(Dtype::Bf16, AttentionMask::Causal);
    for (joined, sizes) in [(12, [3, 12, 200, 200]), (1, [3, 12, 200, 200]), (4, [2, 4, 65, 70])] {
        let [batch, heads, queries, _] = sizes;
        let Made { variant, grids, .. } = make(causal, sizes, joined, 8, Arch::Sm80);
        let ForwardVariant::Tensor(tiles) = variant else { panic!("{variant:?}") };
        let [grid] = grids.list.as_slice() else { panic!("{grids:?}") };
        let tiles_of_a_head = queries.div_ceil(tiles.queries());
        assert_eq!((grid.entry, grid.blocks), ("attention_tensor", [(batch * heads * tiles_of_a_head) as u32, 1, 1]));
        assert_eq!((grid.threads, grid.cluster, grid.waits), (128, 1, false));
        assert_eq!(grids.persistent, batch * heads / joined * tiles_of_a_head * 4);
        assert_eq!(grids.workspace, batch * heads * queries * 64 * 2);
        let at = |position: usize| Word::Argument { position, offset: 16 };
        let none = Word::Number(0);
        assert_eq!(grid.words[..7], [at(0), at(1), at(2), none, none, none, Word::Workspace(0)]);
        let number = |value: usize| Word::Number(value as u64);
        let row = number(joined * 64 * 2);
        let all = number(batch * heads * queries / joined);
        let follows =
            [Word::Persistent(0), at(3), row, Word::Workspace(0), row, at(4), row, at(5), row, all, none, none];
        assert_eq!(grid.words[7 + 2 + 6 + 15..], follows);
    }
}

/// A row stays in the registers that attention leaves: of a part of a warp, of a warp or of the block.
#[test]
fn rows_are_spread_over_the_threads_of_the_block() {
    let of = |dtype, heads: usize, arch| {
        let made = make(kernel(dtype, AttentionMask::Causal), [1, heads, 200, 200], heads, 0, arch);
        let RowConfig { policy, threads_per_row, rows_per_block, chunks, vector, resident, .. } = made.config;
        assert_eq!(threads_per_row * rows_per_block, made.grids.list[0].threads as usize);
        assert!(chunks * vector * threads_per_row >= heads * 64 && resident == 1);
        assert!(rows_per_block == 1 || threads_per_row <= 32, "several warps meet for one row alone");
        (policy, threads_per_row)
    };
    assert_eq!(of(Dtype::Bf16, 1, Arch::Sm80), (Policy::Registers, 8));
    assert_eq!(of(Dtype::Bf16, 12, Arch::Sm80), (Policy::Registers, 32));
    assert_eq!(of(Dtype::Bf16, 25, Arch::Sm80), (Policy::Registers, 128));
    assert_eq!(of(Dtype::Bf16, 128, Arch::Sm80), (Policy::Streamed, 128));
    assert_eq!(of(Dtype::F32, 12, Arch::Sm90a), (Policy::Registers, 256));
    assert_eq!(of(Dtype::F32, 25, Arch::Sm75), (Policy::Registers, 256));
}

#[test]
fn the_text_reads_nothing_as_constant_memory_and_nobody_waits() {
    for (dtype, heads) in [(Dtype::Bf16, 12), (Dtype::F32, 25)] {
        let text = make(kernel(dtype, AttentionMask::Causal), [1, heads, 200, 200], heads, 0, Arch::Sm80).text;
        assert!(text.starts_with("#define MEETS\n"));
        assert!(text.contains(&format!("constexpr int JOINED = {heads};")));
        assert!(!text.contains("#define WAITS") && !text.contains("__ldg"));
        assert_eq!(text.matches("atomicInc").count(), 1);
    }
}
