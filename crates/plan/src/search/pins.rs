//! Pins: names of operations to places in the graph.

use crate::error::PlanError;
use crate::search::problem::{Atom, Problem};
use crate::search::restriction::{Pin, Restriction};
use crate::search::solver::Solver;

/// The name by which a user calls an atom: that of its call.
pub(crate) fn atom_name(problem: &Problem, atom: Atom) -> String {
    let graph = problem.rules.graph;
    graph.call_name(graph.node(problem.atoms[atom][0]).call).to_string()
}

/// Every chain of atoms that follow each other and have these names.
pub(crate) fn places(problem: &Problem, names: &[String]) -> Vec<Vec<Atom>> {
    let is = |atom: Atom, name: &String| {
        let graph = problem.rules.graph;
        atom_name(problem, atom) == *name || problem.atoms[atom].iter().any(|&id| graph.given_name(id) == Some(name))
    };
    let Some((first, rest)) = names.split_first() else { return Vec::new() };
    let mut chains: Vec<Vec<Atom>> =
        (0..problem.atoms.len()).filter(|&atom| is(atom, first)).map(|atom| vec![atom]).collect();
    for name in rest {
        chains = chains
            .into_iter()
            .flat_map(|chain| {
                let last = chain[chain.len() - 1];
                let next = problem.consumers[last].iter().filter(|&&atom| is(atom, name));
                next.map(|&atom| [&chain[..], &[atom]].concat()).collect::<Vec<_>>()
            })
            .collect();
    }
    for chain in &mut chains {
        chain.sort_unstable();
    }
    chains
}

pub(crate) fn restriction(problem: &Problem, pins: &[Pin]) -> Result<Restriction, PlanError> {
    let mut restriction = Restriction::default();
    for pin in pins {
        let (Pin::Force(names) | Pin::Forbid(names)) = pin;
        let found = places(problem, names);
        if found.is_empty() || names.len() < 2 {
            let mut known: Vec<String> = (0..problem.atoms.len()).map(|atom| atom_name(problem, atom)).collect();
            known.sort();
            known.dedup();
            let why = format!("no operations of these names follow each other; the graph has {}", known.join(", "));
            return Err(PlanError::Pin { what: names.join(" + "), why });
        }
        match pin {
            Pin::Force(_) => restriction.together.extend(found),
            Pin::Forbid(_) => restriction.apart.extend(found),
        }
    }
    Ok(restriction)
}

/// Why no plan keeps to the pins: the first set that no kernel may hold, or that two pins speak against each other.
pub(crate) fn impossible(solver: &mut Solver, restriction: &Restriction) -> PlanError {
    for set in &restriction.together {
        let what = set.iter().map(|&atom| atom_name(&solver.problem, atom)).collect::<Vec<_>>().join(" + ");
        if let Err(reason) = solver.problem.price(set) {
            return PlanError::Pin { what, why: format!("{} {reason}", reason.code()) };
        }
    }
    PlanError::Pin { what: "these fusions together".into(), why: "they speak against each other".into() }
}
