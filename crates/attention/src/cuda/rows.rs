//! Attention and the row work that follows it, as one launch: in general as below, and where a residual and a norm follow what
//! `hopper.cu` computes, by `hopper_rows.cu`, whose text is its contract.
//!
//! `o = attention(q, k, v)`, heads side by side in rows, then any row work on them: `s = o + r`, `y = norm(s) * w + b`.
//!
//! - How: the kernel of attention stores `o` in the workspace, in attention's dtype. Blocks of heads that share rows follow each other
//!   and count in a word of their own; the block that increments it last processes the rows of their tile of queries, with all of its
//!   threads. No block waits for another, so the kernel is correct for any number of resident blocks, on every GPU from `sm_75` on.
//! - Counters wrap to 0 by themselves. They are kept from run to run, and no run has to clear them.
//! - Numbers: `o` is rounded to its dtype, as if it were stored for another kernel, and has the bits of [`ForwardVariant::Plain`] or
//!   [`ForwardVariant::Tensor`]; so `s` has the bits that separate kernels give, where attention alone goes the same way (which it does not where
//!   that is [`ForwardVariant::Hopper`]). Sums along a row are of `f32` in an order that the launch shape decides, not who came last: the same
//!   bits on every run, but not those of the separate row kernel, which is spread over other threads.
//! - Traffic: that of both kernels, with `o` written to and read from the L2 while it is there.
//! - Cost beyond that: one block processes the rows of a whole tile while its multiprocessor is otherwise nearly idle, [`WAITS`].
//! - Limits: more than eight queries (fewer are decoded, by blocks that have no rows of their own); what follows is row work without
//!   indices and without sums over rows; queries that follow each other are rows that do ([`AttentionKernel::joined`]).

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::body::Body;
use deuteron_codegen::cuda::grid::{CudaSource, Grids, Word};
use deuteron_codegen::cuda::row::following::{Following, following, following_words};
use deuteron_codegen::cuda::row_config::RowConfig;
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::linear::earlier_sums;
use deuteron_codegen::lower::RowLaunch;
use deuteron_plan::{Work, primitive_work};

use super::forward::{self, DECODE_QUERIES, ForwardVariant};
use super::hopper_norm::{ExchangeRequest, RowExchange, by_rows};
use super::text::{PLAIN, TENSOR, plain_text, tensor_text, text};
use super::tiles::{PLAIN_THREADS, Tiles};
use super::words::RESULT_AT;
use crate::chain::{self, Fit};
use crate::kernel::{AttentionKernel, AttentionMask, AttentionShape, LoweredAttention};
use crate::rows::{self, AttentionRows, AttentionRowsLaunch, LoweredAttentionRows};

/// What the launch waits for beyond the sums of both kernels, in barriers over all blocks: the last block of each tile works on 64 or 128 rows
/// alone, row after row, while the others of its multiprocessor have ended. A first value, to be fitted.
pub const WAITS: f64 = 32.0;

/// Registers of a multiprocessor, on every GPU.
const REGISTERS: usize = 65536;

/// Attention with row work on a GPU.
pub struct AttentionRowsFamily;

impl Family<CudaTarget> for AttentionRowsFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let Some(Fit::Rows(fit)) = chain::fit(&group) else { return None };
        if refusal(&fit.attention.kernel, &fit.attention.shape).is_some() {
            return None;
        }
        let lowered = rows::lower(&group, fit);
        let Work { waits, microseconds, drawback, .. } = price(&lowered, target);
        let work = move || Work { waits, microseconds, drawback, ..primitive_work(&group) };
        offered(work, move || kernel(lowered, target))
    }
}

/// Why CUDA does not take attention with row work that the contract allows, if so.
pub fn refusal(kernel: &AttentionKernel, shape: &AttentionShape) -> Option<&'static str> {
    if shape.queries <= DECODE_QUERIES {
        return Some("expected more than 8 queries: fewer are decoded");
    }
    forward::refusal(kernel, shape)
}

/// The kernel.
pub fn kernel(lowered: LoweredAttentionRows, target: &CudaTarget) -> Kernel {
    match exchange(&lowered, target) {
        Some(exchange) => exchange_kernel(&lowered, &exchange, target),
        None => last_block_kernel(lowered, target),
    }
}

