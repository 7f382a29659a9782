//! The best way to cover the graph with groups, under various restrictions.

use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::search::candidates::{Candidate, Candidates, candidates};
use crate::search::ideals::{Choice, Path, least_shares, shortest};
use crate::search::problem::{Atom, Problem};
use crate::search::restriction::Restriction;

/// How the groups were found.
#[derive(Debug, Clone, PartialEq)]
pub struct Search {
    /// groups considered, including single operations
    pub groups: usize,
    /// states visited
    pub states: usize,
    /// independently covered parts
    pub parts: usize,
    /// parts that differ
    pub distinct_parts: usize,
    /// no legal group and no state was left out
    pub optimal: bool,
    /// a lower bound of any plan, in seconds
    pub lower_bound: f64,
    /// seconds of the plan
    pub seconds: f64,
}

impl Search {
    /// Upper bound of the plan's distance from the optimum, relative to the lower bound.
    pub fn gap(&self) -> f64 {
        if self.optimal || self.lower_bound <= 0.0 { 0.0 } else { (self.seconds / self.lower_bound - 1.0).max(0.0) }
    }

    /// As text.
    pub fn text(&self) -> String {
        let Search { groups, states, .. } = self;
        match self.optimal {
            true => format!("optimal among {groups} groups, {states} states"),
            false => format!(
                "best of {groups} groups, {states} states (beam search); at most {:.0} % above the optimum",
                100.0 * self.gap()
            ),
        }
    }
}

/// What the search chose.
pub(crate) struct Solution {
    pub groups: Vec<Vec<Atom>>,
    pub search: Search,
}

/// A problem with its groups, ready to be solved under various restrictions.
pub(crate) struct Solver<'a> {
    pub problem: Problem<'a>,
    pub candidates: Candidates,
    /// positions of candidates that are cheaper than all of their splits
    useful: Vec<usize>,
    /// seconds of each atom as a kernel of its own
    alone: Vec<f64>,
    paths: HashMap<u128, Option<Path>>,
    /// for each atom, the candidates that hold it
    holding: Vec<Vec<usize>>,
    /// the plan that queries refer to
    settled: Settled,
}

/// The plan that queries refer to: the best one under the user's pins.
#[derive(Default)]
struct Settled {
    restriction: Restriction,
    /// parts, and the seconds of each
    parts: Vec<(Vec<Atom>, f64)>,
    /// states times choices of each part
    looks: Vec<usize>,
    /// for each atom, its part
    part_of: Vec<usize>,
}

/// A restriction solved part by part.
struct Cover {
    solution: Solution,
    parts: Vec<(Vec<Atom>, f64)>,
    looks: Vec<usize>,
}

/// States times choices of a part above which fusions are priced by themselves instead of by another search.
const LARGE_PART: usize = 2_000_000;

impl<'a> Solver<'a> {
    /// Finds and prices all groups. `extra` are groups to consider regardless of the limits.
    pub fn new(mut problem: Problem<'a>, extra: &[Vec<Atom>]) -> Solver<'a> {
        let candidates = candidates(&mut problem, extra);
        let alone: Vec<f64> =
            (0..problem.atoms.len()).map(|atom| problem.price(&[atom]).map_or(0.0, |price| price.seconds())).collect();
        let useful = useful(&candidates.groups, &alone);
        let mut holding = vec![Vec::new(); problem.atoms.len()];
        for (index, group) in candidates.groups.iter().enumerate() {
            group.atoms.iter().for_each(|&atom| holding[atom].push(index));
        }
        let settled = Settled::default();
        Solver { problem, candidates, useful, alone, paths: HashMap::new(), holding, settled }
    }

    /// The cheapest plan under a restriction, which later queries refer to; `None` if there is none.
    pub fn settle(&mut self, restriction: Restriction) -> Option<Solution> {
        let Cover { solution, parts, looks } = self.cover(&restriction)?;
        let mut part_of = vec![0; self.problem.atoms.len()];
        for (index, (part, _)) in parts.iter().enumerate() {
            part.iter().for_each(|&atom| part_of[atom] = index);
        }
        self.settled = Settled { restriction, parts, looks, part_of };
        Some(solution)
    }

    /// The restriction of the plan that queries refer to.
    pub fn restriction(&self) -> &Restriction {
        &self.settled.restriction
    }

    /// Adds a forced set to the groups if it is legal: the limits may have left it out.
    pub fn consider(&mut self, set: &[Atom]) {
        if self.holders(set).next().is_some() {
            return;
        }
        if let Ok(price) = self.problem.price(set) {
            let index = self.candidates.groups.len();
            set.iter().for_each(|&atom| self.holding[atom].push(index));
            self.candidates.groups.push(Candidate { atoms: set.to_vec(), price });
        }
    }

    /// Groups that hold all of these atoms.
    pub fn holders<'s>(&'s self, set: &'s [Atom]) -> impl Iterator<Item = &'s Candidate> + 's {
        let groups = self.holding[set[0]].iter().map(|&index| &self.candidates.groups[index]);
        groups.filter(|group| set.iter().all(|atom| group.atoms.binary_search(atom).is_ok()))
    }

