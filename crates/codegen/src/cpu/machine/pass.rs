//! The loops of a pass around its straight-line code.
//!
//! ```text
//! row work                          one vector for all rows in flight; moves a row at a time
//! for each row in flight
//!     head                          where results stream: the columns before the first whole cache line
//!     loop over whole bodies        past the caches, or through them where lines do not start with vectors
//!     tail                          the same vectors with a mask
//!     reductions to scalars
//! ```

mod random;
mod rows;

use std::mem::offset_of;

use super::encode::{self as x86, Arithmetic, Assembler, Condition, Masked, Memory, Operand, Size};
use super::frame::{self, Context, Frame, Pointer, field};
use super::lower::{Strip, record};
use super::values::Op;
use rows::{Place, Prefetch, Rows};

use super::vectors::{self, Held, Target, TooManyMasks, Variant};
use crate::cpu::program::{Access, Dst, Inst, LANES, Pass, Src, TileProgram};
use crate::cpu::simd::sources;

/// Vectors of a loop's body: as many chains of dependent operations as keep two units of four cycles busy.
const BODY: usize = 8;
/// Vectors of a group of random words.
const GROUP: usize = 4;

/// Emits the passes of a program.
pub struct Passes<'a> {
    pub assembler: &'a mut Assembler,
    pub target: Target,
    pub program: &'a TileProgram,
    /// The strip work of each pass.
    pub strips: Vec<Strip>,
    /// Operations per vector of each pass.
    pub work: Vec<usize>,
    /// Places that all passes share.
    pub frame: Frame,
    /// Bytes that the frames of all passes take.
    pub stack: usize,
}

