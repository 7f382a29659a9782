//! The operation whose name is nearest to an unknown word.

use crate::composite::CompositeKind;
use crate::op::{BinaryOp, CompareOp, ReduceOp, UnaryOp};

/// Operations that are neither composites nor elementwise.
const OTHERS: [&str; 17] = [
    "append",
    "broadcast",
    "cast",
    "column_sum",
    "concat",
    "const",
    "gather",
    "iota",
    "matmul",
    "opaque",
    "random",
    "reshape",
    "scatter_add",
    "select",
    "slice",
    "stop_gradient",
    "transpose",
];

/// The operation whose name is nearest to a word, if it shares more with it than not.
pub(super) fn nearest_operation(word: &str) -> Option<&'static str> {
    let elementwise = UnaryOp::ALL.iter().map(|op| op.name()).chain(BinaryOp::ALL.iter().map(|op| op.name()));
    let compared = CompareOp::ALL.iter().map(|op| op.name()).chain(ReduceOp::ALL.iter().map(|op| op.name()));
    let composites = CompositeKind::ALL.iter().map(|kind| kind.name());
    let all = elementwise.chain(compared).chain(composites).chain(OTHERS);
    let word = word.to_ascii_lowercase();
    let (changes, name) = all.map(|name| (changes(&word, name), name)).min()?;
    (2 * changes <= name.len()).then_some(name)
}

/// Letters to insert, remove or replace between two words.
fn changes(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (line, letter) in one.bytes().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], line + 1);
        for (column, wanted) in other.bytes().enumerate() {
            let above = row[column + 1];
            row[column + 1] = (corner + usize::from(letter != wanted)).min(above + 1).min(row[column] + 1);
            corner = above;
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_with_a_letter_too_many_or_too_few_finds_its_operation() {
        for (word, name) in [
            ("geluu", "gelu"),
            ("layernorm", "layer_norm"),
            ("LayerNorm", "layer_norm"),
            ("soft_max", "softmax"),
            ("matmull", "matmul"),
            ("transposed", "transpose"),
            ("ad", "add"),
        ] {
            assert_eq!(nearest_operation(word), Some(name), "{word}");
        }
        assert_eq!(nearest_operation("convolution_transpose_3d"), None);
        assert_eq!(nearest_operation(""), None);
    }
}
