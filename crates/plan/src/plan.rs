//! Plans: plain data, printable, comparable.

use std::fmt;

use deuteron_graph::{Graph, NodeId, Op};

use crate::chain::Structure;
use crate::cost::cost;
use crate::draft::Draft;
use crate::error::PlanError;
use crate::group::Group;
use crate::grouping::{Grouping, Pinned};
use crate::layout::{Layout, Placement, place};
use crate::memory::{Arena, arena};
use crate::reason::Reason;
use crate::search::{Pin, Search, Solver, pins, search, solver};
use crate::strategy::Strategy;
use crate::target::Target;
use crate::units::{Bytes, Seconds};

/// A merge that was not made, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// index of the group that makes the value
    pub producer: usize,
    /// index of the group that reads it
    pub consumer: usize,
    /// why they are separate
    pub reason: Reason,
}

/// Which nodes share a kernel, in the order the kernels run.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// how the groups were chosen
    pub strategy: Strategy,
    /// the placement of every value
    pub placement: Placement,
    /// the kernels
    pub groups: Vec<Group>,
    /// every producer and consumer that are not fused
    pub refusals: Vec<Refusal>,
    /// intermediate buffers, by lifetime
    pub arena: Arena,
    /// how the groups were found, if by a search
    pub search: Option<Search>,
}

/// Plans a graph. `inputs` are the layouts of the graph's inputs; empty means contiguous.
pub fn plan(graph: &Graph, target: Target, strategy: Strategy, inputs: &[Layout]) -> Result<Plan, PlanError> {
    plan_pinned(graph, target, strategy, inputs, &[])
}

/// Plans a graph with forced or forbidden fusions. Pins apply to the strategies `Fused` and `Greedy`; the baselines fuse no calls.
pub fn plan_pinned(
    graph: &Graph,
    target: Target,
    strategy: Strategy,
    inputs: &[Layout],
    pins: &[Pin],
) -> Result<Plan, PlanError> {
    let placement = check_and_place(graph, target, inputs)?;
    let mut grouping = Grouping::new(graph, &placement, target);
    if strategy == Strategy::Greedy && !pins.is_empty() {
        grouping = grouping.with_pins(pinned_nodes(graph, &placement, target, pins)?);
    }
    grouping.merge_for(strategy);
    if !grouping.keeps_pins() {
        let names = pins.iter().map(|pin| format!("{} {}", pin.verb(), pin.names().join(","))).collect::<Vec<_>>();
        let why = "merging neighbours in order does not lead there; use the plan fused".to_string();
        return Err(PlanError::Pin { verb: "keep", what: names.join(" and ") + " in the plan greedy", why });
    }
    let found = match strategy {
        Strategy::Fused => {
            let mut solver = solver(&grouping, target);
            Some(search(&mut grouping, &mut solver, pins)?)
        }
        Strategy::Naive | Strategy::Eager | Strategy::Unfused | Strategy::Greedy => None,
    };
    Ok(finished(&grouping, target, strategy, found))
}

/// The nodes that pins name.
fn pinned_nodes(graph: &Graph, placement: &Placement, target: Target, pins: &[Pin]) -> Result<Pinned, PlanError> {
    let mut atoms = Grouping::new(graph, placement, target);
    atoms.merge_for(Strategy::Fused);
    let mut solver = solver(&atoms, target);
    let restriction = pins::restriction(&mut solver, pins)?;
    let nodes = |sets: &[Vec<usize>]| sets.iter().map(|set| solver.problem.nodes(set)).collect();
    Ok(Pinned { together: nodes(&restriction.together), apart: nodes(&restriction.apart) })
}

/// The cheapest plan of a graph whose groups are priced already.
pub(crate) fn plan_solved(mut grouping: Grouping, solver: &mut Solver, pins: &[Pin]) -> Result<Plan, PlanError> {
    let found = search(&mut grouping, solver, pins)?;
    Ok(finished(&grouping, solver.problem.target, Strategy::Fused, Some(found)))
}

fn finished(grouping: &Grouping, target: Target, strategy: Strategy, search: Option<Search>) -> Plan {
    let (groups, refusals) = finish(grouping, target, strategy);
    let arena = arena(grouping.rules.graph, &groups);
    Plan { strategy, placement: grouping.rules.placement.clone(), groups, refusals, arena, search }
}

/// Checks a graph and its inputs, and places every value.
pub(crate) fn check_and_place(graph: &Graph, target: Target, inputs: &[Layout]) -> Result<Placement, PlanError> {
    graph.verify()?;
    if graph.outputs().is_empty() {
        return Err(PlanError::NoOutputs);
    }
    if !inputs.is_empty() && inputs.len() != graph.inputs().len() {
        return Err(PlanError::InputLayouts { expected: graph.inputs().len(), got: inputs.len() });
    }
    for (&id, layout) in graph.inputs().iter().zip(inputs) {
        check_input(graph, id, layout)?;
    }
    Ok(place(graph, inputs, target.catalog.widens_operands()))
}

