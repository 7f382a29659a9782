//! Progress of training, and its signal handling.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use deuteron::{Bytes, Engine, Quantity};
use deuteron_gpt2::Config;
use deuteron_train::{Line, MemoryUse, Precision, Settings, Watch, flops_per_token};
use indicatif::ProgressBar;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::show;

/// The interval of progress lines without a terminal.
const EVERY: Duration = Duration::from_secs(10);

/// A bar on a terminal, a line now and then elsewhere; samples on standard output.
pub struct Watching {
    bar: ProgressBar,
    quiet: bool,
    steps: u64,
    /// of this process
    first: u64,
    tokens: u64,
    flops: f64,
    peak: Option<f64>,
    begin: Instant,
    printed: Option<Instant>,
    stop: Arc<AtomicBool>,
}

impl Watching {
    /// From now on the first SIGINT or SIGTERM asks the run to end, and the second ends the process.
    pub fn new(engine: &Engine, config: &Config, settings: &Settings, quiet: bool) -> Result<Watching> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag unset.
            flag::register_conditional_shutdown(signal, 128 + signal, stop.clone())
                .and_then(|_| flag::register(signal, stop.clone()))
                .context("cannot install signal handlers")?;
        }
        let quantity = match settings.precision {
            Precision::F32 => Quantity::Matrix32Tflops,
            Precision::Bf16 => Quantity::Matrix16Tflops,
        };
        Ok(Watching {
            bar: show::progress(Some(settings.steps)),
            quiet,
            steps: settings.steps,
            first: 0,
            tokens: settings.tokens(),
            flops: flops_per_token(config, settings.sequence),
            peak: engine.device().machine().find(quantity).map(|tflops| tflops * 1e12),
            begin: Instant::now(),
            printed: None,
            stop,
        })
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Loss and speed as text. Speed is the mean over this process, including the time between steps.
    fn words(&self, line: &Line) -> String {
        let seconds = self.begin.elapsed().as_secs_f64().max(1e-9);
        let speed = ((line.step - self.first) * self.tokens) as f64 / seconds;
        let share = self.peak.map(|peak| format!(" ({:.0} % of peak)", 100.0 * speed * self.flops / peak));
        let validation = line.validation_loss.map(|loss| format!(", validation {loss:.4}")).unwrap_or_default();
        let tokens = if speed < 1e4 { format!("{speed:.0}") } else { format!("{:.1} k", speed / 1e3) };
        format!("loss {:.4}{validation}, {tokens} tokens/s{}", line.loss, share.unwrap_or_default())
    }

    fn left(&self, line: &Line) -> String {
        let each = self.begin.elapsed().as_secs_f64() / (line.step - self.first).max(1) as f64;
        let seconds = (each * (self.steps - line.step) as f64) as u64;
        match seconds {
            0..60 => format!("{seconds} s"),
            60..3600 => format!("{} min", seconds.div_ceil(60)),
            _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        }
    }
}

/// How much memory training takes, and what is recomputed.
fn in_words(memory: &MemoryUse) -> String {
    let MemoryUse { states, sessions, otherwise } = *memory;
    let parts = format!("{} weights and moments, {} activations and gradients", Bytes(states), Bytes(sessions));
    let why = match otherwise {
        Some(fast) => format!("to save memory: the fastest step takes {}", Bytes(states + fast)),
        None => "where that saves traffic".to_string(),
    };
    format!("memory: {} ({parts}); backward recomputes activations {why}", Bytes(memory.all()))
}

impl Watch for Watching {
    fn started(&mut self, step: u64, memory: MemoryUse) {
        if !self.quiet {
            self.bar.suspend(|| errln!("{}", in_words(&memory)));
        }
        (self.first, self.begin) = (step, Instant::now());
        self.bar.set_position(step);
        self.bar.reset_eta();
    }

    fn stepped(&mut self, line: &Line) {
        self.bar.set_position(line.step);
        self.bar.set_message(self.words(line));
        let due = line.validation_loss.is_some() || line.step == self.first + 1;
        let due = due || self.printed.is_none_or(|printed| printed.elapsed() >= EVERY);
        if !self.quiet && due {
            self.printed = Some(Instant::now());
            let words = self.words(line);
            let text = format!("step {}/{}: {words}, about {} left", line.step, self.steps, self.left(line));
            // Lines with a validation loss stay above the bar; the bar shows the others.
            if self.bar.is_hidden() {
                errln!("{text}");
            } else if line.validation_loss.is_some() {
                self.bar.println(text);
            }
        }
    }

    fn sampled(&mut self, step: u64, text: &str) {
        if !self.quiet {
            self.bar.suspend(|| outln!("--- step {step}\n{text}"));
        }
    }

    fn saved(&mut self, folder: &Path) {
        if !self.quiet && !self.bar.is_hidden() {
            self.bar.println(format!("saved {}", folder.display()));
        }
    }

    fn is_stopped(&mut self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}
