//! Composites: named operations with their attributes and operands.

use crate::activation::{Activation, Gelu};
use crate::dtype::Dtype;
use crate::named;

named! {
    /// The mask of a softmax or attention.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Mask {
        /// Nothing.
        Full = "full",
        /// Columns beyond the row's position, counted from the end: query `i` of `m` sees key `j` of `n` iff `j <= i + n - m`.
        Causal = "causal",
        /// An operand that is added to the scores.
        Additive = "additive",
        /// Keys after the query's own position, with an operand `i32[batch]` of each sequence's first position: query `i` of sequence
        /// `b` sees key `j` iff `j <= positions[b] + i`.
        Cached = "cached",
    }
}

impl Mask {
    /// Operands that it takes.
    fn operands(self) -> usize {
        matches!(self, Mask::Additive | Mask::Cached) as usize
    }
}

/// Work on the scores of attention between their scale and their softmax, in this order: the soft cap, slopes, the bias, then what hides keys.
/// The position of query `i` of `m` over `n` keys is `i + n - m`, or `positions[b] + i` in a cache.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ScoreWork {
    /// `cap tanh(s / cap)`
    pub soft_cap: Option<f64>,
    /// Adds `slope (key - position)`, with an operand `f32[.., 1, 1]` that broadcasts to the heads.
    pub slopes: bool,
    /// Adds an operand that broadcasts to the scores.
    pub bias: bool,
    /// Hides keys that are this many positions or more from the query's own, on both sides of it.
    pub window: Option<usize>,
    /// Hides keys of other documents than the query's own, with an operand `i32[keys]` or `i32[batch, keys]`: each key's document.
    pub documents: bool,
}

impl ScoreWork {
    /// No work.
    pub const NONE: ScoreWork =
        ScoreWork { soft_cap: None, slopes: false, bias: false, window: None, documents: false };

    /// Whether there is any.
    pub fn is_some(&self) -> bool {
        *self != ScoreWork::NONE
    }

    /// Operands that it takes.
    fn operands(&self) -> usize {
        self.operand_words().iter().filter(|word| word.1).count()
    }

    /// The operands that it may take, in order: their words in the text form, and whether it takes them.
    pub(crate) fn operand_words(&self) -> [(&'static str, bool); 3] {
        [("slopes", self.slopes), ("bias", self.bias), ("documents", self.documents)]
    }
}

/// A composite and its attributes, named in each variant's text. Operands are in the call.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Composite {
    /// `(x - mean) rstd w + b`. Operands: x, w, b. Results: y, mean, rstd.
    LayerNorm { eps: f64 },
    /// `x rstd w`. Operands: x, w. Results: y, rstd.
    RmsNorm { eps: f64 },
    /// `e^(x - max) / sum`; a row of `-inf` gives zeros. Operand: x.
    Softmax,
    /// `-inf` beyond the causal border. Operand: scores.
    CausalMask,
    /// Operand: x.
    Activation(Activation),
    /// `silu(x) g`. Operands: x, g.
    Swiglu,
    /// `gelu(x) g`. Operands: x, g.
    Geglu { kind: Gelu },
    /// `x / (1 - p)` where kept, else 0. Operands: x, seed.
    Dropout { p: f64, offset: u32 },
    /// `x w + b`. Operands: x, w `[in, out]` (`[out, in]` if transposed), optionally b.
    Linear { transposed: bool },
    /// `softmax(scale q k^T + mask)`. Operands: q, k `[.., s, d]`, the mask if additive, positions if cached.
    AttentionScores { mask: Mask, scale: f64 },
    /// `dropout(softmax(work(scale q k^T) + mask)) v`. Operands: q, k, v, the mask if additive or positions if cached, those of the
    /// work on scores (slopes, bias, documents), the seed if `p > 0`.
    Attention { mask: Mask, scale: f64, p: f64, offset: u32, work: ScoreWork },
    /// Rows as `i8` with a scale per row: `scale = absmax / 127`. A row of zeros has zeros and the scale 0; the scale of a row
    /// with a NaN or an infinity is NaN or infinite, so that what it scales is NaN. Operand: x. Results: q, scale.
    QuantizeInt8,
    /// Rows as `f8e4m3` with a scale per row: `scale = absmax / 448`. Operand: x. Results: q, scale.
    QuantizeFp8,
    /// `q scale`. Operands: q (`i8`), scale.
    Dequantize { dtype: Dtype },
    /// `(x w^T) xs ws + b` from bytes with a scale a row of x and of w; the sums of bytes are exact. Operands: x (`i8`), xs
    /// `[.., 1]`, w (`i8[out, in]`), ws `[out]`, optionally b.
    QuantizedLinear { dtype: Dtype },
    /// The same with a weight for each row, one of several: row `i` goes to expert `experts[i]`. Operands: x (`i8[rows, in]`),
    /// xs `[rows, 1]`, experts (`i32[rows]`), w (`i8[n, out, in]`), ws `[n, out]`, optionally b `[n, out]`.
    ExpertLinear { dtype: Dtype },
    /// `x w[expert]^T + b[expert]` of floats, for one expert per row or several. Operands: x `[rows, in]`, or `[rows, choices, in]` where
    /// each choice has a row of its own; experts (`i32[rows]` or `i32[rows, choices]`), w `[n, out, in]`, optionally b `[n, out]`.
    /// Result: `[rows, out]` or `[rows, choices, out]`.
    RoutedLinear,
    /// `sum over j of weights[.., j] x[.., j, :]`, in the order of `j`. Operands: x `[.., choices, columns]`, weights `[.., choices]`.
    WeightedSum,
    /// Mean over rows of `log sum e^x - x[target]`. Operands: logits, targets. Results: loss, logsumexp.
    CrossEntropy,
    /// For each row of logits `z = x w^T`, which exist only for some rows at a time: `logsumexp = log sum e^z` and
    /// `loss = logsumexp - (1 - smoothing) z[target] - smoothing mean(z)`, 0 where the target is `ignored`. Operands: x `[rows, in]`,
    /// w `[classes, in]`, targets `i32[rows]`. Results: loss, logsumexp, both `f32[rows, 1]`.
    LinearCrossEntropy { smoothing: f64, ignored: Option<i32> },
    /// Its gradients: `d_z = d_logsumexp e^(z - logsumexp) - d_loss ((1 - smoothing) [target] + smoothing / classes)`, where
    /// `d_logsumexp` includes the contribution of the loss. Operands: x, w, targets, logsumexp, d_logsumexp, d_loss, the last three
    /// `f32[rows, 1]`. Results: d_x, d_w.
    LinearCrossEntropyGradient { smoothing: f64 },
}

