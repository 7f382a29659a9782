//! The input of attention kernels: the compile-time half, sizes and strides, arguments.

use std::ops::Deref;

use deuteron_codegen::argument::{ArgBinding, Argument, strided_reach};
use deuteron_graph::Dtype;

use super::score::ScoreRules;
use super::{Attention, Dropout};

/// The compile-time parameters of attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionKernel {
    /// storage type of queries and result
    pub dtype: Dtype,
    /// storage type of keys and values
    pub kv: Dtype,
    /// elements of a head
    pub width: usize,
    /// heads that share a head of keys and values
    pub group: usize,
    /// factor of the scores
    pub scale: f32,
    /// the mask
    pub mask: AttentionMask,
    /// work on the scores before their softmax
    pub scores: ScoreRules,
    /// dropout of the probabilities
    pub dropout: Option<DropoutRule>,
    /// the kind of result
    pub result: AttentionResult,
}

/// The result of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionResult {
    /// probabilities times values: a row of the width for each query
    Values,
    /// the probabilities alone: a row of all keys for each query; there are no values and no dropout
    Probabilities,
}

/// The mask of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionMask {
    /// nothing
    Full,
    /// keys beyond the query's position, counted from the end
    Causal,
    /// keys hidden by an argument of this type that is added to the scores, as a bias is beside another mask
    Additive(Dtype),
    /// keys beyond the query's position, with an argument for the position of each sequence's first query
    Cached,
}

/// Which probabilities are dropped, without the seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutRule {
    /// share of dropped elements
    pub probability: f64,
    /// second word of the generator's key
    pub offset: u32,
}

/// The role of an argument of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionOperand {
    /// queries
    Q,
    /// keys
    K,
    /// values
    V,
    /// added to the scores
    Mask,
    /// an `i32` for each sequence: the position of its first query
    Positions,
    /// an `f32` for each head: what it adds to a score by the distance of the key
    Slopes,
    /// an `i32` for each key: its document
    Documents,
    /// one `i32`: first word of the generator's key
    Seed,
    /// the result
    O,
}

/// The arguments of attention, in order. A run asks for them, so they take no memory of their own.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOperands {
    list: [AttentionOperand; Self::MOST],
    count: usize,
}

impl AttentionOperands {
    const MOST: usize = 9;
}

impl Deref for AttentionOperands {
    type Target = [AttentionOperand];

    fn deref(&self) -> &[AttentionOperand] {
        &self.list[..self.count]
    }
}

impl IntoIterator for AttentionOperands {
    type Item = AttentionOperand;
    type IntoIter = std::iter::Take<std::array::IntoIter<AttentionOperand, { Self::MOST }>>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.into_iter().take(self.count)
    }
}

impl AttentionKernel {
    /// Its arguments, in order.
    pub fn operands(&self) -> AttentionOperands {
        use AttentionOperand::{Documents, K, Mask, O, Positions, Q, Seed, Slopes, V};
        let values = self.result == AttentionResult::Values;
        let all = [
            (Q, true),
            (K, true),
            (V, values),
            (Mask, self.added().is_some()),
            (Positions, self.mask == AttentionMask::Cached),
            (Slopes, self.scores.slopes),
            (Documents, self.scores.documents),
            (Seed, values && self.dropout.is_some()),
            (O, true),
        ];
        let mut operands = AttentionOperands { list: [O; AttentionOperands::MOST], count: 0 };
        for (operand, _) in all.into_iter().filter(|(_, is_there)| *is_there) {
            operands.list[operands.count] = operand;
            operands.count += 1;
        }
        operands
    }

    /// The storage of what is added to the scores, if anything is.
    pub fn added(&self) -> Option<Dtype> {
        match self.mask {
            AttentionMask::Additive(dtype) => Some(dtype),
            AttentionMask::Full | AttentionMask::Causal | AttentionMask::Cached => self.scores.bias,
        }
    }

    /// The storage type of an argument.
    pub fn operand_dtype(&self, operand: AttentionOperand) -> Dtype {
        match operand {
            AttentionOperand::Seed | AttentionOperand::Positions | AttentionOperand::Documents => Dtype::I32,
            AttentionOperand::Slopes => Dtype::F32,
            AttentionOperand::Mask => self.added().unwrap_or(self.dtype),
            AttentionOperand::K | AttentionOperand::V => self.kv,
            AttentionOperand::Q | AttentionOperand::O => self.dtype,
        }
    }

    /// Elements of a row of the result.
    pub fn result_row(&self, shape: &AttentionShape) -> usize {
        match self.result {
            AttentionResult::Values => self.width,
            AttentionResult::Probabilities => shape.keys,
        }
    }

