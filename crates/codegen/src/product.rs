//! Products of our own, with what makes their first operand and what follows them while their sums are hot.
//!
//! Both are row bodies like any other, but for one kind of argument: values that lie in the worker's scratch as `f32` and never in
//! memory. The *head* writes the first operand, the *tail* reads the sums. Either is rounded to the dtype of its node, as it would
//! be if it were stored: a fused plan gives the bits of an unfused one.

use deuteron_graph::{Dtype, NodeId, Op, Shape};
use deuteron_plan::{Chain, Draft, Link, Space, node_space};

mod routed;

use crate::body::{Access, ArgSpec, Body};
use crate::cpu::program::Program;
use crate::lower::{lower_matmul_shape, lower_rows, whole};
use crate::source::{ArgBinding, Geometry, Kernel, Launch, Lowered, MatmulShape};

/// Rows of a product, at most, that a head is made for: its kernel reads every weight once and holds all of these rows, so the head
/// runs once for each worker, and not for every block of columns.
pub const HEAD_ROWS: usize = 8;

/// One or two products of one first operand, and what stands around them, as bodies or as what the bodies became.
#[derive(Debug, Clone, PartialEq)]
pub struct Product<T> {
    /// storage type of the first operand
    pub left: Dtype,
    /// storage type of the second operands
    pub right: Dtype,
    /// storage type of the product where it is stored as it is
    pub result: Dtype,
    /// second operands, which lie alike: 1 or 2
    pub rights: usize,
    /// whether the second operand is a table of matrices, of which an index picks one for each row
    pub routed: bool,
    /// what makes the first operand; none: it lies in memory
    pub head: Option<Head<T>>,
    /// what follows; none: the sums are stored
    pub tail: Option<Tail<T>>,
}

/// What makes the first operand of a product.
#[derive(Debug, Clone, PartialEq)]
pub struct Head<T> {
    /// over all rows of the product and its inner size
    pub body: T,
    /// which of its arguments is the operand
    pub made: usize,
}

/// What follows a product.
#[derive(Debug, Clone, PartialEq)]
pub struct Tail<T> {
    /// over all rows of the product and its columns
    pub body: T,
    /// which of its arguments are the sums, one a second operand
    pub sums: Vec<usize>,
}

/// What an argument of a product's launch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// the first operand
    Left,
    /// an argument of the head
    Head(usize),
    /// a second operand
    Right(usize),
    /// `i32`: which matrix of the second operand each row takes
    Indices,
    /// the product
    Result,
    /// an argument of the tail
    Tail(usize),
}

/// Whatever has the arguments of a row kernel.
pub trait RowArguments {
    /// in the order of a launch
    fn row_arguments(&self) -> &[ArgSpec];
}

impl RowArguments for Body {
    fn row_arguments(&self) -> &[ArgSpec] {
        &self.args
    }
}

impl RowArguments for Program {
    fn row_arguments(&self) -> &[ArgSpec] {
        &self.args
    }
}

impl<T> Product<T> {
    /// The same product with another kind of head and tail.
    pub fn map<U>(self, mut make: impl FnMut(T) -> U) -> Product<U> {
        Product {
            left: self.left,
            right: self.right,
            result: self.result,
            rights: self.rights,
            routed: self.routed,
            head: self.head.map(|head| Head { body: make(head.body), made: head.made }),
            tail: self.tail.map(|tail| Tail { body: make(tail.body), sums: tail.sums }),
        }
    }
}

impl<T: RowArguments> Product<T> {
    /// The arguments of a launch, in order: what the first operand is or is made of, the second operands, the indices where
    /// there are any, then the result or what the tail reads and writes besides the sums.
    pub fn roles(&self) -> Vec<Role> {
        let mut roles = match &self.head {
            Some(Head { body, made }) => {
                (0..body.row_arguments().len()).filter(|arg| arg != made).map(Role::Head).collect()
            }
            None => vec![Role::Left],
        };
        roles.extend((0..self.rights).map(Role::Right));
        roles.extend(self.routed.then_some(Role::Indices));
        match &self.tail {
            Some(Tail { body, sums }) => {
                roles.extend((0..body.row_arguments().len()).filter(|arg| !sums.contains(arg)).map(Role::Tail));
            }
            None => roles.push(Role::Result),
        }
        roles
    }
}

