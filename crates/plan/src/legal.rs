//! Which groups are allowed, and why the others are not. Legality is a function of a set of nodes; whether a third
//! group stands between is for the search to say, which sees the whole graph.

use std::fmt;

use deuteron_graph::{Call, Callee, Composite, CompositeKind, Graph, NodeId, Op, Shape, is_recomputed};

use crate::catalog::product_size;
use crate::cost::ridge_points;
use crate::layout::{Placement, pattern_source};
use crate::machine::{Machine, MachineKind, Quantity};
use crate::plan::GroupKind;
use crate::reason::Reason;

/// The rows and columns a row kernel runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Space {
    /// product of the leading axes
    pub rows: usize,
    /// the last axis
    pub cols: usize,
}

impl Space {
    fn of(shape: &Shape) -> Space {
        Space { rows: shape.rows(), cols: shape.cols() }
    }

    /// The space that holds both: equal rows, and columns that are equal or 1.
    pub fn join(self, other: Space) -> Option<Space> {
        let cols = match (self.cols, other.cols) {
            (a, b) if a == b => a,
            (1, b) => b,
            (a, 1) => a,
            _ => return None,
        };
        (self.rows == other.rows).then_some(Space { rows: self.rows, cols })
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.cols)
    }
}

/// What stands before or after a product in its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reach {
    /// nothing
    None,
    /// elementwise work
    Pointwise,
    /// work that needs whole rows
    Rows,
}

/// A product and what shares its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatmulForm {
    /// applied while the first operand is loaded
    pub prologue: Reach,
    /// applied to the accumulators
    pub epilogue: Reach,
    /// products of one first operand
    pub products: u8,
}

/// Attention and what shares its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionForm {
    /// the output projection
    pub projection: bool,
    /// residual, bias, norm
    pub epilogue: Reach,
}

/// The skeleton that a group needs, and how much of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// elementwise work, row reductions, column sums
    Row,
    /// products
    Matmul(MatmulForm),
    /// products of a row each, whose second operands are picked from a table
    Routed {
        /// applied to the accumulators
        epilogue: Reach,
    },
    /// attention by online softmax
    Attention(AttentionForm),
    /// probabilities of attention, stored
    AttentionScores,
    /// the gradient of attention
    AttentionBackward,
    /// rows added into a table
    ScatterAdd,
    /// rows written into a cache
    Append,
    /// a view or a concatenation written out
    Copy,
    /// known only by its cost
    Opaque,
}

impl Form {
    /// The kind of kernel.
    pub fn kind(self) -> GroupKind {
        match self {
            Form::Row => GroupKind::Row,
            Form::Matmul(_) | Form::Routed { .. } => GroupKind::Matmul,
            Form::Attention(_) | Form::AttentionScores | Form::AttentionBackward => GroupKind::Attention,
            Form::ScatterAdd => GroupKind::ScatterAdd,
            Form::Append => GroupKind::Append,
            Form::Copy => GroupKind::Copy,
            Form::Opaque => GroupKind::Opaque,
        }
    }

    /// A product alone.
    pub const PRODUCT: Form = Form::Matmul(MatmulForm { prologue: Reach::None, epilogue: Reach::None, products: 1 });

