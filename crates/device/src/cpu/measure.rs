//! Copy bandwidth of this machine: the upper limit of every memory-bound kernel.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deuteron_codegen::cpu::simd::{self, Isa};
use deuteron_codegen::cpu::task::Workers;

use crate::buffer::Buffer;
use crate::cpu::pool::Pool;
use crate::device::CopyProbe;
use crate::error::DeviceError;

/// Elements of one task.
const PIECE: usize = 32 << 10;

/// Two buffers, and copies from one to the other.
pub(crate) struct CpuCopyProbe {
    pool: Arc<Pool>,
    isa: Isa,
    from: Buffer,
    to: Buffer,
    length: usize,
}

impl CpuCopyProbe {
    /// A probe that moves `bytes` bytes (at least a page) from one buffer to another.
    pub fn new(pool: Arc<Pool>, isa: Isa, bytes: usize) -> Result<CpuCopyProbe, DeviceError> {
        let length = (bytes / 4).max(1024);
        let (mut from, mut to) = (Buffer::new(length * 4)?, Buffer::new(length * 4)?);
        from.bytes_mut().fill(1);
        to.bytes_mut().fill(2);
        Ok(CpuCopyProbe { pool, isa, from, to, length })
    }

    fn copy(&mut self, streaming: bool) -> Result<Duration, DeviceError> {
        let ends = Ends { from: self.from.address().cast::<f32>(), to: self.to.address().cast::<f32>() };
        let (length, isa) = (self.length, self.isa);
        let work = |_: usize, task: usize| {
            let start = task * PIECE;
            let count = PIECE.min(length - start);
            // SAFETY: pieces are disjoint and inside both buffers, which outlive the call.
            let (from, to) = unsafe {
                let from = std::slice::from_raw_parts(ends.from().add(start).cast_const(), count);
                (from, std::slice::from_raw_parts_mut(ends.to().add(start), count))
            };
            simd::copy(isa, to, from, streaming);
        };
        let start = Instant::now();
        let done = self.pool.run(length.div_ceil(PIECE), &work);
        done.map(|()| start.elapsed()).map_err(|_| DeviceError::WorkerPanicked { step: 0 })
    }
}

impl CopyProbe for CpuCopyProbe {
    fn bytes(&self) -> usize {
        2 * self.length * 4
    }

    fn ordinary(&mut self) -> Result<Duration, DeviceError> {
        self.copy(false)
    }

    fn streaming(&mut self) -> Result<Duration, DeviceError> {
        self.copy(true)
    }
}

#[derive(Clone, Copy)]
struct Ends {
    from: *mut f32,
    to: *mut f32,
}

impl Ends {
    fn from(&self) -> *mut f32 {
        self.from
    }

    fn to(&self) -> *mut f32 {
        self.to
    }
}

// SAFETY: only numbers; the pieces that use them are disjoint.
unsafe impl Send for Ends {}
// SAFETY: as above.
unsafe impl Sync for Ends {}
