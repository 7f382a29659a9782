//! The rungs of attention: causal, bf16, heads of 64 that lie one after another, as many queries as keys.
//!
//! Four rungs are written for teaching, with their own parameter; the top two are the shipped kernels.

use deuteron_attention::cuda::forward::{ForwardVariant, with_variant};
use deuteron_attention::cuda::hopper::Groups;
use deuteron_attention::cuda::tiles::Tiles;
use deuteron_attention::kernel::{AttentionKernel, AttentionMask, AttentionShape, HeadStrides, LoweredAttention};
use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::cuda::arch::Arch;
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Kernel, Launch, Source};
use deuteron_codegen::tile::{self, Part};
use deuteron_graph::Dtype;

/// Features per head that the rungs support.
pub(super) const WIDTH: usize = 64;
/// Rows of a tile, as in the rungs that have tiles.
const TILE: usize = 64;
/// Blocks along the second and third axis of a grid, at most.
const MAX_BLOCKS: usize = 65_535;

/// A kernel of a ladder of attention: its text, and its launches one after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// as its file
    pub name: &'static str,
    pub(super) texts: &'static [&'static str],
    pub(super) passes: &'static [Pass],
    /// whether it has scores in memory
    pub(super) has_scores: bool,
}

/// One launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pass {
    pub entry: &'static str,
    pub threads: u32,
    /// bytes of dynamic shared memory
    pub shared: u32,
    pub over: Over,
}

/// The work of a block in a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    /// this many keys of one query and head
    Keys(usize),
    /// this many rows over all heads
    Rows(usize),
    /// a tile of queries of a head
    Tiles,
    /// a tile of queries and a tile of keys of a head
    Pairs,
    /// this many rows of heads side by side
    Tokens(usize),
    /// this many elements of the result
    Elements(usize),
}

/// Sizes that determine the launches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counts {
    /// of all sequences
    pub heads: usize,
    pub queries: usize,
    /// rows of heads side by side
    pub tokens: usize,
}

impl Counts {
    /// Elements of attention's result.
    pub fn elements(&self) -> usize {
        self.heads * self.queries * WIDTH
    }
}

pub(super) const NAIVE: Written = Written {
    name: "l1_naive",
    texts: &[include_str!("attention/l1_naive.cu")],
    passes: &[
        Pass { entry: "scores", threads: 256, shared: 0, over: Over::Keys(256) },
        Pass { entry: "softmax", threads: 256, shared: 0, over: Over::Rows(256) },
        Pass { entry: "values", threads: 256, shared: 0, over: Over::Rows(256 / WIDTH) },
    ],
    has_scores: true,
};

pub(super) const TILED: Written = Written {
    name: "l2_tiled",
    texts: &[include_str!("attention/tiles.cuh"), include_str!("attention/l2_tiled.cu")],
    passes: &[
        Pass { entry: "scores", threads: 256, shared: 0, over: Over::Pairs },
        Pass { entry: "softmax", threads: 256, shared: 0, over: Over::Rows(256 / 32) },
        Pass { entry: "values", threads: 256, shared: 0, over: Over::Tiles },
    ],
    has_scores: true,
};

pub(super) const ONLINE: Written = Written {
    name: "l3_online",
    texts: &[include_str!("attention/tiles.cuh"), include_str!("attention/l3_online.cu")],
    // Four tiles of f32, rows of four numbers more than the width.
    passes: &[Pass {
        entry: "attention",
        threads: 256,
        shared: (4 * TILE * (WIDTH + 4) * 4) as u32,
        over: Over::Tiles,
    }],
    has_scores: false,
};

pub(super) const TENSOR_CORES: Written = Written {
    name: "l4_tensor_cores",
    texts: &[include_str!("attention/l4_tensor_cores.cu")],
    passes: &[Pass { entry: "attention", threads: 128, shared: 0, over: Over::Tiles }],
    has_scores: false,
};

/// A kernel of attention as a rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// f32 arithmetic, a teaching kernel
    Plain(Written),
    /// on the tensor cores, a teaching kernel
    Matrix(Written),
    /// the shipped `tensor.cu`
    Tensor,
    /// the shipped `hopper.cu`
    Hopper,
}

impl Step {
    /// Whether a GPU has its instructions and enough shared memory.
    pub fn is_for(self, arch: Arch) -> bool {
        match self {
            Step::Plain(written) => written.fits(arch),
            Step::Matrix(written) => arch.is_ampere() && written.fits(arch),
            Step::Tensor => arch.is_ampere(),
            Step::Hopper => arch.has_wgmma(),
        }
    }

    /// Its kernel for attention, if it supports it.
    pub fn kernel(self, attention: &LoweredAttention, target: &CudaTarget) -> Option<Kernel> {
        let LoweredAttention { kernel, shape, args } = attention;
        // Rows start at multiples of 16 bytes, where those of contiguous heads do that start at one.
        if !is_written_for(kernel, shape) || args.iter().any(|arg| !arg.offset.is_multiple_of(8)) {
            return None;
        }
        let variant = match self {
            Step::Plain(written) | Step::Matrix(written) => return Some(written.kernel(attention)),
            Step::Tensor => ForwardVariant::Tensor(Tiles::new(kernel, shape, target.processors)),
            Step::Hopper => ForwardVariant::Hopper(Groups::new(kernel, shape, target)?),
        };
        Some(with_variant(attention, &variant, target))
    }

