//! `Attention` and `RotaryEmbedding` of opset 23 and later.

use deuteron_graph::{BinaryOp, CompareOp, Composite, Mask, ScoreWork, Shape, UnaryOp};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind};

/// Operands of an attention over `[batch, heads, sequence, features]`.
pub(super) struct Heads {
    pub q: Id,
    pub k: Id,
    pub v: Id,
    pub mask: Option<Id>,
    pub is_causal: bool,
    pub scale: Option<f64>,
}

impl<'a> Translator<'a, '_> {
    pub(super) fn attention(&mut self, call: &Call<'a, '_>) -> Results {
        let (q, k, v) = (call.input(0)?, call.input(1)?, call.input(2)?);
        let rank = self.ir.shape(q).rank();
        let (heads, shared) = (call.int("q_num_heads", 0), call.int("kv_num_heads", 0));
        let (q, mut k, mut v) = match rank {
            4 => (q, k, v),
            3 => (self.split_heads(q, heads)?, self.split_heads(k, shared)?, self.split_heads(v, shared)?),
            _ => return Err(Problem::Refused(format!("operands of rank 3 or 4 expected, got {}", self.ir.shape(q)))),
        };
        if [q, k, v].iter().any(|&id| self.ir.shape(id).rank() != 4) {
            return Err(Problem::Refused(format!("operands of one rank expected, got {}", self.ir.shapes(&[q, k, v]))));
        }
        let precision = call.int("softmax_precision", 1);
        if !matches!(Element::from_number(precision), Some(Element::F32 | Element::F64)) {
            let is_own = Element::from_number(precision) == Some(self.ir.element(q));
            if !is_own {
                return Err(Problem::Opaque(format!("a softmax in ONNX element type {precision} is not a primitive")));
            }
        }
        let mut past = 0;
        for (cache, own) in [(call.optional(4), &mut k), (call.optional(5), &mut v)] {
            if let Some(cache) = cache {
                past = self.ir.shape(cache).get(2).copied().unwrap_or(0);
                *own = self.ir.push(Kind::Concat { axis: 2 }, &[cache, *own])?;
            }
        }
        let scale = call.attribute("scale").and_then(|attribute| attribute.float).map(f64::from);
        let is_causal = call.int("is_causal", 0) != 0;
        let (softcap, mode) = (call.float("softcap", 0.0), call.int("qk_matmul_output_mode", 0));
        let mask = self.padded_mask(call.optional(3), self.ir.shape(k).get(2).copied().unwrap_or(0))?;
        let lengths = call.optional(6);
        let plain = past == 0 && lengths.is_none() && softcap == 0.0 && !call.wants(3);
        let (y, scores) = if plain {
            (self.heads(Heads { q, k, v, mask, is_causal, scale })?, None)
        } else {
            let bias = self.attention_bias([q, k], mask, lengths, is_causal.then_some(past))?;
            let scale = scale.unwrap_or(1.0 / (self.ir.shape(q)[3] as f64).sqrt());
            let (y, scores) = self.written_out([q, k, v], bias, scale, softcap, mode)?;
            (y, Some(scores))
        };
        let y = if rank == 3 { self.join_heads(y)? } else { y };
        Ok([Some(y), Some(k), Some(v), scores].into_iter().flatten().collect())
    }

    /// A mask for fewer keys than there are hides the others.
    fn padded_mask(&mut self, mask: Option<Id>, keys: usize) -> Result<Option<Id>, Problem> {
        let Some(mask) = mask else { return Ok(None) };
        let shape = self.ir.shape(mask).clone();
        if shape.rank() == 0 || shape.cols() == 1 || shape.cols() >= keys {
            return Ok(Some(mask));
        }
        let is_bool = self.ir.element(mask) == Element::Bool;
        let border = shape.with_cols(keys - shape.cols());
        let border = Constant::filled(border, if is_bool { 0.0 } else { f64::NEG_INFINITY });
        let border = self.ir.known(border, self.ir.element(mask));
        Ok(Some(self.ir.push(Kind::Concat { axis: shape.rank() - 1 }, &[mask, border])?))
    }

    /// What is added to the scores: the mask, the causal border behind `past` keys, and how many keys each sequence has.
    fn attention_bias(
        &mut self,
        [q, k]: [Id; 2],
        mask: Option<Id>,
        lengths: Option<Id>,
        past: Option<usize>,
    ) -> Result<Option<Id>, Problem> {
        let element = self.ir.element(q);
        let (rows, keys) = (self.ir.shape(q)[2], self.ir.shape(k)[2]);
        let mut parts = Vec::new();
        if let Some(mask) = mask {
            let is_bool = self.ir.element(mask) == Element::Bool;
            parts.push(if is_bool { self.additive(mask, element)? } else { mask });
        }
        if let Some(past) = past {
            let visible = self.lower_triangle(rows, keys, past)?;
            parts.push(self.additive(visible, element)?);
        }
        if let Some(lengths) = lengths {
            let count = self.counting(keys, Element::I64)?;
            let batch = self.ir.shape(lengths).elements();
            let lengths = self.ir.reshape(lengths, vec![batch, 1, 1, 1])?;
            let visible = self.ir.compare(CompareOp::Lt, count, lengths)?;
            parts.push(self.additive(visible, element)?);
        }
        let Some(&first) = parts.first() else { return Ok(None) };
        let sum = parts[1..].iter().try_fold(first, |sum, &next| self.ir.binary(BinaryOp::Add, sum, next))?;
        Ok(Some(sum))
    }

    /// Attention step by step, with the scores as `mode` asks for them: of the product, capped, with the bias, or as
    /// probabilities.
    fn written_out(
        &mut self,
        [q, k, v]: [Id; 3],
        bias: Option<Id>,
        scale: f64,
        softcap: f64,
        mode: i64,
    ) -> Result<(Id, Id), Problem> {
        let heads = self.ir.shape(q).get(1).copied().unwrap_or(0);
        let (k, v) = (self.repeat_heads(k, heads)?, self.repeat_heads(v, heads)?);
        let product = self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: true }, &[q, k])?;
        let mut scores = self.ir.scale(product, scale)?;
        if softcap > 0.0 {
            let share = self.ir.scale(scores, 1.0 / softcap)?;
            let capped = self.ir.unary(UnaryOp::Tanh, share)?;
            scores = self.ir.scale(capped, softcap)?;
        }
        let biased = match bias {
            Some(bias) => self.ir.binary(BinaryOp::Add, scores, bias)?,
            None => scores,
        };
        let shares = self.ir.push(Kind::Softmax, &[biased])?;
        let y = self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: false }, &[shares, v])?;
        let asked = match mode {
            0 | 1 => scores,
            2 => biased,
            3 => shares,
            _ => return Err(Problem::Refused(format!("a qk_matmul_output_mode from 0 to 3 expected, got {mode}"))),
        };
        Ok((y, asked))
    }

    /// Pairs of features turned by angles: neighbours, or one of each half.
    pub(super) fn rotary(&mut self, call: &Call<'a, '_>) -> Results {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let mut heads = x;
        let count = call.int("num_heads", 0);
        match shape.rank() {
            3 => heads = self.split_heads(x, count)?,
            4 => {}
            _ => return Err(Problem::Refused(format!("operands of rank 3 or 4 expected, got {shape}"))),
        }
        let [batch, _, sequence, features] = self.ir.shape(heads)[..] else {
            return Err(Problem::Refused(format!("operands of rank 3 or 4 expected, got {shape}")));
        };
        let turned = usize::try_from(call.int("rotary_embedding_dim", 0)).unwrap_or(usize::MAX);
        let turned = if turned == 0 { features } else { turned };
        if turned > features || !turned.is_multiple_of(2) {
            return Err(Problem::Refused(format!(
                "an even rotary_embedding_dim up to {features} expected, got {turned}"
            )));
        }
        let half = turned / 2;
        let mut tables = [call.input(1)?, call.input(2)?];
        for table in &mut tables {
            if let Some(positions) = call.optional(3) {
                *table = self.ir.push(Kind::Gather, &[*table, positions])?;
            }
            *table = self.ir.reshape(*table, vec![batch, 1, sequence, half])?;
        }
        let [cosine, sine] = tables;
        let rotated = self.ir.push(Kind::Slice { axis: 3, start: 0, length: turned }, &[heads])?;
        let interleaved = call.int("interleaved", 0) != 0;
        let mut split = self.ir.shape(rotated).to_vec();
        split.splice(3.., if interleaved { [half, 2] } else { [2, half] });
        let axis = if interleaved { 4 } else { 3 };
        let pairs = self.ir.reshape(rotated, split.clone())?;
        let mut part = |start: usize| -> Result<Id, Problem> {
            let part = self.ir.push(Kind::Slice { axis, start, length: 1 }, &[pairs])?;
            Ok(self.ir.reshape(part, [&split[..3], &[half]].concat())?)
        };
        let (a, b) = (part(0)?, part(1)?);
        let mut mixed = |left: Id, right: Id, op: BinaryOp| -> Result<Id, Problem> {
            let (left, right) = (self.ir.binary(BinaryOp::Mul, left, a)?, self.ir.binary(BinaryOp::Mul, right, b)?);
            Ok(self.ir.binary(op, left, right)?)
        };
        let (real, imaginary) = (mixed(cosine, sine, BinaryOp::Sub)?, mixed(sine, cosine, BinaryOp::Add)?);
        let mut dims = split.clone();
        dims[axis] = 1;
        let (real, imaginary) = (self.ir.reshape(real, dims.clone())?, self.ir.reshape(imaginary, dims)?);
        let joined = self.ir.push(Kind::Concat { axis }, &[real, imaginary])?;
        let mut result = self.ir.reshape(joined, [&split[..3], &[turned]].concat())?;
        if turned < features {
            let rest = self.ir.push(Kind::Slice { axis: 3, start: turned, length: features - turned }, &[heads])?;
            result = self.ir.push(Kind::Concat { axis: 3 }, &[result, rest])?;
        }
        Ok(vec![if shape.rank() == 3 { self.join_heads(result)? } else { result }])
    }

    /// `[b, s, h d] -> [b, h, s, d]`
    pub(super) fn split_heads(&mut self, x: Id, heads: i64) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let heads = usize::try_from(heads)
            .ok()
            .filter(|&heads| heads > 0 && shape.rank() == 3 && shape[2].is_multiple_of(heads));
        let heads = heads.ok_or_else(|| format!("a number of heads that divides {shape} expected"))?;
        let split = self.ir.reshape(x, vec![shape[0], shape[1], heads, shape[2] / heads])?;
        Ok(self.ir.push(Kind::Transpose(vec![0, 2, 1, 3]), &[split])?)
    }

    pub(super) fn join_heads(&mut self, x: Id) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let rows = self.ir.push(Kind::Transpose(vec![0, 2, 1, 3]), &[x])?;
        Ok(self.ir.reshape(rows, vec![shape[0], shape[2], shape[1] * shape[3]])?)
    }

    /// Keys and values of a group of heads, repeated for each of its queries.
    pub(super) fn repeat_heads(&mut self, x: Id, heads: usize) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        if shape.rank() != 4 || shape[1] == 0 || !heads.is_multiple_of(shape[1]) {
            return Err(Problem::Refused(format!("heads that divide {heads} expected, got {shape}")));
        }
        let group = heads / shape[1];
        let split = self.ir.reshape(x, vec![shape[0], shape[1], 1, shape[2], shape[3]])?;
        let repeated = self.ir.broadcast(split, &Shape::from([shape[0], shape[1], group, shape[2], shape[3]]))?;
        Ok(self.ir.reshape(repeated, vec![shape[0], heads, shape[2], shape[3]])?)
    }

    pub(super) fn heads(&mut self, heads: Heads) -> Result<Id, Problem> {
        let query = self.ir.shape(heads.q).clone();
        let (k, v) = (self.repeat_heads(heads.k, query[1])?, self.repeat_heads(heads.v, query[1])?);
        let (rows, keys) = (query[2], self.ir.shape(k)[2]);
        let scale = heads.scale.unwrap_or(1.0 / (query[3] as f64).sqrt());
        let element = self.ir.element(heads.q);
        let mut masks = Vec::new();
        let mut mask = Mask::Full;
        if heads.is_causal && rows == keys {
            mask = Mask::Causal;
        } else if heads.is_causal {
            // The operator counts positions from the start, the composite from the end: the mask has to be written out.
            let visible = self.lower_triangle(rows, keys, 0)?;
            masks.push(self.additive(visible, element)?);
        }
        if let Some(given) = heads.mask {
            let is_bool = self.ir.element(given) == Element::Bool;
            masks.push(if is_bool { self.additive(given, element)? } else { given });
        }
        if mask == Mask::Causal && !masks.is_empty() {
            let visible = self.lower_triangle(rows, keys, 0)?;
            masks.push(self.additive(visible, element)?);
        }
        let mut operands = vec![heads.q, k, v];
        if let Some(&first) = masks.first() {
            let sum = masks[1..].iter().try_fold(first, |sum, &next| self.ir.binary(BinaryOp::Add, sum, next))?;
            operands.push(sum);
            mask = Mask::Additive;
        }
        let composite = Composite::Attention { mask, scale, p: 0.0, offset: 0, work: ScoreWork::NONE };
        Ok(self.ir.push(Kind::Composite(composite), &operands)?)
    }

    /// Row `i` sees `past` columns and `i + 1` more.
    fn lower_triangle(&mut self, rows: usize, cols: usize, past: usize) -> Result<Id, Problem> {
        let elements = rows.saturating_mul(cols);
        if !self.ir.folder.spend(elements, elements) {
            return Err(Problem::Opaque(format!("its mask has {elements} elements, more than are folded")));
        }
        let values = (0..rows).flat_map(|i| (0..cols).map(move |j| f64::from(j <= i + past))).collect();
        Ok(self.ir.known(Constant::dense(Shape::from([rows, cols]), values, true), Element::Bool))
    }

    /// 0 where a key is seen, `-inf` where not.
    fn additive(&mut self, visible: Id, element: Element) -> Result<Id, Problem> {
        let zero = self.ir.known_scalar(0.0, element);
        let hidden = self.ir.known_scalar(f64::NEG_INFINITY, element);
        Ok(self.ir.push(Kind::Select, &[visible, zero, hidden])?)
    }
}
