//! Models with weights from a seed, on any engine, against the f64 reference.

use std::ops::ControlFlow;

use deuteron::reference::{Array, Rounding, bounded, interpret};
use deuteron::{Engine, Graph, Strategy, seed};
use deuteron_gpt2::{Config, GenerateOptions, Gpt2, Options, Piece, Sampling, Start, Weights, model, next_logits};

use super::gpu;

const CONFIG: Config =
    Config { layers: 2, heads: 4, hidden: 64, vocabulary: 1000, context: 64, tied: false, ..Config::SMALL };
const SEED: u64 = 3;

#[test]
fn a_cpu_matches_the_reference() {
    check(&Engine::cpu());
}

#[test]
fn a_gpu_matches_the_reference() {
    let Some(engine) = gpu() else { return };
    check(&engine);
}

fn check(engine: &Engine) {
    let prompt = |length: u32| (0..length).map(|position| (position * 37 + length) % 1000).collect();
    let prompts: [Vec<u32>; 3] = [1, 7, 33].map(prompt);
    for weights in [Weights::F32, Weights::F16, Weights::Bf16] {
        for strategy in [Strategy::Unfused, Strategy::Fused] {
            let mut gpt2 = Gpt2::synthetic(engine, &CONFIG, weights, SEED).unwrap().with_strategy(strategy);
            let logits = gpt2.logits(&prompts).unwrap();
            let options = GenerateOptions { max_tokens: 20, sampling: Sampling::GREEDY, end_of_text: None };
            let texts = gpt2.generate(&prompts, &options, |_, _| ControlFlow::Continue(())).unwrap();
            for ((prompt, logits), text) in prompts.iter().zip(logits).zip(texts) {
                let what = format!("{weights} {strategy:?}, {} tokens", prompt.len());
                let bound = check_logits(&what, prompt, weights, logits);
                check_tokens(&what, prompt, &text.tokens, weights, bound);
            }
        }
    }
}

/// The logits are within their bounds, of which the largest is returned.
fn check_logits(what: &str, prompt: &[u32], kind: Weights, got: Vec<f32>) -> f64 {
    let length = prompt.len();
    let graph = from_start(length, kind);
    let places = Array::new([1, length], (0..length).map(|place| place as f64).collect());
    let mut inputs =
        vec![tokens(prompt), places, Array::new([1], vec![0.0]), Array::new([1], vec![length as f64 - 1.0])];
    let cache = Array::filled([2, 1, CONFIG.heads, length, CONFIG.head()], 0.0);
    inputs.extend((0..CONFIG.layers).map(|_| cache.clone()));
    inputs.extend(weights(&graph));
    let expected = bounded(&graph, &inputs).unwrap().remove(0);
    let got = Array::new([1, CONFIG.vocabulary], got.into_iter().map(f64::from).collect());
    let comparison = expected.compare(&got);
    assert!(comparison.holds() && comparison.error > 0.0, "{what}: {comparison:?}");
    expected.bounds.into_iter().fold(0.0, f64::max)
}

/// Each token is the likeliest, up to the rounding of two logits, and of a sequence a little longer.
fn check_tokens(what: &str, prompt: &[u32], generated: &[u32], kind: Weights, bound: f64) {
    assert_eq!(generated.len(), 20, "{what}");
    let sequence = [prompt, generated].concat();
    let options = Options { batch: 1, sequence: sequence.len(), weights: kind, backward: false };
    let graph = model(&CONFIG, &options).unwrap();
    // The weights of the graph for generation: what a seed makes depends on the position among the inputs.
    let mut inputs = weights(&from_start(1, kind));
    inputs.insert(0, tokens(&sequence));
    let exact = interpret(&graph, &inputs, Rounding::Exact).unwrap().outputs.remove(0);
    let rows = exact.values.chunks_exact(CONFIG.vocabulary).skip(prompt.len() - 1);
    for (position, (row, &token)) in rows.zip(generated).enumerate() {
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let chosen = row[token as usize];
        assert!(largest - chosen <= 3.0 * bound, "{what}, token {position}: {chosen} of {largest}, bound {bound:e}");
    }
}

/// The graph of a prompt.
fn from_start(length: usize, kind: Weights) -> Graph {
    next_logits(&CONFIG, &Piece { batch: 1, sequence: length, capacity: length, start: Start::Zero }, kind).unwrap()
}

/// The weights of a graph for generation; before them are data and caches.
fn weights(graph: &Graph) -> Vec<Array> {
    seed::inputs(graph, SEED).unwrap().iter().skip(4 + CONFIG.layers).map(|weight| weight.to_array().unwrap()).collect()
}

fn tokens(tokens: &[u32]) -> Array {
    Array::new([1, tokens.len()], tokens.iter().map(|&token| f64::from(token)).collect())
}
