//! The gradient of attention by warpgroups.

use std::fmt::Write;

use deuteron_attention::BackwardOperand;
use deuteron_attention::backward::LoweredBackward;
use deuteron_attention::cuda::backward::{BackwardVariant, choose, with_variant};
use deuteron_attention::kernel::{AttentionKernel, AttentionMask, HeadStrides};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{ArgBinding, Kernel, Source};
use deuteron_graph::{Dtype, Graph, attention_interior, differentiate, recompute};
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_plan::{Machine, Strategy, Target, plan};

use super::attention::{Case, Order, kernel, runs};
use super::{Launched, Mistake, TileProgram, check_mistakes, compiler, written};

const DRIVER: &str = "attention_gradient.cpp";
const ENTRY: &str = "backward_keys";

/// The gradient for a case, which is one for warpgroups.
fn made(kernel: &AttentionKernel, case: &Case) -> Kernel {
    let base = Graph::new("test").input("x", Dtype::F32, [1]).unwrap();
    let binding = |operand: BackwardOperand| ArgBinding {
        base,
        dtype: match operand {
            BackwardOperand::Operand(operand) => kernel.operand_dtype(operand),
            BackwardOperand::ResultGradient | BackwardOperand::Gradient(_) => kernel.dtype,
        },
        written: matches!(operand, BackwardOperand::Gradient(_)),
        offset: 0,
        leading: Vec::new(),
        table_rows: 0,
    };
    let args = kernel.backward_operands().map(binding).collect();
    let gradient = LoweredBackward::apart(*kernel, case.shape(kernel), args);
    let target = CudaTarget::new(Arch::Sm90a, case.processors);
    assert_eq!(choose(&gradient, &target), BackwardVariant::Hopper, "{case:?}");
    let made = with_variant(&gradient, &BackwardVariant::Hopper, &target);
    let reached: Vec<usize> = made.launch.arguments().iter().map(|argument| argument.reach).collect();
    let key_heads = case.heads / kernel.group;
    let gradients = [case.heads * case.queries, key_heads * case.keys, key_heads * case.keys];
    assert_eq!(reached[4..], gradients.map(|rows| case.batch * rows * kernel.width * kernel.dtype.bytes()));
    made
}

/// The text of a gradient, and its launches as its driver reads them.
fn launched(kernel: &AttentionKernel, case: &Case) -> (CudaSource, String) {
    let Kernel { source, launch } = made(kernel, case);
    let Source::Cuda(source) = source else { panic!("{source}") };
    let (shape, grids) = (case.shape(kernel), launch.grids().expect("grids"));
    let &Case { batch, heads, queries, keys, .. } = case;
    let mut text = format!("shape {batch} {heads} {} {queries} {keys}", kernel.group);
    for HeadStrides { batch, head, position } in [shape.q, shape.k, shape.v, shape.o] {
        write!(text, " {batch} {head} {position}").unwrap();
    }
    writeln!(text, "\nworkspace {}", grids.workspace).unwrap();
    assert_eq!(grids.list.len(), 2);
    grids.list.iter().for_each(|grid| text.push_str(&written(grid)));
    (source, text)
}

/// Runs the gradient in every case, all of which have one text.
fn check(name: &str, kernels: &[(AttentionKernel, &[Case])]) {
    let Some(compiler) = compiler() else { return };
    let (first, cases) = kernels[0];
    let text = launched(&first, &cases[0]).0.text;
    let program = TileProgram::compile(compiler, name, DRIVER, ENTRY, &text);
    for (kernel, cases) in kernels {
        for (at, case) in cases.iter().enumerate() {
            let (source, launch) = launched(kernel, case);
            assert_eq!(source.text, text, "{name}, {case:?}");
            for (lanes, seeds) in runs(at, case) {
                let (ok, said) = program.run(&launch, case.resident, lanes, seeds, 0);
                assert!(ok, "{name}, {kernel:?}, {case:?}, {lanes:?}:\n{said}");
            }
        }
    }
}

fn grouped(kernel: AttentionKernel, group: usize) -> AttentionKernel {
    AttentionKernel { group, ..kernel }
}

