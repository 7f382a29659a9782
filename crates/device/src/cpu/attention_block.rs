//! Attention and the projection of its result: attention stores into memory of the kernel, as it would into a buffer, then strips of its
//! rows are multiplied with the weight, and whoever ends a strip does what follows on its rows.
//!
//! The two run one after the other, each cut for all threads. A worker that multiplies the rows of the tile whose last head it ends
//! would leave the others idle where tiles are few, and finds those rows no closer: heads are the outer loop, so that keys stay in cache.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::kernels::matmul::cpu::Scratch;
use deuteron_codegen::{ArgBinding, AttentionOperand, Geometry, Launch, Source};

use crate::check::mismatch;
use crate::cpu::attention::AttentionTask;
use crate::cpu::pool::Pool;
use crate::cpu::product::ProductTask;
use crate::cpu::row::PerWorker;
use crate::error::DeviceError;
use crate::extent::attention;
use crate::job::Step;

pub(crate) struct AttentionBlockTask {
    attention: AttentionTask,
    product: ProductTask,
    /// How many arguments are attention's.
    operands: usize,
    /// The result of attention, in its dtype.
    result: Vec<u32>,
    /// Addresses of the arguments of one of the two.
    addresses: Vec<*mut u8>,
}

impl AttentionBlockTask {
    /// The step is checked.
    pub fn new(step: &Step, threads: usize, isa: Isa) -> Result<AttentionBlockTask, DeviceError> {
        let (Source::AttentionBlock(kernel), Geometry::AttentionBlock { attention: shape, product, axes }) =
            (&step.kernel.source, step.launch.geometry.clone())
        else {
            return Err(mismatch(0, 0, "not attention with a projection".into()));
        };
        let operands = kernel.operands();
        let dtype = kernel.attention.dtype;
        let offsets = step.launch.args[..operands].iter().map(|arg| arg.offset).chain([0]);
        // The product reads the whole of what lies in memory of the kernel, whatever its name.
        let left = ArgBinding { dtype, written: false, offset: 0, leading: Vec::new(), ..step.launch.args[0].clone() };
        let args = [left].into_iter().chain(step.launch.args[operands..].iter().cloned()).collect();
        let geometry = Geometry::Product { shape: product, head_axes: Vec::new(), axes };
        let second = Step { kernel: step.kernel.clone(), launch: Launch { args, geometry }, places: Vec::new() };
        let elements = attention(&kernel.attention, &shape, AttentionOperand::O);
        Ok(AttentionBlockTask {
            attention: AttentionTask::new(kernel.attention, shape, offsets, threads, isa),
            product: ProductTask::new(&second, threads, isa)?,
            operands,
            result: vec![0; (elements * dtype.bytes()).div_ceil(4)],
            addresses: Vec::with_capacity(step.launch.args.len() + 1),
        })
    }

    /// Floats that each worker's scratch must have.
    pub fn floats(&self) -> usize {
        self.product.floats
    }

    /// # Safety
    /// `addresses` are the starts of the arguments' buffers, valid for the checked extents; what is written overlaps nothing
    /// and is ours alone. Each worker's scratch has [`AttentionBlockTask::floats`].
    pub unsafe fn run(
        &mut self,
        pool: &Pool,
        addresses: &[*mut u8],
        scratch: &[PerWorker<Scratch>],
        step: usize,
    ) -> Result<(), DeviceError> {
        let result: *mut u8 = self.result.as_mut_ptr().cast();
        let (operands, others) = addresses.split_at(self.operands);
        self.addresses.clear();
        self.addresses.extend(operands.iter().copied().chain([result]));
        // SAFETY: the caller's promise; the result is ours, and has room for all that attention stores.
        unsafe { self.attention.run(pool, &self.addresses, step)? };
        self.addresses.clear();
        self.addresses.extend([result].into_iter().chain(others.iter().copied()));
        // SAFETY: the caller's promise; the check of the launch found the first operand inside of the result.
        unsafe { self.product.run(pool, &self.addresses, scratch, step) }
    }
}
