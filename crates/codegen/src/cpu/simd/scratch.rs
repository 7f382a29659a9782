//! The workspace of one thread that runs a program, and the prepared program.
//!
//! Preparing assigns an offset to every operand, and folds a `Store` of an `f32` tile into the instruction that computes the
//! tile, so that the last loop over a strip writes the argument directly.

use deuteron_graph::{BinaryOp, Dtype};

use super::ahead::Ahead;
use super::check::check;
use super::compiled::Compiled;
use super::launch::{Cursor, Launch};
use super::lines::Lines;
use super::philox::SLACK;
use crate::cpu::program::{Access, Dst, Inst, LANES, Pass, STRIP, Src, TileProgram, TileReduce};

/// Equal lanes that stand for a scalar or a constant: the widest vector.
pub(super) const BLOCK: usize = 16;

/// Temporaries, kept rows, scalars and reduction lanes of one thread. Running allocates nothing.
pub struct Scratch {
    pub(super) passes: Vec<Prepared>,
    pub(super) memory: Lines,
    pub(super) places: Places,
    pub(super) ahead: Ahead,
    /// One for each argument.
    pub(super) cursors: Vec<Cursor>,
    /// Rows in flight at once.
    pub(super) rows: usize,
    /// Whether one instruction may do all of them: each row is one strip, with tiles of its own.
    pub(super) together: bool,
    /// Elements from each argument's base to each row in flight.
    pub(super) offsets: Vec<usize>,
    /// The same for the rows that come next.
    pub(super) next_offsets: Vec<usize>,
    /// The program's machine code, which runs instead of its passes.
    pub(super) compiled: Option<Compiled>,
    /// For machine code: where each argument's row in flight is, then the same for those that come next.
    pub(super) addresses: Vec<*mut u8>,
    #[cfg(debug_assertions)]
    pub(super) program: TileProgram,
}

// SAFETY: `addresses` are only numbers until code runs on them, and they are written anew before that.
unsafe impl Send for Scratch {}

/// One pass, ready to run.
pub(super) struct Prepared {
    pub row: Vec<Step>,
    pub strip: Vec<Step>,
    /// Arguments that the strips read or write row by row.
    pub reads: Vec<usize>,
    /// Scalars that the row work makes and strips read.
    pub spread: Vec<u16>,
}

/// An instruction, where its constants are, and whether its tile goes straight to an argument.
#[derive(Clone, Copy)]
pub(super) struct Step {
    pub inst: Inst,
    /// Element of the memory where the blocks of its constants start, one block for each operand.
    pub constants: usize,
    /// The argument that the destination tile is stored to.
    pub store: Option<u16>,
    /// Element of the memory where the lanes of its reduction are.
    pub lanes: usize,
    /// The reduction over its results that is done in the same sweep, and the scalar it goes to.
    pub reduce: Option<(TileReduce, u16)>,
}

/// Where things are in the memory, in elements.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// Where the small things of the rows in flight start. Before them stand the scalars that row work works on: a block
    /// for each, a lane for each row in flight.
    pub first_small: usize,
    /// Elements of one row's small things: scalars as blocks of equal lanes, constants, lanes of reductions.
    pub small: usize,
    pub tiles: usize,
    /// Elements of one tile.
    pub tile: usize,
    /// Elements of all tiles of one row in flight; 0 where rows in flight share them.
    pub tiles_row: usize,
    pub random: usize,
    pub kept: usize,
    /// Elements of one kept row.
    pub kept_row: usize,
    /// Elements of all kept rows of one row in flight.
    pub kept_rows: usize,
}

impl Scratch {
    /// Memory for one thread that runs `program`.
    ///
    /// # Panics
    /// If the program is malformed: row work that is not scalar, strip work with a scalar destination, a place out of
    /// range, or a flat program with rows.
    pub fn for_program(program: &TileProgram) -> Scratch {
        Scratch::of(program, rows_in_flight(program), None)
    }

    /// The same for a program that is run by its machine code.
    ///
    /// # Panics
    /// As [`Scratch::for_program`].
    pub fn with_code(program: &TileProgram, compiled: Compiled) -> Scratch {
        Scratch::of(program, compiled_rows(program), Some(compiled))
    }

