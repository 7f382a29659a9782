//! Forward.

use deuteron_codegen::cpu::task::Floats;
use deuteron_graph::Dtype;

use super::case::{dropout, plain};
use super::{Case, LENGTHS, Layout, MaskKind, Numbers, WIDTHS, machines};
use crate::cpu::{Finished, Forward, Inputs, Output, Shared, Used, forward};
use crate::{Attention, Dropout};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

pub fn check(mut case: Case, with_gradients: bool, what: &str) {
    let formula = case.formula();
    for machine in machines(case.attention.dtype) {
        let run = case.run(machine, with_gradients);
        formula.check(&run, machine, with_gradients, what);
    }
}

/// Everything else by chance, but the same at every run.
pub fn any(numbers: &mut Numbers, lengths: [usize; 2], width: usize) -> Case {
    let dtype = numbers.pick(&DTYPES);
    let heads = numbers.pick(&[[1, 1], [2, 2], [4, 2], [3, 1]]);
    let mut attention = plain(dtype, heads, [lengths[0], lengths[1], width]);
    attention.batch = 1 + numbers.word() as usize % 2;
    attention.causal = numbers.word().is_multiple_of(2);
    attention.dropout = if numbers.word().is_multiple_of(3) { dropout() } else { None };
    let used = if numbers.word().is_multiple_of(3) { lengths[1].div_ceil(2) } else { lengths[1] };
    let layout = numbers.pick(&[Layout::HeadsFirst, Layout::Fused]);
    let mask = numbers.pick(&[None, None, Some(MaskKind::Shared), Some(MaskKind::Own)]);
    Case::new(attention, used, layout, mask, numbers)
}

#[test]
fn every_pair_of_lengths() {
    let mut numbers = Numbers(1);
    for queries in LENGTHS {
        for keys in LENGTHS {
            let width = numbers.pick(&[1, 8, 32, 64, 80]);
            check(any(&mut numbers, [queries, keys], width), false, "any");
        }
    }
}

#[test]
fn every_width_in_every_dtype() {
    let mut numbers = Numbers(2);
    for width in WIDTHS {
        for dtype in DTYPES {
            for (queries, keys) in [(1, 129), (3, 300), (17, 64), (129, 127)] {
                let mut attention = plain(dtype, [2, 1], [queries, keys, width]);
                attention.causal = true;
                check(Case::new(attention, keys, Layout::Fused, None, &mut numbers), false, "width");
            }
        }
    }
}

#[test]
fn keys_and_values_of_another_type() {
    let mut numbers = Numbers(12);
    for (dtype, kv) in [(Dtype::F32, Dtype::Bf16), (Dtype::F32, Dtype::F16), (Dtype::Bf16, Dtype::F32)] {
        for (queries, keys) in [(1, 1000), (3, 129), (17, 64), (129, 127)] {
            for (width, layout) in [(64, Layout::HeadsFirst), (80, Layout::Fused), (7, Layout::HeadsFirst)] {
                let attention = Attention { kv, causal: true, ..plain(dtype, [2, 1], [queries, keys, width]) };
                check(Case::new(attention, keys, layout, None, &mut numbers), false, "another type");
            }
        }
    }
}

#[test]
fn masks_alone_and_together() {
    let mut numbers = Numbers(3);
    for causal in [false, true] {
        for mask in [None, Some(MaskKind::Shared), Some(MaskKind::Own)] {
            for dropped in [None, dropout()] {
                for queries in [2, 65, 130] {
                    let attention = plain(Dtype::F32, [4, 2], [queries, 130, 32]);
                    let attention = Attention { causal, dropout: dropped, ..attention };
                    check(Case::new(attention, 97, Layout::HeadsFirst, mask, &mut numbers), false, "mask");
                }
            }
        }
    }
}

#[test]
fn ranges_of_keys_are_joined() {
    let mut numbers = Numbers(4);
    for (queries, used) in [(1, 1000), (4, 1000), (1, 100), (4, 3), (1, 0), (40, 1000), (70, 513)] {
        for dtype in DTYPES {
            let mut attention = plain(dtype, [2, 1], [queries, 1000, 64]);
            assert!(attention.splits() > 1);
            attention.causal = true;
            check(Case::new(attention, used, Layout::HeadsFirst, None, &mut numbers), false, "ranges");
        }
    }
}

#[test]
fn dropout_of_all_and_none() {
    let mut numbers = Numbers(5);
    for probability in [0.0, 1.0] {
        for queries in [1, 70] {
            let mut attention = plain(Dtype::F32, [1, 1], [queries, 70, 8]);
            attention.dropout = Some(Dropout { probability, seed: 1, offset: 2 });
            let mut case = Case::new(attention, 70, Layout::HeadsFirst, None, &mut numbers);
            if probability == 0.0 {
                check(case, true, "dropout of none");
                continue;
            }
            for machine in machines(Dtype::F32) {
                let run = case.run(machine, false);
                super::case::each([2, 1, queries, 8], |index| assert_eq!(run.o.get(index), 0.0));
            }
        }
    }
}

