//! The rungs of a matmul that are written to be read.

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::{Dtype, Graph};
use deuteron_kernels::ladder::{Ladder, Rung};

use super::{Lanes, Launched, TileProgram, check_mistakes, compiler, greedy, written};

/// The kernel of a rung for a matmul of rows, columns and inner size, and its launch as `emulator/matmul.cpp` reads it.
fn rung_of(rung: &Rung, [m, n, k]: [usize; 3], dtype: Dtype) -> (CudaSource, String) {
    let text = format!("x = input {dtype}[{m},{k}] ; w = input {dtype}[{k},{n}] ; y = matmul x w ; out y");
    let graph: Graph = text.parse().unwrap();
    let plan = greedy(&graph);
    let [group] = plan.groups.as_slice() else { panic!("not one kernel: {plan}") };
    let target = CudaTarget::new(Arch::Sm90a, 2);
    let kernel = rung.kernel(&group.draft(&graph, &plan.placement), &target).expect("a rung of a matmul");
    let Kernel { source: Source::Cuda(source), launch } = kernel else { panic!("a text") };
    let [grid] = launch.grids().expect("grids").list.as_slice() else { panic!("one grid") };
    let storage = if dtype == Dtype::F16 { 1 } else { 2 };
    (source, format!("matmul {m} {n} {k} 1 0 0 {storage} {storage} 0\narguments 3 x w y\nalone\n{}", written(grid)))
}

/// Both types, rows that start at multiples of 16 bytes and others; sizes that fill no tile, and one.
#[test]
fn rungs_of_a_matmul() {
    let Some(compiler) = compiler() else { return };
    for rung in &Ladder::Matmul.rungs()[..4] {
        for (name, dtype, sizes) in [
            ("aligned", Dtype::Bf16, &[[72, 136, 40]][..]),
            ("odd", Dtype::F16, &[[129, 131, 37], [1, 1, 1], [3, 51, 129]]),
        ] {
            let (name, text) = (format!("ladder_{}_{name}", rung.name), rung_of(rung, sizes[0], dtype).0.text);
            let program = TileProgram::compile(compiler, &name, "matmul.cpp", "matmul", &text);
            for &sizes in sizes {
                let (source, launch) = rung_of(rung, sizes, dtype);
                assert_eq!(source.text, text, "{name}");
                let (ok, said) = program.run(&launch, 2, Lanes::Together, 1..2, 0);
                assert!(ok, "{name} {sizes:?}:\n{said}");
            }
        }
    }
}

#[test]
fn mistakes_of_rungs() {
    // Both barriers of a step, told apart.
    let (filled, done) = ("__syncthreads();", "__syncthreads() ;");
    let tiled = [("row < rows && column < columns", "row < rows"), ("row < p.m && column < p.n", "row < p.m")];
    let vectorised = [("column + i < columns", "true"), ("s_a[l][16 + y]", "s_a[l][y]")];
    let matrices = [("column + 1 < p.n", "true"), ("column + 8 * j + lane / 16 * 8", "column + 8 * j")];
    for (index, own) in [(1, tiled), (2, vectorised), (3, matrices)] {
        let rung = &Ladder::Matmul.rungs()[index];
        let (source, launch) = rung_of(rung, [70, 51, 37], Dtype::Bf16);
        let text = source.text.replace("__syncthreads();  //", "__syncthreads() ;  //");
        let launched =
            Launched { source: CudaSource { text, ..source }, entry: "matmul", launch, driver: "matmul.cpp" };
        let mistakes = [(filled, ""), (done, ""), own[0], own[1]].map(|(right, wrong)| (right, wrong, "FAILED"));
        check_mistakes(&format!("mistakes_of_{}", rung.name), launched, 1, 2, &mistakes);
    }
}
