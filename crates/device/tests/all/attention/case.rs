//! One problem of attention, or of its probabilities, with its data.

use super::shared::{added, hide, loaded, lowered, outputs, part};
use crate::support::attention::{Numbers, SEED, shape, stored, widened};
use deuteron_attention::cuda::forward::{self, ForwardVariant, with_variant};
use deuteron_attention::kernel::LoweredAttention;
use deuteron_attention::{
    AttentionKernel, AttentionMask, AttentionOperand, AttentionResult, AttentionShape, HeadStrides,
};
use deuteron_device::{Cuda, Device, Executable, Memory};
use deuteron_kernels::Backend;

/// One problem with its data.
pub struct Case {
    pub kernel: AttentionKernel,
    pub shape: AttentionShape,
    /// Elements of the arguments, and where each starts.
    pub tensors: Vec<(AttentionOperand, Vec<f32>)>,
    pub offsets: Vec<usize>,
    pub positions: Vec<i32>,
}

impl Case {
    pub fn new(kernel: AttentionKernel, sizes: [usize; 4], spread: f32) -> Case {
        let shape = shape(sizes, &kernel);
        let [batch, heads, queries, keys] = sizes;
        let mut numbers = Numbers(sizes.iter().fold(kernel.width as u64, |seed, &size| seed * 31 + size as u64));
        let key_elements = batch * heads / kernel.group * keys * kernel.width;
        let mut tensors = vec![
            (AttentionOperand::Q, numbers.take(batch * heads * queries * kernel.width, spread)),
            (AttentionOperand::K, numbers.take(key_elements, 1.0)),
        ];
        if kernel.result == AttentionResult::Values {
            tensors.push((AttentionOperand::V, numbers.take(key_elements, 1.0)));
        }
        if let AttentionMask::Additive(_) = kernel.mask {
            let mask = added(&mut numbers, [batch, queries, keys]);
            tensors.push((AttentionOperand::Mask, mask));
        }
        let positions = (0..batch).map(|b| keys as i32 - queries as i32 - 11 * b as i32).collect();
        Case { kernel, shape, tensors, offsets: vec![0; 4], positions }
    }

    /// Queries, keys and values, those that there are, side by side in one tensor `[batch, positions, parts, heads, width]`, `start`
    /// elements in.
    pub fn fused(kernel: AttentionKernel, [batch, heads, length]: [usize; 3], start: usize) -> Case {
        let mut case = Case::new(kernel, [batch, heads, length, length], 1.0);
        let (parts, joint) = (case.tensors.len(), heads * kernel.width);
        let strides = HeadStrides { batch: length * parts * joint, head: kernel.width, position: parts * joint };
        let o = match kernel.result {
            AttentionResult::Values => HeadStrides { batch: length * joint, head: kernel.width, position: joint },
            AttentionResult::Probabilities => case.shape.o,
        };
        case.shape = AttentionShape { q: strides, k: strides, v: strides, o, ..case.shape };
        let all = Numbers(5).take(start + batch * length * parts * joint, 1.0);
        case.offsets = (0..parts).map(|part| start + part * joint).collect();
        case.tensors.iter_mut().for_each(|(_, values)| values.clone_from(&all));
        case
    }

    /// Keys of some rows are hidden by a finite number.
    pub fn hidden(mut self, hidden: f32) -> Case {
        let mask = self.tensors.iter_mut().find(|(operand, _)| *operand == AttentionOperand::Mask);
        hide(&mut mask.unwrap().1, self.shape.keys, hidden);
        self
    }

    /// One of its sequences, which lie one after another.
    pub fn sequence(&self, index: usize) -> Case {
        let own = |values: &[f32]| part(values, self.shape.batch, index).to_vec();
        Case {
            kernel: self.kernel,
            shape: AttentionShape { batch: 1, ..self.shape },
            tensors: self.tensors.iter().map(|(operand, values)| (*operand, own(values))).collect(),
            offsets: self.offsets.clone(),
            positions: vec![self.positions[index]],
        }
    }

    pub fn offset(&self, operand: AttentionOperand) -> usize {
        self.kernel
            .operands()
            .iter()
            .position(|&known| known == operand)
            .map_or(0, |at| *self.offsets.get(at).unwrap_or(&0))
    }

    pub fn bytes(&self, operand: AttentionOperand) -> Vec<u8> {
        match operand {
            AttentionOperand::Positions => self.positions.iter().flat_map(|x| x.to_le_bytes()).collect(),
            AttentionOperand::Seed => SEED.to_le_bytes().to_vec(),
            _ => {
                let values = self.tensors.iter().find(|(known, _)| *known == operand).map(|(_, values)| values);
                stored(self.kernel.operand_dtype(operand), values.unwrap())
            }
        }
    }

    pub fn values(&self, operand: AttentionOperand) -> Vec<f64> {
        widened(self.kernel.operand_dtype(operand), &self.bytes(operand))
    }

    pub fn lowered(&self) -> LoweredAttention {
        lowered(&self.kernel, self.shape, |operand| self.offset(operand))
    }

    pub fn result_elements(&self) -> usize {
        let columns = match self.kernel.result {
            AttentionResult::Values => self.kernel.width,
            AttentionResult::Probabilities => self.shape.keys,
        };
        self.shape.batch * self.shape.heads * self.shape.queries * columns
    }

    pub fn result_bytes(&self) -> usize {
        self.result_elements() * self.kernel.dtype.bytes()
    }

    /// Made ready by a kernel, with its inputs.
    pub fn load(&self, device: &Cuda, variant: Option<ForwardVariant>) -> (Box<dyn Executable>, Vec<Memory>) {
        let Backend::Cuda(target) = device.backend() else { panic!("a GPU") };
        let kernel = match variant {
            Some(variant) => with_variant(&self.lowered(), &variant, target),
            None => forward::kernel(&self.lowered(), target),
        };
        let operands = self.kernel.operands();
        let inputs: Vec<Vec<u8>> = operands[..operands.len() - 1].iter().map(|&operand| self.bytes(operand)).collect();
        loaded(device, kernel, &inputs, vec![self.result_bytes()])
    }

    /// Runs it by a kernel, twice and once more as a graph; the bits must be the same.
    pub fn run(&self, device: &Cuda, variant: Option<ForwardVariant>) -> Vec<f64> {
        let (mut executable, memory) = self.load(device, variant);
        widened(self.kernel.dtype, &outputs(&mut *executable, &memory, &[self.result_bytes()])[0])
    }

    /// How many keys query `i` of sequence `b` sees.
    pub fn seen(&self, b: usize, i: usize) -> usize {
        let AttentionShape { queries, keys, .. } = self.shape;
        let seen = match self.kernel.mask {
            AttentionMask::Causal => i as i64 + keys as i64 - queries as i64 + 1,
            AttentionMask::Cached => i64::from(self.positions[b]) + i as i64 + 1,
            AttentionMask::Full | AttentionMask::Additive(_) => keys as i64,
        };
        seen.clamp(0, keys as i64) as usize
    }

    /// What is added to the scores, if anything is.
    pub fn added(&self) -> Vec<f64> {
        match self.kernel.mask {
            AttentionMask::Additive(_) => self.values(AttentionOperand::Mask),
            AttentionMask::Full | AttentionMask::Causal | AttentionMask::Cached => Vec::new(),
        }
    }
}
