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
