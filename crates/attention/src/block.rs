//! Attention and the projection of its result: a matmul with a weight, and row work on its accumulators, such as bias, residual and norm.
//!
//! Attention and its result are those of [`super`], the matmul and its epilogue those of [`deuteron_matmul`], except that the row work may
//! need whole rows. The result of attention is in the kernel's workspace, in the dtype of attention. A fused plan gives the bits of an
//! unfused one.

use deuteron_codegen::argument::{ArgBinding, Argument};
use deuteron_codegen::body::Body;
use deuteron_codegen::matmul_shape::{MatmulShape, lower_matmul_shape};
use deuteron_codegen::rows::RowArguments;
use deuteron_graph::{Dtype, NodeId};
use deuteron_matmul::fit::{MatmulFit, lower_matmul};
use deuteron_matmul::kernel::{LoweredMatmul, Matmul, MatmulLaunch};
use deuteron_plan::{AttentionLink, Draft, Side, Space, node_space};

use super::fit::{AttentionFit, arguments, fit_link};
use super::kernel::{AttentionKernel, AttentionOperand, AttentionResult, AttentionShape};
use super::norm::AddNorm;
use super::rows::is_row_work;

/// Attention, and the matmul of its result and a weight.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionBlock<T> {
    /// attention, its result the left operand of the matmul
    pub attention: AttentionKernel,
    /// the matmul, without a prologue, and its epilogue
    pub product: Matmul<T>,
    /// the epilogue, if it is just a bias, a residual and a norm
    pub norm: Option<AddNorm>,
}

impl<T> AttentionBlock<T> {
    /// The same with another kind of epilogue.
    pub fn map<U>(self, make: impl FnMut(T) -> U) -> AttentionBlock<U> {
        AttentionBlock { attention: self.attention, product: self.product.map(make), norm: self.norm }
    }

    /// Number of attention's arguments: all except its result.
    pub fn operands(&self) -> usize {
        self.attention.operands().len() - 1
    }
}

/// Attention, its projection and the row work on that.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockFit<'a> {
    /// attention; its result is not a buffer
    pub attention: AttentionFit,
    /// one matmul, and the row work on its sums
    pub projection: MatmulFit<'a>,
}

/// Attention, a matmul of its result and a weight, and row work on that, if a kernel supports them together.
pub(super) fn fit<'a>(
    draft: &Draft,
    link: &AttentionLink,
    matmuls: &'a [NodeId],
    epilogue: &'a Side,
) -> Option<BlockFit<'a>> {
    let (graph, rows) = (draft.graph, epilogue.nodes.as_slice());
    let &[matmul] = matmuls else { return None };
    let stored = |id: &NodeId| if rows.is_empty() { *id == matmul } else { rows.contains(id) };
    if !draft.outputs.iter().all(stored) {
        return None;
    }
    let attention = fit_link(draft, link, AttentionResult::Values)?;
    let (shape, operands) = lower_matmul_shape(graph, draft.placement, matmul);
    let [a, b] = &operands;
    let of_floats = [a.dtype, b.dtype].iter().all(|dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16));
    let is_weight = draft.nodes.binary_search(&b.base).is_err() && shape.batch.is_empty();
    if a.base != attention.result || a.offset != 0 || !of_floats || !is_weight {
        return None;
    }
    let space = Space { rows: shape.m, cols: shape.n };
    let in_space = |&id: &NodeId| node_space(graph, id).join(space) == Some(space);
    // One column would be one number per row, worked on by other instructions than a row.
    let follows =
        rows.is_empty() || shape.n > 1 && rows.iter().all(in_space) && is_row_work(draft, rows, matmul, space);
    let projection = MatmulFit { matmuls, gather: None, prologue: &[], epilogue: rows, shape, operands };
    follows.then_some(BlockFit { attention, projection })
}

/// Attention, its projection and row work, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredAttentionBlock {
    /// the compile-time half
    pub kernel: AttentionBlock<Body>,
    /// the run-time half
    pub launch: AttentionBlockLaunch,
}

/// The run-time parameters of attention with a projection.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionBlockLaunch {
    /// operands of attention without its result, then the arguments of the matmul without that result
    pub args: Vec<ArgBinding>,
    /// strides of the result are those that the matmul reads
    pub attention: AttentionShape,
    /// the matmul; its result row after row
    pub product: MatmulShape,
    /// (divide, modulo) of each launch axis of the row work
    pub axes: Vec<(usize, usize)>,
}

/// Lowers attention, its projection and the row work.
pub(crate) fn lower(draft: &Draft, fit: BlockFit) -> LoweredAttentionBlock {
    let BlockFit { attention, projection } = fit;
    let LoweredMatmul { product, launch } = lower_matmul(draft, projection);
    let mut args = arguments(draft, &attention);
    debug_assert_eq!(attention.kernel.operands().last(), Some(&AttentionOperand::O));
    args.pop();
    // The left operand of the matmul is the result of attention.
    args.extend(launch.args.into_iter().skip(1));
    // Behind the operands of attention and the weight.
    let norm = AddNorm::fit(draft, &args, attention.kernel.operands().len());
    let kernel = AttentionBlock { attention: attention.kernel, product, norm };
    let launch = AttentionBlockLaunch { args, attention: attention.shape, product: launch.shape, axes: launch.axes };
    LoweredAttentionBlock { kernel, launch }
}

impl AttentionBlockLaunch {
    /// The launch of the matmul alone, whose left operand is attention's result in the workspace.
    pub(crate) fn matmul_launch<T>(&self, kernel: &AttentionBlock<T>) -> MatmulLaunch {
        let left = self.args[0].internal(kernel.attention.dtype);
        let args = [left].into_iter().chain(self.args[kernel.operands()..].iter().cloned()).collect();
        MatmulLaunch { args, shape: self.product.clone(), prologue_axes: Vec::new(), axes: self.axes.clone() }
    }
}

impl<T: RowArguments> AttentionBlock<T> {
    /// The arguments of a launch, as a device needs them.
    pub fn arguments(&self, launch: &AttentionBlockLaunch) -> Vec<Argument> {
        let operands = self.attention.operands().into_iter().take(self.operands()).zip(&launch.args);
        let attention = operands.map(|(op, arg)| Argument::new(arg, self.attention.reach(&launch.attention, op)));
        let product = self.product.arguments(&launch.matmul_launch(self)).into_iter().skip(1);
        attention.chain(product).collect()
    }
}
