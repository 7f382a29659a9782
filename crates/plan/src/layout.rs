//! The placement of values: views are resolved to strides over a buffer, so that most of them cost nothing.
//!
//! Each node is *inline* (a constant or an index pattern, recomputed by every reader) or *placed*: strides over the
//! buffer of a base node. A view that strides cannot express, or that a consumer cannot read through, gets a buffer
//! of its own, which a copy kernel fills.
//!
//! A cast from a 16-bit type to `f32` is a view too: its consumer reads the narrow value, which widens for free on its
//! way into a lane. Consumers that need the wide type in memory (matmuls, copies, tables) get a buffer of it; but a matmul of two
//! such casts reads the narrow values if there are kernels for it.

use deuteron_graph::{Dtype, Graph, NodeId, Op, Shape, View};

/// Sizes of matmuls that read 16-bit operands as `f32` are below this.
const COUNTED: usize = 1 << 30;

/// Strides over a base buffer, in elements.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    /// logical shape
    pub shape: Shape,
    /// one a logical axis; 0 repeats
    pub strides: Vec<usize>,
    /// first element
    pub offset: usize,
}

/// The placement of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// the node that owns the buffer
    pub base: NodeId,
    /// the layout of the value in it
    pub layout: Layout,
}

/// The placement of every node of a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    places: Vec<Option<Placed>>,
    copied: Vec<bool>,
    /// Inputs and outputs of the graph, with their bytes, which every cost needs.
    ends: Vec<(NodeId, usize)>,
}

/// How a row kernel of a given space reads a value: leading axes, then columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowAccess {
    /// (size, stride) of the leading axes, outermost first, contiguous neighbours merged, sizes of 1 dropped
    pub leading: Vec<(usize, usize)>,
    /// stride of the columns: 1, or 0 if one element is repeated over the row
    pub column_stride: usize,
    /// first element
    pub offset: usize,
}

impl Layout {
    /// Row-major, from the start of the buffer.
    pub fn contiguous(shape: &Shape) -> Layout {
        Layout { shape: shape.clone(), strides: shape.strides(), offset: 0 }
    }

    /// Whether the layout is contiguous and row-major from the start.
    pub fn is_contiguous(&self) -> bool {
        let usual = self.shape.strides();
        self.offset == 0
            && (0..self.shape.rank()).all(|axis| self.shape[axis] == 1 || self.strides[axis] == usual[axis])
    }

    /// The layout of a view of this value, or `None` if strides cannot express it.
    pub fn view(&self, view: &View) -> Option<Layout> {
        match view {
            View::Reshape(shape) => self.reshape(shape),
            View::Transpose(permutation) => Some(Layout {
                shape: Shape::new(permutation.iter().map(|&axis| self.shape[axis]).collect::<Vec<_>>()),
                strides: permutation.iter().map(|&axis| self.strides[axis]).collect(),
                offset: self.offset,
            }),
            View::Slice { axis, start, length } => {
                let mut dims = self.shape.to_vec();
                dims[*axis] = *length;
                let offset = self.offset + start * self.strides[*axis];
                Some(Layout { shape: Shape::new(dims), strides: self.strides.clone(), offset })
            }
            View::Broadcast(shape) => Some(self.broadcast(shape)),
        }
    }

    /// Axes of size 1 repeat, new leading axes repeat.
    pub fn broadcast(&self, shape: &Shape) -> Layout {
        let missing = shape.rank() - self.shape.rank();
        let strides = (0..shape.rank())
            .map(|axis| match axis.checked_sub(missing) {
                Some(own) if self.shape[own] == shape[axis] => self.strides[own],
                _ => 0,
            })
            .collect();
        Layout { shape: shape.clone(), strides, offset: self.offset }
    }

    /// Walks both shapes from the end, matching runs of axes that are contiguous in the buffer.
    fn reshape(&self, shape: &Shape) -> Option<Layout> {
        if self.shape.elements() == 0 {
            return Some(Layout::contiguous(shape));
        }
        let runs = merge_contiguous(&self.shape, &self.strides);
        let mut strides = vec![0; shape.rank()];
        let mut axis = shape.rank();
        for &(size, stride) in runs.iter().rev() {
            let mut covered = 1;
            while axis > 0 && (covered < size || shape[axis - 1] == 1) {
                axis -= 1;
                strides[axis] = stride * covered;
                covered *= shape[axis];
            }
            if covered != size {
                return None;
            }
        }
        Some(Layout { shape: shape.clone(), strides, offset: self.offset })
    }

