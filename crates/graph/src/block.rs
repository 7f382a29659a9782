//! Blocks: calls that are neither one primitive nor a whole composite.

use std::fmt;

use crate::composite::CompositeKind;

/// Nodes grouped by a pass or in a text. Its text is the name of the block in the text form and in
/// reports, and [`Block::named`] reads it back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    /// A plain name. As an origin: a primitive, an opaque operation or such a block.
    Named(String),
    /// The remaining part of a composite. As an origin: the composite.
    Composite(CompositeKind),
    /// The gradient of a call: `grad(gelu)`.
    Gradient(Box<Block>),
    /// The sum of all gradients of an input: `grad_sum`.
    GradientSum,
    /// Values of a call that are recomputed for a gradient: `recompute(gelu)`.
    Recompute(Box<Block>),
}

const GRADIENT: &str = "grad(";
const GRADIENT_SUM: &str = "grad_sum";
const RECOMPUTE: &str = "recompute(";

/// Maximum nesting of blocks in a name, so that no text overflows the stack.
const DEEPEST: usize = 32;

impl Block {
    /// The block of a name, which is what the block prints.
    pub fn named(name: &str) -> Block {
        Block::nested(name, DEEPEST)
    }

    fn nested(name: &str, depth: usize) -> Block {
        let inside = |prefix: &str| {
            let inside = name.strip_prefix(prefix)?.strip_suffix(')').filter(|_| depth > 0)?;
            Some(Box::new(Block::nested(inside, depth - 1)))
        };
        if name == GRADIENT_SUM {
            return Block::GradientSum;
        }
        let gradient = inside(GRADIENT).map(Block::Gradient);
        let composite = || CompositeKind::find(name).map(Block::Composite);
        let pass = gradient.or_else(|| inside(RECOMPUTE).map(Block::Recompute));
        pass.or_else(composite).unwrap_or_else(|| Block::Named(name.to_string()))
    }

    /// The composite it is a part of.
    pub fn composite(&self) -> Option<CompositeKind> {
        match self {
            Block::Composite(kind) => Some(*kind),
            Block::Named(_) | Block::Gradient(_) | Block::GradientSum | Block::Recompute(_) => None,
        }
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Block::Named(name) => f.write_str(name),
            Block::Composite(kind) => f.write_str(kind.name()),
            Block::Gradient(of) => write!(f, "{GRADIENT}{of})"),
            Block::GradientSum => f.write_str(GRADIENT_SUM),
            Block::Recompute(of) => write!(f, "{RECOMPUTE}{of})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_what_prints_it() {
        let attention = || Box::new(Block::Composite(CompositeKind::Attention));
        let twice = Block::Gradient(Box::new(Block::Recompute(attention())));
        for (name, block) in [
            ("attention", *attention()),
            ("grad(attention)", Block::Gradient(attention())),
            ("recompute(attention)", Block::Recompute(attention())),
            ("grad(recompute(attention))", twice),
            ("grad(matmul)", Block::Gradient(Box::new(Block::Named("matmul".into())))),
            ("grad_sum", Block::GradientSum),
            ("grad", Block::Named("grad".into())),
            ("grad(x)y", Block::Named("grad(x)y".into())),
        ] {
            assert_eq!(Block::named(name), block);
            assert_eq!(block.to_string(), name);
        }
    }

    #[test]
    fn no_name_is_too_deep() {
        let name = format!("{}x{}", GRADIENT.repeat(1 << 20), ")".repeat(1 << 20));
        assert_eq!(Block::named(&name).to_string(), name);
    }
}
