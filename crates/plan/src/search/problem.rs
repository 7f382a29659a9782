//! The graph as the search sees it: atoms, their order, and the price of every queried group.
//!
//! An atom is the work of one kernel when nothing is fused: a builder call, or the part of it that is a kernel of its
//! own. Groups are sets of atoms. Equal groups of equal layers are priced once: a price is cached under a signature
//! of everything it depends on.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use deuteron_graph::{Callee, NodeId, Op, is_recomputed};

use crate::between::Between;
use crate::bits::Bits;
use crate::calls::{is_attention, is_attention_gradient, is_loss, is_recomputed_attention, stores_scores};
use crate::chain::Structure;
use crate::cost::{Cost, cost};
use crate::draft::Draft;
use crate::grouping::Grouping;
use crate::kind::GroupKind;
use crate::layout::pattern_source;
use crate::reason::Reason;
use crate::rules::{Rules, after_gradient};
use crate::target::Target;

/// Position of an atom, in an order in which operands come before users.
pub(crate) type Atom = usize;

/// The graph in atoms.
pub(crate) struct Problem<'a> {
    pub rules: Rules<'a>,
    pub target: Target<'a>,
    /// Nodes of each atom.
    pub atoms: Vec<Vec<NodeId>>,
    pub atom_of: Vec<Option<Atom>>,
    pub producers: Vec<Vec<Atom>>,
    pub consumers: Vec<Vec<Atom>>,
    /// Producers, consumers, and the next reader of a common value.
    pub neighbours: Vec<Vec<Atom>>,
    readers: Vec<Vec<NodeId>>,
    is_output: Vec<bool>,
    between: Between,
    node_hash: Vec<u64>,
    prices: HashMap<u128, Result<Price, Reason>>,
}

/// A legal group, priced. Equal groups share it, so it names no nodes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Price {
    pub kind: GroupKind,
    pub cost: Cost,
}

impl Price {
    /// Predicted seconds.
    pub fn seconds(&self) -> f64 {
        self.cost.total.0
    }
}

