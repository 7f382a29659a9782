//! Attention on CUDA: four kernels of one contract, that of [this crate](crate).
//!
//! - `hopper.cu`: heads of up to 128, of 192 and 256 in 16-bit storage, on the matrix units and copy engines that only Hopper has.
//! - `tensor.cu`: 16-bit storage of one type on the matrix units, where rows lie at multiples of 16 bytes.
//! - `decode.cu`: few queries over many keys, in ranges of keys that a cluster or a second grid joins.
//! - `plain.cu`: all the rest.
//!
//! Sizes and strides are launch data: a kernel is compiled once for a width, a storage type, a mask and dropout. A hidden key
//! is not seen, but where another query of the same tile sees it: then 0 times a value that is not finite is NaN.

use std::fmt;

use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_graph::Dtype;
use deuteron_plan::{Work, primitive_work};

use super::hopper::{Groups, Walk};
use super::scores::Scores;
use super::text::{DECODE, HOPPER, HOPPER_ATTEND, NOTHING, PLAIN, TENSOR, plain_text, tensor_text, text};
use super::tiles::{PLAIN_QUERIES, PLAIN_THREADS, Tiles};
use super::time::attention_us;
use super::words::{PARTS_AT, is_aligned, unwritten_positions, words};
use crate::chain::{self, Fit};
use crate::kernel::{AttentionKernel, AttentionResult, AttentionShape, LoweredAttention};

/// Up to this many queries attention is decoded: a tile of queries would be mostly empty.
pub(super) const DECODE_QUERIES: usize = 8;
/// Rows of a block that decodes, at most: each holds a row of queries and of results in registers.
const DECODE_ROWS: usize = 8;
/// Keys of a range, at least: one trip of the block's loop at a width of 64.
const RANGE: usize = 64;
/// Ranges of keys, at most.
const MAX_RANGES: usize = 64;
/// Blocks of a cluster that joins its ranges, at most: what every GPU with clusters can run.
const JOINED_RANGES: usize = 8;
/// Keys of a range, at most, where a cluster has fewer ranges than there are places for blocks.
const JOINED_KEYS: usize = 256;
/// Bytes of shared memory that a cluster joins its ranges in, at most: more would leave room for fewer blocks.
const JOINED_BYTES: usize = 32 << 10;
/// Blocks that decode and that a multiprocessor is given at once: 6, 3 or 2 of them have room at a time for blocks of 1, 4 or 8 rows.
const DECODE_BLOCKS: usize = 6;
/// Threads of a block that decodes or joins, as in `decode.cu`.
const DECODE_THREADS: u32 = 128;
/// Rows of the result of a block that joins, as in `decode.cu`.
const COMBINE_ROWS: usize = 4;
/// Positions are 32-bit numbers on the device, with room for a tile beyond the last.
const MAX_POSITIONS: usize = 1 << 30;

/// Attention on a GPU, and its probabilities.
pub struct AttentionFamily;

impl Family<CudaTarget> for AttentionFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let Some(Fit::Alone(fit)) = chain::fit(&group) else { return None };
        if refusal(&fit.kernel, &fit.shape).is_some() {
            return None;
        }
        let work = move || {
            let lowered = LoweredAttention::new(&group, &fit);
            let microseconds = match choose(&lowered, target) {
                ForwardVariant::Hopper(groups) => {
                    Some(attention_us(&groups, &lowered.kernel, &lowered.shape, target.processors))
                }
                _ => None,
            };
            Work { microseconds, ..primitive_work(&group) }
        };
        let kernel = move || kernel(&LoweredAttention::new(&group, &fit), target);
        offered(work, kernel)
    }
}

/// The kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForwardVariant {
    /// `plain.cu`
    Plain,
    /// `hopper.cu`
    Hopper(Groups),
    /// `tensor.cu`
    Tensor(Tiles),
    /// `decode.cu`
    Decode {
        /// rows of queries of a block
        rows: usize,
        /// whether rows of keys and values are made of whole 16-byte pieces
        vector: bool,
    },
    /// probabilities: `scores.cu` or `scores_plain.cu`
    Scores(Scores),
}

