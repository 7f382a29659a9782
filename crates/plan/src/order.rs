//! An order of groups in which producers come first, kept while groups are merged.
//!
//! A path from one group to another only passes groups at positions between theirs, so only those are examined: both to find a
//! third group between two, and to update the order after a merge. Neighbours are merged, so there are few.

use std::cell::RefCell;

/// Groups, what reads what, and a place for each.
pub(crate) struct Order {
    place: Vec<usize>,
    /// The group at each position; for free positions, an earlier one.
    group_at: Vec<usize>,
    producers: Vec<Vec<usize>>,
    consumers: Vec<Vec<usize>>,
    /// The group that each is a part of now, and the parts of each.
    part_of: Vec<usize>,
    parts: Vec<Vec<usize>>,
    marks: RefCell<Marks>,
}

/// Groups visited by a walk: those with the walk's number.
struct Marks {
    walk: u64,
    of: Vec<u64>,
}

/// Which way to go.
#[derive(Clone, Copy)]
enum Way {
    ToConsumers,
    ToProducers,
}

impl Order {
    /// From the groups in an order in which producers come first, and the producers of each.
    pub fn new(order: &[usize], producers: Vec<Vec<usize>>) -> Order {
        let count = producers.len();
        // Groups that wait for each other are in no order; they come last.
        let mut place: Vec<usize> = (count..2 * count).collect();
        order.iter().enumerate().for_each(|(at, &group)| place[group] = at);
        let mut group_at = vec![0; 2 * count];
        place.iter().enumerate().for_each(|(group, &at)| group_at[at] = group);
        let mut consumers = vec![Vec::new(); count];
        for (group, producers) in producers.iter().enumerate() {
            producers.iter().for_each(|&producer| consumers[producer].push(group));
        }
        let parts = (0..count).map(|group| vec![group]).collect();
        let marks = RefCell::new(Marks { walk: 0, of: vec![0; count] });
        Order { place, group_at, producers, consumers, part_of: (0..count).collect(), parts, marks }
    }

    /// The lowest-numbered group on a path between the two.
    pub fn third(&self, first: usize, second: usize) -> Option<usize> {
        let (early, late) = if self.place[first] < self.place[second] { (first, second) } else { (second, first) };
        let (lowest, highest) = (self.place[early], self.place[late]);
        let after = self.reached(&[early], Way::ToConsumers, lowest, highest);
        if after.is_empty() {
            return None;
        }
        // What stands between the two is reached from both, and nothing else needs to be walked through.
        self.reached_within(&[late], Way::ToProducers, |group, marks| marks.of[group] == marks.walk - 1)
            .into_iter()
            .min()
    }

    /// Merges some groups into the first. No path between two of them leads through another group.
    pub fn merge(&mut self, groups: &[usize]) {
        let places = || groups.iter().map(|&group| self.place[group]);
        let (Some(lowest), Some(highest)) = (places().min(), places().max()) else { return };
        let after = self.reached(groups, Way::ToConsumers, lowest, highest);
        let before = self.reached(groups, Way::ToProducers, lowest, highest);
        // Places are handed out anew: to what the group needs, to it, and to what needs it, each in the order they were in.
        let in_order = |groups: &[usize]| {
            let mut places: Vec<usize> = groups.iter().map(|&group| self.place[group]).collect();
            places.sort_unstable();
            places
        };
        let (after, before) = (in_order(&after), in_order(&before));
        let mut free: Vec<usize> = [&before[..], &after, &places().collect::<Vec<_>>()].concat();
        free.sort_unstable();
        let moved: Vec<usize> = before.iter().chain([&self.place[groups[0]]]).chain(&after).copied().collect();
        let moved: Vec<usize> = moved.into_iter().map(|at| self.group_at[at]).collect();
        // There are more places than groups now. Taken from the lowest on, none of those before moves up, and none of those after down.
        for (&group, &at) in moved.iter().zip(&free) {
            (self.place[group], self.group_at[at]) = (at, group);
        }
        self.join(groups);
    }

    /// Groups reached from some, not through others of them, at places strictly between two.
    fn reached(&self, from: &[usize], way: Way, lowest: usize, highest: usize) -> Vec<usize> {
        self.reached_within(from, way, |group, _| lowest < self.place[group] && self.place[group] < highest)
    }

