//! Products of few rows for CUDA: which groups become one kernel, what it is launched with, and that the real compiler takes it
//! without spills. No GPU and no driver are needed.

use crate::support::{compiled, compiler};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Grid};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::{Dtype, Graph};
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_matmul::cuda::skinny::{SkinnyConfig, SkinnyKernel, Weights};
use deuteron_plan::{Machine, Strategy, Target, plan};

/// The kernels of a graph, and how those of few rows are spread over threads.
fn kernels(text: &str, dtype: Dtype, arch: Arch) -> Vec<(Kernel, Option<SkinnyConfig>)> {
    let graph: Graph = text.replace("float", &dtype.to_string()).parse().unwrap();
    let machine = Machine::profile("h200").unwrap();
    let planned =
        plan(&graph, Target { machine: &machine, catalog: CudaCatalog::of(arch) }, Strategy::Greedy, &[]).unwrap();
    let target = CudaTarget::new(arch, 132);
    let made = planned.groups.iter().map(|group| {
        let draft = group.draft(&graph, &planned.placement);
        let made = render(draft, &Backend::Cuda(target.clone())).unwrap();
        // Matrix units take some of what it takes too; else it is the kernel that the group has.
        let by_matrices = matches!(&made.source, Source::Cuda(source) if source.name == "matmul_strips");
        let skinny = SkinnyKernel::of(&draft, &target).filter(|_| !by_matrices);
        assert!(skinny.as_ref().is_none_or(|skinny| skinny.kernel(&target) == made));
        (made, skinny.map(|skinny| skinny.config))
    });
    made.collect()
}

/// The only kernel of a graph.
fn one(text: &str, dtype: Dtype, arch: Arch) -> (CudaSource, SkinnyConfig, Grid) {
    let mut all = kernels(text, dtype, arch);
    assert_eq!(all.len(), 1, "{text}");
    let (Kernel { source, launch }, config) = all.remove(0);
    let Source::Cuda(source) = source else { panic!("no source of ours: {text}") };
    let Some(config) = config else { panic!("{}: {text}", source.name) };
    let list = &launch.grids().expect("grids").list;
    assert_eq!(list.len(), 1, "{text}");
    (source, config, list[0].clone())
}

/// Graphs of one kernel: both ways that weights lie, with and without row work before and elementwise work after.
fn graphs([m, k, n]: [usize; 3]) -> Vec<String> {
    let x = format!("x = input float[{m},{k}]");
    let norm = format!("h = layer_norm x w:float[{k}] b:float[{k}]");
    let tied = format!("m = weight float[{n},{k}] ; t = transpose m [1,0]");
    vec![
        format!("{x} ; y = matmul x m:float[{k},{n}] ; out y"),
        format!("{x} ; l = linear x m:float[{k},{n}] c:float[{n}] ; y = gelu l ; out y"),
        format!("{x} ; {norm} ; l = linear h m:float[{k},{n}] c:float[{n}] ; y = gelu l ; out y"),
        format!(
            "{x} ; h = rms_norm x w:float[{k}] ; l = matmul h m:float[{k},{n}] ; r = input float[{m},{n}] ; y = add l r ; out y"
        ),
        format!("{x} ; h = silu x ; y = matmul h m:float[{k},{n}] ; out y"),
        format!("{x} ; {tied} ; y = matmul x t ; out y"),
        format!("{x} ; {tied} ; {norm} ; y = matmul h t ; z = cast y f32 ; out z"),
        format!("{x} ; {tied} ; h = softmax x ; y = matmul h t ; z = silu y ; out z"),
    ]
}

const SIZES: [[usize; 3]; 7] =
    [[1, 768, 3072], [2, 768, 2304], [4, 3072, 768], [4, 768, 50257], [3, 127, 129], [7, 1500, 33], [1, 2, 1]];

