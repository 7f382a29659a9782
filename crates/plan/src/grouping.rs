//! Groups made by merging neighbours: the baselines, the greedy plan, and the atoms that the search starts from.
//!
//! Every strategy starts from a kernel per node and merges neighbours while legality and the strategy's scope allow:
//! nothing (naive), parts of calls (eager), attention (unfused), then anything (greedy). Neighbours are a value's producer
//! and consumer, or two consumers of one value.

use std::collections::{BTreeSet, HashSet};

use deuteron_graph::{Call, Graph, NodeId, Op, first_backward};

use crate::calls::{is_attention, is_attention_gradient, is_loss, is_recomputed_attention, is_taken_whole};
use crate::catalog::Catalog;
use crate::chain::Structure;
use crate::draft::Draft;
use crate::layout::Placement;
use crate::order::Order;
use crate::reason::Reason;
use crate::rules::{Rules, after_gradient};
use crate::strategy::Strategy;
use crate::target::Target;

/// Maximum number of groups in a chain that begins with attention: the transpose of its result, a projection, its bias, a residual, a norm,
/// and one to spare.
const CHAIN: usize = 7;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// parts of calls: the atoms of the search
    CallPart,
    /// calls, and of attention its parts
    Call,
    Everything,
}

/// The result of an attempt to merge.
enum Merged {
    /// merged, or never to be merged
    Settled,
    /// no kernel for it yet
    NotOffered,
}

/// Nodes in groups, with their readers.
pub(crate) struct Grouping<'a> {
    pub rules: Rules<'a>,
    pub catalog: &'a dyn Catalog,
    /// For each node, the index of its group; `None` where no kernel is needed.
    pub group_of: Vec<Option<usize>>,
    /// Members in order; empty where a group was merged away.
    pub groups: Vec<Vec<NodeId>>,
    /// For each node that has a buffer, the nodes that read it.
    pub readers: Vec<Vec<NodeId>>,
    pub is_output: Vec<bool>,
    /// Set once groups may span calls.
    order: Option<Order>,
    /// fusions that the user forced or forbade
    pinned: Pinned,
}

/// Nodes that must, and nodes that must not, share a kernel; each list in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pinned {
    pub together: Vec<Vec<NodeId>>,
    pub apart: Vec<Vec<NodeId>>,
}

impl<'a> Grouping<'a> {
    /// The same where the user forced or forbade fusions, which merging in order respects as far as it can.
    pub fn with_pins(mut self, pinned: Pinned) -> Self {
        self.pinned = pinned;
        self
    }

    /// Whether all pins hold.
    pub fn keeps_pins(&self) -> bool {
        let is_one = |set: &Vec<NodeId>| {
            let group = self.group_of[set[0].index()];
            set.iter().all(|id| self.group_of[id.index()] == group)
        };
        self.pinned.together.iter().all(is_one) && !self.pinned.apart.iter().any(is_one)
    }

    /// Merges each forced set, if a kernel of only that exists.
    fn merge_forced(&mut self) {
        for set in self.pinned.together.clone() {
            let mut groups: Vec<usize> = set.iter().filter_map(|id| self.group_of[id.index()]).collect();
            groups.sort_unstable();
            groups.dedup();
            let mut nodes: Vec<NodeId> = groups.iter().flat_map(|&group| self.groups[group].iter().copied()).collect();
            nodes.sort_unstable();
            if groups.len() > 1 && self.allowed(&nodes, &groups).is_ok() && !self.comes_back(&groups) {
                self.join(&groups);
            }
        }
    }
}