/// Warps beside those that multiply normalise what all blocks computed of a row.
fn exchange_kernel(lowered: &LoweredAttentionRows, exchange: &RowExchange, target: &CudaTarget) -> Kernel {
    let (variant, joined) = (ForwardVariant::Hopper(exchange.groups), joined(&lowered.kernel));
    let name = format!("{variant}; rows by warps beside them, as {joined} heads meet");
    let source = CudaSource::new(exchange.name(), exchange.text(&lowered.kernel.attention));
    let grids = exchange.grids(exchange_request(lowered), target);
    finished(lowered, source, grids, name)
}

/// The last block of the heads that share rows goes on with them.
fn last_block_kernel(mut lowered: LoweredAttentionRows, target: &CudaTarget) -> Kernel {
    lowered.kernel.epilogue = earlier_sums(&lowered.kernel.epilogue).body;
    let (variant, joined) = (choose(&lowered, target), joined(&lowered.kernel));
    let epilogue = epilogue_launch(&lowered);
    let Following { text: rows, config } = last_block_rows(&lowered, &variant, &epilogue, target);
    let (constants, parts, own) = match &variant {
        ForwardVariant::Tensor(tiles) => (tiles.constants(), TENSOR, tensor_text(FOLLOWS)),
        _ => (String::new(), PLAIN, plain_text(FOLLOWS)),
    };
    let constants = format!("{constants}constexpr int JOINED = {joined};\n");
    let text = rows + "\n" + &text(&lowered.kernel.attention, &constants, parts, &own);
    // That it walks over rows goes without saying.
    let config = RowConfig { resident: 0, ..config };
    let name = format!("{variant}; rows by the last of {joined} heads, {config}");
    let grids = last_block_grids(&lowered, &variant, &epilogue, target);
    finished(&lowered, CudaSource::new("attention_rows", text), grids, name)
}

/// The row work, and how it is spread over the threads of a block of attention.
pub(super) fn last_block_rows(
    lowered: &LoweredAttentionRows,
    variant: &ForwardVariant,
    epilogue: &RowLaunch,
    target: &CudaTarget,
) -> Following {
    let BlockBudget { threads, registers } = block(&lowered.kernel.attention, variant);
    following(&lowered.kernel.epilogue, epilogue, target, threads, registers)
}

fn finished(lowered: &LoweredAttentionRows, source: CudaSource, grids: Grids, name: String) -> Kernel {
    let arguments = lowered.kernel.arguments(&lowered.launch, lowered.kernel.epilogue.cols);
    let launch = Launch::of_grids(arguments, grids).with_variant(name, String::new());
    Kernel::new(Source::Cuda(source), launch)
}

/// How a block goes on with rows.
const FOLLOWS: &str = include_str!("rows.cuh");

/// Heads side by side in a row.
fn joined(kernel: &AttentionRows<Body>) -> usize {
    kernel.epilogue.cols / kernel.attention.width
}

/// How blocks exchange statistics of rows, where only a residual and a norm follow and attention alone is for warpgroups.
pub(crate) fn exchange(lowered: &LoweredAttentionRows, target: &CudaTarget) -> Option<RowExchange> {
    RowExchange::new(exchange_request(lowered), target)
}

fn exchange_request(lowered: &LoweredAttentionRows) -> ExchangeRequest<'_> {
    let AttentionRows { attention: kernel, norm, epilogue, .. } = &lowered.kernel;
    let AttentionRowsLaunch { args, shape, .. } = &lowered.launch;
    let shape = by_rows(kernel, shape, epilogue.cols);
    ExchangeRequest { kernel, shape, norm: norm.as_ref(), product: None, args }
}

/// What is not counted: the time of a launch if it is known, what it waits for beyond the sums of both kernels, and why separate kernels are faster, if
/// they are.
fn price(lowered: &LoweredAttentionRows, target: &CudaTarget) -> Work {
    if let Some(exchange) = exchange(lowered, target) {
        let microseconds = Some(exchange.microseconds(exchange_request(lowered), target));
        return Work { microseconds, waits: exchange.waits(), drawback: exchange.drawback(), ..Work::default() };
    }
    let alone = forward::choose(&attention_alone(lowered), target);
    let by_warpgroups = matches!(alone, ForwardVariant::Hopper(_));
    let drawback = by_warpgroups.then_some("attention alone runs on warpgroups, and with this epilogue it does not");
    Work { waits: WAITS, drawback, ..Work::default() }
}

