//! Operators of ONNX Runtime that its optimiser makes of several.

use deuteron_graph::{Activation, BinaryOp, Composite, UnaryOp};

use super::attention::Heads;
use super::call::Results;
use super::{Call, Problem, Translator};
use crate::element::as_written;
use crate::ir::{Id, Kind};

impl<'a> Translator<'a, '_> {
    pub(super) fn fused(&mut self, call: &Call<'a, '_>) -> Results {
        match (call.node.op, call.node.domain) {
            ("BiasGelu", _) => {
                let sum = self.ir.binary(BinaryOp::Add, call.input(0)?, call.input(1)?)?;
                Ok(vec![self.ir.push(Kind::Composite(Composite::Activation(Activation::GeluErf)), &[sum])?])
            }
            ("FastGelu", _) => {
                let mut x = call.input(0)?;
                if let Some(bias) = call.optional(1) {
                    x = self.ir.binary(BinaryOp::Add, x, bias)?;
                }
                Ok(vec![self.ir.push(Kind::Composite(Composite::Activation(Activation::GeluTanh)), &[x])?])
            }
            ("QuickGelu", _) => {
                let x = call.input(0)?;
                let steep = self.ir.scale(x, call.float("alpha", 1.702))?;
                let gate = self.ir.push(Kind::Unary(UnaryOp::Sigmoid), &[steep])?;
                Ok(vec![self.ir.binary(BinaryOp::Mul, x, gate)?])
            }
            ("MultiHeadAttention", _) => self.multi_head(call),
            _ => Err(Problem::Opaque("its packed operands have no counterpart".to_string())),
        }
    }

    /// `FusedConv`: a convolution, a sum with a fourth operand, and an activation.
    pub(super) fn fused_convolution(&mut self, call: &Call<'a, '_>) -> Results {
        let results = self.convolution(call, call.input(0)?, call.input(1)?, call.optional(2))?;
        let [mut y] = results[..] else { return Ok(results) };
        if let Some(other) = call.optional(3) {
            y = self.ir.binary(BinaryOp::Add, y, other)?;
        }
        let parameters = call.attribute("activation_params").map(|given| given.floats.clone()).unwrap_or_default();
        Ok(vec![self.fused_activation(call, y, &parameters)?])
    }

    /// The activation that a fused operator names, with its parameters in order.
    pub(super) fn fused_activation(&mut self, call: &Call, x: Id, parameters: &[f32]) -> Result<Id, Problem> {
        let parameter = |position: usize, otherwise: f64| {
            parameters.get(position).map_or(otherwise, |&value| as_written(value.into()))
        };
        Ok(match call.text("activation").unwrap_or_default() {
            "" => x,
            "Relu" => self.ir.push(Kind::Composite(Composite::Activation(Activation::Relu)), &[x])?,
            "Tanh" => self.ir.unary(UnaryOp::Tanh, x)?,
            "Sigmoid" => self.ir.unary(UnaryOp::Sigmoid, x)?,
            "LeakyRelu" => {
                let slope = self.ir.number(parameter(0, 0.01), x);
                self.leaky(x, slope)?
            }
            "Clip" => {
                let least = self.ir.number(parameter(0, f64::NEG_INFINITY), x);
                let most = self.ir.number(parameter(1, f64::INFINITY), x);
                let raised = self.ir.binary(BinaryOp::Max, x, least)?;
                self.ir.binary(BinaryOp::Min, raised, most)?
            }
            "HardSigmoid" => self.hard_sigmoid(x, parameter(0, 0.2), parameter(1, 0.5))?,
            "HardSwish" => {
                let gate = self.hard_sigmoid(x, parameter(0, 1.0 / 6.0), parameter(1, 0.5))?;
                self.ir.binary(BinaryOp::Mul, x, gate)?
            }
            other => return Err(Problem::Opaque(format!("its activation `{other}` has no counterpart"))),
        })
    }

    /// `MultiHeadAttention` of ONNX Runtime, where q, k and v are apart and nothing is cached.
    fn multi_head(&mut self, call: &Call) -> Results {
        let (Some(mut k), Some(mut v)) = (call.optional(1), call.optional(2)) else {
            return Err(Problem::Opaque("its operands are packed".to_string()));
        };
        let mut q = call.input(0)?;
        let plain = [q, k, v].iter().all(|&id| self.ir.shape(id).rank() == 3)
            && call.optional(4).is_none()
            && (6..call.operands()).all(|index| call.optional(index).is_none())
            && !(1..call.node.outputs.len()).any(|index| call.wants(index));
        if !plain {
            return Err(Problem::Opaque("a cache, a padding mask or packed operands are given".to_string()));
        }
        if let Some(bias) = call.optional(3) {
            let mut start = 0;
            for part in [&mut q, &mut k, &mut v] {
                let length = self.ir.shape(*part)[2];
                let piece = self.ir.push(Kind::Slice { axis: 0, start, length }, &[bias])?;
                *part = self.ir.binary(BinaryOp::Add, *part, piece)?;
                start += length;
            }
        }
        let heads = call.int("num_heads", 0);
        let (q, k, v) = (self.split_heads(q, heads)?, self.split_heads(k, heads)?, self.split_heads(v, heads)?);
        let scale = Some(call.float("scale", 0.0)).filter(|&scale| scale != 0.0);
        let is_causal = call.int("unidirectional", 0) != 0;
        call.without_effect(&["mask_filter_value"]);
        let y = self.heads(Heads { q, k, v, mask: call.optional(5), is_causal, scale })?;
        Ok(vec![self.join_heads(y)?])
    }
}
