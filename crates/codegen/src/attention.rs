//! Attention as one kernel: found in a group, and lowered.
//!
//! `o = dropout(softmax(scale q k^T + mask)) v`, which [`kernels::attention`](crate::kernels::attention) computes without a
//! scores matrix. A group is taken if it is the nodes of one attention call, and after them at most the copy that writes the
//! result in the order its reader wants. Scores and probabilities stay in `f32` and inside: a group that hands them out is
//! not taken, unless probabilities are all that the call is for. Row work on the result is for [`rows`], its projection for
//! [`block`], gradients for [`backward`].

pub mod backward;
pub mod block;
pub mod norm;
pub mod rows;

pub use backward::BackwardOperand;

use deuteron_graph::{Call, Callee, Composite, Dtype, Mask, NodeId, Op};
use deuteron_plan::{Draft, Layout};

use crate::argument::{ArgBinding, Argument};
use crate::kernels::attention::{Attention, Dropout};

/// Attention: what is known of it before its sizes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionKernel {
    /// storage type of queries and result
    pub dtype: Dtype,
    /// storage type of keys and values
    pub kv: Dtype,
    /// elements of a head
    pub width: usize,
    /// heads that share a head of keys and values
    pub group: usize,
    /// factor of the scores
    pub scale: f32,
    /// what is left out
    pub mask: AttentionMask,
    /// dropout of the probabilities
    pub dropout: Option<DropoutRule>,
    /// what is stored
    pub result: AttentionResult,
}

/// What attention stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionResult {
    /// probabilities times values: a row of the width for each query
    Values,
    /// the probabilities alone: a row of all keys for each query; there are no values and no dropout
    Probabilities,
}

/// What attention leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionMask {
    /// nothing
    Full,
    /// keys beyond the query's position, counted from the end
    Causal,
    /// what an argument of this type, added to the scores, makes small
    Additive(Dtype),
    /// keys beyond the query's position, an argument giving that of each sequence's first query
    Cached,
}

/// Which probabilities are dropped, but for the seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutRule {
    /// share of dropped elements
    pub probability: f64,
    /// second word of the generator's key
    pub offset: u32,
}

/// What an argument of attention is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionOperand {
    /// queries
    Q,
    /// keys
    K,
    /// values
    V,
    /// added to the scores
    Mask,
    /// an `i32` for each sequence: the position of its first query
    Positions,
    /// one `i32`: first word of the generator's key
    Seed,
    /// the result
    O,
}

