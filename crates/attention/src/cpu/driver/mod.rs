//! Attention by threads: how its tasks are handed out, and what each of them is handed.

pub(crate) mod alone;
pub(crate) mod backward;
pub(crate) mod block;
pub(crate) mod rows;

use super::super::Attention;
use super::{Heads, Inputs, Mask, Used};
use crate::kernel::{AttentionKernel, AttentionMask, AttentionOperand, AttentionShape, HeadStrides};

/// What attention computes and reads, its seed read from memory.
///
/// # Safety
/// `addresses` are the starts of the arguments' buffers, in the order of the operands, each valid for the reach of its argument.
pub(super) unsafe fn bind(
    kernel: &AttentionKernel,
    shape: &AttentionShape,
    addresses: &[*mut u8],
    offsets: &[usize],
) -> (Attention, Inputs) {
    let heads = |operand, strides| heads(kernel, operand, strides, addresses, offsets);
    let seed = match kernel.dropout {
        // SAFETY: the seed's reach is one element.
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