/// Every composite and its word in the text form and in reports.
macro_rules! kinds {
    (activations { $($activation:ident $word:literal,)* } others { $($own:ident $name:literal,)* }) => {
        named! {
            /// Which composite: a [`Composite`] without its attributes.
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
            pub enum CompositeKind {
                $(#[doc = $word] $activation = $word,)*
                $(#[doc = $name] $own = $name,)*
            }
        }

        impl Composite {
            /// Which composite it is.
            pub fn kind(&self) -> CompositeKind {
                match self {
                    Composite::Activation(activation) => activation.kind(),
                    $(Composite::$own { .. } => CompositeKind::$own,)*
                }
            }
        }
    };
}

kinds! {
    activations {
        Gelu "gelu",
        Silu "silu",
        Relu "relu",
    }
    others {
        LayerNorm "layer_norm",
        RmsNorm "rms_norm",
        Softmax "softmax",
        CausalMask "causal_mask",
        Swiglu "swiglu",
        Geglu "geglu",
        Dropout "dropout",
        Linear "linear",
        AttentionScores "attention_scores",
        Attention "attention",
        QuantizeInt8 "quantize_int8",
        QuantizeFp8 "quantize_fp8",
        Dequantize "dequantize",
        QuantizedLinear "quantized_linear",
        ExpertLinear "expert_linear",
        RoutedLinear "routed_linear",
        WeightedSum "weighted_sum",
        CrossEntropy "cross_entropy",
        LinearCrossEntropy "linear_cross_entropy",
        LinearCrossEntropyGradient "linear_cross_entropy_gradient",
    }
}

impl Activation {
    /// Its name in the text form and in reports.
    pub(crate) fn kind(self) -> CompositeKind {
        match self {
            Activation::GeluTanh | Activation::GeluErf => CompositeKind::Gelu,
            Activation::Silu => CompositeKind::Silu,
            Activation::Relu => CompositeKind::Relu,
        }
    }
}

impl Composite {
    /// The word of the text form and of the reports.
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Minimum and maximum number of operands.
    pub fn arity(&self) -> (usize, usize) {
        match self {
            Composite::LayerNorm { .. } => (3, 3),
            Composite::RmsNorm { .. } => (2, 2),
            Composite::Softmax | Composite::CausalMask | Composite::Activation(_) => (1, 1),
            Composite::QuantizeInt8 | Composite::QuantizeFp8 => (1, 1),
            Composite::Swiglu | Composite::Geglu { .. } | Composite::Dropout { .. } => (2, 2),
            Composite::Dequantize { .. } | Composite::CrossEntropy | Composite::WeightedSum => (2, 2),
            Composite::Linear { .. } => (2, 3),
            Composite::LinearCrossEntropy { .. } => (3, 3),
            Composite::LinearCrossEntropyGradient { .. } => (6, 6),
            Composite::QuantizedLinear { .. } => (4, 5),
            Composite::ExpertLinear { .. } => (5, 6),
            Composite::RoutedLinear => (3, 4),
            Composite::AttentionScores { mask, .. } => {
                let n = 2 + mask.operands();
                (n, n)
            }
            Composite::Attention { mask, p, work, .. } => {
                let n = 3 + mask.operands() + work.operands() + (*p > 0.0) as usize;
                (n, n)
            }
        }
    }
}
