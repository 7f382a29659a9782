//! The interface to code generation: which kernels it can generate, and their work.
//!
//! The planner proposes a [`Draft`], and a [`Catalog`] answers. Code generation has one catalogue per target, which examines the
//! kernel it would generate. [`Primitives`] counts the primitives of the graph; it is used for a target that has
//! no generator here.

use std::collections::HashMap;

use deuteron_graph::{BinaryOp, NodeId, Op, UnaryOp};

use crate::chain::Structure;
use crate::draft::Draft;
use crate::space::{Space, matmul_size, node_space};
use crate::traffic::{reads, written};
use crate::work::{Class, LANES, Work};

/// The capabilities of a target's code generation.
pub trait Catalog: Send + Sync {
    /// Whether it supports the structure at all: a cheap check before the nodes are examined.
    fn offers_structure(&self, structure: &Structure) -> bool;
    /// Whether it can generate this kernel.
    fn offers(&self, draft: &Draft) -> bool;
    /// Whether it supports every structure.
    fn offers_everything(&self) -> bool;
    /// The work of the kernel it would generate, or an estimate for a kernel that it does not offer.
    fn work(&self, draft: &Draft) -> Work;
    /// Whether it has matmuls of `f32` whose operands are both stored in one 16-bit type.
    fn widens_operands(&self) -> bool {
        false
    }
}

/// A catalogue that offers every structure and counts primitives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Primitives;

impl Catalog for Primitives {
    fn offers_structure(&self, structure: &Structure) -> bool {
        *structure != Structure::Opaque
    }

    fn offers(&self, draft: &Draft) -> bool {
        self.offers_structure(draft.structure)
    }

    fn offers_everything(&self) -> bool {
        true
    }

    fn work(&self, draft: &Draft) -> Work {
        primitive_work(draft)
    }
}

/// A catalogue that offers every structure, and otherwise behaves like another one.
#[derive(Clone, Copy)]
pub struct Conceivable<'a>(pub &'a dyn Catalog);

impl Catalog for Conceivable<'_> {
    fn offers_structure(&self, structure: &Structure) -> bool {
        Primitives.offers_structure(structure) || self.0.offers_structure(structure)
    }

    fn offers(&self, draft: &Draft) -> bool {
        Primitives.offers(draft) || self.0.offers(draft)
    }

    fn offers_everything(&self) -> bool {
        true
    }

    fn work(&self, draft: &Draft) -> Work {
        self.0.work(draft)
    }

    fn widens_operands(&self) -> bool {
        self.0.widens_operands()
    }
}

/// The work of a draft, primitive by primitive.
pub fn primitive_work(draft: &Draft) -> Work {
    let graph = draft.graph;
    let mut work = Work { chunks: f64::INFINITY, last_chunk: 1.0, ..Work::default() };
    for &id in draft.nodes {
        let node = graph.node(id);
        let space = node_space(graph, id);
        let vectors = vectors(space);
        match &node.op {
            Op::Unary(op) => work.add(unary_class(*op), vectors),
            Op::Binary(BinaryOp::Div) => work.add(Class::Divide, vectors),
            Op::Binary(_) | Op::Compare(_) | Op::Select => work.add(Class::Simple, vectors),
            Op::Cast(_) => work.add(Class::Convert, vectors),
            Op::RowReduce(_) => {
                work.add(Class::Reduce, vectors);
                work.rows = work.rows.max(space.rows as f64);
            }
            Op::ColumnSum => work.add(Class::Column, vectors),
            Op::Random { .. } => work.add(Class::Random, vectors),
            Op::Gather => work.rows = work.rows.max(space.rows as f64),
            Op::Matmul { transpose_a, .. } => {
                let (m, n, k, batch) = matmul_size(graph, id, *transpose_a);
                work.matrix_flops += 2.0 * (m * n * k * batch) as f64;
                work.padded_flops = work.matrix_flops;
                let operand = draft.placement.base(node.inputs[0]).unwrap_or(node.inputs[0]);
                work.matrix_bits = work.matrix_bits.max(8 * graph.node(operand).dtype.bytes() as u32);
                work.matrix_rows = work.matrix_rows.max(m);
                work.products += batch as f64;
            }
            Op::ScatterAdd { .. } => work.scattered += graph.node(node.inputs[0]).shape.elements() as f64,
            Op::Append { .. } => work.copied += graph.node(node.inputs[1]).shape.elements() as f64,
            Op::Concat { .. } | Op::View(_) | Op::StopGradient => work.copied += node.shape.elements() as f64,
            Op::Opaque(opaque) => work.add(Class::Simple, opaque.flops as f64 / LANES as f64),
            Op::Input { .. } | Op::Const { .. } | Op::Iota { .. } => {}
        }
    }
    for value in reads(draft) {
        work.add(Class::Move, vectors(Space { rows: value.rows, cols: value.cols }));
    }
    for &id in draft.outputs {
        work.add(Class::Move, vectors(node_space(graph, written(graph, id))));
    }
    work.live_rows = live_rows(draft);
    work
}

/// Vectors that cover a space. Rows that do not fill a vector are packed only in elementwise kernels, so here they are
/// counted unpacked.
fn vectors(space: Space) -> f64 {
    (space.rows * space.cols).div_ceil(LANES) as f64
}

fn unary_class(op: UnaryOp) -> Class {
    match op {
        UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Round => Class::Simple,
        UnaryOp::Exp => Class::Exp,
        UnaryOp::Log | UnaryOp::Erf => Class::Erf,
        UnaryOp::Sqrt | UnaryOp::Rsqrt | UnaryOp::Reciprocal => Class::Divide,
        UnaryOp::Tanh | UnaryOp::Sigmoid => Class::Tanh,
    }
}

/// The maximum number of row-sized values alive across a reduction, which a row kernel keeps in registers. Values that a
/// reduction consumes immediately are not counted.
fn live_rows(draft: &Draft) -> usize {
    let graph = draft.graph;
    let widest = draft.nodes.iter().map(|&id| node_space(graph, id).cols).max().unwrap_or(1);
    // First and last position at which each value is needed within the kernel.
    let mut lives: HashMap<NodeId, (usize, usize)> = HashMap::new();
    for (position, &id) in draft.nodes.iter().enumerate() {
        draft.placement.for_reads(graph, id, &mut |value| {
            let base = draft.placement.base(value).unwrap_or(value);
            let made = draft.nodes.binary_search(&base).unwrap_or(position);
            lives.entry(base).or_insert((made, position)).1 = position;
        });
    }
    // Reductions before each position.
    let mut reductions = vec![0];
    for &id in draft.nodes {
        let reduces = matches!(graph.node(id).op, Op::RowReduce(_));
        reductions.push(reductions[reductions.len() - 1] + reduces as usize);
    }
    let waits = |&(made, last): &(usize, usize)| last > made && reductions[last] > reductions[made];
    let wide = lives.iter().filter(|(base, _)| graph.node(**base).shape.cols() == widest).map(|(_, life)| *life);
    let waiting: Vec<(usize, usize)> = wide.filter(waits).collect();
    let at = |position: usize| waiting.iter().filter(|(made, last)| *made <= position && position < *last).count();
    (0..draft.nodes.len()).map(at).max().unwrap_or(0).max(1)
}
