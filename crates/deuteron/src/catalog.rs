//! The catalogue: every fused op, defined once as a graph. Ready-made functions, `ops`, `bench` and `fuse` all start here.
//!
//! An op is an entry of a table (`row_ops.rs`, `matmul_ops.rs`) and values of its attributes. Everything about an op
//! is in its entry.

use deuteron_graph::{Activation, Callee, CompositeKind, Dtype, Gelu, Graph, Mask, NodeId, Op, ScoreWork};
use deuteron_plan::Strategy;

mod build;
mod entry;
mod matmul_ops;
mod products;
mod row_ops;
mod sizes;
mod words;

pub(crate) use entry::Entry;
use entry::{Backward, Builder, Built};
pub(crate) use matmul_ops::*;
pub(crate) use row_ops::*;
pub use sizes::{ExpertSizes, Heads, OperandType, Sizes};

use crate::error::Error;
use crate::training::Training;

/// How the graph of a ready-made op is planned. Row work, attention and losses are the fused kernel that they are
/// named for, at every size. Row work around a linear layer is searched: on a GPU a norm before or after a large matmul
/// takes less time as a kernel of its own. Graphs of gradients are greedy.
pub fn strategy(graph: &Graph) -> Strategy {
    let has = |kinds: &[CompositeKind]| {
        graph.calls().iter().any(|call| matches!(&call.callee, Callee::Composite(of) if kinds.contains(&of.kind())))
    };
    let one_kernel = [
        CompositeKind::Attention,
        CompositeKind::AttentionScores,
        CompositeKind::LinearCrossEntropy,
        CompositeKind::LinearCrossEntropyGradient,
    ];
    match has(&[CompositeKind::Linear]) && !has(&one_kernel) {
        true => Strategy::Fused,
        false => Strategy::Greedy,
    }
}

/// The usual epsilon of norms.
pub const EPS: f64 = 1e-5;

/// Norms of the catalogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Norm {
    /// centred, with scale and shift
    Layer,
    /// not centred, with scale
    Rms,
}

/// The reduction of the losses over rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// they are the result
    None,
    /// their mean over the rows that have one
    Mean,
    /// their sum
    Sum,
}

/// Attributes of fused ops. Each op uses some of them and ignores the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attributes {
    /// the activation, if any
    pub act: Option<Activation>,
    /// the form of a gate's GELU
    pub gelu: Gelu,
    /// which norm
    pub norm: Norm,
    /// the norm's epsilon
    pub eps: f64,
    /// probability that dropout drops an element
    pub p: f64,
    /// the mask of a softmax
    pub mask: Mask,
    /// factor of the scores, 1 if there is none
    pub scale: Option<f64>,
    /// work on the scores of attention
    pub scores: ScoreWork,
    /// heads of queries that share a head of keys
    pub group: usize,
    /// whether a value and its gate are the halves of one tensor
    pub packed: bool,
    /// whether a residual is added
    pub residual: bool,
    /// whether a feed-forward block has one layer instead of two
    pub single: bool,
    /// whether the result is quantised again
    pub requantize: bool,
    /// whether rows go to several experts, whose results are weighted and added
    pub weighted: bool,
    /// the reduction of the losses over rows
    pub reduction: Reduction,
    /// label smoothing: the share of a target's weight that is spread evenly over all classes
    pub smoothing: f64,
    /// the target value whose rows have no loss
    pub ignored: Option<i32>,
}

/// A fused op and its attributes. The operands are listed by [`FusedOp::operands`].
#[derive(Clone, Copy)]
pub struct FusedOp {
    entry: &'static Entry,
    attributes: Attributes,
}

impl PartialEq for FusedOp {
    fn eq(&self, other: &FusedOp) -> bool {
        self.is(other.entry) && self.attributes == other.attributes
    }
}

impl FusedOp {
    /// The catalogue with its usual attributes.
    pub fn catalog() -> Vec<FusedOp> {
        ROW_OPS.iter().chain(MATMUL_OPS).map(|entry| entry.usual()).collect()
    }