impl<'a> Grouping<'a> {
    /// A kernel per node.
    pub fn new(graph: &'a Graph, placement: &'a Placement, target: Target<'a>) -> Self {
        let count = graph.nodes().len();
        let mut is_output = vec![false; count];
        graph.outputs().iter().for_each(|output| is_output[output.node.index()] = true);
        let needed = needed(graph, &is_output);
        let mut grouping = Grouping {
            rules: Rules { graph, placement, machine: target.machine, first_backward: first_backward(graph) },
            catalog: target.catalog,
            group_of: vec![None; count],
            groups: Vec::new(),
            readers: vec![Vec::new(); count],
            is_output,
            order: None,
            pinned: Pinned::default(),
        };
        for id in graph.ids().filter(|&id| needed[id.index()] && placement.needs_kernel(graph, id)) {
            grouping.place_node(id);
            placement.for_reads(graph, id, &mut |value| {
                let Some(base) = placement.base(value) else { return };
                let readers = &mut grouping.readers[base.index()];
                if readers.last() != Some(&id) {
                    readers.push(id);
                }
            });
        }
        grouping
    }

    /// Results of one opaque call are one kernel from the start.
    fn place_node(&mut self, id: NodeId) {
        let graph = self.rules.graph;
        let before = id.index().checked_sub(1).and_then(|index| graph.id(index));
        let together = before.filter(|&before| {
            let opaque = |id: NodeId| matches!(graph.node(id).op, Op::Opaque(_));
            opaque(id) && opaque(before) && graph.node(before).call == graph.node(id).call
        });
        match together.and_then(|before| self.group_of[before.index()]) {
            Some(group) => {
                self.group_of[id.index()] = Some(group);
                self.groups[group].push(id);
            }
            None => {
                self.group_of[id.index()] = Some(self.groups.len());
                self.groups.push(vec![id]);
            }
        }
    }

    /// Merges as far as a strategy allows; the search starts from `Unfused`.
    pub fn merge_for(&mut self, strategy: Strategy) {
        match strategy {
            Strategy::Naive => {}
            Strategy::Eager => self.merge(Scope::Call),
            Strategy::Fused => {
                self.merge(Scope::CallPart);
                // Where there is a kernel for all of it, its many parts are nothing to search.
                self.merge_whole_calls(is_loss);
            }
            Strategy::Unfused => {
                self.merge(Scope::Call);
                self.merge_whole_calls(is_taken_whole);
            }
            Strategy::Greedy => {
                self.merge(Scope::Call);
                self.merge_whole_calls(is_taken_whole);
                self.watch();
                self.merge_forced();
                self.merge_chains();
                self.merge_gradients();
                self.merge(Scope::Everything);
            }
        }
    }

    /// Visits the nodes in order and merges each with the producers of its operands, then with other readers of them.
    fn merge(&mut self, scope: Scope) {
        let graph = self.rules.graph;
        let ids: Vec<NodeId> = graph.ids().filter(|id| self.group_of[id.index()].is_some()).collect();
        // Pairs for which there is no kernel yet: half of an epilogue is none, and the whole of it may be.
        let mut unfinished: Vec<(NodeId, NodeId)> = Vec::new();
        for &id in &ids {
            for base in self.bases(id) {
                if let Merged::NotOffered = self.try_merge(base, id, scope) {
                    unfinished.push((base, id));
                }
            }
        }
        for base in graph.ids() {
            for position in 1..self.readers[base.index()].len() {
                let (first, second) = (self.readers[base.index()][position - 1], self.readers[base.index()][position]);
                self.try_merge(first, second, scope);
            }
        }
        loop {
            let before = unfinished.len();
            unfinished.retain(|&(base, id)| matches!(self.try_merge(base, id, scope), Merged::NotOffered));
            if unfinished.len() == before {
                return;
            }
        }
    }

    /// Attention by online softmax is one kernel wherever it is offered, and so are its probabilities and a loss without logits: the
    /// intermediate groups are not legal or not offered, so pairwise merging would not find it.
    fn merge_whole_calls(&mut self, is_wanted: fn(&Call) -> bool) {
        let graph = self.rules.graph;
        for call in graph.calls().iter().filter(|call| is_wanted(call)) {
            let nodes = self.whole_call(call);
            let mut groups: Vec<usize> = nodes.iter().filter_map(|id| self.group_of[id.index()]).collect();
            groups.sort_unstable();
            groups.dedup();
            let stays_inside = groups.iter().map(|&group| self.groups[group].len()).sum::<usize>() == nodes.len();
            if groups.len() > 1 && stays_inside && self.allowed(&nodes, &groups).is_ok() {
                groups[1..].iter().for_each(|&group| self.groups[group].clear());
                nodes.iter().for_each(|id| self.group_of[id.index()] = Some(groups[0]));
                self.groups[groups[0]] = nodes;
            }
        }
    }

