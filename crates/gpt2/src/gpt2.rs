//! A GPT-2 that runs: weights on an engine, and a compiled graph for every size it was asked for.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use deuteron::{Engine, Session, Strategy, Tensor, seed};

use crate::cache::{Cache, Projection};
use crate::checkpoint::{Checkpoint, Weight};
use crate::config::{Config, SizeError};
use crate::model::{last_logits, next_logits};
use crate::sampler::SamplingError;
use crate::weights::{self, Weights};

/// The shortest sequence that is compiled for.
const SHORTEST: usize = 16;

/// Compiled graphs kept, at most; GPT-2 has seven lengths of its own for each batch, from the start and for one more token.
const SESSIONS: usize = 32;

/// Inputs before the weights of a run from the start: tokens, and the rows whose logits are wanted.
const DATA: usize = 2;

/// What a graph is for, and its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    /// sequences from their start
    Start { batch: usize, sequence: usize },
    /// one more token of each, after up to `capacity`
    Next { batch: usize, capacity: usize },
}

/// Why a model does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No prompts, or more than positions can be counted for.
    #[error("expected from 1 to {most} prompts, got {got}")]
    Batch {
        /// the largest allowed
        most: usize,
        /// what came
        got: usize,
    },
    /// Nothing to go on from.
    #[error("prompt {} has no tokens; expected at least 1, such as the end of text", .prompt + 1)]
    EmptyPrompt {
        /// which, from 0
        prompt: usize,
    },
    /// More tokens than the model has positions.
    #[error("prompt {} has {tokens} tokens, the model's context {context}; shorten it", .prompt + 1)]
    TooLong {
        /// which, from 0
        prompt: usize,
        /// its length
        tokens: usize,
        /// the longest allowed
        context: usize,
    },
    /// A token that the model does not have.
    #[error("prompt {}: token {token} is not in the vocabulary of {vocabulary}", .prompt + 1)]
    Token {
        /// which, from 0
        prompt: usize,
        /// the token
        token: u32,
        /// tokens of the model
        vocabulary: usize,
    },
    /// Sizes of no model.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// Sampling is set wrongly, or the model computed nonsense.
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
    sessions: HashMap<Key, Session>,
}

impl Gpt2 {
    /// The model of a checkpoint. Weights that are stored otherwise than they are kept are converted once.
    pub fn new(engine: &Engine, checkpoint: &Checkpoint, kind: Weights) -> Result<Gpt2, Error> {
        Ok(Gpt2::of(engine, checkpoint.config(), kind, weights::upload(engine, checkpoint, kind)?))
    }

    /// A model of any size, with weights made from a seed; bytes are those of the `f32` weights.
    pub fn synthetic(engine: &Engine, config: &Config, kind: Weights, seed: u64) -> Result<Gpt2, Error> {
        config.check()?;
        let floats = if kind == Weights::Int8 { Weights::F32 } else { kind };
        let graph = last_logits(config, 1, 1, floats).map_err(deuteron::Error::from)?;
        let mut weights = Vec::new();
        for (tensor, (name, shape)) in seed::inputs(&graph, seed)?.into_iter().skip(DATA).zip(config.weights()) {
            let weight = Weight { dtype: tensor.dtype(), shape: &shape, bytes: &tensor.to_bytes()? };
            weights::push(&mut weights, engine, &name, weight, kind)?;
        }
        Ok(Gpt2::of(engine, config, kind, weights))
    }

    fn of(engine: &Engine, config: &Config, kind: Weights, weights: Vec<Tensor>) -> Gpt2 {
        let sessions = HashMap::new();
        Gpt2 { engine: engine.clone(), config: *config, kind, strategy: Strategy::Fused, weights, sessions }
    }

    /// The same model under another plan than the fused one.
    pub fn with_strategy(self, strategy: Strategy) -> Gpt2 {
        Gpt2 { strategy, sessions: HashMap::new(), ..self }
    }

