//! Fuzz bodies above the readers: plans, kernels and analyses of any graph or machine that a file describes.
//!
//! An input is the text of a graph or of a machine. Refused inputs are skipped; accepted ones must be planned, rendered and analysed,
//! or refused with a typed error, without a panic.
#![forbid(unsafe_code)]

mod numbers;

pub use numbers::with_another_number;

use std::sync::LazyLock;

use deuteron::analyze::{AnalyzeOptions, analyze};
use deuteron::{Dtype, ExpertSizes, FusedOp, Graph, Heads, Node, NodeId, Op, Sizes, Target};
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_kernels::{Backend, CpuCatalog, CudaCatalog, render};
use deuteron_plan::{Machine, MachineKind, Plan, Quantity, Strategy, plan};
use deuteron_reference::random_case;
use deuteron_report::{diff, html, parse, roofline_svg};

/// Graphs that no op of the catalogue has: operations that are only described, states, nothing but an input.
const SINGULAR: [&str; 7] = [
    "x = input f32[4,8] ; y, mean, rstd = layer_norm x w[8] b[8] ; z = gelu y ; out z",
    "cache = input f32[2,3,8,4] ; rows = input f32[2,3,1,4] ; at = input i32[2] ; kept = append cache rows at batch=0 ; out kept",
    "x = input f32[2,3,8] ; s = slice x axis=1 start=1 length=2 ; t = transpose s [1,0,2] ; y = reshape t [4,8] ; out y",
    "a = opaque x[4,8] f32[4,8] name=Sin flops=32 bytes=256 elementwise ; b = add a 1.0 ; out b",
    "x = input f32[7] ; out x",
    "q = input bf16[2,4,16,8] ; a = attention q q q mask=causal ; out a",
    "x = input f32[4,8] ; i = row_argmax x ; t = input f32[8,3] ; y = gather t i ; out y",
];

/// Elements that every kernel counts, along all axes that are not empty.
const MANY: usize = 1 << 30;

/// Random graphs in the corpus.
const RANDOM: u64 = 64;

/// Texts to begin with: every op of the catalogue, forward and backward, random graphs, and singular ones.
pub fn graphs() -> Vec<String> {
    let mut texts: Vec<String> = SINGULAR.map(str::to_string).to_vec();
    for (number, op) in FusedOp::catalog().into_iter().enumerate() {
        let dtype = Dtype::FLOATS[number % 3];
        let sizes = Sizes {
            heads: Heads { positions: 16, width: 8 },
            tokens: 51,
            positions: 33,
            classes: 51,
            experts: ExpertSizes { count: 3, columns: Some(24), choices: 2 },
            ..Sizes::new(33, 24, dtype)
        };
        let types = op.operand_types_of(&sizes);
        texts.extend(op.graph(&types).map(|graph| graph.to_string()));
        if op.has_backward() {
            texts.extend(op.backward_graph(&types).map(|graph| graph.to_string()));
        }
    }
    texts.extend((0..RANDOM).map(|seed| random_case(seed).graph.to_string()));
    texts
}

/// A machine of the profiles, by a number. Reading one takes longer than reading a graph.
fn machine(number: u64) -> &'static Machine {
    static ALL: LazyLock<Vec<Machine>> = LazyLock::new(|| {
        let read = |name| Machine::profile(name).unwrap_or_else(|error| panic!("profile {name}: {error}"));
        Machine::PROFILES.map(read).to_vec()
    });
    &ALL[number as usize % ALL.len()]
}

fn graph(data: &[u8]) -> Option<Graph> {
    String::from_utf8_lossy(data).parse().ok()
}

/// Whatever the graph, it is planned on a machine with every skeleton, or refused; and a plan is whole.
pub fn planned(data: &[u8], number: u64) -> bool {
    let (Some(graph), machine) = (graph(data), machine(number)) else { return false };
    let strategies = [Strategy::Naive, Strategy::Eager, Strategy::Unfused, Strategy::Greedy, Strategy::Fused];
    let strategy = strategies[number as usize / Machine::PROFILES.len() % strategies.len()];
    let Ok(plan) = plan(&graph, Target::conceivable(machine), strategy, &[]) else { return false };
    is_whole(&graph, &plan);
    true
}

/// Every output is an input or computed by a group, and the cost of the plan is a number.
fn is_whole(graph: &Graph, plan: &Plan) {
    assert!(!plan.explain().is_empty());
    assert!(plan.time().0.is_finite() && plan.time().0 >= 0.0, "the plan takes {:?}", plan.time());
    let held = |id: NodeId| plan.groups.iter().any(|group| group.nodes.contains(&id));
    for output in graph.outputs() {
        // Through views and widening casts, which their readers make.
        let mut id = output.node;
        while matches!(graph.node(id).op, Op::View(_) | Op::Cast(_)) && !held(id) {
            id = graph.node(id).inputs[0];
        }
        assert!(graph.node(id).inputs.is_empty() || held(id), "nothing computes {}", output.name);
    }
}