    fn of(program: &TileProgram, rows: usize, compiled: Option<Compiled>) -> Scratch {
        check(program);
        // Scalars are first, at their number; then constants and lanes, as they are met.
        let mut planner = Planner { next: usize::from(program.scalars) * BLOCK, constants: Vec::new() };
        let passes: Vec<Prepared> = program.passes.iter().map(|pass| planner.prepare(program, pass)).collect();
        let kept_row = kept_row(program);
        let (first_small, small) = (usize::from(program.scalars) * BLOCK, planner.next);
        let tiles = first_small + rows * small;
        // Rows of one strip each have tiles of their own, so that one instruction does all rows in flight.
        let together = rows > 1 && program.cols <= STRIP;
        let tile = if together { kept_row } else { STRIP };
        // Code has its tiles and its random numbers in registers.
        let interprets = usize::from(compiled.is_none());
        let all_tiles = interprets * usize::from(program.tiles) * tile;
        let random = tiles + all_tiles * if together { rows } else { 1 };
        let kept = random + interprets * (STRIP + SLACK).next_multiple_of(BLOCK);
        let kept_rows = usize::from(program.kept) * kept_row;
        let elements = kept + rows * kept_rows;
        let mut memory = Lines::new(elements);
        for (at, value) in planner.constants {
            (0..rows).for_each(|row| memory.fill_line((first_small + row * small + at) / BLOCK, value));
        }
        let mut reads: Vec<usize> = passes.iter().flat_map(|pass| pass.reads.iter().copied()).collect();
        reads.sort_unstable();
        reads.dedup();
        Scratch {
            ahead: Ahead::new(reads, passes.iter().map(|pass| pass.strip.len()).sum(), rows),
            passes,
            memory,
            places: Places {
                first_small,
                small,
                tiles,
                tile,
                tiles_row: if together { all_tiles } else { 0 },
                random,
                kept,
                kept_row,
                kept_rows,
            },
            together,
            cursors: vec![Cursor::default(); program.args.len()],
            rows,
            offsets: vec![0; rows * program.args.len()],
            next_offsets: vec![0; rows * program.args.len()],
            addresses: vec![std::ptr::null_mut(); 2 * rows * program.args.len()],
            compiled,
            #[cfg(debug_assertions)]
            program: program.clone(),
        }
    }
}

impl Scratch {
    /// Goes to the first row of a span.
    pub(super) fn seek(&mut self, launch: &Launch<'_>, span: &std::ops::Range<usize>) {
        for (cursor, arg) in self.cursors.iter_mut().zip(launch.args) {
            cursor.seek(arg, if launch.program.flat { 0 } else { span.start });
        }
    }
}

/// Elements of a kept row.
pub(super) fn kept_row(program: &TileProgram) -> usize {
    program.cols.next_multiple_of(LANES)
}

/// Rows that machine code is called for at once: a call takes as long as a few vectors, so short rows share one.
pub(super) fn compiled_rows(program: &TileProgram) -> usize {
    if program.flat { 1 } else { (ROWS_ELEMENTS / program.cols.max(1)).clamp(1, MOST_ROWS) }
}

/// A reduction ends in a chain of dependent instructions of some 100 cycles, and the next pass waits for it; another row
/// fills the gap. More rows than fit L1 together would cost more than they hide.
pub(in crate::cpu) fn rows_in_flight(program: &TileProgram) -> usize {
    if program.passes.len() < 2 { 1 } else { (ROWS_ELEMENTS / program.cols.max(1)).clamp(1, MOST_ROWS) }
}

/// Columns of all rows in flight, about: 12 KiB of an argument, and as much that is fetched ahead or kept.
const ROWS_ELEMENTS: usize = 3072;
/// Most rows in flight.
const MOST_ROWS: usize = BLOCK;

struct Planner {
    next: usize,
    constants: Vec<(usize, f32)>,
}

impl Planner {
    fn prepare(&mut self, program: &TileProgram, pass: &Pass) -> Prepared {
        let row = pass.row.iter().map(|&inst| self.step(inst)).collect();
        let strip = sweeps(program, pass).into_iter().map(|sweep| {
            let mut step = self.step(sweep.inst);
            (step.store, step.reduce) = (sweep.store, sweep.reduce);
            if step.reduce.is_some() {
                step.lanes = self.next;
                self.next += 2 * LANES;
            }
            step
        });
        Prepared { strip: strip.collect(), row, reads: row_reads(program, pass), spread: spread(program, pass) }
    }

