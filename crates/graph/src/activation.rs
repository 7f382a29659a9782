//! Activations: each defined here, by its name, its word in the text form and its expansion into primitives.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::composite::CompositeKind;
use crate::expand::{Expansion, Value};
use crate::graph::NodeId;
use crate::op::{BinaryOp, UnaryOp};

/// A function of one value between two layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// GELU, tanh form: `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, GPT-2's
    GeluTanh,
    /// GELU, erf form: `x/2 (1 + erf(x / sqrt 2))`
    GeluErf,
    /// `x sigmoid(x)`
    Silu,
    /// `max(x, 0)`
    Relu,
}

/// The two forms of GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gelu {
    /// [`Activation::GeluTanh`]
    Tanh,
    /// [`Activation::GeluErf`]
    Erf,
}

impl Activation {
    /// All of them.
    pub const ALL: [Activation; 4] = [Activation::GeluTanh, Activation::GeluErf, Activation::Silu, Activation::Relu];

    /// The word on the command line and in attributes.
    pub fn name(self) -> &'static str {
        match self {
            Activation::GeluTanh => "gelu",
            Activation::GeluErf => "gelu_erf",
            Activation::Silu => "silu",
            Activation::Relu => "relu",
        }
    }

    /// The activation of a word.
    pub fn find(name: &str) -> Option<Activation> {
        Activation::ALL.into_iter().find(|activation| activation.name() == name)
    }

    /// The form, if it is GELU.
    pub fn gelu(self) -> Option<Gelu> {
        match self {
            Activation::GeluTanh => Some(Gelu::Tanh),
            Activation::GeluErf => Some(Gelu::Erf),
            Activation::Silu | Activation::Relu => None,
        }
    }

    /// What the text form and reports call it.
    pub(crate) fn kind(self) -> CompositeKind {
        match self {
            Activation::GeluTanh | Activation::GeluErf => CompositeKind::Gelu,
            Activation::Silu => CompositeKind::Silu,
            Activation::Relu => CompositeKind::Relu,
        }
    }
}

impl From<Gelu> for Activation {
    fn from(kind: Gelu) -> Activation {
        match kind {
            Gelu::Tanh => Activation::GeluTanh,
            Gelu::Erf => Activation::GeluErf,
        }
    }
}

impl Expansion<'_> {
    pub fn activation(&mut self, activation: Activation, x: NodeId) -> Value {
        match activation {
            // x/2 (1 + tanh u) is x sigmoid(2u): one exponential, and no cancellation where x is far below 0.
            Activation::GeluTanh => {
                let square = self.mul(x, x)?;
                let cubic = self.constant(0.044715)?;
                let one = self.constant(1.0)?;
                let scaled = self.mul(square, cubic)?;
                let factor = self.add(scaled, one)?;
                let slope = self.constant(2.0 * (2.0 / PI).sqrt())?;
                let steep = self.mul(x, slope)?;
                let argument = self.mul(steep, factor)?;
                let gate = self.unary(UnaryOp::Sigmoid, argument)?;
                self.mul(x, gate)
            }
            Activation::GeluErf => {
                let inverse_root = self.constant(FRAC_1_SQRT_2)?;
                let scaled = self.mul(x, inverse_root)?;
                let erf = self.unary(UnaryOp::Erf, scaled)?;
                let one = self.constant(1.0)?;
                let half = self.constant(0.5)?;
                let sum = self.add(erf, one)?;
                let halved = self.mul(x, half)?;
                self.mul(halved, sum)
            }
            Activation::Silu => {
                let gate = self.unary(UnaryOp::Sigmoid, x)?;
                self.mul(x, gate)
            }
            Activation::Relu => {
                let zero = self.constant(0.0)?;
                self.binary(BinaryOp::Max, x, zero)
            }
        }
    }
}
