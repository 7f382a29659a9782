//! Attention by warpgroups and by warps.

use std::fmt::Write;
use std::ops::Range;

use deuteron_attention::cuda::forward::{ForwardVariant, with_variant};
use deuteron_attention::cuda::hopper::Groups;
use deuteron_attention::cuda::tiles::Tiles;
use deuteron_attention::kernel::{
    AttentionKernel, AttentionMask, AttentionResult, AttentionShape, HeadStrides, LoweredAttention,
};
use deuteron_attention::{AttentionOperand, ScoreRules};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{ArgBinding, Kernel, Source};
use deuteron_graph::{Dtype, Graph};

use super::{Lanes, Launched, Mistake, TileProgram, check_mistakes, compiler, written};

/// How rows of heads lie.
#[derive(Debug, Clone, Copy)]
pub(super) enum Order {
    /// positions of a head together
    Heads,
    /// heads of a position together
    Positions,
}

/// Attention of some sizes on a machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub batch: usize,
    pub heads: usize,
    pub queries: usize,
    pub keys: usize,
    pub order: Order,
    /// multiprocessors, for a grid of as many blocks as run at once
    pub processors: usize,
    /// blocks that run at once
    pub resident: usize,
    pub seeds: u64,
}

impl Case {
    pub const fn new([batch, heads, queries, keys]: [usize; 4]) -> Case {
        Case { batch, heads, queries, keys, order: Order::Heads, processors: 2, resident: 2, seeds: 2 }
    }

    pub fn strides(&self, heads: usize, positions: usize, width: usize) -> HeadStrides {
        let batch = heads * positions * width;
        match self.order {
            Order::Heads => HeadStrides { batch, head: positions * width, position: width },
            Order::Positions => HeadStrides { batch, head: width, position: heads * width },
        }
    }

    pub fn shape(&self, kernel: &AttentionKernel) -> AttentionShape {
        let &Case { batch, heads, queries, keys, .. } = self;
        let q = self.strides(heads, queries, kernel.width);
        let k = self.strides(heads / kernel.group, keys, kernel.width);
        let none = HeadStrides::default();
        AttentionShape { batch, heads, queries, keys, q, k, v: k, mask: none, slopes: none, documents: none, o: q }
    }

    /// The kernel by a variant.
    fn made(&self, kernel: &AttentionKernel, variant: ForwardVariant) -> Kernel {
        let base = Graph::new("test").input("x", Dtype::F32, [1]).unwrap();
        let binding = |&operand: &AttentionOperand| ArgBinding {
            base,
            dtype: kernel.operand_dtype(operand),
            written: operand == AttentionOperand::O,
            offset: 0,
            leading: Vec::new(),
            table_rows: 0,
        };
        let args = kernel.operands().iter().map(binding).collect();
        let attention = LoweredAttention { kernel: *kernel, shape: self.shape(kernel), args };
        with_variant(&attention, &variant, &CudaTarget::new(Arch::Sm90a, self.processors))
    }

    /// As `emulator/attention.h` and `emulator/launch.h` read it.
    fn text(&self, variant: ForwardVariant, kernel: &AttentionKernel) -> String {
        let shape = self.shape(kernel);
        let made = self.made(kernel, variant);
        let grids = made.launch.grids().expect("grids");
        assert_eq!(grids.list.len(), 1);
        let &Case { batch, heads, queries, keys, .. } = self;
        let mut text = format!("shape {batch} {heads} {} {queries} {keys}", kernel.group);
        for HeadStrides { batch, head, position } in [shape.q, shape.k, shape.v, shape.o] {
            write!(text, " {batch} {head} {position}").unwrap();
        }
        text + "\n" + &written(&grids.list[0])
    }
}

pub(super) fn kernel(dtype: Dtype, width: usize, mask: AttentionMask) -> AttentionKernel {
    let (scale, result) = (1.0 / (width as f32).sqrt(), AttentionResult::Values);
    AttentionKernel { dtype, kv: dtype, width, group: 1, scale, mask, scores: ScoreRules::NONE, dropout: None, result }
}

