//! Nothing outside an argument is even read: arguments that end, or start, at a page without access.
#![cfg(target_os = "linux")]

use std::ffi::c_void;

use deuteron_graph::{BinaryOp, Dtype};

use super::{WIDTHS, flat_program, reads, run_all, writes};
use crate::cpu::program::{Dst, Inst, Src};
use crate::cpu::simd::{BoundArg, Dim, Isa, MAX_LEADING};

const PAGE: usize = 4096;
/// Room for the widest row of the widest element.
const ROOM: usize = 4 * PAGE;

unsafe extern "C" {
    fn mmap(at: *mut c_void, length: usize, access: i32, flags: i32, file: i32, offset: i64) -> *mut c_void;
    fn mprotect(at: *mut c_void, length: usize, access: i32) -> i32;
    fn munmap(at: *mut c_void, length: usize) -> i32;
}

/// `ROOM` bytes between two pages without access.
struct Guarded(*mut u8);

impl Guarded {
    fn new() -> Guarded {
        const READ_WRITE: i32 = 3;
        const PRIVATE_ANONYMOUS: i32 = 0x22;
        // SAFETY: a fresh private mapping; the two pages whose access is taken away belong to it.
        unsafe {
            let base = mmap(std::ptr::null_mut(), ROOM + 2 * PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0).cast::<u8>();
            assert_ne!(base as isize, -1, "no mapping");
            assert_eq!(mprotect(base.cast(), PAGE, 0), 0);
            assert_eq!(mprotect(base.add(PAGE + ROOM).cast(), PAGE, 0), 0);
            Guarded(base.add(PAGE))
        }
    }

    fn bind(&self, bytes: usize, at_end: bool) -> BoundArg {
        // SAFETY: `bytes <= ROOM`.
        let base = if at_end { unsafe { self.0.add(ROOM - bytes) } } else { self.0 };
        let dims = [Dim { size: 1, stride: 0 }; MAX_LEADING];
        BoundArg { base, dims, rank: 0, table_rows: 0, streaming: at_end }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, once.
        unsafe { munmap(self.0.sub(PAGE).cast(), ROOM + 2 * PAGE) };
    }
}

#[test]
fn no_access_crosses_the_ends() {
    let (first, second, output) = (Guarded::new(), Guarded::new(), Guarded::new());
    for isa in Isa::available() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8, Dtype::Bool] {
            let insts = vec![
                Inst::Load { dst: Dst::Tile(0), arg: 0 },
                Inst::Binary { op: BinaryOp::Add, dst: Dst::Tile(1), a: Src::Tile(0), b: Src::Arg(1) },
                Inst::Store { arg: 2, a: Src::Tile(1) },
            ];
            let program = flat_program(vec![reads(dtype), reads(Dtype::F32), writes(dtype)], insts);
            for width in WIDTHS {
                for at_end in [false, true] {
                    let (narrow, wide) = (width * dtype.bytes(), width * 4);
                    let args = [first.bind(narrow, at_end), second.bind(wide, at_end), output.bind(narrow, at_end)];
                    run_all(isa, &program, &args, width);
                }
            }
        }
    }
}
