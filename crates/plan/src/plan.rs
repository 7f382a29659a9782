//! Plan and Group: plain data, printable, comparable.

use std::fmt;
use std::str::FromStr;

use deuteron_graph::{Graph, GraphError, NodeId, Shape};

use crate::choose::choose;
use crate::cost::traffic::{Traffic, traffic};
use crate::cost::units::Bytes;
use crate::layout::{Layout, Placement, place};
use crate::legal::{Reason, kernel_kind};
use crate::machine::Machine;
use crate::memory::{Arena, arena};

/// How much is merged. All come from one mechanism; they differ in what may share a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// A kernel a primitive.
    Naive,
    /// A kernel a composite, attention as scores, mask, softmax, product.
    Eager,
    /// A kernel a builder call. Attention has no kernel of its own yet, so this equals `Eager`.
    Unfused,
    /// Row ops merged wherever it is legal.
    Fused,
}

impl Strategy {
    /// All of them, from least to most fused.
    pub const ALL: [Strategy; 4] = [Strategy::Naive, Strategy::Eager, Strategy::Unfused, Strategy::Fused];

    /// The word in reports and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Naive => "naive",
            Strategy::Eager => "eager",
            Strategy::Unfused => "unfused",
            Strategy::Fused => "fused",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Strategy {
    type Err = PlanError;
    fn from_str(text: &str) -> Result<Self, PlanError> {
        let found = Strategy::ALL.into_iter().find(|strategy| strategy.name() == text);
        found.ok_or_else(|| PlanError::UnknownStrategy(text.to_string()))
    }
}

/// The kind of kernel a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// Elementwise work, row reductions and column sums over one space.
    Row,
    /// One matrix product.
    Matmul,
    /// Rows added into a table.
    ScatterAdd,
    /// A view or a concatenation written out.
    Copy,
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GroupKind::Row => "row",
            GroupKind::Matmul => "matmul",
            GroupKind::ScatterAdd => "scatter_add",
            GroupKind::Copy => "copy",
        })
    }
}

/// One kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// What it is for a person: `layer_norm + gelu`.
    pub name: String,
    /// Its kind.
    pub kind: GroupKind,
    /// What it makes, operands before users.
    pub nodes: Vec<NodeId>,
    /// The nodes it reads from buffers, each base once.
    pub inputs: Vec<NodeId>,
    /// The nodes it writes to buffers.
    pub outputs: Vec<NodeId>,
    /// What it moves.
    pub traffic: Traffic,
}

/// A merge that was not made, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// index of the group that makes the value
    pub producer: usize,
    /// index of the group that reads it
    pub consumer: usize,
    /// why they are two
    pub reason: Reason,
}

/// Which nodes share a kernel, in the order the kernels run.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// how the groups were chosen
    pub strategy: Strategy,
    /// where every value lies
    pub placement: Placement,
    /// the kernels
    pub groups: Vec<Group>,
    /// every producer and consumer that stay apart
    pub refusals: Vec<Refusal>,
    /// intermediate buffers, by lifetime
    pub arena: Arena,
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The graph is malformed.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// Nothing to compute.
    #[error("the graph has no outputs; declare one with `out NAME`")]
    NoOutputs,
    /// A strategy name that is none of ours.
    #[error("unknown plan `{0}`; expected naive, eager, unfused or fused")]
    UnknownStrategy(String),
    /// An input that row kernels cannot read.
    #[error(
        "input `{name}`: expected shape {shape} with a last axis of stride 1 (or 0, to repeat), got shape {got} with \
             strides {strides:?}; copy it to a contiguous tensor first"
    )]
    InputLayout {
        /// its name
        name: String,
        /// its shape in the graph
        shape: Shape,
        /// the shape given
        got: Shape,
        /// the strides given
        strides: Vec<usize>,
    },
    /// The wrong number of input layouts.
    #[error("expected {expected} input layouts, got {got}")]
    InputLayouts {
        /// inputs of the graph
        expected: usize,
        /// layouts given
        got: usize,
    },
}

/// Plans a graph. `inputs` are the layouts in which the graph's inputs will be handed in; empty means contiguous.
pub fn plan(graph: &Graph, machine: &Machine, strategy: Strategy, inputs: &[Layout]) -> Result<Plan, PlanError> {
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
    let placement = place(graph, inputs);
    let chosen = choose(graph, &placement, machine, strategy);
    let groups: Vec<Group> =
        chosen.groups.iter().map(|nodes| describe(graph, &placement, &chosen.stored, nodes, strategy)).collect();
    let arena = arena(graph, &groups);
    Ok(Plan { strategy, placement, groups, refusals: chosen.refusals, arena })
}

/// Any strides of the leading axes; the last one contiguous, or repeated.
fn check_input(graph: &Graph, id: NodeId, layout: &Layout) -> Result<(), PlanError> {
    let shape = &graph.node(id).shape;
    let last_in_order = shape.cols() == 1 || layout.strides.last().is_none_or(|&stride| stride <= 1);
    if layout.shape == *shape && last_in_order {
        return Ok(());
    }
    let (name, got) = (graph.label(id), layout.shape.clone());
    Err(PlanError::InputLayout { name, shape: shape.clone(), got, strides: layout.strides.clone() })
}

fn describe(graph: &Graph, placement: &Placement, stored: &[bool], nodes: &[NodeId], strategy: Strategy) -> Group {
    let outputs: Vec<NodeId> = nodes.iter().copied().filter(|id| stored[id.index()]).collect();
    let mut inputs: Vec<NodeId> = Vec::new();
    for &id in nodes {
        for value in placement.reads(graph, id) {
            let base = placement.base(value).filter(|base| !nodes.contains(base) && !inputs.contains(base));
            inputs.extend(base);
        }
    }
    let traffic = traffic(graph, placement, nodes, &outputs);
    let name = group_name(graph, nodes, strategy);
    Group { name, kind: kernel_kind(graph, placement, nodes[0]), nodes: nodes.to_vec(), inputs, outputs, traffic }
}

/// The calls a group came from, in order, each once in a row: `add + layer_norm`, `3 gelu`.
fn group_name(graph: &Graph, nodes: &[NodeId], strategy: Strategy) -> String {
    let mut words: Vec<(String, usize)> = Vec::new();
    let mut last_call = None;
    for &id in nodes {
        let node = graph.node(id);
        let (word, same) = match strategy {
            Strategy::Naive => (node.op.name().to_string(), false),
            _ if matches!(node.op, deuteron_graph::Op::Matmul { .. }) && nodes.len() == 1 => {
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

    /// The plan for a person: a line a kernel, and why neighbours stay apart.
    pub fn explain(&self) -> String {
        let mut text = String::new();
        for (index, group) in self.groups.iter().enumerate() {
            text += &format!("group {index}: {}  [{}, {}]\n", group.name, group.kind, group.traffic.total());
            for refusal in self.refusals.iter().filter(|refusal| refusal.consumer == index) {
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
