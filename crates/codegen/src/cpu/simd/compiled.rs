//! Runs the machine code of a program over rows.

use std::ops::Range as Span;
use std::sync::Arc;

use super::launch::{BoundArg, Fault, Launch};
use super::run::locate;
use super::scratch::{Scratch, compiled_rows, kept_row};
use super::{Isa, Task, lanes::Simd};
use crate::cpu::machine::{Argument, Code, Context, LargeResults, Places, Uncovered, listing};
use crate::cpu::program::{Access, ArgSpec, TileProgram};

/// Machine code of a program, and the instruction set that it is for.
#[derive(Debug, Clone)]
pub struct Compiled {
    pub(super) isa: Isa,
    pub(super) code: Arc<Code>,
}

/// Generates machine code of a program for arguments with these streaming flags, which stand for large results.
///
/// # Errors
/// Why there is none: the interpreter runs the program.
pub fn compile(isa: Isa, program: &TileProgram, args: &[BoundArg], large: LargeResults) -> Result<Compiled, Uncovered> {
    let code = Code::compile(isa.target()?, program, places(program), &arguments(program, args, large))?;
    Ok(Compiled { isa, code: Arc::new(code) })
}

/// The lines of that code.
///
/// # Errors
/// As [`compile`].
pub fn machine_code(
    isa: Isa,
    program: &TileProgram,
    args: &[BoundArg],
    large: LargeResults,
) -> Result<Vec<String>, Uncovered> {
    listing(isa.target()?, program, places(program), &arguments(program, args, large))
}

fn places(program: &TileProgram) -> Places {
    let kept_row = kept_row(program);
    Places { kept_row, kept_rows: usize::from(program.kept) * kept_row, rows: compiled_rows(program) }
}

fn arguments(program: &TileProgram, args: &[BoundArg], large: LargeResults) -> Vec<Argument> {
    // A flat program has one row, which is all of its elements.
    let repeats = |spec: &ArgSpec, arg: &BoundArg| {
        let dims = &arg.dims[..arg.rank];
        let has_rows = !program.flat && dims.iter().any(|dim| dim.size > 1);
        has_rows && spec.access == Access::Row && dims.iter().all(|dim| dim.size == 1 || dim.stride == 0)
    };
    let of = |(spec, arg): (&ArgSpec, &BoundArg)| Argument {
        large: (spec.written && arg.streaming).then_some(large),
        repeats: !spec.written && repeats(spec, arg),
    };
    program.args.iter().zip(args).map(of).collect()
}

/// As [`run`](super::run()), by the machine code of the scratch memory.
///
/// # Safety
/// That of [`run`](super::run()).
pub(super) unsafe fn run_code(
    compiled: &Compiled,
    launch: &Launch<'_>,
    span: Span<usize>,
    scratch: &mut Scratch,
    partials: &mut [f32],
) -> Result<(), Fault> {
    let result = match span.is_empty() {
        true => Ok(()),
        // SAFETY: passed on to the caller.
        false => unsafe { rows(&compiled.code, launch, span, scratch, partials) },
    };
    if launch.args.iter().any(|arg| arg.streaming) {
        compiled.isa.dispatch(Fence);
    }
    result
}

struct Fence;

impl Task for Fence {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        simd.fence();
    }
}

unsafe fn rows(
    code: &Code,
    launch: &Launch<'_>,
    span: Span<usize>,
    scratch: &mut Scratch,
    partials: &mut [f32],
) -> Result<(), Fault> {
    let flat = launch.program.flat;
    scratch.seek(launch, &span);
    let cols = if flat { span.len() } else { launch.program.cols };
    let (begin, end) = launch.window.unwrap_or((0, cols));
    assert!(begin.is_multiple_of(4), "a window starts with a block of random words, got column {begin}");
    let origin = if flat { span.start } else { 0 };
    let rows = if flat { 0..1 } else { span };
    let (first, mut row) = (rows.start, rows.start);
    let mut here = locate(launch, scratch, row..rows.end, origin);
    loop {
        let count = here?;
        std::mem::swap(&mut scratch.offsets, &mut scratch.next_offsets);
        here = locate(launch, scratch, row + count..rows.end, origin);
        find_addresses(launch, scratch, count, here.unwrap_or(0), row == first);
        let context = Context {
            count: count as u64,
            addresses: scratch.addresses.as_ptr(),
            lanes: scratch.memory.pointer(),
            // SAFETY: the memory holds the kept rows from there on.
            kept: unsafe { scratch.memory.pointer().add(scratch.places.kept) },
            partials: partials.as_mut_ptr(),
            begin: begin as u64,
            end: end as u64,
            row: row as u64,
            origin: origin as u64,
            axes: launch.axes.as_ptr().cast(),
        };
        // SAFETY: the scratch memory was made for this program with its code, and `run` compared the instruction sets. Its scalars are
        // the blocks that the memory starts with. `run`'s caller lets us use every argument at these rows, and the column sums.
        unsafe { code.run(&context) };
        row += count;
        if row == rows.end {
            return Ok(());
        }
    }
}

/// Addresses of `count` rows, and of `next` that come after them: of the same ones again where there are fewer.
fn find_addresses(launch: &Launch<'_>, scratch: &mut Scratch, count: usize, next: usize, is_first: bool) {
    let args = launch.args.len();
    let (here, behind) = scratch.addresses.split_at_mut(scratch.rows * args);
    // The rows at hand are those that came next before.
    match is_first {
        true => write_addresses(launch, &scratch.offsets, &mut here[..count * args]),
        false => here[..count * args].copy_from_slice(&behind[..count * args]),
    }
    write_addresses(launch, &scratch.next_offsets, &mut behind[..next * args]);
    if next < count {
        behind[next * args..count * args].copy_from_slice(&here[next * args..count * args]);
    }
}

/// Where the rows at these offsets are.
fn write_addresses(launch: &Launch<'_>, offsets: &[usize], addresses: &mut [*mut u8]) {
    let args = launch.args.len();
    if args == 0 {
        return;
    }
    for (addresses, offsets) in addresses.chunks_exact_mut(args).zip(offsets.chunks_exact(args)) {
        let args = launch.args.iter().zip(&launch.program.args);
        for ((address, offset), (arg, spec)) in addresses.iter_mut().zip(offsets).zip(args) {
            *address = arg.base.wrapping_add(offset * spec.dtype.bytes());
        }
    }
}
