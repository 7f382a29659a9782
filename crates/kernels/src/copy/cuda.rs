//! Strided copies on CUDA: runs that are contiguous on both sides, or tiles for two transposed axes.
//!
//! All sizes are words of the launch: one kernel for each size of element serves every shape.

use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_plan::primitive_work;

use super::{Copy, Piece};

/// Threads of a block, as in `copy.cu`.
const THREADS: usize = 256;
/// Vectors that a thread has in flight, as in `copy.cu`.
const UNROLL: usize = 4;
/// Axes of a launch, as in `copy.cu`: as many as a shape may have.
const AXES: usize = 8;
/// Side of a tile, as in `copy.cu`.
const TILE: usize = 64;
/// Bytes that one block moves: longer runs are cut, so that one long run keeps every multiprocessor busy.
const CHUNK: usize = THREADS * UNROLL * 16;
/// Runs and tiles of one grid stay below this, so that divisions by multiplication are exact.
const LIMIT: usize = 1 << 31;
/// Axes shorter than this do not use tiles.
const TILED_FROM: usize = 8;

/// Copies on a GPU.
pub(crate) struct CopyFamily;

impl Family<CudaTarget> for CopyFamily {
    fn offer<'a>(&self, request: Request<'a>, _: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let copy = Copy::lower(&request.group)?;
        offered(move || primitive_work(&request.group), move || kernel(&copy))
    }
}

/// The kernel of a copy: one text for each size of element, 1, 2 or 4 bytes.
pub fn kernel(copy: &Copy) -> Kernel {
    let text = format!("constexpr int ELEMENT = {};\n{}", copy.element, include_str!("copy.cu"));
    let launch = Launch::of_grids(copy.arguments(), grids(copy));
    Kernel::new(Source::Cuda(CudaSource::new("copy", text)), launch)
}

/// One grid for each piece, and more where a piece has more runs than one grid may.
fn grids(copy: &Copy) -> Grids {
    let Copy { element, args, pieces } = copy;
    let (element, destination) = (*element, args.len().saturating_sub(1));
    let mut list = Vec::new();
    for piece in pieces.iter().filter(|piece| !piece.dims.contains(&0)) {
        let offset = |position: usize| args.get(position).map_or(0, |arg| arg.offset);
        let block = StridedBlock {
            element,
            source: piece.source,
            destination,
            from: (offset(piece.source) + piece.from_offset) * element,
            to: (offset(destination) + piece.to_offset) * element,
            axes: merged(piece),
        };
        match block.tiles() {
            Some(grid) => list.push(grid),
            None => block.runs(&mut list),
        }
    }
    Grids { list, ..Grids::default() }
}

/// An axis of a block: strides in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Axis {
    size: usize,
    from: usize,
    to: usize,
}

/// The axes of a piece, outermost first; those that follow each other on both sides are one.
fn merged(piece: &Piece) -> Vec<Axis> {
    let mut axes: Vec<Axis> = Vec::new();
    for ((&size, &from), &to) in piece.dims.iter().zip(&piece.from).zip(&piece.to) {
        match axes.last_mut() {
            _ if size == 1 => {}
            Some(last) if last.from == from * size && last.to == to * size => {
                *last = Axis { size: last.size * size, from, to };
            }
            _ => axes.push(Axis { size, from, to }),
        }
    }
    axes
}

/// A strided block to move: offsets in bytes, strides in elements.
struct StridedBlock {
    element: usize,
    source: usize,
    destination: usize,
    from: usize,
    to: usize,
    axes: Vec<Axis>,
}

impl StridedBlock {
    /// One grid of tiles, if two axes change places: the source runs along one, the destination along the other.
    fn tiles(&self) -> Option<Grid> {
        let long = |axis: &Axis| axis.size >= TILED_FROM;
        let across = self.axes.iter().position(|axis| axis.from == 1 && axis.to != 1 && long(axis))?;
        let along = self.axes.iter().position(|axis| axis.to == 1 && axis.from > 1 && long(axis))?;
        let (p, q) = (self.axes[across], self.axes[along]);
        let tile = |axis: Axis| Axis { size: axis.size.div_ceil(TILE), from: axis.from * TILE, to: axis.to * TILE };
        let mut axes = vec![tile(q), tile(p)];
        axes.extend((0..self.axes.len()).rev().filter(|&i| i != across && i != along).map(|i| self.axes[i]));
        let blocks = count(&axes);
        if blocks >= LIMIT || axes.len() > AXES {
            return None;
        }
        let mut words = self.ends(self.from, self.to);
        let strides = [p.size, q.size, q.from * self.element, p.to * self.element, axes.len()];
        words.extend(strides.map(|number| Word::Number(number as u64)));
        words.extend(axis_words(&axes, self.element));
        Some(Grid::new("copy_tiles", blocks, THREADS as u32, words))
    }

