//! The steps by which a random graph grows: each takes a live value and adds one idiom to the graph.

use deuteron_graph::{
    Activation, BinaryOp, CompareOp, Composite, Dtype, Gelu, GraphError, Mask, NodeId, ReduceOp, ScoreOptions, Shape,
    UnaryOp,
};

use super::maker::{LARGE, Live, Made, Maker};
use crate::array::Array;

/// Elements of the largest tensor that a step makes.
const MOST_ELEMENTS: usize = 1 << 17;
/// Multiplications of the largest product that a step makes.
const MOST_WORK: usize = 1 << 22;

/// One idiom, grown on a live value.
type Step = fn(&mut Maker, Live) -> Made;

/// Every idiom and its share.
const STEPS: [(Step, usize); 23] = [
    (Maker::unary, 3),
    (Maker::binary, 3),
    (Maker::select, 2),
    (Maker::cast, 1),
    (Maker::reduce, 2),
    (Maker::column_sum, 1),
    (Maker::layer_norm, 2),
    (Maker::rms_norm, 2),
    (Maker::softmax, 1),
    (Maker::causal_softmax, 1),
    (Maker::activation, 2),
    (Maker::gated, 2),
    (Maker::dropout, 2),
    (Maker::quantize, 1),
    (Maker::cross_entropy, 1),
    (Maker::bias, 2),
    (Maker::residual, 2),
    (Maker::halves, 1),
    (Maker::view, 1),
    (Maker::concat, 1),
    (Maker::embedding, 1),
    (Maker::linear, 1),
    (Maker::attention, 1),
];

impl Maker {
    /// Adds one idiom.
    pub(super) fn step(&mut self) -> Made {
        let x = self.take()?;
        self.pick_step()(self, x)
    }

    fn pick_step(&mut self) -> Step {
        let total = STEPS.iter().map(|(_, share)| share).sum();
        let mut left = self.generator.below(total);
        for (step, share) in STEPS {
            if left < share {
                return step;
            }
            left -= share;
        }
        Maker::unary
    }

    fn unary(&mut self, x: Live) -> Made {
        let op = self.generator.pick(&UnaryOp::ALL);
        let (operand, size) = match op {
            UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Round => (x.id, x.size),
            UnaryOp::Tanh | UnaryOp::Erf | UnaryOp::Sigmoid => (x.id, 1.0),
            UnaryOp::Exp if x.size > 3.0 => (self.graph.unary(UnaryOp::Tanh, x.id)?, 3.0),
            UnaryOp::Exp => (x.id, x.size.exp()),
            UnaryOp::Log => (self.away_from_zero(x.id)?, 4.0),
            UnaryOp::Sqrt => (self.away_from_zero(x.id)?, 6.0),
            UnaryOp::Rsqrt | UnaryOp::Reciprocal => (self.away_from_zero(x.id)?, 2.0),
        };
        let y = self.graph.unary(op, operand)?;
        self.result(y, size)
    }

    fn binary(&mut self, x: Live) -> Made {
        let (other, other_size) = self.partner(x)?;
        let op = self.generator.pick(&BinaryOp::ALL);
        let (operand, size) = match op {
            BinaryOp::Add | BinaryOp::Sub => (other, x.size + other_size),
            BinaryOp::Mul => (other, x.size * other_size),
            BinaryOp::Div => (self.away_from_zero(other)?, 2.0 * x.size),
            BinaryOp::Max | BinaryOp::Min => (other, x.size.max(other_size)),
        };
        let swap = op != BinaryOp::Div && self.generator.chance(0.3);
        let y = if swap { self.graph.binary(op, operand, x.id)? } else { self.graph.binary(op, x.id, operand)? };
        self.result(y, size)
    }

    fn select(&mut self, x: Live) -> Made {
        let (other, _) = self.partner(x)?;
        let op = self.generator.pick(&CompareOp::ALL);
        let condition = self.graph.compare(op, x.id, other)?;
        let (a, a_size) = self.partner(x)?;
        let y = match self.generator.chance(0.5) {
            true => self.graph.select(condition, x.id, a)?,
            false => self.graph.select(condition, a, x.id)?,
        };
        self.result(y, x.size.max(a_size))
    }

