//! The cheapest plan: all legal groups, priced, and the best way to cover the graph with them.
//!
//! Groups that cost no less than the parts they could be split into are left out; atoms that no group connects form
//! separate parts, and each part is covered on its own, equal parts once. Together they form a plan, unless groups of
//! different parts depend on each other: then those parts are covered together.

mod candidates;
mod ideals;
pub(crate) mod kernels;
pub(crate) mod pins;
pub(crate) mod problem;
mod restriction;
mod solver;

pub use restriction::Pin;
pub(crate) use restriction::Restriction;
pub use solver::Search;
pub(crate) use solver::{Solution, Solver};

use std::collections::BTreeSet;

use crate::error::PlanError;
use crate::grouping::Grouping;
use crate::machine::Quantity;
use crate::search::problem::{Atom, Problem};
use crate::strategy::Strategy;
use crate::target::Target;
use crate::units::Bytes;

/// The atoms of each group of the greedy plan.
fn greedy_groups(problem: &Problem, grouping: &Grouping) -> Vec<Vec<Atom>> {
    let mut greedy = Grouping::new(grouping.rules.graph, grouping.rules.placement, problem.target);
    greedy.merge_for(Strategy::Greedy);
    let groups = greedy.groups.iter().map(|nodes| {
        let mut atoms: Vec<Atom> = nodes.iter().filter_map(|id| problem.atom_of[id.index()]).collect();
        atoms.sort_unstable();
        atoms.dedup();
        atoms
    });
    groups.filter(|atoms| !atoms.is_empty()).collect()
}

/// Groups of the greedy plan, and runs of them, which are considered regardless of the limits.
fn greedy_runs(problem: &Problem, grouping: &Grouping) -> Vec<Vec<Atom>> {
    // Runs of each group too, so that a plan that only begins or ends it elsewhere is found.
    let mut all: BTreeSet<Vec<Atom>> = BTreeSet::new();
    for atoms in greedy_groups(problem, grouping).into_iter().filter(|atoms| atoms.len() > 1) {
        let count = atoms.len();
        for cut in 1..count.min(LONGEST_RUNS) {
            all.insert(atoms[..count - cut].to_vec());
            all.insert(atoms[cut..].to_vec());
        }
        all.insert(atoms);
    }
    all.into_iter().filter(|atoms| atoms.len() > 1 && problem.is_connected(atoms)).collect()
}

/// Runs of a greedy group that are considered at either end.
const LONGEST_RUNS: usize = 24;

/// A grouping of atoms, ready to be solved.
pub(crate) fn solver<'a>(grouping: &Grouping<'a>, target: Target<'a>) -> Solver<'a> {
    let problem = Problem::new(grouping, target);
    let extra = greedy_runs(&problem, grouping);
    Solver::new(problem, &extra)
}

/// Regroups a grouping of atoms into the cheapest plan.
pub(crate) fn search(grouping: &mut Grouping, solver: &mut Solver, pins: &[Pin]) -> Result<Search, PlanError> {
    let restriction = pins::restriction(solver, pins)?;
    let mut solution = solver.settle(restriction.clone()).ok_or_else(|| pins::impossible(solver, &restriction))?;
    if !solution.search.optimal && restriction.is_empty() {
        use_greedy_if_better(grouping, solver, &mut solution);
    }
    if !solver.candidates.complete {
        // Shares of the groups that were found say nothing of those that were not.
        solution.search.lower_bound = floor(solver);
    }
    let groups = solution.groups.iter().map(|set| solver.problem.nodes(set)).collect();
    grouping.regroup(groups);
    Ok(solution.search)
}

/// Seconds that no plan can go below, whatever it fuses: the arithmetic of all operations, or the bytes of inputs and
/// outputs.
fn floor(solver: &mut Solver) -> f64 {
    let graph = solver.problem.rules.graph;
    let given: usize = graph.inputs().iter().map(|&id| graph.node(id).bytes()).sum();
    let handed_out: usize = graph.outputs().iter().map(|output| graph.node(output.node).bytes()).sum();
    let rate = solver.problem.target.machine.gbps(Quantity::DramGbps);
    let moved = (Bytes((given + handed_out) as u64) / rate).0;
    let atoms = 0..solver.problem.atoms.len();
    let arithmetic = atoms.filter_map(|atom| solver.problem.price(&[atom]).ok());
    let arithmetic: f64 = arithmetic.map(|price| price.cost.matrix.max(price.cost.vector).0).sum();
    moved.max(arithmetic)
}

/// A beam may miss what merging in order finds.
fn use_greedy_if_better(grouping: &Grouping, solver: &mut Solver, solution: &mut Solution) {
    let groups = greedy_groups(&solver.problem, grouping);
    let prices = groups.iter().map(|set| solver.problem.price(set).ok().map(|price| price.seconds()));
    let total: Option<f64> = prices.sum();
    if let Some(seconds) = total.filter(|&seconds| seconds < solution.search.seconds) {
        solution.search.seconds = seconds;
        solution.groups = groups;
    }
}

#[cfg(test)]
mod tests;
