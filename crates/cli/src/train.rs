//! `deuteron train`: a GPT-2 of any size, on text or tokens.

mod model;
mod watch;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use deuteron::Engine;
use deuteron_gpt2::{Checkpoint, Config, Weights, upload, write_checkpoint};
use deuteron_train::{Cadence, Corpus, Ended, Precision, RunOptions, Settings, Validation, run as train};
use serde::Serialize;

use crate::device::DeviceArguments;
use crate::{Outcome, show};
use model::{Model, ModelArguments};
use watch::Watching;

#[derive(Args)]
pub struct Arguments {
    /// Text files (UTF-8), or .bin files of tokens: 16 bits each, 32 for a vocabulary above 65536, little-endian
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Folder of the run: checkpoint-STEP folders that `generate --model` and transformers read, log.csv, curve.svg
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Continue from the newest checkpoint of --out, with the same bits as an uninterrupted run; the settings must be the same
    #[arg(long)]
    resume: bool,
    /// At the end of the run, also write the model to this folder, with weights in f16
    #[arg(long, value_name = "DIR")]
    export: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArguments,
    /// Print {step, steps, finished, parameters, loss, validation_loss, tokens, tokens_per_second, checkpoint, memory_bytes, saves_memory, device} at the end; loss and
    /// tokens_per_second are of the last step
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    data: DataArguments,
    #[command(flatten)]
    steps: StepArguments,
    #[command(flatten)]
    optimizer: OptimizerArguments,
    #[command(flatten)]
    cadence: CadenceArguments,
}

#[derive(Args)]
#[command(next_help_heading = "Data")]
struct DataArguments {
    /// Files for validation [default: the end of FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "validation_share")]
    validation: Vec<PathBuf>,
    /// Share of all tokens held out for validation [default: 0.1]
    #[arg(long, value_name = "SHARE")]
    validation_share: Option<f64>,
}

