//! The choice against every other choice there is, on graphs with few candidates.

use deuteron_graph::{Graph, NodeId, first_backward};
use deuteron_reference::{Generator, random_case};

use super::*;

/// The best of all sets of candidates: the lowest cost, and the fewest values that reach it.
fn best(boundary: &Boundary, candidates: &[NodeId], saving: Saving) -> ((u64, u64), usize) {
    let costs = (0..1u32 << candidates.len()).map(|bits| {
        let mut is_again = vec![false; boundary.first_backward];
        for (position, id) in candidates.iter().enumerate() {
            is_again[id.index()] = bits >> position & 1 == 1;
        }
        (cost(boundary, &is_again, saving), bits.count_ones() as usize)
    });
    costs.min().unwrap()
}

fn cost(boundary: &Boundary, is_again: &[bool], saving: Saving) -> (u64, u64) {
    let (passed, kept) = account(boundary, is_again);
    let written = kept.iter().filter(|(id, _)| !boundary.stored[id.index()]).map(|(_, bytes)| bytes.0).sum();
    match saving {
        Saving::Traffic => (passed.traffic.0, 0),
        Saving::Memory => (passed.memory.0, written),
    }
}

/// Gives whether there was anything to choose.
fn check(graph: &Graph, first_backward: usize, stored: &dyn Fn(NodeId) -> bool, saving: Saving) -> bool {
    let boundary = Boundary::new(graph, first_backward, stored);
    let chosen = Candidates::new(&boundary, saving);
    let candidates: Vec<NodeId> = boundary.forward().filter(|id| chosen.is_candidate[id.index()]).collect();
    let is_again = chosen.cut();
    let got = (cost(&boundary, &is_again, saving), is_again.iter().filter(|&&again| again).count());
    if candidates.len() > 12 {
        return false;
    }
    assert_eq!(got, best(&boundary, &candidates, saving), "{saving:?}\n{graph}");
    !candidates.is_empty()
}

#[test]
fn no_other_choice_is_better() {
    let mut checked = [0, 0];
    for seed in (0..900).filter(|seed| seed / 3 % 2 == 1) {
        let graph = random_case(seed).graph;
        let Some(first) = first_backward(&graph) else { continue };
        let fused = stored_when_fused(&graph, first);
        let mut generator = Generator::new(seed);
        let anything: Vec<bool> = (0..first).map(|_| generator.chance(0.5)).collect();
        for (index, saving) in [Saving::Traffic, Saving::Memory].into_iter().enumerate() {
            checked[index] += check(&graph, first, &|id| fused[id.index()], saving) as usize;
            checked[index] += check(&graph, first, &|id| anything[id.index()], saving) as usize;
        }
    }
    assert!(checked.iter().all(|&count| count > 50), "too few graphs had a choice that is small enough: {checked:?}");
}
