//! What code generation offers: which kernels it can make, and the work they do.
//!
//! The planner proposes a [`Draft`]; a [`Catalog`] answers. Code generation has one for each target, which looks at the
//! kernel it would make. [`Primitives`] counts the primitives of the graph, and is what stands in for a target that has
//! no generator here.

use std::collections::HashMap;

use deuteron_graph::{BinaryOp, Graph, NodeId, Op, UnaryOp};

use crate::layout::Placement;
use crate::legal::{Form, Space, node_space};

/// A kernel that the planner considers.
#[derive(Debug, Clone, Copy)]
pub struct Draft<'a> {
    /// the graph
    pub graph: &'a Graph,
    /// where its values lie
    pub placement: &'a Placement,
    /// what the kernel makes, operands before users
    pub nodes: &'a [NodeId],
    /// what it stores
    pub outputs: &'a [NodeId],
    /// the skeleton it needs
    pub form: Form,
}

/// Kinds of vector arithmetic, by what they cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// a load or a store of a strip
    Move,
    /// between f32 and a narrower type
    Convert,
    /// addition, product, comparison, selection
    Simple,
    /// division, square root, reciprocal
    Divide,
    /// exponential
    Exp,
    /// tanh, sigmoid, GELU, SiLU
    Tanh,
    /// error function, logarithm
    Erf,
    /// random bits
    Random,
    /// into a row reduction
    Reduce,
    /// into a column sum
    Column,
}

impl Class {
    /// All of them, in the order of [`Work::vectors`].
    pub const ALL: [Class; 10] = [
        Class::Move,
        Class::Convert,
        Class::Simple,
        Class::Divide,
        Class::Exp,
        Class::Tanh,
        Class::Erf,
        Class::Random,
        Class::Reduce,
        Class::Column,
    ];

    /// Floating point operations an element, as a GPU's vector units spend them.
    pub fn flops(self) -> f64 {
        match self {
            Class::Move => 0.0,
            Class::Convert | Class::Simple | Class::Reduce | Class::Column => 1.0,
            Class::Divide | Class::Exp => 8.0,
            Class::Tanh => 16.0,
            Class::Erf => 24.0,
            Class::Random => 24.0,
        }
    }
}

/// Lanes of the vectors that [`Work`] counts.
pub const LANES: usize = 16;

/// What one launch computes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Work {
    /// vectors of [`LANES`] elements that each class works on; a part of a vector counts as one
    pub vectors: [f64; Class::ALL.len()],
    /// vectors that are not full, one at the end of a row at most: they are masked
    pub tails: f64,
    /// scalar operations, all rows together
    pub row_scalars: f64,
    /// rows that are started one by one; 0 in a kernel that does not care for rows
    pub rows: f64,
    /// sets of rows that are worked on together
    pub flights: f64,
    /// arguments read or written along the row, all sets of rows together
    pub row_arguments: f64,
    /// row reductions that are finished, all rows together
    pub reductions: f64,
    /// instructions of a tile machine handed out, all rows together
    pub dispatches: f64,
    /// pieces the work can be split into
    pub chunks: f64,
    /// the last piece as a share of the others
    pub last_chunk: f64,
    /// elements of column sums that are added up at the end, on one thread
    pub finished: f64,
    /// whether what is written goes past the caches
    pub streams: bool,
    /// bytes a kernel touches from which that is so; 0 where it never is
    pub stream_from: f64,
    /// elements moved one by one by a strided copy
    pub copied: f64,
    /// pieces of rows added into a table
    pub scattered: f64,
    /// pieces of a table's rows that are written
    pub cleared: f64,
    /// products of a batch, each cut into blocks
    pub products: f64,
    /// flops of matrix products
    pub matrix_flops: f64,
    /// the same with the sides that a block does not fill rounded up to what the machine computes
    pub padded_flops: f64,
    /// elements of operands and results that blocks of products copy
    pub packed: f64,
    /// bits of the matrix operands
    pub matrix_bits: u32,
    /// rows of a product's result, of one product of a batch
    pub matrix_rows: usize,
    /// row-sized values alive at once
    pub live_rows: usize,
    /// how long blocks of a GPU's kernel wait for others of it, in meetings of all of them
    pub waits: f64,
    /// what every worker does for itself before its share of the rest
    pub each: Option<Box<Work>>,
    /// what is begun when all of the rest is done, and is shared anew: a product of attention's kernel, or what follows a product
    pub next: Option<Box<Work>>,
}

