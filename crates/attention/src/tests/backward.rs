//! Backward.

use deuteron_graph::Dtype;

use super::case::{Tensor, dropout, plain};
use super::forward::{any, check};
use super::{Case, LENGTHS, Layout, MaskKind, Numbers, WIDTHS, machines};
use crate::Attention;

#[test]
fn every_pair_of_lengths() {
    let mut numbers = Numbers(11);
    for queries in LENGTHS {
        for keys in LENGTHS {
            let width = numbers.pick(&[1, 8, 32, 64, 80]);
            check(any(&mut numbers, [queries, keys], width), true, "any");
        }
    }
}

#[test]
fn every_width() {
    let mut numbers = Numbers(12);
    for width in WIDTHS {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut attention = plain(dtype, [2, 1], [70, 129, width]);
            attention.causal = true;
            check(Case::new(attention, 129, Layout::Fused, None, &mut numbers), true, "width");
        }
    }
}

#[test]
fn ranges_of_keys_are_added() {
    let mut numbers = Numbers(13);
    for (queries, used) in [(1, 600), (130, 600), (130, 200), (65, 0)] {
        let mut attention = plain(Dtype::F32, [4, 2], [queries, 600, 32]);
        assert!(attention.backward_splits() > 1);
        attention.dropout = dropout();
        check(Case::new(attention, used, Layout::HeadsFirst, None, &mut numbers), true, "ranges");
    }
}

/// The slope of `sum(do * o)` along a direction, by differences of the formula.
#[test]
fn gradients_are_slopes() {
    let mut numbers = Numbers(14);
    let attention = plain(Dtype::F32, [2, 1], [5, 7, 6]);
    let attention = Attention { causal: true, dropout: dropout(), ..attention };
    check_slopes(&mut Case::new(attention, 7, Layout::HeadsFirst, Some(MaskKind::Shared), &mut numbers));
}

/// Of two heads that share one of keys, five queries and seven keys of width six.
pub fn check_slopes(case: &mut Case) {
    let run = case.run(machines(Dtype::F32)[0], true);
    let total = |case: &Case| {
        let (formula, mut at, mut total) = (case.formula(), 0, 0.0);
        super::case::each([2, 2, 5, 6], |index| {
            total += case.output_gradient.get(index) * formula.o[at].value;
            at += 1;
        });
        total
    };
    let step = f64::powi(2.0, -9);
    for n in 0..3 {
        let (heads, positions) = if n == 0 { (2, 5) } else { (1, 7) };
        super::case::each([2, heads, positions, 6], |index| {
            let before = operand(case, n).get(index) as f32;
            let ends = [step, -step].map(|step| {
                operand(case, n).set(index, before + step as f32);
                (operand(case, n).get(index), total(case))
            });
            operand(case, n).set(index, before);
            let slope = (ends[0].1 - ends[1].1) / (ends[0].0 - ends[1].0);
            let got = run.gradients[n].get(index);
            // The third derivative is below 8 for numbers below 1.
            assert!((got - slope).abs() < 8.0 * step * step, "gradient {n} at {index:?}: {got} for {slope}");
        });
    }
}

fn operand(case: &mut Case, n: usize) -> &mut Tensor {
    match n {
        0 => &mut case.q,
        1 => &mut case.k,
        _ => &mut case.v,
    }
}