    /// Attention alone.
    pub const ATTENTION: Form = Form::Attention(AttentionForm { projection: false, epilogue: Reach::None });

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Form::Row => "row",
            Form::Matmul(MatmulForm { products: 2.., epilogue: Reach::None, .. }) => "products of one operand",
            Form::Matmul(MatmulForm { products: 2.., .. }) => "products of one operand with epilogue",
            Form::Matmul(MatmulForm { prologue: Reach::None, epilogue: Reach::None, .. }) => "matmul",
            Form::Matmul(MatmulForm { prologue: Reach::None, epilogue: Reach::Pointwise, .. }) => {
                "matmul with epilogue"
            }
            Form::Matmul(MatmulForm { prologue: Reach::None, epilogue: Reach::Rows, .. }) => {
                "matmul of few rows, then norm"
            }
            Form::Matmul(MatmulForm { prologue: Reach::Pointwise, .. }) => "matmul with prologue",
            Form::Matmul(MatmulForm { prologue: Reach::Rows, .. }) => "norm, then matmul of few rows",
            Form::Routed { epilogue: Reach::None } => "routed matmul",
            Form::Routed { .. } => "routed matmul with epilogue",
            Form::Attention(AttentionForm { projection: true, .. }) => "attention block",
            Form::Attention(AttentionForm { epilogue: Reach::None, .. }) => "attention",
            Form::Attention(AttentionForm { epilogue: Reach::Pointwise, .. }) => "attention with residual",
            Form::Attention(AttentionForm { epilogue: Reach::Rows, .. }) => "attention with residual and norm",
            Form::AttentionScores => "attention scores",
            Form::AttentionBackward => "attention backward",
            Form::ScatterAdd => "scatter_add",
            Form::Append => "append",
            Form::Copy => "copy",
            Form::Opaque => "opaque",
        }
    }
}

/// The space of a node inside a row kernel: that of its operand for reductions, its own otherwise.
pub fn node_space(graph: &Graph, id: NodeId) -> Space {
    Space::of(space_shape(graph, id))
}

/// The shape behind [`node_space`].
pub(crate) fn space_shape(graph: &Graph, id: NodeId) -> &Shape {
    let node = graph.node(id);
    match node.op {
        Op::RowReduce(_) | Op::ColumnSum => &graph.node(node.inputs[0]).shape,
        _ => &node.shape,
    }
}

/// The column sum, made by the same kernel, that a node converts as it is stored: sums are of `f32`, gradients of the
/// weight's type.
pub fn finished_sum(graph: &Graph, nodes: &[NodeId], id: NodeId) -> Option<NodeId> {
    let node = graph.node(id);
    let sum = *node.inputs.first().filter(|_| matches!(node.op, Op::Cast(_)) && node.dtype.is_float())?;
    (matches!(graph.node(sum).op, Op::ColumnSum) && nodes.binary_search(&sum).is_ok()).then_some(sum)
}

/// The kind of kernel a node needs when it stands alone.
pub(crate) fn kernel_kind(graph: &Graph, placement: &Placement, id: NodeId) -> GroupKind {
    let node = graph.node(id);
    match &node.op {
        Op::Matmul { .. } => GroupKind::Matmul,
        Op::ScatterAdd { .. } => GroupKind::ScatterAdd,
        Op::Append { .. } => GroupKind::Append,
        Op::Concat { .. } => GroupKind::Copy,
        Op::Opaque(opaque) if !opaque.elementwise => GroupKind::Opaque,
        // A view with a buffer of its own copies what it sees; a pattern with a buffer is written by a row kernel.
        Op::View(_) | Op::StopGradient if placement.get(node.inputs[0]).is_some() => GroupKind::Copy,
        _ => GroupKind::Row,
    }
}

/// What legality looks at.
#[derive(Clone, Copy)]
pub(crate) struct Rules<'a> {
    pub graph: &'a Graph,
    pub placement: &'a Placement,
    pub machine: &'a Machine,
    /// The first node of the backward part, if there is one.
    pub first_backward: Option<usize>,
}

/// A value that one node makes and another reads, both in the group.
struct Edge {
    producer: NodeId,
    value: NodeId,
    consumer: NodeId,
}