    fn cast(&mut self, x: Live) -> Made {
        let others: Vec<Dtype> = Dtype::FLOATS.into_iter().filter(|&dtype| dtype != self.dtype_of(x.id)).collect();
        let to = self.generator.pick(&others);
        let y = self.graph.cast(x.id, to)?;
        if self.generator.chance(0.5) {
            let back = self.graph.cast(y, self.dtype_of(x.id))?;
            return self.result(back, x.size);
        }
        self.result(y, x.size)
    }

    fn reduce(&mut self, x: Live) -> Made {
        let op = self.generator.pick(&ReduceOp::ALL);
        let y = self.graph.reduce(op, x.id)?;
        match op {
            ReduceOp::ArgMax => self.stored.push(y),
            ReduceOp::Sum => return self.summed(y, x.size, self.shape(x.id).cols()),
            ReduceOp::Mean | ReduceOp::Max | ReduceOp::AbsMax => self.push(y, x.size),
        }
        Ok(())
    }

    fn column_sum(&mut self, x: Live) -> Made {
        let y = self.graph.column_sum(x.id)?;
        self.summed(y, x.size, self.shape(x.id).rows())
    }

    /// A long sum is scaled to a mean, so that what follows stays small.
    fn summed(&mut self, y: NodeId, size: f64, terms: usize) -> Made {
        if size * (terms as f64) <= LARGE {
            return self.result(y, size * terms as f64);
        }
        let scaled = self.graph.scale(y, 1.0 / terms as f64)?;
        self.result(scaled, size)
    }

    fn layer_norm(&mut self, x: Live) -> Made {
        let (cols, dtype) = (self.shape(x.id).cols(), self.dtype_of(x.id));
        let (w, b) = (self.norm_weight(cols, dtype)?, self.input(Shape::from([cols]), dtype)?);
        let eps = self.generator.pick(&[1e-5, 1e-6, 1e-3]);
        let norm = self.graph.layer_norm(x.id, w, b, eps)?;
        self.aside(norm.mean);
        self.aside(norm.rstd);
        self.result(norm.y, 10.0)
    }

    fn rms_norm(&mut self, x: Live) -> Made {
        let w = self.norm_weight(self.shape(x.id).cols(), self.dtype_of(x.id))?;
        let norm = self.graph.rms_norm(x.id, w, 1e-5)?;
        self.aside(norm.rstd);
        self.result(norm.y, 8.0)
    }

    fn softmax(&mut self, x: Live) -> Made {
        let y = self.graph.softmax(x.id)?;
        self.result(y, 1.0)
    }

    fn causal_softmax(&mut self, x: Live) -> Made {
        if self.shape(x.id).rank() < 2 {
            return self.activation(x);
        }
        let masked = self.graph.causal_mask(x.id)?;
        self.softmax(Live { id: masked, ..x })
    }

    fn gelu_kind(&mut self) -> Gelu {
        self.generator.pick(&[Gelu::Tanh, Gelu::Erf])
    }

    fn activation(&mut self, x: Live) -> Made {
        let kind = self.gelu_kind();
        let activation = self.generator.pick(&[kind.into(), Activation::Silu, Activation::Relu]);
        let y = self.graph.activation(x.id, activation)?;
        self.result(y, x.size)
    }

    fn gated(&mut self, x: Live) -> Made {
        let gate = self.input(self.shape(x.id), self.dtype_of(x.id))?;
        self.gate_with(x, gate, 4.0)
    }

    fn gate_with(&mut self, x: Live, gate: NodeId, gate_size: f64) -> Made {
        let y = match self.generator.chance(0.5) {
            true => self.graph.swiglu(x.id, gate)?,
            false => {
                let kind = self.gelu_kind();
                self.graph.geglu(x.id, gate, kind)?
            }
        };
        self.result(y, x.size * gate_size)
    }

