//! Streams of our own, and the events that mark points in them.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::context::Context;
use super::error::CudaError;

/// A stream that does not wait for the default stream of other libraries.
pub(crate) struct Stream {
    context: Arc<Context>,
    handle: sys::CUstream,
}

/// A point in a stream, with its time.
pub(crate) struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: handles of streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}
// SAFETY: handles of events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Stream {
    /// The context must be entered.
    pub fn new(context: &Arc<Context>) -> Result<Stream, CudaError> {
        let mut handle: sys::CUstream = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; the pointer is to a handle of ours.
        context.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        Ok(Stream { context: context.clone(), handle })
    }

    pub fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Waits in this thread for all that was enqueued.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        self.context.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }
}

impl Event {
    /// The context must be entered.
    pub fn new(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with(context, sys::CUevent_flags_enum::CU_EVENT_DEFAULT)
    }

    /// Without a time, which makes it cheaper to record. The context must be entered.
    pub fn marker(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with(context, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING)
    }

    fn with(context: &Arc<Context>, flags: sys::CUevent_flags_enum) -> Result<Event, CudaError> {
        let (mut handle, flags): (sys::CUevent, u32) = (std::ptr::null_mut(), flags as u32);
        // SAFETY: a context is current; the pointer is to a handle of ours.
        context.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut handle, flags) })?;
        Ok(Event { context: context.clone(), handle })
    }

    /// Marks the present end of a stream.
    ///
    /// # Safety
    /// The stream lives and is of this context.
    pub unsafe fn record(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: the event lives, and the caller says that the stream does.
        self.context.check("cuEventRecord", unsafe { sys::cuEventRecord(self.handle, stream) })
    }

    /// What is enqueued on a stream from now on starts after this event.
    ///
    /// # Safety
    /// The stream lives.
    pub unsafe fn hold_back(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: the event lives, and the caller says that the stream does.
        self.context.check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, self.handle, 0) })
    }

    /// Whether it has happened.
    pub fn has_happened(&self) -> Result<bool, CudaError> {
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.handle) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => self.context.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits in this thread.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event lives.
        self.context.check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle) })
    }

    /// From another event to this one; both have happened.
    pub fn since(&self, start: &Event) -> Result<Duration, CudaError> {
        let mut milliseconds = 0f32;
        // The second form came with CUDA 12.8, the first is gone from the bindings of 13.0: any driver has one of them.
        let code = if self.context.driver().has(c"cuEventElapsedTime_v2") {
            // SAFETY: the driver has this call; both events live; the pointer is to a number of ours.
            unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, start.handle, self.handle) }
        } else {
            type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
            // SAFETY: the driver is loaded, and this is the signature that the call has had since CUDA 2.
            match unsafe { sys::culib().get::<Elapsed>(c"cuEventElapsedTime") } {
                // SAFETY: as above.
                Ok(elapsed) => unsafe { elapsed(&mut milliseconds, start.handle, self.handle) },
                Err(_) => sys::CUresult::CUDA_ERROR_NOT_FOUND,
            }
        };
        self.context.check("cuEventElapsedTime", code)?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: created once, destroyed once; the driver keeps it until its work is done.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: created once, destroyed once; the driver keeps it until what waits for it is done.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
