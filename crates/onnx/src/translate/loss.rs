//! Losses of a classifier.

use deuteron_graph::{BinaryOp, CompareOp, UnaryOp};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::element::Element;
use crate::ir::{Id, Kind, Logic, Reduction};

impl<'a> Translator<'a, '_> {
    pub(super) fn loss(&mut self, call: &Call<'a, '_>) -> Results {
        let (scores, target) = (call.input(0)?, call.input(1)?);
        if self.ir.shape(scores).rank() < 2 {
            let got = self.ir.shape(scores);
            return Err(Problem::Refused(format!("scores [n, classes, ..] expected, got {got}")));
        }
        let is_softmax = call.node.op == "SoftmaxCrossEntropyLoss";
        let logs = if is_softmax { self.log_softmax_over(scores, 1)? } else { scores };
        let mut results = vec![self.likelihood_loss(call, logs, target)?];
        if is_softmax && call.wants(1) {
            results.push(logs);
        }
        Ok(results)
    }

    /// The negative of the target's entry, weighted, and then all of them, their sum or their mean.
    fn likelihood_loss(&mut self, call: &Call, logs: Id, target: Id) -> Result<Id, Problem> {
        let picked = self.entries(logs, target, 1)?;
        let losses = self.ir.unary(UnaryOp::Neg, picked)?;
        let dims = self.ir.shape(target).to_vec();
        let mut losses = self.ir.reshape(losses, dims.clone())?;
        let mut weights = None;
        if let Some(of_class) = call.optional(2) {
            let rank = self.ir.shape(logs).rank();
            let shaped = self.ir.along(of_class, 1, rank)?;
            let everywhere = self.ir.broadcast(shaped, &self.ir.shape(logs).clone())?;
            let each = self.entries(everywhere, target, 1)?;
            weights = Some(self.ir.reshape(each, dims)?);
        }
        if let Some(ignored) = call.attribute("ignore_index").and_then(|attribute| attribute.int) {
            let is_ignored = self.ir.compare_number(CompareOp::Eq, target, ignored as f64)?;
            let is_counted = self.ir.push(Kind::Logic(Logic::Not), &[is_ignored])?;
            let counted = self.ir.cast(is_counted, self.ir.element(logs))?;
            let zero = self.ir.number(0.0, logs);
            losses = self.ir.select(is_ignored, zero, losses)?;
            weights = Some(match weights {
                Some(weights) => self.ir.select(is_ignored, zero, weights)?,
                None => counted,
            });
        }
        if let Some(weights) = weights {
            losses = self.ir.binary(BinaryOp::Mul, losses, weights)?;
        }
        let all: Vec<usize> = (0..self.ir.shape(losses).rank()).collect();
        match (call.word("reduction", &["mean", "sum", "none"])?, weights) {
            ("none", _) => Ok(losses),
            ("sum", _) => Ok(self.ir.reduce(Reduction::Sum, losses, all, false)?),
            (_, None) => Ok(self.ir.reduce(Reduction::Mean, losses, all, false)?),
            (_, Some(weights)) => {
                let sum = self.ir.reduce(Reduction::Sum, losses, all.clone(), false)?;
                let total = self.ir.reduce(Reduction::Sum, weights, all, false)?;
                Ok(self.ir.binary(BinaryOp::Div, sum, total)?)
            }
        }
    }

    /// Of each line along an axis the entry whose place an index says, counted from the end if negative: the sum of all
    /// entries of which the others count 0. The axis stays with size 1. An index beyond the axis gives 0.
    pub(super) fn entries(&mut self, x: Id, index: Id, axis: usize) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let mut dims = shape.to_vec();
        dims[axis] = 1;
        let index = self.ir.reshape(index, dims)?;
        let chosen = self.is_index(index, axis, shape[axis])?;
        let zero = self.ir.number(0.0, x);
        let only = self.ir.select(chosen, x, zero)?;
        Ok(self.ir.reduce(Reduction::Sum, only, vec![axis], true)?)
    }

    /// Whether each place along an axis is the one that an index names, from the begin or, negative, from the end.
    pub(super) fn is_index(&mut self, index: Id, axis: usize, size: usize) -> Result<Id, Problem> {
        let rank = self.ir.shape(index).rank();
        let count = self.counting(size, Element::I64)?;
        let count = self.ir.along(count, axis, rank)?;
        let chosen = self.ir.compare(CompareOp::Eq, count, index)?;
        let back = (0..size).map(|place| place as f64 - size as f64).collect();
        let back = crate::constant::Constant::dense([size].into(), back, false);
        let back = self.ir.known(back, Element::I64);
        let back = self.ir.along(back, axis, rank)?;
        let from_end = self.ir.compare(CompareOp::Eq, back, index)?;
        Ok(self.ir.push(Kind::Logic(Logic::Or), &[chosen, from_end])?)
    }
}