impl fmt::Display for ForwardVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ForwardVariant::Plain => write!(f, "{PLAIN_QUERIES} queries by 64 keys, f32 arithmetic"),
            ForwardVariant::Hopper(groups) => {
                write!(f, "{} queries by {} keys by warpgroups", groups.queries(), groups.keys)
            }
            ForwardVariant::Tensor(tiles) => {
                write!(f, "{} queries by {} keys on matrix units", tiles.queries(), tiles.keys)
            }
            ForwardVariant::Decode { rows: 1, .. } => f.write_str("ranges of keys, one row per block"),
            ForwardVariant::Decode { rows, .. } => write!(f, "ranges of keys, {rows} rows per block"),
            ForwardVariant::Scores(scores) => scores.fmt(f),
        }
    }
}

/// Why CUDA does not take attention that the contract allows, if so.
pub fn refusal(kernel: &AttentionKernel, shape: &AttentionShape) -> Option<&'static str> {
    match () {
        () if shape.queries > MAX_POSITIONS || shape.keys > MAX_POSITIONS => Some("expected at most 2^30 positions"),
        () if kernel.scores.is_some() => {
            Some("expected scores without a soft cap, slopes, a bias, a window or documents")
        }
        () if !kernel.scale.is_finite() => Some("expected a finite scale"),
        () => None,
    }
}

/// The kernel of attention.
pub fn kernel(attention: &LoweredAttention, target: &CudaTarget) -> Kernel {
    with_variant(attention, &choose(attention, target), target)
}

/// The kernel of attention by a variant that takes it.
pub fn with_variant(attention: &LoweredAttention, variant: &ForwardVariant, target: &CudaTarget) -> Kernel {
    let launch = Launch::of_grids(attention.arguments(), grids(attention, variant, target))
        .with_variant(variant.to_string(), String::new());
    Kernel::new(Source::Cuda(source(&attention.kernel, variant)), launch)
}

/// The variant for attention.
pub fn choose(attention: &LoweredAttention, target: &CudaTarget) -> ForwardVariant {
    let LoweredAttention { kernel, shape, args } = attention;
    if kernel.result == AttentionResult::Probabilities {
        return ForwardVariant::Scores(Scores::new(kernel, shape, args, target));
    }
    let vector = is_aligned(kernel, shape, args);
    if shape.queries <= DECODE_QUERIES {
        let rows = (kernel.group * shape.queries).next_power_of_two().clamp(1, DECODE_ROWS);
        return ForwardVariant::Decode { rows, vector };
    }
    let narrow = matches!(kernel.dtype, Dtype::F16 | Dtype::Bf16) && kernel.kv == kernel.dtype;
    if narrow
        && vector
        && let Some(groups) = Groups::new(kernel, shape, target)
    {
        return ForwardVariant::Hopper(groups);
    }
    if narrow && vector && kernel.width.is_multiple_of(16) && target.arch.is_ampere() {
        return ForwardVariant::Tensor(Tiles::new(kernel, shape, target.processors));
    }
    ForwardVariant::Plain
}

/// The text of a kernel.
fn source(kernel: &AttentionKernel, variant: &ForwardVariant) -> CudaSource {
    let (name, constants, parts, own) = match variant {
        ForwardVariant::Plain => ("attention", String::new(), PLAIN, plain_text(NOTHING)),
        ForwardVariant::Hopper(groups) => {
            let own = [include_str!("hopper.cuh"), HOPPER_ATTEND, include_str!("hopper.cu")].join("\n");
            let draws = groups.walk == Walk::Drawn;
            let constants =
                groups.constants(groups.shared(kernel.width)) + &format!("constexpr bool DRAWS = {draws};\n");
            ("attention_hopper", constants, HOPPER, own)
        }
        ForwardVariant::Tensor(tiles) => ("attention_tensor", tiles.constants(), TENSOR, tensor_text(NOTHING)),
        ForwardVariant::Decode { rows, vector } => {
            let constants = format!("constexpr int ROWS = {rows};\nconstexpr bool VECTOR = {vector};\n");
            ("attention_decode", constants, DECODE, include_str!("decode.cu").into())
        }
        ForwardVariant::Scores(scores) => ("attention_scores", scores.constants(), scores.parts(), scores.text()),
    };
    CudaSource::new(name, text(kernel, &constants, parts, &own))
}

