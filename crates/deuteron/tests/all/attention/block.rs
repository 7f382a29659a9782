//! Attention, its output projection and the row work on that as one kernel: its results against f64, and the bits of the unfused plan.

use deuteron::{Dtype, Graph, GroupKind, Isa, Session, Strategy, seed};

use super::rows::{check, kinds};
use super::sized;
use crate::support::{bits, cpu, outputs, parsed, ran, seeded, set};

/// Attention, heads merged, and `rest`, which finds the result as `m`, the weight `p`, its bias `c` and, as wide as what
/// the weight gives, the residual `r` and a norm's `w` and `b`.
fn projected(sizes: [usize; 5], wide: usize, operands: &str, attention: &str, rest: &str) -> String {
    let [batch, heads, queries, _, width] = sizes;
    let cols = heads * width;
    let rest = format!(
        "p = weight float[{cols},{wide}] ; c = weight float[{wide}]
r = input float[{batch},{queries},{wide}] ; w = weight float[{wide}] ; b = weight float[{wide}]
{operands}
a = attention q k v {attention}
t = transpose a [0,2,1,3] ; m = reshape t [{batch},{queries},{cols}]
{rest}"
    );
    sized(sizes, &rest)
}

const BLOCK: &str = "l = linear m p c ; s = add r l ; y = layer_norm s w b ; out y ; out s";

/// Sizes and columns of the projection: whole and partial tiles and strips, one query and few (the weight is streamed), keys
/// that are split, inner sizes and columns beyond one block of the product.
const SIZES: [([usize; 5], usize); 9] = [
    ([2, 3, 64, 64, 64], 192),
    ([1, 2, 127, 127, 40], 80),
    ([2, 2, 129, 129, 17], 35),
    ([1, 4, 17, 17, 8], 200),
    ([1, 3, 1, 700, 16], 48),
    ([2, 2, 3, 1500, 24], 100),
    ([1, 13, 70, 70, 64], 400),
    ([1, 2, 700, 20, 8], 16),
    ([3, 1, 33, 9, 8], 2),
];

#[test]
fn projection_residual_and_norm() {
    for dtype in Dtype::FLOATS {
        for (sizes, wide) in SIZES {
            check(&projected(sizes, wide, "", "mask=causal", BLOCK), dtype);
        }
        let rms = "l = linear m p c ; s = add r l ; y = rms_norm s w ; out y ; out s";
        check(&projected([2, 3, 65, 90, 20], 60, "", "", rms), dtype);
        let softmax = "l = linear m p c ; y = softmax l ; out y";
        check(&projected([2, 2, 127, 40, 16], 129, "", "", softmax), dtype);
    }
}

#[test]
fn projection_alone_and_elementwise_work() {
    for dtype in Dtype::FLOATS {
        for (sizes, wide) in [SIZES[1], SIZES[4]] {
            check(&projected(sizes, wide, "", "", "y = matmul m p ; out y"), dtype);
            check(&projected(sizes, wide, "", "", "l = linear m p c ; y = add l r ; out y"), dtype);
            check(&projected(sizes, wide, "", "", "l = linear m p c ; g = gelu l ; y = mul g r ; out y"), dtype);
        }
    }
}

#[test]
fn masks_and_dropout() {
    for dtype in Dtype::FLOATS {
        for [queries, keys] in [[70, 70], [5, 600], [2, 600]] {
            let mask = format!("x = input float[{queries},{keys}]");
            check(&projected([2, 2, queries, keys, 24], 48, &mask, "x mask=additive", BLOCK), dtype);
            let both = format!("{mask} ; seed = input i32[]");
            let attention = "x seed mask=additive p=0.3 offset=2";
            check(&projected([1, 2, queries, keys, 24], 48, &both, attention, BLOCK), dtype);
            let (seed, attention) = ("seed = input i32[]", "seed mask=causal p=0.3");
            check(&projected([1, 2, queries, keys, 24], 48, seed, attention, BLOCK), dtype);
            // And what follows drops elements of its own.
            let dropped =
                "l = linear m p c ; d = dropout l seed p=0.5 ; s = add r d ; y = layer_norm s w b ; out y ; out s";
            check(&projected([1, 2, queries, keys, 24], 48, seed, attention, dropped), dtype);
        }
    }
}

#[test]
fn heads_that_share_keys() {
    for dtype in Dtype::FLOATS {
        for queries in [1, 50] {
            let text = format!(
                "q = input float[2,2,3,{queries},16] ; k1 = input float[2,2,1,70,16] ; v1 = input float[2,2,1,70,16]
k = broadcast k1 [2,2,3,70,16] ; v = broadcast v1 [2,2,3,70,16] ; r = input float[2,{queries},64] ; w = weight float[64]
p = weight float[96,64]
a = attention q k v mask=causal ; t = transpose a [0,3,1,2,4] ; m = reshape t [2,{queries},96]
l = matmul m p ; s = add l r ; y = rms_norm s w ; out y ; out s"
            );
            check(&text, dtype);
        }
    }
}

