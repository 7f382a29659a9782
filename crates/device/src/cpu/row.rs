//! A row kernel on the pool: rows are cut into chunks, chunks are tasks.
//!
//! Chunks depend on the size alone, never on the number of threads, and column sums are kept per chunk and added in
//! order: so the result has the same bits for any number of threads.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;

use deuteron_codegen::cpu::program::Program;
use deuteron_codegen::cpu::simd::{self, Axis, BoundArg, Dim, Fault, Isa, Launch, MAX_LEADING, Scratch};
use deuteron_codegen::cpu::{Chunks, STREAM_FROM, chunks};
use deuteron_codegen::{Geometry, Source};

use crate::check::Form;
use crate::cpu::pool::Pool;
use crate::error::DeviceError;
use crate::extent::extent;
use crate::job::{Kernel, Step};

pub(crate) struct RowTask {
    kernel: Arc<Kernel>,
    isa: Isa,
    args: Vec<BoundArg>,
    offsets: Vec<usize>,
    axes: Vec<Axis>,
    /// Rows, or elements of a flat kernel.
    length: usize,
    chunk: usize,
    chunks: usize,
    /// One a worker.
    scratch: Vec<PerWorker<Scratch>>,
    /// `chunks` blocks of partial sums.
    partials: Vec<PerWorker<Vec<f32>>>,
    finished: Vec<f32>,
}

/// A value that only one worker at a time touches.
pub(super) struct PerWorker<T>(pub(super) UnsafeCell<T>);

// SAFETY: `run` gives each worker (or each chunk) its own element.
unsafe impl<T: Send> Sync for PerWorker<T> {}

impl<T> PerWorker<T> {
    pub(super) fn new(value: T) -> Self {
        PerWorker(UnsafeCell::new(value))
    }
}

impl RowTask {
    pub fn new(step: &Step, threads: usize, isa: Isa) -> Result<RowTask, DeviceError> {
        let (Source::Row(program), Geometry::Row { rows, cols, axes }) = (&step.kernel.source, &step.launch.geometry)
        else {
            return Err(DeviceError::Job { step: 0, argument: 0, problem: "not a row kernel".into() });
        };
        let Chunks { length, chunk, chunks } = chunks(program, *rows, *cols);
        let form = Form::Row(program.into());
        let touched: usize = (0..step.launch.args.len()).map(|i| extent(&form, &step.launch, i)).sum();
        let has_partials = !program.partials.is_empty();
        let partial_width: usize = program.partials.iter().map(|partial| partial.width).sum();
        Ok(RowTask {
            isa,
            args: step.launch.args.iter().map(|arg| bind(&arg.leading, arg.table_rows, touched)).collect(),
            offsets: step.launch.args.iter().map(|arg| arg.offset * arg.dtype.bytes()).collect(),
            axes: axes.iter().map(|&(divide, modulo)| Axis { divide, modulo }).collect(),
            length,
            chunk,
            chunks,
            scratch: (0..threads).map(|_| PerWorker::new(Scratch::for_program(program))).collect(),
            partials: match has_partials {
                true => (0..chunks).map(|_| PerWorker::new(vec![0.0; partial_width])).collect(),
                false => Vec::new(),
            },
            finished: vec![0.0; if has_partials { chunks * partial_width } else { 0 }],
            kernel: step.kernel.clone(),
        })
    }

    fn program(&self) -> &Program {
        let Source::Row(program) = &self.kernel.source else { unreachable!("checked in `new`") };
        program
    }

    /// # Safety
    /// `addresses` are the starts of the arguments' buffers, each valid for the extent that was checked when the job
    /// was loaded; written ones overlap no other and nobody else touches them.
    pub unsafe fn run(&mut self, pool: &Pool, addresses: &[*mut u8], step: usize) -> Result<(), DeviceError> {
        for ((arg, &address), &offset) in self.args.iter_mut().zip(addresses).zip(&self.offsets) {
            // An argument without elements may lie anywhere, so this is no more than a number until it is used.
            arg.base = address.wrapping_add(offset);
        }
        let fault: Mutex<Option<Fault>> = Mutex::new(None);
        let this = &*self;
        let work = |worker: usize, chunk: usize| {
            // SAFETY: the caller's promise; chunks are disjoint ranges of rows, each handed out once.
            if let Err(found) = unsafe { this.run_chunk(worker, chunk) } {
                let mut first = fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                // The lowest row is reported whatever the order of threads.
                if first.is_none_or(|known| found.row < known.row) {
                    *first = Some(found);
                }
            }
        };
        pool.run(self.chunks, &work).map_err(|_| DeviceError::WorkerPanicked { step })?;
        if let Some(fault) = fault.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            return Err(DeviceError::Index { step, fault });
        }
        if !self.program().partials.is_empty() {
            // SAFETY: the caller's promise.
            unsafe { self.finish() };
        }
        Ok(())
    }

    unsafe fn run_chunk(&self, worker: usize, chunk: usize) -> Result<(), Fault> {
        let span: Range<usize> = chunk * self.chunk..((chunk + 1) * self.chunk).min(self.length);
        let launch = Launch { program: self.program(), args: &self.args, axes: &self.axes, window: None };
        // SAFETY: a worker runs one chunk at a time, so its scratch is its own.
        let scratch = unsafe { &mut *self.scratch[worker].0.get() };
        let partials: &mut [f32] = match self.partials.get(chunk) {
            // SAFETY: each chunk is run once, by one worker.
            Some(partials) => unsafe { &mut *partials.0.get() },
            None => &mut [],
        };
        partials.fill(0.0);
        // SAFETY: the caller's promise covers all rows of the launch, so these too.
        unsafe { simd::run(self.isa, &launch, span, scratch, partials) }
    }

    unsafe fn finish(&mut self) {
        let width = self.finished.len().checked_div(self.chunks).unwrap_or(0);
        for (chunk, partials) in self.partials.iter_mut().enumerate() {
            self.finished[chunk * width..(chunk + 1) * width].copy_from_slice(partials.0.get_mut());
        }
        let launch = Launch { program: self.program(), args: &self.args, axes: &self.axes, window: None };
        // SAFETY: the caller's promise covers the column sums.
        unsafe { simd::finish(self.isa, &launch, &self.finished, self.chunks) };
    }
}

pub(super) fn bind(leading: &[(usize, usize)], table_rows: usize, touched: usize) -> BoundArg {
    let mut dims = [Dim { size: 1, stride: 0 }; MAX_LEADING];
    for (dim, &(size, stride)) in dims.iter_mut().zip(leading) {
        *dim = Dim { size, stride };
    }
    let streaming = touched >= STREAM_FROM;
    BoundArg { base: std::ptr::null_mut(), dims, rank: leading.len(), table_rows, streaming }
}
