//! The catalogue: every fused op, defined once as a graph. Ready-made functions, `ops`, `bench` and `fuse` all start here.

use deuteron_graph::{Activation, Dtype, Gelu, Graph, InputKind, Mask, NodeId, Op, Shape};

mod build;
mod products;
mod words;

use products::{linear_cross_entropy_gradient, logsumexp_shape};

use crate::error::Error;
use crate::training::Training;

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

/// A fused op and its attributes. The operands are listed by [`FusedOp::operands`].
#[allow(missing_docs)] // the attributes are those of the formula
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FusedOp {
    Act { act: Activation },
    MulAddAct { act: Activation },
    AddAct { act: Activation },
    BiasAct { act: Activation },
    ActDropout { act: Activation, p: f64 },
    ActDropoutAdd { act: Activation, p: f64 },
    BiasDropoutAdd { p: f64 },
    Swiglu { packed: bool },
    Geglu { kind: Gelu, packed: bool },
    LayerNorm { eps: f64 },
    RmsNorm { eps: f64 },
    NormAct { norm: Norm, eps: f64, act: Activation },
    NormBiasAct { norm: Norm, eps: f64, act: Activation },
    AddNorm { norm: Norm, eps: f64 },
    DropoutAddNorm { norm: Norm, eps: f64, p: f64 },
    NormQuantize { norm: Norm, eps: f64, residual: bool },
    Softmax { scale: Option<f64>, mask: Mask, p: f64 },
    AttentionScores { mask: Mask, scale: f64 },
    EmbedNorm { norm: Norm, eps: f64 },
    LinearAct { act: Activation, residual: bool },
    NormLinear { norm: Norm, eps: f64 },
    Qkv,
    Ffn { norm: Norm, eps: f64, act: Activation, single: bool },
    Attention { mask: Mask, p: f64, group: usize },
    AttentionAddNorm { mask: Mask, norm: Norm, eps: f64 },
    AttentionBlock { mask: Mask, norm: Norm, eps: f64 },
    LinearCrossEntropy,
    MoeInt8 { act: Option<Activation>, requantize: bool },
}

/// An operand's type.
pub type OperandType = (Dtype, Shape);

/// What a builder hands back.
#[derive(Default)]
struct Built {
    /// values to return
    outputs: Vec<(&'static str, NodeId)>,
    /// statistics that backward takes again
    saved: Vec<(&'static str, NodeId)>,
    /// of the values that are returned, those that backward takes again: computing them anew would cost attention
    taken: Vec<NodeId>,
}

/// How rows and columns of an op that attends are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// positions of a sequence, at most: the rows are sequences of them
    pub positions: usize,
    /// features of a head: the columns are heads of them where they divide so, and else one head
    pub width: usize,
}

impl Default for Heads {
    /// Those of GPT-2.
    fn default() -> Heads {
        Heads { positions: 1024, width: 64 }
    }
}

impl FusedOp {
    /// The catalogue with its usual attributes.
    pub fn catalog() -> Vec<FusedOp> {
        let (act, norm, eps, p) = (Activation::GeluTanh, Norm::Layer, EPS, 0.1);
        vec![
            FusedOp::Act { act },
            FusedOp::MulAddAct { act },
            FusedOp::AddAct { act },
            FusedOp::BiasAct { act },
            FusedOp::ActDropout { act, p },
            FusedOp::ActDropoutAdd { act, p },
            FusedOp::BiasDropoutAdd { p },
            FusedOp::Swiglu { packed: false },
            FusedOp::Geglu { kind: Gelu::Tanh, packed: false },
            FusedOp::LayerNorm { eps },
            FusedOp::RmsNorm { eps },
            FusedOp::NormAct { norm, eps, act },
            FusedOp::NormBiasAct { norm, eps, act },
            FusedOp::AddNorm { norm, eps },
            FusedOp::DropoutAddNorm { norm, eps, p },
            FusedOp::NormQuantize { norm, eps, residual: false },
            FusedOp::Softmax { scale: None, mask: Mask::Full, p: 0.0 },
            FusedOp::AttentionScores { mask: Mask::Causal, scale: 0.125 },
            FusedOp::EmbedNorm { norm, eps },
            FusedOp::LinearAct { act, residual: false },
            FusedOp::NormLinear { norm, eps },
            FusedOp::Qkv,
            FusedOp::Ffn { norm, eps, act, single: false },
            FusedOp::Attention { mask: Mask::Causal, p: 0.0, group: 1 },
            FusedOp::AttentionAddNorm { mask: Mask::Causal, norm, eps },
            FusedOp::AttentionBlock { mask: Mask::Causal, norm, eps },
            FusedOp::LinearCrossEntropy,
            FusedOp::MoeInt8 { act: Some(act), requantize: true },
        ]
    }

