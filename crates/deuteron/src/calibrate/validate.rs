//! Validation of predictions, on other kernels and sizes than those of the calibration.

use std::time::Duration;

use deuteron_graph::Graph;
use deuteron_plan::{Machine, MachineKind, Quantity, Seconds, Strategy};
use serde::Serialize;

use crate::calibrate::measure::{Anchor, Timed, time};
use crate::calibrate::{cases, gpu};
use crate::engine::Engine;
use crate::error::Error;

/// Approximate time to spend on one graph.
const BUDGET: Duration = Duration::from_millis(150);

/// Plans whose times differ by less than this share are a tie: either choice is right.
const TIE: f64 = 0.05;

/// The result of a validation. The JSON form has these fields.
#[derive(Debug, Clone, Serialize)]
pub struct Validation {
    /// where it ran
    pub device: String,
    /// how much slower the machine ran than when it was calibrated: the anchor's time over that of the calibration, the
    /// middle over all graphs; predictions are compared after each graph's own factor
    pub drift: f64,
    /// whole plans of the catalogue, unfused and fused: predicted against measured time
    pub plans: TimeErrors,
    /// the same without the factor
    pub plans_without_drift: TimeErrors,
    /// the kernels of these plans
    pub kernels: TimeErrors,
    /// unfused or fused: predicted against measured choice
    pub decisions: Decisions,
    /// every graph
    pub cases: Vec<CaseRow>,
}

/// The prediction error: `|predicted - measured| / measured`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct TimeErrors {
    /// predictions
    pub count: usize,
    /// half of them are off by less
    pub median: f64,
    /// nine of ten are off by less
    pub ninetieth_percentile: f64,
}

impl TimeErrors {
    /// Of pairs of predicted and measured times.
    pub(crate) fn of(pairs: impl Iterator<Item = (Seconds, Seconds)>) -> TimeErrors {
        let relative =
            |(predicted, measured): (Seconds, Seconds)| (predicted.0 - measured.0).abs() / measured.0.max(1e-12);
        let mut errors: Vec<f64> = pairs.map(relative).collect();
        errors.sort_by(f64::total_cmp);
        let at = |share: f64| errors.get((errors.len() as f64 * share) as usize).copied().unwrap_or(0.0);
        TimeErrors { count: errors.len(), median: at(0.5), ninetieth_percentile: at(0.9) }
    }
}

/// How often the predictions choose the plan that is faster.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Decisions {
    /// graphs in which something can be fused
    pub cases: usize,
    /// of them, those where fusing everything that is legal is slower
    pub losing: usize,
    /// of them, those where both plans take the same time, within 5 %
    pub ties: usize,
    /// of those that are not ties, the number predicted right
    pub right: usize,
}

impl Decisions {
    fn of(cases: &[CaseRow]) -> Decisions {
        let outcomes = || cases.iter().filter_map(|case| case.outcome.map(|outcome| (case, outcome)));
        let count = |wanted: Outcome| outcomes().filter(|&(_, outcome)| outcome == wanted).count();
        Decisions {
            cases: outcomes().count(),
            losing: count(Outcome::Loses),
            ties: count(Outcome::Tie),
            right: outcomes().filter(|(case, outcome)| *outcome != Outcome::Tie && case.is_right()).count(),
        }
    }

    /// Share of right predictions among those that are not ties.
    pub fn right_share(&self) -> f64 {
        self.right as f64 / (self.cases - self.ties).max(1) as f64
    }

    /// Share of graphs where fusing is slower.
    pub fn losing_share(&self) -> f64 {
        self.losing as f64 / self.cases.max(1) as f64
    }
}

/// The measured outcome of fusing everything that is legal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// faster than unfused
    Wins,
    /// slower than unfused
    Loses,
    /// neither
    Tie,
}

/// One graph, unfused and with everything fused that is legal.
#[derive(Debug, Clone, Serialize)]
pub struct CaseRow {
    /// the graph
    pub name: String,
    /// whether it is an op of the catalogue, whose times count
    pub catalog: bool,
    /// how much slower the machine ran around it than when it was calibrated; predictions include it
    pub drift: f64,
    /// kernels of the unfused plan
    pub unfused_kernels: usize,
    /// kernels of the fused plan
    pub fused_kernels: usize,
    /// measured microseconds, unfused
    pub unfused_us: f64,
    /// predicted microseconds, unfused
    pub unfused_predicted_us: f64,
    /// measured microseconds, fused
    pub fused_us: f64,
    /// predicted microseconds, fused
    pub fused_predicted_us: f64,
    /// the outcome of fusing; none if there is nothing to fuse
    pub outcome: Option<Outcome>,
    /// kernels of both plans, those that were timed on their own
    pub kernels: Vec<KernelCase>,
}

/// One kernel of a case.
#[derive(Debug, Clone, Serialize)]
pub struct KernelCase {
    /// what it is
    pub name: String,
    /// measured microseconds
    pub us: f64,
    /// predicted microseconds
    pub predicted_us: f64,
}