const DRIVER: &str = "attention.cpp";
const HOPPER: &str = "attention_hopper";

/// The text of attention by a variant, which no case has a part in.
fn source(kernel: &AttentionKernel, variant: ForwardVariant, case: &Case) -> CudaSource {
    match case.made(kernel, variant).source {
        Source::Cuda(source) => source,
        source => panic!("{source}"),
    }
}

/// Runs attention in every case; the variants differ in nothing that the text has.
fn check(name: &str, entry: &str, variants: &[ForwardVariant], kernel: AttentionKernel, cases: &[Case]) {
    let Some(compiler) = compiler() else { return };
    let text = source(&kernel, variants[0], &cases[0]).text;
    let program = TileProgram::compile(compiler, name, DRIVER, entry, &text);
    for &variant in variants {
        for (at, case) in cases.iter().enumerate() {
            assert_eq!(source(&kernel, variant, case).text, text, "{name}, {case:?}");
            let launch = case.text(variant, &kernel);
            for (lanes, seeds) in runs(at, case) {
                let (ok, said) = program.run(&launch, case.resident, lanes, seeds, 0);
                assert!(ok, "{name}, {case:?}, {lanes:?}:\n{said}");
            }
        }
    }
}

#[test]
fn heads_of_64() {
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let positions = Case { order: Order::Positions, ..Case::new([2, 2, 200, 200]) };
    let cases = [
        Case { resident: 4, ..Case::new([1, 2, 129, 129]) },
        positions,
        Case { resident: 1, ..Case::new([1, 1, 320, 320]) },
        Case::new([1, 2, 65, 193]),
        // The first queries see no key.
        Case::new([1, 1, 193, 65]),
        Case { seeds: 1, ..Case::new([1, 1, 450, 450]) },
    ];
    check("heads_of_64_causal", HOPPER, &[ForwardVariant::Hopper(Groups::NARROW)], causal, &cases);
    let grouped = AttentionKernel { group: 2, ..kernel(Dtype::F16, 64, AttentionMask::Full) };
    let cases = [Case { order: Order::Positions, ..Case::new([1, 4, 129, 200]) }, Case::new([2, 2, 9, 64])];
    check("heads_of_64_full", HOPPER, &[ForwardVariant::Hopper(Groups::NARROW)], grouped, &cases);
}

#[test]
fn few_heads_of_64() {
    let cases = [
        Case { resident: 4, ..Case::new([1, 2, 129, 129]) },
        Case { order: Order::Positions, processors: 3, ..Case::new([2, 1, 200, 200]) },
        Case { resident: 1, processors: 1, ..Case::new([1, 1, 320, 320]) },
        Case::new([1, 2, 64, 64]),
        Case { seeds: 1, processors: 3, ..Case::new([1, 1, 500, 500]) },
    ];
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    check("few_heads_of_64_causal", HOPPER, &[ForwardVariant::Hopper(Groups::NARROW_FEW)], causal, &cases);
    let cases = [Case::new([1, 2, 129, 200]), Case::new([1, 1, 200, 65])];
    let full = kernel(Dtype::Bf16, 64, AttentionMask::Full);
    check("few_heads_of_64_full", HOPPER, &[ForwardVariant::Hopper(Groups::NARROW_FEW)], full, &cases);
}

