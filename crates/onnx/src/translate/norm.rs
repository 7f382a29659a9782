//! Norms and softmax that exporters write as one operator.

use deuteron_graph::{BinaryOp, Composite, Shape, UnaryOp};

use super::call::{Results, axis_of};
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind, Reduction};

impl<'a> Translator<'a, '_> {
    pub(super) fn norm(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "Softmax" => Ok(vec![self.softmax(call, false)?]),
            "LogSoftmax" => Ok(vec![self.softmax(call, true)?]),
            "LayerNormalization" => {
                self.stashed(call)?;
                let composite = Composite::LayerNorm { eps: call.float("epsilon", 1e-5) };
                self.normalise(call, call.input(0)?, composite, call.optional(1), call.optional(2))
            }
            "RMSNormalization" | "SimplifiedLayerNormalization" => {
                self.stashed(call)?;
                let composite = Composite::RmsNorm { eps: call.float("epsilon", 1e-5) };
                self.normalise(call, call.input(0)?, composite, call.optional(1), None)
            }
            "BatchNormalization" => self.batch_norm(call),
            "InstanceNormalization" => {
                let x = call.input(0)?;
                let channels = self.ir.shape(x).get(1).copied().unwrap_or(0);
                Ok(vec![self.group_norm(call, x, channels)?])
            }
            "GroupNormalization" => {
                let groups = usize::try_from(call.int("num_groups", 0)).unwrap_or(0);
                self.stashed(call)?;
                Ok(vec![self.group_norm(call, call.input(0)?, groups)?])
            }
            _ => self.skip_norm(call),
        }
    }

    /// The type that a norm computes in: ours is `f32` or wider.
    fn stashed(&self, call: &Call) -> Result<(), Problem> {
        match call.int("stash_type", 1) {
            1 => Ok(()),
            other => Err(Problem::Opaque(format!("a norm in ONNX element type {other} is not a primitive"))),
        }
    }

    /// `(x - mean) / sqrt(variance + eps) * scale + bias`, all of them per channel and known.
    fn batch_norm(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        call.without_effect(&["momentum", "is_test"]);
        if call.int("training_mode", 0) != 0 && call.opset >= 14 {
            return self.batch_statistics(call, x);
        }
        let is_training = call.int("training_mode", 0) != 0 || (call.opset < 14 && call.wants(1));
        if is_training || call.int("spatial", 1) == 0 {
            return Err(Problem::Opaque(
                "it takes statistics of the batch (training_mode); export for inference".into(),
            ));
        }
        let rank = self.ir.shape(x).rank();
        let eps = call.float("epsilon", 1e-5);
        let mut of_channel = |position: usize| -> Result<Id, Problem> {
            let operand = call.input(position)?;
            Ok(self.ir.along(operand, 1.min(rank.saturating_sub(1)), rank)?)
        };
        let (scale, bias, mean, variance) = (of_channel(1)?, of_channel(2)?, of_channel(3)?, of_channel(4)?);
        let shifted = self.ir.offset(variance, eps)?;
        let inverse = self.ir.unary(UnaryOp::Rsqrt, shifted)?;
        let factor = self.ir.binary(BinaryOp::Mul, scale, inverse)?;
        let centred = self.ir.binary(BinaryOp::Sub, x, mean)?;
        let scaled = self.ir.binary(BinaryOp::Mul, centred, factor)?;
        Ok(vec![self.ir.binary(BinaryOp::Add, scaled, bias)?])
    }

    /// Normed by the mean and variance of the batch, which move the running ones.
    fn batch_statistics(&mut self, call: &Call, x: Id) -> Results {
        let rank = self.ir.shape(x).rank();
        if rank < 2 || self.ir.shape(x).elements() == 0 {
            let got = self.ir.shape(x);
            return Err(Problem::Refused(format!("a batch [n, c, ..] that is not empty expected, got {got}")));
        }
        let channels = self.ir.shape(x)[1];
        let axes: Vec<usize> = (0..rank).filter(|&axis| axis != 1).collect();
        let wide = self.ir.cast(x, Element::F32)?;
        let mean = self.ir.reduce(Reduction::Mean, wide, axes.clone(), true)?;
        let centred = self.ir.binary(BinaryOp::Sub, wide, mean)?;
        let square = self.ir.binary(BinaryOp::Mul, centred, centred)?;
        let variance = self.ir.reduce(Reduction::Mean, square, axes, true)?;
        let shifted = self.ir.offset(variance, call.float("epsilon", 1e-5))?;
        let inverse = self.ir.unary(UnaryOp::Rsqrt, shifted)?;
        let mut y = self.ir.binary(BinaryOp::Mul, centred, inverse)?;
        for (position, op) in [(1, BinaryOp::Mul), (2, BinaryOp::Add)] {
            let operand = self.ir.cast(call.input(position)?, Element::F32)?;
            let operand = self.ir.along(operand, 1, rank)?;
            y = self.ir.binary(op, y, operand)?;
        }
        let mut results = vec![self.ir.cast(y, self.ir.element(x))?];
        let momentum = call.float("momentum", 0.9);
        for (position, batch) in [(3, mean), (4, variance)] {
            let running = call.input(position)?;
            let element = self.ir.element(running);
            let batch = self.ir.reshape(batch, vec![channels])?;
            let batch = self.ir.cast(batch, element)?;
            let (kept, taken) = (self.ir.scale(running, momentum)?, self.ir.scale(batch, 1.0 - momentum)?);
            results.push(self.ir.binary(BinaryOp::Add, kept, taken)?);
        }
        Ok(results)
    }

    /// Each group of channels of `[n, c, ..]` normed by itself, then scaled and shifted per channel. Up to opset 20, scale
    /// and shift of a group norm are per group.
    fn group_norm(&mut self, call: &Call, x: Id, groups: usize) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let channels = shape.get(1).copied().unwrap_or(0);
        if groups == 0 || !channels.is_multiple_of(groups) || channels == 0 {
            return Err(Problem::Refused(format!("groups that divide the channels of {shape} expected, got {groups}")));
        }
        let rows = self.ir.reshape(x, vec![shape[0], groups, shape.elements() / (shape[0] * groups).max(1)])?;
        let mean = self.ir.reduce(Reduction::Mean, rows, vec![2], true)?;
        let centred = self.ir.binary(BinaryOp::Sub, rows, mean)?;
        let square = self.ir.binary(BinaryOp::Mul, centred, centred)?;
        let variance = self.ir.reduce(Reduction::Mean, square, vec![2], true)?;
        let shifted = self.ir.offset(variance, call.float("epsilon", 1e-5))?;
        let inverse = self.ir.unary(UnaryOp::Rsqrt, shifted)?;
        let normed = self.ir.binary(BinaryOp::Mul, centred, inverse)?;
        let mut result = self.ir.reshape(normed, shape.to_vec())?;
        for (position, op) in [(1, BinaryOp::Mul), (2, BinaryOp::Add)] {
            let mut operand = call.input(position)?;
            if self.ir.shape(operand).elements() == groups && groups != channels {
                let column = self.ir.reshape(operand, vec![groups, 1])?;
                let repeated = self.ir.broadcast(column, &Shape::from([groups, channels / groups]))?;
                operand = self.ir.reshape(repeated, vec![channels])?;
            }
            let operand = self.ir.along(operand, 1, shape.rank())?;
            result = self.ir.binary(op, result, operand)?;
        }
        Ok(result)
    }

    /// Up to opset 12 all axes from the axis on are taken as one.
    fn softmax(&mut self, call: &Call, log: bool) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        if call.opset < 13 {
            let axis = axis_of(call.int("axis", 1), shape.rank())?;
            let dims = vec![shape[..axis].iter().product(), shape[axis..].iter().product()];
            let rows = if axis + 1 == shape.rank() { x } else { self.ir.reshape(x, dims)? };
            let result = if log { self.log_softmax(rows)? } else { self.ir.push(Kind::Softmax, &[rows])? };
            return Ok(self.ir.reshape(result, shape.to_vec())?);
        }
        let axis = axis_of(call.int("axis", -1), shape.rank())?;
        if log {
            return self.log_softmax_over(x, axis);
        }
        let ordered = self.ir.exchange(x, axis)?;
        let result = self.ir.push(Kind::Softmax, &[ordered])?;
        Ok(self.ir.exchange(result, axis)?)
    }

    pub(super) fn log_softmax_over(&mut self, x: Id, axis: usize) -> Result<Id, Problem> {
        let ordered = self.ir.exchange(x, axis)?;
        let result = self.log_softmax(ordered)?;
        Ok(self.ir.exchange(result, axis)?)
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

    /// A weight of a norm as one value per column; a missing one is the same value everywhere.
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
            return Err(Problem::Opaque("its results for mean and deviation are used".to_string()));
        }
        let composite = if simplified { Composite::RmsNorm { eps } } else { Composite::LayerNorm { eps } };
        let shift = if simplified { None } else { call.optional(3) };
        let y = self.normalise(call, sum, composite, call.optional(2), shift)?[0];
        Ok(vec![y, y, y, sum])
    }
}