    /// The files of a teaching rung.
    pub fn texts(self) -> &'static [&'static str] {
        match self {
            Step::Plain(written) | Step::Matrix(written) => written.texts,
            Step::Tensor | Step::Hopper => &[],
        }
    }
}

/// Whether this is the attention that the rungs compute.
fn is_written_for(kernel: &AttentionKernel, shape: &AttentionShape) -> bool {
    takes_heads(kernel, shape, &[shape.q, shape.k, shape.v, shape.o])
}

/// Whether this is causal attention of bf16 whose operands of these strides have heads one after another.
pub(super) fn takes_heads(kernel: &AttentionKernel, shape: &AttentionShape, operands: &[HeadStrides]) -> bool {
    let &AttentionShape { batch, heads, queries, keys, .. } = shape;
    let whole = HeadStrides { batch: heads * queries * WIDTH, head: queries * WIDTH, position: WIDTH };
    let follow = |strides: &HeadStrides| {
        let (sizes, steps) = ([batch, heads, queries], [strides.batch, strides.head, strides.position]);
        let expected = [whole.batch, whole.head, whole.position];
        sizes.iter().zip(steps).zip(expected).all(|((&size, step), expected)| size <= 1 || step == expected)
    };
    let plain = kernel.dropout.is_none() && !kernel.scores.is_some();
    let same = kernel.dtype == Dtype::Bf16 && kernel.kv == Dtype::Bf16 && kernel.group <= 1 && plain;
    let causal = kernel.mask == AttentionMask::Causal && queries == keys;
    let sized = queries <= MAX_BLOCKS && batch * heads <= MAX_BLOCKS;
    same && causal && sized && kernel.width == WIDTH && operands.iter().all(follow)
}

impl Written {
    fn kernel(&self, attention: &LoweredAttention) -> Kernel {
        let LoweredAttention { kernel, shape, args } = attention;
        let source = CudaSource::new(self.name, self.text(kernel.scale));
        let &AttentionShape { batch, heads, queries, .. } = shape;
        let all_heads = batch * heads;
        let address = |position: usize| {
            let offset = args.get(position).map_or(0, ArgBinding::start);
            Word::Argument { position, offset }
        };
        let mut words: Vec<Word> = (0..4).map(address).collect();
        words.push(self.scores_at(0));
        words.extend([all_heads, queries].map(|number| Word::Number(number as u64)));
        let counts = Counts { heads: all_heads, queries, tokens: all_heads * queries };
        let launch = Launch::of_grids(attention.arguments(), self.grids(&counts, words, 0));
        Kernel::new(Source::Cuda(source), launch.with_variant(self.name.to_string(), String::new()))
    }

    /// Its text, for scores that are multiplied by `scale`.
    fn text(&self, scale: f32) -> String {
        let constants = format!(
            "constexpr int STORAGE = 2;\nconstexpr int WIDTH = {WIDTH};\nconstexpr float SCALE = {scale:e}f;\n"
        );
        let parts = tile::text(&[Part::Conversions, Part::Warp, Part::Matrix]);
        let before = [constants.as_str(), &parts, include_str!("attention/parameters.cuh")];
        [&before, self.texts].concat().join("\n")
    }

    /// Whether a GPU has the shared memory of its launches.
    pub(super) fn fits(&self, arch: Arch) -> bool {
        self.passes.iter().all(|pass| pass.shared as usize <= arch.block_shared())
    }

    /// The offset of its scores in the workspace, after `bytes` bytes; none if it stores no scores.
    pub(super) fn scores_at(&self, before: usize) -> Word {
        if self.has_scores { Word::Workspace(before) } else { Word::Number(0) }
    }

    /// Its grids, all with the same words. The workspace is this many bytes, then scores.
    pub(super) fn grids(&self, counts: &Counts, words: Vec<Word>, before: usize) -> Grids {
        let &Counts { heads, queries, tokens, .. } = counts;
        if counts.elements() == 0 {
            return Grids::default();
        }
        let scores = if self.has_scores { heads * queries * queries * 4 } else { 0 };
        let tiles = queries.div_ceil(TILE);
        let grid = |pass: &Pass| {
            let blocks = match pass.over {
                Over::Keys(keys) => [queries.div_ceil(keys), queries, heads],
                Over::Rows(rows) => [(heads * queries).div_ceil(rows), 1, 1],
                Over::Tiles => [tiles, heads, 1],
                Over::Pairs => [tiles, tiles, heads],
                Over::Tokens(rows) => [tokens.div_ceil(rows), 1, 1],
                Over::Elements(elements) => [counts.elements().div_ceil(elements), 1, 1],
            };
            let &Pass { entry, threads, shared, .. } = pass;
            let grid = Grid::new(entry, 0, threads, words.clone());
            Grid { blocks: blocks.map(|count| count as u32), shared, ..grid }
        };
        Grids { list: self.passes.iter().map(grid).collect(), workspace: before + scores, ..Grids::default() }
    }
}