    /// How the rows of a kernel over `space` read this value, which repeats into it; `None` if a row is not contiguous.
    pub fn row_access(&self, space: &Shape) -> Option<RowAccess> {
        let wide = self.broadcast(space);
        let cols = space.cols();
        let column_stride = if cols == 1 { 0 } else { wide.strides.last().copied().unwrap_or(0) };
        if column_stride > 1 {
            return None;
        }
        let leading = Shape::from(space.leading());
        let runs = merge_contiguous(&leading, &wide.strides[..leading.rank()]);
        Some(RowAccess { leading: runs, column_stride, offset: wide.offset })
    }
}

impl RowAccess {
    /// Element `(row, column)` is element `row * cols + column` of the buffer.
    pub fn is_identity(&self, rows: usize, cols: usize) -> bool {
        let row_stride = match self.leading.as_slice() {
            [] => return rows <= 1 && self.offset == 0 && (cols <= 1 || self.column_stride == 1),
            [(size, stride)] if *size == rows => *stride,
            _ => return false,
        };
        self.offset == 0 && row_stride == cols && (cols == 1 || self.column_stride == 1)
    }

    /// One element per row, element `row` of the buffer.
    pub fn is_per_row_identity(&self, rows: usize) -> bool {
        let in_order = match self.leading.as_slice() {
            [] => rows <= 1,
            [(size, stride)] => *size == rows && *stride == 1,
            _ => false,
        };
        self.offset == 0 && self.column_stride == 0 && in_order
    }
}

/// Drops axes of size 1 and merges neighbours that are contiguous.
pub(crate) fn merge_contiguous(shape: &Shape, strides: &[usize]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (axis, &size) in shape.iter().enumerate() {
        if size == 1 {
            continue;
        }
        match runs.last_mut() {
            Some(last) if last.1 == strides[axis] * size => *last = (last.0 * size, strides[axis]),
            _ => runs.push((size, strides[axis])),
        }
    }
    runs
}

impl Placement {
    /// The placement of a node; `None` for an inline node.
    pub fn get(&self, id: NodeId) -> Option<&Placed> {
        self.places[id.index()].as_ref()
    }

    /// The node whose buffer holds this value; `None` for an inline node.
    pub fn base(&self, id: NodeId) -> Option<NodeId> {
        self.get(id).map(|placed| placed.base)
    }

    /// Whether a kernel has to compute this node: arithmetic, or a view that needs a buffer.
    pub fn needs_kernel(&self, graph: &Graph, id: NodeId) -> bool {
        self.copied[id.index()] || is_arithmetic(graph, id)
    }

    /// The placed values a node reads: its operands, and through inline operands what those read (a mask's seed).
    pub fn reads(&self, graph: &Graph, id: NodeId) -> Vec<NodeId> {
        let mut reads = Vec::new();
        self.for_reads(graph, id, &mut |value| reads.push(value));
        reads
    }

    /// Calls `see` for each of [`Placement::reads`].
    pub fn for_reads(&self, graph: &Graph, id: NodeId, see: &mut dyn FnMut(NodeId)) {
        for &input in &graph.node(id).inputs {
            match self.get(input) {
                Some(_) => see(input),
                None => self.for_reads(graph, pattern_source(graph, input), see),
            }
        }
    }

    /// Inputs and outputs of the graph, with their bytes.
    pub(crate) fn ends(&self) -> &[(NodeId, usize)] {
        &self.ends
    }

    /// Whether this node is a view (or a pattern) with a buffer of its own.
    pub fn is_copied(&self, id: NodeId) -> bool {
        self.copied[id.index()]
    }
}

