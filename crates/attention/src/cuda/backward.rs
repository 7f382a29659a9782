//! The gradient of attention on CUDA: three pairs of kernels that compute scores again, of one contract.
//!
//! - `hopper_dq.cu` and `hopper_dkv.cu`, or `hopper_dkv_wide.cu` of heads of more than 128: 16-bit storage, on the matrix units and copy engines that
//!   only Hopper has. They alone sum the gradients of keys and values over heads that share them, where the graph does: elsewhere every
//!   head has its own, and sums are kernels of their own.
//! - `backward.cu`: 16-bit storage on the matrix units, where rows lie at multiples of 16 bytes.
//! - `backward_plain.cu`: all the rest.
//!
//! The first grid leaves two numbers per row of queries, logsumexp and delta, for the second; beside a mask that is added also 1 over the sum of the
//! row's exponentials, since a logsumexp of about -1e9 has no digits for it. Blocks of queries go over the keys twice:
//! logsumexp and delta of each row, then dq; blocks of keys go over the queries once for dk and dv. Nine matmuls instead of seven buy a
//! fixed summation order. Delta is summed over the terms that it is subtracted from, not over a rounded result; in f32 it is counted from
//! the slope of the largest score, so that little cancels where one key has all the weight. Heads of up to 80 go over the keys once on Hopper:
//! what is left of delta is subtracted at the end, from a second sum.

use std::fmt;

use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_graph::Dtype;
use deuteron_plan::{Class, Draft, LANES, Work, primitive_work};

use super::forward::refusal;
use super::hopper::{self, MappedRows};
use super::text::{HOPPER, PLAIN, TENSOR, text};
use super::tiles::{PLAIN_QUERIES, PLAIN_THREADS};
use super::time::{WITHOUT_WARPGROUPS, gradient_us};
use super::words::{is_aligned, words};
use crate::backward::{self, GradientPlace, LoweredBackward};
use crate::chain::{self, Fit};
use crate::kernel::{AttentionKernel, AttentionMask, AttentionOperand, AttentionShape};

/// Queries, and keys, from which the matrix units are used: a tile of fewer would be mostly empty, and what is rounded for them
/// does not average out over a few.
const MANY: usize = 16;
/// Bytes of logsumexp and delta of a row.
const STATISTICS: usize = 8;
/// Bytes of 1 over the sum of a row, which `backward.cu` keeps beside them where masks are added.
const FACTOR: usize = 4;
/// The same as both, as `backward_plain.cu` keeps them.
const PLAIN_STATISTICS: usize = 16;
/// Rows of queries that a block of `hopper_backward.cuh` owns, and of the other side in a tile.
const HOPPER_ROWS: usize = 128;
const HOPPER_TILE: usize = 64;
/// Threads of such a block: two warpgroups multiply, one fetches.
const HOPPER_THREADS: u32 = 384;

/// Head widths up to which `hopper_dq.cu` goes over the keys once.
const ONCE: usize = 80;
/// Head widths up to which a block makes all columns of gradients of keys and values.
const NARROW: usize = 128;
/// Parts of the columns of wider heads.
const PARTS: usize = 2;

/// The gradient of attention on a GPU.
pub struct BackwardFamily;

impl Family<CudaTarget> for BackwardFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let Some(Fit::Gradient(fit)) = chain::fit(&group) else { return None };
        let fit = *fit;
        let (sized, shape) = (fit.kernel, fit.shape);
        if refusal(&sized, &shape).is_some() {
            return None;
        }
        let takes_groups = || choose(&backward::lower(&group, &fit), target) == BackwardVariant::Hopper;
        if sized.group > 1 && !takes_groups() {
            return None;
        }
        offered(
            move || work(&group, &choose(&backward::lower(&group, &fit), target), &sized, &shape, target),
            move || kernel(&backward::lower(&group, &fit), target),
        )
    }
}

