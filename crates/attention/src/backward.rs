//! The gradient of attention: whether the kernel that recomputes scores supports a chain, and its lowering.

use deuteron_codegen::argument::{ArgBinding, Argument, strided_reach};
use deuteron_graph::Shape;
use deuteron_plan::{AttentionGradientLink, AttentionRequest, Draft, Layout, StoredGradient};

use super::fit::{Results, Sharing, fit_layouts, read, reordered};
use super::kernel::{AttentionKernel, AttentionOperand, AttentionResult, AttentionShape, HeadStrides};

/// The role of an argument of the gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackwardOperand {
    /// an operand of attention
    Operand(AttentionOperand),
    /// the gradient of the result
    ResultGradient,
    /// gradients of queries, keys, values, if each has a buffer
    Gradient(AttentionOperand),
}

/// Where a gradient is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientPlace {
    /// the number of the argument that is its buffer
    pub argument: usize,
    /// its first element there
    pub offset: usize,
    /// elements of a head are contiguous
    pub strides: HeadStrides,
}

impl AttentionKernel {
    /// The operands that its gradient reads, in order. After them comes the gradient of its result, then buffers of the gradients that are stored.
    pub fn backward_inputs(&self) -> impl Iterator<Item = AttentionOperand> + use<> {
        self.operands().into_iter().filter(|&operand| operand != AttentionOperand::O)
    }

    /// The arguments of its gradient, in order, if each gradient that is stored has a buffer.
    pub fn backward_operands(&self) -> impl Iterator<Item = BackwardOperand> + use<> {
        use AttentionOperand::{K, Q, V};
        let gradients = [Q, K, V].map(BackwardOperand::Gradient);
        self.backward_inputs().map(BackwardOperand::Operand).chain([BackwardOperand::ResultGradient]).chain(gradients)
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
    /// first element and strides of gradients of queries, keys and values in their buffers
    pub places: [(usize, HeadStrides); 3],
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
    let [q, k, v] = link.gradients.map(|gradient| gradient_layout(draft, link, &gradient));
    let gradients = [q?, k?, v?];
    let results = Results { result: layout, gradients: Some(&gradients) };
    let (kernel, shape, strides) = fit_layouts(draft, request, AttentionResult::Values, results, sharing)?;
    // Heads that are summed are those that share keys.
    if kernel.group != link.group {
        return None;
    }
    // The score of a single key has no slope at all. The kernel subtracts two sums to get there, and they differ by rounding.
    // Without queries there are gradients of keys all the same, zeros, and the sizes do not tell of how many.
    if shape.keys == 1 || shape.queries == 0 {
        return None;
    }
    let places = [0, 1, 2].map(|index| (gradients[index].offset, strides[index]));
    Some(GradientFit { kernel, shape, link: *link, places })
}

/// How a gradient lies in its buffer, by the axes of queries; that of heads that share keys repeats what is summed over them.
fn gradient_layout(draft: &Draft, link: &AttentionGradientLink, gradient: &StoredGradient) -> Option<Layout> {
    let (graph, queries) = (draft.graph, &draft.graph.node(link.request.operands[0]).shape);
    let keys = &graph.node(link.request.operands[1]).shape;
    let of_queries = gradient == &link.gradients[0];
    let mut own = if of_queries { queries.clone() } else { keys.clone() };
    let shared = own.rank().checked_sub(3).filter(|_| link.group > 1 && !of_queries);
    if let Some(axis) = shared {
        let mut sizes = own.to_vec();
        sizes[axis] = 1;
        own = Shape::new(sizes);
    }
    let (order, place) = gradient.layouts(graph, draft.placement)?;
    let mut layout = reordered(&own, &order, &place)?;
    if let Some(axis) = shared {
        layout.strides[axis] = 0;
        layout.shape = keys.clone();
    }
    Some(layout)
}

/// Lowers the gradient of attention.
pub(crate) fn lower(draft: &Draft, fit: &GradientFit) -> LoweredBackward {
    let GradientFit { kernel, shape, link, places } = *fit;
    let AttentionGradientLink { request, result_gradient, gradients, .. } = link;
    let AttentionRequest { operands: [q, k, v], added, slopes, documents, seed, .. } = request;
    let read_by = |operand: AttentionOperand| match operand {
        AttentionOperand::Q => read(draft, q),
        AttentionOperand::K => read(draft, k),
        AttentionOperand::V => read(draft, v),
        AttentionOperand::Mask => read(draft, added.expect("the kernel has a mask")),
        AttentionOperand::Slopes => read(draft, slopes.expect("the kernel has slopes")),
        AttentionOperand::Documents => read(draft, documents.expect("the kernel has documents")),
        AttentionOperand::Seed => read(draft, seed.expect("the kernel has a seed")),
        // The planner finds no gradients over a cache, and the result is no operand.
        AttentionOperand::Positions | AttentionOperand::O => read(draft, result_gradient),
    };
    let mut args: Vec<ArgBinding> = kernel.backward_inputs().map(read_by).collect();
    args.push(read(draft, result_gradient));
    let first = args.len();
    let place = |index: usize| {
        let buffer = gradients[index].buffer();
        let known = args[first..].iter().position(|arg| arg.base == buffer);
        let argument = known.map_or(args.len(), |known| first + known);
        if known.is_none() {
            args.push(ArgBinding::whole(draft.graph, buffer, 0, true));
        }
        let (offset, strides) = places[index];
        GradientPlace { argument, offset, strides }
    };
    let gradients = [0, 1, 2].map(place);
    LoweredBackward { args, kernel, shape, gradients }
}

/// The gradient of attention, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredBackward {
    /// the compile-time half
    pub kernel: AttentionKernel,
    /// strides of the result are those of its gradient
    pub shape: AttentionShape,
    /// as [`AttentionKernel::backward_operands`] lists them; gradients that lie side by side are one
    pub args: Vec<ArgBinding>,
    /// of queries, keys and values
    pub gradients: [GradientPlace; 3],
}

