//! Corrections that the planner learns from a run: measured over predicted times of kernels that are long enough.
//!
//! A correction multiplies the predicted time of a kind of kernel. One run is one sample, taken on a machine that may have been busy, so:
//! only kernels far above the cost of a launch count, weighted by bytes; a run with too large a run-to-run spread is ignored; a
//! correction goes half of the way, stays within a factor of two, and never replaces a number that a calibration fitted.

use deuteron_plan::{Bytes, GroupKind, Machine, MachineError, Quantity};
use deuteron_report::{Analysis, KernelSheet};

/// Minimum bytes of a kernel that counts.
const LEAST_BYTES: u64 = 1 << 20;
/// Minimum time of a kernel that counts, in launch times.
const LEAST_LAUNCHES: f64 = 10.0;
/// The run-to-run spread above which a run is ignored.
const WIDEST_SPREAD: f64 = 0.25;
/// Maximum correction in either direction.
const FARTHEST: f64 = 2.0;

/// The result of learning from a run.
#[derive(Debug, Clone, PartialEq)]
pub enum Lesson {
    /// a machine with corrections, and how many kernels they come from
    Learnt {
        /// with the new numbers
        machine: Machine,
        /// number of kernels that counted
        kernels: usize,
    },
    /// nothing learnt, with the reason
    Nothing(&'static str),
}

/// Corrects a machine by the measured kernels of an analysis. `origin` says where and when; `spread` is the run-to-run spread.
pub fn lesson(machine: &Machine, analysis: &Analysis, spread: f64, origin: &str) -> Result<Lesson, MachineError> {
    if spread > WIDEST_SPREAD {
        return Ok(Lesson::Nothing("its times are spread too widely"));
    }
    let (mut learnt, mut counted) = (machine.clone(), 0);
    for (kind, quantity) in [
        (GroupKind::Row, Quantity::CorrectRow),
        (GroupKind::Matmul, Quantity::CorrectMatmul),
        (GroupKind::Attention, Quantity::CorrectAttention),
        (GroupKind::Copy, Quantity::CorrectCopy),
        (GroupKind::ScatterAdd, Quantity::CorrectScatterAdd),
    ] {
        let all = analysis.before.iter().chain(&analysis.after).filter(|kernel| kernel.kind == kind.to_string());
        let samples: Vec<Sample> = all.filter_map(Sample::of).collect();
        let Some(ratio) = weighted_median(&samples).filter(|_| machine.may_learn(quantity)) else { continue };
        let value = (machine.get(quantity) * ratio.sqrt()).clamp(1.0 / FARTHEST, FARTHEST);
        let bytes = Bytes(samples.iter().map(|sample| sample.bytes).sum());
        let text =
            format!("{} {kind} kernels of {bytes} took {ratio:.2} of the predicted time, {origin}", samples.len());
        learnt = learnt.learn(quantity, (value * 1e4).round() / 1e4, &text)?;
        counted += samples.len();
    }
    Ok(match counted {
        0 => Lesson::Nothing("its kernels are too short to tell, or calibrated"),
        kernels => Lesson::Learnt { machine: learnt, kernels },
    })
}

/// Measured over predicted time of one kernel, without launches, which a correction does not touch.
struct Sample {
    ratio: f64,
    bytes: u64,
}

impl Sample {
    fn of(kernel: &KernelSheet) -> Option<Sample> {
        let cost = &kernel.cost;
        let (predicted, measured) = (cost.us - cost.launch_us, kernel.measured_us? - cost.launch_us);
        let shortest = LEAST_LAUNCHES * cost.launch_us;
        let bytes = cost.read + cost.written;
        let tells = bytes >= LEAST_BYTES && predicted > 0.0 && predicted >= shortest && measured >= shortest;
        tells.then(|| Sample { ratio: measured / predicted, bytes: bytes * kernel.launches.len() as u64 })
    }
}

/// The ratio at which half of the bytes lie below.
fn weighted_median(samples: &[Sample]) -> Option<f64> {
    let mut sorted: Vec<&Sample> = samples.iter().collect();
    sorted.sort_by(|a, b| a.ratio.total_cmp(&b.ratio));
    let all: u64 = sorted.iter().map(|sample| sample.bytes).sum();
    let mut below = 0;
    sorted
        .into_iter()
        .find(|sample| {
            below += sample.bytes;
            2 * below >= all
        })
        .map(|sample| sample.ratio)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analyze::{AnalyzeOptions, analyze};

    /// An analysis whose kernels took this many times what was predicted.
    fn measured(text: &str, machine: &Machine, ratio: f64) -> Analysis {
        let graph = text.parse().unwrap();
        let mut analysis = analyze(&graph, &AnalyzeOptions::on(machine.clone())).unwrap();
        for kernel in analysis.before.iter_mut().chain(&mut analysis.after) {
            kernel.measured_us = Some(kernel.cost.us * ratio);
        }
        analysis
    }

    fn correction(lesson: Lesson) -> Option<f64> {
        match lesson {
            Lesson::Learnt { machine, .. } => machine.find(Quantity::CorrectRow),
            Lesson::Nothing(_) => None,
        }
    }

    const LARGE: &str = "x = input f32[4096,768] ; y = gelu x ; out y";
    const SMALL: &str = "x = input f32[1,8] ; y = gelu x ; out y";

    #[test]
    fn kernels_that_are_mostly_launch_teach_nothing() {
        let cpu = Machine::cpu();
        let lesson = lesson(&cpu, &measured(SMALL, &cpu, 0.1), 0.0, "by a test").unwrap();
        assert!(matches!(lesson, Lesson::Nothing(_)), "{lesson:?}");
    }

    #[test]
    fn a_correction_goes_half_of_the_way_and_stays_within_a_factor_of_two() {
        let mut machine = Machine::cpu();
        let first = correction(lesson(&machine, &measured(LARGE, &machine, 1.44), 0.0, "by a test").unwrap()).unwrap();
        assert!((first - 1.2).abs() < 0.01, "{first}");
        for _ in 0..8 {
            let analysis = measured(LARGE, &machine, 0.2);
            let Lesson::Learnt { machine: next, .. } = lesson(&machine, &analysis, 0.0, "by a test").unwrap() else {
                panic!("nothing learnt")
            };
            machine = next;
        }
        assert_eq!(machine.get(Quantity::CorrectRow), 0.5);
        // Whatever was learnt, no kernel is predicted to beat main memory.
        let analysis = measured("x = input f32[65536,768] ; y = relu x ; out y", &machine, 1.0);
        let kernel = &analysis.after[0];
        let gbps = (kernel.cost.read + kernel.cost.written) as f64 / kernel.cost.us / 1e3;
        assert!(gbps <= machine.get(Quantity::StreamGbps).max(machine.get(Quantity::DramGbps)), "{gbps} GB/s");
    }

    #[test]
    fn noise_and_calibrated_numbers_are_left_alone() {
        let machine = Machine::cpu();
        let analysis = measured(LARGE, &machine, 1.5);
        assert_eq!(correction(lesson(&machine, &analysis, 0.4, "by a test").unwrap()), None);
        let fitted = machine.with(Quantity::CorrectRow, 1.1, "fitted by doctor --calibrate to 9 kernels").unwrap();
        assert_eq!(correction(lesson(&fitted, &analysis, 0.0, "by a test").unwrap()), None);
    }

    #[test]
    fn every_learnt_number_says_where_it_comes_from() {
        let machine = Machine::cpu();
        let lesson = lesson(&machine, &measured(LARGE, &machine, 1.5), 0.0, "by `fuse act` on 2026-11-18").unwrap();
        let Lesson::Learnt { machine, kernels: 2 } = lesson else { panic!("{lesson:?}") };
        let (_, number) = machine.numbers().find(|(quantity, _)| *quantity == Quantity::CorrectRow).unwrap();
        assert!(number.origin.starts_with("learnt: 2 row kernels of 50.3 MB took 1.5"), "{}", number.origin);
        assert!(number.origin.ends_with("by `fuse act` on 2026-11-18"), "{}", number.origin);
    }
}
