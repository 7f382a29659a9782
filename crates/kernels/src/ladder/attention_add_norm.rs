//! The rungs of attention with a residual and a layer norm: attention as in its own ladder, both results stored, everything in bf16.
//!
//! Four rungs are written for teaching; the top one is the shipped kernel. Attention's kernels are those of its own ladder.

use deuteron_attention::chain::{self, Fit};
use deuteron_attention::cuda::rows::{kernel, refusal};
use deuteron_attention::kernel::AttentionShape;
use deuteron_attention::norm::{AddNorm, NormKind};
use deuteron_attention::rows::{LoweredAttentionRows, lower};
use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::cuda::arch::Arch;
use deuteron_codegen::cuda::grid::{CudaSource, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Kernel, Launch, Source};
use deuteron_codegen::tile::{self, Part};
use deuteron_graph::Dtype;
use deuteron_plan::Draft;

use super::attention::{Counts, Over, Pass, WIDTH, Written, takes_heads};

/// The widest row that a warp holds in registers.
const WIDEST: usize = 2048;

const NAIVE_ATTENTION: &[Pass] = super::attention::NAIVE.passes;
const TILED_ATTENTION: &[Pass] = super::attention::TILED.passes;

pub(super) const NAIVE: Written = Written {
    name: "l1_naive",
    texts: &[include_str!("attention/l1_naive.cu"), include_str!("attention_add_norm/l1_rows.cu")],
    passes: &[
        NAIVE_ATTENTION[0],
        NAIVE_ATTENTION[1],
        NAIVE_ATTENTION[2],
        Pass { entry: "add", threads: 256, shared: 0, over: Over::Elements(256) },
        Pass { entry: "layer_norm", threads: 256, shared: 0, over: Over::Tokens(256) },
    ],
    has_scores: true,
};

pub(super) const TILED: Written = Written {
    name: "l2_tiled",
    texts: &[
        include_str!("attention/tiles.cuh"),
        include_str!("attention/l2_tiled.cu"),
        include_str!("attention_add_norm/l2_rows.cu"),
    ],
    passes: &[
        TILED_ATTENTION[0],
        TILED_ATTENTION[1],
        TILED_ATTENTION[2],
        Pass { entry: "add", threads: 256, shared: 0, over: Over::Elements(256 * 8) },
        Pass { entry: "layer_norm", threads: 256, shared: 0, over: Over::Tokens(256 / 32) },
    ],
    has_scores: true,
};

const ADD_NORM: Pass = Pass { entry: "add_norm", threads: 128, shared: 0, over: Over::Tokens(128 / 32) };

pub(super) const ONLINE: Written = Written {
    name: "l3_online",
    texts: &[
        include_str!("attention/tiles.cuh"),
        include_str!("attention/l3_online.cu"),
        include_str!("attention_add_norm/l3_rows.cu"),
    ],
    passes: &[super::attention::ONLINE.passes[0], ADD_NORM],
    has_scores: false,
};

pub(super) const TENSOR_CORES: Written = Written {
    name: "l4_tensor_cores",
    texts: &[include_str!("attention/l4_tensor_cores.cu"), include_str!("attention_add_norm/l3_rows.cu")],
    passes: &[super::attention::TENSOR_CORES.passes[0], ADD_NORM],
    has_scores: false,
};

/// A kernel of attention, residual and norm as a rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// f32 arithmetic, a teaching kernel
    Plain(Written),
    /// on the tensor cores, a teaching kernel
    Matrix(Written),
    /// the shipped kernel of one launch
    OneLaunch,
}

impl Step {
    /// Whether a GPU has its instructions and enough shared memory.
    pub fn is_for(self, arch: Arch) -> bool {
        match self {
            Step::Plain(written) => written.fits(arch),
            Step::Matrix(written) => arch.is_ampere() && written.fits(arch),
            Step::OneLaunch => arch.is_ampere(),
        }
    }

    /// Its kernel for a group, if it takes it.
    pub fn kernel(self, group: &Draft, target: &CudaTarget) -> Option<Kernel> {
        let Fit::Rows(fit) = chain::fit(group)? else { return None };
        if refusal(&fit.attention.kernel, &fit.attention.shape).is_some() {
            return None;
        }
        let lowered = lower(group, fit);
        let rows = Rows::new(&lowered)?;
        match self {
            Step::Plain(written) | Step::Matrix(written) => Some(rows.kernel(&written)),
            Step::OneLaunch => Some(kernel(lowered, target)),
        }
    }

