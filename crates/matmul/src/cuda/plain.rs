//! Products by a kernel of ours: any strides, any size, no library. It is slower than the library's by far, and serves where
//! that has no algorithm or is not installed.

use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::library::{LibraryCall, LibraryMatmul, Operand};
use deuteron_codegen::tile::{self, Part};
use deuteron_graph::{Dtype, MAX_RANK};

/// Side of a tile, as in `plain.cu`.
const TILE: usize = 64;
/// Threads of a block, as in `plain.cu`.
const THREADS: u32 = 256;
/// Batch axes, as in `plain.cu`: a matrix takes two axes of a tensor.
const AXES: usize = MAX_RANK - 2;
/// Blocks of a grid, at most: blocks take several tiles each beyond that.
const MAX_BLOCKS: usize = 1 << 30;

/// The kernel for a storage type and an epilogue.
pub fn source(kernel: &LibraryCall) -> CudaSource {
    let storage = match kernel.dtype {
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
        Dtype::I8 => 3,
        _ => 0,
    };
    let prelude = format!(
        "constexpr int STORAGE = {storage};\nconstexpr bool BIAS = {};\nconstexpr bool GELU = {};\n\
         constexpr bool RESIDUAL = {};\n",
        kernel.epilogue.has_bias(),
        kernel.epilogue.has_gelu(),
        kernel.epilogue.has_residual(),
    );
    let text = [&prelude, &tile::text(&[Part::Conversions]), include_str!("plain.cu")].join("\n");
    CudaSource::new("product", text)
}

/// Its one grid; none where there is nothing to write.
pub fn grids(matmul: &LibraryMatmul) -> Grids {
    let LibraryMatmul { call: kernel, shape, args } = matmul;
    let batches = shape.batches();
    let tiles = batches * shape.m.div_ceil(TILE) * shape.n.div_ceil(TILE);
    if tiles == 0 {
        return Grids::default();
    }
    let number = |value: usize| Word::Number(value as u64);
    let argument = |operand: Operand| {
        let position = kernel.operands().iter().position(|&known| known == operand);
        position.map_or(Word::Number(0), |position| {
            let offset = args.get(position).map_or(0, |arg| arg.offset) * kernel.operand_dtype(operand).bytes();
            Word::Argument { position, offset }
        })
    };
    let mut words: Vec<Word> =
        [Operand::A, Operand::B, Operand::Bias, Operand::Residual, Operand::C].map(argument).to_vec();
    words.extend([shape.m, shape.n, shape.k].map(number));
    words.extend([shape.a.0, shape.a.1, shape.b.0, shape.b.1, shape.c.0, shape.c.1].map(number));
    words.push(number(batches));
    // Axes of one batch stand before the others.
    let missing = AXES.saturating_sub(shape.batch.len());
    words.extend(std::iter::repeat_n([1, 0, 0, 0], missing).chain(shape.batch.iter().copied()).flatten().map(number));
    let grid = Grid::new("product", tiles.min(MAX_BLOCKS), THREADS, words);
    Grids { list: vec![grid], ..Grids::default() }
}

#[cfg(test)]
mod tests {
    use deuteron_graph::Graph;

    use super::*;
    use deuteron_codegen::argument::ArgBinding;
    use deuteron_codegen::library::LibraryEpilogue;
    use deuteron_codegen::matmul_shape::MatmulShape;

    fn product_grids(call: &LibraryCall, shape: &MatmulShape, offsets: &[usize]) -> Grids {
        let graph: Graph = "x = input bf16[1] ; out x".parse().unwrap();
        let arg = |&offset: &usize| ArgBinding::whole(&graph, graph.inputs()[0], offset, false);
        let args = offsets.iter().map(arg).collect();
        grids(&LibraryMatmul { call: *call, shape: shape.clone(), args })
    }

    fn shape(batch: Vec<[usize; 4]>) -> MatmulShape {
        MatmulShape { m: 65, n: 128, k: 7, batch, a: (7, 1), b: (1, 9), c: (128, 1) }
    }

    #[test]
    fn the_words_are_the_fields_of_the_parameter_in_order() {
        let kernel = LibraryCall { dtype: Dtype::Bf16, epilogue: LibraryEpilogue::Residual };
        let grids = product_grids(&kernel, &shape(vec![[3, 455, 0, 8320]]), &[1, 2, 3, 4]);
        let [grid] = &grids.list[..] else { panic!("one grid") };
        let at = |position: usize, offset: usize| Word::Argument { position, offset };
        assert_eq!(grid.words[..5], [at(0, 2), at(1, 4), Word::Number(0), at(2, 6), at(3, 8)]);
        let numbers: Vec<u64> = grid.words[5..]
            .iter()
            .map(|word| match word {
                Word::Number(number) => *number,
                word => panic!("{word:?}"),
            })
            .collect();
        let mut expected = vec![65, 128, 7, 7, 1, 1, 9, 128, 1, 3];
        (0..AXES - 1).for_each(|_| expected.extend([1, 0, 0, 0]));
        expected.extend([3, 455, 0, 8320]);
        assert_eq!(numbers, expected);
        assert_eq!((grid.blocks, grid.threads), ([3 * 2 * 2, 1, 1], 256));
    }

    #[test]
    fn bytes_give_floats() {
        let grids = product_grids(&LibraryCall::plain(Dtype::I8), &shape(vec![]), &[1, 2, 3]);
        let at = |position: usize, offset: usize| Word::Argument { position, offset };
        assert_eq!(grids.list[0].words[..5], [at(0, 1), at(1, 2), Word::Number(0), Word::Number(0), at(2, 12)]);
    }

    #[test]
    fn nothing_to_write_is_no_grid_and_nothing_to_sum_is_one() {
        let plain = LibraryCall::plain(Dtype::F32);
        let grids = |shape: &MatmulShape| product_grids(&plain, shape, &[0, 0, 0]).list.len();
        assert_eq!(grids(&MatmulShape { m: 0, ..shape(vec![]) }), 0);
        assert_eq!(grids(&shape(vec![[2, 0, 0, 0], [0, 0, 0, 0]])), 0);
        assert_eq!(grids(&MatmulShape { k: 0, ..shape(vec![]) }), 1);
    }

    #[test]
    fn a_source_differs_by_storage_type_and_epilogue() {
        let mut texts: Vec<String> = Vec::new();
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            texts.extend(LibraryEpilogue::ALL.map(|epilogue| source(&LibraryCall { dtype, epilogue }).text));
        }
        texts.sort();
        texts.dedup();
        assert_eq!(texts.len(), 18);
        assert!(texts.iter().all(|text| !text.contains("#include")));
    }
}