#[derive(Args)]
#[command(next_help_heading = "Steps")]
struct StepArguments {
    /// Number of steps of the whole run
    #[arg(long, default_value_t = 1000)]
    steps: u64,
    /// Sequences per micro-batch
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Tokens per sequence [default: the model's context]
    #[arg(long)]
    sequence: Option<usize>,
    /// Micro-batches per step; their gradients are accumulated in f32
    #[arg(long, default_value_t = 1)]
    accumulate: usize,
    /// Dtype of forward and backward: f32, or bf16 with master weights and moments in f32
    #[arg(long, default_value = "f32", value_parser = precision)]
    precision: Precision,
    /// Dropout probability for embeddings, attention and block results
    #[arg(long, default_value_t = 0.0)]
    dropout: f64,
    /// Seed of weights, batches and dropout
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Memory limit, such as 16GiB or 800MB. If the fastest step exceeds it, backward recomputes activations
    /// instead of reading stored ones; if that still exceeds it, the command fails [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
}

#[derive(Args)]
#[command(next_help_heading = "Optimiser")]
struct OptimizerArguments {
    /// adamw, sgd or lion; weight decay is decoupled in all of them
    #[arg(long, default_value = "adamw")]
    optimizer: String,
    /// The highest learning rate [default: 0.001; 0.0001 for lion, 0.1 for sgd]
    #[arg(long)]
    learning_rate: Option<f64>,
    /// The learning rate at the end of the cosine [default: a tenth of the highest]
    #[arg(long)]
    least_learning_rate: Option<f64>,
    /// Steps until the highest learning rate [default: a twentieth of --steps, at most 2000]
    #[arg(long)]
    warmup: Option<u64>,
    /// Weight decay of matrices and embedding tables; biases and norms have none
    #[arg(long, default_value_t = 0.1)]
    weight_decay: f64,
    /// Decay rate of the first moment; the momentum of sgd
    #[arg(long, default_value_t = 0.9)]
    beta1: f64,
    /// Decay rate of adamw's second moment, and of lion's moment [default: 0.95; 0.99 for lion]
    #[arg(long)]
    beta2: Option<f64>,
    /// Added to the root of adamw's second moment [default: 1e-8]
    #[arg(long)]
    epsilon: Option<f64>,
    /// Clip the gradient to this norm; 0 for no clipping
    #[arg(long, default_value_t = 1.0)]
    clip: f64,
}

#[derive(Args)]
#[command(next_help_heading = "Between steps")]
struct CadenceArguments {
    /// Save a checkpoint and end after this step, as on Ctrl-C; --resume continues
    #[arg(long, value_name = "STEP")]
    until: Option<u64>,
    /// Steps between evaluations of the validation loss; 0 for none
    #[arg(long, value_name = "STEPS", default_value_t = 100)]
    evaluate_every: u64,
    /// Maximum number of batches per evaluation [default: 20]
    #[arg(long, value_name = "BATCHES")]
    evaluate_batches: Option<usize>,
    /// Steps between checkpoints; 0 for only one at the end
    #[arg(long, value_name = "STEPS", default_value_t = 500)]
    save_every: u64,
    /// Number of checkpoints to keep
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    keep: usize,
    /// Steps between samples on standard output; 0 for none
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    sample_every: u64,
    /// Tokens per sample [default: 64]
    #[arg(long, value_name = "TOKENS")]
    sample_tokens: Option<usize>,
    /// Prompt of the samples [default: the end-of-text token]
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
}

#[derive(Serialize)]
struct Report {
    step: u64,
    steps: u64,
    finished: bool,
    parameters: usize,
    loss: Option<f64>,
    validation_loss: Option<f64>,
    tokens: u64,
    tokens_per_second: Option<f64>,
    checkpoint: PathBuf,
    memory_bytes: u64,
    saves_memory: bool,
    device: String,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let cadence = arguments.cadence.cadence()?;
    if cadence.evaluate_every == 0 && !arguments.data.validation.is_empty() {
        bail!("--validation needs evaluations; got --evaluate-every 0");
    }
    if arguments.json && cadence.sample_every > 0 {
        bail!("--sample-every and --json both write to standard output; expected one of them");
    }
    let engine = arguments.device.engine()?;
    let model = arguments.model.open(&arguments.files)?;
    let settings = arguments.settings(model.config.context)?;
    settings.check(&model.config)?;
    let validation = arguments.data.validation();
    let read = || Corpus::read(&arguments.files, &validation, &model.tokenizer, model.config.vocabulary);
    let corpus = show::spinning("reading the data", read)?;
    if !arguments.json {
        errln!(
            "{:.1} M parameters; {} tokens for training, {} for validation; {} tokens per step; {}",
            model.config.parameters() as f64 / 1e6,
            corpus.train().len(),
            corpus.validation().len(),
            settings.tokens(),
            engine.device().describe()
        );
    }
    let options = RunOptions {
        out: &arguments.out,
        resume: arguments.resume,
        config: model.config,
        settings: &settings,
        corpus: &corpus,
        tokenizer: &model.tokenizer,
        cadence,
    };
    let mut watching = Watching::new(&engine, &model.config, &settings, arguments.json)?;
    let ended = train(&engine, &options, |engine| model.weights(engine, settings.seed), &mut watching);
    watching.finish();
    let ended = ended?;
    if let Some(folder) = &arguments.export {
        export(&engine, &ended.checkpoint, folder, &model)?;
    }
    report(arguments, &settings, &model.config, &engine, ended)
}

/// A checkpoint without training state, at half the size.
fn export(engine: &Engine, checkpoint: &Path, folder: &Path, model: &Model) -> Result<()> {
    let weights = upload(engine, &Checkpoint::open(checkpoint)?, Weights::F16)?;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make `{}`", folder.display()))?;
    write_checkpoint(folder, &model.config, &model.tokenizer, &weights.iter().collect::<Vec<_>>())?;
    Ok(())
}

fn report(
    arguments: &Arguments,
    settings: &Settings,
    config: &Config,
    engine: &Engine,
    ended: Ended,
) -> Result<Outcome> {
    let report = Report {
        step: ended.step,
        steps: settings.steps,
        finished: ended.is_finished,
        parameters: config.parameters(),
        loss: ended.last.map(|line| line.loss),
        validation_loss: ended.validation_loss,
        tokens: ended.step * settings.tokens(),
        tokens_per_second: ended.last.map(|line| line.tokens_per_second),
        checkpoint: ended.checkpoint,
        memory_bytes: ended.memory.all(),
        saves_memory: ended.memory.otherwise.is_some(),
        device: engine.device().describe(),
    };
    if arguments.json {
        show::json(&report)?;
        return Ok(Outcome::Good);
    }
    let loss = |name: &str, loss: Option<f64>| loss.map(|loss| format!(", {name} {loss:.4}")).unwrap_or_default();
    let how = if report.finished { "trained" } else { "stopped; the same command with --resume continues" };
    errln!(
        "{how}: {} of {} steps{}{}; {}",
        report.step,
        report.steps,
        loss("loss", report.loss),
        loss("validation loss", report.validation_loss),
        report.checkpoint.display()
    );
    Ok(Outcome::Good)
}

impl Arguments {
    fn settings(&self, context: usize) -> Result<Settings> {
        let (steps, optimizer) = (&self.steps, &self.optimizer);
        let name = optimizer.optimizer.as_str();
        match (name, optimizer.beta2, optimizer.epsilon) {
            ("sgd", Some(_), _) => bail!("--beta2 is for adamw and lion; got --optimizer sgd"),
            ("sgd" | "lion", _, Some(_)) => bail!("--epsilon is for adamw; got --optimizer {name}"),
            _ => {}
        }
        let learning_rate = optimizer.learning_rate.unwrap_or(match name {
            "sgd" => 0.1,
            "lion" => 1e-4,
            _ => 1e-3,
        });
        Ok(Settings {
            steps: steps.steps,
            batch: steps.batch,
            sequence: steps.sequence.unwrap_or(context),
            accumulate: steps.accumulate,
            precision: steps.precision,
            dropout: steps.dropout,
            optimizer: name.to_string(),
            beta1: optimizer.beta1,
            beta2: optimizer.beta2.unwrap_or(if name == "lion" { 0.99 } else { 0.95 }),
            epsilon: optimizer.epsilon.unwrap_or(1e-8),
            weight_decay: optimizer.weight_decay,
            learning_rate,
            least_learning_rate: optimizer.least_learning_rate.unwrap_or(learning_rate / 10.0),
            warmup: optimizer.warmup.unwrap_or((steps.steps / 20).min(2000)),
            clip: (optimizer.clip != 0.0).then_some(optimizer.clip),
            seed: steps.seed,
            memory: steps.memory,
        })
    }
}

impl DataArguments {
    fn validation(&self) -> Validation {
        match self.validation.as_slice() {
            [] => Validation::Share(self.validation_share.unwrap_or(0.1)),
            files => Validation::Files(files.to_vec()),
        }
    }
}

impl CadenceArguments {
    fn cadence(&self) -> Result<Cadence> {
        if self.sample_every == 0 && (self.sample_tokens.is_some() || self.prompt.is_some()) {
            bail!("--sample-tokens and --prompt are for samples; expected --sample-every STEPS with them");
        }
        match (self.evaluate_every, self.evaluate_batches) {
            (0, Some(_)) => bail!("--evaluate-batches needs evaluations; got --evaluate-every 0"),
            (_, Some(0)) => {
                bail!("--evaluate-batches must be at least 1, got 0; --evaluate-every 0 turns evaluation off")
            }
            _ => {}
        }
        if self.keep == 0 {
            bail!("--keep must be at least 1, got 0: a run without a checkpoint cannot be resumed");
        }
        Ok(Cadence {
            until: self.until,
            evaluate_every: self.evaluate_every,
            evaluate_batches: self.evaluate_batches.unwrap_or(20),
            save_every: self.save_every,
            keep: self.keep,
            sample_every: self.sample_every,
            sample_tokens: self.sample_tokens.unwrap_or(64),
            prompt: self.prompt.clone().unwrap_or_default(),
        })
    }
}

/// A number of bytes, with a unit if there is one.
fn size(text: &str) -> Result<u64, String> {
    let expected = || format!("expected a size such as 16GiB, 800MB or a number of bytes, got `{text}`");
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit: f64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1048576.0,
        "gib" => 1073741824.0,
        "tib" => 1099511627776.0,
        _ => return Err(expected()),
    };
    let number: f64 = digits.trim().parse().map_err(|_| expected())?;
    let bytes = number * unit;
    if bytes.is_finite() && (1.0..1e18).contains(&bytes) { Ok(bytes as u64) } else { Err(expected()) }
}

fn precision(text: &str) -> Result<Precision, String> {
    let all = [Precision::F32, Precision::Bf16];
    all.into_iter().find(|known| known.name() == text).ok_or_else(|| "expected f32 or bf16".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_a_unit() {
        let read = [("16GiB", 16 << 30), ("1.5gib", 3 << 29), ("800MB", 800_000_000), ("4096", 4096), ("2 KiB", 2048)];
        for (text, bytes) in read {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "0", "-1GiB", "nan", "inf", "1e30", "16 gallons", "16GiBs", "1x6"] {
            let error = size(text).unwrap_err();
            assert!(error.contains("such as 16GiB") && error.contains(text), "{error}");
        }
    }
}
