//! The gradient of attention on the pool: attention once more, into memory of our own, then gradients of ranges of keys.
//!
//! Tasks depend on the sizes alone, and what they leave for each other is added in order: so the bits do not depend on the
//! number of threads.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::kernels::attention::cpu::{
    Backward, Forward, Heads, Output, Scratch, Shared, backward, combine, finish, forward,
};
use deuteron_codegen::{AttentionKernel, AttentionShape, HeadStrides};

use crate::buffer::Buffer;
use crate::cpu::attention::bind;
use crate::cpu::pool::Pool;
use crate::cpu::row::PerWorker;
use crate::error::DeviceError;

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
    result: Buffer,
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
    ) -> Result<AttentionBackwardTask, DeviceError> {
        let attention = kernel.sized(&shape, 0);
        let rows = shape.batch * shape.heads * shape.queries;
        Ok(AttentionBackwardTask {
            kernel,
            shape,
            isa,
            amx: Amx::detect(),
            offsets,
            scratch: (0..threads).map(|_| PerWorker::new(Scratch::new(&attention))).collect(),
            result: Buffer::new(rows * kernel.width * kernel.dtype.bytes())?,
            logsumexp: vec![0.0; rows],
            partials: vec![0.0; attention.partial_elements()],
            gradients: vec![0.0; attention.gradient_elements()],
        })
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
        let result = Heads { address: self.result.bytes_mut().as_mut_ptr(), batch, head, position };
        let logsumexp = Shared(self.logsumexp.as_mut_ptr());
        let again = Forward {
            attention: &attention,
            inputs: &inputs,
            logsumexp: Some(logsumexp),
            partials: Shared(self.partials.as_mut_ptr()),
            amx: self.amx,
        };
        // The gradient of the result, and the three that are written, are the last arguments.
        let first = addresses.len() - 4;
        let job = Backward {
            attention: &attention,
            inputs: &inputs,
            output: result,
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
        // SAFETY: as above.
        let forward = |worker: usize, task: usize| unsafe {
            forward(isa, &again, &mut Output::Store(result), task, own(worker));
        };
        // SAFETY: as above.
        let combine = |worker: usize, task: usize| unsafe {
            combine(isa, &again, &mut Output::Store(result), task, own(worker));
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
