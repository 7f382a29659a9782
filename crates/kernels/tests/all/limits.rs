//! Sizes that a kernel does not count right are offered by no family.

use deuteron_codegen::Source;
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_graph::Graph;
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_matmul::cuda::hopper::HopperKernel;
use deuteron_matmul::cuda::mma::MmaKernel;
use deuteron_matmul::cuda::skinny::SkinnyKernel;
use deuteron_plan::{Catalog, Machine, Plan, Strategy, Target, plan};

const ARCH: Arch = Arch::Sm90a;

fn planned(text: &str) -> (Graph, Plan) {
    let graph: Graph = text.parse().unwrap();
    let target = Target { machine: &Machine::profile("h200").unwrap(), catalog: CudaCatalog::of(ARCH) };
    let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
    (graph, plan)
}

/// The texts of a graph's kernels; the first error where one has none.
fn texts(text: &str) -> Result<Vec<String>, String> {
    let (graph, plan) = planned(text);
    let target = CudaTarget::new(ARCH, 132);
    let texts = plan.groups.iter().map(|group| {
        let draft = group.draft(&graph, &plan.placement);
        let made = render(draft, &Backend::Cuda(target.clone()));
        assert_eq!(made.is_ok(), CudaCatalog::of(ARCH).offers(&draft), "{text}");
        match made.map_err(|error| error.to_string())?.source {
            Source::Cuda(source) => Ok(source.text),
            _ => Ok(String::new()),
        }
    });
    texts.collect()
}

#[test]
fn rows_of_more_columns_than_32_bits_count_are_refused() {
    for op in ["softmax", "row_sum", "row_max"] {
        for columns in [1_usize << 31, 3_000_000_000, 5_000_000_000, (1 << 31) - 1] {
            let error = texts(&format!("x = input f32[2,{columns}] ; y = {op} x ; out y")).expect_err(op);
            assert!(error.contains("CUDA"), "{error}");
        }
    }
    let long = texts("x = input f32[2,2000000000] ; y = softmax x ; out y").unwrap();
    assert!(long.iter().any(|text| text.contains("constexpr int COLS = 2000000000;")));
}

#[test]
fn elements_are_counted_by_64_bits_where_they_are_many() {
    let texts = texts("x = input f32[2,3000000000] ; y = exp x ; out y").unwrap();
    assert!(
        texts.iter().all(|text| !text.contains("3000000000")),
        "no size of the graph is a constant of a flat kernel"
    );
}

#[test]
fn matmuls_of_more_columns_than_32_bits_count_are_no_kernels_of_ours() {
    let target = CudaTarget::new(ARCH, 132);
    let ours = |[m, k, n]: [usize; 3]| {
        let (graph, plan) =
            planned(&format!("x = input bf16[{m},{k}] ; w = weight bf16[{k},{n}] ; y = matmul x w ; out y"));
        let [group] = plan.groups.as_slice() else { panic!("{} kernels", plan.groups.len()) };
        let draft = group.draft(&graph, &plan.placement);
        let skinny = SkinnyKernel::of(&draft, &target).is_some();
        (skinny, HopperKernel::of(&draft, &target).is_some(), MmaKernel::of(&draft, &target).is_some())
    };
    assert_eq!(ours([1, 64, 1 << 20]), (true, true, true));
    let (large, limit) = (3_000_000_000, 1 << 30);
    for size in [large, limit] {
        assert_eq!(ours([1, 64, size]), (false, false, false), "columns: {size}");
        assert_eq!(ours([1, size, 64]), (false, false, false), "k: {size}");
        assert_eq!(ours([size, 64, 64]), (false, false, false), "rows: {size}");
    }
}
