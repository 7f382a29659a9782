//! The gradient of attention on the pool: attention once more, into memory of our own, then gradients of ranges of keys.
//!
//! Tasks depend on the sizes alone, and what they leave for each other is added in order: so the bits do not depend on the
//! number of threads.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::kernels::attention::cpu::{
    Backward, Finished, Forward, Heads, Output, Scratch, Shared, backward, combine, finish, forward,
};
use deuteron_codegen::{AttentionKernel, AttentionShape, HeadStrides};
use deuteron_graph::Dtype;

use crate::cpu::attention::bind;
use crate::cpu::pool::Pool;
use crate::cpu::row::PerWorker;
use crate::error::DeviceError;

/// Queries from which bf16 attention is computed again on matrix tiles.
const MANY_QUERIES: usize = 64;

pub(crate) struct AttentionBackwardTask {
    kernel: AttentionKernel,
    shape: AttentionShape,
    isa: Isa,
    amx: Option<Amx>,
    /// Bytes from the start of each argument's buffer.
    offsets: Vec<usize>,
    /// One a worker.
    scratch: Vec<PerWorker<Scratch>>,
    /// What attention gave, computed again, and what its ranges of keys leave for the second step.
    result: Vec<f32>,
    logsumexp: Vec<f32>,
    partials: Vec<f32>,
    /// Gradients of queries by ranges of keys.
    gradients: Vec<f32>,
}

impl AttentionBackwardTask {
    /// The sizes are checked. `offsets` are the first bytes of the arguments.
    pub fn new(
        kernel: AttentionKernel,
        shape: AttentionShape,
        offsets: Vec<usize>,
        threads: usize,
        isa: Isa,
    ) -> AttentionBackwardTask {
        let attention = kernel.sized(&shape, 0);
        let rows = shape.batch * shape.heads * shape.queries;
        AttentionBackwardTask {
            kernel,
            shape,
            isa,
            amx: Amx::detect(),
            offsets,
            scratch: (0..threads).map(|_| PerWorker::new(Scratch::new(&attention))).collect(),
            result: vec![0.0; rows * kernel.width],
            logsumexp: vec![0.0; rows],
            partials: vec![0.0; attention.partial_elements()],
            gradients: vec![0.0; attention.gradient_elements()],
        }
    }

    /// # Safety
    /// `addresses` are the starts of the arguments' buffers, valid for the checked extents; gradients overlap nothing and are
    /// ours alone.
    pub unsafe fn run(&mut self, pool: &Pool, addresses: &[*mut u8], step: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        let (attention, inputs) = unsafe { bind(&self.kernel, &self.shape, addresses, &self.offsets) };
        let place = |position: usize, strides: HeadStrides| {
            let HeadStrides { batch, head, position: next } = strides;
            // An argument without elements may lie anywhere, so this is no more than a number until it is used.
            let address = addresses[position].wrapping_add(self.offsets[position]);
            Heads { address, batch, head, position: next }
        };
        let AttentionShape { heads, queries, keys, .. } = self.shape;
        let width = self.kernel.width;
        let rows_of = |positions: usize| HeadStrides {
            batch: heads * positions * width,
            head: positions * width,
            position: width,
        };
        let HeadStrides { batch, head, position } = rows_of(queries);
        let result = Shared(self.result.as_mut_ptr());
        let output = Heads { address: result.0.cast(), batch, head, position };
        let logsumexp = Shared(self.logsumexp.as_mut_ptr());
        let again = Forward {
            attention: &attention,
            inputs: &inputs,
            logsumexp: Some(logsumexp),
            partials: Shared(self.partials.as_mut_ptr()),
            // Matrix tiles round probabilities, which does not average out over a few rows.
            amx: self.amx.filter(|_| queries >= MANY_QUERIES),
        };
        // The gradient of the result, and the three that are written, are the last arguments.
        let first = addresses.len() - 4;
        let job = Backward {
            attention: &attention,
            inputs: &inputs,
            output,
            output_dtype: Dtype::F32,
            logsumexp,
            output_gradient: place(first, self.shape.o),
            query_gradient: place(first + 1, rows_of(queries)),
            key_gradient: place(first + 2, rows_of(keys)),
            value_gradient: place(first + 3, rows_of(keys)),
            partials: Shared(self.gradients.as_mut_ptr()),
            amx: self.amx,
        };
        let (isa, scratch) = (self.isa, &self.scratch);
        let failed = |_| DeviceError::WorkerPanicked { step };
        // SAFETY: the caller's promise; a worker runs one task at a time, so its scratch is its own. A later step runs when
        // all tasks of the one before are done.
        let own = |worker: usize| unsafe { &mut *scratch[worker].0.get() };
        let keep = move |part: Finished<'_>| {
            let first = part.batch * batch + part.head * head + part.query * position;
            for (row, values) in part.values.chunks_exact(part.stride).enumerate() {
                // SAFETY: the result has these rows, and they are the task's own.
                let to = unsafe { std::slice::from_raw_parts_mut({ result }.0.add(first + row * width), width) };
                to.copy_from_slice(&values[..width]);
            }
        };
        // SAFETY: as above.
        let forward = |worker: usize, task: usize| unsafe {
            forward(isa, &again, &mut Output::Hand(&mut { keep }), task, own(worker));
        };
        // SAFETY: as above.
        let combine = |worker: usize, task: usize| unsafe {
            combine(isa, &again, &mut Output::Hand(&mut { keep }), task, own(worker));
        };
        // SAFETY: as above.
        let backward = |worker: usize, task: usize| unsafe { backward(isa, &job, task, own(worker)) };
        // SAFETY: as above.
        let finish = |worker: usize, task: usize| unsafe { finish(isa, &job, task, own(worker)) };
        pool.run(attention.forward_tasks(), &forward).map_err(failed)?;
        pool.run(attention.combine_tasks(), &combine).map_err(failed)?;
        pool.run(attention.backward_tasks(), &backward).map_err(failed)?;
        pool.run(attention.finish_tasks(), &finish).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::{AttentionMask, Geometry, Launch, Source};

