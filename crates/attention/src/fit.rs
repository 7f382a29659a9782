//! Whether a kernel supports the layout of attention's operands, and its arguments.

use deuteron_codegen::argument::ArgBinding;
use deuteron_graph::{Dtype, Mask, NodeId, Op, Shape};
use deuteron_plan::{AttentionLink, AttentionRequest, Draft, Layout};

use super::kernel::{
    AttentionKernel, AttentionMask, AttentionOperand, AttentionResult, AttentionShape, DropoutRule, HeadStrides,
    LoweredAttention,
};
use super::score::ScoreRules;

/// Attention and the values it reads and makes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionFit {
    /// the compile-time half
    pub kernel: AttentionKernel,
    /// the run-time half
    pub shape: AttentionShape,
    /// its operands
    pub request: AttentionRequest,
    /// its result, stored or passed on
    pub result: NodeId,
}

/// Attention of a link, independent of the use of its result.
pub(super) fn fit_link(draft: &Draft, link: &AttentionLink, wanted: AttentionResult) -> Option<AttentionFit> {
    let (request, result) = (link.request, link.result()?);
    let written = match result == link.output {
        true => Layout::contiguous(&draft.graph.node(result).shape),
        false => copy_layout(draft, link.output, result)?,
    };
    let results = Results { result: written, gradients: None };
    let (kernel, shape, _) = fit_layouts(draft, &request, wanted, results, Sharing::Groups)?;
    Some(AttentionFit { kernel, shape, request, result })
}

/// The treatment of heads that share keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sharing {
    /// they are a group
    Groups,
    /// each reads its keys at a stride of 0
    Alone,
}

/// How results lie in their buffers.
pub(super) struct Results<'a> {
    /// the result, or the gradient of it
    pub result: Layout,
    /// of queries, keys and values, by the axes of queries; a kernel of the gradient stores them
    pub gradients: Option<&'a [Layout; 3]>,
}

/// The kernel of a request with the given layouts of results, if the layout of its operands is supported, and the strides of gradients.
pub(super) fn fit_layouts(
    draft: &Draft,
    request: &AttentionRequest,
    wanted: AttentionResult,
    results: Results,
    sharing: Sharing,
) -> Option<(AttentionKernel, AttentionShape, [HeadStrides; 3])> {
    let (graph, placement) = (draft.graph, draft.placement);
    let &AttentionRequest { mask: kind, scale, p, offset, operands: [q, k, v], work, added, positions, seed, .. } =
        request;
    let [dtype, kv] = [q, k].map(|value| graph.node(value).dtype);
    let (shape, key_shape) = (&graph.node(q).shape, &graph.node(k).shape);
    let leading = shape.rank().checked_sub(2)?;
    let (queries, keys, width) = (shape[leading], key_shape[leading], shape.cols());
    if graph.node(v).shape != *key_shape || key_shape[..leading] != shape[..leading] {
        return None;
    }
    // A tensor of heads, as the kernel reads it: elements of a head follow each other.
    let in_rows = |layout: &Layout| layout.shape.cols() == 1 || layout.strides.last() == Some(&1);
    let heads = |value: NodeId, dtype: Dtype| {
        let placed = placement.get(value)?;
        (graph.node(placed.base).dtype == dtype && in_rows(&placed.layout)).then_some(&placed.layout)
    };
    let (scores, mut mask_dtype) = (shape.with_cols(keys), None);
    let added = match added {
        None => Layout { shape: scores.clone(), strides: vec![0; scores.rank()], offset: 0 },
        Some(value) => {
            let placed = placement.get(value)?;
            let base = graph.node(placed.base).dtype;
            mask_dtype = Some(base);
            let readable = base.is_float() && placed.layout.shape.broadcasts_to(&scores);
            Some(placed.layout.broadcast(&scores)).filter(|layout| readable && in_rows(layout))?
        }
    };
    let slopes = of_heads(draft, request.slopes, &scores, Dtype::F32, 1)?;
    let documents = of_heads(draft, request.documents, &scores, Dtype::I32, keys)?;
    if let Some(value) = positions {
        let placed = placement.get(value)?;
        let in_order = shape[0] == 1 || placed.layout.strides == [1];
        (in_order && graph.node(placed.base).dtype == Dtype::I32).then_some(())?;
    }
    if let Some(value) = seed {
        let base = placement.base(value)?;
        (graph.node(base).dtype == Dtype::I32).then_some(())?;
    }

    let result = Some(&results.result).filter(|layout| in_rows(layout))?;
    let nowhere = Layout { shape: shape.clone(), strides: vec![0; shape.rank()], offset: 0 };
    let [dq, dk, dv] = match results.gradients {
        Some(gradients) => gradients.each_ref(),
        None => [&nowhere; 3],
    };
    if results.gradients.is_some() && ![dq, dk, dv].into_iter().all(in_rows) {
        return None;
    }
    let layouts = [heads(q, dtype)?, heads(k, kv)?, heads(v, kv)?, &added, result, &slopes, &documents, dq, dk, dv];
    let told_apart = positions.is_some();
    let split =
        if shape.elements() == 0 { Split::EMPTY } else { split(&shape[..leading], layouts, sharing, told_apart)? };
    let strides = |operand: usize| HeadStrides {
        batch: split.batch.strides[operand],
        head: split.head.strides[operand],
        position: layouts[operand].strides[leading],
    };
    let kernel = AttentionKernel {
        dtype,
        kv,
        width,
        group: split.group,
        scale: scale as f32,
        mask: match (kind, mask_dtype) {
            (Mask::Causal, _) => AttentionMask::Causal,
            (Mask::Cached, _) => AttentionMask::Cached,
            (Mask::Additive, Some(dtype)) => AttentionMask::Additive(dtype),
            (Mask::Full | Mask::Additive, _) => AttentionMask::Full,
        },
        scores: ScoreRules::of(&work, mask_dtype),
        dropout: seed.map(|_| DropoutRule { probability: p, offset }),
        result: wanted,
    };
    let shape = AttentionShape {
        batch: split.batch.size,
        heads: split.head.size,
        queries,
        keys,
        q: strides(Q),
        k: strides(K),
        v: strides(V),
        mask: strides(MASK),
        slopes: strides(SLOPES),
        documents: strides(DOCUMENTS),
        o: strides(O),
    };
    kernel.sized(&shape, 0).refusal().is_none().then_some(())?;
    Some((kernel, shape, [DQ, DK, DV].map(strides)))
}

