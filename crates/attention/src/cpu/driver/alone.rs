//! Attention alone: the tasks are tiles of queries, and also ranges of keys if there are too few tiles.
//!
//! Tasks depend only on the sizes, so the bits do not depend on the number of threads. Tiles of workers and the sums of ranges are in memory that all
//! launches share in turn: of its own, a launch would keep 0.3 MB for each thread.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::task::{CpuLaunch, CpuTask, Run, ScratchSizes, TaskError};

use super::super::{Forward, Output, Shared, combine, forward};
use super::AttentionLaunch;
use crate::kernel::AttentionOperand;

/// A launch of attention.
#[derive(Debug)]
pub(crate) struct AttentionTasks(pub AttentionLaunch);

impl CpuLaunch for AttentionTasks {
    fn prepare(&self, _threads: usize, isa: Isa) -> Box<dyn CpuTask> {
        Box::new(AttentionTask::new(self, isa))
    }
}

/// A prepared launch of attention.
pub(crate) struct AttentionTask {
    launch: AttentionLaunch,
    isa: Isa,
    amx: Option<Amx>,
    /// Tiles of each worker, and together the results of ranges of keys, for the second step.
    sizes: ScratchSizes,
}

impl AttentionTask {
    /// Prepares it.
    pub fn new(AttentionTasks(launch): &AttentionTasks, isa: Isa) -> AttentionTask {
        let attention = launch.kernel.sized(&launch.shape, 0);
        let sizes = ScratchSizes { worker: attention.scratch_elements(), shared: attention.partial_elements() };
        AttentionTask { launch: launch.clone(), isa, amx: Amx::detect(), sizes }
    }
}

impl CpuTask for AttentionTask {
    fn scratch(&self) -> ScratchSizes {
        self.sizes
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        // SAFETY: the caller's promise.
        let (attention, inputs) = unsafe { self.launch.bind(run.addresses) };
        let result = self.launch.heads(AttentionOperand::O, self.launch.shape.o, run.addresses);
        let job = Forward {
            attention: &attention,
            inputs: &inputs,
            statistics: None,
            partials: Shared(run.shared),
            amx: self.amx,
        };
        let (isa, scratch) = (self.isa, run.scratch);
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
