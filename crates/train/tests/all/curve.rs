//! Losses of a run against PyTorch's in f64, from the same start on the same batches. `bench/make_train_fixture.py` made the fixture; batches
//! and settings are its formulas.

use std::path::Path;

use deuteron::reference::ulp;
use deuteron::{Dtype, Engine, Optimizer};
use deuteron_gpt2::{Checkpoint, Config, Weights, upload};
use deuteron_train::{Batch, Precision, Scalars, Settings, StepOptions, Trainer};

use crate::support::{ADAMW, settings};

const STEPS: usize = 24;
const LONG: usize = 200;
const MICRO_BATCHES: usize = 2;
const BATCH: usize = 2;
const SEQUENCE: usize = 16;
const VOCABULARY: usize = 320;

fn batch(step: usize, micro_batch: usize) -> Batch {
    let token = |at: usize, start: usize| ((at * at * 5 + at * 13 + start / 8) % VOCABULARY) as i32;
    let (mut tokens, mut targets) = (Vec::new(), Vec::new());
    for row in 0..BATCH {
        let start = 31 * step + 7 * micro_batch + 3 * row;
        tokens.extend((start..start + SEQUENCE).map(|at| token(at, start)));
        targets.extend((start + 1..=start + SEQUENCE).map(|at| token(at, start)));
    }
    Batch { tokens, targets }
}

/// PyTorch's losses in f64 and in another mode.
fn torch_losses(optimizer: &str, mode: &str) -> Vec<[f64; 2]> {
    let text = include_str!("../fixtures/torch_losses.csv");
    let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<&str>>());
    let header = lines.next().unwrap();
    let column = |name: &str| header.iter().position(|&known| known == name).unwrap();
    let columns = [column("f64"), column(mode)];
    let own = lines.filter(|line| line[0] == optimizer);
    own.map(|line| columns.map(|column| line[column].parse().unwrap())).collect()
}

/// PyTorch's losses of a longer run of AdamW in f32, with two implementations of attention.
fn long_losses() -> Vec<[f64; 2]> {
    let lines = include_str!("../fixtures/torch_200_steps.csv").lines().skip(1);
    let numbers = lines.map(|line| line.split(',').skip(1).map(|loss| loss.parse().unwrap()).collect::<Vec<f64>>());
    numbers.map(|both| both.try_into().unwrap()).collect()
}

fn our_losses(engine: &Engine, optimizer: Optimizer, rate: f64, precision: Precision, steps: usize) -> Vec<f64> {
    // Where this was built is not where it must run: then the fixture is below the present folder.
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpt2/tests/fixtures/gelu");
    let folder = if built.is_dir() { &built } else { Path::new("crates/gpt2/tests/fixtures/gelu") };
    let checkpoint = Checkpoint::open(folder).unwrap();
    // One layer is planned ten times as fast as two.
    let config = Config { name: Config::OTHER, layers: 1, ..*checkpoint.config() };
    let all = checkpoint.config().weights().into_iter().zip(upload(engine, &checkpoint, Weights::F32).unwrap());
    let weights = all.filter(|((name, _), _)| !name.starts_with("h.1.")).map(|(_, weight)| weight).collect();
    let decay = if matches!(optimizer, Optimizer::Sgd { .. }) { 0.0 } else { 0.1 };
    let options = StepOptions {
        memory: None,
        batch: BATCH,
        sequence: SEQUENCE,
        micro_batches: MICRO_BATCHES,
        precision,
        dropout: 0.0,
        optimizer,
        decay,
    };
    let schedule = Settings {
        steps: steps as u64,
        warmup: 4,
        learning_rate: rate,
        least_learning_rate: rate / 10.0,
        ..settings()
    };
    let mut trainer = Trainer::new(engine, &config, &options, weights).unwrap();
    let losses = (0..steps).map(|step| {
        let batches: Vec<Batch> = (0..MICRO_BATCHES).map(|number| batch(step, number)).collect();
        let number = step as u64;
        let scalars = Scalars { step: number + 1, rate: schedule.rate(number), clip: 1.0, seed: 0 };
        trainer.step(&batches, scalars).unwrap().loss
    });
    losses.collect()
}

#[test]
fn a_curve_is_as_near_to_f64_as_pytorchs_own() {
    check(&Engine::cpu());
}

/// After 200 steps the curve is still within twice PyTorch's drift from itself.
#[test]
fn two_hundred_steps_are_within_twice_pytorchs_drift() {
    check_long(&Engine::cpu());
}

pub fn check_long(engine: &Engine) {
    let torch = long_losses();
    assert_eq!(torch.len(), LONG);
    let ours = our_losses(engine, ADAMW, 3e-3, Precision::F32, LONG);
    let drift = torch.iter().fold(0.0, |worst: f64, [one, other]| worst.max((one - other).abs()));
    let off = |mode: usize| ours.iter().zip(&torch).map(|(ours, torch)| (ours - torch[mode]).abs()).fold(0.0, f64::max);
    let [one, other] = [off(0), off(1)];
    println!("{LONG} steps: off by {one:.2e} and {other:.2e}, PyTorch from itself by {drift:.2e}");
    assert!(one.max(other) <= 2.0 * drift, "{one:e} {other:e} {drift:e}");
    assert!(ours[LONG - 1] < 0.8 * ours[0], "it learns: {} to {}", ours[0], ours[LONG - 1]);
}

pub fn check(engine: &Engine) {
    use Precision::{Bf16, F32};
    let (sgd, lion) = (Optimizer::Sgd { momentum: 0.9 }, Optimizer::Lion { beta1: 0.9, beta2: 0.95 });
    let cases: [(Optimizer, f64, &[Precision]); 3] =
        [(ADAMW, 3e-3, &[F32, Bf16]), (sgd, 0.1, &[F32]), (lion, 1e-3, &[F32])];
    for (optimizer, rate, precisions) in cases {
        for &precision in precisions {
            let torch = torch_losses(optimizer.name(), precision.name());
            assert_eq!(torch.len(), STEPS);
            let ours = our_losses(engine, optimizer, rate, precision, STEPS);
            let drift = torch.iter().fold(0.0, |worst: f64, [exact, theirs]| worst.max((exact - theirs).abs()));
            let off = ours.iter().zip(&torch).map(|(ours, [exact, _])| (ours - exact).abs());
            let worst = off.fold(0.0, f64::max);
            println!("{} {}: off by {worst:.2e}, PyTorch by {drift:.2e}", optimizer.name(), precision.name());
            // A loss is stored in f32, whatever the run computes in.
            let stored = ulp(Dtype::F32, ours[0]);
            assert!(worst <= 2.0 * drift + stored, "{} {}: {worst:e} {drift:e}", optimizer.name(), precision.name());
            assert!(ours[STEPS - 1] < ours[0], "it learns: {ours:?}");
        }
    }
}
