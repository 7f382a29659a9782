//! A GPT-2 on an engine: its weights, and a compiled graph for every size used so far.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use deuteron::{Engine, Launching, Session, SessionOptions, Strategy, Tensor, seed};

use crate::cache::Cache;
use crate::checkpoint::{Checkpoint, Weight};
use crate::config::{Config, SizeError};
use crate::model::{Piece, Start, next_logits};
use crate::sampler::SamplingError;
use crate::weights::{self, Weights};

/// The shortest compiled sequence length.
const SHORTEST: usize = 16;

/// Maximum number of compiled graphs kept; GPT-2 has seven sequence lengths per batch size, for prompts and for steps each.
const SESSIONS: usize = 32;

/// Inputs before the caches: tokens, their positions, the position of each sequence's first token, and the tokens whose logits are needed.
pub(crate) const DATA: usize = 4;

/// The time of runs by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Times {
    /// planning and compiling graphs of new sizes
    pub compiling: Duration,
    /// tokens of prompts
    pub prompt_tokens: usize,
    /// time to run them
    pub prompt: Duration,
    /// tokens after them, one per sequence at a time
    pub step_tokens: usize,
    /// time to run them
    pub steps: Duration,
}

/// Why a model does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No prompts, or too many.
    #[error("expected from 1 to {most} prompts, got {got}")]
    Batch {
        /// the largest allowed
        most: usize,
        /// the value found
        got: usize,
    },
    /// An empty prompt.
    #[error("prompt {} has no tokens; expected at least 1, such as the end-of-text token", .prompt + 1)]
    EmptyPrompt {
        /// its position, from 0
        prompt: usize,
    },
    /// More tokens than the model has positions.
    #[error("prompt {} has {tokens} tokens, but the model's context is {context}; shorten it", .prompt + 1)]
    TooLong {
        /// its position, from 0
        prompt: usize,
        /// its length
        tokens: usize,
        /// the longest allowed
        context: usize,
    },
    /// A token that the model does not have.
    #[error("prompt {}: token {token} is not in the vocabulary of {vocabulary}", .prompt + 1)]
    Token {
        /// its position, from 0
        prompt: usize,
        /// the token
        token: u32,
        /// tokens of the model
        vocabulary: usize,
    },
    /// A text of which no token can be predicted.
    #[error("the text has {got} tokens; expected at least 2, as each is predicted from those before it")]
    Short {
        /// its length
        got: usize,
    },
    /// Invalid sizes.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// Invalid sampling settings, or a model with invalid logits.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] deuteron::Error),
}

/// A model on an engine.
pub struct Gpt2 {
    engine: Engine,
    config: Config,
    kind: Weights,
    strategy: Strategy,
    weights: Vec<Tensor>,
    sessions: HashMap<Piece, Session>,
    times: Times,
}

impl Gpt2 {
    /// The model of a checkpoint. Weights stored in another dtype are converted once.
    pub fn new(engine: &Engine, checkpoint: &Checkpoint, kind: Weights) -> Result<Gpt2, Error> {
        Ok(Gpt2::of(engine, checkpoint.config(), kind, weights::upload(engine, checkpoint, kind)?))
    }

    /// A model of any size, with weights made from a seed; bytes are those of the `f32` weights.
    pub fn synthetic(engine: &Engine, config: &Config, kind: Weights, seed: u64) -> Result<Gpt2, Error> {
        config.check()?;
        let floats = if kind == Weights::Int8 { Weights::F32 } else { kind };
        let piece = Piece { batch: 1, sequence: 1, capacity: 1, start: Start::Anywhere };
        let graph = next_logits(config, &piece, floats).map_err(deuteron::Error::from)?;
        let inputs = seed::inputs(&graph, seed)?.into_iter().skip(DATA + config.layers);
        let mut weights = Vec::new();
        for (tensor, (name, shape)) in inputs.zip(config.weights()) {
            let weight = Weight { dtype: tensor.dtype(), shape: &shape, bytes: &tensor.to_bytes()? };
            weights::push(&mut weights, engine, &name, weight, kind)?;
        }
        Ok(Gpt2::of(engine, config, kind, weights))
    }

    /// A model without weights; [`Gpt2::lend`] supplies them.
    pub fn empty(engine: &Engine, config: &Config, kind: Weights) -> Result<Gpt2, Error> {
        config.check()?;
        Ok(Gpt2::of(engine, config, kind, Vec::new()))
    }

    /// Replaces the model's weights, in the order of [`Config::weights`] and in the form of [`Weights`], and returns the previous ones.
    /// Compiled graphs are kept. Memory is shared: weights that are written in place must be taken back before.
    pub fn lend(&mut self, weights: Vec<Tensor>) -> Vec<Tensor> {
        std::mem::replace(&mut self.weights, weights)
    }

    fn of(engine: &Engine, config: &Config, kind: Weights, weights: Vec<Tensor>) -> Gpt2 {
        let (engine, strategy, sessions) = (engine.clone(), Strategy::Fused, HashMap::new());
        Gpt2 { engine, config: *config, kind, strategy, weights, sessions, times: Times::default() }
    }

