//! A model in training: its states on an engine, and the sessions that write them.

use deuteron::{Dtype, Engine, Graph, Launching, NodeId, Saving, Session, SessionOptions, Shape, Tensor};
use deuteron_gpt2::Config;

use crate::data::Batch;
use crate::error::Error;
use crate::step::{Precision, Stateful, Step, StepOptions};

/// A model, its optimiser's moments, and what was compiled for them.
pub struct Trainer {
    engine: Engine,
    config: Config,
    options: StepOptions,
    step: Compiled,
    /// of all micro-batches but the last
    accumulate: Option<Compiled>,
    evaluate: Option<Compiled>,
    /// for each weight: in f32, its moments, and in bf16 what forward reads
    states: Vec<Tensor>,
    /// of gradients
    sums: Vec<Tensor>,
    memory: MemoryUse,
}

/// Memory of training, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// weights, moments and sums of gradients
    pub states: u64,
    /// activations, gradients and scratch memory of all sessions; with a limit, of evaluation too
    pub sessions: u64,
    /// the sessions' bytes of the fastest step, if that exceeds the limit and backward recomputes activations instead
    pub otherwise: Option<u64>,
}

impl MemoryUse {
    /// All of it.
    pub fn all(&self) -> u64 {
        self.states + self.sessions
    }
}

/// The numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scalars {
    /// from 1
    pub step: u64,
    /// learning rate
    pub rate: f64,
    /// the largest norm of the gradient
    pub clip: f64,
    /// seed of dropout; micro-batches use consecutive seeds
    pub seed: i32,
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepResult {
    /// before the step, mean over all tokens
    pub loss: f64,
    /// of the gradient, before clipping
    pub norm: f64,
}

/// A session and its inputs.
struct Compiled {
    session: Session,
    feeds: Vec<Feed>,
}

/// An input that is no state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Feed {
    Tokens,
    Targets,
    Number(Number),
    /// the weight as forward reads it
    Weight(usize),
    Sum(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Seed,
    Share,
    Rate,
    Clip,
    Decay,
    NoDecay,
    Correction(usize),
    Fresh,
}

impl Trainer {
    /// Compiles a step for a model. Weights are f32, in the order of [`Config::weights`]; moments are 0.
    pub fn new(
        engine: &Engine,
        config: &Config,
        options: &StepOptions,
        weights: Vec<Tensor>,
    ) -> Result<Trainer, Error> {
        let (sessions, memory) = Sessions::within(engine, config, options)?;
        let Sessions { step, accumulate, evaluate } = sessions;
        let several = options.micro_batches > 1;
        let sums = config.weights().into_iter().filter(|_| several).map(|(_, shape)| zeros(engine, &shape));
        let sums = sums.collect::<Result<_, Error>>()?;
        let mut states = Vec::new();
        for (weight, (_, shape)) in weights.into_iter().zip(config.weights()) {
            let copy = match options.precision {
                Precision::F32 => None,
                Precision::Bf16 => Some(rounded(engine, &weight)?),
            };
            // No other tensor may look into a state.
            states.push(Tensor::upload(engine, Dtype::F32, shape.clone(), &weight.to_bytes()?)?);
            for _ in 0..options.optimizer.moments() {
                states.push(zeros(engine, &shape)?);
            }
            states.extend(copy);
        }
        let (engine, config, options) = (engine.clone(), *config, *options);
        Ok(Trainer { engine, config, options, step, accumulate, evaluate, states, sums, memory })
    }

    /// The sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The parameters of the step.
    pub fn options(&self) -> &StepOptions {
        &self.options
    }

    /// The memory that it takes.
    pub fn memory(&self) -> MemoryUse {
        self.memory
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// One step on its micro-batches.
    pub fn step(&mut self, batches: &[Batch], scalars: Scalars) -> Result<StepResult, Error> {
        let expected = self.options.micro_batches;
        let Some((last, first)) = batches.split_last().filter(|_| batches.len() == expected) else {
            return Err(Error::Batches { expected, got: batches.len() });
        };
        let mut losses = 0.0;
        let (stride, own) = (self.stride(), self.own());
        for (number, batch) in first.iter().enumerate() {
            let Some(accumulate) = &mut self.accumulate else { continue };
            let numbers = Numbers { scalars, options: &self.options, number };
            let weights: Vec<&Tensor> = self.states.iter().skip(own).step_by(stride).collect();
            accumulate.run(numbers, batch, (&weights, &[]), &mut self.sums)?;
            losses += accumulate.output(0)?;
        }
        let numbers = Numbers { scalars, options: &self.options, number: first.len() };
        self.step.run(numbers, last, (&[], &self.sums), &mut self.states)?;
        losses += self.step.output(0)?;
        Ok(StepResult { loss: losses / expected as f64, norm: self.step.output(1)? })
    }

    /// The loss of a batch without dropout; changes no state.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<f64, Error> {
        let (stride, own) = (self.stride(), self.own());
        let evaluate = match &mut self.evaluate {
            Some(evaluate) => evaluate,
            none => {
                let step = Step::new(&self.config, &self.options, Saving::Traffic);
                none.insert(Compiled::evaluation(&self.engine, &self.config, &step)?)
            }
        };
        let scalars = Scalars { step: 1, rate: 0.0, clip: 0.0, seed: 0 };
        let numbers = Numbers { scalars, options: &self.options, number: 0 };
        let weights: Vec<&Tensor> = self.states.iter().skip(own).step_by(stride).collect();
        evaluate.run(numbers, batch, (&weights, &[]), &mut [])?;
        evaluate.output(0)
    }

