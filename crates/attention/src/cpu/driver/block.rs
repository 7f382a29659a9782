//! Attention and the projection of its result: attention stores into the workspace, as it would into a buffer, then strips of its
//! rows are multiplied with the weight, and the worker that finishes a strip runs the row work on its rows.
//!
//! The two run one after the other, each distributed over all threads. If a worker multiplied the rows of the tile whose last head it finishes, it
//! would leave the others idle if there are few tiles, without better locality: heads are the outer loop, so that keys stay in cache.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::simd::lines::LINE;
use deuteron_codegen::cpu::task::{CpuLaunch, CpuTask, Run, ScratchSizes, TaskError};
use deuteron_matmul::cpu::driver::{MatmulTask, MatmulTasks};

use super::alone::{AttentionTask, AttentionTasks};

/// A launch of attention with a projection.
#[derive(Debug)]
pub(crate) struct AttentionBlockTasks {
    /// attention, whose last argument is the first one of the matmul
    pub attention: AttentionTasks,
    /// the projection
    pub matmul: MatmulTasks,
    /// bytes of the first one's results for the second
    pub handed: usize,
}

impl CpuLaunch for AttentionBlockTasks {
    fn prepare(&self, threads: usize, isa: Isa) -> Box<dyn CpuTask> {
        let operands = self.attention.0.offsets.len() - 1;
        Box::new(AttentionBlockTask {
            attention: AttentionTask::new(&self.attention, isa),
            matmul: MatmulTask::new(&self.matmul, threads, isa),
            operands,
            result: self.handed.div_ceil(size_of::<f32>()).next_multiple_of(LINE),
            addresses: Vec::with_capacity(operands + self.matmul.launch.args.len()),
        })
    }
}

struct AttentionBlockTask {
    attention: AttentionTask,
    matmul: MatmulTask,
    /// Number of attention's arguments.
    operands: usize,
    /// Floats that the result of attention takes of the shared memory, in its dtype.
    result: usize,
    /// Addresses of the arguments of one of the two.
    addresses: Vec<*mut u8>,
}

// SAFETY: `addresses` is filled anew within each run; all else may go to another thread.
unsafe impl Send for AttentionBlockTask {}

impl CpuTask for AttentionBlockTask {
    fn scratch(&self) -> ScratchSizes {
        let [first, second] = [self.attention.scratch(), self.matmul.scratch()];
        let shared = self.result + first.shared.max(second.shared);
        ScratchSizes { worker: first.worker.max(second.worker), shared }
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        let result: *mut u8 = run.shared.cast();
        let (operands, others) = run.addresses.split_at(self.operands);
        self.addresses.clear();
        self.addresses.extend(operands.iter().copied().chain([result]));
        // SAFETY: the shared memory of both, which take turns, lies behind the result.
        let shared = unsafe { run.shared.add(self.result) };
        // SAFETY: the caller's promise; the result is ours, and has room for all that attention stores.
        unsafe { self.attention.run(Run { addresses: &self.addresses, shared, ..run })? };
        self.addresses.clear();
        self.addresses.extend([result].into_iter().chain(others.iter().copied()));
        // SAFETY: the caller's promise; the left operand of the matmul lies inside of the result, and its own shared memory behind it.
        unsafe { self.matmul.run(Run { addresses: &self.addresses, shared, ..run }) }
    }
}
