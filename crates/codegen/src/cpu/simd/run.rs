//! Runs a program over rows.

use std::ops::Range as Span;

use deuteron_graph::Dtype;

use super::ahead::Ahead;
use super::lanes::Simd;
use super::launch::{Fault, Launch};
use super::map::Loop;
use super::philox::{self, Keep};
use super::reduce::{Strip, of_nothing, reduce};
use super::scratch::{BLOCK, Places, Prepared, Scratch, Step};
use super::store::{Elements, LINE, store};
use super::sweep::{Input, Output};
use super::{Isa, Task};
use crate::cpu::program::{Access, Dst, Inst, STRIP, Src, TileReduce};

/// Runs `launch` on rows `span` (elements, if the program is flat), adding to this chunk's `partials`, which hold the
/// widths of `program.partials` one after another and start at zero.
///
/// Bits do not depend on how rows are split into spans, but for `partials`, which are added up in row order.
///
/// # Errors
/// A gathered index out of range; rows before it are done.
///
/// # Safety
/// - `scratch` was made for this very program, and there is an axis and a bound argument for each that it names.
/// - For every row of `span`, each argument's elements at that row (`program.cols` of them, or one if `PerRow`; for a
///   flat program the elements `span`) can be read, or written if it is `written`. `PerRow` index arguments hold `i32`.
/// - No other thread writes what this call reads, or touches what it writes. A written row overlaps a row that is read
///   only if they start at the same address and have elements of the same size.
pub unsafe fn run(
    isa: Isa,
    launch: &Launch<'_>,
    span: Span<usize>,
    scratch: &mut Scratch,
    partials: &mut [f32],
) -> Result<(), Fault> {
    let widths: usize = launch.program.partials.iter().map(|partial| partial.width).sum();
    assert_eq!(partials.len(), widths, "elements of a chunk's partial sums");
    assert_eq!(launch.args.len(), launch.program.args.len(), "bound arguments");
    assert_eq!(launch.axes.len(), usize::from(launch.program.axes), "axes of the launch");
    #[cfg(debug_assertions)]
    assert_eq!(&scratch.program, launch.program, "the scratch belongs to another program");
    isa.dispatch(Run { launch, span, scratch, partials })
}

struct Run<'a> {
    launch: &'a Launch<'a>,
    span: Span<usize>,
    scratch: &'a mut Scratch,
    partials: &'a mut [f32],
}

impl Task for Run<'_> {
    type Output = Result<(), Fault>;

    fn with<S: Simd>(self, simd: S) -> Result<(), Fault> {
        let streams = self.launch.args.iter().any(|arg| arg.streaming);
        let result = if self.span.is_empty() { Ok(()) } else { self.rows(simd) };
        if streams {
            simd.fence();
        }
        result
    }
}

impl Run<'_> {
    fn rows<S: Simd>(self, simd: S) -> Result<(), Fault> {
        let Run { launch, span, scratch, partials } = self;
        let flat = launch.program.flat;
        for (cursor, arg) in scratch.cursors.iter_mut().zip(launch.args) {
            cursor.seek(arg, if flat { 0 } else { span.start });
        }
        let cols = if flat { span.len() } else { launch.program.cols };
        let origin = if flat { span.start } else { 0 };
        let rows = if flat { 0..1 } else { span };
        let mut row = rows.start;
        let mut here = locate(launch, scratch, row..rows.end, origin);
        loop {
            let count = here?;
            std::mem::swap(&mut scratch.offsets, &mut scratch.next_offsets);
            // Where the next rows are is known before these are done: that is what to prefetch.
            here = locate(launch, scratch, row + count..rows.end, origin);
            if let (Ok(next @ 1..), true) = (&here, cols <= STRIP) {
                scratch.ahead.next_rows(launch, &scratch.next_offsets, *next, cols);
            }
            let mut frame = Frame {
                simd,
                launch,
                memory: scratch.memory.pointer(),
                places: scratch.places,
                offsets: &scratch.offsets,
                partials: partials.as_mut_ptr(),
                flight: 0,
                row,
                origin,
                cols,
            };
            for pass in &scratch.passes {
                for flight in 0..count {
                    (frame.flight, frame.row) = (flight, row + flight);
                    // SAFETY: `run`'s caller lets us use every argument at this row; the memory is the scratch's own.
                    unsafe { frame.pass(pass, &mut scratch.ahead) }
                }
            }
            row += count;
            if row == rows.end {
                return Ok(());
            }
        }
    }
}

