//! Attention on the CPU: alone, with row work on its result, and its gradient.

mod backward;
mod block;
mod forward;
mod rows;
mod scores;

use deuteron::{GroupKind, Session};

/// Kernels of a kind.
fn count(session: &Session, kind: GroupKind) -> usize {
    session.plan().groups.iter().filter(|group| group.kind == kind).count()
}

/// Queries, keys and values of these sizes, and what is made of them.
fn sized([batch, heads, queries, keys, width]: [usize; 5], rest: &str) -> String {
    format!(
        "q = input float[{batch},{heads},{queries},{width}]
k = input float[{batch},{heads},{keys},{width}] ; v = input float[{batch},{heads},{keys},{width}]
{rest}"
    )
}