/// Ops that a kernel computes. The others are inputs, inline patterns or views.
fn is_arithmetic(graph: &Graph, id: NodeId) -> bool {
    match &graph.node(id).op {
        Op::Cast(_) => !widens(graph, id),
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select => true,
        Op::RowReduce(_) | Op::ColumnSum | Op::Matmul { .. } => true,
        Op::Gather | Op::ScatterAdd { .. } | Op::Append { .. } | Op::Concat { .. } | Op::Opaque(_) => true,
        Op::Input { .. } | Op::Const { .. } | Op::Iota { .. } | Op::Random { .. } => false,
        Op::View(_) | Op::StopGradient => false,
    }
}

/// A cast whose operand can be read from memory in its place. Casts of inline values are arithmetic.
fn widens(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    let Op::Cast(Dtype::F32) = node.op else { return false };
    let narrow = matches!(graph.node(node.inputs[0]).dtype, Dtype::F16 | Dtype::Bf16);
    narrow
        && !matches!(
            graph.node(pattern_source(graph, node.inputs[0])).op,
            Op::Const { .. } | Op::Iota { .. } | Op::Random { .. }
        )
}

/// The widening cast behind a chain of views whose buffer is of another type than the value.
fn widening_source(graph: &Graph, placement: &Placement, id: NodeId) -> Option<NodeId> {
    let base = placement.base(id)?;
    if graph.node(base).dtype == graph.node(id).dtype {
        return None;
    }
    let mut at = id;
    while !matches!(graph.node(at).op, Op::Cast(_)) {
        at = *graph.node(at).inputs.first()?;
    }
    Some(at)
}

/// Places every node. `inputs` gives the layouts of the graph's inputs; `widening` says whether there are matmuls of
/// `f32` whose operands are stored in a 16-bit type.
pub fn place(graph: &Graph, inputs: &[Layout], widening: bool) -> Placement {
    let mut copied = vec![false; graph.nodes().len()];
    // An output has a buffer of its own, even if it only looks at an input or is a constant.
    for output in graph.outputs() {
        copied[output.node.index()] = !is_arithmetic(graph, output.node);
    }
    loop {
        let placement = place_once(graph, inputs, &copied);
        let unreadable = readers_that_cannot_follow(graph, &placement, widening);
        let before = copied.iter().filter(|&&c| c).count();
        unreadable.into_iter().for_each(|id| copied[id.index()] = true);
        if copied.iter().filter(|&&c| c).count() == before {
            return placement;
        }
    }
}

fn place_once(graph: &Graph, inputs: &[Layout], copied: &[bool]) -> Placement {
    let ends = graph.inputs().iter().copied().chain(graph.outputs().iter().map(|output| output.node));
    let ends = ends.map(|id| (id, graph.node(id).bytes())).collect();
    let mut placement = Placement { places: Vec::new(), copied: copied.to_vec(), ends };
    let mut layouts: Vec<Option<&Layout>> = vec![None; graph.nodes().len()];
    graph.inputs().iter().zip(inputs).for_each(|(id, layout)| layouts[id.index()] = Some(layout));
    for id in graph.ids() {
        let node = graph.node(id);
        let own = || Some(Placed { base: id, layout: Layout::contiguous(&node.shape) });
        let place = match &node.op {
            _ if copied[id.index()] => own(),
            Op::Input { .. } => {
                let layout = layouts[id.index()].cloned();
                Some(Placed { base: id, layout: layout.unwrap_or_else(|| Layout::contiguous(&node.shape)) })
            }
            Op::Const { .. } | Op::Iota { .. } | Op::Random { .. } => None,
            Op::StopGradient => placement.places[node.inputs[0].index()].clone(),
            Op::Cast(_) if widens(graph, id) => placement.places[node.inputs[0].index()].clone(),
            Op::View(view) => match &placement.places[node.inputs[0].index()] {
                // A repeated constant is a constant. Other views of patterns get a buffer below.
                None => None,
                Some(seen) => match seen.layout.view(view) {
                    Some(layout) => Some(Placed { base: seen.base, layout }),
                    None => {
                        placement.copied[id.index()] = true;
                        own()
                    }
                },
            },
            _ => own(),
        };
        placement.places.push(place);
    }
    placement
}

