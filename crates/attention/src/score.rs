//! Work on scores between their scale and their softmax, and which keys a query then sees.
//!
//! In this order: `cap tanh(s / cap)`; `+ slope (key - position)`; `+ bias`, or an additive mask; `-inf` where a window or documents hide the key.
//! The position of query `i` of `m`, of `used` keys, is `i + used - m`. What hides is exact: it is decided by whole numbers.

use deuteron_graph::{Dtype, ScoreWork};

use super::Attention;

/// The work on scores, without its operands.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ScoreRules {
    /// the largest magnitude
    pub soft_cap: Option<f32>,
    /// whether each head adds its slope times the distance of the key
    pub slopes: bool,
    /// storage of what is added beside a mask that is not additive
    pub bias: Option<Dtype>,
    /// positions from which on keys are hidden, on both sides
    pub window: Option<usize>,
    /// whether keys of other documents are hidden
    pub documents: bool,
}

impl ScoreRules {
    /// No work.
    pub const NONE: ScoreRules =
        ScoreRules { soft_cap: None, slopes: false, bias: None, window: None, documents: false };

    /// That of a request whose bias is stored so.
    pub fn of(work: &ScoreWork, bias: Option<Dtype>) -> ScoreRules {
        let &ScoreWork { soft_cap, slopes, bias: is_there, window, documents } = work;
        let soft_cap = soft_cap.map(|cap| cap as f32);
        ScoreRules { soft_cap, slopes, bias: bias.filter(|_| is_there), window, documents }
    }

    /// Whether there is any.
    pub fn is_some(&self) -> bool {
        *self != ScoreRules::NONE
    }

    /// As text, to follow others.
    pub fn describe(&self) -> String {
        let mut text = self.soft_cap.map_or(String::new(), |cap| format!(", scores below {cap}"));
        for (is_there, word) in
            [(self.slopes, "slopes"), (self.bias.is_some(), "a bias"), (self.documents, "documents")]
        {
            text += &if is_there { format!(", {word}") } else { String::new() };
        }
        text + &self.window.map_or(String::new(), |window| format!(", a window of {window}"))
    }
}

impl Attention {
    /// The position of a query among the keys in use; negative where all keys come after it.
    pub fn position(&self, query: usize, used: usize) -> isize {
        (query + used) as isize - self.queries as isize
    }

    /// Keys that causality, the window and the number in use leave for a query: those from the first number to before the second, none if that
    /// is not larger. Later queries see no earlier keys.
    pub fn seen(&self, query: usize, used: usize) -> (usize, usize) {
        let (position, limit) = (self.position(query, used), used.min(self.keys) as isize);
        let bounded = |key: isize| key.clamp(0, limit) as usize;
        let window = self.scores.window.map(|window| window as isize);
        let first = window.map_or(0, |window| bounded(position - window + 1));
        let end = match (self.causal, window) {
            (true, _) => bounded(position + 1),
            (false, Some(window)) => bounded(position + window),
            (false, None) => bounded(limit),
        };
        (first, end)
    }

    /// Keys that some of several queries may see.
    pub fn seen_by(&self, query: usize, rows: usize, used: usize) -> (usize, usize) {
        (self.seen(query, used).0, self.seen(query + rows - 1, used).1)
    }

    /// Whether every one of several queries sees every one of some keys, for all that the window hides.
    pub fn window_holds(&self, (query, rows): (usize, usize), (key, keys): (usize, usize), used: usize) -> bool {
        let Some(window) = self.scores.window else { return true };
        let (first, last) = (self.position(query, used), self.position(query + rows - 1, used));
        let before = last - (key as isize) < window as isize;
        let after = ((key + keys) as isize) - 1 - first < window as isize;
        before && (self.causal || after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::plain;

    #[test]
    fn keys_of_a_query_are_those_that_its_rules_leave() {
        for causal in [false, true] {
            for window in [None, Some(1), Some(2), Some(7), Some(1000)] {
                for (queries, keys, used) in [(1, 1, 1), (5, 5, 5), (9, 4, 4), (4, 20, 20), (3, 20, 11), (6, 20, 2)] {
                    let scores = ScoreRules { window, ..ScoreRules::NONE };
                    let attention = Attention { causal, scores, ..plain(Dtype::F32, [1, 1], [queries, keys, 8]) };
                    for query in 0..queries {
                        let position = query as isize + used as isize - queries as isize;
                        let sees = |key: usize| {
                            let distance = key as isize - position;
                            key < used
                                && (!causal || distance <= 0)
                                && window.is_none_or(|window| distance.unsigned_abs() < window)
                        };
                        let (first, end) = attention.seen(query, used);
                        for key in 0..keys {
                            let within = (first..end).contains(&key);
                            assert_eq!(
                                within,
                                sees(key),
                                "query {query} of {queries}, key {key} of {used}, {window:?}"
                            );
                        }
                        let holds = attention.window_holds((query, 1), (0, keys), used);
                        let all = (0..keys).all(|key| {
                            let distance = key as isize - position;
                            window.is_none_or(|window| {
                                -distance < window as isize && (causal || distance < window as isize)
                            })
                        });
                        assert_eq!(holds, all, "query {query} of {queries}, {keys} keys, {window:?}");
                    }
                }
            }
        }
    }
}
