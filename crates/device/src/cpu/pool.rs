//! The threads that run the tasks of a kernel: our own, or those of an OpenMP runtime that another library of the process uses.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use deuteron_codegen::cpu::task::{Panicked, Workers};

use crate::cpu::openmp::Runtime;
use crate::cpu::threads::{Tasks, Threads, Work};

/// A number of workers. The caller of [`Workers::run`] is worker 0.
pub struct Pool {
    threads: usize,
    /// Number of participating workers, from 1 to `threads`.
    limit: AtomicUsize,
    openmp: OnceLock<(Runtime, Sharing)>,
    /// Our own threads, spawned by the first call that needs them. A call holds the lock until it ends: calls run one at a time.
    own: Mutex<Option<Threads>>,
}

/// What a pool uses of an OpenMP runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// its threads and its thread limit
    Threads,
    /// only its thread limit: in a forked process its threads do not exist
    Count,
}

impl Pool {
    /// `threads` workers, the caller among them; at least one.
    pub fn new(threads: usize) -> Pool {
        let threads = threads.max(1);
        Pool { threads, limit: AtomicUsize::new(threads), openmp: OnceLock::new(), own: Mutex::new(None) }
    }

    /// Limits the number of participating workers, to at least one and at most all.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit.clamp(1, self.threads), Ordering::Relaxed);
    }

    /// How many workers take part in a call of this thread.
    pub fn active(&self) -> usize {
        let limit = self.limit.load(Ordering::Relaxed);
        self.openmp.get().map_or(limit, |(runtime, _)| limit.min(runtime.max_threads()))
    }

    /// Follows an OpenMP runtime from now on. Only the first call has an effect.
    pub fn follow(&self, runtime: Runtime, sharing: Sharing) {
        self.openmp.get_or_init(|| (runtime, sharing));
    }
}

impl Workers for Pool {
    /// All workers regardless of the limit: workspaces are sized for them.
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, tasks: usize, work: Work<'_>) -> Result<(), Panicked> {
        // The data behind the lock is valid whatever a panicking holder did.
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        let active = self.active();
        if tasks <= 1 || active == 1 {
            let alone = Tasks::new(tasks);
            alone.take(0, work);
            return alone.outcome();
        }
        if let Some((runtime, Sharing::Threads)) = self.openmp.get() {
            return runtime.run(active.min(tasks), tasks, work);
        }
        if own.as_ref().is_none_or(|threads| threads.requested() != active) {
            // The old threads end before the new ones start.
            *own = None;
        }
        own.get_or_insert_with(|| Threads::spawn(active)).run(tasks, work)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_task_runs_once_however_many_threads() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|worker, task| {
                    assert!(worker < threads);
                    counts[task].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                assert!(
                    counts.iter().all(|count| count.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {tasks} tasks"
                );
            }
        }
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_goes_on() {
        let pool = Pool::new(3);
        let outcome = pool.run(100, &|_, task| {
            if task == 50 {
                std::panic::resume_unwind(Box::new("planned"));
            }
        });
        assert_eq!(outcome, Err(Panicked));
        assert_eq!(pool.run(100, &|_, _| {}), Ok(()));
    }

    #[test]
    fn a_limit_is_kept_and_lifted() {
        let pool = Pool::new(4);
        for (limit, active) in [(2, 2), (1, 1), (0, 1), (3, 3), (9, 4)] {
            pool.set_limit(limit);
            assert_eq!((pool.active(), pool.threads()), (active, 4));
            let seen = Mutex::new(HashSet::new());
            pool.run(64, &|worker, _| {
                seen.lock().unwrap().insert(worker);
            })
            .unwrap();
            assert!(seen.into_inner().unwrap().iter().all(|&worker| worker < active), "limit {limit}");
        }
    }

    #[test]
    fn workers_that_sleep_are_woken() {
        let pool = Pool::new(2);
        for _ in 0..20 {
            let done = AtomicUsize::new(0);
            pool.run(4, &|_, _| {
                done.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert_eq!(done.load(Ordering::Relaxed), 4);
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }
}
