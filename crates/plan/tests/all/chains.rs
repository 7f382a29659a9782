//! What groups are made of: the links, the row work around them, and the values that cross between.

use deuteron_graph::{Composite, Graph, Mask, NodeId, Op, attention_interior, differentiate, recompute};
use deuteron_plan::{Chain, Link, Machine, Plan, Reach, Side, Step, Strategy, Structure, Target, epilogue_steps, plan};

fn planned(graph: &Graph, strategy: Strategy) -> Plan {
    plan(graph, Target::conceivable(&Machine::profile("h200").unwrap()), strategy, &[]).unwrap()
}

/// A graph that is one group, and that group's chain.
fn chain(text: &str) -> (Graph, Plan, Chain) {
    let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
    let plan = planned(&graph, Strategy::Greedy);
    assert_eq!(plan.groups.len(), 1, "{plan}");
    let Structure::Chain(chain) = plan.groups[0].structure.clone() else { panic!("{:?}", plan.groups[0].structure) };
    (graph, plan, chain)
}

fn matmuls(graph: &Graph) -> Vec<NodeId> {
    graph.ids().filter(|&id| matches!(graph.node(id).op, Op::Matmul { .. })).collect()
}

/// Every node of a group is in one place of its chain.
fn assert_covers(graph: &Graph, plan: &Plan, Chain { prologue, links, epilogue }: &Chain) {
    let mut nodes = [prologue.nodes.clone(), epilogue.nodes.clone()].concat();
    for link in links {
        match link {
            Link::Matmul { nodes: own } => nodes.extend(own),
            Link::Routed { node, gather } => nodes.extend([node, gather]),
            Link::Attention(link) | Link::AttentionScores(link) => {
                let call = &graph.calls()[graph.node(link.output).call.index()];
                let own = (call.start..call.end).filter_map(|index| graph.id(index));
                nodes.extend(own.filter(|&id| plan.placement.needs_kernel(graph, id)));
                nodes.extend(&link.copies);
            }
            Link::AttentionGradient(_) | Link::CrossEntropy(_) | Link::CrossEntropyGradient(_) => {}
        }
    }
    nodes.sort_unstable();
    assert_eq!(nodes, plan.groups[0].nodes);
}

#[test]
fn a_linear_layer_of_few_rows_between_a_norm_and_an_activation() {
    let (graph, plan, chain) = chain(
        "x = input bf16[4,64] ; g = weight bf16[64] ; w = weight bf16[64,96] ; b = weight bf16[96]
         n, mean, rstd = layer_norm x g g ; l = linear n w b ; y = gelu l ; out y",
    );
    assert_covers(&graph, &plan, &chain);
    let [matmul] = matmuls(&graph)[..] else { panic!("one matmul") };
    assert_eq!(chain.links, [Link::Matmul { nodes: vec![matmul] }]);
    assert_eq!((chain.prologue.reach, chain.epilogue.reach), (Reach::Rows, Reach::Pointwise));
    let left = plan.placement.base(graph.node(matmul).inputs[0]).unwrap();
    assert_eq!((chain.prologue.crossing, chain.epilogue.crossing), (vec![left], vec![matmul]));
    assert_eq!(chain.prologue.nodes.last(), Some(&left));
    assert_eq!(plan.groups[0].structure.name(), "norm, then matmul of few rows");
}

#[test]
fn an_epilogue_reads_as_steps_by_the_calls_it_came_from() {
    let (graph, plan, _) = chain(
        "x = input bf16[64,32] ; w = weight bf16[32,48] ; b = weight bf16[48] ; r = input bf16[64,48]
         l = linear x w b ; a = gelu l ; s = add r a ; y = silu s ; z = mul y b ; out z",
    );
    let draft = plan.groups[0].draft(&graph, &plan.placement);
    let words: Vec<&str> = epilogue_steps(&draft)
        .iter()
        .map(|step| match step {
            Step::Round { .. } => "round",
            Step::Add { .. } => "add",
            Step::Activation { function, .. } => function.name(),
            Step::Norm { .. } => "norm",
            Step::Other => "other",
        })
        .collect();
    assert_eq!(words, ["add", "round", "gelu", "add", "silu", "other"]);
    let [
        Step::Add { value: bias, .. },
        _,
        Step::Activation { function, result },
        Step::Add { value: residual, .. },
        ..,
    ] = epilogue_steps(&draft)[..]
    else {
        panic!("the words are as above")
    };
    let name = |value: NodeId| graph.given_name(plan.placement.base(value).unwrap());
    assert_eq!((name(bias), name(residual), name(result)), (Some("b"), Some("r"), Some("a")));
    assert!(matches!(function, Composite::Activation(_)));
}

#[test]
fn attention_its_projection_and_what_follows_are_links_of_one_chain() {
    let (graph, plan, chain) = chain(
        "q = input bf16[2,256,64] ; k = input bf16[2,256,64] ; v = input bf16[2,256,64] ; r = input bf16[256,128]
         a = attention q k v mask=causal ; t = transpose a [1,0,2] ; m = reshape t [256,128] ; w = weight bf16[128,128]
         p = matmul m w ; s = add r p ; out s",
    );
    assert_covers(&graph, &plan, &chain);
    let [Link::Attention(link), Link::Matmul { nodes }] = &chain.links[..] else { panic!("{chain:?}") };
    let inputs = graph.inputs();
    assert_eq!(link.request.operands, [inputs[0], inputs[1], inputs[2]]);
    assert_eq!((link.request.mask, link.request.seed, link.request.added), (Mask::Causal, None, None));
    assert_eq!(nodes.as_slice(), &matmuls(&graph)[2..]);
    assert_eq!(link.result(), plan.placement.base(graph.node(nodes[0]).inputs[0]), "the matmul reads the copy");
    assert_ne!(link.result(), Some(link.output));
    assert_eq!((&chain.epilogue.crossing, chain.epilogue.reach), (nodes, Reach::Pointwise));
    assert_eq!(chain.prologue, Side::NONE);
}

