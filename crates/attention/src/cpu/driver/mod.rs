//! Attention on threads: the distribution of its tasks, and their inputs.

pub(crate) mod alone;
pub(crate) mod backward;
pub(crate) mod block;
pub(crate) mod rows;

use super::super::Attention;
use super::{Heads, Inputs, Mask, Used};
use crate::kernel::{AttentionKernel, AttentionMask, AttentionOperand, AttentionShape, HeadStrides};

/// Attention with its sizes and offsets. Kernels support its sizes.
#[derive(Debug, Clone)]
pub(crate) struct AttentionLaunch {
    /// what is computed
    pub kernel: AttentionKernel,
    /// sizes and strides
    pub shape: AttentionShape,
    /// bytes from the start of each argument's buffer
    pub offsets: Vec<usize>,
}

impl AttentionLaunch {
    /// The operation and operands of attention, with its seed read from memory.
    ///
    /// # Safety
    /// `addresses` are the starts of the arguments' buffers, in the order of the operands, each valid for the reach of its argument.
    unsafe fn bind(&self, addresses: &[*mut u8]) -> (Attention, Inputs) {
        let AttentionLaunch { kernel, shape, .. } = self;
        let heads = |operand, strides| self.heads(operand, strides, addresses);
        let seed = match kernel.dropout {
            // SAFETY: the seed's reach is one element.
            Some(_) => unsafe {
                heads(AttentionOperand::Seed, HeadStrides::default()).address.cast::<u32>().read_unaligned()
            },
            None => 0,
        };
        let mask = kernel.added().map(|dtype| Mask { dtype, elements: heads(AttentionOperand::Mask, shape.mask) });
        let inputs = Inputs {
            q: heads(AttentionOperand::Q, shape.q),
            k: heads(AttentionOperand::K, shape.k),
            v: heads(AttentionOperand::V, shape.v),
            mask,
            slopes: kernel.scores.slopes.then(|| heads(AttentionOperand::Slopes, shape.slopes)),
            documents: kernel.scores.documents.then(|| heads(AttentionOperand::Documents, shape.documents)),
            used: match kernel.mask {
                AttentionMask::Cached => {
                    Used::To(heads(AttentionOperand::Positions, HeadStrides::default()).address.cast_const().cast())
                }
                AttentionMask::Full | AttentionMask::Causal | AttentionMask::Additive(_) => Used::Of(shape.keys),
            },
        };
        (kernel.sized(shape, seed), inputs)
    }

    /// The location of an operand.
    fn heads(&self, wanted: AttentionOperand, strides: HeadStrides, addresses: &[*mut u8]) -> Heads {
        let position = self.kernel.operands().iter().position(|&operand| operand == wanted);
        let address = position.map_or(std::ptr::null_mut(), |position| self.address(position, addresses));
        heads(address, strides)
    }

    /// The address of an argument. An empty argument may have any address, so this is only a number until it is used.
    fn address(&self, position: usize, addresses: &[*mut u8]) -> *mut u8 {
        addresses[position].wrapping_add(self.offsets[position])
    }
}

fn heads(address: *mut u8, strides: HeadStrides) -> Heads {
    let HeadStrides { batch, head, position } = strides;
    Heads { address, batch, head, position }
}
