//! Where the time of one step of GPT-2 goes: one token from its start, by kind of weights, measured alternately.
//!
//! `cargo run --release -p deuteron-gpt2 --example step -- [runs] [kind ..]`

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use deuteron::{Engine, GroupKind, Session, Strategy, Tensor, seed};
use deuteron_gpt2::{Config, Weights, last_logits};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let runs: usize = words.next().map_or(Ok(50), |word| word.parse())?;
    let mut kinds: Vec<Weights> = words.map(|word| word.parse()).collect::<Result<_, _>>()?;
    if kinds.is_empty() {
        kinds = vec![Weights::F32, Weights::Bf16, Weights::Int8];
    }
    let engine = Engine::cpu();
    let mut models = Vec::new();
    for &kind in &kinds {
        let graph = last_logits(&Config::SMALL, 1, 1, kind)?;
        let mut inputs = seed::inputs(&graph, 1)?;
        // The one row there is.
        inputs[1] = Tensor::from_i32([1], &[0])?;
        models.push((Session::new(&engine, &graph, Strategy::Fused)?, inputs));
    }
    let mut whole: Vec<Vec<Duration>> = vec![Vec::new(); kinds.len()];
    let mut parts: Vec<Vec<Vec<Duration>>> = vec![Vec::new(); kinds.len()];
    for _ in 0..runs {
        for (at, (session, inputs)) in models.iter_mut().enumerate() {
            let inputs: Vec<&Tensor> = inputs.iter().collect();
            let begin = Instant::now();
            session.run(&inputs)?;
            whole[at].push(begin.elapsed());
            parts[at].push(session.run_timed(&inputs)?.to_vec());
        }
    }
    for (at, (session, _)) in models.iter().enumerate() {
        println!("{}: {:.2} ms", kinds[at], 1e3 * median(&mut whole[at]).as_secs_f64());
        let mut names: BTreeMap<(String, u64), (usize, Duration)> = BTreeMap::new();
        for (index, group) in session.plan().groups.iter().enumerate() {
            let mut times: Vec<Duration> = parts[at].iter().map(|run| run[index]).collect();
            let read = |&id: &deuteron::NodeId| session.graph().node(id).bytes() as u64;
            let bytes = if group.kind == GroupKind::Row { 0 } else { group.inputs.iter().map(read).sum() };
            let entry = names.entry((group.name.clone(), bytes)).or_default();
            *entry = (entry.0 + 1, entry.1 + median(&mut times));
        }
        let mut rows: Vec<_> = names.into_iter().collect();
        rows.sort_by_key(|(_, (_, time))| std::cmp::Reverse(*time));
        for ((name, bytes), (count, time)) in rows {
            let each = time / count as u32;
            let rate = bytes as f64 / each.as_secs_f64() / 1e9;
            println!("  {count:>3} x {:>8.1} us  {rate:>5.1} GB/s  {name}", 1e6 * each.as_secs_f64());
        }
    }
    Ok(())
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times[times.len() / 2]
}
