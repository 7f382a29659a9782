//! The random cases are what the differential tests take them for.

use std::collections::BTreeMap;

use deuteron_graph::{Dtype, Op};
use deuteron_reference::{
    Array, Case, MOST_ELEMENTS, Rounding, bounded, interpret, op_counts, random_bounded_case, random_case,
    random_case_within, round_to,
};

const CASES: u64 = 300;

fn outputs_of_forward(case: &Case) -> usize {
    case.graph.outputs().iter().filter(|output| output.name.starts_with('y')).count()
}

#[test]
fn a_seed_decides_everything() {
    for seed in [0, 5, 77] {
        assert_eq!(random_case(seed), random_case(seed));
    }
    assert_ne!(random_case(1).graph, random_case(4).graph);
}

#[test]
fn cases_cover_all_operations_sizes_and_dtypes() {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let (mut calls, mut backward, mut elements) = (Vec::new(), 0, Vec::new());
    for seed in 0..CASES {
        let case = random_case(seed);
        backward += case.backward as u64;
        let own = op_counts(&case.graph);
        if !case.backward {
            calls.push(own.values().sum::<usize>());
        }
        own.into_iter().for_each(|(name, count)| *counts.entry(name).or_default() += count);
        assert_eq!(case.dtype, Dtype::FLOATS[(seed % 3) as usize]);
        assert!((1..=4).contains(&outputs_of_forward(&case)), "case {seed}");
        elements.push(case.inputs[0].values.len());
        assert!(case.graph.nodes().iter().all(|node| node.shape.elements() <= 1 << 17), "case {seed}");
        for (&id, array) in case.graph.inputs().iter().zip(&case.inputs) {
            let node = case.graph.node(id);
            assert!(matches!(node.op, Op::Input { .. }) && node.shape == array.shape);
            assert!(array.values.iter().all(|&x| round_to(node.dtype, x) == x), "case {seed}: inputs are rounded");
        }
    }
    assert_eq!(backward, CASES / 2);
    calls.sort();
    elements.sort();
    assert!(calls[calls.len() / 2] >= 5 && calls[0] >= 3 && calls[calls.len() - 1] <= 14, "{calls:?}");
    assert!((500..10_000).contains(&elements[elements.len() / 2]), "{}", elements[elements.len() / 2]);
    let expected = "neg abs exp log sqrt rsqrt reciprocal tanh erf sigmoid round add sub mul div max min lt le eq ne gt \
        ge select cast row_sum row_mean row_max row_absmax row_argmax column_sum layer_norm rms_norm softmax causal_mask \
        gelu silu relu swiglu geglu dropout quantize_int8 quantize_fp8 dequantize cross_entropy linear attention gather \
        slice reshape transpose concat grad(layer_norm) grad(softmax) grad(gelu) grad(linear) grad(attention)";
    for name in expected.split_whitespace() {
        assert!(counts.contains_key(name), "no {name} in {CASES} cases: {counts:?}");
    }
}

/// What a perfect kernel that stores as the graph says would give is within the bounds, and the bounds bite.
#[test]
fn rounded_outputs_pass_and_disturbed_outputs_fail() {
    let (mut disturbed, mut caught) = (0, 0);
    for seed in 0..CASES {
        let (case, expected) = random_bounded_case(seed, MOST_ELEMENTS).unwrap();
        let rounded = interpret(&case.graph, &case.inputs, Rounding::Storage).unwrap().outputs;
        for ((output, expected), stored) in case.graph.outputs().iter().zip(&expected).zip(&rounded) {
            let comparison = expected.compare(stored);
            assert!(comparison.holds(), "case {seed}, {} of {}: {comparison:?}", output.name, expected.dtype);
            let swapped = reversed(stored);
            if (expected.exact.max_abs() > 0.0) && swapped != *stored && stored.values.len() > 8 {
                disturbed += 1;
                caught += !expected.compare(&swapped).holds() as usize;
            }
        }
    }
    assert!(caught * 100 >= disturbed * 98, "{caught} of {disturbed} reversed outputs were caught");
}

fn reversed(array: &Array) -> Array {
    Array { shape: array.shape.clone(), values: array.values.iter().rev().copied().collect() }
}

#[test]
fn bounds_that_come_with_a_case_are_those_of_its_graph() {
    for seed in 0..6 {
        let (case, expected) = random_bounded_case(seed, 2048).unwrap();
        assert_eq!(case, random_case_within(seed, 2048));
        assert_eq!(expected, bounded(&case.graph, &case.inputs).unwrap());
    }
}

/// The first input has the size that is aimed at; a case of all sizes is what it always was.
#[test]
fn cases_keep_within_the_elements_they_aim_at() {
    let largest = |most: usize| {
        let first = (0..40).map(|seed| random_case_within(seed, most).inputs[0].values.len());
        first.max().unwrap_or(0)
    };
    assert!((256..=1024).contains(&largest(1024)), "{}", largest(1024));
    assert_eq!(random_case(5), random_case_within(5, MOST_ELEMENTS));
}
