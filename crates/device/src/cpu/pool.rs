//! Threads of our own: one call forks the work over all of them and joins. Nothing is allocated in a call.
//!
//! Workers spin for a moment after a call, since the next kernel of a plan follows at once, then sleep.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use deuteron_codegen::cpu::task::{Panicked, Workers};

/// Turns of the spin loop before a worker sleeps: enough to bridge the gap between two kernels of a plan.
const SPINS: usize = 2_000;

/// What a worker runs: (worker, task).
type Work<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// A fixed set of threads. The caller of [`Workers::run`] is worker 0.
pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// One call at a time.
    turn: Mutex<()>,
}

struct Shared {
    /// Counts calls; a worker wakes when it changes.
    call: AtomicUsize,
    /// The work of the call at hand.
    work: Mutex<Option<Work<'static>>>,
    tasks: AtomicUsize,
    next: AtomicUsize,
    /// Workers that have not finished the call at hand.
    busy: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleeping: Mutex<usize>,
    wake: Condvar,
}

impl Pool {
    /// `threads` workers, the caller among them; at least one.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            call: AtomicUsize::new(0),
            work: Mutex::new(None),
            tasks: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleeping: Mutex::new(0),
            wake: Condvar::new(),
        });
        // A thread that the system refuses is one worker less; the work is shared by those there are.
        let handles = (1..threads.max(1))
            .map_while(|worker| {
                let shared = shared.clone();
                let name = format!("deuteron-{worker}");
                std::thread::Builder::new().name(name).spawn(move || shared.serve(worker)).ok()
            })
            .collect();
        Pool { shared, handles, turn: Mutex::new(()) }
    }
}

impl Workers for Pool {
    /// The caller is one of them.
    fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    fn run(&self, tasks: usize, work: Work<'_>) -> Result<(), Panicked> {
        let _turn = lock(&self.turn);
        let shared = &*self.shared;
        shared.panicked.store(false, Ordering::Relaxed);
        if tasks <= 1 || self.handles.is_empty() {
            shared.tasks.store(tasks, Ordering::Relaxed);
            shared.next.store(0, Ordering::Relaxed);
            shared.take_tasks(0, work);
        } else {
            // SAFETY: the reference is used only between here and the moment `busy` is back at zero, which this call
            // waits for before it returns; so it never outlives the borrow.
            let erased = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
            *lock(&shared.work) = Some(erased);
            shared.tasks.store(tasks, Ordering::Relaxed);
            shared.next.store(0, Ordering::Relaxed);
            shared.busy.store(self.handles.len(), Ordering::Relaxed);
            shared.call.fetch_add(1, Ordering::Release);
            if *lock(&shared.sleeping) > 0 {
                shared.wake.notify_all();
            }
            shared.take_tasks(0, work);
            let mut turns = 0;
            while shared.busy.load(Ordering::Acquire) > 0 {
                turns += 1;
                if turns < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
            }
            *lock(&shared.work) = None;
        }
        if shared.panicked.load(Ordering::Relaxed) { Err(Panicked) } else { Ok(()) }
    }
}

impl Shared {
    fn serve(&self, worker: usize) {
        let mut seen = 0;
        loop {
            seen = self.wait(seen);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let work = *lock(&self.work);
            if let Some(work) = work {
                self.take_tasks(worker, work);
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }

    /// Returns when the call count is no longer `seen`, with the new count.
    fn wait(&self, seen: usize) -> usize {
        for _ in 0..SPINS {
            let call = self.call.load(Ordering::Acquire);
            if call != seen {
                return call;
            }
            std::hint::spin_loop();
        }
        let mut sleeping = lock(&self.sleeping);
        *sleeping += 1;
        loop {
            // Checked under the lock that the caller takes after raising the count, so no wake-up is lost.
            let call = self.call.load(Ordering::Acquire);
            if call != seen {
                *sleeping -= 1;
                return call;
            }
            sleeping = self.wake.wait(sleeping).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn take_tasks(&self, worker: usize, work: Work<'_>) {
        let tasks = self.tasks.load(Ordering::Relaxed);
        let all = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    return;
                }
                work(worker, task);
            }
        }));
        if all.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.call.fetch_add(1, Ordering::Release);
        drop(lock(&self.shared.sleeping));
        self.shared.wake.notify_all();
        for handle in self.handles.drain(..) {
            // A worker that panicked outside of a task has nothing left to say.
            let _ = handle.join();
        }
    }
}

/// The data behind these locks is valid whatever a panicking holder did.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
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
