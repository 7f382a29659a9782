//! Weights as bytes: how far logits and perplexity are from those of `f32`, and what odd sizes and broken weights give.

use std::ops::ControlFlow;

use crate::support::{Expected, fixture};
use deuteron::cuda::{self, Search};
use deuteron::{Backend, Engine, Machine, Strategy, Target, plan, render};
use deuteron_codegen::Source;
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_gpt2::{Checkpoint, Config, GenerateOptions, Gpt2, Piece, Sampling, Start, Weights, next_logits};
use deuteron_kernels::CudaCatalog;
use deuteron_testkit::hardware;

/// How far logits of two plans may be apart, as a share of a logit or of [`SMALL_LOGIT`], whichever is larger: the plans add up
/// floats in other orders, a value between two bytes may fall either way, and attention has 16 bits, to which a plan that parts it rounds
/// more often.
const PLAN_ERROR: f32 = 5e-2;
const SMALL_LOGIT: f32 = 0.1;
/// How far below the best logit that of a generated token may be, as a share of the best one: with a cache, keys and values are
/// rounded to 16 bits on the way, and again a byte may fall either way.
const CACHE_ERROR: f32 = 0.05;

struct Compared {
    /// largest error over spread
    error: f64,
    /// of `f32` and of bytes
    perplexity: [f64; 2],
}

/// Compares the logits after every token of the sequences.
fn compare(models: &mut [Gpt2; 2], sequences: &[Vec<u32>]) -> Compared {
    let (mut error, mut entropy, mut count) = (0.0f64, [0.0; 2], 0);
    for sequence in sequences {
        let prefixes: Vec<Vec<u32>> = (1..sequence.len()).map(|length| sequence[..length].to_vec()).collect();
        let [floats, bytes] = [0, 1].map(|which| models[which].logits(&prefixes).unwrap());
        for ((floats, bytes), &next) in floats.iter().zip(&bytes).zip(&sequence[1..]) {
            let most = floats.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let least = floats.iter().copied().fold(f32::INFINITY, f32::min);
            let worst = floats.iter().zip(bytes).fold(0.0, |worst: f32, (a, b)| worst.max((a - b).abs()));
            error = error.max(f64::from(worst / (most - least)));
            entropy[0] += cross_entropy(floats, next);
            entropy[1] += cross_entropy(bytes, next);
            count += 1;
        }
    }
    Compared { error, perplexity: entropy.map(|sum| (sum / f64::from(count)).exp()) }
}

fn cross_entropy(logits: &[f32], token: u32) -> f64 {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - most).exp()).sum();
    most + sum.ln() - f64::from(logits[token as usize])
}

#[test]
fn logits_and_perplexity_are_near_those_of_floats() {
    for name in ["gelu", "shards", "bf16", "f16"] {
        let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
        let open = |weights| Gpt2::new(&Engine::cpu(), &checkpoint, weights).unwrap();
        let cases = Expected::read(&fixture(name)).cases;
        let ids = |tokens: &[usize]| tokens.iter().map(|&token| token as u32).collect::<Vec<u32>>();
        let sequences: Vec<Vec<u32>> =
            cases.iter().map(|case| [ids(&case.prompt), ids(&case.greedy)].concat()).collect();
        let Compared { error, perplexity } = compare(&mut [open(Weights::F32), open(Weights::Int8)], &sequences);
        let change = (perplexity[1] / perplexity[0] - 1.0).abs();
        println!(
            "{name}: logits off by {:.2} % of their spread, perplexity {:.4} to {:.4}, {:.2} %",
            100.0 * error,
            perplexity[0],
            perplexity[1],
            100.0 * change
        );
        assert!(error > 0.0 && error < Weights::INT8_LOGIT_ERROR, "{name}: {error}");
        assert!(change < Weights::INT8_PERPLEXITY_ERROR, "{name}: {perplexity:?}");
    }
}

