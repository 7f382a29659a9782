//! Attention on the pool: tiles of queries, and ranges of keys where those are too few, are tasks.
//!
//! Tasks depend on the sizes alone, so the bits do not depend on the number of threads. Scratch and the sums of ranges
//! are allocated when the job is loaded.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::kernels::attention::Attention;
use deuteron_codegen::kernels::attention::cpu::{
    Forward, Heads, Inputs, Mask, Output, Scratch, Shared, Used, combine, forward,
};
use deuteron_codegen::{AttentionKernel, AttentionMask, AttentionOperand, AttentionShape, HeadStrides};

use crate::cpu::pool::Pool;
use crate::cpu::row::PerWorker;
use crate::error::DeviceError;

pub(crate) struct AttentionTask {
    kernel: AttentionKernel,
    shape: AttentionShape,
    isa: Isa,
    amx: Option<Amx>,
    /// Bytes from the start of each argument's buffer.
    offsets: Vec<usize>,
    /// One a worker.
    scratch: Vec<PerWorker<Scratch>>,
    /// What ranges of keys leave for the second step.
    partials: Vec<f32>,
}

impl AttentionTask {
    /// The sizes are checked: [`deuteron_codegen::kernels::attention::Attention::refusal`] is none. `offsets` are the first
    /// elements of the arguments.
    pub fn new(
        kernel: AttentionKernel,
        shape: AttentionShape,
        offsets: impl Iterator<Item = usize>,
        threads: usize,
        isa: Isa,
    ) -> AttentionTask {
        let attention = kernel.sized(&shape, 0);
        let bytes = kernel.operands().iter().map(|&operand| kernel.operand_dtype(operand).bytes());
        AttentionTask {
            kernel,
            shape,
            isa,
            amx: Amx::detect(),
            offsets: offsets.zip(bytes).map(|(elements, bytes)| elements * bytes).collect(),
            scratch: (0..threads).map(|_| PerWorker::new(Scratch::new(&attention))).collect(),
            partials: vec![0.0; attention.partial_elements()],
        }
    }

    /// # Safety
    /// `addresses` are the starts of the arguments' buffers, valid for the checked extents; the result overlaps nothing and
    /// is ours alone.
    pub unsafe fn run(&mut self, pool: &Pool, addresses: &[*mut u8], step: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        let (attention, inputs) = unsafe { bind(&self.kernel, &self.shape, addresses, &self.offsets) };
        let result = heads(&self.kernel, AttentionOperand::O, self.shape.o, addresses, &self.offsets);
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
            unsafe { forward(isa, &job, &mut Output::Store(result), task, &mut *scratch[worker].0.get()) }
        };
        let second = |worker: usize, task: usize| {
            // SAFETY: as above, and all of the first tasks are done.
            unsafe { combine(isa, &job, &mut Output::Store(result), task, &mut *scratch[worker].0.get()) }
        };
        pool.run(attention.forward_tasks(), &first).map_err(|_| DeviceError::WorkerPanicked { step })?;
        if attention.combine_tasks() > 0 {
            pool.run(attention.combine_tasks(), &second).map_err(|_| DeviceError::WorkerPanicked { step })?;
        }
        Ok(())
    }
}

/// What attention computes and reads, its seed read from memory.
///
/// # Safety
/// `addresses` are the starts of the arguments' buffers, in the order of the operands, valid for the checked extents.
pub(super) unsafe fn bind(
    kernel: &AttentionKernel,
    shape: &AttentionShape,
    addresses: &[*mut u8],
    offsets: &[usize],
) -> (Attention, Inputs) {
    let heads = |operand, strides| heads(kernel, operand, strides, addresses, offsets);
    let seed = match kernel.dropout {
        // SAFETY: the seed's extent is one element.
        Some(_) => unsafe {
            heads(AttentionOperand::Seed, HeadStrides::default()).address.cast::<u32>().read_unaligned()
        },
        None => 0,
    };
    let mask = match kernel.mask {
        AttentionMask::Additive(dtype) => Some(Mask { dtype, elements: heads(AttentionOperand::Mask, shape.mask) }),
        AttentionMask::Full | AttentionMask::Causal | AttentionMask::Cached => None,
    };
    let inputs = Inputs {
        q: heads(AttentionOperand::Q, shape.q),
        k: heads(AttentionOperand::K, shape.k),
        v: heads(AttentionOperand::V, shape.v),
        mask,
        used: match kernel.mask {
            AttentionMask::Cached => {
                Used::To(heads(AttentionOperand::Positions, HeadStrides::default()).address.cast_const().cast())
            }
            AttentionMask::Full | AttentionMask::Causal | AttentionMask::Additive(_) => Used::Of(shape.keys),
        },
    };
    (kernel.sized(shape, seed), inputs)
}