    use super::*;
    use crate::cpu::attention::tests::{argument, tiny};
    use crate::job::{Job, Place, Step};
    use crate::{Cpu, Device, Launching, NoStates};

    /// One query of width 2 against two keys, and what is wrong with it.
    fn job(cpu: &Cpu, change: impl Fn(&mut AttentionKernel, &mut AttentionShape), outputs: [usize; 3]) -> Job {
        let (mut kernel, mut shape) = tiny();
        change(&mut kernel, &mut shape);
        let kernel = cpu.compile(vec![Source::AttentionBackward(kernel)]).unwrap().remove(0);
        let launch = Launch {
            args: (0..7).map(|position| argument(position > 3)).collect(),
            geometry: Geometry::AttentionBackward(shape),
        };
        let inputs = [0, 1, 1, 2].map(Place::Input);
        let places = inputs.into_iter().chain([0, 1, 2].map(Place::Output)).collect();
        Job {
            steps: vec![Step { kernel, launch, places }],
            inputs: 3,
            states: Vec::new(),
            outputs: outputs.to_vec(),
            arena: 0,
        }
    }

    #[test]
    fn gradients_of_equal_scores() {
        let cpu = Cpu::with(2, Isa::detect());
        let mut executable = cpu.load(job(&cpu, |_, _| {}, [8, 16, 16])).unwrap();
        let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let inputs = [&[0.0, 0.0][..], &[1.0, 5.0, 3.0, 7.0], &[1.0, 0.0]];
        let memory = inputs.map(|values| cpu.upload(&bytes(values)).unwrap());
        executable.run(&|index| &memory[index], &mut NoStates, Launching::Eager).unwrap();
        for (index, expected) in [&[1.0, 1.0][..], &[0.0; 4], &[0.5, 0.0, 0.5, 0.0]].into_iter().enumerate() {
            let mut result = vec![0xff; 4 * expected.len()];
            executable.read(index, &mut result).unwrap();
            assert_eq!(result, bytes(expected), "gradient {index}");
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let cpu = Cpu::with(1, Isa::detect());
        let refused = |change: fn(&mut AttentionKernel, &mut AttentionShape), outputs| {
            matches!(cpu.load(job(&cpu, change, outputs)), Err(DeviceError::Job { step: 0, .. }))
        };
        assert!(!refused(|_, _| {}, [8, 16, 16]));
        assert!(refused(|_, _| {}, [7, 16, 16]) && refused(|_, _| {}, [8, 15, 16]) && refused(|_, _| {}, [8, 16, 15]));
        assert!(refused(|_, shape| shape.queries = 2, [8, 16, 16]));
        assert!(refused(|_, shape| shape.keys = 3, [8, 16, 16]));
        assert!(refused(|kernel, shape| (kernel.group, shape.heads) = (2, 2), [16, 32, 32]), "keys of their own");
        assert!(refused(|kernel, _| kernel.width = 300, [4096; 3]));
        assert!(refused(|kernel, _| kernel.mask = AttentionMask::Additive(Dtype::F32), [8, 16, 16]));
    }
}