/// Whatever the graph, its plan of kernels that can be generated is rendered, for a CPU or for a GPU, as `deuteron kernel` prints it.
pub fn rendered(data: &[u8], number: u64) -> bool {
    let (Some(graph), machine) = (graph(data), machine(number)) else { return false };
    if graph.nodes().iter().any(|node| matches!(node.op, Op::Opaque(_))) {
        return false;
    }
    let arch = Arch::of_profile(&machine.name).unwrap_or(Arch::Sm80);
    let (target, backend) = match machine.kind {
        MachineKind::Cpu => (Target { machine, catalog: &CpuCatalog }, Backend::Cpu),
        MachineKind::Gpu => {
            let backend = Backend::Cuda(CudaTarget::new(arch, machine.count(Quantity::Processors)));
            (Target { machine, catalog: CudaCatalog::of(arch) }, backend)
        }
    };
    let Ok(plan) = plan(&graph, target, Strategy::Fused, &[]) else { return false };
    // Kernels count some sizes by 32 bits, and refuse larger ones.
    let size = |node: &Node| node.shape.iter().fold(1, |size: usize, &axis| size.saturating_mul(axis.max(1)));
    let usual = graph.nodes().iter().all(|node| size(node) <= MANY);
    for group in &plan.groups {
        match render(group.draft(&graph, &plan.placement), &backend) {
            Ok(kernel) => assert!(!kernel.source.to_string().is_empty()),
            Err(error) if usual => panic!("a planned group has no kernel: {error}\n{graph}"),
            Err(_) => return false,
        }
    }
    true
}

/// Whatever the graph, it is analysed for a machine or refused; and what comes of it can be shown, compared and read again.
pub fn analyzed(data: &[u8], number: u64) -> bool {
    let (Some(graph), machine) = (graph(data), machine(number)) else { return false };
    let options = AnalyzeOptions { sources: number.is_multiple_of(2), ..AnalyzeOptions::on(machine.clone()) };
    let Ok(analysis) = analyze(&graph, &options) else { return false };
    let text = serde_json::to_string(&analysis).expect("an analysis is data");
    let again = parse(&text).unwrap_or_else(|error| panic!("an analysis that was written is refused: {error}"));
    assert_eq!(again, analysis, "writing and reading are inverse");
    assert!(html(&analysis).trim_end().ends_with("</html>"), "the page is whole");
    assert!(roofline_svg(&analysis).contains("</svg>"), "the picture is whole");
    assert!(!diff(&analysis, &again).to_string().is_empty());
    true
}

/// Whatever the machine, graphs are planned and analysed on it, or refused.
pub fn on_machine(data: &[u8], number: u64, graphs: &[Graph]) -> bool {
    let Ok(machine) = Machine::parse(&String::from_utf8_lossy(data)) else { return false };
    let graph = &graphs[number as usize % graphs.len()];
    if let Ok(plan) = plan(graph, Target::conceivable(&machine), Strategy::Fused, &[]) {
        is_whole(graph, &plan);
    }
    if let Ok(analysis) = analyze(graph, &AnalyzeOptions::on(machine)) {
        assert!(roofline_svg(&analysis).contains("</svg>"), "the picture is whole");
    }
    true
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_corpus_is_planned_rendered_and_analysed() {
        let texts = graphs();
        assert!(texts.len() > 100, "{} texts", texts.len());
        for (number, text) in texts.iter().enumerate().step_by(5) {
            let number = number as u64;
            assert!(planned(text.as_bytes(), number), "{text}");
            assert!(text.contains("opaque") || rendered(text.as_bytes(), number), "{text}");
            assert!(analyzed(text.as_bytes(), number), "{text}");
        }
    }

    /// The planner says that they should share a kernel; there is none.
    #[test]
    fn large_operations_that_are_only_described_are_analysed() {
        let size = "f32[4,2147483647]";
        let text = format!(
            "x = input {size} ; a = opaque x {size} name=Sin flops=32 bytes=0 elementwise ; b = add a 1.0 ; out b"
        );
        for number in 0..2 * Machine::PROFILES.len() as u64 {
            assert!(analyzed(text.as_bytes(), number), "{number}");
            assert!(!rendered(text.as_bytes(), number), "{number}");
        }
    }

    /// Every query was visited once for each kernel that was offered: 40 s.
    #[test]
    fn attention_of_more_queries_than_can_be_visited_is_rendered() {
        let text = "q = input f32[1,2,2147483647,8] ; k = input f32[1,2,33,8] ; a = attention q k k MASK ; out a";
        let begin = Instant::now();
        for mask in ["", "mask=causal"] {
            for number in 0..Machine::PROFILES.len() as u64 {
                let text = text.replace("MASK", mask);
                assert!(planned(text.as_bytes(), number), "{text} on {number}");
                rendered(text.as_bytes(), number);
            }
        }
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    }

    #[test]
    fn what_no_reader_accepts_is_no_case() {
        for body in [planned, rendered, analyzed] {
            assert!(!body(b"y = nothing x ; out y", 0));
        }
        assert!(!on_machine(b"name = ", 0, &[]));
    }
}
