//! Attributes of ops, and ops with their attributes as text: `norm_act norm=rms act=silu eps=1e-6`.

use std::fmt;
use std::str::FromStr;

use deuteron_graph::{Activation, Gelu, Mask};

use super::{Attributes, FusedOp, Norm, Reduction};
use crate::error::Error;

/// An attribute that an op can have.
pub(crate) struct Attribute {
    /// the word before `=`
    pub(super) key: &'static str,
    /// its name where an op is shown
    field: &'static str,
    /// parses the word after `=`, or returns what was expected
    read: Read,
    show: Show,
    /// whether it is shown if it is as usual
    always: bool,
}

type Read = fn(&str, &mut Attributes) -> Result<(), String>;
type Show = fn(&Attributes) -> &dyn fmt::Debug;

const fn attribute(key: &'static str, read: Read, show: Show) -> Attribute {
    Attribute { key, field: key, read, show, always: true }
}

/// One that is shown only where it is set.
const fn unusual(key: &'static str, read: Read, show: Show) -> Attribute {
    Attribute { always: false, ..attribute(key, read, show) }
}

pub(super) const ACT: Attribute = attribute(
    "act",
    |value, a| set(&mut a.act, activation(value).map(Some)),
    |a| a.act.as_ref().map_or(&a.act as &dyn fmt::Debug, |act| act),
);
pub(super) const OPTIONAL_ACT: Attribute = attribute(
    "act",
    |value, a| match value {
        "none" => set(&mut a.act, Ok::<_, String>(None)),
        _ => set(&mut a.act, activation(value).map(Some).map_err(|expected| format!("{expected}, or act=none"))),
    },
    |a| &a.act,
);
pub(super) const GELU: Attribute = Attribute {
    key: "act",
    field: "kind",
    read: |value, a| {
        let kinds = [Gelu::Tanh, Gelu::Erf].map(|kind| (Activation::from(kind).name(), kind));
        set(&mut a.gelu, choice("act", value, &kinds))
    },
    show: |a| &a.gelu,
    always: true,
};
pub(super) const NORM: Attribute = attribute(
    "norm",
    |value, a| set(&mut a.norm, choice("norm", value, &[("layer", Norm::Layer), ("rms", Norm::Rms)])),
    |a| &a.norm,
);
pub(super) const EPSILON: Attribute = attribute(
    "eps",
    |value, a| set(&mut a.eps, number(value, |eps| eps >= 0.0).ok_or("eps=NUMBER, at least 0")),
    |a| &a.eps,
);
pub(super) const DROPOUT: Attribute = attribute(
    "p",
    |value, a| set(&mut a.p, number(value, |p| (0.0..1.0).contains(&p)).ok_or("p=NUMBER, at least 0 and below 1")),
    |a| &a.p,
);
pub(super) const MASK: Attribute = attribute(
    "mask",
    |value, a| {
        let masks = [Mask::Full, Mask::Causal, Mask::Additive].map(|mask| (mask.name(), mask));
        set(&mut a.mask, choice("mask", value, &masks))
    },
    |a| &a.mask,
);
pub(super) const SCALE: Attribute = attribute(
    "scale",
    |value, a| set(&mut a.scale, number(value, |_| true).map(Some).ok_or("scale=NUMBER")),
    |a| a.scale.as_ref().map_or(&a.scale as &dyn fmt::Debug, |scale| scale),
);
pub(super) const OPTIONAL_SCALE: Attribute = attribute(
    "scale",
    |value, a| match value {
        "none" => set(&mut a.scale, Ok::<_, String>(None)),
        _ => (SCALE.read)(value, a).map_err(|expected| format!("{expected}, or none")),
    },
    |a| &a.scale,
);
pub(super) const GROUP: Attribute = attribute(
    "group",
    |value, a| set(&mut a.group, value.parse().ok().filter(|&group| group > 0).ok_or("group=NUMBER, at least 1")),
    |a| &a.group,
);
pub(super) const SOFT_CAP: Attribute = unusual(
    "soft_cap",
    |value, a| {
        let read = if value == "none" { Some(None) } else { number(value, |cap| cap > 0.0).map(Some) };
        set(&mut a.scores.soft_cap, read.ok_or("soft_cap=NUMBER above 0, or none"))
    },
    |a| &a.scores.soft_cap,
);
pub(super) const WINDOW: Attribute = unusual(
    "window",
    |value, a| {
        let keys = value.parse().ok().filter(|&keys: &usize| keys > 0).map(Some);
        let read = if value == "none" { Some(None) } else { keys };
        set(&mut a.scores.window, read.ok_or("window=NUMBER, at least 1, or none"))
    },
    |a| &a.scores.window,
);
pub(super) const SLOPES: Attribute =
    unusual("slopes", |value, a| set(&mut a.scores.slopes, flag("slopes", value)), |a| &a.scores.slopes);
