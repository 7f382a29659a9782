//! Attention alone: tiles of queries, and ranges of keys where those are too few, are tasks.
//!
//! Tasks depend on the sizes alone, so the bits do not depend on the number of threads. Scratch and the sums of ranges
//! are allocated when the launch is made ready.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::task::{CpuLaunch, CpuTask, PerWorker, Run, ScratchSizes, TaskError};

use super::super::{Forward, Output, Scratch, Shared, combine, forward};
use super::{bind, heads};
use crate::kernel::{AttentionKernel, AttentionOperand, AttentionShape};

/// A launch of attention. No kernel refuses its sizes.
#[derive(Debug)]
pub(crate) struct AttentionTasks {
    /// what is computed
    pub kernel: AttentionKernel,
    /// sizes and strides
    pub shape: AttentionShape,
    /// bytes from the start of each argument's buffer
    pub offsets: Vec<usize>,
}

impl CpuLaunch for AttentionTasks {
    fn prepare(&self, threads: usize, isa: Isa) -> Box<dyn CpuTask> {
        Box::new(AttentionTask::new(self, threads, isa))
    }
}

/// A launch of attention made ready.
pub(crate) struct AttentionTask {
    kernel: AttentionKernel,
    shape: AttentionShape,
    isa: Isa,
    amx: Option<Amx>,
    offsets: Vec<usize>,
    /// One for each worker.
    scratch: Vec<PerWorker<Scratch>>,
    /// What ranges of keys leave for the second step.
    partials: Vec<f32>,
}

impl AttentionTask {
    /// Ready for so many threads.
    pub fn new(tasks: &AttentionTasks, threads: usize, isa: Isa) -> AttentionTask {
        let attention = tasks.kernel.sized(&tasks.shape, 0);
        AttentionTask {
            kernel: tasks.kernel,
            shape: tasks.shape,
            isa,
            amx: Amx::detect(),
            offsets: tasks.offsets.clone(),
            scratch: (0..threads).map(|_| PerWorker::new(Scratch::new(&attention))).collect(),
            partials: vec![0.0; attention.partial_elements()],
        }
    }
}

impl CpuTask for AttentionTask {
    fn scratch(&self) -> ScratchSizes {
        ScratchSizes::default()
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        // SAFETY: the caller's promise.
        let (attention, inputs) = unsafe { bind(&self.kernel, &self.shape, run.addresses, &self.offsets) };
        let result = heads(&self.kernel, AttentionOperand::O, self.shape.o, run.addresses, &self.offsets);
        let job = Forward {
            attention: &attention,
            inputs: &inputs,
            logsumexp: None,
            partials: Shared(self.partials.as_mut_ptr()),
            amx: self.amx,
        };
        let (isa, scratch) = (self.isa, &self.scratch);
        let first = |worker: usize, task: usize| {
            // SAFETY: the caller's promise; a worker runs one task at a time, so its scratch is its own.
            unsafe { forward(isa, &job, &mut Output::Store(result), task, scratch[worker].get()) }
        };
        let second = |worker: usize, task: usize| {
            // SAFETY: as above, and all of the first tasks are done.
            unsafe { combine(isa, &job, &mut Output::Store(result), task, scratch[worker].get()) }
        };
        run.workers.run(attention.forward_tasks(), &first)?;
        if attention.combine_tasks() > 0 {
            run.workers.run(attention.combine_tasks(), &second)?;
        }
        Ok(())
    }
}
