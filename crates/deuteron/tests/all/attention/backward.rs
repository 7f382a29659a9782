//! The gradient of attention as one kernel that computes scores again: its results against f64, and where it stays apart.

use deuteron::{
    Dtype, Engine, Graph, GroupKind, Isa, Session, Strategy, Tensor, attention_interior, differentiate, recompute, seed,
};

use super::{count, sized};
use crate::support::{assert_holds, bits, cpu, outputs, parsed, ran, seeded, set};

/// A graph and its gradients with respect to the inputs whose names start with a letter of `wrt`.
fn gradients(text: &str, dtype: Dtype, wrt: &str) -> Graph {
    let graph = parsed(text, dtype);
    let named =
        |id| graph.given_name(id).and_then(|name| name.chars().next()).is_some_and(|letter| wrt.contains(letter));
    let wrt: Vec<_> = graph.inputs().iter().copied().filter(|&id| named(id)).collect();
    let joint = differentiate(&graph, &wrt).unwrap();
    let again = attention_interior(&joint.graph, joint.first_backward);
    recompute(&joint.graph, joint.first_backward, &again).unwrap().graph
}

/// Forward and backward are one kernel each, right, with the same bits for any number of threads.
fn check(text: &str, dtype: Dtype) {
    let graph = gradients(text, dtype, "qkvx");
    let (inputs, expected) = seeded(&graph, 11);
    for isa in Isa::available() {
        let on = |threads: usize| cpu(threads, isa);
        let one = ran(&on(1), &graph, Strategy::Greedy, &inputs);
        assert_eq!(count(&one, GroupKind::Attention), 2, "{dtype} {}\n{text}\n{}", isa.name(), one.plan());
        assert_eq!(count(&one, GroupKind::Matmul), 0, "{dtype} {}\n{text}", isa.name());
        assert_holds(&expected, &graph, &outputs(&one), format_args!("{dtype} {}\n{text}", isa.name()));
        for threads in [2, 7] {
            let more = ran(&on(threads), &graph, Strategy::Unfused, &inputs);
            assert!(bits(&more) == bits(&one), "{dtype} {} {threads} threads: other bits\n{text}", isa.name());
        }
    }
    let fused = ran(&Engine::cpu(), &graph, Strategy::Fused, &inputs);
    assert_holds(&expected, &graph, &outputs(&fused), format_args!("{dtype}\n{text}"));
}

const SIZES: [[usize; 5]; 7] = [
    [2, 3, 64, 64, 64],
    [1, 2, 127, 127, 40],
    [2, 2, 129, 129, 17],
    [1, 1, 2, 2, 1],
    [2, 2, 1, 300, 16],
    [1, 2, 17, 600, 24],
    [1, 1, 33, 9, 8],
];

#[test]
fn causal_and_full() {
    for dtype in Dtype::FLOATS {
        for sizes in SIZES {
            check(&sized(sizes, "a = attention q k v mask=causal ; out a"), dtype);
            check(&sized(sizes, "a = attention q k v scale=0.3 ; out a"), dtype);
        }
    }
}

#[test]
fn masks_and_dropout() {
    for dtype in Dtype::FLOATS {
        for sizes @ [batch, _, queries, keys, _] in [SIZES[1], SIZES[5], SIZES[6]] {
            for mask in [format!("float[{queries},{keys}]"), format!("f32[{batch},1,1,{keys}]")] {
                let text = format!("m = input {mask} ; a = attention q k v m mask=additive ; out a");
                check(&sized(sizes, &text), dtype);
            }
            let text = "seed = input i32[] ; a = attention q k v seed mask=causal p=0.4 offset=9 ; out a";
            check(&sized(sizes, text), dtype);
        }
        let text = "seed = input i32[] ; m = input float[30,30]
a = attention q k v m seed mask=additive p=0.4 offset=9 ; out a";
        check(&sized([2, 3, 30, 30, 20], text), dtype);
    }
}