    fn step(&mut self, inst: Inst) -> Step {
        let constants = self.next;
        for (slot, source) in sources(inst).into_iter().enumerate() {
            let value = match source {
                Some(Src::Const(value)) => value,
                Some(Src::ConstInt(value)) => f32::from_bits(value as u32),
                _ => continue,
            };
            self.constants.push((constants + slot * BLOCK, value));
            self.next = self.next.max(constants + (slot + 1) * BLOCK);
        }
        let lanes = self.next;
        if matches!(inst, Inst::Reduce { .. }) {
            self.next += 2 * LANES;
        }
        Step { inst, constants, store: None, lanes, reduce: None }
    }
}

/// An instruction of the strips with what was folded into it.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Sweep {
    pub inst: Inst,
    /// The argument that the destination tile is stored to.
    pub store: Option<u16>,
    /// The reduction over its results that is done in the same sweep, and the scalar it goes to.
    pub reduce: Option<(TileReduce, u16)>,
}

/// The sweeps over a strip that a pass takes: its instructions, less those that another one does on its way.
pub(in crate::cpu) fn sweeps(program: &TileProgram, pass: &Pass) -> Vec<Sweep> {
    let mut sweeps = Vec::with_capacity(pass.strip.len());
    // Stores that were folded into their producers are dropped.
    let mut dropped = vec![false; pass.strip.len()];
    let mut reduced = false;
    for (at, &inst) in pass.strip.iter().enumerate() {
        let stored = folded_store(program, pass, at);
        if let Some((to, _)) = stored {
            dropped[to] = true;
        }
        let reduce = folded_reduce(pass, at);
        if !dropped[at] && !reduced {
            sweeps.push(Sweep { inst, store: stored.map(|(_, arg)| arg), reduce });
        }
        reduced = reduce.is_some();
    }
    sweeps
}

/// Operands of an instruction, in the order of its constants' blocks.
pub(in crate::cpu) fn sources(inst: Inst) -> [Option<Src>; 5] {
    match inst {
        Inst::Load { .. } | Inst::ColumnIndex { .. } | Inst::RowIndex { .. } => [None; 5],
        Inst::Unary { a, .. } | Inst::ColumnAdd { a, .. } | Inst::Store { a, .. } => [Some(a), None, None, None, None],
        Inst::Keep { seed, .. } => [Some(seed), None, None, None, None],
        Inst::Binary { a, b, .. } | Inst::Integer { a, b, .. } => [Some(a), Some(b), None, None, None],
        Inst::Compare { a, b, .. } => [Some(a), Some(b), None, None, None],
        Inst::Reduce { a, b, .. } | Inst::ExpSub { a, b, .. } => [Some(a), Some(b), None, None, None],
        Inst::MulAdd { a, b, c, .. } => [Some(a), Some(b), Some(c), None, None],
        Inst::MulMulAdd { a, b, c, d, .. } => [Some(a), Some(b), Some(c), Some(d), None],
        Inst::SubMulMulAdd { a, b, c, d, e, .. } => [Some(a), Some(b), Some(c), Some(d), Some(e)],
        Inst::Select { cond, a, b, .. } => [Some(cond), Some(a), Some(b), None, None],
    }
}

/// Where an instruction writes lanes.
pub(in crate::cpu) fn destination(inst: Inst) -> Option<Dst> {
    match inst {
        Inst::Load { dst, .. }
        | Inst::Unary { dst, .. }
        | Inst::Binary { dst, .. }
        | Inst::Integer { dst, .. }
        | Inst::MulAdd { dst, .. }
        | Inst::MulMulAdd { dst, .. }
        | Inst::SubMulMulAdd { dst, .. }
        | Inst::ExpSub { dst, .. }
        | Inst::Compare { dst, .. }
        | Inst::Select { dst, .. }
        | Inst::ColumnIndex { dst }
        | Inst::RowIndex { dst, .. }
        | Inst::Keep { dst, .. } => Some(dst),
        Inst::Reduce { .. } | Inst::ColumnAdd { .. } | Inst::Store { .. } => None,
    }
}

