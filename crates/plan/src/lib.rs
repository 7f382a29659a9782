//! What shares a kernel, and why.
//!
//! A [`Plan`] is a list of [`Group`]s, each one kernel, in the order they run, with what each moves and takes, and for
//! every pair that was kept apart the reason. Same graph and machine in, same plan out. It knows no CUDA and no SIMD.
#![forbid(unsafe_code)]

mod assess;
mod between;
mod bits;
mod catalog;
mod cost;
mod grouping;
mod layout;
mod legal;
mod machine;
mod memory;
mod min_cut;
mod plan;
mod reason;
mod recompute;
mod score;
mod search;

pub use assess::{Assessment, AtomSheet, Fusion, FusionKind, PinPrice, Question, assess, atoms};
pub use catalog::{Catalog, Class, Conceivable, Draft, LANES, Primitives, Work, primitive_work, product_size};
pub use cost::traffic::{ReadValue, Traffic, reads, traffic};
pub use cost::units::{Bytes, Rate, Seconds};
pub use cost::{Bound, Cost, Resources, cost, matrix_rate, ridge_points};
pub use layout::{Layout, Placed, Placement, RowAccess, place};
pub use legal::{AttentionForm, Form, MatmulForm, Reach, Space, finished_sum, node_space};
pub use machine::{Machine, MachineError, MachineKind, Number, Quantity};
pub use memory::{Arena, Slot};
pub use plan::{Group, GroupKind, Plan, PlanError, Refusal, Strategy, Target, plan, plan_pinned};
pub use reason::{PAGES, Page, Reason, page};
pub use recompute::{Passed, Recompute, Saving, store_or_recompute, stored_when_fused};
pub use score::{Evidence, FUSE_FROM, Score, WEIGHTS, score};
pub use search::{Pin, Search};