    /// The files of a teaching rung.
    pub fn texts(self) -> &'static [&'static str] {
        match self {
            Step::Plain(written) | Step::Matrix(written) => written.texts,
            Step::OneLaunch => &[],
        }
    }
}

/// Attention and rows that the rungs are written for.
struct Rows<'a> {
    lowered: &'a LoweredAttentionRows,
    norm: AddNorm,
    cols: usize,
    tokens: usize,
    /// positions of the residual, the norm's factors, what it adds, the sum and the result
    args: [usize; 5],
}

impl<'a> Rows<'a> {
    fn new(lowered: &'a LoweredAttentionRows) -> Option<Rows<'a>> {
        let LoweredAttentionRows { kernel, launch } = lowered;
        let norm = kernel.norm.filter(|norm| norm.norm == NormKind::Layer && norm.weights == Dtype::Bf16)?;
        let args = [norm.residual, norm.weight, norm.bias?, norm.sum?, norm.result];
        let shape = &launch.shape;
        let AttentionShape { batch, heads, queries, .. } = *shape;
        let cols = kernel.epilogue.cols;
        let joined = kernel.attention.joined(shape, cols)?;
        let tokens = batch * heads / joined * queries;
        let lie = [norm.residual, args[3], norm.result].iter().all(|&at| follow(&launch.args[at], cols));
        let aligned = launch.args.iter().all(|arg| arg.offset.is_multiple_of(8));
        let sized = cols <= WIDEST && joined == heads && norm.added.is_none();
        let takes = takes_heads(&kernel.attention, shape, &[shape.q, shape.k, shape.v]);
        (lie && aligned && sized && takes).then_some(Rows { lowered, norm, cols, tokens, args })
    }

    fn kernel(&self, written: &Written) -> Kernel {
        let LoweredAttentionRows { kernel, launch } = self.lowered;
        let source = CudaSource::new(written.name, self.text(written));
        let arguments = kernel.arguments(launch, self.cols);
        let launch = Launch::of_grids(arguments, self.grids(written));
        Kernel::new(Source::Cuda(source), launch.with_variant(written.name.to_string(), String::new()))
    }

    fn text(&self, written: &Written) -> String {
        let constants = format!(
            "constexpr int STORAGE = 2;\nconstexpr int WIDTH = {WIDTH};\nconstexpr float SCALE = {:e}f;\n\
             constexpr int COLS = {};\nconstexpr float EPS = {:e}f;\n",
            self.lowered.kernel.attention.scale, self.cols, self.norm.eps
        );
        let parts = tile::text(&[Part::Conversions, Part::Warp, Part::Matrix]);
        let before = [constants.as_str(), &parts, include_str!("attention_add_norm/parameters.cuh")];
        [&before, written.texts].concat().join("\n")
    }

    /// The grids of a launch, with the words of `parameters.cuh`. The workspace is attention's result, then scores.
    fn grids(&self, written: &Written) -> Grids {
        let AttentionShape { batch, heads, queries, .. } = self.lowered.launch.shape;
        let counts = Counts { heads: batch * heads, queries, tokens: self.tokens };
        let result = counts.elements() * Dtype::Bf16.bytes();
        let args = &self.lowered.launch.args;
        let address = |position: usize| Word::Argument { position, offset: args[position].start() };
        let mut words: Vec<Word> = (0..3).map(address).collect();
        words.extend([Word::Workspace(0), written.scores_at(result)]);
        words.extend([counts.heads, queries].map(|number| Word::Number(number as u64)));
        words.extend(self.args.map(address));
        words.push(Word::Number(self.tokens as u64));
        written.grids(&counts, words, result)
    }
}

/// Whether rows of this many columns are contiguous.
fn follow(arg: &ArgBinding, cols: usize) -> bool {
    let mut expected = cols;
    arg.leading.iter().rev().all(|&(size, stride)| {
        let follows = size <= 1 || stride == expected;
        expected *= size;
        follows
    })
}