    /// Every op with every attribute that changes its arithmetic, for the tests.
    pub fn variants() -> Vec<FusedOp> {
        let mut all = FusedOp::catalog();
        for act in &Activation::ALL[1..] {
            all.extend([ACT, ADD_ACT, BIAS_ACT, NORM_ACT].map(|entry| entry.with(|a| a.act = Some(*act))));
        }
        let rms = |entry: &'static Entry| entry.with(|a| a.norm = Norm::Rms);
        let rms_silu = |entry: &'static Entry| rms(entry).with(|a| a.act = Some(Activation::Silu));
        let masked = |entry: &'static Entry, mask: Mask| entry.with(|a| a.mask = mask);
        let scaled = |op: FusedOp, scale: f64| op.with(|a| a.scale = Some(scale));
        let requantized = |act: Option<Activation>| MOE_INT8.with(|a| (a.act, a.requantize) = (act, false));
        all.extend([
            SWIGLU.with(|a| a.packed = true),
            GEGLU.with(|a| (a.gelu, a.packed) = (Gelu::Erf, true)),
            rms_silu(NORM_ACT),
            rms_silu(NORM_BIAS_ACT),
            rms(ADD_NORM),
            rms(DROPOUT_ADD_NORM).with(|a| a.p = 0.25),
            rms(NORM_QUANTIZE).with(|a| a.residual = true),
            NORM_QUANTIZE.with(|a| a.residual = true),
            scaled(masked(SOFTMAX, Mask::Causal), 0.125).with(|a| a.p = 0.1),
            scaled(masked(SOFTMAX, Mask::Additive), 0.125),
            scaled(masked(ATTENTION_SCORES, Mask::Full), 0.25),
            scaled(masked(ATTENTION_SCORES, Mask::Additive), 0.25),
            rms(EMBED_NORM),
            LINEAR_ACT.with(|a| (a.act, a.residual) = (Some(Activation::Relu), true)),
            rms(NORM_LINEAR),
            rms_silu(FFN),
            FFN.with(|a| a.single = true),
            masked(ATTENTION, Mask::Full),
            masked(ATTENTION, Mask::Additive).with(|a| a.p = 0.1),
            masked(ATTENTION_ADD_NORM, Mask::Full).with(|a| a.norm = Norm::Rms),
            LINEAR_CROSS_ENTROPY.with(|a| (a.reduction, a.ignored) = (Reduction::Mean, Some(3))),
            LINEAR_CROSS_ENTROPY.with(|a| (a.reduction, a.smoothing) = (Reduction::Sum, 0.1)),
            LINEAR_CROSS_ENTROPY.with(|a| (a.reduction, a.smoothing, a.ignored) = (Reduction::None, 0.25, Some(0))),
            requantized(None),
            requantized(Some(Activation::Relu)),
            MOE.with(|a| a.act = None),
            MOE.with(|a| (a.act, a.weighted) = (Some(Activation::Silu), true)),
        ]);
        all
    }

    /// The op of a name, with its usual attributes.
    pub fn find(name: &str) -> Result<FusedOp, Error> {
        let catalog = FusedOp::catalog();
        catalog.iter().find(|op| op.name() == name).copied().ok_or_else(|| {
            let known: Vec<&str> = catalog.iter().map(|op| op.name()).collect();
            Error::UnknownOp { name: name.to_string(), known: known.join(", ") }
        })
    }

    /// Its attributes.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// The same op with other attributes.
    pub fn with(mut self, change: impl FnOnce(&mut Attributes)) -> FusedOp {
        change(&mut self.attributes);
        self
    }

    /// The same op with another activation, if it has one.
    pub fn with_activation(self, activation: Activation) -> FusedOp {
        let has = self.entry.attributes.iter().any(|attribute| attribute.is_activation());
        self.with(|a| a.act = a.act.filter(|_| has).map(|_| activation).or(a.act))
    }

    /// Whether it is the op of an entry, whatever its attributes.
    pub(crate) fn is(&self, entry: &Entry) -> bool {
        self.name() == entry.name
    }

    /// Whether its attributes are the usual ones, whatever its epsilon.
    pub(crate) fn is_usual(&self) -> bool {
        self.with(|a| a.eps = EPS) == self.entry.usual()
    }