#[test]
fn gradients_of_heads_of_64() {
    let causal = kernel(Dtype::Bf16, 64, AttentionMask::Causal);
    let alone = [
        Case { seeds: 1, ..Case::new([1, 2, 129, 129]) },
        // More queries than keys, the first of which see none, and fewer.
        Case::new([1, 1, 193, 65]),
        Case { order: Order::Positions, seeds: 1, ..Case::new([2, 1, 65, 193]) },
    ];
    let shared = [
        Case { order: Order::Positions, processors: 3, ..Case::new([2, 4, 129, 129]) },
        Case { resident: 1, processors: 1, seeds: 1, ..Case::new([1, 2, 200, 72]) },
    ];
    check(
        "gradients_of_heads_of_64_causal",
        &[(causal, &alone), (grouped(causal, 2), &shared), (grouped(causal, 4), &shared[..1])],
    );
    let full = kernel(Dtype::F16, 64, AttentionMask::Full);
    let shared = [Case { seeds: 1, ..Case::new([1, 8, 17, 129]) }, Case { seeds: 1, ..Case::new([1, 8, 130, 16]) }];
    check("gradients_of_heads_of_64_full", &[(full, &shared[..1]), (grouped(full, 8), &shared)]);
}

#[test]
fn gradients_of_heads_of_128() {
    let causal = kernel(Dtype::F16, 128, AttentionMask::Causal);
    let alone = [Case { seeds: 1, ..Case::new([1, 1, 129, 129]) }];
    let shared = [Case { order: Order::Positions, processors: 1, seeds: 1, ..Case::new([1, 4, 136, 200]) }];
    check(
        "gradients_of_heads_of_128_causal",
        &[(causal, &alone), (grouped(causal, 2), &shared), (grouped(causal, 4), &shared)],
    );
    let full = kernel(Dtype::Bf16, 128, AttentionMask::Full);
    let shared = [Case { seeds: 1, ..Case::new([2, 2, 70, 129]) }];
    check("gradients_of_heads_of_128_full", &[(full, &alone), (grouped(full, 2), &shared)]);
}

/// A block owns 64 keys, and a warpgroup makes dk or dv.
#[test]
fn gradients_of_heads_of_256() {
    let causal = kernel(Dtype::Bf16, 256, AttentionMask::Causal);
    let alone = [Case { seeds: 1, ..Case::new([1, 1, 193, 65]) }, Case { seeds: 1, ..Case::new([1, 1, 65, 193]) }];
    let shared = [Case { order: Order::Positions, processors: 1, seeds: 1, ..Case::new([1, 4, 136, 200]) }];
    check("gradients_of_heads_of_256_causal", &[(causal, &alone), (grouped(causal, 2), &shared)]);
    let full = kernel(Dtype::F16, 256, AttentionMask::Full);
    let shared = [Case { seeds: 1, ..Case::new([2, 2, 70, 129]) }];
    check("gradients_of_heads_of_256_full", &[(full, &shared), (grouped(full, 2), &shared)]);
}

/// Columns beyond the width are zeros in shared memory, and are never stored.
#[test]
fn gradients_of_heads_of_other_widths() {
    let sizes = [[1, 2, 65, 129], [2, 2, 70, 134], [1, 2, 129, 65], [1, 2, 80, 80]];
    let sizes = [sizes, [[1, 2, 72, 72], [1, 2, 129, 129], [1, 2, 65, 129], [1, 2, 129, 65]]].concat();
    let widths = [48, 80, 96, 112, 144, 192, 208, 224];
    for (turn, (width, sizes)) in widths.into_iter().zip(sizes).enumerate() {
        let dtype = [Dtype::F16, Dtype::Bf16][turn % 2];
        let causal = kernel(dtype, width, AttentionMask::Causal);
        let case = [Case { order: Order::Positions, seeds: 1, ..Case::new(sizes) }];
        let name = format!("gradients_of_heads_of_{width}");
        check(&name, &[(causal, &case), (grouped(causal, 2), &case)]);
    }
}

#[test]
fn mistakes_of_a_gradient() {
    let slopes = "load_rows<TILE>(ring.tile(at, 1), &p.slope, ring.full(at, 1), row, head, work.sequence);";
    let statistics = "bulk_load(ring.rows(at), rows_of(p, work.sequence, head) + row, ROWS_BYTES, ring.full(at, 0));";
    let [other_slopes, other_statistics] = [slopes, statistics].map(|right| right.replace("head", "(head ^ 1)"));
    let mistakes: [Mistake; 6] = [
        ("work.head / (int)p.backward.of.group", "0", "FAILED"),
        ("left > 0", "left > 1", "deadlock"),
        (slopes, &other_slopes, "FAILED"),
        (statistics, &other_statistics, "FAILED"),
        ("skip_tiles(ring, at, facing.begin);", "", "deadlock"),
        ("at + (whole - work.begin + TILE - 1) / TILE", "(whole - work.begin + TILE - 1) / TILE", "FAILED"),
    ];
    let causal = grouped(kernel(Dtype::Bf16, 64, AttentionMask::Causal), 2);
    let case = Case { processors: 1, seeds: 1, ..Case::new([1, 4, 150, 150]) };
    let (source, launch) = launched(&causal, &case);
    let all = Launched { source, entry: ENTRY, launch, driver: DRIVER };
    check_mistakes("mistakes_of_a_gradient", all, case.resident, case.seeds, &mistakes);
}

