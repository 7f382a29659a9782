//! Attention with row work on its result: a task owns some queries for all heads of a row. It keeps their rows in scratch, and
//! what follows is done on them while they are hot.
//!
//! The bits of a row do not depend on how many go together, so neither do they on the number of threads.

use std::sync::Arc;

use deuteron_codegen::cpu::program::Program;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::simd::{self, Axis, BoundArg, Isa};
use deuteron_codegen::kernels::attention::cpu::{Finished, Forward, Output, Piece, Scratch, Shared, forward, forward_piece};
use deuteron_codegen::{AttentionRows, AttentionShape, Geometry, Source};

use crate::check::{Form, tail_argument};
use crate::cpu::attention::bind;
use crate::cpu::pool::Pool;
use crate::cpu::row::{self, PerWorker};
use crate::error::DeviceError;
use crate::extent::extent;
use crate::job::{self, Step};

pub(crate) struct AttentionRowsTask {
    source: Arc<job::Kernel>,
    shape: AttentionShape,
    isa: Isa,
    amx: Option<Amx>,
    /// Bytes from the start of each argument's buffer.
    offsets: Vec<usize>,
    /// Heads of a row, and rows of a piece.
    joined: usize,
    rows: usize,
    axes: Vec<Axis>,
    workers: Vec<PerWorker<Worker>>,
    /// What ranges of keys leave for the second step.
    partials: Vec<f32>,
}

/// What one worker has to itself.
struct Worker {
    attention: Scratch,
    /// Rows of a piece.
    merged: Vec<f32>,
    /// Arguments of what follows, the rows among them, and its memory.
    args: Vec<BoundArg>,
    after: simd::Scratch,
}

impl AttentionRowsTask {
    /// The step is checked.
    pub fn new(step: &Step, threads: usize, isa: Isa) -> Result<AttentionRowsTask, DeviceError> {
        let (Source::AttentionRows(kernel), Geometry::AttentionRows { shape, axes }) =
            (&step.kernel.source, &step.launch.geometry)
        else {
            return Err(DeviceError::Job { step: 0, argument: 0, problem: "not attention with row work".into() });
        };
        let attention = kernel.attention.sized(shape, 0);
        let cols = kernel.tail.body.cols;
        let joined = cols / attention.width;
        let rows = attention.piece_rows(joined, threads);
        let args = tail_arguments(step, kernel, attention.batch * attention.heads / joined * attention.queries);
        let worker = || Worker {
            attention: Scratch::new(&attention),
            merged: vec![0.0; rows.min(attention.queries) * cols],
            args: args.clone(),
            after: simd::Scratch::for_program(&kernel.tail.body),
        };
        Ok(AttentionRowsTask {
            shape: *shape,
            isa,
            amx: Amx::detect(),
            offsets: step.launch.args.iter().map(|arg| arg.offset * arg.dtype.bytes()).collect(),
            joined,
            rows,
            axes: axes.iter().map(|&(divide, modulo)| Axis { divide, modulo }).collect(),
            workers: (0..threads).map(|_| PerWorker::new(worker())).collect(),
            partials: vec![0.0; attention.partial_elements()],
            source: step.kernel.clone(),
        })
    }

    /// # Safety
    /// `addresses` are the starts of the arguments' buffers, valid for the checked extents; what is written overlaps nothing
    /// and is ours alone.
    pub unsafe fn run(&mut self, pool: &Pool, addresses: &[*mut u8], step: usize) -> Result<(), DeviceError> {
        let source = self.source.clone();
        let Source::AttentionRows(kernel) = &source.source else { unreachable!("checked in `new`") };
        for position in kernel.operands()..addresses.len() {
            // An argument without elements may lie anywhere: a number until it is used.
            let address = addresses[position].wrapping_add(self.offsets[position]);
            for worker in &mut self.workers {
                worker.0.get_mut().args[tail_argument(position, kernel.operands(), kernel.tail.sums)].base = address;
            }
        }
        // SAFETY: the caller's promise.
        let (attention, inputs) = unsafe { bind(&kernel.attention, &self.shape, addresses, &self.offsets) };
        let job = Forward {
            attention: &attention,
            inputs: &inputs,
            logsumexp: None,
            partials: Shared(self.partials.as_mut_ptr()),
            amx: self.amx,
        };
        let this = &*self;
        let failed = |_| DeviceError::WorkerPanicked { step };
        if attention.splits() > 1 {
            let first = |worker: usize, task: usize| {
                // SAFETY: a worker runs one task at a time, so this is its own.
                let scratch = unsafe { &mut (*this.workers[worker].0.get()).attention };
                // SAFETY: the caller's promise. Ranges of keys are left in the partials, nothing is handed over.
                unsafe { forward(this.isa, &job, &mut Output::Hand(&mut |_| {}), task, scratch) };
            };
            pool.run(attention.forward_tasks(), &first).map_err(failed)?;
        }
        let work = |worker: usize, task: usize| {
            let piece = attention.piece(this.joined, this.rows, task);
            // SAFETY: the caller's promise; a piece has its rows of the results to itself, a worker its scratch.
            unsafe { this.piece(kernel, &job, piece, &mut *this.workers[worker].0.get()) };
        };
        pool.run(attention.pieces(self.joined, self.rows), &work).map_err(failed)
    }

    /// # Safety
    /// As for [`Self::run`]; the worker is of this thread.
    unsafe fn piece(&self, kernel: &AttentionRows<Program>, job: &Forward, piece: Piece, worker: &mut Worker) {
        let Worker { attention: scratch, merged, args, after } = worker;
        let (width, cols) = (job.attention.width, kernel.tail.body.cols);
        let mut hand = |done: Finished<'_>| {
            let column = (done.head - piece.head) * width;
            for (row, values) in done.values.chunks_exact(done.stride).enumerate() {
                let to = (done.query - piece.query + row) * cols + column;
                merged[to..to + width].copy_from_slice(&values[..width]);
            }
        };
        // SAFETY: the caller's promise.
        unsafe { forward_piece(self.isa, job, &mut hand, (piece, self.joined), scratch) };
        let o = self.shape.o;
        let first = (piece.batch * o.batch + piece.head * o.head + piece.query * o.position) / cols;
        // The program counts all rows; the piece is where its own are.
        args[kernel.tail.sums].base = merged.as_mut_ptr().wrapping_sub(first * cols).cast();
        let launch = simd::Launch { program: &kernel.tail.body, args, axes: &self.axes, window: None };
        // SAFETY: the caller's promise for the rows of the piece, whose values are the worker's own. No index is looked up, so
        // there is no fault.
        let _ = unsafe { simd::run(self.isa, &launch, first..first + piece.rows, after, &mut []) };
    }
}

/// Arguments of what follows attention of so many rows, without addresses.
fn tail_arguments(step: &Step, kernel: &AttentionRows<Program>, rows: usize) -> Vec<BoundArg> {
    let form = Form::AttentionRow(kernel.attention, (&kernel.tail.body).into(), kernel.tail.sums);
    let touched: usize = (0..step.launch.args.len()).map(|position| extent(&form, &step.launch, position)).sum();
    let others = step.launch.args[kernel.operands()..].iter();
    let mut args: Vec<BoundArg> = others.map(|arg| row::bind(&arg.leading, arg.table_rows, touched)).collect();
    args.insert(kernel.tail.sums, row::bind(&[(rows, kernel.tail.body.cols)], 0, 0));
    args
}