    /// Whether it is made of row kernels, products of scores aside: those whose cost is that of memory.
    pub fn is_rows(&self) -> bool {
        !matches!(
            self,
            FusedOp::LinearAct { .. }
                | FusedOp::NormLinear { .. }
                | FusedOp::Qkv
                | FusedOp::LinearCrossEntropy
                | FusedOp::MoeInt8 { .. }
                | FusedOp::Ffn { .. }
                | FusedOp::Attention { .. }
                | FusedOp::AttentionAddNorm { .. }
                | FusedOp::AttentionBlock { .. }
        )
    }

    /// Whether it is attention, or begins with it.
    pub fn attends(&self) -> bool {
        matches!(self, FusedOp::Attention { .. } | FusedOp::AttentionAddNorm { .. } | FusedOp::AttentionBlock { .. })
    }

    /// Every op with every attribute that changes its arithmetic: what the tests run.
    pub fn variants() -> Vec<FusedOp> {
        let mut all = FusedOp::catalog();
        for act in [Activation::GeluErf, Activation::Silu, Activation::Relu] {
            all.extend([FusedOp::Act { act }, FusedOp::AddAct { act }, FusedOp::BiasAct { act }]);
            all.push(FusedOp::NormAct { norm: Norm::Layer, eps: EPS, act });
        }
        let (norm, eps) = (Norm::Rms, EPS);
        all.extend([
            FusedOp::Swiglu { packed: true },
            FusedOp::Geglu { kind: Gelu::Erf, packed: true },
            FusedOp::NormAct { norm, eps, act: Activation::Silu },
            FusedOp::NormBiasAct { norm, eps, act: Activation::Silu },
            FusedOp::AddNorm { norm, eps },
            FusedOp::DropoutAddNorm { norm, eps, p: 0.25 },
            FusedOp::NormQuantize { norm, eps, residual: true },
            FusedOp::NormQuantize { norm: Norm::Layer, eps, residual: true },
            FusedOp::Softmax { scale: Some(0.125), mask: Mask::Causal, p: 0.1 },
            FusedOp::Softmax { scale: Some(0.125), mask: Mask::Additive, p: 0.0 },
            FusedOp::AttentionScores { mask: Mask::Full, scale: 0.25 },
            FusedOp::AttentionScores { mask: Mask::Additive, scale: 0.25 },
            FusedOp::EmbedNorm { norm, eps },
            FusedOp::LinearAct { act: Activation::Relu, residual: true },
            FusedOp::NormLinear { norm, eps },
            FusedOp::Ffn { norm, eps, act: Activation::Silu, single: false },
            FusedOp::Ffn { norm: Norm::Layer, eps, act: Activation::GeluTanh, single: true },
            FusedOp::Attention { mask: Mask::Full, p: 0.0, group: 1 },
            FusedOp::Attention { mask: Mask::Additive, p: 0.1, group: 1 },
            FusedOp::AttentionAddNorm { mask: Mask::Full, norm, eps },
            FusedOp::MoeInt8 { act: None, requantize: false },
            FusedOp::MoeInt8 { act: Some(Activation::Relu), requantize: false },
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

    /// The same op with another activation, if it has one.
    pub fn with_activation(mut self, activation: Activation) -> FusedOp {
        match &mut self {
            FusedOp::Act { act } | FusedOp::MulAddAct { act } | FusedOp::AddAct { act } => *act = activation,
            FusedOp::BiasAct { act } | FusedOp::ActDropout { act, .. } => *act = activation,
            FusedOp::ActDropoutAdd { act, .. } | FusedOp::NormAct { act, .. } => *act = activation,
            FusedOp::NormBiasAct { act, .. } | FusedOp::LinearAct { act, .. } | FusedOp::Ffn { act, .. } => {
                *act = activation;
            }
            FusedOp::MoeInt8 { act, .. } => *act = act.map(|_| activation),
            FusedOp::NormLinear { .. } | FusedOp::Attention { .. } | FusedOp::Qkv => {}
            FusedOp::LinearCrossEntropy => {}
            FusedOp::AttentionAddNorm { .. } | FusedOp::AttentionBlock { .. } => {}
            FusedOp::BiasDropoutAdd { .. } | FusedOp::Swiglu { .. } | FusedOp::Geglu { .. } => {}
            FusedOp::LayerNorm { .. } | FusedOp::RmsNorm { .. } | FusedOp::AddNorm { .. } => {}
            FusedOp::DropoutAddNorm { .. } | FusedOp::NormQuantize { .. } | FusedOp::Softmax { .. } => {}
            FusedOp::AttentionScores { .. } | FusedOp::EmbedNorm { .. } => {}
        }
        self
    }

    /// Its name in the catalogue.
    pub fn name(&self) -> &'static str {
        match self {
            FusedOp::Act { .. } => "act",
            FusedOp::MulAddAct { .. } => "mul_add_act",
            FusedOp::AddAct { .. } => "add_act",
            FusedOp::BiasAct { .. } => "bias_act",
            FusedOp::ActDropout { .. } => "act_dropout",
            FusedOp::ActDropoutAdd { .. } => "act_dropout_add",
            FusedOp::BiasDropoutAdd { .. } => "bias_dropout_add",
            FusedOp::Swiglu { .. } => "swiglu",
            FusedOp::Geglu { .. } => "geglu",
            FusedOp::LayerNorm { .. } => "layer_norm",
            FusedOp::RmsNorm { .. } => "rms_norm",
            FusedOp::NormAct { .. } => "norm_act",
            FusedOp::NormBiasAct { .. } => "norm_bias_act",
            FusedOp::AddNorm { .. } => "add_norm",
            FusedOp::DropoutAddNorm { .. } => "dropout_add_norm",
            FusedOp::NormQuantize { .. } => "norm_quantize",
            FusedOp::Softmax { .. } => "softmax",
            FusedOp::AttentionScores { .. } => "attention_scores",
            FusedOp::EmbedNorm { .. } => "embed_norm",
            FusedOp::LinearAct { .. } => "linear_act",
            FusedOp::NormLinear { .. } => "norm_linear",
            FusedOp::Qkv => "qkv",
            FusedOp::Ffn { .. } => "ffn",
            FusedOp::Attention { .. } => "attention",
            FusedOp::AttentionAddNorm { .. } => "attention_add_norm",
            FusedOp::AttentionBlock { .. } => "attention_block",
            FusedOp::LinearCrossEntropy => "linear_cross_entropy",
            FusedOp::MoeInt8 { .. } => "moe_int8",
        }
    }

    /// What it computes, for a person.
    pub fn formula(&self) -> &'static str {
        match self {
            FusedOp::Act { .. } => "act(x); act = gelu, gelu_erf, silu, relu",
            FusedOp::MulAddAct { .. } => "act(x * w + b), elementwise",
            FusedOp::AddAct { .. } => "act(x + r)",
            FusedOp::BiasAct { .. } => "act(x + b), b per column",
            FusedOp::ActDropout { .. } => "dropout(act(x), p, seed)",
            FusedOp::ActDropoutAdd { .. } => "dropout(act(x), p, seed) + r",
            FusedOp::BiasDropoutAdd { .. } => "dropout(x + b, p, seed) + r",
            FusedOp::Swiglu { .. } => "silu(x) * g; operands apart or one [.., 2h] tensor",
            FusedOp::Geglu { .. } => "gelu(x) * g; operands apart or one [.., 2h] tensor",
            FusedOp::LayerNorm { .. } => "(x - mean) * rstd * w + b; returns mean and rstd too",
            FusedOp::RmsNorm { .. } => "x * rstd * w; returns rstd too",
            FusedOp::NormAct { .. } => "act(norm(x)); norm = layer_norm, rms_norm",
            FusedOp::NormBiasAct { .. } => "act(norm(x) + bias)",
            FusedOp::AddNorm { .. } => "s = x + r; y = norm(s); returns both",
            FusedOp::DropoutAddNorm { .. } => "s = r + dropout(x + bias, p, seed); y = norm(s); returns both",
            FusedOp::NormQuantize { .. } => "int8 rows of norm(x) (or norm(x + r)) with a scale a row",
            FusedOp::Softmax { .. } => "dropout(softmax(scale * x + mask)); any subset",
            FusedOp::AttentionScores { .. } => "softmax(scale * q k^T + mask), materialised",
            FusedOp::EmbedNorm { .. } => "norm(wte[tokens] + wpe[position]); returns the sum too",
            FusedOp::LinearAct { .. } => "act(x W + b), or that + r",
            FusedOp::NormLinear { .. } => "norm(x) W + b",
            FusedOp::Qkv => "x [Wq Wk Wv] + b in one pass; q, k and v are views of it",
            FusedOp::Ffn { .. } => "x + act(norm(x) W1 + b1) W2 + b2, or x + act(norm(x) W + b)",
            FusedOp::Attention { .. } => "dropout(softmax(q k^T / sqrt(d) + mask)) v; heads may share keys",
            FusedOp::AttentionAddNorm { .. } => "s = r + attention(q, k, v); y = norm(s); returns both",
            FusedOp::AttentionBlock { .. } => "s = r + attention(q, k, v) W + b; y = norm(s); returns both",
            FusedOp::MoeInt8 { .. } => "act(x W[expert] + b) of int8 rows routed to int8 experts; int8 rows, or floats",
            FusedOp::LinearCrossEntropy => "mean cross entropy of x W^T, logits of few rows at a time",
        }
    }

    /// Whether it has a backward.
    pub fn has_backward(&self) -> bool {
        !matches!(self, FusedOp::NormQuantize { .. } | FusedOp::MoeInt8 { .. })
    }

    /// Names of its operands, in order.
    pub fn operands(&self) -> Vec<&'static str> {
        let norm_operands = |norm: &Norm| match norm {
            Norm::Layer => vec!["w", "b"],
            Norm::Rms => vec!["w"],
        };
        let with_norm = |first: &[&'static str], norm: &Norm| [first, &norm_operands(norm)].concat();
        match self {
            FusedOp::Act { .. } => vec!["x"],
            FusedOp::MulAddAct { .. } => vec!["x", "w", "b"],
            FusedOp::AddAct { .. } => vec!["x", "r"],
            FusedOp::BiasAct { .. } => vec!["x", "b"],
            FusedOp::ActDropout { .. } => vec!["x", "seed"],
            FusedOp::ActDropoutAdd { .. } => vec!["x", "r", "seed"],
            FusedOp::BiasDropoutAdd { .. } => vec!["x", "b", "r", "seed"],
            FusedOp::Swiglu { packed } | FusedOp::Geglu { packed, .. } => {
                if *packed {
                    vec!["xg"]
                } else {
                    vec!["x", "g"]
                }
            }
            FusedOp::LayerNorm { .. } => vec!["x", "w", "b"],
            FusedOp::RmsNorm { .. } => vec!["x", "w"],
            FusedOp::NormAct { norm, .. } => with_norm(&["x"], norm),
            FusedOp::NormBiasAct { norm, .. } => with_norm(&["x", "bias"], norm),
            FusedOp::AddNorm { norm, .. } => with_norm(&["x", "r"], norm),
            FusedOp::DropoutAddNorm { norm, .. } => with_norm(&["x", "bias", "r", "seed"], norm),
            FusedOp::NormQuantize { norm, residual, .. } => {
                with_norm(if *residual { &["x", "r"] } else { &["x"] }, norm)
            }
            FusedOp::Softmax { mask, p, .. } => {
                let mask = (*mask == Mask::Additive).then_some("mask");
                ["x"].into_iter().chain(mask).chain((*p > 0.0).then_some("seed")).collect()
            }
            FusedOp::AttentionScores { mask, .. } => {
                ["q", "k"].into_iter().chain((*mask == Mask::Additive).then_some("mask")).collect()
            }
            FusedOp::EmbedNorm { norm, .. } => with_norm(&["tokens", "wte", "wpe"], norm),
            FusedOp::LinearAct { residual, .. } => {
                ["x", "weight", "bias"].into_iter().chain(residual.then_some("r")).collect()
            }
            FusedOp::NormLinear { norm, .. } => with_norm(&["x", "weight", "bias"], norm),
            FusedOp::Qkv => vec!["x", "weight", "bias"],
            FusedOp::Ffn { norm, single: true, .. } => with_norm(&["x", "weight", "bias"], norm),
            FusedOp::Ffn { norm, .. } => with_norm(&["x", "weight1", "bias1", "weight2", "bias2"], norm),
            FusedOp::Attention { mask, p, .. } => {
                let mask = (*mask == Mask::Additive).then_some("mask");
                ["q", "k", "v"].into_iter().chain(mask).chain((*p > 0.0).then_some("seed")).collect()
            }
            FusedOp::LinearCrossEntropy => vec!["x", "weight", "targets"],
            FusedOp::MoeInt8 { .. } => vec!["x", "x_scale", "experts", "weight", "weight_scale", "bias"],
            FusedOp::AttentionAddNorm { norm, .. } => with_norm(&["q", "k", "v", "r"], norm),
            FusedOp::AttentionBlock { norm, .. } => with_norm(&["q", "k", "v", "weight", "bias", "r"], norm),
        }
    }

    /// Names of what it returns, in order; statistics that a norm returns besides for its gradient are none of it.
    pub fn outputs(&self) -> Vec<&'static str> {
        match self {
            FusedOp::AddNorm { .. } | FusedOp::DropoutAddNorm { .. } | FusedOp::EmbedNorm { .. } => vec!["y", "s"],
            FusedOp::AttentionAddNorm { .. } | FusedOp::AttentionBlock { .. } => vec!["y", "s"],
            FusedOp::NormQuantize { residual: true, .. } => vec!["q", "scale", "s"],
            FusedOp::NormQuantize { .. } | FusedOp::MoeInt8 { requantize: true, .. } => vec!["q", "scale"],
            FusedOp::LinearCrossEntropy => vec!["loss"],
            _ => vec!["y"],
        }
    }