/// Groups in the order they run, and why neighbours are not fused.
fn finish(grouping: &Grouping, target: Target, strategy: Strategy) -> (Vec<Group>, Vec<Refusal>) {
    let order = grouping.topological();
    let mut position = vec![usize::MAX; grouping.groups.len()];
    order.iter().enumerate().for_each(|(index, &group)| position[group] = index);
    let groups = order.iter().map(|&group| describe(grouping, target, group, strategy)).collect();
    let mut refusals = Vec::new();
    for &consumer in &order {
        let mut producers: Vec<usize> = grouping.producers(consumer).into_iter().collect();
        producers.sort_by_key(|&producer| position[producer]);
        for producer in producers {
            let reason = match strategy {
                Strategy::Naive | Strategy::Eager | Strategy::Unfused => Reason::Strategy,
                Strategy::Greedy => grouping.legal(producer, consumer).err().unwrap_or(Reason::Strategy),
                Strategy::Fused => grouping.legal(producer, consumer).err().unwrap_or_else(|| {
                    let apart = price(grouping, target, &[producer]) + price(grouping, target, &[consumer]);
                    Reason::Slower { extra: price(grouping, target, &[producer, consumer]) - apart }
                }),
            };
            refusals.push(Refusal { producer: position[producer], consumer: position[consumer], reason });
        }
    }
    (groups, refusals)
}

/// The time of one kernel for these groups together.
fn price(grouping: &Grouping, target: Target, groups: &[usize]) -> Seconds {
    let mut nodes: Vec<NodeId> = groups.iter().flat_map(|&group| grouping.groups[group].iter().copied()).collect();
    nodes.sort();
    let outputs: Vec<NodeId> = nodes.iter().copied().filter(|&id| grouping.leaves(id, groups)).collect();
    let found = grouping.rules.structure(&nodes, &|id| grouping.leaves(id, groups));
    let structure = &found.unwrap_or(Structure::Opaque);
    let (graph, placement) = (grouping.rules.graph, grouping.rules.placement);
    cost(&Draft { graph, placement, nodes: &nodes, outputs: &outputs, structure }, target.machine, target.catalog).total
}

/// Any strides of the leading axes; the last one contiguous, or repeated.
fn check_input(graph: &Graph, id: NodeId, layout: &Layout) -> Result<(), PlanError> {
    let shape = &graph.node(id).shape;
    let last_in_order = shape.cols() == 1 || layout.strides.last().is_none_or(|&stride| stride <= 1);
    // Rows are added into a table, or appended to a cache, from memory as it lies.
    let takes_memory = |op: &Op| matches!(op, Op::ScatterAdd { .. } | Op::Append { .. });
    let as_it_lies = || graph.nodes().iter().any(|node| takes_memory(&node.op) && node.inputs.contains(&id));
    if layout.shape == *shape && last_in_order && (layout.is_contiguous() || !as_it_lies()) {
        return Ok(());
    }
    let (name, got) = (graph.label(id), layout.shape.clone());
    Err(PlanError::InputLayout { name, shape: shape.clone(), got, strides: layout.strides.clone() })
}

fn describe(grouping: &Grouping, target: Target, group: usize, strategy: Strategy) -> Group {
    let nodes = &grouping.groups[group];
    let (graph, placement) = (grouping.rules.graph, grouping.rules.placement);
    let outputs: Vec<NodeId> = nodes.iter().copied().filter(|&id| grouping.leaves(id, &[group])).collect();
    let mut inputs: Vec<NodeId> = Vec::new();
    for &id in nodes {
        for base in grouping.bases(id) {
            if nodes.binary_search(&base).is_err() && !inputs.contains(&base) {
                inputs.push(base);
            }
        }
    }
    let structure = grouping.structure(group);
    let draft = Draft { graph, placement, nodes, outputs: &outputs, structure: &structure };
    let cost = cost(&draft, target.machine, target.catalog);
    let name = group_name(graph, nodes, strategy);
    let kind = structure.kind();
    Group { name, kind, structure, nodes: nodes.clone(), inputs, outputs, traffic: cost.traffic, cost }
}

/// The calls of a group, in order, with repetitions counted: `add + layer_norm`, `3 gelu`.
fn group_name(graph: &Graph, nodes: &[NodeId], strategy: Strategy) -> String {
    let mut words: Vec<(String, usize)> = Vec::new();
    let mut last_call = None;
    for &id in nodes {
        let node = graph.node(id);
        let (word, same) = match strategy {
            Strategy::Naive => (node.op.name().to_string(), false),
            _ if matches!(node.op, Op::Matmul { .. }) && nodes.len() == 1 => {
                (format!("{} (matmul)", graph.call_name(node.call)), false)
            }
            _ => (graph.call_name(node.call).to_string(), last_call == Some(node.call)),
        };
        last_call = Some(node.call);
        match words.last_mut() {
            _ if same => {}
            Some((last, count)) if *last == word => *count += 1,
            _ => words.push((word, 1)),
        }
    }
    let words: Vec<String> =
        words.into_iter().map(|(word, count)| if count > 1 { format!("{count} {word}") } else { word }).collect();
    words.join(" + ").replace("matmul (matmul)", "matmul")
}

impl Plan {
    /// Bytes all kernels move together.
    pub fn bytes(&self) -> Bytes {
        self.groups.iter().map(|group| group.traffic.total()).sum()
    }

    /// Predicted time of all kernels together.
    pub fn time(&self) -> Seconds {
        self.groups.iter().map(|group| group.cost.total).sum()
    }

    /// The plan as text: one line per kernel, and why neighbours are not fused.
    pub fn explain(&self) -> String {
        let mut text = String::new();
        let mut refusals: Vec<Vec<&Refusal>> = vec![Vec::new(); self.groups.len()];
        self.refusals.iter().for_each(|refusal| refusals[refusal.consumer].push(refusal));
        for (index, group) in self.groups.iter().enumerate() {
            text += &format!("group {index}: {}  [{}, {}]\n", group.name, group.kind, group.traffic.total());
            for refusal in &refusals[index] {
                let code = refusal.reason.code();
                text += &format!("    apart from group {}: {code} {}\n", refusal.producer, refusal.reason);
            }
        }
        text
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.explain())
    }
}