    fn dropout(&mut self, x: Live) -> Made {
        let seed = match self.seed {
            Some(seed) => seed,
            None => {
                let value = self.generator.below(1 << 31) as f64;
                let seed = self.given(Array::scalar(value), Dtype::I32, "seed")?;
                self.seed = Some(seed);
                seed
            }
        };
        let p = self.generator.pick(&[0.0, 0.1, 0.5]);
        self.dropouts += 1;
        let y = self.graph.dropout(x.id, seed, p, self.dropouts - 1)?;
        self.result(y, 2.0 * x.size)
    }

    /// Bytes are read by a dequantisation or are outputs, never more.
    fn quantize(&mut self, x: Live) -> Made {
        if self.generator.chance(0.15) {
            let out = self.graph.call(Composite::QuantizeFp8, &[x.id])?;
            self.stored.push(out[0]);
            self.aside(out[1]);
            return Ok(());
        }
        let quantized = self.graph.quantize_int8(x.id)?;
        self.aside(quantized.scale);
        if self.generator.chance(0.3) {
            self.stored.push(quantized.q);
            return Ok(());
        }
        let y = self.graph.dequantize(quantized.q, quantized.scale, self.dtype_of(x.id))?;
        self.result(y, x.size)
    }

    fn cross_entropy(&mut self, x: Live) -> Made {
        let shape = self.shape(x.id);
        let targets = Array::indices(shape.leading(), self.generator.bits(), shape.cols());
        let targets = self.given(targets, Dtype::I32, "target")?;
        let result = self.graph.cross_entropy(x.id, targets)?;
        self.stored.push(result.loss);
        self.aside(result.logsumexp);
        Ok(())
    }

    fn bias(&mut self, x: Live) -> Made {
        let array = Array::normal([self.shape(x.id).cols()], self.generator.bits());
        let bias = self.given(array, self.dtype_of(x.id), "w")?;
        let y = self.graph.add(x.id, bias)?;
        self.result(y, x.size + 4.0)
    }

    fn residual(&mut self, x: Live) -> Made {
        let (shape, dtype) = (self.shape(x.id), self.dtype_of(x.id));
        let same = |live: &Live| live.id != x.id && self.shape(live.id) == shape && self.dtype_of(live.id) == dtype;
        let (other, size) = match self.live.iter().position(same) {
            Some(position) => {
                self.live[position].read = true;
                (self.live[position].id, self.live[position].size)
            }
            None => (self.input(shape, dtype)?, 4.0),
        };
        let y = self.graph.add(other, x.id)?;
        self.result(y, x.size + size)
    }

    /// Two halves of the last axis, one gating the other.
    fn halves(&mut self, x: Live) -> Made {
        let shape = self.shape(x.id);
        let (axis, cols) = (shape.rank() - 1, shape.cols());
        if cols % 2 == 1 {
            return self.gated(x);
        }
        let a = self.graph.slice(x.id, axis, 0, cols / 2)?;
        let gate = self.graph.slice(x.id, axis, cols / 2, cols / 2)?;
        self.gate_with(Live { id: a, ..x }, gate, x.size)
    }

    fn view(&mut self, x: Live) -> Made {
        let shape = self.shape(x.id);
        let y = match shape.rank() {
            3 if self.generator.chance(0.5) => self.graph.transpose(x.id, &[1, 0, 2])?,
            1 => self.graph.reshape(x.id, [1, shape.cols()])?,
            3 => self.graph.reshape(x.id, [shape.rows(), shape.cols()])?,
            _ if shape.rows().is_multiple_of(2) => self.graph.reshape(x.id, [2, shape.rows() / 2, shape.cols()])?,
            _ => self.graph.stop_gradient(x.id)?,
        };
        self.result(y, x.size)
    }

    fn concat(&mut self, x: Live) -> Made {
        let shape = self.shape(x.id);
        let axis = self.generator.below(shape.rank());
        if 2 * shape.elements() > MOST_ELEMENTS {
            return self.activation(x);
        }
        let other = self.input(shape, self.dtype_of(x.id))?;
        let y = self.graph.concat(&[x.id, other], axis)?;
        self.result(y, x.size.max(4.0))
    }