    /// Nodes of a call that a kernel computes, and of the scores that are recomputed for it, in order.
    fn whole_call(&self, call: &Call) -> Vec<NodeId> {
        let nodes = (call.start..call.end).filter_map(|index| self.rules.graph.id(index));
        self.with_recomputed_scores(nodes.filter(|id| self.group_of[id.index()].is_some()).collect())
    }

    /// Attention and its consumers are one kernel as far as one is offered. Whole chains are tried, consumer after consumer: with a
    /// projection alone there may be no kernel, but with the norm after it there is one.
    fn merge_chains(&mut self) {
        let graph = self.rules.graph;
        for call in graph.calls().iter().filter(|call| is_attention(call)) {
            let first = call.outputs.first().and_then(|output| self.group_of[output.index()]);
            let Some(first) =
                first.filter(|&group| self.groups[group].iter().all(|id| (call.start..call.end).contains(&id.index())))
            else {
                continue;
            };
            let (mut chain, mut whole) = (vec![first], 1);
            while chain.len() < CHAIN
                && let Some(next) = self.next_reader(&chain)
            {
                chain.push(next);
                let mut nodes: Vec<NodeId> =
                    chain.iter().flat_map(|&group| self.groups[group].iter().copied()).collect();
                nodes.sort_unstable();
                match self.allowed(&nodes, &chain) {
                    Ok(()) if !self.comes_back(&chain) => whole = chain.len(),
                    Ok(()) | Err(Reason::NotOffered { .. }) => {}
                    Err(_) => break,
                }
            }
            self.join(&chain[..whole]);
        }
    }

    /// The gradient of attention is one kernel with what its gradients become where that is offered whole: sums over heads that share keys
    /// are for keys and for values, or for neither.
    fn merge_gradients(&mut self) {
        let Rules { graph, placement, .. } = self.rules;
        for call in graph.calls().iter().filter(|call| is_attention_gradient(call)) {
            // The call alone may have no kernel where heads share keys.
            let core = self.whole_call(call);
            let after = after_gradient(graph, placement, &core, &self.readers);
            let mut groups: Vec<usize> = core.iter().chain(&after).filter_map(|id| self.group_of[id.index()]).collect();
            groups.sort_unstable();
            groups.dedup();
            let mut nodes: Vec<NodeId> = groups.iter().flat_map(|&group| self.groups[group].iter().copied()).collect();
            nodes.sort_unstable();
            let alone = nodes.len() == core.len() + after.len();
            if groups.len() > 1 && alone && self.allowed(&nodes, &groups).is_ok() && !self.comes_back(&groups) {
                self.join(&groups);
            }
        }
    }

    /// The group of the first node that reads a value of some groups and is in none of them.
    fn next_reader(&self, groups: &[usize]) -> Option<usize> {
        let made = groups.iter().flat_map(|&group| &self.groups[group]);
        let readers = made.flat_map(|id| &self.readers[id.index()]);
        let outside =
            readers.filter(|reader| self.group_of[reader.index()].is_some_and(|group| !groups.contains(&group)));
        self.group_of[outside.min()?.index()]
    }

    /// Whether a path leads from some groups through another one back to them.
    fn comes_back(&self, groups: &[usize]) -> bool {
        let mut seen: HashSet<usize> = HashSet::new();
        let mut stack = groups.to_vec();
        while let Some(group) = stack.pop() {
            let inside = groups.contains(&group);
            for reader in self.groups[group].iter().flat_map(|id| &self.readers[id.index()]) {
                let Some(next) = self.group_of[reader.index()].filter(|&next| next != group) else { continue };
                match groups.contains(&next) {
                    true if !inside => return true,
                    false if seen.insert(next) => stack.push(next),
                    _ => {}
                }
            }
        }
        false
    }

