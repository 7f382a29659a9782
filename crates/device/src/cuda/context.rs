//! The primary context of a GPU, which PyTorch and others of the process share.
//!
//! Every driver call is made while the guard returned by `enter` is alive, and its result goes through `check`,
//! which remembers a fault that lost the context: later calls return the same error without calling the driver.

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use super::error::CudaError;
use super::library::Driver;

pub(crate) struct Context {
    driver: Driver,
    ordinal: usize,
    device: sys::CUdevice,
    handle: sys::CUcontext,
    /// The fault that lost the context, if one did.
    lost: OnceLock<CudaError>,
}

// SAFETY: the handle of a primary context may be used from any thread; the driver locks what it must.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// While it is alive, this thread may allocate and load although some stream is being captured; the allocations are not part of the CUDA graph.
pub(crate) struct Relaxed {
    before: sys::CUstreamCaptureMode,
}

impl Relaxed {
    /// The driver must be loaded.
    pub fn new() -> Relaxed {
        let mut before = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is to a mode of ours. A driver that refuses leaves it as it is, and things as they were.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut before) };
        Relaxed { before }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}

/// The context is current in this thread. Dropping it brings back the context that was, if there was another.
pub(crate) struct Entered<'a> {
    previous: Option<sys::CUcontext>,
    /// Being current is a property of the thread, so this stays in it.
    _thread: PhantomData<(*mut (), &'a Context)>,
}

impl Context {
    /// Retains the primary context of a GPU.
    pub fn new(driver: Driver, ordinal: usize) -> Result<Arc<Context>, CudaError> {
        let check = |call, code: sys::CUresult| code.result().map_err(|error| CudaError::driver(call, error));
        // SAFETY: the token proves that the driver is loaded; `cuInit` may be called any number of times.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        let mut count: c_int = 0;
        // SAFETY: the driver is initialised; the pointer is to an integer of ours.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        if count <= 0 {
            return Err(CudaError::NoDevice);
        }
        if ordinal >= count as usize {
            let (what, expected) = (format!("GPU {ordinal}"), format!("a number below {count}"));
            return Err(CudaError::Unsupported { what, expected, got: ordinal.to_string() });
        }
        let mut device: sys::CUdevice = 0;
        // SAFETY: as above, and the ordinal is below the count.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) })?;
        let mut handle: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: `device` is a device; the pointer is to a handle of ours, released when the context is dropped.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut handle, device) })?;
        Ok(Arc::new(Context { driver, ordinal, device, handle, lost: OnceLock::new() }))
    }

    /// Makes the context current in this thread; refuses once it is lost.
    pub fn enter(&self) -> Result<Entered<'_>, CudaError> {
        if let Some(error) = self.lost.get() {
            return Err(error.clone());
        }
        let mut current: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: the driver is initialised; the pointer is to a handle of ours.
        self.check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        if current == self.handle {
            return Ok(Entered { previous: None, _thread: PhantomData });
        }
        // SAFETY: the handle is retained while `self` lives.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.handle) })?;
        Ok(Entered { previous: (!current.is_null()).then_some(current), _thread: PhantomData })
    }

    /// Converts the result of a call, and remembers a fault that lost the context.
    pub fn check(&self, call: &'static str, code: sys::CUresult) -> Result<(), CudaError> {
        if code == sys::CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let error = code.result().map_err(|error| CudaError::driver(call, error));
        match error {
            Err(error) if error.is_sticky() => Err(self.lost.get_or_init(|| error).clone()),
            other => other,
        }
    }

    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    pub fn handle(&self) -> sys::CUcontext {
        self.handle
    }

    /// One property of the GPU.
    pub fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<usize, CudaError> {
        let mut value: c_int = 0;
        // SAFETY: the driver is initialised, `device` is a device, the pointer is to an integer of ours.
        self.check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.device) })?;
        Ok(value.max(0) as usize)
    }

    /// The GPU's name.
    pub fn name(&self) -> Result<String, CudaError> {
        let mut name = [0 as c_char; 256];
        // SAFETY: the driver writes at most as many characters as it is told, with a NUL at the end.
        let code = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, self.device) };
        self.check("cuDeviceGetName", code)?;
        // SAFETY: the last character was never written to and is NUL.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Bytes of memory: free, and all. The context must be entered.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to integers of ours.
        self.check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `new`, released once here; all that lives in it holds an `Arc` of this. At the end of
        // a process the driver may be gone already and says so, which changes nothing.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: it was current in this thread a moment ago; if its owner has destroyed it since, the call fails.
            let _ = unsafe { sys::cuCtxSetCurrent(previous) };
        }
    }
}
