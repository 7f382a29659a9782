//! Work on the scores of attention: one kernel forward and one backward, by every strategy what f64 gives.

use deuteron::{
    Dtype, Graph, GroupKind, Isa, NodeId, Session, Strategy, Tensor, attention_interior, differentiate, recompute, seed,
};

use deuteron_codegen::cuda::Arch;
use deuteron_kernels::CudaCatalog;
use deuteron_plan::{Machine, Target, plan};

use super::count;
use crate::support::{assert_holds, bits, cpu, expected, outputs, parsed, ran};

/// Every work alone, and together.
const WORK: [(&str, &str); 8] = [
    ("", "soft_cap=1.5"),
    ("", "window=5"),
    ("s", "with=slopes"),
    ("b", "with=bias"),
    ("d", "with=documents"),
    ("", "soft_cap=0.9 window=70"),
    ("d", "window=64 with=documents"),
    ("s b d", "soft_cap=2.0 window=90 with=slopes+bias+documents"),
];

const SIZES: [[usize; 5]; 6] = [
    [2, 3, 64, 64, 64],
    [1, 2, 130, 130, 40],
    [2, 2, 1, 300, 16],
    [1, 2, 17, 600, 24],
    [1, 1, 33, 40, 8],
    [2, 1, 3, 3, 1],
];

/// Attention of these sizes, with inputs for all that work may take.
fn text([batch, heads, queries, keys, width]: [usize; 5], mask: &str, (operands, work): (&str, &str)) -> String {
    let positions = if mask == "cached" { "p" } else { "" };
    format!(
        "q = input float[{batch},{heads},{queries},{width}]
k = input float[{batch},{heads},{keys},{width}] ; v = input float[{batch},{heads},{keys},{width}]
s = weight f32[{heads},1,1] ; b = input float[{heads},{queries},{keys}] ; d = input i32[{batch},{keys}]
p = input i32[{batch}]
a = attention q k v {positions} {operands} mask={mask} {work} ; out a"
    )
}

/// Inputs from a seed; documents follow one another, and positions are within the keys.
fn inputs(graph: &Graph, [batch, _, queries, keys, _]: [usize; 5]) -> Vec<Tensor> {
    let mut inputs = seed::inputs(graph, 11).unwrap();
    for (position, &id) in graph.inputs().iter().enumerate() {
        let values: Option<(Vec<usize>, Vec<i32>)> = match graph.given_name(id) {
            Some("d") => {
                let documents = (0..batch * keys).map(|at| ((at % keys) * (3 + at / keys) / keys) as i32 * 7 - 3);
                Some((vec![batch, keys], documents.collect()))
            }
            Some("p") => {
                let last = keys.saturating_sub(queries) as i32;
                Some((vec![batch], (0..batch as i32).map(|sequence| last - 2 * sequence).collect()))
            }
            _ => None,
        };
        if let Some((shape, values)) = values {
            inputs[position] = Tensor::from_i32(shape, &values).unwrap();
        }
    }
    inputs
}

fn named(graph: &Graph, names: &str) -> Vec<NodeId> {
    let is_named = |&id: &NodeId| graph.given_name(id).is_some_and(|name| names.contains(name));
    graph.inputs().iter().copied().filter(is_named).collect()
}

#[test]
fn forward_is_one_kernel() {
    let mut dtypes = Dtype::FLOATS.into_iter().cycle();
    for work in WORK {
        for sizes in SIZES {
            for mask in ["full", "causal", "cached"] {
                if mask == "cached" && work.0.contains('d') {
                    continue;
                }
                let dtype = dtypes.next().unwrap();
                let text = text(sizes, mask, work);
                let graph = parsed(&text, dtype);
                let inputs = inputs(&graph, sizes);
                let expected = expected(&graph, &inputs);
                for strategy in [Strategy::Naive, Strategy::Greedy, Strategy::Fused] {
                    let session = ran(&cpu(2, Isa::detect()), &graph, strategy, &inputs);
                    assert_holds(&expected, &graph, &outputs(&session), format_args!("{dtype} {strategy}\n{text}"));
                    if strategy == Strategy::Greedy {
                        assert_eq!(count(&session, GroupKind::Attention), 1, "{dtype}\n{text}\n{}", session.plan());
                        assert_eq!(session.plan().groups.len(), 1, "{dtype}\n{text}");
                    }
                }
            }
        }
    }
}