/// Inner sizes and columns that no vector divides, a head of its own; one token at a time, in batches, under every plan.
#[test]
fn odd_sizes_give_the_same_logits_under_every_plan_and_with_a_cache() {
    let config = Config {
        layers: 2,
        heads: 3,
        hidden: 99,
        inner: Some(77),
        vocabulary: 131,
        context: 33,
        tied: false,
        ..Config::SMALL
    };
    let make = |weights| Gpt2::synthetic(&Engine::cpu(), &config, weights, 5).unwrap();
    let prompts: Vec<Vec<u32>> = [1, 4, 17].map(|length| (0..length).map(|at| at * 41 % 131).collect()).to_vec();
    let floats = make(Weights::F32).logits(&prompts).unwrap();
    let mut fused = make(Weights::Int8);
    let bytes = fused.logits(&prompts).unwrap();
    for strategy in [Strategy::Naive, Strategy::Unfused] {
        let other = make(Weights::Int8).with_strategy(strategy).logits(&prompts).unwrap();
        for (a, b) in bytes.iter().flatten().zip(other.iter().flatten()) {
            assert!((a - b).abs() <= PLAN_ERROR * a.abs().max(SMALL_LOGIT), "{strategy:?}: {a} and {b}");
        }
    }
    for (a, b) in floats.iter().zip(&bytes) {
        let (most, least) = a.iter().fold((f32::MIN, f32::MAX), |(most, least), &x| (most.max(x), least.min(x)));
        let error = a.iter().zip(b).fold(0.0, |most: f32, (a, b)| most.max((a - b).abs()));
        assert!(error < Weights::INT8_LOGIT_ERROR as f32 * (most - least), "{error} of {least} to {most}");
    }
    let options = GenerateOptions { max_tokens: 12, sampling: Sampling::GREEDY, end_of_text: None };
    let texts = fused.generate(&prompts, &options, |_, _| ControlFlow::Continue(())).unwrap();
    for (prompt, text) in prompts.iter().zip(&texts) {
        let mut tokens = prompt.clone();
        for &token in &text.tokens {
            let logits = fused.logits(std::slice::from_ref(&tokens)).unwrap().remove(0);
            let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert!(logits[token as usize] >= best - CACHE_ERROR * best.abs(), "{} tokens", tokens.len());
            tokens.push(token);
        }
    }
}

/// The same bytes and the same sums on a GPU.
#[test]
fn a_gpu_gives_the_logits_of_the_cpu() {
    let search = Search { cuda_home: hardware::cuda_home(), environments: hardware::environments() };
    let Some(engine) = hardware::gpu(|| cuda::open(&cuda::Options { search, ..cuda::Options::default() })) else {
        return;
    };
    let checkpoint = Checkpoint::open(&fixture("gelu")).unwrap();
    let mut models = [engine, Engine::cpu()].map(|engine| Gpt2::new(&engine, &checkpoint, Weights::Int8).unwrap());
    let sequences = [(0..40).map(|at| at * 7 % 100).collect()];
    let Compared { error, .. } = compare(&mut models, &sequences);
    assert!(error < Weights::INT8_LOGIT_ERROR, "{error}");
}

#[test]
fn names_of_weights_are_read_back() {
    for weights in Weights::ALL {
        assert_eq!(weights.to_string().parse::<Weights>(), Ok(weights));
    }
    let error = "i8".parse::<Weights>().unwrap_err();
    assert_eq!(error.to_string(), "unknown weights `i8`; expected f32, f16, bf16 or int8");
}

/// Every matmul of a prompt runs on the tensor cores as bytes: ours on Hopper, and before Hopper ours or the library's.
#[test]
fn matmuls_of_a_prompt_are_on_tensor_cores_of_bytes() {
    let piece = Piece { batch: 1, sequence: 1024, capacity: 1024, start: Start::Zero };
    let graph = next_logits(&Config::SMALL, &piece, Weights::Int8).unwrap();
    let h200 = ("h200", Arch::Sm90a, "matmul_hopper", "k32.s32.s8.s8");
    let a100 = ("a100", Arch::Sm80, "matmul_mma", "m16n8k32.row.col.s32.s8.s8.s32");
    for (profile, arch, entry, instruction) in [h200, a100] {
        let machine = Machine::profile(profile).unwrap();
        let catalog = CudaCatalog::of(arch);
        let plan = plan(&graph, Target { machine: &machine, catalog }, Strategy::Fused, &[]).unwrap();
        let backend = Backend::Cuda(CudaTarget::new(arch, 132));
        let [mut ours, mut library, mut others] = [0; 3];
        for group in plan.groups.iter().filter(|group| group.structure.is_matmul()) {
            let kernel = render(group.draft(&graph, &plan.placement), &backend).unwrap();
            let Source::Cuda(source) = &kernel.source else {
                library += 1;
                continue;
            };
            let launched = kernel.launch.grids().expect("grids").list.iter().any(|grid| grid.entry == entry);
            // The kind of its operands: 1 and 2 are floats of 16 bits.
            let of_bytes = source.text.contains("constexpr int KIND = 3;") && source.text.contains(instruction);
            *if launched && of_bytes { &mut ours } else { &mut others } += 1;
        }
        // Four per layer; the head has one row, and reads the bytes of its weight once.
        assert_eq!((ours + library, others), (12 * 4, 1), "{profile}");
        assert!(ours > 0 && (library == 0 || arch == Arch::Sm80), "{profile}: {ours} and {library} of the library");
    }
}
