//! Products of bf16 and of bytes in blocks of 32 by 32 sums, with AMX or what reads the same layout.
//!
//! A step is 64 bytes of `k`: 32 bf16 or 64 bytes. Packed A is `[panel][step][32 rows][64 bytes]`, packed B
//! `[panel][step][2][16 groups of k][16 columns][4 bytes]`: every tile of 16 rows of 64 bytes is contiguous.
//! Rows, columns and inner indices that are missing are 0.

use std::marker::PhantomData;

use deuteron_codegen::cpu::simd::amx::{Amx, TileShape, Tiles};
use deuteron_codegen::cpu::simd::format::{BrainFloat, Format, SignedByte};
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};

use super::pack::{LeftBlock, left};
use super::store::{Sums, finish_block};
use super::words::{Words, pack_right};
use super::{Job, Matrix, Packed, Spec, SumBlock, Values};

/// Rows and columns of a panel.
pub(super) const SIDE: usize = 32;
/// Bytes of `k` in a step.
pub(super) const STEP: usize = 64;
/// Bytes of a step of a panel.
pub(super) const STEP_PANEL: usize = SIDE * STEP;
/// Steps of a block of `k`: 768 bf16. Sums that one block finishes never leave the caches.
const STEPS: usize = 24;
/// Steps at a time: 24 KiB of A stay in the L1 while panels of B stream from the L2.
const NEAR: usize = 12;
/// Bytes of a panel of B: the steps, and what a [`Machine`] notes about its 32 columns.
pub(super) const RIGHT_PANEL: usize = STEPS * STEP_PANEL + NOTES;
pub(super) const NOTES: usize = 4 * SIDE;
/// Columns of B that are packed at a time: 576 KiB.
const COLUMNS: usize = 384;
/// Floats from one row of a filled block of A to the next.
const STAGE_STRIDE: usize = STEPS * STEP + 16;

/// What multiplies packed panels.
pub(super) trait Machine: Copy {
    /// Elements in storage.
    type Element: Format;
    /// Sums are `i32`.
    const WHOLE: bool;
    /// What every byte of A is combined with by exclusive or.
    const FLIP: u8;
    /// Whatever must be set up on a thread.
    type Session;

    fn begin(self) -> Self::Session;

    /// Looks at a packed panel of B before it is used.
    ///
    /// # Safety
    /// `right` is a panel of this many steps, with room for notes behind the steps that a panel can have.
    unsafe fn prepare(self, right: *mut u8, steps: usize);

    /// `sums += left right` for 32 columns and at least the first `rows <= 32` rows; from zero if `first`.
    ///
    /// # Safety
    /// `left` and `right` are this many steps of panels, notes those of the panel; 32 rows of 32 sums can be written.
    unsafe fn multiply(session: &Self::Session, panels: PanelPair, sums: *mut f32, stride: usize, first: bool);
}

/// A panel of A and one of B.
#[derive(Clone, Copy)]
pub(super) struct PanelPair {
    pub left: *const u8,
    pub right: *const u8,
    pub steps: usize,
    pub rows: usize,
    /// The notes of the panel of B, with its first steps.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // VNNI alone has any
    pub notes: Option<*const u8>,
}

/// Where things lie in the scratch, in floats.
struct Layout {
    columns: usize,
    single: bool,
    sums_stride: usize,
    sums: usize,
    left: usize,
    right: usize,
}

impl Layout {
    fn new(spec: &Spec, rows: usize, columns: usize) -> Layout {
        let (padded_rows, padded) = (rows.next_multiple_of(SIDE), columns.next_multiple_of(SIDE));
        let block = (COLUMNS / spec.rights).min(padded);
        let single = spec.k * spec.right.bytes() <= STEPS * STEP;
        let sums_stride = if single { block } else { padded } + 16;
        Layout {
            columns: block,
            single,
            sums_stride,
            sums: if single { SIDE } else { padded_rows } * sums_stride,
            left: padded_rows * STEPS * STEP / 4,
            right: block / SIDE * RIGHT_PANEL / 4,
        }
    }
}

/// Floats of scratch.
pub(super) fn scratch(spec: &Spec, rows: usize, columns: usize) -> usize {
    let layout = Layout::new(spec, rows, columns);
    SIDE * STAGE_STRIDE + layout.left + spec.rights * (layout.right + layout.sums)
}