    /// Whether the settled plan covers these atoms with parts so large that solving them again for every query takes too
    /// long.
    pub fn is_large(&self, set: &[Atom]) -> bool {
        let parts: BTreeSet<usize> = set.iter().map(|&atom| self.settled.part_of[atom]).collect();
        are_many(parts.iter().map(|&part| self.settled.looks[part]))
    }

    /// Seconds by which the best plan under a restriction is slower than the settled one; `None` if there is none. Only the
    /// parts that hold one of the atoms in `changed`, where the restriction differs from the settled one, are covered again.
    pub fn extra(&mut self, restriction: &Restriction, changed: &[Atom]) -> Option<f64> {
        let mut waiting: Vec<usize> = changed.iter().map(|&atom| self.settled.part_of[atom]).collect();
        let mut parts: BTreeSet<usize> = BTreeSet::new();
        let mut choices: BTreeSet<usize> = BTreeSet::new();
        while let Some(part) = waiting.pop() {
            if !parts.insert(part) {
                continue;
            }
            for &atom in &self.settled.parts[part].0 {
                for &index in &self.holding[atom] {
                    if self.is_choice(index, restriction) && choices.insert(index) {
                        let atoms = &self.candidates.groups[index].atoms;
                        waiting.extend(atoms.iter().map(|&atom| self.settled.part_of[atom]));
                    }
                }
            }
        }
        let mut atoms: Vec<Atom> = parts.iter().flat_map(|&part| self.settled.parts[part].0.iter().copied()).collect();
        atoms.sort_unstable();
        let before: f64 = parts.iter().map(|&part| self.settled.parts[part].1).sum();
        let chosen: Vec<usize> = choices.into_iter().collect();
        let hopeless = !self.candidates.complete;
        let (choices, _) = self.local(&atoms, &chosen, restriction);
        let key = key(atoms.len(), &choices);
        let path = self.paths.entry(key).or_insert_with(|| shortest(atoms.len(), &choices, hopeless)).clone()?;
        Some(path.seconds - before)
    }

    /// The cheapest plan under a restriction; `None` if there is none.
    pub fn solve_with(&mut self, restriction: &Restriction) -> Option<Solution> {
        self.cover(restriction).map(|cover| cover.solution)
    }

    fn cover(&mut self, restriction: &Restriction) -> Option<Cover> {
        let hopeless = !self.candidates.complete;
        let chosen = self.choices(restriction);
        let mut parts = self.parts(&chosen);
        loop {
            let mut search = self.empty_search();
            search.groups += chosen.len();
            let mut groups: Vec<Vec<Atom>> = Vec::new();
            let mut distinct: BTreeSet<u128> = BTreeSet::new();
            let by_part = self.by_part(&parts, &chosen);
            let (mut seconds, mut looks): (Vec<f64>, Vec<usize>) = (Vec::new(), Vec::new());
            for part in &parts {
                if let ([atom], true) = (part.as_slice(), restriction.is_empty()) {
                    groups.push(vec![*atom]);
                    search.seconds += self.alone[*atom];
                    search.lower_bound += self.alone[*atom];
                    seconds.push(self.alone[*atom]);
                    looks.push(0);
                    continue;
                }
                let own = &by_part[part[0]];
                let (choices, lists) = self.local(part, own, restriction);
                let key = key(part.len(), &choices);
                let path = self.paths.entry(key).or_insert_with(|| shortest(part.len(), &choices, hopeless)).clone()?;
                search.parts += 1;
                search.optimal &= path.complete;
                search.seconds += path.seconds;
                seconds.push(path.seconds);
                looks.push(if path.complete { path.states * choices.len() } else { usize::MAX / 2 });
                search.lower_bound += least_shares(part.len(), &choices).iter().sum::<f64>();
                if distinct.insert(key) {
                    search.states += path.states;
                }
                groups.extend(path.chosen.iter().map(|&choice| lists[choice].clone()));
            }
            search.distinct_parts = distinct.len();
            match self.waiting(&groups) {
                waiting if waiting.is_empty() => {
                    let parts = parts.into_iter().zip(seconds).collect();
                    return Some(Cover { solution: Solution { groups, search }, parts, looks });
                }
                waiting => parts = joined(parts, &waiting),
            }
        }
    }

