//! Attention and the row work on its result as one kernel: its results against f64, and the bits of the unfused plan.

use deuteron::{Dtype, Graph, GroupKind, Isa, Session, Strategy, seed};

use super::sized;
use crate::support::{assert_holds, bits, cpu, outputs, parsed, ran, seeded, set};

/// Kinds of a session's kernels.
pub(crate) fn kinds(session: &Session) -> Vec<GroupKind> {
    session.plan().groups.iter().map(|group| group.kind).collect()
}

/// Attention, heads merged, residual, norm: everything is one kernel, right, and bit for bit what the unfused plan gives,
/// for any number of threads and on every instruction set.
pub(crate) fn check(text: &str, dtype: Dtype) {
    let graph = parsed(text, dtype);
    let (inputs, expected) = seeded(&graph, 11);
    for isa in Isa::available() {
        let unfused = ran(&cpu(2, isa), &graph, Strategy::Unfused, &inputs);
        assert!(unfused.plan().groups.len() > 1, "{text}");
        for threads in [1, 2, 7] {
            let fused = ran(&cpu(threads, isa), &graph, Strategy::Greedy, &inputs);
            assert_eq!(kinds(&fused), [GroupKind::Attention], "{dtype} {}\n{text}", isa.name());
            assert_holds(&expected, &graph, &outputs(&fused), format_args!("{dtype} {}\n{text}", isa.name()));
            assert!(bits(&fused) == bits(&unfused), "{dtype} {} {threads} threads: other bits\n{text}", isa.name());
        }
    }
}

fn merged([batch, heads, queries, keys, width]: [usize; 5], operands: &str, attention: &str, rest: &str) -> String {
    let cols = heads * width;
    let rest = format!(
        "r = input float[{batch},{queries},{cols}] ; w = weight float[{cols}] ; b = weight float[{cols}]
{operands}
a = attention q k v {attention}
t = transpose a [0,2,1,3] ; m = reshape t [{batch},{queries},{cols}]
{rest}"
    );
    sized([batch, heads, queries, keys, width], &rest)
}

const ADD_NORM: &str = "s = add r m ; y = layer_norm s w b ; out y ; out s";

/// Whole and partial tiles, several heads and one, few queries against many keys (which are split), one query.
const SIZES: [[usize; 5]; 9] = [
    [2, 3, 64, 64, 64],
    [1, 2, 127, 127, 40],
    [2, 2, 129, 129, 17],
    [1, 4, 17, 17, 8],
    [1, 3, 1, 700, 16],
    [2, 2, 3, 1500, 24],
    [1, 2, 40, 600, 32],
    [1, 2, 300, 300, 8],
    [2, 1, 33, 9, 8],
];

#[test]
fn add_and_norm() {
    for dtype in Dtype::FLOATS {
        for sizes in SIZES {
            check(&merged(sizes, "", "mask=causal", ADD_NORM), dtype);
        }
        check(&merged([2, 3, 65, 90, 20], "", "", "s = add r m ; y = rms_norm s w ; out y ; out s"), dtype);
    }
}

#[test]
fn pointwise_work() {
    for dtype in Dtype::FLOATS {
        for sizes in [SIZES[1], SIZES[4]] {
            check(&merged(sizes, "", "", "y = add m r ; out y"), dtype);
            check(&merged(sizes, "", "", "g = gelu m ; y = mul g r ; out y"), dtype);
        }
    }
}

#[test]
fn masks_and_dropout() {
    for dtype in Dtype::FLOATS {
        for [queries, keys] in [[70, 70], [5, 600], [2, 600]] {
            let mask = format!("x = input float[{queries},{keys}]");
            check(&merged([2, 2, queries, keys, 24], &mask, "x mask=additive", ADD_NORM), dtype);
            let both = format!("{mask} ; seed = input i32[]");
            check(&merged([1, 2, queries, keys, 24], &both, "x seed mask=additive p=0.3 offset=2", ADD_NORM), dtype);
            check(&merged([1, 2, queries, keys, 24], "seed = input i32[]", "seed mask=causal p=0.3", ADD_NORM), dtype);
        }
    }
}

