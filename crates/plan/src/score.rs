//! The score sheet: five criteria, each from 0 to 1, and their weighted sum. The score explains; predicted time decides.
//!
//! | criterion | weight | value | criterion from the value | passes |
//! |---|---|---|---|---|
//! | bandwidth | 0.4 | `s = 1 - bytes together / bytes apart` | `min(1, s / 0.6)`: half at the threshold | `s > 0.3` |
//! | launch | 0.2 | `l`: launch time that fusing saves, over the time of all separate kernels but the longest | `min(1, l / 0.1)`: whole at the threshold | `l > 0.1` |
//! | registers | 0.2 | row kernels: registers `r`; products and attention: occupancy together over that of the part with least, `o` | `1` if `r < 50`, else `50 / r`; `1` if `o >= 0.9`, else `o`; `1` on a CPU | criterion is 1 |
//! | complexity | 0.1 | primitives `p` of the kernel | `max(0, 1 - p / 32)`: thirty-two fill a page | `p < 32` |
//! | maintainability | 0.1 | who writes the kernel | 0.7 generated row kernel, 0.6 generated epilogue, 0.4 hand-written template, 1 nothing to write | generated: 0.5 or more |
//!
//! The launch criterion considers the kernels that disappear: removing a short kernel that is mostly launch overhead pays, removing a
//! long one saves almost nothing. An illegal fusion has 0 in the last three. The verdict is FUSE if it is legal and
//! the score is at least 0.6. Weights and thresholds are those of [`Scoring`]; a user may supply others.

use serde::Deserialize;

use crate::cost::Cost;
use crate::kind::GroupKind;
use crate::machine::MachineKind;
use crate::units::{Bytes, Seconds};

/// The threshold of the last criterion: a hand-written template is below it, everything else above.
pub const MAINTAINABILITY_THRESHOLD: f64 = 0.5;

/// Occupancy of the fused kernel, relative to the lowest separate one, above which a matmul is not slower.
const OCCUPANCY_KEPT: f64 = 0.9;

/// One number per criterion.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// bytes saved
    pub bandwidth: f64,
    /// launch time saved
    pub launch: f64,
    /// registers or occupancy
    pub registers: f64,
    /// size of the kernel
    pub complexity: f64,
    /// whether it is generated or hand-written
    pub maintainability: f64,
}

/// The threshold of each criterion.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Thresholds {
    /// minimum share of bytes saved
    pub bandwidth: f64,
    /// minimum share of launch overhead in the shorter kernels' time
    pub launch: f64,
    /// maximum registers of a row kernel
    pub registers: f64,
    /// maximum number of primitives
    pub complexity: f64,
}

impl Default for Thresholds {
    fn default() -> Self {
        Thresholds { bandwidth: 0.3, launch: 0.1, registers: 50.0, complexity: 32.0 }
    }
}

/// How fusions are scored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scoring {
    /// of each criterion; they add up to 1
    pub weights: Weights,
    /// of each criterion
    pub thresholds: Thresholds,
    /// the score from which the verdict is FUSE
    pub fuse_from: f64,
}

impl Default for Scoring {
    fn default() -> Self {
        let weights = Weights { bandwidth: 0.4, launch: 0.2, registers: 0.2, complexity: 0.1, maintainability: 0.1 };
        Scoring { weights, thresholds: Thresholds::default(), fuse_from: 0.6 }
    }
}

/// Why a file of weights was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScoringError {
    /// Not TOML, or a key is missing or unknown.
    #[error("weights: {0}")]
    Malformed(String),
    /// A number out of range.
    #[error("weights: `{name}` must be {expected}, got {value}")]
    Range {
        /// the key
        name: &'static str,
        /// its range
        expected: &'static str,
        /// the value found
        value: f64,
    },
    /// Weights that do not add up to 1.
    #[error("weights: the five weights must add up to 1, got {0}")]
    Sum(f64),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    fuse_from: Option<f64>,
    weights: Weights,
    #[serde(default)]
    thresholds: Thresholds,
}

