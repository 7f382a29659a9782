//! The loops over rows and columns.

use std::mem::offset_of;

use super::super::encode::{self as x86, Arithmetic, Assembler, Condition, Masked, Memory, Operand, Size};
use super::super::frame::{self, Context, Frame, field};
use super::super::lower::Strip;
use super::super::values::{Op, Two};
use super::super::vectors::{self, Held, ODD, TAIL, TAIL_VECTOR, Target, TooManyMasks, Variant};
use super::{GROUP, Passes};

/// Prefetch distance of a loop, in bytes. Hardware prefetchers stop at the end of a page.
const AHEAD: usize = 2048;

/// Lines of an argument that each iteration of a loop prefetches.
pub(super) struct Prefetch {
    pub arg: u16,
    /// The lines will be written.
    pub writes: bool,
    pub lines: std::ops::Range<usize>,
    pub place: Place,
}

/// Where these lines are.
#[derive(Clone, Copy)]
pub(super) enum Place {
    /// At the same columns of the row that comes next, to this level of the caches.
    NextRow { level: u8 },
    /// [`AHEAD`] in the same row.
    Ahead,
}

/// The strip work of a pass, ready to be put in loops.
pub(super) struct Rows<'a> {
    pub strip: &'a Strip,
    pub held: &'a Held,
    /// Vectors whose operations are emitted in turn.
    pub together: usize,
    pub prefetches: Vec<Prefetch>,
}

