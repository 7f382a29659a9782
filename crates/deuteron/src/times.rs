//! Times of equal runs: their middle, the run-to-run spread, and how many of them it takes.

use std::time::{Duration, Instant};

/// The middle of the sorted list; zero of an empty one.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(Duration::ZERO)
}

/// The run-to-run spread: from the first quarter of the sorted list to the last, over the median. Three runs count whole.
pub fn spread(times: &[Duration]) -> f64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    let at = |index: usize| times.get(index).map_or(0.0, Duration::as_secs_f64);
    (at(3 * times.len() / 4) - at(times.len() / 4)) / at(times.len() / 2).max(1e-12)
}

/// Above this share of their median runs lie too far apart for a few of them to tell much.
const UNSTEADY: f64 = 0.1;
/// As many are made of those.
const OF_UNSTEADY: usize = 9;

/// How many rounds are made of plans that run in turn.
pub struct Rounds {
    begin: Instant,
    budget: Duration,
    least: usize,
    most: usize,
}

impl Rounds {
    /// At least `least`; then up to `most`, for about `budget`; beyond that a few more where the machine is doing other things.
    pub fn new(budget: Duration, least: usize, most: usize) -> Rounds {
        Rounds { begin: Instant::now(), budget, least, most }
    }

    /// Whether there is to be one more after these runs of each plan.
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