    /// Grids of runs.
    fn runs(&self, list: &mut Vec<Grid>) {
        let (run, outer) = match self.axes.split_last() {
            Some((last, outer)) if last.from == 1 && last.to == 1 => (last.size, outer),
            _ => (1, &self.axes[..]),
        };
        self.split(run, outer, self.from, self.to, list);
    }

    /// Cuts the outermost axis until the rest has few enough runs.
    fn split(&self, run: usize, outer: &[Axis], from: usize, to: usize, list: &mut Vec<Grid>) {
        let chunks = (run * self.element).div_ceil(CHUNK);
        let Some((&first, inner)) = outer.split_first().filter(|_| count(outer) * chunks >= LIMIT) else {
            list.push(self.run_grid(run, outer, from, to));
            return;
        };
        let each = ((LIMIT - 1) / (count(inner) * chunks)).max(1);
        for start in (0..first.size).step_by(each) {
            let (from, to) = (from + start * first.from * self.element, to + start * first.to * self.element);
            let part = Axis { size: each.min(first.size - start), ..first };
            let axes: Vec<Axis> =
                std::iter::once(part).filter(|axis| axis.size > 1).chain(inner.iter().copied()).collect();
            self.split(run, &axes, from, to, list);
        }
    }

    fn run_grid(&self, run: usize, outer: &[Axis], from: usize, to: usize) -> Grid {
        let bytes = run * self.element;
        let chunked = bytes > CHUNK;
        let piece = bytes.min(CHUNK);
        let mut axes: Vec<Axis> = outer.to_vec();
        if chunked {
            // A multiple of 16 bytes, and so of an element.
            let elements = CHUNK / self.element;
            axes.push(Axis { size: bytes.div_ceil(CHUNK), from: elements, to: elements });
        }
        axes.reverse();
        let grain = axes.iter().flat_map(|axis| [axis.from, axis.to]).fold(16, |grain, stride| {
            let bytes = stride * self.element;
            if bytes == 0 { grain } else { grain.min(1 << bytes.trailing_zeros().min(4)) }
        });
        // A run that is shorter than a vector is moved in elements.
        let lanes = piece.div_ceil(grain).next_power_of_two().min(THREADS);
        let runs = count(&axes);
        let groups = THREADS / lanes;
        let together = if piece <= lanes * grain { groups * UNROLL } else { groups };
        let mut words = self.ends(from, to);
        let numbers = [runs, lanes, grain, bytes, piece, usize::from(chunked), axes.len()];
        words.extend(numbers.map(|number| Word::Number(number as u64)));
        words.extend(axis_words(&axes, self.element));
        Grid::new("copy_runs", runs.div_ceil(together), THREADS as u32, words)
    }

    fn ends(&self, from: usize, to: usize) -> Vec<Word> {
        vec![
            Word::Argument { position: self.destination, offset: to },
            Word::Argument { position: self.source, offset: from },
        ]
    }
}

fn count(axes: &[Axis]) -> usize {
    axes.iter().map(|axis| axis.size).product()
}

/// Size, divisor and strides in bytes of every axis the kernel has room for; those that are not there have size 1.
fn axis_words(axes: &[Axis], element: usize) -> Vec<Word> {
    let none = Axis { size: 1, from: 0, to: 0 };
    let all = (0..AXES).map(|index| axes.get(index).copied().unwrap_or(none));
    let words = all.flat_map(|axis| {
        [axis.size as u64, divisor(axis.size), (axis.from * element) as u64, (axis.to * element) as u64]
    });
    words.map(Word::Number).collect()
}

