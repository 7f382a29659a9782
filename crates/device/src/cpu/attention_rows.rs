//! Attention with row work on its result: tiles of queries of a head are tasks, as for attention alone, and whoever ends the last
//! head of a tile does what follows on its rows.
//!
//! Tasks depend on the sizes alone, and the bits of a row not on who ends it: so any number of threads gives the same bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use deuteron_codegen::cpu::program::Program;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::simd::{self, Axis, BoundArg, Isa};
use deuteron_codegen::kernels::attention::cpu::{Ended, Forward, Heads, Output, Scratch, Shared, combine, forward};
use deuteron_codegen::{AttentionRows, AttentionShape, Geometry, HeadStrides, Source};

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
    /// Heads of a row.
    joined: usize,
    axes: Vec<Axis>,
    workers: Vec<PerWorker<Worker>>,
    /// What ranges of keys leave for the second step.
    partials: Vec<f32>,
    /// Floats that the result of attention takes of the kernel's memory: row after row, in its dtype.
    merged: usize,
    /// Tasks done of each row; of a tile, those of its first row count.
    done: Vec<AtomicUsize>,
}

/// What one worker has to itself.
struct Worker {
    attention: Scratch,
    /// Arguments of what follows, the rows among them, and its memory.
    args: Vec<BoundArg>,
    after: simd::Scratch,
}

/// What all tasks of a run share.
struct Run<'a> {
    kernel: &'a AttentionRows<Program>,
    job: Forward<'a>,
    merged: Heads,
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
        let cols = kernel.tail.cols;
        let joined = cols / attention.width;
        let rows = attention.batch * attention.heads / joined * attention.queries;
        let args = tail_arguments(step, kernel, rows);
        let worker = || Worker {
            attention: Scratch::new(&attention),
            args: args.clone(),
            after: simd::Scratch::for_program(&kernel.tail),
        };
        Ok(AttentionRowsTask {
            shape: *shape,
            isa,
            amx: Amx::detect(),
            offsets: step.launch.args.iter().map(|arg| arg.offset * arg.dtype.bytes()).collect(),
            joined,
            axes: axes.iter().map(|&(divide, modulo)| Axis { divide, modulo }).collect(),
            workers: (0..threads).map(|_| PerWorker::new(worker())).collect(),
            partials: vec![0.0; attention.partial_elements()],
            merged: (rows * cols * attention.dtype.bytes()).div_ceil(4),
            done: (0..rows).map(|_| AtomicUsize::new(0)).collect(),
            source: step.kernel.clone(),
        })
    }

    /// Floats of the memory that all workers share while it runs.
    pub fn kernel_floats(&self) -> usize {
        self.merged
    }

    /// # Safety
    /// `addresses` are the starts of the arguments' buffers, valid for the checked extents; what is written overlaps nothing
    /// and is ours alone. `memory`, from a cache line on, has [`AttentionRowsTask::kernel_floats`].
    pub unsafe fn run(
        &mut self,
        pool: &Pool,
        addresses: &[*mut u8],
        memory: *mut f32,
        step: usize,
    ) -> Result<(), DeviceError> {
        let source = self.source.clone();
        let Source::AttentionRows(kernel) = &source.source else { unreachable!("checked in `new`") };
        for worker in &mut self.workers {
            let args = &mut worker.0.get_mut().args;
            args[kernel.result].base = memory.cast();
            for position in kernel.operands()..addresses.len() {
                // An argument without elements may lie anywhere: a number until it is used.
                let address = addresses[position].wrapping_add(self.offsets[position]);
                args[tail_argument(position, kernel.operands(), kernel.result)].base = address;
            }
        }
        self.done.iter_mut().for_each(|done| *done.get_mut() = 0);
        // SAFETY: the caller's promise.
        let (attention, inputs) = unsafe { bind(&kernel.attention, &self.shape, addresses, &self.offsets) };
        let job = Forward {
            attention: &attention,
            inputs: &inputs,
            logsumexp: None,
            partials: Shared(self.partials.as_mut_ptr()),
            amx: self.amx,
        };
        let HeadStrides { batch, head, position } = self.shape.o;
        let merged = Heads { address: memory.cast(), batch, head, position };
        let run = Run { kernel, job, merged };
        let this = &*self;
        let failed = |_| DeviceError::WorkerPanicked { step };
        if attention.splits() > 1 {
            let first = |worker: usize, task: usize| {
                // SAFETY: a worker runs one task at a time, so this is its own.
                let scratch = unsafe { &mut (*this.workers[worker].0.get()).attention };
                // SAFETY: the caller's promise. Ranges of keys are left in the partials, nothing is stored.
                unsafe { forward(this.isa, &run.job, &mut Output::Store(run.merged), task, scratch) };
            };
            pool.run(attention.forward_tasks(), &first).map_err(failed)?;
        }
        let work = |worker: usize, task: usize| {
            // SAFETY: the caller's promise; a worker runs one task at a time, so its memory is its own.
            unsafe { this.end(&run, task, &mut *this.workers[worker].0.get()) };
        };
        pool.run(attention.ending_tasks(), &work).map_err(failed)
    }

    /// Ends some rows of one head (of a group of heads, when decoding), and goes on with rows whose heads are all done.
    ///
    /// # Safety
    /// As for [`Self::run`]; the worker is of this thread, and the task runs once.
    unsafe fn end(&self, run: &Run, task: usize, worker: &mut Worker) {
        let Run { kernel, ref job, merged } = *run;
        let attention = job.attention;
        let output = &mut Output::Store(merged);
        // SAFETY: the caller's promise; the check of the launch found all heads inside the rows, and these are this task's alone.
        unsafe {
            match attention.splits() {
                1 => forward(self.isa, job, output, task, &mut worker.attention),
                _ => combine(self.isa, job, output, task, &mut worker.attention),
            }
        }
        let Ended { batch, head, query, rows } = attention.ended(task);
        let first = batch * merged.batch + head / self.joined * self.joined * merged.head + query * merged.position;
        let rows = first / kernel.tail.cols..first / kernel.tail.cols + rows;
        // What others wrote before they counted is seen by the one who counts last.
        if self.done[rows.start].fetch_add(1, Ordering::AcqRel) + 1 < attention.tasks_of_row(self.joined) {
            return;
        }
        let launch = simd::Launch { program: &kernel.tail, args: &worker.args, axes: &self.axes, window: None };
        // SAFETY: the caller's promise for these rows, whose values are written and of which nobody else has any left to do. No
        // index is looked up, so there is no fault.
        let _ = unsafe { simd::run(self.isa, &launch, rows, &mut worker.after, &mut []) };
    }
}

