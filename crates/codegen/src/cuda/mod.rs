//! CUDA: what is compiled is text, what is launched is a list of grids.
//!
//! A [`CudaSource`] is a whole translation unit, free of `#include`, with one or more `extern "C"` kernels that take one
//! parameter each: a structure of 64-bit words. [`grids`] turns a launch into grids whose words are numbers or
//! addresses that the device fills in. So a device knows neither rows nor operations.

mod append;
mod arch;
mod catalog;
mod copy;
mod product;
mod row;
mod scatter;
mod tuning;

pub use arch::Arch;
pub use catalog::CudaCatalog;
pub use copy::source as copy_source;
pub use product::{product_grids, product_source};
pub use row::{Policy, RowConfig, RowKernel};
pub use scatter::source as scatter_source;
pub use tuning::{BadTuning, Tuning};

pub use crate::tile::tensor_map::{MAP_WORDS, Mapped, TensorMap};

use deuteron_graph::Dtype;
use deuteron_plan::Draft;

use crate::attention::AttentionKernel;
use crate::body::{Body, Origin};
pub(crate) use crate::cuda::row::{Following, PRELUDE, Side, following, following_words, gcd, type_name};
use crate::cuda::row::{Line, Lines};
use crate::kernels::attention::cuda::backward::{self as attention_backward, CudaBackward};
use crate::kernels::attention::cuda::block::{self as attention_block, CudaBlock};
use crate::kernels::attention::cuda::rows::{self as attention_rows, CudaRows};
use crate::kernels::attention::cuda::{self as attention, CudaAttention};
use crate::kernels::matmul::cuda as skinny;
use crate::kernels::matmul::cuda::SkinnyKernel;
use crate::linear::{Earlier, earlier_sums};
use crate::lower::lower;
use crate::source::{Backend, Kernel, Launch, MatmulKernel, Source};

/// A kernel, `hold`, that keeps a stream busy for as many nanoseconds as its only word says.
pub const HOLD: &str = include_str!("hold.cu");

/// What CUDA sources are rendered for.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaTarget {
    /// the instruction set
    pub arch: Arch,
    /// multiprocessors
    pub processors: usize,
    /// measured launch shapes; others are chosen by their shape
    pub tuning: Tuning,
}

impl CudaTarget {
    /// Without measured launch shapes.
    pub fn new(arch: Arch, processors: usize) -> CudaTarget {
        CudaTarget { arch, processors, tuning: Tuning::default() }
    }
}

/// Launch shapes worth measuring for a row kernel, the suggested one first; none for a kernel of another kind.
pub fn candidates(group: &Draft, target: &CudaTarget) -> Vec<RowConfig> {
    let lowered = lower(group, &Backend::Cuda(target.clone()));
    match &lowered.kernel {
        Kernel::Row(body) => row::candidates(&earlier_sums(body).body, &lowered.launch, target),
        Kernel::Matmul(_) | Kernel::Product(_) => Vec::new(),
        Kernel::Attention(_) | Kernel::AttentionBackward(_) => Vec::new(),
        Kernel::AttentionRows(_) | Kernel::AttentionBlock(_) => Vec::new(),
        Kernel::ScatterAdd(_) | Kernel::Append(_) | Kernel::Copy(_) => Vec::new(),
    }
}

/// A CUDA translation unit and the shape of its launches. Two sources that are equal are one compiled kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaSource {
    /// for messages: `row`, `copy`, `scatter_add`, `append`, `attention`, `attention_rows`, `attention_backward`
    pub name: String,
    /// the text
    pub text: String,
    /// what its launches look like
    pub family: Family,
}

/// The families of generated CUDA kernels.
#[derive(Debug, Clone, PartialEq)]
pub enum Family {
    /// elementwise work, row reductions, column sums
    Row(Box<RowKernel>),
    /// elements of this many bytes moved
    Copy(usize),
    /// rows added into a table of this storage type
    ScatterAdd(Dtype),
    /// rows of elements of this many bytes written into a cache
    Append(usize),
    /// a matrix product that the vendor's library does not do
    Product(MatmulKernel),
    /// attention
    Attention(CudaAttention),
    /// attention and row work on its result
    AttentionRows(Box<CudaRows>),
    /// attention, its projection, a residual and a norm
    AttentionBlock(Box<CudaBlock>),
    /// the gradient of attention
    AttentionBackward(CudaBackward),
    /// a matrix product of few rows, with what stands around it
    Skinny(Box<SkinnyKernel>),
    /// attention by a text for one launch, with its grids
    FixedAttention(AttentionKernel, Grids),
}

