//! Attention with row work on its result: residual, norm, or any other work of a row kernel.
//!
//! The work is a row body like any other, except for one argument: attention's result, whose rows are in the kernel's workspace, in the
//! dtype of attention, and are processed as soon as their last head is finished. A fused plan gives the bits of an unfused one.

use deuteron_codegen::argument::{ArgBinding, Argument, saturating_elements};
use deuteron_codegen::body::Body;
use deuteron_codegen::lower::{LoweredRows, RowLaunch, lower_rows};
use deuteron_codegen::rows::{RowArguments, reach};
use deuteron_graph::{NodeId, Op};
use deuteron_plan::{AttentionLink, Draft, Side, Space, node_space};

use super::fit::{AttentionFit, arguments, fit_link};
use super::kernel::{AttentionKernel, AttentionOperand, AttentionResult, AttentionShape};
use super::norm::AddNorm;

/// Attention, and the work on its rows as a body or in lowered form.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionRows<T> {
    /// attention, its result passed on
    pub attention: AttentionKernel,
    /// the epilogue, its columns heads side by side
    pub epilogue: T,
    /// which of its arguments is the result of attention
    pub result: usize,
    /// the epilogue, if it is just a residual and a norm
    pub norm: Option<AddNorm>,
}

impl<T> AttentionRows<T> {
    /// The same attention with another kind of epilogue.
    pub fn map<U>(self, make: impl FnOnce(T) -> U) -> AttentionRows<U> {
        AttentionRows { attention: self.attention, epilogue: make(self.epilogue), result: self.result, norm: self.norm }
    }

    /// Number of attention's arguments: all except its result.
    pub fn operands(&self) -> usize {
        self.attention.operands().len() - 1
    }
}

/// Attention and the row work that follows it.
#[derive(Debug, Clone, PartialEq)]
pub struct RowsFit<'a> {
    /// attention; its result is not a buffer
    pub attention: AttentionFit,
    /// the epilogue, in order
    pub rows: &'a [NodeId],
}

/// Attention and row work on its result, if a kernel supports both.
pub(super) fn fit<'a>(draft: &Draft, link: &AttentionLink, epilogue: &'a Side) -> Option<RowsFit<'a>> {
    let (graph, rows) = (draft.graph, epilogue.nodes.as_slice());
    if !draft.outputs.iter().all(|id| rows.contains(id)) {
        return None;
    }
    let attention = fit_link(draft, link, AttentionResult::Values)?;
    // If heads are side by side without a copy, only their readers determine the row length.
    let first = node_space(graph, *rows.first()?);
    let space = rows.iter().try_fold(first, |space, &id| space.join(node_space(graph, id)))?;
    let in_rows = graph.node(attention.result).shape.elements() == space.rows * space.cols;
    let taken = in_rows && is_row_work(draft, rows, attention.result, space);
    attention.kernel.joined(&attention.shape, space.cols)?;
    taken.then_some(RowsFit { attention, rows })
}

/// Whether nodes are row work over a space on a value that they read in order, and on no other earlier result of the
/// kernel.
pub(super) fn is_row_work(draft: &Draft, nodes: &[NodeId], value: NodeId, space: Space) -> bool {
    let (graph, placement, Space { rows, cols }) = (draft.graph, draft.placement, space);
    let gone = |base: NodeId| draft.nodes.contains(&base) && !nodes.contains(&base);
    let follows = |&id: &NodeId| {
        let node = graph.node(id);
        let is_row_work = matches!(
            node.op,
            Op::Unary(_)
                | Op::Binary(_)
                | Op::Compare(_)
                | Op::Select
                | Op::Cast(_)
                | Op::RowReduce(_)
                | Op::Random { .. }
        );
        let reader = if matches!(node.op, Op::RowReduce(_)) { &graph.node(node.inputs[0]).shape } else { &node.shape };
        let in_order = node.inputs.iter().all(|&input| match placement.get(input) {
            Some(placed) if placed.base == value => {
                let access = placed.layout.row_access(reader);
                placed.layout.shape.cols() == cols && access.is_some_and(|access| access.is_identity(rows, cols))
            }
            Some(placed) => !gone(placed.base),
            None => true,
        });
        is_row_work && in_order
    };
    let reads = |&id: &NodeId| graph.node(id).inputs.iter().any(|&input| placement.base(input) == Some(value));
    nodes.iter().any(reads) && nodes.iter().all(follows)
}

