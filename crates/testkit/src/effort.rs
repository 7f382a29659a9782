//! What work costs, for tests of growth: a wall clock also counts what other processes do.

use std::time::{Duration, Instant};

/// CPU time that this thread spends on some work, the least of three runs; wall-clock time where the system does not count it.
pub fn cpu_time<T>(mut work: impl FnMut() -> T) -> Duration {
    let mut once = || {
        let (start, before) = (Instant::now(), spent());
        let result = work();
        let elapsed = start.elapsed();
        drop(result);
        before.zip(spent()).map_or(elapsed, |(before, after)| after.saturating_sub(before))
    };
    [once(), once(), once()].into_iter().min().unwrap_or_default()
}

/// CPU time of this thread so far, as Linux counts it: the first number of `schedstat`, in nanoseconds.
fn spent() -> Option<Duration> {
    let counts = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    counts.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeping_costs_nothing_and_work_does() {
        let mut sum = 0_u64;
        let work = cpu_time(|| (0..20_000_000_u64).for_each(|index| sum = std::hint::black_box(sum ^ index)));
        let start = Instant::now();
        let sleep = cpu_time(|| std::thread::sleep(Duration::from_millis(20)));
        assert!(start.elapsed() >= Duration::from_millis(60));
        assert!(work > Duration::from_millis(2), "{work:?}");
        if spent().is_some() {
            assert!(sleep < Duration::from_millis(15), "{sleep:?}");
        }
    }
}