    /// Nodes of the gradient of attention and the scores recomputed for them, in order.
    fn with_recomputed_scores(&self, mut nodes: Vec<NodeId>) -> Vec<NodeId> {
        let graph = self.rules.graph;
        let mut next = 0;
        while next < nodes.len() {
            for base in self.bases(nodes[next]) {
                let again = is_recomputed_attention(graph, base);
                if again && self.group_of[base.index()].is_some() && !nodes.contains(&base) {
                    nodes.push(base);
                }
            }
            next += 1;
        }
        nodes.sort_unstable();
        nodes
    }

    pub fn bases(&self, id: NodeId) -> Vec<NodeId> {
        let mut bases = Vec::new();
        let Rules { graph, placement, .. } = self.rules;
        placement.for_reads(graph, id, &mut |value| bases.extend(placement.base(value)));
        bases
    }

    fn try_merge(&mut self, neighbour: NodeId, member: NodeId, scope: Scope) -> Merged {
        let (first, second) = match (self.group_of[neighbour.index()], self.group_of[member.index()]) {
            (Some(first), Some(second)) if first != second => (first, second),
            _ => return Merged::Settled,
        };
        let (a, b) = (self.rules.graph.node(neighbour), self.rules.graph.node(member));
        let in_scope = match scope {
            Scope::CallPart => a.call == b.call && a.part == b.part,
            Scope::Call => {
                let call = &self.rules.graph.calls()[a.call.index()];
                a.call == b.call && (a.part == b.part || !is_attention(call))
            }
            Scope::Everything => true,
        };
        if !in_scope {
            return Merged::Settled;
        }
        match self.legal(first, second) {
            Ok(()) => {}
            // All readers of a value may be one kernel later.
            Err(Reason::NotOffered { .. } | Reason::ReadElsewhere { .. }) => return Merged::NotOffered,
            Err(_) => return Merged::Settled,
        }
        self.join(&[first, second]);
        Merged::Settled
    }

    /// Merges some groups into the first of them.
    fn join(&mut self, groups: &[usize]) {
        if let Some(order) = &mut self.order {
            order.merge(groups);
        }
        for &group in &groups[1..] {
            let moved = std::mem::take(&mut self.groups[group]);
            moved.iter().for_each(|id| self.group_of[id.index()] = Some(groups[0]));
            self.groups[groups[0]].extend(moved);
        }
        self.groups[groups[0]].sort();
    }

    /// Whether two groups may be merged.
    pub fn legal(&self, first: usize, second: usize) -> Result<(), Reason> {
        let mut nodes: Vec<NodeId> = self.groups[first].iter().chain(&self.groups[second]).copied().collect();
        nodes.sort();
        self.allowed(&nodes, &[first, second])?;
        self.convex(first, second)
    }

    fn allowed(&self, nodes: &[NodeId], groups: &[usize]) -> Result<(), Reason> {
        let holds = |set: &Vec<NodeId>| set.iter().all(|id| nodes.binary_search(id).is_ok());
        if self.pinned.apart.iter().any(holds) {
            return Err(Reason::Forbidden);
        }
        let structure = &self.rules.structure(nodes, &|id| self.leaves(id, groups))?;
        let offered = self.catalog.offers_structure(structure) && {
            let outputs: Vec<NodeId> = nodes.iter().copied().filter(|&id| self.leaves(id, groups)).collect();
            let Rules { graph, placement, .. } = self.rules;
            self.catalog.offers(&Draft { graph, placement, nodes, outputs: &outputs, structure })
        };
        if offered { Ok(()) } else { Err(Reason::NotOffered { form: structure.name() }) }
    }

    /// Whether a value is read outside of the groups, or is an output.
    pub fn leaves(&self, id: NodeId, groups: &[usize]) -> bool {
        let outside = |reader: &NodeId| self.group_of[reader.index()].is_none_or(|group| !groups.contains(&group));
        self.is_output[id.index()] || self.readers[id.index()].iter().any(outside)
    }

