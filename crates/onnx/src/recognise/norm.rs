//! Recognises decomposed layer norm and RMS norm.

use deuteron_graph::{BinaryOp, Composite, Shape, UnaryOp};

use super::{Match, Miss, Search, or_no};
use crate::constant::Constant;
use crate::element::as_written;
use crate::ir::{Id, Kind, Reduction};

/// `(x - mean) / sqrt(var + eps) [* w] [+ b]` or `x / sqrt(mean x^2 + eps) [* w]`.
pub(super) fn norm(search: &mut Search, root: Id) -> Result<Match, Miss> {
    let cols = search.ir.shape(root).cols();
    let mut interior = Vec::new();
    let (scaled, b) = affine(search, root, BinaryOp::Add, cols, &mut interior);
    let (normed, w) = affine(search, scaled, BinaryOp::Mul, cols, &mut interior);
    let normed = search.through_casts(normed, &mut interior);
    let heart = normed;
    let (top, radicand) = or_no(quotient(search, normed, &mut interior))?;
    interior.push(normed);
    let (variance, eps) = shift(search, radicand, &mut interior);
    let (op, squared, axes) = or_no(search.reduction(variance, &mut interior))?;
    let last = search.last_axis(squared);
    let centring = centring(search, top, &mut interior);
    let what = if centring.is_some() { "layer_norm" } else { "rms_norm" };
    let near = |missing: String| Err(Miss::Near { what, heart, missing });
    let (base, exponent) = or_no(power(search, squared))?;
    interior.push(squared);
    if op != Reduction::Mean {
        return near(format!("the squares are reduced by {op:?}, expected their mean"));
    }
    if exponent != 2.0 {
        return near(format!("the `Pow` exponent is {exponent}, expected 2"));
    }
    if axes != [last] {
        return near(format!("the variance is taken over axes {axes:?}, the last axis ({last}) is needed"));
    }
    let Some(eps) = eps.filter(|&eps| eps >= 0.0) else {
        return near("what is added to the variance is not a known number that is not negative".to_string());
    };
    if !search.same(base, top) {
        return near("the value that is squared is not the one that is divided".to_string());
    }
    interior.push(base);
    let x = match &centring {
        None => top,
        Some((x, mean_axes)) => {
            if *mean_axes != [last] {
                return near(format!("the mean is taken over axes {mean_axes:?}, the last axis ({last}) is needed"));
            }
            interior.push(top);
            *x
        }
    };
    // The composite widens by itself: it takes what was cast, if its result is of that type.
    let mut casts = Vec::new();
    let narrow = search.through_casts(x, &mut casts);
    let x = if narrow != x && search.ir.element(narrow) == search.ir.element(root) {
        interior.extend(casts);
        narrow
    } else {
        x
    };
    if centring.is_none() && b.is_some() {
        // An RMS norm has no bias: the sum is left to others.
        return Err(Miss::No);
    }
    if cols != search.ir.shape(x).cols() {
        return Err(Miss::No);
    }
    let w = weight(search, w, cols, x, 1.0)?;
    let (composite, operands) = match centring {
        Some(_) => (Composite::LayerNorm { eps }, vec![x, w, weight(search, b, cols, x, 0.0)?]),
        None => (Composite::RmsNorm { eps }, vec![x, w]),
    };
    Ok(Match { what, heart, kind: Kind::Composite(composite), operands, interior })
}

/// A value and the weight that is added to it or multiplies it, if there is one.
fn affine(search: &Search, id: Id, op: BinaryOp, cols: usize, interior: &mut Vec<Id>) -> (Id, Option<Id>) {
    let orders = search.orders(id, op);
    match orders.into_iter().find(|&(x, weight)| search.is_per_column(weight, cols) && !search.ir.node(x).is_fixed) {
        Some((x, weight)) => {
            interior.push(id);
            (search.through_casts(x, interior), Some(weight))
        }
        None => (id, None),
    }
}

fn weight(search: &mut Search, weight: Option<Id>, cols: usize, like: Id, value: f64) -> Result<Id, Miss> {
    match weight {
        Some(weight) => search.ir.reshape(weight, vec![cols]).map_err(|_| Miss::No),
        None => {
            let element = search.ir.element(like);
            Ok(search.ir.known(Constant::filled(Shape::from([cols]), value), element))
        }
    }
}

/// What is divided, and what it is divided by the root of.
fn quotient(search: &Search, id: Id, interior: &mut Vec<Id>) -> Option<(Id, Id)> {
    let root_of = |id: Id| match search.kind(id) {
        Kind::Unary(UnaryOp::Sqrt) => Some(search.inputs(id)[0]),
        _ => None,
    };
    if let Some((x, root)) = search.binary(id, BinaryOp::Div) {
        let radicand = root_of(root)?;
        interior.push(root);
        return Some((x, radicand));
    }
    for (x, inverse) in search.orders(id, BinaryOp::Mul) {
        let root = match search.kind(inverse) {
            Kind::Unary(UnaryOp::Rsqrt) => {
                interior.push(inverse);
                return Some((x, search.inputs(inverse)[0]));
            }
            Kind::Unary(UnaryOp::Reciprocal) => search.inputs(inverse)[0],
            Kind::Binary(BinaryOp::Div) if search.ir.scalar(search.inputs(inverse)[0]) == Some(1.0) => {
                search.inputs(inverse)[1]
            }
            _ => continue,
        };
        if let Some(radicand) = root_of(root) {
            interior.extend([inverse, root]);
            return Some((x, radicand));
        }
    }
    None
}

/// The variance and what is added to it; the number is `None` if it is not known.
fn shift(search: &Search, id: Id, interior: &mut Vec<Id>) -> (Id, Option<f64>) {
    let orders = search.orders(id, BinaryOp::Add);
    if orders.is_empty() {
        return (id, Some(0.0));
    }
    interior.push(id);
    let known = orders.iter().find_map(|&(variance, eps)| Some((variance, as_written(search.ir.scalar(eps)?))));
    let reduced = orders.iter().find(|&&(variance, _)| search.reduction(variance, &mut Vec::new()).is_some());
    known.map_or((reduced.unwrap_or(&orders[0]).0, None), |(variance, eps)| (variance, Some(eps)))
}

/// The operand of `x - mean x`, and the axes of the mean.
fn centring(search: &Search, id: Id, interior: &mut Vec<Id>) -> Option<(Id, Vec<usize>)> {
    let (x, mean) = search.binary(id, BinaryOp::Sub)?;
    let mut inner = Vec::new();
    let (op, of, axes) = search.reduction(mean, &mut inner)?;
    if op != Reduction::Mean || !search.same(of, x) {
        return None;
    }
    interior.extend(inner);
    Some((x, axes))
}

/// The base and exponent of a power.
fn power(search: &Search, id: Id) -> Option<(Id, f64)> {
    match (search.kind(id), search.inputs(id)) {
        (Kind::Power(exponent), &[base]) => Some((base, *exponent)),
        (Kind::Binary(BinaryOp::Mul), &[a, b]) if search.same(a, b) => Some((a, 2.0)),
        _ => None,
    }
}
