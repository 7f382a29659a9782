//! What one more token costs after so many, on the CPU with seeded weights: the median step, its share of the memory's speed,
//! and where its time goes by kind of kernel.
//!
//! `cargo run --release -p deuteron-gpt2 --example steps -- [context] [dtype] [steps]`

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use deuteron::{Dtype, Engine, Session, Strategy, Tensor, seed};
use deuteron_gpt2::{Config, Piece, Start, next_logits};

const MEGABYTE: f64 = 1e6;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |index: usize, default: &'static str| words.get(index).map_or(default, String::as_str).to_string();
    let (context, dtype, steps) = (word(0, "128").parse::<usize>()?, word(1, "f32").parse::<Dtype>()?, word(2, "60"));
    let (config, engine) = (Config::SMALL, Engine::cpu());
    let capacity = (context + 1).next_power_of_two().min(config.context);
    let piece = Piece { batch: 1, sequence: 1, capacity, start: Start::Anywhere };
    let graph = next_logits(&config, &piece, dtype)?;
    let mut inputs = seed::inputs(&graph, 1)?;
    let at = context.min(capacity - 1) as i32;
    inputs[1] = Tensor::from_i32([1, 1], &[at])?;
    inputs[2] = Tensor::from_i32([1], &[at])?;
    let mut caches: Vec<Tensor> = inputs.drain(4..4 + config.layers).collect();
    let states = &graph.inputs()[4..4 + config.layers];
    let mut session = Session::with_states(&engine, &graph, Strategy::Fused, states)?;
    let inputs: Vec<&Tensor> = inputs.iter().collect();

    // The table of tokens is the head, too; of that of positions one row is read.
    let read = config.parameters() - config.context * config.hidden + 2 * (context + 1) * config.layers * config.hidden;
    let bytes = (read * dtype.bytes()) as f64;
    let mut probe = engine.device().copy_probe(256 << 20)?;
    let (mut whole, mut copies) = (Vec::new(), Vec::new());
    let mut kinds: BTreeMap<String, Vec<Duration>> = BTreeMap::new();
    for _ in 0..steps.parse::<usize>()? {
        let begin = Instant::now();
        session.run_with(&inputs, &mut caches)?;
        session.output(0)?.to_f32()?;
        whole.push(begin.elapsed());
        let times = session.run_timed_with(&inputs, &mut caches)?.to_vec();
        let mut sums: BTreeMap<String, Duration> = BTreeMap::new();
        for (group, time) in session.plan().groups.iter().zip(times) {
            *sums.entry(group.kind.to_string()).or_default() += time;
        }
        sums.into_iter().for_each(|(kind, sum)| kinds.entry(kind).or_default().push(sum));
        copies.push(probe.ordinary()?);
    }
    let step = median(whole).as_secs_f64();
    let copied = probe.bytes() as f64 / median(copies).as_secs_f64();
    println!(
        "{dtype} after {context}: {:.2} ms a token, {:.0} MB read at {:.1} GB/s; a copy moves {:.1} GB/s",
        1e3 * step,
        bytes / MEGABYTE,
        bytes / step / 1e9,
        copied / 1e9
    );
    for (kind, times) in kinds {
        let time = median(times).as_secs_f64();
        println!("{kind:>10} {:8.3} ms {:5.1} %", 1e3 * time, 100.0 * time / step);
    }
    Ok(())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
