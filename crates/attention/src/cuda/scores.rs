//! Probabilities of attention on CUDA, stored: two kernels of one contract, which is in `scores.cuh`. All keys are read twice, for the sum of
//! each row and then for its probabilities, so no score is stored. Keys are ordered in shared memory such that a matmul leaves eight
//! neighbours of a row to a thread, which stores them from registers.
//!
//! - `scores.cu`: 16-bit storage on the matrix units, where rows of queries and keys lie at multiples of 16 bytes.
//! - `scores_plain.cu`: all the rest.

use std::fmt;

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::tile::Part;
use deuteron_graph::Dtype;

use super::text::{PLAIN, TENSOR};
use super::tiles::{PLAIN_QUERIES, PLAIN_THREADS, Tiles};
use super::words::rows_start_at;
use crate::kernel::{AttentionKernel, AttentionMask, AttentionOperand, AttentionShape};

/// The kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// `scores_plain.cu`
    Plain,
    /// `scores.cu`
    Tensor {
        /// how a block is cut; tiles are of keys alone
        tiles: Tiles,
        /// 8, 4, 2 or 1: elements of a row of the result that are stored at once, and of the mask that are loaded so
        together: usize,
    },
}

impl Scores {
    pub(super) fn new(
        kernel: &AttentionKernel,
        shape: &AttentionShape,
        args: &[ArgBinding],
        target: &CudaTarget,
    ) -> Scores {
        use AttentionOperand::{K, Q};
        let narrow = matches!(kernel.dtype, Dtype::F16 | Dtype::Bf16) && kernel.kv == kernel.dtype;
        let aligned = [Q, K].into_iter().all(|operand| rows_start_at(kernel, shape, args, operand, 16));
        if narrow && aligned && kernel.width.is_multiple_of(16) && target.arch.is_ampere() {
            let together = together(kernel, shape, args);
            return Scores::Tensor { tiles: tiles(kernel, shape, together, target.processors), together };
        }
        Scores::Plain
    }

    /// Queries of a block.
    pub(super) fn queries(&self) -> usize {
        match self {
            Scores::Plain => PLAIN_QUERIES,
            Scores::Tensor { tiles, .. } => tiles.queries(),
        }
    }

    /// Threads of a block.
    pub(super) fn threads(&self) -> u32 {
        match self {
            Scores::Plain => PLAIN_THREADS,
            Scores::Tensor { tiles, .. } => 32 * tiles.warps as u32,
        }
    }

    /// Bytes of dynamic shared memory: two stages of keys, and the queries.
    pub(super) fn shared(&self, width: usize) -> usize {
        match self {
            Scores::Plain => 0,
            Scores::Tensor { tiles, .. } => (2 * tiles.keys + tiles.queries()) * (width + 8) * 2,
        }
    }

    pub(super) fn entry(&self) -> &'static str {
        match self {
            Scores::Plain => "attention_scores_plain",
            Scores::Tensor { .. } => "attention_scores",
        }
    }

    pub(super) fn constants(&self) -> String {
        match self {
            Scores::Plain => String::new(),
            Scores::Tensor { tiles, together } => {
                format!("{}constexpr int TOGETHER = {together};\n", tiles.constants())
            }
        }
    }

    /// The parts of the device-side library that it uses.
    pub(super) fn parts(&self) -> &'static [Part] {
        match self {
            Scores::Plain => PLAIN,
            Scores::Tensor { .. } => TENSOR,
        }
    }

    pub(super) fn text(&self) -> String {
        let [before, own] = match self {
            Scores::Plain => [include_str!("plain.cuh"), include_str!("scores_plain.cu")],
            Scores::Tensor { .. } => [include_str!("tensor.cuh"), include_str!("scores.cu")],
        };
        [before, include_str!("scores.cuh"), own].join("\n")
    }
}

impl fmt::Display for Scores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scores::Plain => write!(f, "{PLAIN_QUERIES} queries by 64 keys, f32 arithmetic"),
            Scores::Tensor { tiles, .. } => {
                write!(f, "{} queries by {} keys on matrix units", tiles.queries(), tiles.keys)
            }
        }
    }
}

/// Two sixteens of queries a warp halve what is read of shared memory for a product, and keys are read by half as many blocks: for
/// enough queries, where rows end with whole pieces and nothing takes registers beside them. Queries stay in registers at every
/// width. Nothing spills.
fn tiles(kernel: &AttentionKernel, shape: &AttentionShape, together: usize, processors: usize) -> Tiles {
    let blocks = shape.batch * shape.heads * shape.queries.div_ceil(128);
    let tall = shape.queries > 64 && blocks >= 2 * processors && together == 8;
    let plain = !matches!(kernel.mask, AttentionMask::Additive(_));
    match kernel.width {
        0..=64 if tall && plain => Tiles { warps: 4, atoms: 2, keys: 64, blocks: 4 },
        0..=64 if tall => Tiles { warps: 4, atoms: 2, keys: 64, blocks: 3 },
        65..=128 if tall && plain => Tiles { warps: 4, atoms: 2, keys: 64, blocks: 3 },
        0..=128 if plain => Tiles { warps: 4, atoms: 1, keys: 64, blocks: 4 },
        0..=128 => Tiles { warps: 4, atoms: 1, keys: 64, blocks: 3 },
        _ => Tiles { warps: 4, atoms: 1, keys: 32, blocks: 3 },
    }
}

/// The most elements that lie together in every row of the result and of the mask, at a multiple of their size or of 16 bytes.
fn together(kernel: &AttentionKernel, shape: &AttentionShape, args: &[ArgBinding]) -> usize {
    let lie = |operand: AttentionOperand, dtype: Dtype, count: usize| {
        rows_start_at(kernel, shape, args, operand, (count * dtype.bytes()).min(16))
    };
    let masked = |count: usize| match kernel.mask {
        AttentionMask::Additive(dtype) => lie(AttentionOperand::Mask, dtype, count),
        AttentionMask::Full | AttentionMask::Causal | AttentionMask::Cached => true,
    };
    let fits = |count: &usize| {
        shape.keys.is_multiple_of(*count) && lie(AttentionOperand::O, kernel.dtype, *count) && masked(*count)
    };
    [8, 4, 2].into_iter().find(fits).unwrap_or(1)
}
