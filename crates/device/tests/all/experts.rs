//! Rows of floats that are routed to experts: that the real compiler takes every cut by warpgroups, and by warps for every architecture,
//! without spills, and that launches are within limits. No GPU and no driver are needed.

use crate::support::{compiled, compiler};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::Graph;
use deuteron_kernels::CudaCatalog;
use deuteron_matmul::cuda::mma_routed::MmaRoutedKernel;
use deuteron_matmul::cuda::routed::RoutedKernel;
use deuteron_plan::{Draft, Machine, Strategy, Target, plan};

/// What a kernel family makes of the only group of a graph, planned for Hopper.
fn of_group<T>(text: &str, make: impl Fn(&Draft) -> Option<T>) -> Option<T> {
    let graph: Graph = text.parse().unwrap();
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    let planned = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
    let [group] = planned.groups.as_slice() else { panic!("{} kernels: {text}", planned.groups.len()) };
    make(&group.draft(&graph, &planned.placement))
}

/// Rows with choices, bias and an activation.
fn experts(dtype: &str, [rows, choices, k, n, experts]: [usize; 5]) -> String {
    format!(
        "x = input {dtype}[{rows},{k}] ; chosen = input i32[{rows},{choices}] ; w = weight {dtype}[{experts},{n},{k}]
         b = weight {dtype}[{experts},{n}] ; l = routed_linear x chosen w b ; y = gelu l ; out y"
    )
}

fn of_bytes([rows, k, n, experts]: [usize; 4]) -> String {
    format!(
        "x = input i8[{rows},{k}] ; s = input f32[{rows},1] ; chosen = input i32[{rows}] ; w = weight i8[{experts},{n},{k}]
         t = weight f32[{experts},{n}] ; l = expert_linear x s chosen w t c:bf16[{experts},{n}] bf16 ; y = silu l ; out y"
    )
}

fn source(kernel: Kernel, target: &CudaTarget) -> CudaSource {
    let grids = kernel.launch.grids().expect("grids");
    assert!(grids.list.iter().all(|grid| grid.shared as usize <= target.arch.block_shared()));
    let Source::Cuda(source) = kernel.source else { panic!("a text") };
    source
}

fn check(all: Vec<(String, CudaSource, Arch)>) {
    let Some(compiler) = compiler() else { return };
    let labels: Vec<String> = all.iter().map(|(label, ..)| label.clone()).collect();
    let sources = all.into_iter().map(|(_, source, arch)| (source, arch)).collect();
    for (label, cubin) in labels.iter().zip(compiled(&compiler, sources)) {
        let spills: Vec<_> = cubin.entries.iter().map(|entry| entry.spill_stores + entry.spill_loads).collect();
        assert!(spills.len() == 2 && spills.iter().all(|&bytes| bytes == 0), "{label}: spills {spills:?}");
    }
}

#[test]
fn experts_by_warpgroups_compile_without_spills() {
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let mut all = Vec::new();
    // Every second cut of each.
    for (at, (dtype, sizes)) in
        [("bf16", [3000, 2, 784, 1000, 8]), ("f16", [3000, 1, 784, 1001, 64])].into_iter().enumerate()
    {
        let text = experts(dtype, sizes);
        let routed = of_group(&text, |group| RoutedKernel::of(group, &target)).expect("a routed matmul");
        for tile in routed.cuts(&target).into_iter().skip(at).step_by(2) {
            let source = source(routed.clone().with_tile(tile).kernel(&target), &target);
            all.push((format!("{tile}: {text}"), source, target.arch));
        }
    }
    assert!(all.len() > 8, "{}", all.len());
    check(all);
}

/// Every architecture, every type, rows and columns that lie at multiples of 16 bytes and elsewhere. The cuts take turns;
/// one architecture compiles one half of the graphs, the next the other.
#[test]
fn experts_by_warps_compile_for_every_architecture_without_spills() {
    let texts: Vec<String> = ["bf16", "f16", "f32"]
        .into_iter()
        .flat_map(|dtype| [[3000, 2, 784, 1000, 8], [1501, 3, 769, 131, 33]].map(|sizes| experts(dtype, sizes)))
        .chain([of_bytes([3000, 784, 1000, 8]), of_bytes([1501, 769, 131, 33])])
        .collect();
    let mut all = Vec::new();
    for (turn, arch) in Arch::ALL.into_iter().enumerate() {
        let target = CudaTarget::new(arch, 132);
        for (at, text) in texts.iter().enumerate() {
            let Some(routed) = of_group(text, |group| MmaRoutedKernel::of(group, &target)) else {
                assert!(arch == Arch::Sm75 && !text.contains(" f16["), "{arch}: {text}");
                continue;
            };
            if (at / 2 + turn) % 2 != 0 {
                continue;
            }
            let cuts = routed.cuts(&target);
            let tile = cuts[(turn + at) % cuts.len()];
            let source = source(routed.with_tile(tile).kernel(&target), &target);
            all.push((format!("{arch}, {tile}: {text}"), source, arch));
        }
    }
    assert!(all.len() > 20, "{}", all.len());
    check(all);
}
