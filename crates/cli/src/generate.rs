//! `deuteron generate`: text from a GPT-2.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use deuteron::{Bytes, Engine};
use deuteron_gpt2::{Decoder, GenerateOptions, Generation, Sampler, Sampling, Stop, Times, Tokenizer};
use serde::Serialize;

use crate::device::DeviceArguments;
use crate::model::ModelArguments;
use crate::{Outcome, output, show};

#[derive(Args)]
pub struct Arguments {
    /// Text to continue; several prompts run as one batch. Without a prompt the model starts a new document
    #[arg(value_name = "PROMPT")]
    prompts: Vec<String>,
    #[command(flatten)]
    model: ModelArguments,
    /// Maximum number of tokens to generate per prompt
    #[arg(long, default_value_t = 64)]
    max_tokens: usize,
    /// Sampling temperature: 0 takes the likeliest token, higher values flatten the distribution [default: 0; 1 with --top-k or --top-p]
    #[arg(long)]
    temperature: Option<f32>,
    /// Sample from this many of the likeliest tokens
    #[arg(long)]
    top_k: Option<usize>,
    /// Sample from the smallest set of likeliest tokens whose probabilities add up to this
    #[arg(long)]
    top_p: Option<f32>,
    /// Seed of sampling and of synthetic weights; each further prompt uses the next seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    device: DeviceArguments,
    /// Print {model, device, weights, load_seconds, prompt_tokens, generated_tokens, seconds, compile_seconds,
    /// prompt_tokens_per_second, tokens_per_second, peak_memory_bytes, texts}, each text {prompt, text, tokens, stop}; stop is
    /// end_of_text, max_tokens or context_full. The rates exclude compilation, and count prompts and the tokens after the first;
    /// peak_memory_bytes is that of the process and includes the mapped file
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    device: String,
    weights: &'static str,
    load_seconds: f64,
    prompt_tokens: usize,
    generated_tokens: usize,
    seconds: f64,
    compile_seconds: f64,
    prompt_tokens_per_second: f64,
    tokens_per_second: f64,
    peak_memory_bytes: Option<u64>,
    texts: Vec<Text<'a>>,
}

#[derive(Serialize)]
struct Text<'a> {
    prompt: &'a str,
    text: String,
    tokens: &'a [u32],
    stop: &'static str,
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    generate(arguments).map(|()| Outcome::Good)
}

fn generate(arguments: &Arguments) -> Result<()> {
    let sampling = arguments.sampling();
    // Settings are checked before a model is read.
    Sampler::new(sampling)?;
    let engine = arguments.device.engine()?;
    let begin = Instant::now();
    let (mut gpt2, tokenizer) = show::spinning("reading the model", || arguments.model.open(&engine, arguments.seed))?;
    let load = begin.elapsed();
    if !arguments.json {
        arguments.model.introduce();
    }
    let nothing = [String::new()];
    let prompts = if arguments.prompts.is_empty() { &nothing[..] } else { &arguments.prompts };
    let tokens: Vec<Vec<u32>> = prompts.iter().map(|prompt| encode(&tokenizer, prompt)).collect();
    let options = GenerateOptions { max_tokens: arguments.max_tokens, sampling, end_of_text: tokenizer.end_of_text() };
    let begin = Instant::now();
    let generations = match prompts {
        [prompt] if !arguments.json => {
            let mut live = Live::new(&tokenizer, prompt);
            let generations = gpt2.generate(&tokens, &options, |_, token| live.push(token))?;
            live.finish()?;
            generations
        }
        _ => {
            let bar = show::progress(Some((prompts.len() * arguments.max_tokens) as u64));
            let generations = gpt2.generate(&tokens, &options, |_, _| {
                bar.inc(1);
                ControlFlow::Continue(())
            });
            bar.finish_and_clear();
            generations?
        }
    };
    let seconds = begin.elapsed();
    let texts = texts(&tokenizer, prompts, &generations)?;
    let report = arguments.report(&engine, &tokens, texts, (load, seconds, gpt2.times()));
    if arguments.json {
        return show::json(&report);
    }
    if prompts.len() > 1 {
        let texts = (1..).zip(&report.texts);
        let texts = texts.map(|(number, text)| format!("[{number}]\n{}{}\n", text.prompt, text.text));
        out!("{}", texts.collect::<Vec<String>>().join("\n"));
    }
    if output::is_lost() {
        // Whoever reads has seen enough, or the end of the command says what happened.
        return Ok(());
    }
    let full = generations.iter().any(|generation| generation.stop == Stop::ContextFull);
    let full = if full { format!("; the context of {} tokens is full", gpt2.config().context) } else { String::new() };
    let memory = report.peak_memory_bytes.map(|bytes| format!("; peak memory {}", Bytes(bytes))).unwrap_or_default();
    errln!(
        "read in {:.2} s; {} prompt + {} generated tokens in {:.2} s, {:.2} s of it to compile: {:.1} prompt tokens/s, then {:.1} \
         tokens/s{memory}{full}",
        report.load_seconds,
        report.prompt_tokens,
        report.generated_tokens,
        report.seconds,
        report.compile_seconds,
        report.prompt_tokens_per_second,
        report.tokens_per_second
    );
    Ok(())
}

