//! Matmuls on the matrix units of a warp: that the real compiler takes every cut for every architecture without spills, and that launches
//! are within limits. No GPU and no driver are needed.

use crate::support::{compiled, compiler};
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::Graph;
use deuteron_kernels::CudaCatalog;
use deuteron_matmul::cuda::mma::MmaKernel;
use deuteron_matmul::cuda::realigned::RealignedKernel;
use deuteron_plan::{Machine, Strategy, Target, plan};

/// The kernel of the matmul of a graph, if there is one for a GPU.
fn kernel(text: &str, target: &CudaTarget) -> Option<MmaKernel> {
    let graph: Graph = text.parse().unwrap();
    let machine = Machine::profile("h200").unwrap();
    let catalog = CudaCatalog::of(Arch::Sm90a);
    let planned = plan(&graph, Target { machine: &machine, catalog }, Strategy::Greedy, &[]).unwrap();
    let group = planned.groups.iter().find(|group| group.structure.is_matmul()).expect("a matmul");
    MmaKernel::of(&group.draft(&graph, &planned.placement), target)
}

/// Both grids of matmuls whose operands are copied first.
#[test]
fn copies_compile_without_spills() {
    let Some(compiler) = compiler() else { return };
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let (machine, catalog) = (Machine::profile("h200").unwrap(), CudaCatalog::of(Arch::Sm90a));
    let mut sources = Vec::new();
    for text in [
        "x = input bf16[8192,50257] ; w = input bf16[50257,768] ; y = matmul x w ; out y",
        "x = input f16[8192,50257] ; w = input f16[8192,768] ; p = matmul x w transpose_a ; y = silu p ; out y",
        "x = input bf16[3,65,77] ; w = input bf16[3,77,129] ; y = matmul x w ; out y",
    ] {
        let graph: Graph = text.parse().unwrap();
        let planned = plan(&graph, Target { machine: &machine, catalog }, Strategy::Greedy, &[]).unwrap();
        let [group] = planned.groups.as_slice() else { panic!("{} kernels: {text}", planned.groups.len()) };
        let ours = RealignedKernel::of(&group.draft(&graph, &planned.placement), &target).expect("a matmul of copies");
        let Kernel { source: Source::Cuda(source), launch } = ours.kernel(&target) else { panic!("a text") };
        let grids = launch.grids().expect("grids");
        assert!(grids.list.len() > 1 && grids.workspace > 0, "{text}");
        sources.push((source, target.arch));
    }
    for cubin in compiled(&compiler, sources) {
        assert_eq!(cubin.entries.len(), 2);
        assert!(cubin.entries.iter().all(|entry| entry.spill_stores + entry.spill_loads == 0), "{:?}", cubin.entries);
    }
}

/// All types, all ways that operands lie and come, and what follows from nothing to much.
fn graphs() -> Vec<String> {
    let mut graphs = Vec::new();
    for dtype in ["bf16", "f16", "f32", "i8"] {
        let result = if dtype == "i8" { "f32" } else { dtype };
        let matmul = |m: usize, k: usize, n: usize, left: bool, right: bool| {
            let sizes = |turned: bool, a: usize, b: usize| if turned { format!("{b},{a}") } else { format!("{a},{b}") };
            let flag = |set: bool, name: &str| if set { format!(" {name}") } else { String::new() };
            format!(
                "x = input {dtype}[{}] ; w = input {dtype}[{}] ; p = matmul x w{}{}",
                sizes(left, m, k),
                sizes(right, k, n),
                flag(left, "transpose_a"),
                flag(right, "transpose_b")
            )
        };
        let follow = |n: usize| {
            format!(
                "b = weight {result}[{n}] ; r = input {result}[1500,{n}] ; seed = input i32[] ; l = add p b ; g = gelu l
                 h = dropout g seed p=0.3 offset=5 ; y = add h r ; out y"
            )
        };
        graphs.extend([
            format!("{} ; out p", matmul(1500, 768, 2304, false, true)),
            format!("{} ; {}", matmul(1500, 768, 2304, true, false), follow(2304)),
            format!("{} ; {}", matmul(1500, 769, 2305, false, true), follow(2305)),
            format!("{} ; out p", matmul(1501, 768, 2303, true, false)),
            format!("{} ; {}", matmul(1500, 769, 2304, false, false), follow(2304)),
            format!("x = input {dtype}[150,72,3] ; t = transpose x [2,0,1] ; w = input {dtype}[3,72,129] ; p = matmul t w ; out p"),
        ]);
    }
    // Sums that are too short for three passes.
    graphs.push("x = input f32[150,40] ; w = input f32[40,96] ; p = matmul x w ; out p".into());
    graphs
}

#[test]
fn every_cut_compiles_for_every_architecture_without_spills() {
    let Some(compiler) = compiler() else { return };
    let (mut labels, mut sources) = (Vec::new(), Vec::new());
    let graphs = graphs();
    for (turn, arch) in Arch::ALL.into_iter().enumerate() {
        let target = CudaTarget::new(arch, 132);
        for (at, text) in graphs.iter().enumerate() {
            let Some(ours) = kernel(text, &target) else {
                assert!(arch == Arch::Sm75 && !text.contains(" f16["), "{arch}: {text}");
                continue;
            };
            // The cuts take turns.
            for (index, tile) in ours.tiles(&target, f64::INFINITY).into_iter().enumerate() {
                if (index + at + turn) % 11 != 0 {
                    continue;
                }
                let Kernel { source: Source::Cuda(source), launch } = ours.clone().with_tile(tile).kernel(&target)
                else {
                    panic!("a text")
                };
                let grid = &launch.grids().expect("grids").list[0];
                assert!(grid.shared as usize <= arch.block_shared(), "{arch}, {tile}: {text}");
                labels.push(format!("{arch}, {tile}: {text}"));
                sources.push((source, arch));
            }
        }
    }
    let mut failures = Vec::new();
    for (label, cubin) in labels.iter().zip(compiled(&compiler, sources)) {
        if cubin.entries.iter().any(|entry| entry.spill_stores + entry.spill_loads > 0) {
            failures.push(format!("spills: {label}"));
        }
    }
    println!("{} kernels compiled", labels.len());
    assert!(labels.len() > 35 && failures.is_empty(), "{} kernels:\n{}", failures.len(), failures.join("\n"));
}
