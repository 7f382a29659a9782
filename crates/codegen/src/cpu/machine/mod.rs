//! Machine code of tile programs on x86-64, generated when a kernel is loaded.
//!
//! A [`TileProgram`] is compiled directly, so that emitter, listing and cost model are shared with the interpreter
//! ([`simd`](super::simd)), which runs programs without code. The difference is the location of values: the interpreter runs one instruction
//! over a strip before the next one, through tiles in L1; here one vector passes through the whole strip work of a pass in registers.
//!
//! | file | does |
//! |---|---|
//! | `values.rs` | records operations on lanes: the functions of `simd/math.rs`, `format.rs`, `reduce.rs` and `philox.rs`, written once |
//! | `lower.rs` | instructions of a program to such operations |
//! | `vectors.rs` | operations to instructions, values to registers |
//! | `weave.rs` | the operations of several vectors in turn |
//! | `pass.rs` | the loops over rows and columns, row work, random numbers, prefetches |
//! | `frame.rs` | the layout of the context, general registers and the stack |
//! | `encode.rs` | bytes of instructions, and their listing |
//! | `memory.rs` | pages that are written, then run, never both |
//!
//! Results have the bits of the interpreter of the same instruction set, except for the payload of a NaN.

mod encode;
mod frame;
mod lower;
mod memory;
mod pass;
#[cfg(test)]
mod tests;
mod values;
mod vectors;
mod weave;

use encode::{Arithmetic, Assembler};
pub use frame::Context;
use frame::{CALLER, CONTEXT, Frame, MOST_KEEPS};
use lower::Strip;
use memory::Executable;
use pass::Passes;
pub use vectors::Target;

use crate::cpu::program::{Inst, LANES, TileProgram, TileReduce};

/// Why a program has no machine code: the interpreter runs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Uncovered {
    /// the interpreter was asked for
    #[error("the interpreter was asked for")]
    Interpreter,
    /// no code is generated for this CPU
    #[error("no code is generated for this instruction set")]
    InstructionSet,
    /// rows without columns
    #[error("rows without columns")]
    NoColumns,
    /// the column of a largest element
    #[error("the column of the largest element is searched by the interpreter")]
    ArgMax,
    /// too many sets of random numbers
    #[error("more than {MOST_KEEPS} sets of random numbers in a pass")]
    RandomNumbers,
    /// too many truth values
    #[error("more truth values at once than there are mask registers")]
    TruthValues,
    /// too many values
    #[error("values at once take more than {MOST_STACK} bytes of the stack")]
    Stack,
    /// too long rows
    #[error("kept rows or column sums of more than {MOST_BYTES} bytes")]
    Long,
    /// the system gives no memory for code
    #[error("the system gives no memory that code may run from")]
    Memory,
}

/// Maximum bytes of a stack frame: a page, since a guard page may follow.
const MOST_STACK: usize = 4096;

/// Maximum bytes of a row's kept rows, and of column sums: displacements have 31 bits.
const MOST_BYTES: usize = 1 << 30;

/// How results are written that are too large for the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LargeResults {
    /// By streaming stores. They save the read of each line, and with it a third of a copy's traffic.
    PastCaches,
    /// By ordinary stores to lines that were prefetched. A core has few streaming stores under way, which also block its loads. The rows of
    /// 2026-11-19 in `bench/results/xeon-2core.csv` have it, with two threads.
    Fetched,
}

impl LargeResults {
    /// Of a launch with so many threads. From about eight on, all cores together should be limited by the traffic, not each by its own waits; only
    /// two threads were measured.
    pub fn of(threads: usize) -> LargeResults {
        if threads < 8 { LargeResults::Fetched } else { LargeResults::PastCaches }
    }
}

/// What is known of an argument when code is generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument {
    /// How it is written, if it is a large result.
    pub large: Option<LargeResults>,
    /// All rows are one and the same, which stays in the caches.
    pub repeats: bool,
}

/// Alignment in the interpreter's workspace, which code shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// Elements of one kept row.
    pub kept_row: usize,
    /// Elements of all kept rows of one row in flight.
    pub kept_rows: usize,
    /// Maximum rows in flight.
    pub rows: usize,
}

/// Machine code of a program.
#[derive(Debug)]
pub struct Code {
    executable: Executable,
}

