//! The text form: printing and parsing are inverse, mistakes are errors with their place, no text panics.

use std::time::{Duration, Instant};

use deuteron_graph::{BinaryOp, Dtype, Graph, GraphError, Mask, Quantized, differentiate, extract};
use deuteron_testkit::fixtures::{CACHE, GRAPHS, MALFORMED};
use deuteron_testkit::fuzz;

fn round_trip(graph: &Graph) {
    graph.verify().unwrap();
    let printed = graph.to_string();
    let again: Graph = printed.parse().unwrap_or_else(|error| panic!("{error}\n{printed}"));
    assert_eq!(&again, graph, "{printed}");
}

#[test]
fn printing_and_parsing_are_inverse() {
    for text in GRAPHS.into_iter().chain([CACHE]) {
        let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        round_trip(&graph);
    }
}

#[test]
fn gradients_and_parts_of_them_round_trip() {
    for text in GRAPHS {
        let graph: Graph = text.parse().unwrap();
        let wrt: Vec<_> = graph.inputs().iter().filter(|&&id| graph.node(id).dtype.is_float()).copied().collect();
        let joint = differentiate(&graph, &wrt).unwrap();
        round_trip(&joint.graph);
        let outputs = joint.graph.outputs()[graph.outputs().len()..].to_vec();
        round_trip(&extract(&joint.graph, &outputs, joint.graph.inputs()).unwrap());
    }
}

#[test]
fn the_text_of_a_graph_is_what_a_person_would_write() {
    let mut graph = Graph::new("block");
    let x = graph.input("x", Dtype::Bf16, [2, 3]).unwrap();
    let w = graph.weight("w", Dtype::Bf16, [3]).unwrap();
    let normed = graph.rms_norm(x, w, 1e-5).unwrap();
    let y = graph.add(normed.y, x).unwrap();
    graph.output("y", y).unwrap();
    let expected = "graph block
x = input bf16[2,3]
w = weight bf16[3]
%11, %7 = rms_norm x w eps=1e-5
%12 = add %11 x
out y=%12
";
    assert_eq!(graph.to_string(), expected);
}

#[test]
fn a_scale_that_is_not_written_is_one_over_the_root_of_the_features() {
    let graph = |scale: &str| -> Graph {
        let operands = "q = input f32[1,2,4,16] ; k = input f32[1,2,4,16] ; v = input f32[1,2,4,16]";
        format!("{operands} ; y = attention q k v {scale} ; s = attention_scores q k {scale} ; out y s")
            .parse()
            .unwrap()
    };
    assert_eq!(graph(""), graph("scale=0.25"));
}

#[test]
fn mistakes_are_errors_that_say_what_was_expected() {
    for (text, word) in MALFORMED {
        match text.parse::<Graph>() {
            Ok(_) => panic!("accepted: {text}"),
            Err(error @ GraphError::Parse { .. }) => {
                assert!(error.to_string().contains(word), "`{text}` gave: {error}; expected it to say: {word}");
            }
            Err(error) => panic!("`{text}` gave an error without a place: {error:?}"),
        }
    }
}

#[test]
fn errors_name_the_place() {
    let error = "x = input f32[2,3]\n  y = add x z".parse::<Graph>().unwrap_err();
    assert_eq!(error.to_string(), "line 2, column 13: unknown value `z`; values are defined before they are used");
}

#[test]
fn builder_errors_name_the_op_the_operands_and_the_shapes() {
    let mut graph = Graph::new("errors");
    let x = graph.input("x", Dtype::F32, [2, 3]).unwrap();
    let r = graph.input("r", Dtype::F32, [4]).unwrap();
    let before = graph.clone();
    let error = graph.add(x, r).unwrap_err();
    assert_eq!(error.to_string(), "add: expected shapes that broadcast (equal sizes, or 1), got x f32[2,3], r f32[4]");
    let error = "x = input f32[2,3] ; h = input f16[2,3] ; y = add x h ; out y".parse::<Graph>().unwrap_err();
    assert!(error.to_string().contains("operands of one dtype (cast one of them)"), "{error}");
    let error = graph.layer_norm(x, r, r, 1e-5).unwrap_err();
    assert_eq!(
        error.to_string(),
        "layer_norm: expected weights of the size of the last axis, got x f32[2,3], r f32[4], r f32[4]"
    );
    assert!(graph.attention(x, x, r, Mask::Causal, 1.0).is_err());
    let error = graph.dropout(x, r, 1.0, 0).unwrap_err();
    assert_eq!(error.to_string(), "dropout: p must be in [0, 1), got 1");
    assert_eq!(graph, before, "an error leaves the graph as it was");
}

