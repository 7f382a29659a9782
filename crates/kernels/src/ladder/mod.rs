//! Ladders from a naive kernel to the generated one, rung by rung, for `add_act`, `norm_act`, `softmax`, `attention`,
//! `attention_add_norm` and matmuls.
//!
//! - Computes: `gelu(x + r)`; `gelu(layer_norm(x))`, with results rounded to the storage type where the graph has them;
//!   `softmax(x)` over rows; `softmax(q k^T / sqrt(64)) v`, causal; the same with a residual and a layer norm; `a b`.
//! - Shapes: any count of elements; rows of a multiple of 8 columns, of at most [`WIDEST`]; heads of 64, in bf16; matrices of any size whose
//!   rows are contiguous, in f16 and bf16.
//! - Launched in place of the generated kernel, on its arguments, so that one harness runs and checks all of them. The
//!   generated kernel is the top rung.
//! - On a CPU a rung is a plan, an instruction set and a number of threads, which the harness varies. The only kernels made
//!   here are those of [`cpu`], and the one that uses ordinary stores at any size ([`with_ordinary_stores`]).

pub(crate) mod attention;
pub(crate) mod attention_add_norm;
#[allow(unsafe_code)]
pub mod cpu;
pub(crate) mod matmul;

use deuteron_attention::chain::{self, Fit};
use deuteron_attention::kernel::LoweredAttention;
use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::cuda::arch::Arch;
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids};
use deuteron_codegen::cuda::row::variant::RowVariant;
use deuteron_codegen::cuda::row_config::{Policy, RowConfig};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Kernel, Launch};
use deuteron_codegen::lower::{LoweredRows, lower_with_origins};
use deuteron_graph::Dtype;
use deuteron_plan::{Draft, Structure};

/// The longest row that the rungs support.
pub const WIDEST: usize = 4096;

/// Threads of a block where several launches stand for a row kernel.
const LAUNCH_THREADS: usize = 256;

/// An op that has a ladder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ladder {
    /// `gelu(x + r)`
    AddAct,
    /// `gelu(layer_norm(x))`
    NormAct,
    /// `softmax(x)`
    Softmax,
    /// `softmax(q k^T / sqrt(64)) v`, causal
    Attention,
    /// `s = r + attention(q, k, v)`, `y = layer_norm(s)`
    AttentionAddNorm,
    /// `a b`
    Matmul,
}

/// One rung.
#[derive(Debug, Clone, Copy)]
pub struct Rung {
    /// as its file
    pub name: &'static str,
    /// the improvement over the previous rung
    pub about: &'static str,
    text: Text,
}

/// The kind of a rung.
#[derive(Debug, Clone, Copy)]
enum Text {
    /// a text in place of that of a row kernel
    Row(RowText),
    /// a kernel of attention
    Attention(attention::Step),
    /// a kernel of attention, residual and norm
    AttentionAddNorm(attention_add_norm::Step),
    /// a kernel of a matmul
    Matmul(matmul::Step),
}

/// A text in place of that of a row kernel.
#[derive(Debug, Clone, Copy)]
struct RowText {
    text: &'static str,
    /// the text before it
    parameters: &'static str,
    /// arguments of the kernel
    arguments: usize,
    spread: Spread,
}

/// The mapping of a row kernel to threads.
#[derive(Debug, Clone, Copy)]
enum Spread {
    /// threads of a block, and how many vectors a thread takes; 0: one element
    Elements { threads: usize, vectors: usize },
    /// threads per row, rows per block
    Rows { threads: usize, rows: usize },
    /// launches of 256 threads per block one after another: their kernels, and whether a thread takes an element or a row; and words of 4
    /// bytes of the workspace, per row, beside one per element
    Launches { list: &'static [(&'static str, bool)], words_per_row: usize },
}

