//! CUDA kernels on a CPU. The host's C++ compiler compiles the CUDA text of a kernel against a machine
//! (`machine/emulator.h`) that implements the GPU's instructions. It checks synchronisation and index arithmetic, not speed.
//!
//! - Threads are fibers in a random order that depends on a seed: a missing barrier gives different results for some seed, or a deadlock, which is
//!   reported with what every warp waits for.
//! - Every argument ends at a protected page: an access beyond it is reported with its block and thread. Bytes before it must keep
//!   their values.
//! - Shared memory and results hold NaN until they are written.
//! - Memory fences do nothing: memory is coherent and in order, so a missing fence is not detected.
//! - `printf` of a kernel prints under the first seed.
//! - On request it counts the cost of memory accesses: sectors of global memory, wavefronts of shared memory ([`Accesses`]).
//!
//! It runs kernels for Hopper (`sm_90a`).
#![forbid(unsafe_code)]

mod accesses;
mod launch;
mod program;
mod run;
mod text;

use std::path::PathBuf;

pub use accesses::{Accesses, Traffic};
pub use launch::written;
pub use program::{Lanes, Program, Said, Schedule, Toolchain, Unit};
pub use run::{Ran, run};
pub use text::{emulated, is_emulated};

/// Why a kernel did not run, or the mistake found in it.
#[derive(Debug, thiserror::Error)]
pub enum EmulatorError {
    /// There is no compiler of that name.
    #[error("the emulator needs a C++ compiler, and `{0}` does not run; install g++ or clang++, or name one in CXX")]
    NoCompiler(String),
    /// A file could not be written or read.
    #[error("{}: {error}", path.display())]
    File {
        /// which
        path: PathBuf,
        /// why
        error: std::io::Error,
    },
    /// The text has a declaration that is not understood.
    #[error("the emulator does not understand the declaration `{0}` in shared memory")]
    Declaration(String),
    /// The text is not C++.
    #[error("the kernel does not compile:\n{0}")]
    Compile(String),
    /// The kernel is not CUDA text.
    #[error("the emulator runs CUDA kernels, and this one is a {0}; `--plan` may give another kernel")]
    NotCuda(&'static str),
    /// The number of arguments or their bytes do not fit the launch.
    #[error("argument {position}: the kernel reaches {reach} bytes, got {got}")]
    Argument {
        /// its position
        position: usize,
        /// bytes that the kernel may touch
        reach: usize,
        /// bytes given
        got: usize,
    },
    /// The kernel did something wrong.
    #[error("the kernel is wrong:\n{0}")]
    Kernel(String),
}

impl EmulatorError {
    fn file(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> EmulatorError + '_ {
        move |error| EmulatorError::File { path: path.to_path_buf(), error }
    }
}