/// Nodes that must be copied because a consumer cannot read their layout.
fn readers_that_cannot_follow(graph: &Graph, placement: &Placement, widening: bool) -> Vec<NodeId> {
    let mut copies = Vec::new();
    for id in graph.ids() {
        if placement.copied[id.index()] {
            copies.push(id);
        }
        let node = graph.node(id);
        let takes_memory = match node.op {
            Op::Matmul { .. } => !(widening && reads_narrow(graph, placement, id)),
            Op::Concat { .. } | Op::Gather | Op::ScatterAdd { .. } | Op::Opaque(_) | Op::Append { .. } => true,
            Op::View(_) | Op::StopGradient => placement.copied[id.index()],
            _ => false,
        };
        for (position, &input) in node.inputs.iter().enumerate() {
            if let (true, Some(cast)) = (takes_memory, widening_source(graph, placement, input)) {
                copies.push(cast);
                continue;
            }
            match placement.get(input) {
                None => copies.extend(unreadable_pattern(graph, placement, id, input)),
                Some(placed) => {
                    if !can_read(graph, id, position, &placed.layout) {
                        copies.push(input);
                    }
                }
            }
        }
    }
    copies
}

/// Whether both operands of a matmul are casts of values that are stored in one 16-bit type, and the sizes are supported.
fn reads_narrow(graph: &Graph, placement: &Placement, product: NodeId) -> bool {
    let node = graph.node(product);
    let narrow = |&operand: &NodeId| {
        let base = graph.node(placement.base(operand)?);
        let counted = graph.node(operand).shape.iter().all(|size| (1..COUNTED).contains(size));
        (matches!(base.dtype, Dtype::F16 | Dtype::Bf16) && base.op != Op::Gather && counted).then_some(base.dtype)
    };
    let [a, b] = node.inputs.as_slice() else { return false };
    node.dtype == Dtype::F32 && node.shape.elements() < COUNTED && narrow(a).is_some() && narrow(a) == narrow(b)
}

/// Row kernels can read inline values in their own shape, and constants in any shape.
fn unreadable_pattern(graph: &Graph, placement: &Placement, reader: NodeId, input: NodeId) -> Option<NodeId> {
    let source = pattern_source(graph, input);
    let is_constant = matches!(graph.node(source).op, Op::Const { .. });
    match &graph.node(reader).op {
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) => {
            let same_shape = source == input && graph.node(input).shape == graph.node(reader).shape;
            (!is_constant && !same_shape).then_some(source)
        }
        Op::RowReduce(_) | Op::ColumnSum => (!is_constant && source != input).then_some(source),
        Op::View(_) | Op::StopGradient if !placement.is_copied(reader) => (!is_constant).then_some(source),
        // An operation that is only described takes a constant as an attribute: nobody runs it from memory.
        Op::Opaque(_) if is_constant => None,
        _ => Some(input),
    }
}

/// The pattern behind a chain of views of it.
pub(crate) fn pattern_source(graph: &Graph, id: NodeId) -> NodeId {
    match graph.node(id).op {
        Op::View(_) | Op::StopGradient => pattern_source(graph, graph.node(id).inputs[0]),
        _ => id,
    }
}

fn can_read(graph: &Graph, reader: NodeId, position: usize, layout: &Layout) -> bool {
    let node = graph.node(reader);
    match &node.op {
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) => {
            layout.row_access(&node.shape).is_some()
        }
        Op::RowReduce(_) | Op::ColumnSum => layout.row_access(&layout.shape).is_some(),
        // A table is read by rows, indices one a row.
        Op::Gather if position == 0 => layout.row_access(&layout.shape).is_some_and(|access| access.leading.len() <= 1),
        Op::Gather => true,
        Op::ScatterAdd { .. } => layout.is_contiguous(),
        // The new rows may lie anywhere, each in one piece.
        Op::Append { .. } if position == 1 => layout.shape.cols() <= 1 || layout.strides.last() == Some(&1),
        Op::Append { .. } => layout.is_contiguous(),
        Op::Random { .. } => true,
        // Products and copies take any strides.
        Op::Matmul { .. } | Op::Concat { .. } | Op::View(_) | Op::StopGradient | Op::Opaque(_) => true,
        Op::Input { .. } | Op::Const { .. } | Op::Iota { .. } => true,
    }
}
