//! Recognises decomposed attention: scores, scale, mask, softmax, product.

use deuteron_graph::{BinaryOp, CompareOp, Composite, Mask, ScoreWork, Shape};

use super::{Match, Miss, Search};
use crate::element::Element;
use crate::ir::{Id, Ir, Kind, Refusal};
use crate::limits::{HIDDEN, PATTERN_DEPTH, PATTERN_STEPS};

/// What is done to the scores, from the product outwards.
struct Scores {
    product: Id,
    scale: f64,
    masks: Vec<MaskPart>,
}

/// One thing that hides keys.
enum MaskPart {
    /// Added to the scores.
    Added(Id),
    /// Scores are kept where the condition is as said, and replaced by `fill` elsewhere.
    Kept { condition: Id, where_true: bool, fill: f64 },
}

/// `softmax(scale q k^T + mask) v`
pub(super) fn attention(search: &mut Search, root: Id) -> Result<Match, Miss> {
    if let Kind::Composite(Composite::Attention { mask: Mask::Additive, scale, p, offset, work }) = *search.kind(root) {
        return search.settled(root, |mask| Composite::Attention { mask, scale, p, offset, work });
    }
    let Kind::Matmul { transpose_a: false, transpose_b } = *search.kind(root) else { return Err(Miss::No) };
    let (weights, mut v) = (search.inputs(root)[0], search.inputs(root)[1]);
    let mut interior = Vec::new();
    let weights = search.through_casts(weights, &mut interior);
    let weights = guarded(search, weights, &mut interior);
    let weights = search.through_casts(weights, &mut interior);
    let Kind::Softmax = search.kind(weights) else { return Err(Miss::No) };
    interior.push(weights);
    let near = |missing: String| Miss::Near { what: "attention", heart: weights, missing };
    let mut steps = PATTERN_STEPS;
    let scores = search.scores(search.inputs(weights)[0], &mut interior, PATTERN_DEPTH, &mut steps);
    let mut scores = scores.ok_or_else(|| near("the softmax is not of scale q k^T + mask".to_string()))?;
    let product = scores.product;
    let Kind::Matmul { transpose_a: false, transpose_b: keys_as_rows } = *search.kind(product) else {
        return Err(near("the queries are stored transposed".to_string()));
    };
    let mut q = search.inputs(product)[0];
    let mut k = search.inputs(product)[1];
    for operand in [&mut q, &mut k] {
        *operand = search.unscaled(*operand, &mut scores.scale, &mut interior);
    }
    let shape = search.ir.shape(product).clone();
    if search.ir.shape(root).rank() < 2 || shape.rank() != search.ir.shape(root).rank() {
        return Err(near("queries, keys and values differ in rank".to_string()));
    }
    let refused = |_: Refusal| Miss::No;
    if !keys_as_rows {
        k = search.rows_of_keys(k, &mut interior).map_err(refused)?;
    }
    if transpose_b {
        v = search.ir.swap_last(v).map_err(refused)?;
    }
    let batch = search.ir.shape(root)[..shape.rank() - 2].to_vec();
    let mut operands = Vec::new();
    for operand in [q, k, v] {
        operands.push(widened(search.ir, operand, &batch).map_err(refused)?);
    }
    let (mask, operand) = search.mask(&scores.masks, &shape, search.ir.element(q)).map_err(refused)?;
    operands.extend(operand);
    let composite = Composite::Attention { mask, scale: scores.scale, p: 0.0, offset: 0, work: ScoreWork::NONE };
    Ok(Match { what: "attention", heart: weights, kind: Kind::Composite(composite), operands, interior })
}

/// Through `where(isnan(p), 0, p)`: the composite gives zeros for a row without keys.
fn guarded(search: &Search, id: Id, interior: &mut Vec<Id>) -> Id {
    if let (Kind::Select, &[condition, zero, p]) = (search.kind(id), search.inputs(id)) {
        let is_nan =
            matches!(search.kind(condition), Kind::Compare(CompareOp::Ne)) && search.inputs(condition) == [p, p];
        if is_nan && search.ir.scalar(zero) == Some(0.0) {
            interior.extend([id, condition]);
            return p;
        }
    }
    id
}

/// Leading axes repeated to those of the result.
fn widened(ir: &mut Ir, id: Id, batch: &[usize]) -> Result<Id, Refusal> {
    let shape = ir.shape(id).clone();
    let matrix = &shape[shape.rank().saturating_sub(2)..];
    ir.broadcast(id, &Shape::new([batch, matrix].concat()))
}

