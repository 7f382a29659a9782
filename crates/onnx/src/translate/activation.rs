//! Activations, written with a few functions of one value.

use deuteron_graph::{Activation, BinaryOp, CompareOp, Composite, UnaryOp};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::ir::{Id, Kind};

/// What `Selu` is defined with.
const SELU: (f64, f64) = (1.673_263_242_354_377_2, 1.050_700_987_355_480_5);

impl<'a> Translator<'a, '_> {
    pub(super) fn activation(&mut self, call: &Call<'a, '_>) -> Results {
        let x = call.input(0)?;
        let result = match call.node.op {
            "Relu" => return self.composite(call, Composite::Activation(Activation::Relu)),
            "Gelu" => {
                let tanh = call.word("approximate", &["none", "tanh"])? == "tanh";
                let form = if tanh { Activation::GeluTanh } else { Activation::GeluErf };
                return self.composite(call, Composite::Activation(form));
            }
            "Swish" => self.swish(call, x)?,
            "LeakyRelu" => {
                let slope = self.ir.number(call.float("alpha", 0.01), x);
                self.leaky(x, slope)?
            }
            "PRelu" => {
                let slope = call.input(1)?;
                self.leaky(x, slope)?
            }
            "Elu" => self.elu(x, call.float("alpha", 1.0), 1.0)?,
            "Celu" => {
                let alpha = call.float("alpha", 1.0);
                self.elu(x, alpha, alpha)?
            }
            "Selu" => {
                let y = self.elu(x, call.float("alpha", SELU.0), 1.0)?;
                self.ir.scale(y, call.float("gamma", SELU.1))?
            }
            "HardSigmoid" => self.hard_sigmoid(x, call.float("alpha", 0.2), call.float("beta", 0.5))?,
            "HardSwish" => {
                let gate = self.hard_sigmoid(x, 1.0 / 6.0, 0.5)?;
                self.ir.binary(BinaryOp::Mul, x, gate)?
            }
            "Softplus" => self.softplus(x)?,
            "Softsign" => {
                let size = self.ir.unary(UnaryOp::Abs, x)?;
                let below = self.ir.offset(size, 1.0)?;
                self.ir.binary(BinaryOp::Div, x, below)?
            }
            "Mish" => {
                let soft = self.softplus(x)?;
                let gate = self.ir.unary(UnaryOp::Tanh, soft)?;
                self.ir.binary(BinaryOp::Mul, x, gate)?
            }
            "ThresholdedRelu" => {
                let is_above = self.ir.compare_number(CompareOp::Gt, x, call.float("alpha", 1.0))?;
                let zero = self.ir.number(0.0, x);
                self.ir.select(is_above, x, zero)?
            }
            _ => self.shrink(call, x)?,
        };
        Ok(vec![result])
    }

    fn swish(&mut self, call: &Call, x: Id) -> Result<Id, Problem> {
        let alpha = call.float("alpha", 1.0);
        if alpha == 1.0 {
            return Ok(self.ir.push(Kind::Composite(Composite::Activation(Activation::Silu)), &[x])?);
        }
        let steep = self.ir.scale(x, alpha)?;
        let gate = self.ir.unary(UnaryOp::Sigmoid, steep)?;
        Ok(self.ir.binary(BinaryOp::Mul, x, gate)?)
    }

    /// `x` where it is positive, `slope x` elsewhere.
    pub(super) fn leaky(&mut self, x: Id, slope: Id) -> Result<Id, Problem> {
        let scaled = self.ir.binary(BinaryOp::Mul, x, slope)?;
        if self.ir.scalar(slope).is_some_and(|slope| (0.0..=1.0).contains(&slope)) {
            return Ok(self.ir.binary(BinaryOp::Max, x, scaled)?);
        }
        let is_negative = self.ir.compare_number(CompareOp::Lt, x, 0.0)?;
        Ok(self.ir.select(is_negative, scaled, x)?)
    }

    /// `x` where it is positive, `alpha (exp(x / width) - 1)` elsewhere.
    fn elu(&mut self, x: Id, alpha: f64, width: f64) -> Result<Id, Problem> {
        let zero = self.ir.number(0.0, x);
        // The exponential of what is not selected must not overflow.
        let negative = self.ir.binary(BinaryOp::Min, x, zero)?;
        let argument = self.ir.scale(negative, 1.0 / width)?;
        let exponential = self.ir.unary(UnaryOp::Exp, argument)?;
        let shifted = self.ir.offset(exponential, -1.0)?;
        let curve = self.ir.scale(shifted, alpha)?;
        let is_positive = self.ir.compare_number(CompareOp::Gt, x, 0.0)?;
        Ok(self.ir.select(is_positive, x, curve)?)
    }

    pub(super) fn hard_sigmoid(&mut self, x: Id, slope: f64, centre: f64) -> Result<Id, Problem> {
        let line = self.ir.scale(x, slope)?;
        let line = self.ir.offset(line, centre)?;
        let (zero, one) = (self.ir.number(0.0, x), self.ir.number(1.0, x));
        let least = self.ir.binary(BinaryOp::Max, line, zero)?;
        Ok(self.ir.binary(BinaryOp::Min, least, one)?)
    }

    /// `max(x, 0) + log(1 + exp(-|x|))`, which does not overflow.
    fn softplus(&mut self, x: Id) -> Result<Id, Problem> {
        let size = self.ir.unary(UnaryOp::Abs, x)?;
        let negative = self.ir.unary(UnaryOp::Neg, size)?;
        let exponential = self.ir.unary(UnaryOp::Exp, negative)?;
        let sum = self.ir.offset(exponential, 1.0)?;
        let log = self.ir.unary(UnaryOp::Log, sum)?;
        let zero = self.ir.number(0.0, x);
        let positive = self.ir.binary(BinaryOp::Max, x, zero)?;
        Ok(self.ir.binary(BinaryOp::Add, positive, log)?)
    }

    fn shrink(&mut self, call: &Call, x: Id) -> Result<Id, Problem> {
        let (limit, bias) = (call.float("lambd", 0.5), call.float("bias", 0.0));
        let (below, above) = (self.ir.offset(x, bias)?, self.ir.offset(x, -bias)?);
        let zero = self.ir.number(0.0, x);
        let is_above = self.ir.compare_number(CompareOp::Gt, x, limit)?;
        let is_below = self.ir.compare_number(CompareOp::Lt, x, -limit)?;
        let rest = self.ir.select(is_below, below, zero)?;
        Ok(self.ir.select(is_above, above, rest)?)
    }
}