/// A matmul, or two of one left operand, with prologue and epilogue, as our kernels take them.
#[derive(Debug, Clone, PartialEq)]
pub struct MatmulFit<'a> {
    /// one matmul or two
    pub matmuls: &'a [NodeId],
    /// what picks the right operand of each row
    pub gather: Option<NodeId>,
    /// what makes the left operand, in order
    pub prologue: &'a [NodeId],
    /// what follows, in order
    pub epilogue: &'a [NodeId],
    /// the matmul, or each of two
    pub shape: MatmulShape,
    /// left and right operand of the first; of a routed matmul, the rows and the table
    pub operands: [ArgBinding; 2],
}

/// The matmuls of a draft, if they are one or two of one operand, with row work that makes the operand of few rows and elementwise
/// work on the sums.
pub fn fit<'a>(draft: &Draft<'a>) -> Option<MatmulFit<'a>> {
    let Chain { prologue, links, epilogue } = draft.structure.chain()?;
    let fit = match links.as_slice() {
        [Link::Routed { node, gather }] => return routed::fit(draft, node, *gather, epilogue),
        [Link::Matmul { nodes }] => {
            let (shape, operands) = lower_matmul_shape(draft.graph, draft.placement, *nodes.first()?);
            let (prologue, epilogue) = (prologue.nodes.as_slice(), epilogue.nodes.as_slice());
            MatmulFit { matmuls: nodes, gather: None, prologue, epilogue, shape, operands }
        }
        _ => return None,
    };
    let stored = |id: &NodeId| draft.outputs.contains(id);
    if !fit.epilogue.is_empty() && fit.matmuls.iter().any(stored) {
        return None;
    }
    let fits = can_be_together(draft, &fit, &epilogue.crossing)
        && (fit.prologue.is_empty() || can_be_prologue(draft, &fit))
        && can_be_epilogue(draft, &fit);
    fits.then_some(fit)
}

/// One matmul, or two of one left operand whose right operands lie alike and which are both read on.
fn can_be_together(draft: &Draft, fit: &MatmulFit, read: &[NodeId]) -> bool {
    let &[first, second] = fit.matmuls else { return fit.matmuls.len() == 1 };
    let [a_one, b_one] = &fit.operands;
    let (shape_two, [a_two, b_two]) = lower_matmul_shape(draft.graph, draft.placement, second);
    let dtype = |id: NodeId| draft.graph.node(id).dtype;
    let alike = *a_one == a_two && b_one.dtype == b_two.dtype && fit.shape == shape_two;
    alike && dtype(first) == dtype(second) && read == fit.matmuls
}

/// Row work over few rows that is read as it would lie, where every weight is read once.
fn can_be_prologue(draft: &Draft, fit: &MatmulFit) -> bool {
    let graph = draft.graph;
    let node = graph.node(fit.matmuls[0]);
    let (&MatmulShape { m, k, .. }, [_, b]) = (&fit.shape, &fit.operands);
    let Some(placed) = draft.placement.get(node.inputs[0]) else { return false };
    let made = graph.node(placed.base);
    let in_place = fit.prologue.contains(&placed.base)
        && !matches!(node.op, Op::Matmul { transpose_a: true, .. })
        && placed.layout.is_contiguous()
        && placed.layout.shape.elements() == made.shape.elements()
        && Space { rows: made.shape.rows(), cols: made.shape.cols() } == Space { rows: m, cols: k };
    let weights = fit.shape.batch.is_empty()
        && (fit.shape.b.0 == 1 || fit.shape.b.1 == 1)
        && !fit.prologue.contains(&b.base)
        && [made.dtype, b.dtype].iter().all(|dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16));
    let of_rows = |&id: &NodeId| {
        let space = node_space(graph, id);
        let known = is_elementwise(&graph.node(id).op) || matches!(graph.node(id).op, Op::RowReduce(_));
        known && space.rows == m && (space.cols == k || space.cols == 1)
    };
    // One column would be one number per row, worked on by other instructions than a row.
    (1..=HEAD_ROWS).contains(&m) && k > 1 && in_place && weights && fit.prologue.iter().all(of_rows)
}