/// Blocks of inner indices and columns of a packed B.
pub(super) fn pieces(spec: &Spec, columns: usize) -> usize {
    (spec.k * spec.right.bytes()).div_ceil(STEPS * STEP) * columns.div_ceil(COLUMNS)
}

/// Floats of each.
pub(super) fn piece_floats(spec: &Spec, columns: usize) -> usize {
    Layout::new(spec, 0, columns).right
}

/// # Safety
/// The promise of [`super::PartKernel::pack`], which has such a piece, of the machine's element.
pub(super) unsafe fn pack_piece<S: Simd, M: Machine>(
    simd: S,
    machine: M,
    spec: &Spec,
    right: Matrix,
    to: Packed,
    piece: usize,
) {
    let (across, deepest) = (to.columns.div_ceil(COLUMNS), STEPS * STEP / M::Element::BYTES);
    let (inner, column) = (piece / across * deepest, piece % across * COLUMNS);
    let (depth, columns) = (deepest.min(spec.k - inner), COLUMNS.min(to.columns - column));
    // SAFETY: the block is inside of B, and each piece has room for its panels.
    unsafe {
        let place = to.base.add(piece * piece_floats(spec, to.columns)).cast();
        pack_block(simd, machine, &right, (inner, depth), (column, columns), place);
    }
}

/// Packs a block of B: inner indices and columns, given as (first, number).
///
/// # Safety
/// The block can be read, and a panel for each 32 columns be written.
unsafe fn pack_block<S: Simd, M: Machine>(
    simd: S,
    machine: M,
    right: &Matrix,
    (inner, depth): (usize, usize),
    (column, columns): (usize, usize),
    to: *mut u8,
) {
    let offset = inner * right.strides.0 + column * right.strides.1;
    let steps = (depth * M::Element::BYTES).div_ceil(STEP);
    let from = Matrix { base: right.base.wrapping_add(offset * M::Element::BYTES), ..*right };
    // SAFETY: the caller's promise.
    unsafe {
        pack_right(simd, Words { from, depth, columns, element: M::Element::BYTES, steps, to });
        (0..columns.div_ceil(SIDE)).for_each(|panel| machine.prepare(to.add(panel * RIGHT_PANEL), steps));
    }
}

