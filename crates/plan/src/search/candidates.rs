//! All groups that the search chooses from: connected, convex, legal.
//!
//! Every such group can be grown one neighbour at a time through groups of the same kind (a source or sink that is not a
//! cut vertex can always be removed), so growing finds all of them, except for attention, which starts from its call.

use std::collections::HashSet;

use crate::search::problem::{Atom, Price, Problem};

/// A group of two atoms or more.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Candidate {
    /// in order
    pub atoms: Vec<Atom>,
    pub price: Price,
}

/// All groups, or as many as the limits allow.
pub(crate) struct Candidates {
    pub groups: Vec<Candidate>,
    /// nothing was left out
    pub complete: bool,
}

/// Maximum number of groups grown from one first atom; beyond that, only those around the greedy plan are added. A block of GPT-2,
/// forward and backward, has under 400 groups in all; small graphs of nine operations have under 300.
const GROUPS_AN_ATOM: usize = 300;

/// Maximum number of groups, and of atoms in all groups: pricing 20,000 groups takes about two seconds.
const GROUPS: usize = 20_000;
const MEMBERS: usize = 200_000;

pub(crate) fn candidates(problem: &mut Problem, extra: &[Vec<Atom>]) -> Candidates {
    let mut found = Candidates { groups: Vec::new(), complete: true };
    let mut seen: HashSet<Vec<Atom>> = HashSet::new();
    let mut from_atom = vec![0usize; problem.atoms.len()];
    let mut members = 0;
    let mut queue: std::collections::VecDeque<Vec<Atom>> = (0..problem.atoms.len()).map(|atom| vec![atom]).collect();
    for seed in problem.seeds().into_iter().chain(extra.iter().cloned()) {
        let fresh = seed.len() > 1 && seen.insert(seed.clone());
        if let (true, Ok(price)) = (fresh, problem.price(&seed)) {
            found.groups.push(Candidate { atoms: seed.clone(), price });
            queue.push_back(seed);
        }
    }
    while let Some(set) = queue.pop_front() {
        for grown in grown(problem, &set) {
            if from_atom[grown[0]] >= GROUPS_AN_ATOM || found.groups.len() >= GROUPS || members > MEMBERS {
                found.complete = false;
                continue;
            }
            if !seen.insert(grown.clone()) {
                continue;
            }
            if let Ok(price) = problem.price(&grown) {
                from_atom[grown[0]] += 1;
                members += grown.len();
                found.groups.push(Candidate { atoms: grown.clone(), price });
                queue.push_back(grown);
            }
        }
    }
    found
}

fn grown(problem: &Problem, set: &[Atom]) -> Vec<Vec<Atom>> {
    let mut next: Vec<Atom> = set.iter().flat_map(|&atom| problem.neighbours[atom].iter().copied()).collect();
    next.sort_unstable();
    next.dedup();
    next.retain(|atom| set.binary_search(atom).is_err());
    let with = |atom: Atom| {
        let mut grown = set.to_vec();
        grown.insert(grown.partition_point(|&member| member < atom), atom);
        grown
    };
    next.into_iter().map(with).collect()
}
