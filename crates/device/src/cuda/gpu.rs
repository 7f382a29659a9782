//! A GPU: its context, compiler and library, which executables share with the device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use cudarc::driver::sys;
use deuteron_codegen::cuda::{CudaSource, CudaTarget, Grid, HOLD, Word};
use deuteron_codegen::{LibraryCall, MatmulShape, Source};

use super::cache::DiskCache;
use super::compile::compile;
use super::context::{Context, Relaxed};
use super::cublas_lt;
use super::error::CudaError;
use super::launch;
use super::library::Search;
use super::memory::{Allocation, Copies, Zones};
use super::module::Module;
use super::nvrtc::Compiler;
use super::stream::{Event, Stream};
use super::workspace::{Blocks, Workspaces};
use crate::error::DeviceError;
use crate::job::CompiledKernel;

/// State that executables share with the device.
pub(crate) struct Gpu {
    pub context: Arc<Context>,
    pub copies: Arc<Copies>,
    pub target: CudaTarget,
    pub zones: Zones,
    /// Bytes of the last-level cache.
    pub l2: usize,
    pub search: Search,
    pub compiler: Compiler,
    pub cache: Option<DiskCache>,
    pub library: OnceLock<Result<cublas_lt::Library, CudaError>>,
    /// Kernels that replace unsupported library calls, by their text.
    pub fallbacks: Mutex<HashMap<String, Arc<CompiledKernel>>>,
    pub hold: OnceLock<Result<Module, CudaError>>,
    pub workspaces: Workspaces<GpuBlocks>,
}

/// `CU_STREAM_LEGACY`, which the bindings leave out.
const LEGACY_STREAM: usize = 1;

/// Blocks of memory of this GPU, and events of its streams.
pub(crate) struct GpuBlocks(pub Arc<Context>);

impl Blocks for GpuBlocks {
    type Block = Allocation;
    type Mark = Arc<Event>;

    fn allocate(&self, bytes: usize) -> Result<Allocation, CudaError> {
        let _relaxed = Relaxed::new();
        Allocation::new(&self.0, bytes, Zones::Off)
    }

    fn address(&self, block: &Allocation) -> u64 {
        block.address()
    }

    fn is_past(&self, mark: &Arc<Event>) -> Result<bool, CudaError> {
        let _relaxed = Relaxed::new();
        mark.has_happened()
    }

    fn wait(&self, mark: &Arc<Event>) -> Result<(), CudaError> {
        let _relaxed = Relaxed::new();
        mark.wait()
    }
}

/// A job that is counted while it is loaded: its requirement of a stream's workspace, and its own memory.
pub(crate) struct Counted {
    gpu: Arc<Gpu>,
    need: usize,
    own: usize,
}

impl Counted {
    pub fn new(gpu: &Arc<Gpu>, need: usize, own: usize) -> Counted {
        gpu.workspaces.join(need);
        gpu.workspaces.add_own(own);
        Counted { gpu: gpu.clone(), need, own }
    }

    /// Adds to its own memory.
    pub fn add(&mut self, bytes: usize) {
        self.gpu.workspaces.add_own(bytes);
        self.own += bytes;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // Where the context is lost, nothing is freed.
        let _entered = self.gpu.context.enter();
        self.gpu.workspaces.remove_own(self.own);
        self.gpu.workspaces.leave(self.need);
    }
}

impl Gpu {
    /// A call of the library, which is loaded for the first one; `None` where it has nothing for it or is not
    /// installed. The context must be entered.
    pub fn library_call(
        &self,
        call: &LibraryCall,
        shape: &MatmulShape,
        offsets: &[usize],
    ) -> Result<Option<cublas_lt::Prepared>, CudaError> {
        match self.library.get_or_init(|| cublas_lt::Library::new(&self.search)) {
            Ok(library) => library.prepare(call, shape, offsets),
            Err(CudaError::LibraryMissing { .. } | CudaError::TooOld { .. }) => Ok(None),
            Err(error) => Err(error.clone()),
        }
    }

