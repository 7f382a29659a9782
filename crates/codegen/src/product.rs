//! Products of our own, with what makes their first operand and what follows them while their sums are hot.
//!
//! Both are row bodies like any other, but for one kind of argument: values that lie in the worker's scratch as `f32` and never in
//! memory. The *head* writes the first operand, the *tail* reads the sums. Either is rounded to the dtype of its node, as it would
//! be if it were stored: a fused plan gives the bits of an unfused one.

use deuteron_graph::{Dtype, NodeId, Op, Shape};
use deuteron_plan::{Draft, Form, Space, node_space};

mod routed;

use crate::argument::{ArgBinding, Argument};
use crate::body::{Access, ArgSpec, Body};
use crate::cpu::program::Program;
use crate::kernels::matmul::shape::{MatmulShape, Matrix, lower_matmul_shape};
use crate::kernels::row::reach;
use crate::lower::{LoweredRows, lower_rows};

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

/// A draft as products with a head and a tail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts {
    /// one product or two
    pub products: Vec<NodeId>,
    /// what makes their first operand, in order
    pub head: Vec<NodeId>,
    /// what follows them, in order
    pub tail: Vec<NodeId>,
    /// what picks the second operand of each row
    pub picked: Option<NodeId>,
}

/// Sees a draft as one product, or two of one operand, with row work that makes the operand of few rows and elementwise work on the
/// sums; none where it is something else.
pub fn parts(draft: &Draft) -> Option<Parts> {
    let is_product = |id: &NodeId| matches!(draft.graph.node(*id).op, Op::Matmul { .. });
    let (products, mut rest): (Vec<NodeId>, Vec<NodeId>) = draft.nodes.iter().partition(|id| is_product(id));
    let &first = products.first()?;
    if let Form::Routed { .. } = draft.form {
        let picked = draft.placement.base(draft.graph.node(first).inputs[1])?;
        rest.retain(|&id| id != picked);
        let parts = Parts { products, head: Vec::new(), tail: rest, picked: Some(picked) };
        return routed::fits(draft, &parts).then_some(parts);
    }
    let head = feeding(draft, first, &rest);
    let tail: Vec<NodeId> = rest.iter().copied().filter(|id| !head.contains(id)).collect();
    let stored = |id: &NodeId| draft.outputs.contains(id);
    if (!tail.is_empty() && products.iter().any(stored)) || head.iter().any(stored) {
        return None;
    }
    let fits = can_be_together(draft, &products, &tail)
        && (head.is_empty() || can_be_head(draft, first, &head))
        && can_be_tail(draft, &products, &head, &tail);
    fits.then_some(Parts { products, head, tail, picked: None })
}

/// Those of `rest` that the first operand of a product is made of.
fn feeding(draft: &Draft, product: NodeId, rest: &[NodeId]) -> Vec<NodeId> {
    let base = |value: NodeId| draft.placement.base(value).filter(|base| rest.contains(base));
    let mut found: Vec<NodeId> = base(draft.graph.node(product).inputs[0]).into_iter().collect();
    let mut next = 0;
    while let Some(&reader) = found.get(next) {
        next += 1;
        for value in draft.placement.reads(draft.graph, reader) {
            found.extend(base(value).filter(|base| !found.contains(base)));
        }
    }
    found.sort_unstable();
    found
}

/// One product, or two of one operand whose second operands lie alike and which are both read on.
fn can_be_together(draft: &Draft, products: &[NodeId], tail: &[NodeId]) -> bool {
    let &[first, second] = products else { return products.len() == 1 };
    let (one, two) = (draft.graph.node(first), draft.graph.node(second));
    let shape = |id: NodeId| lower_matmul_shape(draft.graph, draft.placement, id);
    let ((shape_one, [a_one, b_one]), (shape_two, [a_two, b_two])) = (shape(first), shape(second));
    let read = |product: NodeId| {
        tail.iter().any(|&id| {
            let reads = draft.placement.reads(draft.graph, id);
            reads.into_iter().any(|value| draft.placement.base(value) == Some(product))
        })
    };
    let alike = a_one == a_two && b_one.dtype == b_two.dtype && shape_one == shape_two && one.dtype == two.dtype;
    alike && read(first) && read(second)
}

/// Row work over few rows that is read as it would lie, where every weight is read once.
fn can_be_head(draft: &Draft, product: NodeId, head: &[NodeId]) -> bool {
    let graph = draft.graph;
    let node = graph.node(product);
    let (shape, [_, b]) = lower_matmul_shape(graph, draft.placement, product);
    let MatmulShape { m, k, .. } = shape;
    let Some(placed) = draft.placement.get(node.inputs[0]) else { return false };
    let made = graph.node(placed.base);
    let in_place = !matches!(node.op, Op::Matmul { transpose_a: true, .. })
        && placed.layout.is_contiguous()
        && placed.layout.shape.elements() == made.shape.elements()
        && Space { rows: made.shape.rows(), cols: made.shape.cols() } == Space { rows: m, cols: k };
    let weights = shape.batch.is_empty()
        && (shape.b.0 == 1 || shape.b.1 == 1)
        && !head.contains(&b.base)
        && [made.dtype, b.dtype].iter().all(|dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16));
    let of_rows = |&id: &NodeId| {
        let space = node_space(graph, id);
        let known = is_elementwise(&graph.node(id).op) || matches!(graph.node(id).op, Op::RowReduce(_));
        known && space.rows == m && (space.cols == k || space.cols == 1)
    };
    // One column would be a number a row, worked on by other instructions than a row.
    (1..=HEAD_ROWS).contains(&m) && k > 1 && in_place && weights && head.iter().all(of_rows)
}

