//! Products of our own, with what follows them while their sums are hot: any chain of elementwise work.
//!
//! The chain is a row body like any other, but for one argument: the sums, which lie in the worker's scratch as `f32` and
//! never in memory. What follows reads them rounded to the product's dtype, as it would if they were stored: a fused plan gives
//! the bits of an unfused one.

use deuteron_graph::{Dtype, NodeId, Op};
use deuteron_plan::Draft;

use crate::body::Access;
use crate::lower::{lower_matmul_shape, lower_rows, whole};
use crate::source::{ArgBinding, Geometry, Kernel, Launch, Lowered};

/// A product, and what follows it as a body or as what the body became.
#[derive(Debug, Clone, PartialEq)]
pub struct Product<T> {
    /// storage type of the first operand
    pub left: Dtype,
    /// storage type of the second operand
    pub right: Dtype,
    /// storage type of the product where it is stored as it is
    pub result: Dtype,
    /// what follows; none: the sums are stored
    pub tail: Option<Tail<T>>,
}

/// What follows a product.
#[derive(Debug, Clone, PartialEq)]
pub struct Tail<T> {
    /// over all rows of the product and its columns
    pub body: T,
    /// which of its arguments are the sums
    pub sums: usize,
}

impl<T> Product<T> {
    /// The same product with another kind of tail.
    pub fn map<U>(self, make: impl FnOnce(T) -> U) -> Product<U> {
        let tail = self.tail.map(|tail| Tail { body: make(tail.body), sums: tail.sums });
        Product { left: self.left, right: self.right, result: self.result, tail }
    }
}

/// The product of a draft that is one product and elementwise work on it.
pub fn product(draft: &Draft) -> Option<NodeId> {
    let mut products = draft.nodes.iter().filter(|&&id| matches!(draft.graph.node(id).op, Op::Matmul { .. }));
    let (product, None) = (*products.next()?, products.next()) else { return None };
    if draft.nodes.len() > 1 && draft.outputs.contains(&product) {
        return None;
    }
    let shape = &draft.graph.node(product).shape;
    let follows = |id: NodeId| {
        let node = draft.graph.node(id);
        let elementwise = matches!(
            node.op,
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) | Op::Random { .. }
        );
        let same = node.shape.elements() == shape.elements() && node.shape.cols() == shape.cols();
        let in_order = node.inputs.iter().all(|&input| match draft.placement.get(input) {
            Some(placed) if placed.base == product => {
                placed.layout.is_contiguous() && placed.layout.shape.cols() == shape.cols()
            }
            _ => true,
        });
        elementwise && same && in_order
    };
    draft.nodes.iter().all(|&id| id == product || follows(id)).then_some(product)
}

/// Lowers a draft of which [`product`] is the product.
pub(crate) fn lower_product(draft: &Draft, product: NodeId) -> Lowered {
    let graph = draft.graph;
    let node = graph.node(product);
    let (shape, [a, b]) = lower_matmul_shape(graph, draft.placement, product);
    let mut kernel = Product { left: a.dtype, right: b.dtype, result: node.dtype, tail: None };
    if draft.nodes.len() == 1 {
        let launch = Launch {
            args: vec![a, b, whole(graph, product, 0, true)],
            geometry: Geometry::Product { shape, axes: vec![] },
        };
        return Lowered { kernel: Kernel::Product(kernel), launch };
    }
    let rest: Vec<NodeId> = draft.nodes.iter().copied().filter(|&id| id != product).collect();
    let chain = Draft { nodes: &rest, ..*draft };
    let Lowered { kernel: Kernel::Row(body), launch } = lower_rows(&chain, product) else {
        unreachable!("elementwise work is a row kernel")
    };
    let Geometry::Row { axes, .. } = launch.geometry else { unreachable!("a row kernel has rows") };
    let sums = launch.args.iter().position(|arg| arg.base == product && !arg.written);
    let sums = sums.expect("what follows a product reads it");
    debug_assert!(matches!(body.args[sums].access, Access::Row | Access::PerRow), "one column is a number a row");
    let others = launch.args.into_iter().enumerate().filter(|&(position, _)| position != sums);
    let args: Vec<ArgBinding> = [a, b].into_iter().chain(others.map(|(_, arg)| arg)).collect();
    kernel.tail = Some(Tail { body, sums });
    Lowered { kernel: Kernel::Product(kernel), launch: Launch { args, geometry: Geometry::Product { shape, axes } } }
}
