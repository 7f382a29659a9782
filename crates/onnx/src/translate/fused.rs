//! Attention and activations that exporters and optimisers write as one operator.

use deuteron_graph::{Activation, BinaryOp, Composite, Mask, Shape, UnaryOp};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind};

/// Operands of an attention over `[batch, heads, sequence, features]`.
struct Heads {
    q: Id,
    k: Id,
    v: Id,
    mask: Option<Id>,
    is_causal: bool,
    scale: Option<f64>,
}

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
            ("Attention", "" | "ai.onnx") => self.attention(call),
            ("MultiHeadAttention", _) => self.multi_head(call),
            _ => Err(Problem::Opaque("its packed operands have no counterpart".to_string())),
        }
    }

    /// `Attention` of opset 23.
    fn attention(&mut self, call: &Call) -> Results {
        let (q, k, v) = (call.input(0)?, call.input(1)?, call.input(2)?);
        let rank = self.ir.shape(q).rank();
        let cached = call.optional(4).is_some() || call.optional(5).is_some() || call.optional(6).is_some();
        if cached || (1..4).any(|index| call.wants(index)) || call.float("softcap", 0.0) != 0.0 {
            return Err(Problem::Opaque("a cache, a soft cap or inner results are asked for".to_string()));
        }
        let (heads, shared) = (call.int("q_num_heads", 0), call.int("kv_num_heads", 0));
        let (q, k, v) = match rank {
            4 => (q, k, v),
            3 => (self.split_heads(q, heads)?, self.split_heads(k, shared)?, self.split_heads(v, shared)?),
            _ => return Err(Problem::Refused(format!("operands of rank 3 or 4 expected, got {}", self.ir.shape(q)))),
        };
        let scale = call.attribute("scale").and_then(|attribute| attribute.float).map(f64::from);
        let is_causal = call.int("is_causal", 0) != 0;
        let y = self.heads(Heads { q, k, v, mask: call.optional(3), is_causal, scale })?;
        Ok(vec![if rank == 3 { self.join_heads(y)? } else { y }])
    }

    /// `MultiHeadAttention` of ONNX Runtime, where q, k and v are apart and nothing is cached.
    fn multi_head(&mut self, call: &Call) -> Results {
        let (Some(mut k), Some(mut v)) = (call.optional(1), call.optional(2)) else {
            return Err(Problem::Opaque("its operands are packed".to_string()));
        };
        let mut q = call.input(0)?;
        let plain = [q, k, v].iter().all(|&id| self.ir.shape(id).rank() == 3)
            && call.optional(4).is_none()
            && (6..call.inputs.len()).all(|index| call.optional(index).is_none())
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
        let y = self.heads(Heads { q, k, v, mask: call.optional(5), is_causal, scale })?;
        Ok(vec![self.join_heads(y)?])
    }

    /// `[b, s, h d] -> [b, h, s, d]`
    fn split_heads(&mut self, x: Id, heads: i64) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let heads = usize::try_from(heads)
            .ok()
            .filter(|&heads| heads > 0 && shape.rank() == 3 && shape[2].is_multiple_of(heads));
        let heads = heads.ok_or_else(|| format!("a number of heads that divides {shape} expected"))?;
        let split = self.ir.reshape(x, vec![shape[0], shape[1], heads, shape[2] / heads])?;
        Ok(self.ir.push(Kind::Transpose(vec![0, 2, 1, 3]), &[split])?)
    }

    fn join_heads(&mut self, x: Id) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let rows = self.ir.push(Kind::Transpose(vec![0, 2, 1, 3]), &[x])?;
        Ok(self.ir.reshape(rows, vec![shape[0], shape[2], shape[1] * shape[3]])?)
    }

    /// Keys and values of a group of heads, repeated for each of its queries.
    fn repeat_heads(&mut self, x: Id, heads: usize) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        if shape.rank() != 4 || shape[1] == 0 || !heads.is_multiple_of(shape[1]) {
            return Err(Problem::Refused(format!("heads that divide {heads} expected, got {shape}")));
        }
        let group = heads / shape[1];
        let split = self.ir.reshape(x, vec![shape[0], shape[1], 1, shape[2], shape[3]])?;
        let repeated = self.ir.broadcast(split, &Shape::from([shape[0], shape[1], group, shape[2], shape[3]]))?;
        Ok(self.ir.reshape(repeated, vec![shape[0], heads, shape[2], shape[3]])?)
    }

    fn heads(&mut self, heads: Heads) -> Result<Id, Problem> {
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
            let visible = self.lower_triangle(rows, keys)?;
            masks.push(self.additive(visible, element)?);
        }
        if let Some(given) = heads.mask {
            let is_bool = self.ir.element(given) == Element::Bool;
            masks.push(if is_bool { self.additive(given, element)? } else { given });
        }
        if mask == Mask::Causal && !masks.is_empty() {
            let visible = self.lower_triangle(rows, keys)?;
            masks.push(self.additive(visible, element)?);
        }
        let mut operands = vec![heads.q, k, v];
        if let Some(&first) = masks.first() {
            let sum = masks[1..].iter().try_fold(first, |sum, &next| self.ir.binary(BinaryOp::Add, sum, next))?;
            operands.push(sum);
            mask = Mask::Additive;
        }
        let composite = Composite::Attention { mask, scale, p: 0.0, offset: 0 };
        Ok(self.ir.push(Kind::Composite(composite), &operands)?)
    }

    fn lower_triangle(&mut self, rows: usize, cols: usize) -> Result<Id, Problem> {
        let elements = rows.saturating_mul(cols);
        if !self.ir.folder.spend(elements, elements) {
            return Err(Problem::Opaque(format!("its mask has {elements} elements, more than are folded")));
        }
        let values = (0..rows).flat_map(|i| (0..cols).map(move |j| f64::from(j <= i))).collect();
        Ok(self.ir.known(Constant::dense(Shape::from([rows, cols]), values, true), Element::Bool))
    }

    /// 0 where a key is seen, `-inf` where not.
    fn additive(&mut self, visible: Id, element: Element) -> Result<Id, Problem> {
        let zero = self.ir.known_scalar(0.0, element);
        let hidden = self.ir.known_scalar(f64::NEG_INFINITY, element);
        Ok(self.ir.push(Kind::Select, &[visible, zero, hidden])?)
    }
}