/// Forward and backward are one kernel each; a graph of the gradient alone has no forward call to look at.
#[test]
fn gradients_are_one_kernel() {
    for (turn, work) in WORK.into_iter().enumerate() {
        for (at, sizes) in SIZES.into_iter().enumerate() {
            // Masks and types take turns.
            let (mask, dtype) = (["full", "causal"][(turn + at) % 2], Dtype::FLOATS[(turn + at) % 3]);
            let text = text(sizes, mask, work);
            let graph = parsed(&text, dtype);
            let joint = differentiate(&graph, &named(&graph, "qkv")).unwrap();
            let again = attention_interior(&joint.graph, joint.first_backward);
            let graph = recompute(&joint.graph, joint.first_backward, &again).unwrap().graph;
            let inputs = inputs(&graph, sizes);
            let expected = expected(&graph, &inputs);
            let one = ran(&cpu(1, Isa::detect()), &graph, Strategy::Greedy, &inputs);
            assert_eq!(count(&one, GroupKind::Attention), 2, "{dtype}\n{text}\n{}", one.plan());
            assert_eq!(count(&one, GroupKind::Matmul), 0, "{dtype}\n{text}\n{}", one.plan());
            assert_holds(&expected, &graph, &outputs(&one), format_args!("{dtype}\n{text}"));
            let more = ran(&cpu(3, Isa::detect()), &graph, Strategy::Unfused, &inputs);
            assert!(bits(&more) == bits(&one), "{dtype} 3 threads: other bits\n{text}");
        }
    }
}

/// Gradients of the work's own operands are parts, and right.
#[test]
fn slopes_and_a_bias_have_gradients_too() {
    let sizes = [2, 2, 20, 24, 8];
    let text = text(sizes, "causal", WORK[7]);
    let graph = parsed(&text, Dtype::F32);
    let graph = differentiate(&graph, &named(&graph, "qkvsb")).unwrap().graph;
    let inputs = inputs(&graph, sizes);
    let expected = expected(&graph, &inputs);
    for strategy in [Strategy::Naive, Strategy::Greedy, Strategy::Fused] {
        let session = ran(&cpu(2, Isa::detect()), &graph, strategy, &inputs);
        assert_holds(&expected, &graph, &outputs(&session), format_args!("{strategy}\n{text}"));
    }
}

/// Heads that share keys, row work on the result, and documents of all sequences alike.
#[test]
fn with_shared_heads_and_row_work() {
    let text = "q = input float[2,2,3,70,16] ; k1 = input float[2,2,1,70,16] ; v1 = input float[2,2,1,70,16]
k = broadcast k1 [2,2,3,70,16] ; v = broadcast v1 [2,2,3,70,16]
s = weight f32[6,1,1] ; s5 = reshape s [2,3,1,1] ; d = input i32[70]
a = attention q k v s5 d mask=causal soft_cap=3.0 window=30 with=slopes+documents
t = transpose a [0,3,1,2,4] ; m = reshape t [2,70,96] ; r = input float[2,70,96] ; y = add m r ; out y";
    for dtype in Dtype::FLOATS {
        let graph = parsed(text, dtype);
        let inputs = inputs(&graph, [1, 6, 70, 70, 16]);
        let inputs: Vec<Tensor> = inputs
            .into_iter()
            .zip(graph.inputs())
            .map(|(tensor, &id)| {
                let documents: Vec<i32> = (0..70).map(|key| key / 25).collect();
                if graph.given_name(id) == Some("d") { Tensor::from_i32([70], &documents).unwrap() } else { tensor }
            })
            .collect();
        let expected = expected(&graph, &inputs);
        for strategy in [Strategy::Naive, Strategy::Unfused, Strategy::Greedy] {
            let session = ran(&cpu(2, Isa::detect()), &graph, strategy, &inputs);
            assert_holds(&expected, &graph, &outputs(&session), format_args!("{dtype} {strategy}\n{text}"));
            if strategy == Strategy::Greedy {
                assert_eq!(session.plan().groups.len(), 1, "{}", session.plan());
            }
        }
    }
}

#[test]
fn the_listing_says_what_is_done_to_scores() {
    let graph = parsed(&text([1, 2, 20, 20, 8], "causal", WORK[7]), Dtype::F32);
    let session = Session::new(&cpu(1, Isa::detect()), &graph, Strategy::Greedy).unwrap();
    assert_eq!(
        session.kernels()[0].source.to_string(),
        "causal attention by online softmax, heads of 8, scores below 2, slopes, a bias, documents, a window of 90, f32 in and out, f32 sums\n"
    );
}

/// Kernels for GPUs do not know work on scores: they take none of it, and what runs is its parts.
#[test]
fn on_a_gpu_it_is_parts() {
    let machine = Machine::profile("h200").unwrap();
    for work in WORK {
        let text = text([2, 3, 64, 64, 64], "causal", work);
        let graph = parsed(&text, Dtype::Bf16);
        let joint = differentiate(&graph, &named(&graph, "qkv")).unwrap().graph;
        for arch in [Arch::Sm75, Arch::Sm80, Arch::Sm90a] {
            let target = Target { machine: &machine, catalog: CudaCatalog::of(arch) };
            for graph in [&graph, &joint] {
                let plan = plan(graph, target, Strategy::Greedy, &[]).unwrap();
                let attends = plan.groups.iter().filter(|group| group.kind == GroupKind::Attention).count();
                assert_eq!(attends, 0, "{arch:?}\n{text}\n{plan}");
                assert!(plan.groups.iter().any(|group| group.kind == GroupKind::Matmul), "{arch:?}\n{text}\n{plan}");
            }
        }
    }
}
