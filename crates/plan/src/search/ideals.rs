//! The cheapest way to cover a set of atoms with groups: a shortest path over order ideals.
//!
//! A state is the set of finished atoms; an edge is a group whose predecessors are finished; its weight is the group's time. Plans that
//! differ only in the order of independent groups share their states, so there are few. Above a cap only the best
//! states of each size are kept, and the result says so.

use std::collections::HashMap;

use crate::bits::Bits;

/// A group to choose from, in local numbers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Choice {
    pub atoms: Vec<usize>,
    /// atoms outside that must be finished before, without those that others of them imply
    pub needs: Vec<usize>,
    pub seconds: f64,
}

/// The result.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Path {
    /// positions in the list of choices
    pub chosen: Vec<usize>,
    pub seconds: f64,
    pub states: usize,
    /// no state was left out
    pub complete: bool,
}

/// States times choices of one part of the graph before the search narrows to a beam: under a second. GPT-2 with gradients
/// needs 67 states.
const LOOKS: usize = 20_000_000;

/// States of one size that a beam keeps.
const BEAM: usize = 16;

/// Number of atoms above which a part with missing choices is not solved exactly.
const HOPELESS_FROM: usize = 40;

/// A beam continues with groups that start at one of the first few unfinished atoms.
const WINDOW: usize = 6;

struct Entry {
    done: Bits,
    seconds: f64,
    /// (size of the state before, its position there, the choice that led here)
    from: Option<(usize, usize, usize)>,
}

/// The cheapest path over `count` atoms, or `None` if the choices do not cover them. `hopeless` says that choices are missing,
/// so that a large part is not solved exactly.
pub(crate) fn shortest(count: usize, choices: &[Choice], hopeless: bool) -> Option<Path> {
    if hopeless && count > HOPELESS_FROM {
        return walk(count, choices, BEAM);
    }
    let path = walk(count, choices, usize::MAX)?;
    if path.complete { Some(path) } else { walk(count, choices, BEAM) }
}

fn walk(count: usize, choices: &[Choice], beam: usize) -> Option<Path> {
    let sets: Vec<(Bits, Bits)> = choices.iter().map(|choice| (set(&choice.atoms), set(&choice.needs))).collect();
    let remaining = Remaining::new(count, choices);
    let mut layers: Vec<Vec<Entry>> = (0..=count).map(|_| Vec::new()).collect();
    let mut known: Vec<HashMap<Bits, usize>> = vec![HashMap::new(); count + 1];
    layers[0].push(Entry { done: Bits::NONE, seconds: 0.0, from: None });
    let mut starting: Vec<Vec<usize>> = vec![Vec::new(); count];
    choices.iter().enumerate().for_each(|(index, choice)| starting[choice.atoms[0]].push(index));
    let everything: Vec<usize> = (0..choices.len()).collect();
    let (mut states, mut looks) = (1, 0);
    for size in 0..count {
        known[size] = HashMap::new();
        let order = kept(&layers[size], beam, &remaining);
        for position in order {
            let (done, seconds) = (layers[size][position].done.clone(), layers[size][position].seconds);
            let near: Vec<usize>;
            let tried = match beam {
                usize::MAX => &everything,
                _ => {
                    let first = done.next_missing(0);
                    let next = |&atom: &usize| done.next_missing(atom + 1);
                    let waiting = std::iter::successors(first, next).take_while(|&atom| atom < count).take(WINDOW);
                    near = waiting.flat_map(|atom| starting[atom].iter().copied()).collect();
                    &near
                }
            };
            looks += tried.len();
            for &index in tried {
                let (choice, (own, needs)) = (&choices[index], &sets[index]);
                if !own.is_disjoint(&done) || !needs.is_subset(&done) {
                    continue;
                }
                let next = size + choice.atoms.len();
                let (after, total) = (done.union(own), seconds + choice.seconds);
                let from = Some((size, position, index));
                match known[next].get(&after) {
                    Some(&at) if layers[next][at].seconds <= total => {}
                    Some(&at) => layers[next][at] = Entry { done: after, seconds: total, from },
                    None => {
                        known[next].insert(after.clone(), layers[next].len());
                        layers[next].push(Entry { done: after, seconds: total, from });
                        states += 1;
                    }
                }
            }
            if looks > LOOKS && beam == usize::MAX {
                return Some(Path { chosen: Vec::new(), seconds: f64::INFINITY, states, complete: false });
            }
        }
    }
    let seconds = layers[count].first()?.seconds;
    let mut chosen = Vec::new();
    let mut at = (count, 0);
    while let Some((size, position, choice)) = layers[at.0][at.1].from {
        chosen.push(choice);
        at = (size, position);
    }
    chosen.reverse();
    Some(Path { chosen, seconds, states, complete: beam == usize::MAX })
}

