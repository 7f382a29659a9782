//! Launches on a GPU: a translation unit, and grids whose parameters are 64-bit words.
//!
//! A source is free of `#include`, with one or more `extern "C"` kernels that take one parameter each: a structure of words. Words are
//! numbers, or addresses that the device fills in. So a device knows neither rows nor operations.

use crate::tile::tensor_map::{MAP_WORDS, TensorMap};

/// A CUDA translation unit. Two sources that are equal are one compiled kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaSource {
    /// for messages: `row`, `copy`, `attention`, ...
    pub name: String,
    /// the text
    pub text: String,
}

impl CudaSource {
    /// A named text.
    pub fn new(name: &str, text: String) -> CudaSource {
        CudaSource { name: name.to_string(), text }
    }
}

/// One word of a kernel's parameter, or the words of a tensor map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// a number
    Number(u64),
    /// the address of an argument of the launch, plus an offset in bytes
    Argument {
        /// its position
        position: usize,
        /// bytes from its start
        offset: usize,
    },
    /// the same where no kernel of the job writes the argument, so that it can be prefetched before earlier grids have ended; else 0
    Unwritten {
        /// its position
        position: usize,
        /// bytes from its start
        offset: usize,
    },
    /// an address inside of the launch's workspace
    Workspace(usize),
    /// an address inside of the launch's persistent memory, which keeps its contents from one run to the next
    Persistent(usize),
    /// the address of the step's fault word: an `u64` of all ones, into which a kernel that meets an index outside of its
    /// table puts, by `atomicMin`, `row * 256 + argument`
    Fault,
    /// a tensor map: [`MAP_WORDS`] words
    Map(TensorMap),
}

impl Word {
    /// How many words it is.
    pub fn count(&self) -> usize {
        match self {
            Word::Map(_) => MAP_WORDS,
            Word::Number(_) | Word::Argument { .. } | Word::Unwritten { .. } => 1,
            Word::Workspace(_) | Word::Persistent(_) | Word::Fault => 1,
        }
    }
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
    /// whether every thread of it waits for earlier grids (`tile/dependent_launch.cuh`), so that it may be started before they have ended
    pub waits: bool,
    /// whether its blocks walk over tiles until none is left: fewer whole clusters of them do as well
    pub walks: bool,
    /// the parameter
    pub words: Vec<Word>,
}

impl Grid {
    /// Blocks along one axis, without clusters and dynamic shared memory, which start when earlier grids have ended.
    pub fn new(entry: &'static str, blocks: usize, threads: u32, words: Vec<Word>) -> Grid {
        Grid { entry, blocks: [blocks as u32, 1, 1], threads, cluster: 1, shared: 0, waits: false, walks: false, words }
    }
}

/// The tiles of a grid's matmul, for reports only; devices do not read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// the kernel's name in the text
    pub entry: &'static str,
    /// the instructions that multiply: `wgmma`, `mma.sync`, `fma`, `dp4a`
    pub by: &'static str,
    /// rows and columns of a tile
    pub tile: [usize; 2],
    /// pipeline stages of operands in shared memory; none without such a pipeline
    pub stages: Option<usize>,
    /// total tiles that persistent blocks process; none if every block has one
    pub walked: Option<usize>,
    /// blocks of a multiprocessor that the kernel is compiled for, which bounds its registers
    pub resident: usize,
}

/// All grids of one launch, in order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Grids {
    /// run one after another
    pub list: Vec<Grid>,
    /// bytes of workspace, shared with other launches: its initial contents are arbitrary
    pub workspace: usize,
    /// bytes of their own persistent memory: zeros before the first run, then the contents left by the previous run
    pub persistent: usize,
    /// whether a fault word must be checked afterwards
    pub checks_indices: bool,
}
