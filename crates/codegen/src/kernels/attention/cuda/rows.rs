//! Attention and the row work that follows it, as one launch: in general as below, and where a residual and a norm follow what
//! `hopper.cu` computes, by `hopper_rows.cu`, whose text is its contract.
//!
//! `o = attention(q, k, v)`, heads side by side in rows, then any row work on them: `s = o + r`, `y = norm(s) * w + b`.
//!
//! - How: the kernel of attention stores `o` in the workspace, in attention's dtype. Blocks of heads that share rows follow each other
//!   and count in a word of their own; the one that counts last does the work on the rows of their tile of queries, with all of its
//!   threads. No block waits for another, so that nothing is asked of how many run at once: every GPU from `sm_75` on takes it.
//! - Counters wrap to 0 by themselves. They are kept from run to run, and no run has to clear them.
//! - Numbers: `o` is rounded to its dtype, as if it were stored for another kernel, and has the bits of [`Way::Plain`] or
//!   [`Way::Tensor`]; so `s` has the bits that separate kernels give, where attention alone goes the same way (which it does not where
//!   that is [`Way::Hopper`]). Sums along a row are of `f32` in an order that the launch shape decides, not who came last: the same
//!   bits on every run, but not those of the separate row kernel, which is spread over other threads.
//! - Traffic: that of both kernels, with `o` written to and read from the L2 while it is there.
//! - Cost beyond that: one block does the rows of a whole tile while its multiprocessor has little else to do, [`WAITS`].
//! - Limits: more than eight queries (fewer are decoded, by blocks that have no rows of their own); what follows is row work without
//!   indices and without sums over rows; queries that follow each other are rows that do ([`AttentionKernel::joined`]).

use std::fmt;

use super::hopper_norm::{Asked, Meeting, by_rows};
use super::{
    CudaAttention, DECODE_QUERIES, PLAIN, PLAIN_THREADS, RESULT_AT, SLOWER, TENSOR, Tiles, Way, choose as choose_alone,
    grids as grids_alone, plain_text, tensor_text, text,
};
use crate::attention::rows::AttentionRows;
use crate::attention::{AttentionKernel, AttentionMask, AttentionShape};
use crate::body::Body;
use crate::cuda::{CudaSource, CudaTarget, Family, Following, Grids, RowConfig, Word, following, following_words};
use crate::linear::earlier_sums;
use crate::source::{ArgBinding, Geometry, Launch};

/// What the launch waits for beyond the sums of both kernels, in meetings of all blocks: the last block of each tile works on 64 or 128 rows
/// alone, row after row, while the others of its multiprocessor have ended. A first value, to be fitted.
pub const WAITS: f64 = 32.0;

/// Registers of a multiprocessor, on every GPU.
const REGISTERS: usize = 65536;

/// Attention, what follows it, and the kernel that does both.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaRows {
    /// what is computed
    pub kernel: AttentionRows<Body>,
    /// by which kernel
    pub way: RowsWay,
}

/// The kernels.
#[derive(Debug, Clone, PartialEq)]
pub enum RowsWay {
    /// the last block of the heads that share rows goes on with them
    Last {
        /// attention: [`Way::Plain`] or [`Way::Tensor`]
        way: Way,
        /// how row work is spread over the threads of a block
        config: RowConfig,
    },
    /// warps beside those who multiply normalise what all blocks made of a row: `hopper_rows.cu`
    Meeting(Meeting),
}

impl CudaRows {
    /// Heads side by side in a row.
    pub fn joined(&self) -> usize {
        self.kernel.tail.cols / self.kernel.attention.width
    }
}

impl fmt::Display for CudaRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.way {
            RowsWay::Last { way, config } => {
                // That it walks over rows goes without saying.
                let config = RowConfig { resident: 0, ..config.clone() };
                write!(f, "{way}; rows by the last of {} heads, {config}", self.joined())
            }
            RowsWay::Meeting(meeting) => {
                write!(f, "{}; rows by warps beside them, as {} heads meet", Way::Hopper(meeting.groups), self.joined())
            }
        }
    }
}