/// Writes where each argument's rows are, for as many rows of `rows` as are in flight at once, and says how many; looks
/// up the gathered ones. An index out of range is an error if it is in the first of them, else the rows end before it.
fn locate(launch: &Launch<'_>, scratch: &mut Scratch, rows: Span<usize>, origin: usize) -> Result<usize, Fault> {
    let args = launch.args.len();
    let count = scratch.rows.min(rows.len());
    for flight in 0..count {
        let found = locate_row(launch, scratch, rows.start + flight, flight * args, origin);
        match (found, flight) {
            (Err(fault), 0) => return Err(fault),
            (Err(_), _) => return Ok(flight),
            (Ok(()), _) => {}
        }
        for (cursor, arg) in scratch.cursors.iter_mut().zip(launch.args) {
            cursor.advance(arg);
        }
    }
    Ok(count)
}

fn locate_row(
    launch: &Launch<'_>,
    scratch: &mut Scratch,
    row: usize,
    place: usize,
    origin: usize,
) -> Result<(), Fault> {
    for (arg, spec) in launch.program.args.iter().enumerate() {
        let bound = &launch.args[arg];
        scratch.next_offsets[place + arg] = match spec.access {
            Access::Row => scratch.cursors[arg].offset() + origin,
            Access::PerRow | Access::Columns => scratch.cursors[arg].offset(),
            Access::GatheredRow { index } => {
                let position = usize::from(index);
                // SAFETY: `run`'s caller promises an `i32` of the index argument at this row, at any alignment.
                let index = unsafe {
                    let base = launch.args[position].base.cast::<i32>();
                    base.add(scratch.cursors[position].offset()).read_unaligned()
                };
                let table_rows = bound.table_rows;
                match usize::try_from(index) {
                    Ok(index) if index < table_rows => index * bound.dims[0].stride,
                    _ => return Err(Fault { arg, row, index: i64::from(index), table_rows }),
                }
            }
        };
    }
    Ok(())
}

/// One row in flight.
#[derive(Clone, Copy)]
struct Frame<'a, S> {
    simd: S,
    launch: &'a Launch<'a>,
    memory: *mut f32,
    places: Places,
    offsets: &'a [usize],
    partials: *mut f32,
    /// Which of the rows in flight it is.
    flight: usize,
    row: usize,
    /// Column of the first element: 0, but where a flat span starts.
    origin: usize,
    cols: usize,
}

/// Columns `first .. first + length` of the row.
#[derive(Clone, Copy)]
struct Columns {
    first: usize,
    length: usize,
}