impl Arguments {
    fn sampling(&self) -> Sampling {
        let draws = self.top_k.is_some() || self.top_p.is_some();
        let temperature = self.temperature.unwrap_or(if draws { 1.0 } else { 0.0 });
        Sampling { temperature, top_k: self.top_k, top_p: self.top_p, seed: self.seed }
    }

    fn report<'a>(
        &'a self,
        engine: &Engine,
        prompts: &[Vec<u32>],
        texts: Vec<Text<'a>>,
        (load, time, times): (Duration, Duration, Times),
    ) -> Report<'a> {
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        Report {
            model: &self.model.model,
            device: engine.device().describe(),
            weights: self.model.weights.name(),
            load_seconds: load.as_secs_f64(),
            prompt_tokens: prompts.iter().map(Vec::len).sum(),
            generated_tokens: texts.iter().map(|text| text.tokens.len()).sum(),
            seconds: time.as_secs_f64(),
            compile_seconds: times.compiling.as_secs_f64(),
            prompt_tokens_per_second: rate(times.prompt_tokens, times.prompt),
            tokens_per_second: rate(times.step_tokens, times.steps),
            peak_memory_bytes: peak_memory(),
            texts,
        }
    }
}

/// A text without tokens starts as documents do in training: after an end-of-text token.
fn encode(tokenizer: &Tokenizer, prompt: &str) -> Vec<u32> {
    match tokenizer.encode(prompt) {
        tokens if tokens.is_empty() => tokenizer.end_of_text().into_iter().collect(),
        tokens => tokens,
    }
}

fn texts<'a>(tokenizer: &Tokenizer, prompts: &'a [String], generations: &'a [Generation]) -> Result<Vec<Text<'a>>> {
    let pairs = prompts.iter().zip(generations);
    let text = |(prompt, generation): (&'a String, &'a Generation)| {
        let stop = match generation.stop {
            Stop::EndOfText => "end_of_text",
            Stop::MaxTokens => "max_tokens",
            Stop::ContextFull => "context_full",
            Stop::Interrupted => "interrupted",
        };
        let text = tokenizer.decode(&generation.tokens)?;
        Ok(Text { prompt, text, tokens: &generation.tokens, stop })
    };
    pairs.map(text).collect()
}

/// A text that is printed while it is generated: first the prompt, then the new tokens.
struct Live<'a> {
    decoder: Decoder<'a>,
    decoded: Result<()>,
}

impl<'a> Live<'a> {
    fn new(tokenizer: &'a Tokenizer, prompt: &str) -> Live<'a> {
        output::write_now(prompt);
        Live { decoder: tokenizer.decoder(), decoded: Ok(()) }
    }

    /// Continues until a token has no text or the output is closed.
    fn push(&mut self, token: u32) -> ControlFlow<()> {
        match self.decoder.push(token) {
            Ok(text) => output::write_now(&text),
            Err(error) => self.decoded = Err(error.into()),
        }
        if self.decoded.is_err() || output::is_lost() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn finish(self) -> Result<()> {
        self.decoded?;
        outln!("{}", self.decoder.finish());
        Ok(())
    }
}

/// The peak memory of this process so far, as Linux counts it.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kibibytes = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().strip_suffix("kB")?;
    Some(kibibytes.trim().parse::<u64>().ok()? * 1024)
}