/// A rung in place of a row kernel: its folder and file, its arguments, what it does better, how it is spread.
macro_rules! row {
    ($folder:literal, $arguments:literal, $name:literal, $about:literal, $spread:expr) => {
        Rung {
            name: $name,
            about: $about,
            text: Text::Row(RowText {
                text: include_str!(concat!($folder, "/", $name, ".cu")),
                parameters: include_str!(concat!($folder, "/parameters.cuh")),
                arguments: $arguments,
                spread: $spread,
            }),
        }
    };
}

const fn elements(vectors: usize) -> Spread {
    Spread::Elements { threads: 256, vectors }
}

const fn rows(threads: usize, rows: usize) -> Spread {
    Spread::Rows { threads, rows }
}

/// One launch per operation.
const STEPS_OF_ADD_ACT: Spread = Spread::Launches { list: &[("add", true), ("activate", true)], words_per_row: 0 };

const ADD_ACT: [Rung; 4] = [
    row!("add_act", 3, "l1_two_launches", "one launch per operation, the sum in memory", STEPS_OF_ADD_ACT),
    row!("add_act", 3, "l2_scalar", "one launch, one thread per element", elements(0)),
    row!("add_act", 3, "l3_vector", "16 bytes per thread", elements(1)),
    row!("add_act", 3, "l4_in_flight", "two vectors per thread, loads first", elements(2)),
];

/// One launch per step of the formula.
const STEPS_OF_NORM_ACT: Spread = Spread::Launches {
    list: &[("average", false), ("deviate", false), ("normalise", true), ("scale_and_shift", true), ("activate", true)],
    words_per_row: 2,
};

const NORM_ACT: [Rung; 6] = [
    row!("norm_act", 4, "l1_five_launches", "one launch per step of the formula, results in memory", STEPS_OF_NORM_ACT),
    row!("norm_act", 4, "l2_thread_a_row", "one launch, one thread per row", rows(1, 128)),
    row!("norm_act", 4, "l3_block_a_row", "one block per row, sums by a tree in shared memory", rows(256, 1)),
    row!("norm_act", 4, "l4_warp_a_row", "one warp per row, sums by shuffles", rows(32, 8)),
    row!("norm_act", 4, "l5_vectors", "16 bytes per thread", rows(32, 8)),
    row!("norm_act", 4, "l6_row_in_registers", "the row read once and held in registers", rows(32, 4)),
];

/// One launch per step of the formula.
const STEPS_OF_SOFTMAX: Spread = Spread::Launches {
    list: &[("find_largest", false), ("exponentials", true), ("add_up", false), ("divide", true)],
    words_per_row: 2,
};

const SOFTMAX: [Rung; 6] = [
    row!(
        "softmax",
        2,
        "l1_four_launches",
        "one launch per step of the formula, exponentials in memory",
        STEPS_OF_SOFTMAX
    ),
    row!("softmax", 2, "l2_thread_a_row", "one launch, one thread per row", rows(1, 128)),
    row!("softmax", 2, "l3_block_a_row", "one block per row, a tree in shared memory", rows(256, 1)),
    row!("softmax", 2, "l4_warp_a_row", "one warp per row, shuffles", rows(32, 8)),
    row!("softmax", 2, "l5_online", "16 bytes per access, maximum and sum in one pass", rows(32, 8)),
    row!("softmax", 2, "l6_row_in_registers", "the row read once and held in registers", rows(32, 4)),
];

const fn of_attention(name: &'static str, about: &'static str, step: attention::Step) -> Rung {
    Rung { name, about, text: Text::Attention(step) }
}

