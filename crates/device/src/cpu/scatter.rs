//! Rows added into a table, in `f32`, in the order of the indices: the same bits every time.

use deuteron_codegen::cpu::SCATTER_COLUMNS as COLUMNS;
use deuteron_codegen::cpu::simd::Fault;
use deuteron_graph::Dtype;

use crate::cpu::pool::Pool;
use crate::error::DeviceError;

pub(crate) struct ScatterTask {
    dtype: Dtype,
    count: usize,
    cols: usize,
    rows: usize,
    offsets: [usize; 3],
    /// (row of the table, position), sorted: equal rows side by side, positions in order.
    order: Vec<(u32, u32)>,
}

impl ScatterTask {
    pub fn new(dtype: Dtype, count: usize, cols: usize, rows: usize, offsets: [usize; 3]) -> ScatterTask {
        ScatterTask { dtype, count, cols, rows, offsets, order: Vec::with_capacity(count) }
    }

    /// # Safety
    /// As for a row task: addresses valid for the checked extents, the table overlaps nothing and is ours alone.
    pub unsafe fn run(&mut self, pool: &Pool, addresses: &[*mut u8], step: usize) -> Result<(), DeviceError> {
        // SAFETY: the index argument has `count` elements of `i32` from its offset.
        unsafe { self.sort(addresses[0].cast::<i32>().wrapping_add(self.offsets[0]), step)? };
        let element = self.dtype.bytes();
        let updates = addresses[1].wrapping_add(self.offsets[1] * element);
        let table = addresses[2].wrapping_add(self.offsets[2] * element);
        let (updates, table) = (Address(updates), Address(table));
        let this = &*self;
        let work = |_: usize, block: usize| {
            let columns = block * COLUMNS..((block + 1) * COLUMNS).min(this.cols);
            // SAFETY: blocks of columns are disjoint, so each element of the table is written by one task.
            unsafe { this.columns(updates, table, columns) };
        };
        pool.run(self.cols.div_ceil(COLUMNS), &work).map_err(|_| DeviceError::WorkerPanicked { step })
    }

    unsafe fn sort(&mut self, indices: *const i32, step: usize) -> Result<(), DeviceError> {
        self.order.clear();
        for position in 0..self.count {
            // SAFETY: the caller's promise: `count` elements.
            let index = unsafe { indices.add(position).read_unaligned() };
            if index < 0 || index as usize >= self.rows {
                let fault = Fault { arg: 0, row: position, index: index as i64, table_rows: self.rows };
                return Err(DeviceError::Index { step, fault });
            }
            self.order.push((index as u32, position as u32));
        }
        self.order.sort_unstable();
        Ok(())
    }

    unsafe fn columns(&self, updates: Address, table: Address, columns: std::ops::Range<usize>) {
        let mut sums = [0f32; COLUMNS];
        let mut next = 0;
        for row in 0..self.rows {
            sums.fill(0.0);
            while let Some(&(_, position)) = self.order.get(next).filter(|&&(target, _)| target as usize == row) {
                for (sum, column) in sums.iter_mut().zip(columns.clone()) {
                    // SAFETY: position < count and column < cols.
                    *sum += unsafe { self.read(updates, position as usize * self.cols + column) };
                }
                next += 1;
            }
            for (&sum, column) in sums.iter().zip(columns.clone()) {
                // SAFETY: row < rows and column < cols, and only this task has these columns.
                unsafe { self.write(table, row * self.cols + column, sum) };
            }
        }
    }

    unsafe fn read(&self, from: Address, index: usize) -> f32 {
        // SAFETY: the caller keeps the index inside the buffer.
        unsafe {
            match self.dtype {
                Dtype::F16 => from.0.cast::<half::f16>().add(index).read_unaligned().to_f32(),
                Dtype::Bf16 => from.0.cast::<half::bf16>().add(index).read_unaligned().to_f32(),
                _ => from.0.cast::<f32>().add(index).read_unaligned(),
            }
        }
    }

    unsafe fn write(&self, to: Address, index: usize, value: f32) {
        // SAFETY: the caller keeps the index inside the buffer.
        unsafe {
            match self.dtype {
                Dtype::F16 => to.0.cast::<half::f16>().add(index).write_unaligned(half::f16::from_f32(value)),
                Dtype::Bf16 => to.0.cast::<half::bf16>().add(index).write_unaligned(half::bf16::from_f32(value)),
                _ => to.0.cast::<f32>().add(index).write_unaligned(value),
            }
        }
    }
}

/// An address that tasks share; who writes where is settled by the ranges they are given.
#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: only a number; the tasks that use it write to disjoint columns.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}
