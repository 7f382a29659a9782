//! Recognises softmax written as exponentials over their sum.

use deuteron_graph::{BinaryOp, UnaryOp};

use super::{Match, Miss, Search, or_no};
use crate::ir::{Id, Kind, Reduction};

/// `e / sum e`, `e = exp(x - max x)` or `exp x`.
pub(super) fn softmax(search: &mut Search, root: Id) -> Result<Match, Miss> {
    let mut interior = Vec::new();
    let (exponentials, sum) = or_no(quotient(search, root, &mut interior))?;
    let is_exponential = matches!(search.kind(exponentials), Kind::Unary(UnaryOp::Exp));
    let (op, summed, axes) = or_no(search.reduction(sum, &mut interior))?;
    if !is_exponential || op != Reduction::Sum || !search.same(summed, exponentials) {
        return Err(Miss::No);
    }
    interior.extend([exponentials, summed]);
    let shifted = search.inputs(exponentials)[0];
    let last = search.last_axis(root);
    let near = |missing: String| Err(Miss::Near { what: "softmax", heart: root, missing });
    if axes != [last] {
        return near(format!("the sum is taken over axes {axes:?}, the last axis ({last}) is needed"));
    }
    let mut x = shifted;
    if let Some((from, max)) = search.binary(shifted, BinaryOp::Sub) {
        let mut inner = Vec::new();
        if let Some((Reduction::Max, of, axes)) = search.reduction(max, &mut inner) {
            if axes != [last] {
                return near(format!("the maximum is taken over axes {axes:?}, the last axis ({last}) is needed"));
            }
            if search.same(of, from) {
                interior.push(shifted);
                interior.extend(inner);
                x = from;
            }
        }
    }
    Ok(Match { what: "softmax", heart: root, kind: Kind::Softmax, operands: vec![x], interior })
}

fn quotient(search: &Search, id: Id, interior: &mut Vec<Id>) -> Option<(Id, Id)> {
    if let Some(both) = search.binary(id, BinaryOp::Div) {
        return Some(both);
    }
    let orders = search.orders(id, BinaryOp::Mul);
    let (x, inverse) =
        orders.into_iter().find(|&(_, inverse)| matches!(search.kind(inverse), Kind::Unary(UnaryOp::Reciprocal)))?;
    interior.push(inverse);
    Some((x, search.inputs(inverse)[0]))
}
