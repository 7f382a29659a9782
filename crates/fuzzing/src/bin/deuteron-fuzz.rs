//! Feeds mutated files to every reader, and the parsed results to planner, kernels and analysis: nothing may panic, or take too much time or memory.
//!
//! Mutations come from a seed, so a failure is found again by its number. `cargo xtask fuzz` builds and runs this; cargo-fuzz drives
//! the same bodies where a nightly toolchain exists (`fuzz/`).
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use deuteron::Graph;
use deuteron_fuzzing::{analyzed, graphs, on_machine, planned, rendered, with_another_number};
use deuteron_plan::Machine;
use deuteron_reference::Generator;
use deuteron_report::{Analysis, parse};
use deuteron_testkit::fuzz::{mutate, mutate_bytes, onnx, text_graph};
use deuteron_testkit::readers;

/// Seconds of a core that planning, rendering or analysing one graph may take at most.
const LONGEST: f64 = 10.0;

/// Memory that the program may have at most.
const MOST_MEGABYTES: u64 = 2048;

/// How long a target runs.
#[derive(Clone, Copy)]
enum Limit {
    Inputs(u64),
    Time(Duration),
}

const TARGETS: [&str; 9] =
    ["text_graph", "onnx", "machine", "analysis", "expectations", "plan", "kernel", "analyze", "on_machine"];

const EXPECTATIONS: [&str; 2] = [
    "# in CI\nfused: layer_norm, gelu\nnot fused: matmul, layer_norm\nall fused: add, layer_norm\n",
    "fused layer_norm + gelu\nnot fused add + add + add\n",
];

/// What was asked for.
struct Options {
    limit: Limit,
    only: Option<String>,
    /// Seed of the first input.
    from: u64,
    /// Gets a row per target.
    csv: Option<PathBuf>,
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let options = options(&words)?;
    for target in TARGETS.into_iter().filter(|target| options.only.as_deref().is_none_or(|only| only == *target)) {
        let body = body(target)?;
        let run = drive(&*body, options.limit, options.from);
        let Run { inputs, accepted, seconds, longest } = run;
        let memory = peak_megabytes();
        println!(
            "fuzz {target}: {inputs} inputs, {accepted} accepted, 0 panics, {seconds:.0} s, longest {longest:.2} s, {memory} MB"
        );
        if let Some(file) = &options.csv {
            append(file, target, options.from, &run, memory).with_context(|| file.display().to_string())?;
        }
        ensure!(memory <= MOST_MEGABYTES, "{target} took {memory} MB, at most {MOST_MEGABYTES} are expected");
    }
    Ok(())
}

fn options(words: &[String]) -> Result<Options> {
    let mut options = Options { limit: Limit::Inputs(100_000), only: None, from: 0, csv: None };
    for pair in words.chunks(2) {
        match pair.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
            ["--inputs", count] => options.limit = Limit::Inputs(count.parse().context("--inputs needs a number")?),
            ["--seconds", count] => {
                let seconds = count.parse().context("--seconds needs a number")?;
                options.limit = Limit::Time(Duration::from_secs(seconds));
            }
            ["--seed", seed] => options.from = seed.parse().context("--seed needs a number")?,
            ["--csv", file] => options.csv = Some(PathBuf::from(file)),
            ["--target", name] if TARGETS.contains(name) => options.only = Some(name.to_string()),
            _ => bail!("expected --inputs N, --seconds S, --seed N, --csv FILE or --target ({})", TARGETS.join(", ")),
        }
    }
    Ok(options)
}

/// Whether the input of a seed was accepted. A panic ends the program with the seed in its message.
type Body = Box<dyn Fn(u64) -> bool + Sync>;

fn body(target: &str) -> Result<Body> {
    Ok(match target {
        "text_graph" => {
            let texts = graphs();
            Box::new(move |seed| text_graph(&changed(&texts, seed)))
        }
        "onnx" => {
            let corpus = corpus("fuzz/seeds/onnx")?;
            Box::new(move |seed| onnx(&mutate_bytes(&corpus, seed)).is_ok())
        }
        "machine" => {
            let texts = machines();
            Box::new(move |seed| readers::machine(&mutate(&texts, seed)))
        }
        "analysis" => {
            let corpus = corpus("fuzz/seeds/analysis")?;
            Box::new(move |seed| readers::analysis(&mutate_bytes(&corpus, seed)))
        }
        "plan" => of_graphs(planned),
        "kernel" => of_graphs(rendered),
        "analyze" => of_graphs(analyzed),
        "on_machine" => {
            let (texts, graphs) = (machines(), graphs());
            let graphs: Vec<Graph> = graphs.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
            Box::new(move |seed| watched(changed(&texts, seed), |data| on_machine(data, seed, &graphs)))
        }
        _ => {
            let known = known_analysis()?;
            Box::new(move |seed| readers::expectations(&mutate(&EXPECTATIONS, seed), &known))
        }
    })
}