#[test]
fn extreme_scores() {
    let mut numbers = Numbers(6);
    for dtype in DTYPES {
        for queries in [2, 80] {
            for kind in 0..4 {
                let mut attention = plain(dtype, [1, 1], [queries, 250, 8]);
                attention.scale = 1.0;
                let mut case = Case::new(attention, 250, Layout::HeadsFirst, Some(MaskKind::Own), &mut numbers);
                let mask = case.mask.as_mut().unwrap();
                super::case::each([2, 1, queries, 250], |index| {
                    let hot = index[3] == index[2];
                    let x = match kind {
                        0 => [1e4, -1e4][numbers.word() as usize % 2],
                        1 => f32::NEG_INFINITY,
                        2 if hot => 0.0,
                        2 => f32::NEG_INFINITY,
                        // The maximum moves at every tile, and what came before still counts.
                        _ => 6.5 * (index[3] / 64) as f32,
                    };
                    mask.set(index, x);
                });
                check(case, true, ["large", "all hidden", "one hot", "growing"][kind]);
            }
        }
    }
}

/// NaN and infinity reach the rows that see them, and no others.
#[test]
fn what_is_not_finite_stays_where_it_is_seen() {
    let mut numbers = Numbers(7);
    for dtype in DTYPES {
        for (queries, keys) in [(3, 70), (70, 70), (150, 150)] {
            for poison in [f32::NAN, f32::INFINITY] {
                for in_values in [false, true] {
                    let mut attention = plain(dtype, [1, 1], [queries, keys, 16]);
                    attention.causal = true;
                    let mut case = Case::new(attention, keys, Layout::HeadsFirst, None, &mut numbers);
                    let key = keys - queries.min(keys) / 2 - 1;
                    let to = if in_values { &mut case.v } else { &mut case.k };
                    to.set([0, 0, key, 3], poison);
                    for machine in machines(dtype) {
                        let run = case.run(machine, false);
                        super::case::each([2, 1, queries, 16], |index| {
                            let seen = index[0] == 0 && key <= index[2] + keys - queries;
                            let reached = seen && if in_values { index[3] == 3 } else { poison.is_nan() };
                            let got = run.o.get(index);
                            let may = seen && !in_values; // an infinite key gives a score of either sign
                            assert!(if reached { !got.is_finite() } else { may || got.is_finite() }, "{index:?} {got}");
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn finished_rows_are_handed_on_in_f32() {
    let mut numbers = Numbers(8);
    for queries in [2, 70] {
        let attention = plain(Dtype::Bf16, [2, 2], [queries, 70, 40]);
        let mut case = Case::new(attention, 70, Layout::HeadsFirst, None, &mut numbers);
        let formula = case.formula();
        let inputs = Inputs {
            q: case.q.heads(),
            k: case.k.heads(),
            v: case.v.heads(),
            mask: None,
            slopes: None,
            documents: None,
            used: Used::Of(case.used),
        };
        let job = Forward {
            attention: &attention,
            inputs: &inputs,
            statistics: None,
            partials: Shared(std::ptr::null_mut()),
            amx: None,
        };
        let mut seen = vec![f32::NAN; formula.o.len()];
        let mut scratch = Floats::new(attention.scratch_elements());
        let isa = machines(Dtype::F32)[0].isa;
        let mut take = |rows: Finished| {
            for (r, row) in rows.values.chunks(rows.stride).enumerate() {
                let at = (rows.batch * 2 + rows.head) * queries + rows.query + r;
                seen[at * 40..(at + 1) * 40].copy_from_slice(&row[..40]);
            }
        };
        for task in 0..attention.forward_tasks() {
            // SAFETY: all tensors were made for these sizes.
            unsafe { forward(isa, &job, &mut Output::Hand(&mut take), task, &mut scratch) };
        }
        for (got, want) in seen.iter().zip(&formula.o) {
            let bound = 64.0 * f64::from(f32::EPSILON) * want.size;
            assert!((f64::from(*got) - want.value).abs() <= bound, "{got} for {}", want.value);
        }
    }
}

/// Bits depend on sizes alone: not on the order of tasks, nor on what scratch held.
#[test]
fn the_order_of_tasks_does_not_matter() {
    let mut numbers = Numbers(9);
    for (queries, keys) in [(1, 700), (200, 700)] {
        let mut attention = plain(Dtype::Bf16, [2, 1], [queries, keys, 64]);
        attention.causal = true;
        let mut case = Case::new(attention, keys, Layout::Fused, None, &mut numbers);
        for machine in machines(Dtype::Bf16) {
            let [last_first, first_first] = [false, true].map(|first| {
                case.first_tasks_first = first;
                case.run(machine, true)
            });
            assert_eq!(last_first.o.bytes, first_first.o.bytes);
            assert_eq!(last_first.statistics, first_first.statistics);
            for n in 0..3 {
                assert_eq!(last_first.gradients[n].bytes, first_first.gradients[n].bytes);
            }
        }
    }
}