    /// The same model under another plan than the fused one.
    pub fn with_strategy(self, strategy: Strategy) -> Gpt2 {
        Gpt2 { strategy, sessions: HashMap::new(), ..self }
    }

    /// The sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How weights are kept.
    pub fn kind(&self) -> Weights {
        self.kind
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn strategy(&self) -> Strategy {
        self.strategy
    }

    pub(crate) fn weights(&self) -> &[Tensor] {
        &self.weights
    }

    /// The logits after the last token of each prompt.
    pub fn logits(&mut self, prompts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, Error> {
        self.check(prompts)?;
        let sequences: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let (logits, _) = self.start(&sequences)?;
        Ok(logits)
    }

    pub(crate) fn check(&self, prompts: &[Vec<u32>]) -> Result<(), Error> {
        let Config { context, vocabulary, .. } = self.config;
        let most = i32::MAX as usize / context;
        if !(1..=most).contains(&prompts.len()) {
            return Err(Error::Batch { most, got: prompts.len() });
        }
        for (prompt, tokens) in prompts.iter().enumerate() {
            if tokens.is_empty() {
                return Err(Error::EmptyPrompt { prompt });
            }
            if tokens.len() > context {
                return Err(Error::TooLong { prompt, tokens: tokens.len(), context });
            }
            if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
                return Err(Error::Token { prompt, token, vocabulary });
            }
        }
        Ok(())
    }

    /// Where the time of all runs so far went.
    pub fn times(&self) -> Times {
        self.times
    }

    /// The logits after the last token of each sequence, all of checked lengths, and a cache of them for [`Gpt2::next`].
    pub(crate) fn start(&mut self, sequences: &[&[u32]]) -> Result<(Vec<Vec<f32>>, Cache), Error> {
        let longest = sequences.iter().map(|sequence| sequence.len()).max().unwrap_or(1);
        let (batch, capacity) = (sequences.len(), bucket(longest + 1, self.config.context));
        let mut cache = Cache::new(&self.engine, &self.config, self.kind.cache(), batch, capacity)?;
        let piece = Piece { batch, sequence: bucket(longest, self.config.context), capacity, start: Start::Zero };
        let (logits, time) = self.run(piece, &mut cache, sequences)?;
        self.times.prompt_tokens += sequences.iter().map(|sequence| sequence.len()).sum::<usize>();
        self.times.prompt += time;
        Ok((logits, cache))
    }

    /// The logits after one more token of each sequence of a cache, which takes it up.
    pub(crate) fn next(&mut self, cache: &mut Cache, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        let (batch, longest) = (tokens.len(), cache.lengths().iter().copied().max().unwrap_or(0));
        if longest >= cache.capacity() {
            let all: Vec<usize> = (0..batch).collect();
            *cache = cache.reshaped(&self.engine, &all, bucket(longest + 1, self.config.context))?;
        }
        let piece = Piece { batch, sequence: 1, capacity: cache.capacity(), start: Start::Anywhere };
        let sequences: Vec<&[u32]> = tokens.chunks(1).collect();
        let (logits, time) = self.run(piece, cache, &sequences)?;
        self.times.step_tokens += batch;
        self.times.steps += time;
        Ok(logits)
    }

    /// The sequences `kept` of a cache alone.
    pub(crate) fn keep(&self, cache: &Cache, kept: &[usize]) -> Result<Cache, Error> {
        Ok(cache.reshaped(&self.engine, kept, cache.capacity())?)
    }

    /// Runs a piece, compiling it if it is new, and appends it to a cache; returns the logits and the time.
    fn run(
        &mut self,
        piece: Piece,
        cache: &mut Cache,
        sequences: &[&[u32]],
    ) -> Result<(Vec<Vec<f32>>, Duration), Error> {
        let begin = Instant::now();
        let Gpt2 { engine, config, kind, strategy, weights, sessions, times } = self;
        if sessions.len() >= SESSIONS && !sessions.contains_key(&piece) {
            sessions.clear();
        }
        let session = match sessions.entry(piece) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(free) => {
                let graph = next_logits(config, &piece, *kind).map_err(deuteron::Error::from)?;
                let states = &graph.inputs()[DATA..DATA + config.layers];
                let mut session = Session::new(engine, &graph, SessionOptions::from(*strategy).states(states))?;
                // Steps run again and again on the same memory.
                session.set_launching(Launching::Graph);
                times.compiling += begin.elapsed();
                free.insert(session)
            }
        };
        let begin = Instant::now();
        let data = data(config, &piece, cache.lengths(), sequences)?;
        let inputs: Vec<&Tensor> = data.iter().chain(weights.iter()).collect();
        session.run_with(&inputs, cache.layers())?;
        cache.advance(sequences.iter().map(|sequence| sequence.len()));
        let logits = session.output(0)?.to_f32()?;
        let time = begin.elapsed();
        Ok((logits.chunks_exact(config.vocabulary).map(<[f32]>::to_vec).collect(), time))
    }
}