fn set(atoms: &[usize]) -> Bits {
    let mut set = Bits::NONE;
    atoms.iter().for_each(|&atom| set.insert(atom));
    set
}

/// Positions of the states to continue from: all, or the best by their cost plus a lower bound of the rest.
fn kept(layer: &[Entry], beam: usize, remaining: &Remaining) -> Vec<usize> {
    let mut order: Vec<usize> = (0..layer.len()).collect();
    if layer.len() > beam {
        let worth: Vec<f64> = layer.iter().map(|entry| entry.seconds + remaining.without(&entry.done)).collect();
        order.sort_by(|&a, &b| worth[a].total_cmp(&worth[b]).then(layer[a].done.cmp(&layer[b].done)));
        order.truncate(beam);
    }
    order
}

/// A lower bound of the cost of unfinished atoms.
struct Remaining {
    least: Vec<f64>,
    /// of each atom and all after it
    from: Vec<f64>,
}

impl Remaining {
    fn new(count: usize, choices: &[Choice]) -> Remaining {
        let least = least_shares(count, choices);
        let mut from = vec![0.0; count + 1];
        for atom in (0..count).rev() {
            from[atom] = from[atom + 1] + least[atom];
        }
        Remaining { least, from }
    }

    /// From the first that is not done, less those after it that are.
    fn without(&self, done: &Bits) -> f64 {
        let first = done.next_missing(0).unwrap_or(self.least.len()).min(self.least.len());
        self.from[first] - done.iter_from(first).map(|atom| self.least[atom]).sum::<f64>()
    }
}

/// For each atom, the smallest share of any group's time that is attributed to it, in proportion to the atoms' own times: no plan costs
/// less than all shares together.
pub(crate) fn least_shares(count: usize, choices: &[Choice]) -> Vec<f64> {
    let mut alone = vec![f64::INFINITY; count];
    for choice in choices.iter().filter(|choice| choice.atoms.len() == 1) {
        alone[choice.atoms[0]] = choice.seconds;
    }
    // An atom that never stands alone gets an equal weight.
    let weight = |atom: usize| if alone[atom].is_finite() { alone[atom].max(1e-12) } else { 1e-6 };
    let mut least = vec![f64::INFINITY; count];
    for choice in choices {
        let whole: f64 = choice.atoms.iter().map(|&atom| weight(atom)).sum();
        for &atom in &choice.atoms {
            least[atom] = least[atom].min(choice.seconds * weight(atom) / whole);
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 0 before 1, and 2 before 3: one of two cheap groups would wait for the other.
    #[test]
    fn groups_that_wait_for_each_other_are_not_chosen_together() {
        let choice = |atoms: &[usize], needs: &[usize], seconds: f64| Choice {
            atoms: atoms.to_vec(),
            needs: needs.to_vec(),
            seconds,
        };
        let mut choices = vec![choice(&[0, 3], &[2], 1.0), choice(&[1, 2], &[0], 1.0)];
        let alone = [(0, None), (1, Some(0)), (2, None), (3, Some(2))];
        choices.extend(alone.map(|(atom, needs): (usize, Option<usize>)| choice(&[atom], needs.as_slice(), 3.0)));
        for hopeless in [false, true] {
            let path = shortest(4, &choices, hopeless).unwrap();
            assert_eq!((path.seconds, path.chosen.len()), (7.0, 3), "one of the groups, and two atoms");
        }
        let beam = walk(4, &choices, BEAM).unwrap();
        assert_eq!(beam.seconds, 7.0);
    }
}
