//! Attention on CUDA: four kernels of one contract, that of [`kernels::attention`](super). The gradient is in [`backward`],
//! probabilities that are stored in [`scores`], row work in the same launch in [`rows`].
//!
//! - `hopper.cu`: heads of 64 and 128 in 16-bit storage, on the matrix units and copy engines that only Hopper has.
//! - `tensor.cu`: 16-bit storage of one type on the matrix units, where rows lie at multiples of 16 bytes.
//! - `decode.cu`: few queries over many keys, in ranges of keys that a cluster or a second grid joins.
//! - `plain.cu`: all the rest.
//!
//! Sizes and strides are launch data: a kernel is compiled once for a width, a storage type, a mask and dropout. A hidden key
//! is not seen, but where another query of the same tile sees it: then 0 times a value that is not finite is NaN.

pub mod backward;
pub mod block;
mod hopper;
mod hopper_norm;
pub mod rows;
pub mod scores;

use std::fmt;

use deuteron_graph::{Dtype, keep_threshold};

use crate::attention::{
    AttentionKernel, AttentionMask, AttentionOperand, AttentionResult, AttentionShape, DropoutRule, HeadStrides,
};
use crate::cuda::{CLUSTER, CudaSource, CudaTarget, DEPENDENT, Family, Grid, Grids, PHILOX, Word};
use crate::kernels::ladder::attention::Written;
use crate::source::{Geometry, Launch};

pub use hopper::Groups;
pub use hopper_norm::{Meeting, Projection};
use scores::Scores;

/// Up to this many queries attention is decoded: a tile of queries would be mostly empty.
const DECODE_QUERIES: usize = 8;
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
/// Queries of a block, as in `plain.cu`.
const PLAIN_QUERIES: usize = 64;
/// Threads of a block, as in `plain.cu`.
const PLAIN_THREADS: u32 = 256;
/// Positions are 32-bit numbers on the device, with room for a tile beyond the last.
const MAX_POSITIONS: usize = 1 << 30;

/// The instructions that only Hopper has.
const HOPPER: &str = include_str!("hopper_instructions.cuh");
/// Attention of a tile by them.
const HOPPER_ATTEND: &str = include_str!("hopper_attend.cuh");

/// Attention and the kernel that does it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CudaAttention {
    /// what is computed
    pub kernel: AttentionKernel,
    /// by which kernel
    pub way: Way,
}

/// The kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
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
    /// a rung of the ladder, never chosen by itself
    Written(Written),
}

/// How a block of `tensor.cu` or of `scores.cu` is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// warps of a block
    pub warps: usize,
    /// sixteens of queries of a warp
    pub atoms: usize,
    /// keys of a tile; in `tensor.cu` twice as many are at least the queries of a block
    pub keys: usize,
    /// blocks of a multiprocessor that registers are left for
    pub blocks: usize,
}

impl Tiles {
    /// Two sixteens of queries a warp halve what is read of shared memory for a product, and cost registers: for narrow heads,
    /// and where tiles of half the height are not needed to fill the machine. Nothing spills up to a width of 128.
    pub(crate) fn new(kernel: &AttentionKernel, shape: &AttentionShape, processors: usize) -> Tiles {
        let tall = shape.batch * shape.heads * shape.queries.div_ceil(128);
        let many = shape.queries > 64 && tall >= 2 * processors;
        let plain = kernel.dropout.is_none() && !matches!(kernel.mask, AttentionMask::Additive(_));
        match kernel.width {
            0..=64 if many && plain => Tiles { warps: 4, atoms: 2, keys: 64, blocks: 2 },
            0..=64 => Tiles { warps: 4, atoms: 1, keys: 64, blocks: 2 },
            65..=128 if plain => Tiles { warps: 4, atoms: 1, keys: 64, blocks: 2 },
            65..=128 => Tiles { warps: 4, atoms: 1, keys: 32, blocks: 2 },
            _ => Tiles { warps: 4, atoms: 1, keys: 32, blocks: 1 },
        }
    }

    /// Queries of a block.
    pub fn queries(&self) -> usize {
        self.warps * self.atoms * 16
    }

    fn constants(&self) -> String {
        let Tiles { warps, atoms, keys, blocks } = self;
        format!(
            "constexpr int WARPS = {warps};\nconstexpr int ATOMS = {atoms};\nconstexpr int KEYS = {keys};\n\
             constexpr int BLOCKS = {blocks};\n"
        )
    }