const ATTENTION: [Rung; 6] = [
    of_attention(
        attention::NAIVE.name,
        "scores, softmax, values: one launch each, one thread per element or row",
        attention::Step::Plain(attention::NAIVE),
    ),
    of_attention(
        attention::TILED.name,
        "matmuls of tiles in shared memory, one warp per row of the softmax",
        attention::Step::Plain(attention::TILED),
    ),
    of_attention(
        attention::ONLINE.name,
        "one launch with online softmax, no scores in memory",
        attention::Step::Plain(attention::ONLINE),
    ),
    of_attention(
        attention::TENSOR_CORES.name,
        "matmuls on the tensor cores, probabilities in registers",
        attention::Step::Matrix(attention::TENSOR_CORES),
    ),
    // Its rows are padded where others permute them: to the same end, no two of a small matrix in one bank.
    of_attention(
        "l5_pipelined",
        "prefetch of the next tile by cp.async, more queries per warp (shipped)",
        attention::Step::Tensor,
    ),
    of_attention("l6_warpgroups", "wgmma on tiles loaded by TMA, a producer warp (shipped)", attention::Step::Hopper),
];

const fn of_rows(name: &'static str, about: &'static str, step: attention_add_norm::Step) -> Rung {
    Rung { name, about, text: Text::AttentionAddNorm(step) }
}

const ATTENTION_ADD_NORM: [Rung; 5] = [
    of_rows(
        attention_add_norm::NAIVE.name,
        "five launches: scores, softmax, values, sum, norm, one thread per element or row",
        attention_add_norm::Step::Plain(attention_add_norm::NAIVE),
    ),
    of_rows(
        attention_add_norm::TILED.name,
        "five launches: matmuls of tiles in shared memory, one warp per row of softmax and norm",
        attention_add_norm::Step::Plain(attention_add_norm::TILED),
    ),
    of_rows(
        attention_add_norm::ONLINE.name,
        "two launches: attention with online softmax; sum and norm, the row in registers",
        attention_add_norm::Step::Plain(attention_add_norm::ONLINE),
    ),
    of_rows(
        attention_add_norm::TENSOR_CORES.name,
        "two launches: attention on the tensor cores; sum and norm",
        attention_add_norm::Step::Matrix(attention_add_norm::TENSOR_CORES),
    ),
    of_rows(
        "l5_one_launch",
        "one launch: rows are normalised after their last head (shipped)",
        attention_add_norm::Step::OneLaunch,
    ),
];

const fn of_matmul(name: &'static str, about: &'static str, step: matmul::Step) -> Rung {
    Rung { name, about, text: Text::Matmul(step) }
}

const MATMUL: [Rung; 7] = [
    of_matmul(matmul::NAIVE.name, "one thread per element", matmul::Step::Plain(matmul::NAIVE)),
    of_matmul(
        matmul::TILED.name,
        "tiles of both operands in shared memory, 4 x 4 elements per thread",
        matmul::Step::Plain(matmul::TILED),
    ),
    of_matmul(
        matmul::VECTORISED.name,
        "16 bytes per load, 8 x 8 elements per thread",
        matmul::Step::Plain(matmul::VECTORISED),
    ),
    of_matmul(
        matmul::TENSOR_CORES.name,
        "matmul on the tensor cores (mma.sync)",
        matmul::Step::Matrix(matmul::TENSOR_CORES),
    ),
    of_matmul(
        "l5_pipelined",
        "prefetch of the next tiles by asynchronous copies (cp.async) (shipped)",
        matmul::Step::Mma,
    ),
    of_matmul("l6_warpgroups", "wgmma on tiles loaded by TMA, one tile per block (shipped)", matmul::Step::OneTile),
    of_matmul(
        "l7_persistent",
        "persistent blocks: one warpgroup's epilogue overlaps the other's mainloop (shipped)",
        matmul::Step::Turns,
    ),
];

impl Ladder {
    /// All of them.
    pub const ALL: [Ladder; 6] =
        [Ladder::AddAct, Ladder::NormAct, Ladder::Softmax, Ladder::Attention, Ladder::AttentionAddNorm, Ladder::Matmul];