/// The methods are unsafe for the same reason: the promises of [`run`] hold for this row.
impl<S: Simd> Frame<'_, S> {
    unsafe fn pass(&self, pass: &Prepared, ahead: &mut Ahead) {
        // SAFETY: passed on to the caller; lanes of reductions and scalars are places of the memory.
        unsafe {
            for step in &pass.row {
                self.row_step(step);
            }
            if !pass.strip.is_empty() {
                for first in (0..self.cols).step_by(STRIP) {
                    let columns = Columns { first, length: STRIP.min(self.cols - first) };
                    if self.cols > STRIP {
                        self.next_strip(pass, columns, ahead);
                    }
                    for step in &pass.strip {
                        ahead.issue(self.simd);
                        self.strip_step(step, columns);
                    }
                }
            }
            if self.cols == 0 {
                for step in &pass.strip {
                    if let Inst::Reduce { op, into, .. } = step.inst {
                        self.fill(into, of_nothing(op));
                    }
                }
            }
        }
    }

    /// Plans the prefetch of the strip that follows.
    fn next_strip(&self, pass: &Prepared, columns: Columns, ahead: &mut Ahead) {
        let first = columns.first + STRIP;
        let length = self.cols.saturating_sub(first).min(STRIP);
        ahead.start(pass.strip.len());
        for &arg in &pass.reads {
            let bytes = length * self.launch.program.args[arg].dtype.bytes();
            ahead.plan(self.element(arg as u16, first) as usize, bytes);
        }
    }

    /// Scalar work: the same loops on one vector of equal lanes.
    unsafe fn row_step(&self, step: &Step) {
        let columns = Columns { first: 0, length: S::WIDTH };
        // SAFETY: passed on to the caller; one vector fits a scalar's block.
        unsafe {
            match step.inst {
                Inst::Load { dst: Dst::Scalar(scalar), arg } => {
                    let block = self.scalar(scalar);
                    let output = Output { base: block, stream_until: 0 };
                    let dtype = self.launch.program.args[usize::from(arg)].dtype;
                    Loop { simd: self.simd, length: 1, output }.load(dtype, self.element(arg, 0));
                    self.fill(scalar, block.read());
                }
                Inst::RowIndex { dst: Dst::Scalar(scalar), axis } => {
                    let axis = self.launch.axes[usize::from(axis)];
                    let index = (self.row / axis.divide) % axis.modulo;
                    self.fill(scalar, f32::from_bits(index as u32));
                }
                Inst::ColumnAdd { partial, a } => {
                    let sum = self.partial(partial);
                    sum.write(sum.read() + self.input(step, 0, a, 0).base.read());
                }
                Inst::Store { arg, a } => {
                    let from = self.input(step, 0, a, 0);
                    let dtype = self.launch.program.args[usize::from(arg)].dtype;
                    store(self.simd, 1, from, Elements { base: self.element(arg, 0), dtype, streaming: false });
                }
                _ => self.lanes(step, columns),
            }
        }
    }

    unsafe fn strip_step(&self, step: &Step, columns: Columns) {
        let Columns { first, length } = columns;
        // SAFETY: passed on to the caller; `columns` are columns of the row, and fit a tile.
        unsafe {
            match step.inst {
                Inst::Reduce { op, into, a, b } => {
                    let a = self.input(step, 0, a, first);
                    let b = if op == TileReduce::Dot { self.input(step, 1, b, first) } else { a };
                    let (lanes, into) = (self.small().add(step.lanes), self.scalar(into));
                    let last = first + length == self.cols;
                    reduce(self.simd, op, Strip { first, length, last, a, b, lanes, into });
                }
                Inst::ColumnAdd { partial, a } => {
                    let output = Output { base: self.partial(partial).add(first), stream_until: 0 };
                    Loop { simd: self.simd, length, output }.accumulate(self.input(step, 0, a, first));
                }
                Inst::Store { arg, a } => {
                    self.store_row(arg, self.input(step, 0, a, first), columns);
                }
                Inst::Keep { dst, seed, offset, threshold } => {
                    let seed = self.input(step, 0, seed, 0).base.read().to_bits();
                    let element = self.row as u64 * self.cols as u64 + (self.origin + first) as u64;
                    let random = self.memory.add(self.places.random);
                    let keep = Keep { key: [seed, offset], threshold };
                    philox::keep(self.simd, keep, element, length, random);
                    let output = self.output(dst, first);
                    let from = random.add((element % 4) as usize).cast();
                    Loop { simd: self.simd, length, output }.load(Dtype::F32, from);
                }
                _ => self.lanes(step, columns),
            }
        }
    }

    /// Instructions that are the same for a strip and for a scalar.
    unsafe fn lanes(&self, step: &Step, columns: Columns) {
        let Columns { first, length } = columns;
        let Some(dst) = super::scratch::destination(step.inst) else {
            unreachable!("instructions without a destination are done by the callers, got {:?}", step.inst)
        };
        // SAFETY: passed on to the caller.
        unsafe {
            let direct = step.store.and_then(|arg| self.direct_output(arg, columns));
            let output = direct.unwrap_or_else(|| self.output(dst, first));
            let range = Loop { simd: self.simd, length, output };
            match step.inst {
                Inst::Load { arg, .. } => {
                    let dtype = self.launch.program.args[usize::from(arg)].dtype;
                    range.load(dtype, self.element(arg, first));
                }
                Inst::Unary { op, a, .. } => range.unary(op, self.input(step, 0, a, first)),
                Inst::Binary { op, a, b, .. } => {
                    range.binary(op, self.input(step, 0, a, first), self.input(step, 1, b, first));
                }
                Inst::MulAdd { a, b, c, .. } => {
                    let (a, b) = (self.input(step, 0, a, first), self.input(step, 1, b, first));
                    range.mul_add(a, b, self.input(step, 2, c, first));
                }
                Inst::Compare { op, kind, a, b, .. } => {
                    range.compare(op, kind, self.input(step, 0, a, first), self.input(step, 1, b, first));
                }
                Inst::Select { cond, a, b, .. } => {
                    let (cond, a) = (self.input(step, 0, cond, first), self.input(step, 1, a, first));
                    range.select(cond, a, self.input(step, 2, b, first));
                }
                Inst::ColumnIndex { .. } => range.count_from((self.origin + first) as i32),
                Inst::RowIndex { .. }
                | Inst::Keep { .. }
                | Inst::Reduce { .. }
                | Inst::ColumnAdd { .. }
                | Inst::Store { .. } => unreachable!("done by the callers, got {:?}", step.inst),
            }
            if let (Some(arg), None) = (step.store, direct) {
                self.store_row(arg, Input { base: output.base, step: 1 }, columns);
            }
        }
    }

    /// The block of a scalar.
    unsafe fn scalar(&self, scalar: u16) -> *mut f32 {
        // SAFETY: the program was checked to have that scalar.
        unsafe { self.small().add(usize::from(scalar) * BLOCK) }
    }

    /// Scalars, constants and lanes of this row.
    #[inline]
    unsafe fn small(&self) -> *mut f32 {
        // SAFETY: the memory holds as many as there are rows in flight.
        unsafe { self.memory.add(self.flight * self.places.small) }
    }

    /// Makes every lane of a scalar `value`. With the machine's own vectors: a vector that was stored in smaller pieces
    /// cannot be forwarded to the load that follows, and waits some 15 cycles.
    unsafe fn fill(&self, scalar: u16, value: f32) {
        // SAFETY: the program was checked to have that scalar.
        let output = Output { base: unsafe { self.scalar(scalar) }, stream_until: 0 };
        // SAFETY: one vector fits a scalar's block.
        unsafe { Loop { simd: self.simd, length: S::WIDTH, output }.splat(value) }
    }

    /// The first element of a partial sum.
    unsafe fn partial(&self, partial: u16) -> *mut f32 {
        let before = &self.launch.program.partials[..usize::from(partial)];
        // SAFETY: `run` checked that the partial sums have these widths.
        unsafe { self.partials.add(before.iter().map(|partial| partial.width).sum()) }
    }

    /// Element `column` of an argument's row.
    fn element(&self, arg: u16, column: usize) -> *mut u8 {
        let arg = usize::from(arg);
        let bytes = self.launch.program.args[arg].dtype.bytes();
        let offset = self.offsets[self.flight * self.launch.args.len() + arg];
        self.launch.args[arg].base.wrapping_add((offset + column) * bytes)
    }

    /// Operand `slot` of a step, from column `first` on.
    #[inline]
    unsafe fn input(&self, step: &Step, slot: usize, source: Src, first: usize) -> Input {
        // SAFETY: the program was checked to have these places, and to name such arguments.
        unsafe {
            let (base, step) = match source {
                Src::Tile(tile) => (self.memory.add(self.places.tiles + usize::from(tile) * STRIP), 1),
                Src::Kept(kept) => (self.kept(kept, first), 1),
                Src::Arg(arg) => (self.element(arg, first).cast(), 1),
                Src::Scalar(scalar) => (self.scalar(scalar), 0),
                Src::Const(_) | Src::ConstInt(_) => (self.small().add(step.constants + slot * BLOCK), 0),
            };
            Input { base, step }
        }
    }

    unsafe fn output(&self, dst: Dst, first: usize) -> Output {
        // SAFETY: the program was checked to have these places.
        let base = unsafe {
            match dst {
                Dst::Tile(tile) => self.memory.add(self.places.tiles + usize::from(tile) * STRIP),
                Dst::Kept(kept) => self.kept(kept, first),
                Dst::Scalar(scalar) => self.scalar(scalar),
            }
        };
        Output { base, stream_until: 0 }
    }

    unsafe fn kept(&self, kept: u16, first: usize) -> *mut f32 {
        // The program was checked to have that kept row, and `first` is a column of it.
        let row = self.flight * self.places.kept_rows + usize::from(kept) * self.places.kept_row;
        // SAFETY: as above.
        unsafe { self.memory.add(self.places.kept + row + first) }
    }

    /// The argument itself as the output of a loop, if its lines can be written whole.
    fn direct_output(&self, arg: u16, columns: Columns) -> Option<Output> {
        let base: *mut f32 = self.element(arg, columns.first).cast();
        if !self.launch.args[usize::from(arg)].streaming {
            return Some(Output { base, stream_until: 0 });
        }
        let stream_until = columns.length / BLOCK * BLOCK;
        (base as usize).is_multiple_of(LINE).then_some(Output { base, stream_until })
    }

    unsafe fn store_row(&self, arg: u16, from: Input, columns: Columns) {
        let spec = self.launch.program.args[usize::from(arg)];
        let streaming = self.launch.args[usize::from(arg)].streaming;
        // SAFETY: passed on to the caller.
        unsafe {
            let to = Elements { base: self.element(arg, columns.first), dtype: spec.dtype, streaming };
            store(self.simd, columns.length, from, to);
        }
    }
}