/// The layout over the heads of scores of an operand of this type: one number per head, or a row of numbers for all queries of a head. Zeros
/// for one that there is not.
fn of_heads(draft: &Draft, value: Option<NodeId>, scores: &Shape, dtype: Dtype, run: usize) -> Option<Layout> {
    let leading = scores.rank() - 2;
    let Some(value) = value else {
        return Some(Layout { shape: scores.clone(), strides: vec![0; scores.rank()], offset: 0 });
    };
    let placed = draft.placement.get(value)?;
    let (layout, own) = (&placed.layout, placed.layout.shape.rank());
    // Of a row per sequence, the first axis is that of sequences; of a number per head, all are those of scores.
    let mut strides = vec![0; scores.rank()];
    if run == 1 {
        for axis in 0..own.saturating_sub(2) {
            let there = scores.rank() - own + axis;
            strides[there] = if layout.shape[axis] == 1 { 0 } else { layout.strides[axis] };
        }
    } else if own == 2 && layout.shape[0] > 1 {
        strides[0] = layout.strides[0];
    }
    let in_rows = run == 1 || layout.shape.cols() == 1 || layout.strides.last() == Some(&1);
    let fits = draft.graph.node(placed.base).dtype == dtype && in_rows && leading + 2 >= own;
    fits.then(|| Layout { shape: scores.clone(), strides, offset: layout.offset })
}

/// The arguments of attention, as [`AttentionKernel::operands`] lists them.
pub(super) fn arguments(draft: &Draft, fit: &AttentionFit) -> Vec<ArgBinding> {
    let AttentionRequest { operands: [q, k, v], added, positions, slopes, documents, seed, .. } = fit.request;
    let read = |value: NodeId| read(draft, value);
    let args = fit.kernel.operands().into_iter().map(|operand| match operand {
        AttentionOperand::Q => read(q),
        AttentionOperand::K => read(k),
        AttentionOperand::V => read(v),
        AttentionOperand::Mask => read(added.expect("the kernel has a mask")),
        AttentionOperand::Positions => read(positions.expect("the kernel has positions")),
        AttentionOperand::Slopes => read(slopes.expect("the kernel has slopes")),
        AttentionOperand::Documents => read(documents.expect("the kernel has documents")),
        AttentionOperand::Seed => read(seed.expect("the kernel has a seed")),
        AttentionOperand::O => ArgBinding::whole(draft.graph, fit.result, 0, true),
    });
    args.collect()
}

/// The argument that a value is read from.
pub(super) fn read(draft: &Draft, value: NodeId) -> ArgBinding {
    let placed = draft.placement.get(value).expect("operands of attention are placed");
    ArgBinding::whole(draft.graph, placed.base, placed.layout.offset, false)
}

