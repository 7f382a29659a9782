use deuteron_codegen::cuda::arch::Arch;
use deuteron_codegen::library::LibraryEpilogue;

use super::time::library_us;
use super::*;
use deuteron_codegen::argument::ArgBinding;

fn shape(m: usize, k: usize, n: usize) -> MatmulShape {
    MatmulShape { m, n, k, batch: Vec::new(), a: (k, 1), b: (n, 1), c: (n, 1) }
}

/// A plain matmul, cut as it is predicted to be done first.
fn plain(m: usize, k: usize, n: usize) -> HopperKernel {
    of_operands(Dtype::Bf16, m, k, n)
}

fn of_operands(operands: Dtype, m: usize, k: usize, n: usize) -> HopperKernel {
    HopperKernel::new(lowered(operands, [m, k, n], false), &CudaTarget::new(Arch::Sm90a, 132)).unwrap()
}

fn lowered(operands: Dtype, [m, k, n]: [usize; 3], routed: bool) -> LoweredMatmul {
    let shape = shape(m, k, n);
    let launch = MatmulLaunch { args: Vec::new(), shape, prologue_axes: Vec::new(), axes: Vec::new() };
    let product = Matmul {
        left: operands,
        right: operands,
        result: Types::of(operands).sums,
        rights: 1,
        routed,
        prologue: None,
        epilogue: None,
    };
    LoweredMatmul { product, launch }
}

#[test]
fn many_tiles_are_walked_over_and_few_are_not() {
    assert_eq!(plain(8192, 768, 3072).tile, HopperTile { columns: 192, ..TURNS });
    // One tile for each of 128 blocks.
    let few = plain(1024, 768, 3072).tile;
    assert_eq!((few.rows * few.columns, few.sharing, few.split), (128 * 192, Sharing::Rows, 1));
    // K is shared where there are fewer tiles than multiprocessors.
    assert!(plain(64, 8192, 256).tile.split > 1);
}

#[test]
fn tiles_of_bytes_are_taken_in_turn_where_there_are_many() {
    let turns = |m, k, n| of_operands(Dtype::I8, m, k, n).tile.sharing == Sharing::Turns;
    assert_eq!(of_operands(Dtype::I8, 4096, 4096, 4096).tile, TURNS);
    assert!(turns(8192, 768, 3072) && !turns(1024, 768, 3072) && !turns(1024, 3072, 768));
    // Routed rows are gathered more slowly: wide tiles gather them less often.
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let routed = |dtype| HopperKernel::routed(lowered(dtype, [16384, 4096, 4096], true), 132, &target).unwrap();
    let columns = |dtype| routed(dtype).tile.columns;
    assert_eq!((columns(Dtype::I8), columns(Dtype::Bf16)), (256, 192));
}

/// Operands of f32 are split where that is long before the multiplications end.
#[test]
fn f32_is_split_where_it_pays() {
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let us = |m, k, n| of_operands(Dtype::F32, m, k, n).microseconds(&target);
    assert_eq!(of_operands(Dtype::F32, 4096, 4096, 4096).tile, HopperTile { sharing: Sharing::Rows, ..TURNS });
    let library = |m, k, n| mma::library_f32_us(&shape(m, k, n), &target);
    assert!(us(4096, 4096, 4096) < 0.6 * library(4096, 4096, 4096) && us(8192, 768, 2304) < library(8192, 768, 2304));
    assert!(us(16, 4096, 4096) > library(16, 4096, 4096) && us(256, 256, 256) > library(256, 256, 256));
}

#[test]
fn the_library_keeps_what_it_does_faster() {
    let ours = |m, k, n| {
        let kernel = plain(m, k, n);
        let theirs = library_us(&kernel.launch.shape, LibraryEpilogue::None);
        kernel.microseconds(&CudaTarget::new(Arch::Sm90a, 132)) < theirs
    };
    assert!(ours(8192, 768, 2304) && ours(32768, 768, 3072) && ours(8192, 768, 50304));
    assert!(!ours(2048, 3072, 768) && !ours(768, 8192, 2304) && !ours(64, 768, 2304));
    // Of few rows, a long K is shared by blocks of a cluster.
    assert!(ours(9, 3072, 768) && ours(16, 3072, 768) && ours(128, 3072, 768));
}

#[test]
fn every_cut_has_room_in_shared_memory() {
    let shape = shape(300, 1024, 200);
    for (operands, tile) in [Dtype::Bf16, Dtype::I8, Dtype::F32]
        .into_iter()
        .flat_map(|of| tiles(&shape, Types::of(of)).map(move |tile| (of, tile)))
    {
        for b in [(200, 1), (1, 1024)] {
            let mut kernel = of_operands(operands, 300, 1024, 200).with_tile(tile);
            kernel.launch.shape.b = b;
            assert!(kernel.shared() <= SHARED && kernel.stages() >= 3, "{tile}: {} stages", kernel.stages());
        }
    }
}

#[test]
fn maps_need_starts_and_strides_of_16_bytes() {
    let graph: deuteron_graph::Graph = "x = input bf16[1] ; out x".parse().unwrap();
    let arg = |offset| ArgBinding::whole(&graph, graph.inputs()[0], offset, false);
    assert!(is_fit_for_map((768, 1), &arg(0), None) && is_fit_for_map((1, 768), &arg(8), Some(0)));
    assert!(!is_fit_for_map((50257, 1), &arg(0), None));
    assert!(!is_fit_for_map((768, 1), &arg(3), None));
    assert!(!is_fit_for_map((768, 1), &arg(0), Some(100)));
    assert!(!is_fit_for_map((768, 2), &arg(0), None));
}

/// More than it began with, a block would wait for forever.
#[test]
fn a_block_has_the_registers_that_its_warpgroups_ask_for() {
    for [fetching, multiplying] in [REGISTERS, MAKING_REGISTERS] {
        assert!(fetching + 2 * multiplying <= 3 * 168 && fetching % 8 == 0 && multiplying % 8 == 0);
    }
}
