//! Checks after a run: indices out of range, and red zones.

use cudarc::driver::sys;
use deuteron_codegen::cpu::simd::Fault;

use super::CudaExecutable;
use crate::cuda::error::CudaError;
use crate::cuda::frame::check_zone;
use crate::cuda::memory::Zones;
use crate::error::DeviceError;

impl CudaExecutable {
    /// The fault of an earlier run on a caller's memory, which has ended. That memory may be gone, so no step runs again to find
    /// the index. The words are cleared on a stream.
    pub(super) fn earlier_fault(&self, stream: sys::CUstream) -> Result<Option<DeviceError>, CudaError> {
        let Some((step, word)) = self.first_fault() else { return Ok(None) };
        if let Some(faults) = &self.faults {
            // SAFETY: the run that wrote them has ended, and nothing else reads or writes them now.
            unsafe { faults.seen.as_ptr().write_bytes(0xFF, faults.seen.len()) };
            // SAFETY: the words have this many bytes and live as long as we do; the stream is ours or the caller's of this run.
            let code = unsafe { sys::cuMemsetD8Async(faults.words.address(), 0xFF, faults.words.len(), stream) };
            self.gpu.context.check("cuMemsetD8Async", code)?;
        }
        Ok(Some(DeviceError::EarlierIndex { step, row: (word / 256) as usize }))
    }

    /// Enqueues a copy of the fault words to where the host looks at them.
    ///
    /// # Safety
    /// The stream lives and is of our context.
    pub(super) unsafe fn copy_faults(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        let Some(faults) = &self.faults else { return Ok(()) };
        let (to, from) = (faults.seen.as_ptr().cast(), faults.words.address());
        // SAFETY: both have as many bytes, and the host's are looked at only when this copy has been waited for.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, faults.seen.len(), stream) };
        self.gpu.context.check("cuMemcpyDtoHAsync", code)
    }

    /// Waits for the end, then looks at the fault words and the red zones of the first `frames` frames.
    pub(super) fn check_results(&mut self, frames: usize) -> Result<(), DeviceError> {
        // SAFETY: our stream.
        unsafe { self.copy_faults(self.stream.handle())? };
        self.stream.wait()?;
        if let Some((step, word)) = self.first_fault() {
            return Err(self.explain_fault(step, word, frames)?);
        }
        self.check_red_zones(frames)
    }

    /// Looks at the red zones of the first `frames` frames. All work is done.
    pub(super) fn check_red_zones(&self, frames: usize) -> Result<(), DeviceError> {
        if self.gpu.zones == Zones::On {
            for frame in &self.frames[..frames.min(self.frames.len())] {
                frame.check_zones(&self.gpu.copies)?;
            }
            if let Some(workspace) = &self.workspace {
                check_zone("the workspace".into(), workspace, &self.gpu.copies)?;
            }
            if let Some(persistent) = &self.persistent {
                check_zone("persistent memory of steps".into(), persistent, &self.gpu.copies)?;
            }
        }
        Ok(())
    }

    /// The first step with a fault, and its word.
    fn first_fault(&self) -> Option<(usize, u64)> {
        let faults = self.faults.as_ref()?;
        let words = faults.seen.as_ptr().cast::<u64>();
        let mut steps = self.program.steps.iter().enumerate().filter(|(_, step)| step.checks_indices);
        steps.find_map(|(index, _)| {
            // SAFETY: one word per step, aligned to a page; the copy into them was waited for.
            let word = unsafe { words.add(index).read() };
            (word != u64::MAX).then_some((index, word))
        })
    }

    /// The error that the CPU would give. The steps before the fault run again, since the index may stand in memory that a
    /// later step used for something else; in each frame, since the word does not tell which one it was.
    fn explain_fault(&mut self, step: usize, word: u64, frames: usize) -> Result<DeviceError, DeviceError> {
        let (row, arg) = ((word / 256) as usize, (word % 256) as usize);
        let mut fault = Fault { arg, row, index: -1, table_rows: 0 };
        let lookup = self.program.steps[step].launch.lookup(arg);
        let place = lookup.map(|lookup| (lookup.indices, lookup.element(row), lookup.table_rows));
        if let Some((indices, element, table_rows)) = place {
            fault.table_rows = table_rows;
            let argument = self.program.steps[step].places[indices];
            for frame in 0..frames.min(self.frames.len()) {
                // SAFETY: our stream, and the inputs of the run that is being looked at.
                unsafe { self.launch(frame, self.stream.handle(), 0..step)? };
                self.stream.wait()?;
                let address = self.frames[frame].address(argument) + 4 * element as u64;
                let mut index = [0; 4];
                // SAFETY: the element is one that the kernel read, inside of the argument's checked extent.
                unsafe { self.gpu.copies.download(address, &mut index)? };
                fault.index = i64::from(i32::from_le_bytes(index));
                if fault.index < 0 || fault.index as usize >= fault.table_rows {
                    break;
                }
            }
        }
        if let Some(faults) = &self.faults {
            faults.words.fill(0xFF, &self.stream)?;
        }
        self.stream.wait()?;
        Ok(DeviceError::Index { step, fault })
    }
}
