//! Decides which operations share a kernel, and why.
//!
//! A [`Plan`] is a list of [`Group`]s, each one kernel, in the order in which they run, with the bytes and the time of each, and the
//! reason for every pair that was kept apart. The same graph and machine give the same plan. The crate knows no CUDA and no SIMD.
//!
//! ```
//! use deuteron_graph::Graph;
//! use deuteron_plan::{Machine, Strategy, Target, plan};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph: Graph = "x = input bf16[8192,768] ; w = weight bf16[768] ; b = weight bf16[768]
//!                     n = layer_norm x w b ; y = gelu n ; out y".parse()?;
//! let h200 = Machine::profile("h200")?;
//! let target = Target::conceivable(&h200); // as if every structure had a kernel
//! let unfused = plan(&graph, target, Strategy::Unfused, &[])?;
//! let fused = plan(&graph, target, Strategy::Fused, &[])?;
//! assert_eq!((unfused.groups.len(), fused.groups.len()), (2, 1));
//! assert!(fused.bytes().0 < unfused.bytes().0 && fused.time() < unfused.time());
//! assert!(fused.explain().contains("layer_norm + gelu"));
//! # Ok(())
//! # }
//! ```
//!
//! Each module imports only those before it: vocabulary (`units` to `reason`), what a kernel costs (`draft` to
//! `cost`), which groups are legal, and their structure (`rules`), groups and the search for the best of them (`grouping`, `search`),
//! plans, and their assessment (`assess`, `recompute`). `tests/layers.rs` has the order.
#![forbid(unsafe_code)]

mod assess;
mod between;
mod bits;
mod calls;
mod catalog;
mod chain;
mod cost;
mod draft;
mod error;
mod group;
mod grouping;
mod kind;
mod layout;
mod machine;
mod memory;
mod min_cut;
mod order;
mod plan;
mod rates;
mod reason;
mod recompute;
mod rules;
mod score;
mod search;
mod space;
mod steps;
mod strategy;
mod target;
mod traffic;
mod units;
mod work;

pub use assess::{Assessment, AtomSheet, Fusion, FusionKind, PinPrice, Question, Within, assess, atoms};
pub use catalog::{Catalog, Conceivable, Primitives, primitive_work};
pub use chain::{
    AttentionGradientLink, AttentionLink, AttentionRequest, Chain, CrossEntropyGradientLink, CrossEntropyLink, Link,
    Reach, Side, StoredGradient, Structure,
};
pub use cost::{Bound, Cost, Resources, cost};
pub use draft::Draft;
pub use error::PlanError;
pub use group::Group;
pub use kind::GroupKind;
pub use layout::{Layout, Placed, Placement, RowAccess, place};
pub use machine::{Basis, Machine, MachineError, MachineKind, Number, Quantity};
pub use memory::{Arena, Slot};
pub use plan::{Plan, Refusal, plan, plan_pinned};
pub use rates::{matrix_rate, ridge_points};
pub use reason::{PAGES, Page, Reason, page};
pub use recompute::{Passed, Recompute, Saving, store_or_recompute, stored_when_fused};
pub use score::{Criterion, Evidence, NAMES as CRITERIA, Score, Scoring, ScoringError, Thresholds, Weights, score};
pub use search::{Pin, Search};
pub use space::{Space, finished_sum, matmul_size, node_space};
pub use steps::{Step, epilogue_steps};
pub use strategy::Strategy;
pub use target::Target;
pub use traffic::{ReadValue, Traffic, reads, traffic};
pub use units::{Bytes, Rate, Seconds};
pub use work::{Class, LANES, Work};
