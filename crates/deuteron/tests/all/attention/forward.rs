//! Attention on the CPU: one kernel where the plan allows it, its results against f64, and where it stays apart.

use deuteron::{Dtype, Engine, GroupKind, Isa, Session, Strategy, Tensor, seed};

use super::{count, sized};
use crate::support::{assert_holds, cpu, outputs, parsed, ran, seeded};

/// Runs a graph by every strategy, compares with f64, and expects `kernels` of attention and no product beside them where
/// attention is one kernel.
fn check(text: &str, dtype: Dtype, kernels: usize) {
    let engine = cpu(2, Isa::detect());
    let graph = parsed(text, dtype);
    let (inputs, expected) = seeded(&graph, 11);
    for strategy in Strategy::ALL {
        let session = ran(&engine, &graph, strategy, &inputs);
        assert_holds(&expected, &graph, &outputs(&session), format_args!("{dtype} {strategy}\n{text}"));
        let found = count(&session, GroupKind::Attention);
        let one = match strategy {
            Strategy::Naive | Strategy::Eager => 0,
            Strategy::Unfused | Strategy::Greedy => kernels,
            // As the price says: a handful of queries may be cheaper in parts.
            Strategy::Fused => found.min(kernels),
        };
        assert_eq!(found, one, "{dtype} {strategy}\n{text}");
        if one > 0 {
            assert_eq!(count(&session, GroupKind::Matmul), 0, "{dtype} {strategy}\n{text}");
        }
    }
}

/// Whole tiles, parts of tiles, few queries against many keys, more queries than keys.
const SIZES: [[usize; 5]; 9] = [
    [2, 3, 64, 64, 64],
    [1, 2, 127, 127, 40],
    [2, 2, 129, 129, 17],
    [1, 1, 1, 1, 1],
    [2, 4, 1, 700, 64],
    [1, 2, 3, 1500, 24],
    [1, 1, 33, 9, 8],
    [1, 1, 5, 1025, 80],
    [1, 1, 65, 66, 256],
];

#[test]
fn causal_and_full() {
    for dtype in Dtype::FLOATS {
        for sizes in SIZES {
            check(&sized(sizes, "a = attention q k v mask=causal ; out a"), dtype, 1);
            check(&sized(sizes, "a = attention q k v scale=0.3 ; out a"), dtype, 1);
        }
    }
}

/// As over a cache: nobody writes wide keys and values.
#[test]
fn narrow_keys_and_values_are_read_in_place() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for [batch, heads, queries, keys, width] in SIZES {
            let text = format!(
                "q = input f32[{batch},{heads},{queries},{width}]
k = input float[{batch},{heads},{keys},{width}] ; v = input float[{batch},{heads},{keys},{width}]
p = input i32[{batch}] ; a = attention q k v mask=causal ; b = attention q k v p mask=cached ; out a b"
            );
            check(&text, dtype, 2);
        }
    }
}

#[test]
fn added_masks_repeat_over_heads_and_queries() {
    for (turn, dtype) in Dtype::FLOATS.into_iter().enumerate() {
        for (at, sizes @ [batch, heads, queries, keys, _]) in SIZES.into_iter().enumerate() {
            let masks = [
                format!("float[{queries},{keys}]"),
                format!("f32[{batch},1,{queries},{keys}]"),
                format!("float[{batch},{heads},{queries},{keys}]"),
                format!("float[{batch},1,1,{keys}]"),
            ];
            // Two of them for each size and type, in turn.
            for mask in masks.iter().skip((turn + at) % 2).step_by(2) {
                let text = format!("m = input {mask} ; a = attention q k v m mask=additive ; out a");
                check(&sized(sizes, &text), dtype, 1);
            }
        }
    }
}

#[test]
fn dropout_drops_what_the_reference_drops() {
    for dtype in Dtype::FLOATS {
        for sizes in SIZES {
            let text = "seed = input i32[] ; a = attention q k v seed mask=causal p=0.4 offset=9 ; out a";
            check(&sized(sizes, text), dtype, 1);
        }
        let text = "seed = input i32[] ; m = input float[30,30]
a = attention q k v m seed mask=additive p=0.4 offset=9 ; out a";
        check(&sized([2, 3, 30, 30, 20], text), dtype, 1);
    }
}