/// The work of kernels that compute scores again, from that of the operations. Other numbers of a pair of a query and a key are computed
/// again with them; only those that cost much are counted.
fn work(
    group: &Draft,
    variant: &BackwardVariant,
    kernel: &AttentionKernel,
    shape: &AttentionShape,
    target: &CudaTarget,
) -> Work {
    let mut work = primitive_work(group);
    let heads = shape.batch * shape.heads;
    let pairs = (heads * shape.queries * shape.keys) as f64;
    let count = products(kernel, variant);
    let products = count as f64;
    work.matrix_flops = 2.0 * products * pairs * kernel.width as f64;
    work.padded_flops = work.matrix_flops;
    work.products = products * heads as f64;
    let slower = match variant {
        BackwardVariant::Hopper => Some(1.0),
        BackwardVariant::Tensor(_) if target.arch.has_wgmma() => Some(WITHOUT_WARPGROUPS),
        BackwardVariant::Tensor(_) | BackwardVariant::Plain => None,
    };
    work.microseconds = slower.map(|factor| factor * gradient_us(count, HOPPER_ROWS, kernel, shape, target.processors));
    work.add(Class::Exp, 2.0 * pairs / LANES as f64);
    if kernel.dropout.is_some() {
        work.add(Class::Random, 2.0 * pairs / LANES as f64);
    }
    work
}

/// The kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackwardVariant {
    /// `backward_plain.cu`
    Plain,
    /// `hopper_dq.cu` and `hopper_dkv.cu`
    Hopper,
    /// `backward.cu`
    Tensor(BackwardTiles),
}

/// How blocks of `backward.cu` are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackwardTiles {
    /// of the kernel whose blocks own queries
    pub queries: SideTiles,
    /// of the kernel whose blocks own keys
    pub keys: SideTiles,
    /// parts of the columns of gradients of keys and values, a block each
    pub parts: usize,
}

/// How a block of one of the kernels is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SideTiles {
    /// warps of a block
    pub warps: usize,
    /// sixteens of rows that a warp owns
    pub atoms: usize,
    /// rows of the other side in a tile
    pub tile: usize,
    /// of them those that are worked on at a time
    pub inner: usize,
    /// blocks of a multiprocessor that registers are left for
    pub blocks: usize,
    /// whether what a warp owns stays in registers
    pub held: bool,
}

/// Products with a number for each pair of a query and a key. Scores and slopes of probabilities are made three times: for the
/// statistics, for the gradient of queries, and for those of keys and values, there again for each part of the columns. Then
/// the three gradients. Narrow heads by warpgroups have the first two at once, with one more sum.
pub fn products(kernel: &AttentionKernel, variant: &BackwardVariant) -> usize {
    match variant {
        BackwardVariant::Hopper if kernel.width <= ONCE => 2 + 2 + 2 + 2,
        BackwardVariant::Hopper | BackwardVariant::Plain => 2 + 2 + 2 + 3,
        BackwardVariant::Tensor(tiles) => 2 + 2 + 2 * tiles.parts + 3,
    }
}

impl SideTiles {
    /// Rows that a block owns.
    pub fn rows(&self) -> usize {
        self.warps * self.atoms * 16
    }

    /// Bytes of shared memory for rows: two tensors of what is owned, and of two stages of the other side.
    fn shared(&self, width: usize) -> usize {
        (2 * self.rows() + 4 * self.tile) * (width + 8) * 2
    }
}

impl BackwardTiles {
    /// As for attention, two sixteens of rows a warp halve what is read of shared memory for a product. Of keys and values
    /// there are then no registers to hold them, but twice as many queries at a time.
    fn new(kernel: &AttentionKernel, shape: &AttentionShape, processors: usize) -> BackwardTiles {
        let plain = kernel.dropout.is_none() && !matches!(kernel.mask, AttentionMask::Additive(_));
        let heads = shape.batch * shape.heads;
        let many = |rows: usize| rows > 64 && heads * rows.div_ceil(128) >= 2 * processors && plain;
        let low = SideTiles { warps: 4, atoms: 1, tile: 64, inner: 32, blocks: 2, held: true };
        let inner = if plain { 32 } else { 16 };
        let (queries, keys, parts) = match kernel.width {
            0..=64 => {
                let queries = SideTiles { atoms: 2, inner: 16, ..low };
                let keys = SideTiles { atoms: 2, held: false, ..low };
                (if many(shape.queries) { queries } else { low }, if many(shape.keys) { keys } else { low }, 1)
            }
            65..=NARROW => {
                let queries = SideTiles { tile: 32, inner, ..low };
                (queries, SideTiles { held: false, ..queries }, 1)
            }
            _ => {
                let queries = SideTiles { tile: 16, inner: 16, blocks: 1, held: false, ..low };
                (queries, SideTiles { warps: 2, ..queries }, PARTS)
            }
        };
        BackwardTiles { queries, keys, parts }
    }

