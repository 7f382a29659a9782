//! Matmuls of `f32`: B is packed, and a tile of accumulators stays in registers during the loop over `k`.
//!
//! Per block of [`DEPTH`] inner indices: all rows of the part's A, then a block of columns of B at a time. The sums of a tile
//! are loaded again for the next block: one chain of multiply-adds an element.
//!
//! - A stored as rows of `f32` is read in place; otherwise it is packed in rows with a stride of [`STRIDE`] floats.
//! - B stored as rows of `f32` is packed by the tiles of the first rows, which load its vectors anyway: beside their
//!   multiply-adds the copy is almost free. Otherwise it is packed before.
//! - B that was packed once for all parts ([`Packed`]) is read from there.
//! - The other tiles prefetch the next block of B meanwhile: with few rows it is reused too little to wait for it.

use std::sync::atomic::{Ordering, compiler_fence};

use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};
use deuteron_graph::Dtype;

use super::pack::{LeftBlock, Source, left, panels};
use super::store::{Sums, finish_block};
use super::{Job, LINE, Matrix, Packed, Spec, SumBlock, Values};

/// Inner indices of a block: a panel of A (24 KiB) stays in the L1 while those of B stream from the L2.
const DEPTH: usize = 768;
/// Floats from one packed row of A to the next: not a power of two, for the sets of the cache.
const STRIDE: usize = DEPTH + 16;
/// Columns of B that are packed at a time. Multiples of every panel's width, also when halved.
///
/// 288 KiB leave room in the L2 for A and the next block: with 128 rows 3 % faster than 576 KiB on two cores of a Xeon. Many
/// rows read A from further away, and rather read it half as often: from 512 on 2 to 4 % the other way.
const fn block_columns(rows: usize) -> usize {
    if rows <= 256 { 96 } else { 192 }
}

/// The same of a B that is packed once, whatever rows its parts have.
const PACKED_COLUMNS: usize = 192;

/// Inner indices between two tests for the end; a line of the next block is asked for with each.
const UNROLLED: usize = 4;
/// Rows of B that are asked for before they are packed.
const ROWS_AHEAD: usize = 8;

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
        Layout::of_blocks::<S>(spec, rows, columns, block_columns(rows))
    }

    /// Of parts of a B that is packed once.
    fn packed<S: Simd>(spec: &Spec, rows: usize, columns: usize) -> Layout {
        Layout::of_blocks::<S>(spec, rows, columns, PACKED_COLUMNS)
    }

    fn of_blocks<S: Simd>(spec: &Spec, rows: usize, columns: usize, block: usize) -> Layout {
        let (tile_rows, vectors) = tile_shape::<S>();
        let width = vectors * S::WIDTH;
        let padded = columns.next_multiple_of(width);
        let block = (block / spec.rights).min(padded);
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
    let floats = |layout: &Layout, right: usize| layout.left + spec.rights * (right + layout.sums);
    let own = Layout::new::<S>(spec, rows, columns);
    floats(&own, own.right).max(floats(&Layout::packed::<S>(spec, rows, columns), 0))
}

/// Blocks of inner indices and columns of a packed B.
pub(super) fn pieces(spec: &Spec, columns: usize) -> usize {
    spec.k.div_ceil(DEPTH) * columns.div_ceil(PACKED_COLUMNS)
}

/// Floats of each.
pub(super) fn piece_floats<S: Simd>(spec: &Spec, columns: usize) -> usize {
    Layout::packed::<S>(spec, 0, columns).right
}

/// # Safety
/// The promise of [`super::PartKernel::pack`], which has such a piece.
pub(super) unsafe fn pack_piece<S: Simd>(simd: S, spec: &Spec, right: Matrix, to: Packed, piece: usize) {
    let layout = Layout::packed::<S>(spec, 0, to.columns);
    let across = to.columns.div_ceil(PACKED_COLUMNS);
    let (inner, column) = (piece / across * DEPTH, piece % across * PACKED_COLUMNS);
    let (depth, columns) = (DEPTH.min(spec.k - inner), PACKED_COLUMNS.min(to.columns - column));
    let source = right_block(spec, &right, (inner, depth), (column, columns));
    // SAFETY: the block is inside of B, and each piece has room for its panels.
    unsafe { panels(simd, source, to.base.add(piece * layout.right), layout.width, layout.panel) };
}