impl AttentionKernel {
    /// Its arguments, in order.
    pub fn operands(&self) -> &'static [AttentionOperand] {
        use AttentionOperand::{K, Mask, O, Positions, Q, Seed, V};
        if self.result == AttentionResult::Probabilities {
            return match self.mask {
                AttentionMask::Full | AttentionMask::Causal => &[Q, K, O],
                AttentionMask::Additive(_) => &[Q, K, Mask, O],
                AttentionMask::Cached => &[Q, K, Positions, O],
            };
        }
        match (self.mask, self.dropout) {
            (AttentionMask::Full | AttentionMask::Causal, None) => &[Q, K, V, O],
            (AttentionMask::Full | AttentionMask::Causal, Some(_)) => &[Q, K, V, Seed, O],
            (AttentionMask::Additive(_), None) => &[Q, K, V, Mask, O],
            (AttentionMask::Additive(_), Some(_)) => &[Q, K, V, Mask, Seed, O],
            (AttentionMask::Cached, None) => &[Q, K, V, Positions, O],
            (AttentionMask::Cached, Some(_)) => &[Q, K, V, Positions, Seed, O],
        }
    }

    /// The storage type of an argument.
    pub fn operand_dtype(&self, operand: AttentionOperand) -> Dtype {
        match (operand, self.mask) {
            (AttentionOperand::Seed | AttentionOperand::Positions, _) => Dtype::I32,
            (AttentionOperand::Mask, AttentionMask::Additive(dtype)) => dtype,
            (AttentionOperand::K | AttentionOperand::V, _) => self.kv,
            (_, _) => self.dtype,
        }
    }

    /// Elements of a row of the result.
    pub fn result_row(&self, shape: &AttentionShape) -> usize {
        match self.result {
            AttentionResult::Values => self.width,
            AttentionResult::Probabilities => shape.keys,
        }
    }

    /// What is computed for these sizes and this seed.
    pub fn sized(&self, shape: &AttentionShape, seed: u32) -> Attention {
        let &AttentionShape { batch, heads, queries, keys, .. } = shape;
        let dropout = |DropoutRule { probability, offset }| Dropout { probability, seed, offset };
        Attention {
            dtype: self.dtype,
            kv: self.kv,
            batch,
            heads,
            kv_heads: heads / self.group.max(1),
            queries,
            keys,
            width: self.width,
            scale: self.scale,
            causal: matches!(self.mask, AttentionMask::Causal | AttentionMask::Cached),
            dropout: self.dropout.map(dropout),
        }
    }

    /// In words.
    pub fn describe(&self) -> String {
        let mask = match self.mask {
            AttentionMask::Full => "",
            AttentionMask::Causal => "causal ",
            AttentionMask::Additive(_) => "masked ",
            AttentionMask::Cached => "cached ",
        };
        let group = if self.group > 1 { format!(", {} heads a key head", self.group) } else { String::new() };
        let dropout = self.dropout.map_or(String::new(), |rule| format!(", dropout {}", rule.probability));
        let (dtype, width) = (self.dtype, self.width);
        let keys = if self.kv == dtype { String::new() } else { format!(", {} keys and values", self.kv) };
        let what = match self.result {
            AttentionResult::Values => "attention by online softmax",
            AttentionResult::Probabilities => "probabilities of attention",
        };
        format!("{mask}{what}, heads of {width}{group}{dropout}, {dtype} in and out{keys}, f32 sums")
    }
}

/// Sizes and strides of a launch of attention. Elements of a head, and keys of a mask, follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// sequences
    pub batch: usize,
    /// heads of queries
    pub heads: usize,
    /// queries of a sequence
    pub queries: usize,
    /// keys of a sequence
    pub keys: usize,
    /// of the queries
    pub q: HeadStrides,
    /// of the keys, a head for each group of heads
    pub k: HeadStrides,
    /// of the values, likewise
    pub v: HeadStrides,
    /// of the mask, by query; zeros without one
    pub mask: HeadStrides,
    /// of the result
    pub o: HeadStrides,
}

/// Elements from one index to the next; 0 repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeadStrides {
    /// from one sequence to the next
    pub batch: usize,
    /// from one head to the next
    pub head: usize,
    /// from one position to the next
    pub position: usize,
}

/// Attention found in a group.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundAttention {
    /// the compile-time half
    pub kernel: AttentionKernel,
    /// the run-time half
    pub shape: AttentionShape,
    /// queries, keys and values; keys once more where only probabilities are wanted
    pub operands: [NodeId; 3],
    /// what is added to the scores
    pub mask: Option<NodeId>,
    /// the first position of each sequence
    pub positions: Option<NodeId>,
    /// the seed of dropout
    pub seed: Option<NodeId>,
    /// what is stored
    pub result: NodeId,
}

/// Sees a group as attention, or `None` where it is more, less or something that the kernel does not do.
pub fn recognise(draft: &Draft) -> Option<FoundAttention> {
    let graph = draft.graph;
    let call = graph.calls().get(graph.node(*draft.nodes.first()?).call.index())?;
    let result = *draft.nodes.last()?;
    let in_call = |id: NodeId| (call.start..call.end).contains(&id.index());
    let alone = draft.nodes.iter().all(|&id| in_call(id) || id == result);
    if alone && draft.outputs == [result] { find(draft, call, result) } else { None }
}

/// Attention in a group of more, none of whose own values is stored.
struct Followed<'a> {
    call: &'a Call,
    /// its output, or the copy of that
    result: NodeId,
    /// what follows, in order
    rest: Vec<NodeId>,
}

impl Followed<'_> {
    /// Whether a node is attention's.
    fn inside(&self, id: NodeId) -> bool {
        (self.call.start..self.call.end).contains(&id.index()) || id == self.result
    }
}