    /// Bytes of shared memory: two stages of keys and values; wide queries stay beside them.
    pub fn shared(&self, width: usize) -> usize {
        let row = (width + 8) * 2;
        let held = if width <= 128 { 0 } else { self.queries() };
        (4 * self.keys + held) * row
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::Plain => write!(f, "{PLAIN_QUERIES} queries by 64 keys, f32 arithmetic"),
            Way::Hopper(groups) => write!(f, "{} queries by {} keys by warpgroups", groups.queries(), groups.keys),
            Way::Tensor(tiles) => write!(f, "{} queries by {} keys on matrix units", tiles.queries(), tiles.keys),
            Way::Decode { rows: 1, .. } => f.write_str("ranges of keys, a row a block"),
            Way::Decode { rows, .. } => write!(f, "ranges of keys, {rows} rows a block"),
            Way::Scores(scores) => scores.fmt(f),
            Way::Written(written) => f.write_str(written.name),
        }
    }
}

/// Why CUDA does not take attention that the contract allows, if so.
pub fn refusal(kernel: &AttentionKernel, shape: &AttentionShape) -> Option<&'static str> {
    match () {
        () if shape.queries > MAX_POSITIONS || shape.keys > MAX_POSITIONS => Some("expected at most 2^30 positions"),
        () if !kernel.scale.is_finite() => Some("expected a finite scale"),
        () => None,
    }
}

/// The kernel for a launch.
pub fn render(kernel: AttentionKernel, launch: &Launch, target: &CudaTarget) -> CudaSource {
    let way = match &launch.geometry {
        Geometry::Attention(shape) => choose(&kernel, shape, launch, target),
        _ => Way::Plain,
    };
    source(CudaAttention { kernel, way })
}

fn choose(kernel: &AttentionKernel, shape: &AttentionShape, launch: &Launch, target: &CudaTarget) -> Way {
    if kernel.result == AttentionResult::Probabilities {
        return Way::Scores(Scores::new(kernel, shape, launch, target));
    }
    let vector = is_aligned(kernel, shape, launch);
    if shape.queries <= DECODE_QUERIES {
        let rows = (kernel.group * shape.queries).next_power_of_two().clamp(1, DECODE_ROWS);
        return Way::Decode { rows, vector };
    }
    let narrow = matches!(kernel.dtype, Dtype::F16 | Dtype::Bf16) && kernel.kv == kernel.dtype;
    if narrow
        && vector
        && let Some(groups) = Groups::new(kernel, shape, target)
    {
        return Way::Hopper(groups);
    }
    if narrow && vector && kernel.width.is_multiple_of(16) && target.arch.is_ampere() {
        return Way::Tensor(Tiles::new(kernel, shape, target.processors));
    }
    Way::Plain
}

/// Whether every row of queries, keys, values and result starts at a multiple of 16 bytes and ends at one.
fn is_aligned(kernel: &AttentionKernel, shape: &AttentionShape, launch: &Launch) -> bool {
    let whole = |dtype: Dtype| (kernel.width * dtype.bytes()).is_multiple_of(16);
    let rows = [AttentionOperand::Q, AttentionOperand::K, AttentionOperand::V, AttentionOperand::O];
    let start = |&operand: &AttentionOperand| rows_start_at(kernel, shape, launch, operand, 16);
    whole(kernel.dtype) && whole(kernel.kv) && rows.iter().all(start)
}

/// Whether every row of an operand starts at a multiple of so many bytes; so it is for an operand that there is not.
fn rows_start_at(
    kernel: &AttentionKernel,
    shape: &AttentionShape,
    launch: &Launch,
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
    };
    let whole = |elements: usize| (elements * kernel.operand_dtype(operand).bytes()).is_multiple_of(bytes);
    let steps = [strides.batch, strides.head, strides.position];
    let offset = launch.args.get(position).map_or(0, |arg| arg.offset);
    whole(offset) && sizes.iter().zip(steps).all(|(&size, step)| size <= 1 || whole(step))
}