    /// Types of its operands for a tensor of `rows` and `cols`, as `bench` and `fuse` use them.
    pub fn operand_types(&self, rows: usize, cols: usize, dtype: Dtype) -> Vec<OperandType> {
        self.operand_types_of_heads(rows, cols, dtype, Heads::default())
    }

    /// The same, of an op that attends with other sequences and heads.
    pub fn operand_types_of_heads(&self, rows: usize, cols: usize, dtype: Dtype, of: Heads) -> Vec<OperandType> {
        let full = Shape::from([rows, cols]);
        let sequence = rows.clamp(1, of.positions.max(1));
        let width = of.width.max(1);
        let (batch, heads) =
            (rows.div_ceil(sequence), if cols.is_multiple_of(width) { (cols / width).max(1) } else { 1 });
        let attends = self.attends();
        let routed = routed_columns(rows, cols);
        let of = |name: &str| -> OperandType {
            let vector = Shape::from([cols]);
            match (name, self) {
                ("x", FusedOp::MoeInt8 { .. }) => (Dtype::I8, full.clone()),
                ("x_scale", _) => (Dtype::F32, Shape::from([rows, 1])),
                ("experts", _) => (Dtype::I32, Shape::from([rows])),
                ("weight", FusedOp::MoeInt8 { .. }) => (Dtype::I8, Shape::from([EXPERTS, routed, cols])),
                ("weight_scale", _) => (Dtype::F32, Shape::from([EXPERTS, routed])),
                ("bias", FusedOp::MoeInt8 { .. }) => (dtype, Shape::from([EXPERTS, routed])),
                ("seed", _) => (Dtype::I32, Shape::scalar()),
                ("xg", _) => (dtype, Shape::from([rows, 2 * cols])),
                ("w" | "b", FusedOp::MulAddAct { .. }) => (dtype, full.clone()),
                ("k" | "v", FusedOp::Attention { group, .. }) => {
                    (dtype, Shape::from([batch, heads.div_ceil((*group).max(1)), sequence, cols / heads]))
                }
                ("mask", FusedOp::Attention { .. }) => (dtype, Shape::from([sequence, sequence])),
                ("q" | "k" | "v", _) if attends => (dtype, Shape::from([batch, heads, sequence, cols / heads])),
                ("r", _) if attends => (dtype, Shape::from([batch, sequence, cols])),
                ("weight", FusedOp::AttentionBlock { .. } | FusedOp::Ffn { .. }) => (dtype, Shape::from([cols, cols])),
                // GPT-2's tokens for a sequence of its length; for more rows fewer, so that the work stays.
                ("weight", FusedOp::LinearCrossEntropy) => {
                    (dtype, Shape::from([(50257 * 1024 / rows.max(1024)).max(512), cols]))
                }
                ("weight", FusedOp::Qkv) => (dtype, Shape::from([cols, 3 * cols])),
                ("bias", FusedOp::Qkv) => (dtype, Shape::from([3 * cols])),
                ("targets", _) => (Dtype::I32, Shape::from([rows])),
                ("weight" | "weight1", _) => (dtype, Shape::from([cols, 4 * cols])),
                ("weight2", _) => (dtype, Shape::from([4 * cols, cols])),
                ("bias", FusedOp::LinearAct { .. } | FusedOp::NormLinear { .. }) | ("bias1", _) => {
                    (dtype, Shape::from([4 * cols]))
                }
                ("bias2", _) => (dtype, vector),
                ("r", FusedOp::LinearAct { .. }) => (dtype, Shape::from([rows, 4 * cols])),
                ("w" | "b" | "bias", _) => (dtype, vector),
                ("mask", FusedOp::AttentionScores { .. }) => (dtype, Shape::from([cols, cols])),
                // Twelve heads of 64 features, as many queries as keys: `rows` counts heads times queries.
                ("q" | "k", _) => (dtype, Shape::from([rows.div_ceil(cols.max(1)).max(1), cols, 64])),
                ("tokens", _) => (Dtype::I32, Shape::from([1, rows])),
                ("wte", _) => (dtype, Shape::from([50257, cols])),
                ("wpe", _) => (dtype, Shape::from([rows.max(1024), cols])),
                ("x" | "mask", FusedOp::Softmax { mask, .. })
                    if *mask == Mask::Causal && rows.is_multiple_of(cols.max(1)) =>
                {
                    (dtype, Shape::from([rows / cols.max(1), cols, cols]))
                }
                _ => (dtype, full.clone()),
            }
        };
        self.operands().into_iter().map(of).collect()
    }

