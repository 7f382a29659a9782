//! Strategies: how much is fused.

use std::str::FromStr;

use deuteron_graph::named;

use crate::error::PlanError;

named! {
    /// How much is fused. All strategies use one mechanism, and differ in what may share a kernel.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Strategy {
        /// One kernel per primitive.
        Naive = "naive",
        /// One kernel per composite, attention as scores, mask, softmax, product.
        Eager = "eager",
        /// One kernel per builder call, attention by online softmax where that is offered.
        Unfused = "unfused",
        /// Neighbours merged in order wherever it is legal.
        Greedy = "greedy",
        /// The cheapest plan.
        Fused = "fused",
    }
}

impl FromStr for Strategy {
    type Err = PlanError;
    fn from_str(text: &str) -> Result<Self, PlanError> {
        Strategy::find(text).ok_or_else(|| PlanError::UnknownStrategy(text.to_string()))
    }
}