impl Search<'_> {
    /// Scores from the softmax inwards. `steps` bounds the search where sums branch.
    fn scores(&self, id: Id, interior: &mut Vec<Id>, depth: usize, steps: &mut usize) -> Option<Scores> {
        *steps = steps.checked_sub(1)?;
        let depth = depth.checked_sub(1)?;
        let node = self.ir.node(id);
        if node.constant.is_some() {
            return None;
        }
        let length = interior.len();
        interior.push(id);
        let found = match (&node.kind, &node.inputs[..]) {
            (Kind::Matmul { .. }, _) => Some(Scores { product: id, scale: 1.0, masks: Vec::new() }),
            (Kind::Cast(to), &[x]) if to.is_float() => self.scores(x, interior, depth, steps),
            (Kind::Binary(op @ (BinaryOp::Mul | BinaryOp::Div)), &[a, b]) => {
                let known = match (self.ir.scalar(a), self.ir.scalar(b), op) {
                    (_, Some(value), BinaryOp::Div) => Some((a, 1.0 / value)),
                    (_, Some(value), _) => Some((a, value)),
                    (Some(value), _, BinaryOp::Mul) => Some((b, value)),
                    _ => None,
                };
                // A scale of what is masked already would scale the mask too.
                known.and_then(|(x, factor)| {
                    let inner = self.scores(x, interior, depth, steps).filter(|inner| inner.masks.is_empty())?;
                    Some(Scores { scale: inner.scale * factor, ..inner })
                })
            }
            (Kind::Binary(BinaryOp::Max), &[a, b]) => {
                let lowest = |id: Id| self.ir.scalar(id).is_some_and(|value| value <= -1e30);
                let x = if lowest(b) { Some(a) } else { Some(b).filter(|_| lowest(a)) };
                x.and_then(|x| self.scores(x, interior, depth, steps))
            }
            (Kind::Binary(BinaryOp::Add), &[a, b]) => [(a, b), (b, a)].into_iter().find_map(|(x, mask)| {
                let mut inner = self.scores(x, interior, depth, steps)?;
                inner.masks.push(MaskPart::Added(mask));
                Some(inner)
            }),
            (Kind::Select, &[condition, a, b]) => {
                [(a, b, true), (b, a, false)].into_iter().find_map(|(x, fill, where_true)| {
                    let fill = self.ir.scalar(fill).filter(|&fill| fill <= HIDDEN)?;
                    let mut inner = self.scores(x, interior, depth, steps)?;
                    inner.masks.push(MaskPart::Kept { condition, where_true, fill });
                    Some(inner)
                })
            }
            _ => None,
        };
        if found.is_none() {
            interior.truncate(length);
        }
        found
    }

    /// An operand of the product without the numbers that scale it, where nothing else reads the scaled value.
    fn unscaled(&self, mut id: Id, scale: &mut f64, interior: &mut Vec<Id>) -> Id {
        for _ in 0..PATTERN_DEPTH {
            let single =
                self.readers.get(id.index()).is_some_and(|readers| readers.len() == 1) && !self.is_output[id.index()];
            let node = self.ir.node(id);
            let (Kind::Binary(op), &[a, b], true) = (&node.kind, &node.inputs[..], single) else { break };
            let (inner, factor) = match (op, self.ir.scalar(a), self.ir.scalar(b)) {
                (BinaryOp::Mul, _, Some(value)) => (a, value),
                (BinaryOp::Mul, Some(value), _) => (b, value),
                (BinaryOp::Div, _, Some(value)) => (a, 1.0 / value),
                _ => break,
            };
            if self.ir.shape(inner) != &node.shape {
                break;
            }
            *scale *= factor;
            interior.push(id);
            id = inner;
        }
        id
    }

    /// Keys `[.., n, d]` of their transpose. Exporters also turn them under one leading axis, between two reshapes.
    fn rows_of_keys(&mut self, id: Id, interior: &mut Vec<Id>) -> Result<Id, Refusal> {
        let wanted = self.ir.shape(id).clone();
        let inner = |id: Id| self.inputs(id).first().copied();
        if let (Kind::Reshape(_), Some(turned)) = (self.kind(id), inner(id))
            && let (Kind::Transpose(order), Some(flat)) = (self.kind(turned), inner(turned))
        {
            let source = if let Kind::Reshape(_) = self.kind(flat) { inner(flat).unwrap_or(flat) } else { flat };
            let mut swapped = self.ir.shape(source).to_vec();
            let last = swapped.len().saturating_sub(2);
            swapped[last..].reverse();
            let matrices_stay = self.ir.shape(flat).last_chunk::<2>() == self.ir.shape(source).last_chunk::<2>();
            if order[..] == [0, 2, 1] && swapped[..] == wanted[..] && matrices_stay {
                interior.extend([id, turned, flat]);
                return Ok(source);
            }
        }
        self.ir.swap_last(id)
    }

    /// The kind of mask and its operand.
    fn mask(&mut self, parts: &[MaskPart], shape: &Shape, element: Element) -> Result<(Mask, Option<Id>), Refusal> {
        let mut is_causal = false;
        let (mut causal, mut others) = (Vec::new(), Vec::new());
        for part in parts {
            match self.effect(part, shape) {
                Effect::None => {}
                Effect::Causal => {
                    is_causal = true;
                    causal.push(part);
                }
                Effect::Other => others.push(part),
            }
        }
        if others.is_empty() {
            return Ok((if is_causal { Mask::Causal } else { Mask::Full }, None));
        }
        let mut sum: Option<Id> = None;
        for part in causal.into_iter().chain(others) {
            let added = match *part {
                MaskPart::Added(id) => id,
                MaskPart::Kept { condition, where_true, fill } => {
                    let (seen, hidden) = (self.ir.known_scalar(0.0, element), self.ir.known_scalar(fill, element));
                    let (a, b) = if where_true { (seen, hidden) } else { (hidden, seen) };
                    self.ir.push(Kind::Select, &[condition, a, b])?
                }
            };
            sum = Some(match sum {
                Some(sum) => self.ir.binary(BinaryOp::Add, sum, added)?,
                None => added,
            });
        }
        Ok((Mask::Additive, sum))
    }

    /// Attention that the model has as one operator, with a mask that is known and causal, or hides nothing.
    fn settled(&mut self, root: Id, composite: impl Fn(Mask) -> Composite) -> Result<Match, Miss> {
        let &[q, k, v, mask] = self.inputs(root) else { return Err(Miss::No) };
        let rows = self.ir.shape(q).rank() - 2;
        let shape = Shape::from([self.ir.shape(q)[rows], self.ir.shape(k)[rows]]);
        let mask = match self.effect(&MaskPart::Added(mask), &shape) {
            Effect::None => Mask::Full,
            Effect::Causal => Mask::Causal,
            Effect::Other => return Err(Miss::No),
        };
        let kind = Kind::Composite(composite(mask));
        Ok(Match { what: "attention", heart: root, kind, operands: vec![q, k, v], interior: Vec::new() })
    }

    /// What a known mask does. Layers share their mask, so the answer is kept.
    fn effect(&mut self, part: &MaskPart, shape: &Shape) -> Effect {
        let key = match part {
            MaskPart::Added(id) => (*id, None),
            MaskPart::Kept { condition, where_true, .. } => (*condition, Some(*where_true)),
        };
        let spans = self.ir.shape(key.0).last_chunk::<2>() == shape.last_chunk::<2>();
        match self.effects.get(&key) {
            Some(Effect::Causal) if !spans => Effect::Other,
            Some(&effect) => effect,
            None => {
                let effect = self.computed_effect(part);
                self.effects.insert(key, effect);
                if effect == Effect::Causal && !spans { Effect::Other } else { effect }
            }
        }
    }

    fn computed_effect(&self, part: &MaskPart) -> Effect {
        let (id, seen): (Id, &dyn Fn(f64) -> bool) = match part {
            MaskPart::Added(id) => (*id, &|value| value == 0.0),
            MaskPart::Kept { condition, where_true: true, .. } => (*condition, &|value| value != 0.0),
            MaskPart::Kept { condition, where_true: false, .. } => (*condition, &|value| value == 0.0),
        };
        let Some(constant) = self.ir.constant(id) else { return Effect::Other };
        if constant.uniform().is_some_and(seen) {
            return Effect::None;
        }
        let hides = |value: f64| seen(value) || value <= HIDDEN || !matches!(part, MaskPart::Added(_));
        match constant.distinct().all(hides) && constant.is_causal(seen) {
            true => Effect::Causal,
            false => Effect::Other,
        }
    }
}

/// What a mask does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// Hides nothing.
    None,
    /// Hides what lies behind the causal border.
    Causal,
    /// Anything else.
    Other,
}