impl Rules<'_> {
    /// The form of a kernel that makes `nodes` (in order) and stores `outputs` of them, or why there is none. `leaves` says
    /// whether a value is read outside of the group or handed out.
    pub fn form(&self, nodes: &[NodeId], leaves: &dyn Fn(NodeId) -> bool) -> Result<Form, Reason> {
        if let Some(first) = self.first_backward {
            let again = nodes.iter().find(|&&id| is_recomputed(self.graph, id));
            if let (Some(&value), true) = (again, nodes[0].index() < first) {
                return Err(Reason::Recomputed { value });
            }
        }
        let (needed, available) = (nodes.len(), self.machine.count(Quantity::KernelNodes));
        let kinds: Vec<GroupKind> = nodes.iter().map(|&id| kernel_kind(self.graph, self.placement, id)).collect();
        let has = |kind: GroupKind| kinds.contains(&kind);
        if needed > available && !has(GroupKind::Matmul) {
            return Err(Reason::TooManyNodes { needed, available });
        }
        if has(GroupKind::Matmul) {
            return self.form_with_products(nodes, &kinds, leaves);
        }
        if !kinds.iter().all(|&kind| kind == kinds[0]) || (nodes.len() > 1 && !self.may_be_several(nodes, kinds[0])) {
            let other = kinds.iter().find(|&&kind| kind != kinds[0]).copied().unwrap_or(kinds[0]);
            return Err(Reason::OtherKernel { producer: kinds[0], consumer: other });
        }
        match kinds[0] {
            GroupKind::Row => self.check_rows(nodes, leaves).map(|_| Form::Row),
            GroupKind::Copy => Ok(Form::Copy),
            GroupKind::ScatterAdd => Ok(Form::ScatterAdd),
            GroupKind::Append => Ok(Form::Append),
            GroupKind::Opaque => Ok(Form::Opaque),
            GroupKind::Matmul | GroupKind::Attention => Ok(Form::PRODUCT),
        }
    }

    /// Results of one opaque call are one kernel; other kinds than row kernels stand alone.
    fn may_be_several(&self, nodes: &[NodeId], kind: GroupKind) -> bool {
        match kind {
            GroupKind::Row => true,
            GroupKind::Opaque => nodes.iter().all(|&id| self.graph.node(id).call == self.graph.node(nodes[0]).call),
            GroupKind::Copy | GroupKind::ScatterAdd | GroupKind::Append => false,
            GroupKind::Matmul | GroupKind::Attention => false,
        }
    }

    /// One space, values read at their own place, nothing needed before it is complete, and room for all of it.
    fn check_rows(&self, nodes: &[NodeId], leaves: &dyn Fn(NodeId) -> bool) -> Result<Space, Reason> {
        // A sum is converted as it is stored by one node, and what is stored can be read by another kernel alone.
        let first = |sum: NodeId| nodes.iter().find(|&&id| finished_sum(self.graph, nodes, id) == Some(sum));
        let finishes =
            |id: NodeId| finished_sum(self.graph, nodes, id).is_some_and(|sum| !leaves(sum) && first(sum) == Some(&id));
        let mut edges = self.edges(nodes);
        edges.retain(|edge| !finishes(edge.consumer));
        for edge in &edges {
            let summed = matches!(self.graph.node(edge.producer).op, Op::ColumnSum) || finishes(edge.producer);
            let looked_up = matches!(self.graph.node(edge.consumer).op, Op::Gather);
            if summed || looked_up {
                return Err(Reason::NeedsAllRows { value: edge.producer });
            }
        }
        let mut space = node_space(self.graph, nodes[0]);
        for &id in nodes.iter().filter(|&&id| !finishes(id)) {
            let own = node_space(self.graph, id);
            space = space.join(own).ok_or(Reason::DifferentSpace { producer: space, consumer: own })?;
        }
        for edge in &edges {
            self.check_edge(edge, space)?;
        }
        self.check_patterns(nodes, space)?;
        self.check_resources(nodes, leaves, space)?;
        Ok(space)
    }

    /// Values made and read within the group.
    fn edges(&self, nodes: &[NodeId]) -> Vec<Edge> {
        let mut edges = Vec::new();
        for &consumer in nodes {
            self.placement.for_reads(self.graph, consumer, &mut |value| {
                let Some(producer) = self.placement.base(value) else { return };
                if nodes.binary_search(&producer).is_ok() {
                    edges.push(Edge { producer, value, consumer });
                }
            });
        }
        edges
    }

    /// Inside one kernel a value is read at its own row and column, or is one number a row.
    fn check_edge(&self, edge: &Edge, space: Space) -> Result<(), Reason> {
        let moves = || Reason::ViewMovesData { view: edge.value };
        let reader = space_shape(self.graph, edge.consumer);
        let placed = self.placement.get(edge.value).ok_or_else(moves)?;
        if !placed.layout.shape.broadcasts_to(reader) {
            return Err(moves());
        }
        let access = placed.layout.row_access(reader).ok_or_else(moves)?;
        let produced = &self.graph.node(edge.producer).shape;
        let in_place = if produced.cols() == 1 {
            produced.rows() == space.rows && access.is_per_row_identity(space.rows)
        } else {
            produced.rows() == space.rows && reader.cols() == space.cols && access.is_identity(space.rows, space.cols)
        };
        if in_place { Ok(()) } else { Err(moves()) }
    }

    /// A random mask is counted in its own shape, and a gathered row is as long as its table's: their readers keep those
    /// columns.
    fn check_patterns(&self, nodes: &[NodeId], space: Space) -> Result<(), Reason> {
        let differs = |cols: usize| {
            let consumer = Space { rows: space.rows, cols };
            if cols == space.cols { Ok(()) } else { Err(Reason::DifferentSpace { producer: space, consumer }) }
        };
        for &id in nodes {
            let node = self.graph.node(id);
            if matches!(node.op, Op::Gather | Op::Random { .. }) {
                differs(node.shape.cols())?;
            }
            for &input in &node.inputs {
                if self.placement.get(input).is_some() {
                    continue;
                }
                let pattern = self.graph.node(pattern_source(self.graph, input));
                if matches!(pattern.op, Op::Random { .. }) {
                    differs(pattern.shape.cols())?;
                }
            }
        }
        Ok(())
    }

    /// How many tensors the kernel reads and writes, and a row of temporaries for each it reads whole.
    fn check_resources(&self, nodes: &[NodeId], leaves: &dyn Fn(NodeId) -> bool, space: Space) -> Result<(), Reason> {
        let mut bases: Vec<NodeId> = Vec::new();
        let mut full_rows = 0;
        for &id in nodes {
            self.placement.for_reads(self.graph, id, &mut |value| {
                let Some(base) = self.placement.base(value) else { return };
                if nodes.binary_search(&base).is_err() && !bases.contains(&base) {
                    bases.push(base);
                    full_rows += (self.graph.node(base).shape.cols() == space.cols) as usize;
                }
            });
        }
        let outputs = nodes.iter().filter(|&&id| leaves(id)).count();
        let (needed, available) = (bases.len() + outputs, self.machine.count(Quantity::KernelArguments));
        // One node is always a kernel, however many operands it has.
        if needed > available && nodes.len() > 1 {
            return Err(Reason::TooManyArguments { needed, available });
        }
        let (needed, available) =
            (full_rows * space.cols * 4, self.machine.kilobytes(Quantity::RowScratchKb).0 as usize);
        if needed > available && nodes.len() > 1 && nodes.iter().any(|&id| self.is_reduction(id)) {
            return Err(Reason::RowTooLong { needed, available });
        }
        Ok(())
    }

    fn is_reduction(&self, id: NodeId) -> bool {
        matches!(self.graph.node(id).op, Op::RowReduce(_))
    }

    /// A group that holds products: one with its prologue and epilogue, several of one operand, or attention.
    fn form_with_products(
        &self,
        nodes: &[NodeId],
        kinds: &[GroupKind],
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Form, Reason> {
        let products: Vec<NodeId> =
            nodes.iter().zip(kinds).filter(|&(_, &kind)| kind == GroupKind::Matmul).map(|(&id, _)| id).collect();
        if nodes.len() == 1 {
            return Ok(Form::PRODUCT);
        }
        if let Some(core) = self.attention_core(&products) {
            return self.form_of_attention(nodes, kinds, leaves, core);
        }
        if self.is_whole_scores_call(nodes) {
            return Ok(Form::AttentionScores);
        }
        let other = kinds.iter().copied().find(|kind| !matches!(kind, GroupKind::Matmul | GroupKind::Row));
        if let Some(consumer) = other {
            return Err(Reason::OtherKernel { producer: GroupKind::Matmul, consumer });
        }
        self.check_shared_operand(&products)?;
        let rows: Vec<NodeId> = nodes.iter().copied().filter(|id| !products.contains(id)).collect();
        if let Some(picked) = self.picked_operand(&rows, &products) {
            return self.form_of_picked(&rows, &products, picked, leaves);
        }
        let (before, after) = self.sides(&rows, &products)?;
        if let Some(&value) = before.iter().find(|&&id| leaves(id)) {
            return Err(Reason::ReadElsewhere { value });
        }
        let prologue = self.check_side(&before, &products, leaves)?;
        let epilogue = self.check_side(&after, &products, leaves)?;
        self.check_operand_positions(&before, &products)?;
        if prologue == Reach::Rows || epilogue == Reach::Rows {
            self.check_few_rows(products[0])?;
        }
        Ok(Form::Matmul(MatmulForm { prologue, epilogue, products: products.len() as u8 }))
    }

    /// The second operands of a batch of products of one row, if each is a row of a table.
    fn picked_operand(&self, rows: &[NodeId], products: &[NodeId]) -> Option<NodeId> {
        let &[product] = products else { return None };
        let node = self.graph.node(product);
        let picked = self.placement.base(node.inputs[1]).filter(|base| rows.contains(base))?;
        let batch: usize = node.shape[..node.shape.rank() - 2].iter().product();
        let gather = self.graph.node(picked);
        let one_each = gather.shape.rows() == batch && node.shape[node.shape.rank() - 2] == 1;
        (matches!(gather.op, Op::Gather) && one_each).then_some(picked)
    }

    /// A product whose second operand is picked from a table, and what follows it. The table and the indices lie in memory, and
    /// nobody else reads what is picked.
    fn form_of_picked(
        &self,
        rows: &[NodeId],
        products: &[NodeId],
        picked: NodeId,
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Form, Reason> {
        let others: Vec<NodeId> = rows.iter().copied().filter(|&id| id != picked).collect();
        let before = self.feeding(&others, &[products[0], picked]);
        let read_again = others.iter().any(|&id| {
            let mut reads = false;
            self.placement.for_reads(self.graph, id, &mut |value| reads |= self.placement.base(value) == Some(picked));
            reads
        });
        if let Some(&value) = before.first() {
            return Err(Reason::NeedsAllRows { value });
        }
        if read_again || leaves(picked) {
            return Err(Reason::ReadElsewhere { value: picked });
        }
        let epilogue = self.check_side(&others, products, leaves)?;
        if epilogue == Reach::Rows {
            self.check_few_rows(products[0])?;
        }
        Ok(Form::Routed { epilogue })
    }

    /// Several products in one kernel read one first operand, over one size of rows.
    fn check_shared_operand(&self, products: &[NodeId]) -> Result<(), Reason> {
        let first = self.graph.node(products[0]);
        let alike = products.iter().all(|&id| {
            let node = self.graph.node(id);
            node.inputs[0] == first.inputs[0]
                && node.op == first.op
                && node.shape.rank() == first.shape.rank()
                && node.shape.rows() == first.shape.rows()
        });
        if products.len() > 3 || !alike {
            return Err(Reason::SeveralProducts { products: products.len() });
        }
        Ok(())
    }

    /// Those of `rows` whose values the targets read, directly or through others of them, in order.
    fn feeding(&self, rows: &[NodeId], targets: &[NodeId]) -> Vec<NodeId> {
        let mut found: Vec<NodeId> = Vec::new();
        let mut waiting: Vec<NodeId> = targets.to_vec();
        while let Some(reader) = waiting.pop() {
            self.placement.for_reads(self.graph, reader, &mut |value| {
                let base = self.placement.base(value).filter(|base| rows.contains(base) && !found.contains(base));
                found.extend(base);
                waiting.extend(base);
            });
        }
        found.sort_unstable();
        found
    }

    /// Row nodes before and after the products: what feeds them, and all the rest, which may also read what other kernels
    /// made. A node on both sides would have to be in two places.
    fn sides(&self, rows: &[NodeId], products: &[NodeId]) -> Result<(Vec<NodeId>, Vec<NodeId>), Reason> {
        let before = self.feeding(rows, products);
        let after: Vec<NodeId> = rows.iter().copied().filter(|id| !before.contains(id)).collect();
        // What a prologue makes exists only while an operand is loaded: the other side of the product never sees it.
        for &id in &after {
            let mut seen = None;
            self.placement.for_reads(self.graph, id, &mut |value| {
                seen = seen.or(self.placement.base(value).filter(|base| before.contains(base)));
            });
            if let Some(value) = seen {
                return Err(Reason::ReadElsewhere { value });
            }
        }
        Ok((before, after))
    }

    /// One side of a product: a row kernel's rules, over the space of the product's operand or result.
    fn check_side(
        &self,
        side: &[NodeId],
        products: &[NodeId],
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Reach, Reason> {
        if side.is_empty() {
            return Ok(Reach::None);
        }
        let space = self.check_rows(side, leaves)?;
        if let Some(&sum) = side.iter().find(|&&id| matches!(self.graph.node(id).op, Op::ColumnSum)) {
            return Err(Reason::NeedsAllRows { value: sum });
        }
        for &id in side {
            let mut problem = None;
            self.placement.for_reads(self.graph, id, &mut |value| {
                let Some(producer) = self.placement.base(value) else { return };
                if products.contains(&producer) {
                    problem = problem.take().or(self.check_edge(&Edge { producer, value, consumer: id }, space).err());
                }
            });
            problem.map_or(Ok(()), Err)?;
        }
        Ok(if side.iter().any(|&id| self.is_reduction(id)) { Reach::Rows } else { Reach::Pointwise })
    }

    /// A prologue feeds the first operand, in place.
    fn check_operand_positions(&self, before: &[NodeId], products: &[NodeId]) -> Result<(), Reason> {
        for &product in products {
            let node = self.graph.node(product);
            for (position, &input) in node.inputs.iter().enumerate() {
                let Some(base) = self.placement.base(input) else { continue };
                if before.contains(&base) && (position != 0 || self.graph.node(base).shape.rows() != node.shape.rows())
                {
                    return Err(Reason::ViewMovesData { view: input });
                }
            }
        }
        Ok(())
    }

    fn check_few_rows(&self, product: NodeId) -> Result<(), Reason> {
        let transpose_a = matches!(self.graph.node(product).op, Op::Matmul { transpose_a: true, .. });
        let (m, n, k, batch) = product_size(self.graph, product, transpose_a);
        let few = self.machine.count(Quantity::FewRows);
        let rows = m * batch;
        if rows <= few {
            return Ok(());
        }
        let element = self.graph.node(self.graph.node(product).inputs[0]).dtype.bytes();
        let intensity = 2.0 * (m * n * k) as f64 / ((m * k + k * n + m * n) * element).max(1) as f64;
        let (ridge, _) = ridge_points(self.machine, 8 * element as u32);
        let units = match self.machine.kind {
            MachineKind::Gpu => "tensor cores",
            MachineKind::Cpu => "vector units",
        };
        Err(Reason::WholeRows { intensity, ridge, rows, few, cols: n, units })
    }

    /// The attention call (or its gradient) that two of the products are parts of.
    fn attention_core(&self, products: &[NodeId]) -> Option<usize> {
        products
            .iter()
            .map(|&id| self.graph.node(id).call.index())
            .find(|&call| is_attention(&self.graph.calls()[call]))
    }

    /// Whether nodes are those of one call that stores its probabilities, all of them and no others. Parts of such a call are a
    /// product and row work like any other.
    fn is_whole_scores_call(&self, nodes: &[NodeId]) -> bool {
        let call = &self.graph.calls()[self.graph.node(nodes[0]).call.index()];
        let made = (call.start..call.end).filter_map(|index| self.graph.id(index));
        stores_scores(call) && made.filter(|&id| self.placement.needs_kernel(self.graph, id)).eq(nodes.iter().copied())
    }

    /// Attention needs its whole call; what follows it may be its output in another order, a projection, and row work.
    fn form_of_attention(
        &self,
        nodes: &[NodeId],
        kinds: &[GroupKind],
        leaves: &dyn Fn(NodeId) -> bool,
        core: usize,
    ) -> Result<Form, Reason> {
        let call = &self.graph.calls()[core];
        let in_call = |id: NodeId| (call.start..call.end).contains(&id.index());
        let missing = (call.start..call.end)
            .filter_map(|index| self.graph.id(index))
            .find(|&id| self.placement.needs_kernel(self.graph, id) && nodes.binary_search(&id).is_err());
        let products = |inside: bool| {
            let count =
                nodes.iter().zip(kinds).filter(|&(&id, &kind)| kind == GroupKind::Matmul && in_call(id) == inside);
            count.count()
        };
        if missing.is_some() {
            return match nodes.iter().all(|&id| in_call(id)) && products(true) < 2 {
                true => self.half_of_attention(nodes, leaves),
                // A neighbour of one part: attention is fused with its neighbours as a whole, or not at all.
                false if products(true) + products(false) < 2 => {
                    let outside = nodes.iter().copied().find(|&id| !in_call(id)).unwrap_or(nodes[0]);
                    let producer = kernel_kind(self.graph, self.placement, outside);
                    Err(Reason::OtherKernel { producer, consumer: GroupKind::Attention })
                }
                false => Err(Reason::SeveralProducts { products: products(true) + products(false) }),
            };
        }
        let is_backward = matches!(call.callee, Callee::Block(_));
        let rest: Vec<NodeId> = nodes.iter().copied().filter(|&id| !in_call(id)).collect();
        if is_backward {
            let other = rest.iter().find(|&&id| {
                let call = &self.graph.calls()[self.graph.node(id).call.index()];
                !recomputes_attention(call)
            });
            return match other {
                None => Ok(Form::AttentionBackward),
                Some(&id) => Err(Reason::OtherKernel {
                    producer: GroupKind::Attention,
                    consumer: kernel_kind(self.graph, self.placement, id),
                }),
            };
        }
        if products(false) > 1 {
            return Err(Reason::SeveralProducts { products: products(true) + products(false) });
        }
        self.form_after_attention(nodes, &rest, leaves, call)
    }

    /// Parts of an attention call that are a kernel on their own: a product with the work before or after it.
    fn half_of_attention(&self, nodes: &[NodeId], leaves: &dyn Fn(NodeId) -> bool) -> Result<Form, Reason> {
        let is_product = |id: NodeId| matches!(self.graph.node(id).op, Op::Matmul { .. });
        let products: Vec<NodeId> = nodes.iter().copied().filter(|&id| is_product(id)).collect();
        let rows: Vec<NodeId> = nodes.iter().copied().filter(|&id| !is_product(id)).collect();
        let (before, after) = self.sides(&rows, &products)?;
        if let Some(&value) = before.iter().find(|&&id| leaves(id)) {
            return Err(Reason::ReadElsewhere { value });
        }
        let prologue = self.check_side(&before, &products, leaves)?;
        let epilogue = self.check_side(&after, &products, leaves)?;
        if prologue == Reach::Rows || epilogue == Reach::Rows {
            self.check_few_rows(products[0])?;
        }
        Ok(Form::Matmul(MatmulForm { prologue, epilogue, products: products.len() as u8 }))
    }

    fn form_after_attention(
        &self,
        nodes: &[NodeId],
        rest: &[NodeId],
        leaves: &dyn Fn(NodeId) -> bool,
        call: &Call,
    ) -> Result<Form, Reason> {
        // Heads side by side are the columns of a row of tokens.
        let Some(&output) = call.outputs.first() else {
            return Err(Reason::SeveralProducts { products: 2 });
        };
        let shape = &self.graph.node(output).shape;
        let heads = if shape.rank() >= 3 { shape[shape.rank() - 3] } else { 1 };
        let (tokens, width) = (shape.rows() / heads.max(1), shape.cols() * heads);
        let (mut rows, mut projected) = (Vec::new(), None);
        for &id in rest {
            let node = self.graph.node(id);
            match kernel_kind(self.graph, self.placement, id) {
                GroupKind::Copy => {
                    // The output written in the order its reader wants.
                    let source = self.placement.base(node.inputs[0]);
                    if source != Some(output) || node.inputs.len() != 1 {
                        return Err(Reason::OtherKernel { producer: GroupKind::Attention, consumer: GroupKind::Copy });
                    }
                }
                GroupKind::Matmul => {
                    let operand = self.placement.base(node.inputs[0]);
                    let reads_core = operand.is_some_and(|base| nodes.binary_search(&base).is_ok());
                    // Its rows are heads side by side, some or all of them.
                    let joined = self.graph.node(node.inputs[0]).shape.cols();
                    let is_projection = reads_core
                        && joined.is_multiple_of(shape.cols())
                        && node.shape.rows() * joined == shape.elements()
                        && self.placement.base(node.inputs[1]).is_none_or(|base| nodes.binary_search(&base).is_err());
                    if !is_projection {
                        return Err(Reason::SeveralProducts { products: 3 });
                    }
                    projected = Some(node.shape.rows());
                }
                GroupKind::Row => rows.push(id),
                consumer @ (GroupKind::ScatterAdd | GroupKind::Append | GroupKind::Opaque | GroupKind::Attention) => {
                    return Err(Reason::OtherKernel { producer: GroupKind::Attention, consumer });
                }
            }
        }
        let projection = projected.is_some();
        if rows.is_empty() {
            return Ok(Form::Attention(AttentionForm { projection, epilogue: Reach::None }));
        }
        let space = self.check_rows(&rows, leaves)?;
        if let Some(&sum) = rows.iter().find(|&&id| matches!(self.graph.node(id).op, Op::ColumnSum)) {
            return Err(Reason::NeedsAllRows { value: sum });
        }
        // Row work follows the rows of tokens that attention or its projection gives: heads side by side, some or all of them.
        let joins = space.cols.is_multiple_of(shape.cols()) && space.rows * space.cols == shape.elements();
        let in_rows = projected.map_or(space.rows == tokens || joins, |rows| space.rows == rows);
        if !in_rows {
            let producer = Space { rows: projected.unwrap_or(tokens), cols: width };
            return Err(Reason::DifferentSpace { producer, consumer: space });
        }
        // What stands before attention is no part of its kernel.
        let core: Vec<NodeId> = nodes.iter().copied().filter(|id| !rows.contains(id)).collect();
        if let Some(&value) = self.feeding(&rows, &core).first() {
            return Err(Reason::ReadElsewhere { value });
        }
        let reduces = rows.iter().any(|&id| self.is_reduction(id));
        let epilogue = if reduces { Reach::Rows } else { Reach::Pointwise };
        Ok(Form::Attention(AttentionForm { projection, epilogue }))
    }
}

/// Whether a call computes scores again for a gradient.
pub(crate) fn recomputes_attention(call: &Call) -> bool {
    call.callee.recomputes() == Some(CompositeKind::Attention)
}

/// Whether a call is made of scores that are stored as probabilities.
pub(crate) fn stores_scores(call: &Call) -> bool {
    matches!(call.callee, Callee::Composite(Composite::AttentionScores { .. }))
}

/// Whether a call is attention, or its gradient.
pub(crate) fn is_attention(call: &Call) -> bool {
    let forward = matches!(call.callee, Callee::Composite(Composite::Attention { .. }));
    forward || call.callee.gradient_of() == Some(CompositeKind::Attention)
}
