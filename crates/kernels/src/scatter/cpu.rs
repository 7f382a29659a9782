//! Rows added into a table, in `f32`, in the order of the indices: the same bits every time.

use std::sync::Arc;

use deuteron_codegen::cpu::SCATTER_COLUMNS as COLUMNS;
use deuteron_codegen::cpu::family::{CpuTarget, assemble};
use deuteron_codegen::cpu::simd::{Fault, Isa};
use deuteron_codegen::cpu::task::{CpuLaunch, CpuSource, CpuTask, Run, ScratchSizes, TaskError};
use deuteron_codegen::kernel::{Family, Kernel, Offer, Request, offered};
use deuteron_graph::{Dtype, memory};
use deuteron_plan::Work;

use super::Scatter;

/// Scatters by threads of the CPU.
pub(crate) struct ScatterFamily;

impl Family<CpuTarget> for ScatterFamily {
    fn offer<'a>(&self, request: Request<'a>, _: &'a CpuTarget) -> Option<Box<dyn Offer + 'a>> {
        let scatter = Scatter::lower(&request.group)?;
        let work = work(&scatter);
        offered(move || work.clone(), move || kernel(scatter))
    }
}

/// Every block of columns walks over the table's rows, and over the rows that are added.
fn work(&Scatter { count, cols, rows, .. }: &Scatter) -> Work {
    let blocks = cols.div_ceil(COLUMNS);
    Work {
        chunks: blocks.max(1) as f64,
        last_chunk: 1.0,
        scattered: (blocks * count) as f64,
        cleared: (blocks * rows) as f64,
        ..Work::default()
    }
}

fn kernel(scatter: Scatter) -> Kernel {
    let (dtype, arguments) = (scatter.dtype, scatter.arguments());
    let source = CpuSource::described(dtype, format!("rows added into a table, {dtype}, in order of the indices\n"));
    // SAFETY: tasks touch the rows of the sizes that the arguments' reach is taken of, and of the table only rows that it has.
    unsafe { assemble(source, arguments, ScatterTasks(Arc::new(scatter))) }
}

/// A launch of a scatter.
#[derive(Debug)]
struct ScatterTasks(Arc<Scatter>);

impl CpuLaunch for ScatterTasks {
    fn prepare(&self, _: usize, _: Isa) -> Box<dyn CpuTask> {
        Box::new(ScatterTask { order: memory::room(self.0.count), scatter: self.0.clone() })
    }
}

struct ScatterTask {
    scatter: Arc<Scatter>,
    /// (row of the table, position), sorted: equal rows side by side, positions in order.
    order: Vec<(u32, u32)>,
}

impl CpuTask for ScatterTask {
    fn scratch(&self) -> ScratchSizes {
        ScratchSizes::default()
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        let at = |argument: usize| run.addresses[argument].wrapping_add(self.scatter.args[argument].start());
        let (indices, updates, table) = (at(0).cast::<i32>(), Address(at(1)), Address(at(2)));
        // SAFETY: the index argument has `count` elements of `i32` from its offset.
        unsafe { self.sort(indices)? };
        let this = &*self;
        let work = |_: usize, block: usize| {
            let columns = block * COLUMNS..((block + 1) * COLUMNS).min(this.scatter.cols);
            // SAFETY: blocks of columns are disjoint, so each element of the table is written by one task.
            unsafe { this.columns(updates, table, columns) };
        };
        run.workers.run(self.scatter.cols.div_ceil(COLUMNS), &work)?;
        Ok(())
    }
}

impl ScatterTask {
    unsafe fn sort(&mut self, indices: *const i32) -> Result<(), Fault> {
        self.order.clear();
        for position in 0..self.scatter.count {
            // SAFETY: the caller's promise: `count` elements.
            let index = unsafe { indices.add(position).read_unaligned() };
            if index < 0 || index as usize >= self.scatter.rows {
                return Err(Fault { arg: 0, row: position, index: index as i64, table_rows: self.scatter.rows });
            }
            self.order.push((index as u32, position as u32));
        }
        self.order.sort_unstable();
        Ok(())
    }

    unsafe fn columns(&self, updates: Address, table: Address, columns: std::ops::Range<usize>) {
        let mut sums = [0f32; COLUMNS];
        let mut next = 0;
        for row in 0..self.scatter.rows {
            sums.fill(0.0);
            while let Some(&(_, position)) = self.order.get(next).filter(|&&(target, _)| target as usize == row) {
                for (sum, column) in sums.iter_mut().zip(columns.clone()) {
                    // SAFETY: position < count and column < cols.
                    *sum += unsafe { self.read(updates, position as usize * self.scatter.cols + column) };
                }
                next += 1;
            }
            for (&sum, column) in sums.iter().zip(columns.clone()) {
                // SAFETY: row < rows and column < cols, and only this task has these columns.
                unsafe { self.write(table, row * self.scatter.cols + column, sum) };
            }
        }
    }

    unsafe fn read(&self, from: Address, index: usize) -> f32 {
        // SAFETY: the caller keeps the index inside the buffer.
        unsafe {
            match self.scatter.dtype {
                Dtype::F16 => from.0.cast::<half::f16>().add(index).read_unaligned().to_f32(),
                Dtype::Bf16 => from.0.cast::<half::bf16>().add(index).read_unaligned().to_f32(),
                _ => from.0.cast::<f32>().add(index).read_unaligned(),
            }
        }
    }

    unsafe fn write(&self, to: Address, index: usize, value: f32) {
        // SAFETY: the caller keeps the index inside the buffer.
        unsafe {
            match self.scatter.dtype {
                Dtype::F16 => to.0.cast::<half::f16>().add(index).write_unaligned(half::f16::from_f32(value)),
                Dtype::Bf16 => to.0.cast::<half::bf16>().add(index).write_unaligned(half::bf16::from_f32(value)),
                _ => to.0.cast::<f32>().add(index).write_unaligned(value),
            }
        }
    }
}

/// An address shared by tasks, which write disjoint ranges.
#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: only a number; the tasks that use it write to disjoint columns.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}
