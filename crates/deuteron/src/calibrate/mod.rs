//! The numbers of this machine: measurement, fit and validation.
//!
//! [`calibrate`] times a list of kernels and finds the numbers of the cost model that explain them best. [`validate`] times
//! other kernels at other sizes, and reports the prediction error and how often predictions choose the faster plan.

mod cases;
mod fit;
mod gpu;
mod measure;
mod validate;

use std::time::Duration;

use deuteron_graph::Graph;
use deuteron_plan::{Machine, MachineError, MachineKind, Quantity, Seconds, Strategy};

pub use validate::{CaseRow, Decisions, KernelCase, Outcome, TimeErrors, Validation, validate};

use crate::engine::Engine;
use crate::error::Error;
use fit::Unknown;
use measure::{Anchor, Sample, Timed, time};

/// Approximate time to spend on one graph.
const BUDGET: Duration = Duration::from_millis(110);

/// The result of a calibration.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    /// the machine before
    pub before: Machine,
    /// the same with the fitted numbers
    pub machine: Machine,
    /// kernels that were measured
    pub kernels: usize,
    /// prediction error of the new numbers on the data of the fit: kernels of a CPU, plans of a GPU
    pub errors: TimeErrors,
    /// the numbers to fit
    pub fitted: Vec<Quantity>,
}

impl Calibration {
    /// The numbers that were fitted: before and after.
    pub fn changes(&self) -> impl Iterator<Item = (Quantity, f64, f64)> + '_ {
        self.fitted.iter().map(|&quantity| (quantity, self.before.get(quantity), self.machine.get(quantity)))
    }
}

/// The numbers to fit, and the factor by which each may differ from the shipped profile. The speeds of memory and arithmetic differ
/// less between machines than the engine's own overhead.
const FITTED: [(Quantity, f64); 35] = [
    (Quantity::DramGbps, 30.0),
    (Quantity::CacheGbps, 30.0),
    (Quantity::CacheMb, 10.0),
    (Quantity::InnerGbps, 30.0),
    (Quantity::InnerMb, 10.0),
    (Quantity::StreamGbps, 30.0),
    (Quantity::Matrix16Tflops, 100.0),
    (Quantity::Matrix32Tflops, 100.0),
    (Quantity::LaunchUs, 20.0),
    (Quantity::ForkUs, 20.0),
    (Quantity::ChunkNs, 20.0),
    (Quantity::DispatchNs, 20.0),
    (Quantity::RowNs, 20.0),
    (Quantity::FlightNs, 20.0),
    (Quantity::RowArgumentNs, 20.0),
    (Quantity::RowScalarNs, 20.0),
    (Quantity::TailNs, 20.0),
    (Quantity::MoveNs, 20.0),
    (Quantity::ConvertNs, 20.0),
    (Quantity::SimpleNs, 20.0),
    (Quantity::DivideNs, 20.0),
    (Quantity::ExpNs, 20.0),
    (Quantity::TanhNs, 20.0),
    (Quantity::ErfNs, 20.0),
    (Quantity::RandomNs, 20.0),
    (Quantity::ReduceNs, 20.0),
    (Quantity::ReductionNs, 20.0),
    (Quantity::ColumnNs, 20.0),
    (Quantity::FinishNs, 20.0),
    (Quantity::CopyElementNs, 20.0),
    (Quantity::ScatterRowNs, 20.0),
    (Quantity::ClearRowNs, 20.0),
    (Quantity::ProductNs, 20.0),
    (Quantity::PackNs, 20.0),
    (Quantity::Exposed, 10.0),
];

/// Measures kernels on an engine and fits the machine's numbers to them. `date` goes into the numbers' origins; `progress` is
/// called with the number of finished graphs and of all graphs.
///
/// Starts from the shipped profile, so that the result depends only on the measurements.
pub fn calibrate(engine: &Engine, date: &str, progress: impl FnMut(usize, usize)) -> Result<Calibration, Error> {
    match engine.device().machine().kind {
        MachineKind::Cpu => calibrate_on(engine, &cases::calibration()?, BUDGET, date, progress),
        MachineKind::Gpu => gpu::calibrate(engine, date, progress),
    }
}

fn calibrate_on(
    engine: &Engine,
    graphs: &[Graph],
    budget: Duration,
    date: &str,
    mut progress: impl FnMut(usize, usize),
) -> Result<Calibration, Error> {
    let mut samples: Vec<Sample> = Vec::new();
    let mut anchor = Anchor::new(engine)?;
    let mut anchors: Vec<Seconds> = Vec::new();
    for (done, graph) in graphs.iter().enumerate() {
        progress(done, graphs.len());
        anchors.push(anchor.now()?);
        let [unfused, greedy] = time(engine, graph, [Strategy::Unfused, Strategy::Greedy], budget)?;
        samples.extend(distinct(unfused, greedy));
    }
    progress(graphs.len(), graphs.len());
    let processors = engine.device().machine().get(Quantity::Processors);
    let before = Machine::cpu().with(Quantity::Processors, processors, "threads in use")?;
    let pairs = |machine: &Machine| -> Vec<(Seconds, Seconds)> {
        samples.iter().filter_map(|sample| Some((sample.predict(machine), sample.measured?))).collect()
    };
    let origin = format!("fitted by doctor --calibrate to {} kernels, {date}", samples.len());
    let machine = fitted(&before, &FITTED, &origin, pairs)?;
    let machine = match middle(&mut anchors) {
        Some(usual) => {
            machine.with(Quantity::AnchorUs, rounded(usual.us()), &format!("GELU of 256x1024 f32, {date}"))?
        }
        None => machine,
    };
    let errors = TimeErrors::of(pairs(&machine).into_iter());
    let fitted = FITTED.iter().map(|&(quantity, _)| quantity).collect();
    Ok(Calibration { before, machine, kernels: samples.len(), errors, fitted })
}

