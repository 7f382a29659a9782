//! Recognises linear layers: a matmul with a weight, and its bias.

use deuteron_graph::{BinaryOp, Composite};

use super::{Match, Miss, Search, or_no};
use crate::ir::{Id, Kind};

/// `x w + b`, or `x w` with a weight of rank 2.
pub(super) fn linear(search: &mut Search, root: Id) -> Result<Match, Miss> {
    for (product, bias) in search.orders(root, BinaryOp::Add) {
        let Some((x, w, transposed)) = product_of(search, product) else { continue };
        if !search.ir.node(bias).is_fixed {
            continue;
        }
        let cols = search.ir.shape(product).cols();
        if !search.is_per_column(bias, cols) {
            let missing = format!("the bias has shape {}, expected [{cols}]", search.ir.shape(bias));
            return Err(Miss::Near { what: "linear", heart: product, missing });
        }
        let bias = search.ir.reshape(bias, vec![cols]).map_err(|_| Miss::No)?;
        let kind = Kind::Composite(Composite::Linear { transposed });
        return Ok(Match { what: "linear", heart: product, kind, operands: vec![x, w, bias], interior: vec![product] });
    }
    let (x, w, transposed) = or_no(product_of(search, root))?;
    let kind = Kind::Composite(Composite::Linear { transposed });
    Ok(Match { what: "linear", heart: root, kind, operands: vec![x, w], interior: Vec::new() })
}

/// Operand, weight, and whether the weight is stored `[out, in]`.
fn product_of(search: &Search, id: Id) -> Option<(Id, Id, bool)> {
    let node = search.ir.node(id);
    let (Kind::Matmul { transpose_a: false, transpose_b }, &[x, w]) = (&node.kind, &node.inputs[..]) else {
        return None;
    };
    if !search.ir.node(w).is_fixed || search.ir.node(x).is_fixed || search.ir.shape(w).rank() != 2 {
        return None;
    }
    // A weight that is only turned is read as it is stored.
    match search.kind(w) {
        Kind::Transpose(_) => Some((x, search.inputs(w)[0], !transpose_b)),
        _ => Some((x, w, *transpose_b)),
    }
}