impl LoweredBackward {
    /// One whose gradients have a buffer each, from its start on, one head after the other.
    pub fn apart(kernel: AttentionKernel, shape: AttentionShape, args: Vec<ArgBinding>) -> LoweredBackward {
        let first = kernel.backward_inputs().count() + 1;
        let key_heads = shape.heads / kernel.group.max(1);
        let rows = [(shape.heads, shape.queries), (key_heads, shape.keys), (key_heads, shape.keys)];
        let place = |index: usize| {
            let (heads, positions) = rows[index];
            let strides = HeadStrides {
                batch: heads * positions * kernel.width,
                head: positions * kernel.width,
                position: kernel.width,
            };
            GradientPlace {
                argument: first + index,
                offset: args.get(first + index).map_or(0, |arg| arg.offset),
                strides,
            }
        };
        let gradients = [0, 1, 2].map(place);
        LoweredBackward { kernel, shape, args, gradients }
    }

    /// Its arguments, as a device needs them.
    pub fn arguments(&self) -> Vec<Argument> {
        let inputs = self.kernel.backward_inputs().map(|operand| self.kernel.reach(&self.shape, operand));
        let mut reaches: Vec<usize> = inputs.collect();
        reaches.push(self.kernel.reach(&self.shape, AttentionOperand::O));
        reaches.resize(self.args.len(), 0);
        for (index, place) in self.gradients.iter().enumerate() {
            let start = self.args[place.argument].offset;
            let end = self.gradient_reach(index).map_or(0, |reach| (place.offset - start).saturating_add(reach));
            reaches[place.argument] = reaches[place.argument].max(end);
        }
        self.args.iter().zip(reaches).map(|(arg, reach)| Argument::new(arg, reach)).collect()
    }

    /// Elements from the first of a gradient to its last; none where it is empty.
    fn gradient_reach(&self, index: usize) -> Option<usize> {
        let AttentionShape { batch, heads, queries, keys, .. } = self.shape;
        let (heads, positions) = if index == 0 { (heads, queries) } else { (heads / self.kernel.group.max(1), keys) };
        let HeadStrides { batch: of_batch, head, position } = self.gradients[index].strides;
        let axes = [(batch, of_batch), (heads, head), (positions, position)];
        Some(strided_reach(axes, self.kernel.width)).filter(|&reach| reach > 0)
    }

    /// Whether every row of a gradient starts at a multiple of so many bytes.
    pub fn gradients_start_at(&self, bytes: usize) -> bool {
        let whole = |elements: usize| (elements * self.kernel.dtype.bytes()).is_multiple_of(bytes);
        let starts = |GradientPlace { offset, strides, .. }: &GradientPlace| {
            [*offset, strides.batch, strides.head, strides.position].into_iter().all(whole)
        };
        self.gradients.iter().all(starts)
    }
}