/// Why CUDA does not take attention with row work that the contract allows, if so.
pub fn refusal(kernel: &AttentionKernel, shape: &AttentionShape) -> Option<&'static str> {
    if shape.queries <= DECODE_QUERIES {
        return Some("expected more than 8 queries: fewer are decoded");
    }
    super::refusal(kernel, shape)
}

/// The kernel for a launch.
pub(crate) fn render(mut kernel: AttentionRows<Body>, launch: &Launch, target: &CudaTarget) -> CudaSource {
    if let Some(meeting) = meeting(&kernel, launch, target) {
        let text = meeting.text(&kernel.attention);
        let rows = CudaRows { kernel, way: RowsWay::Meeting(meeting) };
        return CudaSource { name: meeting.name().into(), text, family: Family::AttentionRows(Box::new(rows)) };
    }
    kernel.tail = earlier_sums(&kernel.tail).body;
    let alone = choose(&kernel, launch, target);
    let Block { threads, registers } = block(&kernel.attention, alone);
    let tail = tail_launch(&kernel, launch);
    let Following { text: rows, config } = following(&kernel.tail, &tail, target, threads, registers);
    let (constants, parts, own) = match alone {
        Way::Tensor(tiles) => (tiles.constants(), TENSOR, tensor_text(FOLLOWS)),
        _ => (String::new(), PLAIN, plain_text(FOLLOWS)),
    };
    let source = CudaRows { kernel, way: RowsWay::Last { way: alone, config } };
    let constants = format!("{constants}constexpr int JOINED = {};\n", source.joined());
    let text = rows + "\n" + &text(&source.kernel.attention, &constants, parts, &own);
    CudaSource { name: "attention_rows".into(), text, family: Family::AttentionRows(Box::new(source)) }
}

/// How a block goes on with rows.
const FOLLOWS: &str = include_str!("rows.cuh");

/// The meeting of a launch, where only a residual and a norm follow and attention alone is for warpgroups.
pub(crate) fn meeting(kernel: &AttentionRows<Body>, launch: &Launch, target: &CudaTarget) -> Option<Meeting> {
    Meeting::new(asked(kernel, launch)?, target)
}

fn asked<'a>(kernel: &'a AttentionRows<Body>, launch: &'a Launch) -> Option<Asked<'a>> {
    let Geometry::AttentionRows { shape, .. } = &launch.geometry else { return None };
    let AttentionRows { attention: kernel, norm, tail, .. } = kernel;
    let shape = by_rows(kernel, shape, tail.cols);
    Some(Asked { kernel, shape, norm: norm.as_ref(), product: None, launch })
}

/// What a launch waits for, in meetings of all blocks.
pub(crate) fn waits(kernel: &AttentionRows<Body>, launch: &Launch, target: &CudaTarget) -> f64 {
    if let Some(meeting) = meeting(kernel, launch, target) {
        return meeting.waits();
    }
    let alone = attention_launch(kernel, launch);
    let way = alone.map(|(alone, shape)| choose_alone(&kernel.attention, &shape, &alone, target));
    // Where attention alone is by warpgroups, without them it is slower.
    if matches!(way, Some(Way::Hopper(_))) { SLOWER } else { WAITS }
}

/// As attention alone, but for what only Hopper has.
fn choose(kernel: &AttentionRows<Body>, launch: &Launch, target: &CudaTarget) -> Way {
    let Some((alone, shape)) = attention_launch(kernel, launch) else { return Way::Plain };
    match choose_alone(&kernel.attention, &shape, &alone, target) {
        way @ (Way::Plain | Way::Tensor(_)) => way,
        Way::Hopper(_) => Way::Tensor(Tiles::new(&kernel.attention, &shape, target.processors)),
        // Few queries are refused, and nothing else is stored than values.
        Way::Decode { .. } | Way::Scores(_) => Way::Plain,
    }
}