/// A body that takes the text of a graph.
fn of_graphs(body: fn(&[u8], u64) -> bool) -> Body {
    let texts = graphs();
    Box::new(move |seed| watched(changed(&texts, seed), |data| body(data, seed)))
}

/// Gives a text to a body, which may not take too long; a panic prints the text.
fn watched(text: Vec<u8>, body: impl Fn(&[u8]) -> bool) -> bool {
    let (text, begin) = (Shown(text), Instant::now());
    let accepted = body(&text.0);
    if begin.elapsed().as_secs_f64() > LONGEST {
        // Much of that may be waiting for a core. The system's count takes longer to read than a short input.
        let begin = thread_seconds();
        body(&text.0);
        let seconds = thread_seconds() - begin;
        assert!(seconds <= LONGEST, "an input took {seconds:.0} s, at most {LONGEST} are expected");
    }
    accepted
}

/// Seconds that this thread has computed, whatever else the machine does; 0 where the system does not say.
fn thread_seconds() -> f64 {
    let status = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    status.split(' ').next().and_then(|word| word.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

/// A text that is printed while a panic unwinds.
struct Shown(Vec<u8>);

impl Drop for Shown {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", String::from_utf8_lossy(&self.0));
        }
    }
}

fn machines() -> [&'static str; 5] {
    Machine::PROFILES.map(|name| Machine::profile_text(name).unwrap_or(""))
}

/// One of some texts with other numbers in it, or, one in four, with other bytes.
fn changed(texts: &[impl AsRef<str>], seed: u64) -> Vec<u8> {
    let mut random = Generator::new(seed);
    if random.chance(0.25) {
        return mutate(texts, seed);
    }
    let mut text = texts[random.below(texts.len())].as_ref().to_string();
    for _ in 0..1 + random.below(3) {
        text = with_another_number(&text, &mut random);
    }
    text.into_bytes()
}

fn known_analysis() -> Result<Analysis> {
    let corpus = corpus("fuzz/seeds/analysis")?;
    let text = String::from_utf8_lossy(&corpus[0]).into_owned();
    Ok(parse(&text)?)
}

fn corpus(folder: &str) -> Result<Vec<Vec<u8>>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder);
    let entries = fs::read_dir(&root).with_context(|| format!("cannot read {folder}"))?;
    let mut paths: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    paths.sort();
    let files: Vec<Vec<u8>> = paths.iter().map(fs::read).collect::<Result<_, _>>()?;
    if files.is_empty() {
        bail!("{folder} is empty");
    }
    Ok(files)
}

/// What a target took.
struct Run {
    inputs: u64,
    accepted: u64,
    seconds: f64,
    /// Seconds of the input that took longest, waiting for a core included.
    longest: f64,
}

/// Runs a body on all cores, seed after seed.
fn drive(body: &(dyn Fn(u64) -> bool + Sync), limit: Limit, from: u64) -> Run {
    let (next, accepted, longest) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let over = match limit {
                        Limit::Inputs(count) => number >= count,
                        Limit::Time(time) => start.elapsed() >= time,
                    };
                    if over {
                        return;
                    }
                    // Named, so that a panic's report ends with the number that brings it back.
                    let guard = Seed(from.wrapping_add(number));
                    let begin = Instant::now();
                    accepted.fetch_add(body(guard.0) as u64, Ordering::Relaxed);
                    longest.fetch_max(begin.elapsed().as_micros() as u64, Ordering::Relaxed);
                    std::mem::forget(guard);
                }
            });
        }
    });
    let inputs = match limit {
        Limit::Inputs(count) => count,
        Limit::Time(_) => next.load(Ordering::Relaxed).saturating_sub(workers as u64),
    };
    let longest = longest.load(Ordering::Relaxed) as f64 / 1e6;
    Run { inputs, accepted: accepted.load(Ordering::Relaxed), seconds: start.elapsed().as_secs_f64(), longest }
}

/// Says which seed panicked while the panic unwinds.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        eprintln!("the input of seed {} panicked", self.0);
    }
}

/// The most memory that the program has had; 0 where the system does not say.
fn peak_megabytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// Appends a row, below a header if the file is new.
fn append(file: &Path, target: &str, from: u64, run: &Run, memory: u64) -> Result<()> {
    let mut file = File::options().append(true).create(true).open(file)?;
    let is_new = file.metadata()?.len() == 0;
    let header = if is_new { "date,target,driver,inputs,panics_left,note\n" } else { "" };
    let date = Command::new("date").arg("+%Y-%m-%d").output()?.stdout;
    let date = String::from_utf8_lossy(&date).trim().to_string();
    let Run { inputs, accepted, seconds, longest } = run;
    let note = format!("from seed {from}; {accepted} accepted; {seconds:.0} s; longest {longest:.2} s; {memory} MB");
    file.write_all(format!("{header}{date},{target},cargo xtask fuzz,{inputs},0,{note}\n").as_bytes())?;
    Ok(())
}
