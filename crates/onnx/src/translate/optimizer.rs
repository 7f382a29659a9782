//! One step of an optimiser, as the training domain of ONNX has it. Several tensors follow each other in groups: all weights,
//! then all gradients, then all states.

use deuteron_graph::{BinaryOp, CompareOp, UnaryOp};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::element::Element;
use crate::ir::{Function, Id, Kind};

/// A tensor that is updated, its gradient and its states.
struct Update {
    x: Id,
    gradient: Id,
    states: Vec<Id>,
}

impl<'a> Translator<'a, '_> {
    /// Operands: the rate, the number of earlier steps, and the tensors. Results: the tensors, then each of their states.
    pub(super) fn optimizer(&mut self, call: &Call<'a, '_>) -> Results {
        let states = if call.node.op == "Adam" { 2 } else { 1 };
        let (rate, steps) = (call.input(0)?, call.input(1)?);
        let tensors: Vec<Id> = call.all().into_iter().skip(2).collect();
        let count = tensors.len() / (2 + states);
        if count == 0 || tensors.len() != count * (2 + states) || call.operands() != tensors.len() + 2 {
            let got = tensors.len();
            return Err(Problem::Refused(format!("tensors in groups of {} expected, got {got}", 2 + states)));
        }
        let mut results = vec![Vec::with_capacity(count); 1 + states];
        for index in 0..count {
            let [x, gradient] = [0, 1].map(|group| tensors[group * count + index]);
            let states = (0..states).map(|state| tensors[(2 + state) * count + index]).collect();
            let gradient = self.decayed(call, x, gradient)?;
            let update = Update { x, gradient, states };
            let made = match call.node.op {
                "Adam" => self.adam(call, [rate, steps], &update)?,
                "Adagrad" => self.adagrad(call, [rate, steps], &update)?,
                _ => self.momentum(call, [rate, steps], &update)?,
            };
            results.iter_mut().zip(made).for_each(|(group, result)| group.push(result));
        }
        Ok(results.concat())
    }

    /// The gradient, with that of the tensor's size.
    fn decayed(&mut self, call: &Call, x: Id, gradient: Id) -> Result<Id, Problem> {
        let decay = self.ir.scale(x, call.float("norm_coefficient", 0.0))?;
        Ok(self.ir.binary(BinaryOp::Add, decay, gradient)?)
    }

    /// `state * kept + term * taken`
    fn averaged(&mut self, state: Id, kept: f64, term: Id, taken: f64) -> Result<Id, Problem> {
        let state = self.ir.scale(state, kept)?;
        let term = self.ir.scale(term, taken)?;
        Ok(self.ir.binary(BinaryOp::Add, state, term)?)
    }

    /// The rest that is left of a factor's power to the number of steps, from 1.
    fn bias_of(&mut self, factor: f64, steps: Id) -> Result<Id, Problem> {
        let base = self.ir.known_scalar(factor, Element::F32);
        let exponent = self.ir.cast(steps, Element::F32)?;
        let power = self.ir.push(Kind::Function(Function::Pow), &[base, exponent])?;
        let one = self.ir.number(1.0, power);
        Ok(self.ir.binary(BinaryOp::Sub, one, power)?)
    }

    fn adam(&mut self, call: &Call, [rate, steps]: [Id; 2], update: &Update) -> Result<Vec<Id>, Problem> {
        let (alpha, beta) = (call.float("alpha", 0.9), call.float("beta", 0.999));
        let (gradient, element) = (update.gradient, self.ir.element(update.x));
        let square = self.ir.binary(BinaryOp::Mul, gradient, gradient)?;
        let mean = self.averaged(update.states[0], alpha, gradient, 1.0 - alpha)?;
        let variance = self.averaged(update.states[1], beta, square, 1.0 - beta)?;
        let deviation = self.ir.unary(UnaryOp::Sqrt, variance)?;
        let divisor = self.ir.offset(deviation, call.float("epsilon", 1e-6))?;
        // From the second step on, states that began at zero are scaled up.
        let (of_mean, of_variance) = (self.bias_of(alpha, steps)?, self.bias_of(beta, steps)?);
        let root = self.ir.unary(UnaryOp::Sqrt, of_variance)?;
        let rate = self.ir.cast(rate, Element::F32)?;
        let scaled = self.ir.binary(BinaryOp::Mul, rate, root)?;
        let scaled = self.ir.binary(BinaryOp::Div, scaled, of_mean)?;
        let is_later = self.ir.compare_number(CompareOp::Gt, steps, 0.0)?;
        let rate = self.ir.select(is_later, scaled, rate)?;
        let rate = self.ir.cast(rate, element)?;
        let share = self.ir.binary(BinaryOp::Div, mean, divisor)?;
        let step = self.ir.binary(BinaryOp::Mul, share, rate)?;
        let moved = self.ir.binary(BinaryOp::Sub, update.x, step)?;
        let x = self.ir.scale(moved, 1.0 - call.float("norm_coefficient_post", 0.0))?;
        Ok(vec![x, mean, variance])
    }

    fn adagrad(&mut self, call: &Call, [rate, steps]: [Id; 2], update: &Update) -> Result<Vec<Id>, Problem> {
        let element = self.ir.element(update.x);
        let steps = self.ir.cast(steps, Element::F32)?;
        let decay = self.ir.scale(steps, call.float("decay_factor", 0.0))?;
        let divisor = self.ir.offset(decay, 1.0)?;
        let rate = self.ir.cast(rate, Element::F32)?;
        let rate = self.ir.binary(BinaryOp::Div, rate, divisor)?;
        let rate = self.ir.cast(rate, element)?;
        let square = self.ir.binary(BinaryOp::Mul, update.gradient, update.gradient)?;
        let sum = self.ir.binary(BinaryOp::Add, update.states[0], square)?;
        let root = self.ir.unary(UnaryOp::Sqrt, sum)?;
        let divisor = self.ir.offset(root, call.float("epsilon", 1e-6))?;
        let scaled = self.ir.binary(BinaryOp::Mul, update.gradient, rate)?;
        let step = self.ir.binary(BinaryOp::Div, scaled, divisor)?;
        Ok(vec![self.ir.binary(BinaryOp::Sub, update.x, step)?, sum])
    }

    fn momentum(&mut self, call: &Call, [rate, steps]: [Id; 2], update: &Update) -> Result<Vec<Id>, Problem> {
        // All of these have to be there.
        let (alpha, beta) = (call.float("alpha", f64::NAN), call.float("beta", f64::NAN));
        if alpha.is_nan() || beta.is_nan() {
            return Err(Problem::Refused("alpha and beta expected".to_string()));
        }
        let is_standard = call.word("mode", &["standard", "nesterov"])? == "standard";
        let (gradient, element) = (update.gradient, self.ir.element(update.x));
        let (one, beta) = (self.ir.known_scalar(1.0, element), self.ir.known_scalar(beta, element));
        let is_later = self.ir.compare_number(CompareOp::Gt, steps, 0.0)?;
        let share = self.ir.select(is_later, beta, one)?;
        let term = self.ir.binary(BinaryOp::Mul, gradient, share)?;
        let kept = self.ir.scale(update.states[0], alpha)?;
        let state = self.ir.binary(BinaryOp::Add, kept, term)?;
        let mut direction = state;
        if !is_standard {
            direction = self.averaged(state, alpha, gradient, 1.0)?;
        }
        let rate = self.ir.cast(rate, element)?;
        let step = self.ir.binary(BinaryOp::Mul, direction, rate)?;
        Ok(vec![self.ir.binary(BinaryOp::Sub, update.x, step)?, state])
    }
}
