//! The CPU: a pool of threads that runs the tasks of kernels.

pub mod counters;
mod measure;
pub mod openmp;
mod pool;
mod run;
mod sync;
mod threads;
mod workspace;

pub use pool::{Pool, Sharing};

use std::sync::Arc;

use deuteron_codegen::cpu::machine::Uncovered;
use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::task::Workers;
use deuteron_codegen::{Execution, Launch, Source};
use deuteron_kernels::{Backend, CpuCatalog};
use deuteron_plan::{Catalog, Machine, Quantity};

use crate::buffer::Buffer;
use crate::cpu::workspace::SharedWorkspace;
use crate::device::{CopyProbe, Device, Executable, MemoryStats};
use crate::error::DeviceError;
use crate::job::{CompiledKernel, Job};
use crate::kept::InUse;
use crate::memory::Memory;

/// The CPU device.
pub struct Cpu {
    pool: Arc<Pool>,
    isa: Isa,
    machine: Machine,
    kernels: InUse,
    workspace: Arc<SharedWorkspace>,
}

impl Cpu {
    /// All cores, the best instruction set.
    pub fn new() -> Cpu {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Cpu::with(threads, Isa::detect())
    }

    /// A number of threads (at least one) and an instruction set.
    pub fn with(threads: usize, isa: Isa) -> Cpu {
        Cpu::like(threads, isa, Machine::cpu())
    }

    /// A number of threads, an instruction set, and a machine whose numbers the planner uses.
    pub fn like(threads: usize, isa: Isa, machine: Machine) -> Cpu {
        let pool = Arc::new(Pool::new(threads));
        let machine = match machine.clone().with(Quantity::Processors, threads.max(1) as f64, "threads in use") {
            Ok(machine) => machine,
            // More threads than the planner can count: it plans for as many as the profile says.
            Err(_) => machine,
        };
        let workspace = Arc::new(SharedWorkspace::new(pool.threads()));
        Cpu { pool, isa, machine, kernels: InUse::default(), workspace }
    }

    /// Number of threads, including the caller.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The threads that run its kernels.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// How many distinct kernels are in use.
    pub fn compiled(&self) -> usize {
        self.kernels.live()
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Cpu::new()
    }
}

impl Device for Cpu {
    fn describe(&self) -> String {
        format!("cpu, {} threads, {}", self.threads(), self.isa.name())
    }

    fn machine(&self) -> &Machine {
        &self.machine
    }

    fn catalog(&self) -> &dyn Catalog {
        &CpuCatalog
    }

    fn backend(&self) -> &Backend {
        &Backend::Cpu
    }

    fn compile(&self, sources: Vec<Source>) -> Result<Vec<Arc<CompiledKernel>>, DeviceError> {
        Ok(self.kernels.of(sources))
    }

    fn load(&self, job: Job) -> Result<Box<dyn Executable>, DeviceError> {
        Ok(Box::new(run::CpuExecutable::new(job, self.pool.clone(), self.isa, &self.workspace)?))
    }

    fn machine_code(&self, launch: &Launch) -> Option<Result<Vec<String>, Uncovered>> {
        match launch.execution() {
            Execution::Tasks(tasks) => tasks.machine_code(self.pool.threads(), self.isa),
            Execution::Grids(_) | Execution::Library(_) => None,
        }
    }

    fn memory_stats(&self) -> MemoryStats {
        self.workspace.stats()
    }

    fn release_memory(&self) {
        self.workspace.release();
    }

    fn upload(&self, bytes: &[u8]) -> Result<Memory, DeviceError> {
        let mut buffer = Buffer::new(bytes.len())?;
        buffer.bytes_mut().copy_from_slice(bytes);
        Ok(Memory::Host(buffer))
    }

    fn copy_probe(&self, bytes: usize) -> Result<Box<dyn CopyProbe>, DeviceError> {
        Ok(Box::new(measure::CpuCopyProbe::new(self.pool.clone(), self.isa, bytes)?))
    }
}
