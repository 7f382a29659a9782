//! NVIDIA GPUs: kernels are compiled on demand, and launched one by one or as a CUDA graph.
//!
//! The device shares the primary context with PyTorch and other libraries of the process. Nothing here panics on a library
//! that is missing: all calls come after the proof that [`library`] gives.

pub mod cache;
mod compile;
mod context;
mod cublas_lt;
pub mod error;
mod frame;
mod gpu;
mod launch;
pub mod library;
mod load;
mod memory;
pub(crate) mod module;
pub mod nvrtc;
mod probe;
mod profile;
mod record;
mod run;
mod stream;
mod tensor_map;
mod workspace;

pub use error::CudaError;
pub use memory::CudaBuffer;
pub use nvrtc::EntryUsage;
pub use run::{CudaExecutable, LaunchCost};

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use deuteron_codegen::cpu::machine::Uncovered;
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Tuning};
use deuteron_codegen::{Launch, Source};
use deuteron_kernels::Backend;
use deuteron_plan::{Catalog, Machine};

use self::cache::DiskCache;
use self::context::{Context, Relaxed};
use self::gpu::Gpu;
use self::library::Search;
use self::memory::{Copies, Zones};
use self::module::Module;
use self::nvrtc::Compiler;
use crate::device::{CopyProbe, Device, Executable, MemoryStats};
use crate::error::DeviceError;
use crate::job::{CompiledKernel, Job};
use crate::kept::Kept;
use crate::memory::Memory;

/// How to open a GPU.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Options {
    /// which GPU
    pub ordinal: usize,
    /// where to search libraries
    pub search: Search,
    /// folder of compiled kernels; none disables the disk cache
    pub cache: Option<PathBuf>,
    /// whether buffers are surrounded by bytes that are checked after each run
    pub red_zones: bool,
    /// numbers for the planner instead of those of the profile
    pub machine: Option<Machine>,
    /// measured launch shapes
    pub tuning: Tuning,
}

/// The CUDA device.
pub struct Cuda {
    gpu: Arc<Gpu>,
    machine: Machine,
    backend: Backend,
    name: String,
    memory: usize,
    kernels: Kept,
}

impl Cuda {
    /// Opens a GPU: finds the driver and the compiler, and retains the primary context.
    pub fn new(options: &Options) -> Result<Cuda, CudaError> {
        let driver = library::driver(&options.search)?;
        let compiler = Compiler::new(library::nvrtc(&options.search)?);
        let context = Context::new(driver, options.ordinal)?;
        let arch = architecture(&context)?;
        let _entered = context.enter()?;
        let name = context.name()?;
        let processors = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let target = CudaTarget { tuning: options.tuning.clone(), ..CudaTarget::new(arch, processors) };
        let machine = match &options.machine {
            Some(machine) => machine.clone(),
            None => profile::machine(&context, &name, arch)?,
        };
        let gpu = Gpu {
            copies: Arc::new(Copies::new(&context)?),
            target: target.clone(),
            zones: if options.red_zones { Zones::On } else { Zones::Off },
            l2: context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            search: options.search.clone(),
            compiler,
            cache: options.cache.clone().map(DiskCache::open),
            library: OnceLock::new(),
            fallbacks: Mutex::default(),
            hold: OnceLock::new(),
            workspaces: workspace::Workspaces::new(gpu::GpuBlocks(context.clone())),
            context: context.clone(),
        };
        let (_, memory) = context.memory()?;
        Ok(Cuda { gpu: Arc::new(gpu), machine, backend: Backend::Cuda(target), name, memory, kernels: Kept::default() })
    }

    /// Checks a job and allocates what it needs. As [`Device::load`], with what only CUDA has.
    pub fn executable(&self, job: Job) -> Result<CudaExecutable, DeviceError> {
        let _entered = self.gpu.context.enter()?;
        let _relaxed = Relaxed::new();
        CudaExecutable::new(self.gpu.clone(), job)
    }

    /// The GPU's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its instruction set and multiprocessors.
    pub fn cuda_target(&self) -> &CudaTarget {
        &self.gpu.target
    }