#[test]
fn integers_are_added_and_multiplied_but_not_divided() {
    let mut graph = Graph::new("integers");
    let (a, b) = (graph.input("a", Dtype::I32, [3, 5]).unwrap(), graph.input("b", Dtype::I32, [3, 1]).unwrap());
    let x = graph.input("x", Dtype::F32, [3, 5]).unwrap();
    let mut all = a;
    for op in [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Max, BinaryOp::Min] {
        all = graph.binary(op, all, b).unwrap();
        assert_eq!((graph.node(all).dtype, &graph.node(all).shape[..]), (Dtype::I32, &[3, 5][..]));
    }
    assert!(graph.binary(BinaryOp::Div, a, b).unwrap_err().to_string().contains("float operands"));
    assert!(graph.binary(BinaryOp::Add, a, x).unwrap_err().to_string().contains("operands of one dtype"));
    let bytes = graph.input("bytes", Dtype::I8, [3, 5]).unwrap();
    assert!(graph.binary(BinaryOp::Add, bytes, bytes).unwrap_err().to_string().contains("float or i32 operands"));
    let whole = graph.cast(x, Dtype::I32).unwrap();
    let picks = graph.reshape(all, [15]).unwrap();
    let rows = graph.gather(whole, picks).unwrap();
    assert_eq!((graph.node(rows).dtype, &graph.node(rows).shape[..]), (Dtype::I32, &[15, 5][..]));
    graph.output("rows", rows).unwrap();
    round_trip(&graph);
    // No gradient passes through integers: that of a float before them is zeros, whatever comes in.
    let made = differentiate(&graph, &[x]).unwrap();
    assert!(made.seeds.is_empty() && made.gradients.len() == 1 && made.gradients[0].0 == x);
}

#[test]
fn products_of_bytes_are_floats_and_have_no_gradient() {
    let mut graph = Graph::new("bytes");
    let x = graph.input("x", Dtype::F32, [3, 70]).unwrap();
    let x = graph.quantize_int8(x).unwrap();
    let (q, scale) =
        (graph.weight("w", Dtype::I8, [5, 70]).unwrap(), graph.weight("w_scale", Dtype::F32, [5]).unwrap());
    let sums = graph.matmul_transposed(x.q, q, false, true).unwrap();
    assert_eq!(graph.node(sums).dtype, Dtype::F32);
    let y = graph.quantized_linear(x, Quantized { q, scale }, None, Dtype::Bf16).unwrap();
    graph.output("y", y).unwrap();
    round_trip(&graph);
    assert!(differentiate(&graph, &[scale]).is_ok(), "nothing flows through the bytes");
    let input = graph.inputs()[0];
    assert!(matches!(differentiate(&graph, &[input]), Err(GraphError::NoGradient { .. })));
    let error = graph.quantized_linear(x, Quantized { q, scale: x.scale }, None, Dtype::F32).unwrap_err();
    assert!(error.to_string().contains("scales and a bias of the weight's outer size"), "{error}");
    let float = graph.input("f", Dtype::F32, [3, 70]).unwrap();
    assert!(graph.matmul_transposed(float, q, false, true).is_err());
    for (inner, fits) in [((1 << 17) - 1, true), (1 << 17, false)] {
        let a = graph.input(&format!("a{inner}"), Dtype::I8, [1, inner]).unwrap();
        assert_eq!(graph.matmul_transposed(a, a, false, true).is_ok(), fits);
    }
}

/// A bounded run of what cargo-fuzz does without bounds.
/// Keys and values may be narrower than the queries, both alike; a gradient of theirs is as narrow.
#[test]
fn an_additive_mask_is_of_floats() {
    for mask in ["bool", "i32", "i8"] {
        for op in ["a = attention q q q m mask=additive", "a = attention_scores q q m mask=additive"] {
            let text = format!("q = input f32[2,3,4,8] ; m = input {mask}[4,4]\n{op} ; out a");
            let error = text.parse::<Graph>().unwrap_err().to_string();
            assert!(error.contains("expected a float mask"), "{error}");
        }
    }
}

