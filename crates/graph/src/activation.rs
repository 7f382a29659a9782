//! Activations and their names.

use crate::named;

named! {
    /// A function of one value between two layers.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Activation {
        /// GELU, tanh form: `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, GPT-2's
        GeluTanh = "gelu",
        /// GELU, erf form: `x/2 (1 + erf(x / sqrt 2))`
        GeluErf = "gelu_erf",
        /// `x sigmoid(x)`
        Silu = "silu",
        /// `max(x, 0)`
        Relu = "relu",
    }
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
    /// The form, if it is GELU.
    pub fn gelu(self) -> Option<Gelu> {
        match self {
            Activation::GeluTanh => Some(Gelu::Tanh),
            Activation::GeluErf => Some(Gelu::Erf),
            Activation::Silu | Activation::Relu => None,
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