impl Passes<'_> {
    /// Emits pass `number`.
    pub fn pass(&mut self, number: usize) -> Result<(), TooManyMasks> {
        let program = self.program;
        let pass = &program.passes[number];
        self.assembler.comment(|| format!("pass {number}"));
        self.row_work(pass)?;
        if pass.strip.is_empty() {
            return Ok(());
        }
        pass.strip.iter().for_each(|inst| self.assembler.comment(|| inst.to_string()));
        let strip = std::mem::take(&mut self.strips[number]);
        self.frame.pointers = pointers(&strip.ops);
        self.frame.reductions = strip.reductions.len();
        self.frame.vectors = LANES / self.target.width();
        self.frame.body = BODY;
        let (held, together) = self.hold(&strip)?;
        let rows = Rows { strip: &strip, held: &held, together, prefetches: self.prefetches(number) };
        self.rows(&rows)?;
        self.stack = self.stack.max(self.frame.bytes as usize);
        Ok(())
    }

    fn row_work(&mut self, pass: &Pass) -> Result<(), TooManyMasks> {
        let is_computed = |inst: &Inst| {
            !matches!(inst, Inst::Load { .. } | Inst::Store { .. } | Inst::RowIndex { .. } | Inst::ColumnAdd { .. })
        };
        let (target, program) = (self.target, self.program);
        (self.frame.reductions, self.frame.pointers) = (0, Vec::new());
        for insts in pass.row.chunk_by(|a, b| is_computed(a) && is_computed(b)) {
            insts.iter().for_each(|inst| self.assembler.comment(|| inst.to_string()));
            let held = Held::default();
            match insts[0] {
                Inst::Load { arg, dst } => {
                    let Dst::Scalar(scalar) = dst else { unreachable!("checked with the program") };
                    let ops = record(target, program, |notes| notes.load_one(arg, scalar));
                    self.one_element(&ops)?;
                }
                Inst::Store { arg, a } => {
                    let ops = record(target, program, |notes| notes.store_one(arg, a));
                    self.one_element(&ops)?;
                }
                Inst::RowIndex { dst, axis } => {
                    let Dst::Scalar(scalar) = dst else { unreachable!("checked with the program") };
                    self.row_index(scalar, axis);
                }
                Inst::ColumnAdd { partial, a } => self.add_scalar(partial, a),
                _ => {
                    let ops = record(target, program, |notes| notes.scalars(insts));
                    self.odd_lanes(ops.iter());
                    self.assembler.load(frame::SCALARS, field(offset_of!(Context, lanes)));
                    for vector in 0..16 / target.width() {
                        self.vectors(&ops, &held, Variant::whole(vector))?;
                    }
                }
            }
        }
        self.stack = self.stack.max(self.frame.bytes as usize);
        Ok(())
    }

    fn vectors(&mut self, ops: &[Op], held: &Held, variant: Variant) -> Result<usize, TooManyMasks> {
        vectors::emit(self.assembler, self.target, &mut self.frame, ops, held, variant)
    }

    /// A loop over the rows in flight.
    fn each_row(&mut self, body: impl FnOnce(&mut Self) -> Result<(), TooManyMasks>) -> Result<(), TooManyMasks> {
        let assembler = &mut *self.assembler;
        assembler.load(frame::ROWS_LEFT, field(offset_of!(Context, count)));
        assembler.load(frame::ADDRESSES, field(offset_of!(Context, addresses)));
        assembler.load(frame::SCALARS, field(offset_of!(Context, lanes)));
        let again = assembler.label();
        assembler.place(again);
        body(self)?;
        let assembler = &mut *self.assembler;
        assembler.compute_number(Arithmetic::Add, frame::ADDRESSES, 8 * self.program.args.len() as i32);
        assembler.compute_number(Arithmetic::Add, frame::SCALARS, 4);
        assembler.compute_number(Arithmetic::Sub, frame::ROWS_LEFT, 1);
        assembler.jump_if(Condition::NotEqual, again);
        Ok(())
    }

    /// Operations on one element per row.
    fn one_element(&mut self, ops: &[Op]) -> Result<(), TooManyMasks> {
        self.assembler.number(x86::RAX, 1);
        self.assembler.store(frame::TAIL_COUNT.memory(), x86::RAX);
        self.tail_mask();
        self.each_row(|passes| {
            passes.assembler.compute(Arithmetic::Xor, frame::COLUMN, frame::COLUMN);
            passes.vectors(ops, &Held::default(), Variant::tail(0)).map(drop)
        })
    }

    fn row_index(&mut self, scalar: u16, axis: u16) {
        let to = self.frame.scalar(scalar);
        // It cannot run out of masks: there are none.
        let _ = self.each_row(|passes| {
            let assembler = &mut *passes.assembler;
            passes.frame.row_number(assembler);
            assembler.load(x86::RCX, field(offset_of!(Context, axes)));
            for half in 0..2 {
                assembler.compute(Arithmetic::Xor, x86::RDX, x86::RDX);
                assembler.divide(Memory::at(x86::RCX, 16 * i32::from(axis) + 8 * half));
            }
            assembler.store_word(to, x86::RDX);
            Ok(())
        });
    }

    /// Adds a scalar of each row to a column sum of one column.
    fn add_scalar(&mut self, partial: u16, a: Src) {
        let before = &self.program.partials[..usize::from(partial)];
        let at: usize = before.iter().map(|partial| partial.width).sum();
        let term = match a {
            Src::Scalar(scalar) => self.frame.scalar(scalar),
            Src::Const(value) => Memory::constant(self.assembler.constant(&value.to_le_bytes())),
            Src::ConstInt(value) => Memory::constant(self.assembler.constant(&value.to_le_bytes())),
            Src::Tile(_) | Src::Kept(_) | Src::Arg(_) => unreachable!("row work reads scalars, got {a:?}"),
        };
        // As above.
        let _ = self.each_row(|passes| {
            let assembler = &mut *passes.assembler;
            assembler.load(x86::RAX, field(offset_of!(Context, partials)));
            let sum = Operand::Memory(Memory::at(x86::RAX, 4 * at as i32));
            assembler.vector(x86::VMOVSS, Size::Xmm, Masked::All, (0, 0, sum), None);
            assembler.vector(x86::VADDSS, Size::Xmm, Masked::All, (0, 0, Operand::Memory(term)), None);
            assembler.vector(x86::VMOVSS_STORE, Size::Xmm, Masked::All, (0, 0, sum), None);
            Ok(())
        });
    }

    /// How many vectors are emitted together, and the leaves that stay in registers: as many as leave enough registers for the rest.
    fn hold(&mut self, strip: &Strip) -> Result<(Held, usize), TooManyMasks> {
        let registers = self.target.registers();
        let vectors = self.frame.vectors as u8;
        let mut top = registers;
        let gathered = strip.reductions.iter().map(|_| {
            // Half of the registers are for what is computed.
            let left = top.checked_sub(vectors).filter(|&left| left + 1 >= registers / 2)?;
            top = left;
            Some(left)
        });
        let gathered: Vec<Option<u8>> = gathered.collect();
        let leaves = leaves(strip);
        let bare = Held { leaves: Vec::new(), gathered: gathered.clone() };
        let fits = |together: usize| self.spills(strip, &bare, together).is_ok_and(|spills| spills <= together / 2);
        let together = [8, 4, 2].into_iter().find(|&together| fits(together)).unwrap_or(1);
        let least = self.spills(strip, &bare, together)?;
        // Emitting takes time, so not every number is tried.
        let most = leaves.len().min(usize::from(top).saturating_sub(4));
        let counts = std::iter::successors(Some(most), |&count| Some(count * 2 / 3));
        for count in counts.take_while(|&count| count > 0) {
            let leaves = leaves[..count].iter().enumerate().map(|(at, &leaf)| (leaf, top - 1 - at as u8));
            let held = Held { leaves: leaves.collect(), gathered: gathered.clone() };
            if self.spills(strip, &held, together)? <= least {
                return Ok((held, together));
            }
        }
        Ok((bare, together))
    }

    /// Number of values that would spill with so many vectors together.
    fn spills(&self, strip: &Strip, held: &Held, together: usize) -> Result<usize, TooManyMasks> {
        let mut trial = Assembler::new(self.target.is_avx512(), false);
        let mut frame = self.frame.clone();
        let mut spills = 0;
        let groups = Variant { count: self.groups_together(), ..Variant::whole(0) };
        for ops in &strip.keeps {
            spills += vectors::emit(&mut trial, self.target, &mut frame, ops, held, groups)?;
        }
        let variant = Variant { count: together, ..Variant::whole(0) };
        Ok(spills + vectors::emit(&mut trial, self.target, &mut frame, &strip.ops, held, variant)?)
    }

    /// The prefetches of a pass. While a pass computes on a row that is in the cache, memory would be idle, so prefetches of the next
    /// rows are distributed over all passes, as the work is: a pass that only sums takes a cycle or two per vector, and a line that is fetched
    /// takes ten or more. For rows that are too long for that, the first reader of each line prefetches it; lines of large
    /// results are prefetched by their writer.
    fn prefetches(&self, number: usize) -> Vec<Prefetch> {
        let program = self.program;
        let before: usize = self.work[..number].iter().sum();
        let all: usize = self.work.iter().sum();
        let mut found = Vec::new();
        for (arg, spec) in program.args.iter().enumerate() {
            let along = matches!(spec.access, Access::Row | Access::GatheredRow { .. });
            if !along || self.frame.repeats[arg] {
                continue;
            }
            let arg = arg as u16;
            let lines = (self.frame.body * self.target.width() * spec.dtype.bytes()).div_ceil(64);
            if spec.written {
                let is_stored = |inst: &Inst| matches!(*inst, Inst::Store { arg: stored, .. } if stored == arg);
                if self.frame.fetches[usize::from(arg)] && program.passes[number].strip.iter().any(is_stored) {
                    found.push(Prefetch { arg, writes: true, lines: 0..lines, place: Place::Ahead });
                }
                continue;
            }
            let row = program.cols * spec.dtype.bytes();
            if program.flat || row > LONG_ROW {
                let is_read = |pass: &Pass| pass.strip.iter().any(|&inst| reads(inst, arg));
                if program.passes.iter().position(is_read) == Some(number) {
                    found.push(Prefetch { arg, writes: false, lines: 0..lines, place: Place::Ahead });
                }
                continue;
            }
            let part = |work: usize| (work * lines + all / 2) / all.max(1);
            let place = Place::NextRow { level: if row > SHORT_ROW { 2 } else { 1 } };
            found.push(Prefetch { arg, writes: false, lines: part(before)..part(before + self.work[number]), place });
        }
        found
    }
}

