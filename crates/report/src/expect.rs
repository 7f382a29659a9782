//! Expectations: lines of text that state what must be fused or kept apart, checked against an analysis.
//!
//! ```text
//! # the activation must be in the norm's kernel
//! fused: layer_norm, gelu
//! fused add + layer_norm
//! all fused: add, layer_norm
//! not fused: matmul, layer_norm
//! ```
//!
//! Producer first. Names are those of operations, or labels that the user gave. A line matches every place of the
//! graph where each operation except the first reads one named before it. Operations are fused if the chosen plan
//! computes them in one launch. `fused` requires one such place, `all fused` requires all of them, `not fused` none.

use std::fmt;

use serde::Serialize;

use crate::neighbours::{Neighbours, distance};
use crate::{Analysis, Candidate, ReportError};

/// Maximum search steps per line. GPT-2 XL with gradients needs a few thousand for four names.
const MOST_STEPS: usize = 2_000_000;

/// Maximum number of pairs or names that a violation suggests.
const SUGGESTIONS: usize = 5;

/// An expectation that the analysis does not meet.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Violation {
    /// line of the text, from 1
    pub line: usize,
    /// what was expected: `fused: layer_norm, gelu`
    pub expected: String,
    /// the value found
    pub outcome: Outcome,
    /// positions in `ops` of the place it refers to; empty if there is none
    pub at: Vec<usize>,
    /// code of the reason the planner gave, `OK` where it is legal; empty where it gave none
    pub code: String,
    /// the planner's reason, in words; empty where it gave none
    pub reason: String,
}

/// What came instead of what was expected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub enum Outcome {
    /// expected fused, but they are in separate kernels
    Apart {
        /// launches of the chosen plan that compute them
        launches: Vec<usize>,
        /// number of places where they are separate
        apart: usize,
        /// number of places
        places: usize,
    },
    /// expected separate, but one kernel computes them
    Fused {
        /// that launch
        launch: usize,
        /// its kernel
        kernel: String,
    },
    /// no consecutive operations have these names
    NoSuchNeighbours {
        /// a name that no operation has, if that is the cause
        unknown: Option<String>,
        /// the most similar names of the graph
        nearest: Vec<String>,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: expected `{}`: ", self.line, self.expected)?;
        match &self.outcome {
            Outcome::Apart { launches, apart, places } => {
                let launches: Vec<String> = launches.iter().map(ToString::to_string).collect();
                write!(
                    f,
                    "got separate kernels in {apart} of {places} places, first launches {}",
                    launches.join(", ")
                )?;
            }
            Outcome::Fused { launch, kernel } => write!(f, "got one kernel, `{kernel}`, in launch {launch}")?,
            Outcome::NoSuchNeighbours { unknown, nearest } => {
                match unknown {
                    Some(name) => write!(f, "no operation is called `{name}`")?,
                    None => write!(f, "no such neighbours")?,
                }
                if !nearest.is_empty() {
                    write!(f, "; the graph has: {}", nearest.join("; "))?;
                }
            }
        }
        if !self.at.is_empty() {
            let at: Vec<String> = self.at.iter().map(|op| format!("#{op}")).collect();
            write!(f, " (operations {})", at.join(", "))?;
        }
        if !self.code.is_empty() {
            write!(f, ": {}: {}", self.code, self.reason)?;
        }
        Ok(())
    }
}

/// Checks an analysis against expectations, one per line; the module's documentation shows the format.
///
/// Returns the violations in the order of the lines. An expectation about operations that are not neighbours is not
/// met, whatever it requires: a misspelt name must not pass.
pub fn expect(analysis: &Analysis, text: &str) -> Result<Vec<Violation>, ReportError> {
    let neighbours = Neighbours::of(analysis);
    let mut violations = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        let content = line.split('#').next().unwrap_or_default().trim();
        if content.is_empty() {
            continue;
        }
        let expectation = Expectation::read(content).map_err(|problem| ReportError::Expectation {
            line: line_number,
            text: content.into(),
            problem,
        })?;
        let found = places(&neighbours, &expectation.names)
            .ok_or_else(|| ReportError::TooBroad { line: line_number, text: content.into() })?;
        violations.extend(expectation.violation(analysis, &neighbours, &found, line_number));
    }
    Ok(violations)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asks {
    Fused,
    AllFused,
    NotFused,
}

struct Expectation<'a> {
    asks: Asks,
    names: Vec<&'a str>,
}

impl<'a> Expectation<'a> {
    fn read(line: &'a str) -> Result<Self, String> {
        let words = [("all fused", Asks::AllFused), ("not fused", Asks::NotFused), ("fused", Asks::Fused)];
        let (asks, rest) = words
            .into_iter()
            .find_map(|(word, asks)| {
                let rest = line.strip_prefix(word)?;
                rest.starts_with([':', ' ', '\t']).then_some((asks, rest))
            })
            .ok_or("expected `fused:`, `all fused:` or `not fused:` and names")?;
        let rest = rest.trim_start();
        let names: Vec<&str> = split_names(rest.strip_prefix(':').unwrap_or(rest));
        if names.iter().any(|name| name.is_empty()) {
            return Err("a name is missing".into());
        }
        match names.len() {
            0 | 1 => Err("at least two names are needed".into()),
            2..=16 => Ok(Self { asks, names }),
            _ => Err("more than 16 names".into()),
        }
    }

