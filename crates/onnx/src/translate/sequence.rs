//! Layers that carry a state along a sequence: causal convolutions, linear attention, caches.

use deuteron_graph::{Activation, BinaryOp, Composite, Shape, UnaryOp};

use super::call::{Results, axis_of};
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind};
use crate::limits::MAX_STEPS;

/// Positions of a causal convolution that are added one by one. Models have four.
const MAX_TAPS: usize = 64;

/// Sizes of linear attention.
#[derive(Clone, Copy)]
struct Heads {
    batch: usize,
    steps: usize,
    /// Of keys and values, each with so many queries.
    heads: usize,
    queries: usize,
    keys: usize,
    values: usize,
}

impl<'a> Translator<'a, '_> {
    pub(super) fn sequence(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "CausalConvWithState" => self.causal_convolution(call),
            "LinearAttention" => self.linear_attention(call),
            _ => Ok(vec![self.write_cache(call)?]),
        }
    }

    fn zeros(&mut self, dims: &[usize], element: Element) -> Result<Id, Problem> {
        let shape = Shape::from(dims);
        if shape.checked_elements().is_none() {
            return Err(Problem::Refused(format!("a state of at most 2^48 elements expected, got {shape}")));
        }
        Ok(self.ir.known(Constant::filled(shape, 0.0), element))
    }

    /// Each channel of `x [n, c, length]` is a sum of its last positions; those before the begin are a state, which ends as the last
    /// positions of all.
    fn causal_convolution(&mut self, call: &Call) -> Results {
        let (x, weight) = (call.input(0)?, call.input(1)?);
        let (of_x, of_weight) = (self.ir.shape(x).clone(), self.ir.shape(weight).clone());
        let (&[batch, channels, length], &[rows, 1, taps]) = (&of_x[..], &of_weight[..]) else {
            let got = format!("got {of_x} and {of_weight}");
            return Err(Problem::Refused(format!("x [n, c, length] and a weight [c, 1, k] expected, {got}")));
        };
        if rows != channels || taps == 0 {
            return Err(Problem::Refused(format!("a weight [{channels}, 1, k] expected, got {of_weight}")));
        }
        if taps > MAX_TAPS {
            return Err(Problem::Opaque(format!("it adds {taps} positions, and at most {MAX_TAPS} are unrolled")));
        }
        let activation = call.word("activation", &["none", "silu", "swish"])?;
        let element = self.ir.element(x);
        let past = match call.optional(3) {
            Some(past) => past,
            None => self.zeros(&[batch, channels, taps - 1], element)?,
        };
        if self.ir.shape(past)[..] != [batch, channels, taps - 1] {
            let got = self.ir.shape(past);
            return Err(Problem::Refused(format!("a state [{batch},{channels},{}] expected, got {got}", taps - 1)));
        }
        let padded = if taps == 1 { x } else { self.ir.push(Kind::Concat { axis: 2 }, &[past, x])? };
        let (wide, weight) = (self.ir.cast(padded, Element::F32)?, self.ir.cast(weight, Element::F32)?);
        let weight = self.ir.reshape(weight, vec![channels, taps])?;
        let mut sum = None;
        for tap in 0..taps {
            let part = self.ir.push(Kind::Slice { axis: 2, start: tap, length }, &[wide])?;
            let factor = self.ir.push(Kind::Slice { axis: 1, start: tap, length: 1 }, &[weight])?;
            let term = self.ir.binary(BinaryOp::Mul, part, factor)?;
            sum = Some(match sum {
                Some(sum) => self.ir.binary(BinaryOp::Add, sum, term)?,
                None => term,
            });
        }
        let mut result = sum.ok_or_else(|| "a weight of at least one position expected".to_string())?;
        if let Some(bias) = call.optional(2) {
            let bias = self.ir.cast(bias, Element::F32)?;
            let bias = self.ir.along(bias, 1, 3)?;
            result = self.ir.binary(BinaryOp::Add, result, bias)?;
        }
        // The sum is rounded before and after the activation.
        result = self.ir.cast(result, element)?;
        if activation != "none" {
            let wide = self.ir.cast(result, Element::F32)?;
            let active = self.ir.push(Kind::Composite(Composite::Activation(Activation::Silu)), &[wide])?;
            result = self.ir.cast(active, element)?;
        }
        let present = match taps {
            1 => past,
            _ => self.ir.push(Kind::Slice { axis: 2, start: length, length: taps - 1 }, &[padded])?,
        };
        Ok(vec![result, present])
    }

    /// A matrix of keys by values for each head, which decays, may forget what a key stands for, and takes in a key and its value at
    /// each step.
    fn linear_attention(&mut self, call: &Call) -> Results {
        let rule = call.word("update_rule", &["gated_delta", "linear", "gated", "delta"])?;
        // How the work is cut does not change what is computed.
        call.without_effect(&["chunk_size"]);
        let [q, k, v] = [call.input(0)?, call.input(1)?, call.input(2)?];
        let sizes = self.heads_of(call, [q, k, v])?;
        let Heads { batch, steps, heads, queries, keys, values } = sizes;
        let (is_gated, is_corrected) = (rule.starts_with("gated"), rule.ends_with("delta"));
        let (past, decay, beta) = (call.optional(3), call.optional(4), call.optional(5));
        if is_gated != decay.is_some() || is_corrected != beta.is_some() {
            return Err(Problem::Refused(format!(
                "a decay where update_rule is gated and a beta where it is delta expected, got {rule} with {} and {}",
                if decay.is_some() { "a decay" } else { "none" },
                if beta.is_some() { "a beta" } else { "none" },
            )));
        }
        if steps > MAX_STEPS {
            return Err(Problem::Opaque(format!("it takes {steps} steps, and at most {MAX_STEPS} are unrolled")));
        }
        let (element, of_state) = (self.ir.element(q), past.map_or(self.ir.element(q), |past| self.ir.element(past)));
        let dims = [batch, heads, keys, values];
        let mut state = match past {
            Some(past) => self.ir.cast(past, Element::F32)?,
            None => self.zeros(&dims, Element::F32)?,
        };
        if self.ir.shape(state)[..] != dims {
            let got = self.ir.shape(state);
            return Err(Problem::Refused(format!("a state {dims:?} expected, got {got}")));
        }
        let scale = match call.float("scale", 0.0) {
            0.0 => 1.0 / (keys as f64).sqrt(),
            scale => scale,
        };
        let mut rows = Vec::with_capacity(steps);
        for step in 0..steps {
            if let Some(decay) = decay {
                let (width, what) = (self.ir.shape(decay).cols(), "a decay per head, or per head and key,");
                let per_key = if width == heads { 1 } else { keys };
                let gate = self.step_of(decay, step, [batch, heads, per_key, 1], what)?;
                let gate = self.ir.unary(UnaryOp::Exp, gate)?;
                state = self.ir.binary(BinaryOp::Mul, state, gate)?;
            }
            let key = self.step_of(k, step, [batch, heads, 1, keys], "keys")?;
            let mut value = self.step_of(v, step, [batch, heads, 1, values], "values")?;
            let product = Kind::Matmul { transpose_a: false, transpose_b: false };
            if let Some(beta) = beta {
                let known = self.ir.push(product.clone(), &[key, state])?;
                let change = self.ir.binary(BinaryOp::Sub, value, known)?;
                let of_beta = if self.ir.shape(beta).cols() == 1 { 1 } else { heads };
                let share = self.step_of(beta, step, [batch, of_beta, 1, 1], "a beta per head, or one,")?;
                value = self.ir.binary(BinaryOp::Mul, share, change)?;
            }
            let column = self.ir.swap_last(key)?;
            let outer = self.ir.binary(BinaryOp::Mul, column, value)?;
            state = self.ir.binary(BinaryOp::Add, state, outer)?;
            let query = self.step_of(q, step, [batch, heads, queries, keys], "queries")?;
            let seen = self.ir.push(product, &[query, state])?;
            let seen = self.ir.scale(seen, scale)?;
            rows.push(self.ir.reshape(seen, vec![batch, 1, heads * queries * values])?);
        }
        let result = match rows.is_empty() {
            true => self.zeros(&[batch, 0, heads * queries * values], Element::F32)?,
            false => self.ir.push(Kind::Concat { axis: 1 }, &rows)?,
        };
        Ok(vec![self.ir.cast(result, element)?, self.ir.cast(state, of_state)?])
    }

    fn heads_of(&self, call: &Call, ids: [Id; 3]) -> Result<Heads, Problem> {
        let [q, k, v] = ids.map(|id| self.ir.shape(id).clone());
        let count = |name: &str| usize::try_from(call.int(name, 0)).unwrap_or(0);
        let (of_q, heads) = (count("q_num_heads"), count("kv_num_heads"));
        let misfit = || {
            let got = format!("got {q}, {k} and {v} of {of_q} and {heads} heads");
            Problem::Refused(format!("q, k and v [batch, steps, heads * size] expected, {got}"))
        };
        let (&[batch, steps, width], &[_, _, of_k], &[_, _, of_v]) = (&q[..], &k[..], &v[..]) else {
            return Err(misfit());
        };
        let divides = heads > 0 && of_q > 0 && of_q.is_multiple_of(heads) && width.is_multiple_of(of_q);
        if !divides || !of_v.is_multiple_of(heads) || k[..2] != q[..2] || v[..2] != q[..2] {
            return Err(misfit());
        }
        let keys = width / of_q;
        if Some(of_k) != keys.checked_mul(heads) {
            return Err(misfit());
        }
        let values = of_v / heads;
        if Shape::from([batch, of_q, keys, values]).checked_elements().is_none() {
            return Err(misfit());
        }
        Ok(Heads { batch, steps, heads, queries: of_q / heads, keys, values })
    }

    /// What `x [batch, steps, ..]` is at a step, in f32 and this shape.
    fn step_of(&mut self, x: Id, step: usize, dims: [usize; 4], what: &str) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let each: usize = dims[1..].iter().product();
        if shape.rank() != 3 || shape[0] != dims[0] || step >= shape[1] || shape[2] != each {
            return Err(Problem::Refused(format!("{what} [{}, steps, {each}] expected, got {shape}", dims[0])));
        }
        let slice = self.ir.push(Kind::Slice { axis: 1, start: step, length: 1 }, &[x])?;
        let slice = self.ir.reshape(slice, dims.to_vec())?;
        Ok(self.ir.cast(slice, Element::F32)?)
    }

    /// `TensorScatter`: rows written into a cache from a known place of each batch on, in a ring if the mode is circular.
    fn write_cache(&mut self, call: &Call) -> Result<Id, Problem> {
        let (cache, update) = (call.input(0)?, call.input(1)?);
        let (to, from) = (self.ir.shape(cache).clone(), self.ir.shape(update).clone());
        let is_ring = call.word("mode", &["linear", "circular"])? == "circular";
        let axis = axis_of(call.int("axis", -2), to.rank())?;
        let fits = axis > 0
            && from.rank() == to.rank()
            && (0..to.rank())
                .all(|other| if other == axis { from[other] <= to[other] } else { from[other] == to[other] });
        if !fits {
            return Err(Problem::Refused(format!("rows within the cache {to} on axis {axis} expected, got {from}")));
        }
        let starts = match call.optional(2) {
            Some(starts) => self.integers(starts, "write_indices")?,
            None => vec![0; to[0]],
        };
        let most = if is_ring { to[axis] } else { to[axis] - from[axis] + 1 };
        let starts: Vec<usize> = starts.iter().filter_map(|&start| usize::try_from(start).ok()).collect();
        if starts.len() != to[0] || starts.iter().any(|&start| start >= most.max(1)) {
            return Err(Problem::Refused(format!("{} write_indices below {most} expected, got {starts:?}", to[0])));
        }
        self.reserve(to.elements().saturating_add(from.elements()))?;
        let (strides, inner) = (to.strides(), from.strides());
        let place = |flat: usize| {
            let index = |axis: usize| flat / inner[axis] % from[axis];
            let along = |other: usize| match other == axis {
                true => (starts[index(0)] + index(axis)) % to[axis],
                false => index(other),
            };
            (0..to.rank()).map(|other| along(other) * strides[other]).sum()
        };
        let places: Vec<usize> = (0..from.elements()).map(place).collect();
        self.combined(cache, update, &places, "none")
    }
}