#[test]
fn views_and_shared_heads() {
    let views = "x = input float[2,67,288]
q1 = slice x axis=2 start=0 length=96 ; q4 = reshape q1 [2,67,4,24] ; q = transpose q4 [0,2,1,3]
k1 = slice x axis=2 start=96 length=96 ; k4 = reshape k1 [2,67,4,24] ; k = transpose k4 [0,2,1,3]
v1 = slice x axis=2 start=192 length=96 ; v4 = reshape v1 [2,67,4,24] ; v = transpose v4 [0,2,1,3]
a = attention q k v mask=causal
t = transpose a [0,2,1,3] ; y = reshape t [2,67,96]
out y";
    let grouped = "q = input float[2,2,3,50,16] ; k1 = input float[2,2,1,70,16] ; v1 = input float[2,2,1,70,16]
k = broadcast k1 [2,2,3,70,16] ; v = broadcast v1 [2,2,3,70,16]
a = attention q k v mask=causal ; out a";
    let one = "q = input float[9,8] ; a = attention q q q ; out a";
    for dtype in Dtype::FLOATS {
        [views, grouped, one].iter().for_each(|text| check(text, dtype));
        let graph = gradients(views, dtype, "x");
        let session = Session::new(&Engine::cpu(), &graph, Strategy::Greedy).unwrap();
        assert_eq!(count(&session, GroupKind::Copy), 0, "gradients are stored side by side\n{}", session.plan());
    }
}

/// Rows that see no key, or only keys that a mask hides, have no gradient; NaN that causality hides reaches nobody.
#[test]
fn hidden_rows_have_no_gradient() {
    let text = sized([1, 1, 20, 20, 8], "m = input float[20,20] ; a = attention q k v m mask=additive ; out a");
    let graph = gradients(&text, Dtype::F32, "qkv");
    let mut inputs = seed::inputs(&graph, 5).unwrap();
    let mask: Vec<f32> = (0..400).map(|at| if at < 40 { f32::NEG_INFINITY } else { 0.0 }).collect();
    inputs[3] = Tensor::from_f32(Dtype::F32, [20, 20], &mask).unwrap();
    let session = ran(&Engine::cpu(), &graph, Strategy::Unfused, &inputs);
    assert_eq!(count(&session, GroupKind::Attention), 2);
    let slopes = session.output(1).unwrap().to_f32().unwrap();
    assert!(slopes[..16].iter().all(|&x| x == 0.0) && slopes[16..].iter().all(|&x| x.is_finite() && x != 0.0));

    let graph = gradients(&sized([1, 1, 70, 70, 8], "a = attention q k v mask=causal ; out a"), Dtype::F32, "qkv");
    let mut inputs = seed::inputs(&graph, 5).unwrap();
    set(&mut inputs[2], 50 * 8, f32::NAN);
    let session = ran(&Engine::cpu(), &graph, Strategy::Unfused, &inputs);
    let slopes = session.output(1).unwrap().to_f32().unwrap();
    assert!(slopes[..50 * 8].iter().all(|x| x.is_finite()) && slopes[50 * 8..].iter().any(|x| x.is_nan()));
}

/// A gradient of the mask, not all three gradients, or a single key is not the kernel's: parts, and right.
#[test]
fn what_stays_apart() {
    let single = "k1 = input float[1,2,1,8] ; v1 = input float[1,2,1,8] ; a = attention q k1 v1 ; out a";
    for (rest, wrt) in [
        (single, "qkv"),
        ("m = input float[20,20] ; a = attention q k v m mask=additive ; out a", "qkvm"),
        ("a = attention q k v mask=causal ; out a", "q"),
        ("a = attention q k v mask=causal ; out a", "kv"),
    ] {
        let graph = gradients(&sized([1, 2, 20, 20, 8], rest), Dtype::F32, wrt);
        let (inputs, expected) = seeded(&graph, 11);
        for strategy in [Strategy::Greedy, Strategy::Fused] {
            let session = ran(&Engine::cpu(), &graph, strategy, &inputs);
            assert!(expected.verify(&graph, &outputs(&session)).unwrap().holds(), "{strategy} {wrt}");
            assert!(count(&session, GroupKind::Attention) <= 1, "{strategy} {wrt}");
        }
    }
}

