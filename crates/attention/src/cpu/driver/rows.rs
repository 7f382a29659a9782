//! Attention with row work on its result: tiles of queries of a head are tasks, as for attention alone, and the worker that finishes the last
//! head of a tile runs the row work on its rows.
//!
//! Tasks depend only on the sizes, and the bits of a row do not depend on the worker, so any number of threads gives the same bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use deuteron_codegen::cpu::bind::{bind as bind_row, bind_axes};
use deuteron_codegen::cpu::program::TileProgram;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::simd::lines::LINE;
use deuteron_codegen::cpu::simd::{self, Axis, BoundArg, Isa};
use deuteron_codegen::cpu::task::{CpuLaunch, CpuTask, Floats, PerWorker, Run, ScratchSizes, TaskError};
use deuteron_graph::memory;

use super::super::{Ended, Forward, Heads, Output, Shared, combine, forward};
use super::{AttentionLaunch, heads};
use crate::rows::{AttentionRows, AttentionRowsLaunch};

/// A launch of attention with row work. Kernels support its sizes, and heads are side by side in rows of the row work.
#[derive(Debug)]
pub(crate) struct AttentionRowsTasks {
    /// what is computed
    pub kernel: Arc<AttentionRows<TileProgram>>,
    /// the run-time half
    pub launch: AttentionRowsLaunch,
    /// bytes within reach of the arguments of the row work
    pub touched: usize,
}

impl CpuLaunch for AttentionRowsTasks {
    fn prepare(&self, threads: usize, isa: Isa) -> Box<dyn CpuTask> {
        let AttentionRowsLaunch { args, shape, axes } = &self.launch;
        let attention = self.kernel.attention.sized(shape, 0);
        let cols = self.kernel.epilogue.cols;
        let joined = cols / attention.width;
        let rows = attention.batch * attention.heads / joined * attention.queries;
        let bound = self.bound_arguments(rows);
        let worker = || Worker { args: bound.clone(), after: simd::Scratch::for_program(&self.kernel.epilogue) };
        Box::new(AttentionRowsTask {
            attention: AttentionLaunch {
                kernel: self.kernel.attention,
                shape: *shape,
                offsets: args.iter().map(|arg| arg.start()).collect(),
            },
            isa,
            amx: Amx::detect(),
            joined,
            axes: bind_axes(axes),
            workers: (0..threads).map(|_| PerWorker::new(worker())).collect(),
            tiles: attention.scratch_elements(),
            partials: attention.partial_elements(),
            merged: (rows * cols * attention.dtype.bytes()).div_ceil(4).next_multiple_of(LINE),
            done: memory::collected((0..rows).map(|_| AtomicUsize::new(0))),
            kernel: self.kernel.clone(),
        })
    }
}

impl AttentionRowsTasks {
    /// Arguments of the row work after attention of this many rows, without addresses.
    fn bound_arguments(&self, rows: usize) -> Vec<BoundArg> {
        let others = self.launch.args[self.kernel.operands()..].iter();
        let mut args: Vec<BoundArg> = others.map(|arg| bind_row(&arg.leading, arg.table_rows, self.touched)).collect();
        args.insert(self.kernel.result, bind_row(&[(rows, self.kernel.epilogue.cols)], 0, 0));
        args
    }
}

struct AttentionRowsTask {
    kernel: Arc<AttentionRows<TileProgram>>,
    /// Attention, its offsets those of all arguments.
    attention: AttentionLaunch,
    isa: Isa,
    amx: Option<Amx>,
    /// Heads of a row.
    joined: usize,
    axes: Vec<Axis>,
    workers: Vec<PerWorker<Worker>>,
    /// Floats of the tiles of a worker.
    tiles: usize,
    /// Floats of the results of ranges of keys, for the second step. They lie behind the merged result.
    partials: usize,
    /// Floats that the result of attention takes of the shared memory: row after row, in its dtype.
    merged: usize,
    /// Finished tasks of each row; for a tile, those of its first row.
    done: Vec<AtomicUsize>,
}