/// Renders a kernel. Matrix products of many rows stay with the vendor's library.
pub(crate) fn render(kernel: Kernel, launch: &Launch, target: &CudaTarget) -> Source {
    match kernel {
        Kernel::Row(body) => Source::Cuda(row::render(&earlier_sums(&body).body, launch, target)),
        Kernel::Matmul(kernel) => Source::Matmul(kernel),
        Kernel::Product(product) => Source::Cuda(skinny::render(product, launch, target)),
        Kernel::Attention(kernel) => Source::Cuda(attention::render(kernel, launch, target)),
        Kernel::AttentionBackward(kernel) => Source::Cuda(attention_backward::render(kernel, launch, target)),
        Kernel::AttentionRows(kernel) => Source::Cuda(attention_rows::render(kernel, launch, target)),
        Kernel::AttentionBlock(kernel) => Source::Cuda(attention_block::render(kernel, launch, target)),
        Kernel::ScatterAdd(dtype) => Source::Cuda(scatter::source(dtype)),
        Kernel::Append(bytes) => Source::Cuda(append::source(bytes)),
        Kernel::Copy(bytes) => Source::Cuda(copy::source(bytes)),
    }
}

/// The lines of a row kernel, each with what it came from in the body; one line stands for what all row kernels share.
pub(crate) fn row_lines(body: &Body, launch: &Launch, target: &CudaTarget) -> Vec<(String, Option<Origin>)> {
    let Earlier { body, exprs, stages } = earlier_sums(body);
    let Lines { constants, kernel } = row::lines(&body, launch, target).0;
    let before = |origin: Origin| match origin {
        Origin::Expr(id) => Origin::Expr(exprs[id.index()]),
        Origin::Stage(position) => Origin::Stage(stages[position]),
    };
    let shared = format!("// prelude: {} lines that all row kernels share", PRELUDE.lines().count());
    let shared = Line { text: shared, origin: None };
    let all = constants.into_iter().chain([shared]).chain(kernel);
    all.map(|line| (line.text, line.origin.map(before))).collect()
}

/// One word of a kernel's parameter, or the words of a tensor map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// a number
    Number(u64),
    /// the address of an argument of the launch, plus so many bytes
    Argument {
        /// its position
        position: usize,
        /// bytes from its start
        offset: usize,
    },
    /// the same where no kernel of the job writes the argument, so that it may be read before earlier grids have ended; else 0
    Given {
        /// its position
        position: usize,
        /// bytes from its start
        offset: usize,
    },
    /// an address inside of the launch's workspace
    Workspace(usize),
    /// an address inside of what the launch keeps from one run to the next
    Kept(usize),
    /// the address of the step's fault word: an `u64` of all ones, into which a kernel that meets an index outside of its
    /// table puts, by `atomicMin`, `row * 256 + argument`
    Fault,
    /// a tensor map: [`MAP_WORDS`] words
    Map(TensorMap),
}

impl Word {
    /// How many words it is.
    pub fn count(&self) -> usize {
        match self {
            Word::Map(_) => MAP_WORDS,
            Word::Number(_) | Word::Argument { .. } | Word::Given { .. } => 1,
            Word::Workspace(_) | Word::Kept(_) | Word::Fault => 1,
        }
    }
}

/// One launch of one kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// the kernel's name in the text
    pub entry: &'static str,
    /// blocks
    pub blocks: [u32; 3],
    /// threads of a block
    pub threads: u32,
    /// blocks of a cluster; 1 where there are none
    pub cluster: u32,
    /// bytes of dynamic shared memory
    pub shared: u32,
    /// whether every thread of it waits for earlier grids (`tile/dependent_launch.cuh`), so that it may be started before they have ended
    pub waits: bool,
    /// the parameter
    pub words: Vec<Word>,
}

/// All grids of one launch, in order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Grids {
    /// run one after another
    pub list: Vec<Grid>,
    /// bytes of scratch memory they share, with other launches too: each finds what the one before it left
    pub workspace: usize,
    /// bytes of memory of their own: zeros before the first run, then what the run before left
    pub kept: usize,
    /// whether a fault word must be looked at afterwards
    pub checks_indices: bool,
}

/// The grids of a launch of a source.
pub fn grids(source: &CudaSource, launch: &Launch, target: &CudaTarget) -> Grids {
    match &source.family {
        Family::Row(kernel) => row::grids(kernel, launch, target),
        Family::Copy(bytes) => copy::grids(*bytes, launch),
        Family::ScatterAdd(dtype) => scatter::grids(*dtype, launch),
        Family::Append(bytes) => append::grids(*bytes, launch, target),
        Family::Product(kernel) => product::grids(kernel, launch),
        Family::Attention(attention) => attention::grids(attention, launch, target),
        Family::AttentionRows(rows) => attention_rows::grids(rows, launch, target),
        Family::AttentionBlock(block) => attention_block::grids(block, launch, target),
        Family::AttentionBackward(backward) => attention_backward::grids(backward, launch, target),
        Family::Skinny(kernel) => skinny::grids(kernel, launch, target),
        Family::FixedAttention(_, grids) => grids.clone(),
    }
}