#[test]
fn attention_takes_narrow_keys_and_values() {
    let text = |q: &str, k: &str, v: &str| {
        format!("q = input {q}[2,3,4,8] ; k = input {k}[2,3,5,8] ; v = input {v}[2,3,5,8]\na = attention q k v ; out a")
    };
    for narrow in ["bf16", "f16"] {
        let graph: Graph = text("f32", narrow, narrow).parse().unwrap();
        round_trip(&graph);
        assert_eq!(graph.node(graph.outputs()[0].node).dtype, Dtype::F32);
        let joint = differentiate(&graph, graph.inputs()).unwrap();
        let dtypes = joint.gradients.iter().map(|&(_, gradient)| joint.graph.node(gradient).dtype.to_string());
        assert_eq!(dtypes.collect::<Vec<_>>(), ["f32", narrow, narrow]);
    }
    for (q, k, v) in [("f32", "bf16", "f16"), ("f32", "bf16", "f32"), ("bf16", "f32", "f32"), ("f16", "bf16", "bf16")] {
        let error = text(q, k, v).parse::<Graph>().unwrap_err().to_string();
        assert!(error.contains("f32 queries over 16-bit keys and values"), "{error}");
    }
}

#[test]
fn no_text_panics() {
    let corpus: Vec<&str> = GRAPHS.into_iter().chain(MALFORMED.map(|(text, _)| text)).collect();
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut accepted = 0;
    for seed in 0..200_000 {
        accepted += fuzz::text_graph(&fuzz::mutate(&corpus, seed)) as usize;
        if Instant::now() > deadline {
            break;
        }
    }
    assert!(accepted > 100, "the mutations are too wild to test what is accepted: {accepted}");
}

/// Operands of attention with all work on its scores.
const WORKED: &str =
    "q = input f32[2,3,4,8] ; k = input f32[2,3,5,8] ; s = input f32[3,1,1] ; b = input bf16[4,5] ; d = input i32[2,5]
m = input f32[4,5] ; p = input i32[2] ; f = input f32[5]";

#[test]
fn work_on_scores_reads_as_it_is_written() {
    for (operands, work) in [
        ("", "mask=full soft_cap=30.0"),
        ("", "mask=causal window=128"),
        ("s", "mask=causal with=slopes"),
        ("s b d", "mask=causal soft_cap=2.5 window=3 with=slopes+bias+documents"),
        ("m d", "mask=additive with=documents"),
        ("p b", "mask=cached window=2 with=bias"),
    ] {
        let text = format!("{WORKED}\na = attention q k k {operands} {work} scale=0.5 ; out a");
        let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        round_trip(&graph);
        let words = work.split_once(' ').map_or("", |(_, words)| words);
        assert!(graph.to_string().contains(&format!(" p=0.0 offset=0 {words}").trim_end().to_string()), "{graph}");
        let wrt: Vec<_> = graph.inputs().iter().filter(|&&id| graph.node(id).dtype.is_float()).copied().collect();
        round_trip(&differentiate(&graph, &wrt[..2]).unwrap().graph);
    }
    // No queries are of no document.
    let empty =
        "q = input f32[2,0,8] ; k = input f32[2,5,8] ; d = input i32[5]\na = attention q k k d with=documents ; out a";
    round_trip(&empty.parse().unwrap());
}

#[test]
fn mistakes_in_work_on_scores_say_what_was_expected() {
    for (line, hint) in [
        ("attention q k k soft_cap=0.0", "soft_cap must be positive"),
        ("attention q k k soft_cap=inf", "soft_cap must be positive"),
        ("attention q k k window=0", "window must be at least 1"),
        ("attention q k k window=16777217", "window must be at most 2^24"),
        ("attention q k k window=-1", "expected a whole number for window"),
        ("attention q k k s with=slope", "expected with=slopes, with=bias, with=documents"),
        ("attention q k k s s with=slopes+slopes", "expected slopes once"),
        ("attention q k k with=slopes", "expected 4 operands"),
        ("attention q k k f with=slopes", "expected f32 slopes [heads, 1, 1]"),
        ("attention q k k b with=slopes", "expected f32 slopes [heads, 1, 1]"),
        ("attention q k k d with=bias", "expected a float bias"),
        ("attention q k k s with=documents", "expected an i32 document for each key"),
        ("attention q k k p with=documents", "expected an i32 document for each key"),
        ("attention q k k m b mask=additive with=bias", "mask must be full, causal or cached beside a bias"),
        ("attention q k k p d mask=cached with=documents", "mask must be full, causal or additive beside documents"),
        ("attention_scores q k window=3", "no such attribute"),
    ] {
        let error = format!("{WORKED}\na = {line} ; out a").parse::<Graph>().unwrap_err().to_string();
        assert!(error.contains(hint), "{line}: {error}");
    }
    let few =
        "q = input f32[2,6,8] ; k = input f32[2,5,8] ; d = input i32[5]\na = attention q k k d with=documents ; out a";
    let error = few.parse::<Graph>().unwrap_err().to_string();
    assert!(error.contains("at most as many queries as keys"), "{error}");
}