impl Work {
    /// Adds `count` vectors of a class.
    pub fn add(&mut self, class: Class, count: f64) {
        self.vectors[class as usize] += count;
    }

    /// Vectors of a class.
    pub fn of(&self, class: Class) -> f64 {
        self.vectors[class as usize]
    }

    /// Flops of the vector units.
    pub fn vector_flops(&self) -> f64 {
        let vectors: f64 = Class::ALL.iter().map(|&class| self.of(class) * class.flops()).sum();
        let others: f64 = [&self.each, &self.next].into_iter().flatten().map(|work| work.vector_flops()).sum();
        vectors * LANES as f64 + self.row_scalars + others
    }

    /// Flops of matrix products, those of what follows among them.
    pub fn all_matrix_flops(&self) -> f64 {
        self.matrix_flops + self.next.as_ref().map_or(0.0, |next| next.all_matrix_flops())
    }
}

/// What a target's code generation can do.
pub trait Catalog: Send + Sync {
    /// Whether it makes kernels of this form at all: a cheap no, before the nodes are looked at.
    fn offers_form(&self, form: Form) -> bool;
    /// Whether it can make this kernel.
    fn offers(&self, draft: &Draft) -> bool;
    /// Whether there is no form it cannot make.
    fn offers_everything(&self) -> bool;
    /// The work of the kernel it would make; for a kernel it does not offer, a sound estimate.
    fn work(&self, draft: &Draft) -> Work;
}

/// A catalogue that offers every skeleton and counts primitives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Primitives;

impl Catalog for Primitives {
    fn offers_form(&self, form: Form) -> bool {
        form != Form::Opaque
    }

    fn offers(&self, draft: &Draft) -> bool {
        self.offers_form(draft.form)
    }

    fn offers_everything(&self) -> bool {
        true
    }

    fn work(&self, draft: &Draft) -> Work {
        primitive_work(draft)
    }
}

/// A catalogue that offers every skeleton, and otherwise is another one.
#[derive(Clone, Copy)]
pub struct Conceivable<'a>(pub &'a dyn Catalog);

impl Catalog for Conceivable<'_> {
    fn offers_form(&self, form: Form) -> bool {
        Primitives.offers_form(form) || self.0.offers_form(form)
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
                let (m, n, k, batch) = product_size(graph, id, *transpose_a);
                work.matrix_flops += 2.0 * (m * n * k * batch) as f64;
                work.padded_flops = work.matrix_flops;
                work.matrix_bits = work.matrix_bits.max(8 * graph.node(node.inputs[0]).dtype.bytes() as u32);
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
    for value in crate::cost::traffic::reads(draft) {
        work.add(Class::Move, vectors(Space { rows: value.rows, cols: value.cols }));
    }
    for &id in draft.outputs {
        work.add(Class::Move, vectors(node_space(graph, crate::cost::traffic::written(graph, id))));
    }
    work.live_rows = live_rows(draft);
    work
}

/// Vectors that cover a space; rows that do not fill a vector are packed only where rows do not matter, so here they are
/// counted as they lie.
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

/// (m, n, k, batch) of a product.
pub fn product_size(graph: &Graph, id: NodeId, transpose_a: bool) -> (usize, usize, usize, usize) {
    let node = graph.node(id);
    let a = &graph.node(node.inputs[0]).shape;
    let k = if transpose_a { a[a.rank() - 2] } else { a.cols() };
    let rank = node.shape.rank();
    let (n, m) = (node.shape.cols(), node.shape[rank - 2]);
    let batch: usize = node.shape[..rank - 2].iter().product();
    // A weight that serves every batch makes one tall product.
    if graph.node(node.inputs[1]).shape.rank() == 2 && !transpose_a { (m * batch, n, k, 1) } else { (m, n, k, batch) }
}

/// Row-sized values that wait for a reduction together, at the widest point: what a row kernel keeps in registers. What a
/// reduction takes in as it comes does not wait.
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
