//! Runs a program over rows.

use std::ops::Range as Span;

use deuteron_graph::Dtype;

use super::ahead::Ahead;
use super::compiled::run_code;
use super::lanes::Simd;
use super::launch::{Fault, Launch};
use super::map::{Chained, Function, Loop, Visitor, visit};
use super::philox::{self, Keep};
use super::reduce::{Read, Strip, of_nothing, reduce};
use super::scratch::{BLOCK, Places, Prepared, Scratch, Step};
use super::store::{Elements, LINE, store};
use super::sweep::{Input, Output};
use super::{Isa, Task};
use crate::cpu::program::{Access, Dst, Inst, STRIP, Src, TileReduce};

/// Arguments of at most this many elements are not prefetched: 16 KiB are in the cache, or arrive before a prefetch would be planned.
const NEAR: usize = 4096;

/// Runs `launch` on rows `span` (elements, if the program is flat), adding to this chunk's `partials`, which hold the
/// widths of `program.partials` one after another and start at zero.
///
/// Bits do not depend on how rows are split into spans, except for `partials`, which are added up in row order.
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
    if let Some(compiled) = scratch.compiled.clone() {
        assert_eq!(compiled.isa, isa, "instruction set of the machine code");
        // SAFETY: passed on to the caller.
        return unsafe { run_code(&compiled, launch, span, scratch, partials) };
    }
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
        scratch.seek(launch, &span);
        let cols = if flat { span.len() } else { launch.program.cols };
        let (begin, end) = launch.window.unwrap_or((0, cols));
        let origin = if flat { span.start } else { 0 };
        let rows = if flat { 0..1 } else { span };
        let far = rows.len() * cols > NEAR;
        if !far {
            scratch.ahead.start(1);
        }
        let mut row = rows.start;
        let mut here = locate(launch, scratch, row..rows.end, origin);
        loop {
            let count = here?;
            std::mem::swap(&mut scratch.offsets, &mut scratch.next_offsets);
            // Where the next rows are is known before these are done: that is what to prefetch.
            here = locate(launch, scratch, row + count..rows.end, origin);
            if let (Ok(next @ 1..), true) = (&here, far && cols <= STRIP && launch.window.is_none()) {
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
                rows: 1,
                row,
                origin,
                cols,
                begin,
                end,
            };
            let together = scratch.together && launch.window.is_none() && frame.rows_are_apart_evenly(count);
            for pass in &scratch.passes {
                (frame.flight, frame.row) = (0, row);
                // SAFETY: `run`'s caller lets us use every argument at these rows; the memory is the scratch's own.
                unsafe { frame.row_work(pass, count) }
                if together {
                    // SAFETY: as above.
                    unsafe { frame.rows_together(pass, row, count, &mut scratch.ahead) }
                    continue;
                }
                for flight in 0..count {
                    (frame.flight, frame.row) = (flight, row + flight);
                    // SAFETY: as above.
                    unsafe { frame.strips(pass, &mut scratch.ahead) }
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
pub(super) fn locate(
    launch: &Launch<'_>,
    scratch: &mut Scratch,
    rows: Span<usize>,
    origin: usize,
) -> Result<usize, Fault> {
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

/// One row in flight, or all of them.
#[derive(Clone, Copy)]
struct Frame<'a, S> {
    simd: S,
    launch: &'a Launch<'a>,
    memory: *mut f32,
    places: Places,
    offsets: &'a [usize],
    partials: *mut f32,
    /// Which of the rows in flight it is; the first, where it is all of them.
    flight: usize,
    /// How many rows an instruction does.
    rows: usize,
    row: usize,
    /// Column of the first element: 0, but where a flat span starts.
    origin: usize,
    cols: usize,
    /// Columns `begin .. end` are worked on.
    begin: usize,
    end: usize,
}

/// The operands of an instruction: columns of a strip, or scalars of all rows in flight.
#[derive(Clone, Copy)]
enum Operands {
    Strip { first: usize },
    Rows,
}

/// Columns `first .. first + length` of the row.
#[derive(Clone, Copy)]
struct Columns {
    first: usize,
    length: usize,
}

/// The methods are unsafe for the same reason: the promises of [`run`] hold for this row.
impl<S: Simd> Frame<'_, S> {
    /// Scalar work of all rows in flight at once: a lane each. Then what strips read is spread to blocks of equal lanes.
    unsafe fn row_work(&mut self, pass: &Prepared, count: usize) {
        // SAFETY: passed on to the caller; scalars are places of the memory.
        unsafe {
            for step in &pass.row {
                self.row_step(step, count);
            }
            self.flight = 0;
            for &scalar in &pass.spread {
                let output = Output { base: self.scalar(scalar), stream_until: 0, row: self.places.small as isize };
                Loop { simd: self.simd, rows: count, length: S::WIDTH, output }.spread(self.row_lanes(scalar));
            }
        }
    }

    unsafe fn strips(&self, pass: &Prepared, ahead: &mut Ahead) {
        // SAFETY: passed on to the caller; lanes of reductions and scalars are places of the memory.
        unsafe {
            if !pass.strip.is_empty() {
                for first in (self.begin..self.end).step_by(STRIP) {
                    let columns = Columns { first, length: STRIP.min(self.end - first) };
                    if self.end - self.begin > STRIP {
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
                    let reduction = match step.inst {
                        Inst::Reduce { op, into, .. } => Some((op, into)),
                        _ => step.reduce,
                    };
                    if let Some((op, into)) = reduction {
                        self.fill(into, of_nothing(op));
                        self.row_lanes(into).add(self.flight).write(of_nothing(op));
                    }
                }
            }
        }
    }

    /// Whether the rows in flight of every argument are as far apart as the first two.
    fn rows_are_apart_evenly(&self, count: usize) -> bool {
        let args = self.launch.args.len();
        count > 1
            && self.cols > 0
            && (0..args).all(|arg| {
                let apart = |flight: usize| {
                    self.offsets[flight * args + arg].wrapping_sub(self.offsets[(flight - 1) * args + arg])
                };
                (2..count).all(|flight| apart(flight) == apart(1))
            })
    }

    /// The strips of rows `row .. row + count`, which have one each: instruction by instruction, each for all rows. To find its operands
    /// takes as long as 64 columns of it, so it is done once. Bits are those of row by row: no lane meets one of another row, but
    /// in column sums, whose rows come in order.
    unsafe fn rows_together(&mut self, pass: &Prepared, row: usize, count: usize, ahead: &mut Ahead) {
        let columns = Columns { first: 0, length: self.cols };
        for step in &pass.strip {
            for _ in 0..count {
                ahead.issue(self.simd);
            }
            if self.is_done_together(step) {
                (self.flight, self.row, self.rows) = (0, row, count);
                // SAFETY: passed on to the caller, for every row.
                unsafe { self.strip_step(step, columns) }
                self.rows = 1;
                continue;
            }
            for flight in 0..count {
                (self.flight, self.row) = (flight, row + flight);
                // SAFETY: passed on to the caller.
                unsafe { self.strip_step(step, columns) }
            }
        }
    }

    /// Whether one loop executes an instruction for several rows. Streaming stores depend on the address of each row.
    fn is_done_together(&self, step: &Step) -> bool {
        let streams = |arg: u16| self.launch.args[usize::from(arg)].streaming;
        match step.inst {
            Inst::Reduce { op: TileReduce::ArgMax, .. } => false,
            Inst::Store { arg, a: Src::Tile(_) | Src::Kept(_) } => {
                self.launch.program.args[usize::from(arg)].dtype == Dtype::F32 && !streams(arg)
            }
            Inst::ColumnAdd { .. } | Inst::Keep { .. } | Inst::Store { .. } => false,
            _ => !step.store.is_some_and(streams),
        }
    }

    /// Elements from an argument's row to the next, where an instruction does several.
    fn row_of_arg(&self, arg: u16) -> isize {
        if self.rows == 1 {
            return 0;
        }
        let (arg, args) = (usize::from(arg), self.launch.args.len());
        self.offsets[args + arg].wrapping_sub(self.offsets[arg]) as isize
    }

    /// Plans the prefetch of the strip that follows.
    fn next_strip(&self, pass: &Prepared, columns: Columns, ahead: &mut Ahead) {
        let first = columns.first + STRIP;
        let length = self.end.saturating_sub(first).min(STRIP);
        ahead.start(pass.strip.len());
        for &arg in &pass.reads {
            let bytes = length * self.launch.program.args[arg].dtype.bytes();
            let spec = self.launch.program.args[arg];
            if !(spec.written && self.launch.args[arg].streaming) {
                ahead.plan(self.element(arg as u16, first) as usize, bytes, spec.written);
            }
        }
    }

    /// One instruction of the row work, for rows `0 .. count` in flight.
    unsafe fn row_step(&mut self, step: &Step, count: usize) {
        let first_row = self.row;
        // SAFETY: passed on to the caller; a lane for each row in flight fits a block.
        unsafe {
            match step.inst {
                Inst::Load { dst: Dst::Scalar(scalar), arg } => {
                    let dtype = self.launch.program.args[usize::from(arg)].dtype;
                    for flight in 0..count {
                        self.flight = flight;
                        let output = Output::lanes(self.row_lanes(scalar).add(flight));
                        Loop::one_row(self.simd, 1, output).load(dtype, self.element(arg, 0), 0);
                    }
                }
                Inst::RowIndex { dst: Dst::Scalar(scalar), axis } => {
                    let axis = self.launch.axes[usize::from(axis)];
                    for flight in 0..count {
                        let index = ((first_row + flight) / axis.divide) % axis.modulo;
                        self.row_lanes(scalar).add(flight).write(f32::from_bits(index as u32));
                    }
                }
                Inst::ColumnAdd { partial, a } => {
                    let (sum, terms) = (self.partial(partial), self.row_input(step, 0, a).base());
                    for flight in 0..count {
                        sum.write(sum.read() + terms.add(flight).read());
                    }
                }
                Inst::Store { arg, a } => {
                    let from = self.row_input(step, 0, a).base();
                    let dtype = self.launch.program.args[usize::from(arg)].dtype;
                    for flight in 0..count {
                        self.flight = flight;
                        let from = Input::lanes(from.add(flight));
                        store(self.simd, 1, from, Elements { base: self.element(arg, 0), dtype, streaming: false });
                    }
                }
                inst => {
                    let Some(Dst::Scalar(scalar)) = super::scratch::destination(inst) else {
                        unreachable!("row work makes scalars, got {inst:?}")
                    };
                    let output = Output::lanes(self.row_lanes(scalar));
                    self.compute(step, Loop::one_row(self.simd, BLOCK, output), Operands::Rows);
                }
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
                    let two = matches!(op, TileReduce::Dot | TileReduce::Deviation);
                    let b = if two { self.input(step, 1, b, first) } else { a };
                    reduce(self.simd, op, Read { a, b }, self.reduced_strip(step, into, columns));
                }
                Inst::ColumnAdd { partial, a } => {
                    let output = Output::lanes(self.partial(partial).add(first));
                    Loop::one_row(self.simd, length, output).accumulate(self.input(step, 0, a, first));
                }
                Inst::Store { arg, a } if self.rows > 1 => {
                    // Only `f32` through the caches is stored for several rows: a copy.
                    let from = self.input(step, 0, a, first);
                    let output =
                        Output { base: self.element(arg, first).cast(), stream_until: 0, row: self.row_of_arg(arg) };
                    let range = Loop { simd: self.simd, rows: self.rows, length, output };
                    range.load(Dtype::F32, from.base().cast(), 4 * from.row());
                }
                Inst::Store { arg, a } => {
                    self.store_row(arg, self.input(step, 0, a, first), columns);
                }
                Inst::Keep { dst, seed, offset, threshold } => {
                    let seed = self.input(step, 0, seed, 0).base().read().to_bits();
                    let element = self.row as u64 * self.cols as u64 + (self.origin + first) as u64;
                    let random = self.memory.add(self.places.random);
                    let keep = Keep { key: [seed, offset], threshold };
                    philox::keep(self.simd, keep, element, length, random);
                    let output = self.output(dst, first);
                    let from = random.add((element % 4) as usize).cast();
                    Loop::one_row(self.simd, length, output).load(Dtype::F32, from, 0);
                }
                _ => self.lanes(step, columns),
            }
        }
    }

    /// Instructions that compute lanes of a strip.
    unsafe fn lanes(&self, step: &Step, columns: Columns) {
        let Columns { first, length } = columns;
        let Some(dst) = super::scratch::destination(step.inst) else {
            unreachable!("instructions without a destination are done by the caller, got {:?}", step.inst)
        };
        // SAFETY: passed on to the caller.
        unsafe {
            let direct = step.store.and_then(|arg| self.direct_output(arg, columns));
            let output = direct.unwrap_or_else(|| self.output(dst, first));
            let range = Loop { simd: self.simd, rows: self.rows, length, output };
            match (step.reduce, step.inst) {
                (Some((op, into)), _) => {
                    let Some(chained) = Chained::of(step.inst, |slot, source| self.input(step, slot, source, first))
                    else {
                        unreachable!("only these are prepared with a reduction, got {:?}", step.inst)
                    };
                    range.chained(chained, op, self.reduced_strip(step, into, columns));
                }
                (None, Inst::Load { arg, .. }) => {
                    let dtype = self.launch.program.args[usize::from(arg)].dtype;
                    range.load(dtype, self.element(arg, first), self.row_of_arg(arg) * dtype.bytes() as isize);
                }
                (None, Inst::ColumnIndex { .. }) => range.count_from((self.origin + first) as i32),
                (None, _) => self.compute(step, range, Operands::Strip { first }),
            }
            if let (Some(arg), None) = (step.store, direct) {
                self.store_row(arg, Input::lanes(output.base), columns);
            }
        }
    }

    /// Instructions that are the same for a strip and for the scalars of all rows in flight.
    unsafe fn compute(&self, step: &Step, range: Loop<S>, operands: Operands) {
        let input = |slot: usize, source: Src| match operands {
            // SAFETY: passed on to the caller.
            Operands::Strip { first } => unsafe { self.input(step, slot, source, first) },
            // SAFETY: passed on to the caller.
            Operands::Rows => unsafe { self.row_input(step, slot, source) },
        };
        let done = visit(step.inst, Compute { range, input });
        assert!(done.is_some(), "moves, indices and reductions are done by the callers, got {:?}", step.inst);
    }

    /// What a reduction into `into` over these columns needs.
    unsafe fn reduced_strip(&self, step: &Step, into: u16, columns: Columns) -> Strip {
        let Columns { first, length } = columns;
        let last = first + length == self.cols;
        // SAFETY: the memory holds the lanes of every step and all scalars.
        unsafe {
            let lane = self.row_lanes(into).add(self.flight);
            let (lanes, into) = (self.small().add(step.lanes), self.scalar(into));
            Strip { first, length, last, lanes, into, lane, rows: self.rows, small: self.places.small }
        }
    }

    /// The block in which a scalar has a lane for each row in flight.
    unsafe fn row_lanes(&self, scalar: u16) -> *mut f32 {
        // SAFETY: the program was checked to have that scalar.
        unsafe { self.memory.add(usize::from(scalar) * BLOCK) }
    }

    /// Operand `slot` of a step of the row work: a lane for each row in flight.
    unsafe fn row_input(&self, step: &Step, slot: usize, source: Src) -> Input {
        // SAFETY: the program was checked to have these places.
        let base = unsafe {
            match source {
                Src::Scalar(scalar) => self.row_lanes(scalar),
                Src::Const(_) | Src::ConstInt(_) => self.small().add(step.constants + slot * BLOCK),
                Src::Tile(_) | Src::Kept(_) | Src::Arg(_) => unreachable!("row work reads scalars, got {source:?}"),
            }
        };
        Input::lanes(base)
    }

    /// The block of a scalar of this row: equal lanes.
    unsafe fn scalar(&self, scalar: u16) -> *mut f32 {
        // SAFETY: the program was checked to have that scalar.
        unsafe { self.small().add(usize::from(scalar) * BLOCK) }
    }

    /// Scalars, constants and lanes of this row.
    #[inline]
    unsafe fn small(&self) -> *mut f32 {
        // SAFETY: the memory holds as many as there are rows in flight.
        unsafe { self.memory.add(self.places.first_small + self.flight * self.places.small) }
    }

    /// Makes every lane of a scalar `value`. With the machine's own vectors: a vector that was stored in smaller pieces
    /// cannot be forwarded to the load that follows, and waits some 15 cycles.
    unsafe fn fill(&self, scalar: u16, value: f32) {
        // SAFETY: the program was checked to have that scalar.
        let output = Output::lanes(unsafe { self.scalar(scalar) });
        // SAFETY: one vector fits a scalar's block.
        unsafe { Loop::one_row(self.simd, S::WIDTH, output).splat(value) }
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
            match source {
                Src::Tile(tile) => Input::lanes(self.tile(tile)).rows_apart(self.places.tiles_row as isize),
                Src::Kept(kept) => Input::lanes(self.kept(kept, first)).rows_apart(self.places.kept_rows as isize),
                Src::Arg(arg) => Input::lanes(self.element(arg, first).cast()).rows_apart(self.row_of_arg(arg)),
                Src::Scalar(scalar) => Input::block(self.scalar(scalar)).rows_apart(self.places.small as isize),
                Src::Const(_) | Src::ConstInt(_) => Input::block(self.small().add(step.constants + slot * BLOCK)),
            }
        }
    }

    unsafe fn output(&self, dst: Dst, first: usize) -> Output {
        // SAFETY: the program was checked to have these places.
        let (base, row) = unsafe {
            match dst {
                Dst::Tile(tile) => (self.tile(tile), self.places.tiles_row),
                Dst::Kept(kept) => (self.kept(kept, first), self.places.kept_rows),
                Dst::Scalar(scalar) => (self.scalar(scalar), self.places.small),
            }
        };
        Output { base, stream_until: 0, row: row as isize }
    }

    unsafe fn tile(&self, tile: u16) -> *mut f32 {
        let place = self.places.tiles + self.flight * self.places.tiles_row + usize::from(tile) * self.places.tile;
        // SAFETY: the program was checked to have that tile.
        unsafe { self.memory.add(place) }
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
            return Some(Output { base, stream_until: 0, row: self.row_of_arg(arg) });
        }
        let stream_until = columns.length / BLOCK * BLOCK;
        (base as usize).is_multiple_of(LINE).then_some(Output { base, stream_until, row: 0 })
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

/// Runs a function over a range; `input` says where each operand is.
struct Compute<S, I> {
    range: Loop<S>,
    input: I,
}

impl<S: Simd, I: Fn(usize, Src) -> Input> Visitor for Compute<S, I> {
    type Output = ();

    fn visit<F: Function<N>, const N: usize>(self, function: F, operands: [Src; N]) {
        let inputs = std::array::from_fn(|slot| (self.input)(slot, operands[slot]));
        // SAFETY: one is made only in `Frame::compute`, whose caller promises that the operands and the result cover the range.
        unsafe { self.range.map(function, inputs) }
    }
}
