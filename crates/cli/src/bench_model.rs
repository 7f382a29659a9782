//! `deuteron bench gpt2`: the time of a prompt and of one more token.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use deuteron::bench::Crossing;
use deuteron::{Bytes, Engine};
use deuteron_gpt2::{BenchOptions, BenchReport, Config, Phase, Weights, bench};

use crate::input::GPT2_SEQUENCE;
use crate::show;

/// Sizes of the model to measure.
#[derive(Args)]
pub struct ModelArguments {
    /// Sequences of a model
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Tokens per prompt, and per sequence of attention ops [default: 1024; of box 256]
    #[arg(long)]
    seq: Option<usize>,
    /// Tokens before the one that is decoded
    #[arg(long, default_value_t = 128)]
    context: usize,
}

impl ModelArguments {
    /// Measures a model with weights in the given form.
    pub fn run(&self, engine: &Engine, config: &Config, weights: Weights) -> Result<BenchReport> {
        let seq = self.seq.unwrap_or(config.context.min(GPT2_SEQUENCE));
        measure(engine, config, self.batch, seq, self.context, weights)
    }

    /// Tokens per sequence of attention ops.
    pub fn positions(&self) -> usize {
        self.seq.unwrap_or(GPT2_SEQUENCE)
    }
}

/// Measures prompts of `seq` tokens, and one token after `context`.
pub fn measure(
    engine: &Engine,
    config: &Config,
    batch: usize,
    seq: usize,
    context: usize,
    weights: Weights,
) -> Result<BenchReport> {
    if batch == 0 || !(1..=config.context).contains(&seq) || context >= config.context {
        let most = config.context;
        bail!("expected --batch from 1, --seq from 1 to {most}, --context below {most}; got {batch}, {seq}, {context}");
    }
    let budget = Duration::from_millis(2000);
    let options = BenchOptions { batch, prompt: seq, context, weights, seed: 1, budget };
    Ok(show::spinning("prompt and step", || bench(engine, config, &options))?)
}

/// The report as text.
pub fn print(report: &BenchReport) {
    outln!("{}, {} weights made from a seed, on {}", report.model, report.weights, report.device);
    for phase in &report.phases {
        let (batch, tokens, context) = (phase.batch, phase.tokens, phase.context);
        match phase.name {
            "prefill" => outln!("\nPrefill: {batch} x {tokens} tokens to the last logits"),
            _ => outln!("\nDecode: one token of {batch}, after {context}"),
        }
        print_phase(phase);
        outln!("Fusion: {}.", show::speed(phase.speedup, phase.plans.iter().map(|plan| plan.spread)));
    }
    if let Some(layer) = &report.attention_layer {
        print_layer(layer);
    }
}

fn print_layer(layer: &Crossing) {
    let time = |us: f64| show::milliseconds(us / 1e3);
    let Crossing { apart_kernels, apart_us, .. } = *layer;
    outln!("\nAttention layer of the prompt, queries, keys and values to the norm after the residual");
    outln!("{apart_kernels} kernels: {}.", time(apart_us));
    let Some((kernels, us)) = layer.one_kernels.zip(layer.one_us) else {
        outln!("This device has no kernel for attention, projection, residual and norm in one launch.");
        return;
    };
    let taken = if layer.takes_one { "uses it" } else { "does not use it" };
    let speed = apart_us / us.max(1e-6);
    outln!(
        "{kernels} kernels, all after the first product in one launch: {}, {speed:.2}x the speed. The plan {taken}.",
        time(us)
    );
}

fn print_phase(phase: &Phase) {
    let rows = phase.plans.iter().map(|plan| {
        let layers: Vec<&deuteron_gpt2::LayerTime> =
            plan.layers.iter().filter(|layer| layer.layer.starts_with("h.")).collect();
        let of = |name: &str| plan.layers.iter().find(|layer| layer.layer == name).map_or(0.0, |layer| layer.ms);
        let each = layers.iter().map(|layer| layer.ms).sum::<f64>() / layers.len().max(1) as f64;
        vec![
            plan.plan.clone(),
            plan.kernels.to_string(),
            Bytes(plan.bytes).to_string(),
            show::milliseconds(of("embedding")),
            format!("{} x {}", layers.len(), show::milliseconds(each)),
            show::milliseconds(of("head")),
            show::milliseconds(plan.ms),
            format!("{:.0}", plan.tokens_per_second),
        ]
    });
    let header = ["plan", "kernels", "moved", "embedding", "layers", "head", "whole", "tokens/s"];
    outln!("{}", show::table(&header, rows.collect(), 1));
}
