//! Models that run: logits and tokens of the transformers library, under two plans, alone and together.

use std::ops::ControlFlow;

use crate::support::{Library, fixture};
use deuteron::reference::{Array, Bounded, bounded};
use deuteron::{Dtype, Engine, Strategy};
use deuteron_gpt2::{
    Checkpoint, Config, Error, GenerateOptions, Generation, Gpt2, Piece, Sampling, SamplingError, Start, Stop, Weight,
    Weights, next_logits,
};
use half::{bf16, f16};

const STRATEGIES: [Strategy; 2] = [Strategy::Unfused, Strategy::Fused];
const GREEDY: GenerateOptions = GenerateOptions { max_tokens: 64, sampling: Sampling::GREEDY, end_of_text: None };

fn open(name: &str, weights: Weights) -> Gpt2 {
    Gpt2::new(&Engine::cpu(), &Checkpoint::open(&fixture(name)).unwrap(), weights).unwrap()
}

/// A synthetic model small enough for a test of anything but numbers.
fn tiny() -> Gpt2 {
    let config = Config { layers: 1, heads: 2, hidden: 16, vocabulary: 40, context: 20, ..Config::SMALL };
    Gpt2::synthetic(&Engine::cpu(), &config, Weights::F32, 1).unwrap()
}

fn go_on(_: usize, _: u32) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Every token from the start of its sequence again, against the cache of keys and values, which grows on the way.
#[test]
fn a_cache_changes_no_token() {
    for weights in [Weights::F32, Weights::Bf16] {
        let mut model = open("gelu", weights);
        let prompts = Library::read("gelu", model.config().vocabulary).prompts;
        let cached = model.generate(&prompts, &GenerateOptions { max_tokens: 24, ..GREEDY }, go_on).unwrap();
        for (prompt, generation) in prompts.iter().zip(&cached) {
            let mut tokens = prompt.clone();
            for &expected in &generation.tokens {
                let logits = model.logits(std::slice::from_ref(&tokens)).unwrap().remove(0);
                let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                // The two ways round differently; with 16-bit values a near tie may fall either way.
                let epsilon = weights.activations().epsilon() as f32;
                let tie = if weights == Weights::F32 { 0.0 } else { 8.0 * epsilon * best.abs() };
                assert!(logits[expected as usize] >= best - tie, "{weights}, {} tokens", tokens.len());
                tokens.push(expected);
            }
        }
    }
}

/// Weights in 16 bits: off by at most twice what the f64 reference is when it rounds weights and values likewise.
#[test]
fn weights_in_16_bits_give_logits_within_their_rounding() {
    use Weights::{Bf16, F16};
    for (name, weights) in [("gelu", Bf16), ("gelu", F16), ("shards", Bf16), ("bf16", Bf16)] {
        let dtype = weights.activations();
        let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
        let config = *checkpoint.config();
        let library = Library::read(name, config.vocabulary);
        for (prompt, expected) in library.prompts.iter().zip(&library.logits) {
            let length = prompt.len();
            let piece = Piece { batch: 1, sequence: length, capacity: length, start: Start::Anywhere };
            let graph = next_logits(&config, &piece, weights).unwrap();
            let tokens = prompt.iter().map(|&token| f64::from(token)).collect();
            let places = (0..length).map(|place| place as f64).collect();
            let mut inputs = [tokens, places].map(|values| Array::new([1, length], values)).to_vec();
            inputs.extend([0.0, length as f64 - 1.0].map(|value| Array::new([1], vec![value])));
            let cache = Array::filled([2, 1, config.heads, length, config.head()], 0.0);
            inputs.extend((0..config.layers).map(|_| cache.clone()));
            for (weight, shape) in config.weights() {
                inputs.push(Array::new(shape, values(checkpoint.weight(&weight).unwrap()).collect()));
            }
            // Weights as the library had them: that they are stored in 16 bits is part of the error.
            let bounds = bounded(&graph, &inputs).unwrap().remove(0).bounds;
            let array = |logits: &[f32]| Array::new([1, config.vocabulary], logits.iter().map(|&x| x.into()).collect());
            for strategy in STRATEGIES {
                let mut model = open(name, weights).with_strategy(strategy);
                let got = model.logits(std::slice::from_ref(prompt)).unwrap();
                let expected = Bounded { dtype, exact: array(expected), bounds: bounds.clone() };
                let comparison = expected.compare(&array(&got[0]));
                assert!(comparison.holds(), "{name} {dtype} {strategy:?}: {comparison:?}");
                assert!(comparison.error > 0.0, "{name} {dtype}: nothing was rounded");
            }
        }
    }
}