    fn empty_search(&self) -> Search {
        Search {
            groups: self.problem.atoms.len(),
            states: 0,
            parts: 0,
            distinct_parts: 0,
            optimal: self.candidates.complete,
            lower_bound: 0.0,
            seconds: 0.0,
        }
    }

    /// Positions of the candidates to choose from: useful ones, and all that contain forced sets.
    fn choices(&self, restriction: &Restriction) -> Vec<usize> {
        if restriction.is_empty() {
            return self.useful.clone();
        }
        (0..self.candidates.groups.len()).filter(|&index| self.is_choice(index, restriction)).collect()
    }

    fn is_choice(&self, index: usize, restriction: &Restriction) -> bool {
        let atoms = &self.candidates.groups[index].atoms;
        let holds = |set: &Vec<Atom>| set.iter().all(|atom| atoms.binary_search(atom).is_ok());
        let considered = self.useful.binary_search(&index).is_ok() || restriction.together.iter().any(holds);
        considered && restriction.allows(atoms)
    }

    /// Atoms that some group connects, directly or through others.
    fn parts(&self, chosen: &[usize]) -> Vec<Vec<Atom>> {
        let count = self.problem.atoms.len();
        let mut root: Vec<usize> = (0..count).collect();
        fn find(root: &mut [usize], mut atom: usize) -> usize {
            while root[atom] != atom {
                root[atom] = root[root[atom]];
                atom = root[atom];
            }
            atom
        }
        for &index in chosen {
            let atoms = &self.candidates.groups[index].atoms;
            for pair in atoms.windows(2) {
                let (a, b) = (find(&mut root, pair[0]), find(&mut root, pair[1]));
                root[a.max(b)] = a.min(b);
            }
        }
        let mut parts: Vec<Vec<Atom>> = vec![Vec::new(); count];
        for atom in 0..count {
            let of = find(&mut root, atom);
            parts[of].push(atom);
        }
        parts.retain(|part| !part.is_empty());
        parts
    }

    /// For the first atom of each part, the candidates within the part.
    fn by_part(&self, parts: &[Vec<Atom>], chosen: &[usize]) -> Vec<Vec<usize>> {
        let count = self.problem.atoms.len();
        let mut first = vec![0; count];
        parts.iter().for_each(|part| part.iter().for_each(|&atom| first[atom] = part[0]));
        let mut all = vec![Vec::new(); count];
        chosen.iter().for_each(|&index| all[first[self.candidates.groups[index].atoms[0]]].push(index));
        all
    }

    /// The choices of a part in its own numbers, and the atoms of each.
    fn local(&self, part: &[Atom], chosen: &[usize], restriction: &Restriction) -> (Vec<Choice>, Vec<Vec<Atom>>) {
        let position = |atom: Atom| part.binary_search(&atom);
        let mut lists: Vec<(Vec<Atom>, f64)> = Vec::new();
        for &atom in part {
            if restriction.allows(&[atom]) {
                lists.push((vec![atom], self.alone[atom]));
            }
        }
        for &index in chosen {
            let group = &self.candidates.groups[index];
            lists.push((group.atoms.clone(), group.price.seconds()));
        }
        let local = |atoms: &[Atom]| atoms.iter().filter_map(|&atom| position(atom).ok()).collect::<Vec<usize>>();
        let choices = lists.iter().map(|(atoms, seconds)| {
            let needs = self.problem.needs(atoms, part);
            Choice { atoms: local(atoms), needs: local(&needs), seconds: *seconds }
        });
        (choices.collect(), lists.iter().map(|(atoms, _)| atoms.clone()).collect())
    }

