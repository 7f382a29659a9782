//! Runs tile programs: all intrinsics of the CPU backend.
//!
//! - [`Isa`] is a proof that this CPU runs an instruction set. Everything here takes one.
//! - [`run`] executes a [`TileProgram`](super::program::TileProgram) over a span of rows, by machine code where [`compile`] made some and instruction by
//!   instruction elsewhere; [`finish`] adds up its column sums.
//! - [`amx`] is the tiles of matrix products; the kernels in `kernels/` use them and `lanes.rs`.
//! - `lanes.rs` is the vector machine as a trait; `avx512.rs`, `avx2.rs`, `sse2.rs`, `neon.rs` and, for all others, `plain.rs` implement it.
//!   Every loop and every function (`map.rs`, `math.rs`, `reduce.rs`, `philox.rs`, `format.rs`) is written once above it.
//!
//! Numerics: the same program on the same instruction set gives the same bits however rows are split into spans.
//! Instruction sets may differ in the last bits, because `Sse2` and `Plain` have no fused multiply-add.
//! No loop reads or writes outside `[row, row + cols)` of an argument: tails are masked or copied.

mod ahead;
pub mod amx;
mod bulk;
mod check;
mod compiled;
mod finish;
pub mod format;
pub mod lanes;
mod launch;
pub mod lines;
mod map;
pub mod math;
pub mod philox;
#[cfg(any(test, not(target_arch = "x86_64")))]
mod plain;
mod reduce;
mod run;
mod scratch;
mod store;
mod sweep;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod sse2;

#[cfg(test)]
pub(super) mod tests;

pub use bulk::{copy, narrow, widen};
pub use compiled::{Compiled, compile, machine_code};
pub use finish::finish;
pub use launch::{Axis, BoundArg, Dim, Fault, Launch, MAX_LEADING};
pub(super) use map::{Function, Visitor, visit};
pub(super) use reduce::{Step, StepVisitor, tree, with_step};
pub use run::run;
pub use scratch::Scratch;
pub(super) use scratch::{Sweep, destination, rows_in_flight, sources, spread, sweeps};

use crate::cpu::machine::{Target, Uncovered};
use lanes::Simd;

/// An instruction set that this CPU has. Only [`Isa::available`] and [`Isa::detect`] make one, after asking the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa {
    proof: Proof,
    /// Tile programs are interpreted, whether or not machine code can be made of them.
    interprets: bool,
    /// Machine code has no instructions that only some CPUs with the instruction set have.
    is_plain: bool,
}

/// The variants hold the tokens that the vector methods take, so none exists without its detection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Proof {
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Sse2(sse2::Sse2),
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon),
    #[cfg(not(target_arch = "x86_64"))]
    Plain(plain::Plain),
}

impl Isa {
    /// The fastest one of this CPU.
    pub fn detect() -> Isa {
        Isa::available()[0]
    }

    /// Every one that this CPU runs, fastest first; the last one runs on every CPU of the architecture.
    pub fn available() -> Vec<Isa> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            found.extend(avx512::Avx512::detect().map(Proof::Avx512));
            found.extend(avx2::Avx2::detect().map(Proof::Avx2));
            found.push(Proof::Sse2(sse2::Sse2));
        }
        #[cfg(target_arch = "aarch64")]
        found.extend(neon::Neon::detect().map(Proof::Neon));
        #[cfg(not(target_arch = "x86_64"))]
        found.push(Proof::Plain(plain::Plain));
        found.into_iter().map(|proof| Isa { proof, interprets: false, is_plain: false }).collect()
    }

    /// The same, without machine code for tile programs.
    pub fn interpreting(self) -> Isa {
        Isa { interprets: true, ..self }
    }

    /// The same, with machine code for every CPU that has the instruction set. Bits are the same.
    pub fn without_extensions(self) -> Isa {
        Isa { is_plain: true, ..self }
    }

    /// What machine code of tile programs is made for.
    fn target(self) -> Result<Target, Uncovered> {
        match self.proof {
            _ if self.interprets => Err(Uncovered::Interpreter),
            #[cfg(target_arch = "x86_64")]
            Proof::Avx512(_) if is_x86_feature_detected!("bmi2") => {
                Ok(Target::Avx512 { picks_bytes: !self.is_plain && is_x86_feature_detected!("avx512vbmi") })
            }
            #[cfg(target_arch = "x86_64")]
            Proof::Avx2(_) if is_x86_feature_detected!("bmi2") => Ok(Target::Avx2),
            _ => Err(Uncovered::InstructionSet),
        }
    }

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self.proof {
            #[cfg(target_arch = "x86_64")]
            Proof::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Proof::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Proof::Sse2(_) => "sse2",
            #[cfg(target_arch = "aarch64")]
            Proof::Neon(_) => "neon",
            #[cfg(not(target_arch = "x86_64"))]
            Proof::Plain(_) => "plain",
        }
    }

    /// Whether it is AVX-512, beside which AMX and VNNI may be.
    pub fn is_avx512(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self.proof, Proof::Avx512(_));
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Runs `task` with the vector machine of this instruction set.
    pub fn dispatch<T: Task>(self, task: T) -> T::Output {
        match self.proof {
            #[cfg(target_arch = "x86_64")]
            Proof::Avx512(simd) => task.with(simd),
            #[cfg(target_arch = "x86_64")]
            Proof::Avx2(simd) => task.with(simd),
            #[cfg(target_arch = "x86_64")]
            Proof::Sse2(simd) => task.with(simd),
            #[cfg(target_arch = "aarch64")]
            Proof::Neon(simd) => task.with(simd),
            #[cfg(not(target_arch = "x86_64"))]
            Proof::Plain(simd) => task.with(simd),
        }
    }
}

/// Work that is written for any vector machine; it calls [`Simd::enter`] for its loops.
pub trait Task {
    /// Its result.
    type Output;
    /// Runs with one.
    fn with<S: Simd>(self, simd: S) -> Self::Output;
}
