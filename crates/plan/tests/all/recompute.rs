//! Store or recompute: what is chosen and why, and that results stay the same to the bit.

use std::time::Duration;

use deuteron_graph::{
    Differentiated, Dtype, Gelu, Graph, Mask, NodeId, Op, ReduceOp, differentiate, first_backward, recompute,
};
use deuteron_plan::{Bytes, Passed, Recompute, Saving, store_or_recompute, stored_when_fused};
use deuteron_reference::{Array, Generator, Rounding, interpret, random_case};
use deuteron_testkit::effort::cpu_time;

const BOTH: [Saving; 2] = [Saving::Traffic, Saving::Memory];

fn with_gradients(forward: &Graph) -> Differentiated {
    let is_float = |id: &&NodeId| forward.node(**id).dtype.is_float();
    let wrt: Vec<NodeId> = forward.inputs().iter().filter(is_float).copied().collect();
    differentiate(forward, &wrt).unwrap()
}

fn parsed(text: &str) -> Graph {
    text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The choice where forward fuses all it can.
fn fused(joint: &Differentiated, saving: Saving) -> Recompute {
    let stored = stored_when_fused(&joint.graph, joint.first_backward);
    store_or_recompute(&joint.graph, joint.first_backward, &|id| stored[id.index()], saving)
}

/// The choice where forward writes every value that a kernel makes.
fn unfused(joint: &Differentiated, saving: Saving) -> Recompute {
    let is_inline =
        |op: &Op| matches!(op, Op::View(_) | Op::StopGradient | Op::Const { .. } | Op::Iota { .. } | Op::Random { .. });
    let is_made = |id: NodeId| !is_inline(&joint.graph.node(id).op);
    store_or_recompute(&joint.graph, joint.first_backward, &is_made, saving)
}

fn labels(graph: &Graph, ids: impl IntoIterator<Item = NodeId>) -> Vec<String> {
    ids.into_iter().map(|id| graph.label(id)).collect()
}

fn calls(graph: &Graph, ids: &[NodeId]) -> Vec<String> {
    let mut names: Vec<String> = ids.iter().map(|&id| graph.call_name(graph.node(id).call).to_string()).collect();
    names.dedup();
    names
}

/// Values for all inputs: normal floats, small indices.
fn inputs(graph: &Graph, seed: u64) -> Vec<Array> {
    let of = |(position, &id): (usize, &NodeId)| {
        let (node, seed) = (graph.node(id), seed + position as u64);
        if node.dtype.is_float() {
            Array::normal(node.shape.clone(), seed).rounded(node.dtype)
        } else {
            Array::indices(node.shape.clone(), seed, 5)
        }
    };
    graph.inputs().iter().enumerate().map(of).collect()
}

/// Interprets both graphs and compares every bit of every output. Gives how many copies were made.
fn check_same(graph: &Graph, first_backward: usize, again: &[NodeId], inputs: &[Array]) -> usize {
    let rewritten = recompute(graph, first_backward, again).unwrap();
    rewritten.graph.verify().unwrap();
    assert_eq!(rewritten.graph.to_string().parse::<Graph>().unwrap(), rewritten.graph);
    let bits = |graph: &Graph| {
        let outputs = interpret(graph, inputs, Rounding::Exact).unwrap().outputs;
        let of = |array: Array| (array.shape.clone(), array.values.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        outputs.into_iter().map(of).collect::<Vec<_>>()
    };
    let names = |graph: &Graph| graph.outputs().iter().map(|output| output.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&rewritten.graph), names(graph));
    assert!(bits(&rewritten.graph) == bits(graph), "{again:?}\n{graph}");
    rewritten.copies.len()
}

/// What the choice says of itself: never worse, never a product, copies only of what is not kept.
fn check_choice(graph: &Graph, first_backward: usize, choice: &Recompute, saving: Saving) {
    match saving {
        Saving::Traffic => assert!(choice.after.traffic <= choice.before.traffic),
        Saving::Memory => assert!(choice.after.memory <= choice.before.memory),
    }
    for &id in &choice.again {
        assert!(id.index() < first_backward);
        let op = &graph.node(id).op;
        let never = matches!(op, Op::Input { .. } | Op::Matmul { .. } | Op::ColumnSum | Op::ScatterAdd { .. });
        assert!(!never && !matches!(op, Op::Opaque(_)), "{op} is made again");
        assert!(choice.kept.iter().all(|(kept, _)| *kept != id));
    }
    assert_eq!(choice.after.memory, choice.kept.iter().map(|(_, bytes)| *bytes).sum());
}

const MLP: &str = "x = input f32[64,32] ; w1 = weight f32[32,128] ; b1 = weight f32[128] ; w2 = weight f32[128,32]
u = linear x w1 b1 ; h = gelu u ; y = linear h w2 ; z = mul y y ; out z";

/// Bytes of a hidden tensor of `MLP`, of its bias, of a weight, and of its input.
const WIDE: u64 = 64 * 128 * 4;
const BIAS: u64 = 128 * 4;
const WEIGHT: u64 = 32 * 128 * 4;
const NARROW: u64 = 64 * 32 * 4;

/// Backward reads `u` in the gradient of GELU, and `h`, `x`, `w1` and `w2` in products; `y` is at hand where it is
/// squared. A fused forward stores the product under `u` and `h`, and not `u`.
#[test]
fn traffic_takes_what_forward_stores_anyway() {
    let joint = with_gradients(&parsed(MLP));
    let choice = fused(&joint, Saving::Traffic);
    let products = WIDE + NARROW + 2 * WEIGHT;
    // u is written and read. h costs one read, which a copy of it would not save: the product reads the copy.
    assert_eq!(choice.before, Passed { memory: Bytes(2 * WIDE), traffic: Bytes(products + 2 * WIDE) });
    // The product and the bias are read instead, and added in the gradient's kernel.
    assert_eq!(choice.after, Passed { memory: Bytes(2 * WIDE), traffic: Bytes(products + WIDE + BIAS) });
    assert_eq!(labels(&joint.graph, choice.again), ["u"]);
    assert_eq!(labels(&joint.graph, choice.kept.iter().map(|(id, _)| *id)), ["%4", "h"]);

    let choice = unfused(&joint, Saving::Traffic);
    assert!(choice.again.is_empty(), "u is there: a read of it, or a read of the product and the bias");
    assert_eq!(choice.before.traffic, Bytes(products + WIDE));
}

#[test]
fn memory_keeps_one_of_two_wide_tensors() {
    let joint = with_gradients(&parsed(MLP));
    // Of u and the product under it, which are as large, the one that forward stores anyway.
    let choice = fused(&joint, Saving::Memory);
    assert_eq!(labels(&joint.graph, choice.kept.iter().map(|(id, _)| *id)), ["%4"]);
    assert_eq!(calls(&joint.graph, &choice.again), ["linear", "gelu"]);
    assert_eq!((choice.before.memory, choice.after.memory), (Bytes(2 * WIDE), Bytes(WIDE)));
    // Where forward wrote u, the kernel of the gradient writes the copy of h; it reads the product in place of u.
    assert_eq!(choice.after.traffic, choice.before.traffic + Bytes(BIAS));
    // Where both are stored, the one that needs fewer copies.
    let choice = unfused(&joint, Saving::Memory);
    assert_eq!(labels(&joint.graph, choice.kept.iter().map(|(id, _)| *id)), ["u"]);
    assert_eq!(calls(&joint.graph, &choice.again), ["gelu"]);
}

#[test]
fn ties_are_kept() {
    // The square of n reads n; n is as large as the product it could be made from.
    let text = "x = input f32[8,8] ; p = matmul x w[8,8] ; n = neg p ; y = mul n n ; v = matmul y w ; z = exp v
out z y";
    let joint = with_gradients(&parsed(text));
    for saving in BOTH {
        let choice = unfused(&joint, saving);
        assert_eq!(labels(&joint.graph, choice.kept.iter().map(|(id, _)| *id)), ["n"], "{saving:?}");
        assert_eq!((choice.again, choice.before), (Vec::new(), choice.after), "{saving:?}");
    }
}

#[test]
fn products_are_never_made_again() {
    // Its operands are small and its result is large.
    let joint = with_gradients(&parsed(
        "x = input f32[512,1] ; p = matmul x w[1,512] ; y = mul p p ; v = matmul y x ; z = exp v ; out z y",
    ));
    for saving in BOTH {
        let choice = fused(&joint, saving);
        assert_eq!(labels(&joint.graph, choice.kept.iter().map(|(id, _)| *id)), ["p"]);
        assert!(choice.again.is_empty());
    }
}

#[test]
fn views_of_one_buffer_count_once() {
    let text = "x = input f32[64,32] ; p = matmul x w[32,64] ; n = neg p
a = slice n axis=1 start=0 length=32 ; b = slice n axis=1 start=32 length=32 ; y = swiglu a b
v = matmul y w ; z = exp v ; out z y";
    let joint = with_gradients(&parsed(text));
    let choice = unfused(&joint, Saving::Memory);
    assert_eq!(choice.before.memory, Bytes(64 * 64 * 4));
    assert_eq!(labels(&joint.graph, choice.kept.iter().map(|(id, _)| *id)), ["n"]);
    // What is made again is n; the copies of its views come with it.
    let choice = fused(&joint, Saving::Traffic);
    assert_eq!(labels(&joint.graph, choice.kept.iter().map(|(id, _)| *id)), ["p"]);
    assert_eq!(labels(&joint.graph, choice.again), ["n", "a", "b"]);
}

/// A table is read by the rows that are picked, which is as much as their copy holds.
#[test]
fn a_gathered_row_is_gathered_again_if_nobody_stored_it() {
    let text = "t = input i32[64] ; table = weight f32[4096,8] ; e = gather table t ; y = mul e e ; v = matmul y w[8,8]
z = exp v ; out z y";
    let joint = with_gradients(&parsed(text));
    let (picked, indices) = (64 * 8 * 4, 64 * 4);
    let choice = fused(&joint, Saving::Traffic);
    assert_eq!(labels(&joint.graph, choice.again), ["e"]);
    // Written and read before; picked from the table now.
    assert_eq!(choice.before.traffic - choice.after.traffic, Bytes(2 * picked - (picked + indices)));
    assert!(unfused(&joint, Saving::Traffic).again.is_empty());
    assert_eq!(unfused(&joint, Saving::Memory).after.memory, Bytes(0));
}

/// Where the gradient waits for no product after the value, forward and backward can be one kernel.
#[test]
fn nothing_passes_from_a_loss_to_its_gradient() {
    let text = "x = input f32[16,8] ; t = input i32[16] ; l = linear x w[8,32] b[32]
loss, lse = cross_entropy l t ; out loss";
    let joint = with_gradients(&parsed(text));
    for saving in BOTH {
        let choice = fused(&joint, saving);
        assert_eq!((choice.again, choice.kept), (Vec::new(), Vec::new()), "{saving:?}");
    }
}

#[test]
fn statistics_are_kept_for_traffic_and_not_for_memory() {
    let text = "x = input f32[16,8] ; p = matmul x m[8,64] ; n, mean, rstd = layer_norm p w[64] b[64]
y = matmul n v[64,8] ; z = exp y ; out z";
    let joint = with_gradients(&parsed(text));
    let choice = fused(&joint, Saving::Traffic);
    assert_eq!(labels(&joint.graph, choice.kept.iter().map(|(id, _)| *id)), ["p", "mean", "rstd", "n"]);
    let choice = fused(&joint, Saving::Memory);
    assert_eq!(labels(&joint.graph, choice.kept.iter().map(|(id, _)| *id)), ["p"]);
    assert!(choice.again.iter().any(|&id| joint.graph.node(id).op == Op::RowReduce(ReduceOp::Mean)));
}

/// Layers of `x + cast(product(norm(x)))`: the sum is `f32`, what is added `bf16`. Adding it all up again would read
/// half as much for each layer alone, and the whole history for each layer in truth.
#[test]
fn a_residual_stream_is_not_added_up_again() {
    let layers = 6;
    let mut text = "x0 = input f32[32,16]\n".to_string();
    for n in 0..layers {
        text += &format!(
            "w{n} = weight f32[16] ; m{n} = weight bf16[16,16] ; n{n}, r{n} = rms_norm x{n} w{n} ; c{n} = cast n{n} bf16
p{n} = matmul c{n} m{n} ; d{n} = cast p{n} f32 ; x{} = add x{n} d{n}\n",
            n + 1
        );
    }
    text += &format!("y = mul x{layers} x{layers} ; out y");
    let joint = with_gradients(&text.parse().unwrap());
    for saving in BOTH {
        for choice in [fused(&joint, saving), unfused(&joint, saving)] {
            // The last sum is read in one place, and may be made there of the one before.
            for layer in 1..layers {
                let sum = joint.graph.find(&format!("x{layer}")).unwrap();
                assert!(choice.kept.iter().any(|(id, _)| *id == sum), "{saving:?} x{layer}");
            }
        }
    }
}

struct Sizes {
    batch: usize,
    sequence: usize,
    hidden: usize,
    heads: usize,
    layers: usize,
    dtype: Dtype,
}

fn linear(graph: &mut Graph, x: NodeId, name: &str, to: usize) -> NodeId {
    let (dtype, from) = (graph.node(x).dtype, graph.node(x).shape.cols());
    let w = graph.weight(&format!("{name}.weight"), dtype, [from, to]).unwrap();
    let b = graph.weight(&format!("{name}.bias"), dtype, [to]).unwrap();
    graph.linear(x, w, Some(b)).unwrap()
}

fn norm(graph: &mut Graph, x: NodeId, name: &str) -> NodeId {
    let (dtype, cols) = (graph.node(x).dtype, graph.node(x).shape.cols());
    let w = graph.weight(&format!("{name}.weight"), dtype, [cols]).unwrap();
    let b = graph.weight(&format!("{name}.bias"), dtype, [cols]).unwrap();
    graph.layer_norm(x, w, b, 1e-5).unwrap().y
}

/// GPT-2 without embeddings.
fn gpt2(sizes: &Sizes) -> Graph {
    let &Sizes { batch, sequence, hidden, heads, layers, dtype } = sizes;
    let mut graph = Graph::new("gpt2");
    let mut x = graph.input("x", dtype, [batch, sequence, hidden]).unwrap();
    for layer in 0..layers {
        let normed = norm(&mut graph, x, &format!("h.{layer}.ln_1"));
        let qkv = linear(&mut graph, normed, &format!("h.{layer}.attn.c_attn"), 3 * hidden);
        let mut parts = Vec::new();
        for part in 0..3 {
            let slice = graph.slice(qkv, 2, part * hidden, hidden).unwrap();
            let split = graph.reshape(slice, [batch, sequence, heads, hidden / heads]).unwrap();
            parts.push(graph.transpose(split, &[0, 2, 1, 3]).unwrap());
        }
        let mixed = graph.attention(parts[0], parts[1], parts[2], Mask::Causal, 0.125).unwrap();
        let merged = graph.transpose(mixed, &[0, 2, 1, 3]).unwrap();
        let merged = graph.reshape(merged, [batch, sequence, hidden]).unwrap();
        let projected = linear(&mut graph, merged, &format!("h.{layer}.attn.c_proj"), hidden);
        x = graph.add(x, projected).unwrap();
        let normed = norm(&mut graph, x, &format!("h.{layer}.ln_2"));
        let wide = linear(&mut graph, normed, &format!("h.{layer}.mlp.c_fc"), 4 * hidden);
        let active = graph.gelu(wide, Gelu::Tanh).unwrap();
        let narrow = linear(&mut graph, active, &format!("h.{layer}.mlp.c_proj"), hidden);
        x = graph.add(x, narrow).unwrap();
    }
    // Something whose gradient waits for the end of forward, as that of a loss does.
    let y = graph.mul(x, x).unwrap();
    graph.output("y", y).unwrap();
    graph
}

/// GPT-2's smallest block on 8 sequences of 1024, in bf16.
#[test]
fn a_gpt2_block() {
    let sizes = Sizes { batch: 8, sequence: 1024, hidden: 768, heads: 12, layers: 1, dtype: Dtype::Bf16 };
    let joint = with_gradients(&gpt2(&sizes));
    let megabytes = |bytes: Bytes| bytes.0 / 1_000_000;

    let choice = fused(&joint, Saving::Traffic);
    // The masked scores, f32, are made again from the product, bf16; the operand of GELU from the product under it.
    assert_eq!(calls(&joint.graph, &choice.again), ["attention", "linear"]);
    assert_eq!((megabytes(choice.before.traffic), megabytes(choice.after.traffic)), (1349, 695));
    assert_eq!((megabytes(choice.before.memory), megabytes(choice.after.memory)), (793, 592));

    let choice = fused(&joint, Saving::Memory);
    // Norms, probabilities and GELU too: what stays are products and the residual stream.
    assert_eq!(calls(&joint.graph, &choice.again), ["layer_norm", "attention", "layer_norm", "linear", "gelu"]);
    assert_eq!((megabytes(choice.after.memory), megabytes(choice.after.traffic)), (314, 970));
    let kept: Vec<&str> = choice.kept.iter().map(|(id, _)| joint.graph.node(*id).op.name()).collect();
    assert_eq!(kept, ["cast", "matmul", "matmul", "add", "matmul"], "q, k, v; scores; mixed; stream; GELU's operand");
}

#[test]
fn results_stay_the_same_to_the_bit() {
    let mlp = "x = input bf16[3,5,16] ; seed = input i32[]
u = linear x w1:bf16[16,48] b1:bf16[48] ; h = gelu u ; d = dropout h seed p=0.3 offset=2 ; y = linear d w2:bf16[48,16]
z = dropout y seed p=0.1 offset=3 ; e = exp z ; out e";
    let norms = "x = input f32[7,24] ; a, m, r = layer_norm x w1[24] b1[24] ; b = gelu a kind=erf
c, n, s = layer_norm b w2[24] b2[24] ; d = add c x ; e = softmax d ; f, t = rms_norm e w3[24]
g = matmul f v[24,8] ; h = softmax g ; out h r";
    let tokens = "t = input i32[6] ; table = weight f16[9,8] ; e = gather table t ; g = silu e
l = matmul g table transpose_b ; loss, lse = cross_entropy l t ; out loss";
    let block = gpt2(&Sizes { batch: 2, sequence: 5, hidden: 12, heads: 3, layers: 2, dtype: Dtype::F16 });
    let attention = "q = input f32[2,2,6,4] ; seed = input i32[] ; m = input f32[6,6]
a = attention q q q m seed mask=additive p=0.4 offset=9 ; c = concat a q axis=3 ; y = mul c c ; out y";
    for forward in [parsed(mlp), parsed(norms), parsed(tokens), block, parsed(attention)] {
        let joint = with_gradients(&forward);
        let inputs = inputs(&joint.graph, 11);
        for saving in BOTH {
            for choice in [fused(&joint, saving), unfused(&joint, saving)] {
                check_choice(&joint.graph, joint.first_backward, &choice, saving);
                check_same(&joint.graph, joint.first_backward, &choice.again, &inputs);
            }
        }
        let copies = fused(&joint, Saving::Memory).again;
        assert!(check_same(&joint.graph, joint.first_backward, &copies, &inputs) > 0, "{forward}");
    }
}

/// What is chosen, and any other set of values.
#[test]
fn random_graphs_give_the_same_results() {
    let (mut graphs, mut copies) = (0, 0);
    for seed in (0..).filter(|seed| seed / 3 % 2 == 1) {
        let case = random_case(seed);
        let Some(first) = first_backward(&case.graph) else { continue };
        let stored = stored_when_fused(&case.graph, first);
        for saving in BOTH {
            let choice = store_or_recompute(&case.graph, first, &|id| stored[id.index()], saving);
            check_choice(&case.graph, first, &choice, saving);
            copies += check_same(&case.graph, first, &choice.again, &case.inputs);
            let twice = store_or_recompute(&case.graph, first, &|id| stored[id.index()], saving);
            assert_eq!(choice, twice, "same in, same out");
        }
        let mut generator = Generator::new(seed);
        let is_computed = |id: &NodeId| id.index() < first && !matches!(case.graph.node(*id).op, Op::Input { .. });
        let any: Vec<NodeId> = case.graph.ids().filter(is_computed).filter(|_| generator.chance(0.6)).collect();
        check_same(&case.graph, first, &any, &case.inputs);
        graphs += 1;
        if graphs == 200 {
            break;
        }
    }
    assert!(copies > 500, "{copies}");
}

/// The stack does not grow with the graph, and time hardly more than its length.
#[test]
fn large_graphs_take_no_time() {
    let xl = Sizes { batch: 1, sequence: 1024, hidden: 1600, heads: 25, layers: 48, dtype: Dtype::Bf16 };
    let mut chain = Graph::new("chain");
    let mut x = chain.input("x", Dtype::F32, [1024, 8]).unwrap();
    for index in 0..20_000 {
        x = match index % 100 {
            0 => {
                let w = chain.weight(&format!("w{index}"), Dtype::F32, [8]).unwrap();
                chain.mul(x, w).unwrap()
            }
            _ => chain.mul(x, x).unwrap(),
        };
    }
    let m = chain.weight("m", Dtype::F32, [8, 8]).unwrap();
    let product = chain.matmul(x, m).unwrap();
    let y = chain.mul(product, product).unwrap();
    chain.output("y", y).unwrap();
    for graph in [gpt2(&xl), chain] {
        let joint = with_gradients(&graph);
        for saving in BOTH {
            let choice = fused(&joint, saving);
            let time = cpu_time(|| fused(&joint, saving));
            let nodes = joint.graph.nodes().len();
            // A quadratic search takes minutes; what counts is that a slow machine passes and such a search does not.
            assert!(time < Duration::from_secs(3), "{}: {nodes} nodes took {time:?}", graph.name());
            check_choice(&joint.graph, joint.first_backward, &choice, saving);
            assert!(!choice.again.is_empty());
            recompute(&joint.graph, joint.first_backward, &choice.again).unwrap();
        }
    }
}