/// A factor and a shift such that `n / size = n * factor >> shift` for every `n` below 2^31, in one word.
///
/// With `2^(s-1) < size <= 2^s`, the factor `ceil(2^(31+s) / size)` is below 2^32 and too large by less than 1, so the
/// quotient is too large by less than `n / 2^(31+s) < 1 / size`, which never reaches the next integer.
fn divisor(size: usize) -> u64 {
    let size = size.max(1) as u64;
    let log = u64::from(size.next_power_of_two().trailing_zeros());
    let shift = 31 + log;
    let factor = (1u128 << shift).div_ceil(u128::from(size)) as u64;
    factor | shift << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use deuteron_codegen::argument::ArgBinding;
    use deuteron_graph::{Dtype, Graph};

    #[test]
    fn divisions_by_multiplication_are_exact() {
        let largest = (1u64 << 31) - 1;
        let sizes = (1..200).chain([255, 256, 257, 65535, 65537, 50257, 1 << 30, (1 << 30) + 1, largest]);
        for size in sizes {
            let word = divisor(size as usize);
            let near = (1..=4).flat_map(|k| [size * k - 1, size * k, size * k + 1]);
            for n in near.chain([0, 1, largest, largest - 1, largest / size * size]).filter(|&n| n <= largest) {
                assert_eq!((n * (word & 0xFFFF_FFFF)) >> (word >> 32), n / size, "{n} / {size}");
            }
        }
    }

    #[test]
    fn axes_that_follow_each_other_are_one() {
        let piece = piece(&[2, 3, 4, 5], &[60, 20, 5, 1], &[60, 20, 5, 1]);
        assert_eq!(merged(&piece), [Axis { size: 120, from: 1, to: 1 }]);
        let swapped = super::tests::piece(&[2, 3, 4, 5], &[60, 5, 15, 1], &[60, 20, 5, 1]);
        let expected = [(2, 60, 60), (3, 5, 20), (4, 15, 5), (5, 1, 1)].map(|(size, from, to)| Axis { size, from, to });
        assert_eq!(merged(&swapped), expected);
    }

    #[test]
    fn the_kind_of_grid_follows_the_strides() {
        let entries = |pieces: &[Piece]| {
            let list = grids(&Copy { element: 2, args: vec![arg(), arg()], pieces: pieces.to_vec() }).list;
            list.iter().map(|grid| (grid.entry, grid.blocks[0])).collect::<Vec<_>>()
        };
        // 1 MB in chunks of 16 KB, a block each.
        assert_eq!(entries(&[piece(&[1 << 19], &[1], &[1])]), [("copy_runs", 64)]);
        // Runs of 128 bytes: 8 lanes, 32 runs a block, 4 at once.
        assert_eq!(entries(&[piece(&[512, 12, 64], &[64, 32768, 1], &[768, 64, 1])]), [("copy_runs", 48)]);
        assert_eq!(entries(&[piece(&[3, 100, 70], &[7000, 1, 100], &[7000, 70, 1])]), [("copy_tiles", 3 * 2 * 2)]);
        // Repeated elements: one at a time.
        assert_eq!(entries(&[piece(&[1024, 8], &[1, 0], &[8, 1])]), [("copy_runs", 8)]);
        assert_eq!(entries(&[piece(&[0, 8], &[8, 1], &[8, 1])]), []);
        assert_eq!(entries(&[piece(&[], &[], &[])]), [("copy_runs", 1)]);
    }

    #[test]
    fn a_block_with_too_many_runs_is_cut() {
        let many = piece(&[5, 1 << 30, 2], &[1 << 34, 8, 2], &[1 << 34, 8, 4]);
        let list = grids(&Copy { element: 1, args: vec![arg(), arg()], pieces: vec![many] }).list;
        let total: u64 = list.iter().map(|grid| number(grid.words[2])).sum();
        assert_eq!((list.len(), total), (10, 5 << 31));
        assert!(list.iter().all(|grid| number(grid.words[2]) < 1 << 31));
        // The second half of the first part: the last pair of the long axis.
        assert_eq!(list[1].words[1], Word::Argument { position: 0, offset: ((1 << 30) - 1) * 8 });
    }

    fn number(word: Word) -> u64 {
        match word {
            Word::Number(number) => number,
            other => panic!("expected a number, got {other:?}"),
        }
    }

    fn piece(dims: &[usize], from: &[usize], to: &[usize]) -> Piece {
        let (dims, from, to) = (dims.to_vec(), from.to_vec(), to.to_vec());
        Piece { source: 0, dims, from, from_offset: 0, to, to_offset: 0 }
    }

    fn arg() -> ArgBinding {
        let mut graph = Graph::new("copy");
        let base = graph.input("x", Dtype::I8, [1]).unwrap();
        ArgBinding { base, dtype: Dtype::I8, written: false, offset: 0, leading: Vec::new(), table_rows: 0 }
    }
}
