//! Forward values that backward reads, in terms of buffers and kernels.
//!
//! Views are followed to the buffer they look into. Kernels come in *waves*: a row kernel of one wave may hold every
//! row op of it; what is complete only after its kernel (a product, a sum over rows) is read in a later wave.

use deuteron_graph::{Graph, NodeId, Op};

/// The readers of one value in backward.
#[derive(Debug, Clone, Default)]
pub(super) struct Reads {
    /// Waves of row kernels, each of which reads it once or could recompute it. Those in which forward has the
    /// value in registers are left out: nothing is stored there.
    pub rows: Vec<u32>,
    /// Kernels that must read it from memory.
    pub whole: Vec<WholeRead>,
}

/// A read by a matmul, a scatter or a copy.
#[derive(Debug, Clone, Copy)]
pub(super) struct WholeRead {
    pub wave: u32,
    pub bytes: u64,
}

/// The forward values that backward may read, and how it does.
pub(super) struct Boundary<'a> {
    pub graph: &'a Graph,
    pub first_backward: usize,
    /// Whether forward would write the value to memory without backward.
    pub stored: Vec<bool>,
    pub is_output: Vec<bool>,
    /// For each forward node that has a buffer, what backward reads of it.
    pub reads: Vec<Reads>,
    /// For each node, the one that owns its buffer.
    roots: Vec<NodeId>,
}

impl<'a> Boundary<'a> {
    pub fn new(graph: &'a Graph, first_backward: usize, stored_forward: &dyn Fn(NodeId) -> bool) -> Boundary<'a> {
        let is_output = outputs(graph);
        let forward = |id: &NodeId| id.index() < first_backward;
        let stored: Vec<bool> =
            graph.ids().filter(forward).map(|id| is_output[id.index()] || stored_forward(id)).collect();
        let roots = roots(graph, &stored);
        let reads = vec![Reads::default(); first_backward];
        let mut boundary = Boundary { graph, first_backward, stored, is_output, reads, roots };
        boundary.collect_reads();
        boundary
    }

    pub fn forward(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        let first_backward = self.first_backward;
        self.graph.ids().filter(move |id| id.index() < first_backward)
    }

    pub fn op(&self, id: NodeId) -> &Op {
        &self.graph.node(id).op
    }

    pub fn bytes(&self, id: NodeId) -> u64 {
        self.graph.node(id).bytes() as u64
    }

    pub fn root(&self, id: NodeId) -> NodeId {
        self.roots[id.index()]
    }

    pub fn is_view(&self, id: NodeId) -> bool {
        self.root(id) != id
    }

    /// Whether every reader recomputes the value: an index pattern that is not stored.
    pub fn is_free(&self, id: NodeId) -> bool {
        is_pattern(self.op(id)) && !self.stored.get(id.index()).is_some_and(|&stored| stored)
    }

    pub fn is_input(&self, id: NodeId) -> bool {
        matches!(self.op(id), Op::Input { .. })
    }

    /// Whether a row kernel computes the value row by row.
    pub fn is_row_op(&self, id: NodeId) -> bool {
        match self.op(id) {
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) | Op::RowReduce(_) => true,
            Op::Const { .. } | Op::Iota { .. } | Op::Random { .. } | Op::View(_) | Op::StopGradient => true,
            // A table that is handed in is there before any kernel runs.
            Op::Gather => self.is_input(self.root(self.graph.node(id).inputs[0])),
            Op::Input { .. } | Op::ColumnSum | Op::Matmul { .. } => false,
            Op::ScatterAdd { .. } | Op::Append { .. } | Op::Concat { .. } | Op::Opaque(_) => false,
        }
    }