/// The text of a kernel.
pub fn source(attention: CudaAttention) -> CudaSource {
    let (name, constants, own) = match attention.way {
        Way::Plain => ("attention", String::new(), plain_text(NOTHING)),
        Way::Hopper(groups) => {
            let own = [HOPPER, include_str!("hopper.cuh"), HOPPER_ATTEND, include_str!("hopper.cu")].join("\n");
            ("attention_hopper", groups.constants(groups.shared(attention.kernel.width)), own)
        }
        Way::Tensor(tiles) => ("attention_tensor", tiles.constants(), tensor_text(NOTHING)),
        Way::Decode { rows, vector } => {
            let constants = format!("constexpr int ROWS = {rows};\nconstexpr bool VECTOR = {vector};\n");
            ("attention_decode", constants, [DEPENDENT, CLUSTER, include_str!("decode.cu")].join("\n"))
        }
        Way::Scores(scores) => ("attention_scores", scores.constants(), scores.text()),
        Way::Written(written) => (written.name, String::new(), written.text()),
    };
    let text = text(&attention.kernel, &constants, &own);
    CudaSource { name: name.into(), text, family: Family::Attention(attention) }
}

/// What all kernels share, with the constants before it and the kernel's own text behind it.
fn text(kernel: &AttentionKernel, constants: &str, own: &str) -> String {
    let shared = [PHILOX, include_str!("instructions.cuh"), include_str!("common.cuh")].join("\n");
    format!("{}{constants}\n{shared}\n{own}", prelude(kernel))
}

/// What follows attention where nothing does.
const NOTHING: &str = include_str!("no_rows.cuh");

/// The kernel in f32 arithmetic, and what follows it.
fn plain_text(follows: &str) -> String {
    [include_str!("plain.cuh"), follows, include_str!("plain.cu")].join("\n")
}

/// The kernel on the matrix units, and what follows it.
fn tensor_text(follows: &str) -> String {
    [include_str!("tensor.cuh"), follows, include_str!("tensor.cu")].join("\n")
}

/// The constants of all kernels.
fn prelude(kernel: &AttentionKernel) -> String {
    let storage = |dtype: Dtype| match dtype {
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
        _ => 0,
    };
    let (mask, mask_storage) = match kernel.mask {
        AttentionMask::Full => (0, 0),
        AttentionMask::Causal => (1, 0),
        AttentionMask::Additive(dtype) => (2, storage(dtype)),
        AttentionMask::Cached => (3, 0),
    };
    let DropoutRule { probability, offset } = kernel.dropout.unwrap_or(DropoutRule { probability: 0.0, offset: 0 });
    let threshold = keep_threshold(probability);
    let kept = if probability < 1.0 { (1.0 / (1.0 - probability)) as f32 } else { 0.0 };
    format!(
        "constexpr int STORAGE = {};\nconstexpr int KV_STORAGE = {};\nconstexpr int MASK_STORAGE = {mask_storage};\nconstexpr int WIDTH = {};\n\
         constexpr float SCALE = {:e}f;\nconstexpr int MASK = {mask};\nconstexpr bool DROPOUT = {};\n\
         constexpr unsigned THRESHOLD = {threshold}u;\nconstexpr unsigned OFFSET = {offset}u;\n\
         constexpr float KEPT = {kept:e}f;\n",
        storage(kernel.dtype),
        storage(kernel.kv),
        kernel.width,
        kernel.scale,
        kernel.dropout.is_some(),
    )
}

/// The grids of a launch; none where there is nothing to write.
pub(crate) fn grids(attention: &CudaAttention, launch: &Launch, target: &CudaTarget) -> Grids {
    let Geometry::Attention(shape) = &launch.geometry else { return Grids::default() };
    let &AttentionShape { batch, heads, queries, .. } = shape;
    let all_rows = batch * heads * queries;
    if all_rows == 0 {
        return Grids::default();
    }
    let width = attention.kernel.width;
    let grid = |entry: &'static str, blocks: usize, threads: u32, shared: usize, words: &[Word]| {
        let (blocks, shared, words) = ([blocks as u32, 1, 1], shared as u32, words.to_vec());
        Grid { entry, blocks, threads, cluster: 1, shared, waits: false, words }
    };
    let one = words(&attention.kernel, shape, launch, 1);
    let (list, workspace) = match attention.way {
        Way::Plain => {
            let blocks = batch * heads * queries.div_ceil(PLAIN_QUERIES);
            (vec![grid("attention_plain", blocks, PLAIN_THREADS, 0, &one)], 0)
        }
        Way::Hopper(groups) => (vec![groups.grid(&attention.kernel, shape, launch, target.processors)], 0),
        Way::Tensor(tiles) => {
            let blocks = batch * heads * queries.div_ceil(tiles.queries());
            let threads = 32 * tiles.warps as u32;
            (vec![grid("attention_tensor", blocks, threads, tiles.shared(width), &one)], 0)
        }
        Way::Decode { rows, .. } => {
            let group = attention.kernel.group.max(1);
            let units = batch * (heads / group) * (group * queries).div_ceil(rows);
            let most = shape.keys.div_ceil(RANGE).clamp(1, MAX_RANGES);
            let ranges = even_ranges(units, most, DECODE_BLOCKS * target.processors);
            let waits = target.arch.has_dependent_grids();
            let waiting = |grid: Grid| Grid { waits, ..grid };
            let joined = clustered(ranges, shape.keys, rows * (width + 2) * 4).filter(|_| target.arch.has_clusters());
            let ranges = joined.map_or(ranges, |(cluster, _)| cluster);
            let mut words = words(&attention.kernel, shape, launch, ranges);
            words.push(given_positions(&attention.kernel, launch));
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
        Way::Scores(scores) => {
            let blocks = batch * heads * queries.div_ceil(scores.queries());
            (vec![grid(scores.entry(), blocks, scores.threads(), scores.shared(width), &one)], 0)
        }
        Way::Written(written) => return written.grids(shape, launch),
    };
    Grids { list, workspace, ..Grids::default() }
}

