//! The threads of the CPU device under Loom: the same source file as in `crates/device`, with Loom's locks and atomics.
//!
//! Loom runs each test once per interleaving, with every value that the memory model lets a thread read. Interleavings with more than two
//! preemptions are left out: all of them would take hours.

#[cfg(test)]
mod sync;
#[cfg(test)]
#[path = "../../crates/device/src/cpu/threads.rs"]
mod threads;

#[cfg(test)]
mod tests {
    use deuteron_codegen::cpu::task::Panicked;
    use loom::cell::UnsafeCell;

    use crate::threads::Threads;

    /// Counters that tasks increment. Loom tracks every access: a data race fails the test.
    struct Counts(Vec<UnsafeCell<u32>>);

    // SAFETY: each task writes to its own counter; Loom checks that.
    unsafe impl Sync for Counts {}

    impl Counts {
        fn add(&self, task: usize) {
            // SAFETY: Loom checks that no other thread accesses this counter now.
            self.0[task].with_mut(|count| unsafe { *count += 1 });
        }

        fn all_are(&self, expected: u32) -> bool {
            // SAFETY: as above.
            self.0.iter().all(|count| count.with(|count| unsafe { *count } == expected))
        }
    }

    /// Runs `body` in every interleaving with at most two preemptions.
    fn explore(body: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(body);
    }

    /// Several calls, then the threads end. Every task runs once, the caller sees what it wrote, and nothing deadlocks.
    fn check(threads: usize, calls: usize, tasks: usize) {
        explore(move || {
            let mut pool = Threads::spawn(threads);
            for _ in 0..calls {
                let counts = Counts((0..tasks).map(|_| UnsafeCell::new(0)).collect());
                pool.run(tasks, &|_, task| counts.add(task)).unwrap();
                assert!(counts.all_are(1));
            }
        });
    }

    #[test]
    fn two_threads_share_the_tasks_of_two_calls() {
        check(2, 2, 2);
    }

    #[test]
    fn three_threads_share_the_tasks_of_a_call() {
        check(3, 1, 2);
    }

    #[test]
    fn a_panic_is_an_error_and_the_threads_go_on() {
        explore(|| {
            let mut pool = Threads::spawn(2);
            let outcome = pool.run(2, &|_, task| {
                if task == 1 {
                    std::panic::resume_unwind(Box::new("planned"));
                }
            });
            assert_eq!(outcome, Err(Panicked));
            assert_eq!(pool.run(2, &|_, _| {}), Ok(()));
        });
    }
}