#[test]
fn heads_of_128() {
    let cases = [
        Case { resident: 4, ..Case::new([1, 2, 129, 129]) },
        Case { order: Order::Positions, processors: 3, ..Case::new([2, 1, 200, 200]) },
        Case { resident: 1, processors: 1, ..Case::new([1, 1, 320, 320]) },
        Case { seeds: 1, ..Case::new([1, 1, 72, 200]) },
        // Tiles whose queries see no key are drawn beside others.
        Case { processors: 2, ..Case::new([1, 3, 300, 44]) },
    ];
    let wide = [ForwardVariant::Hopper(Groups::WIDE)];
    check("heads_of_128_causal", HOPPER, &wide, kernel(Dtype::Bf16, 128, AttentionMask::Causal), &cases);
    let cases = [Case::new([1, 1, 129, 300]), Case { seeds: 1, ..Case::new([1, 1, 64, 64]) }];
    check("heads_of_128_full", HOPPER, &wide, kernel(Dtype::F16, 128, AttentionMask::Full), &cases);
}

/// Columns beyond the width are zeros in shared memory, and are never stored.
#[test]
fn heads_of_other_widths() {
    for (width, groups) in [(16, Groups::NARROW), (48, Groups::NARROW_FEW)] {
        let causal = kernel(Dtype::Bf16, width, AttentionMask::Causal);
        let cases = [
            Case { seeds: 1, ..Case::new([1, 2, 129, 129]) },
            Case { order: Order::Positions, seeds: 1, ..Case::new([2, 2, 65, 193]) },
        ];
        check(&format!("heads_of_{width}"), HOPPER, &[ForwardVariant::Hopper(groups)], causal, &cases);
    }
    let wide = [ForwardVariant::Hopper(Groups::WIDE)];
    for (width, mask) in [(80, AttentionMask::Causal), (112, AttentionMask::Full)] {
        let cases = [
            Case { seeds: 1, ..Case::new([1, 2, 129, 129]) },
            Case { order: Order::Positions, processors: 1, seeds: 1, ..Case::new([1, 2, 72, 200]) },
        ];
        check(&format!("heads_of_{width}"), HOPPER, &wide, kernel(Dtype::Bf16, width, mask), &cases);
    }
}

/// Results go out through the place of the queries.
#[test]
fn heads_of_192_and_256() {
    let causal = [
        Case { processors: 1, seeds: 1, ..Case::new([1, 2, 129, 193]) },
        // The first queries see no key: their results are zeros without a place.
        Case { order: Order::Positions, resident: 1, processors: 1, seeds: 1, ..Case::new([1, 1, 257, 65]) },
    ];
    let full = [Case { processors: 1, seeds: 1, ..Case::new([1, 2, 130, 200]) }];
    for (width, stages) in [(192, 3), (256, 2)] {
        let widest = [ForwardVariant::Hopper(Groups { stages, ..Groups::WIDEST })];
        let name = format!("heads_of_{width}");
        check(&format!("{name}_causal"), HOPPER, &widest, kernel(Dtype::Bf16, width, AttentionMask::Causal), &causal);
        if width == 256 {
            check(&format!("{name}_full"), HOPPER, &widest, kernel(Dtype::F16, width, AttentionMask::Full), &full);
        }
    }
}

#[test]
fn mistakes_of_lent_places() {
    let stored = "store_rows<QUERIES * 128>(p, tile, r, s_base + (rank.part * 64 + rank.warp * 16) * 128, first);";
    let other_rows = stored.replace("first)", "tile.first + rank.warp * 16)");
    let mistakes: [Mistake; 4] = [
        (stored, &other_rows, "FAILED"),
        ("store_zeros(g_o, p.o.position, tile.end - first);", "", "of what rounding allows"),
        ("__syncwarp();\n    release(rings.q_empty());", "", "deadlock"),
        ("begin_turn(in.warpgroup);\n        end_turn(in.warpgroup);", "", "FAILED"),
    ];
    let causal = kernel(Dtype::Bf16, 192, AttentionMask::Causal);
    let case = Case { processors: 1, resident: 1, seeds: 2, ..Case::new([1, 2, 257, 129]) };
    let groups = Groups { stages: 3, ..Groups::WIDEST };
    check_mistakes(
        "mistakes_of_lent_places",
        Launched::attention(groups, &causal, &case),
        case.resident,
        case.seeds,
        &mistakes,
    );
}