    /// Its name in the catalogue.
    pub fn name(&self) -> &'static str {
        self.entry.name
    }

    /// Its formula, as text.
    pub fn formula(&self) -> &'static str {
        self.entry.formula
    }

    /// Whether it consists of row kernels (except for matmuls of scores), so that memory dominates its time.
    pub fn is_rows(&self) -> bool {
        self.entry.is_rows
    }

    /// Whether it is attention, or begins with it.
    pub fn attends(&self) -> bool {
        self.entry.attends
    }

    /// Whether its result is square.
    pub fn is_square(&self) -> bool {
        self.entry.is_square
    }

    /// Whether it has a backward.
    pub fn has_backward(&self) -> bool {
        !matches!(self.entry.backward, Backward::None)
    }

    /// The words before `=` of its attributes, in the order in which they are shown.
    pub fn attribute_names(&self) -> Vec<&'static str> {
        self.entry.attributes.iter().map(|attribute| attribute.key).collect()
    }

    fn entries(&self) -> impl Iterator<Item = &'static entry::Operand> {
        self.entry.operands.iter().filter(|operand| (operand.when)(&self.attributes))
    }

    /// Names of its operands, in order.
    pub fn operands(&self) -> Vec<&'static str> {
        self.entries().map(|operand| operand.name).collect()
    }

    /// Names of its results, in order, without the statistics that a norm returns for its gradient.
    pub fn outputs(&self) -> Vec<&'static str> {
        (self.entry.outputs)(&self.attributes).to_vec()
    }

    /// Types of its operands for a tensor of `rows` and `cols`, as `bench` and `fuse` use them.
    pub fn operand_types(&self, rows: usize, cols: usize, dtype: Dtype) -> Vec<OperandType> {
        self.operand_types_of(&Sizes::new(rows, cols, dtype))
    }

    /// The same of any sizes.
    pub fn operand_types_of(&self, sizes: &Sizes) -> Vec<OperandType> {
        self.entries().map(|operand| (operand.of)(sizes, &self.attributes)).collect()
    }

    /// The forward graph over operands of these types. Statistics that the backward pass reads are outputs too.
    pub fn graph(&self, operands: &[OperandType]) -> Result<Graph, Error> {
        let (mut graph, built) = self.start(operands, &[])?;
        for (name, node) in built.outputs.iter().chain(&built.saved) {
            graph.output(name, *node)?;
        }
        Ok(graph)
    }

    /// The backward graph: takes operands, saved statistics, `s` for ops that continue after attention, and incoming gradients (`d_<output>`),
    /// and returns `d_<operand>`.
    /// Unused inputs are left out, so callers bind by name.
    pub fn backward_graph(&self, operands: &[OperandType]) -> Result<Graph, Error> {
        match self.entry.backward {
            Backward::None => Err(Error::NoBackward(self.name())),
            Backward::Derived => {
                let training = self.training(operands)?;
                let wrt: Vec<bool> = self.operands().iter().map(|&name| name != "mask").collect();
                training.backward(&vec![true; training.forward().outputs().len()], &wrt)
            }
        }
    }

    /// The forward graph with the values that its gradient reads, for an op that has one.
    pub fn training(&self, operands: &[OperandType]) -> Result<Training, Error> {
        self.training_transposed(operands, &[])
    }

    /// The same with weights of linear layers that are stored as `[out, in]`, at these positions among the operands,
    /// each of which must satisfy [`FusedOp::reads_transposed`].
    pub fn training_transposed(&self, operands: &[OperandType], transposed: &[usize]) -> Result<Training, Error> {
        let (mut graph, built) = self.start(operands, transposed)?;
        for (name, node) in &built.outputs {
            graph.output(name, *node)?;
        }
        Training::keeping(graph, built.saved.iter().map(|&(_, node)| node).chain(built.taken).collect())
    }

    /// Whether an operand is the weight of a linear layer, which may be read in place if it is stored as `[out, in]`.
    pub fn reads_transposed(&self, operand: &str) -> bool {
        self.entries().any(|entry| entry.name == operand && entry.transposes)
    }

    /// A graph of its operands alone.
    fn inputs(&self, operands: &[OperandType]) -> Result<(Graph, Vec<NodeId>), Error> {
        let names = self.operands();
        if operands.len() != names.len() {
            let got = format!("{} operands", operands.len());
            return Err(Error::Operands { op: self.name(), expected: names.join(", "), got });
        }
        let mut graph = Graph::new(self.name());
        let mut nodes = Vec::new();
        for (operand, (dtype, shape)) in self.entries().zip(operands) {
            nodes.push(graph.input_of(operand.kind, operand.name, *dtype, shape.clone())?);
        }
        Ok((graph, nodes))
    }

    fn start(&self, operands: &[OperandType], transposed: &[usize]) -> Result<(Graph, Built), Error> {
        let (mut graph, nodes) = self.inputs(operands)?;
        let transposed: Vec<NodeId> = transposed.iter().filter_map(|&position| nodes.get(position).copied()).collect();
        let (v, a) = (nodes.as_slice(), self.attributes);
        let built = (self.entry.build)(&mut Builder { g: &mut graph, v, a, transposed: &transposed })?;
        for (name, node) in built.outputs.iter().chain(&built.saved) {
            if !matches!(graph.node(*node).op, Op::Input { .. }) && graph.given_name(*node).is_none() {
                graph.set_node_name(*node, name)?;
            }
        }
        Ok((graph, built))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_work_around_a_linear_layer_is_searched() {
        let strategy_of = |name: &str| {
            let op = FusedOp::find(name).unwrap();
            strategy(&op.graph(&op.operand_types(256, 64, Dtype::F32)).unwrap())
        };
        for name in ["norm_linear", "ffn", "linear_act", "qkv"] {
            assert_eq!(strategy_of(name), Strategy::Fused, "{name}");
        }
        for name in ["norm_act", "attention", "attention_block", "linear_cross_entropy", "moe", "softmax"] {
            assert_eq!(strategy_of(name), Strategy::Greedy, "{name}");
        }
    }
}