pub(super) const SCORE_BIAS: Attribute =
    unusual("bias", |value, a| set(&mut a.scores.bias, flag("bias", value)), |a| &a.scores.bias);
pub(super) const DOCUMENTS: Attribute =
    unusual("documents", |value, a| set(&mut a.scores.documents, flag("documents", value)), |a| &a.scores.documents);
pub(super) const PACKED: Attribute =
    attribute("packed", |value, a| set(&mut a.packed, flag("packed", value)), |a| &a.packed);
pub(super) const RESIDUAL: Attribute =
    attribute("residual", |value, a| set(&mut a.residual, flag("residual", value)), |a| &a.residual);
pub(super) const SINGLE: Attribute =
    attribute("single", |value, a| set(&mut a.single, flag("single", value)), |a| &a.single);
pub(super) const REQUANTIZE: Attribute =
    attribute("requantize", |value, a| set(&mut a.requantize, flag("requantize", value)), |a| &a.requantize);
pub(super) const WEIGHTED: Attribute =
    attribute("weighted", |value, a| set(&mut a.weighted, flag("weighted", value)), |a| &a.weighted);
pub(super) const REDUCTION: Attribute = attribute(
    "reduction",
    |value, a| {
        let choices = [("none", Reduction::None), ("mean", Reduction::Mean), ("sum", Reduction::Sum)];
        set(&mut a.reduction, choice("reduction", value, &choices))
    },
    |a| &a.reduction,
);
pub(super) const SMOOTHING: Attribute = attribute(
    "label_smoothing",
    |value, a| {
        let fits = |smoothing: f64| (0.0..=1.0).contains(&smoothing);
        set(&mut a.smoothing, number(value, fits).ok_or("label_smoothing=NUMBER, from 0 to 1"))
    },
    |a| &a.smoothing,
);
pub(super) const IGNORED: Attribute = attribute(
    "ignore_index",
    |value, a| {
        let read = if value == "none" { Some(None) } else { value.parse().ok().map(Some) };
        set(&mut a.ignored, read.ok_or("ignore_index=NUMBER of 32 bits, or none"))
    },
    |a| &a.ignored,
);

impl Attribute {
    /// Whether it is any activation, and not a form of one.
    pub fn is_activation(&self) -> bool {
        self.field == ACT.field
    }
}

impl FromStr for FusedOp {
    type Err = Error;

    /// An op of the catalogue with its usual attributes, and those that are named.
    fn from_str(text: &str) -> Result<FusedOp, Error> {
        let mut words = text.split_whitespace();
        let mut op = FusedOp::find(words.next().unwrap_or_default())?;
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let attribute = op.entry.attributes.iter().find(|attribute| attribute.key == key);
            let read = match attribute {
                Some(attribute) => (attribute.read)(value, &mut op.attributes),
                None => Err(format!("one of its attributes, and it has no `{key}`")),
            };
            read.map_err(|expected| Error::Operands { op: op.name(), expected, got: format!("`{word}`") })?;
        }
        Ok(op)
    }
}

impl fmt::Debug for FusedOp {
    /// Its name in capitals and its own attributes: `NormAct { norm: Rms, eps: 1e-6, act: Silu }`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let capital = |word: &str| word[..1].to_uppercase() + &word[1..];
        let name: String = self.name().split('_').map(capital).collect();
        let mut shown = f.debug_struct(&name);
        for attribute in self.entry.attributes {
            let [value, usual] = [&self.attributes, &self.entry.usual].map(|of| (attribute.show)(of));
            if attribute.always || format!("{value:?}") != format!("{usual:?}") {
                shown.field(attribute.field, value);
            }
        }
        shown.finish()
    }
}

fn set<T, E: Into<String>>(place: &mut T, read: Result<T, E>) -> Result<(), String> {
    *place = read.map_err(E::into)?;
    Ok(())
}