/// # Safety
/// The promise of [`super::PartKernel::run`]; `memory` has the floats that [`scratch`] asks for and starts a cache line, the
/// part is not empty, both operands have the machine's element.
pub(super) unsafe fn run<S: Simd, M: Machine>(
    simd: S,
    machine: M,
    job: &Job,
    mut values: Values,
    memory: *mut f32,
    finish: &mut dyn FnMut(SumBlock<'_>),
) {
    let Job { spec, part, .. } = job;
    let layout = Layout::new(spec, part.rows, part.columns);
    // SAFETY: the scratch has this many floats, in this order.
    let (stage, packed_left, packed_right, sums) = unsafe {
        let left = memory.add(SIDE * STAGE_STRIDE);
        let right = left.add(layout.left);
        (memory, left.cast::<u8>(), right.cast::<u8>(), right.add(spec.rights * layout.right))
    };
    let deepest = STEPS * STEP / M::Element::BYTES;
    let blocks = spec.k.div_ceil(deepest).max(1);
    let session = machine.begin();
    for block in 0..blocks {
        let inner = block * deepest;
        let depth = deepest.min(spec.k - inner);
        let steps = (depth * M::Element::BYTES).div_ceil(STEP);
        for row in (0..part.rows).step_by(SIDE) {
            let rows = SIDE.min(part.rows - row);
            let wanted = LeftBlock { row: part.row + row, rows, inner, count: depth, stride: STAGE_STRIDE };
            // SAFETY: the rows are the part's; the stage holds them as floats, and there is room for the panel.
            unsafe {
                let to = packed_left.add(row * STEPS * STEP);
                pack_left::<S, M>(simd, job, &mut values, wanted, stage, to);
            }
        }
        for column in (0..part.columns).step_by(layout.columns) {
            let columns = layout.columns.min(part.columns - column);
            let panels = columns.div_ceil(SIDE);
            let mut all_rights = packed_right.cast_const();
            match job.packed {
                // SAFETY: the pieces of earlier blocks lie before this one.
                Some(Packed { base, .. }) => unsafe {
                    let across = part.columns.div_ceil(layout.columns);
                    all_rights = base.add((block * across + column / layout.columns) * layout.right).cast();
                },
                None => {
                    for (which, matrix) in job.rights[..spec.rights].iter().enumerate() {
                        // SAFETY: the block is inside of B, and there is room for its panels.
                        unsafe {
                            let to = packed_right.add(which * layout.right * 4);
                            let first = part.column + column;
                            pack_block(simd, machine, matrix, (inner, depth), (first, columns), to);
                        }
                    }
                }
            }
            for row in (0..part.rows).step_by(SIDE) {
                let rows = SIDE.min(part.rows - row);
                let offset = if layout.single { 0 } else { row * layout.sums_stride + column };
                for which in 0..spec.rights {
                    let right = which * layout.right * 4;
                    // No step at all still sets the sums to zero.
                    for step in (0..steps.max(1)).step_by(NEAR) {
                        for panel in 0..panels {
                            // SAFETY: both panels are packed, and their sums are inside of the scratch.
                            unsafe {
                                let right = all_rights.add(right + panel * RIGHT_PANEL);
                                let pair = PanelPair {
                                    left: packed_left.add(row * STEPS * STEP + step * STEP_PANEL),
                                    right: right.add(step * STEP_PANEL),
                                    steps: NEAR.min(steps - step),
                                    rows,
                                    notes: (step == 0).then_some(right.add(RIGHT_PANEL - NOTES)),
                                };
                                let sums = sums.add(which * layout.sums + offset + panel * SIDE);
                                M::multiply(&session, pair, sums, layout.sums_stride, block == 0 && step == 0);
                            }
                        }
                    }
                }
                if block + 1 == blocks {
                    // SAFETY: the sums of this block were written, those of a second B `layout.sums` floats further.
                    unsafe {
                        let base = sums.add(offset);
                        let sums = Sums { base, second: layout.sums, stride: layout.sums_stride, whole: M::WHOLE };
                        finish_block(simd, job, sums, (row, rows), (column, columns), finish);
                    }
                }
            }
        }
    }
}

/// Packs a panel of A.
///
/// # Safety
/// The job's promise for A; the stage has 32 rows, and `to` room for a panel.
unsafe fn pack_left<S: Simd, M: Machine>(
    simd: S,
    job: &Job,
    values: &mut Values,
    wanted: LeftBlock,
    stage: *mut f32,
    to: *mut u8,
) {
    let LeftBlock { row, rows, inner, count, stride } = wanted;
    let bytes = M::Element::BYTES;
    match values {
        Values::Lie(Matrix { base, strides }) if strides.1 == 1 => {
            let base = base.wrapping_add((row * strides.0 + inner) * bytes);
            simd.enter(CopyLeft { base, row_bytes: strides.0 * bytes, rows, bytes: count * bytes, flip: M::FLIP, to });
        }
        _ => {
            // SAFETY: the stage has a stride of floats for each row; the values are in the stage's first `count` floats.
            unsafe {
                left(simd, job, values, wanted, stage);
                simd.enter(NarrowLeft::<M::Element> {
                    _format: PhantomData,
                    stage,
                    stride,
                    rows,
                    count,
                    flip: M::FLIP,
                    to,
                });
            }
        }
    }
}

/// Rows of elements in place.
struct CopyLeft {
    base: *const u8,
    row_bytes: usize,
    rows: usize,
    bytes: usize,
    flip: u8,
    to: *mut u8,
}

impl Kernel for CopyLeft {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (step, at) in (0..self.bytes).step_by(STEP).enumerate() {
            let count = STEP.min(self.bytes - at);
            for row in 0..SIDE {
                let mut piece = [0u8; STEP];
                // SAFETY: `pack_left`'s caller lets us read the rows, and write a panel.
                unsafe {
                    if row < self.rows {
                        let from = self.base.add(row * self.row_bytes + at);
                        if count == STEP {
                            piece = from.cast::<[u8; STEP]>().read();
                        } else {
                            std::ptr::copy_nonoverlapping(from, piece.as_mut_ptr(), count);
                        }
                    }
                    if self.flip != 0 {
                        piece.iter_mut().for_each(|byte| *byte ^= self.flip);
                    }
                    self.to.add(step * STEP_PANEL + row * STEP).cast::<[u8; STEP]>().write(piece);
                }
            }
        }
    }
}

/// Rows of floats to elements.
struct NarrowLeft<T> {
    _format: PhantomData<T>,
    stage: *const f32,
    stride: usize,
    rows: usize,
    count: usize,
    flip: u8,
    to: *mut u8,
}

