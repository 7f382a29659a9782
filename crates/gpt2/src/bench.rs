//! Times of a prompt and of one more token: unfused and fused in turn, per layer and in total.

use std::time::{Duration, Instant};

use deuteron::bench::{Crossing, crossing};
use deuteron::times::{Rounds, median, spread};
use deuteron::{Engine, Graph, Group, Launching, MachineKind, Session, SessionOptions, Strategy, Tensor, seed};
use serde::Serialize;

use crate::cache::Cache;
use crate::config::Config;
use crate::gpt2::{DATA, Error, data};
use crate::model::{Options, Piece, Start, attention_layer, next_logits};
use crate::weights::Weights;

/// The case to measure.
#[derive(Debug, Clone, Copy)]
pub struct BenchOptions {
    /// sequences
    pub batch: usize,
    /// tokens of each prompt
    pub prompt: usize,
    /// tokens before the one that is decoded
    pub context: usize,
    /// form of the weights
    pub weights: Weights,
    /// of the weights
    pub seed: u64,
    /// approximate time to spend on prompt and step each
    pub budget: Duration,
}

/// The result of `bench gpt2`. The JSON form has these fields.
#[derive(Debug, Clone, Serialize)]
pub struct BenchReport {
    /// its name
    pub model: String,
    /// where it ran
    pub device: String,
    /// form of the weights
    pub weights: String,
    /// the prompt, then one more token
    pub phases: Vec<Phase>,
    /// the prompt's attention layer, from the QKV matmul to the norm after the residual, with attention,
    /// projection, residual and norm in one launch and in several; none for int8 weights, which use other projection kernels
    pub attention_layer: Option<Crossing>,
}

/// A prompt, or one more token.
#[derive(Debug, Clone, Serialize)]
pub struct Phase {
    /// `prefill` or `decode`
    pub name: &'static str,
    /// sequences
    pub batch: usize,
    /// tokens of each that are computed
    pub tokens: usize,
    /// earlier tokens of each
    pub context: usize,
    /// the unfused plan, then the fused one
    pub plans: Vec<PlanTimes>,
    /// unfused time over fused time
    pub speedup: f64,
}

/// One plan, measured.
#[derive(Debug, Clone, Serialize)]
pub struct PlanTimes {
    /// `unfused` or `fused`
    pub plan: String,
    /// how many
    pub kernels: usize,
    /// compulsory traffic
    pub bytes: u64,
    /// median of a run; on a GPU as one CUDA graph
    pub ms: f64,
    /// the run-to-run spread over that median
    pub spread: f64,
    /// tokens per second over all sequences
    pub tokens_per_second: f64,
    /// where the time went, as shares of `ms`: the embedding, each layer, the head
    pub layers: Vec<LayerTime>,
}

/// The kernels of one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerTime {
    /// `embedding`, `h.0` and so on, `head`
    pub layer: String,
    /// how many
    pub kernels: usize,
    /// milliseconds
    pub ms: f64,
}

/// Measures a model with weights made from a seed.
pub fn bench(engine: &Engine, config: &Config, options: &BenchOptions) -> Result<BenchReport, Error> {
    config.check()?;
    let BenchOptions { batch, prompt, context, .. } = *options;
    let start = Piece { batch, sequence: prompt, capacity: prompt, start: Start::Zero };
    let capacity = (context + 1).min(config.context);
    let step = Piece { batch, sequence: 1, capacity, start: Start::Anywhere };
    let phases = [("prefill", start, 0), ("decode", step, capacity - 1)];
    let phases = phases.into_iter().map(|(name, piece, context)| phase(engine, config, options, name, piece, context));
    Ok(BenchReport {
        model: config.name.to_string(),
        device: engine.device().describe(),
        weights: options.weights.to_string(),
        phases: phases.collect::<Result<_, Error>>()?,
        attention_layer: layer(engine, config, options)?,
    })
}

/// The attention layer of a prompt.
fn layer(engine: &Engine, config: &Config, options: &BenchOptions) -> Result<Option<Crossing>, Error> {
    let BenchOptions { batch, prompt, weights, .. } = *options;
    let options = Options { batch, sequence: prompt, weights, backward: false };
    let graph = attention_layer(config, &options).map_err(deuteron::Error::from)?;
    Ok(crossing(engine, &graph)?)
}

/// Both plans of one piece, run in turn.
fn phase(
    engine: &Engine,
    config: &Config,
    options: &BenchOptions,
    name: &'static str,
    piece: Piece,
    context: usize,
) -> Result<Phase, Error> {
    let graph = next_logits(config, &piece, options.weights).map_err(deuteron::Error::from)?;
    let weights = seed::inputs(&graph, options.seed)?.into_iter().skip(DATA + config.layers);
    let tokens = vec![0; piece.sequence];
    let sequences = vec![tokens.as_slice(); piece.batch];
    let mut inputs = Vec::new();
    for tensor in data(config, &piece, &vec![context; piece.batch], &sequences)?.into_iter().chain(weights) {
        inputs.push(tensor.to_device(engine)?);
    }
    let mut cache = Cache::new(engine, config, options.weights.cache(), piece.batch, piece.capacity)?;
    let states = &graph.inputs()[DATA..DATA + config.layers];
    let mut runs = Vec::new();
    for strategy in [Strategy::Unfused, Strategy::Fused] {
        let session = Session::new(engine, &graph, SessionOptions::from(strategy).states(states))?;
        runs.push(Run { session, whole: Vec::new(), kernels: Vec::new() });
    }
    let recorded = engine.device().machine().kind == MachineKind::Gpu;
    let sets = [inputs];
    // The first run is slower than all later ones.
    for run in &mut runs {
        run.sample(&sets, cache.layers(), recorded)?;
        run.forget();
    }
    let rounds = Rounds::new(options.budget, 3, 200);
    while rounds.more(&[&runs[0].whole, &runs[1].whole]) {
        runs.iter_mut().try_for_each(|run| run.sample(&sets, cache.layers(), recorded))?;
    }
    let plans: Vec<PlanTimes> = runs.into_iter().map(|run| run.finish(&graph, piece.batch * piece.sequence)).collect();
    let speedup = plans[0].ms / plans[1].ms.max(1e-9);
    Ok(Phase { name, batch: piece.batch, tokens: piece.sequence, context, plans, speedup })
}