/// The loops over rows and columns.
impl Passes<'_> {
    pub(super) fn rows(&mut self, rows: &Rows<'_>) -> Result<(), TooManyMasks> {
        let assembler = &mut *self.assembler;
        let (scalars, others): (Vec<_>, Vec<_>) =
            rows.held.leaves.iter().partition(|(leaf, _)| matches!(leaf, Op::Scalar(_)));
        for &(leaf, register) in &others {
            vectors::load_leaf(assembler, self.target, &self.frame, leaf, register);
        }
        self.odd_lanes(rows.strip.keeps.iter().flatten().chain(&rows.strip.ops));
        let assembler = &mut *self.assembler;
        assembler.load(x86::RAX, field(offset_of!(Context, kept)));
        assembler.store(frame::KEPT.memory(), x86::RAX);
        self.each_row(|passes| {
            for &(leaf, register) in &scalars {
                vectors::load_leaf(passes.assembler, passes.target, &passes.frame, leaf, register);
            }
            passes.row(rows)?;
            if passes.frame.kept_rows > 0 {
                let assembler = &mut *passes.assembler;
                assembler.load(x86::RAX, frame::KEPT.memory());
                assembler.compute_number(Arithmetic::Add, x86::RAX, passes.frame.kept_rows as i32);
                assembler.store(frame::KEPT.memory(), x86::RAX);
            }
            Ok(())
        })
    }

    /// Sets the mask of odd lanes, where operations merge them.
    pub(super) fn odd_lanes<'o>(&mut self, mut ops: impl Iterator<Item = &'o Op>) {
        if self.target.is_avx512() && ops.any(|op| matches!(op, Op::Two(Two::EvenOdd, ..))) {
            self.assembler.number(x86::RAX, 0xAAAA);
            self.assembler.mask_from(ODD, x86::RAX);
        }
    }

    fn row(&mut self, rows: &Rows<'_>) -> Result<(), TooManyMasks> {
        self.frame.load_pointers(self.assembler);
        self.start_reductions(rows);
        self.assembler.load(frame::COLUMN, field(offset_of!(Context, begin)));
        self.start_random(rows)?;
        let streams = self.streams(rows);
        let tail = self.assembler.label();
        if !streams.is_empty() {
            let plain = self.assembler.label();
            let aligned = self.assembler.label();
            self.test_lines(&streams);
            self.assembler.jump_if(Condition::Equal, aligned);
            if rows.strip.reductions.is_empty() && rows.strip.keeps.is_empty() {
                self.head(rows, streams[0], plain)?;
                self.test_lines(&streams);
            }
            self.assembler.jump_if(Condition::NotEqual, plain);
            self.assembler.place(aligned);
            self.whole(rows, true)?;
            self.assembler.jump(tail);
            self.assembler.place(plain);
        }
        self.whole(rows, false)?;
        self.assembler.place(tail);
        self.assembler.load(x86::RAX, field(offset_of!(Context, end)));
        self.assembler.compute(Arithmetic::Sub, x86::RAX, frame::COLUMN);
        let whole = self.body_sizes(rows).into_iter().min().unwrap_or(0);
        self.masked(rows, whole)?;
        self.end_reductions(rows)
    }

    fn start_reductions(&mut self, rows: &Rows<'_>) {
        for (number, reduction) in rows.strip.reductions.iter().enumerate() {
            let start = Op::Const(reduction.start.to_bits());
            match rows.held.gathered[number] {
                Some(first) => (0..self.frame.vectors as u8).for_each(|vector| {
                    vectors::load_leaf(self.assembler, self.target, &self.frame, start, first + vector);
                }),
                None => {
                    vectors::load_leaf(self.assembler, self.target, &self.frame, start, 0);
                    for vector in 0..self.frame.vectors {
                        let to = Operand::Memory(self.frame.gathered(number as u16, vector).memory());
                        let size = self.target.size();
                        self.assembler.vector(x86::VMOVUPS_STORE, size, Masked::All, (0, 0, to), None);
                    }
                }
            }
        }
    }

    fn end_reductions(&mut self, rows: &Rows<'_>) -> Result<(), TooManyMasks> {
        for reduction in &rows.strip.reductions {
            self.vectors(&reduction.tree, rows.held, Variant::whole(0))?;
        }
        Ok(())
    }

    /// Arguments that the pass writes with streaming stores.
    fn streams(&self, rows: &Rows<'_>) -> Vec<u16> {
        let stored = rows.strip.ops.iter().filter_map(|op| match *op {
            Op::Store(arg, _) if self.frame.streams[usize::from(arg)] => Some(arg),
            _ => None,
        });
        stored.collect()
    }

    /// Compares with 0 the distance of the loop's column from the start of a cache line.
    fn test_lines(&mut self, streams: &[u16]) {
        let assembler = &mut *self.assembler;
        assembler.compute(Arithmetic::Xor, x86::RDX, x86::RDX);
        for &arg in streams {
            let at = self.frame.argument(assembler, arg, 0);
            assembler.address(x86::RAX, at);
            assembler.compute(Arithmetic::Or, x86::RDX, x86::RAX);
        }
        assembler.compute_number(Arithmetic::And, x86::RDX, 63);
    }

    /// The columns up to the first cache line of an argument. Goes to `plain` where no column starts one, or the row ends before.
    fn head(&mut self, rows: &Rows<'_>, arg: u16, plain: x86::Label) -> Result<(), TooManyMasks> {
        let bytes = self.frame.dtypes[usize::from(arg)].bytes();
        let assembler = &mut *self.assembler;
        let at = self.frame.argument(assembler, arg, 0);
        assembler.address(x86::RDX, at);
        assembler.compute(Arithmetic::Xor, x86::RAX, x86::RAX);
        assembler.compute(Arithmetic::Sub, x86::RAX, x86::RDX);
        assembler.compute_number(Arithmetic::And, x86::RAX, 63);
        if bytes > 1 {
            assembler.copy(x86::RDX, x86::RAX);
            assembler.compute_number(Arithmetic::And, x86::RDX, bytes as i32 - 1);
            assembler.jump_if(Condition::NotEqual, plain);
            assembler.shift_right(x86::RAX, bytes.trailing_zeros() as u8);
        }
        assembler.load(x86::RDX, field(offset_of!(Context, end)));
        assembler.compute(Arithmetic::Sub, x86::RDX, frame::COLUMN);
        assembler.compute(Arithmetic::Compare, x86::RAX, x86::RDX);
        assembler.jump_if(Condition::Above, plain);
        assembler.store(frame::HEAD.memory(), x86::RAX);
        self.masked(rows, (64 / bytes).div_ceil(self.target.width()))?;
        self.assembler.compute_memory(Arithmetic::Add, frame::COLUMN, frame::HEAD.memory());
        Ok(())
    }

    /// Vectors of the bodies that are tried in turn: a half one as well, where its end is also one of the lanes of reductions.
    fn body_sizes(&self, rows: &Rows<'_>) -> Vec<usize> {
        let half = self.frame.body / 2;
        let halves = rows.strip.reductions.is_empty() || half.is_multiple_of(self.frame.vectors);
        if halves { vec![self.frame.body, half] } else { vec![self.frame.body] }
    }

    /// Columns without a mask.
    fn whole(&mut self, rows: &Rows<'_>, stream: bool) -> Result<(), TooManyMasks> {
        self.body_sizes(rows).into_iter().try_for_each(|body| self.bodies(rows, body, stream))
    }

    /// Whole bodies, while there are any.
    fn bodies(&mut self, rows: &Rows<'_>, body: usize, stream: bool) -> Result<(), TooManyMasks> {
        let columns = (body * self.target.width()) as i32;
        let (again, done) = (self.assembler.label(), self.assembler.label());
        self.assembler.load(frame::LIMIT, field(offset_of!(Context, end)));
        self.assembler.compute_number(Arithmetic::Sub, frame::LIMIT, columns);
        self.assembler.compute(Arithmetic::Compare, frame::COLUMN, frame::LIMIT);
        self.assembler.jump_if(Condition::Greater, done);
        self.assembler.place(again);
        let lines = self.lines(rows, columns as usize);
        let count = rows.together.min(body);
        let groups = self.groups_together().min(body / GROUP);
        for first in (0..body / GROUP).step_by(groups) {
            self.random(rows, first, groups)?;
        }
        for vector in (0..body).step_by(count) {
            let variant = Variant { vector, count, tail: false, stream };
            let share = |vector: usize| vector * lines.len() / body;
            let lines = &lines[share(vector)..share(vector + count)];
            let Passes { assembler, target, frame, .. } = self;
            let fetch: vectors::Between<'_> = &mut |assembler, frame, number| lines[number].fetch(assembler, frame);
            vectors::emit_spread(assembler, *target, frame, &rows.strip.ops, rows.held, variant, (lines.len(), fetch))?;
        }
        self.assembler.compute_number(Arithmetic::Add, frame::COLUMN, columns);
        self.assembler.compute(Arithmetic::Compare, frame::COLUMN, frame::LIMIT);
        self.assembler.jump_if(Condition::LessOrEqual, again);
        self.assembler.place(done);
        Ok(())
    }

    /// `rax` columns from the loop's column on, of this many vectors at most.
    fn masked(&mut self, rows: &Rows<'_>, vectors: usize) -> Result<(), TooManyMasks> {
        let done = self.assembler.label();
        let width = self.target.width() as i32;
        self.assembler.store(frame::TAIL_LEFT.memory(), x86::RAX);
        for vector in 0..vectors {
            let assembler = &mut *self.assembler;
            assembler.load(x86::RAX, frame::TAIL_LEFT.memory());
            match vector {
                0 => assembler.compute_number(Arithmetic::Compare, x86::RAX, 0),
                _ => assembler.compute_number(Arithmetic::Sub, x86::RAX, width * vector as i32),
            }
            assembler.jump_if(Condition::LessOrEqual, done);
            if !self.target.is_avx512() {
                // One vector at most.
                let fits = assembler.label();
                assembler.compute_number(Arithmetic::Compare, x86::RAX, width);
                assembler.jump_if(Condition::LessOrEqual, fits);
                assembler.number(x86::RAX, width as u64);
                assembler.place(fits);
            }
            assembler.store(frame::TAIL_COUNT.memory(), x86::RAX);
            self.tail_mask();
            if vector.is_multiple_of(GROUP) {
                self.random(rows, vector / GROUP, 1)?;
            }
            self.vectors(&rows.strip.ops, rows.held, Variant::tail(vector))?;
        }
        self.assembler.place(done);
        Ok(())
    }

    /// The mask of the first `rax` lanes.
    pub(super) fn tail_mask(&mut self) {
        let assembler = &mut *self.assembler;
        match self.target {
            Target::Avx512 { .. } => {
                assembler.number(x86::RDX, 0xFFFF);
                assembler.bzhi(x86::RAX, x86::RDX, x86::RAX);
                assembler.mask_from(TAIL, x86::RAX);
            }
            Target::Avx2 => {
                let lanes: Vec<u8> =
                    (0..16u32).flat_map(|lane| (if lane < 8 { u32::MAX } else { 0 }).to_le_bytes()).collect();
                let table = assembler.constant(&lanes);
                assembler.address(x86::RDX, Memory::constant(table + 32));
                assembler.shift_left(x86::RAX, 2);
                assembler.compute(Arithmetic::Sub, x86::RDX, x86::RAX);
                let from = Operand::Memory(Memory::at(x86::RDX, 0));
                assembler.vector(x86::VMOVUPS, Size::Ymm, Masked::All, (TAIL_VECTOR, 0, from), None);
            }
        }
    }

    /// Lines that an iteration over so many columns prefetches, those of each argument in turn. Few can be on their way at a time, and a prefetch
    /// beyond that keeps a load port, so they are spread over the iteration.
    fn lines(&self, rows: &Rows<'_>, columns: usize) -> Vec<Line> {
        let of = |&Prefetch { arg, writes, ref lines, place }: &Prefetch| {
            let bytes = columns * self.frame.dtypes[usize::from(arg)].bytes();
            let lines = lines.clone().filter(move |line| 64 * line < bytes);
            lines.map(move |line| Line { arg, writes, line, place })
        };
        let mut lines: Vec<Line> = rows.prefetches.iter().flat_map(of).collect();
        lines.sort_by_key(|line| line.line);
        lines
    }
}

/// A line to prefetch.
struct Line {
    arg: u16,
    writes: bool,
    /// Its number from the loop's column on, in the row where it is.
    line: usize,
    place: Place,
}

impl Line {
    fn fetch(&self, assembler: &mut Assembler, frame: &Frame) {
        let Line { arg, writes, line, place } = *self;
        let (level, at) = match place {
            Place::NextRow { level } => (level, frame.next_argument(assembler, arg, 64 * line)),
            Place::Ahead => (1, frame.argument_behind(assembler, arg, AHEAD + 64 * line)),
        };
        match writes {
            true => assembler.prefetch_to_write(at),
            false => assembler.prefetch(level, at),
        }
    }
}