    /// Bytes of shared memory of a block that owns queries, and of one that owns keys.
    pub fn shared(&self, width: usize) -> [usize; 2] {
        [self.queries.shared(width), self.keys.shared(width) + 2 * self.keys.tile * STATISTICS]
    }
}

/// How a block of one of the kernels of `hopper_backward.cuh` is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HopperSide {
    /// rows that it owns
    rows: usize,
    /// tiles of the other side in shared memory: of keys and of values, or of queries and of slopes
    stages: [usize; 2],
    /// bytes of shared memory beside rows, statistics and barriers
    more: usize,
}

impl HopperSide {
    /// Of the kernel whose blocks own queries, and of the one whose blocks own keys. Stages are those that shared memory has room for.
    fn both(width: usize) -> [HopperSide; 2] {
        let side = |rows, stages, more| HopperSide { rows, stages, more };
        if width <= NARROW {
            return [side(HOPPER_ROWS, [4, 4], 0); 2];
        }
        // Probabilities of two tiles, from one warpgroup to the other, and their barriers.
        let exchange = 2 * HOPPER_TILE * 64 * 4 + 4 * 8;
        let (of_queries, of_keys) = if hopper::padded(width) <= 192 { ([3, 2], [3, 3]) } else { ([2, 1], [2, 2]) };
        [side(HOPPER_ROWS, of_queries, 0), side(64, of_keys, exchange)]
    }

    /// Bytes of shared memory: what a block owns, the ring, statistics, barriers, what the start is moved by to be a multiple of 1024.
    fn shared(&self, width: usize) -> usize {
        let HopperSide { rows, stages: [first, second], more } = *self;
        let row = hopper::padded(width) * 2;
        // Narrow results have a place of their own on their way out. Tiles of both tensors have one barrier unless heads are wide.
        let owned = if width <= 64 { 4 } else { 2 } * rows * row;
        let barriers = if width <= NARROW { first } else { first + second };
        let ring = (first + second) * HOPPER_TILE * row + first * HOPPER_TILE * STATISTICS;
        owned + ring + more + (2 * barriers + 2) * 8 + 1024
    }
}

impl fmt::Display for BackwardVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackwardVariant::Plain => write!(f, "{PLAIN_QUERIES} queries by 64 keys, f32 arithmetic"),
            BackwardVariant::Hopper => {
                write!(f, "{HOPPER_ROWS} queries a block, then keys, by warpgroups")
            }
            BackwardVariant::Tensor(BackwardTiles { queries, keys, .. }) => {
                write!(f, "{} queries, then {} keys a block, on matrix units", queries.rows(), keys.rows())
            }
        }
    }
}

/// The kernels of a gradient.
pub fn kernel(gradient: &LoweredBackward, target: &CudaTarget) -> Kernel {
    with_variant(gradient, &choose(gradient, target), target)
}

/// The kernels of a gradient by a variant that takes it.
pub fn with_variant(gradient: &LoweredBackward, variant: &BackwardVariant, target: &CudaTarget) -> Kernel {
    let launch = Launch::of_grids(gradient.arguments(), grids(gradient, variant, target))
        .with_variant(variant.to_string(), String::new());
    Kernel::new(Source::Cuda(source(&gradient.kernel, variant)), launch)
}

/// Whether the matrix units take it.
fn is_narrow(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16)
}

/// The variant for a gradient. Heads that are summed are for warpgroups alone: a family offers no others.
pub fn choose(gradient: &LoweredBackward, target: &CudaTarget) -> BackwardVariant {
    let LoweredBackward { kernel, shape, args, .. } = gradient;
    let many = shape.queries.min(shape.keys) >= MANY;
    // Gradients of wide keys and values are made in two halves of whole sixteens.
    let whole = kernel.width.is_multiple_of(if kernel.width > NARROW { 32 } else { 16 });
    let aligned = is_aligned(kernel, shape, args) && gradient.gradients_start_at(16);
    if many && aligned && takes_hopper(kernel, shape, target) {
        return BackwardVariant::Hopper;
    }
    if is_narrow(kernel.dtype) && many && whole && target.arch.is_ampere() && aligned {
        return BackwardVariant::Tensor(BackwardTiles::new(kernel, shape, target.processors));
    }
    BackwardVariant::Plain
}