    /// The weights as forward reads them, sharing their memory: they must be gone before the next step.
    pub fn lent(&self) -> Vec<Tensor> {
        let (stride, own) = (self.stride(), self.own());
        self.states.iter().skip(own).step_by(stride).cloned().collect()
    }

    /// The weights in f32.
    pub fn weights(&self) -> Vec<&Tensor> {
        self.states.iter().step_by(self.stride()).collect()
    }

    /// The moments with their names: `NAME.1`, `NAME.2`.
    pub fn moments(&self) -> Vec<(String, &Tensor)> {
        let moments = self.options.optimizer.moments();
        let of = self.config.weights().into_iter().zip(self.states.chunks(self.stride()));
        let each = of.flat_map(|((name, _), states)| {
            states[1..=moments].iter().zip(1..).map(move |(state, number)| (format!("{name}.{number}"), state))
        });
        each.collect()
    }

    /// Sets the moments from tensors on any device.
    pub fn set_moments(
        &mut self,
        mut moment: impl FnMut(&Engine, &str, &Shape) -> Result<Tensor, Error>,
    ) -> Result<(), Error> {
        let (stride, moments) = (self.stride(), self.options.optimizer.moments());
        for (index, (name, shape)) in self.config.weights().into_iter().enumerate() {
            for number in 1..=moments {
                self.states[index * stride + number] = moment(&self.engine, &format!("{name}.{number}"), &shape)?;
            }
        }
        Ok(())
    }

    /// States of a weight.
    fn stride(&self) -> usize {
        1 + self.options.optimizer.moments() + self.own().min(1)
    }

    /// Which of a weight's states forward reads.
    fn own(&self) -> usize {
        match self.options.precision {
            Precision::F32 => 0,
            Precision::Bf16 => 1 + self.options.optimizer.moments(),
        }
    }
}

/// What is compiled for a model.
struct Sessions {
    step: Compiled,
    accumulate: Option<Compiled>,
    /// if it was compiled already
    evaluate: Option<Compiled>,
}

impl Sessions {
    /// The sessions with least traffic if they fit the memory limit, otherwise those with least memory.
    fn within(engine: &Engine, config: &Config, options: &StepOptions) -> Result<(Sessions, MemoryUse), Error> {
        let states = states_bytes(config, options);
        let (fast, sessions) = Sessions::new(engine, config, options, Saving::Traffic)?;
        let taken = MemoryUse { states, sessions, otherwise: None };
        let Some(limit) = options.memory.filter(|&limit| taken.all() > limit) else { return Ok((fast, taken)) };
        // Its memory is free before the others are made.
        drop(fast);
        let (small, sessions) = Sessions::new(engine, config, options, Saving::Memory)?;
        let saved = MemoryUse { states, sessions, otherwise: Some(taken.sessions) };
        if saved.all() <= limit {
            return Ok((small, saved));
        }
        // In a tiny model the scratch memory of recomputed values can exceed what they save.
        let least = if saved.all() < taken.all() { saved } else { taken };
        Err(Error::Memory { limit, least })
    }

    /// With the bytes that they hold.
    fn new(engine: &Engine, config: &Config, options: &StepOptions, saving: Saving) -> Result<(Sessions, u64), Error> {
        let graphs = Step::new(config, options, saving);
        let compile = |stateful: &Stateful| Compiled::new(engine, config, &stateful.graph, &stateful.updates);
        let step = compile(&graphs.step()?)?;
        let several = options.micro_batches > 1;
        let accumulate = if several { Some(compile(&graphs.accumulate()?)?) } else { None };
        let evaluate = options.memory.map(|_| Compiled::evaluation(engine, config, &graphs)).transpose()?;
        let all = [Some(&step), accumulate.as_ref(), evaluate.as_ref()];
        let bytes = all.iter().flatten().map(|compiled| compiled.session.bytes() as u64).sum();
        Ok((Sessions { step, accumulate, evaluate }, bytes))
    }
}

/// Bytes of weights in f32, moments, copies in bf16 and sums of gradients.
fn states_bytes(config: &Config, options: &StepOptions) -> u64 {
    let copies = match options.precision {
        Precision::F32 => 0,
        Precision::Bf16 => 2,
    };
    let sums = if options.micro_batches > 1 { 4 } else { 0 };
    let each = 4 * (1 + options.optimizer.moments()) + copies + sums;
    config.weights().iter().map(|(_, shape)| (shape.elements() * each) as u64).sum()
}