impl Scoring {
    /// Reads a file of weights: `fuse_from`, `[weights]` with all five criteria, `[thresholds]` with those that differ.
    pub fn parse(text: &str) -> Result<Scoring, ScoringError> {
        let file: File = toml::from_str(text).map_err(|error| ScoringError::Malformed(error.to_string()))?;
        let scoring = Scoring {
            weights: file.weights,
            thresholds: file.thresholds,
            fuse_from: file.fuse_from.unwrap_or(Scoring::default().fuse_from),
        };
        let shares =
            [("fuse_from", scoring.fuse_from)].into_iter().chain(NAMES.into_iter().zip(scoring.weights.list()));
        for (name, value) in shares {
            if !(0.0..=1.0).contains(&value) {
                return Err(ScoringError::Range { name, expected: "from 0 to 1", value });
            }
        }
        let Thresholds { bandwidth, launch, registers, complexity } = scoring.thresholds;
        for (name, value) in NAMES.into_iter().zip([bandwidth, launch, registers, complexity]) {
            if !(1e-6..1e9).contains(&value) {
                return Err(ScoringError::Range { name, expected: "above 0", value });
            }
        }
        let sum: f64 = scoring.weights.list().iter().sum();
        if (sum - 1.0).abs() > 1e-6 {
            return Err(ScoringError::Sum(sum));
        }
        Ok(scoring)
    }

    /// The requirement of each criterion as text, in the order of [`NAMES`].
    pub fn asks(&self) -> [String; 5] {
        let Thresholds { bandwidth, launch, registers, complexity } = self.thresholds;
        [
            format!("more than {:.0} % of the bytes saved", 100.0 * bandwidth),
            format!("launches are more than {:.0} % of the time of all kernels but the longest", 100.0 * launch),
            format!(
                "fewer than {registers} registers; for matmuls and attention, {OCCUPANCY_KEPT} of the occupancy kept"
            ),
            format!("fewer than {complexity} primitives"),
            "generated, not written by hand".to_string(),
        ]
    }

    /// The threshold of each criterion, in the order of [`NAMES`].
    pub fn thresholds(&self) -> [f64; 5] {
        let Thresholds { bandwidth, launch, registers, complexity } = self.thresholds;
        [bandwidth, launch, registers, complexity, MAINTAINABILITY_THRESHOLD]
    }
}

/// The criteria, in order.
pub const NAMES: [&str; 5] = ["bandwidth", "launch", "registers", "complexity", "maintainability"];

impl Weights {
    /// In the order of [`NAMES`].
    pub fn list(&self) -> [f64; 5] {
        [self.bandwidth, self.launch, self.registers, self.complexity, self.maintainability]
    }
}

/// The inputs of a score.
#[derive(Debug, Clone, PartialEq)]
pub struct Evidence<'a> {
    /// of the machine
    pub machine: MachineKind,
    /// the cost of the separate kernels
    pub apart: Vec<&'a Cost>,
    /// the cost of the fused kernel
    pub together: Option<&'a Cost>,
    /// its kind; `None` if it is not legal
    pub kind: Option<GroupKind>,
    /// bytes of one kernel, legal or not
    pub bytes_together: Bytes,
    /// primitives of one kernel
    pub primitives: usize,
}

/// One criterion of a fusion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Criterion {
    /// from 0 to 1
    pub score: f64,
    /// whether it meets its threshold
    pub passes: bool,
}

/// A score and its parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// bytes saved
    pub bandwidth: Criterion,
    /// launch time saved
    pub launch: Criterion,
    /// registers or occupancy
    pub registers: Criterion,
    /// size of the kernel
    pub complexity: Criterion,
    /// whether it is generated or hand-written
    pub maintainability: Criterion,
    /// the weighted sum
    pub total: f64,
    /// share of the bytes saved
    pub bandwidth_saving: f64,
    /// launch time saved over the time of all kernels but the longest
    pub launch_saving: f64,
    /// occupancy of the fused kernel over the lowest separate one
    pub occupancy_ratio: f64,
    /// whether the verdict is FUSE
    pub fuse: bool,
}

/// Scores a fusion.
pub fn score(evidence: &Evidence, scoring: &Scoring) -> Score {
    let thresholds = &scoring.thresholds;
    // `whole` is the value from which the criterion is 1.
    let saved = |value: f64, threshold: f64, whole: f64| Criterion {
        score: (value / whole).clamp(0.0, 1.0),
        passes: value > threshold,
    };
    let bytes_apart: Bytes = evidence.apart.iter().map(|cost| cost.traffic.total()).sum();
    // Of no bytes nothing can be saved.
    let bandwidth_saving = match bytes_apart.0 {
        0 => 0.0,
        apart => 1.0 - evidence.bytes_together.0 as f64 / apart as f64,
    };
    let launch_saving = launch_saving(evidence);
    let least = evidence.apart.iter().map(|cost| cost.resources.occupancy).fold(1.0, f64::min);
    let occupancy_ratio = evidence.together.map_or(0.0, |cost| cost.resources.occupancy / least.max(1e-9));
    const NONE: Criterion = Criterion { score: 0.0, passes: false };
    let [registers, complexity, maintainability] = match (evidence.kind, evidence.together) {
        (Some(kind), Some(cost)) => {
            let registers = registers(evidence.machine, kind, cost, occupancy_ratio, thresholds.registers);
            let (filled, written) = (evidence.primitives as f64 / thresholds.complexity, maintainability(kind));
            [
                Criterion { score: registers, passes: registers >= 1.0 },
                Criterion { score: (1.0 - filled).max(0.0), passes: filled < 1.0 },
                Criterion { score: written, passes: written >= MAINTAINABILITY_THRESHOLD },
            ]
        }
        _ => [NONE; 3],
    };
    let bandwidth = saved(bandwidth_saving, thresholds.bandwidth, 2.0 * thresholds.bandwidth);
    let launch = saved(launch_saving, thresholds.launch, thresholds.launch);
    let criteria = [bandwidth, launch, registers, complexity, maintainability];
    let total: f64 = criteria.iter().zip(scoring.weights.list()).map(|(one, weight)| one.score * weight).sum();
    let fuse = evidence.kind.is_some() && total >= scoring.fuse_from;
    Score {
        bandwidth,
        launch,
        registers,
        complexity,
        maintainability,
        total,
        bandwidth_saving,
        launch_saving,
        occupancy_ratio,
        fuse,
    }
}

