//! Memory of the GPU, page-locked memory of the host, and copies between them.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::context::{Context, Relaxed};
use super::error::CudaError;
use super::stream::{Event, Stream};
use crate::error::DeviceError;
use crate::memory::DeviceMemory;

/// Bytes of a red zone on each side of a buffer.
const ZONE: usize = 4096;
/// What a red zone is filled with.
const PATTERN: u8 = 0xA5;
/// Buffers are padded to a multiple of this, and start at one: what the driver does as well.
const ALIGNMENT: usize = 256;
/// Bytes of one page-locked buffer: long enough that starting a copy costs nothing against it.
const CHUNK: usize = 8 << 20;

/// Memory of the GPU, with red zones or without.
pub(crate) struct Allocation {
    context: Arc<Context>,
    base: sys::CUdeviceptr,
    bytes: usize,
    /// Bytes before the buffer, 0 without red zones.
    before: usize,
    /// All of it.
    total: usize,
}

/// Whether a buffer has red zones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zones {
    Off,
    On,
}

impl Allocation {
    /// Allocates. The context must be entered. Red zones must be painted before the first check.
    pub fn new(context: &Arc<Context>, bytes: usize, zones: Zones) -> Result<Allocation, CudaError> {
        let before = if zones == Zones::On { ZONE } else { 0 };
        let padded = bytes.max(1).checked_next_multiple_of(ALIGNMENT);
        let total =
            padded.and_then(|bytes| bytes.checked_add(2 * before)).filter(|&total| total <= isize::MAX as usize);
        let total = total.ok_or(CudaError::OutOfMemory { bytes: bytes as u64, free: 0, total: 0 })?;
        let mut base: sys::CUdeviceptr = 0;
        // SAFETY: a context is current; the pointer is to an address of ours.
        match unsafe { sys::cuMemAlloc_v2(&mut base, total) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, all) = context.memory()?;
                Err(CudaError::OutOfMemory { bytes: total as u64, free: free as u64, total: all as u64 })
            }
            code => {
                context.check("cuMemAlloc", code)?;
                Ok(Allocation { context: context.clone(), base, bytes, before, total })
            }
        }
    }

    /// The same with its red zones painted.
    pub fn painted(
        context: &Arc<Context>,
        bytes: usize,
        zones: Zones,
        stream: &Stream,
    ) -> Result<Allocation, CudaError> {
        let memory = Allocation::new(context, bytes, zones)?;
        memory.paint(stream)?;
        Ok(memory)
    }

    /// Where the buffer begins.
    pub fn address(&self) -> u64 {
        self.base + self.before as u64
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Fills the buffer, not the zones.
    pub fn fill(&self, value: u8, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the buffer is `bytes` long from there.
        unsafe { self.set(self.address(), value, self.bytes, stream) }
    }

    /// Fills the zones with their pattern. Without zones, does nothing.
    fn paint(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: `zones` gives ranges of this allocation.
        self.zones().into_iter().try_for_each(|(start, length)| unsafe { self.set(start, PATTERN, length, stream) })
    }

    /// Which red zone of the buffer was overwritten, if any. All work on the buffer must have finished.
    pub fn damage(&self, copies: &Copies) -> Result<Option<&'static str>, CudaError> {
        let mut bytes = vec![0; ZONE + ALIGNMENT];
        for ((start, length), side) in self.zones().into_iter().zip(["before", "after"]) {
            // SAFETY: as in `paint`.
            unsafe { copies.download(start, &mut bytes[..length])? };
            if bytes[..length].iter().any(|&byte| byte != PATTERN) {
                return Ok(Some(side));
            }
        }
        Ok(None)
    }

    /// (start, length) of the zones. The second begins right behind the last byte of the buffer.
    fn zones(&self) -> Vec<(u64, usize)> {
        if self.before == 0 {
            return Vec::new();
        }
        let end = self.before + self.bytes;
        vec![(self.base, self.before), (self.base + end as u64, self.total - end)]
    }

    /// # Safety
    /// The range is inside of this allocation.
    unsafe fn set(&self, start: u64, value: u8, length: usize, stream: &Stream) -> Result<(), CudaError> {
        if length == 0 {
            return Ok(());
        }
        // SAFETY: the caller's; the memory is freed only when `self` is dropped, which waits for the work on it.
        let code = unsafe { sys::cuMemsetD8Async(start, value, length, stream.handle()) };
        self.context.check("cuMemsetD8Async", code)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            let _relaxed = Relaxed::new();
            // SAFETY: allocated once, freed once. The driver waits for work that is under way.
            let _ = unsafe { sys::cuMemFree_v2(self.base) };
        }
    }
}

/// Page-locked memory of the host.
pub(crate) struct Pinned {
    context: Arc<Context>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its memory; reads and writes are ordered by events and `&mut`.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates zeroed bytes. The context must be entered.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Pinned, CudaError> {
        let mut start = std::ptr::null_mut();
        // SAFETY: a context is current; the pointer is to an address of ours.
        context.check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut start, bytes.max(1), 0) })?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(CudaError::OutOfMemory {
            bytes: bytes as u64,
            free: 0,
            total: 0,
        })?;
        // SAFETY: just allocated with this length.
        unsafe { start.as_ptr().write_bytes(0, bytes) };
        Ok(Pinned { context: context.clone(), start, bytes })
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: allocated once, freed once; every copy that uses it was waited for or belongs to a stream that the
            // driver waits for.
            let _ = unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) };
        }
    }
}

/// Copies between host and GPU through two page-locked buffers: one is filled while the other is transferred.
pub(crate) struct Copies {
    context: Arc<Context>,
    /// For copies that belong to no other stream.
    stream: Stream,
    slots: Mutex<[Slot; 2]>,
}

