//! Matmuls of 5 to 16 rows by matrix units: which groups become one, what it is launched with, and that the real compiler takes it without
//! spills. No GPU and no driver are needed.

use crate::support::{compiled, compiler};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Grid};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::{Dtype, Graph};
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_plan::{Machine, Strategy, Target, plan};

const ARCHS: [Arch; 5] = [Arch::Sm80, Arch::Sm89, Arch::Sm90a, Arch::Sm100, Arch::Sm120];

/// Sources and grids of the kernels of a graph; none for a call of the library.
fn kernels(text: &str, dtype: Dtype, arch: Arch) -> Vec<Option<(CudaSource, Grid)>> {
    let graph: Graph = text.replace("float", &dtype.to_string()).parse().unwrap();
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(arch) };
    let planned = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
    let backend = Backend::Cuda(CudaTarget::new(arch, 132));
    let made = planned.groups.iter().map(|group| {
        let Kernel { source, launch } = render(group.draft(&graph, &planned.placement), &backend).unwrap();
        let Source::Cuda(source) = source else { return None };
        launch.grids().and_then(|grids| grids.list.first()).map(|grid| (source, grid.clone()))
    });
    made.collect()
}

/// The only kernel of a graph, if it is one by matrix units.
fn strips(text: &str, dtype: Dtype, arch: Arch) -> Option<(CudaSource, Grid)> {
    match kernels(text, dtype, arch).as_slice() {
        [Some((source, grid))] if source.name == "matmul_strips" => Some((source.clone(), grid.clone())),
        _ => None,
    }
}

/// Weights both ways, with and without row work before and elementwise work after.
fn graphs([m, k, n]: [usize; 3]) -> Vec<String> {
    let x = format!("x = input float[{m},{k}]");
    vec![
        format!("{x} ; l = linear x m:float[{k},{n}] c:float[{n}] ; y = gelu l ; out y"),
        format!("{x} ; h = layer_norm x w:float[{k}] b:float[{k}] ; y = matmul h m:float[{k},{n}] ; out y"),
        format!(
            "{x} ; m = weight float[{n},{k}] ; r = input float[{m},{n}] ; l = matmul x m transpose_b ; y = add l r ; out y"
        ),
    ]
}

#[test]
fn every_kernel_by_matrix_units_compiles_without_spills() {
    let Some(compiler) = compiler() else { return };
    let mut kernels = Vec::new();
    for (at, arch) in ARCHS.into_iter().enumerate() {
        // Strips that are walked over, parts of K where there are clusters, columns that no vector divides.
        for (turn, size) in [[8, 768, 3072], [16, 3072, 768], [5, 768, 50264]].into_iter().enumerate() {
            let text = &graphs(size)[(at + turn) % 3];
            let dtype = if (at + turn) % 2 == 0 { Dtype::Bf16 } else { Dtype::F16 };
            let Some((source, _)) = strips(text, dtype, arch) else {
                // Where K cannot be shared, rows of A may not fit a block.
                assert!(!arch.has_clusters() || arch == Arch::Sm120, "{arch}: {text}");
                continue;
            };
            kernels.push((format!("{dtype} {arch}: {text}"), (source, arch)));
        }
    }
    let odd = "x = input float[9,64] ; m = weight float[131,64] ; y = matmul x m transpose_b ; out y";
    kernels.push((odd.to_string(), (strips(odd, Dtype::Bf16, Arch::Sm90a).expect("strips").0, Arch::Sm90a)));
    assert!(kernels.len() > 12, "{}", kernels.len());
    let (labels, sources): (Vec<String>, Vec<_>) = kernels.into_iter().unzip();
    for (label, cubin) in labels.iter().zip(compiled(&compiler, sources)) {
        let entry = &cubin.entries[0];
        assert_eq!(entry.spill_stores + entry.spill_loads, 0, "{label}: {} registers", entry.registers);
        assert!(entry.registers <= 128, "{label}: {} registers", entry.registers);
    }
}

#[test]
fn launches_by_matrix_units_are_within_the_limits() {
    for size in [[5, 768, 3072], [8, 3072, 768], [16, 768, 50264], [9, 16, 8], [16, 8, 24], [12, 12288, 4096]] {
        for (arch, text) in ARCHS.into_iter().flat_map(|arch| graphs(size).into_iter().map(move |text| (arch, text))) {
            let Some((_, grid)) = strips(&text, Dtype::Bf16, arch) else { continue };
            assert!(grid.shared as usize + 1024 <= arch.block_shared(), "{arch}: {text}: {grid:?}");
            assert!(grid.cluster == 1 || arch.has_clusters(), "{arch}: {text}: {grid:?}");
            assert!(grid.blocks[0] > 0 && grid.blocks[0].is_multiple_of(grid.cluster), "{arch}: {text}: {grid:?}");
        }
    }
}

/// What a plan was promised holds on a GPU with any number of multiprocessors.
#[test]
fn whether_matrix_units_take_it_depends_on_no_multiprocessors() {
    let machine = Machine::profile("h200").unwrap();
    for (arch, k) in ARCHS.into_iter().flat_map(|arch| [64, 768, 2304, 2560, 3072, 16384].map(|k| (arch, k))) {
        for n in [8, 504, 512, 3072, 50264] {
            let text =
                format!("x = input bf16[12,{k}] ; h = silu x ; m = weight bf16[{k},{n}] ; y = matmul h m ; out y");
            let graph: Graph = text.parse().unwrap();
            let target = Target { machine: &machine, catalog: CudaCatalog::of(arch) };
            let planned = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
            for processors in [1, 8, 24, 84, 132, 148, 400] {
                let backend = Backend::Cuda(CudaTarget::new(arch, processors));
                for group in &planned.groups {
                    let made = render(group.draft(&graph, &planned.placement), &backend);
                    assert!(made.is_ok(), "{arch}, {processors} multiprocessors: {text}: {:?}", made.err());
                }
            }
        }
    }
}

#[test]
fn matrix_units_take_5_to_16_rows_of_16_bits() {
    let taken = |rows: usize, k: usize, dtype: Dtype, arch: Arch| {
        let text = format!("x = input float[{rows},{k}] ; m = weight float[{k},3072] ; y = matmul x m ; out y");
        strips(&text, dtype, arch).is_some()
    };
    for (rows, expected) in [(1, false), (4, false), (5, true), (16, true), (17, false)] {
        assert_eq!(taken(rows, 768, Dtype::Bf16, Arch::Sm90a), expected, "{rows} rows");
    }
    // Other types, lines that start between vectors, and GPUs without copies past the registers.
    assert!(!taken(8, 768, Dtype::F32, Arch::Sm90a) && !taken(8, 764, Dtype::Bf16, Arch::Sm90a));
    assert!(!taken(8, 768, Dtype::F16, Arch::Sm75) && taken(8, 768, Dtype::F16, Arch::Sm80));
}
