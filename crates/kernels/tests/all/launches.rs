//! The least number of launches that layers can have on an H200.

use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::Graph;
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_plan::{Machine, Strategy, Target, plan};

/// Around each change of kernels: few rows, strips of them, tiles of one wave, many waves.
const ROWS: [usize; 14] = [1, 4, 5, 8, 16, 17, 64, 128, 256, 257, 1000, 1024, 8192, 32768];

/// Launches of a greedy plan, a call of the library counted as one, and its predicted microseconds.
fn launches(text: &str) -> (usize, f64) {
    let graph: Graph = text.parse().unwrap();
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
    let backend = Backend::Cuda(CudaTarget::new(Arch::Sm90a, 132));
    let of = |kernel: Kernel| match &kernel.source {
        Source::Library(_) => 1,
        _ => kernel.launch.grids().expect("grids").list.len(),
    };
    let kernels = plan.groups.iter().map(|group| render(group.draft(&graph, &plan.placement), &backend).unwrap());
    (kernels.map(of).sum(), plan.time().us())
}

/// A greedy plan has at most so many launches, with a price by which the search may prefer more.
#[track_caller]
fn at_most(most: usize, text: &str) {
    let (launches, price) = launches(text);
    assert!(launches <= most, "{launches} launches: {text}");
    assert!(price.is_finite() && price > 0.0, "{price} us: {text}");
}

#[test]
fn norm_linear_activation_and_residual_are_one_launch_at_any_row_count() {
    for rows in ROWS {
        for [inner, columns] in [[768, 768], [1600, 1600]] {
            at_most(
                1,
                &format!(
                    "x = input bf16[{rows},{inner}] ; n = layer_norm x g:bf16[{inner}] h:bf16[{inner}] eps=1e-5
                     l = linear n w:bf16[{inner},{columns}] c:bf16[{columns}] ; a = gelu l ; y = add x a ; out y"
                ),
            );
        }
    }
}

#[test]
fn a_feed_forward_network_is_two_launches_at_any_row_count() {
    for rows in ROWS {
        for inner in [768, 1600] {
            let hidden = 4 * inner;
            at_most(
                2,
                &format!(
                    "x = input bf16[{rows},{inner}] ; n = layer_norm x g:bf16[{inner}] h:bf16[{inner}] eps=1e-5
                     l = linear n w:bf16[{inner},{hidden}] c:bf16[{hidden}] ; a = gelu l
                     m = linear a v:bf16[{hidden},{inner}] d:bf16[{inner}] ; y = add x m ; out y"
                ),
            );
        }
    }
}

/// What the kernels of a graph launch on a GPU, without calls of the library.
fn entries(text: &str, arch: Arch) -> Vec<&'static str> {
    let graph: Graph = text.parse().unwrap();
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(arch) };
    let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
    let backend = Backend::Cuda(CudaTarget::new(arch, 132));
    let kernels = plan.groups.iter().map(|group| render(group.draft(&graph, &plan.placement), &backend).unwrap());
    let of = |kernel: Kernel| match &kernel.source {
        Source::Library(_) => Vec::new(),
        _ => kernel.launch.grids().expect("grids").list.iter().map(|grid| grid.entry).collect(),
    };
    kernels.flat_map(of).collect()
}

/// On Hopper, where the multiplications take much longer than splitting, whatever follows and however operands lie.
#[test]
fn operands_of_f32_are_split_where_that_pays() {
    let split = ["split_tf32", "matmul_hopper"];
    let square = "x = input f32[4096,4096] ; w = weight f32[4096,4096] ; y = matmul x w";
    let followed = format!("{square} ; z = gelu y ; out z");
    assert_eq!(entries(&format!("{square} ; out y"), Arch::Sm90a), split);
    assert_eq!(entries(&followed, Arch::Sm90a), split);
    assert_eq!(entries(&followed, Arch::Sm80), ["matmul_mma"]);
    let across =
        "x = input f32[1501,2047] ; w = weight f32[1999,1501] ; y = matmul x w transpose_a transpose_b ; out y";
    assert_eq!(entries(across, Arch::Sm90a), split);
    for text in [
        // Few rows, few of everything, sums that are too short, copies that are too large.
        "x = input f32[1,4096] ; w = weight f32[4096,4096] ; y = matmul x w ; z = gelu y ; out z",
        "x = input f32[16,4096] ; w = weight f32[4096,4096] ; y = matmul x w ; z = gelu y ; out z",
        "x = input f32[128,128] ; w = weight f32[128,128] ; y = matmul x w ; z = gelu y ; out z",
        "x = input f32[4096,63] ; w = weight f32[63,4096] ; y = matmul x w ; z = gelu y ; out z",
        "x = input f32[4096,65536] ; w = weight f32[65536,4097] ; y = matmul x w ; z = gelu y ; out z",
    ] {
        let entries = entries(text, Arch::Sm90a);
        assert!(!entries.contains(&"split_tf32"), "{entries:?}: {text}");
    }
}