/// Launch time saved, relative to the time of the kernels that disappear: all except the longest.
fn launch_saving(evidence: &Evidence) -> f64 {
    let sum = |of: fn(&Cost) -> Seconds| evidence.apart.iter().map(|cost| of(cost).0).sum::<f64>();
    let longest = evidence.apart.iter().map(|cost| cost.total.0).fold(0.0, f64::max);
    let one = evidence.apart.iter().map(|cost| cost.launch.0).fold(0.0, f64::max);
    let kept = evidence.together.map_or(one, |cost| cost.launch.0);
    let shorter = sum(|cost| cost.total) - longest;
    if shorter > 0.0 { ((sum(|cost| cost.launch) - kept) / shorter).clamp(0.0, 1.0) } else { 0.0 }
}

fn registers(machine: MachineKind, kind: GroupKind, cost: &Cost, occupancy_ratio: f64, threshold: f64) -> f64 {
    match (machine, kind) {
        (MachineKind::Cpu, _) => 1.0,
        (MachineKind::Gpu, GroupKind::Matmul | GroupKind::Attention) if occupancy_ratio >= OCCUPANCY_KEPT => 1.0,
        (MachineKind::Gpu, GroupKind::Matmul | GroupKind::Attention) => occupancy_ratio,
        (
            MachineKind::Gpu,
            GroupKind::Row | GroupKind::Copy | GroupKind::ScatterAdd | GroupKind::Append | GroupKind::Opaque,
        ) => {
            let registers = cost.resources.registers as f64;
            if registers < threshold { 1.0 } else { threshold / registers }
        }
    }
}

fn maintainability(kind: GroupKind) -> f64 {
    match kind {
        GroupKind::Row => 0.7,
        GroupKind::Matmul => 0.6,
        GroupKind::Attention => 0.4,
        GroupKind::Copy | GroupKind::ScatterAdd | GroupKind::Append | GroupKind::Opaque => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEIGHTS: &str =
        "[weights]\nbandwidth = 0.2\nlaunch = 0.5\nregisters = 0.1\ncomplexity = 0.1\nmaintainability = 0.1\n";

    #[test]
    fn a_file_of_weights_says_what_differs() {
        let scoring = Scoring::parse(&format!("fuse_from = 0.5\n{WEIGHTS}[thresholds]\nlaunch = 0.25")).unwrap();
        assert_eq!((scoring.fuse_from, scoring.weights.launch, scoring.thresholds.launch), (0.5, 0.5, 0.25));
        assert_eq!(scoring.thresholds.bandwidth, Thresholds::default().bandwidth);
        assert_eq!(Scoring::parse(WEIGHTS).unwrap().fuse_from, 0.6);
    }

    #[test]
    fn bad_weights_say_what_is_wrong() {
        let refused = |text: &str| Scoring::parse(text).unwrap_err().to_string();
        assert!(refused("").contains("weights"));
        assert!(refused(&WEIGHTS.replace("launch = 0.5", "launch = 0.6")).contains("add up to 1, got 1.1"));
        assert!(refused(&WEIGHTS.replace("launch = 0.5", "launch = -0.5")).contains("`launch` must be from 0 to 1"));
        assert!(refused(&WEIGHTS.replace("launch", "launches")).contains("launches"));
        assert!(refused(&format!("{WEIGHTS}[thresholds]\nregisters = 0")).contains("`registers` must be above 0"));
        assert!(refused(&format!("fuse_from = 2\n{WEIGHTS}")).contains("`fuse_from` must be from 0 to 1"));
    }
}