/// A plan under measurement.
struct Run {
    session: Session,
    whole: Vec<Duration>,
    /// times of each kernel, per run
    kernels: Vec<Vec<Duration>>,
}

impl Run {
    fn sample(&mut self, sets: &[Vec<Tensor>; 1], states: &mut [Tensor], recorded: bool) -> Result<(), Error> {
        let inputs: Vec<&Tensor> = sets[0].iter().collect();
        let begin = Instant::now();
        let kernels = self.session.run_timed_with(&inputs, states)?.to_vec();
        let whole = begin.elapsed();
        self.kernels.push(kernels);
        // On a CPU the clock is read between kernels at no cost; on a GPU events between them cost more than many a kernel.
        self.whole.push(if recorded { self.session.time_with(sets, states, 20, Launching::Graph)? } else { whole });
        Ok(())
    }

    fn forget(&mut self) {
        self.whole.clear();
        self.kernels.clear();
    }

    fn finish(self, graph: &Graph, tokens: usize) -> PlanTimes {
        let spread = spread(&self.whole);
        let whole = median(self.whole).as_secs_f64();
        let plan = self.session.plan();
        let kernels: Vec<f64> = (0..plan.groups.len())
            .map(|kernel| median(self.kernels.iter().map(|run| run[kernel]).collect()).as_secs_f64())
            .collect();
        // What is between kernels is in the whole alone: kernels are given their share of it.
        let share = 1e3 * whole / kernels.iter().sum::<f64>().max(1e-12);
        let mut layers: Vec<LayerTime> = Vec::new();
        for (group, time) in plan.groups.iter().zip(kernels) {
            let layer = layer_of(graph, group)
                .unwrap_or_else(|| layers.last().map_or("embedding".into(), |last| last.layer.clone()));
            match layers.iter_mut().find(|known| known.layer == layer) {
                Some(known) => {
                    known.kernels += 1;
                    known.ms += share * time;
                }
                None => layers.push(LayerTime { layer, kernels: 1, ms: share * time }),
            }
        }
        PlanTimes {
            plan: plan.strategy.to_string(),
            kernels: plan.groups.len(),
            bytes: plan.bytes().0,
            ms: 1e3 * whole,
            spread,
            tokens_per_second: tokens as f64 / whole.max(1e-9),
            layers,
        }
    }
}

/// The layer whose weights a kernel reads; of several, the first.
fn layer_of(graph: &Graph, group: &Group) -> Option<String> {
    let names = group.inputs.iter().filter_map(|&input| graph.given_name(input));
    let layer = |name: &str| {
        let mut parts = name.split('.');
        match (parts.next()?, parts.next()) {
            ("h", Some(number)) => Some(format!("h.{number}")),
            ("ln_f" | "lm_head", _) => Some("head".to_string()),
            ("wpe", _) => Some("embedding".to_string()),
            _ => None,
        }
    };
    // The table of tokens is at both ends: a product with it is the head.
    let product = group.kind == deuteron::GroupKind::Matmul;
    let head = |name: &str| (product && name.starts_with("wte")).then(|| "head".to_string());
    names.into_iter().find_map(|name| layer(name).or_else(|| head(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_is_there_and_they_add_up() {
        let config = Config { layers: 3, hidden: 32, heads: 2, vocabulary: 50, context: 16, ..Config::SMALL };
        for weights in Weights::ALL {
            let options = BenchOptions { batch: 2, prompt: 8, context: 5, weights, seed: 1, budget: Duration::ZERO };
            let report = bench(&Engine::cpu(), &config, &options).unwrap();
            assert_eq!(report.phases.len(), 2);
            // Attention, its projection, residual and norm are one kernel beside the product before them, wherever bytes are not.
            let layer = report.attention_layer;
            assert_eq!(layer.is_some(), weights != Weights::Int8);
            assert!(
                layer.is_none_or(|own| own.one_kernels == Some(2) && own.apart_kernels > 2 && own.one_us > Some(0.0))
            );
            for phase in &report.phases {
                for plan in &phase.plans {
                    let names: Vec<&str> = plan.layers.iter().map(|layer| layer.layer.as_str()).collect();
                    assert_eq!(names, ["embedding", "h.0", "h.1", "h.2", "head"], "{} {}", phase.name, plan.plan);
                    let sum: f64 = plan.layers.iter().map(|layer| layer.ms).sum();
                    assert!((sum - plan.ms).abs() < 1e-6 * plan.ms, "{sum} of {}", plan.ms);
                    let kernels: usize = plan.layers.iter().map(|layer| layer.kernels).sum();
                    assert_eq!(kernels, plan.kernels);
                }
                assert!(phase.plans[1].kernels < phase.plans[0].kernels);
            }
        }
    }
}