    /// The op's name in the catalogue, or `matmul`, which has no sizes of a row op.
    pub fn op(self) -> &'static str {
        match self {
            Ladder::AddAct => "add_act",
            Ladder::NormAct => "norm_act",
            Ladder::Softmax => "softmax",
            Ladder::Attention => "attention",
            Ladder::AttentionAddNorm => "attention_add_norm",
            Ladder::Matmul => "matmul",
        }
    }

    /// The ladder of that name, if there is one.
    pub fn of(op: &str) -> Option<Ladder> {
        Ladder::ALL.into_iter().find(|ladder| ladder.op() == op)
    }

    /// From the naive one up; the generated kernel follows the last rung, unless it is that rung.
    pub fn rungs(self) -> &'static [Rung] {
        match self {
            Ladder::AddAct => &ADD_ACT,
            Ladder::NormAct => &NORM_ACT,
            Ladder::Softmax => &SOFTMAX,
            Ladder::Attention => &ATTENTION,
            Ladder::AttentionAddNorm => &ATTENTION_ADD_NORM,
            Ladder::Matmul => &MATMUL,
        }
    }
}

impl Rung {
    /// Its text, without the code that rungs of its ladder share; none for a shipped kernel.
    pub fn text(&self) -> Option<String> {
        let texts = match &self.text {
            Text::Row(row) => std::slice::from_ref(&row.text),
            Text::Attention(step) => step.texts(),
            Text::AttentionAddNorm(step) => step.texts(),
            Text::Matmul(step) => step.texts(),
        };
        (!texts.is_empty()).then(|| texts.join("\n"))
    }

    /// Whether a GPU has its instructions and enough shared memory.
    pub fn is_for(&self, arch: Arch) -> bool {
        match self.text {
            Text::Row(_) => true,
            Text::Attention(step) => step.is_for(arch),
            Text::AttentionAddNorm(step) => step.is_for(arch),
            Text::Matmul(step) => step.is_for(arch),
        }
    }

    /// The rung's kernel for a group. None where the group is of another kind than the rung stands for, or of a storage type or shape
    /// that it is not written for.
    pub fn kernel(&self, group: &Draft, target: &CudaTarget) -> Option<Kernel> {
        match self.text {
            Text::Row(row) if *group.structure == Structure::Row => {
                row_kernel(self, row, RowVariant::new(lower_with_origins(group).0, target), target)
            }
            Text::Row(_) => None,
            Text::Attention(step) => match chain::fit(group)? {
                Fit::Alone(fit) => step.kernel(&LoweredAttention::new(group, &fit), target),
                Fit::Rows(_) | Fit::Block(_) | Fit::Gradient(_) => None,
            },
            Text::AttentionAddNorm(step) => step.kernel(group, target),
            Text::Matmul(step) => step.kernel(group, target),
        }
    }
}

/// The CPU kernel of row work with ordinary stores at any size: the rung below prefetched or streaming stores. None
/// if the group is not row work.
pub fn with_ordinary_stores(group: &Draft) -> Option<Kernel> {
    (*group.structure == Structure::Row).then(|| crate::row::cpu::with_ordinary_stores(lower_with_origins(group).0))
}

/// A rung in place of a row kernel, of f32 or bf16.
fn row_kernel(rung: &Rung, row: RowText, mut variant: RowVariant, target: &CudaTarget) -> Option<Kernel> {
    let body = &variant.lowered.body;
    let (element, vector) = match variant.lowered.launch.args.first()?.dtype {
        Dtype::F32 => (include_str!("f32.cuh"), 4),
        Dtype::Bf16 => (include_str!("bf16.cuh"), 8),
        _ => return None,
    };
    let is_flat = match row.spread {
        Spread::Elements { .. } => true,
        Spread::Rows { .. } => false,
        Spread::Launches { list, .. } => list.iter().all(|&(_, by_elements)| by_elements),
    };
    if body.flat != is_flat || body.args.len() != row.arguments || !is_supported(&variant.lowered) {
        return None;
    }
    let constants = format!("constexpr int COLS = {};\nconstexpr float EPS = 1e-5f;\n", body.cols);
    let parts = [element, &constants, include_str!("common.cuh"), row.parameters, row.text];
    variant.config = RowConfig { why: rung.about.to_string(), ..row.spread.config(vector, variant.config) };
    variant.shared = 0;
    let (rows, cols) = (variant.lowered.launch.rows, variant.lowered.launch.cols);
    let kernel = variant.with_source(CudaSource::new(rung.name, parts.join("\n")), target);
    Some(match row.spread {
        Spread::Elements { .. } | Spread::Rows { .. } => kernel,
        Spread::Launches { list, words_per_row } => in_launches(kernel, list, (rows, cols), words_per_row),
    })
}

