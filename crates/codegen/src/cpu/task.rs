//! How the CPU runs a kernel: a launch becomes a task for a number of threads, which distributes its work over them.
//!
//! A driver is next to its kernels and knows nothing of pools, buffers or plans: it receives workers, addresses and
//! workspaces. The device guarantees that every address is valid for the reach of its argument.

use std::any::Any;
use std::cell::UnsafeCell;
use std::fmt;
use std::sync::Arc;

use deuteron_graph::memory::{self, OutOfMemory};

use crate::cpu::machine::Uncovered;
use crate::cpu::simd::lines::Lines;
use crate::cpu::simd::{Fault, Isa};

/// A program for the CPU: what two launches of one kernel have in common. It prints as a listing.
pub trait CpuProgram: fmt::Debug + fmt::Display + Send + Sync + 'static {
    /// For comparisons.
    fn as_any(&self) -> &dyn Any;
    /// Whether both are one kernel.
    fn is_same(&self, other: &dyn CpuProgram) -> bool;
}

impl<T: fmt::Debug + fmt::Display + PartialEq + Send + Sync + 'static> CpuProgram for T {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn is_same(&self, other: &dyn CpuProgram) -> bool {
        other.as_any().downcast_ref::<T>().is_some_and(|other| self == other)
    }
}

/// A program as a source.
#[derive(Clone, Debug)]
pub struct CpuSource {
    program: Arc<dyn CpuProgram>,
    /// Its requirements of the tile machine.
    pub tiles: TileUse,
}

/// The requirements of a tile program; zeros for other kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TileUse {
    /// temporaries, a strip each
    pub tiles: u16,
    /// rows that are kept from one pass to the next
    pub kept_rows: u16,
    /// passes over a row
    pub passes: usize,
}

impl CpuSource {
    /// A program that needs nothing of the tile machine.
    pub fn new(program: Arc<dyn CpuProgram>) -> CpuSource {
        CpuSource { program, tiles: TileUse::default() }
    }

    /// A program that a value identifies, and that prints as a text.
    pub fn described<T>(value: T, text: String) -> CpuSource
    where
        T: fmt::Debug + PartialEq + Send + Sync + 'static,
    {
        CpuSource::new(Arc::new(Described { value, text }))
    }

    /// The same with what it needs of the tile machine.
    pub fn with_tiles(self, tiles: TileUse) -> CpuSource {
        CpuSource { tiles, ..self }
    }
}

impl PartialEq for CpuSource {
    fn eq(&self, other: &CpuSource) -> bool {
        self.program.is_same(&*other.program)
    }
}

impl fmt::Display for CpuSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.program.fmt(f)
    }
}

#[derive(Debug, PartialEq)]
struct Described<T> {
    value: T,
    text: String,
}

impl<T> fmt::Display for Described<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A launch on a CPU, the counterpart of a GPU's grids.
pub trait CpuLaunch: fmt::Debug + Send + Sync {
    /// Prepares it for this many threads. Everything that a run needs is allocated here; large memory comes from [`memory`], which unwinds.
    fn prepare(&self, threads: usize, isa: Isa) -> Box<dyn CpuTask>;

    /// The generated machine code, one line per instruction, or why the kernel is interpreted; none for a kernel that
    /// was compiled with this crate.
    fn machine_code(&self, _threads: usize, _isa: Isa) -> Option<Result<Vec<String>, Uncovered>> {
        None
    }
}

/// A launch that copies of it share.
#[derive(Clone, Debug)]
pub struct Tasks(Arc<dyn CpuLaunch>);

impl Tasks {
    pub(crate) fn new(launch: impl CpuLaunch + 'static) -> Tasks {
        Tasks(Arc::new(launch))
    }

    /// Prepares it for this many threads, if there is enough memory.
    pub fn prepare(&self, threads: usize, isa: Isa) -> Result<Box<dyn CpuTask>, OutOfMemory> {
        memory::caught(|| self.0.prepare(threads, isa))
    }

    /// As [`CpuLaunch::machine_code`].
    pub fn machine_code(&self, threads: usize, isa: Isa) -> Option<Result<Vec<String>, Uncovered>> {
        self.0.machine_code(threads, isa)
    }
}

impl PartialEq for Tasks {
    fn eq(&self, other: &Tasks) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A prepared launch.
pub trait CpuTask: Send {
    /// Memory that it needs beyond its own while it runs.
    fn scratch(&self) -> ScratchSizes;

    /// Runs it.
    ///
    /// # Safety
    /// `run.addresses` are the starts of the arguments' buffers, each valid for the reach of its argument until this returns. What
    /// is written overlaps nothing except an operand that it replaces, and nothing else accesses it; nothing else writes what is read. Each
    /// worker's scratch, and the shared memory from a cache line on, have the sizes of [`CpuTask::scratch`]; there are as many
    /// workers as it was prepared for.
    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError>;
}

/// Scratch memory of a task, in floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ScratchSizes {
    /// of each worker
    pub worker: usize,
    /// of all workers together
    pub shared: usize,
}

/// The inputs of a task.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    /// threads
    pub workers: &'a dyn Workers,
    /// where the buffer of each argument starts
    pub addresses: &'a [*mut u8],
    /// of each worker
    pub scratch: &'a [PerWorker<Floats>],
    /// of all workers together
    pub shared: *mut f32,
}

/// Threads that share the tasks of one call.
pub trait Workers: Sync {
    /// How many there are.
    fn threads(&self) -> usize;
    /// Runs `work(worker, task)` for every task, in no order, and returns when all are done. A worker runs one task at a time.
    fn run(&self, tasks: usize, work: &(dyn Fn(usize, usize) + Sync)) -> Result<(), Panicked>;
}

/// A task panicked; some tasks may not have run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Panicked;

/// Why a run failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskError {
    /// a worker panicked
    Panicked,
    /// an index outside of its table
    Index(Fault),
}

impl From<Panicked> for TaskError {
    fn from(_: Panicked) -> TaskError {
        TaskError::Panicked
    }
}

impl From<Fault> for TaskError {
    fn from(fault: Fault) -> TaskError {
        TaskError::Index(fault)
    }
}

/// A value that only one worker at a time touches.
pub struct PerWorker<T>(UnsafeCell<T>);

// SAFETY: shared access goes through `get` alone, whose callers give each worker (or each task) an element of its own.
unsafe impl<T: Send> Sync for PerWorker<T> {}

impl<T> PerWorker<T> {
    /// One value.
    pub fn new(value: T) -> Self {
        PerWorker(UnsafeCell::new(value))
    }

    /// The value, for the owner of all of them.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// The value, for its worker.
    ///
    /// # Safety
    /// Nobody else uses this element while the reference lives.
    #[allow(clippy::mut_from_ref)] // that is what the promise is for
    pub unsafe fn get(&self) -> &mut T {
        // SAFETY: the caller's promise.
        unsafe { &mut *self.0.get() }
    }
}

/// Floats from a cache line on.
#[derive(Clone, Debug, Default)]
pub struct Floats(Lines);

impl Floats {
    /// At least this many of them, or unwinds as [`memory`] says.
    pub fn new(floats: usize) -> Floats {
        Floats(Lines::new(floats))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.elements()
    }

    /// The first one, which starts a cache line.
    pub fn pointer(&mut self) -> *mut f32 {
        self.0.pointer()
    }

    /// All of them one value.
    pub fn fill(&mut self, value: f32) {
        self.0.fill(value);
    }
}
