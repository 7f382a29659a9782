//! How long each part of a command took.

use std::fmt::{Display, Formatter};
use std::time::{Duration, Instant};

/// Parts in the order in which they ended.
#[derive(Default)]
pub struct Phases {
    taken: Vec<(&'static str, Duration)>,
}

impl Phases {
    /// Runs a part and notes its time.
    pub fn time<T>(&mut self, name: &'static str, part: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let outcome = part();
        self.taken.push((name, start.elapsed()));
        outcome
    }
}

/// A table, with the sum as its last line.
impl Display for Phases {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let sum = ("so far", self.taken.iter().map(|(_, time)| *time).sum());
        let lines = || self.taken.iter().chain([&sum]);
        let width = lines().map(|(name, _)| name.len()).max().unwrap_or_default();
        lines().try_for_each(|(name, time)| writeln!(f, "{name:<width$} {:>6.0} s", time.as_secs_f64()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_ends_with_the_sum() {
        let taken = vec![("format", Duration::from_secs(2)), ("first tests", Duration::from_secs(110))];
        let table = Phases { taken }.to_string();
        assert_eq!(table, "format           2 s\nfirst tests    110 s\nso far         112 s\n");
    }
}
