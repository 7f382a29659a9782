//! Locks and atomics of [`super::threads`]. The package in `loom/` compiles that file with Loom's instead, which explores every interleaving.

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
pub(super) use std::thread;

/// Iterations of the spin loop before a worker sleeps: enough to bridge the gap between two kernels of a plan.
pub(super) const SPINS: usize = 2_000;
