//! The graph of a step: forward, loss, backward, norm of the gradient, clipping and optimiser.
//!
//! All of it is one graph and one session. Weights and moments are its states and are written in place; everything else is a small input:
//!
//! | input | shape | holds |
//! |---|---|---|
//! | `tokens`, `targets` | `i32[batch, sequence]` | a micro-batch |
//! | `seed` | `i32[]` | of the masks of dropout, if there is dropout |
//! | `d_loss` | `f32[]` | 1 over the number of micro-batches, so that gradients add up to those of the mean |
//! | `rate`, `clip` | `f32[]` | the learning rate; the largest norm of the gradient |
//! | `decay`, `no_decay` | `f32[]` | weight decay of matrices and tables; 0, that of biases and norms |
//! | `correction1`, `correction2` | `f32[]` | of AdamW's moments |
//! | `sum.NAME` | of the weight, `f32` | gradients of earlier micro-batches, if there are several |
//!
//! With several micro-batches, all except the last run the graph of [`Step::accumulate`], whose states are the sums. The first of them resets the
//! sums: `fresh: f32[]` is 1 there and 0 later.
//!
//! In f32 a weight is one state. In bf16 it is two: `NAME`, which forward and backward read, and `master.NAME`, which the optimiser keeps in
//! f32 and rounds to the first. Gradients of bf16 weights are bf16, as the matmuls store them; everything after that is f32.

use deuteron::training::with_gradients;
use deuteron::{
    BinaryOp, CompareOp, Dtype, Graph, GraphError, NodeId, Optimizer, Saving, Shape, StepScalars, UnaryOp, WeightUpdate,
};
use deuteron_gpt2::{Config, Options, Weights, loss};
use serde::{Deserialize, Serialize};

/// The parameters of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepOptions {
    /// sequences of a micro-batch
    pub batch: usize,
    /// tokens of each
    pub sequence: usize,
    /// micro-batches of a step
    pub micro_batches: usize,
    /// dtype of forward and backward
    pub precision: Precision,
    /// probability that an element is dropped
    pub dropout: f64,
    /// the optimiser
    pub optimizer: Optimizer,
    /// weight decay of matrices and tables; biases and norms have none
    pub decay: f64,
    /// bytes that weights, moments, sums of gradients and all sessions may take; none for no limit
    pub memory: Option<u64>,
}

/// The dtype of forward and backward. Weights and moments are f32 in both cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// all in f32
    F32,
    /// weights, activations and gradients in bf16, sums in f32
    Bf16,
}

impl Precision {
    /// The name on the command line and in files.
    pub fn name(self) -> &'static str {
        self.weights().name()
    }

    /// How the model keeps its weights.
    pub fn weights(self) -> Weights {
        match self {
            Precision::F32 => Weights::F32,
            Precision::Bf16 => Weights::Bf16,
        }
    }
}

/// A graph with states.
#[derive(Debug, Clone)]
pub struct Stateful {
    /// The graph. Its first outputs are no states: `loss`, and in a step `norm`.
    pub graph: Graph,
    /// each state, and its new value
    pub updates: Vec<(NodeId, NodeId)>,
}

/// A model, as a training step needs it.
pub struct Step<'a> {
    config: &'a Config,
    options: &'a StepOptions,
    saving: Saving,
}

/// A weight in the graph of a step.
struct Weight {
    name: String,
    shape: Shape,
    /// the weight that forward reads
    read: NodeId,
    gradient: NodeId,
}

/// Forward, loss and backward, without the optimiser.
struct Backward {
    graph: Graph,
    loss: NodeId,
    weights: Vec<Weight>,
}