/// Where an operand lies.
fn heads(
    kernel: &AttentionKernel,
    wanted: AttentionOperand,
    strides: HeadStrides,
    addresses: &[*mut u8],
    offsets: &[usize],
) -> Heads {
    let HeadStrides { batch, head, position } = strides;
    let address = match kernel.operands().iter().position(|&operand| operand == wanted) {
        // An argument without elements may lie anywhere, so this is no more than a number until it is used.
        Some(position) => addresses[position].wrapping_add(offsets[position]),
        None => std::ptr::null_mut(),
    };
    Heads { address, batch, head, position }
}

#[cfg(test)]
pub(super) mod tests {
    use deuteron_codegen::{ArgBinding, AttentionResult, Geometry, Launch, Source};
    use deuteron_graph::{Dtype, Graph};

    use super::*;
    use crate::job::{Job, Place, Step};
    use crate::{Cpu, Device, Launching, NoStates};

    /// One query of width 2 against two keys.
    pub(in crate::cpu) fn tiny() -> (AttentionKernel, AttentionShape) {
        let strides = HeadStrides { batch: 4, head: 4, position: 2 };
        let (dtype, mask) = (Dtype::F32, AttentionMask::Full);
        let result = AttentionResult::Values;
        let kernel = AttentionKernel { dtype, kv: dtype, width: 2, group: 1, scale: 1.0, mask, dropout: None, result };
        let (q, k, v, o) = (strides, strides, strides, strides);
        let mask = HeadStrides::default();
        (kernel, AttentionShape { batch: 1, heads: 1, queries: 1, keys: 2, q, k, v, mask, o })
    }

    /// An argument of a job; the device only looks at places, so any node will do as a name.
    pub(in crate::cpu) fn argument(written: bool) -> ArgBinding {
        let graph: Graph = "x = input f32[1] ; out x".parse().unwrap();
        let (base, dtype) = (graph.inputs()[0], Dtype::F32);
        ArgBinding { base, dtype, written, offset: 0, leading: Vec::new(), table_rows: 0 }
    }

    /// The same, and what is wrong with it.
    fn job(cpu: &Cpu, change: impl Fn(&mut AttentionKernel, &mut AttentionShape), result: usize) -> Job {
        let (mut kernel, mut shape) = tiny();
        change(&mut kernel, &mut shape);
        let kernel = cpu.compile(vec![Source::Attention(kernel)]).unwrap().remove(0);
        let launch = Launch {
            args: (0..4).map(|position| argument(position == 3)).collect(),
            geometry: Geometry::Attention(shape),
        };
        let places = vec![Place::Input(0), Place::Input(1), Place::Input(1), Place::Output(0)];
        Job { steps: vec![Step { kernel, launch, places }], inputs: 2, states: vec![], outputs: vec![result], arena: 0 }
    }

    #[test]
    fn equal_keys_give_the_mean_of_the_values() {
        let cpu = Cpu::with(2, Isa::detect());
        let mut executable = cpu.load(job(&cpu, |_, _| {}, 8)).unwrap();
        let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let memory = [&[0.0, 0.0][..], &[1.0, 5.0, 3.0, 7.0]].map(|values| cpu.upload(&bytes(values)).unwrap());
        executable.run(&|index| &memory[index], &mut NoStates, Launching::Eager).unwrap();
        let mut result = [0; 8];
        executable.read(0, &mut result).unwrap();
        assert_eq!(result.to_vec(), bytes(&[2.0, 6.0]));
        let short = cpu.upload(&bytes(&[1.0, 5.0, 3.0])).unwrap();
        let short = |index| if index == 1 { &short } else { &memory[0] };
        let refused = executable.run(&short, &mut NoStates, Launching::Eager);
        assert_eq!(refused, Err(DeviceError::InputSize { input: 1, expected: 16, got: 12 }));
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let cpu = Cpu::with(1, Isa::detect());
        let refused = |change: fn(&mut AttentionKernel, &mut AttentionShape), result| {
            matches!(cpu.load(job(&cpu, change, result)), Err(DeviceError::Job { step: 0, .. }))
        };
        assert!(!refused(|_, _| {}, 8));
        assert!(refused(|_, _| {}, 7), "a result of 8 bytes");
        assert!(refused(|_, shape| shape.queries = 2, 8));
        assert!(refused(|kernel, _| kernel.group = 2, 8), "heads are a multiple of key heads");
        assert!(refused(|kernel, _| kernel.width = 300, 4096));
        assert!(refused(|kernel, _| kernel.dtype = Dtype::I8, 8) && refused(|kernel, _| kernel.kv = Dtype::I8, 8));
        assert!(refused(|kernel, _| kernel.mask = AttentionMask::Additive(Dtype::F32), 8), "an argument is missing");
        let stored = cpu.load(job(&cpu, |kernel, _| kernel.result = AttentionResult::Probabilities, 8));
        assert!(matches!(stored, Err(DeviceError::ForeignKernel { step: 0 })), "a GPU's kernel");
    }
}
