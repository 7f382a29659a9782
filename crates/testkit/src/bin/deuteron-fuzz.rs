//! Mutated files into every reader of files: nothing may panic.
//!
//! Mutations come from a seed, so a failure is found again by its number. `cargo xtask fuzz` builds and runs this; cargo-fuzz drives
//! the same bodies where a nightly toolchain exists (`fuzz/`).
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use deuteron_plan::Machine;
use deuteron_report::{Analysis, parse};
use deuteron_testkit::fuzz::{mutate, mutate_bytes, onnx, text_graph};
use deuteron_testkit::readers;

/// How long a target runs.
#[derive(Clone, Copy)]
enum Limit {
    Inputs(u64),
    Time(Duration),
}

const TARGETS: [&str; 5] = ["text_graph", "onnx", "machine", "analysis", "expectations"];

const GRAPHS: [&str; 3] = [
    "x = input f32[4,8] ; y, mean, rstd = layer_norm x w[8] b[8] ; z = gelu y ; out z",
    "q = input bf16[2,4,16,8] ; a = attention q q q mask=causal ; out a",
    "a = opaque x[4,8] f32[4,8] name=Sin flops=32 bytes=256 elementwise ; b = add a 1.0 ; out b",
];

const EXPECTATIONS: [&str; 2] = [
    "# in CI\nfused: layer_norm, gelu\nnot fused: matmul, layer_norm\nall fused: add, layer_norm\n",
    "fused layer_norm + gelu\nnot fused add + add + add\n",
];

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (mut limit, mut only) = (Limit::Inputs(100_000), None);
    for pair in words.chunks(2) {
        match pair {
            ["--inputs", count] => limit = Limit::Inputs(count.parse().context("--inputs needs a number")?),
            ["--seconds", count] => {
                limit = Limit::Time(Duration::from_secs(count.parse().context("--seconds needs a number")?));
            }
            ["--target", name] if TARGETS.contains(name) => only = Some(*name),
            _ => bail!("expected --inputs N, --seconds S or --target ({})", TARGETS.join(", ")),
        }
    }
    for target in TARGETS.into_iter().filter(|target| only.is_none_or(|only| only == *target)) {
        let body = body(target)?;
        let (inputs, accepted, seconds) = drive(&*body, limit);
        println!("fuzz {target}: {inputs} inputs, {accepted} accepted, 0 panics, {seconds:.0} s");
    }
    Ok(())
}

/// Whether the reader accepted the input of a seed. A panic ends the program with the seed in its message.
type Body = Box<dyn Fn(u64) -> bool + Sync>;

fn body(target: &str) -> Result<Body> {
    Ok(match target {
        "text_graph" => Box::new(|seed| {
            text_graph(&mutate(&GRAPHS, seed));
            true
        }),
        "onnx" => {
            let corpus = corpus("fuzz/seeds/onnx")?;
            Box::new(move |seed| onnx(&mutate_bytes(&corpus, seed)).is_ok())
        }
        "machine" => {
            let texts = Machine::PROFILES.map(|name| Machine::profile_text(name).unwrap_or(""));
            Box::new(move |seed| readers::machine(&mutate(&texts, seed)))
        }
        "analysis" => {
            let corpus = corpus("fuzz/seeds/analysis")?;
            Box::new(move |seed| readers::analysis(&mutate_bytes(&corpus, seed)))
        }
        _ => {
            let known = known_analysis()?;
            Box::new(move |seed| readers::expectations(&mutate(&EXPECTATIONS, seed), &known))
        }
    })
}

fn known_analysis() -> Result<Analysis> {
    let corpus = corpus("fuzz/seeds/analysis")?;
    let text = String::from_utf8_lossy(&corpus[0]).into_owned();
    Ok(parse(&text)?)
}

fn corpus(folder: &str) -> Result<Vec<Vec<u8>>> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder);
    let entries = std::fs::read_dir(&root).with_context(|| format!("cannot read {folder}"))?;
    let mut paths: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    paths.sort();
    let files: Vec<Vec<u8>> = paths.iter().map(std::fs::read).collect::<Result<_, _>>()?;
    if files.is_empty() {
        bail!("{folder} is empty");
    }
    Ok(files)
}

/// Runs a body on all cores, seed after seed.
fn drive(body: &(dyn Fn(u64) -> bool + Sync), limit: Limit) -> (u64, u64, f64) {
    let (next, accepted) = (AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let over = match limit {
                        Limit::Inputs(count) => seed >= count,
                        Limit::Time(time) => start.elapsed() >= time,
                    };
                    if over {
                        return;
                    }
                    // Named, so that a panic's report ends with the number that brings it back.
                    let guard = Seed(seed);
                    accepted.fetch_add(body(seed) as u64, Ordering::Relaxed);
                    std::mem::forget(guard);
                }
            });
        }
    });
    let inputs = match limit {
        Limit::Inputs(count) => count,
        Limit::Time(_) => next.load(Ordering::Relaxed).saturating_sub(workers as u64),
    };
    (inputs, accepted.load(Ordering::Relaxed), start.elapsed().as_secs_f64())
}

/// Says which seed panicked while the panic unwinds.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        eprintln!("the input of seed {} panicked", self.0);
    }
}