fn values(weight: Weight<'_>) -> Box<dyn Iterator<Item = f64> + '_> {
    let halves = weight.bytes.as_chunks::<2>().0.iter();
    match weight.dtype {
        Dtype::F16 => Box::new(halves.map(|&bytes| f16::from_le_bytes(bytes).to_f64())),
        Dtype::Bf16 => Box::new(halves.map(|&bytes| bf16::from_le_bytes(bytes).to_f64())),
        _ => Box::new(weight.bytes.as_chunks().0.iter().map(|&bytes| f64::from(f32::from_le_bytes(bytes)))),
    }
}

/// Each text of a batch ends where it would alone.
#[test]
fn texts_end_on_their_own() {
    let mut model = open("shards", Weights::F32);
    let library = Library::read("shards", model.config().vocabulary);
    // Token 0 comes nowhere in the first text, and early in the others.
    let options = GenerateOptions { end_of_text: Some(0), ..GREEDY };
    let texts = model.generate(&library.prompts, &options, go_on).unwrap();
    let expected = library.greedy.iter().map(|greedy| match greedy.iter().position(|&token| token == 0) {
        Some(end) => Generation { tokens: greedy[..end].to_vec(), stop: Stop::EndOfText },
        None => Generation { tokens: greedy.clone(), stop: Stop::MaxTokens },
    });
    assert_eq!(texts, expected.collect::<Vec<_>>());
    let stops: Vec<Stop> = texts.iter().map(|text| text.stop).collect();
    assert_eq!(stops, [Stop::MaxTokens, Stop::EndOfText, Stop::EndOfText]);
}

/// The last position gives one more token, which has none itself.
#[test]
fn a_full_context_ends_a_text() {
    let mut model = tiny();
    let prompts = [vec![1; 20], vec![2; 3]];
    let texts = model.generate(&prompts, &GREEDY, go_on).unwrap();
    let lengths: Vec<(usize, Stop)> = texts.iter().map(|text| (text.tokens.len(), text.stop)).collect();
    assert_eq!(lengths, [(1, Stop::ContextFull), (18, Stop::ContextFull)]);
    let options = GenerateOptions { max_tokens: 18, ..GREEDY };
    assert_eq!(model.generate(&prompts[1..], &options, go_on).unwrap()[0].stop, Stop::MaxTokens);
    let options = GenerateOptions { max_tokens: 0, ..GREEDY };
    let nothing = Generation { tokens: Vec::new(), stop: Stop::MaxTokens };
    assert_eq!(model.generate(&prompts[1..], &options, go_on).unwrap(), [nothing]);
}

#[test]
fn the_caller_may_end_it() {
    let mut count = 0;
    let stop_at_three = |_: usize, _: u32| {
        count += 1;
        if count == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let texts = tiny().generate(&[vec![1], vec![2]], &GREEDY, stop_at_three).unwrap();
    let lengths: Vec<(usize, Stop)> = texts.iter().map(|text| (text.tokens.len(), text.stop)).collect();
    assert_eq!(lengths, [(2, Stop::Interrupted), (1, Stop::Interrupted)]);
}

#[test]
fn draws_depend_on_the_seed_and_the_prompts_index_alone() {
    let mut model = tiny();
    let sampling = Sampling { temperature: 1.0, seed: 7, ..Sampling::GREEDY };
    let options = GenerateOptions { max_tokens: 16, sampling, end_of_text: None };
    let two = model.generate(&[vec![1, 2], vec![1, 2]], &options, go_on).unwrap();
    assert_ne!(two[0], two[1]);
    assert_eq!(model.generate(&[vec![1, 2]], &options, go_on).unwrap()[0], two[0]);
    let options = GenerateOptions { sampling: Sampling { seed: 8, ..sampling }, ..options };
    assert_eq!(model.generate(&[vec![1, 2]], &options, go_on).unwrap()[0], two[1]);
}

#[test]
fn bad_prompts_and_settings_are_refused() {
    let mut model = tiny();
    let mut say = |prompts: &[Vec<u32>]| {
        let error = model.generate(prompts, &GREEDY, go_on).unwrap_err().to_string();
        assert_eq!(model.logits(prompts).unwrap_err().to_string(), error);
        error
    };
    assert_eq!(say(&[]), "expected from 1 to 107374182 prompts, got 0");
    assert_eq!(say(&[vec![1], vec![]]), "prompt 2 has no tokens; expected at least 1, such as the end-of-text token");
    assert_eq!(say(&[vec![1; 21]]), "prompt 1 has 21 tokens, but the model's context is 20; shorten it");
    assert_eq!(say(&[vec![3, 40]]), "prompt 1: token 40 is not in the vocabulary of 40");
    assert_eq!(say(&[vec![u32::MAX]]), "prompt 1: token 4294967295 is not in the vocabulary of 40");
    let options = GenerateOptions { sampling: Sampling { temperature: -1.0, ..Sampling::GREEDY }, ..GREEDY };
    let error = model.generate(&[vec![1]], &options, go_on).unwrap_err();
    assert!(matches!(error, Error::Sampling(SamplingError::Temperature(_))), "{error}");
    let engine = Engine::cpu();
    let odd = Config { heads: 5, ..Config::SMALL };
    assert!(matches!(Gpt2::synthetic(&engine, &odd, Weights::F32, 1), Err(Error::Size(_))));
}
