//! Loom's locks and atomics, under the names of `crates/device/src/cpu/sync.rs`.

pub(super) use loom::hint::spin_loop;
pub(super) use loom::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
pub(super) use loom::thread;

/// Each further iteration multiplies the number of interleavings.
pub(super) const SPINS: usize = 1;