    /// The sizes.
    pub fn config(&self) -> &Config {
        &self.config
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

    /// The logits after the last token of each sequence, all of checked lengths, and the session that has their keys and values.
    fn start(&mut self, sequences: &[&[u32]]) -> Result<(Vec<Vec<f32>>, Key), Error> {
        let longest = sequences.iter().map(|sequence| sequence.len()).max().unwrap_or(1);
        let (batch, bucket) = (sequences.len(), bucket(longest, self.config.context));
        // What is right of a sequence is never attended to, so any token will do.
        let mut tokens = vec![0; batch * bucket];
        for (row, sequence) in tokens.chunks_exact_mut(bucket).zip(sequences) {
            row.iter_mut().zip(*sequence).for_each(|(to, &token)| *to = token as i32);
        }
        let last = sequences.iter().enumerate().map(|(index, sequence)| (index * bucket + sequence.len() - 1) as i32);
        let tokens = Tensor::from_i32([batch, bucket], &tokens)?;
        let last = Tensor::from_i32([batch], &last.collect::<Vec<i32>>())?;
        let key = Key::Start { batch, sequence: bucket };
        Ok((self.run(key, &[&tokens, &last])?, key))
    }

    /// The same, with a cache of the sequences for [`Gpt2::next`].
    pub(crate) fn start_cached(&mut self, sequences: &[&[u32]]) -> Result<(Vec<Vec<f32>>, Cache), Error> {
        let (logits, key) = self.start(sequences)?;
        let counts: Vec<usize> = sequences.iter().map(|sequence| sequence.len()).collect();
        let longest = counts.iter().copied().max().unwrap_or(1);
        let capacity = bucket(longest + 1, self.config.context);
        let mut cache = Cache::new(&self.config, self.kind.activations(), sequences.len(), capacity)?;
        self.remember(key, &mut cache, &counts)?;
        Ok((logits, cache))
    }

    /// The logits after one more token of each sequence of a cache, which takes it up.
    pub(crate) fn next(&mut self, cache: &mut Cache, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        let batch = tokens.len();
        let longest = cache.lengths().iter().copied().max().unwrap_or(0);
        if longest >= cache.capacity() {
            let all: Vec<usize> = (0..batch).collect();
            *cache = cache.reshaped(&all, bucket(longest + 1, self.config.context))?;
        }
        let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let positions: Vec<i32> = cache.lengths().iter().map(|&length| length as i32).collect();
        let ids = Tensor::from_i32([batch, 1], &ids)?;
        let positions = Tensor::from_i32([batch, 1], &positions)?;
        let mask = cache.mask()?;
        let key = Key::Next { batch, capacity: cache.capacity() };
        let data: Vec<&Tensor> = [&ids, &positions, &mask].into_iter().chain(cache.tensors()).collect();
        let logits = self.run(key, &data)?;
        self.remember(key, cache, &vec![1; batch])?;
        Ok(logits)
    }

    /// Runs the graph of a key, compiled now if it is new; the logits.
    fn run(&mut self, key: Key, data: &[&Tensor]) -> Result<Vec<Vec<f32>>, Error> {
        let Gpt2 { engine, config, kind, strategy, weights, sessions } = self;
        if sessions.len() >= SESSIONS && !sessions.contains_key(&key) {
            sessions.clear();
        }
        let session = match sessions.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(free) => {
                let graph = match key {
                    Key::Start { batch, sequence } => last_logits(config, batch, sequence, *kind),
                    Key::Next { batch, capacity } => next_logits(config, batch, capacity, *kind),
                };
                free.insert(Session::new(engine, &graph.map_err(deuteron::Error::from)?, *strategy)?)
            }
        };
        let inputs: Vec<&Tensor> = data.iter().copied().chain(weights.iter()).collect();
        session.run(&inputs)?;
        let logits = session.output(0)?.to_f32()?;
        Ok(logits.chunks_exact(config.vocabulary).map(<[f32]>::to_vec).collect())
    }

    /// Takes the keys and values of the last run of a session up into a cache.
    fn remember(&self, key: Key, cache: &mut Cache, counts: &[usize]) -> Result<(), Error> {
        let Some(session) = self.sessions.get(&key) else { return Ok(()) };
        let sequence = if let Key::Start { sequence, .. } = key { sequence } else { 1 };
        for layer in 0..self.config.layers {
            let bytes = session.output(layer + 1)?.to_bytes()?;
            cache.write(layer, &Projection { bytes: &bytes, sequence }, counts);
        }
        cache.advance(counts);
        Ok(())
    }
}

/// The length that is compiled for: a power of two, or the whole context.
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

    #[test]
    fn inputs_of_the_graph_are_data_then_weights() {
        for config in [Config::SMALL, Config { tied: false, inner: Some(7), ..Config::SMALL }] {
            let graph = last_logits(&config, 2, 5, Weights::F32).unwrap();
            let names: Vec<String> = graph.inputs().iter().map(|&id| graph.label(id)).collect();
            let weights = config.weights().into_iter().map(|(name, _)| name);
            let expected: Vec<String> = ["tokens", "last"].map(String::from).into_iter().chain(weights).collect();
            assert_eq!(names, expected);
            let next = next_logits(&config, 2, 5, Weights::F32).unwrap();
            let weights = config.weights().len();
            let names: Vec<String> = next.inputs().iter().rev().take(weights).rev().map(|&id| next.label(id)).collect();
            assert_eq!(names, expected[2..]);
        }
    }
}