#[test]
fn heads_that_share_keys() {
    for dtype in Dtype::FLOATS {
        for queries in [1, 50] {
            let text = format!(
                "q = input float[2,2,3,{queries},16] ; k1 = input float[2,2,1,70,16] ; v1 = input float[2,2,1,70,16]
k = broadcast k1 [2,2,3,70,16] ; v = broadcast v1 [2,2,3,70,16] ; r = input float[2,{queries},96] ; w = weight float[96]
a = attention q k v mask=causal ; t = transpose a [0,3,1,2,4] ; m = reshape t [2,{queries},96]
s = add m r ; y = rms_norm s w ; out y ; out s"
            );
            check(&text, dtype);
        }
    }
}

#[test]
fn heads_that_are_not_merged() {
    for dtype in Dtype::FLOATS {
        let text = "q = input float[2,3,50,16] ; k = input float[2,3,70,16] ; v = input float[2,3,70,16]
r = input float[2,3,50,16] ; w = weight float[16]
a = attention q k v mask=causal ; s = add a r ; y = rms_norm s w ; out y ; out s";
        check(text, dtype);
    }
}

/// What the kernel does not do stays apart, and right.
#[test]
fn what_stays_apart() {
    let engine = cpu(2, Isa::detect());
    for (text, wanted) in [
        // The merged result is handed out; its rows are not in the order of queries; they are summed over.
        ("s = add m r ; y = layer_norm s w b ; out y ; out m", 2),
        ("s = add m r ; c = column_sum s ; out c", 2),
        ("z = transpose m [1,0,2] ; r2 = transpose r [1,0,2] ; y = add z r2 ; out y", 2),
    ] {
        let graph: Graph = merged([2, 2, 30, 30, 8], "", "mask=causal", text).replace("float", "f32").parse().unwrap();
        let (inputs, expected) = seeded(&graph, 7);
        let session = ran(&engine, &graph, Strategy::Greedy, &inputs);
        assert!(session.plan().groups.len() >= wanted, "{text}: {:?}", kinds(&session));
        assert!(expected.verify(&graph, &outputs(&session)).unwrap().holds(), "{text}");
    }
}

/// NaN at a key that causality hides reaches no row before it, whatever the pieces.
#[test]
fn hidden_nan_stays_hidden() {
    for dtype in Dtype::FLOATS {
        let text = merged([1, 2, 150, 150, 16], "", "mask=causal", ADD_NORM).replace("float", &dtype.to_string());
        let graph: Graph = text.parse().unwrap();
        let mut inputs = seed::inputs(&graph, 3).unwrap();
        for operand in [1, 2] {
            set(&mut inputs[operand], 100 * 16 + 3, f32::NAN);
        }
        for isa in Isa::available() {
            let unfused = ran(&cpu(2, isa), &graph, Strategy::Unfused, &inputs);
            for threads in [1, 3, 16] {
                let fused = ran(&cpu(threads, isa), &graph, Strategy::Greedy, &inputs);
                let (one, other) = (outputs(&fused), outputs(&unfused));
                for (one, other) in one.iter().zip(&other) {
                    let (one, other) = (one.to_f32().unwrap(), other.to_f32().unwrap());
                    let same =
                        one.iter().zip(&other).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
                    assert!(same && one[..100 * 32].iter().all(|x| x.is_finite()), "{dtype} {}", isa.name());
                    assert!(one[100 * 32..].iter().any(|x| x.is_nan()));
                }
            }
        }
    }
}

#[test]
fn the_listing_says_what_it_does() {
    let graph: Graph = merged([1, 2, 30, 30, 8], "", "mask=causal", ADD_NORM).replace("float", "f32").parse().unwrap();
    let session = Session::new(&cpu(1, Isa::detect()), &graph, Strategy::Greedy).unwrap();
    let text = session.kernels()[0].source.to_string();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("causal attention by online softmax, heads of 8, f32 in and out, f32 sums"));
    assert_eq!(lines.next(), Some("rows of 2 heads side by side, while they (argument 1) are hot:"));
    assert!(lines.next().is_some_and(|line| line.starts_with("tile program, 16 columns")), "{text}");
}