/// # Safety
/// The promise of [`super::PartKernel::run`]; `memory` has the floats that [`scratch`] asks for, the part is not empty.
pub(super) unsafe fn run<S: Simd>(
    simd: S,
    job: &Job,
    mut values: Values,
    memory: *mut f32,
    finish: &mut dyn FnMut(SumBlock<'_>),
) {
    let Job { spec, part, .. } = job;
    let layout = match job.packed {
        Some(_) => Layout::packed::<S>(spec, part.rows, part.columns),
        None => Layout::new::<S>(spec, part.rows, part.columns),
    };
    // SAFETY: the scratch has this many floats, in this order.
    let (packed_left, packed_right, sums) = unsafe {
        let right = memory.add(layout.left);
        (memory, right, right.add(if job.packed.is_some() { 0 } else { spec.rights * layout.right }))
    };
    // The first rows pack what they multiply if their tile is a whole one.
    let lies = spec.right == Dtype::F32 && spec.right_strides.1 == 1;
    let packs = job.packed.is_none() && lies && part.rows >= layout.rows;
    let blocks = spec.k.div_ceil(DEPTH).max(1);
    for block in 0..blocks {
        let inner = block * DEPTH;
        let depth = DEPTH.min(spec.k - inner);
        // SAFETY: there is room for the part's rows.
        let left = unsafe { left_block(simd, job, &mut values, (inner, depth), layout.rows, packed_left) };
        for column in (0..part.columns).step_by(layout.columns) {
            let columns = layout.columns.min(part.columns - column);
            let whole = if packs { columns / layout.width * layout.width } else { 0 };
            let right = match job.packed {
                None => packed_right,
                // SAFETY: the pieces of earlier blocks lie before this one.
                Some(Packed { base, .. }) => unsafe {
                    let across = part.columns.div_ceil(layout.columns);
                    base.add((block * across + column / layout.columns) * layout.right)
                },
            };
            for which in 0..spec.rights {
                if job.packed.is_none() && whole < columns {
                    let first = part.column + column + whole;
                    let source = right_block(spec, &job.rights[which], (inner, depth), (first, columns - whole));
                    // SAFETY: the block is inside of B, and its panels fill at most `layout.right` floats.
                    unsafe {
                        let to = packed_right.add(which * layout.right + whole / layout.width * layout.panel);
                        panels(simd, source, to, layout.width, layout.panel);
                    }
                }
            }
            let across = columns.div_ceil(layout.width);
            for row in (0..part.rows).step_by(layout.rows) {
                let rows = layout.rows.min(part.rows - row);
                let offset = if layout.single { 0 } else { row * layout.sums_stride + column };
                for which in 0..spec.rights {
                    let packing = packs && row == 0;
                    let ahead = Ahead::new(job, which, &layout, (inner, column)).filter(|_| !packing);
                    let first = part.column + column;
                    let source = right_block(spec, &job.rights[which], (inner, depth), (first, columns));
                    // SAFETY: panels and sums of these rows and columns are inside of the scratch.
                    unsafe {
                        simd.enter(Tiles {
                            depth,
                            rows,
                            panels: across,
                            panel: layout.panel,
                            left: (left.0.add(row * left.1), left.1),
                            right: right.add(which * layout.right),
                            packs: if packing { whole / layout.width } else { 0 },
                            source: (source.base.cast(), source.strides.0),
                            ahead,
                            number: (row / layout.rows - usize::from(packs && row > 0)) * across,
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

/// The part's rows of A at the inner indices given as (first, number): the first of them, and the floats from row to row.
///
/// # Safety
/// The promise of [`super::PartKernel::run`]; the part's rows, each of [`STRIDE`] floats, can be written at `to`.
unsafe fn left_block<S: Simd>(
    simd: S,
    job: &Job,
    values: &mut Values,
    (inner, depth): (usize, usize),
    tile_rows: usize,
    to: *mut f32,
) -> (*const f32, usize) {
    let part = &job.part;
    if let Values::Lie(matrix) = values
        && job.spec.left == Dtype::F32
        && matrix.strides.1 == 1
    {
        let offset = (part.row * matrix.strides.0 + inner) * job.spec.left.bytes();
        return (matrix.base.wrapping_add(offset).cast(), matrix.strides.0);
    }
    for row in (0..part.rows).step_by(tile_rows) {
        let rows = tile_rows.min(part.rows - row);
        let wanted = LeftBlock { row: part.row + row, rows, inner, count: depth, stride: STRIDE };
        // SAFETY: the rows are the part's, and there is room for each of them.
        unsafe { left(simd, job, values, wanted, to.add(row * STRIDE)) };
    }
    (to, STRIDE)
}

/// A block of one B: inner indices and columns, each as (first, number).
fn right_block(
    spec: &Spec,
    right: &Matrix,
    (inner, rows): (usize, usize),
    (column, columns): (usize, usize),
) -> Source {
    let offset = inner * right.strides.0 + column * right.strides.1;
    let base = right.base.wrapping_add(offset * spec.right.bytes());
    Source { base, dtype: spec.right, strides: right.strides, rows, columns }
}

/// Rows of the next block of B, to be asked for.
#[derive(Clone, Copy)]
struct Ahead {
    base: *const u8,
    row_bytes: usize,
    rows: usize,
    /// Cache lines of a row.
    lines: usize,
}

impl Ahead {
    /// What follows the block at these first inner index and column; nothing if it is the part's last one, if columns of B
    /// are not contiguous, or if all of B is packed.
    fn new(job: &Job, which: usize, layout: &Layout, (inner, column): (usize, usize)) -> Option<Ahead> {
        let beside = column + layout.columns;
        let (inner, column) = if beside < job.part.columns { (inner, beside) } else { (inner + DEPTH, 0) };
        if inner >= job.spec.k || job.spec.right_strides.1 != 1 || job.packed.is_some() {
            return None;
        }
        let rows = DEPTH.min(job.spec.k - inner);
        let columns = layout.columns.min(job.part.columns - column);
        let first = job.part.column + column;
        let block = right_block(&job.spec, &job.rights[which], (inner, rows), (first, columns));
        let bytes = job.spec.right.bytes();
        Some(Ahead {
            base: block.base,
            row_bytes: block.strides.0 * bytes,
            rows,
            lines: (columns * bytes).div_ceil(LINE),
        })
    }

    /// The rows that a tile of this many inner indices has the time to ask for, by the tile's number.
    fn of_tile(self, number: usize, depth: usize) -> Ahead {
        let share = depth / UNROLLED / self.lines;
        let first = self.rows.min(number * share);
        let base = self.base.wrapping_add(first * self.row_bytes);
        Ahead { base, rows: share.min(self.rows - first), ..self }
    }
}

/// Rows of A against panels of B.
struct Tiles {
    depth: usize,
    rows: usize,
    panels: usize,
    panel: usize,
    /// The first row, and floats to the next.
    left: (*const f32, usize),
    right: *mut f32,
    /// Panels, from the first on, that are not packed yet: these rows, a whole tile, do that.
    packs: usize,
    /// B in place, and its row stride in floats; used for panels that are not packed.
    source: (*const f32, usize),
    ahead: Option<Ahead>,
    /// Tiles of this block that asked for something before.
    number: usize,
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
    /// `R` is the number of rows; panels of A and B and the sums of `R` rows can be read, the sums written, and panels that
    /// are not packed as well.
    #[inline(always)]
    unsafe fn tiles<S: Simd, const R: usize, const V: usize>(self, simd: S) {
        for panel in 0..self.panels {
            // SAFETY: the caller's promise for this panel; B has all columns of a panel that is not packed.
            unsafe {
                let right = self.right.add(panel * self.panel);
                let at = panel * V * S::WIDTH;
                let sums = (self.sums.add(at), self.stride);
                let mut tile = sums_of::<S, R, V>(simd, sums, self.first);
                if R == tile_shape::<S>().0 && panel < self.packs {
                    let source = (self.source.0.wrapping_add(at), self.source.1);
                    packing_tile(simd, self.depth, self.left, source, right, &mut tile);
                } else {
                    let ahead = self.ahead.map(|ahead| ahead.of_tile(self.number + panel, self.depth));
                    packed_tile(simd, self.depth, self.left, right, ahead, &mut tile);
                }
                for row in 0..R {
                    for vector in 0..V {
                        simd.store(sums.0.add(row * sums.1 + vector * S::WIDTH), tile[row][vector]);
                    }
                }
            }
        }
    }
}

/// The sums of a tile so far: zeros if it is the first one.
///
/// # Safety
/// As [`Tiles::tiles`], for the sums of one panel.
#[inline(always)]
unsafe fn sums_of<S: Simd, const R: usize, const V: usize>(
    simd: S,
    (sums, stride): (*mut f32, usize),
    first: bool,
) -> [[S::Float; V]; R] {
    let mut tile = [[simd.splat(0.0); V]; R];
    // SAFETY: rows below R and columns below V * WIDTH are there.
    unsafe {
        for row in 0..R {
            if first {
                simd.prefetch_to_write(sums.add(row * stride).cast());
                continue;
            }
            for vector in 0..V {
                tile[row][vector] = simd.load(sums.add(row * stride + vector * S::WIDTH));
            }
        }
    }
    tile
}

/// `tile[r][c] += left[r][i] * right[i][c]`.
///
/// # Safety
/// As [`Tiles::tiles`], for one packed panel.
#[inline(always)]
unsafe fn packed_tile<S: Simd, const R: usize, const V: usize>(
    simd: S,
    depth: usize,
    left: (*const f32, usize),
    right: *const f32,
    ahead: Option<Ahead>,
    tile: &mut [[S::Float; V]; R],
) {
    let mut inner = 0;
    // SAFETY: rows below R, columns below V * WIDTH and inner indices below `depth` are there.
    unsafe {
        if let Some(ahead) = ahead {
            for row in 0..ahead.rows {
                for line in 0..ahead.lines {
                    simd.prefetch(ahead.base.wrapping_add(row * ahead.row_bytes + line * LINE));
                    for next in inner..inner + UNROLLED {
                        packed_step(simd, left, right, next, tile);
                    }
                    inner += UNROLLED;
                }
            }
        }
        while inner + UNROLLED <= depth {
            for next in inner..inner + UNROLLED {
                packed_step(simd, left, right, next, tile);
            }
            inner += UNROLLED;
        }
        for next in inner..depth {
            packed_step(simd, left, right, next, tile);
        }
    }
}

/// One inner index of [`packed_tile`].
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn packed_step<S: Simd, const R: usize, const V: usize>(
    simd: S,
    left: (*const f32, usize),
    right: *const f32,
    inner: usize,
    tile: &mut [[S::Float; V]; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let lanes = vectors(simd, right.add(inner * V * S::WIDTH));
        multiply_add(simd, (left.0.add(inner), left.1), lanes, tile);
    }
}

/// As [`packed_tile`], for a panel that is not packed, which this does.
///
/// # Safety
/// As [`Tiles::tiles`], for one panel.
#[inline(always)]
unsafe fn packing_tile<S: Simd, const R: usize, const V: usize>(
    simd: S,
    depth: usize,
    left: (*const f32, usize),
    source: (*const f32, usize),
    to: *mut f32,
    tile: &mut [[S::Float; V]; R],
) {
    // Not unrolled: the compiler would mix the steps, and a load that follows a store often waits for it.
    for inner in 0..depth {
        // SAFETY: rows below R, columns below V * WIDTH and inner indices below `depth` are there.
        unsafe {
            let from = source.0.add(inner * source.1);
            let lanes = vectors::<S, V>(simd, from);
            let ahead = from.wrapping_add(ROWS_AHEAD * source.1).cast::<u8>();
            for line in (0..V * S::WIDTH * size_of::<f32>()).step_by(LINE) {
                simd.prefetch(ahead.wrapping_add(line));
            }
            for (vector, lanes) in lanes.into_iter().enumerate() {
                simd.store(to.add((inner * V + vector) * S::WIDTH), lanes);
            }
            multiply_add(simd, (left.0.add(inner), left.1), lanes, tile);
        }
    }
}

/// `V` vectors, one after the other.
///
/// # Safety
/// They can be read.
#[inline(always)]
unsafe fn vectors<S: Simd, const V: usize>(simd: S, from: *const f32) -> [S::Float; V] {
    let mut lanes = [simd.splat(0.0); V];
    for vector in 0..V {
        // SAFETY: the caller's promise.
        lanes[vector] = unsafe { simd.load(from.add(vector * S::WIDTH)) };
    }
    lanes
}

/// One inner index of a tile.
///
/// # Safety
/// The `R` values of A, the given floats apart, can be read.
#[inline(always)]
unsafe fn multiply_add<S: Simd, const R: usize, const V: usize>(
    simd: S,
    (left, stride): (*const f32, usize),
    lanes: [S::Float; V],
    tile: &mut [[S::Float; V]; R],
) {
    for row in 0..R {
        // SAFETY: the caller's promise; rows of A may lie at any alignment.
        let value = simd.splat(unsafe { left.add(row * stride).read_unaligned() });
        for vector in 0..V {
            tile[row][vector] = simd.mul_add(value, lanes[vector], tile[row][vector]);
        }
    }
    // Nothing is loaded for a later index before this one is done: the compiler would run out of registers.
    compiler_fence(Ordering::SeqCst);
}