    fn violation(
        &self,
        analysis: &Analysis,
        neighbours: &Neighbours<'_>,
        found: &Places,
        line: usize,
    ) -> Option<Violation> {
        let at = match self.asks {
            _ if found.count == 0 => &None,
            Asks::Fused if found.first_fused.is_none() => &found.first_apart,
            Asks::AllFused if found.apart > 0 => &found.first_apart,
            Asks::NotFused if found.first_fused.is_some() => &found.first_fused,
            Asks::Fused | Asks::AllFused | Asks::NotFused => return None,
        };
        let at = at.clone().unwrap_or_default();
        let outcome = if at.is_empty() {
            no_such_neighbours(neighbours, &self.names)
        } else if self.asks == Asks::NotFused {
            let launch = neighbours.ops[at[0]].after;
            let kernel = analysis.after.iter().find(|sheet| sheet.launches.contains(&launch));
            Outcome::Fused { launch, kernel: kernel.map(|sheet| sheet.name.clone()).unwrap_or_default() }
        } else {
            let mut launches: Vec<usize> = at.iter().map(|&op| neighbours.ops[op].after).collect();
            launches.dedup();
            Outcome::Apart { launches, apart: found.apart, places: found.count }
        };
        let reason = reason(analysis, neighbours, &at);
        let (code, reason) = reason.map(|why| (why.reason.code.clone(), why.reason.text.clone())).unwrap_or_default();
        let word = match self.asks {
            Asks::Fused => "fused",
            Asks::AllFused => "all fused",
            Asks::NotFused => "not fused",
        };
        Some(Violation { line, expected: format!("{word}: {}", self.names.join(", ")), outcome, at, code, reason })
    }
}

/// Names between commas or `+`; not between those inside brackets, since `grad(a, b)` is one name.
fn split_names(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let (mut depth, mut start) = (0_i32, 0);
    for (at, letter) in text.char_indices() {
        match letter {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            ',' | '+' if depth <= 0 => {
                names.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    names.push(text[start..].trim());
    names
}

/// The places of the graph that a line matches.
#[derive(Default)]
struct Places {
    count: usize,
    apart: usize,
    first_fused: Option<Vec<usize>>,
    first_apart: Option<Vec<usize>>,
}

/// All ways to pick an operation for every name such that each except the first reads one picked before it. Nothing if
/// that takes too long.
fn places(neighbours: &Neighbours<'_>, names: &[&str]) -> Option<Places> {
    let mut places = Places::default();
    let mut steps = 0;
    for first in (0..neighbours.ops.len()).filter(|&op| neighbours.named(op, names[0])) {
        pick(neighbours, &names[1..], &mut vec![first], &mut places, &mut steps)?;
    }
    Some(places)
}

fn pick(
    neighbours: &Neighbours<'_>,
    names: &[&str],
    picked: &mut Vec<usize>,
    places: &mut Places,
    steps: &mut usize,
) -> Option<()> {
    let Some((name, rest)) = names.split_first() else {
        places.count += 1;
        let launch = neighbours.ops[picked[0]].after;
        if picked.iter().all(|&op| neighbours.ops[op].after == launch) {
            places.first_fused.get_or_insert_with(|| picked.clone());
        } else {
            places.apart += 1;
            places.first_apart.get_or_insert_with(|| picked.clone());
        }
        return Some(());
    };
    let mut next: Vec<usize> = picked.iter().flat_map(|&op| neighbours.readers(op)).copied().collect();
    next.sort_unstable();
    next.dedup();
    *steps += next.len();
    if *steps > MOST_STEPS {
        return None;
    }
    for op in next {
        if neighbours.named(op, name) && !picked.contains(&op) {
            picked.push(op);
            pick(neighbours, rest, picked, places, steps)?;
            picked.pop();
        }
    }
    Some(())
}

/// The sheet of the first neighbours among these operations that the planner gives a reason for.
fn reason<'a>(analysis: &'a Analysis, neighbours: &Neighbours<'_>, at: &[usize]) -> Option<&'a Candidate> {
    let mut best: Option<&Candidate> = None;
    for (&producer, &reader) in at.iter().zip(at.iter().skip(1)) {
        let fused = neighbours.ops[producer].after == neighbours.ops[reader].after;
        let names = [&neighbours.ops[producer].name, &neighbours.ops[reader].name];
        let same = |sheet: &&Candidate| sheet.ops.iter().eq(names) && sheet.chosen == fused;
        let exact = analysis.candidates.iter().find(|sheet| sheet.at == [producer, reader]);
        let sheet = exact.or_else(|| analysis.candidates.iter().find(same));
        // Where something is apart, the pair that is apart explains it.
        if sheet.is_some() && (best.is_none() || !fused) {
            best = sheet;
            if !fused {
                break;
            }
        }
    }
    best
}

fn no_such_neighbours(neighbours: &Neighbours<'_>, names: &[&str]) -> Outcome {
    let known = neighbours.names();
    if let Some(unknown) = names.iter().find(|name| !known.contains(*name)) {
        let mut nearest: Vec<&str> = known.into_iter().collect();
        nearest.sort_by_cached_key(|name| distance(name, unknown));
        let nearest = nearest.into_iter().take(SUGGESTIONS).map(String::from).collect();
        return Outcome::NoSuchNeighbours { unknown: Some(unknown.to_string()), nearest };
    }
    // Neighbours that share a name with the line come first, the same two in the other order before all.
    let wanted = |name: &str| usize::from(names.contains(&name));
    let mut pairs: Vec<((&str, &str), usize)> = neighbours.pairs().into_iter().collect();
    pairs.sort_by_key(|((producer, reader), count)| {
        let turned = producer != reader && wanted(producer) + wanted(reader) == 2;
        (!turned, std::cmp::Reverse(wanted(producer) + wanted(reader)), std::cmp::Reverse(*count))
    });
    let nearest = pairs.into_iter().take(SUGGESTIONS).map(|((a, b), _)| format!("{a}, {b}")).collect();
    Outcome::NoSuchNeighbours { unknown: None, nearest }
}