    /// The forward graph over operands of these types. Statistics that backward takes again are outputs too.
    pub fn graph(&self, operands: &[OperandType]) -> Result<Graph, Error> {
        let (mut graph, built) = self.start(operands, &[])?;
        for (name, node) in built.outputs.iter().chain(&built.saved) {
            graph.output(name, *node)?;
        }
        Ok(graph)
    }

    /// The backward graph: takes operands, saved statistics, of ops that attend and go on `s`, and incoming gradients (`d_<output>`),
    /// gives `d_<operand>`.
    /// Inputs that it does not need are left out, so callers bind by name.
    pub fn backward_graph(&self, operands: &[OperandType]) -> Result<Graph, Error> {
        if !self.has_backward() {
            return Err(Error::NoBackward(self.name()));
        }
        if let FusedOp::LinearCrossEntropy = self {
            return self.cross_entropy_backward(operands);
        }
        let training = self.training(operands)?;
        let wrt: Vec<bool> = self.operands().iter().map(|&name| name != "mask").collect();
        training.backward(&vec![true; training.forward().outputs().len()], &wrt)
    }

    /// The forward graph with what its gradient takes again, for an op that has one. That of [`FusedOp::LinearCrossEntropy`] is
    /// [`FusedOp::backward_graph`].
    pub fn training(&self, operands: &[OperandType]) -> Result<Training, Error> {
        self.training_turned(operands, &[])
    }

