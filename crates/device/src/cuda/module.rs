//! Compiled kernels, loaded: a module of the driver and its functions.

use std::collections::HashMap;
use std::ffi::{CString, c_int};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use deuteron_codegen::cuda::{Grid, Word};

use super::context::Context;
use super::error::CudaError;
use super::launch::cluster_attribute;
use super::nvrtc::{Cubin, EntryUsage};

/// Dynamic shared memory that every kernel may use without asking: what it declares itself comes on top, and both together
/// must not pass 48 KiB.
const PLAIN_SHARED: u32 = 16 << 10;
/// Blocks of a cluster that every GPU with clusters can run.
const PORTABLE_CLUSTER: u32 = 8;

/// A function to launch. Valid while its module is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Function(pub sys::CUfunction);

// SAFETY: handles of functions may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// A cubin in the context.
pub(crate) struct Module {
    context: Arc<Context>,
    handle: sys::CUmodule,
    entries: Vec<EntryUsage>,
    functions: Mutex<HashMap<&'static str, Prepared>>,
}

// SAFETY: the handle may be used from any thread; the table of functions is locked.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A function and the limits set for it so far.
#[derive(Clone, Copy)]
struct Prepared {
    function: Function,
    shared: u32,
    cluster: u32,
    /// Bytes of its parameter, where the driver tells.
    parameter: Option<usize>,
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.entries).finish()
    }
}

impl Module {
    /// Loads a cubin. The context must be entered.
    pub fn new(context: &Arc<Context>, cubin: Cubin) -> Result<Module, CudaError> {
        let mut handle: sys::CUmodule = std::ptr::null_mut();
        // SAFETY: a context is current, and the image is a whole ELF file, whose length is inside of it. The driver copies
        // what it needs.
        let code = unsafe { sys::cuModuleLoadData(&mut handle, cubin.image.as_ptr().cast()) };
        context.check("cuModuleLoadData", code)?;
        Ok(Module { context: context.clone(), handle, entries: cubin.entries, functions: Mutex::default() })
    }

    /// Resources of each function, as the compiler reports them.
    pub fn entries(&self) -> &[EntryUsage] {
        &self.entries
    }

    /// The function of a grid, ready to be launched as the grid says. The context must be entered.
    pub fn function(&self, grid: &Grid) -> Result<Function, CudaError> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known = match functions.get(grid.entry) {
            Some(known) => *known,
            None => self.find(grid.entry)?,
        };
        let words = grid.words.iter().map(Word::count).sum::<usize>() * 8;
        if let Some(expected) = known.parameter.filter(|&expected| expected != words) {
            return Err(CudaError::Unsupported {
                what: format!("a launch of `{}`", grid.entry),
                expected: format!("a parameter of {expected} bytes"),
                got: format!("{words} bytes"),
            });
        }
        if grid.shared > known.shared {
            use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            self.allow(known.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, grid.shared as c_int)?;
            known.shared = grid.shared;
        }
        if grid.cluster > known.cluster {
            use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
            self.allow(known.function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
            known.cluster = grid.cluster;
        }
        functions.insert(grid.entry, known);
        Ok(known.function)
    }

    /// Blocks of a grid of clusters that run at once: clusters of neighbours leave some multiprocessors over, not as many on every GPU.
    pub fn blocks_at_once(&self, function: Function, grid: &Grid) -> Result<u32, CudaError> {
        let [x, y, z] = grid.blocks;
        if !self.context.driver().has(c"cuOccupancyMaxActiveClusters") {
            return Ok(x);
        }
        let mut attribute = cluster_attribute(grid.cluster);
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: std::ptr::null_mut(),
            attrs: &mut attribute,
            numAttrs: 1,
        };
        let mut clusters: c_int = 0;
        // SAFETY: the driver has this call; the function belongs to this module, which lives; the pointers are to values of ours.
        let code = unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, function.0, &config) };
        self.context.check("cuOccupancyMaxActiveClusters", code)?;
        Ok(clusters.max(1) as u32 * grid.cluster)
    }

    fn find(&self, entry: &'static str) -> Result<Prepared, CudaError> {
        let name = CString::new(entry).unwrap_or_default();
        let mut handle: sys::CUfunction = std::ptr::null_mut();
        // SAFETY: the module lives; the name ends with NUL; the pointer is to a handle of ours.
        let code = unsafe { sys::cuModuleGetFunction(&mut handle, self.handle, name.as_ptr()) };
        self.context.check("cuModuleGetFunction", code)?;
        // Asking loads the function now: a driver that loads on first use would do it in the middle of a recording.
        let mut registers: c_int = 0;
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: the function was just found; the pointer is to an integer of ours.
        let code = unsafe { sys::cuFuncGetAttribute(&mut registers, attribute, handle) };
        self.context.check("cuFuncGetAttribute", code)?;
        let parameter = self.parameter(handle)?;
        Ok(Prepared { function: Function(handle), shared: PLAIN_SHARED, cluster: PORTABLE_CLUSTER, parameter })
    }

    /// Bytes of a function's only parameter, if the driver is new enough to say.
    fn parameter(&self, function: sys::CUfunction) -> Result<Option<usize>, CudaError> {
        if !self.context.driver().has(c"cuFuncGetParamInfo") {
            return Ok(None);
        }
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the driver has this call; the function lives; the pointers are to integers of ours.
        let code = unsafe { sys::cuFuncGetParamInfo(function, 0, &mut offset, &mut size) };
        self.context.check("cuFuncGetParamInfo", code)?;
        Ok(Some(size))
    }

    fn allow(&self, function: Function, what: sys::CUfunction_attribute, value: c_int) -> Result<(), CudaError> {
        // SAFETY: the function belongs to this module, which lives.
        self.context.check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function.0, what, value) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: loaded once, unloaded once. Executables hold the kernel, and with it this module, until their work
            // is done.
            let _ = unsafe { sys::cuModuleUnload(self.handle) };
        }
    }
}
