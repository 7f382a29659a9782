//! `deuteron perplexity`: how well a GPT-2 predicts a text.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::device::DeviceArguments;
use crate::input::text_file;
use crate::model::ModelArguments;
use crate::{Outcome, show};

#[derive(Args)]
pub struct Arguments {
    /// UTF-8 text
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    device: DeviceArguments,
    /// Print {model, device, weights, bytes, tokens, loss, perplexity, bits_per_byte, seconds}; loss is the mean over all tokens except the first,
    /// in nats; perplexity is its exponential
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    device: String,
    weights: &'static str,
    bytes: usize,
    tokens: usize,
    loss: f64,
    perplexity: f64,
    bits_per_byte: f64,
    seconds: f64,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    let text = text_file(&arguments.file)?;
    let engine = arguments.device.engine()?;
    let (gpt2, tokenizer) = show::spinning("reading the model", || arguments.model.open(&engine, 1))?;
    let tokens = tokenizer.encode_ordinary(&text);
    let begin = Instant::now();
    let bar = show::progress(Some(tokens.len() as u64));
    let prediction = gpt2.predict(&tokens, |done| bar.set_position(done as u64));
    bar.finish_and_clear();
    let prediction = prediction?;
    let report = Report {
        model: &arguments.model.model,
        device: engine.device().describe(),
        weights: arguments.model.weights.name(),
        bytes: text.len(),
        tokens: tokens.len(),
        loss: prediction.loss(),
        perplexity: prediction.perplexity(),
        bits_per_byte: prediction.nats / std::f64::consts::LN_2 / text.len() as f64,
        seconds: begin.elapsed().as_secs_f64(),
    };
    show::report(&report, arguments.json, |report| {
        outln!(
            "{}, {} weights: perplexity {:.3}, {:.4} nats per token, {:.4} bits per byte; {} tokens of {} bytes in {:.1} s",
            report.model,
            report.weights,
            report.perplexity,
            report.loss,
            report.bits_per_byte,
            report.tokens,
            report.bytes,
            report.seconds
        );
    })?;
    Ok(Outcome::Good)
}