    /// The same with weights of linear layers that lie as `[out, in]`, and are given so: of these positions among the operands,
    /// each of which [`FusedOp::turns`].
    pub fn training_turned(&self, operands: &[OperandType], turned: &[usize]) -> Result<Training, Error> {
        let (mut graph, built) = self.start(operands, turned)?;
        for (name, node) in &built.outputs {
            graph.output(name, *node)?;
        }
        Training::keeping(graph, built.saved.iter().map(|&(_, node)| node).chain(built.taken).collect())
    }

    /// Written out by hand: see [`linear_cross_entropy_gradient`].
    fn cross_entropy_backward(&self, operands: &[OperandType]) -> Result<Graph, Error> {
        let (mut graph, nodes) = self.inputs(operands)?;
        let operands = [nodes[0], nodes[1], nodes[2]];
        let rows = graph.node(nodes[0]).shape.rows();
        let logsumexp = graph.input("logsumexp", Dtype::F32, logsumexp_shape(rows))?;
        let d_loss = graph.input("d_loss", Dtype::F32, Shape::scalar())?;
        let [d_x, d_weight] = linear_cross_entropy_gradient(&mut graph, operands, logsumexp, d_loss)?;
        graph.output("d_x", d_x)?;
        graph.output("d_weight", d_weight)?;
        graph.set_name(&format!("{}_backward", self.name()));
        Ok(graph)
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
        for (name, (dtype, shape)) in names.iter().zip(operands) {
            nodes.push(match input_kind(name) {
                InputKind::Data => graph.input(name, *dtype, shape.clone())?,
                InputKind::Weight => graph.weight(name, *dtype, shape.clone())?,
            });
        }
        Ok((graph, nodes))
    }