fn takes_hopper(kernel: &AttentionKernel, shape: &AttentionShape, target: &CudaTarget) -> bool {
    hopper::fits(kernel, shape, target, HOPPER_TILE, &mapped_rows(kernel, shape))
}

/// The rows that `hopper_backward.cuh` has maps of, as it lists them.
fn mapped_rows(kernel: &AttentionKernel, shape: &AttentionShape) -> [MappedRows; 4] {
    use AttentionOperand::{K, O, Q, V};
    let &AttentionShape { batch, heads, queries, keys, q, k, v, o, .. } = shape;
    let key_heads = heads / kernel.group.max(1);
    let rows = |operand, strides, heads, positions| MappedRows { operand, strides, batch, heads, positions };
    // The gradient that comes in stands where attention has its result.
    [rows(Q, q, heads, queries), rows(O, o, heads, queries), rows(K, k, key_heads, keys), rows(V, v, key_heads, keys)]
}

/// The text of the kernels.
fn source(kernel: &AttentionKernel, variant: &BackwardVariant) -> CudaSource {
    let (parts, own) = match variant {
        BackwardVariant::Plain => {
            let own = [include_str!("plain.cuh"), include_str!("backward.cuh"), include_str!("backward_plain.cu")];
            (PLAIN, own.join("\n"))
        }
        BackwardVariant::Hopper => {
            let common =
                [include_str!("hopper.cuh"), include_str!("backward.cuh"), include_str!("hopper_backward.cuh")];
            let of_keys =
                if kernel.width <= NARROW { include_str!("hopper_dkv.cu") } else { include_str!("hopper_dkv_wide.cu") };
            let own = [include_str!("hopper_dq.cu"), include_str!("hopper_keys.cuh"), of_keys];
            (HOPPER, [&[hopper_constants(kernel.width).as_str()], &common[..], &own].concat().join("\n"))
        }
        BackwardVariant::Tensor(tiles) => {
            let common = [include_str!("tensor.cuh"), include_str!("backward.cuh")];
            (TENSOR, [&[constants(tiles).as_str()], &common[..], &[include_str!("backward.cu")]].concat().join("\n"))
        }
    };
    CudaSource::new("attention_backward", text(kernel, "", parts, &own))
}

fn hopper_constants(width: usize) -> String {
    let [queries, keys] = HopperSide::both(width);
    let of_side = |side: &str, [first, second]: [&str; 2], cut: HopperSide| {
        let ([firsts, seconds], shared) = (cut.stages, cut.shared(width));
        format!(
            "constexpr int {first}_STAGES = {firsts};\nconstexpr int {second}_STAGES = {seconds};\nconstexpr int {side}_SHARED = {shared};\n"
        )
    };
    of_side("QUERIES", ["KEY", "VALUE"], queries) + &of_side("KEYS", ["QUERY", "SLOPE"], keys)
}

fn constants(tiles: &BackwardTiles) -> String {
    let of_side = |side: char, other: &str, tiles: SideTiles| {
        let SideTiles { warps, atoms, tile, inner, blocks, held } = tiles;
        format!(
            "constexpr int {side}_WARPS = {warps};\nconstexpr int {side}_ATOMS = {atoms};\nconstexpr int {side}_{other} = {tile};\n\
             constexpr int {side}_INNER = {inner};\nconstexpr int {side}_BLOCKS = {blocks};\nconstexpr bool {side}_HELD = {held};\n"
        )
    };
    let (queries, keys) = (of_side('Q', "KEYS", tiles.queries), of_side('K', "QUERIES", tiles.keys));
    format!("{queries}{keys}constexpr int PARTS = {};\n", tiles.parts)
}