/// As attention alone, but for what only Hopper has.
pub(super) fn choose(lowered: &LoweredAttentionRows, target: &CudaTarget) -> ForwardVariant {
    let alone = attention_alone(lowered);
    match forward::choose(&alone, target) {
        variant @ (ForwardVariant::Plain | ForwardVariant::Tensor(_)) => variant,
        ForwardVariant::Hopper(_) => ForwardVariant::Tensor(Tiles::new(&alone.kernel, &alone.shape, target.processors)),
        // Few queries are refused, and nothing else is stored than values.
        ForwardVariant::Decode { .. } | ForwardVariant::Scores(_) => ForwardVariant::Plain,
    }
}

/// What a block of attention has for the rows that follow.
struct BlockBudget {
    threads: usize,
    /// of a thread
    registers: usize,
}

fn block(kernel: &AttentionKernel, variant: &ForwardVariant) -> BlockBudget {
    let (threads, blocks) = match variant {
        ForwardVariant::Tensor(tiles) => (32 * tiles.warps, tiles.blocks),
        // As in `plain.cu`.
        _ => {
            let seen = matches!(kernel.mask, AttentionMask::Full | AttentionMask::Causal);
            let two = kernel.width <= 64 && kernel.dropout.is_none() && seen;
            (PLAIN_THREADS as usize, if two { 2 } else { 1 })
        }
    };
    BlockBudget { threads, registers: (REGISTERS / (threads * blocks)).min(255) }
}

/// Attention alone: its result is the last argument, and lies in the workspace.
fn attention_alone(lowered: &LoweredAttentionRows) -> LoweredAttention {
    let LoweredAttentionRows { kernel, launch } = lowered;
    let mut args = launch.args[..kernel.operands()].to_vec();
    args.push(ArgBinding { written: true, ..launch.args[0].internal(kernel.attention.dtype) });
    LoweredAttention { kernel: kernel.attention, shape: launch.shape, args }
}

/// The launch of the row work alone: one of its arguments is attention's result.
pub(super) fn epilogue_launch(lowered: &LoweredAttentionRows) -> RowLaunch {
    let LoweredAttentionRows { kernel, launch: AttentionRowsLaunch { args, shape, axes } } = lowered;
    let cols = kernel.epilogue.cols;
    let rows = shape.batch * shape.heads * shape.queries * kernel.attention.width / cols.max(1);
    let result = ArgBinding { leading: vec![(rows, cols)], ..args[0].internal(kernel.attention.dtype) };
    let mut args = args[kernel.operands()..].to_vec();
    args.insert(kernel.result, result);
    RowLaunch { args, rows, cols, axes: axes.clone() }
}

/// The grid; none where there is nothing to write.
fn last_block_grids(
    lowered: &LoweredAttentionRows,
    variant: &ForwardVariant,
    epilogue: &RowLaunch,
    target: &CudaTarget,
) -> Grids {
    let kernel = &lowered.kernel;
    let AttentionShape { batch, heads, queries, .. } = lowered.launch.shape;
    let mut grids = forward::grids(&attention_alone(lowered), variant, target);
    let address = |arg: usize| match arg == kernel.result {
        true => Word::Workspace(0),
        false => {
            let position = kernel.operands() + arg - usize::from(arg > kernel.result);
            Word::Argument { position, offset: epilogue.args[arg].start() }
        }
    };
    for grid in &mut grids.list {
        grid.words[RESULT_AT] = Word::Workspace(0);
        grid.words.push(Word::Persistent(0));
        grid.words.extend(following_words(&kernel.epilogue, epilogue, address));
        grids.persistent = grid.blocks[0] as usize / joined(kernel) * 4;
    }
    grids.workspace = batch * heads * queries * kernel.attention.width * kernel.attention.dtype.bytes();
    grids
}
