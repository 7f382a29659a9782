//! Matmuls of bytes: that the real compiler takes every cut of those on Hopper's matrix units, those of few rows and those of experts, without
//! spills. No GPU and no driver are needed.

use crate::support::{compiled, compiler};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::Graph;
use deuteron_kernels::CudaCatalog;
use deuteron_matmul::cuda::hopper::HopperKernel;
use deuteron_matmul::cuda::routed::RoutedKernel;
use deuteron_matmul::cuda::skinny::SkinnyKernel;
use deuteron_plan::{Draft, Machine, Strategy, Target, plan};

/// What a kernel family makes of the only group of a graph.
fn of_group<T>(text: &str, target: &CudaTarget, make: impl Fn(&Draft) -> Option<T>) -> T {
    let graph: Graph = text.parse().unwrap();
    let machine = Machine::profile("h200").unwrap();
    let catalog = CudaCatalog::of(target.arch);
    let planned = plan(&graph, Target { machine: &machine, catalog }, Strategy::Greedy, &[]).unwrap();
    let [group] = planned.groups.as_slice() else { panic!("{} kernels: {text}", planned.groups.len()) };
    make(&group.draft(&graph, &planned.placement)).unwrap_or_else(|| panic!("not of this family: {text}"))
}

/// Sums as they are, and with much behind them.
fn graphs([m, k, n]: [usize; 3]) -> [String; 2] {
    let operands = format!("x = input i8[{m},{k}] ; w = weight i8[{n},{k}]");
    [
        format!("{operands} ; y = matmul x w transpose_b ; out y"),
        format!(
            "{operands} ; s = input f32[{m},1] ; t = weight f32[{n}] ; r = input bf16[{m},{n}]
             l = quantized_linear x s w t c:bf16[{n}] bf16 ; g = gelu l ; y = add g r ; out y"
        ),
    ]
}

fn experts([m, k, n, experts]: [usize; 4]) -> String {
    format!(
        "x = input i8[{m},{k}] ; s = input f32[{m},1] ; chosen = input i32[{m}] ; w = weight i8[{experts},{n},{k}]
         t = weight f32[{experts},{n}] ; l = expert_linear x s chosen w t c:bf16[{experts},{n}] bf16 ; y = silu l ; out y"
    )
}

/// Rows that are made bytes again, of a matmul and of experts: floats wait in registers for the largest of their row.
fn again([m, k, n]: [usize; 3], dtype: &str) -> String {
    format!(
        "x = input i8[{m},{k}] ; w = weight i8[{n},{k}] ; s = input f32[{m},1] ; t = weight f32[{n}]
         l = quantized_linear x s w t c:{dtype}[{n}] {dtype} ; g = gelu l ; q, u = quantize_int8 g ; out q u"
    )
}

fn experts_again([m, k, n, experts]: [usize; 4], dtype: &str) -> String {
    format!(
        "x = input i8[{m},{k}] ; s = input f32[{m},1] ; chosen = input i32[{m}] ; w = weight i8[{experts},{n},{k}] ; t = weight f32[{experts},{n}]
         l = expert_linear x s chosen w t c:{dtype}[{experts},{n}] {dtype} ; y = silu l ; q, u = quantize_int8 y ; out q u"
    )
}

fn source(kernel: Kernel, target: &CudaTarget) -> CudaSource {
    let grids = kernel.launch.grids().expect("grids");
    assert!(grids.list.iter().all(|grid| grid.shared as usize <= target.arch.block_shared()));
    let Source::Cuda(source) = kernel.source else { panic!("a text") };
    source
}

#[test]
fn matmuls_of_bytes_compile_without_spills() {
    let Some(compiler) = compiler() else { return };
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let mut all: Vec<(String, CudaSource)> = Vec::new();
    for (at, text) in graphs([1500, 784, 2308]).iter().enumerate() {
        let ours = of_group(text, &target, |group| HopperKernel::of(group, &target));
        for tile in ours.tiles(&target, f64::INFINITY).into_iter().skip(at).step_by(2) {
            all.push((format!("{tile}: {text}"), source(ours.clone().with_tile(tile).kernel(&target), &target)));
        }
    }
    for m in [1, 2, 3, 8] {
        for text in graphs([m, 1000, 260]) {
            let few = of_group(&text, &target, |group| SkinnyKernel::of(group, &target));
            all.push((text, source(few.kernel(&target), &target)));
        }
    }
    for (at, count) in [1, 3, 8, 33, 64, 256, 1000, 1024].into_iter().enumerate() {
        let text = experts([3000, 784, 1000, count]);
        let routed = of_group(&text, &target, |group| RoutedKernel::of(group, &target));
        for tile in routed.cuts(&target).into_iter().skip(at).step_by(8) {
            all.push((format!("{tile}: {text}"), source(routed.clone().with_tile(tile).kernel(&target), &target)));
        }
    }
    for dtype in ["bf16", "f32"] {
        let text = again([1500, 784, 3072], dtype);
        let ours = of_group(&text, &target, |group| HopperKernel::of(group, &target));
        let text = experts_again([3000, 784, 4096, 8], dtype);
        let routed = of_group(&text, &target, |group| RoutedKernel::of(group, &target));
        let cuts = [ours.tiles(&target, f64::INFINITY), routed.cuts(&target)];
        assert!(cuts.iter().all(|cuts| cuts.len() >= 3), "{cuts:?}");
        for tile in cuts[0].iter().copied() {
            all.push((format!("{tile}: {dtype} again"), source(ours.clone().with_tile(tile).kernel(&target), &target)));
        }
        for tile in cuts[1].iter().copied() {
            let kernel = routed.clone().with_tile(tile).kernel(&target);
            all.push((format!("{tile}: {dtype} again, of experts"), source(kernel, &target)));
        }
    }
    let (labels, sources): (Vec<String>, Vec<CudaSource>) = all.into_iter().unzip();
    let sources: Vec<_> = sources.into_iter().map(|source| (source, target.arch)).collect();
    let mut spilling = Vec::new();
    for (label, cubin) in labels.iter().zip(compiled(&compiler, sources)) {
        let spills: Vec<_> = cubin.entries.iter().map(|entry| entry.spill_stores + entry.spill_loads).collect();
        if spills.iter().any(|&bytes| bytes > 0) {
            spilling.push(format!("{label}: {spills:?}"));
        }
    }
    assert!(spilling.is_empty(), "{}", spilling.join("\n"));
}
