//! Groups of equal arithmetic as one kernel: the bits of a kernel each.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;

use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_codegen::{InPlace, Kernel, Request};
use deuteron_emulator::{Lanes, Schedule, Toolchain};
use deuteron_graph::{Dtype, Graph, NodeId, Optimizer, StepScalars, WeightUpdate};
use deuteron_kernels::{Backend, CudaCatalog, render, render_joined};
use deuteron_plan::{Machine, Strategy, Target, plan};

use super::compiler;

/// Elements of the tensors: less than a vector, a block that is not full, several blocks.
const LENGTHS: [usize; 3] = [5, 6001, 4096];

/// Steps of weights with a moment, of which the last ones have another dtype.
fn updates(lengths: &[usize], narrow: &[usize]) -> Graph {
    let mut text = String::from("graph updates\nrate = input f32[]\nkeep = input f32[]\n");
    let all = [lengths, narrow].concat();
    for (at, length) in all.iter().enumerate() {
        let dtype = if at < lengths.len() { "f32" } else { "bf16" };
        writeln!(text, "w{at} = input {dtype}[{length}]\ng{at} = input {dtype}[{length}]\nm{at} = input f32[{length}]")
            .unwrap();
    }
    for at in 0..all.len() {
        let cast = |name: &str| if at < lengths.len() { format!("{name}{at}") } else { format!("{name}{at}.f32") };
        let casts = match at < lengths.len() {
            true => String::new(),
            false => format!("w{at}.f32 = cast w{at} f32\ng{at}.f32 = cast g{at} f32\n"),
        };
        let (w, g) = (cast("w"), cast("g"));
        write!(text, "step {{\n{casts}k{at} = mul m{at} keep\nn{at} = add k{at} {g}\nc{at} = mul n{at} rate\ny{at} = sub {w} c{at}\n").unwrap();
        match at < lengths.len() {
            true => writeln!(text, "}}\nout y{at} n{at}").unwrap(),
            false => writeln!(text, "z{at} = cast y{at} bf16\n}}\nout z{at} n{at}").unwrap(),
        }
    }
    text.parse().unwrap()
}

/// The kernels of a graph: joined, or one for each group.
fn kernels(graph: &Graph, in_place: bool, joined: bool) -> Vec<Kernel> {
    let (machine, arch) = (Machine::profile("h200").unwrap(), Arch::Sm90a);
    let target = Target { machine: &machine, catalog: CudaCatalog::of(arch) };
    let plan = plan(graph, target, Strategy::Fused, &[]).unwrap();
    let node = |name: String| graph.find(&name);
    let pairs = (0..graph.inputs().len()).flat_map(|at| {
        let new = node(format!("z{at}")).or_else(|| node(format!("y{at}")));
        [(node(format!("w{at}")), new), (node(format!("m{at}")), node(format!("n{at}")))]
    });
    let pairs = pairs.filter_map(|(operand, result)| Some(InPlace { operand: operand?, result: result? }));
    let pairs: Vec<InPlace> = pairs.filter(|_| in_place).collect();
    let backend = Backend::Cuda(CudaTarget::new(arch, 132));
    let drafts = plan.groups.iter().map(|group| group.draft(graph, &plan.placement));
    let requests: Vec<Request> = drafts.map(|group| Request { group, in_place: &pairs }).collect();
    match joined {
        true => render_joined(&requests, &backend, &|_, _| true).unwrap(),
        false => requests.iter().map(|&request| render(request, &backend).unwrap()).collect(),
    }
}

/// What kernels leave in the memory of every node.
fn ran(toolchain: &Toolchain, name: &str, graph: &Graph, kernels: &[Kernel]) -> HashMap<NodeId, Vec<u8>> {
    let schedule = Schedule { resident: 8, lanes: Lanes::Together, seeds: 1..2 };
    let mut memory: HashMap<NodeId, Vec<u8>> = HashMap::new();
    for (index, kernel) in kernels.iter().enumerate() {
        let arguments = kernel.launch.arguments();
        for argument in arguments {
            // Bytes whose floats of either width are near 1, different everywhere.
            let seed = argument.base.index();
            let byte = |at: usize| if at % 2 == 1 { 0x3f } else { ((at * 37 + seed * 101) % 251) as u8 };
            memory.entry(argument.base).or_insert_with(|| (0..graph.node(argument.base).bytes()).map(byte).collect());
        }
        let bytes: Vec<&[u8]> = arguments.iter().map(|argument| memory[&argument.base].as_slice()).collect();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated").join(format!("{name}{index}"));
        let done = deuteron_emulator::run(toolchain, &folder, kernel, &bytes, &schedule).unwrap();
        let results = arguments.iter().zip(done.results).filter(|(argument, _)| argument.written);
        results.for_each(|(argument, bytes)| drop(memory.insert(argument.base, bytes)));
    }
    memory
}

