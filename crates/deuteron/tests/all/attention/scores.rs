//! Work on the scores of attention: one kernel forward and one backward, by every strategy what f64 gives.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;

use deuteron::emulate::{Choice, Toolchain, emulate};
use deuteron::{
    Dtype, Graph, GroupKind, Isa, NodeId, Session, Strategy, Tensor, attention_interior, differentiate, recompute, seed,
};

use deuteron_codegen::Source;
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_kernels::{Backend, CudaCatalog, render};
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
    let mut dtypes = Dtype::FLOATS.into_iter().cycle();
    for work in WORK {
        for sizes in SIZES {
            for mask in ["full", "causal"] {
                let dtype = dtypes.next().unwrap();
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

/// On GPUs too it is one kernel forward and one backward, but not with row work behind it.
#[test]
fn on_a_gpu_it_is_one_kernel() {
    let machine = Machine::profile("h200").unwrap();
    for work in WORK {
        let text = text([2, 3, 64, 64, 64], "causal", work);
        let graph = parsed(&text, Dtype::Bf16);
        let joint = differentiate(&graph, &named(&graph, "qkv")).unwrap();
        let again = attention_interior(&joint.graph, joint.first_backward);
        let joint = recompute(&joint.graph, joint.first_backward, &again).unwrap().graph;
        for arch in [Arch::Sm75, Arch::Sm80, Arch::Sm90a] {
            let target = Target { machine: &machine, catalog: CudaCatalog::of(arch) };
            for (graph, kernels) in [(&graph, 1), (&joint, 2)] {
                let plan = plan(graph, target, Strategy::Greedy, &[]).unwrap();
                assert_eq!(plan.groups.len(), kernels, "{arch:?}\n{text}\n{plan}");
                assert!(plan.groups.iter().all(|group| group.kind == GroupKind::Attention), "{arch:?}\n{text}\n{plan}");
            }
        }
    }
}

/// The kernels for GPUs, in `f32` arithmetic and on the matrix units, on the emulator: results and gradients.
#[test]
fn on_the_emulator_kernels_for_gpus_agree_with_the_reference() {
    let Some((toolchain, folder)) = toolchain("scores") else { return };
    // On the matrix units and in f32 arithmetic, by turns causal and full: a text takes some seconds to compile.
    let cases = [[("full", Dtype::Bf16), ("causal", Dtype::F32)], [("full", Dtype::F32), ("causal", Dtype::F16)]];
    let next = Mutex::new(WORK.iter().enumerate().flat_map(|(at, work)| cases[at % 2].map(|case| (at, *work, case))));
    let run = || {
        loop {
            let Some((at, work, (mask, dtype))) = next.lock().unwrap().next() else { return };
            // Several tiles, the last of which are parts, and fewer queries than keys.
            let sizes = [[1, 2, 70, 200, 16], [2, 1, 130, 140, 32]][at % 2];
            let text = in_order(&text(sizes, mask, work), sizes);
            let graph = parsed(&text, dtype);
            let joint = differentiate(&graph, &named(&graph, "qkv")).unwrap();
            let again = attention_interior(&joint.graph, joint.first_backward);
            let joint = recompute(&joint.graph, joint.first_backward, &again).unwrap().graph;
            let folder = folder.join(format!("{at}_{mask}_{dtype}"));
            let ran = emulate(&toolchain, &folder, &joint, Strategy::Greedy, &Choice::default(), 1);
            let ran = ran.unwrap_or_else(|error| panic!("{dtype}\n{text}\n{error}"));
            assert!(ran.verification.holds(), "{dtype}\n{text}\n{:?}", ran.verification.worst());
        }
    };
    thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(run))));
}

/// The same with three documents that follow one another, made by the graph: inputs from a seed are in no order.
fn in_order(text: &str, [batch, _, _, keys, _]: [usize; 5]) -> String {
    let mut made = format!("i = iota [{batch},{keys}] axis=1");
    for (document, length) in [keys / 2, keys / 4, keys - keys / 2 - keys / 4].into_iter().enumerate() {
        made += &format!(" ; one{document} = slice i axis=1 start={document} length=1");
        made += &format!(" ; all{document} = broadcast one{document} [{batch},{length}]");
    }
    text.replace(&format!("d = input i32[{batch},{keys}]"), &(made + " ; d = concat all0 all1 all2 axis=1"))
}

/// Mistakes in the text of a kernel show.
#[test]
fn mistakes_in_kernels_for_gpus_are_caught() {
    let Some((toolchain, folder)) = toolchain("score_mistakes") else { return };
    let sizes = [1, 2, 70, 200, 16];
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    for (turn, (work, right, wrong)) in [
        (0, "s = CAP * tanhf(s * (1.0f / CAP));", "s = CAP * tanhf(s);"),
        (1, "distance <= -WINDOW", "distance < -WINDOW"),
        (2, "(float)(key - last - query)", "(float)(key / 2 - last - query)"),
        (3, "g_mask[", "g_mask[1 + "),
        (4, "!= document(p, sequence, head, last + query)", "!= document(p, sequence, head, query)"),
        (1, "return bounded_key(p, last + query + 1 - WINDOW);", "return bounded_key(p, last + query + 64 - WINDOW);"),
    ]
    .into_iter()
    .enumerate()
    {
        let dtype = [Dtype::F32, Dtype::Bf16][turn % 2];
        let graph = parsed(&text(sizes, "causal", WORK[work]), dtype);
        let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
        let backend = Backend::Cuda(CudaTarget::new(Arch::Sm90a, 132));
        let kernel = render(plan.groups[0].draft(&graph, &plan.placement), &backend).unwrap();
        let Source::Cuda(source) = kernel.source else { panic!("{}", kernel.source) };
        assert!(source.text.contains(right), "{right}");
        for (kind, text) in [("right", source.text.clone()), ("wrong", source.text.replace(right, wrong))] {
            let folder = folder.join(format!("{turn}_{kind}"));
            let choice = Choice { rung: None, text: Some(text) };
            let ran = emulate(&toolchain, &folder, &graph, Strategy::Greedy, &choice, 1);
            let held = ran.as_ref().is_ok_and(|ran| ran.verification.holds());
            assert_eq!(held, kind == "right", "{dtype} {kind} {right}: {:?}", ran.err());
        }
    }
}

/// A compiler for the emulator and a folder, if there is one.
fn toolchain(name: &str) -> Option<(Toolchain, PathBuf)> {
    let Ok(found) = Toolchain::find(&std::env::var("CXX").unwrap_or_else(|_| "c++".into())) else {
        let _ = std::io::stderr().write_all(b"skipped: no C++ compiler\n");
        return None;
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    Some((found.prepared(&folder.join("prepared")).unwrap(), folder))
}