    /// Rows of a small table, added.
    fn embedding(&mut self, x: Live) -> Made {
        let shape = self.shape(x.id);
        let count = self.generator.pick(&[1, 7, 50]);
        if count * shape.cols() > MOST_ELEMENTS {
            return self.bias(x);
        }
        let table = Array::normal([count, shape.cols()], self.generator.bits());
        let table = self.given(table, self.dtype_of(x.id), "w")?;
        let indices = Array::indices(shape.leading(), self.generator.bits(), count);
        let indices = self.given(indices, Dtype::I32, "index")?;
        let rows = self.graph.gather(table, indices)?;
        let y = self.graph.add(x.id, rows)?;
        self.result(y, x.size + 4.0)
    }

    /// Weights of deviation `1 / sqrt(inner)` keep the magnitude.
    fn linear(&mut self, x: Live) -> Made {
        let (shape, dtype) = (self.shape(x.id), self.dtype_of(x.id));
        let (inner, outputs) = (shape.cols(), self.generator.pick(&[1, 7, 64, 65, 129]));
        let largest = shape.rows().max(inner) * outputs;
        if shape.rank() < 2 || shape.elements() * outputs > MOST_WORK || largest > MOST_ELEMENTS {
            return self.bias(x);
        }
        let transposed = self.generator.chance(0.3);
        let dims = if transposed { [outputs, inner] } else { [inner, outputs] };
        let mut w = Array::normal(dims, self.generator.bits());
        w.values.iter_mut().for_each(|w| *w /= (inner as f64).sqrt());
        let mut operands = vec![x.id, self.given(w, dtype, "w")?];
        if self.generator.chance(0.6) {
            let bias = Array::normal([outputs], self.generator.bits());
            operands.push(self.given(bias, dtype, "w")?);
        }
        let y = self.graph.call(Composite::Linear { transposed }, &operands)?[0];
        self.result(y, 2.0 * x.size + 4.0)
    }

    /// `x` as queries to fresh keys and values.
    fn attention(&mut self, x: Live) -> Made {
        let (shape, dtype) = (self.shape(x.id), self.dtype_of(x.id));
        let keys = self.generator.pick(&[1, 7, 33, 64]);
        if shape.rank() < 2 || shape.elements() * keys > MOST_WORK || shape.rows() * keys > MOST_ELEMENTS {
            return self.layer_norm(x);
        }
        let mut dims = shape.to_vec();
        dims[shape.rank() - 2] = keys;
        if Shape::new(dims.clone()).elements() > MOST_ELEMENTS {
            return self.layer_norm(x);
        }
        let (k, v) = (self.input(Shape::new(dims.clone()), dtype)?, self.input(Shape::new(dims), dtype)?);
        let mask = self.generator.pick(&[Mask::Full, Mask::Causal]);
        let scale = 1.0 / (shape.cols() as f64).sqrt();
        let scores =
            if self.generator.chance(0.5) { self.score_options(&shape, keys)? } else { ScoreOptions::default() };
        let y = self.graph.worked_attention([x.id, k, v], mask, scale, scores)?;
        self.result(y, 4.0)
    }

    /// Some work on the scores of attention.
    fn score_options(&mut self, shape: &Shape, keys: usize) -> Result<ScoreOptions, GraphError> {
        let rank = shape.rank();
        let queries = shape[rank - 2];
        let mut options = ScoreOptions {
            soft_cap: self.generator.chance(0.4).then_some(2.0),
            window: self.generator.chance(0.5).then(|| self.generator.pick(&[1, 5, 40])),
            ..ScoreOptions::default()
        };
        if rank >= 3 && self.generator.chance(0.4) {
            let heads = shape[rank - 3];
            let slopes = Array::uniform([heads, 1, 1], self.generator.bits(), -0.2, 0.2);
            options.slopes = Some(self.given(slopes, Dtype::F32, "slopes")?);
        }
        if self.generator.chance(0.4) && queries * keys <= MOST_ELEMENTS {
            let bias = Array::normal([queries, keys], self.generator.bits());
            options.bias = Some(self.given(bias, Dtype::F32, "bias")?);
        }
        if self.generator.chance(0.4) && queries <= keys {
            let documents = Array::from_fn([keys], |key| (key * 3 / keys) as f64);
            options.documents = Some(self.given(documents, Dtype::I32, "documents")?);
        }
        Ok(options)
    }
}
