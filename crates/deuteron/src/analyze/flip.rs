//! The device, batch, sequence or size at which the verdict on a fusion changes.

use std::collections::HashMap;

use deuteron_graph::{Graph, NodeId};
use deuteron_plan::{Machine, Strategy, atoms, plan};
use deuteron_report::{Analysis, Flip};

use crate::analyze::AnalyzeOptions;
use crate::error::Error;

/// A variable size: its name, its current value, and the values to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Knob {
    /// `batch`, `sequence`, `hidden`, `rows`, `cols`
    pub name: &'static str,
    /// its current value
    pub now: usize,
    /// values to try
    pub values: Vec<usize>,
}

impl Knob {
    /// Powers of two from 1 to `most`, and the current value.
    pub fn doubling(name: &'static str, now: usize, most: usize) -> Knob {
        let mut values: Vec<usize> =
            std::iter::successors(Some(1), |value| Some(value * 2)).take_while(|&value| value <= most).collect();
        values.retain(|&value| value != now);
        Knob { name, now, values }
    }
}

/// A graph in other sizes: its variable sizes, and the graph with one of them changed.
pub trait Variants {
    /// The sizes that can be changed.
    fn knobs(&self) -> Vec<Knob>;
    /// The graph with the size of this name set to this value, if there is one.
    fn at(&self, knob: &str, value: usize) -> Option<Graph>;
}

/// Finds for every pair of the analysis the nearest setting at which the plan's decision changes.
pub fn flips(
    graph: &Graph,
    analysis: &Analysis,
    options: &AnalyzeOptions,
    variants: &dyn Variants,
) -> Result<Vec<Flip>, Error> {
    // Variants of a graph have the same nodes in the same order, so a node names the same operation in all of them.
    let operations = atoms(graph, super::target_of(options))?;
    let operations: Vec<NodeId> = operations.iter().map(|nodes| nodes[0]).collect();
    let mut flips = Vec::new();
    let mut decided: HashMap<(String, usize), bool> = HashMap::new();
    for name in Machine::PROFILES {
        let machine = Machine::profile(name).map_err(Error::Machine)?;
        if name == options.machine.name || machine.kind != options.machine.kind {
            continue;
        }
        let elsewhere = AnalyzeOptions { kernels: options.kernels, ..AnalyzeOptions::on(machine) };
        for (candidate, fused) in decisions(graph, &elsewhere, analysis, &operations)? {
            if fused != analysis.candidates[candidate].chosen
                && decided.insert(("device".into(), candidate), true).is_none()
            {
                flips.push(flip(analysis, candidate, "device", &options.machine.name, name));
            }
        }
    }
    for knob in variants.knobs() {
        let mut values = knob.values.clone();
        // Nearest first, by ratio.
        values.sort_by(|&a, &b| distance(a, knob.now).total_cmp(&distance(b, knob.now)).then(a.cmp(&b)));
        for value in values {
            let Some(other) = variants.at(knob.name, value) else { continue };
            if other.nodes().len() != graph.nodes().len() {
                continue;
            }
            for (candidate, fused) in decisions(&other, options, analysis, &operations)? {
                let turned = fused != analysis.candidates[candidate].chosen;
                if turned && decided.insert((knob.name.to_string(), candidate), true).is_none() {
                    flips.push(flip(analysis, candidate, knob.name, &knob.now.to_string(), &value.to_string()));
                }
            }
        }
    }
    flips.sort_by_key(|flip| flip.candidate);
    Ok(flips)
}

fn distance(value: usize, now: usize) -> f64 {
    (value as f64 / now.max(1) as f64).ln().abs()
}

/// For each pair of the analysis, whether a plan of the graph puts it into one kernel. Pairs of which a part needs no kernel
/// in this variant (a copy that strides make unnecessary) have no decision.
fn decisions(
    graph: &Graph,
    options: &AnalyzeOptions,
    analysis: &Analysis,
    operations: &[NodeId],
) -> Result<Vec<(usize, bool)>, Error> {
    let plan = plan(graph, super::target_of(options), Strategy::Fused, &[])?;
    let mut group_of: Vec<Option<usize>> = vec![None; graph.nodes().len()];
    for (index, group) in plan.groups.iter().enumerate() {
        group.nodes.iter().for_each(|id| group_of[id.index()] = Some(index));
    }
    let mut decisions = Vec::new();
    for (index, candidate) in analysis.candidates.iter().enumerate() {
        let groups: Option<Vec<usize>> =
            candidate.at.iter().map(|&atom| operations.get(atom).and_then(|node| group_of[node.index()])).collect();
        if let (Some(groups), true) = (groups, candidate.kind != "view") {
            decisions.push((index, groups.windows(2).all(|pair| pair[0] == pair[1])));
        }
    }
    Ok(decisions)
}

fn flip(analysis: &Analysis, candidate: usize, what: &str, from: &str, to: &str) -> Flip {
    let sheet = &analysis.candidates[candidate];
    let names = sheet.ops.join(" + ");
    let (now, then) = if sheet.chosen { ("fused", "kept apart") } else { ("kept apart", "fused") };
    let text = format!("{names}: {now} at {what} {from}, {then} at {what} {to}");
    Flip { candidate, what: what.to_string(), from: from.to_string(), to: to.to_string(), text }
}