impl<'a> Problem<'a> {
    pub fn new(grouping: &Grouping<'a>, target: Target<'a>) -> Problem<'a> {
        let order = grouping.topological();
        let mut position = vec![usize::MAX; grouping.groups.len()];
        order.iter().enumerate().for_each(|(index, &group)| position[group] = index);
        let count = order.len();
        let producers: Vec<Vec<Atom>> = order
            .iter()
            .map(|&group| {
                let mut all: Vec<Atom> = grouping.producers(group).into_iter().map(|group| position[group]).collect();
                all.sort_unstable();
                all
            })
            .collect();
        let mut consumers = vec![Vec::new(); count];
        for (atom, all) in producers.iter().enumerate() {
            all.iter().for_each(|&producer| consumers[producer].push(atom));
        }
        let between = Between::new(&producers);
        let atom_of: Vec<Option<Atom>> =
            grouping.group_of.iter().map(|group| group.map(|group| position[group])).collect();
        let atoms: Vec<Vec<NodeId>> = order.iter().map(|&group| grouping.groups[group].clone()).collect();
        let mut problem = Problem {
            rules: grouping.rules,
            target,
            atoms,
            atom_of,
            neighbours: Vec::new(),
            producers,
            consumers,
            readers: grouping.readers.clone(),
            is_output: grouping.is_output.clone(),
            between,
            node_hash: Vec::new(),
            prices: HashMap::new(),
        };
        problem.neighbours = problem.find_neighbours();
        problem.node_hash = problem.hash_nodes();
        problem
    }

    fn find_neighbours(&self) -> Vec<Vec<Atom>> {
        let mut all: Vec<Vec<Atom>> =
            (0..self.atoms.len()).map(|atom| [&self.producers[atom][..], &self.consumers[atom]].concat()).collect();
        for readers in &self.readers {
            for pair in readers.windows(2) {
                let (first, second) = (self.atom_of[pair[0].index()], self.atom_of[pair[1].index()]);
                if let (Some(a), Some(b), true) = (first, second, first != second) {
                    all[a].push(b);
                    all[b].push(a);
                }
            }
        }
        for list in &mut all {
            list.sort_unstable();
            list.dedup();
        }
        all
    }

    /// Everything about a node but the identity of its operands.
    fn hash_nodes(&self) -> Vec<u64> {
        let Rules { graph, placement, .. } = self.rules;
        graph
            .ids()
            .map(|id| {
                let node = graph.node(id);
                let mut hasher = DefaultHasher::new();
                hash_op(&node.op, &mut hasher);
                (&node.shape, node.dtype, placement.is_copied(id)).hash(&mut hasher);
                // Attention is known by its call, and so is what a causal mask halves.
                let call = &graph.calls()[node.call.index()];
                (is_attention(call), stores_scores(call), is_loss(call), node.part).hash(&mut hasher);
                // The steps of an epilogue are read off calls: what is spelled out in primitives is another epilogue, and so is a
                // copy of a matmul and what follows it.
                let is_copy = matches!(node.op, Op::Matmul { .. }) && is_recomputed(graph, id);
                (matches!(call.callee, Callee::Primitive), is_copy).hash(&mut hasher);
                if let Some(placed) = placement.get(id) {
                    placed.layout.hash(&mut hasher);
                }
                hasher.finish()
            })
            .collect()
    }

    /// Groups that pairwise merging does not reach: the atoms of each attention call and of each of its gradients, and all matmuls with one left operand.
    pub fn seeds(&self) -> Vec<Vec<Atom>> {
        let attention = self.attention_seeds();
        let ended: Vec<Vec<Atom>> = attention.iter().filter_map(|seed| self.with_ending(seed)).collect();
        attention.into_iter().chain(ended).chain(self.shared_operand_seeds()).collect()
    }

    /// The atoms of a gradient of attention, and of what its gradients become: sums over heads that share keys, for keys and for values.
    fn with_ending(&self, seed: &[Atom]) -> Option<Vec<Atom>> {
        let Rules { graph, placement, .. } = self.rules;
        let nodes = self.nodes(seed);
        let call = |id: &NodeId| &graph.calls()[graph.node(*id).call.index()];
        if !nodes.iter().any(|id| is_attention_gradient(call(id))) {
            return None;
        }
        let after = after_gradient(graph, placement, &nodes, &self.readers);
        let mut atoms = seed.to_vec();
        atoms.extend(after.iter().filter_map(|id| self.atom_of[id.index()]));
        atoms.sort_unstable();
        atoms.dedup();
        (self.nodes(&atoms).len() == nodes.len() + after.len() && atoms.len() > seed.len()).then_some(atoms)
    }

    /// Matmuls with one left operand, at most three: a kernel of three may pay where one of two does not.
    fn shared_operand_seeds(&self) -> Vec<Vec<Atom>> {
        let graph = self.rules.graph;
        let mut by_operand: BTreeMap<NodeId, Vec<Atom>> = BTreeMap::new();
        for id in graph.ids().filter(|&id| matches!(graph.node(id).op, Op::Matmul { .. })) {
            let (operand, atom) = (graph.node(id).inputs[0], self.atom_of[id.index()]);
            by_operand.entry(operand).or_default().extend(atom);
        }
        let sorted = by_operand.into_values().map(|mut atoms| {
            atoms.sort_unstable();
            atoms.dedup();
            atoms
        });
        sorted.filter(|atoms| (2..=3).contains(&atoms.len())).collect()
    }

    fn attention_seeds(&self) -> Vec<Vec<Atom>> {
        let graph = self.rules.graph;
        let attention = graph.calls().iter().filter(|call| is_attention(call) || stores_scores(call));
        let atoms = attention.map(|call| {
            let mut atoms: Vec<Atom> = (call.start..call.end).filter_map(|index| self.atom_of[index]).collect();
            let again: Vec<Atom> = atoms
                .iter()
                .flat_map(|&atom| self.producers[atom].iter().copied())
                .filter(|&atom| self.is_recomputed_attention(atom))
                .collect();
            atoms.extend(again.iter().flat_map(|&atom| self.with_recomputed(atom)));
            atoms.sort_unstable();
            atoms.dedup();
            atoms
        });
        atoms.filter(|atoms| atoms.len() > 1).collect()
    }

    fn is_recomputed_attention(&self, atom: Atom) -> bool {
        is_recomputed_attention(self.rules.graph, self.atoms[atom][0])
    }

    /// An atom of recomputed scores, and all of those it needs.
    fn with_recomputed(&self, atom: Atom) -> Vec<Atom> {
        let mut found = vec![atom];
        let mut next = 0;
        while next < found.len() {
            let more = self.producers[found[next]].iter().copied().filter(|&atom| self.is_recomputed_attention(atom));
            let more: Vec<Atom> = more.filter(|atom| !found.contains(atom)).collect();
            found.extend(more);
            next += 1;
        }
        found
    }

    /// Nodes of a set of atoms, in order.
    pub fn nodes(&self, set: &[Atom]) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = set.iter().flat_map(|&atom| self.atoms[atom].iter().copied()).collect();
        nodes.sort_unstable();
        nodes
    }

    /// Whether a value is read outside of a set of atoms, or is an output.
    pub fn leaves(&self, id: NodeId, set: &[Atom]) -> bool {
        let outside =
            |reader: &NodeId| self.atom_of[reader.index()].is_none_or(|atom| set.binary_search(&atom).is_err());
        self.is_output[id.index()] || self.readers[id.index()].iter().any(outside)
    }

    /// Whether the members are connected through neighbours.
    pub fn is_connected(&self, set: &[Atom]) -> bool {
        let mut reached: BTreeSet<Atom> = set.first().copied().into_iter().collect();
        let mut waiting: Vec<Atom> = reached.iter().copied().collect();
        while let Some(atom) = waiting.pop() {
            for &next in &self.neighbours[atom] {
                if set.binary_search(&next).is_ok() && reached.insert(next) {
                    waiting.push(next);
                }
            }
        }
        reached.len() == set.len()
    }

    /// Whether no path between members leads through an outside atom.
    pub fn convex(&self, set: &[Atom]) -> Result<(), Reason> {
        let (mut inside, mut above, mut below) = (Bits::NONE, Bits::NONE, Bits::NONE);
        for &atom in set {
            inside.insert(atom);
            above.union_with(self.between.before(atom));
            below.union_with(self.between.after(atom));
        }
        match above.common_outside(&below, &inside) {
            None => Ok(()),
            Some(between) => Err(Reason::WouldFormCycle { through: self.atoms[between][0] }),
        }
    }

    /// Atoms of `part` that must run before `set`, without those that others of them imply.
    pub fn needs(&self, set: &[Atom], part: &[Atom]) -> Vec<Atom> {
        let mut found: BTreeSet<Atom> = BTreeSet::new();
        let mut seen: HashSet<Atom> = set.iter().copied().collect();
        let mut waiting: Vec<Atom> = set.to_vec();
        while let Some(atom) = waiting.pop() {
            // Producers have lower numbers: nothing before the first of the part leads to one of it.
            for &producer in self.producers[atom].iter().filter(|&&producer| producer >= part[0]) {
                if !seen.insert(producer) {
                    continue;
                }
                if part.binary_search(&producer).is_ok() {
                    found.insert(producer);
                } else {
                    waiting.push(producer);
                }
            }
        }
        let mut implied = Bits::NONE;
        let mut needs: Vec<Atom> = Vec::new();
        for atom in found.into_iter().rev().filter(|atom| set.binary_search(atom).is_err()) {
            if !implied.contains(atom) {
                needs.push(atom);
                implied.union_with(self.between.before(atom));
            }
        }
        needs.reverse();
        needs
    }

    /// Whether one kernel may contain these atoms, and its predicted time.
    pub fn price(&mut self, set: &[Atom]) -> Result<Price, Reason> {
        if set.len() > 1 {
            self.convex(set)?;
        }
        let nodes = self.nodes(set);
        let signature = self.signature(&nodes, set);
        if let Some(known) = self.prices.get(&signature) {
            return known.clone();
        }
        let price = self.fresh_price(set, &nodes);
        self.prices.insert(signature, price.clone());
        price
    }

    fn fresh_price(&self, set: &[Atom], nodes: &[NodeId]) -> Result<Price, Reason> {
        let structure = self.structure(set, nodes)?;
        let Target { machine, catalog } = self.target;
        let refused = || Reason::NotOffered { form: structure.name() };
        // An atom is a kernel whatever is offered: there is nothing less to fall back on.
        let asks = set.len() > 1;
        if asks && !catalog.offers_structure(&structure) {
            return Err(refused());
        }
        let outputs = self.outputs(set, nodes);
        let draft = self.draft(nodes, &outputs, &structure);
        if asks && !catalog.offers(&draft) {
            return Err(refused());
        }
        let cost = cost(&draft, machine, catalog);
        match cost.drawback {
            Some(why) if asks => Err(Reason::Drawback { why }),
            _ => Ok(Price { kind: structure.kind(), cost }),
        }
    }

    /// The structure of a group, or why it is not legal.
    pub fn structure(&self, set: &[Atom], nodes: &[NodeId]) -> Result<Structure, Reason> {
        self.rules.structure(nodes, &|id| self.leaves(id, set))
    }

    /// The cost of a group as a kernel of a given structure, legal or not.
    pub fn cost_as(&self, set: &[Atom], nodes: &[NodeId], structure: &Structure) -> Cost {
        cost(&self.draft(nodes, &self.outputs(set, nodes), structure), self.target.machine, self.target.catalog)
    }

    /// The values that a group stores.
    pub fn outputs(&self, set: &[Atom], nodes: &[NodeId]) -> Vec<NodeId> {
        nodes.iter().copied().filter(|&id| self.leaves(id, set)).collect()
    }

    /// A group as a draft for the catalogue.
    pub fn draft<'d>(&'d self, nodes: &'d [NodeId], outputs: &'d [NodeId], structure: &'d Structure) -> Draft<'d> {
        Draft { graph: self.rules.graph, placement: self.rules.placement, nodes, outputs, structure }
    }

    /// A signature that two groups share only if their legality and cost are equal.
    fn signature(&self, nodes: &[NodeId], set: &[Atom]) -> u128 {
        let Rules { graph, placement, .. } = self.rules;
        let mut outside: Vec<NodeId> = Vec::new();
        let mut words: Vec<u64> = Vec::with_capacity(16 * nodes.len());
        for &id in nodes {
            words.extend([self.node_hash[id.index()], self.leaves(id, set) as u64]);
            for &input in &graph.node(id).inputs {
                let source = if placement.get(input).is_some() { input } else { pattern_source(graph, input) };
                let base = placement.base(input);
                words.extend(match base.map(|base| (base, nodes.binary_search(&base))) {
                    Some((_, Ok(position))) => [1, position as u64, self.node_hash[input.index()], 0],
                    Some((base, Err(_))) => {
                        let position = outside.iter().position(|&known| known == base).unwrap_or_else(|| {
                            outside.push(base);
                            outside.len() - 1
                        });
                        let node = graph.node(base);
                        let given = matches!(node.op, Op::Input { .. }) as u64;
                        [2 + given, position as u64, self.node_hash[input.index()], node.bytes() as u64]
                    }
                    None => [4, self.node_hash[source.index()], self.node_hash[input.index()], 0],
                });
            }
        }
        let mut hashers = [DefaultHasher::new(), DefaultHasher::new()];
        1u8.hash(&mut hashers[1]);
        hashers.iter_mut().for_each(|hasher| words.hash(hasher));
        (hashers[0].finish() as u128) << 64 | hashers[1].finish() as u128
    }
}

fn hash_op(op: &Op, hasher: &mut DefaultHasher) {
    std::mem::discriminant(op).hash(hasher);
    match op {
        Op::Input { .. } | Op::Select | Op::ColumnSum | Op::Gather | Op::StopGradient => {}
        Op::Const { value, .. } => value.to_bits().hash(hasher),
        Op::Iota { axis, .. } | Op::Concat { axis } => axis.hash(hasher),
        Op::Random { drop, .. } => drop.to_bits().hash(hasher),
        Op::Unary(op) => op.hash(hasher),
        Op::Binary(op) => op.hash(hasher),
        Op::Compare(op) => op.hash(hasher),
        Op::Cast(dtype) => dtype.hash(hasher),
        Op::RowReduce(op) => op.hash(hasher),
        Op::Matmul { transpose_a, transpose_b } => (transpose_a, transpose_b).hash(hasher),
        Op::ScatterAdd { rows } => rows.hash(hasher),
        Op::Append { batch } => batch.hash(hasher),
        Op::View(view) => view.hash(hasher),
        Op::Opaque(opaque) => (&opaque.name, opaque.bytes, opaque.flops, opaque.elementwise).hash(hasher),
    }
}
