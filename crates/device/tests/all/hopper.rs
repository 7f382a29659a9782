//! Matmuls on Hopper's matrix units: that the real compiler takes every cut without spills, and that launches are within limits. No GPU
//! and no driver are needed.

use crate::support::{compiled, compiler};
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::{Dtype, Graph};
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_matmul::cuda::hopper::HopperKernel;
use deuteron_plan::{Machine, Strategy, Target, plan};

/// The kernel of a graph of one matmul.
fn kernel(text: &str, target: &CudaTarget) -> HopperKernel {
    let graph: Graph = text.parse().unwrap();
    let machine = Machine::profile("h200").unwrap();
    let catalog = CudaCatalog::of(target.arch);
    let planned = plan(&graph, Target { machine: &machine, catalog }, Strategy::Greedy, &[]).unwrap();
    let [group] = planned.groups.as_slice() else { panic!("{} kernels: {text}", planned.groups.len()) };
    HopperKernel::of(&group.draft(&graph, &planned.placement), target)
        .unwrap_or_else(|| panic!("not for Hopper: {text}"))
}

/// Both ways that weights lie, what follows from nothing to much, several right operands, norms before, and sums over rows behind.
fn graphs(dtype: Dtype) -> [String; 9] {
    let x = format!("x = input {dtype}[1500,768]");
    let three = "q = weight KIND[768,768] ; k = weight KIND[768,768] ; v = weight KIND[768,768]"
        .replace("KIND", &dtype.to_string());
    [
        format!("{x} ; y = matmul x w:{dtype}[768,2304] ; out y"),
        format!(
            "{x} ; r = input {dtype}[1500,768] ; l = linear x w:{dtype}[768,768] c:{dtype}[768] ; y = add l r
             n = layer_norm y g:{dtype}[768] h:{dtype}[768] eps=1e-5 ; out y ; out n"
        ),
        format!("{x} ; l = linear x w:{dtype}[2305,768] c:{dtype}[2305] transposed ; y = gelu l ; out y"),
        format!(
            "{x} ; r = input {dtype}[1500,2304] ; seed = input i32[] ; l = linear x w:{dtype}[768,2304] c:{dtype}[2304]
             h = dropout l seed p=0.3 offset=5 ; y = add h r ; out y"
        ),
        format!(
            "{x} ; g = weight {dtype}[2048,768] ; u = weight {dtype}[2048,768] ; a = matmul x g transpose_b
             b = matmul x u transpose_b ; s = silu a ; y = mul s b ; out y"
        ),
        format!(
            "{x} ; {three} ; a = linear x q c:{dtype}[768] ; b = linear x k d:{dtype}[768] ; c2 = linear x v e:{dtype}[768]
             out a ; out b ; out c2"
        ),
        format!(
            "{x} ; n = layer_norm x g:{dtype}[768] h:{dtype}[768] eps=1e-5 ; l = linear n w:{dtype}[768,2304] c:{dtype}[2304]
             y = gelu l ; out y"
        ),
        format!(
            "{x} ; r = input {dtype}[1500,768] ; s = add x r ; n = rms_norm s g:{dtype}[768] eps=1e-6
             l = linear n w:{dtype}[2048,768] transposed ; q = input {dtype}[1500,2048] ; y = add l q ; out y"
        ),
        format!(
            "{x} ; l = matmul x w:{dtype}[768,2304] ; q = input {dtype}[1500,2304] ; t = sigmoid q ; y = mul l t
             f = cast y f32 ; c = column_sum f ; d = cast c {dtype} ; out y ; out d"
        ),
    ]
}

#[test]
fn every_cut_compiles_without_spills() {
    let Some(compiler) = compiler() else { return };
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let (mut labels, mut sources) = (Vec::new(), Vec::new());
    for (turn, dtype) in [Dtype::Bf16, Dtype::F16].into_iter().enumerate() {
        for (at, text) in graphs(dtype).iter().enumerate() {
            let ours = kernel(text, &target);
            // The graphs take turns, and so do the types.
            for (index, tile) in ours.tiles(&target, f64::INFINITY).into_iter().enumerate() {
                if (index + at + turn) % 17 != 0 {
                    continue;
                }
                let Kernel { source: Source::Cuda(source), launch } = ours.clone().with_tile(tile).kernel(&target)
                else {
                    panic!("a text")
                };
                let grid = &launch.grids().expect("grids").list[0];
                assert!(grid.shared as usize <= target.arch.block_shared(), "{tile}: {text}");
                assert!(grid.blocks[0] > 0 && grid.blocks[0].is_multiple_of(grid.cluster), "{tile}: {text}");
                labels.push(format!("{tile}: {text}"));
                sources.push((source, target.arch));
            }
        }
    }
    let mut failures = Vec::new();
    for (label, cubin) in labels.iter().zip(compiled(&compiler, sources)) {
        let spilled: u32 = cubin.entries.iter().map(|entry| entry.spill_stores + entry.spill_loads).sum();
        if spilled > 0 {
            failures.push(format!("spills {spilled} bytes: {label}"));
        }
    }
    println!("{} kernels compiled", labels.len());
    assert!(labels.len() > 16 && failures.is_empty(), "{} kernels:\n{}", failures.len(), failures.join("\n"));
}