/// The attention of a group in which something follows it.
fn followed<'a>(draft: &Draft<'a>) -> Option<Followed<'a>> {
    let (graph, placement) = (draft.graph, draft.placement);
    let is_attention = |id: &&NodeId| {
        let callee = &graph.calls()[graph.node(**id).call.index()].callee;
        matches!(callee, Callee::Composite(Composite::Attention { .. }))
    };
    let call = &graph.calls()[graph.node(*draft.nodes.iter().find(is_attention)?).call.index()];
    let &[output] = call.outputs.as_slice() else { return None };
    let in_call = |id: NodeId| (call.start..call.end).contains(&id.index());
    let mut rest: Vec<NodeId> = draft.nodes.iter().copied().filter(|&id| !in_call(id)).collect();
    let is_copy = |&id: &NodeId| {
        let node = graph.node(id);
        let moves = matches!(node.op, Op::View(_) | Op::StopGradient);
        moves && node.inputs.first().and_then(|&input| placement.base(input)) == Some(output)
    };
    let result = rest.iter().position(is_copy).map_or(output, |position| rest.remove(position));
    let followed = Followed { call, result, rest };
    let stored = draft.outputs.iter().any(|&id| followed.inside(id));
    (!followed.rest.is_empty() && !stored).then_some(followed)
}

/// The attention of a call whose nodes are all in the group, given as `result`: its output, or a copy of that.
fn find(draft: &Draft, call: &Call, result: NodeId) -> Option<FoundAttention> {
    let (graph, placement) = (draft.graph, draft.placement);
    let asked = Asked::of(&call.callee)?;
    let &[output] = call.outputs.as_slice() else { return None };
    let mut rest = call.inputs.iter().copied();
    let (q, k) = (rest.next()?, rest.next()?);
    let v = match asked.wanted {
        AttentionResult::Values => rest.next()?,
        AttentionResult::Probabilities if result == output => k,
        AttentionResult::Probabilities => return None,
    };
    let mask = if asked.kind == Mask::Additive { Some(rest.next()?) } else { None };
    let positions = if asked.kind == Mask::Cached { Some(rest.next()?) } else { None };
    let seed = if asked.p > 0.0 { Some(rest.next()?) } else { None };

    let whole = (call.start..call.end)
        .filter_map(|index| graph.id(index))
        .all(|id| !placement.needs_kernel(graph, id) || draft.nodes.binary_search(&id).is_ok());
    if !whole {
        return None;
    }

    let (own, operands) = (&graph.node(output).shape, [q, k, v]);
    let written = if result == output { Layout::contiguous(own) } else { reordered(draft, output, result)? };
    let rule = Rule { asked, operands, mask, positions, seed };
    let (kernel, shape) = fit(draft, &rule, written, Sharing::Groups)?;
    Some(FoundAttention { kernel, shape, operands, mask, positions, seed, result })
}

/// What an attention call computes.
#[derive(Debug, Clone, Copy)]
struct Asked {
    kind: Mask,
    scale: f64,
    p: f64,
    offset: u32,
    wanted: AttentionResult,
}

impl Asked {
    fn of(callee: &Callee) -> Option<Asked> {
        match *callee {
            Callee::Composite(Composite::Attention { mask: kind, scale, p, offset }) => {
                Some(Asked { kind, scale, p, offset, wanted: AttentionResult::Values })
            }
            Callee::Composite(Composite::AttentionScores { mask: kind, scale }) => {
                Some(Asked { kind, scale, p: 0.0, offset: 0, wanted: AttentionResult::Probabilities })
            }
            Callee::Composite(_) | Callee::Primitive | Callee::Block(_) => None,
        }
    }
}

/// The same, of which values.
#[derive(Debug, Clone, Copy)]
struct Rule {
    asked: Asked,
    operands: [NodeId; 3],
    mask: Option<NodeId>,
    positions: Option<NodeId>,
    seed: Option<NodeId>,
}

/// What becomes of heads that share keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// they are a group
    Groups,
    /// each reads what lies at a stride of 0
    Alone,
}