impl<T: Format> Kernel for NarrowLeft<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let elements = STEP / T::BYTES;
        for (step, at) in (0..self.count).step_by(elements).enumerate() {
            let count = elements.min(self.count - at);
            for row in 0..SIDE {
                let mut piece = [0u8; STEP];
                // SAFETY: the stage has `count` floats in each of `rows` rows, and `to` has room for a panel.
                unsafe {
                    let from = self.stage.add(row * self.stride + at);
                    for lane in (0..if row < self.rows { count } else { 0 }).step_by(S::WIDTH) {
                        let to = piece.as_mut_ptr().add(lane * T::BYTES);
                        match count - lane {
                            left if left < S::WIDTH => {
                                T::write_partial(simd, to, simd.load_partial(from.add(lane), left), left)
                            }
                            _ => T::write(simd, to, simd.load(from.add(lane)), false),
                        }
                    }
                    piece.iter_mut().for_each(|byte| *byte ^= self.flip);
                    self.to.add(step * STEP_PANEL + row * STEP).cast::<[u8; STEP]>().write(piece);
                }
            }
        }
    }
}

/// AMX with bf16.
#[derive(Clone, Copy)]
pub(super) struct Bf16(pub Amx);

/// AMX with signed bytes.
#[derive(Clone, Copy)]
pub(super) struct Bytes(pub Amx);

/// Both kinds differ in one instruction.
macro_rules! amx_machine {
    ($machine:ty, $element:ty, $whole:literal, $dot:ident) => {
        impl Machine for $machine {
            type Element = $element;
            const WHOLE: bool = $whole;
            const FLIP: u8 = 0;
            type Session = Tiles;

            fn begin(self) -> Tiles {
                self.0.configure(&[TileShape::FULL; 8])
            }

            unsafe fn prepare(self, _: *mut u8, _: usize) {}

            unsafe fn multiply(tiles: &Tiles, pair: PanelPair, sums: *mut f32, stride: usize, first: bool) {
                const TILE: usize = STEP_PANEL / 2;
                let PanelPair { left, right, steps, rows, .. } = pair;
                let row_bytes = 4 * stride;
                // SAFETY: all tiles are full ones; the caller's panels and sums are as large as what is read and written.
                unsafe {
                    let top = sums.cast::<u8>();
                    let low = top.add(16 * row_bytes);
                    if rows <= 16 {
                        if first {
                            tiles.zero::<0>();
                            tiles.zero::<1>();
                        } else {
                            tiles.load::<0>(top, row_bytes);
                            tiles.load::<1>(top.add(STEP), row_bytes);
                        }
                        for step in 0..steps {
                            tiles.load::<4>(left.add(step * STEP_PANEL), STEP);
                            tiles.load::<6>(right.add(step * STEP_PANEL), STEP);
                            tiles.$dot::<0, 4, 6>();
                            tiles.load::<7>(right.add(step * STEP_PANEL + TILE), STEP);
                            tiles.$dot::<1, 4, 7>();
                        }
                        tiles.store::<0>(top, row_bytes);
                        tiles.store::<1>(top.add(STEP), row_bytes);
                        return;
                    }
                    if first {
                        tiles.zero::<0>();
                        tiles.zero::<1>();
                        tiles.zero::<2>();
                        tiles.zero::<3>();
                    } else {
                        tiles.load::<0>(top, row_bytes);
                        tiles.load::<1>(top.add(STEP), row_bytes);
                        tiles.load::<2>(low, row_bytes);
                        tiles.load::<3>(low.add(STEP), row_bytes);
                    }
                    for step in 0..steps {
                        tiles.load::<4>(left.add(step * STEP_PANEL), STEP);
                        tiles.load::<6>(right.add(step * STEP_PANEL), STEP);
                        tiles.$dot::<0, 4, 6>();
                        tiles.load::<7>(right.add(step * STEP_PANEL + TILE), STEP);
                        tiles.$dot::<1, 4, 7>();
                        tiles.load::<5>(left.add(step * STEP_PANEL + TILE), STEP);
                        tiles.$dot::<2, 5, 6>();
                        tiles.$dot::<3, 5, 7>();
                    }
                    tiles.store::<0>(top, row_bytes);
                    tiles.store::<1>(top.add(STEP), row_bytes);
                    tiles.store::<2>(low, row_bytes);
                    tiles.store::<3>(low.add(STEP), row_bytes);
                }
            }
        }
    };
}

amx_machine!(Bf16, BrainFloat, false, dot_bf16);
amx_machine!(Bytes, SignedByte, true, dot_signed);