/// The kernels of both plans, or of one if nothing was fused.
fn distinct(unfused: Timed, greedy: Timed) -> impl Iterator<Item = Sample> {
    let same = unfused.kernels.len() == greedy.kernels.len();
    unfused.kernels.into_iter().chain(greedy.kernels.into_iter().filter(move |_| !same))
}

/// The machine whose predictions are closest to the measurements: some of its numbers are fitted, each within a factor. `pairs` returns
/// a machine's predictions with the measurements.
fn fitted(
    before: &Machine,
    numbers: &[(Quantity, f64)],
    origin: &str,
    pairs: impl Fn(&Machine) -> Vec<(Seconds, Seconds)>,
) -> Result<Machine, MachineError> {
    let unknown = |&(quantity, factor): &(Quantity, f64)| {
        let start = before.get(quantity).max(1e-6);
        // More than all of the shorter time cannot be exposed.
        let high = if quantity == Quantity::Exposed { 1.0 } else { start * factor };
        Unknown { start: start.min(high), low: start / factor, high }
    };
    let unknowns: Vec<Unknown> = numbers.iter().map(unknown).collect();
    let machine_of = |values: &[f64]| {
        let mut numbers = numbers.iter().zip(values);
        numbers.try_fold(before.clone(), |machine, (&(quantity, _), &value)| machine.with(quantity, value, origin))
    };
    let residuals = |values: &[f64]| -> Vec<f64> {
        // Values stay within their bounds, which every number's range includes.
        let machine = machine_of(values).unwrap_or_else(|_| before.clone());
        pairs(&machine).into_iter().map(|(predicted, measured)| (predicted.0 / measured.0.max(1e-9)).ln()).collect()
    };
    machine_of(&fit::fit(&unknowns, &residuals).into_iter().map(rounded).collect::<Vec<f64>>())
}

/// The median of the times.
fn middle(times: &mut [Seconds]) -> Option<Seconds> {
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    times.get(times.len() / 2).copied()
}

/// Rounds to three significant digits, the accuracy of the fit.
fn rounded(value: f64) -> f64 {
    let scale = 10f64.powi(2 - value.abs().max(1e-300).log10().floor() as i32);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::validate::validate_on;

    fn small(text: &str) -> Graph {
        cases::text_graph(text, 64, 48).unwrap()
    }

    #[test]
    fn a_short_calibration_gives_a_machine_that_can_be_stored_and_validated() {
        let engine = Engine::cpu();
        let graphs = [
            small("x = input f32[R,C] ; y = add x 1 ; out y"),
            small("x = input f32[R,C] ; g = gelu x ; y = layer_norm g w[C] b[C] ; out y"),
        ];
        let mut told = Vec::new();
        let budget = Duration::from_millis(1);
        let found = calibrate_on(&engine, &graphs, budget, "2026-11-15", |done, all| told.push((done, all))).unwrap();
        assert_eq!(told, [(0, 2), (1, 2), (2, 2)]);
        assert_eq!(found.kernels, 4, "add; gelu and layer_norm apart and together");
        let text = found.machine.to_string();
        assert_eq!(Machine::parse(&text).unwrap(), found.machine);
        assert!(text.contains("fitted by doctor --calibrate to 4 kernels, 2026-11-15"), "{text}");
        assert!(found.changes().all(|(_, _, after)| after.is_finite() && after > 0.0));
        let cases = graphs.map(|graph| (graph, true));
        let validation = validate_on(&engine, &cases, budget, |_, _| {}).unwrap();
        assert_eq!((validation.plans.count, validation.kernels.count), (4, 5));
        assert_eq!(validation.decisions.cases, 1, "there is nothing to fuse in a single op");
    }

    #[test]
    fn no_size_of_the_calibration_is_validated() {
        let names = |graphs: Vec<Graph>| graphs.into_iter().map(|graph| graph.name().to_string()).collect::<Vec<_>>();
        let calibrated = names(cases::calibration().unwrap());
        let validated = names(cases::validation().unwrap().into_iter().map(|(graph, _)| graph).collect());
        let sizes = |names: &[String]| -> std::collections::BTreeSet<String> {
            names.iter().filter_map(|name| name.rsplit('_').next().map(str::to_string)).collect()
        };
        let both: Vec<String> = sizes(&calibrated).intersection(&sizes(&validated)).cloned().collect();
        assert!(both.is_empty(), "{both:?}");
        assert!(sizes(&validated).iter().all(|size| size.contains('x')), "names end in a size");
    }

    #[test]
    fn numbers_keep_three_digits() {
        assert_eq!(rounded(0.0123456), 0.0123);
        assert_eq!(rounded(98765.0), 98800.0);
    }
}