/// What a block of attention has for the rows that follow.
struct Block {
    threads: usize,
    /// of a thread
    registers: usize,
}

fn block(kernel: &AttentionKernel, way: Way) -> Block {
    let (threads, blocks) = match way {
        Way::Tensor(tiles) => (32 * tiles.warps, tiles.blocks),
        // As in `plain.cu`.
        _ => {
            let seen = matches!(kernel.mask, AttentionMask::Full | AttentionMask::Causal);
            let two = kernel.width <= 64 && kernel.dropout.is_none() && seen;
            (PLAIN_THREADS as usize, if two { 2 } else { 1 })
        }
    };
    Block { threads, registers: (REGISTERS / (threads * blocks)).min(255) }
}

/// The launch of attention alone: its result is the last argument, and lies in the workspace.
fn attention_launch(kernel: &AttentionRows<Body>, launch: &Launch) -> Option<(Launch, AttentionShape)> {
    let Geometry::AttentionRows { shape, .. } = launch.geometry else { return None };
    let mut args = launch.args.get(..kernel.operands())?.to_vec();
    args.push(result(kernel, launch, Vec::new(), true)?);
    Some((Launch { args, geometry: Geometry::Attention(shape) }, shape))
}

/// The launch of the row work alone: one of its arguments is attention's result.
fn tail_launch(kernel: &AttentionRows<Body>, launch: &Launch) -> Launch {
    let Geometry::AttentionRows { shape, axes } = &launch.geometry else { return launch.clone() };
    let cols = kernel.tail.cols;
    let rows = shape.batch * shape.heads * shape.queries * kernel.attention.width / cols.max(1);
    let mut args = launch.args[kernel.operands()..].to_vec();
    if let Some(read) = result(kernel, launch, vec![(rows, cols)], false) {
        args.insert(kernel.result, read);
    }
    Launch { args, geometry: Geometry::Row { rows, cols, axes: axes.clone() } }
}

/// Attention's result as an argument.
fn result(
    kernel: &AttentionRows<Body>,
    launch: &Launch,
    leading: Vec<(usize, usize)>,
    written: bool,
) -> Option<ArgBinding> {
    let base = launch.args.first()?.base;
    Some(ArgBinding { base, dtype: kernel.attention.dtype, written, offset: 0, leading, table_rows: 0 })
}

/// The grid of a launch; none where there is nothing to write.
pub(crate) fn grids(rows: &CudaRows, launch: &Launch, target: &CudaTarget) -> Grids {
    let CudaRows { kernel, way } = rows;
    let way = match way {
        RowsWay::Last { way, .. } => way,
        RowsWay::Meeting(meeting) => {
            return asked(kernel, launch).map_or_else(Grids::default, |asked| meeting.grids(asked, target));
        }
    };
    let Some((alone, shape)) = attention_launch(kernel, launch) else { return Grids::default() };
    let attention = CudaAttention { kernel: kernel.attention, way: *way };
    let mut grids = grids_alone(&attention, &alone, target);
    let tail = tail_launch(kernel, launch);
    let address = |arg: usize| match arg == kernel.result {
        true => Word::Workspace(0),
        false => {
            let position = kernel.operands() + arg - usize::from(arg > kernel.result);
            Word::Argument { position, offset: tail.args[arg].offset * tail.args[arg].dtype.bytes() }
        }
    };
    for grid in &mut grids.list {
        grid.words[RESULT_AT] = Word::Workspace(0);
        grid.words.push(Word::Kept(0));
        grid.words.extend(following_words(&kernel.tail, &tail, address));
        grids.kept = grid.blocks[0] as usize / rows.joined() * 4;
    }
    let elements = shape.batch * shape.heads * shape.queries * kernel.attention.width;
    grids.workspace = elements * kernel.attention.dtype.bytes();
    grids
}
