//! Which nodes share a kernel: the one place where groups are chosen.
//!
//! Every strategy starts from a kernel a node and merges neighbours while legality and the strategy's scope allow:
//! nothing (naive), parts of calls (eager, unfused), then anything (fused). Neighbours are a value's maker and its
//! reader, or two readers of one value. The cost model will replace the order of merging here; legality stays.

use std::collections::HashSet;

use deuteron_graph::{Graph, NodeId};

use crate::layout::Placement;
use crate::legal::{Pair, Reason};
use crate::machine::Machine;
use crate::plan::{Refusal, Strategy};

/// Groups in the order they run.
pub(crate) struct Chosen {
    pub groups: Vec<Vec<NodeId>>,
    /// For each node: is its value written to a buffer?
    pub stored: Vec<bool>,
    pub refusals: Vec<Refusal>,
}

pub(crate) fn choose(graph: &Graph, placement: &Placement, machine: &Machine, strategy: Strategy) -> Chosen {
    let mut grouping = Grouping::new(graph, placement, machine);
    match strategy {
        Strategy::Naive => {}
        Strategy::Eager | Strategy::Unfused => grouping.merge(Scope::CallPart),
        Strategy::Fused => {
            grouping.merge(Scope::CallPart);
            grouping.merge(Scope::Everything);
        }
    }
    grouping.finish(strategy)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    CallPart,
    Everything,
}

struct Grouping<'a> {
    graph: &'a Graph,
    placement: &'a Placement,
    machine: &'a Machine,
    /// For each node, the index of its group; `None` where no kernel is needed.
    group_of: Vec<Option<usize>>,
    /// Members in order; empty where a group was merged away.
    groups: Vec<Vec<NodeId>>,
    /// For each node that has a buffer, the nodes that read it.
    readers: Vec<Vec<NodeId>>,
    is_output: Vec<bool>,
}

impl<'a> Grouping<'a> {
    fn new(graph: &'a Graph, placement: &'a Placement, machine: &'a Machine) -> Self {
        let count = graph.nodes().len();
        let mut is_output = vec![false; count];
        graph.outputs().iter().for_each(|output| is_output[output.node.index()] = true);
        let needed = needed(graph, &is_output);
        let mut grouping = Grouping {
            graph,
            placement,
            machine,
            group_of: vec![None; count],
            groups: Vec::new(),
            readers: vec![Vec::new(); count],
            is_output,
        };
        for id in graph.ids().filter(|&id| needed[id.index()] && placement.needs_kernel(graph, id)) {
            grouping.group_of[id.index()] = Some(grouping.groups.len());
            grouping.groups.push(vec![id]);
            for value in placement.reads(graph, id) {
                if let Some(base) = placement.base(value) {
                    let readers = &mut grouping.readers[base.index()];
                    if readers.last() != Some(&id) {
                        readers.push(id);
                    }
                }
            }
        }
        grouping
    }

    /// Walks the nodes in order and merges each with the makers of its operands, then with other readers of them.
    fn merge(&mut self, scope: Scope) {
        let ids: Vec<NodeId> = self.graph.ids().filter(|id| self.group_of[id.index()].is_some()).collect();
        for &id in &ids {
            for base in self.bases(id) {
                if let Some(producer) = self.group_of[base.index()] {
                    self.try_merge(producer, id, base, scope);
                }
            }
        }
        for base in self.graph.ids() {
            let readers = self.readers[base.index()].clone();
            for pair in readers.windows(2) {
                if let Some(first) = self.group_of[pair[0].index()] {
                    self.try_merge(first, pair[1], pair[0], scope);
                }
            }
        }
    }

    fn bases(&self, id: NodeId) -> Vec<NodeId> {
        let reads = self.placement.reads(self.graph, id);
        reads.into_iter().filter_map(|value| self.placement.base(value)).collect()
    }

    fn try_merge(&mut self, first: usize, member: NodeId, neighbour: NodeId, scope: Scope) {
        let Some(second) = self.group_of[member.index()] else { return };
        let (a, b) = (self.graph.node(neighbour), self.graph.node(member));
        let in_scope = match scope {
            Scope::CallPart => a.call == b.call && a.part == b.part,
            Scope::Everything => true,
        };
        if first == second || !in_scope || self.legal(first, second).is_err() {
            return;
        }
        let moved = std::mem::take(&mut self.groups[second]);
        moved.iter().for_each(|id| self.group_of[id.index()] = Some(first));
        self.groups[first].extend(moved);
        self.groups[first].sort();
    }

