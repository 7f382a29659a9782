//! What shares a kernel, and why.
//!
//! A [`Plan`] is a list of [`Group`]s, each one kernel, in the order they run, with what each moves, and for every pair
//! that was kept apart the reason. Same graph and machine in, same plan out. It knows no CUDA and no SIMD.
#![forbid(unsafe_code)]

mod choose;
mod cost;
mod layout;
mod legal;
mod machine;
mod memory;
mod plan;

pub use cost::traffic::{Traffic, traffic};
pub use cost::units::Bytes;
pub use layout::{Layout, Placed, Placement, RowAccess, place};
pub use legal::{Reason, Space, node_space};
pub use machine::Machine;
pub use memory::{Arena, Slot};
pub use plan::{Group, GroupKind, Plan, PlanError, Refusal, Strategy, plan};