/// The kernel of a rule whose result lies as given, if its operands lie so that there is one.
fn fit(draft: &Draft, rule: &Rule, result: Layout, sharing: Sharing) -> Option<(AttentionKernel, AttentionShape)> {
    let (graph, placement) = (draft.graph, draft.placement);
    let &Rule { asked: Asked { kind, scale, p, offset, wanted }, operands: [q, k, v], mask, positions, seed } = rule;
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
    let added = match mask {
        None => Layout { shape: scores.clone(), strides: vec![0; scores.rank()], offset: 0 },
        Some(value) => {
            let placed = placement.get(value)?;
            let base = graph.node(placed.base).dtype;
            mask_dtype = Some(base);
            let readable = base.is_float() && placed.layout.shape.broadcasts_to(&scores);
            Some(placed.layout.broadcast(&scores)).filter(|layout| readable && in_rows(layout))?
        }
    };
    if let Some(value) = positions {
        let placed = placement.get(value)?;
        let in_order = shape[0] == 1 || placed.layout.strides == [1];
        (in_order && graph.node(placed.base).dtype == Dtype::I32).then_some(())?;
    }
    if let Some(value) = seed {
        let base = placement.base(value)?;
        (graph.node(base).dtype == Dtype::I32).then_some(())?;
    }

    let result = Some(&result).filter(|layout| in_rows(layout))?;
    let layouts = [heads(q, dtype)?, heads(k, kv)?, heads(v, kv)?, &added, result];
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
        o: strides(O),
    };
    kernel.sized(&shape, 0).refusal().is_none().then_some(())?;
    Some((kernel, shape))
}

/// Attention, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredAttention {
    /// the compile-time half
    pub kernel: AttentionKernel,
    /// sizes and strides
    pub shape: AttentionShape,
    /// as [`AttentionKernel::operands`] lists them
    pub args: Vec<ArgBinding>,
}

impl LoweredAttention {
    /// Lowers attention that was found in a group.
    pub(crate) fn new(draft: &Draft, found: &FoundAttention) -> LoweredAttention {
        LoweredAttention { kernel: found.kernel, shape: found.shape, args: arguments(draft, found) }
    }

    /// What a device has to know of its arguments.
    pub fn arguments(&self) -> Vec<Argument> {
        let operands = self.kernel.operands().iter().zip(&self.args);
        operands.map(|(&operand, arg)| Argument::new(arg, self.kernel.reach(&self.shape, operand))).collect()
    }
}

impl AttentionKernel {
    /// Elements from its first one on that an operand reaches.
    pub fn reach(&self, shape: &AttentionShape, operand: AttentionOperand) -> usize {
        let &AttentionShape { batch, heads, queries, keys, .. } = shape;
        let key_heads = self.sized(shape, 0).kv_heads;
        // Sizes, strides, and elements that follow each other.
        let (sizes, strides, run) = match operand {
            AttentionOperand::Q => ([batch, heads, queries], shape.q, self.width),
            AttentionOperand::K => ([batch, key_heads, keys], shape.k, self.width),
            AttentionOperand::V => ([batch, key_heads, keys], shape.v, self.width),
            AttentionOperand::Mask => ([batch, heads, queries], shape.mask, keys),
            AttentionOperand::O => ([batch, heads, queries], shape.o, self.result_row(shape)),
            AttentionOperand::Positions => return batch,
            AttentionOperand::Seed => return 1,
        };
        if sizes.contains(&0) || run == 0 {
            return 0;
        }
        let steps = [strides.batch, strides.head, strides.position];
        sizes.iter().zip(steps).map(|(size, step)| (size - 1) * step).sum::<usize>() + run
    }
}

