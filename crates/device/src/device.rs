//! The interface of devices: compiling, loading, running, timing.

use std::sync::Arc;
use std::time::Duration;

use deuteron_codegen::cpu::machine::Uncovered;
use deuteron_codegen::{Launch, Source};
use deuteron_kernels::Backend;
use deuteron_plan::{Catalog, Machine, Target};

use crate::error::DeviceError;
use crate::job::{CompiledKernel, Job};
use crate::memory::{BorrowedMemory, Memory};

/// A device that compiles and runs kernels.
pub trait Device: Send + Sync {
    /// Name and properties, as text.
    fn describe(&self) -> String;
    /// The planner's numbers.
    fn machine(&self) -> &Machine;
    /// What can be generated for it.
    fn catalog(&self) -> &dyn Catalog;
    /// Both: what a plan is for.
    fn target(&self) -> Target<'_> {
        Target { machine: self.machine(), catalog: self.catalog() }
    }
    /// The target of its sources.
    fn backend(&self) -> &Backend;
    /// Compiles sources, or finds them compiled; several at once where that is faster.
    fn compile(&self, sources: Vec<Source>) -> Result<Vec<Arc<CompiledKernel>>, DeviceError>;
    /// Checks a job against its kernels and allocates its memory.
    fn load(&self, job: Job) -> Result<Box<dyn Executable>, DeviceError>;
    /// The machine code of a kernel, one line per instruction, or why the kernel is interpreted; none for a
    /// kernel that is compiled ahead of loading.
    fn machine_code(&self, launch: &Launch) -> Option<Result<Vec<String>, Uncovered>>;
    /// Bytes in the memory that its kernels read fastest.
    fn upload(&self, bytes: &[u8]) -> Result<Memory, DeviceError>;
    /// The memory that jobs keep between runs, without tensors.
    fn memory_stats(&self) -> MemoryStats;
    /// Frees memory that no current run uses; later runs allocate it again.
    fn release_memory(&self);
    /// Copies of `bytes` bytes to time: what "copy" means in every report.
    fn copy_probe(&self, bytes: usize) -> Result<Box<dyn CopyProbe>, DeviceError>;
}

/// Memory that a device holds for intermediates and scratch of its jobs, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryStats {
    /// allocated now
    pub held: usize,
    /// what its jobs need to run, on one stream where there are streams
    pub needed: usize,
    /// jobs that are loaded
    pub jobs: usize,
}

/// Copies on a device, timed.
pub trait CopyProbe {
    /// Bytes that one copy moves, read and written both counted.
    fn bytes(&self) -> usize;
    /// One copy by a kernel like ours: on a CPU with stores that go through the caches.
    fn ordinary(&mut self) -> Result<Duration, DeviceError>;
    /// One copy by the alternative method: streaming stores, or the driver's copy.
    fn streaming(&mut self) -> Result<Duration, DeviceError>;
}

/// The memory of each input of a job, by position. A function, so that a run allocates no list.
pub type Inputs<'f, 'a> = &'f dyn Fn(usize) -> &'a Memory;

/// The memory of each state of a job, which a run reads and writes.
///
/// All of it is passed at once, each for as long as the states are borrowed: memory passed by one call cannot be taken back,
/// moved or freed by a later one.
///
/// ```compile_fail
/// use deuteron_device::{Memory, States};
///
/// struct Replaced(Vec<Memory>);
/// impl States for Replaced {
///     fn count(&self) -> usize {
///         self.0.len()
///     }
///     fn each<'a>(&'a mut self, take: &mut dyn FnMut(Option<&'a mut Memory>)) {
///         take(self.0.first_mut());
///         self.0.clear(); // it is borrowed
///     }
/// }
/// ```
pub trait States {
    /// How many there are.
    fn count(&self) -> usize;
    /// Passes the memory of every state, in order; `None` for one that is shared.
    fn each<'a>(&'a mut self, take: &mut dyn FnMut(Option<&'a mut Memory>));
}

/// No states.
pub struct NoStates;

impl States for NoStates {
    fn count(&self) -> usize {
        0
    }

    fn each<'a>(&'a mut self, _: &mut dyn FnMut(Option<&'a mut Memory>)) {}
}

/// How the steps of a job are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Launching {
    /// one by one
    Eager,
    /// all at once, as a CUDA graph if the device supports it
    Graph,
}

/// The nodes in the CUDA graph of one run, as the driver counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recorded {
    /// launches of kernels
    pub kernels: usize,
    /// all else: fills, copies, calls of the host
    pub others: usize,
}

/// The progress of a watched run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// the step of this number is about to start
    Before(usize),
    /// it has ended
    After(usize),
}

/// A job ready to run.
pub trait Executable: Send {
    /// Runs every step in order and waits for the end. `input(i)` gives the memory of the job's i-th input.
    fn run(&mut self, input: Inputs<'_, '_>, states: &mut dyn States, launching: Launching) -> Result<(), DeviceError>;
    /// Runs every step in order on memory of the caller: inputs are read and states and outputs written in place. On a device with
    /// streams the run is enqueued on the stream of `borrowed`, and this returns without waiting. The stream may be capturing a
    /// CUDA graph; then the executable must live as long as that graph is replayed, and two runs or replays of it may not overlap. An index outside of its table is reported by
    /// a later call.
    fn run_borrowed(&mut self, borrowed: BorrowedMemory<'_>) -> Result<(), DeviceError>;
    /// Runs every step in order, one by one; `times` receives one duration per step.
    fn run_timed(
        &mut self,
        input: Inputs<'_, '_>,
        states: &mut dyn States,
        times: &mut [Duration],
    ) -> Result<(), DeviceError>;
    /// Runs every step in order and waits for each; `watch` is called before it starts and when it has ended. An error on a device
    /// whose steps do not end one by one on the host.
    fn run_watched(
        &mut self,
        input: Inputs<'_, '_>,
        states: &mut dyn States,
        watch: &mut dyn FnMut(Moment),
    ) -> Result<(), DeviceError>;
    /// The time of one run measured by the device, for `runs` runs back to back. Run `i` takes input set
    /// `i % sets` and, on a device with a cache worth avoiding, outputs and intermediates of its own for each set. All
    /// take the same states.
    fn time(
        &mut self,
        sets: &[Inputs<'_, '_>],
        states: &mut dyn States,
        runs: usize,
        launching: Launching,
    ) -> Result<Duration, DeviceError>;
    /// Copies an output of the last run to the host. `into` has as many bytes as the output.
    fn read(&self, index: usize, into: &mut [u8]) -> Result<(), DeviceError>;
    /// Fills all outputs and intermediates with `0xFF` bytes (NaN in every float type), so that what a run does not
    /// write shows.
    fn poison(&mut self) -> Result<(), DeviceError>;
    /// Whether a caller captured a run of it in its own CUDA graph. Then it must live as long as that graph is replayed, which is
    /// not known here.
    fn is_captured(&self) -> bool {
        false
    }
    /// The nodes in the CUDA graph of one run. None without a CUDA graph: on a device without them, and before a run
    /// from one.
    fn recorded(&self) -> Result<Option<Recorded>, DeviceError> {
        Ok(None)
    }
}
