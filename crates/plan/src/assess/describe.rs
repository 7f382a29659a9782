//! Descriptions of atoms for reports.

use crate::kind::GroupKind;
use crate::plan::Plan;
use crate::search::kernels::atom_name;
use crate::search::problem::Problem;

/// One operation as the search sees it: a builder call, or the part of it that is a kernel of its own.
#[derive(Debug, Clone, PartialEq)]
pub struct AtomSheet {
    /// `layer_norm`
    pub name: String,
    /// the name the user gave its result
    pub label: String,
    /// the kernel it is on its own
    pub kind: GroupKind,
    /// type of its largest result
    pub result: String,
    /// atoms whose results it reads
    pub reads: Vec<usize>,
    /// its kernel in the unfused plan
    pub before: usize,
    /// its kernel in the chosen plan
    pub after: usize,
    /// flops per byte on its own
    pub intensity: f64,
}

pub(super) fn atoms(problem: &mut Problem, unfused: &Plan, chosen: &Plan) -> Vec<AtomSheet> {
    let (before, after) = (group_of(problem, unfused), group_of(problem, chosen));
    let graph = problem.rules.graph;
    let mut sheets = Vec::new();
    for atom in 0..problem.atoms.len() {
        let nodes = problem.atoms[atom].clone();
        let label = nodes.iter().rev().find_map(|&id| {
            let output = graph.outputs().iter().find(|output| output.node == id).map(|output| output.name.as_str());
            graph.given_name(id).or(output)
        });
        let stored = nodes.iter().filter(|&&id| problem.leaves(id, &[atom]));
        let largest = stored.max_by_key(|&&id| graph.node(id).bytes()).map(|&id| graph.node(id));
        let price = problem.price(&[atom]).ok();
        sheets.push(AtomSheet {
            name: atom_name(problem, atom),
            label: label.unwrap_or_default().to_string(),
            kind: price.as_ref().map_or(GroupKind::Opaque, |price| price.kind),
            result: largest.map_or(String::new(), |node| format!("{}{}", node.dtype, node.shape)),
            reads: problem.producers[atom].clone(),
            before: before[atom],
            after: after[atom],
            intensity: price.map_or(0.0, |price| price.cost.intensity()),
        });
    }
    sheets
}

/// For each atom, the position of its group in a plan.
pub(super) fn group_of(problem: &Problem, plan: &Plan) -> Vec<usize> {
    let mut of = vec![0; problem.atoms.len()];
    for (index, group) in plan.groups.iter().enumerate() {
        for id in &group.nodes {
            if let Some(atom) = problem.atom_of[id.index()] {
                of[atom] = index;
            }
        }
    }
    of
}