#[test]
fn the_listing_says_what_it_does() {
    let graph = gradients(&sized([1, 2, 20, 20, 8], "a = attention q k v mask=causal ; out a"), Dtype::F32, "qkv");
    let session = Session::new(&Engine::cpu(), &graph, Strategy::Greedy).unwrap();
    let text = session.kernels()[1].source.to_string();
    assert_eq!(
        text,
        "gradients of causal attention by online softmax, heads of 8, f32 in and out, f32 sums, scores computed again\n"
    );
}

/// Rows whose keys are all masked by so much that no digits are left for the scores are the mean of the values: their gradients are those of the mean.
#[test]
fn gradients_of_rows_that_are_masked_deeply_are_those_of_the_mean() {
    const N: usize = 40;
    const WIDTH: usize = 16;
    let text = "q = input f32[40,16] ; k = input f32[40,16] ; v = input f32[40,16] ; m = input f32[40,40]
a = attention q k v m mask=additive scale=0.3 ; out a";
    let graph = gradients(text, Dtype::F32, "qkv");
    let mut inputs = seed::inputs(&graph, 7).unwrap();
    let name = |at: usize| graph.given_name(graph.inputs()[at]);
    let of = |wanted: &str| (0..inputs.len()).find(|&at| name(at) == Some(wanted)).unwrap();
    let (mask, named) = (of("m"), ["q", "k", "v"].map(of));
    let slope = (0..inputs.len()).find(|at| *at != mask && !named.contains(at)).unwrap();
    let values = |at: usize| -> Vec<f64> { inputs[at].to_f32().unwrap().into_iter().map(f64::from).collect() };
    let [q, k, v] = named.map(values);
    let slope = values(slope);
    let dot = |a: &[f64], i: usize, b: &[f64], j: usize| -> f64 {
        (0..WIDTH).map(|d| a[i * WIDTH + d] * b[j * WIDTH + d]).sum()
    };
    let mut expected = [(); 3].map(|()| vec![0.0; N * WIDTH]);
    for i in 0..N {
        let mean = (0..N).map(|j| dot(&slope, i, &v, j)).sum::<f64>() / N as f64;
        for j in 0..N {
            let of_score = 0.3 * (dot(&slope, i, &v, j) - mean) / N as f64;
            for d in 0..WIDTH {
                expected[0][i * WIDTH + d] += of_score * k[j * WIDTH + d];
                expected[1][j * WIDTH + d] += of_score * q[i * WIDTH + d];
                expected[2][j * WIDTH + d] += slope[i * WIDTH + d] / N as f64;
            }
        }
    }
    for hidden in [-1e9, -744_843_904.0, -855_220_224_000.0, -1e30, f32::MIN / 1.5, f32::MIN] {
        inputs[mask] = Tensor::from_f32(Dtype::F32, [N, N], &vec![hidden; N * N]).unwrap();
        let results = outputs(&ran(&Engine::cpu(), &graph, Strategy::Greedy, &inputs));
        assert_eq!(results.len(), 4);
        for (gradient, expected) in results[1..].iter().zip(&expected) {
            // Some roundings of sums of N terms, or of WIDTH, that are at most as large as the largest element is without cancelling.
            let largest = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
            let bound = 64.0 * f64::from(f32::EPSILON) * largest;
            for (got, want) in gradient.to_f32().unwrap().into_iter().zip(expected) {
                assert!(
                    (f64::from(got) - want).abs() <= bound,
                    "masked by {hidden}: {got} for {want} within {bound:e}"
                );
            }
        }
    }
}