#[test]
fn a_joined_kernel_gives_the_bits_of_a_kernel_each() {
    let Some(toolchain) = compiler() else { return };
    let graph = updates(&LENGTHS, &[127, 1500]);
    for in_place in [false, true] {
        let (apart, joined) = (kernels(&graph, in_place, false), kernels(&graph, in_place, true));
        assert_eq!((apart.len(), joined.len()), (5, 2), "one of each dtype");
        let shared = |kernels: &[Kernel]| {
            let arguments = kernels.iter().flat_map(|kernel| kernel.launch.arguments());
            arguments.filter(|argument| argument.in_place_of.is_some()).count()
        };
        assert_eq!((shared(&apart), shared(&joined)), if in_place { (10, 10) } else { (0, 0) });
        let (one, other) = (ran(toolchain, "apart", &graph, &apart), ran(toolchain, "joined", &graph, &joined));
        for output in graph.outputs() {
            assert!(one[&output.node] == other[&output.node], "{} in place: {in_place}", output.name);
        }
    }
}

/// More sets than a parameter has room for are shared out among several kernels.
#[test]
fn parameters_have_at_most_four_kibibytes() {
    let lengths: Vec<usize> = (0..90).map(|at| 100 + at).collect();
    let mut text = String::from("graph many\nrate = input f32[]\n");
    for (at, length) in lengths.iter().enumerate() {
        writeln!(text, "w{at} = input f32[{length}]\ng{at} = input f32[{length}]").unwrap();
    }
    for at in 0..lengths.len() {
        writeln!(text, "step {{\nc{at} = mul g{at} rate\ny{at} = sub w{at} c{at}\n}}\nout y{at}").unwrap();
    }
    let graph: Graph = text.parse().unwrap();
    let joined = kernels(&graph, false, true);
    let grids: Vec<_> = joined.iter().flat_map(|kernel| &kernel.launch.grids().unwrap().list).collect();
    // Four arguments, and four words beside them.
    let least = lengths.len().div_ceil(4096 / 8 / 8);
    assert_eq!(grids.len(), least);
    assert!(grids.iter().all(|grid| grid.words.len() * 8 <= 4096));
    let arguments: usize = joined.iter().map(|kernel| kernel.launch.arguments().len()).sum();
    assert_eq!(arguments, 4 * lengths.len());
}

/// Weight decay is an operand: matrices that decay and biases that do not have the same arithmetic.
#[test]
fn weights_that_decay_and_others_are_one_kernel() {
    let mut graph = Graph::new("step");
    let [rate, scale, first, second, decay, no_decay] = ["rate", "scale", "first", "second", "decay", "no_decay"]
        .map(|name| graph.input(name, Dtype::F32, []).unwrap());
    let scalars = StepScalars { rate, scale, corrections: [first, second] };
    let shapes: [&[usize]; 4] = [&[64, 33], &[33], &[7, 5], &[1500]];
    for (at, shape) in shapes.into_iter().enumerate() {
        let [weight, gradient, m, v] =
            ["w", "g", "m", "v"].map(|name| graph.input(&format!("{name}{at}"), Dtype::F32, shape).unwrap());
        let decay = Some(if shape.len() > 1 { decay } else { no_decay });
        let update = WeightUpdate { weight, gradient, moments: &[m, v], decay, copy: Some(Dtype::Bf16) };
        let new =
            graph.updated_weight(Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 }, update, scalars).unwrap();
        for (part, value) in [new.weight].into_iter().chain(new.moments).chain(new.copy).enumerate() {
            graph.output(&format!("new{at}.{part}"), value).unwrap();
        }
    }
    assert_eq!(kernels(&graph, false, false).len(), 4);
    assert_eq!(kernels(&graph, false, true).len(), 1);
}

/// Neighbours that need each other are not joined.
#[test]
fn dependent_groups_are_kernels_of_their_own() {
    let graph = updates(&[5, 127, 4096, 2, 6001, 1500], &[]);
    let (machine, arch) = (Machine::profile("h200").unwrap(), Arch::Sm90a);
    let plan =
        plan(&graph, Target { machine: &machine, catalog: CudaCatalog::of(arch) }, Strategy::Fused, &[]).unwrap();
    let drafts = plan.groups.iter().map(|group| group.draft(&graph, &plan.placement));
    let requests: Vec<Request> = drafts.map(Request::from).collect();
    let backend = Backend::Cuda(CudaTarget::new(arch, 132));
    let count =
        |independent: &dyn Fn(usize, usize) -> bool| render_joined(&requests, &backend, independent).unwrap().len();
    assert_eq!(count(&|_, _| true), 1);
    assert_eq!(count(&|_, _| false), 6);
    assert_eq!(count(&|one, other| (one < 2) == (other < 2)), 2, "the first two, and the other four");
    assert_eq!(render_joined(&requests, &Backend::Cpu, &|_, _| true).unwrap().len(), 6, "threads of a CPU share each");
}