    fn legal(&self, first: usize, second: usize) -> Result<(), Reason> {
        let (a, b) = (&self.groups[first], &self.groups[second]);
        let pair = Pair { graph: self.graph, placement: self.placement, machine: self.machine, first: a, second: b };
        let space = pair.check()?;
        let outputs = a.iter().chain(b).filter(|&&id| self.leaves(id, &[first, second])).count();
        pair.check_resources(outputs, space)?;
        self.convex(first, second)
    }

    /// Whether a value is read outside of the groups, or handed out.
    fn leaves(&self, id: NodeId, groups: &[usize]) -> bool {
        let outside = |reader: &NodeId| self.group_of[reader.index()].is_none_or(|group| !groups.contains(&group));
        self.is_output[id.index()] || self.readers[id.index()].iter().any(outside)
    }

    /// No way from one group to the other may lead through a third.
    fn convex(&self, first: usize, second: usize) -> Result<(), Reason> {
        let mut seen: HashSet<usize> = HashSet::new();
        let mut stack: Vec<(usize, NodeId)> = Vec::new();
        for &start in [first, second].iter() {
            self.push_outside_readers(start, &[first, second], &mut seen, &mut stack);
        }
        while let Some((group, entry)) = stack.pop() {
            if self.reads_into(group, first, second) {
                return Err(Reason::WouldFormCycle { through: entry });
            }
            self.push_outside_readers(group, &[first, second], &mut seen, &mut stack);
        }
        Ok(())
    }

    /// Groups that read a value of `group`, apart from `pair`. A late group may lead back: it may have been merged with an
    /// early one.
    fn push_outside_readers(
        &self,
        group: usize,
        pair: &[usize; 2],
        seen: &mut HashSet<usize>,
        stack: &mut Vec<(usize, NodeId)>,
    ) {
        for &id in &self.groups[group] {
            for &reader in &self.readers[id.index()] {
                let Some(next) = self.group_of[reader.index()] else { continue };
                if next != group && !pair.contains(&next) && seen.insert(next) {
                    stack.push((next, reader));
                }
            }
        }
    }

    fn reads_into(&self, group: usize, first: usize, second: usize) -> bool {
        self.groups[group].iter().any(|id| {
            self.readers[id.index()].iter().any(|reader| {
                let target = self.group_of[reader.index()];
                target == Some(first) || target == Some(second)
            })
        })
    }

    fn finish(self, strategy: Strategy) -> Chosen {
        let order = self.topological();
        let mut position = vec![usize::MAX; self.groups.len()];
        order.iter().enumerate().for_each(|(index, &group)| position[group] = index);
        let mut stored = vec![false; self.graph.nodes().len()];
        for (group, members) in self.groups.iter().enumerate() {
            members.iter().for_each(|&id| stored[id.index()] = self.leaves(id, &[group]));
        }
        let mut refusals = Vec::new();
        for &consumer in &order {
            let mut producers: Vec<usize> = Vec::new();
            for &id in &self.groups[consumer] {
                for base in self.bases(id) {
                    producers.extend(self.group_of[base.index()].filter(|&producer| producer != consumer));
                }
            }
            producers.sort_by_key(|&producer| position[producer]);
            producers.dedup();
            for producer in producers {
                let reason = match strategy {
                    Strategy::Fused => self.legal(producer, consumer).err().unwrap_or(Reason::Strategy),
                    Strategy::Naive | Strategy::Eager | Strategy::Unfused => Reason::Strategy,
                };
                refusals.push(Refusal { producer: position[producer], consumer: position[consumer], reason });
            }
        }
        let groups = order.into_iter().map(|group| self.groups[group].clone()).collect();
        Chosen { groups, stored, refusals }
    }

    /// Groups after the groups they read from; among those that are ready, the one whose first node is earliest.
    fn topological(&self) -> Vec<usize> {
        let mut waiting = vec![0usize; self.groups.len()];
        let mut followers: Vec<Vec<usize>> = vec![Vec::new(); self.groups.len()];
        for (group, members) in self.groups.iter().enumerate() {
            let mut producers: HashSet<usize> = HashSet::new();
            for &id in members {
                producers.extend(self.bases(id).iter().filter_map(|base| self.group_of[base.index()]));
            }
            producers.remove(&group);
            waiting[group] = producers.len();
            producers.into_iter().for_each(|producer| followers[producer].push(group));
        }
        let mut ready: std::collections::BTreeSet<(NodeId, usize)> = (0..self.groups.len())
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
