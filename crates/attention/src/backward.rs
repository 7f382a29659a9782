//! The gradient of attention: whether the kernel that recomputes scores supports a chain, and its lowering.

use deuteron_codegen::argument::{ArgBinding, Argument, saturating_elements};
use deuteron_plan::{AttentionGradientLink, AttentionRequest, Draft};

use super::fit::{Sharing, fit_layouts, read};
use super::kernel::{AttentionKernel, AttentionOperand, AttentionResult, AttentionShape};

/// The role of an argument of the gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackwardOperand {
    /// an operand of attention
    Operand(AttentionOperand),
    /// the gradient of the result
    ResultGradient,
    /// gradients of queries, keys, values: one after the other
    Gradient(AttentionOperand),
}

impl AttentionKernel {
    /// The arguments of its gradient, in order.
    pub fn backward_operands(&self) -> impl Iterator<Item = BackwardOperand> + use<> {
        use AttentionOperand::{K, O, Q, V};
        let operands = self.operands().into_iter().filter(|&operand| operand != O);
        let gradients = [Q, K, V].map(BackwardOperand::Gradient);
        operands.map(BackwardOperand::Operand).chain([BackwardOperand::ResultGradient]).chain(gradients)
    }
}

/// The gradient of attention and the values it reads and makes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradientFit {
    /// the attention; its heads form groups if gradients of keys and values are summed over a group, otherwise every head has its own keys, at
    /// a stride of 0 if they are shared
    pub kernel: AttentionKernel,
    /// the run-time half; strides of the result are those of its gradient
    pub shape: AttentionShape,
    /// its operands, the gradient of its result, and the gradients that are stored
    pub link: AttentionGradientLink,
}

/// The gradient of attention, if the kernel supports the layout of its operands.
pub(super) fn fit(draft: &Draft, link: &AttentionGradientLink) -> Option<GradientFit> {
    let (graph, request) = (draft.graph, &link.request);
    let placed = draft.placement.get(link.result_gradient)?;
    if graph.node(placed.base).dtype != graph.node(request.operands[0]).dtype {
        return None;
    }
    let layout = placed.layout.clone();
    let sharing = if link.group > 1 { Sharing::Groups } else { Sharing::Alone };
    let (kernel, shape) = fit_layouts(draft, request, AttentionResult::Values, layout, sharing)?;
    // Heads that are summed are those that share keys.
    if kernel.group != link.group {
        return None;
    }
    // The score of a single key has no slope at all. The kernel subtracts two sums to get there, and they differ by rounding.
    // Without queries there are gradients of keys all the same, zeros, and the sizes do not tell of how many.
    if shape.keys == 1 || shape.queries == 0 {
        return None;
    }
    Some(GradientFit { kernel, shape, link: *link })
}

/// Lowers the gradient of attention.
pub(crate) fn lower(draft: &Draft, fit: GradientFit) -> LoweredBackward {
    let GradientFit { kernel, shape, link: AttentionGradientLink { request, result_gradient, gradients, .. } } = fit;
    let AttentionRequest { operands: [q, k, v], added, slopes, documents, seed, .. } = request;
    let args = kernel.backward_operands().map(|operand| match operand {
        BackwardOperand::Operand(AttentionOperand::Q) => read(draft, q),
        BackwardOperand::Operand(AttentionOperand::K) => read(draft, k),
        BackwardOperand::Operand(AttentionOperand::V) => read(draft, v),
        BackwardOperand::Operand(AttentionOperand::Mask) => read(draft, added.expect("the kernel has a mask")),
        BackwardOperand::Operand(AttentionOperand::Slopes) => read(draft, slopes.expect("the kernel has slopes")),
        BackwardOperand::Operand(AttentionOperand::Documents) => {
            read(draft, documents.expect("the kernel has documents"))
        }
        BackwardOperand::Operand(AttentionOperand::Seed) => read(draft, seed.expect("the kernel has a seed")),
        // The planner finds no gradients over a cache, and the result is no operand.
        BackwardOperand::Operand(AttentionOperand::Positions | AttentionOperand::O) => read(draft, result_gradient),
        BackwardOperand::ResultGradient => read(draft, result_gradient),
        BackwardOperand::Gradient(AttentionOperand::Q) => ArgBinding::whole(draft.graph, gradients[0], 0, true),
        BackwardOperand::Gradient(AttentionOperand::K) => ArgBinding::whole(draft.graph, gradients[1], 0, true),
        BackwardOperand::Gradient(_) => ArgBinding::whole(draft.graph, gradients[2], 0, true),
    });
    LoweredBackward { args: args.collect(), kernel, shape }
}

/// The gradient of attention, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredBackward {
    /// the compile-time half
    pub kernel: AttentionKernel,
    /// strides of the result are those of its gradient
    pub shape: AttentionShape,
    /// as [`AttentionKernel::backward_operands`] lists them
    pub args: Vec<ArgBinding>,
}

impl LoweredBackward {
    /// Its arguments, as a device needs them.
    pub fn arguments(&self) -> Vec<Argument> {
        let AttentionShape { batch, heads, queries, keys, .. } = self.shape;
        let key_heads = heads / self.kernel.group.max(1);
        let elements = |operand: BackwardOperand| match operand {
            BackwardOperand::Operand(operand) => self.kernel.reach(&self.shape, operand),
            BackwardOperand::ResultGradient => self.kernel.reach(&self.shape, AttentionOperand::O),
            BackwardOperand::Gradient(AttentionOperand::Q) => {
                saturating_elements(&[batch, heads, queries, self.kernel.width])
            }
            BackwardOperand::Gradient(_) => saturating_elements(&[batch, key_heads, keys, self.kernel.width]),
        };
        let operands = self.kernel.backward_operands().zip(&self.args);
        operands.map(|(operand, arg)| Argument::new(arg, elements(operand))).collect()
    }
}
