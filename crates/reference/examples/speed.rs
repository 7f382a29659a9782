//! Times the interpreter on the large tensors of GPT-2: the last product, scores, and one attention with its gradient.

use std::time::Instant;

use deuteron_graph::{Dtype, Graph, Mask, differentiate};
use deuteron_reference::{Array, Rounding, interpret};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut product = Graph::new("logits");
    let x = product.input("x", Dtype::F32, [1024, 768])?;
    let w = product.weight("w", Dtype::F32, [50257, 768])?;
    let y = product.matmul_transposed(x, w, false, true)?;
    product.output("y", y)?;
    time("matmul 1024x768x50257", &product, Rounding::Exact)?;

    let mut softmax = Graph::new("softmax");
    let x = softmax.input("x", Dtype::Bf16, [12, 1024, 1024])?;
    let masked = softmax.causal_mask(x)?;
    let y = softmax.softmax(masked)?;
    softmax.output("y", y)?;
    time("causal mask, softmax 12x1024x1024", &softmax, Rounding::Exact)?;
    time("the same, rounded", &softmax, Rounding::Storage)?;

    let mut attention = Graph::new("attention");
    let inputs: Vec<_> = ["q", "k", "v"]
        .into_iter()
        .map(|name| attention.input(name, Dtype::Bf16, [12, 1024, 64]))
        .collect::<Result<_, _>>()?;
    let y = attention.attention(inputs[0], inputs[1], inputs[2], Mask::Causal, 0.125)?;
    attention.output("y", y)?;
    time("attention 12x1024x64", &attention, Rounding::Exact)?;
    let gradient = differentiate(&attention, &inputs)?.graph;
    time("attention and its gradient", &gradient, Rounding::Exact)?;
    time("the same, rounded", &gradient, Rounding::Storage)?;

    let mut loss = Graph::new("loss");
    let x = loss.input("x", Dtype::Bf16, [1024, 50257])?;
    let targets = loss.input("targets", Dtype::I32, [1024])?;
    let result = loss.cross_entropy(x, targets)?;
    loss.output("loss", result.loss)?;
    let gradient = differentiate(&loss, &[x])?.graph;
    time("cross entropy 1024x50257 and its gradient", &gradient, Rounding::Exact)
}

fn time(name: &str, graph: &Graph, rounding: Rounding) -> Result<(), Box<dyn std::error::Error>> {
    let inputs: Vec<Array> = graph
        .inputs()
        .iter()
        .map(|&id| match graph.node(id).dtype {
            Dtype::I32 => Array::indices(graph.node(id).shape.clone(), 1, 1000),
            dtype => Array::normal(graph.node(id).shape.clone(), id.index() as u64).rounded(dtype),
        })
        .collect();
    let start = Instant::now();
    interpret(graph, &inputs, rounding)?;
    println!("{name}: {:.2} s", start.elapsed().as_secs_f64());
    Ok(())
}