/// A weight that lies by columns, and keys in a cache.
#[test]
fn operands_that_lie_otherwise() {
    for dtype in Dtype::FLOATS {
        for (sizes, wide) in [SIZES[1], SIZES[4], SIZES[5]] {
            let cols = sizes[1] * sizes[4];
            let rest = "n = transpose z [1,0] ; l = matmul m n ; s = add r l ; y = layer_norm s w b ; out y ; out s";
            let weight = format!("z = weight float[{wide},{cols}]");
            check(&projected(sizes, wide, &weight, "mask=causal", rest), dtype);
        }
        let positions = "at = input i32[2]";
        for queries in [1, 20] {
            check(&projected([2, 2, queries, 90, 16], 40, positions, "at mask=cached", BLOCK), dtype);
        }
    }
}

/// What the kernel does not do stays apart, and right.
#[test]
fn what_stays_apart() {
    let engine = cpu(2, Isa::detect());
    for (text, wanted) in [
        // The merged result is handed out, or read again after the product; rows are moved; they are summed over; two weights.
        ("l = linear m p c ; y = layer_norm l w b ; out y ; out m", 2),
        ("l = matmul m p ; s = add l m ; y = layer_norm s w b ; out y", 2),
        ("l = matmul m p ; z = transpose l [1,0,2] ; r2 = transpose r [1,0,2] ; y = add z r2 ; out y", 2),
        ("l = matmul m p ; s = column_sum l ; out s", 2),
        ("l = matmul m p ; f = matmul l p ; y = layer_norm f w b ; out y", 2),
        // What the product gives is handed out beside what follows it.
        ("l = matmul m p ; y = layer_norm l w b ; out y ; out l", 2),
        // The result of attention is the second operand.
        ("i = reshape r [60,16] ; j = reshape m [16,60] ; y = matmul i j ; out y", 2),
    ] {
        let text = projected([2, 2, 30, 30, 8], 16, "", "mask=causal", text).replace("float", "f32");
        let graph: Graph = text.parse().unwrap();
        let (inputs, expected) = seeded(&graph, 7);
        for strategy in [Strategy::Greedy, Strategy::Fused] {
            let session = ran(&engine, &graph, strategy, &inputs);
            assert!(session.plan().groups.len() >= wanted, "{text}: {:?}", kinds(&session));
            assert!(expected.verify(&graph, &outputs(&session)).unwrap().holds(), "{text}");
        }
    }
}

/// The plan that the search finds is right, whatever it is, and gives the same bits.
#[test]
fn the_search_gives_the_same_bits() {
    for (sizes, wide) in SIZES {
        let graph = parsed(&projected(sizes, wide, "", "mask=causal", BLOCK), Dtype::F32);
        let inputs = seed::inputs(&graph, 5).unwrap();
        let engine = cpu(2, Isa::detect());
        let [fused, unfused] =
            [Strategy::Fused, Strategy::Unfused].map(|strategy| ran(&engine, &graph, strategy, &inputs));
        assert!(bits(&fused) == bits(&unfused), "{sizes:?}");
    }
}

/// NaN and infinities in one row of a residual or of the result of attention stay in that row.
#[test]
fn rows_are_not_mixed() {
    for dtype in Dtype::FLOATS {
        let text = projected([1, 2, 150, 150, 16], 32, "", "mask=causal", BLOCK).replace("float", &dtype.to_string());
        let graph: Graph = text.parse().unwrap();
        let mut inputs = seed::inputs(&graph, 3).unwrap();
        set(&mut inputs[2], 100 * 16 + 3, f32::NAN);
        for isa in Isa::available() {
            for threads in [1, 3, 16] {
                let fused = ran(&cpu(threads, isa), &graph, Strategy::Greedy, &inputs);
                assert_eq!(kinds(&fused), [GroupKind::Attention]);
                for output in outputs(&fused) {
                    let values = output.to_f32().unwrap();
                    assert!(values[..100 * 32].iter().all(|x| x.is_finite()), "{dtype} {}", isa.name());
                    assert!(values[100 * 32..].iter().all(|x| x.is_nan()), "{dtype} {}", isa.name());
                }
            }
        }
    }
}

#[test]
fn the_listing_says_what_it_does() {
    let text = projected([1, 2, 30, 30, 8], 16, "", "mask=causal", BLOCK).replace("float", "f32");
    let graph: Graph = text.parse().unwrap();
    let session = Session::new(&cpu(1, Isa::detect()), &graph, Strategy::Greedy).unwrap();
    let text = session.kernels()[0].source.to_string();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("causal attention by online softmax, heads of 8, f32 in and out, f32 sums"));
    let product = "then, of its rows and a weight: matrix product, f32 by f32, f32 sums, blocks of the result";
    assert_eq!(lines.next(), Some(product));
    assert!(lines.next().is_some_and(|line| line.starts_with("each row, while its sums (argument")), "{text}");
    assert!(lines.next().is_some_and(|line| line.starts_with("tile program, 16 columns")), "{text}");
}
