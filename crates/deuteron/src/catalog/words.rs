//! Ops with their attributes in words: `norm_act norm=rms act=silu eps=1e-6`.

use std::str::FromStr;

use deuteron_graph::{Activation, Gelu, Mask};

use super::{FusedOp, Norm};
use crate::error::Error;

impl FromStr for FusedOp {
    type Err = Error;

    /// An op of the catalogue with its usual attributes, and those that are named.
    fn from_str(text: &str) -> Result<FusedOp, Error> {
        let mut words = text.split_whitespace();
        let mut op = FusedOp::find(words.next().unwrap_or_default())?;
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let expected = op.set(key, value);
            expected.map_err(|expected| Error::Operands { op: op.name(), expected, got: format!("`{word}`") })?;
        }
        Ok(op)
    }
}

impl FusedOp {
    /// Sets an attribute, or says what would be one.
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "act" => return self.set_activation(value),
            "norm" => *self.norm_mut().ok_or_else(|| none("norm"))? = norm(value)?,
            "eps" => *self.eps_mut().ok_or_else(|| none("eps"))? = positive("eps", value)?,
            "p" => *self.p_mut().ok_or_else(|| none("p"))? = probability(value)?,
            "mask" => *self.mask_mut().ok_or_else(|| none("mask"))? = mask(value)?,
            "scale" => self.set_scale(value)?,
            "group" => match self {
                FusedOp::Attention { group, .. } => *group = whole(value)?,
                _ => return Err(none("group")),
            },
            _ => *self.flag_mut(key).ok_or_else(|| none(key))? = flag(key, value)?,
        }
        Ok(())
    }

    fn set_activation(&mut self, value: &str) -> Result<(), String> {
        if let (FusedOp::MoeInt8 { act, .. }, "none") = (&mut *self, value) {
            *act = None;
            return Ok(());
        }
        let found = Activation::ALL.into_iter().find(|act| act.name() == value);
        let found = found.ok_or_else(|| "act=gelu, act=gelu_erf, act=silu or act=relu".to_string())?;
        match (&mut *self, found) {
            (FusedOp::Geglu { kind, .. }, Activation::GeluTanh) => *kind = Gelu::Tanh,
            (FusedOp::Geglu { kind, .. }, Activation::GeluErf) => *kind = Gelu::Erf,
            (FusedOp::Geglu { .. }, _) => return Err("act=gelu or act=gelu_erf".into()),
            (FusedOp::MoeInt8 { act, .. }, found) => *act = Some(found),
            _ => {
                let changed = [Activation::GeluTanh, Activation::Relu].map(|act| self.with_activation(act));
                if changed[0] == changed[1] {
                    return Err(none("act"));
                }
                *self = self.with_activation(found);
            }
        }
        Ok(())
    }

    fn set_scale(&mut self, value: &str) -> Result<(), String> {
        let number = value.parse::<f64>().ok().filter(|scale| scale.is_finite());
        match (self, value, number) {
            (FusedOp::Softmax { scale, .. }, "none", _) => *scale = None,
            (FusedOp::Softmax { scale, .. }, _, Some(number)) => *scale = Some(number),
            (FusedOp::AttentionScores { scale, .. }, _, Some(number)) => *scale = number,
            (FusedOp::Softmax { .. } | FusedOp::AttentionScores { .. }, ..) => {
                return Err("scale=NUMBER".into());
            }
            _ => return Err(none("scale")),
        }
        Ok(())
    }

    fn norm_mut(&mut self) -> Option<&mut Norm> {
        match self {
            FusedOp::NormAct { norm, .. } | FusedOp::NormBiasAct { norm, .. } | FusedOp::AddNorm { norm, .. } => {
                Some(norm)
            }
            FusedOp::DropoutAddNorm { norm, .. } | FusedOp::NormQuantize { norm, .. } => Some(norm),
            FusedOp::EmbedNorm { norm, .. } | FusedOp::NormLinear { norm, .. } | FusedOp::Ffn { norm, .. } => {
                Some(norm)
            }
            FusedOp::AttentionAddNorm { norm, .. } | FusedOp::AttentionBlock { norm, .. } => Some(norm),
            _ => None,
        }
    }

    fn eps_mut(&mut self) -> Option<&mut f64> {
        match self {
            FusedOp::LayerNorm { eps } | FusedOp::RmsNorm { eps } | FusedOp::NormAct { eps, .. } => Some(eps),
            FusedOp::NormBiasAct { eps, .. } | FusedOp::AddNorm { eps, .. } => Some(eps),
            FusedOp::DropoutAddNorm { eps, .. } | FusedOp::NormQuantize { eps, .. } => Some(eps),
            FusedOp::EmbedNorm { eps, .. } | FusedOp::NormLinear { eps, .. } | FusedOp::Ffn { eps, .. } => Some(eps),
            FusedOp::AttentionAddNorm { eps, .. } | FusedOp::AttentionBlock { eps, .. } => Some(eps),
            _ => None,
        }
    }

    fn p_mut(&mut self) -> Option<&mut f64> {
        match self {
            FusedOp::ActDropout { p, .. } | FusedOp::ActDropoutAdd { p, .. } | FusedOp::BiasDropoutAdd { p } => Some(p),
            FusedOp::DropoutAddNorm { p, .. } | FusedOp::Softmax { p, .. } | FusedOp::Attention { p, .. } => Some(p),
            _ => None,
        }
    }

    fn mask_mut(&mut self) -> Option<&mut Mask> {
        match self {
            FusedOp::Softmax { mask, .. } | FusedOp::AttentionScores { mask, .. } => Some(mask),
            FusedOp::Attention { mask, .. } | FusedOp::AttentionAddNorm { mask, .. } => Some(mask),
            FusedOp::AttentionBlock { mask, .. } => Some(mask),
            _ => None,
        }
    }

    fn flag_mut(&mut self, key: &str) -> Option<&mut bool> {
        match (self, key) {
            (FusedOp::Swiglu { packed } | FusedOp::Geglu { packed, .. }, "packed") => Some(packed),
            (FusedOp::NormQuantize { residual, .. } | FusedOp::LinearAct { residual, .. }, "residual") => {
                Some(residual)
            }
            (FusedOp::Ffn { single, .. }, "single") => Some(single),
            (FusedOp::MoeInt8 { requantize, .. }, "requantize") => Some(requantize),
            _ => None,
        }
    }
}