/// Elementwise work on the sums, which it reads in order.
fn can_be_epilogue(draft: &Draft, fit: &MatmulFit) -> bool {
    let follows = |&id: &NodeId| is_elementwise(&draft.graph.node(id).op) && is_in_order(draft, fit.matmuls, id);
    fit.epilogue.iter().all(follows)
}

/// Whether a node has an element for each sum, and reads the sums in order.
fn is_in_order(draft: &Draft, matmuls: &[NodeId], id: NodeId) -> bool {
    let shape: &Shape = &draft.graph.node(matmuls[0]).shape;
    let node = draft.graph.node(id);
    let same = node.shape.elements() == shape.elements() && node.shape.cols() == shape.cols();
    let in_order = node.inputs.iter().all(|&input| match draft.placement.get(input) {
        Some(placed) if matmuls.contains(&placed.base) => {
            placed.layout.is_contiguous() && placed.layout.shape.cols() == shape.cols()
        }
        Some(_) | None => true,
    });
    same && in_order
}

fn is_elementwise(op: &Op) -> bool {
    matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) | Op::Random { .. })
}

/// Lowers matmuls with prologue and epilogue.
pub(crate) fn lower_product(draft: &Draft, fit: MatmulFit) -> Lowered {
    let graph = draft.graph;
    let MatmulFit { matmuls, gather, prologue, epilogue, shape, operands: [a, b] } = fit;
    let mut kernel = Product {
        left: a.dtype,
        right: b.dtype,
        result: graph.node(matmuls[0]).dtype,
        rights: matmuls.len(),
        routed: gather.is_some(),
        head: None,
        tail: None,
    };
    let (mut args, mut head_axes, mut axes) = (Vec::new(), Vec::new(), Vec::new());
    if prologue.is_empty() {
        args.push(a);
    } else {
        let rows = lower_side(&Draft { nodes: prologue, outputs: &[a.base], ..*draft }, &[a.base]);
        head_axes = rows.axes;
        kernel.head = Some(Head { made: rows.handed[0], body: rows.body });
        args.extend(rows.others);
    }
    args.push(b);
    args.extend(gather.map(|gather| routed::indices(draft, gather)));
    args.extend(matmuls[1..].iter().map(|&id| lower_matmul_shape(graph, draft.placement, id).1[1].clone()));
    if epilogue.is_empty() {
        args.push(whole(graph, matmuls[0], 0, true));
    } else {
        let rows = lower_side(&Draft { nodes: epilogue, ..*draft }, matmuls);
        axes = rows.axes;
        kernel.tail = Some(Tail { body: rows.body, sums: rows.handed });
        args.extend(rows.others);
    }
    let geometry = Geometry::Product { shape, head_axes, axes };
    Lowered { kernel: Kernel::Product(kernel), launch: Launch { args, geometry } }
}

/// A head or a tail.
struct Side {
    body: Body,
    /// Arguments that are handed over as `f32`, in the order of their nodes.
    handed: Vec<usize>,
    /// All the others.
    others: Vec<ArgBinding>,
    axes: Vec<(usize, usize)>,
}

fn lower_side(draft: &Draft, handed: &[NodeId]) -> Side {
    let Lowered { kernel: Kernel::Row(body), launch } = lower_rows(draft, handed) else {
        unreachable!("a row kernel was asked for")
    };
    let Geometry::Row { axes, .. } = launch.geometry else { unreachable!("a row kernel has rows") };
    let position = |&id: &NodeId| launch.args.iter().position(|arg| arg.base == id).expect("it is read or written");
    let handed: Vec<usize> = handed.iter().map(position).collect();
    debug_assert!(handed.iter().all(|&arg| matches!(body.args[arg].access, Access::Row | Access::PerRow)));
    let others = launch.args.iter().enumerate().filter(|(arg, _)| !handed.contains(arg));
    Side { handed: handed.clone(), others: others.map(|(_, arg)| arg.clone()).collect(), axes, body }
}
