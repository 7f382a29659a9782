//! Work on the scores: a soft cap, slopes, a bias, a window, documents, forward and backward.

use deuteron_graph::Dtype;

use super::case::{dropout, each, plain};
use super::forward::check;
use super::{Case, Layout, MaskKind, Numbers, machines};
use crate::{Attention, ScoreRules};

/// The rules whose bits are set.
fn rules(bits: u64, window: usize) -> ScoreRules {
    let on = |bit: u32| bits >> bit & 1 == 1;
    ScoreRules {
        soft_cap: on(0).then_some(0.75),
        slopes: on(1),
        bias: on(2).then_some(Dtype::F32),
        window: on(3).then_some(window),
        documents: on(4),
    }
}

#[test]
fn all_work_alone_and_together() {
    let mut numbers = Numbers(21);
    for bits in 1..32 {
        for (queries, keys) in [(1, 1), (1, 300), (3, 129), (17, 64), (127, 129), (130, 130), (300, 300)] {
            // The larger ones take turns: they take as long as all others.
            if queries > 100 && bits as usize % 4 != queries % 4 {
                continue;
            }
            let dtype = numbers.pick(&[Dtype::F32, Dtype::F16, Dtype::Bf16]);
            let heads = numbers.pick(&[[1, 1], [2, 2], [4, 2]]);
            let width = numbers.pick(&[8, 32, 64]);
            let attention = plain(dtype, heads, [queries, keys, width]);
            let causal = numbers.word().is_multiple_of(2);
            let dropout = if numbers.word().is_multiple_of(4) { dropout() } else { None };
            let scores = rules(bits, numbers.pick(&[1, 2, 40, 64, 65, 200]));
            let mask = scores.bias.map(|_| numbers.pick(&[MaskKind::Shared, MaskKind::Own]));
            let attention = Attention { causal, scores, dropout, ..attention };
            check(Case::new(attention, keys, Layout::HeadsFirst, mask, &mut numbers), true, "work on scores");
        }
    }
}

#[test]
fn ranges_of_keys_are_joined() {
    let mut numbers = Numbers(22);
    for (queries, used) in [(1, 1000), (4, 1000), (1, 100), (40, 1000), (70, 513)] {
        for window in [3, 100, 600] {
            let scores = rules(0b1011, window);
            let attention = Attention { causal: true, scores, ..plain(Dtype::F32, [2, 1], [queries, 1000, 64]) };
            assert!(attention.splits() > 1);
            check(Case::new(attention, used, Layout::HeadsFirst, None, &mut numbers), true, "ranges");
        }
    }
}

/// NaN in tiles that a query must not go over does not reach its row: they were not read.
#[test]
fn tiles_that_no_query_sees_are_skipped() {
    let mut numbers = Numbers(23);
    for (scores, causal) in [(rules(0b1000, 16), true), (rules(0b1000, 16), false), (rules(0b10000, 0), true)] {
        for queries in [2, 300] {
            let attention = Attention { causal, scores, ..plain(Dtype::F32, [2, 1], [queries, 300, 16]) };
            let mut case = Case::new(attention, 300, Layout::HeadsFirst, None, &mut numbers);
            case.documents = (0..600).map(|at| i32::from(at % 300 >= 64)).collect();
            each([2, 1, 64, 16], |index| {
                case.k.set(index, f32::NAN);
                case.v.set(index, f32::NAN);
            });
            for machine in machines(Dtype::F32) {
                let run = case.run(machine, true);
                let first = if queries == 2 { 0 } else { 128 };
                each([2, 2, queries, 16], |[b, h, i, d]| {
                    let (o, dq) = (run.o.get([b, h, i, d]), run.gradients[0].get([b, h, i, d]));
                    assert!(i < first || (o.is_finite() && dq.is_finite()), "query {i} of {queries}: {o} {dq}");
                });
                // Of queries that see them, they do.
                let reached = queries == 2 || run.o.get([0, 0, 0, 0]).is_nan();
                assert!(reached, "the poison is where it should be");
            }
        }
    }
}

/// A window of 128 over 4096 keys: a query's tile goes over three or four tiles of keys, not over up to 64.
#[test]
fn a_window_leaves_a_few_tiles() {
    for causal in [false, true] {
        let full = Attention { causal, ..plain(Dtype::F32, [1, 1], [4096, 4096, 64]) };
        let scores = rules(0b1000, 128);
        let near = Attention { scores, ..full };
        let tiles = |attention: &Attention| -> usize {
            let tiles = (0..attention.forward_tasks()).map(|task| {
                let (first, end) = attention.keys_of(&attention.task(task), 4096);
                end.saturating_sub(first).div_ceil(64)
            });
            tiles.sum()
        };
        let (all, few) = (tiles(&full), tiles(&near));
        assert!(few * if causal { 10 } else { 12 } < all, "{few} of {all} tiles");
        // What the cost model counts is what is done.
        let counted = near.computed_scores() * 2.0 / (64.0 * 64.0);
        assert!((0.9..1.5).contains(&(counted / few as f64)), "{counted} counted, {few} done");
        assert!(near.seen_scores() < full.seen_scores() / 7.0);
    }
}

/// The slope of `sum(do * o)` along a direction, by differences of the formula.
#[test]
fn gradients_are_slopes() {
    let mut numbers = Numbers(24);
    let scores = ScoreRules { window: Some(4), ..rules(0b10111, 0) };
    let attention = Attention { causal: true, scores, dropout: dropout(), ..plain(Dtype::F32, [2, 1], [5, 7, 6]) };
    let mut case = Case::new(attention, 7, Layout::HeadsFirst, Some(MaskKind::Shared), &mut numbers);
    super::backward::check_slopes(&mut case);
}
