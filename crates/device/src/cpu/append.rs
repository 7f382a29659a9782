//! Rows written into a cache, from a position of each sequence on.

use deuteron_codegen::AppendShape;
use deuteron_codegen::cpu::simd::Fault;

use crate::cpu::copy::PARALLEL_FROM;
use crate::cpu::pool::Pool;
use crate::error::DeviceError;

/// The argument that holds positions.
const POSITIONS: usize = 2;

pub(crate) struct AppendTask {
    shape: AppendShape,
    /// Bytes of an element.
    element: usize,
    /// Elements from the start of each argument's buffer.
    offsets: [usize; 4],
}

impl AppendTask {
    pub fn new(element: usize, shape: AppendShape, offsets: [usize; 4]) -> AppendTask {
        AppendTask { shape, element, offsets }
    }

    /// # Safety
    /// As for a row task: addresses valid for the checked extents, the result overlaps nothing but the cache that it is,
    /// and is ours alone.
    pub unsafe fn run(&mut self, pool: &Pool, addresses: &[*mut u8], step: usize) -> Result<(), DeviceError> {
        let at = |argument: usize, element: usize| addresses[argument].wrapping_add(self.offsets[argument] * element);
        let positions = at(POSITIONS, 4).cast_const().cast::<i32>();
        for row in 0..self.shape.sequences() {
            // SAFETY: there is a position for each sequence.
            let index = i64::from(unsafe { positions.add(row).read_unaligned() });
            if index < 0 || index >= self.shape.places() as i64 {
                let fault = Fault { arg: POSITIONS, row, index, table_rows: self.shape.places() };
                return Err(DeviceError::Index { step, fault });
            }
        }
        let ends = Ends {
            cache: at(0, self.element),
            rows: at(1, self.element),
            positions,
            result: at(3, self.element),
        };
        let this = &*self;
        let work = |_: usize, block: usize| {
            // SAFETY: the caller's promise; blocks are disjoint, and all positions are places where the rows fit.
            unsafe { this.block(ends, block) };
        };
        let blocks = self.shape.blocks();
        let written = if self.shape.in_place { self.shape.rows } else { self.shape.capacity };
        if blocks * written * self.shape.cols * self.element < PARALLEL_FROM {
            (0..blocks).for_each(|block| work(0, block));
            return Ok(());
        }
        pool.run(blocks, &work).map_err(|_| DeviceError::WorkerPanicked { step })
    }

    /// The rows of one block, after the block itself where the cache is not kept in place.
    unsafe fn block(&self, ends: Ends, block: usize) {
        let AppendShape { rows, stride, capacity, cols, in_place, .. } = self.shape;
        let (sequence, from) = self.shape.source(block);
        let (row, whole) = (cols * self.element, capacity * cols * self.element);
        // SAFETY: the caller's promise; cache and result are one or apart, and the rows overlap neither.
        unsafe {
            let result = ends.result.add(block * whole);
            if !in_place {
                std::ptr::copy_nonoverlapping(ends.cache.add(block * whole), result, whole);
            }
            let position = ends.positions.add(sequence).read_unaligned() as usize;
            let to = result.add(position * row);
            for index in 0..rows {
                let from = ends.rows.add((from + index * stride) * self.element);
                std::ptr::copy_nonoverlapping(from, to.add(index * row), row);
            }
        }
    }
}

/// Where the arguments begin.
#[derive(Clone, Copy)]
struct Ends {
    cache: *const u8,
    rows: *const u8,
    positions: *const i32,
    result: *mut u8,
}

// SAFETY: only numbers; the tasks that use them write to disjoint blocks.
unsafe impl Send for Ends {}
// SAFETY: as above.
unsafe impl Sync for Ends {}
