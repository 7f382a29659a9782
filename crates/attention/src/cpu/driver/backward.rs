//! The gradient of attention: attention is recomputed into the workspace, then gradients of ranges of keys are computed.
//!
//! Tasks depend only on the sizes, and partial results are added in order, so the bits do not depend on the
//! number of threads. All memory is shared by launches, which take turns: a program for each of many lengths would keep much otherwise.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::simd::lines::LINE;
use deuteron_codegen::cpu::task::{CpuLaunch, CpuTask, Run, ScratchSizes, TaskError};
use deuteron_graph::Dtype;

use super::super::super::Attention;
use super::super::{Backward, Finished, Forward, Inputs, Output, Shared, backward, combine, finish, forward};
use super::{AttentionLaunch, heads};
use crate::backward::GradientPlace;
use crate::kernel::{AttentionShape, HeadStrides};

/// Minimum number of queries for which bf16 attention is recomputed on matrix tiles.
const MANY_QUERIES: usize = 64;

/// A launch of the gradient of attention. Strides of the result are those of its gradient, and every head has keys of its own.
#[derive(Debug)]
pub(crate) struct AttentionBackwardTasks {
    /// attention; offsets are of all arguments
    pub attention: AttentionLaunch,
    /// where gradients of queries, keys and values are stored
    pub gradients: [GradientPlace; 3],
}

impl CpuLaunch for AttentionBackwardTasks {
    fn prepare(&self, _threads: usize, isa: Isa) -> Box<dyn CpuTask> {
        let AttentionLaunch { kernel, shape, .. } = &self.attention;
        let attention = kernel.sized(shape, 0);
        let rows = shape.batch * shape.heads * shape.queries;
        let parts = [rows * kernel.width, 2 * rows, attention.partial_elements(), attention.gradient_elements()];
        Box::new(AttentionBackwardTask {
            launch: self.attention.clone(),
            gradients: self.gradients,
            isa,
            amx: Amx::detect(),
            tiles: attention.scratch_elements(),
            parts: parts.map(|floats| floats.next_multiple_of(LINE)),
        })
    }
}

struct AttentionBackwardTask {
    launch: AttentionLaunch,
    gradients: [GradientPlace; 3],
    isa: Isa,
    amx: Option<Amx>,
    /// Floats of the tiles of a worker.
    tiles: usize,
    /// Floats of the shared memory: the recomputed result of attention and the statistics of its rows, results of its ranges of keys for the
    /// second step, and gradients of queries by ranges of keys.
    parts: [usize; 4],
}

/// Where each part of the shared memory starts.
#[derive(Clone, Copy)]
struct Parts {
    result: Shared,
    statistics: Shared,
    partials: Shared,
    gradients: Shared,
}

impl CpuTask for AttentionBackwardTask {
    fn scratch(&self) -> ScratchSizes {
        ScratchSizes { worker: self.tiles, shared: self.parts.iter().sum() }
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        // SAFETY: the caller's promise.
        let (attention, inputs) = unsafe { self.launch.bind(run.addresses) };
        let [result, statistics, partials, _] = self.parts;
        // SAFETY: the shared memory holds all parts.
        let place = |floats: usize| Shared(unsafe { run.shared.add(floats) });
        let parts = Parts {
            result: place(0),
            statistics: place(result),
            partials: place(result + statistics),
            gradients: place(result + statistics + partials),
        };
        // SAFETY: the caller's promise; the second step runs when all tasks of the first are done.
        unsafe {
            self.compute_again(run, &attention, &inputs, parts)?;
            self.differentiate(run, &attention, &inputs, parts)
        }
    }
}

impl AttentionBackwardTask {
    /// Strides of rows of heads, one head after the other.
    fn rows_of(&self, positions: usize) -> HeadStrides {
        let (heads, width) = (self.launch.shape.heads, self.launch.kernel.width);
        HeadStrides { batch: heads * positions * width, head: positions * width, position: width }
    }

