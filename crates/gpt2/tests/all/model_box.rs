//! The model that comes with the program, against what the transformers library computes from it (`bench/make_box_fixture.py`).

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use deuteron::Engine;
use deuteron_gpt2::{Checkpoint, Config, Error, GenerateOptions, Gpt2, Sampling, Tokenizer, Weights};
use serde::Deserialize;

/// The most bytes of weights that the repository and every binary carry.
const MOST_BYTES: u64 = 8 << 20;

/// How far the loss of f32 may be from that of f64: some hundred roundings of logits near 10.
const F32_LOSS_ERROR: f64 = 1e-4;
/// How much larger or smaller the perplexity of 16 bits may be, as a share.
const HALF_PERPLEXITY_ERROR: f64 = 0.01;

#[derive(Deserialize)]
struct Expected {
    cases: Vec<Case>,
    /// of the held-out text, whose mean loss is given
    tokens: usize,
    loss: f64,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    prompt: Vec<u32>,
    greedy: Vec<u32>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("box")
}

fn expected() -> Expected {
    serde_json::from_slice(&std::fs::read(folder().join("expected.json")).unwrap()).unwrap()
}

fn open(weights: Weights) -> Gpt2 {
    Gpt2::new(&Engine::cpu(), &Checkpoint::in_the_box().unwrap(), weights).unwrap()
}

#[test]
fn it_is_that_of_its_folder_and_of_its_name() {
    let (ours, file) = (Checkpoint::in_the_box().unwrap(), Checkpoint::open(&folder()).unwrap());
    assert_eq!((ours.config(), file.config()), (&Config::BOX, &Config::BOX));
    for (name, _) in Config::BOX.weights() {
        assert_eq!(ours.weight(&name), file.weight(&name), "{name}");
    }
    assert!(std::fs::metadata(folder().join("model.safetensors")).unwrap().len() <= MOST_BYTES);
    assert_eq!(Tokenizer::in_the_box().unwrap().tokens(), Config::BOX.vocabulary);
}

#[test]
fn its_greedy_text_is_that_of_the_library() {
    let (mut model, tokenizer) = (open(Weights::F32), Tokenizer::in_the_box().unwrap());
    let cases = expected().cases;
    let prompts: Vec<Vec<u32>> = cases.iter().map(|case| tokenizer.encode(&case.text)).collect();
    let options = GenerateOptions { max_tokens: cases[0].greedy.len(), sampling: Sampling::GREEDY, end_of_text: None };
    let texts = model.generate(&prompts, &options, |_, _| ControlFlow::Continue(())).unwrap();
    for ((case, prompt), text) in cases.iter().zip(&prompts).zip(&texts) {
        assert_eq!((prompt, &text.tokens), (&case.prompt, &case.greedy), "{}", case.text);
    }
}

#[test]
fn its_perplexity_is_that_of_the_library_in_every_precision() {
    let text = std::fs::read_to_string(folder().join("held-out.txt")).unwrap();
    let Expected { tokens, loss, .. } = expected();
    let ids = Tokenizer::in_the_box().unwrap().encode(&text);
    let predicted = |weights: Weights| {
        let prediction = open(weights).predict(&ids[..tokens], |_| ()).unwrap();
        assert_eq!(prediction.tokens, tokens - 1);
        prediction
    };
    let floats = predicted(Weights::F32);
    println!("f32: loss {:.6}, of the library {loss:.6}", floats.loss());
    assert!((floats.loss() - loss).abs() < F32_LOSS_ERROR, "{} and {loss}", floats.loss());
    let allowed = [
        (Weights::F16, HALF_PERPLEXITY_ERROR),
        (Weights::Bf16, HALF_PERPLEXITY_ERROR),
        (Weights::Int8, Weights::INT8_PERPLEXITY_ERROR),
    ];
    for (weights, allowed) in allowed {
        let perplexity = predicted(weights).perplexity();
        let change = (perplexity / floats.perplexity() - 1.0).abs();
        println!("{weights}: perplexity {perplexity:.4}, of f32 {:.4}", floats.perplexity());
        assert!(change > 0.0 && change < allowed, "{weights}: {perplexity} and {}", floats.perplexity());
    }
}

#[test]
fn a_text_of_one_token_cannot_be_predicted() {
    let model = open(Weights::F32);
    assert!(matches!(model.predict(&[1], |_| ()), Err(Error::Short { got: 1 })));
    assert!(matches!(model.predict(&[1, 5000], |_| ()), Err(Error::Token { token: 5000, vocabulary: 2048, .. })));
    assert_eq!(model.predict(&[1, 2], |_| ()).unwrap().tokens, 1);
}
