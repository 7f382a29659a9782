//! The parameter that all kernels of attention begin with, and how operands lie.

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::cuda::grid::Word;
use deuteron_graph::Dtype;

use crate::kernel::{AttentionKernel, AttentionOperand, AttentionShape, HeadStrides};

/// Where the parameter has the address of the result.
pub(super) const RESULT_AT: usize = 6;
/// Where the parameter has the places of ranges in the workspace.
pub(super) const PARTS_AT: usize = 7;

/// The parameter, as `common.cuh` lists it.
pub(super) fn words(kernel: &AttentionKernel, shape: &AttentionShape, args: &[ArgBinding], ranges: usize) -> Vec<Word> {
    use AttentionOperand::{K, Mask, O, Positions, Q, Seed, V};
    let number = |value: usize| Word::Number(value as u64);
    let argument = |operand: AttentionOperand| {
        let position = kernel.operands().iter().position(|&known| known == operand);
        position.map_or(Word::Number(0), |position| {
            let offset = args.get(position).map_or(0, |arg| arg.offset);
            Word::Argument { position, offset: offset * kernel.operand_dtype(operand).bytes() }
        })
    };
    let mut words = [Q, K, V, Mask, Seed, Positions, O].map(argument).to_vec();
    let sums = shape.batch * shape.heads * shape.queries * ranges * 2 * 4;
    let places = [Word::Workspace(0), Word::Workspace(sums)];
    words.extend(if ranges > 1 { places } else { [Word::Number(0); 2] });
    let &AttentionShape { batch, heads, queries, keys, q, k, v, mask, slopes: _, documents: _, o } = shape;
    words.extend([batch, heads, kernel.group.max(1), queries, keys, ranges].map(number));
    let strides = [q, k, v, mask, o].map(|HeadStrides { batch, head, position }| [batch, head, position]);
    words.extend(strides.into_iter().flatten().map(number));
    words
}

/// The positions, if no kernel of the job writes them.
pub(super) fn unwritten_positions(kernel: &AttentionKernel, args: &[ArgBinding]) -> Word {
    let position = kernel.operands().iter().position(|&operand| operand == AttentionOperand::Positions);
    let offset = |position: usize| args.get(position).map_or(0, |arg| arg.offset * Dtype::I32.bytes());
    position.map_or(Word::Number(0), |position| Word::Unwritten { position, offset: offset(position) })
}

/// Whether every row of queries, keys, values and result starts at a multiple of 16 bytes and ends at one.
pub(super) fn is_aligned(kernel: &AttentionKernel, shape: &AttentionShape, args: &[ArgBinding]) -> bool {
    let whole = |dtype: Dtype| (kernel.width * dtype.bytes()).is_multiple_of(16);
    let rows = [AttentionOperand::Q, AttentionOperand::K, AttentionOperand::V, AttentionOperand::O];
    let start = |&operand: &AttentionOperand| rows_start_at(kernel, shape, args, operand, 16);
    whole(kernel.dtype) && whole(kernel.kv) && rows.iter().all(start)
}

/// Whether every row of an operand starts at a multiple of so many bytes; true for an operand that is absent.
pub(super) fn rows_start_at(
    kernel: &AttentionKernel,
    shape: &AttentionShape,
    args: &[ArgBinding],
    operand: AttentionOperand,
    bytes: usize,
) -> bool {
    let &AttentionShape { batch, heads, queries, keys, .. } = shape;
    let key_heads = heads / kernel.group.max(1);
    let Some(position) = kernel.operands().iter().position(|&known| known == operand) else { return true };
    let (strides, sizes) = match operand {
        AttentionOperand::Q => (shape.q, [batch, heads, queries]),
        AttentionOperand::K => (shape.k, [batch, key_heads, keys]),
        AttentionOperand::V => (shape.v, [batch, key_heads, keys]),
        AttentionOperand::Mask => (shape.mask, [batch, heads, queries]),
        AttentionOperand::O => (shape.o, [batch, heads, queries]),
        AttentionOperand::Positions | AttentionOperand::Seed => return true,
        AttentionOperand::Slopes | AttentionOperand::Documents => return true,
    };
    let whole = |elements: usize| (elements * kernel.operand_dtype(operand).bytes()).is_multiple_of(bytes);
    let steps = [strides.batch, strides.head, strides.position];
    let offset = args.get(position).map_or(0, |arg| arg.offset);
    whole(offset) && sizes.iter().zip(steps).all(|(&size, step)| size <= 1 || whole(step))
}
