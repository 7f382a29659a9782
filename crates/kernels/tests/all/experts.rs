//! Rows routed to experts of realistic sizes: how many kernels, and what memory they take besides inputs and results.

use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_graph::Graph;
use deuteron_kernels::{Backend, CpuCatalog, CudaCatalog, render};
use deuteron_plan::{Machine, Plan, Strategy, Target, plan};

/// What a launch may take besides what it is given.
const MOST: usize = 64 << 20;

const ROWS: [usize; 4] = [1, 16, 1024, 16384];

fn floats(dtype: &str, rows: usize, experts: usize, choices: usize, weighted: bool) -> Graph {
    let adds = if weighted { "y = weighted_sum a g" } else { "y = add a 1.0" };
    let text = format!(
        "x = input {dtype}[{rows},4096] ; e = input i32[{rows},{choices}] ; w = weight {dtype}[{experts},4096,4096]
b = weight {dtype}[{experts},4096] ; g = input f32[{rows},{choices}] ; l = routed_linear x e w b ; a = gelu l ; {adds} ; out y"
    );
    text.parse().unwrap()
}

/// Results are floats, or bytes again.
fn bytes(rows: usize, experts: usize, again: bool) -> Graph {
    let results = if again { "q, c = quantize_int8 y ; out q c" } else { "out y" };
    let text = format!(
        "x = input i8[{rows},4096] ; s = input f32[{rows},1] ; e = input i32[{rows}] ; w = weight i8[{experts},4096,4096]
t = weight f32[{experts},4096] ; b = weight bf16[{experts},4096] ; l = expert_linear x s e w t b bf16 ; y = gelu l ; {results}"
    );
    text.parse().unwrap()
}

fn planned(graph: &Graph, arch: Arch, strategy: Strategy) -> Plan {
    let machine = Machine::profile("h200").unwrap();
    plan(graph, Target { machine: &machine, catalog: CudaCatalog::of(arch) }, strategy, &[]).unwrap()
}

/// Bytes of the arena, and of the largest workspace of a kernel.
fn memory(graph: &Graph, plan: &Plan, arch: Arch) -> usize {
    let backend = Backend::Cuda(CudaTarget::new(arch, 132));
    let workspace = |group: &deuteron_plan::Group| {
        let kernel = render(group.draft(graph, &plan.placement), &backend).unwrap();
        kernel.launch.grids().map_or(0, |grids| grids.workspace)
    };
    plan.arena.bytes + plan.groups.iter().map(workspace).max().unwrap_or(0)
}

#[test]
fn a_projection_is_one_kernel_and_takes_no_memory() {
    for arch in Arch::ALL {
        for (rows, experts) in ROWS.into_iter().flat_map(|rows| [8, 64].map(|experts| (rows, experts))) {
            let mut graphs: Vec<Graph> =
                [("f16", 1), ("f16", 3)].map(|(dtype, choices)| floats(dtype, rows, experts, choices, false)).into();
            graphs.push(floats("f16", rows, experts, 1, true));
            if arch.is_ampere() {
                graphs.extend(["bf16", "f32"].map(|dtype| floats(dtype, rows, experts, 1, false)));
                graphs.push(bytes(rows, experts, false));
            }
            if arch.has_wgmma() {
                graphs.push(bytes(rows, experts, true));
            }
            for graph in graphs {
                for strategy in [Strategy::Greedy, Strategy::Fused] {
                    let plan = planned(&graph, arch, strategy);
                    // To make bytes again, a launch of its own may end earlier than blocks that meet.
                    let apart = graph.outputs().len() > 1 && strategy == Strategy::Fused;
                    let most = if apart { 2 } else { 1 };
                    assert!(plan.groups.len() <= most, "{arch} {rows} {experts} {strategy}\n{}", plan.explain());
                    let taken = memory(&graph, &plan, arch);
                    let most = if plan.groups.len() > 1 { 2 * 4096 * rows + MOST } else { MOST };
                    assert!(taken <= most, "{arch} {rows} {experts} {strategy}: {taken} bytes");
                }
                // Plans that fuse within calls alone write down what calls hand on, and no weights.
                let results: usize =
                    graph.outputs().iter().map(|output| graph.node(output.node).shape.elements()).sum();
                for strategy in [Strategy::Eager, Strategy::Unfused] {
                    let taken = memory(&graph, &planned(&graph, arch, strategy), arch);
                    assert!(taken <= 2 * 4 * results + MOST, "{arch} {rows} {experts} {strategy}: {taken} bytes");
                }
            }
        }
    }
}

/// The results of all choices, once, are what is added.
#[test]
fn several_choices_are_two_kernels() {
    for (rows, choices) in ROWS.into_iter().flat_map(|rows| [2, 3, 8].map(|choices| (rows, choices))) {
        for (arch, dtype, size) in [(Arch::Sm90a, "bf16", 2), (Arch::Sm80, "f16", 2), (Arch::Sm89, "f32", 4)] {
            let graph = floats(dtype, rows, 64, choices, true);
            for strategy in [Strategy::Greedy, Strategy::Fused] {
                let plan = planned(&graph, arch, strategy);
                assert_eq!(plan.groups.len(), 2, "{arch} {rows} {choices} {strategy}\n{}", plan.explain());
                let taken = memory(&graph, &plan, arch);
                assert!(
                    taken <= rows * choices * 4096 * size + MOST,
                    "{arch} {rows} {choices} {strategy}: {taken} bytes"
                );
            }
        }
    }
}

#[test]
fn a_cpu_has_no_weights_of_rows_in_memory() {
    let machine = Machine::profile("h200").unwrap();
    for graph in [floats("f32", 16384, 64, 1, true), floats("bf16", 16384, 8, 2, false), bytes(16384, 64, false)] {
        let plan = plan(&graph, Target { machine: &machine, catalog: &CpuCatalog }, Strategy::Greedy, &[]).unwrap();
        assert_eq!((plan.groups.len(), plan.arena.bytes), (1, 0), "{}", plan.explain());
    }
}

/// Blocks that exchange numbers in memory must all run at once, so a GPU of few multiprocessors has no such kernel of wide rows.
#[test]
fn a_plan_for_few_multiprocessors_has_kernels() {
    let machine = Machine::profile("h200").unwrap();
    let mut kernels = Vec::new();
    for processors in [16, 78, 114, 132] {
        let backend = Backend::Cuda(CudaTarget::new(Arch::Sm90a, processors));
        for columns in [2048, 6400, 16384] {
            let routed = format!(
                "x = input i8[64,256] ; s = input f32[64,1] ; e = input i32[64] ; w = weight i8[8,{columns},256]
t = weight f32[8,{columns}] ; b = weight bf16[8,{columns}] ; l = expert_linear x s e w t b bf16 ; q, c = quantize_int8 l ; out q c"
            );
            let plain = format!(
                "x = input i8[64,256] ; w = input i8[{columns},256] ; t = matmul x w transpose_b ; q, c = quantize_int8 t ; out q c"
            );
            for text in [routed, plain] {
                let graph: Graph = text.parse().unwrap();
                let plan =
                    plan(&graph, Target { machine: &machine, catalog: &backend }, Strategy::Greedy, &[]).unwrap();
                for group in &plan.groups {
                    render(group.draft(&graph, &plan.placement), &backend).unwrap();
                }
                kernels.push(plan.groups.len());
            }
        }
    }
    // Routed and plain rows of 2048, 6400 and 16384 columns, for each number of multiprocessors.
    assert_eq!(kernels, [[1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 2, 1], [1, 1, 1, 1, 2, 1], [1; 6]].concat());
}
