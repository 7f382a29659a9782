//! Rows written into a cache on CUDA: a warp a row. A cache that is not kept in place is copied first.

use super::{CudaSource, CudaTarget, Family, Grid, Grids, Word};
use crate::source::{AppendShape, Geometry, Launch};
use crate::tile::{self, Part};

/// Threads of a block, as in `append.cu`.
const THREADS: usize = 256;
/// Leading axes that a kernel has room for, as in `append.cu`: all of a tensor's but two.
const AXES: usize = 6;
/// Bytes that one thread of the copy moves, as in `append.cu`.
const COPIED: usize = 64;
/// Blocks of a copy, at most; then threads move several pieces each.
const MAX_BLOCKS: usize = 1 << 16;

/// The kernels for elements of so many bytes.
pub(super) fn source(element: usize) -> CudaSource {
    let parts = tile::text(&[Part::DependentLaunch]);
    let text = format!("constexpr int ELEMENT = {element};\n\n{parts}\n{}", include_str!("append.cu"));
    CudaSource { name: "append".into(), text, family: Family::Append(element) }
}

/// The copy, where there is one, then the rows. There is a warp for each sequence at least, so that every position is looked
/// at.
pub(super) fn grids(element: usize, launch: &Launch, target: &CudaTarget) -> Grids {
    let Geometry::Append(shape) = &launch.geometry else { return Grids::default() };
    let argument = |position: usize, bytes: usize| {
        let offset = launch.args.get(position).map_or(0, |arg| arg.offset * bytes);
        Word::Argument { position, offset }
    };
    let number = |value: usize| Word::Number(value as u64);
    let [cache, rows, positions, result] = [0, 1, 2, 3].map(|i| argument(i, if i == 2 { 4 } else { element }));
    let whole = shape.blocks() * shape.capacity * shape.cols * element;
    let waits = target.arch.has_dependent_grids();
    let grid = |entry, blocks: usize, words| {
        let blocks = [blocks as u32, 1, 1];
        Grid { entry, blocks, threads: THREADS as u32, cluster: 1, shared: 0, waits, words }
    };
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
    use super::*;
    use crate::cuda::Arch;

    fn entries(rows: usize, in_place: bool) -> Vec<(&'static str, u32)> {
        let leading = vec![(2, 768), (3, 2304), (12, 64)];
        let shape = AppendShape { leading, batch: 1, rows, stride: 2304, capacity: 128, cols: 64, in_place };
        let launch = Launch { args: Vec::new(), geometry: Geometry::Append(shape) };
        grids(2, &launch, &CudaTarget::new(Arch::Sm80, 108))
            .list
            .iter()
            .map(|grid| (grid.entry, grid.blocks[0]))
            .collect()
    }

    #[test]
    fn a_cache_that_is_kept_in_place_is_not_copied() {
        assert_eq!(entries(1, true), [("append_rows", 9)]);
        assert_eq!(entries(1, false), [("append_copy", 72), ("append_rows", 9)]);
        // Positions are looked at without a row to write.
        assert_eq!(entries(0, true), [("append_rows", 1)]);
    }
}