/// Scalars that the row work of a pass makes and strips read.
pub(in crate::cpu) fn spread(program: &TileProgram, pass: &Pass) -> Vec<u16> {
    let strips = || program.passes.iter().flat_map(|pass| pass.strip.iter().copied());
    let made = pass.row.iter().filter_map(|&inst| match destination(inst) {
        Some(Dst::Scalar(scalar)) => Some(scalar),
        _ => None,
    });
    made.filter(|&scalar| strips().any(|inst| sources(inst).contains(&Some(Src::Scalar(scalar))))).collect()
}

/// The reduction right behind instruction `at` of the strips, if it is over what that makes and both can be one sweep.
fn folded_reduce(pass: &Pass, at: usize) -> Option<(TileReduce, u16)> {
    let chained = matches!(
        pass.strip[at],
        Inst::Binary { op: BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul, .. }
            | Inst::MulAdd { .. }
            | Inst::MulMulAdd { .. }
            | Inst::SubMulMulAdd { .. }
            | Inst::ExpSub { .. }
    );
    let made = match destination(pass.strip[at])? {
        Dst::Tile(tile) => Src::Tile(tile),
        Dst::Kept(kept) => Src::Kept(kept),
        Dst::Scalar(_) => return None,
    };
    match *pass.strip.get(at + 1)? {
        Inst::Reduce { op: op @ (TileReduce::Sum | TileReduce::Max | TileReduce::AbsMax), into, a, .. } => {
            (chained && a == made).then_some((op, into))
        }
        Inst::Reduce { op: TileReduce::Dot, into, a, b } => {
            (chained && a == made && b == made).then_some((TileReduce::Dot, into))
        }
        _ => None,
    }
}

/// The position of the store that instruction `at` can take over, and its argument. The tile must have no other use,
/// and nothing that touches an argument may stand between the two: arguments may be the same memory.
fn folded_store(program: &TileProgram, pass: &Pass, at: usize) -> Option<(usize, u16)> {
    let tile = match (pass.strip[at], destination(pass.strip[at])?) {
        (Inst::Keep { .. }, _) => return None, // goes through a place of its own
        (_, Dst::Tile(tile)) => tile,
        (_, Dst::Kept(_) | Dst::Scalar(_)) => return None,
    };
    for (to, &inst) in pass.strip.iter().enumerate().skip(at + 1) {
        match inst {
            Inst::Store { arg, a: Src::Tile(stored) } if stored == tile => {
                let words = matches!(program.args[usize::from(arg)].dtype, Dtype::F32 | Dtype::I32);
                return (words && uses(program, tile) == 1 && makers(program, tile) == 1).then_some((to, arg));
            }
            Inst::Store { .. } | Inst::Load { .. } => return None,
            _ if sources(inst).iter().any(|source| matches!(source, Some(Src::Arg(_)))) => return None,
            _ => {}
        }
    }
    None
}

fn instructions(program: &TileProgram) -> impl Iterator<Item = Inst> + '_ {
    program.passes.iter().flat_map(|pass| pass.row.iter().chain(&pass.strip)).copied()
}

fn uses(program: &TileProgram, tile: u16) -> usize {
    instructions(program).flat_map(sources).filter(|&source| source == Some(Src::Tile(tile))).count()
}

fn makers(program: &TileProgram, tile: u16) -> usize {
    instructions(program).filter(|&inst| destination(inst) == Some(Dst::Tile(tile))).count()
}

/// Arguments that the strips of a pass read along the row, each once.
fn row_reads(program: &TileProgram, pass: &Pass) -> Vec<usize> {
    let mut reads = Vec::new();
    for &inst in &pass.strip {
        let loaded = match inst {
            Inst::Load { arg, .. } | Inst::Store { arg, .. } => Some(arg),
            _ => None,
        };
        let read = sources(inst).into_iter().filter_map(|source| match source {
            Some(Src::Arg(arg)) => Some(arg),
            _ => None,
        });
        for arg in loaded.into_iter().chain(read).map(usize::from) {
            if program.args[arg].access == Access::Row && !reads.contains(&arg) {
                reads.push(arg);
            }
        }
    }
    reads
}