impl Code {
    /// Compiles a program with these arguments.
    pub fn compile(
        target: Target,
        program: &TileProgram,
        places: Places,
        args: &[Argument],
    ) -> Result<Code, Uncovered> {
        let (bytes, _) = assemble(target, program, places, args, false)?;
        let executable = Executable::new(&bytes).map_err(|_| Uncovered::Memory)?;
        Ok(Code { executable })
    }

    /// Runs the program on some rows.
    ///
    /// # Safety
    /// The CPU has the instruction set that the code was compiled for, and the context is one of a launch of this program: each
    /// address, scalar, kept row and column sum that the program names is there, for all rows of the context and the columns from
    /// `begin` to `end`.
    pub unsafe fn run(&self, context: &Context) {
        // SAFETY: `assemble` makes such a function; the rest is passed on to the caller.
        unsafe { self.executable.run(context) }
    }
}

/// The lines of a program's machine code.
pub fn listing(
    target: Target,
    program: &TileProgram,
    places: Places,
    args: &[Argument],
) -> Result<Vec<String>, Uncovered> {
    Ok(assemble(target, program, places, args, true)?.1)
}

fn covered(program: &TileProgram) -> Result<(), Uncovered> {
    if !program.flat && program.cols == 0 {
        return Err(Uncovered::NoColumns);
    }
    for pass in &program.passes {
        let is_arg_max = |inst: &Inst| matches!(inst, Inst::Reduce { op: TileReduce::ArgMax, .. });
        if pass.strip.iter().any(is_arg_max) {
            return Err(Uncovered::ArgMax);
        }
        if pass.strip.iter().filter(|inst| matches!(inst, Inst::Keep { .. })).count() > MOST_KEEPS {
            return Err(Uncovered::RandomNumbers);
        }
    }
    Ok(())
}

fn assemble(
    target: Target,
    program: &TileProgram,
    places: Places,
    args: &[Argument],
    lists: bool,
) -> Result<(Vec<u8>, Vec<String>), Uncovered> {
    covered(program)?;
    let sums: usize = program.partials.iter().map(|partial| partial.width).sum();
    if 4 * places.kept_rows.max(sums) > MOST_BYTES {
        return Err(Uncovered::Long);
    }
    let mut assembler = Assembler::new(target.is_avx512(), lists);
    let saved = [encode::RBX, encode::RBP, encode::R12, encode::R13, encode::R14, encode::R15];
    saved.iter().for_each(|&register| assembler.push(register));
    assembler.copy(encode::RAX, encode::RSP);
    let stack_at = assembler.take_stack();
    assembler.compute_number(Arithmetic::And, encode::RSP, -64);
    assembler.store(CALLER.memory(), encode::RAX);
    assembler.copy(CONTEXT, encode::RDI);
    let frame = Frame {
        vectors: LANES / target.width(),
        body: 0,
        dtypes: program.args.iter().map(|spec| spec.dtype).collect(),
        streams: args.iter().map(|arg| arg.large == Some(LargeResults::PastCaches)).collect(),
        fetches: args.iter().map(|arg| arg.large == Some(LargeResults::Fetched)).collect(),
        repeats: args.iter().map(|arg| arg.repeats).collect(),
        kept_row: 4 * places.kept_row,
        kept_rows: 4 * places.kept_rows,
        pointers: Vec::new(),
        reductions: 0,
        width: target.width(),
        next_rows: (8 * places.rows * program.args.len()) as i32,
        bytes: 0,
    };
    let strips: Vec<Strip> = program.passes.iter().map(|pass| Strip::of(target, program, &pass.strip)).collect();
    let mut passes = Passes {
        assembler: &mut assembler,
        target,
        program,
        work: strips.iter().map(Strip::work).collect(),
        strips,
        stack: frame.start_of_spills() as usize,
        frame,
    };
    for number in 0..program.passes.len() {
        passes.pass(number).map_err(|_| Uncovered::TruthValues)?;
    }
    let stack = passes.stack;
    if stack > MOST_STACK {
        return Err(Uncovered::Stack);
    }
    assembler.patch_stack(stack_at, stack);
    assembler.zero_upper();
    assembler.load(encode::RSP, CALLER.memory());
    saved.iter().rev().for_each(|&register| assembler.pop(register));
    assembler.leave();
    Ok(assembler.finish())
}