/// The sources of a session's inputs.
#[derive(Clone, Copy)]
struct Numbers<'a> {
    scalars: Scalars,
    options: &'a StepOptions,
    /// of the micro-batch
    number: usize,
}

impl Numbers<'_> {
    fn tensor(&self, number: Number) -> Result<Tensor, deuteron::Error> {
        let value = match number {
            Number::Seed => {
                let seed = self.scalars.seed.wrapping_add(self.number as i32);
                return Tensor::from_i32([], &[seed]);
            }
            Number::Share => 1.0 / self.options.micro_batches as f64,
            Number::Rate => self.scalars.rate,
            Number::Clip => self.scalars.clip,
            Number::Decay => self.options.decay,
            Number::NoDecay => 0.0,
            Number::Correction(which) => {
                self.options.optimizer.corrections(self.scalars.step).map_or(1.0, |corrections| corrections[which])
            }
            Number::Fresh => f64::from(u8::from(self.number == 0)),
        };
        Tensor::from_f32(Dtype::F32, [], &[value as f32])
    }
}

impl Compiled {
    fn new(engine: &Engine, config: &Config, graph: &Graph, updates: &[(NodeId, NodeId)]) -> Result<Compiled, Error> {
        let options =
            updates.iter().fold(SessionOptions::default().joined(), |all, &(state, new)| all.update(state, new));
        let mut session = Session::new(engine, graph, options)?;
        // Steps run again and again on the same memory.
        session.set_launching(Launching::Graph);
        let names: Vec<String> = config.weights().into_iter().map(|(name, _)| name).collect();
        let data = graph.inputs().iter().filter(|input| !updates.iter().any(|(state, _)| state == *input));
        let feeds = data.map(|&input| feed(&names, &graph.label(input))).collect::<Result<_, Error>>()?;
        Ok(Compiled { session, feeds })
    }

    /// The loss of a batch.
    fn evaluation(engine: &Engine, config: &Config, step: &Step<'_>) -> Result<Compiled, Error> {
        Compiled::new(engine, config, &step.evaluate().map_err(deuteron::Error::from)?, &[])
    }

    /// Runs on weights and sums, as far as they are no states.
    fn run(
        &mut self,
        numbers: Numbers<'_>,
        batch: &Batch,
        (weights, sums): (&[&Tensor], &[Tensor]),
        states: &mut [Tensor],
    ) -> Result<(), Error> {
        let shape = [numbers.options.batch, numbers.options.sequence];
        let small = self.feeds.iter().filter_map(|feed| match feed {
            Feed::Tokens => Some(Tensor::from_i32(shape, &batch.tokens)),
            Feed::Targets => Some(Tensor::from_i32(shape, &batch.targets)),
            Feed::Number(number) => Some(numbers.tensor(*number)),
            Feed::Weight(_) | Feed::Sum(_) => None,
        });
        let small = small.collect::<Result<Vec<Tensor>, deuteron::Error>>()?;
        let mut next = small.iter();
        let inputs = self.feeds.iter().filter_map(|feed| match feed {
            Feed::Weight(index) => weights.get(*index).copied(),
            Feed::Sum(index) => sums.get(*index),
            Feed::Tokens | Feed::Targets | Feed::Number(_) => next.next(),
        });
        let inputs: Vec<&Tensor> = inputs.collect();
        Ok(self.session.run_with(&inputs, states)?)
    }

    /// A scalar that is no state.
    fn output(&self, index: usize) -> Result<f64, Error> {
        let values = self.session.output(index)?.to_f32()?;
        Ok(values.first().map_or(f64::NAN, |&value| f64::from(value)))
    }
}

/// The kind of an input of a step's graph.
fn feed(names: &[String], label: &str) -> Result<Feed, Error> {
    let weight = |name: &str| names.iter().position(|known| known == name);
    Ok(match label {
        "tokens" => Feed::Tokens,
        "targets" => Feed::Targets,
        "seed" => Feed::Number(Number::Seed),
        "d_loss" => Feed::Number(Number::Share),
        "rate" => Feed::Number(Number::Rate),
        "clip" => Feed::Number(Number::Clip),
        "decay" => Feed::Number(Number::Decay),
        "no_decay" => Feed::Number(Number::NoDecay),
        "correction1" => Feed::Number(Number::Correction(0)),
        "correction2" => Feed::Number(Number::Correction(1)),
        "fresh" => Feed::Number(Number::Fresh),
        other => {
            let sum = other.strip_prefix("sum.").and_then(weight).map(Feed::Sum);
            let found = sum.or_else(|| weight(other).map(Feed::Weight));
            found.ok_or_else(|| Error::Input(other.to_string()))?
        }
    })
}

fn zeros(engine: &Engine, shape: &Shape) -> Result<Tensor, Error> {
    Ok(Tensor::filled(Dtype::F32, shape.clone(), 0.0)?.to_device(engine)?)
}

/// A weight in bf16.
fn rounded(engine: &Engine, weight: &Tensor) -> Result<Tensor, Error> {
    Ok(Tensor::from_f32(Dtype::Bf16, weight.shape().clone(), &weight.to_f32()?)?.to_device(engine)?)
}
