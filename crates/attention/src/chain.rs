//! A chain that starts with attention, as input of kernels.
//!
//! The planner found the chain and its operands; here their layouts and types are checked. Scores and probabilities stay in `f32` and
//! inside: a group that returns them is not supported, unless the call computes only probabilities.

use deuteron_plan::{AttentionLink, Draft, Link};

use super::backward::{self, GradientFit};
use super::block::{self, BlockFit};
use super::fit::{AttentionFit, fit_link};
use super::kernel::AttentionResult;
use super::rows::{self, RowsFit};

/// A chain that starts with attention, as input of kernels.
#[derive(Debug, Clone, PartialEq)]
pub enum Fit<'a> {
    /// attention or its probabilities
    Alone(AttentionFit),
    /// attention and row work on its result
    Rows(RowsFit<'a>),
    /// attention, the projection of its result and row work on that
    Block(Box<BlockFit<'a>>),
    /// the gradient of attention
    Gradient(Box<GradientFit>),
}

/// The attention of a draft, if a kernel supports the layout of its operands.
pub fn fit<'a>(draft: &Draft<'a>) -> Option<Fit<'a>> {
    let chain = draft.structure.chain()?;
    match chain.links.as_slice() {
        [Link::Attention(link)] if chain.epilogue.nodes.is_empty() => {
            alone(draft, link, AttentionResult::Values).map(Fit::Alone)
        }
        [Link::Attention(link)] => rows::fit(draft, link, &chain.epilogue).map(Fit::Rows),
        [Link::Attention(link), Link::Matmul { nodes }] => {
            block::fit(draft, link, nodes, &chain.epilogue).map(|fit| Fit::Block(Box::new(fit)))
        }
        [Link::AttentionScores(link)] => alone(draft, link, AttentionResult::Probabilities).map(Fit::Alone),
        [Link::AttentionGradient(Some(link))] => backward::fit(draft, link).map(Box::new).map(Fit::Gradient),
        _ => None,
    }
}

/// Attention whose result is all that is stored.
fn alone(draft: &Draft, link: &AttentionLink, wanted: AttentionResult) -> Option<AttentionFit> {
    fit_link(draft, link, wanted).filter(|fit| draft.outputs == [fit.result])
}