impl CaseRow {
    fn new(graph: &Graph, catalog: bool, machine: &Machine, drift: f64, [unfused, fused]: [&Timed; 2]) -> CaseRow {
        let ratio = fused.measured.0 / unfused.measured.0.max(1e-12);
        let outcome = match ratio {
            _ if unfused.kernels.len() == fused.kernels.len() => None,
            ratio if ratio > 1.0 + TIE => Some(Outcome::Loses),
            ratio if ratio < 1.0 - TIE => Some(Outcome::Wins),
            _ => Some(Outcome::Tie),
        };
        let kernels = unfused.kernels.iter().chain(&fused.kernels).filter_map(|sample| {
            let (name, us) = (sample.name(), sample.measured?.us());
            Some(KernelCase { name, us, predicted_us: drift * sample.predict(machine).us() })
        });
        CaseRow {
            name: graph.name().to_string(),
            catalog,
            drift,
            unfused_kernels: unfused.kernels.len(),
            fused_kernels: fused.kernels.len(),
            unfused_us: unfused.measured.us(),
            unfused_predicted_us: drift * unfused.predict(machine).us(),
            fused_us: fused.measured.us(),
            fused_predicted_us: drift * fused.predict(machine).us(),
            outcome,
            kernels: kernels.collect(),
        }
    }

    /// Whether the predicted times choose the faster plan; either is right in a tie.
    pub fn is_right(&self) -> bool {
        let predicted_faster = self.fused_predicted_us < self.unfused_predicted_us;
        match self.outcome {
            Some(Outcome::Wins) => predicted_faster,
            Some(Outcome::Loses) => !predicted_faster,
            Some(Outcome::Tie) | None => true,
        }
    }

    /// The larger error of the two predictions, relative and with its sign.
    pub fn worst_error(&self) -> f64 {
        let unfused = self.unfused_predicted_us / self.unfused_us.max(1e-9) - 1.0;
        let fused = self.fused_predicted_us / self.fused_us.max(1e-9) - 1.0;
        if unfused.abs() > fused.abs() { unfused } else { fused }
    }
}

/// Measures the catalogue at three sizes, and graphs where fusing wins or loses, against the predictions of the engine's
/// machine. `progress` receives the number of finished graphs and of all graphs.
pub fn validate(engine: &Engine, progress: impl FnMut(usize, usize)) -> Result<Validation, Error> {
    match engine.device().machine().kind {
        MachineKind::Cpu => validate_on(engine, &cases::validation()?, BUDGET, progress),
        MachineKind::Gpu => validate_gpu(engine, progress),
    }
}

/// A GPU's speed does not drift as that of a shared CPU does, so there is no anchor.
fn validate_gpu(engine: &Engine, progress: impl FnMut(usize, usize)) -> Result<Validation, Error> {
    let (graphs, catalog): (Vec<Graph>, Vec<bool>) = gpu::validation()?.into_iter().unzip();
    let timed = gpu::time_all(engine, &graphs, progress)?;
    let machine = engine.device().machine();
    let cases = graphs.iter().zip(catalog).zip(&timed);
    let cases =
        cases.map(|((graph, catalog), [unfused, fused])| CaseRow::new(graph, catalog, machine, 1.0, [unfused, fused]));
    Ok(Validation::of(engine, cases.collect()))
}

pub(super) fn validate_on(
    engine: &Engine,
    graphs: &[(Graph, bool)],
    budget: Duration,
    mut progress: impl FnMut(usize, usize),
) -> Result<Validation, Error> {
    let all = graphs.len();
    let machine = engine.device().machine();
    let mut cases = Vec::with_capacity(all);
    let mut anchor = Anchor::new(engine)?;
    for (done, (graph, catalog)) in graphs.iter().enumerate() {
        progress(done, all);
        let before = anchor.now()?;
        let [unfused, fused] = time(engine, graph, [Strategy::Unfused, Strategy::Greedy], budget)?;
        let around = (before + anchor.now()?) * 0.5;
        let drift = machine.find(Quantity::AnchorUs).map_or(1.0, |usual| around.us() / usual.max(1e-9));
        cases.push(CaseRow::new(graph, *catalog, machine, drift, [&unfused, &fused]));
    }
    progress(all, all);
    Ok(Validation::of(engine, cases))
}

impl Validation {
    fn of(engine: &Engine, cases: Vec<CaseRow>) -> Validation {
        let of_catalog = || cases.iter().filter(|case| case.catalog);
        let pair = |predicted: f64, measured: f64| (Seconds::from_us(predicted), Seconds::from_us(measured));
        let plans = TimeErrors::of(of_catalog().flat_map(|case| {
            let unfused = pair(case.unfused_predicted_us, case.unfused_us);
            [unfused, pair(case.fused_predicted_us, case.fused_us)]
        }));
        let plans_without_drift = TimeErrors::of(of_catalog().flat_map(|case| {
            let unfused = pair(case.unfused_predicted_us / case.drift, case.unfused_us);
            [unfused, pair(case.fused_predicted_us / case.drift, case.fused_us)]
        }));
        let mut drifts: Vec<f64> = cases.iter().map(|case| case.drift).collect();
        drifts.sort_by(f64::total_cmp);
        let kernels = of_catalog().flat_map(|case| &case.kernels);
        Validation {
            device: engine.device().describe(),
            drift: drifts.get(drifts.len() / 2).copied().unwrap_or(1.0),
            plans,
            plans_without_drift,
            kernels: TimeErrors::of(kernels.map(|kernel| pair(kernel.predicted_us, kernel.us))),
            decisions: Decisions::of(&cases),
            cases,
        }
    }
}