/// The grids of a launch; none where there is nothing to write.
pub(super) fn grids(attention: &LoweredAttention, variant: &ForwardVariant, target: &CudaTarget) -> Grids {
    let LoweredAttention { kernel, shape, args } = attention;
    let &AttentionShape { batch, heads, queries, .. } = shape;
    let all_rows = batch * heads * queries;
    if all_rows == 0 {
        return Grids::default();
    }
    let width = kernel.width;
    let grid = |entry: &'static str, blocks: usize, threads: u32, shared: usize, words: &[Word]| Grid {
        shared: shared as u32,
        ..Grid::new(entry, blocks, threads, words.to_vec())
    };
    let one = words(kernel, shape, args, 1);
    let (list, workspace) = match variant {
        ForwardVariant::Plain => {
            let blocks = batch * heads * queries.div_ceil(PLAIN_QUERIES);
            (vec![grid("attention_plain", blocks, PLAIN_THREADS, 0, &one)], 0)
        }
        ForwardVariant::Hopper(groups) => {
            let list = vec![groups.grid(kernel, shape, args, target.processors)];
            return Grids { list, persistent: groups.persistent(), ..Grids::default() };
        }
        ForwardVariant::Tensor(tiles) => {
            let blocks = batch * heads * queries.div_ceil(tiles.queries());
            let threads = 32 * tiles.warps as u32;
            (vec![grid("attention_tensor", blocks, threads, tiles.shared(width), &one)], 0)
        }
        &ForwardVariant::Decode { rows, .. } => {
            let group = kernel.group.max(1);
            let units = batch * (heads / group) * (group * queries).div_ceil(rows);
            let most = shape.keys.div_ceil(RANGE).clamp(1, MAX_RANGES);
            let ranges = even_ranges(units, most, DECODE_BLOCKS * target.processors);
            let waits = target.arch.has_dependent_grids();
            let waiting = |grid: Grid| Grid { waits, ..grid };
            let joined = clustered(ranges, shape.keys, rows * (width + 2) * 4).filter(|_| target.arch.has_clusters());
            let ranges = joined.map_or(ranges, |(cluster, _)| cluster);
            let mut words = words(kernel, shape, args, ranges);
            words.push(unwritten_positions(kernel, args));
            if let Some((cluster, shared)) = joined {
                // No place in the workspace tells the kernel to join.
                words[PARTS_AT..PARTS_AT + 2].fill(Word::Number(0));
                let decode = grid("attention_decode", units * ranges, DECODE_THREADS, shared, &words);
                (vec![waiting(Grid { cluster: cluster as u32, ..decode })], 0)
            } else {
                let mut list = vec![waiting(grid("attention_decode", units * ranges, DECODE_THREADS, 0, &words))];
                if ranges > 1 {
                    let blocks = all_rows.div_ceil(COMBINE_ROWS);
                    list.push(waiting(grid("attention_combine", blocks, DECODE_THREADS, 0, &words)));
                }
                (list, if ranges > 1 { all_rows * ranges * (width + 2) * 4 } else { 0 })
            }
        }
        ForwardVariant::Scores(scores) => {
            let blocks = batch * heads * queries.div_ceil(scores.queries());
            (vec![grid(scores.entry(), blocks, scores.threads(), scores.shared(width), &one)], 0)
        }
    };
    Grids { list, workspace, ..Grids::default() }
}

/// Ranges of keys of each of so many units: the fewest that keep nine tenths of the places for blocks busy until the end, else
/// those that keep most of them busy.
pub(super) fn even_ranges(units: usize, most: usize, places: usize) -> usize {
    let busy = |ranges: usize| (units * ranges) as f64 / (units * ranges).next_multiple_of(places.max(1)) as f64;
    let best = (1..=most).fold(1, |best, ranges| if busy(ranges) > busy(best) { ranges } else { best });
    (1..=most).find(|&ranges| busy(ranges) >= 0.9).unwrap_or(best)
}

/// Blocks of a cluster that joins so many ranges of some keys, each of so many bytes, and its shared memory; none where a second grid
/// should. Half as many ranges, each twice as long, cost less than that grid where they are short.
pub(super) fn clustered(ranges: usize, keys: usize, bytes: usize) -> Option<(usize, usize)> {
    let cluster = ranges.min(JOINED_RANGES);
    let halved = ranges <= 2 * JOINED_RANGES && keys.div_ceil(cluster) <= JOINED_KEYS;
    (ranges > 1 && (ranges == cluster || halved) && cluster * bytes <= JOINED_BYTES)
        .then_some((cluster, cluster * bytes))
}