/// Maximum bytes of a row such that the next one also fits L1, and such that it fits L2.
const SHORT_ROW: usize = 8 << 10;
const LONG_ROW: usize = 256 << 10;

fn reads(inst: Inst, arg: u16) -> bool {
    matches!(inst, Inst::Load { arg: loaded, .. } if loaded == arg) || sources(inst).contains(&Some(Src::Arg(arg)))
}

/// Leaves of a pass that may stay in registers, those that are read most first.
fn leaves(strip: &Strip) -> Vec<Op> {
    let mut counted: Vec<(Op, usize)> = Vec::new();
    // Random words are made once for four vectors.
    let weighted = strip.keeps.iter().map(|ops| (ops, 1)).chain([(&strip.ops, 4)]);
    for (ops, weight) in weighted {
        for operand in ops.iter().flat_map(|op| op.operands()) {
            let op = ops[operand.index()];
            match counted.iter_mut().find(|(known, _)| *known == op) {
                _ if !op.is_leaf() => {}
                Some((_, count)) => *count += weight,
                None => counted.push((op, weight)),
            }
        }
    }
    counted.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    counted.into_iter().map(|(op, _)| op).collect()
}

/// The addresses that operations use, in the order of their first use.
fn pointers(ops: &[Op]) -> Vec<Pointer> {
    let mut found = Vec::new();
    for op in ops {
        let pointer = match *op {
            Op::Load(arg) | Op::Store(arg, _) => Pointer::Argument(arg),
            Op::Kept(_) | Op::Keeping(..) => Pointer::Kept,
            Op::Partial(_) | Op::AddColumn(..) => Pointer::Partials,
            _ => continue,
        };
        if !found.contains(&pointer) {
            found.push(pointer);
        }
    }
    found
}