#[test]
fn matrix_units_of_a_warp() {
    let tiles = ForwardVariant::Tensor(Tiles { warps: 4, atoms: 1, keys: 32, blocks: 2 });
    let positions = Case { order: Order::Positions, ..Case::new([2, 1, 65, 200]) };
    // Of the last case the first queries see no key, some of them beside queries that do.
    let cases = [Case::new([1, 2, 129, 129]), positions, Case::new([1, 1, 100, 30])];
    let causal = kernel(Dtype::F16, 80, AttentionMask::Causal);
    check("matrix_units_of_a_warp", "attention_tensor", &[tiles], causal, &cases);
}

#[test]
fn mistakes_in_order() {
    let mistakes: [Mistake; 7] = [
        ("mbarrier_wait(in.rings.k_full(now), Rings::parity(now));", "", "in flight"),
        ("mbarrier_wait(rings.v_empty(now), Rings::parity(now) ^ 1);", "", "a copy to"),
        ("if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier);", "mbarrier_arrive(barrier);", "FAILED"),
        (
            "mbarrier_arrive_expect_tx(rings.v_full(now), KV_BYTES);",
            "mbarrier_arrive_expect_tx(rings.v_full(now), KV_BYTES + 16);",
            "deadlock",
        ),
        ("in.end1 - key", "in.end1 - key + 1", "of what rounding allows"),
        (
            "if (soften(r, r_s, factor, in, i)) scale_result(r, factor);",
            "soften(r, r_s, factor, in, i);",
            "of what rounding allows",
        ),
        (
            "store_staged<BEYOND>(s_o, threadIdx.x & 31, g_o, p.o.position, tile.end - first);",
            "store_staged<BEYOND>(s_o, threadIdx.x & 31, g_o, p.o.position, 16);",
            "wrote beside the result",
        ),
    ];
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let case = Case { seeds: 3, ..Case::new([1, 1, 450, 450]) };
    check_mistakes(
        "mistakes_in_order",
        Launched::attention(Groups::NARROW, &causal, &case),
        case.resident,
        case.seeds,
        &mistakes,
    );
}

#[test]
fn mistakes_ahead() {
    let mistakes: [Mistake; 6] = [
        ("wgmma_wait<1>();", "", "FAILED"),
        ("atomicInc(p.g_drawn, tiles - 1)", "atomicAdd(p.g_drawn, 1u)", "FAILED"),
        ("*s_number = number;", "", "FAILED"),
        ("if constexpr (!LENDS) release(rings.q_empty());", "", "deadlock"),
        ("named_barrier_arrive(TURN_BARRIER + 1 - warpgroup, MULTIPLIERS);", "", "waits for named barrier"),
        (
            "named_barrier_sync(TURN_BARRIER + warpgroup, MULTIPLIERS);",
            "named_barrier_sync(TURN_BARRIER + warpgroup, 128);",
            "threads and with",
        ),
    ];
    let causal = kernel(Dtype::Bf16, 128, AttentionMask::Causal);
    let case = Case { processors: 1, ..Case::new([1, 1, 300, 300]) };
    check_mistakes(
        "mistakes_ahead",
        Launched::attention(Groups::WIDE, &causal, &case),
        case.resident,
        case.seeds,
        &mistakes,
    );
}

impl Launched {
    fn attention(groups: Groups, kernel: &AttentionKernel, case: &Case) -> Launched {
        let variant = ForwardVariant::Hopper(groups);
        let (source, launch) = (source(kernel, variant, case), case.text(variant, kernel));
        Launched { source, entry: HOPPER, launch, driver: DRIVER }
    }
}

/// How a case of a list is run: lanes apart, which takes longer, in the first one.
pub(super) fn runs(at: usize, case: &Case) -> Vec<(Lanes, Range<u64>)> {
    let together = (Lanes::Together, 1..case.seeds + 1);
    if at == 0 { vec![together, (Lanes::Apart, 101..102)] } else { vec![together] }
}