/// The private data of one worker.
struct Worker {
    /// Arguments of the row work, including the rows, and its workspace.
    args: Vec<BoundArg>,
    after: simd::Scratch,
}

/// The data shared by all tasks of a run.
struct Shares<'a> {
    job: Forward<'a>,
    merged: Heads,
}

impl CpuTask for AttentionRowsTask {
    fn scratch(&self) -> ScratchSizes {
        ScratchSizes { worker: self.tiles, shared: self.merged + self.partials }
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        self.bind_rows(run.addresses, run.shared);
        // SAFETY: the caller's promise.
        let (attention, inputs) = unsafe { self.attention.bind(run.addresses) };
        let job = Forward {
            attention: &attention,
            inputs: &inputs,
            statistics: None,
            // SAFETY: the shared memory has both.
            partials: Shared(unsafe { run.shared.add(self.merged) }),
            amx: self.amx,
        };
        let merged = heads(run.shared.cast(), self.attention.shape.o);
        let shares = Shares { job, merged };
        let this = &*self;
        if attention.splits() > 1 {
            let first = |worker: usize, task: usize| {
                // SAFETY: a worker runs one task at a time, so this is its own.
                let scratch = unsafe { run.scratch[worker].get() };
                // SAFETY: the caller's promise. Ranges of keys are left in the partials, nothing is stored.
                unsafe { forward(this.isa, &shares.job, &mut Output::Store(shares.merged), task, scratch) };
            };
            run.workers.run(attention.forward_tasks(), &first)?;
        }
        let work = |worker: usize, task: usize| {
            // SAFETY: the caller's promise; a worker runs one task at a time, so its memory is its own.
            unsafe { this.end(&shares, task, run.scratch[worker].get(), this.workers[worker].get()) };
        };
        run.workers.run(attention.ending_tasks(), &work)?;
        Ok(())
    }
}

impl AttentionRowsTask {
    /// Records the addresses of the row work's arguments, and resets the counters.
    fn bind_rows(&mut self, addresses: &[*mut u8], shared: *mut f32) {
        let kernel = &*self.kernel;
        for worker in &mut self.workers {
            let args = &mut worker.get_mut().args;
            args[kernel.result].base = shared.cast();
            for position in kernel.operands()..addresses.len() {
                args[kernel.epilogue_argument(position)].base = self.attention.address(position, addresses);
            }
        }
        self.done.iter_mut().for_each(|done| *done.get_mut() = 0);
    }

    /// Finishes some rows of one head (of a group of heads, when decoding), and runs the row work on rows whose heads are all finished.
    ///
    /// # Safety
    /// As for [`CpuTask::run`]; the worker is of this thread, and the task runs once.
    unsafe fn end(&self, shares: &Shares, task: usize, tiles: &mut Floats, worker: &mut Worker) {
        let Shares { ref job, merged } = *shares;
        let (attention, epilogue) = (job.attention, &self.kernel.epilogue);
        let output = &mut Output::Store(merged);
        // SAFETY: the caller's promise; all heads lie inside the rows, and these are this task's alone.
        unsafe {
            match attention.splits() {
                1 => forward(self.isa, job, output, task, tiles),
                _ => combine(self.isa, job, output, task, tiles),
            }
        }
        let Ended { batch, head, query, rows } = attention.ended(task);
        let first = batch * merged.batch + head / self.joined * self.joined * merged.head + query * merged.position;
        let rows = first / epilogue.cols..first / epilogue.cols + rows;
        // The worker that counts last sees what the others wrote before they counted.
        if self.done[rows.start].fetch_add(1, Ordering::AcqRel) + 1 < attention.tasks_of_row(self.joined) {
            return;
        }
        let launch = simd::Launch { program: epilogue, args: &worker.args, axes: &self.axes, window: None };
        // SAFETY: the caller's promise for these rows, whose values are written and of which nobody else has any left to do. No
        // index is looked up, so there is no fault.
        let _ = unsafe { simd::run(self.isa, &launch, rows, &mut worker.after, &mut []) };
    }
}