    /// The buffers a node reads, each with the bytes taken from it if it must be in memory, else `None`.
    pub fn operands(&self, id: NodeId) -> impl Iterator<Item = (NodeId, Option<u64>)> + '_ {
        let node = self.graph.node(id);
        node.inputs.iter().enumerate().map(move |(position, &input)| {
            let root = self.root(input);
            (root, (!self.takes_rows(id, position)).then(|| self.bytes_taken(id, root)))
        })
    }

    /// Whether an operand may be computed in the reader's kernel.
    fn takes_rows(&self, reader: NodeId, position: usize) -> bool {
        match self.op(reader) {
            // Of a table any row may be asked for.
            Op::Gather => position == 1,
            Op::ColumnSum => true,
            _ => self.is_row_op(reader),
        }
    }

    /// Of a gathered table only the rows that are picked.
    fn bytes_taken(&self, reader: NodeId, root: NodeId) -> u64 {
        match self.op(reader) {
            Op::Gather => self.bytes(reader).min(self.bytes(root)),
            _ => self.bytes(root),
        }
    }

    /// For each of `nodes`, the wave in which it is made. What `ends_wave` is made as soon as its operands are there,
    /// and read in a later wave; all else is made where it is first read.
    pub fn waves(&self, nodes: &[NodeId], ends_wave: impl Fn(NodeId) -> bool) -> Vec<u32> {
        let count = self.graph.nodes().len();
        let (mut made, mut ready) = (vec![0; count], vec![0; count]);
        for &id in nodes {
            let operands = &self.graph.node(id).inputs;
            made[id.index()] = operands.iter().map(|input| ready[input.index()]).max().unwrap_or(0);
            ready[id.index()] = made[id.index()] + ends_wave(id) as u32;
        }
        let mut first_read = vec![None; count];
        for &id in nodes.iter().rev() {
            if let (Some(wave), false) = (first_read[id.index()], ends_wave(id)) {
                made[id.index()] = wave;
            }
            for input in &self.graph.node(id).inputs {
                let first = first_read[input.index()].get_or_insert(made[id.index()]);
                *first = made[id.index()].min(*first);
            }
        }
        made
    }

    /// Whether the value is complete only after its kernel: only row ops share a kernel with their readers.
    pub fn ends_wave(&self, id: NodeId) -> bool {
        !self.is_row_op(id) && !self.is_input(id)
    }

    fn collect_reads(&mut self) {
        let needed = needed(self.graph);
        let waves = self.waves(&needed, |id| self.ends_wave(id));
        let at_hand = self.at_hand(&needed, &waves);
        let mut found: Vec<(NodeId, u32, Option<u64>)> = Vec::new();
        for id in needed.into_iter().filter(|id| id.index() >= self.first_backward) {
            let wave = waves[id.index()];
            if !self.is_view(id) {
                found.extend(self.operands(id).map(|(root, whole)| (root, wave, whole)));
            } else if self.is_output[id.index()] {
                // A view that is handed out is a copy.
                found.push((self.root(id), wave, Some(self.bytes(id))));
            }
        }
        for (root, wave, whole) in found.into_iter().filter(|(root, ..)| root.index() < self.first_backward) {
            let reads = &mut self.reads[root.index()];
            match whole {
                Some(bytes) => reads.whole.push(WholeRead { wave, bytes }),
                None if at_hand[root.index()].binary_search(&wave).is_ok() => {}
                None => reads.rows.push(wave),
            }
        }
        for reads in &mut self.reads {
            reads.rows.sort_unstable();
            reads.rows.dedup();
        }
    }

    /// For each forward value the waves in which a row kernel of forward makes or reads it. A row op of backward in
    /// that wave can be in that kernel (a loss and its gradient), and has the value there.
    fn at_hand(&self, needed: &[NodeId], waves: &[u32]) -> Vec<Vec<u32>> {
        let mut at_hand = vec![Vec::new(); self.first_backward];
        for &id in needed.iter().filter(|id| id.index() < self.first_backward && !self.is_view(**id)) {
            if self.is_row_op(id) {
                at_hand[id.index()].push(waves[id.index()]);
            }
            for (root, _) in self.operands(id).filter(|(_, whole)| whole.is_none()) {
                at_hand[root.index()].push(waves[id.index()]);
            }
        }
        at_hand.iter_mut().for_each(|waves| waves.sort_unstable());
        at_hand
    }
}

pub(super) fn outputs(graph: &Graph) -> Vec<bool> {
    let mut is_output = vec![false; graph.nodes().len()];
    graph.outputs().iter().for_each(|output| is_output[output.node.index()] = true);
    is_output
}

/// Nodes that an output depends on, in order.
fn needed(graph: &Graph) -> Vec<NodeId> {
    let mut needed = outputs(graph);
    for id in graph.ids().rev() {
        if needed[id.index()] {
            graph.node(id).inputs.iter().for_each(|input| needed[input.index()] = true);
        }
    }
    graph.ids().filter(|id| needed[id.index()]).collect()
}

fn is_pattern(op: &Op) -> bool {
    matches!(op, Op::Const { .. } | Op::Iota { .. } | Op::Random { .. })
}

/// The node whose buffer each node looks into. A view that is stored has its own.
fn roots(graph: &Graph, stored: &[bool]) -> Vec<NodeId> {
    let mut roots: Vec<NodeId> = Vec::with_capacity(graph.nodes().len());
    for id in graph.ids() {
        let node = graph.node(id);
        let looks_through = matches!(node.op, Op::View(_) | Op::StopGradient);
        let has_buffer = stored.get(id.index()).is_some_and(|&stored| stored);
        roots.push(if looks_through && !has_buffer { roots[node.inputs[0].index()] } else { id });
    }
    roots
}
