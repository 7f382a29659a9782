//! Our own threads: a call distributes its tasks over all of them and waits for the last. A call allocates nothing.
//!
//! Workers spin for a short time after a call, because the next kernel of a plan usually follows at once; then they sleep.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

use deuteron_codegen::cpu::task::Panicked;

use super::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use super::sync::thread::{Builder, JoinHandle, yield_now};
use super::sync::{Arc, Condvar, Mutex, MutexGuard, SPINS, spin_loop};

/// What a worker runs: (worker, task).
pub type Work<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// The tasks of one call. A free worker takes the next one.
pub struct Tasks {
    count: AtomicUsize,
    next: AtomicUsize,
    panicked: AtomicBool,
}

impl Tasks {
    pub fn new(count: usize) -> Tasks {
        Tasks { count: AtomicUsize::new(count), next: AtomicUsize::new(0), panicked: AtomicBool::new(false) }
    }

    /// Resets the tasks. No worker may take tasks meanwhile.
    fn reset(&self, count: usize) {
        self.count.store(count, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
        self.panicked.store(false, Ordering::Relaxed);
    }

    /// Runs tasks until none is left. A panic ends this worker's part; it is caught here.
    pub fn take(&self, worker: usize, work: Work<'_>) {
        let count = self.count.load(Ordering::Relaxed);
        let all = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= count {
                    return;
                }
                work(worker, task);
            }
        }));
        if all.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a task panicked. Call it after all workers are done.
    pub fn outcome(&self) -> Result<(), Panicked> {
        if self.panicked.load(Ordering::Relaxed) { Err(Panicked) } else { Ok(()) }
    }
}

/// A fixed set of threads. The caller of [`Threads::run`] is worker 0.
pub struct Threads {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    requested: usize,
}

struct Shared {
    /// Counts calls; a worker wakes when it changes.
    call: AtomicUsize,
    /// The work of the call at hand.
    work: Mutex<Option<Work<'static>>>,
    tasks: Tasks,
    /// Workers that have not finished the call at hand.
    busy: AtomicUsize,
    stop: AtomicBool,
    sleeping: Mutex<usize>,
    wake: Condvar,
}

impl Threads {
    /// `threads` workers, the caller among them. Where the system refuses a thread, fewer workers share the work.
    pub fn spawn(threads: usize) -> Threads {
        let shared = Arc::new(Shared {
            call: AtomicUsize::new(0),
            work: Mutex::new(None),
            tasks: Tasks::new(0),
            busy: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            sleeping: Mutex::new(0),
            wake: Condvar::new(),
        });
        let handles = (1..threads)
            .map_while(|worker| {
                let shared = shared.clone();
                Builder::new().name(format!("deuteron-{worker}")).spawn(move || shared.serve(worker)).ok()
            })
            .collect();
        Threads { shared, handles, requested: threads }
    }

    /// The requested number of threads, even if the system granted fewer.
    pub fn requested(&self) -> usize {
        self.requested
    }

    /// Runs `work(worker, task)` for every task. The exclusive borrow allows one call at a time.
    pub fn run(&mut self, tasks: usize, work: Work<'_>) -> Result<(), Panicked> {
        let shared = &*self.shared;
        shared.tasks.reset(tasks);
        // SAFETY: the reference is used only between here and the moment `busy` is back at zero, which this call
        // waits for before it returns; so it never outlives the borrow.
        let erased = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        *lock(&shared.work) = Some(erased);
        shared.busy.store(self.handles.len(), Ordering::Relaxed);
        shared.call.fetch_add(1, Ordering::Release);
        if *lock(&shared.sleeping) > 0 {
            shared.wake.notify_all();
        }
        shared.tasks.take(0, work);
        let mut turns = 0;
        while shared.busy.load(Ordering::Acquire) > 0 {
            turns += 1;
            if turns < SPINS { spin_loop() } else { yield_now() }
        }
        *lock(&shared.work) = None;
        shared.tasks.outcome()
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
                self.tasks.take(worker, work);
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
            spin_loop();
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
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.call.fetch_add(1, Ordering::Release);
        drop(lock(&self.shared.sleeping));
        self.shared.wake.notify_all();
        for handle in self.handles.drain(..) {
            // Panics of tasks were caught; one outside of a task has no caller left to report to.
            let _ = handle.join();
        }
    }
}

/// The data behind these locks stays valid after a panic of the holder.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
