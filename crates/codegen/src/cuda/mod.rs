//! CUDA: what is compiled is text, what is launched is a list of grids.
//!
//! A [`CudaSource`] is a whole translation unit, free of `#include`, with one or more `extern "C"` kernels that take one
//! parameter each: a structure of 64-bit words. [`grids`] turns a launch into grids whose words are numbers or
//! addresses that the device fills in. So a device knows neither rows nor operations.

mod arch;

pub use arch::Arch;

use crate::source::{Kernel, Launch, Source};

/// What CUDA sources are rendered for.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaTarget {
    /// the instruction set
    pub arch: Arch,
    /// multiprocessors
    pub processors: usize,
}

/// A CUDA translation unit and the shape of its launches. Two sources that are equal are one compiled kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaSource {
    /// for messages: `row`, `copy`, `scatter_add`
    pub name: String,
    /// the text
    pub text: String,
    /// what its launches look like
    pub family: Family,
}

/// The families of generated CUDA kernels.
#[derive(Debug, Clone, PartialEq)]
pub enum Family {
    /// elements of this many bytes moved
    Copy(usize),
}

/// Renders a kernel. Matrix products stay with the vendor's library.
pub(crate) fn render(kernel: Kernel, launch: &Launch, target: &CudaTarget) -> Source {
    let _ = (launch, target);
    match kernel {
        Kernel::Row(_) => Source::Copy(0),
        Kernel::Matmul(dtype) => Source::Matmul(dtype),
        Kernel::ScatterAdd(dtype) => Source::ScatterAdd(dtype),
        Kernel::Copy(bytes) => Source::Copy(bytes),
    }
}

/// One word of a kernel's parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// a number
    Number(u64),
    /// the address of an argument of the launch, plus so many bytes
    Argument {
        /// its position
        position: usize,
        /// bytes from its start
        offset: usize,
    },
    /// an address inside of the launch's workspace
    Workspace(usize),
    /// the address of the step's fault word: an `u64` of all ones, into which a kernel that meets an index outside of its
    /// table puts, by `atomicMin`, `row * 256 + argument`
    Fault,
}

/// One launch of one kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// the kernel's name in the text
    pub entry: &'static str,
    /// blocks
    pub blocks: [u32; 3],
    /// threads of a block
    pub threads: u32,
    /// blocks of a cluster; 1 where there are none
    pub cluster: u32,
    /// bytes of dynamic shared memory
    pub shared: u32,
    /// the parameter
    pub words: Vec<Word>,
}

/// All grids of one launch, in order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Grids {
    /// run one after another
    pub list: Vec<Grid>,
    /// bytes of scratch memory they share
    pub workspace: usize,
    /// whether a fault word must be looked at afterwards
    pub checks_indices: bool,
}

/// The grids of a launch of a source.
pub fn grids(source: &CudaSource, launch: &Launch, target: &CudaTarget) -> Grids {
    let _ = (launch, target);
    match source.family {
        Family::Copy(_) => Grids::default(),
    }
}
