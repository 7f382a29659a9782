//! Times of equal runs: median, run-to-run spread, and the number of runs needed.

use std::time::{Duration, Instant};

/// The median of a sorted list; zero for an empty one.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(Duration::ZERO)
}

/// The run-to-run spread: the interquartile range of a sorted list, over the median; the full range for up to three runs.
pub fn spread(times: &[Duration]) -> f64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    let at = |index: usize| times.get(index).map_or(0.0, Duration::as_secs_f64);
    (at(3 * times.len() / 4) - at(times.len() / 4)) / at(times.len() / 2).max(1e-12)
}

/// Above this run-to-run spread, a few runs are not enough.
const UNSTEADY: f64 = 0.1;
/// The number of runs in that case.
const OF_UNSTEADY: usize = 9;

/// The number of rounds for plans that run in turn.
pub struct Rounds {
    begin: Instant,
    budget: Duration,
    least: usize,
    most: usize,
}

impl Rounds {
    /// At least `least`; then up to `most` within about `budget`; then a few more if the machine is busy with other work.
    pub fn new(budget: Duration, least: usize, most: usize) -> Rounds {
        Rounds { begin: Instant::now(), budget, least, most }
    }

    /// Whether to make another round after these runs of each plan.
    pub fn more(&self, plans: &[&[Duration]]) -> bool {
        let done = plans.iter().map(|runs| runs.len()).min().unwrap_or(0);
        let unsteady = || plans.iter().any(|runs| spread(runs) > UNSTEADY);
        done < self.least
            || (done < self.most && self.begin.elapsed() < self.budget)
            || (done < OF_UNSTEADY && unsteady())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs<const N: usize>(milliseconds: [u64; N]) -> [Duration; N] {
        milliseconds.map(Duration::from_millis)
    }

    #[test]
    fn few_runs_are_taken_whole_and_of_many_the_middle_half() {
        assert_eq!(spread(&[]), 0.0);
        assert_eq!(spread(&runs([7])), 0.0);
        assert!((spread(&runs([120, 100, 90])) - 0.3).abs() < 1e-9);
        assert!((spread(&runs([100, 900, 101, 99, 100, 100, 100, 98])) - 0.01).abs() < 1e-9);
    }

    #[test]
    fn unsteady_runs_get_more_rounds_but_not_without_end() {
        let rounds = Rounds::new(Duration::ZERO, 3, 200);
        let (steady, unsteady) = (runs([100, 101, 100]), runs([100, 150, 100]));
        assert!(rounds.more(&[&[], &[]]));
        assert!(rounds.more(&[&steady[..2], &steady[..2]]));
        assert!(!rounds.more(&[&steady, &steady]));
        assert!(rounds.more(&[&steady, &unsteady]));
        let nine = [unsteady, unsteady, unsteady].concat();
        assert!(!rounds.more(&[&nine, &nine]));
        assert!(Rounds::new(Duration::from_secs(3600), 3, 200).more(&[&steady, &steady]));
    }
}