fn activation(value: &str) -> Result<Activation, String> {
    choice("act", value, &Activation::ALL.map(|act| (act.name(), act)))
}

/// One of some words.
fn choice<T: Copy>(key: &str, value: &str, choices: &[(&str, T)]) -> Result<T, String> {
    if let Some((_, found)) = choices.iter().find(|(word, _)| *word == value) {
        return Ok(*found);
    }
    let words: Vec<String> = choices.iter().map(|(word, _)| format!("{key}={word}")).collect();
    let (last, others) = words.split_last().map_or(("", &[][..]), |(last, others)| (last.as_str(), others));
    Err(format!("{} or {last}", others.join(", ")))
}

fn flag(key: &str, value: &str) -> Result<bool, String> {
    value.parse().map_err(|_| format!("{key}=true or {key}=false"))
}

fn number(value: &str, fits: impl Fn(f64) -> bool) -> Option<f64> {
    value.parse::<f64>().ok().filter(|&number| number.is_finite() && fits(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{ATTENTION, FFN, GEGLU, MOE_INT8, NORM_ACT, QKV, SOFTMAX};

    /// `act = gelu, silu` in a formula are words that a command takes.
    #[test]
    fn choices_that_a_formula_names_are_words_of_the_attribute() {
        let mut tried = 0;
        for op in FusedOp::catalog() {
            for part in op.formula().split("; ") {
                let Some((key, words)) = part.split_once(" = ") else { continue };
                if !op.attribute_names().contains(&key) {
                    continue;
                }
                for word in words.split(", ") {
                    assert!(format!("{} {key}={word}", op.name()).parse::<FusedOp>().is_ok(), "{op:?}: {key}={word}");
                    tried += 1;
                }
            }
        }
        assert_eq!(tried, 6);
    }

    #[test]
    fn attributes_are_set_by_their_words() {
        let op: FusedOp = "norm_act norm=rms act=silu eps=1e-6".parse().unwrap();
        assert_eq!(op, NORM_ACT.with(|a| (a.norm, a.eps, a.act) = (Norm::Rms, 1e-6, Some(Activation::Silu))));
        let op: FusedOp = "softmax scale=0.5 mask=causal p=0.1".parse().unwrap();
        assert_eq!(op, SOFTMAX.with(|a| (a.scale, a.mask, a.p) = (Some(0.5), Mask::Causal, 0.1)));
        let op: FusedOp = "geglu act=gelu_erf packed=true".parse().unwrap();
        assert_eq!(op, GEGLU.with(|a| (a.gelu, a.packed) = (Gelu::Erf, true)));
        let op: FusedOp = "moe_int8 act=none requantize=false".parse().unwrap();
        assert_eq!(op, MOE_INT8.with(|a| (a.act, a.requantize) = (None, false)));
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
            ("attention window=0", "at least 1, or none"),
            ("attention soft_cap=-2", "above 0, or none"),
            ("softmax scale=nan", "scale=NUMBER, or none"),
            ("geglu act=tanh", "expected act=gelu or act=gelu_erf,"),
            ("moe act=tanh", "act=relu, or act=none"),
            ("nothing", "unknown op"),
        ] {
            let error = text.parse::<FusedOp>().unwrap_err().to_string();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }

    #[test]
    fn an_op_is_shown_with_its_own_attributes() {
        for (op, shown) in [
            (NORM_ACT, "NormAct { norm: Layer, eps: 1e-5, act: GeluTanh }"),
            (SOFTMAX, "Softmax { scale: None, mask: Full, p: 0.0 }"),
            (GEGLU, "Geglu { kind: Tanh, packed: false }"),
            (MOE_INT8, "MoeInt8 { act: Some(GeluTanh), requantize: true }"),
            (FFN, "Ffn { norm: Layer, eps: 1e-5, act: GeluTanh, single: false }"),
            (QKV, "Qkv"),
            (ATTENTION, "Attention { scale: None, mask: Causal, p: 0.0, group: 1 }"),
        ] {
            assert_eq!(format!("{:?}", op.usual()), shown);
        }
        let op: FusedOp = "attention window=5 bias=true".parse().unwrap();
        assert_eq!(
            format!("{op:?}"),
            "Attention { scale: None, mask: Causal, p: 0.0, group: 1, window: Some(5), bias: true }"
        );
    }
}
