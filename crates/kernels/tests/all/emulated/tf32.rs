//! Matmuls of f32 by warpgroups, whose operands are split into numbers of TF32 first.

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_graph::Dtype;
use deuteron_matmul::cuda::hopper::{HopperKernel, HopperTile};

use super::matmul::{Product, shared, tile};
use super::{Lanes, Launched, Mistake, TileProgram, check_mistakes, compiler, greedy};

const fn product(sizes: [usize; 3], left: bool, right: bool) -> Product {
    Product { left, dtype: Dtype::F32, ..Product::new(sizes, right) }
}

/// Its kernel, cut in some way, and its launches.
fn matmul(product: &Product, tile: HopperTile) -> (CudaSource, String) {
    let graph = product.graph();
    let plan = greedy(&graph);
    let group = plan.groups.iter().find(|group| group.structure.is_matmul()).expect("a matmul");
    let target = CudaTarget::new(Arch::Sm90a, 2);
    let kernel = HopperKernel::of(&group.draft(&graph, &plan.placement), &target).expect("a matmul for Hopper");
    assert!(kernel.tiles(&target, f64::INFINITY).contains(&tile), "{tile}");
    let Kernel { source: Source::Cuda(source), launch } = kernel.with_tile(tile).kernel(&target) else {
        panic!("a text")
    };
    let [split, multiply] = launch.grids().expect("grids").list.as_slice() else { panic!("two grids") };
    assert_eq!([split.entry, multiply.entry], ["split_tf32", "matmul_hopper"]);
    (source, product.launch(&graph, &launch, multiply))
}

/// All cuts and transpositions, odd starts and strides, sizes from 1 on that are no multiples of a tile's.
#[test]
fn matmuls_of_f32() {
    let Some(compiler) = compiler() else { return };
    for (name, product, tile) in [
        ("walk", product([300, 200, 100], false, true), tile(64, false, 1)),
        ("turns", product([300, 200, 136], false, false), tile(96, true, 1)),
        ("wide", product([130, 330, 64], true, true), tile(160, false, 1)),
        ("narrow", Product { skipped: 1, ..product([69, 150, 67], false, true) }, tile(144, false, 1)),
        ("batch", Product { batch: 2, skipped: 3, ..product([69, 51, 75], true, false) }, tile(96, false, 1)),
        ("shared", product([600, 136, 100], false, false), shared(tile(128, false, 1))),
        ("shared_turns", product([300, 70, 129], true, true), shared(tile(64, true, 1))),
        ("columns", product([130, 3, 70], false, true), tile(64, false, 1)),
        ("row", Product { skipped: 2, ..product([1, 17, 1500], false, false) }, tile(64, true, 1)),
    ] {
        let (source, launch) = matmul(&product, tile);
        let program =
            TileProgram::compile(compiler, &format!("tf32_{name}"), "matmul.cpp", "matmul_hopper", &source.text);
        let (ok, said) = program.run(&launch, 2, Lanes::Together, 1..3, 0);
        assert!(ok, "{name}:\n{said}");
    }
}

#[test]
fn mistakes_with_f32() {
    let mistakes: [Mistake; 10] = [
        ("if (ALTERNATES) named_barrier_arrive(TURN_BARRIER + (first ^ 1), MULTIPLIERS);", "", "deadlock"),
        ("batch * PASSES + step % PASSES", "batch * PASSES", "FAILED"),
        ("PASSES - 1 - step % PASSES", "step % PASSES", "FAILED"),
        ("step / PASSES * DEPTH", "step * DEPTH", "FAILED"),
        ("await_stage<COPIED>(ring, at + 1);", "", "in flight"),
        ("add_product(sums, ring, first, side, at + 1, at + 1, false);", "", "FAILED"),
        ("add_product(sums, ring, first, side, at, at + 1, false);", "", "FAILED"),
        ("release(ring.empty(at));", "", "deadlock"),
        ("at % fours * 4", "at % fours * 2", "FAILED"),
        ("s_tile[i][x] = word;", "s_tile[x][i] = word;", "FAILED"),
    ];
    let product = Product { batch: 2, ..product([150, 70, 331], false, false) };
    let (source, launch) = matmul(&product, tile(64, false, 1));
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "matmul.cpp" };
    check_mistakes("mistakes_with_f32", launched, 2, 2, &mistakes);
}

/// What is infinite or no number in f32 is so, and nothing else is; of operands that lie either way.
#[test]
fn extremes_of_f32() {
    let Some(compiler) = compiler() else { return };
    for (name, product, tile) in [
        ("lines", product([70, 50, 100], false, true), tile(64, false, 1)),
        ("across", Product { batch: 2, ..product([20, 70, 79], true, false) }, tile(96, true, 1)),
    ] {
        let (source, launch) = matmul(&product, tile);
        let name = format!("tf32_extremes_{name}");
        let program = TileProgram::compile(compiler, &name, "tf32_extremes.cpp", "matmul_hopper", &source.text);
        let (ok, said) = program.run(&launch, 2, Lanes::Together, 1..3, 0);
        assert!(ok, "{name}:\n{said}");
    }
}

#[test]
fn mistakes_with_extremes_of_f32() {
    let mistakes: [Mistake; 6] = [
        (
            "return {nearest, round(__float_as_uint(rest))};",
            "return {nearest, size < 0x08000000u ? 0u : round(__float_as_uint(rest))};",
            "FAILED",
        ),
        ("size >= 0x7f7ff000u ? x & 0xffffe000u : round(x)", "round(x)", "FAILED"),
        ("*s_sum = sum_again(p, row_of(row), column + own);", "", "FAILED"),
        ("batch * p.given[0].matrix", "0", "FAILED"),
        ("(u64)row % p.m * p.given[0].line", "0", "FAILED"),
        ("column * p.given[1].line", "0", "FAILED"),
    ];
    let product = Product { batch: 2, skipped: 1, ..product([30, 70, 67], false, true) };
    let (source, launch) = matmul(&product, tile(64, false, 1));
    let launched = Launched { source, entry: "matmul_hopper", launch, driver: "tf32_extremes.cpp" };
    check_mistakes("mistakes_with_extremes_of_f32", launched, 2, 2, &mistakes);
}
