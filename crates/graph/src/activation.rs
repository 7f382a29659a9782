//! Activations and their names.

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
}

impl From<Gelu> for Activation {
    fn from(kind: Gelu) -> Activation {
        match kind {
            Gelu::Tanh => Activation::GeluTanh,
            Gelu::Erf => Activation::GeluErf,
        }
    }
}
