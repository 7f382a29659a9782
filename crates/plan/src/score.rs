//! The score sheet: five criteria, each from 0 to 1, and their weighted sum. The score explains; predicted time decides.
//!
//! | criterion | weight | value | criterion from the value |
//! |---|---|---|---|
//! | bandwidth | 0.4 | `s = 1 - bytes together / bytes apart` | `min(1, s / 0.6)`: half at the threshold of 30 % |
//! | launch | 0.2 | `l = 1 - 1 / launches apart` | `min(1, l / 0.2)`: half at the threshold of 10 % |
//! | registers | 0.2 | row kernels: registers `r`; products and attention: occupancy together over that of the part with least, `o` | `1` if `r < 50`, else `50 / r`; `1` if `o >= 0.9`, else `o`; `1` on a CPU |
//! | complexity | 0.1 | primitives `p` of the kernel | `max(0, 1 - p / 32)`: thirty-two fill a page |
//! | maintainability | 0.1 | who writes the kernel | 0.7 generated row kernel, 0.6 generated epilogue, 0.4 hand-written template, 1 nothing to write |
//!
//! A fusion that is not legal has 0 in the last three. The verdict is FUSE if it is legal and the score is at least 0.6.

use crate::cost::Cost;
use crate::kind::GroupKind;
use crate::machine::MachineKind;
use crate::units::Bytes;

/// Weights, in the order of the criteria.
pub const WEIGHTS: [f64; 5] = [0.4, 0.2, 0.2, 0.1, 0.1];

/// The score from which the verdict is FUSE.
pub const FUSE_FROM: f64 = 0.6;

/// Share of the bytes that a fusion should save.
pub const BANDWIDTH_THRESHOLD: f64 = 0.3;

/// Share of the launches that a fusion should save.
pub const LAUNCH_THRESHOLD: f64 = 0.1;

/// Registers below which a row kernel is fine.
pub const REGISTER_THRESHOLD: u32 = 50;

/// Primitives that fill a page.
const PAGE: f64 = 32.0;

/// What a score is computed from.
#[derive(Debug, Clone, PartialEq)]
pub struct Evidence<'a> {
    /// of the machine
    pub machine: MachineKind,
    /// what the kernels cost apart
    pub apart: Vec<&'a Cost>,
    /// what one kernel would cost
    pub together: Option<&'a Cost>,
    /// its kind; `None` if it is not legal
    pub kind: Option<GroupKind>,
    /// bytes of one kernel, legal or not
    pub bytes_together: Bytes,
    /// primitives of one kernel
    pub primitives: usize,
}

/// A score and its parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// bytes saved
    pub bandwidth: f64,
    /// launches saved
    pub launch: f64,
    /// registers or occupancy
    pub registers: f64,
    /// size of the kernel
    pub complexity: f64,
    /// who writes it
    pub maintainability: f64,
    /// the weighted sum
    pub total: f64,
    /// share of the bytes saved
    pub bandwidth_saving: f64,
    /// share of the launches saved
    pub launch_saving: f64,
    /// occupancy together over the least apart
    pub occupancy_ratio: f64,
    /// whether the verdict is FUSE
    pub fuse: bool,
}

/// Scores a fusion.
pub fn score(evidence: &Evidence) -> Score {
    let bytes_apart: Bytes = evidence.apart.iter().map(|cost| cost.traffic.total()).sum();
    let bandwidth_saving = 1.0 - evidence.bytes_together.0 as f64 / bytes_apart.0.max(1) as f64;
    let bandwidth = (bandwidth_saving / (2.0 * BANDWIDTH_THRESHOLD)).clamp(0.0, 1.0);
    let launch_saving = 1.0 - 1.0 / evidence.apart.len().max(1) as f64;
    let launch = (launch_saving / (2.0 * LAUNCH_THRESHOLD)).clamp(0.0, 1.0);
    let least = evidence.apart.iter().map(|cost| cost.resources.occupancy).fold(1.0, f64::min);
    let occupancy_ratio = evidence.together.map_or(0.0, |cost| cost.resources.occupancy / least.max(1e-9));
    let (registers, complexity, maintainability) = match (evidence.kind, evidence.together) {
        (Some(kind), Some(cost)) => (
            registers(evidence.machine, kind, cost, occupancy_ratio),
            (1.0 - evidence.primitives as f64 / PAGE).max(0.0),
            maintainability(kind),
        ),
        _ => (0.0, 0.0, 0.0),
    };
    let criteria = [bandwidth, launch, registers, complexity, maintainability];
    let total: f64 = criteria.iter().zip(WEIGHTS).map(|(criterion, weight)| criterion * weight).sum();
    let fuse = evidence.kind.is_some() && total >= FUSE_FROM;
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

fn registers(machine: MachineKind, kind: GroupKind, cost: &Cost, occupancy_ratio: f64) -> f64 {
    match (machine, kind) {
        (MachineKind::Cpu, _) => 1.0,
        (MachineKind::Gpu, GroupKind::Matmul | GroupKind::Attention) if occupancy_ratio >= 0.9 => 1.0,
        (MachineKind::Gpu, GroupKind::Matmul | GroupKind::Attention) => occupancy_ratio,
        (
            MachineKind::Gpu,
            GroupKind::Row | GroupKind::Copy | GroupKind::ScatterAdd | GroupKind::Append | GroupKind::Opaque,
        ) => {
            let registers = cost.resources.registers;
            if registers < REGISTER_THRESHOLD { 1.0 } else { REGISTER_THRESHOLD as f64 / registers as f64 }
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