#[test]
fn every_kernel_compiles_without_spills() {
    let Some(compiler) = compiler() else { return };
    // Every dtype for one size, and one dtype for each number of rows; bf16 for both architectures, which take turns for all else.
    let both = [Arch::Sm80, Arch::Sm90a];
    // Of 16-bit operands, more than four rows go to matrix units where vectors divide the sizes.
    let of_dtypes = Dtype::FLOATS.map(|dtype| (dtype, [if dtype == Dtype::F32 { 8 } else { 4 }, 768, 384]));
    let of_rows = [[1, 768, 3072], [2, 768, 2304], [8, 1500, 33], [3, 127, 129]].map(|size| (Dtype::Bf16, size));
    let mut kernels = Vec::new();
    for (at, (dtype, size)) in of_dtypes.into_iter().chain(of_rows).enumerate() {
        for (turn, text) in graphs(size).iter().enumerate() {
            let archs =
                if dtype == Dtype::Bf16 && at < of_dtypes.len() { &both[..] } else { &both[(at + turn) % 2..][..1] };
            for &arch in archs {
                let (source, config, _) = one(text, dtype, arch);
                kernels.push((format!("{dtype} {arch}: {text}: {config:?}"), (source, arch)));
            }
        }
    }
    let (labels, sources): (Vec<String>, Vec<_>) = kernels.into_iter().unzip();
    let (mut failures, mut most) = (Vec::new(), 0);
    for (label, cubin) in labels.iter().zip(compiled(&compiler, sources)) {
        let entry = &cubin.entries[0];
        most = most.max(entry.registers);
        println!("{} registers: {label}", entry.registers);
        if entry.spill_stores + entry.spill_loads > 0 {
            failures.push(format!("spills {} bytes: {label}", entry.spill_stores));
        }
    }
    println!("{} kernels compiled, {most} registers at most", labels.len());
    assert!(failures.is_empty(), "{} kernels:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_launch_is_within_the_limits_of_the_architecture() {
    for size in SIZES.into_iter().chain([[1, 14000, 100], [8, 1500, 768], [3, 64, 100_000]]) {
        for dtype in Dtype::FLOATS {
            for text in graphs(size) {
                for arch in Arch::ALL {
                    let (_, config, grid) = one(&text, dtype, arch);
                    let label = format!("{dtype} {arch}: {text}: {config:?}: {grid:?}");
                    // Static shared memory: sums of the warps, and what a head reduces with.
                    assert!(grid.shared as usize + 4096 <= arch.block_shared(), "{label}");
                    let clusters = if arch.has_clusters() { 8 } else { 1 };
                    assert!((1..=clusters).contains(&grid.cluster), "{label}");
                    assert!(grid.blocks[0] > 0 && grid.blocks[0].is_multiple_of(grid.cluster), "{label}");
                    assert!(grid.words.len() * 8 <= 4096, "{label}");
                }
            }
        }
    }
}

#[test]
fn all_multiprocessors_have_work_where_there_are_weights_for_them() {
    // The products of GPT-2 for one token.
    for ([k, n], split) in [([768, 2304], 4), ([768, 768], 8), ([768, 3072], 4), ([3072, 768], 8)] {
        let text = format!("x = input float[1,{k}] ; y = matmul x m:float[{k},{n}] ; out y");
        let (_, config, grid) = one(&text, Dtype::Bf16, Arch::Sm90a);
        assert!(
            matches!(config.weights, Weights::ByRows { split: found, .. } if found == split),
            "{k}x{n}: {config:?}"
        );
        assert!(grid.blocks[0] >= 132, "{k}x{n}: {grid:?}");
    }
    let head = "x = input float[1,768] ; m = weight float[50257,768] ; t = transpose m [1,0] ; y = matmul x t ; out y";
    let (_, config, grid) = one(head, Dtype::Bf16, Arch::Sm90a);
    assert_eq!(config.weights, Weights::ByColumns { slices: 1 });
    assert!((132 * 2..=132 * 3).contains(&grid.blocks[0]), "{grid:?}");
}

#[test]
fn products_of_more_rows_stay_with_the_library() {
    let is_library = |kernels: &[(Kernel, Option<SkinnyConfig>)]| {
        matches!(kernels, [(Kernel { source: Source::Library(_), .. }, None)])
    };
    let library = |text: &str| is_library(&kernels(text, Dtype::Bf16, Arch::Sm90a));
    // Hopper has kernels of its own for these.
    let more = "x = input float[17,768] ; l = linear x m:float[768,768] c:float[768] ; out l";
    assert!(!library(more) && is_library(&kernels(more, Dtype::F16, Arch::Sm75)));
    // More than the shared memory of a block holds, on one architecture or on all.
    let long = "x = input float[8,3072] ; l = linear x m:float[3072,768] c:float[768] ; out l";
    assert!(!library(long));
    assert!(is_library(&kernels(long, Dtype::F16, Arch::Sm75)));
    // Hopper has a kernel whose blocks share a long K.
    let longer = "x = input float[8,4096] ; l = linear x m:float[4096,768] c:float[768] ; out l";
    assert!(!library(longer) && is_library(&kernels(longer, Dtype::F16, Arch::Sm75)));
    // Batches.
    assert!(library("x = input float[4,1,64] ; y = input float[4,64,100] ; z = matmul x y ; out z"));
    // A norm of more rows is a kernel of its own, but on Hopper, where the launch of a matmul makes its left operand.
    let norm =
        "x = input float[17,768] ; h = layer_norm x w:float[768] b:float[768] ; y = matmul h m:float[768,768] ; out y";
    assert_eq!([Arch::Sm80, Arch::Sm90a].map(|arch| kernels(norm, Dtype::Bf16, arch).len()), [2, 1]);
}