/// The grids of a launch; none where there is nothing to write.
fn grids(gradient: &LoweredBackward, variant: &BackwardVariant, target: &CudaTarget) -> Grids {
    let LoweredBackward { kernel, shape, .. } = gradient;
    let heads = shape.batch * shape.heads;
    let grid = |entry, blocks: usize, threads, shared: usize, words: Vec<Word>| Grid {
        shared: shared as u32,
        ..Grid::new(entry, blocks, threads, words)
    };
    let words = backward_words(gradient);
    let sides = [("backward_queries", shape.queries), ("backward_keys", shape.keys)];
    let (mut queries, mut statistics) = (shape.queries, STATISTICS);
    let list = match variant {
        BackwardVariant::Plain => {
            statistics = PLAIN_STATISTICS;
            sides.map(|(entry, positions)| {
                grid(entry, heads * positions.div_ceil(PLAIN_QUERIES), PLAIN_THREADS, 0, words.clone())
            })
        }
        BackwardVariant::Hopper => {
            queries = queries.next_multiple_of(HOPPER_ROWS);
            let [of_queries, of_keys] = HopperSide::both(kernel.width);
            sides.map(|(entry, positions)| {
                let owns_queries = entry == "backward_queries";
                let (owned, side) =
                    if owns_queries { (heads, of_queries) } else { (heads / kernel.group.max(1), of_keys) };
                let blocks = (owned * positions.div_ceil(side.rows)).min(target.processors);
                let words = hopper_words(gradient, owns_queries, side.rows);
                grid(entry, blocks, HOPPER_THREADS, side.shared(kernel.width), words)
            })
        }
        BackwardVariant::Tensor(tiles) => {
            if let AttentionMask::Additive(_) = kernel.mask {
                statistics += FACTOR;
            }
            let [(of_queries, queries), (of_keys, keys)] = sides;
            let [query_bytes, key_bytes] = tiles.shared(kernel.width);
            let blocks = |side: SideTiles, positions: usize| heads * positions.div_ceil(side.rows());
            let threads = |side: SideTiles| 32 * side.warps as u32;
            let (own, other) = (tiles.queries, tiles.keys);
            [
                grid(of_queries, blocks(own, queries), threads(own), query_bytes, words.clone()),
                grid(of_keys, blocks(other, keys) * tiles.parts, threads(other), key_bytes, words),
            ]
        }
    };
    let list = list.into_iter().filter(|grid| grid.blocks[0] > 0).collect();
    Grids { list, workspace: heads * queries * statistics, ..Grids::default() }
}

/// The parameter of one of the kernels of `hopper_backward.cuh`, as it lists it.
fn hopper_words(gradient: &LoweredBackward, owns_queries: bool, owned_rows: usize) -> Vec<Word> {
    let LoweredBackward { kernel, shape, args, .. } = gradient;
    let maps = mapped_rows(kernel, shape).map(|rows| {
        let is_owned = owns_queries == matches!(rows.operand, AttentionOperand::Q | AttentionOperand::O);
        Word::Map(rows.map(kernel, args, if is_owned { owned_rows } else { HOPPER_TILE }))
    });
    let mut words: Vec<Word> = maps.into_iter().chain(backward_words(gradient)).collect();
    // What is read again and again: keys and values of a head; queries and slopes of all heads of a group.
    let group = kernel.group.max(1);
    let section = match owns_queries {
        true => hopper::section(kernel, shape),
        false => hopper::evened(shape.batch * shape.heads / group, group * shape.queries * kernel.width * 4),
    };
    words.push(Word::Number(section as u64));
    // The parameter is a multiple of a map's alignment.
    words.extend([Word::Number(0); 4]);
    words
}

/// The parameter, as `backward.cuh` lists it.
fn backward_words(gradient: &LoweredBackward) -> Vec<Word> {
    let LoweredBackward { kernel, shape, args, gradients } = gradient;
    // The gradient that comes in stands where attention has its result.
    let mut words = words(kernel, shape, args, 1);
    words.push(Word::Workspace(0));
    words.extend(gradients.map(|GradientPlace { argument, offset, .. }| Word::Argument {
        position: argument,
        offset: offset * kernel.dtype.bytes(),
    }));
    let strides = gradients.map(|place| [place.strides.batch, place.strides.head, place.strides.position]);
    words.extend(strides.into_iter().flatten().map(|stride| Word::Number(stride as u64)));
    words
}
