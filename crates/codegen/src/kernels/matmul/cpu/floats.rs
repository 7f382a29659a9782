//! Products of `f32`: A and B are packed, and a tile of sums stays in registers while `k` runs.
//!
//! Per block of [`DEPTH`] inner indices: all rows of the part's A, then a block of columns of B at a time. Packed rows of
//! A are [`STRIDE`] floats apart, so that every row is at a fixed distance from the first and the filled block needs no
//! transposition. The sums of a tile are loaded again for the next block: one chain of multiply-adds an element.

use super::pack::{LeftBlock, Source, left, panels};
use super::store::{Sums, finish_block};
use super::{Block, Job, Matrix, Packed, Spec, Values};
use crate::cpu::simd::lanes::{Kernel, Simd};

/// Inner indices of a block: a panel of A (24 KiB) stays in the L1 while those of B stream from the L2.
const DEPTH: usize = 768;
/// Floats from one packed row of A to the next: not a power of two, for the sets of the cache.
const STRIDE: usize = DEPTH + 16;
/// Columns of B that are packed at a time: 576 KiB. A multiple of every panel's width, also when halved.
const COLUMNS: usize = 192;

/// Inner indices between two tests for the end.
const UNROLLED: usize = 4;

/// Rows and vectors of the tile in registers. 8 by 3 against 14 by 2: the same on an idle core, 8 % more where two
/// threads share its front end (fewer instructions a product).
const fn tile_shape<S: Simd>() -> (usize, usize) {
    match (S::WIDTH, S::REGISTERS) {
        (16, _) => (8, 3),
        (8, _) => (6, 2),
        (_, 32) => (6, 4),
        _ => (4, 2),
    }
}

/// Where things lie in the scratch, in floats.
struct Layout {
    rows: usize,
    width: usize,
    /// Floats of a panel of B.
    panel: usize,
    /// Columns of B that are packed at a time.
    columns: usize,
    /// Whether there is one block of `k`: sums are needed for one panel of rows only.
    single: bool,
    sums_stride: usize,
    /// Floats of the sums with one B.
    sums: usize,
    left: usize,
    right: usize,
}

impl Layout {
    fn new<S: Simd>(spec: &Spec, rows: usize, columns: usize) -> Layout {
        let (tile_rows, vectors) = tile_shape::<S>();
        let width = vectors * S::WIDTH;
        let padded = columns.next_multiple_of(width);
        let block = (COLUMNS / spec.rights).min(padded);
        let single = spec.k <= DEPTH;
        let sums_stride = if single { block } else { padded } + 16;
        let sums_rows = if single { tile_rows } else { rows.next_multiple_of(tile_rows) };
        let panel = DEPTH * width + 32;
        Layout {
            rows: tile_rows,
            width,
            panel,
            columns: block,
            single,
            sums_stride,
            sums: sums_rows * sums_stride,
            left: rows.next_multiple_of(tile_rows) * STRIDE,
            right: block / width * panel,
        }
    }
}

/// Floats of scratch.
pub(super) fn scratch<S: Simd>(spec: &Spec, rows: usize, columns: usize) -> usize {
    let layout = Layout::new::<S>(spec, rows, columns);
    layout.left + spec.rights * (layout.right + layout.sums)
}

/// Blocks of inner indices and columns of a packed B.
pub(super) fn pieces(spec: &Spec, columns: usize) -> usize {
    spec.k.div_ceil(DEPTH) * columns.div_ceil(COLUMNS)
}

/// Floats of each.
pub(super) fn piece_floats<S: Simd>(spec: &Spec, columns: usize) -> usize {
    Layout::new::<S>(spec, 0, columns).right
}

/// # Safety
/// The promise of [`super::Kernel::pack`], which has such a piece.
pub(super) unsafe fn pack_piece<S: Simd>(simd: S, spec: &Spec, right: Matrix, to: Packed, piece: usize) {
    let layout = Layout::new::<S>(spec, 0, to.columns);
    let across = to.columns.div_ceil(COLUMNS);
    let (inner, column) = (piece / across * DEPTH, piece % across * COLUMNS);
    let (depth, columns) = (DEPTH.min(spec.k - inner), COLUMNS.min(to.columns - column));
    // SAFETY: the block is inside of B, and each piece has room for its panels.
    unsafe {
        pack_block(simd, spec, &right, (inner, depth), (column, columns), &layout, to.base.add(piece * layout.right))
    };
}