/// Whether rows have a multiple of 8 columns, at most [`WIDEST`], and start at multiples of 16 bytes, as those of some rungs must. A flat body
/// has no rows.
fn is_supported(lowered: &LoweredRows) -> bool {
    let LoweredRows { body, launch } = lowered;
    let whole = |count: usize| count.is_multiple_of(8);
    let by_rows = |arg: &ArgBinding| arg.leading.iter().all(|&(size, stride)| size <= 1 || whole(stride));
    let rows = body.flat || (whole(body.cols) && body.cols <= WIDEST && launch.args.iter().all(by_rows));
    rows && launch.args.iter().all(|arg| whole(arg.offset))
}

/// A kernel of one grid as several with the same words.
fn in_launches(kernel: Kernel, list: &[(&'static str, bool)], (rows, cols): (usize, usize), words: usize) -> Kernel {
    let Kernel { source, launch } = kernel;
    let made = |grid: &Grid| -> Vec<Grid> {
        let launches = list.iter().map(|&(entry, by_elements)| {
            let threads = if by_elements { rows * cols } else { rows };
            Grid::new(entry, threads.div_ceil(LAUNCH_THREADS), LAUNCH_THREADS as u32, grid.words.clone())
        });
        launches.collect()
    };
    let list = launch.grids().and_then(|grids| grids.list.first()).map_or(Vec::new(), made);
    let grids = Grids { list, workspace: rows * (cols + words) * 4, ..Grids::default() };
    let variant = launch.variant().name.clone();
    let launch = Launch::of_grids(launch.arguments().to_vec(), grids).with_variant(variant, String::new());
    Kernel::new(source, launch)
}

impl Spread {
    /// The generated kernel's config, changed to what a rung is written for.
    fn config(self, width: usize, mut config: RowConfig) -> RowConfig {
        let (policy, threads, rows, vector, chunks) = match self {
            Spread::Elements { threads, vectors: 0 } => (Policy::Flat, threads, 1, 1, 1),
            Spread::Elements { threads, vectors } => (Policy::Flat, threads, 1, width, vectors),
            Spread::Rows { threads, rows } => (Policy::Streamed, threads, rows, 1, 1),
            Spread::Launches { .. } => (Policy::Streamed, 1, LAUNCH_THREADS, 1, 1),
        };
        (config.policy, config.threads_per_row, config.rows_per_block) = (policy, threads, rows);
        (config.vector, config.chunks) = (vector, chunks);
        (config.parts, config.cluster, config.resident) = (1, false, 0);
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rungs_are_short_and_free_of_includes() {
        for rung in Ladder::ALL.iter().flat_map(|ladder| ladder.rungs()) {
            assert_eq!(rung.text().is_none(), rung.about.ends_with("(shipped)"), "{}", rung.name);
            let (texts, limit) = match &rung.text {
                Text::Row(row) => (std::slice::from_ref(&row.text), 80),
                Text::Attention(step) => (step.texts(), 120),
                Text::AttentionAddNorm(step) => (step.texts(), 120),
                Text::Matmul(step) => (step.texts(), 80),
            };
            for text in texts {
                assert!(text.lines().count() < limit, "{}", rung.name);
                assert!(!text.contains("#include") && text.starts_with("//"), "{}", rung.name);
            }
        }
    }
}
