//! Jobs: kernels in order, with the location of each argument.

use std::sync::Arc;

use deuteron_codegen::{Launch, Source};

use crate::cuda::module::Module;
use crate::cuda::nvrtc::EntryUsage;

/// The location of an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// An input buffer of each run; never written.
    Input(usize),
    /// A state buffer of each run, which keeps what is written to it.
    State(usize),
    /// An output buffer of the executable.
    Output(usize),
    /// A range of the arena.
    Arena {
        /// first byte
        offset: usize,
        /// length
        bytes: usize,
    },
}

/// A compiled kernel.
#[derive(Debug)]
pub struct CompiledKernel {
    /// what it was made from
    pub source: Source,
    /// Loaded into a GPU's context, if it was made for one.
    pub(crate) module: Option<Module>,
}

impl CompiledKernel {
    /// What the compiler said of each of its functions: registers, spills, memory. Empty where there was no compiler.
    pub fn usage(&self) -> &[EntryUsage] {
        self.module.as_ref().map_or(&[], Module::entries)
    }
}

/// One kernel and its arguments.
#[derive(Debug, Clone)]
pub struct Step {
    /// compiled
    pub kernel: Arc<CompiledKernel>,
    /// its arguments, and how it is run
    pub launch: Launch,
    /// one for each argument of the launch
    pub places: Vec<Place>,
}

/// All kernels of a plan.
#[derive(Debug, Clone)]
pub struct Job {
    /// in order
    pub steps: Vec<Step>,
    /// number of input buffers
    pub inputs: usize,
    /// bytes of each state
    pub states: Vec<usize>,
    /// bytes of each output
    pub outputs: Vec<usize>,
    /// bytes of the arena
    pub arena: usize,
}