/// Packs a block of B: inner indices and columns, given as (first, number).
///
/// # Safety
/// The block can be read, and `layout.right` floats be written.
unsafe fn pack_block<S: Simd>(
    simd: S,
    spec: &Spec,
    right: &Matrix,
    (inner, depth): (usize, usize),
    (column, columns): (usize, usize),
    layout: &Layout,
    to: *mut f32,
) {
    let offset = inner * right.strides.0 + column * right.strides.1;
    let base = right.base.wrapping_add(offset * spec.right.bytes());
    let source = Source { base, dtype: spec.right, strides: right.strides, rows: depth, columns };
    // SAFETY: the caller's promise.
    unsafe { panels(simd, source, to, layout.width, layout.panel) };
}

/// # Safety
/// The promise of [`super::Kernel::run`]; `memory` has the floats that [`scratch`] asks for, the part is not empty.
pub(super) unsafe fn run<S: Simd>(
    simd: S,
    job: &Job,
    mut values: Values,
    memory: *mut f32,
    finish: &mut dyn FnMut(Block<'_>),
) {
    let Job { spec, part, .. } = job;
    let layout = Layout::new::<S>(spec, part.rows, part.columns);
    // SAFETY: the scratch has this many floats, in this order.
    let (packed_left, packed_right, sums) = unsafe {
        let right = memory.add(layout.left);
        (memory, right, right.add(spec.rights * layout.right))
    };
    let blocks = spec.k.div_ceil(DEPTH).max(1);
    for block in 0..blocks {
        let inner = block * DEPTH;
        let depth = DEPTH.min(spec.k - inner);
        for row in (0..part.rows).step_by(layout.rows) {
            let rows = layout.rows.min(part.rows - row);
            let wanted = LeftBlock { row: part.row + row, rows, inner, count: depth, stride: STRIDE };
            // SAFETY: the rows are the part's, and there is room for each of them.
            unsafe { left(simd, job, &mut values, wanted, packed_left.add(row * STRIDE)) };
        }
        for column in (0..part.columns).step_by(layout.columns) {
            let columns = layout.columns.min(part.columns - column);
            let mut right = packed_right.cast_const();
            match job.packed {
                // SAFETY: the pieces of earlier blocks lie before this one.
                Some(Packed { base, .. }) => unsafe {
                    let across = part.columns.div_ceil(layout.columns);
                    right = base.add((block * across + column / layout.columns) * layout.right);
                },
                None => {
                    for (which, matrix) in job.rights[..spec.rights].iter().enumerate() {
                        // SAFETY: the block is inside of B, and its panels fill at most `layout.right` floats.
                        unsafe {
                            let to = packed_right.add(which * layout.right);
                            let first = part.column + column;
                            pack_block(simd, spec, matrix, (inner, depth), (first, columns), &layout, to);
                        }
                    }
                }
            }
            for row in (0..part.rows).step_by(layout.rows) {
                let rows = layout.rows.min(part.rows - row);
                let offset = if layout.single { 0 } else { row * layout.sums_stride + column };
                for which in 0..spec.rights {
                    // SAFETY: panels and sums of these rows and columns are inside of the scratch.
                    unsafe {
                        simd.enter(Tiles {
                            depth,
                            rows,
                            panels: columns.div_ceil(layout.width),
                            panel: layout.panel,
                            left: packed_left.add(row * STRIDE),
                            right: right.add(which * layout.right),
                            sums: sums.add(which * layout.sums + offset),
                            stride: layout.sums_stride,
                            first: block == 0,
                        });
                    }
                }
                if block + 1 == blocks {
                    // SAFETY: the sums of this block were written, those of a second B `layout.sums` floats further.
                    unsafe {
                        let base = sums.add(offset);
                        let sums = Sums { base, second: layout.sums, stride: layout.sums_stride, whole: false };
                        finish_block(simd, job, sums, (row, rows), (column, columns), finish);
                    }
                }
            }
        }
    }
}

/// Rows of A against panels of B.
struct Tiles {
    depth: usize,
    rows: usize,
    panels: usize,
    panel: usize,
    left: *const f32,
    right: *const f32,
    sums: *mut f32,
    stride: usize,
    first: bool,
}

impl Kernel for Tiles {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: `run` made the struct for these rows, which are at most those of the tile.
        unsafe {
            match tile_shape::<S>() {
                (8, _) => match self.rows {
                    1 => self.tiles::<S, 1, 3>(simd),
                    2 => self.tiles::<S, 2, 3>(simd),
                    3 => self.tiles::<S, 3, 3>(simd),
                    4 => self.tiles::<S, 4, 3>(simd),
                    5 => self.tiles::<S, 5, 3>(simd),
                    6 => self.tiles::<S, 6, 3>(simd),
                    7 => self.tiles::<S, 7, 3>(simd),
                    _ => self.tiles::<S, 8, 3>(simd),
                },
                (6, 2) => match self.rows {
                    1 => self.tiles::<S, 1, 2>(simd),
                    2 => self.tiles::<S, 2, 2>(simd),
                    3 => self.tiles::<S, 3, 2>(simd),
                    4 => self.tiles::<S, 4, 2>(simd),
                    5 => self.tiles::<S, 5, 2>(simd),
                    _ => self.tiles::<S, 6, 2>(simd),
                },
                (6, _) => match self.rows {
                    1 => self.tiles::<S, 1, 4>(simd),
                    2 => self.tiles::<S, 2, 4>(simd),
                    3 => self.tiles::<S, 3, 4>(simd),
                    4 => self.tiles::<S, 4, 4>(simd),
                    5 => self.tiles::<S, 5, 4>(simd),
                    _ => self.tiles::<S, 6, 4>(simd),
                },
                _ => match self.rows {
                    1 => self.tiles::<S, 1, 2>(simd),
                    2 => self.tiles::<S, 2, 2>(simd),
                    3 => self.tiles::<S, 3, 2>(simd),
                    _ => self.tiles::<S, 4, 2>(simd),
                },
            }
        }
    }
}