    /// No path from one group to the other may lead through a third.
    fn convex(&self, first: usize, second: usize) -> Result<(), Reason> {
        let third = match &self.order {
            Some(order) => order.third(first, second),
            None => self.third_of_call(first, second),
        };
        third.map_or(Ok(()), |group| Err(Reason::WouldFormCycle { through: self.groups[group][0] }))
    }

    /// While groups stay within calls, which are runs of nodes, a path that leaves the call never returns: only the
    /// groups of the call are examined.
    fn third_of_call(&self, first: usize, second: usize) -> Option<usize> {
        let graph = self.rules.graph;
        let call = graph.node(self.groups[first][0]).call;
        let mut seen: HashSet<usize> = HashSet::new();
        let mut stack: Vec<usize> = vec![first, second];
        while let Some(group) = stack.pop() {
            for reader in self.groups[group].iter().flat_map(|id| &self.readers[id.index()]) {
                let Some(next) = self.group_of[reader.index()] else { continue };
                if graph.node(*reader).call != call || next == group {
                    continue;
                }
                let is_pair = next == first || next == second;
                if is_pair && group != first && group != second {
                    return Some(group);
                }
                if !is_pair && seen.insert(next) {
                    stack.push(next);
                }
            }
        }
        None
    }

    /// The order of groups, maintained from now on: groups may span calls.
    fn watch(&mut self) {
        let order = self.topological();
        let producers = (0..self.groups.len()).map(|group| self.producers(group).into_iter().collect());
        self.order = Some(Order::new(&order, producers.collect()));
    }

    /// Replaces all groups.
    pub fn regroup(&mut self, groups: Vec<Vec<NodeId>>) {
        for (index, nodes) in groups.iter().enumerate() {
            nodes.iter().for_each(|id| self.group_of[id.index()] = Some(index));
        }
        self.groups = groups;
        self.watch();
    }

    /// The groups that a group reads from.
    pub fn producers(&self, group: usize) -> BTreeSet<usize> {
        let mut producers = BTreeSet::new();
        for &id in &self.groups[group] {
            producers.extend(self.bases(id).iter().filter_map(|base| self.group_of[base.index()]));
        }
        producers.remove(&group);
        producers
    }

    /// Groups after the groups they read from; among those that are ready, the one whose first node is earliest. Groups
    /// in a cycle are left out.
    pub fn topological(&self) -> Vec<usize> {
        let mut waiting = vec![0usize; self.groups.len()];
        let mut followers: Vec<Vec<usize>> = vec![Vec::new(); self.groups.len()];
        for (group, waits) in waiting.iter_mut().enumerate() {
            let producers = self.producers(group);
            *waits = producers.len();
            producers.into_iter().for_each(|producer| followers[producer].push(group));
        }
        let mut ready: BTreeSet<(NodeId, usize)> = (0..self.groups.len())
            .filter(|&group| !self.groups[group].is_empty() && waiting[group] == 0)
            .map(|group| (self.groups[group][0], group))
            .collect();
        let mut order = Vec::new();
        while let Some((_, group)) = ready.pop_first() {
            order.push(group);
            for &follower in &followers[group] {
                waiting[follower] -= 1;
                if waiting[follower] == 0 {
                    ready.insert((self.groups[follower][0], follower));
                }
            }
        }
        order
    }

    /// The structure of a group that is known to be legal.
    pub fn structure(&self, group: usize) -> Structure {
        let found = self.rules.structure(&self.groups[group], &|id| self.leaves(id, &[group]));
        found.unwrap_or(Structure::Opaque)
    }
}

/// Nodes that an output depends on.
fn needed(graph: &Graph, is_output: &[bool]) -> Vec<bool> {
    let mut needed = is_output.to_vec();
    for id in graph.ids().rev() {
        if needed[id.index()] {
            graph.node(id).inputs.iter().for_each(|input| needed[input.index()] = true);
        }
    }
    needed
}
