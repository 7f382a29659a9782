//! Runs on memory and streams of callers. Intermediates and scratch are in the workspace of the stream, which all executables share.
//!
//! Memory of its own has a run whose stream captures a CUDA graph, since the graph is replayed when the stream is elsewhere; one on the
//! executable's own stream; and any run where buffers have red zones.

use std::sync::Arc;

use cudarc::driver::sys;

use super::CudaExecutable;
use crate::check::check_borrowed;
use crate::cuda::context::Relaxed;
use crate::cuda::error::CudaError;
use crate::cuda::frame::Scratch;
use crate::cuda::memory::{Allocation, Zones};
use crate::cuda::stream::Event;
use crate::cuda::workspace::Enqueued;
use crate::error::DeviceError;
use crate::memory::BorrowedMemory;

/// The last run on a caller's stream.
pub(super) struct Outside {
    /// Its end. The workspace of that stream has it too, so it is never recorded on another stream.
    pub end: Arc<Event>,
    /// the number of that stream
    pub stream: u64,
    /// whether its end has not been awaited
    pub pending: bool,
}

impl CudaExecutable {
    /// Enqueues a run. The context must be entered.
    pub(super) fn run_outside(&mut self, borrowed: &BorrowedMemory<'_>) -> Result<(), DeviceError> {
        let gpu = self.gpu.clone();
        let stream = borrowed.stream as usize as sys::CUstream;
        if self.known != Some(borrowed.stream) {
            // SAFETY: the caller of `BorrowedMemory::new` promised that the stream lives.
            unsafe { gpu.check_stream(stream)? };
            self.known = Some(borrowed.stream);
        }
        let program = &self.program;
        check_borrowed(borrowed, &program.input_bytes, &program.state_bytes, &program.outputs)?;
        let (bytes, scratch) = program.block();
        if bytes == 0 && self.runs_apart() {
            // Runs share only borrowed memory, whose owner orders them: no end need be marked.
            self.bind_borrowed(borrowed)?;
            self.unmarked = true;
            // SAFETY: promised by the caller of `BorrowedMemory::new`; sizes were checked.
            unsafe { self.launch(0, stream, self.all())? };
            return Ok(());
        }
        // SAFETY: the stream lives.
        if unsafe { gpu.is_capturing(stream)? } {
            return self.run_captured(borrowed, stream);
        }
        // SAFETY: as above. A stream that captures has no number.
        let number = unsafe { gpu.stream_number(stream)? };
        let own = gpu.zones == Zones::On || stream == self.stream.handle();
        self.follow(stream, number, own || !self.runs_apart())?;
        self.bind_borrowed(borrowed)?;
        if own || bytes == 0 {
            self.use_own_scratch(0)?;
            return self.enqueue(stream, number).1;
        }
        gpu.workspaces.run(number, bytes, |start| {
            let scratch = Scratch { arena: start, workspace: start + scratch as u64 };
            let ready = self.frames[0].set_scratch(&gpu.context, scratch);
            // SAFETY: the stream lives, and the block has more bytes than the arena.
            match ready.and_then(|()| unsafe { self.poison_block(start, stream) }) {
                Ok(()) => self.enqueue(stream, number),
                Err(error) => (Enqueued::Nothing, Err(error.into())),
            }
        })
    }

    /// Enqueues a run that becomes part of the caller's CUDA graph; the caller orders its replays and other work. The graph may not depend on work
    /// outside of it, and keeps the addresses that it was captured with.
    fn run_captured(&mut self, borrowed: &BorrowedMemory<'_>, stream: sys::CUstream) -> Result<(), DeviceError> {
        self.captured = true;
        self.bind_borrowed(borrowed)?;
        {
            let _relaxed = Relaxed::new();
            self.use_own_scratch(0)?;
        }
        // SAFETY: promised by the caller of `BorrowedMemory::new`; sizes were checked.
        unsafe { self.launch(0, stream, self.all())? };
        Ok(())
    }

    /// Reports a fault of the last run on a caller's stream, if it has ended, and orders a run on another stream after it if both use our memory.
    fn follow(&mut self, stream: sys::CUstream, number: u64, shares: bool) -> Result<(), DeviceError> {
        let Some(outside) = self.outside.as_ref().filter(|outside| outside.pending) else { return Ok(()) };
        if self.faults.is_some()
            && outside.end.has_happened()?
            && let Some(error) = self.earlier_fault(stream)?
        {
            return Err(error);
        }
        if shares && outside.stream != number {
            // SAFETY: the caller of `BorrowedMemory::new` promised that the stream lives.
            unsafe { outside.end.hold_back(stream)? };
        }
        Ok(())
    }

    /// Enqueues all steps and marks their end.
    fn enqueue(&mut self, stream: sys::CUstream, number: u64) -> (Enqueued<Arc<Event>>, Result<(), DeviceError>) {
        let known = self.outside.as_ref().filter(|outside| outside.stream == number).map(|outside| outside.end.clone());
        let end = match known.map_or_else(|| Event::marker(&self.gpu.context).map(Arc::new), Ok) {
            Ok(end) => end,
            Err(error) => return (Enqueued::Nothing, Err(error.into())),
        };
        // SAFETY: promised by the caller of `BorrowedMemory::new`; sizes were checked.
        let launched = unsafe { self.launch(0, stream, self.all()).and_then(|()| self.copy_faults(stream)) };
        // SAFETY: the stream lives.
        if let Err(error) = unsafe { end.record(stream) } {
            self.unmarked = true;
            return (Enqueued::Unmarked, launched.and(Err(error)).map_err(DeviceError::from));
        }
        self.outside = Some(Outside { end: end.clone(), stream: number, pending: true });
        self.warm |= launched.is_ok();
        (Enqueued::Until(end), launched.map_err(DeviceError::from))
    }

    /// Whether runs on several streams share only inputs and outputs.
    fn runs_apart(&self) -> bool {
        self.persistent.is_none() && self.faults.is_none()
    }

    /// Allocates our own memory for a frame's intermediates and workspace if there is none, and uses it. The context must be entered.
    pub(super) fn use_own_scratch(&mut self, frame: usize) -> Result<(), CudaError> {
        let (gpu, program) = (&self.gpu, &self.program);
        if self.workspace.is_none() && program.workspace > 0 {
            self.workspace = Some(Allocation::painted(&gpu.context, program.workspace, gpu.zones, &self.stream)?);
            self.counted.add(program.workspace);
        }
        let workspace = self.workspace.as_ref().map_or(0, Allocation::address);
        let made = self.frames[frame].use_own_scratch(gpu, program, workspace, &self.stream)?;
        self.counted.add(made);
        Ok(())
    }

    /// Fills the intermediates in the block of a stream, if that was asked for.
    ///
    /// # Safety
    /// The stream lives; the block has the bytes of the arena.
    unsafe fn poison_block(&mut self, start: u64, stream: sys::CUstream) -> Result<(), CudaError> {
        if !std::mem::take(&mut self.poisoned) || self.program.arena == 0 {
            return Ok(());
        }
        // SAFETY: the caller's.
        let code = unsafe { sys::cuMemsetD8Async(start, 0xFF, self.program.arena, stream) };
        self.gpu.context.check("cuMemsetD8Async", code)
    }
}