/// A block's attention: heads are slices of one product's result, and the result is written head by head.
const FUSED_QKV: &str = "x = input float[2,67,288]
q1 = slice x axis=2 start=0 length=96 ; q4 = reshape q1 [2,67,4,24] ; q = transpose q4 [0,2,1,3]
k1 = slice x axis=2 start=96 length=96 ; k4 = reshape k1 [2,67,4,24] ; k = transpose k4 [0,2,1,3]
v1 = slice x axis=2 start=192 length=96 ; v4 = reshape v1 [2,67,4,24] ; v = transpose v4 [0,2,1,3]
a = attention q k v mask=causal
t = transpose a [0,2,1,3] ; y = reshape t [2,67,96]
out y";

#[test]
fn views_are_followed_and_the_result_is_written_where_its_reader_wants_it() {
    for dtype in Dtype::FLOATS {
        check(FUSED_QKV, dtype, 1);
    }
    let engine = Engine::cpu();
    let kinds = |strategy| {
        let session = Session::new(&engine, &parsed(FUSED_QKV, Dtype::F32), strategy).unwrap();
        session.plan().groups.iter().map(|group| group.kind).collect::<Vec<_>>()
    };
    assert_eq!(kinds(Strategy::Unfused), [GroupKind::Attention, GroupKind::Copy]);
    assert_eq!(kinds(Strategy::Greedy), [GroupKind::Attention]);
    assert_eq!(kinds(Strategy::Fused), [GroupKind::Attention]);
}

#[test]
fn heads_may_share_keys_and_values() {
    // Key heads before the heads that share them; one key head for all; shared by sequences, which are no heads.
    let grouped = "q = input float[2,2,3,50,16] ; k1 = input float[2,2,1,70,16] ; v1 = input float[2,2,1,70,16]
k = broadcast k1 [2,2,3,70,16] ; v = broadcast v1 [2,2,3,70,16]
a = attention q k v mask=causal ; out a";
    let one = "q = input float[2,6,1,16] ; k1 = input float[2,1,600,16] ; v1 = input float[2,1,600,16]
k = broadcast k1 [2,6,600,16] ; v = broadcast v1 [2,6,600,16] ; a = attention q k v ; out a";
    let prefix = "q = input float[3,2,5,16] ; k1 = input float[2,9,16] ; v1 = input float[2,9,16]
k = broadcast k1 [3,2,9,16] ; v = broadcast v1 [3,2,9,16] ; a = attention q k v ; out a";
    for dtype in Dtype::FLOATS {
        [grouped, one, prefix].iter().for_each(|text| check(text, dtype, 1));
    }
    let engine = Engine::cpu();
    let text = Session::new(&engine, &parsed(grouped, Dtype::F32), Strategy::Unfused).unwrap();
    let source = text.kernels()[0].source.to_string();
    assert_eq!(
        source,
        "causal attention by online softmax, heads of 16, 3 heads a key head, f32 in and out, f32 sums\n"
    );
}