#[test]
fn mistakes_of_a_wide_gradient() {
    let mistakes: [Mistake; 8] = [
        ("mbarrier_wait(exchange.full(at), Exchange::parity(at));", "", "FAILED"),
        ("mbarrier_wait(exchange.empty(at), Exchange::parity(at) ^ 1);", "", "FAILED"),
        ("Exchange::signal(exchange.empty(at), thread);", "", "deadlock"),
        ("facing.hidden - (int)at * TILE", "facing.hidden", "FAILED"),
        ("s_base + GROUP * KeyRing::OWN_BYTES", "s_base", "FAILED"),
        ("ring.release(at, 1 - GROUP);", "", "deadlock"),
        ("ring.release(last, 1 - GROUP);", "ring.release(last, GROUP);", "FAILED"),
        (
            "load_rows<TILE>(ring.tile(at, 1), &p.v, ring.full(at, 1), row, key_head, work.sequence);",
            "load_rows<TILE>(ring.tile(at, 0), &p.v, ring.full(at, 1), row, key_head, work.sequence);",
            "FAILED",
        ),
    ];
    let causal = grouped(kernel(Dtype::Bf16, 144, AttentionMask::Causal), 2);
    let case = Case { processors: 1, seeds: 1, ..Case::new([1, 2, 136, 136]) };
    let (source, launch) = launched(&causal, &case);
    let all = Launched { source, entry: ENTRY, launch, driver: DRIVER };
    check_mistakes("mistakes_of_a_wide_gradient", all, case.resident, case.seeds, &mistakes);
}

/// The gradient of attention over heads that share keys, as the planner makes it of a graph whose keys repeat.
#[test]
fn a_grouped_gradient_is_one_kernel_of_a_graph() {
    for (batch, key_heads) in [(2, 2), (1, 2), (2, 1), (1, 1)] {
        let (group, length) = (4, 129);
        let case = Case::new([batch, key_heads * group, length, length]);
        let keys = format!("bf16[{batch},{key_heads},{length},64]");
        let apart = format!("[{batch},{key_heads},{group},{length},64]");
        let text = format!(
            "q = input bf16[{batch},{},{length},64] ; k = input {keys} ; v = input {keys}
             a = reshape q {apart}
             b = reshape k [{batch},{key_heads},1,{length},64] ; c = broadcast b {apart}
             d = reshape v [{batch},{key_heads},1,{length},64] ; e = broadcast d {apart}
             o = attention a c e mask=causal
             y = reshape o [{batch},{},{length},64]
             out y",
            case.heads, case.heads
        );
        let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        let joint = differentiate(&graph, &graph.inputs()[..3]).unwrap();
        let scores = attention_interior(&joint.graph, joint.first_backward);
        let graph = recompute(&joint.graph, joint.first_backward, &scores).unwrap().graph;
        let kernel = AttentionKernel { group, ..kernel(Dtype::Bf16, 64, AttentionMask::Causal) };
        let (source, _) = launched(&kernel, &case);
        let machine = Machine::profile("h200").unwrap();
        let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
        for strategy in [Strategy::Greedy, Strategy::Fused] {
            let plan = plan(&graph, target, strategy, &[]).unwrap();
            let gradients: Vec<_> =
                plan.groups.iter().filter(|group| group.structure.is_attention_gradient()).collect();
            let [gradient] = gradients.as_slice() else { panic!("{plan}") };
            let backend = Backend::Cuda(CudaTarget::new(Arch::Sm90a, case.processors));
            let made = render(gradient.draft(&graph, &plan.placement), &backend).unwrap();
            assert_eq!(made.source, Source::Cuda(source.clone()), "{plan}");
            // Attention, the copy of its result into the shape that is asked for, and the gradient, which stores what the graph gives out.
            assert!(plan.groups.len() <= 3, "{plan}");
        }
    }
}
