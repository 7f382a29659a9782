//! Strategies: how much is merged.

use std::fmt;
use std::str::FromStr;

use crate::error::PlanError;

/// How much is merged. All come from one mechanism; they differ in what may share a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// One kernel per primitive.
    Naive,
    /// One kernel per composite, attention as scores, mask, softmax, product.
    Eager,
    /// One kernel per builder call, attention by online softmax where that is offered.
    Unfused,
    /// Neighbours merged in order wherever it is legal.
    Greedy,
    /// The cheapest plan.
    Fused,
}

impl Strategy {
    /// All of them, from least to most fused.
    pub const ALL: [Strategy; 5] =
        [Strategy::Naive, Strategy::Eager, Strategy::Unfused, Strategy::Greedy, Strategy::Fused];

    /// The word in reports and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Naive => "naive",
            Strategy::Eager => "eager",
            Strategy::Unfused => "unfused",
            Strategy::Greedy => "greedy",
            Strategy::Fused => "fused",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Strategy {
    type Err = PlanError;
    fn from_str(text: &str) -> Result<Self, PlanError> {
        let found = Strategy::ALL.into_iter().find(|strategy| strategy.name() == text);
        found.ok_or_else(|| PlanError::UnknownStrategy(text.to_string()))
    }
}
