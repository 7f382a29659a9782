//! The inputs of an assessment.

use deuteron_graph::Graph;

use crate::catalog::Catalog;
use crate::score::Scoring;
use crate::search::Pin;
use crate::target::Target;

/// What to assess.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    /// the graph
    pub graph: &'a Graph,
    /// the graph that the baselines run: the same, or the one before values were recomputed
    pub baseline: &'a Graph,
    /// machine and code generation the chosen plan is for
    pub target: Target<'a>,
    /// what can be generated here; `None` if nothing can be generated for this machine
    pub realizable: Option<&'a dyn Catalog>,
    /// fusions forced and forbidden
    pub pins: &'a [Pin],
    /// how fusions are scored
    pub scoring: Scoring,
}