    /// Bytes of its memory: free now, and all.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        let _entered = self.gpu.context.enter()?;
        self.gpu.context.memory()
    }

    /// How many distinct kernels were compiled.
    pub fn compiled(&self) -> usize {
        self.kernels.len()
    }
}

/// The instruction set of a GPU, if we compile for it.
fn architecture(context: &Context) -> Result<Arch, CudaError> {
    let major = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Arch::of(major as u32, minor as u32).ok_or_else(|| CudaError::Unsupported {
        what: format!("GPU {}", context.ordinal()),
        expected: "a compute capability of 7.5, 8.0, 8.6, 8.7, 8.9, 9.0, 10.0 or 12.0".into(),
        got: format!("{major}.{minor}"),
    })
}

impl Device for Cuda {
    fn describe(&self) -> String {
        let (arch, processors) = (self.gpu.target.arch, self.gpu.target.processors);
        let gibibytes = self.memory as f64 / f64::from(1 << 30);
        let driver = self.gpu.context.driver().version();
        let compiler = self.gpu.compiler.version();
        format!(
            "cuda {}: {}, {arch}, {processors} multiprocessors, {gibibytes:.0} GiB, driver for CUDA {}.{}, NVRTC {}.{}",
            self.gpu.context.ordinal(),
            self.name,
            driver.0,
            driver.1,
            compiler.0,
            compiler.1
        )
    }

    fn machine(&self) -> &Machine {
        &self.machine
    }

    fn catalog(&self) -> &dyn Catalog {
        &self.backend
    }

    fn backend(&self) -> &Backend {
        &self.backend
    }

    fn compile(&self, sources: Vec<Source>) -> Result<Vec<Arc<CompiledKernel>>, DeviceError> {
        let _entered = self.gpu.context.enter()?;
        let _relaxed = Relaxed::new();
        let mut missing: Vec<&CudaSource> = Vec::new();
        for (step, source) in sources.iter().enumerate() {
            match source {
                Source::Cuda(text) if self.kernels.has(source) || missing.contains(&text) => {}
                Source::Cuda(text) => missing.push(text),
                Source::Library(_) => {}
                Source::Cpu(_) => return Err(DeviceError::ForeignKernel { step }),
            }
        }
        let arch = self.gpu.target.arch.name();
        let cubins = compile::compile(&self.gpu.compiler, self.gpu.cache.as_ref(), arch, &missing)?;
        for (source, cubin) in missing.into_iter().zip(cubins) {
            let module = Module::new(&self.gpu.context, cubin)?;
            self.kernels.keep(CompiledKernel { source: Source::Cuda(source.clone()), module: Some(module) });
        }
        Ok(self.kernels.of(sources))
    }

    fn load(&self, job: Job) -> Result<Box<dyn Executable>, DeviceError> {
        Ok(Box::new(self.executable(job)?))
    }

    fn upload(&self, bytes: &[u8]) -> Result<Memory, DeviceError> {
        let _entered = self.gpu.context.enter()?;
        let buffer = CudaBuffer::new(&self.gpu.context, &self.gpu.copies, bytes)?;
        Ok(Memory::Device(Box::new(buffer)))
    }

    fn machine_code(&self, _: &Launch) -> Option<Result<Vec<String>, Uncovered>> {
        None
    }

    fn memory_stats(&self) -> MemoryStats {
        // A lost context holds what it held.
        let _entered = self.gpu.context.enter();
        self.gpu.workspaces.stats()
    }

    /// Frees the workspaces of streams after their enqueued runs. The memory of executables, for runs on
    /// their own streams and for graphs that callers captured, is freed with them.
    fn release_memory(&self) {
        if let Ok(_entered) = self.gpu.context.enter() {
            self.gpu.workspaces.release();
        }
    }

    fn copy_probe(&self, bytes: usize) -> Result<Box<dyn CopyProbe>, DeviceError> {
        Ok(Box::new(probe::CudaCopyProbe::new(self, bytes)?))
    }
}