impl Tiles {
    /// # Safety
    /// `R` is the number of rows; panels of A and B and the sums of `R` rows can be read, the sums written.
    #[inline(always)]
    unsafe fn tiles<S: Simd, const R: usize, const V: usize>(self, simd: S) {
        for panel in 0..self.panels {
            // SAFETY: the caller's promise for this panel.
            unsafe {
                let right = self.right.add(panel * self.panel);
                let sums = self.sums.add(panel * V * S::WIDTH);
                tile::<S, R, V>(simd, self.depth, self.left, right, (sums, self.stride), self.first);
            }
        }
    }
}

/// `sums[r][c] += left[r][i] * right[i][c]`, from zero if `first`.
///
/// # Safety
/// As [`Tiles::tiles`], for one panel.
#[inline(always)]
unsafe fn tile<S: Simd, const R: usize, const V: usize>(
    simd: S,
    depth: usize,
    left: *const f32,
    right: *const f32,
    (sums, stride): (*mut f32, usize),
    first: bool,
) {
    let mut tile = [[simd.splat(0.0); V]; R];
    // SAFETY: rows below R, columns below V * WIDTH and inner indices below `depth` are there.
    unsafe {
        if first {
            for row in 0..R {
                simd.prefetch_to_write(sums.add(row * stride).cast());
            }
        } else {
            for row in 0..R {
                for vector in 0..V {
                    tile[row][vector] = simd.load(sums.add(row * stride + vector * S::WIDTH));
                }
            }
        }
        let whole = depth / UNROLLED * UNROLLED;
        for inner in (0..whole).step_by(UNROLLED) {
            for next in 0..UNROLLED {
                multiply_add(simd, left.add(inner + next), right.add((inner + next) * V * S::WIDTH), &mut tile);
            }
        }
        for inner in whole..depth {
            multiply_add(simd, left.add(inner), right.add(inner * V * S::WIDTH), &mut tile);
        }
        for row in 0..R {
            for vector in 0..V {
                simd.store(sums.add(row * stride + vector * S::WIDTH), tile[row][vector]);
            }
        }
    }
}

/// One inner index of a tile.
///
/// # Safety
/// The `R` values of A and `V` vectors of B can be read.
#[inline(always)]
unsafe fn multiply_add<S: Simd, const R: usize, const V: usize>(
    simd: S,
    left: *const f32,
    right: *const f32,
    tile: &mut [[S::Float; V]; R],
) {
    let mut lanes = [simd.splat(0.0); V];
    // SAFETY: the caller's promise.
    unsafe {
        for (vector, lanes) in lanes.iter_mut().enumerate() {
            *lanes = simd.load(right.add(vector * S::WIDTH));
        }
        for (row, sums) in tile.iter_mut().enumerate() {
            let value = simd.splat(*left.add(row * STRIDE));
            for (sum, lanes) in sums.iter_mut().zip(lanes) {
                *sum = simd.mul_add(value, lanes, *sum);
            }
        }
    }
}