/// The inputs with tokens and their positions, after this many tokens of each sequence. Padding to the right of a sequence is
/// never attended to, so its tokens and positions do not matter.
pub(crate) fn data(
    config: &Config,
    piece: &Piece,
    lengths: &[usize],
    sequences: &[&[u32]],
) -> Result<[Tensor; DATA], Error> {
    let Piece { batch, sequence, .. } = *piece;
    let mut tokens = vec![0; batch * sequence];
    let mut places = vec![0; batch * sequence];
    for (index, (own, &length)) in sequences.iter().zip(lengths).enumerate() {
        let row = index * sequence..(index + 1) * sequence;
        tokens[row.clone()].iter_mut().zip(*own).for_each(|(to, &token)| *to = token as i32);
        (length..).zip(&mut places[row]).for_each(|(place, to)| *to = place.min(config.context - 1) as i32);
    }
    let positions: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
    let last = sequences.iter().enumerate().map(|(index, own)| (index * sequence + own.len() - 1) as i32);
    Ok([
        Tensor::from_i32([batch, sequence], &tokens)?,
        Tensor::from_i32([batch, sequence], &places)?,
        Tensor::from_i32([batch], &positions)?,
        Tensor::from_i32([batch], &last.collect::<Vec<i32>>())?,
    ])
}

/// The compiled sequence length: a power of two, or the whole context.
fn bucket(length: usize, context: usize) -> usize {
    length.next_power_of_two().max(SHORTEST).min(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_powers_of_two_up_to_the_context() {
        let buckets = [1, 16, 17, 64, 65, 96].map(|length| bucket(length, 96));
        assert_eq!(buckets, [16, 16, 32, 64, 96, 96]);
        assert_eq!(bucket(3, 5), 5);
    }

    /// Token by token, so that all keys and values except those of the first token are read from the cache: as close to floats as
    /// a prompt, which attends to its keys and values before they are rounded.
    #[test]
    fn steps_of_bytes_over_a_cache_of_16_bits_are_near_those_of_floats() {
        for name in ["gelu", "shards", "bf16", "f16"] {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
            let checkpoint = Checkpoint::open(&folder).unwrap();
            let mut models =
                [Weights::F32, Weights::Int8].map(|kind| Gpt2::new(&Engine::cpu(), &checkpoint, kind).unwrap());
            let mut caches = Vec::new();
            let mut logits = models.each_mut().map(|model| {
                let (logits, cache) = model.start(&[&[7]]).unwrap();
                caches.push(cache);
                logits
            });
            let (mut worst, mut entropy, tokens) = (0.0f64, [0.0; 2], 40);
            for _ in 0..tokens {
                let [floats, bytes] = logits.each_ref().map(|logits| logits[0].as_slice());
                let (most, least) = floats.iter().fold((f32::MIN, f32::MAX), |(a, b), &x| (a.max(x), b.min(x)));
                let error = floats.iter().zip(bytes).fold(0.0, |worst: f32, (a, b)| worst.max((a - b).abs()));
                worst = worst.max(f64::from(error / (most - least)));
                let token = floats.iter().position(|&x| x == most).unwrap();
                for (entropy, logits) in entropy.iter_mut().zip([floats, bytes]) {
                    let sum: f64 = logits.iter().map(|&x| f64::from(x - most).exp()).sum();
                    *entropy += sum.ln() - f64::from(logits[token] - most);
                }
                for ((model, cache), logits) in models.iter_mut().zip(&mut caches).zip(&mut logits) {
                    *logits = model.next(cache, &[token as u32]).unwrap();
                }
            }
            let perplexity = entropy.map(|sum| (sum / f64::from(tokens)).exp());
            let change = (perplexity[1] / perplexity[0] - 1.0).abs();
            println!(
                "{name}: logits off by {:.2} % of their spread, perplexity by {:.2} %",
                100.0 * worst,
                100.0 * change
            );
            assert!(worst > 0.0 && worst < Weights::INT8_LOGIT_ERROR, "{name}: {worst}");
            assert!(change < Weights::INT8_PERPLEXITY_ERROR, "{name}: {perplexity:?}");
        }
    }

    #[test]
    fn inputs_of_the_graph_are_data_then_caches_then_weights() {
        for config in [Config::SMALL, Config { tied: false, inner: Some(7), ..Config::SMALL }] {
            for start in [Start::Zero, Start::Anywhere] {
                let piece = Piece { batch: 2, sequence: 5, capacity: 8, start };
                let graph = next_logits(&config, &piece, Weights::F32).unwrap();
                let names: Vec<String> = graph.inputs().iter().map(|&id| graph.label(id)).collect();
                let data = ["tokens", "places", "positions", "last"].map(String::from).into_iter();
                let caches = (0..config.layers).map(|layer| format!("h.{layer}.cache"));
                let weights = config.weights().into_iter().map(|(name, _)| name);
                assert_eq!(names, data.chain(caches).chain(weights).collect::<Vec<String>>());
            }
        }
    }
}