    /// Computes the result of attention, and what the gradient takes of each of its rows.
    ///
    /// # Safety
    /// As for [`CpuTask::run`].
    unsafe fn compute_again(
        &self,
        run: Run<'_>,
        attention: &Attention,
        inputs: &Inputs,
        parts: Parts,
    ) -> Result<(), TaskError> {
        let HeadStrides { batch, head, position } = self.rows_of(self.launch.shape.queries);
        let (result, width) = (parts.result, self.launch.kernel.width);
        let again = Forward {
            attention,
            inputs,
            statistics: Some(parts.statistics),
            partials: parts.partials,
            // Matrix tiles round probabilities, which does not average out over a few rows.
            amx: self.amx.filter(|_| self.launch.shape.queries >= MANY_QUERIES),
        };
        let (isa, scratch) = (self.isa, run.scratch);
        // SAFETY: a worker runs one task at a time, so its scratch is its own.
        let own = |worker: usize| unsafe { scratch[worker].get() };
        let keep = move |part: Finished<'_>| {
            let first = part.batch * batch + part.head * head + part.query * position;
            for (row, values) in part.values.chunks_exact(part.stride).enumerate() {
                // SAFETY: the result has these rows, and they are the task's own.
                let to = unsafe { std::slice::from_raw_parts_mut({ result }.0.add(first + row * width), width) };
                to.copy_from_slice(&values[..width]);
            }
        };
        // SAFETY: the caller's promise.
        let forward = |worker: usize, task: usize| unsafe {
            forward(isa, &again, &mut Output::Hand(&mut { keep }), task, own(worker));
        };
        // SAFETY: as above, and all of the first tasks are done.
        let combine = |worker: usize, task: usize| unsafe {
            combine(isa, &again, &mut Output::Hand(&mut { keep }), task, own(worker));
        };
        run.workers.run(attention.forward_tasks(), &forward)?;
        run.workers.run(attention.combine_tasks(), &combine)?;
        Ok(())
    }

    /// Computes the gradients.
    ///
    /// # Safety
    /// As for [`CpuTask::run`]; the result of attention is there.
    unsafe fn differentiate(
        &self,
        run: Run<'_>,
        attention: &Attention,
        inputs: &Inputs,
        parts: Parts,
    ) -> Result<(), TaskError> {
        let AttentionShape { queries, o, .. } = self.launch.shape;
        let AttentionLaunch { kernel, .. } = &self.launch;
        let result_gradient = self.launch.address(kernel.backward_inputs().count(), run.addresses);
        let [of_queries, of_keys, of_values] = self.gradients.map(|GradientPlace { argument, offset, strides }| {
            heads(run.addresses[argument].wrapping_add(offset * kernel.dtype.bytes()), strides)
        });
        let job = Backward {
            attention,
            inputs,
            output: heads(parts.result.0.cast(), self.rows_of(queries)),
            output_dtype: Dtype::F32,
            statistics: parts.statistics,
            output_gradient: heads(result_gradient, o),
            query_gradient: of_queries,
            key_gradient: of_keys,
            value_gradient: of_values,
            partials: parts.gradients,
            amx: self.amx,
        };
        let (isa, scratch) = (self.isa, run.scratch);
        // SAFETY: a worker runs one task at a time, so its scratch is its own.
        let own = |worker: usize| unsafe { scratch[worker].get() };
        // SAFETY: the caller's promise.
        let backward = |worker: usize, task: usize| unsafe { backward(isa, &job, task, own(worker)) };
        // SAFETY: as above, and all of the first tasks are done.
        let finish = |worker: usize, task: usize| unsafe { finish(isa, &job, task, own(worker)) };
        run.workers.run(attention.backward_tasks(), &backward)?;
        run.workers.run(attention.finish_tasks(), &finish)?;
        Ok(())
    }
}