/// Ranges of keys of each of so many units: the fewest that keep nine tenths of the places for blocks busy until the end, else
/// those that keep most of them busy.
fn even_ranges(units: usize, most: usize, places: usize) -> usize {
    let busy = |ranges: usize| (units * ranges) as f64 / (units * ranges).next_multiple_of(places.max(1)) as f64;
    let best = (1..=most).fold(1, |best, ranges| if busy(ranges) > busy(best) { ranges } else { best });
    (1..=most).find(|&ranges| busy(ranges) >= 0.9).unwrap_or(best)
}

/// Blocks of a cluster that joins so many ranges of some keys, each of so many bytes, and its shared memory; none where a second grid
/// should. Half as many ranges, each twice as long, cost less than that grid where they are short.
fn clustered(ranges: usize, keys: usize, bytes: usize) -> Option<(usize, usize)> {
    let cluster = ranges.min(JOINED_RANGES);
    let halved = ranges <= 2 * JOINED_RANGES && keys.div_ceil(cluster) <= JOINED_KEYS;
    (ranges > 1 && (ranges == cluster || halved) && cluster * bytes <= JOINED_BYTES)
        .then_some((cluster, cluster * bytes))
}

/// The positions, if no kernel of the job makes them.
fn given_positions(kernel: &AttentionKernel, launch: &Launch) -> Word {
    let position = kernel.operands().iter().position(|&operand| operand == AttentionOperand::Positions);
    let offset = |position: usize| launch.args.get(position).map_or(0, |arg| arg.offset * Dtype::I32.bytes());
    position.map_or(Word::Number(0), |position| Word::Given { position, offset: offset(position) })
}

/// Where the parameter has the address of the result.
const RESULT_AT: usize = 6;

/// What is said to be waited for, in meetings of all blocks, by one launch that is far slower than its kernels, which the price of attention
/// does not know: so much that no search takes it.
const SLOWER: f64 = 1e4;
/// Where the parameter has the places of ranges in the workspace.
const PARTS_AT: usize = 7;

/// The parameter, as `common.cuh` lists it.
fn words(kernel: &AttentionKernel, shape: &AttentionShape, launch: &Launch, ranges: usize) -> Vec<Word> {
    use AttentionOperand::{K, Mask, O, Positions, Q, Seed, V};
    let number = |value: usize| Word::Number(value as u64);
    let argument = |operand: AttentionOperand| {
        let position = kernel.operands().iter().position(|&known| known == operand);
        position.map_or(Word::Number(0), |position| {
            let offset = launch.args.get(position).map_or(0, |arg| arg.offset);
            Word::Argument { position, offset: offset * kernel.operand_dtype(operand).bytes() }
        })
    };
    let mut words = [Q, K, V, Mask, Seed, Positions, O].map(argument).to_vec();
    let sums = shape.batch * shape.heads * shape.queries * ranges * 2 * 4;
    let places = [Word::Workspace(0), Word::Workspace(sums)];
    words.extend(if ranges > 1 { places } else { [Word::Number(0); 2] });
    let &AttentionShape { batch, heads, queries, keys, q, k, v, mask, o } = shape;
    words.extend([batch, heads, kernel.group.max(1), queries, keys, ranges].map(number));
    let strides = [q, k, v, mask, o].map(|HeadStrides { batch, head, position }| [batch, head, position]);
    words.extend(strides.into_iter().flatten().map(number));
    words
}

#[cfg(test)]
mod tests;
