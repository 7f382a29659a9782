//! Errors of devices.

use deuteron_codegen::cpu::simd::Fault;
use deuteron_graph::memory::OutOfMemory;

use crate::cuda::error::CudaError;

/// Why a job could not be loaded or run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An index is out of range of its table.
    #[error("step {step}: {fault}")]
    Index {
        /// the step that met it
        step: usize,
        /// where
        fault: Fault,
    },
    /// An input that is too short.
    #[error("input {input}: expected at least {expected} bytes, got {got}")]
    InputSize {
        /// which
        input: usize,
        /// bytes the kernels read
        expected: usize,
        /// bytes given
        got: usize,
    },
    /// A job that would access memory outside of its buffers.
    #[error("step {step}, argument {argument}: {problem}")]
    Job {
        /// the step
        step: usize,
        /// the argument
        argument: usize,
        /// what is wrong
        problem: String,
    },
    /// No memory.
    #[error("could not allocate {bytes} bytes; use a smaller batch or sequence")]
    OutOfMemory {
        /// how much was asked for
        bytes: usize,
    },
    /// A kernel of another device.
    #[error("step {step}: its kernel was made for another device; compile it with the device that loads the job")]
    ForeignKernel {
        /// the step
        step: usize,
    },
    /// A run that cannot be watched per step.
    #[error("only a CPU can report the steps of a run one by one; on a GPU, time the steps with `run_timed`")]
    Unwatched,
    /// An input that the device cannot reach.
    #[error("input {input}: expected host memory, got a tensor on a device; copy it to the host first")]
    InputPlace {
        /// which
        input: usize,
    },
    /// An input in memory of another GPU, or in none that CUDA knows.
    #[error("input {input}: expected memory of GPU {ordinal}, got an address that is not; copy it there first")]
    ForeignMemory {
        /// which
        input: usize,
        /// the GPU of the device
        ordinal: usize,
    },
    /// An input that is not aligned to its elements.
    #[error("input {input}: expected a start at a multiple of {bytes} bytes; copy it to an aligned buffer")]
    InputAlignment {
        /// which
        input: usize,
        /// bytes of an element
        bytes: usize,
    },
    /// An index of an earlier run that was not waited for.
    #[error(
        "an earlier run picked a row that its table does not have, at row {row} of step {step}: look at its indices"
    )]
    EarlierIndex {
        /// the step that met it
        step: usize,
        /// where
        row: usize,
    },
    /// A caller's output that does not fit.
    #[error("output {output}: expected {expected} bytes at a multiple of {alignment}, got {got} at {address:#x}")]
    OutputPlace {
        /// which
        output: usize,
        /// bytes that it has
        expected: usize,
        /// required alignment
        alignment: usize,
        /// bytes given
        got: usize,
        /// where
        address: u64,
    },
    /// A run with fewer or more outputs than its job.
    #[error("expected {expected} outputs, got {got}")]
    OutputCount {
        /// of the job
        expected: usize,
        /// of the run
        got: usize,
    },
    /// A run with fewer or more inputs than its job.
    #[error("expected {expected} inputs, got {got}")]
    InputCount {
        /// of the job
        expected: usize,
        /// of the run
        got: usize,
    },
    /// A run with fewer or more states than its job.
    #[error("expected {expected} states, got {got}")]
    StateCount {
        /// of the job
        expected: usize,
        /// of the run
        got: usize,
    },
    /// A state that is too short.
    #[error("state {state}: expected at least {expected} bytes, got {got}")]
    StateSize {
        /// which
        state: usize,
        /// bytes the kernels read and write
        expected: usize,
        /// bytes given
        got: usize,
    },
    /// A state that the device does not write to.
    #[error("state {state}: expected memory of {expected}; make it with `to_device` of the engine that runs")]
    StatePlace {
        /// which
        state: usize,
        /// where it should be
        expected: &'static str,
    },
    /// A state that is also another state.
    #[error("state {state}: expected memory of its own, got that of another state")]
    SharedState {
        /// which
        state: usize,
    },
    /// An output that the job does not have.
    #[error("output {index}: the job has {outputs}")]
    Output {
        /// how many there are
        outputs: usize,
        /// the requested output
        index: usize,
    },
    /// A kernel wrote outside of its buffers: a defect of ours.
    #[error("the bytes {side} {buffer} were overwritten by a kernel; please report this with the graph")]
    RedZone {
        /// which buffer
        buffer: String,
        /// `before` or `after`
        side: &'static str,
    },
    /// What CUDA says.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A worker thread panicked: a defect of ours.
    #[error("a worker thread panicked in step {step}; please report this with the graph")]
    WorkerPanicked {
        /// the step
        step: usize,
    },
}

impl From<OutOfMemory> for DeviceError {
    fn from(OutOfMemory { bytes }: OutOfMemory) -> DeviceError {
        DeviceError::OutOfMemory { bytes }
    }
}
