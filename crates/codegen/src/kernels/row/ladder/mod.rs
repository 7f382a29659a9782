//! The road from a naive kernel to the generated one, rung by rung, for `add_act` and `norm_act`.
//!
//! - Computes: `gelu(x + r)`; `gelu(layer_norm(x))`, with results rounded to the storage type where the graph has them.
//! - Shapes: any count of elements; rows of a multiple of 8 columns, of at most [`WIDEST`].
//! - Launched in place of the generated kernel, with its parameter, so that one harness runs and checks all of them. The
//!   generated kernel is the top rung.

use deuteron_graph::Dtype;

use crate::cuda::{CudaSource, Family, Policy, RowConfig};

/// The longest row that the rungs take.
pub const WIDEST: usize = 4096;

/// An op that has a ladder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ladder {
    /// `gelu(x + r)`
    AddAct,
    /// `gelu(layer_norm(x))`
    NormAct,
}

/// One kernel on the way.
#[derive(Debug, Clone, Copy)]
pub struct Rung {
    /// as its file
    pub name: &'static str,
    /// what it does better than the one before
    pub about: &'static str,
    text: &'static str,
    spread: Spread,
}

/// How a rung is spread over threads.
#[derive(Debug, Clone, Copy)]
enum Spread {
    /// threads of a block, and how many vectors a thread takes; 0: one element
    Elements { threads: usize, vectors: usize },
    /// threads a row, rows a block
    Rows { threads: usize, rows: usize },
}

const ADD_ACT: [Rung; 3] = [
    Rung {
        name: "l1_scalar",
        about: "a thread an element",
        text: include_str!("add_act/l1_scalar.cu"),
        spread: Spread::Elements { threads: 256, vectors: 0 },
    },
    Rung {
        name: "l2_vector",
        about: "16 bytes a thread",
        text: include_str!("add_act/l2_vector.cu"),
        spread: Spread::Elements { threads: 256, vectors: 1 },
    },
    Rung {
        name: "l3_in_flight",
        about: "two vectors a thread, loads first",
        text: include_str!("add_act/l3_in_flight.cu"),
        spread: Spread::Elements { threads: 256, vectors: 2 },
    },
];

const NORM_ACT: [Rung; 5] = [
    Rung {
        name: "l1_thread_a_row",
        about: "a thread a row",
        text: include_str!("norm_act/l1_thread_a_row.cu"),
        spread: Spread::Rows { threads: 1, rows: 128 },
    },
    Rung {
        name: "l2_block_a_row",
        about: "a block a row, sums by a tree in shared memory",
        text: include_str!("norm_act/l2_block_a_row.cu"),
        spread: Spread::Rows { threads: 256, rows: 1 },
    },
    Rung {
        name: "l3_warp_a_row",
        about: "a warp a row, sums by shuffles",
        text: include_str!("norm_act/l3_warp_a_row.cu"),
        spread: Spread::Rows { threads: 32, rows: 8 },
    },
    Rung {
        name: "l4_vectors",
        about: "16 bytes a thread",
        text: include_str!("norm_act/l4_vectors.cu"),
        spread: Spread::Rows { threads: 32, rows: 8 },
    },
    Rung {
        name: "l5_row_in_registers",
        about: "the row read once and held in registers",
        text: include_str!("norm_act/l5_row_in_registers.cu"),
        spread: Spread::Rows { threads: 32, rows: 4 },
    },
];

impl Ladder {
    /// The ladder of an op of the catalogue, if it has one.
    pub fn of(op: &str) -> Option<Ladder> {
        match op {
            "add_act" => Some(Ladder::AddAct),
            "norm_act" => Some(Ladder::NormAct),
            _ => None,
        }
    }

    /// From the naive one up; the generated kernel comes after the last.
    pub fn rungs(self) -> &'static [Rung] {
        match self {
            Ladder::AddAct => &ADD_ACT,
            Ladder::NormAct => &NORM_ACT,
        }
    }

    fn parameters(self) -> &'static str {
        match self {
            Ladder::AddAct => include_str!("add_act/parameters.cuh"),
            Ladder::NormAct => include_str!("norm_act/parameters.cuh"),
        }
    }

    /// A rung in place of the kernel that was generated for the same graph. None where that is no row kernel of the kind
    /// the rung stands for, or of another storage type than f32 and bf16.
    pub fn source(self, rung: &Rung, generated: &CudaSource, dtype: Dtype) -> Option<CudaSource> {
        let Family::Row(kernel) = &generated.family else { return None };
        let (element, vector) = match dtype {
            Dtype::F32 => (include_str!("f32.cuh"), 4),
            Dtype::Bf16 => (include_str!("bf16.cuh"), 8),
            _ => return None,
        };
        let is_flat = matches!(self, Ladder::AddAct);
        if kernel.flat != is_flat || kernel.args.len() != if is_flat { 3 } else { 4 } {
            return None;
        }
        let constants = format!("constexpr int COLS = {};\nconstexpr float EPS = 1e-5f;\n", kernel.cols);
        let parts = [element, &constants, include_str!("common.cuh"), self.parameters(), rung.text];
        let mut kernel = kernel.clone();
        kernel.config = rung.config(vector, kernel.config);
        kernel.shared = 0;
        Some(CudaSource { name: rung.name.into(), text: parts.join("\n"), family: Family::Row(kernel) })
    }
}

impl Rung {
    /// The generated kernel's config, changed to what the rung is written for.
    fn config(&self, width: usize, mut config: RowConfig) -> RowConfig {
        let (policy, threads, rows, vector, chunks) = match self.spread {
            Spread::Elements { threads, vectors: 0 } => (Policy::Flat, threads, 1, 1, 1),
            Spread::Elements { threads, vectors } => (Policy::Flat, threads, 1, width, vectors),
            Spread::Rows { threads, rows } => (Policy::Streamed, threads, rows, 1, 1),
        };
        (config.policy, config.threads_per_row, config.rows_per_block) = (policy, threads, rows);
        (config.vector, config.chunks) = (vector, chunks);
        (config.parts, config.cluster, config.resident) = (1, false, 0);
        config.why = self.about.to_string();
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_are_short_and_free_of_includes() {
        for ladder in [Ladder::AddAct, Ladder::NormAct] {
            for rung in ladder.rungs() {
                assert!(rung.text.lines().count() < 80, "{}", rung.name);
                assert!(!rung.text.contains("#include") && rung.text.starts_with("//"), "{}", rung.name);
            }
        }
    }
}
