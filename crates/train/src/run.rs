//! A whole run: steps, and between them evaluation, samples and checkpoints.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use deuteron::{Engine, Tensor};
use deuteron_gpt2::{Config, GenerateOptions, Gpt2, Sampling, Tokenizer};

use crate::data::{Batch, Corpus, Draw, mixed};
use crate::error::Error;
use crate::folder::{Progress, RunFolder, restore};
use crate::log::{Line, Log};
use crate::settings::Settings;
use crate::trainer::{MemoryUse, Scalars, StepResult, Trainer};

const LOG: &str = "log.csv";
const CURVE: &str = "curve.svg";

/// The parts of a run.
pub struct RunOptions<'a> {
    /// its folder
    pub out: &'a Path,
    /// whether to resume from the newest checkpoint of the folder
    pub resume: bool,
    /// the model
    pub config: Config,
    /// the settings
    pub settings: &'a Settings,
    /// the data
    pub corpus: &'a Corpus,
    /// for samples; also stored with checkpoints
    pub tokenizer: &'a Tokenizer,
    /// work between steps
    pub cadence: Cadence,
}

/// Work between steps, which does not change the run. A count of 0 turns it off.
#[derive(Debug, Clone, PartialEq)]
pub struct Cadence {
    /// the step at which this process stops, if it is not the last
    pub until: Option<u64>,
    /// steps between losses of the validation tokens
    pub evaluate_every: u64,
    /// maximum batches per evaluation
    pub evaluate_batches: usize,
    /// steps between checkpoints, besides the one at the end
    pub save_every: u64,
    /// number of checkpoints to keep
    pub keep: usize,
    /// steps between samples
    pub sample_every: u64,
    /// tokens of a sample
    pub sample_tokens: usize,
    /// prompt of samples; if empty, the end-of-text token
    pub prompt: String,
}

/// An observer of a run.
pub trait Watch {
    /// The run starts or resumes after this many steps, and uses this much memory.
    fn started(&mut self, step: u64, memory: MemoryUse);
    /// A step was taken.
    fn stepped(&mut self, line: &Line);
    /// A sample was drawn.
    fn sampled(&mut self, step: u64, text: &str);
    /// A checkpoint was written.
    fn saved(&mut self, folder: &Path);
    /// Whether the run should save a checkpoint and stop; called before each step.
    fn is_stopped(&mut self) -> bool;
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Ended {
    /// steps that were taken in all
    pub step: u64,
    /// whether those are all steps
    pub is_finished: bool,
    /// the last step of this process, if it took one
    pub last: Option<Line>,
    /// the last loss of the validation tokens
    pub validation_loss: Option<f64>,
    /// the newest checkpoint
    pub checkpoint: PathBuf,
    /// its memory
    pub memory: MemoryUse,
}

/// Trains. `start` returns the initial weights, in f32.
pub fn run(
    engine: &Engine,
    options: &RunOptions<'_>,
    start: impl FnOnce(&Engine) -> Result<Vec<Tensor>, Error>,
    watch: &mut dyn Watch,
) -> Result<Ended, Error> {
    let RunOptions { out, resume, config, settings, corpus, .. } = *options;
    settings.check(&config)?;
    config.check()?;
    corpus.check(settings.sequence)?;
    let folder = RunFolder::open(out)?;
    let data = format!("{} tokens, {:016x}", corpus.train().len() + corpus.validation().len(), corpus.digest());
    let (trainer, step) = match (folder.checkpoints()?.last().copied(), resume) {
        (Some(step), false) => return Err(Error::Occupied { folder: out.to_path_buf(), step }),
        (None, true) => return Err(Error::NoCheckpoint(out.to_path_buf())),
        (None, false) => (Trainer::new(engine, &config, &settings.step()?, start(engine)?)?, 0),
        (Some(step), true) => {
            let checkpoint = folder.checkpoint(step);
            let progress = Progress::read(&checkpoint)?;
            progress.check(&checkpoint, settings, &data)?;
            let trainer = restore(engine, &checkpoint, settings)?;
            same_model(&checkpoint, trainer.config(), &config)?;
            (trainer, progress.step)
        }
    };
    let log = Log::open(&folder.file(LOG), step)?;
    watch.started(step, trainer.memory());
    Running { options, folder, trainer, log, data, sampler: None, step }.all(watch)
}

/// A run between two steps.
struct Running<'a> {
    options: &'a RunOptions<'a>,
    folder: RunFolder,
    trainer: Trainer,
    log: Log,
    /// of the corpus
    data: String,
    sampler: Option<Gpt2>,
    /// taken so far
    step: u64,
}