/// The gradient of attention for its first inputs, with scores computed again, and the link that was found in it.
fn gradient(text: &str, wanted: usize) -> (Graph, Option<Link>) {
    let graph: Graph = text.parse().unwrap();
    let joint = differentiate(&graph, &graph.inputs()[..wanted]).unwrap();
    let scores = attention_interior(&joint.graph, joint.first_backward);
    let graph = recompute(&joint.graph, joint.first_backward, &scores).unwrap().graph;
    let plan = planned(&graph, Strategy::Greedy);
    let found = plan.groups.iter().find(|group| group.structure.is_attention_gradient());
    let link = found.and_then(|group| group.structure.chain()).map(|chain| chain.links[0].clone());
    (graph, link)
}

#[test]
fn the_operands_of_a_gradient_of_attention_are_known_if_it_is_just_that() {
    let operands = "q = input f32[2,32,16] ; k = input f32[2,32,16] ; v = input f32[2,32,16] ;";
    let (graph, link) = gradient(&format!("{operands} a = attention q k v scale=0.5 ; out a"), 3);
    let Some(Link::AttentionGradient(Some(link))) = link else { panic!("{link:?}") };
    assert_eq!(link.request.operands, graph.inputs()[..3]);
    assert_eq!((link.request.scale, link.request.mask, link.request.p), (0.5, Mask::Full, 0.0));
    let stored: Vec<NodeId> = graph.outputs().iter().map(|output| output.node).collect();
    assert!(link.gradients.iter().all(|gradient| stored.contains(&gradient.buffer())), "{link:?} of {stored:?}");
}

/// Queries, keys and values that are parts of one value of positions: their gradients are stored side by side, as its gradient.
#[test]
fn gradients_of_attention_are_stored_in_the_order_of_their_readers() {
    let heads = |name: &str, from: &str| {
        format!("{name}a = reshape {from} [2,32,4,16] ; {name} = transpose {name}a [0,2,1,3] ; ")
    };
    let together = format!(
        "x = input bf16[2,32,192] ; qs = slice x axis=2 start=0 length=64 ; ks = slice x axis=2 start=64 length=64 ; vs = slice x axis=2 start=128 length=64 ;
         {}{}{} a = attention q k v mask=causal ; out a",
        heads("q", "qs"),
        heads("k", "ks"),
        heads("v", "vs")
    );
    let (graph, link) = gradient(&together, 1);
    let Some(Link::AttentionGradient(Some(link))) = link else { panic!("{link:?}") };
    let stored = graph.outputs()[1].node;
    assert_eq!(link.gradients.map(|gradient| gradient.buffer()), [stored; 3]);
    assert_eq!(link.gradients.map(|gradient| gradient.joined), [0, 1, 2].map(|operand| Some((stored, operand))));

    let apart = format!(
        "x = input bf16[2,32,64] ; y = input bf16[2,32,64] ; z = input bf16[2,32,64] ; {}{}{} a = attention q k v ; out a",
        heads("q", "x"),
        heads("k", "y"),
        heads("v", "z")
    );
    let (graph, link) = gradient(&apart, 3);
    let Some(Link::AttentionGradient(Some(link))) = link else { panic!("{link:?}") };
    let stored: Vec<NodeId> = graph.outputs()[1..].iter().map(|output| output.node).collect();
    assert_eq!(link.gradients.map(|gradient| gradient.buffer()).as_slice(), stored);
    assert!(link.gradients.iter().all(|gradient| gradient.copy.is_some() && gradient.joined.is_none()), "{link:?}");
}

#[test]
fn the_operands_of_a_part_of_a_gradient_are_not_known() {
    let text = "q = input f32[2,32,16] ; k = input f32[2,32,16] ; v = input f32[2,32,16] ; a = attention q k v ; out a";
    assert_eq!(gradient(text, 2).1, Some(Link::AttentionGradient(None)), "without the gradient of the values");
}

/// In three chunks of rows each; nobody reads the logsumexp of a loss without a gradient.
#[test]
fn a_loss_and_its_gradient_are_one_kernel_each() {
    let text = "x = input bf16[600,64] ; w = weight bf16[70001,64] ; t = input i32[600]
                l, s = linear_cross_entropy x w t smoothing=0.1 ignored=-100 ; out l";
    let (graph, _, alone) = chain(text);
    let [Link::CrossEntropy(link)] = &alone.links[..] else { panic!("{alone:?}") };
    assert_eq!((link.operands.as_slice(), link.loss), (graph.inputs(), graph.outputs()[0].node));
    assert_eq!((link.smoothing, link.ignored), (0.1, Some(-100)));

    let joint = differentiate(&graph, &graph.inputs()[..2]).unwrap().graph;
    let plan = planned(&joint, Strategy::Greedy);
    let links = plan.groups.iter().filter_map(|group| group.structure.chain()).flat_map(|chain| &chain.links);
    let [Link::CrossEntropy(forward), Link::CrossEntropyGradient(backward)] = links.collect::<Vec<_>>()[..] else {
        panic!("{plan}")
    };
    assert_eq!(backward.operands, forward.operands);
    assert_eq!((backward.logsumexp, backward.smoothing), (forward.logsumexp, 0.1));
    assert_eq!(backward.gradients, [joint.outputs()[1].node, joint.outputs()[2].node]);
    assert_eq!(backward.d_logsumexp, backward.d_loss, "nothing else reaches the logsumexp");
}