    /// Groups reached from some, not through others of them, among those that a condition holds for.
    fn reached_within(&self, from: &[usize], way: Way, is_within: impl Fn(usize, &Marks) -> bool) -> Vec<usize> {
        let mut marks = self.marks.borrow_mut();
        marks.walk += 1;
        let mut found: Vec<usize> = Vec::new();
        let mut position = 0;
        while let Some(&group) = from.get(position).or_else(|| found.get(position - from.len())) {
            position += 1;
            let neighbours = match way {
                Way::ToConsumers => &self.consumers[group],
                Way::ToProducers => &self.producers[group],
            };
            counted(neighbours.len());
            for &neighbour in neighbours {
                let neighbour = self.part_of[neighbour];
                let is_new = marks.of[neighbour] != marks.walk && !from.contains(&neighbour);
                if is_new && is_within(neighbour, &marks) {
                    marks.of[neighbour] = marks.walk;
                    found.push(neighbour);
                }
            }
        }
        found
    }

    fn join(&mut self, groups: &[usize]) {
        let first = groups[0];
        for &group in &groups[1..] {
            let parts = std::mem::take(&mut self.parts[group]);
            parts.iter().for_each(|&part| self.part_of[part] = first);
            self.parts[first].extend(parts);
        }
        let joined = |lists: &mut [Vec<usize>], part_of: &[usize]| {
            let all: Vec<usize> = groups.iter().flat_map(|&group| std::mem::take(&mut lists[group])).collect();
            let mut all: Vec<usize> = all.into_iter().filter(|&other| part_of[other] != first).collect();
            all.sort_unstable();
            all.dedup();
            lists[first] = all;
        };
        joined(&mut self.producers, &self.part_of);
        joined(&mut self.consumers, &self.part_of);
    }
}

#[cfg(test)]
thread_local! {
    static STEPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Neighbours examined on this thread so far.
#[cfg(test)]
pub(crate) fn steps_taken() -> usize {
    STEPS.get()
}

#[cfg(test)]
fn counted(steps: usize) {
    STEPS.set(STEPS.get() + steps);
}

#[cfg(not(test))]
fn counted(_steps: usize) {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Which group needs which, directly or through others, by trying all ways.
    fn needs(producers: &[BTreeSet<usize>]) -> Vec<Vec<bool>> {
        let count = producers.len();
        let mut needs: Vec<Vec<bool>> =
            producers.iter().map(|own| (0..count).map(|group| own.contains(&group)).collect()).collect();
        for through in 0..count {
            for group in 0..count {
                if needs[group][through] {
                    (0..count).for_each(|other| needs[group][other] |= needs[through][other]);
                }
            }
        }
        needs
    }

    #[test]
    fn a_third_group_is_found_and_the_order_stays_one_while_groups_merge() {
        for seed in 0..200u64 {
            let mut state = seed;
            let mut next = |limit: usize| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as usize % limit
            };
            let count = 4 + next(12);
            let mut producers: Vec<BTreeSet<usize>> = (0..count)
                .map(|group| (0..next(4)).map(|_| next(group.max(1))).filter(|&p| p < group).collect())
                .collect();
            let all: Vec<usize> = (0..count).collect();
            let mut order = Order::new(&all, producers.iter().map(|own| own.iter().copied().collect()).collect());
            let mut alive = all;
            while alive.len() > 1 {
                let needs = needs(&producers);
                let pairs = alive.iter().flat_map(|&a| alive.iter().map(move |&b| (a, b))).filter(|(a, b)| a != b);
                for (a, b) in pairs {
                    let stands =
                        |&third: &usize| needs[a][third] && needs[third][b] || needs[b][third] && needs[third][a];
                    assert_eq!(order.third(a, b), alive.iter().copied().find(stands), "{a} and {b} of {producers:?}");
                    assert!(!needs[b][a] || order.place[a] < order.place[b], "{a} before {b} of {producers:?}");
                }
                let first = alive[next(alive.len())];
                let Some(&second) = alive.iter().find(|&&b| b != first && order.third(first, b).is_none()) else {
                    break;
                };
                order.merge(&[first, second]);
                alive.retain(|&group| group != second);
                let taken = std::mem::take(&mut producers[second]);
                producers[first].extend(taken);
                for own in &mut producers {
                    if own.remove(&second) {
                        own.insert(first);
                    }
                }
                producers[first].remove(&first);
            }
        }
    }
}
