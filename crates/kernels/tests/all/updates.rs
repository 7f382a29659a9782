//! Results in place of operands: which kernels support them, and which arguments share memory.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_codegen::{Execution, InPlace, Kernel, Request};
use deuteron_graph::{Graph, NodeId};
use deuteron_kernels::{Backend, CpuCatalog, CudaCatalog, render};
use deuteron_plan::{Machine, Strategy, Target, plan};

/// Fused kernels of a graph in which an input may be updated to an output.
fn kernels(text: &str, backend: &Backend, updates: &[(&str, &str)]) -> Vec<Kernel> {
    let graph: Graph = text.parse().unwrap();
    let machine = Machine::profile("h200").unwrap();
    let target = match backend {
        Backend::Cpu => Target { machine: &Machine::cpu(), catalog: &CpuCatalog },
        Backend::Cuda(target) => Target { machine: &machine, catalog: CudaCatalog::of(target.arch) },
    };
    let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
    let node = |name: &str| graph.ids().find(|&id: &NodeId| graph.label(id) == name).unwrap();
    let pair = |&(operand, result): &(&str, &str)| InPlace { operand: node(operand), result: node(result) };
    let in_place: Vec<InPlace> = updates.iter().map(pair).collect();
    let drafts = plan.groups.iter().map(|group| group.draft(&graph, &plan.placement));
    drafts.map(|group| render(Request { group, in_place: &in_place }, backend).unwrap()).collect()
}

/// What each argument of the only kernel is in place of.
fn in_place(text: &str, backend: &Backend, updates: &[(&str, &str)]) -> Vec<Option<usize>> {
    let kernels = kernels(text, backend, updates);
    let [kernel] = kernels.as_slice() else { panic!("{} kernels", kernels.len()) };
    kernel.launch.arguments().iter().map(|argument| argument.in_place_of).collect()
}

fn backends() -> [Backend; 3] {
    let cuda = |arch| Backend::Cuda(CudaTarget::new(arch, 132));
    [Backend::Cpu, cuda(Arch::Sm80), cuda(Arch::Sm90a)]
}

const STEP: &str = "w = input f32[127] ; g = input f32[127] ; s = mul g 0.1 ; y = sub w s ; out y";

#[test]
fn elementwise_work_is_in_place_where_it_is_asked_for() {
    for backend in backends() {
        let asked = in_place(STEP, &backend, &[("w", "y")]);
        assert_eq!(asked.iter().flatten().count(), 1);
        assert!(in_place(STEP, &backend, &[]).iter().flatten().next().is_none());
        assert!(in_place(STEP, &backend, &[("s", "y")]).iter().flatten().next().is_none(), "no operand");
        let half = STEP.replace("f32", "bf16");
        assert_eq!(in_place(&half, &backend, &[("w", "y")]).iter().flatten().count(), 1);
    }
}

#[test]
fn loads_of_what_a_kernel_writes_are_ordinary() {
    for arch in [Arch::Sm80, Arch::Sm90a] {
        let backend = Backend::Cuda(CudaTarget::new(arch, 132));
        let text = |updates| kernels(STEP, &backend, updates).remove(0).source.to_string();
        let (apart, updated) = (text(&[]), text(&[("w", "y")]));
        assert_eq!(updated, format!("#define MEETS\n{apart}"));
    }
}

/// Lines that were just read are in the cache: ordinary stores write to them, however large the tensor is. Others stream, or are
/// fetched first where threads are few.
#[test]
fn results_in_place_do_not_stream() {
    let large = STEP.replace("127", "4194304");
    for isa in Isa::available().into_iter().filter(|isa| ["avx512", "avx2"].contains(&isa.name())) {
        let has = |threads, updates: &[(&str, &str)], words: [&str; 3]| {
            let kernel = kernels(&large, &Backend::Cpu, updates).remove(0);
            let Execution::Tasks(tasks) = kernel.launch.execution() else { panic!("{:?}", kernel.launch) };
            let code = tasks.machine_code(threads, isa).unwrap().unwrap();
            words.map(|word| code.iter().any(|line| line.contains(word)))
        };
        let words = ["vmovnt", "prefetchw", "prefetcht"];
        assert_eq!(has(16, &[], words), [true, false, true], "{}", isa.name());
        assert_eq!(has(2, &[], words), [false, true, true], "{}", isa.name());
        for threads in [2, 16] {
            assert_eq!(has(threads, &[("w", "y")], words), [false, false, true], "{} {threads}", isa.name());
        }
    }
}

/// A gradient that is added to a sum of gradients, of another type.
#[test]
fn what_follows_a_matmul_is_in_place_on_hopper() {
    let text = "w = input f32[768,3072] ; p = input bf16[8192,768] ; q = input bf16[8192,3072]
g = matmul p q transpose_a ; f = cast g f32 ; y = add w f ; out y";
    let hopper = Backend::Cuda(CudaTarget::new(Arch::Sm90a, 132));
    assert_eq!(in_place(text, &hopper, &[("w", "y")]).iter().flatten().count(), 1);
    assert_eq!(in_place(text, &hopper, &[]).iter().flatten().count(), 0);
    // An operand of the matmul is read by many blocks.
    let square = "w = input bf16[768,768] ; q = input bf16[768,768] ; g = matmul w q ; y = add w g ; out y";
    assert_eq!(in_place(square, &hopper, &[("w", "y")]).iter().flatten().count(), 0);
}

#[test]
fn rows_and_operands_that_do_not_fit_are_left_alone() {
    let cases: [(&str, &str); 6] = [
        ("softmax of rows", "w = input f32[7,127] ; y = softmax w ; out y"),
        ("a row for all rows", "w = input f32[7,127] ; b = input f32[127] ; y = add w b ; out y"),
        ("one number", "w = input f32[1] ; y = add w 1.0 ; out y"),
        ("another type", "w = input f16[127] ; y = cast w f32 ; out y"),
        ("a matmul", "w = input f32[40,40] ; b = input f32[40,40] ; y = matmul w b ; out y"),
        ("a copy", "w = input f32[40,40] ; y = transpose w [1,0] ; out y"),
    ];
    for backend in backends() {
        for (what, text) in cases {
            assert!(in_place(text, &backend, &[("w", "y")]).iter().flatten().next().is_none(), "{what}");
        }
    }
}

#[test]
fn a_later_read_of_the_operand_is_for_the_backend_to_allow() {
    let text = "w = input f32[127] ; g = input f32[127] ; y = mul g 0.1 ; z = mul w g ; out y z";
    let [cpu, ampere, hopper] = backends().map(|backend| in_place(text, &backend, &[("w", "y")]));
    assert!(cpu.iter().flatten().next().is_none(), "the strip of `y` is stored before `w` is read");
    assert!(ampere.iter().flatten().count() == 1 && hopper.iter().flatten().count() == 1, "a thread loads first");
}