struct Slot {
    buffer: Pinned,
    /// The last copy from or to the buffer.
    done: Event,
    busy: bool,
}

impl Slot {
    fn new(context: &Arc<Context>) -> Result<Slot, CudaError> {
        Ok(Slot { buffer: Pinned::new(context, CHUNK)?, done: Event::new(context)?, busy: false })
    }

    fn free(&mut self) -> Result<(), CudaError> {
        if std::mem::take(&mut self.busy) { self.done.wait() } else { Ok(()) }
    }
}

impl Copies {
    /// The context must be entered.
    pub fn new(context: &Arc<Context>) -> Result<Copies, CudaError> {
        let slots = [Slot::new(context)?, Slot::new(context)?];
        Ok(Copies { context: context.clone(), stream: Stream::new(context)?, slots: Mutex::new(slots) })
    }

    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Enqueues a copy to the GPU. When it returns, `bytes` are no longer needed, and work that is enqueued on the stream
    /// later sees them.
    ///
    /// # Safety
    /// `to` is valid for as many bytes until the stream has done the copy.
    pub unsafe fn upload(&self, to: u64, bytes: &[u8], stream: &Stream) -> Result<(), CudaError> {
        let mut slots = self.lock();
        for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
            let slot = &mut slots[index % 2];
            slot.free()?;
            // SAFETY: the buffer holds a chunk, nothing copies from it any more, and it is not `bytes`.
            unsafe { slot.buffer.as_ptr().copy_from_nonoverlapping(chunk.as_ptr(), chunk.len()) };
            let to = to + (index * CHUNK) as u64;
            // SAFETY: the caller's for `to`; the buffer is not touched before `done` has happened.
            let code =
                unsafe { sys::cuMemcpyHtoDAsync_v2(to, slot.buffer.as_ptr().cast(), chunk.len(), stream.handle()) };
            self.context.check("cuMemcpyHtoDAsync", code)?;
            // SAFETY: the stream lives.
            unsafe { slot.done.record(stream.handle())? };
            slot.busy = true;
        }
        Ok(())
    }

    /// Copies from the GPU and waits. Work that writes what is read has been waited for.
    ///
    /// # Safety
    /// `from` is valid for as many bytes.
    pub unsafe fn download(&self, from: u64, into: &mut [u8]) -> Result<(), CudaError> {
        let mut slots = self.lock();
        let chunks = into.len().div_ceil(CHUNK);
        for step in 0..=chunks {
            if step < chunks {
                let slot = &mut slots[step % 2];
                slot.free()?;
                let start = step * CHUNK;
                let length = CHUNK.min(into.len() - start);
                // SAFETY: the caller's for `from`; the buffer holds a chunk and nothing else uses it.
                let code = unsafe {
                    let to = slot.buffer.as_ptr().cast();
                    sys::cuMemcpyDtoHAsync_v2(to, from + start as u64, length, self.stream.handle())
                };
                self.context.check("cuMemcpyDtoHAsync", code)?;
                // SAFETY: the stream lives.
                unsafe { slot.done.record(self.stream.handle())? };
                slot.busy = true;
            }
            // While this chunk travels, the one before is copied out.
            if let Some(chunk) = step.checked_sub(1).and_then(|before| into.chunks_mut(CHUNK).nth(before)) {
                let slot = &mut slots[(step - 1) % 2];
                slot.free()?;
                // SAFETY: the copy into the buffer is done; the chunk is not longer than the buffer.
                unsafe { chunk.as_mut_ptr().copy_from_nonoverlapping(slot.buffer.as_ptr(), chunk.len()) };
            }
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, [Slot; 2]> {
        // A panic cannot leave a slot marked free that is not: it is marked after the copy is enqueued and its event
        // recorded, with no panic between.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tensor memory on the GPU.
pub struct CudaBuffer {
    memory: Allocation,
    copies: Arc<Copies>,
}

impl CudaBuffer {
    /// A copy of bytes of the host. The context must be entered.
    pub(crate) fn new(context: &Arc<Context>, copies: &Arc<Copies>, bytes: &[u8]) -> Result<CudaBuffer, CudaError> {
        let memory = Allocation::new(context, bytes.len(), Zones::Off)?;
        // SAFETY: the allocation has these bytes, and the copy is waited for before it can be dropped.
        unsafe { copies.upload(memory.address(), bytes, copies.stream())? };
        copies.stream().wait()?;
        Ok(CudaBuffer { memory, copies: copies.clone() })
    }

    /// Bytes of one value. The context must be entered.
    pub(crate) fn filled(
        context: &Arc<Context>,
        copies: &Arc<Copies>,
        bytes: usize,
        value: u8,
    ) -> Result<CudaBuffer, CudaError> {
        let memory = Allocation::new(context, bytes, Zones::Off)?;
        memory.fill(value, copies.stream())?;
        copies.stream().wait()?;
        Ok(CudaBuffer { memory, copies: copies.clone() })
    }
}

impl fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaBuffer {{ {} bytes at {:#x} }}", self.memory.len(), self.memory.address())
    }
}

impl DeviceMemory for CudaBuffer {
    fn len(&self) -> usize {
        self.memory.len()
    }

    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn read(&self, into: &mut [u8]) -> Result<(), DeviceError> {
        let length = into.len().min(self.memory.len());
        let _entered = self.memory.context.enter()?;
        // SAFETY: not more than the allocation has, which nothing writes to after `new`.
        unsafe { self.copies.download(self.memory.address(), &mut into[..length])? };
        Ok(())
    }
}