impl AttentionKernel {
    /// Number of heads side by side in a row of this many columns, if blocks of heads are whole rows of the result, consecutive queries
    /// are consecutive rows, and a decoding task computes whole rows.
    pub fn joined(&self, shape: &AttentionShape, cols: usize) -> Option<usize> {
        let &AttentionShape { batch, heads, queries, o, .. } = shape;
        let joined = cols.checked_div(self.width).filter(|&joined| joined * self.width == cols && joined > 0)?;
        let steps = [(batch, o.batch), (heads, o.head), (queries, o.position)];
        let last: usize = steps.iter().map(|&(size, step)| size.saturating_sub(1) * step).sum();
        let elements = batch * heads * queries * self.width;
        let lies = heads.is_multiple_of(joined)
            && last + self.width <= elements
            && (joined == 1 || o.head == self.width)
            && (queries == 1 || o.position == cols)
            && (heads == joined || (joined * o.head).is_multiple_of(cols))
            && (batch == 1 || o.batch.is_multiple_of(cols))
            && (joined.is_multiple_of(self.group) || !self.sized(shape, 0).decodes());
        lies.then_some(joined)
    }
}

/// Attention with row work on its result, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredAttentionRows {
    /// the compile-time half
    pub kernel: AttentionRows<Body>,
    /// the run-time half
    pub launch: AttentionRowsLaunch,
}

/// The run-time parameters of attention with row work.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionRowsLaunch {
    /// operands of attention without its result, then the arguments of the row work without that result
    pub args: Vec<ArgBinding>,
    /// strides of the result are those of the row work's rows
    pub shape: AttentionShape,
    /// (divide, modulo) of each launch axis of the row work
    pub axes: Vec<(usize, usize)>,
}

/// Lowers attention and the row work after it.
pub fn lower(draft: &Draft, fit: RowsFit) -> LoweredAttentionRows {
    let RowsFit { attention, rows } = fit;
    let LoweredRows { body, launch: RowLaunch { args: row_args, axes, .. } } =
        lower_rows(&Draft { nodes: rows, ..*draft }, &[]);
    let result = row_args.iter().position(|arg| arg.base == attention.result && !arg.written);
    let result = result.expect("what follows attention reads it");
    let mut args = arguments(draft, &attention);
    debug_assert_eq!(attention.kernel.operands().last(), Some(&AttentionOperand::O));
    args.pop();
    args.extend(row_args.into_iter().enumerate().filter(|&(position, _)| position != result).map(|(_, arg)| arg));
    let norm = AddNorm::fit(draft, &args, attention.kernel.operands().len() - 1);
    let kernel = AttentionRows { attention: attention.kernel, epilogue: body, result, norm };
    LoweredAttentionRows { kernel, launch: AttentionRowsLaunch { args, shape: attention.shape, axes } }
}

impl<T: RowArguments> AttentionRows<T> {
    /// An argument of the row work, by its position in the launch.
    pub fn epilogue_argument(&self, position: usize) -> usize {
        let at = position - self.operands();
        at + usize::from(at >= self.result)
    }

    /// The arguments of a launch over rows of this many columns, as a device needs them.
    pub fn arguments(&self, launch: &AttentionRowsLaunch, cols: usize) -> Vec<Argument> {
        let AttentionRowsLaunch { args, shape, .. } = launch;
        let joined = cols / self.attention.width.max(1);
        let rows = saturating_elements(&[shape.batch, shape.heads, shape.queries]) / joined.max(1);
        let elements = |position: usize, arg: &ArgBinding| match self.attention.operands().get(position) {
            Some(&operand) if position < self.operands() => self.attention.reach(shape, operand),
            _ => reach(&self.epilogue.row_arguments()[self.epilogue_argument(position)], arg, rows, cols),
        };
        args.iter().enumerate().map(|(position, arg)| Argument::new(arg, elements(position, arg))).collect()
    }
}