#[test]
fn what_the_kernel_does_not_do_is_planned_in_parts() {
    for text in [
        // Probabilities are no result of the kernel; nor are values of another width, heads above 256, three axes.
        "q = input float[2,9,8] ; k = input float[2,9,8] ; v = input float[2,9,5] ; a = attention q k v ; out a",
        "q = input float[4,300] ; a = attention q q q ; out a",
        "x = input float[5,4,3,9,8] ; q = transpose x [2,1,0,3,4] ; k = input float[3,4,5,9,8]
a = attention q k k ; out a",
        // Keys that lie in columns, a mask of one number a query, a constant mask.
        "q = input float[7,8] ; x = input float[8,9] ; k = transpose x [1,0] ; v = input float[9,8]
a = attention q k v ; out a",
        "q = input float[7,8] ; k = input float[9,8] ; m = input float[7,1] ; a = attention q k k m mask=additive ; out a",
        "q = input float[7,8] ; k = input float[9,8] ; m = const -2.0 float ; a = attention q k k m mask=additive ; out a",
    ] {
        Dtype::FLOATS.into_iter().for_each(|dtype| check(text, dtype, 0));
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for dtype in Dtype::FLOATS {
        for sizes in SIZES {
            let graph = parsed(&sized(sizes, "a = attention q k v mask=causal ; out a"), dtype);
            let inputs = seed::inputs(&graph, 3).unwrap();
            for isa in Isa::available() {
                for strategy in [Strategy::Unfused, Strategy::Fused] {
                    let bits = |threads| {
                        let engine = cpu(threads, isa);
                        let output = outputs(&ran(&engine, &graph, strategy, &inputs)).remove(0);
                        output.to_f32().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>()
                    };
                    let one = bits(1);
                    let same = [2, 3, 7].into_iter().all(|threads| bits(threads) == one);
                    assert!(same, "{dtype} {sizes:?} {} {strategy}", isa.name());
                }
            }
        }
    }
}

#[test]
fn nothing_to_do_is_done() {
    for sizes in [[0, 2, 5, 5, 8], [2, 0, 5, 5, 8], [2, 2, 0, 5, 8]] {
        check(&sized(sizes, "a = attention q k v mask=causal ; out a"), Dtype::Bf16, 1);
    }
}

#[test]
fn rows_without_a_key_are_zeros() {
    let engine = Engine::cpu();
    let graph = parsed("q = input f32[6,8] ; k = input f32[4,8] ; a = attention q k k mask=causal ; out a", Dtype::F32);
    let inputs = seed::inputs(&graph, 5).unwrap();
    let values = outputs(&ran(&engine, &graph, Strategy::Unfused, &inputs)).remove(0).to_f32().unwrap();
    assert!(values[..16].iter().all(|&x| x == 0.0) && values[16..].iter().all(|&x| x != 0.0), "{values:?}");
}

/// A finite mask leaves no row empty: beside the smallest `f32` all scores are lost, and each value counts the same, as in separate kernels.
#[test]
fn rows_whose_keys_are_all_masked_are_means() {
    let engine = Engine::cpu();
    for ([queries, keys], work) in [
        ([7, 7], ""),
        ([1, 33], ""),
        ([40, 129], ""),
        ([5, 1025], ""),
        ([129, 64], ""),
        ([40, 40], " soft_cap=30.0"),
        ([4, 40], " soft_cap=30.0"),
        ([130, 130], " window=200"),
    ] {
        let text = format!(
            "q = input f32[{queries},16] ; k = input f32[{keys},16] ; v = input f32[{keys},16] ; m = input f32[{queries},{keys}]
a = attention q k v m mask=additive scale=0.3{work} ; out a"
        );
        let graph = parsed(&text, Dtype::F32);
        let mut inputs = seed::inputs(&graph, 5).unwrap();
        let v = inputs[2].to_f32().unwrap();
        let mean = |column: usize| v.iter().skip(column).step_by(16).sum::<f32>() / keys as f32;
        for hidden in [-1e8, -1e10, -1e30, f32::MIN / 1.5, f32::MIN] {
            inputs[3] = Tensor::from_f32(Dtype::F32, [queries, keys], &vec![hidden; queries * keys]).unwrap();
            for strategy in Strategy::ALL {
                let values = outputs(&ran(&engine, &graph, strategy, &inputs)).remove(0).to_f32().unwrap();
                let distance = |at: usize| (values[at] - mean(at % 16)).abs();
                let farthest = (0..values.len()).map(distance).fold(0.0, f32::max);
                // Beside -1e8 scores are still rounded to multiples of 8, so that few differ.
                let is_even = if hidden < -1e9 { farthest < 1e-5 } else { farthest < 4.0 };
                assert!(is_even, "{strategy} {queries}x{keys} masked by {hidden}: {farthest}");
            }
        }
    }
}

#[test]
fn gradients_read_scores_and_are_planned_in_parts() {
    for dtype in Dtype::FLOATS {
        let graph = parsed(FUSED_QKV, dtype);
        let graph = deuteron::differentiate(&graph, graph.inputs()).unwrap().graph;
        let engine = Engine::cpu();
        let (inputs, expected) = seeded(&graph, 11);
        for strategy in Strategy::ALL {
            let session = ran(&engine, &graph, strategy, &inputs);
            assert!(expected.verify(&graph, &outputs(&session)).unwrap().holds(), "{dtype} {strategy}");
            assert_eq!(count(&session, GroupKind::Attention), 0, "{strategy}: its scores leave");
        }
    }
}
