//! Pins: names of operations to places in the graph.

use std::collections::BTreeSet;

use crate::error::PlanError;
use crate::search::kernels::{Kernels, Listed, atom_name, names_of};
use crate::search::problem::{Atom, Problem};
use crate::search::restriction::{Pin, Restriction};
use crate::search::solver::Solver;

/// Every set of atoms that these names stand for: consecutive operations, and the fusions that a sheet lists under them. A set that
/// another one contains is left out: a sheet is about whole kernels, such as all of an attention.
pub(crate) fn places(problem: &Problem, listed: &Listed, names: &[String]) -> Vec<Vec<Atom>> {
    let mut found: BTreeSet<Vec<Atom>> = chains(problem, names).into_iter().collect();
    found.extend(listed.of(names).iter().cloned());
    let all: Vec<Vec<Atom>> = found.into_iter().collect();
    let holds = |set: &Vec<Atom>, part: &Vec<Atom>| {
        set.len() > part.len() && part.iter().all(|atom| set.binary_search(atom).is_ok())
    };
    all.iter().filter(|part| !all.iter().any(|set| holds(set, part))).cloned().collect()
}

/// Every chain of consecutive atoms with these names, of calls or given by the user.
fn chains(problem: &Problem, names: &[String]) -> Vec<Vec<Atom>> {
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

/// The restriction that pins impose on the search. Forced sets are considered regardless of the limits.
pub(crate) fn restriction(solver: &mut Solver, pins: &[Pin]) -> Result<Restriction, PlanError> {
    let mut restriction = Restriction::default();
    if pins.is_empty() {
        return Ok(restriction);
    }
    let listed = Kernels::of(&solver.problem).listed(solver);
    for pin in pins {
        let (Pin::Force(names) | Pin::Forbid(names)) = pin;
        let found = places(&solver.problem, &listed, names);
        if found.is_empty() || names.len() < 2 {
            let mut known: Vec<String> =
                (0..solver.problem.atoms.len()).map(|atom| atom_name(&solver.problem, atom)).collect();
            known.sort();
            known.dedup();
            let why = format!("no consecutive operations have these names; the graph has {}", known.join(", "));
            return Err(PlanError::Pin { verb: pin.verb(), what: names.join(" + "), why });
        }
        match pin {
            Pin::Force(_) => {
                found.iter().for_each(|set| solver.consider(set));
                restriction.together.extend(found);
            }
            Pin::Forbid(_) => restriction.apart.extend(found),
        }
    }
    Ok(restriction)
}

/// Why no plan satisfies the pins: the first set that is not legal, or two contradicting pins.
pub(crate) fn impossible(solver: &mut Solver, restriction: &Restriction) -> PlanError {
    for set in &restriction.together {
        let what = names_of(&solver.problem, set).join(" + ");
        let is_held = solver.holders(set).next().is_some();
        if let (false, Err(reason)) = (is_held, solver.problem.price(set)) {
            return PlanError::Pin { verb: "force", what, why: format!("{} {reason}", reason.code()) };
        }
    }
    let why = "no plan satisfies all --force and --forbid flags; drop one";
    PlanError::Pin { verb: "combine", what: "these pins".into(), why: why.into() }
}