    /// Whether an operand is the weight of a linear layer, which may be read as it lies if it is `[out, in]`.
    pub fn turns(&self, operand: &str) -> bool {
        let linear = matches!(
            self,
            FusedOp::LinearAct { .. }
                | FusedOp::NormLinear { .. }
                | FusedOp::Qkv
                | FusedOp::Ffn { .. }
                | FusedOp::AttentionBlock { .. }
        );
        linear && matches!(operand, "weight" | "weight1" | "weight2")
    }

    fn start(&self, operands: &[OperandType], turned: &[usize]) -> Result<(Graph, Built), Error> {
        let (mut graph, nodes) = self.inputs(operands)?;
        let turned: Vec<NodeId> = turned.iter().filter_map(|&position| nodes.get(position).copied()).collect();
        let built = self.build(&mut graph, &nodes, &turned)?;
        for (name, node) in built.outputs.iter().chain(&built.saved) {
            if !matches!(graph.node(*node).op, Op::Input { .. }) && graph.given_name(*node).is_none() {
                graph.set_node_name(*node, name)?;
            }
        }
        Ok((graph, built))
    }
}

/// Experts, as `bench` and `fuse` have them.
const EXPERTS: usize = 8;

/// Columns of an expert: as of any first layer, but no more than let the weights of all rows, one by one, be 2^28 elements. A plan
/// that fuses nothing writes them down, and so does the reference.
fn routed_columns(rows: usize, cols: usize) -> usize {
    // Sizes that no tensor can have are refused where it is made.
    cols.saturating_mul(4).min(((1 << 28) / rows.saturating_mul(cols).max(1)).max(16))
}

fn input_kind(operand: &str) -> InputKind {
    match operand {
        "w" | "b" | "bias" | "wte" | "wpe" => InputKind::Weight,
        "weight" | "weight1" | "weight2" | "weight_scale" | "bias1" | "bias2" => InputKind::Weight,
        _ => InputKind::Data,
    }
}