/// f32 by products of TF32: both grids of every cut, of operands that lie either way, from nothing that follows to much.
#[test]
fn every_cut_of_f32_compiles_without_spills() {
    let Some(compiler) = compiler() else { return };
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let follow = "b = weight f32[2304] ; r = input f32[1500,2304] ; seed = input i32[] ; l = add p b ; g = gelu l
         h = dropout g seed p=0.3 offset=5 ; y = add h r ; out y";
    let graphs = [
        "x = input f32[1500,768] ; w = weight f32[768,2304] ; p = matmul x w ; out p".to_string(),
        format!(
            "x = input f32[768,1500] ; w = weight f32[2304,768] ; p = matmul x w transpose_a transpose_b ; {follow}"
        ),
        "x = input f32[1500,769] ; w = weight f32[2305,769] ; p = matmul x w transpose_b ; y = silu p ; out y"
            .to_string(),
        "x = input f32[3,1500,99] ; w = input f32[3,99,1001] ; p = matmul x w ; y = gelu p ; out y".to_string(),
    ];
    let (mut labels, mut sources) = (Vec::new(), Vec::new());
    for (at, text) in graphs.iter().enumerate() {
        let ours = kernel(text, &target);
        for (index, tile) in ours.tiles(&target, f64::INFINITY).into_iter().enumerate() {
            if (index + at) % 3 != 0 {
                continue;
            }
            let Kernel { source: Source::Cuda(source), launch } = ours.clone().with_tile(tile).kernel(&target) else {
                panic!("a text")
            };
            let grids = launch.grids().expect("grids");
            assert!(grids.list.iter().all(|grid| grid.shared as usize <= target.arch.block_shared()), "{tile}: {text}");
            labels.push(format!("{tile}: {text}"));
            sources.push((source, target.arch));
        }
    }
    let mut failures = Vec::new();
    for (label, cubin) in labels.iter().zip(compiled(&compiler, sources)) {
        assert_eq!(cubin.entries.len(), 2);
        let spilled: u32 = cubin.entries.iter().map(|entry| entry.spill_stores + entry.spill_loads).sum();
        if spilled > 0 {
            failures.push(format!("spills {spilled} bytes: {label}"));
        }
    }
    println!("{} kernels compiled", labels.len());
    assert!(labels.len() > 16 && failures.is_empty(), "{} kernels:\n{}", failures.len(), failures.join("\n"));
}

/// Losses without logits and their gradients: every kernel of a launch.
#[test]
fn losses_compile_without_spills() {
    let Some(compiler) = compiler() else { return };
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let mut sources = Vec::new();
    for (dtype, [rows, classes, inner], smoothing) in
        [(Dtype::Bf16, [8192, 50_257, 768], 0.0), (Dtype::F16, [1500, 1000, 136], 0.1)]
    {
        let operands = format!(
            "x = input {dtype}[{rows},{inner}] ; w = weight {dtype}[{classes},{inner}] ; t = input i32[{rows}]"
        );
        let per_row = format!("s = input f32[{rows},1] ; d = input f32[{rows},1]");
        for text in [
            format!("{operands} ; l, s = linear_cross_entropy x w t smoothing={smoothing:?} ; out l ; out s"),
            format!(
                "{operands} ; {per_row} ; dx, dw = linear_cross_entropy_gradient x w t s d d smoothing={smoothing:?} ; out dx ; out dw"
            ),
        ] {
            let graph: Graph = text.parse().unwrap();
            let machine = Machine::profile("h200").unwrap();
            let catalog = CudaCatalog::of(target.arch);
            let planned = plan(&graph, Target { machine: &machine, catalog }, Strategy::Greedy, &[]).unwrap();
            let [group] = planned.groups.as_slice() else { panic!("{} kernels: {text}", planned.groups.len()) };
            let kernel = render(group.draft(&graph, &planned.placement), &Backend::Cuda(target.clone())).unwrap();
            let Kernel { source: Source::Cuda(source), launch } = kernel else { panic!("a text") };
            let grids = launch.grids().expect("grids");
            assert!(grids.workspace < 256 << 20, "{} bytes of workspace: {text}", grids.workspace);
            assert!(grids.list.iter().all(|grid| grid.shared as usize <= target.arch.block_shared()), "{text}");
            sources.push((source, target.arch));
        }
    }
    for cubin in compiled(&compiler, sources) {
        for entry in &cubin.entries {
            assert_eq!(entry.spill_stores + entry.spill_loads, 0, "{} spills", entry.name);
        }
    }
}