    /// Atoms of groups in a dependency cycle; none in a valid plan.
    fn waiting(&self, groups: &[Vec<Atom>]) -> Vec<Atom> {
        let mut group_of = vec![usize::MAX; self.problem.atoms.len()];
        for (index, atoms) in groups.iter().enumerate() {
            atoms.iter().for_each(|&atom| group_of[atom] = index);
        }
        let mut waiting = vec![0usize; groups.len()];
        let mut followers: Vec<Vec<usize>> = vec![Vec::new(); groups.len()];
        for (index, atoms) in groups.iter().enumerate() {
            let producers = atoms.iter().flat_map(|&atom| self.problem.producers[atom].iter());
            let mut producers: Vec<usize> = producers.map(|&atom| group_of[atom]).filter(|&of| of != index).collect();
            producers.sort_unstable();
            producers.dedup();
            waiting[index] = producers.len();
            producers.into_iter().for_each(|producer| followers[producer].push(index));
        }
        let mut ready: Vec<usize> = (0..groups.len()).filter(|&index| waiting[index] == 0).collect();
        let mut done = vec![false; groups.len()];
        while let Some(index) = ready.pop() {
            done[index] = true;
            for &follower in &followers[index] {
                waiting[follower] -= 1;
                if waiting[follower] == 0 {
                    ready.push(follower);
                }
            }
        }
        // What only follows a knot waits too; joining it as well does no harm.
        (0..groups.len())
            .filter(|&index| !done[index] && groups[index].len() > 1)
            .flat_map(|index| groups[index].clone())
            .collect()
    }
}

/// Joins all parts that hold one of the atoms.
fn joined(parts: Vec<Vec<Atom>>, atoms: &[Atom]) -> Vec<Vec<Atom>> {
    let (mut knot, mut rest): (Vec<Atom>, Vec<Vec<Atom>>) = (Vec::new(), Vec::new());
    let atoms: BTreeSet<Atom> = atoms.iter().copied().collect();
    for part in parts {
        if part.iter().any(|atom| atoms.contains(atom)) { knot.extend(part) } else { rest.push(part) }
    }
    knot.sort_unstable();
    rest.push(knot);
    rest
}

/// Candidates that are cheaper than each split into one atom and the rest. A finer split of a plan is always valid, so the
/// others are never needed.
fn useful(groups: &[Candidate], alone: &[f64]) -> Vec<usize> {
    let seconds: HashMap<&[Atom], f64> = groups.iter().map(|group| (&group.atoms[..], group.price.seconds())).collect();
    let beaten = |group: &Candidate| {
        let whole = group.price.seconds();
        let singles: f64 = group.atoms.iter().map(|&atom| alone[atom]).sum();
        singles <= whole
            || (group.atoms.len() > 2
                && group.atoms.iter().enumerate().any(|(position, &atom)| {
                    let mut rest = group.atoms.clone();
                    rest.remove(position);
                    seconds.get(&rest[..]).is_some_and(|rest| rest + alone[atom] <= whole)
                }))
    };
    (0..groups.len()).filter(|&index| !beaten(&groups[index])).collect()
}

/// Two parts of one key have the same cheapest path.
fn key(count: usize, choices: &[Choice]) -> u128 {
    let mut hashers = [DefaultHasher::new(), DefaultHasher::new()];
    1u8.hash(&mut hashers[1]);
    for hasher in &mut hashers {
        count.hash(hasher);
        for choice in choices {
            (&choice.atoms, &choice.needs, choice.seconds.to_bits()).hash(hasher);
        }
    }
    (hashers[0].finish() as u128) << 64 | hashers[1].finish() as u128
}

/// Whether these looks are more than a large part's. A part that was not searched completely counts as half of all numbers, so the
/// sum must not wrap.
fn are_many(looks: impl Iterator<Item = usize>) -> bool {
    looks.fold(0, usize::saturating_add) > LARGE_PART
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_were_not_searched_completely_are_large() {
        let incomplete = usize::MAX / 2;
        for count in 1..6 {
            assert!(are_many(std::iter::repeat_n(incomplete, count)), "{count}");
        }
        assert!(!are_many([LARGE_PART - 1, 1].into_iter()));
        assert!(are_many([LARGE_PART, 1].into_iter()));
    }
}