fn none(key: &str) -> String {
    format!("one of its attributes, and it has no `{key}`")
}

fn norm(value: &str) -> Result<Norm, String> {
    match value {
        "layer" => Ok(Norm::Layer),
        "rms" => Ok(Norm::Rms),
        _ => Err("norm=layer or norm=rms".into()),
    }
}

fn mask(value: &str) -> Result<Mask, String> {
    match value {
        "full" => Ok(Mask::Full),
        "causal" => Ok(Mask::Causal),
        "additive" => Ok(Mask::Additive),
        _ => Err("mask=full, mask=causal or mask=additive".into()),
    }
}

fn flag(key: &str, value: &str) -> Result<bool, String> {
    value.parse().map_err(|_| format!("{key}=true or {key}=false"))
}

fn whole(value: &str) -> Result<usize, String> {
    value.parse().ok().filter(|&number| number > 0).ok_or_else(|| "group=NUMBER, at least 1".to_string())
}

fn positive(key: &str, value: &str) -> Result<f64, String> {
    let number = value.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| format!("{key}=NUMBER, at least 0"))
}

fn probability(value: &str) -> Result<f64, String> {
    let number = value.parse::<f64>().ok().filter(|p| (0.0..1.0).contains(p));
    number.ok_or_else(|| "p=NUMBER, at least 0 and below 1".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_set_by_their_words() {
        let op: FusedOp = "norm_act norm=rms act=silu eps=1e-6".parse().unwrap();
        assert_eq!(op, FusedOp::NormAct { norm: Norm::Rms, eps: 1e-6, act: Activation::Silu });
        let op: FusedOp = "softmax scale=0.5 mask=causal p=0.1".parse().unwrap();
        assert_eq!(op, FusedOp::Softmax { scale: Some(0.5), mask: Mask::Causal, p: 0.1 });
        let op: FusedOp = "geglu act=gelu_erf packed=true".parse().unwrap();
        assert_eq!(op, FusedOp::Geglu { kind: Gelu::Erf, packed: true });
        let op: FusedOp = "moe_int8 act=none requantize=false".parse().unwrap();
        assert_eq!(op, FusedOp::MoeInt8 { act: None, requantize: false });
        for op in FusedOp::catalog() {
            assert_eq!(op.name().parse::<FusedOp>().unwrap(), op);
        }
    }

    #[test]
    fn outputs_are_named_as_graphs_have_them() {
        for op in FusedOp::variants() {
            let training = op.training(&op.operand_types(64, 64, deuteron_graph::Dtype::F32)).unwrap();
            let names: Vec<&str> = training.forward().outputs().iter().map(|output| output.name.as_str()).collect();
            assert_eq!(names, op.outputs(), "{op:?}");
        }
    }

    #[test]
    fn what_an_op_does_not_have_is_told() {
        for (text, hint) in [
            ("norm_act p=0.5", "no `p`"),
            ("norm_act norm=batch", "norm=layer"),
            ("act_dropout p=1.5", "below 1"),
            ("layer_norm act=relu", "no `act`"),
            ("swiglu packed=maybe", "packed=true"),
            ("layer_norm eps=-1", "at least 0"),
            ("attention group=0", "at least 1"),
            ("softmax scale=nan", "scale=NUMBER"),
            ("nothing", "unknown op"),
        ] {
            let error = text.parse::<FusedOp>().unwrap_err().to_string();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }
}
