//! What a measured launch shape belongs to, and that it is used: no GPU is needed for it.

use deuteron::cuda::{Arch, CudaCatalog, CudaTarget, RowConfig, Tuning};
use deuteron::tune::{Timed, TuneReport, TunedKernel, launch_shapes};
use deuteron::{Dtype, FusedOp, Graph, Group, Machine, Strategy, Structure, Target, plan, render};
use deuteron_kernels::Backend;
use deuteron_kernels::row;

const ARCH: Arch = Arch::Sm90a;

/// The keys and launch shapes of the row kernels of a graph.
fn shapes(graph: &Graph, arch: Arch) -> Vec<(String, Vec<RowConfig>)> {
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(arch) };
    launch_shapes(graph, Strategy::Greedy, target, &CudaTarget::new(arch, 132)).unwrap()
}

/// The launch shapes that kernels are rendered with.
fn rendered(graph: &Graph, tuning: Tuning) -> Vec<RowConfig> {
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    let plan = plan(graph, target, Strategy::Greedy, &[]).unwrap();
    let cuda = CudaTarget { tuning, ..CudaTarget::new(ARCH, 132) };
    let backend = Backend::Cuda(cuda.clone());
    let rows = plan.groups.iter().filter(|group| group.structure == Structure::Row);
    let config = |group: &Group| {
        let draft = group.draft(graph, &plan.placement);
        let config = row::cuda::chosen(&draft, &cuda);
        assert_eq!(render(draft, &backend).unwrap().launch.variant().name, config.to_string());
        config
    };
    rows.map(config).collect()
}

fn norm(rows: usize, cols: usize, dtype: Dtype) -> Graph {
    let op = FusedOp::find("add_norm").unwrap();
    op.graph(&op.operand_types(rows, cols, dtype)).unwrap()
}

fn key(rows: usize, cols: usize, dtype: Dtype, arch: Arch) -> String {
    let [(key, _)] = shapes(&norm(rows, cols, dtype), arch).try_into().unwrap();
    key
}

#[test]
fn a_key_is_that_of_the_kernel_and_of_about_as_many_rows() {
    let one = key(8192, 768, Dtype::Bf16, ARCH);
    assert!(one.starts_with("sm_90a-") && !one.contains(char::is_whitespace), "{one}");
    for rows in [4097, 5000, 8191] {
        assert_eq!(key(rows, 768, Dtype::Bf16, ARCH), one, "{rows} rows");
    }
    let others = [
        key(4096, 768, Dtype::Bf16, ARCH),
        key(8193, 768, Dtype::Bf16, ARCH),
        key(8192, 760, Dtype::Bf16, ARCH),
        key(8192, 768, Dtype::F16, ARCH),
        key(8192, 768, Dtype::F32, ARCH),
        key(8192, 768, Dtype::Bf16, Arch::Sm80),
    ];
    for (index, other) in others.iter().enumerate() {
        assert!(other != &one && !others[..index].contains(other), "{index}: {other}");
    }
}

#[test]
fn every_launch_shape_can_be_kept_and_is_then_used() {
    let op = FusedOp::find("add_norm").unwrap();
    let backward = op.backward_graph(&op.operand_types(8192, 768, Dtype::Bf16)).unwrap();
    for graph in [norm(8192, 768, Dtype::Bf16), norm(100, 4099, Dtype::F32), backward] {
        let kernels = shapes(&graph, ARCH);
        assert_eq!(rendered(&graph, Tuning::default()).len(), kernels.len());
        for (position, (key, configs)) in kernels.iter().enumerate() {
            assert!(configs.len() > 1, "{key} has nothing to choose from");
            assert_eq!(rendered(&graph, Tuning::default())[position], configs[0], "the suggested one comes first");
            for config in configs {
                let mut kept = Tuning::default();
                kept.insert(key, config.clone());
                let read: Tuning = kept.to_string().parse().unwrap();
                assert!(rendered(&graph, read)[position].is_same(config), "{config}");
            }
        }
    }
}

#[test]
fn a_launch_shape_that_the_kernel_cannot_have_is_not_used() {
    let graph = norm(8192, 768, Dtype::Bf16);
    let (key, configs) = shapes(&graph, ARCH).swap_remove(0);
    // One column a thread: most of the row would be left out.
    let mut kept = Tuning::default();
    kept.insert(&key, RowConfig { vector: 1, chunks: 1, ..configs[0].clone() });
    let used = rendered(&graph, kept).swap_remove(0);
    assert!(used.is_same(&configs[0]));
    assert!(used.why.contains("does not fit"), "{used}");
}

#[test]
fn a_report_gives_the_table_to_keep() {
    let (key, configs) = shapes(&norm(8192, 768, Dtype::Bf16), ARCH).swap_remove(0);
    let timed = |config: &RowConfig, us: f64| Timed { config: config.clone(), us };
    let kernel = |key: &str, chosen: &RowConfig| TunedKernel {
        name: "add + layer_norm".into(),
        key: key.into(),
        suggested: timed(&configs[0], 52.0),
        chosen: timed(chosen, 50.0),
        tried: configs.len(),
        dropped: Vec::new(),
    };
    let report = TuneReport { kernels: vec![kernel(&key, &configs[1]), kernel("other", &configs[0])] };
    assert!(report.kernels[0].is_changed() && !report.kernels[1].is_changed());
    let mut tuning: Tuning = Tuning::default();
    tuning.insert(&key, configs[0].clone());
    tuning.insert("third", configs[0].clone());
    tuning.merge(report.tuning());
    assert_eq!(tuning.len(), 3, "what was not tuned stays");
    assert!(tuning.get(&key).unwrap().is_same(&configs[1]), "what was tuned is new");
    assert!(tuning.get("other").unwrap().is_same(&configs[0]), "what was confirmed is kept too");
    assert_eq!(tuning.to_string().parse::<Tuning>().unwrap().to_string(), tuning.to_string());
}
