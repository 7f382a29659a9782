//! `RNN`, `GRU` and `LSTM`: one matmul of all steps with the input weights, then the steps one after the other.

use deuteron_graph::{BinaryOp, Shape, UnaryOp};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind};
use crate::limits::MAX_STEPS;

/// Sizes of a layer.
#[derive(Clone, Copy)]
struct Layer {
    steps: usize,
    batch: usize,
    hidden: usize,
    gates: usize,
}

/// Weights of one direction.
struct Direction {
    recurrent: Id,
    recurrent_bias: Option<Id>,
    peepholes: Option<Id>,
    is_backward: bool,
}

impl<'a> Translator<'a, '_> {
    pub(super) fn recurrent(&mut self, call: &Call<'a, '_>) -> Results {
        let (x, w, r) = (call.input(0)?, call.input(1)?, call.input(2)?);
        let (gates, activations): (usize, &[&str]) = match call.node.op {
            "LSTM" => (4, &["Sigmoid", "Tanh", "Tanh"]),
            "GRU" => (3, &["Sigmoid", "Tanh"]),
            _ => (1, &["Tanh"]),
        };
        let is_batch_first = call.int("layout", 0) != 0;
        let x = if is_batch_first { self.ir.push(Kind::Transpose(vec![1, 0, 2]), &[x])? } else { x };
        let (of_x, of_r) = (self.ir.shape(x).clone(), self.ir.shape(r).clone());
        let (&[steps, batch, _], &[directions, rows, hidden]) = (&of_x[..], &of_r[..]) else {
            return Err(Problem::Refused(format!(
                "x [steps, batch, n] and r [directions, gates, n] expected, got {of_x} and {of_r}"
            )));
        };
        let backward = match call.word("direction", &["forward", "reverse", "bidirectional"])? {
            "forward" => vec![false],
            "reverse" => vec![true],
            _ => vec![false, true],
        };
        let stated = call.int("hidden_size", hidden as i64);
        if directions != backward.len() || rows != gates * hidden || stated != hidden as i64 {
            return Err(Problem::Refused(format!(
                "r [{}, {gates} * {stated}, {stated}] expected, got {of_r}",
                backward.len()
            )));
        }
        let layer = Layer { steps, batch, hidden, gates };
        if let Some(why) = self.unusual(call, layer, activations, directions) {
            return self.described_layer(call, why, layer, directions, is_batch_first);
        }
        let (bias, h, c) = (call.optional(3), call.optional(5), call.optional(6));
        let peepholes = call.optional(7);
        let (mut all, mut last, mut cells) = (Vec::new(), Vec::new(), Vec::new());
        for (index, &is_backward) in backward.iter().enumerate() {
            let input = self.direction(w, index)?;
            let projected = self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: true }, &[x, input])?;
            let (projected, recurrent_bias) = match bias {
                Some(bias) => {
                    let bias = self.direction(bias, index)?;
                    let own = self.ir.push(Kind::Slice { axis: 0, start: 0, length: rows }, &[bias])?;
                    let other = self.ir.push(Kind::Slice { axis: 0, start: rows, length: rows }, &[bias])?;
                    (self.ir.binary(BinaryOp::Add, projected, own)?, Some(other))
                }
                None => (projected, None),
            };
            let peepholes = peepholes.map(|p| self.direction(p, index)).transpose()?;
            let direction = Direction { recurrent: self.direction(r, index)?, recurrent_bias, peepholes, is_backward };
            let start = [h, c].map(|state| state.map(|state| (state, is_batch_first)));
            let mut states = Vec::new();
            for state in start {
                states.push(match state {
                    Some((state, true)) => {
                        let ordered = self.ir.push(Kind::Transpose(vec![1, 0, 2]), &[state])?;
                        self.direction(ordered, index)?
                    }
                    Some((state, false)) => self.direction(state, index)?,
                    None => {
                        let zero = Constant::filled(Shape::from([batch, hidden]), 0.0);
                        self.ir.known(zero, self.ir.element(x))
                    }
                });
            }
            let (outputs, h, c) = self.steps(call, layer, projected, &direction, [states[0], states[1]])?;
            all.push(outputs);
            last.push(h);
            cells.push(c);
        }
        let mut results = vec![self.joined(&all, &[steps, 1, batch, hidden], 1)?];
        results.push(self.joined(&last, &[1, batch, hidden], 0)?);
        results.push(self.joined(&cells, &[1, batch, hidden], 0)?);
        if is_batch_first {
            results[0] = self.ir.push(Kind::Transpose(vec![2, 0, 1, 3]), &[results[0]])?;
            for result in &mut results[1..] {
                *result = self.ir.push(Kind::Transpose(vec![1, 0, 2]), &[*result])?;
            }
        }
        results.truncate(if call.node.op == "LSTM" { 3 } else { 2 });
        Ok(results)
    }

    /// What keeps a layer from being written out.
    fn unusual(&mut self, call: &Call, layer: Layer, activations: &[&str], directions: usize) -> Option<String> {
        let words = call.attribute("activations").map(|attribute| attribute.texts.clone()).unwrap_or_default();
        let usual = (0..directions).flat_map(|_| activations.iter().map(|word| word.as_bytes()));
        let scaled = ["activation_alpha", "activation_beta"].iter().any(|name| call.attribute(name).is_some());
        if scaled || (!words.is_empty() && !words.iter().map(|word| word.bytes()).eq(usual)) {
            return Some("its activations are not the usual ones".to_string());
        }
        if call.float("clip", 0.0) != 0.0 || call.int("input_forget", 0) != 0 {
            return Some("it clips its gates or couples them".to_string());
        }
        if let Some(lengths) = call.optional(4) {
            let all = self
                .given(lengths)
                .is_some_and(|lengths| lengths.distinct().all(|length| length == layer.steps as f64));
            if !all {
                return Some("its sequences have different lengths".to_string());
            }
        }
        (layer.steps > MAX_STEPS).then(|| format!("its {} steps are more than are unrolled", layer.steps))
    }

    /// ONNX Runtime's LSTM of quantised weights, whose shapes are those of a plain one.
    pub(super) fn quantized_lstm(&mut self, call: &Call<'a, '_>) -> Results {
        let x = self.ir.shape(call.input(0)?).clone();
        let hidden = usize::try_from(call.int("hidden_size", 0)).unwrap_or(0);
        let (&[steps, batch, _], true) = (&x[..], hidden > 0) else {
            return Err(Problem::Refused(format!(
                "x [steps, batch, n] and a hidden_size expected, got {x} and {hidden}"
            )));
        };
        let directions =
            if call.word("direction", &["forward", "reverse", "bidirectional"])? == "bidirectional" { 2 } else { 1 };
        let layer = Layer { steps, batch, hidden, gates: 4 };
        self.described_layer(call, "its quantised weights are not unpacked".to_string(), layer, directions, false)
    }

    fn described_layer(
        &mut self,
        call: &Call,
        why: String,
        layer: Layer,
        directions: usize,
        is_batch_first: bool,
    ) -> Results {
        let Layer { steps, batch, hidden, gates } = layer;
        let element = self.ir.element(call.input(0)?);
        let (all, last) = match is_batch_first {
            true => (vec![batch, steps, directions, hidden], vec![batch, directions, hidden]),
            false => (vec![steps, directions, batch, hidden], vec![directions, batch, hidden]),
        };
        let terms = self.ir.shape(call.input(0)?).cols() + hidden;
        let flops = [2, steps, batch, directions, gates, hidden, terms];
        let flops = flops.iter().fold(1u64, |product, &size| product.saturating_mul(size as u64));
        let mut results: Vec<(Element, Shape)> =
            vec![(element, all.into()), (element, last.clone().into()), (element, last.into())];
        results.truncate(call.node.outputs.len().max(1));
        Ok(self.opaque(call, why, flops, false, results))
    }

    /// What belongs to one direction, which is the first axis.
    fn direction(&mut self, x: Id, index: usize) -> Result<Id, Problem> {
        let part = self.ir.push(Kind::Slice { axis: 0, start: index, length: 1 }, &[x])?;
        let dims = self.ir.shape(part)[1..].to_vec();
        Ok(self.ir.reshape(part, dims)?)
    }

    fn joined(&mut self, parts: &[Id], dims: &[usize], axis: usize) -> Result<Id, Problem> {
        let parts = parts.iter().map(|&part| self.ir.reshape(part, dims.to_vec())).collect::<Result<Vec<_>, _>>()?;
        Ok(self.ir.push(Kind::Concat { axis }, &parts)?)
    }

    /// All outputs in order of time `[steps, batch, hidden]`, the last of them, and the last cell state.
    fn steps(
        &mut self,
        call: &Call,
        layer: Layer,
        projected: Id,
        direction: &Direction,
        [mut h, mut c]: [Id; 2],
    ) -> Result<(Id, Id, Id), Problem> {
        let Layer { steps, batch, hidden, gates } = layer;
        let is_linear = call.int("linear_before_reset", 0) != 0;
        let mut outputs = vec![h; steps];
        for step in 0..steps {
            let start = if direction.is_backward { steps - 1 - step } else { step };
            let row = self.ir.push(Kind::Slice { axis: 0, start, length: 1 }, &[projected])?;
            let row = self.ir.reshape(row, vec![batch, gates * hidden])?;
            (h, c) = match call.node.op {
                "LSTM" => self.lstm_step(layer, row, direction, h, c)?,
                "GRU" => (self.gru_step(layer, row, direction, h, is_linear)?, c),
                _ => {
                    let own = self.recurrence(direction, h)?;
                    let sum = self.ir.binary(BinaryOp::Add, row, own)?;
                    (self.ir.unary(UnaryOp::Tanh, sum)?, c)
                }
            };
            outputs[start] = h;
        }
        let rows =
            outputs.iter().map(|&row| self.ir.reshape(row, vec![1, batch, hidden])).collect::<Result<Vec<_>, _>>()?;
        Ok((self.ir.push(Kind::Concat { axis: 0 }, &rows)?, h, c))
    }

    /// `h r^T + bias`
    fn recurrence(&mut self, direction: &Direction, h: Id) -> Result<Id, Problem> {
        let kind = Kind::Matmul { transpose_a: false, transpose_b: true };
        let product = self.ir.push(kind, &[h, direction.recurrent])?;
        Ok(match direction.recurrent_bias {
            Some(bias) => self.ir.binary(BinaryOp::Add, product, bias)?,
            None => product,
        })
    }

    fn gate(&mut self, all: Id, index: usize, hidden: usize) -> Result<Id, Problem> {
        let axis = self.ir.shape(all).rank().saturating_sub(1);
        Ok(self.ir.push(Kind::Slice { axis, start: index * hidden, length: hidden }, &[all])?)
    }

    /// Gates in the order input, output, forget, cell.
    fn lstm_step(&mut self, layer: Layer, row: Id, direction: &Direction, h: Id, c: Id) -> Result<(Id, Id), Problem> {
        let own = self.recurrence(direction, h)?;
        let all = self.ir.binary(BinaryOp::Add, row, own)?;
        let mut parts = Vec::new();
        for index in 0..layer.gates {
            parts.push(self.gate(all, index, layer.hidden)?);
        }
        let open = |this: &mut Self, part: Id, peephole: usize, state: Id| -> Result<Id, Problem> {
            let mut argument = part;
            if let Some(peepholes) = direction.peepholes {
                let weight = this.gate(peepholes, peephole, layer.hidden)?;
                let seen = this.ir.binary(BinaryOp::Mul, weight, state)?;
                argument = this.ir.binary(BinaryOp::Add, argument, seen)?;
            }
            Ok(this.ir.unary(UnaryOp::Sigmoid, argument)?)
        };
        let (input, forget) = (open(self, parts[0], 0, c)?, open(self, parts[2], 2, c)?);
        let candidate = self.ir.unary(UnaryOp::Tanh, parts[3])?;
        let (kept, added) =
            (self.ir.binary(BinaryOp::Mul, forget, c)?, self.ir.binary(BinaryOp::Mul, input, candidate)?);
        let c = self.ir.binary(BinaryOp::Add, kept, added)?;
        let output = open(self, parts[1], 1, c)?;
        let shown = self.ir.unary(UnaryOp::Tanh, c)?;
        Ok((self.ir.binary(BinaryOp::Mul, output, shown)?, c))
    }

    /// Gates in the order update, reset, hidden.
    fn gru_step(
        &mut self,
        layer: Layer,
        row: Id,
        direction: &Direction,
        h: Id,
        is_linear: bool,
    ) -> Result<Id, Problem> {
        let hidden = layer.hidden;
        let own = self.recurrence(direction, h)?;
        let mut gates = Vec::new();
        for index in 0..2 {
            let (a, b) = (self.gate(row, index, hidden)?, self.gate(own, index, hidden)?);
            let sum = self.ir.binary(BinaryOp::Add, a, b)?;
            gates.push(self.ir.unary(UnaryOp::Sigmoid, sum)?);
        }
        let [update, reset] = gates[..] else { return Err(Problem::Refused("two gates expected".to_string())) };
        let inner = if is_linear {
            let own = self.gate(own, 2, hidden)?;
            self.ir.binary(BinaryOp::Mul, reset, own)?
        } else {
            let seen = self.ir.binary(BinaryOp::Mul, reset, h)?;
            let own = self.recurrence(direction, seen)?;
            self.gate(own, 2, hidden)?
        };
        let outer = self.gate(row, 2, hidden)?;
        let sum = self.ir.binary(BinaryOp::Add, outer, inner)?;
        let candidate = self.ir.unary(UnaryOp::Tanh, sum)?;
        // (1 - z) candidate + z h = candidate + z (h - candidate)
        let change = self.ir.binary(BinaryOp::Sub, h, candidate)?;
        let taken = self.ir.binary(BinaryOp::Mul, update, change)?;
        Ok(self.ir.binary(BinaryOp::Add, candidate, taken)?)
    }
}