impl Running<'_> {
    fn all(mut self, watch: &mut dyn Watch) -> Result<Ended, Error> {
        let RunOptions { settings, ref cadence, corpus, .. } = *self.options;
        let validation = match cadence.evaluate_every {
            0 => Vec::new(),
            _ => corpus.validation_batches(settings.batch, settings.sequence, cadence.evaluate_batches),
        };
        let mut last = None;
        let end = cadence.until.map_or(settings.steps, |step| step.min(settings.steps));
        while self.step < end && !watch.is_stopped() {
            let due = |every: u64, step: u64| every > 0 && (step.is_multiple_of(every) || step == settings.steps);
            let mut line = self.step()?;
            if due(cadence.evaluate_every, self.step) {
                line.validation_loss = self.evaluate(&validation)?;
            }
            self.log.push(line)?;
            watch.stepped(&line);
            last = Some(line);
            if due(cadence.sample_every, self.step) {
                watch.sampled(self.step, &self.sample()?);
            }
            if due(cadence.save_every, self.step) {
                watch.saved(&self.save()?);
            }
        }
        let checkpoint = self.save()?;
        watch.saved(&checkpoint);
        let validation_loss = self.log.lines().iter().rev().find_map(|line| line.validation_loss);
        let (step, is_finished, memory) = (self.step, self.step >= settings.steps, self.trainer.memory());
        Ok(Ended { step, is_finished, last, validation_loss, checkpoint, memory })
    }

    /// Takes a step.
    fn step(&mut self) -> Result<Line, Error> {
        let RunOptions { settings, corpus, .. } = *self.options;
        let Settings { seed, batch, sequence, .. } = *settings;
        let begin = Instant::now();
        let draw = |micro_batch: usize| corpus.batch(Draw { seed, step: self.step, micro_batch, batch, sequence });
        let batches: Vec<Batch> = (0..settings.accumulate).map(draw).collect();
        let scalars = Scalars {
            step: self.step + 1,
            rate: settings.rate(self.step),
            clip: settings.clip.unwrap_or(f64::INFINITY),
            // Beside the streams of batches, whose last part is a small number.
            seed: mixed(&[seed, self.step, u64::MAX]) as i32,
        };
        let StepResult { loss, norm } = self.trainer.step(&batches, scalars)?;
        self.step += 1;
        for (what, value) in [("loss", loss), ("norm of the gradient", norm)] {
            if !value.is_finite() {
                let last = self.folder.checkpoints()?.last().map(|&step| self.folder.checkpoint(step));
                return Err(Error::NotFinite { step: self.step, what, value, last });
            }
        }
        Ok(Line {
            step: self.step,
            tokens: self.step * settings.tokens(),
            loss,
            validation_loss: None,
            gradient_norm: norm,
            learning_rate: scalars.rate,
            tokens_per_second: settings.tokens() as f64 / begin.elapsed().as_secs_f64().max(1e-9),
        })
    }

    fn evaluate(&mut self, batches: &[Batch]) -> Result<Option<f64>, Error> {
        let mut sum = 0.0;
        for batch in batches {
            sum += self.trainer.evaluate(batch)?;
        }
        Ok((!batches.is_empty()).then(|| sum / batches.len() as f64))
    }

    /// A sample of the current model.
    fn sample(&mut self) -> Result<String, Error> {
        let RunOptions { tokenizer, ref cadence, settings, .. } = *self.options;
        let (engine, config) = (self.trainer.engine(), self.trainer.config());
        let mut prompt = tokenizer.encode(&cadence.prompt);
        if prompt.is_empty() {
            prompt.push(tokenizer.end_of_text().unwrap_or(0));
        }
        prompt.truncate(config.context);
        let sampling = Sampling { temperature: 0.8, top_k: Some(40), top_p: None, seed: self.step };
        let options =
            GenerateOptions { max_tokens: cadence.sample_tokens, sampling, end_of_text: tokenizer.end_of_text() };
        let sampler = match &mut self.sampler {
            Some(sampler) => sampler,
            none => none.insert(Gpt2::empty(engine, config, settings.precision.weights())?),
        };
        sampler.lend(self.trainer.lent());
        let texts = sampler.generate(&[prompt], &options, |_, _| ControlFlow::Continue(()));
        // The next step writes them.
        drop(sampler.lend(Vec::new()));
        let texts = texts?;
        // A model may have more rows than the tokenizer has tokens; those have no text.
        let known = texts[0].tokens.iter().copied().filter(|&token| (token as usize) < tokenizer.tokens());
        Ok(cadence.prompt.clone() + &tokenizer.decode(&known.collect::<Vec<u32>>()).unwrap_or_default())
    }

    fn save(&mut self) -> Result<PathBuf, Error> {
        let RunOptions { tokenizer, settings, ref cadence, .. } = *self.options;
        let progress = Progress { step: self.step, settings: settings.clone(), data: self.data.clone() };
        let saved = self.folder.save(&self.trainer, tokenizer, &progress, cadence.keep)?;
        let curve = self.folder.file(CURVE);
        let title = format!("{:.1} M parameters", self.trainer.config().parameters() as f64 / 1e6);
        std::fs::write(&curve, self.log.curve(&title)).map_err(|problem| Error::Write { path: curve, problem })?;
        Ok(saved)
    }
}

/// Checks that a checkpoint belongs to the requested model.
fn same_model(checkpoint: &Path, stored: &Config, given: &Config) -> Result<(), Error> {
    if (Config { name: given.name, ..*stored }) == *given {
        return Ok(());
    }
    let sizes = |config: &Config| {
        let Config { layers, heads, hidden, context, vocabulary, .. } = config;
        format!("{layers} layers, width {hidden}, {heads} heads, context {context}, {vocabulary} tokens")
    };
    let (folder, name) = (checkpoint.to_path_buf(), "a model of".to_string());
    Err(Error::Differs { folder, name, stored: sizes(stored), given: sizes(given) })
}