/// The arguments of attention, as [`AttentionKernel::operands`] lists them.
fn arguments(draft: &Draft, found: &FoundAttention) -> Vec<ArgBinding> {
    let FoundAttention { kernel, operands: [q, k, v], mask, positions, seed, result, .. } = *found;
    let read = |value: NodeId| read(draft, value);
    let args = kernel.operands().iter().map(|operand| match operand {
        AttentionOperand::Q => read(q),
        AttentionOperand::K => read(k),
        AttentionOperand::V => read(v),
        AttentionOperand::Mask => read(mask.expect("the kernel has a mask")),
        AttentionOperand::Positions => read(positions.expect("the kernel has positions")),
        AttentionOperand::Seed => read(seed.expect("the kernel has a seed")),
        AttentionOperand::O => ArgBinding::whole(draft.graph, result, 0, true),
    });
    args.collect()
}

/// The argument that a value is read from.
fn read(draft: &Draft, value: NodeId) -> ArgBinding {
    let placed = draft.placement.get(value).expect("operands of attention are placed");
    ArgBinding::whole(draft.graph, placed.base, placed.layout.offset, false)
}

/// How the output lies in the buffer of a copy of it: the copy's axes are the output's in another order.
fn reordered(draft: &Draft, output: NodeId, copy: NodeId) -> Option<Layout> {
    let node = draft.graph.node(copy);
    let &[input] = node.inputs.as_slice() else { return None };
    let placed = draft.placement.get(input).filter(|placed| placed.base == output)?;
    let seen = match &node.op {
        // Where strides cannot express the view, the order of elements is its operand's.
        Op::View(view) => placed.layout.view(view).unwrap_or_else(|| placed.layout.clone()),
        Op::StopGradient => placed.layout.clone(),
        _ => return None,
    };
    let own = Layout::contiguous(&draft.graph.node(output).shape);
    if seen.offset != 0 || seen.shape.elements() != own.shape.elements() {
        return None;
    }
    let to = seen.shape.strides();
    let strides = (0..own.shape.rank()).map(|axis| {
        let (size, stride) = (own.shape[axis], own.strides[axis]);
        let same = |&there: &usize| seen.shape[there] == size && seen.strides[there] == stride;
        if size == 1 { Some(0) } else { (0..to.len()).find(same).map(|there| to[there]) }
    });
    Some(Layout { strides: strides.collect::<Option<_>>()?, shape: own.shape.clone(), offset: 0 })
}

/// Positions of the operands among strides.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const MASK: usize = 3;
const O: usize = 4;

/// A leading axis: its size, and the stride of each operand.
#[derive(Clone, Copy)]
struct Axis {
    size: usize,
    strides: [usize; 5],
}

impl Axis {
    const ONE: Axis = Axis { size: 1, strides: [0; 5] };

    /// Whether an operand goes on where `inner` ends.
    fn continues(&self, inner: &Axis, operand: usize) -> bool {
        self.strides[operand] == inner.strides[operand] * inner.size
    }
}

/// Leading axes as sequences and heads.
struct Split {
    batch: Axis,
    /// Strides of keys and values are those of a head of keys.
    head: Axis,
    group: usize,
}

impl Split {
    const EMPTY: Split = Split { batch: Axis { size: 0, ..Axis::ONE }, head: Axis::ONE, group: 1 };
}

/// Merges axes that follow each other in every operand; `None` where more than two are left. The first axis is kept as the
/// sequences if those are `told_apart`.
fn split(sizes: &[usize], layouts: [&Layout; 5], sharing: Sharing, told_apart: bool) -> Option<Split> {
    let axis = |at: usize| Axis { size: sizes[at], strides: layouts.map(|layout| layout.strides[at]) };
    let mut axes: Vec<Axis> = Vec::new();
    for at in (usize::from(told_apart)..sizes.len()).filter(|&at| sizes[at] != 1) {
        let (axis, size) = (axis(at), sizes[at]);
        match axes.last_mut() {
            Some(last) if (0..5).all(|operand| last.continues(&axis, operand)) => {
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
        if axes.is_empty() || [Q, MASK, O].iter().all(|&operand| outer.continues(&head, operand)) {
            axes.pop();
            group = head.size;
            head.size *= outer.size;
            (head.strides[K], head.strides[V]) = (outer.strides[K], outer.strides[V]);
        }
    }
    let batch = if told_apart { axis(0) } else { axes.pop().unwrap_or(Axis::ONE) };
    axes.is_empty().then_some(Split { batch, head, group })
}
