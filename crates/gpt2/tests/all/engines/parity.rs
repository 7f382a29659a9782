//! Logits and greedy tokens of the transformers library, on any engine, under two plans, alone and together.

use std::ops::ControlFlow;

use deuteron::{Dtype, Engine, Strategy};
use deuteron_gpt2::{Checkpoint, Config, GenerateOptions, Gpt2, Sampling, Stop, Weights};

use super::gpu;
use crate::support::{Library, fixture};

const MODELS: [&str; 4] = ["gelu", "shards", "bf16", "f16"];
const STRATEGIES: [Strategy; 2] = [Strategy::Unfused, Strategy::Fused];
const GREEDY: GenerateOptions = GenerateOptions { max_tokens: 64, sampling: Sampling::GREEDY, end_of_text: None };

#[test]
fn a_cpu_says_what_the_library_says() {
    check(&Engine::cpu());
}

#[test]
fn a_gpu_says_what_the_library_says() {
    let Some(engine) = gpu() else { return };
    check(&engine);
}

/// The library and the engine both compute in f32, each off by some roundings of a sum of `inner` terms.
fn f32_bound(config: &Config, logits: &[f32]) -> f64 {
    let largest = logits.iter().fold(0.0, |largest: f64, logit| largest.max(f64::from(logit.abs())));
    2.0 * 8.0 * Dtype::F32.epsilon() * (config.inner() as f64).sqrt() * largest
}

fn assert_near(what: &str, got: &[f32], expected: &[f32], bound: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let error = got.iter().zip(expected).fold(0.0, |most: f64, (a, b)| most.max(f64::from((a - b).abs())));
    assert!(error < bound, "{what}: off by {error:e}, bound {bound:e}");
}

/// Prompts of 1, 7 and 32 tokens: together they begin in the bucket of the longest, alone each passes through its own.
fn check(engine: &Engine) {
    for name in MODELS {
        for strategy in STRATEGIES {
            let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
            let model = Gpt2::new(engine, &checkpoint, Weights::F32).unwrap();
            let mut model = model.with_strategy(strategy);
            let config = *model.config();
            let library = Library::read(name, config.vocabulary);
            let alone = library.prompts.iter().map(|prompt| vec![prompt.clone()]);
            let together = [(0, library.prompts.clone())];
            for (first, prompts) in alone.enumerate().chain(together) {
                let what = format!("{name} {strategy:?}, {} from {first}", prompts.len());
                let cases = first..first + prompts.len();
                let logits = model.logits(&prompts).unwrap();
                for (got, expected) in logits.iter().zip(&library.logits[cases.clone()]) {
                    let bound = f32_bound(&config, expected);
                    assert!(library.margin > 10.0 * bound, "{what}: greedy tokens are not safe from rounding");
                    assert_near(&what, got, expected, bound);
                }
                let mut told = vec![Vec::new(); prompts.len()];
                let tell = |index: usize, token: u32| {
                    told[index].push(token);
                    ControlFlow::Continue(())
                };
                let texts = model.generate(&prompts, &GREEDY, tell).unwrap();
                assert!(texts.iter().all(|text| text.stop == Stop::MaxTokens), "{what}");
                let tokens: Vec<Vec<u32>> = texts.into_iter().map(|text| text.tokens).collect();
                assert_eq!(tokens, library.greedy[cases], "{what}");
                assert_eq!(told, tokens, "{what}");
            }
        }
    }
}