/// Arguments of what follows attention of so many rows, without addresses.
fn tail_arguments(step: &Step, kernel: &AttentionRows<Program>, rows: usize) -> Vec<BoundArg> {
    let form = Form::AttentionRow(kernel.attention, (&kernel.tail).into(), kernel.result);
    // What attention reads is read over and over, and is no reason to write past the caches.
    let touched =
        (kernel.operands()..step.launch.args.len()).map(|position| extent(&form, &step.launch, position)).sum();
    let others = step.launch.args[kernel.operands()..].iter();
    let mut args: Vec<BoundArg> = others.map(|arg| row::bind(&arg.leading, arg.table_rows, touched)).collect();
    args.insert(kernel.result, row::bind(&[(rows, kernel.tail.cols)], 0, 0));
    args
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::body::Exprs;
    use deuteron_codegen::cpu::emit::emit;
    use deuteron_codegen::{
        Access, ArgBinding, ArgSpec, AttentionKernel, AttentionMask, AttentionResult, Body, Expr, HeadStrides, Launch,
        Stage,
    };
    use deuteron_graph::{BinaryOp, Dtype};

    use super::*;
    use crate::cpu::attention::tests::argument;
    use crate::job::{Job, Place};
    use crate::{Cpu, Device, Launching, NoStates};

    /// Twice the result of attention: two heads of width 2 side by side, two queries, one key.
    fn job(cpu: &Cpu, change: impl Fn(&mut AttentionKernel, &mut AttentionShape), cols: usize, result: usize) -> Job {
        let mut attention = AttentionKernel {
            dtype: Dtype::F32,
            kv: Dtype::F32,
            width: 2,
            group: 1,
            scale: 1.0,
            mask: AttentionMask::Full,
            dropout: None,
            result: AttentionResult::Values,
        };
        let strides = |head, position| HeadStrides { batch: 0, head, position };
        let (q, k, o) = (strides(4, 2), strides(2, 2), strides(2, 4));
        let mask = HeadStrides::default();
        let mut shape = AttentionShape { batch: 1, heads: 2, queries: 2, keys: 1, q, k, v: k, mask, o };
        change(&mut attention, &mut shape);
        let mut exprs = Exprs::default();
        let load = exprs.make(Expr::Load(0));
        let value = exprs.make(Expr::Binary(BinaryOp::Add, load, load));
        let spec = |written| ArgSpec { dtype: Dtype::F32, access: Access::Row, written };
        let body = Body {
            cols,
            flat: false,
            args: vec![spec(false), spec(true)],
            exprs: exprs.finish(),
            axes: 0,
            row_values: 0,
            stages: vec![Stage::Store { value, arg: 1 }],
        };
        let tail = emit(&body);
        let arg = |position: usize| ArgBinding {
            leading: if position == 3 { vec![(2, 4)] } else { Vec::new() },
            ..argument(position == 3)
        };
        let kernel = cpu
            .compile(vec![Source::AttentionRows(Box::new(AttentionRows { attention, tail, result: 0, norm: None }))])
            .unwrap()
            .remove(0);
        let geometry = Geometry::AttentionRows { shape, axes: Vec::new() };
        let launch = Launch { args: (0..4).map(arg).collect(), geometry };
        let places = vec![Place::Input(0), Place::Input(1), Place::Input(1), Place::Output(0)];
        Job {
            steps: vec![Step { kernel, launch, places }],
            inputs: 2,
            states: Vec::new(),
            outputs: vec![result],
            arena: 0,
        }
    }

    #[test]
    fn one_key_gives_its_values_in_rows() {
        for threads in [1, 3] {
            let cpu = Cpu::with(threads, Isa::detect());
            let mut executable = cpu.load(job(&cpu, |_, _| {}, 4, 32)).unwrap();
            let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
            let memory = [&[0.0; 8][..], &[1.0, 2.0, 3.0, 4.0]].map(|values| cpu.upload(&bytes(values)).unwrap());
            // Twice: what is counted is counted anew.
            for _ in 0..2 {
                executable.poison().unwrap();
                executable.run(&|index| &memory[index], &mut NoStates, Launching::Eager).unwrap();
                let mut result = [0; 32];
                executable.read(0, &mut result).unwrap();
                assert_eq!(result.to_vec(), bytes(&[2.0, 4.0, 6.0, 8.0, 2.0, 4.0, 6.0, 8.0]));
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let cpu = Cpu::with(1, Isa::detect());
        let refused = |change: fn(&mut AttentionKernel, &mut AttentionShape), cols, result| {
            matches!(cpu.load(job(&cpu, change, cols, result)), Err(DeviceError::Job { step: 0, .. }))
        };
        assert!(!refused(|_, _| {}, 4, 32));
        assert!(refused(|_, _| {}, 4, 31), "a result of 32 bytes");
        assert!(refused(|_, _| {}, 8, 64) && refused(|_, _| {}, 3, 64), "rows that are no whole heads");
        assert!(refused(|_, shape| shape.o.position = 5, 4, 32) && refused(|_, shape| shape.o.head = 3, 4, 32));
        assert!(refused(|_, shape| (shape.batch, shape.o.batch) = (2, 16), 4, 64), "beyond the last row");
        assert!(refused(|kernel, _| kernel.width = 0, 4, 32) && refused(|kernel, _| kernel.group = 3, 4, 32));
    }
}
