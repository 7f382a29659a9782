//! Norms and softmax that exporters write as one operator.

use deuteron_graph::{BinaryOp, Composite, Shape, UnaryOp};

use super::call::{Results, axis_of};
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::ir::{Id, Kind, Reduction};

impl<'a> Translator<'a, '_> {
    pub(super) fn norm(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "Softmax" => Ok(vec![self.softmax(call, false)?]),
            "LogSoftmax" => Ok(vec![self.softmax(call, true)?]),
            "LayerNormalization" => {
                let composite = Composite::LayerNorm { eps: call.float("epsilon", 1e-5) };
                self.normalise(call, call.input(0)?, composite, call.optional(1), call.optional(2))
            }
            "RMSNormalization" | "SimplifiedLayerNormalization" => {
                let composite = Composite::RmsNorm { eps: call.float("epsilon", 1e-5) };
                self.normalise(call, call.input(0)?, composite, call.optional(1), None)
            }
            _ => self.skip_norm(call),
        }
    }

    fn softmax(&mut self, call: &Call, log: bool) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let rank = self.ir.shape(x).rank();
        let axis = axis_of(call.int("axis", -1), rank)?;
        let mut swap: Vec<usize> = (0..rank).collect();
        swap.swap(axis, rank - 1);
        let ordered = self.ir.push(Kind::Transpose(swap.clone()), &[x])?;
        let result = if log { self.log_softmax(ordered)? } else { self.ir.push(Kind::Softmax, &[ordered])? };
        Ok(self.ir.push(Kind::Transpose(swap), &[result])?)
    }

    fn log_softmax(&mut self, x: Id) -> Result<Id, Problem> {
        let axes = vec![self.ir.shape(x).rank() - 1];
        let max = self.ir.push(Kind::Reduce { op: Reduction::Max, axes: axes.clone(), keep: true }, &[x])?;
        let shifted = self.ir.binary(BinaryOp::Sub, x, max)?;
        let exponentials = self.ir.push(Kind::Unary(UnaryOp::Exp), &[shifted])?;
        let sum = self.ir.push(Kind::Reduce { op: Reduction::Sum, axes, keep: true }, &[exponentials])?;
        let log = self.ir.push(Kind::Unary(UnaryOp::Log), &[sum])?;
        Ok(self.ir.binary(BinaryOp::Sub, shifted, log)?)
    }

    /// A norm over the axes from `axis` on, which are taken as one.
    fn normalise(&mut self, call: &Call, x: Id, composite: Composite, w: Option<Id>, b: Option<Id>) -> Results {
        let shape = self.ir.shape(x).clone();
        let axis = axis_of(call.int("axis", -1), shape.rank())?;
        let cols: usize = shape[axis..].iter().product();
        let dims: Vec<usize> = shape[..axis].iter().copied().chain([cols]).collect();
        let flat = self.ir.reshape(x, dims)?;
        let w = self.per_column(w, cols, x, 1.0)?;
        let mut operands = vec![flat, w];
        if let Composite::LayerNorm { .. } = composite {
            operands.push(self.per_column(b, cols, x, 0.0)?);
        }
        let y = self.ir.push(Kind::Composite(composite), &operands)?;
        let mut results = vec![self.ir.reshape(y, shape.to_vec())?];
        let statistics: Vec<usize> = (0..shape.rank()).map(|i| if i < axis { shape[i] } else { 1 }).collect();
        let count = if let Composite::LayerNorm { .. } = composite { 2 } else { 1 };
        for index in 1..=count {
            if call.wants(index) {
                let part = self.ir.push(Kind::Part(index), &[y])?;
                results.push(self.ir.reshape(part, statistics.clone())?);
            }
        }
        Ok(results)
    }

    /// A weight of a norm as one value a column; a missing one is the same value everywhere.
    pub(super) fn per_column(&mut self, weight: Option<Id>, cols: usize, like: Id, value: f64) -> Result<Id, Problem> {
        let shape = Shape::from([cols]);
        match weight {
            None => Ok(self.ir.known(Constant::filled(shape, value), self.ir.element(like))),
            Some(weight) if self.ir.shape(weight).elements() == cols => Ok(self.ir.reshape(weight, vec![cols])?),
            Some(weight) => Ok(self.ir.broadcast(weight, &shape)?),
        }
    }

    /// Residual, bias and norm in one operator. Results: y, mean, rstd, sum.
    fn skip_norm(&mut self, call: &Call) -> Results {
        let simplified = call.node.op == "SkipSimplifiedLayerNormalization";
        let mut sum = self.ir.binary(BinaryOp::Add, call.input(0)?, call.input(1)?)?;
        let (bias, eps) = (call.optional(if simplified { 3 } else { 4 }), call.float("epsilon", 1e-12));
        if let Some(bias) = bias {
            sum = self.ir.binary(BinaryOp::Add, sum, bias)?;
        }
        if call.wants(1) || call.wants(2) {
            return Err(Problem::Opaque("its statistics are asked for".to_string()));
        }
        let composite = if simplified { Composite::RmsNorm { eps } } else { Composite::LayerNorm { eps } };
        let shift = if simplified { None } else { call.optional(3) };
        let y = self.normalise(call, sum, composite, call.optional(2), shift)?[0];
        Ok(vec![y, y, y, sum])
    }
}
