//! Rows written into a cache on CUDA: one warp per row. A cache that is not kept in place is copied first.

use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::tile::{self, Part};
use deuteron_plan::primitive_work;

use super::{Append, AppendShape};

/// Threads of a block, as in `append.cu`.
const THREADS: usize = 256;
/// Maximum number of leading axes, as in `append.cu`: all of a tensor's axes except two.
const AXES: usize = 6;
/// Bytes that one thread of the copy moves, as in `append.cu`.
const COPIED: usize = 64;
/// Maximum blocks of a copy; beyond that, each thread moves several pieces.
const MAX_BLOCKS: usize = 1 << 16;

/// Rows written into a cache on a GPU.
pub(crate) struct AppendFamily;

impl Family<CudaTarget> for AppendFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let append = Append::lower(&request)?;
        offered(move || primitive_work(&request.group), move || kernel(&append, target))
    }
}

/// The kernels of an append.
fn kernel(append: &Append, target: &CudaTarget) -> Kernel {
    let parts = tile::text(&[Part::DependentLaunch]);
    let text = format!("constexpr int ELEMENT = {};\n\n{parts}\n{}", append.element, include_str!("append.cu"));
    let launch = Launch::of_grids(append.arguments(), grids(append, target));
    let launch = launch.with_lookups(append.lookups());
    Kernel::new(Source::Cuda(CudaSource::new("append", text)), launch)
}

/// The copy, where there is one, then the rows. There is a warp for each sequence at least, so that every position is
/// checked.
fn grids(append: &Append, target: &CudaTarget) -> Grids {
    let Append { element, args, shape } = append;
    let element = *element;
    let [cache, rows, positions, result] =
        [0, 1, 2, 3].map(|position| Word::Argument { position, offset: args[position].start() });
    let number = |value: usize| Word::Number(value as u64);
    let whole = shape.blocks() * shape.capacity * shape.cols * element;
    let waits = target.arch.has_dependent_grids();
    let grid = |entry, blocks: usize, words| Grid { waits, ..Grid::new(entry, blocks, THREADS as u32, words) };
    let mut list = Vec::new();
    if !shape.in_place {
        let blocks = whole.div_ceil(THREADS * COPIED).min(MAX_BLOCKS);
        list.push(grid("append_copy", blocks, vec![result, cache, number(whole)]));
    }
    let count = shape.blocks() * shape.rows;
    let mut words = vec![result, rows, positions, Word::Fault];
    words.extend([count, shape.sequences(), shape.places(), shape.rows].map(number));
    words.extend([shape.stride * element, shape.capacity, shape.cols * element, shape.batch].map(number));
    words.push(number(shape.leading.len()));
    words.extend(axes(shape, element));
    list.push(grid("append_rows", count.max(shape.sequences()).div_ceil(THREADS / 32), words));
    Grids { list, checks_indices: shape.sequences() > 0, ..Grids::default() }
}

/// Size and stride in bytes of every axis the kernel has room for, outermost first.
fn axes(shape: &AppendShape, element: usize) -> impl Iterator<Item = Word> {
    let axis = move |index: usize| shape.leading.get(index).map_or([1, 0], |&(size, stride)| [size, stride * element]);
    (0..AXES).flat_map(axis).map(|value| Word::Number(value as u64))
}

#[cfg(test)]
mod tests {
    use deuteron_graph::Graph;

    use super::*;
    use deuteron_codegen::argument::ArgBinding;
    use deuteron_codegen::cuda::arch::Arch;

    fn entries(rows: usize, in_place: bool) -> Vec<(&'static str, u32)> {
        let leading = vec![(2, 768), (3, 2304), (12, 64)];
        let shape = AppendShape { leading, batch: 1, rows, stride: 2304, capacity: 128, cols: 64, in_place };
        let graph: Graph = "x = input bf16[1] ; out x".parse().unwrap();
        let arg = || ArgBinding::whole(&graph, graph.inputs()[0], 0, false);
        let append = Append { element: 2, args: [arg(), arg(), arg(), arg()], shape };
        grids(&append, &CudaTarget::new(Arch::Sm80, 108)).list.iter().map(|grid| (grid.entry, grid.blocks[0])).collect()
    }

    #[test]
    fn a_cache_that_is_kept_in_place_is_not_copied() {
        assert_eq!(entries(1, true), [("append_rows", 9)]);
        assert_eq!(entries(1, false), [("append_copy", 72), ("append_rows", 9)]);
        // Positions are looked at without a row to write.
        assert_eq!(entries(0, true), [("append_rows", 1)]);
    }
}
