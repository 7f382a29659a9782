//! Attention alone: the tasks are tiles of queries, and also ranges of keys if there are too few tiles.
//!
//! Tasks depend only on the sizes, so the bits do not depend on the number of threads. Workspaces and the sums of ranges
//! are allocated when the launch is prepared.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::task::{CpuLaunch, CpuTask, PerWorker, Run, ScratchSizes, TaskError};
use deuteron_graph::memory;

use super::super::{Forward, Output, Scratch, Shared, combine, forward};
use super::AttentionLaunch;
use crate::kernel::AttentionOperand;

/// A launch of attention.
#[derive(Debug)]
pub(crate) struct AttentionTasks(pub AttentionLaunch);

impl CpuLaunch for AttentionTasks {
    fn prepare(&self, threads: usize, isa: Isa) -> Box<dyn CpuTask> {
        Box::new(AttentionTask::new(self, threads, isa))
    }
}

/// A prepared launch of attention.
pub(crate) struct AttentionTask {
    launch: AttentionLaunch,
    isa: Isa,
    amx: Option<Amx>,
    /// One for each worker.
    scratch: Vec<PerWorker<Scratch>>,
    /// Results of ranges of keys, for the second step.
    partials: Vec<f32>,
}

impl AttentionTask {
    /// Prepares it for this many threads.
    pub fn new(AttentionTasks(launch): &AttentionTasks, threads: usize, isa: Isa) -> AttentionTask {
        let attention = launch.kernel.sized(&launch.shape, 0);
        AttentionTask {
            launch: launch.clone(),
            isa,
            amx: Amx::detect(),
            scratch: (0..threads).map(|_| PerWorker::new(Scratch::new(&attention))).collect(),
            partials: memory::zeros(attention.partial_elements()),
        }
    }
}

impl CpuTask for AttentionTask {
    fn scratch(&self) -> ScratchSizes {
        ScratchSizes::default()
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        // SAFETY: the caller's promise.
        let (attention, inputs) = unsafe { self.launch.bind(run.addresses) };
        let result = self.launch.heads(AttentionOperand::O, self.launch.shape.o, run.addresses);
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