    /// Our kernel in place of a library's. The context must be entered.
    pub fn fallback(&self, source: &CudaSource) -> Result<Arc<CompiledKernel>, CudaError> {
        let mut known = self.fallbacks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = known.get(&source.text) {
            return Ok(kernel.clone());
        }
        let cubins = compile(&self.compiler, self.cache.as_ref(), self.target.arch.name(), &[source])?;
        let module = cubins.into_iter().next().map(|cubin| Module::new(&self.context, cubin)).transpose()?;
        let made = Arc::new(CompiledKernel { source: Source::Cuda(source.clone()), module });
        known.insert(source.text.clone(), made.clone());
        Ok(made)
    }

    /// Keeps a stream busy, so that work enqueued meanwhile runs without gaps. The context must be entered.
    pub fn hold(&self, stream: &Stream, time: Duration) -> Result<(), CudaError> {
        let module = self.hold.get_or_init(|| {
            let source = CudaSource::new("hold", HOLD.into());
            let cubins = compile(&self.compiler, self.cache.as_ref(), self.target.arch.name(), &[&source])?;
            let cubin = cubins.into_iter().next().ok_or(CudaError::NoDevice)?;
            Module::new(&self.context, cubin)
        });
        let module = module.as_ref().map_err(Clone::clone)?;
        let words = [time.as_nanos() as u64];
        let grid = Grid::new("hold", 1, 1, words.map(Word::Number).to_vec());
        let launch = launch::Grid::new(module.function(&grid)?, &grid, 0..1);
        // SAFETY: the stream lives; the parameter is one number.
        self.context.check("cuLaunchKernel", unsafe { launch.launch(&words, stream.handle(), false) })
    }

    /// An error if an address is not in memory of this GPU. The context must be entered.
    pub fn check_memory(&self, input: usize, address: u64) -> Result<(), DeviceError> {
        let foreign = DeviceError::ForeignMemory { input, ordinal: self.context.ordinal() };
        let (mut ordinal, mut kind) = (-1i32, 0u32);
        use sys::CUpointer_attribute_enum::{
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE as KIND,
        };
        // SAFETY: any address may be asked about; each answer has the type that the attribute documents.
        let codes = unsafe {
            let first = sys::cuPointerGetAttribute((&raw mut ordinal).cast(), ORDINAL, address);
            [first, sys::cuPointerGetAttribute((&raw mut kind).cast(), KIND, address)]
        };
        for code in codes {
            if code == sys::CUresult::CUDA_ERROR_INVALID_VALUE {
                return Err(foreign);
            }
            self.context.check("cuPointerGetAttribute", code)?;
        }
        let on_host = kind == sys::CUmemorytype_enum::CU_MEMORYTYPE_HOST as u32;
        if on_host || ordinal != self.context.ordinal() as i32 { Err(foreign) } else { Ok(()) }
    }

    /// An error if a stream belongs to another context. Our own must be entered.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn check_stream(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        let mut context: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: the caller's; the pointer is to a handle of ours.
        let code = unsafe { sys::cuStreamGetCtx(stream, &mut context) };
        self.context.check("cuStreamGetCtx", code)?;
        if context == self.context.handle() {
            return Ok(());
        }
        Err(CudaError::Unsupported {
            what: "a stream of another context".into(),
            expected: format!("one of the primary context of GPU {}", self.context.ordinal()),
            got: "another".into(),
        })
    }

    /// A unique id of the stream: handles may be reused.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn stream_number(&self, stream: sys::CUstream) -> Result<u64, CudaError> {
        // The default stream may not be asked while another one captures. It is the same for all threads, and has two handles.
        if stream.is_null() || stream as usize == LEGACY_STREAM {
            return Ok(u64::MAX);
        }
        let mut number = 0;
        // SAFETY: the caller's; the pointer is to a number of ours. The call came with CUDA 12.0, the oldest driver that is opened.
        self.context.check("cuStreamGetId", unsafe { sys::cuStreamGetId(stream, &mut number) })?;
        Ok(number)
    }

    /// Whether a stream is capturing a CUDA graph.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn is_capturing(&self, stream: sys::CUstream) -> Result<bool, CudaError> {
        let mut status = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller's; the pointer is to a status of ours.
        match unsafe { sys::cuStreamIsCapturing(stream, &mut status) } {
            // The default stream while another one captures: it cannot be capturing itself.
            sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => Ok(false),
            code => {
                self.context.check("cuStreamIsCapturing", code)?;
                Ok(status != sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE)
            }
        }
    }
}