/// Elementwise work on the sums, which it reads in order, and on nothing that is gone by then.
fn can_be_tail(draft: &Draft, products: &[NodeId], before: &[NodeId], tail: &[NodeId]) -> bool {
    tail.iter().all(|&id| is_elementwise(&draft.graph.node(id).op) && is_in_order(draft, products, before, id))
}

/// Whether a node has an element for each sum, reads the sums in order, and nothing of `before`.
fn is_in_order(draft: &Draft, products: &[NodeId], before: &[NodeId], id: NodeId) -> bool {
    let shape: &Shape = &draft.graph.node(products[0]).shape;
    let node = draft.graph.node(id);
    let same = node.shape.elements() == shape.elements() && node.shape.cols() == shape.cols();
    let in_order = node.inputs.iter().all(|&input| match draft.placement.get(input) {
        Some(placed) if products.contains(&placed.base) => {
            placed.layout.is_contiguous() && placed.layout.shape.cols() == shape.cols()
        }
        Some(placed) => !before.contains(&placed.base),
        None => true,
    });
    same && in_order
}

fn is_elementwise(op: &Op) -> bool {
    matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) | Op::Random { .. })
}

/// A product with what stands around it, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredProduct {
    /// the compile-time half
    pub product: Product<Body>,
    /// the run-time half
    pub launch: ProductLaunch,
}

/// What is known of a product at run time.
#[derive(Debug, Clone, PartialEq)]
pub struct ProductLaunch {
    /// as [`Product::roles`] lists them
    pub args: Vec<ArgBinding>,
    /// the product, or each of two; its result row after row
    pub shape: MatmulShape,
    /// (divide, modulo) of each launch axis of what makes the first operand
    pub head_axes: Vec<(usize, usize)>,
    /// (divide, modulo) of each launch axis of what follows
    pub axes: Vec<(usize, usize)>,
}

impl<T: RowArguments> Product<T> {
    /// What a device has to know of the arguments of a launch.
    pub fn arguments(&self, launch: &ProductLaunch) -> Vec<Argument> {
        let ProductLaunch { args, shape, .. } = launch;
        let rows = shape.m * shape.batches();
        let elements = |role: Role, arg: &ArgBinding| match (role, &self.head, &self.tail) {
            (Role::Left, ..) => shape.reach(Matrix::A),
            // Of a table that is routed to, every matrix.
            (Role::Right(_), ..) if self.routed => match (shape.reach(Matrix::B), arg.leading.as_slice()) {
                (0, _) | (_, [] | [(0, _), ..]) => 0,
                (matrix, [(experts, stride), ..]) => (experts - 1) * stride + matrix,
            },
            (Role::Right(_), ..) => shape.reach(Matrix::B),
            (Role::Indices, ..) => shape.m,
            (Role::Result, ..) => shape.reach(Matrix::C),
            (Role::Head(at), Some(head), _) => reach(&head.body.row_arguments()[at], arg, rows, shape.k),
            (Role::Tail(at), _, Some(tail)) => reach(&tail.body.row_arguments()[at], arg, rows, shape.n),
            (Role::Head(_) | Role::Tail(_), ..) => 0,
        };
        let roles = self.roles();
        roles.iter().zip(args).map(|(&role, arg)| Argument::new(arg, elements(role, arg))).collect()
    }
}

/// Lowers a draft that consists of `parts`.
pub(crate) fn lower_product(draft: &Draft, parts: &Parts) -> LoweredProduct {
    let graph = draft.graph;
    let &first = parts.products.first().expect("there is a product");
    let (shape, [a, b]) = match parts.picked {
        Some(picked) => routed::shape(draft, first, picked),
        None => lower_matmul_shape(graph, draft.placement, first),
    };
    let mut kernel = Product {
        left: a.dtype,
        right: b.dtype,
        result: graph.node(first).dtype,
        rights: parts.products.len(),
        routed: parts.picked.is_some(),
        head: None,
        tail: None,
    };
    let (mut args, mut head_axes, mut axes) = (Vec::new(), Vec::new(), Vec::new());
    if parts.head.is_empty() {
        args.push(a.clone());
    } else {
        let rows = lower_side(&Draft { nodes: &parts.head, outputs: &[a.base], ..*draft }, &[a.base]);
        head_axes = rows.axes;
        kernel.head = Some(Head { made: rows.handed[0], body: rows.body });
        args.extend(rows.others);
    }
    match parts.picked {
        Some(picked) => args.extend([b, routed::indices(draft, picked)]),
        None => {
            args.extend(parts.products.iter().map(|&id| lower_matmul_shape(graph, draft.placement, id).1[1].clone()))
        }
    }
    if parts.tail.is_empty() {
        args.push(ArgBinding::whole(graph, first, 0, true));
    } else {
        let rows = lower_side(&Draft { nodes: &parts.tail, ..*draft }, &parts.products);
        axes = rows.axes;
        kernel.tail = Some(Tail { body: rows.body, sums: rows.handed });
        args.extend(rows.others);
    }
    LoweredProduct { product: kernel, launch: ProductLaunch { args, shape, head_axes, axes } }
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
    let LoweredRows { body, launch } = lower_rows(draft, handed);
    let position = |&id: &NodeId| launch.args.iter().position(|arg| arg.base == id).expect("it is read or written");
    let handed: Vec<usize> = handed.iter().map(position).collect();
    debug_assert!(handed.iter().all(|&arg| matches!(body.args[arg].access, Access::Row | Access::PerRow)));
    let others = launch.args.iter().enumerate().filter(|(arg, _)| !handed.contains(arg));
    let others = others.map(|(_, arg)| arg.clone()).collect();
    Side { handed, others, axes: launch.axes, body }
}