    /// What is computed for these sizes and this seed.
    pub fn sized(&self, shape: &AttentionShape, seed: u32) -> Attention {
        let &AttentionShape { batch, heads, queries, keys, .. } = shape;
        let dropout = |DropoutRule { probability, offset }| Dropout { probability, seed, offset };
        Attention {
            dtype: self.dtype,
            kv: self.kv,
            batch,
            heads,
            kv_heads: heads / self.group.max(1),
            queries,
            keys,
            width: self.width,
            scale: self.scale,
            causal: matches!(self.mask, AttentionMask::Causal | AttentionMask::Cached),
            scores: self.scores,
            dropout: self.dropout.map(dropout),
        }
    }

    /// As text.
    pub fn describe(&self) -> String {
        let mask = match self.mask {
            AttentionMask::Full => "",
            AttentionMask::Causal => "causal ",
            AttentionMask::Additive(_) => "masked ",
            AttentionMask::Cached => "cached ",
        };
        let scores = self.scores.describe();
        let group = if self.group > 1 { format!(", {} heads a key head", self.group) } else { String::new() };
        let dropout = self.dropout.map_or(String::new(), |rule| format!(", dropout {}", rule.probability));
        let (dtype, width) = (self.dtype, self.width);
        let keys = if self.kv == dtype { String::new() } else { format!(", {} keys and values", self.kv) };
        let what = match self.result {
            AttentionResult::Values => "attention by online softmax",
            AttentionResult::Probabilities => "probabilities of attention",
        };
        format!("{mask}{what}, heads of {width}{group}{scores}{dropout}, {dtype} in and out{keys}, f32 sums")
    }
}

/// Sizes and strides of a launch of attention. Elements of a head, and keys of a mask, are contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// sequences
    pub batch: usize,
    /// heads of queries
    pub heads: usize,
    /// queries of a sequence
    pub queries: usize,
    /// keys of a sequence
    pub keys: usize,
    /// of the queries
    pub q: HeadStrides,
    /// of the keys, a head for each group of heads
    pub k: HeadStrides,
    /// of the values, likewise
    pub v: HeadStrides,
    /// of the mask, by query; zeros without one
    pub mask: HeadStrides,
    /// of slopes, one per head; zeros without them
    pub slopes: HeadStrides,
    /// of documents, a row of keys; zeros without them
    pub documents: HeadStrides,
    /// of the result
    pub o: HeadStrides,
}

/// Elements from one index to the next; 0 repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeadStrides {
    /// from one sequence to the next
    pub batch: usize,
    /// from one head to the next
    pub head: usize,
    /// from one position to the next
    pub position: usize,
}

/// Attention, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredAttention {
    /// the compile-time half
    pub kernel: AttentionKernel,
    /// sizes and strides
    pub shape: AttentionShape,
    /// as [`AttentionKernel::operands`] lists them
    pub args: Vec<ArgBinding>,
}

impl LoweredAttention {
    /// Its arguments, as a device needs them.
    pub fn arguments(&self) -> Vec<Argument> {
        let operands = self.kernel.operands().into_iter().zip(&self.args);
        operands.map(|(operand, arg)| Argument::new(arg, self.kernel.reach(&self.shape, operand))).collect()
    }
}

impl AttentionKernel {
    /// The reach of an operand in elements from its first one.
    pub fn reach(&self, shape: &AttentionShape, operand: AttentionOperand) -> usize {
        let &AttentionShape { batch, heads, queries, keys, .. } = shape;
        let key_heads = self.sized(shape, 0).kv_heads;
        // Sizes, strides, and elements that follow each other.
        let (sizes, strides, run) = match operand {
            AttentionOperand::Q => ([batch, heads, queries], shape.q, self.width),
            AttentionOperand::K => ([batch, key_heads, keys], shape.k, self.width),
            AttentionOperand::V => ([batch, key_heads, keys], shape.v, self.width),
            AttentionOperand::Mask => ([batch, heads, queries], shape.mask, keys),
            AttentionOperand::O => ([batch, heads, queries], shape.o, self.result_row(shape)),
            AttentionOperand::Slopes => ([batch, heads, 1], shape.slopes, 1),
            AttentionOperand::Documents => ([batch, heads, 1], shape.documents, keys),
            AttentionOperand::Positions => return batch,
            AttentionOperand::Seed => return 1,
        };
        let steps = [strides.batch, strides.head, strides.position];
        // Rows without elements reach nothing.
        strided_reach(sizes.into_iter().zip(steps).chain([(run.min(1), 0)]), run)
    }
}