/// The layout of the output in the buffer of its copy.
fn copy_layout(draft: &Draft, output: NodeId, copy: NodeId) -> Option<Layout> {
    let node = draft.graph.node(copy);
    let &[input] = node.inputs.as_slice() else { return None };
    let placed = draft.placement.get(input).filter(|placed| placed.base == output)?;
    let seen = match &node.op {
        // Where strides cannot express the view, the order of elements is its operand's.
        Op::View(view) => placed.layout.view(view).unwrap_or_else(|| placed.layout.clone()),
        Op::StopGradient => placed.layout.clone(),
        _ => return None,
    };
    reordered(&draft.graph.node(output).shape, &seen, &Layout::contiguous(&seen.shape))
}

/// The layout of a value of this shape in a buffer that holds its elements in another order: `order` goes over the value, and `place`, which
/// has the same shape, over the buffer. Axes of `order` are those of the value, neighbouring ones may be merged.
pub(super) fn reordered(own: &Shape, order: &Layout, place: &Layout) -> Option<Layout> {
    let usual = own.strides();
    if order.offset != 0 || order.shape.elements() != own.elements() {
        return None;
    }
    let strides = (0..own.rank()).map(|axis| {
        let (size, stride) = (own[axis], usual[axis]);
        // An axis of the value is one of the buffer's, or a part of one: heads of a group are neighbours among all heads.
        let holds = |&there: &usize| {
            let (all, step) = (order.shape[there], order.strides[there]);
            step > 0 && stride.is_multiple_of(step) && all.is_multiple_of(size * (stride / step))
        };
        let stride_there = |there: usize| place.strides[there] * (stride / order.strides[there]);
        if size == 1 { Some(0) } else { (0..order.shape.rank()).find(holds).map(stride_there) }
    });
    Some(Layout { strides: strides.collect::<Option<_>>()?, shape: own.clone(), offset: place.offset })
}

/// Positions of the operands among strides.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const MASK: usize = 3;
const O: usize = 4;
const SLOPES: usize = 5;
const DOCUMENTS: usize = 6;
const DQ: usize = 7;
const DK: usize = 8;
const DV: usize = 9;
const OPERANDS: usize = 10;

/// A leading axis: its size, and the stride of each operand.
#[derive(Clone, Copy)]
struct Axis {
    size: usize,
    strides: [usize; OPERANDS],
}

impl Axis {
    const ONE: Axis = Axis { size: 1, strides: [0; OPERANDS] };

    /// Whether an operand continues where `inner` ends.
    fn continues(&self, inner: &Axis, operand: usize) -> bool {
        self.strides[operand] == inner.strides[operand] * inner.size
    }
}

/// Leading axes as sequences and heads.
struct Split {
    batch: Axis,
    /// Strides of keys and values, and of their gradients, are those of a head of keys.
    head: Axis,
    group: usize,
}

impl Split {
    const EMPTY: Split = Split { batch: Axis { size: 0, ..Axis::ONE }, head: Axis::ONE, group: 1 };
}

/// Merges axes that are contiguous in every operand; `None` if more than two are left. The first axis is kept as the
/// sequences if those are `told_apart`.
fn split(sizes: &[usize], layouts: [&Layout; OPERANDS], sharing: Sharing, told_apart: bool) -> Option<Split> {
    let axis = |at: usize| Axis { size: sizes[at], strides: layouts.map(|layout| layout.strides[at]) };
    let mut axes: Vec<Axis> = Vec::new();
    for at in (usize::from(told_apart)..sizes.len()).filter(|&at| sizes[at] != 1) {
        let (axis, size) = (axis(at), sizes[at]);
        match axes.last_mut() {
            Some(last) if (0..OPERANDS).all(|operand| last.continues(&axis, operand)) => {
                *last = Axis { size: last.size * size, ..axis };
            }
            _ => axes.push(axis),
        }
    }
    let mut head = axes.pop().unwrap_or(Axis::ONE);
    let mut group = 1;
    if sharing == Sharing::Groups && head.size > 1 && head.strides[K] == 0 && head.strides[V] == 0 {
        // Heads that share keys: with the axis before them they are all heads.
        let outer = axes.last().copied().unwrap_or(Axis::ONE);
        if axes.is_empty() || [Q, MASK, O, SLOPES, DOCUMENTS, DQ].iter().all(|&operand| outer.continues(&head, operand))
        {
            axes.pop();
            group = head.size;
            head.size *= outer.size;
            for of_keys in [K, V, DK, DV] {
                head.strides[of_keys] = outer.strides[of_keys];
            }
        }
    }
    let batch = if told_apart { axis(0) } else { axes.pop().unwrap_or(Axis::ONE) };
    axes.is_empty().then_some(Split { batch, head, group })
}

impl LoweredAttention {
    /// Lowers attention.
    pub fn new(draft: &Draft, fit: &AttentionFit) -> LoweredAttention {
        LoweredAttention { kernel: fit.kernel, shape: fit.shape, args: arguments(draft, fit) }
    }
}