impl<'a> Step<'a> {
    /// Builds it for a model. `saving` is the goal of recomputation: less traffic, or less memory.
    pub fn new(config: &'a Config, options: &'a StepOptions, saving: Saving) -> Step<'a> {
        Step { config, options, saving }
    }

    /// The loss without dropout and without gradients. Inputs are `tokens`, `targets` and the weights.
    pub fn evaluate(&self) -> Result<Graph, GraphError> {
        loss(self.config, &self.model(), 0.0)
    }

    /// A micro-batch whose gradients are added to the sums. Its states are the sums, in the order of [`Config::weights`].
    pub fn accumulate(&self) -> Result<Stateful, deuteron::Error> {
        let Backward { mut graph, loss, weights } = self.backward()?;
        graph.output("loss", loss)?;
        let fresh = graph.input("fresh", Dtype::F32, [])?;
        let half = graph.constant(0.5, Dtype::F32)?;
        let is_fresh = graph.compare(CompareOp::Gt, fresh, half)?;
        let mut updates = Vec::new();
        for weight in &weights {
            let sum = graph.input(&format!("sum.{}", weight.name), Dtype::F32, weight.shape.clone())?;
            let gradient = float(&mut graph, weight.gradient)?;
            let added = graph.add(sum, gradient)?;
            let new = graph.select(is_fresh, gradient, added)?;
            graph.output(&format!("new.sum.{}", weight.name), new)?;
            updates.push((sum, new));
        }
        Ok(Stateful { graph, updates })
    }

    /// A whole step, or the last micro-batch of one. Its states are, for each weight in the order of [`Config::weights`], the weight in f32,
    /// its moments, and in bf16 the weight that forward reads.
    pub fn step(&self) -> Result<Stateful, deuteron::Error> {
        let optimizer = self.options.optimizer;
        let Backward { mut graph, loss, mut weights } = self.backward()?;
        for weight in &mut weights {
            weight.gradient = float(&mut graph, weight.gradient)?;
            if self.options.micro_batches > 1 {
                let sum = graph.input(&format!("sum.{}", weight.name), Dtype::F32, weight.shape.clone())?;
                weight.gradient = graph.add(sum, weight.gradient)?;
            }
        }
        let gradients: Vec<NodeId> = weights.iter().map(|weight| weight.gradient).collect();
        let norm = graph.sum_of_squares(&gradients)?;
        let norm = graph.unary(UnaryOp::Sqrt, norm)?;
        let mut scalar = |name: &str| graph.input(name, Dtype::F32, []);
        let (rate, clip) = (scalar("rate")?, scalar("clip")?);
        let (decay, no_decay) = (scalar("decay")?, scalar("no_decay")?);
        let corrections = match optimizer {
            Optimizer::AdamW { .. } => [scalar("correction1")?, scalar("correction2")?],
            Optimizer::Sgd { .. } | Optimizer::Lion { .. } => [rate; 2],
        };
        let scalars = StepScalars { rate, scale: clipping(&mut graph, norm, clip)?, corrections };
        graph.output("loss", loss)?;
        graph.output("norm", norm)?;
        let mut updates = Vec::new();
        for weight in &weights {
            let Weight { name, shape, read, gradient } = weight;
            let (master, copy) = match self.options.precision {
                Precision::F32 => (*read, None),
                Precision::Bf16 => {
                    (graph.weight(&format!("master.{name}"), Dtype::F32, shape.clone())?, Some(Dtype::Bf16))
                }
            };
            let moments = (0..optimizer.moments())
                .map(|at| graph.input(&format!("moment{}.{name}", at + 1), Dtype::F32, shape.clone()));
            let moments = moments.collect::<Result<Vec<NodeId>, GraphError>>()?;
            let decay = Some(if decays(shape) { decay } else { no_decay });
            let update = WeightUpdate { weight: master, gradient: *gradient, moments: &moments, decay, copy };
            let new = graph.updated_weight(optimizer, update, scalars)?;
            let states = [master].into_iter().chain(moments).chain(copy.map(|_| *read));
            let results = [new.weight].into_iter().chain(new.moments).chain(new.copy);
            for (state, result) in states.zip(results) {
                graph.output(&format!("new.{}", graph.label(state)), result)?;
                updates.push((state, result));
            }
        }
        Ok(Stateful { graph, updates })
    }

    fn backward(&self) -> Result<Backward, deuteron::Error> {
        let forward = loss(self.config, &self.model(), self.options.dropout)?;
        let names: Vec<(String, Shape)> = self.config.weights();
        let wrt: Vec<NodeId> = names.iter().filter_map(|(name, _)| forward.find(name)).collect();
        let mut graph = with_gradients(&forward, &wrt, self.saving)?;
        // The loss is first, and then the gradients in the order in which they were asked for.
        let results: Vec<NodeId> = graph.outputs().iter().map(|output| output.node).collect();
        graph.retain_outputs(|_| false);
        let weights = names.into_iter().zip(wrt).zip(&results[1..]);
        let weights = weights.map(|(((name, shape), read), &gradient)| Weight { name, shape, read, gradient });
        Ok(Backward { weights: weights.collect(), graph, loss: results[0] })
    }

    fn model(&self) -> Options {
        let StepOptions { batch, sequence, precision, .. } = *self.options;
        Options { batch, sequence, weights: precision.weights(), backward: false }
    }
}

/// Whether a weight of this shape decays: matrices and tables do, biases and norms do not.
pub fn decays(shape: &Shape) -> bool {
    shape.rank() > 1
}

/// The factor that limits the gradients' norm to `clip`, computed without dividing by norms near 0.
fn clipping(graph: &mut Graph, norm: NodeId, clip: NodeId) -> Result<NodeId, GraphError> {
    let (least, one) = (graph.constant(1e-6, Dtype::F32)?, graph.constant(1.0, Dtype::F32)?);
    let norm = graph.add(norm, least)?;
    let share = graph.binary(BinaryOp::Div, clip, norm)?;
    graph.binary(BinaryOp::Min, one, share)
}

fn float(graph: &mut Graph, x: NodeId) -> Result<NodeId, GraphError> {
    if graph.node(x).dtype == Dtype::F32 { Ok(x) } else { graph.cast(x, Dtype::F32) }
}
