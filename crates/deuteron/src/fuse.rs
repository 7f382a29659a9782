//! Plans a graph, runs it eager, unfused and fused, verifies all three against f64, and measures them.

mod agreement;
mod learn;
mod measure;

pub use learn::{Lesson, lesson};

use std::time::{Duration, Instant};

use deuteron_graph::Graph;
use deuteron_plan::{GroupKind, Machine, Plan, Strategy};
use deuteron_reference::Array;
use deuteron_report::{Analysis, ClassError, KernelSheet, MeasuredSheet};
use serde::Serialize;

use crate::analyze::{AnalyzeOptions, Kernels, analyze, note_registers};
use crate::engine::Engine;
use crate::error::Error;
use crate::seed;
use crate::session::Session;
use crate::tensor::Tensor;
use crate::times::median;
use crate::verify::{Expected, Verification};
pub(crate) use measure::{PlanTimes, measure};

pub use crate::seed::inputs;
pub use crate::verify::Coverage;
pub use agreement::{Agreement, Difference, agreement};

/// The result of `fuse`. The JSON form has these fields.
#[derive(Debug, Clone, Serialize)]
pub struct FuseReport {
    /// name of the graph
    pub graph: String,
    /// where it ran
    pub device: String,
    /// whether every output of all plans is within its bounds, and these say something: not all are above the largest value of their output
    pub verified: bool,
    /// whether every output of all plans is within its bounds, and some element of every output has one: what the exit code says
    pub within_bounds: bool,
    /// how many elements were checked
    pub coverage: Coverage,
    /// largest error against f64, of the output nearest to its bound
    pub max_error: f64,
    /// the bound of that output; `null` if none of its elements has one, which is then not verified
    pub bound: f64,
    /// the largest error as a share of its bound
    pub worst_ratio: f64,
    /// the output nearest to its bound
    pub worst_output: String,
    /// a kernel per composite, attention with its scores in memory: what textbook code runs
    pub eager: PlanReport,
    /// a kernel per builder call
    pub unfused: PlanReport,
    /// the cheapest plan
    pub fused: PlanReport,
    /// unfused time over fused time, from recordings where there are such
    pub speedup: f64,
    /// eager time over fused time, the same way
    pub speedup_over_eager: f64,
    /// the kernels of the fused plan, in order
    pub groups: Vec<GroupReport>,
    /// every pair of neighbours of the fused plan that stays apart
    pub refusals: Vec<RefusalReport>,
    /// seconds the f64 reference took
    pub reference_seconds: f64,
    /// the prediction error for each kind of kernel
    pub model: Vec<ClassError>,
    /// the analysis, with what was measured
    #[serde(skip)]
    pub analysis: Analysis,
}

/// One plan, measured.
#[derive(Debug, Clone, Serialize)]
pub struct PlanReport {
    /// how many
    pub kernels: usize,
    /// compulsory traffic of all kernels
    pub bytes: u64,
    /// median time of a run; on a GPU with kernels launched one by one
    pub ms: f64,
    /// the same from a CUDA graph of all launches, on a device that supports it
    pub graph_ms: Option<f64>,
    /// the run-to-run spread over the median: the interquartile range, or the full range of a few runs
    pub spread: f64,
    /// predicted time
    pub predicted_ms: f64,
    /// bytes of intermediates
    pub arena: usize,
}

/// One kernel of the fused plan.
#[derive(Debug, Clone, Serialize)]
pub struct GroupReport {
    /// what it is
    pub name: String,
    /// its kind
    pub kind: String,
    /// primitives it holds
    pub ops: usize,
    /// compulsory traffic
    pub bytes: u64,
    /// median time
    pub ms: f64,
    /// predicted time
    pub predicted_ms: f64,
}

/// Two neighbours that stay apart.
#[derive(Debug, Clone, Serialize)]
pub struct RefusalReport {
    /// group that makes the value
    pub producer: usize,
    /// group that reads it
    pub consumer: usize,
    /// stable code of the reason
    pub code: String,
    /// the reason
    pub text: String,
}

/// How `fuse` runs.
#[derive(Debug, Clone, Copy)]
pub struct FuseOptions {
    /// of the inputs
    pub seed: u64,
    /// whether the graph holds gradients, which are allowed a larger multiple of the storage type's error
    pub backward: bool,
    /// approximate time to spend on measuring
    pub budget: Duration,
    /// whether the analysis holds the source of every kernel
    pub sources: bool,
}

impl Default for FuseOptions {
    fn default() -> Self {
        FuseOptions { seed: 1, backward: false, budget: Duration::from_millis(1500), sources: false }
    }
}

/// The stage of `fuse`, for a progress bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// making inputs
    Inputs,
    /// planning and compiling
    Compiling,
    /// running the f64 reference
    Reference,
    /// comparing
    Verifying,
    /// timing
    Measuring,
}

/// Runs all stages on one graph.
pub fn fuse(
    engine: &Engine,
    graph: &Graph,
    options: &FuseOptions,
    mut progress: impl FnMut(Stage),
) -> Result<FuseReport, Error> {
    progress(Stage::Inputs);
    let tensors = seed::inputs(graph, options.seed)?;
    fuse_on(engine, graph, tensors, options, progress)
}

/// The same on inputs of the caller, one for each input of the graph.
pub fn fuse_on(
    engine: &Engine,
    graph: &Graph,
    tensors: Vec<Tensor>,
    options: &FuseOptions,
    mut progress: impl FnMut(Stage),
) -> Result<FuseReport, Error> {
    progress(Stage::Compiling);
    let question = AnalyzeOptions {
        backend: Some(engine.device().backend().clone()),
        sources: options.sources,
        // All plans run the graph as it is, so that they can be compared kernel by kernel.
        keep_all: true,
        kernels: Kernels::Generated,
        ..AnalyzeOptions::on(engine.device().machine().clone())
    };
    let analysis = analyze(graph, &question)?;
    let mut sessions = PLANS
        .into_iter()
        .map(|strategy| Session::new(engine, graph, strategy))
        .collect::<Result<Vec<Session>, Error>>()?;
    progress(Stage::Reference);
    let begin = Instant::now();
    let arrays: Vec<Array> = tensors.iter().map(Tensor::to_array).collect::<Result<_, _>>()?;
    let expected = Expected::new(graph, &arrays)?;
    drop(arrays);
    let reference_seconds = begin.elapsed().as_secs_f64();
    progress(Stage::Verifying);
    let uploaded: Vec<Tensor> = tensors.iter().map(|tensor| tensor.to_device(engine)).collect::<Result<_, _>>()?;
    let inputs: Vec<&Tensor> = uploaded.iter().collect();
    let checked = sessions
        .iter_mut()
        .map(|session| verify(session, &inputs, &expected))
        .collect::<Result<Vec<Verification>, Error>>()?;
    drop((expected, uploaded));
    progress(Stage::Measuring);
    let times = measure(engine, &mut sessions, &tensors, options.budget)?;
    Ok(report(engine, graph, &sessions, &checked, &times, reference_seconds, analysis))
}

/// The plans that are run, in this order.
const PLANS: [Strategy; 3] = [Strategy::Eager, Strategy::Unfused, Strategy::Fused];
const EAGER: usize = 0;
const UNFUSED: usize = 1;
const FUSED: usize = 2;

fn verify(session: &mut Session, inputs: &[&Tensor], expected: &Expected) -> Result<Verification, Error> {
    session.poison()?;
    session.run(inputs)?;
    let outputs: Vec<Tensor> =
        (0..session.graph().outputs().len()).map(|index| session.output(index)).collect::<Result<_, _>>()?;
    expected.verify(session.graph(), &outputs)
}

fn report(
    engine: &Engine,
    graph: &Graph,
    sessions: &[Session],
    checked: &[Verification],
    times: &[PlanTimes],
    reference_seconds: f64,
    mut analysis: Analysis,
) -> FuseReport {
    let worst = checked.iter().filter_map(Verification::worst);
    let worst = worst.max_by(|a, b| a.comparison.ratio.total_cmp(&b.comparison.ratio));
    // Bounds are of the graph and its inputs, so they are those of every plan.
    let coverage = checked.first().map(Verification::coverage).unwrap_or_default();
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let plan_report = |(plan, times): (&Plan, &PlanTimes)| PlanReport {
        kernels: plan.groups.len(),
        bytes: plan.bytes().0,
        ms: milliseconds(times.run),
        graph_ms: times.graph.map(milliseconds),
        spread: times.spread,
        predicted_ms: plan.time().us() / 1e3,
        arena: plan.arena.bytes,
    };
    let of = |index: usize| (sessions[index].plan(), &times[index]);
    let fused_plan = sessions[FUSED].plan();
    let groups = fused_plan.groups.iter().zip(&times[FUSED].kernels).map(|(group, &time)| GroupReport {
        name: group.name.clone(),
        kind: group.kind.to_string(),
        ops: group.nodes.len(),
        bytes: group.traffic.total().0,
        ms: milliseconds(time),
        predicted_ms: group.cost.total.us() / 1e3,
    });
    let refusals = fused_plan.refusals.iter().map(|refusal| RefusalReport {
        producer: refusal.producer,
        consumer: refusal.consumer,
        code: refusal.reason.code().to_string(),
        text: refusal.reason.to_string(),
    });
    let within_bounds = coverage.is_whole() && checked.iter().all(Verification::holds);
    let verified = within_bounds && !coverage.is_vacuous();
    let [unfused_shares, fused_shares] = [UNFUSED, FUSED].map(|index| times[index].shares());
    let model = class_errors(fused_plan, &fused_shares);
    let machine = engine.device().machine();
    fill_measured(&mut analysis.before, &unfused_shares, &sessions[UNFUSED], machine);
    fill_measured(&mut analysis.after, &fused_shares, &sessions[FUSED], machine);
    let [eager_time, unfused_time, fused_time] = [EAGER, UNFUSED, FUSED].map(|index| times[index].best());
    let over_fused = |time: Duration| time.as_secs_f64() / fused_time.as_secs_f64().max(1e-12);
    let speedup = over_fused(unfused_time);
    analysis.measured = Some(MeasuredSheet {
        eager_us: milliseconds(eager_time) * 1e3,
        unfused_us: milliseconds(unfused_time) * 1e3,
        chosen_us: milliseconds(fused_time) * 1e3,
        speedup,
        verified,
        worst_ratio: worst.map_or(0.0, |worst| worst.comparison.ratio),
        classes: model.clone(),
    });
    FuseReport {
        graph: graph.name().to_string(),
        device: engine.device().describe(),
        verified,
        within_bounds,
        coverage,
        max_error: worst.map_or(0.0, |worst| worst.comparison.error),
        bound: worst.map_or(0.0, |worst| worst.comparison.bound),
        worst_ratio: worst.map_or(0.0, |worst| worst.comparison.ratio),
        worst_output: worst.map_or(String::new(), |worst| worst.name.clone()),
        eager: plan_report(of(EAGER)),
        unfused: plan_report(of(UNFUSED)),
        fused: plan_report(of(FUSED)),
        speedup,
        speedup_over_eager: over_fused(eager_time),
        groups: groups.collect(),
        refusals: refusals.collect(),
        reference_seconds,
        model,
        analysis,
    }
}

/// The median of the measured times of each kernel's launches, and its registers as compiled.
pub(crate) fn fill_measured(kernels: &mut [KernelSheet], times: &[Duration], session: &Session, machine: &Machine) {
    for kernel in kernels {
        let own: Vec<Duration> = kernel.launches.iter().filter_map(|&launch| times.get(launch).copied()).collect();
        kernel.measured_us = Some(median(own).as_secs_f64() * 1e6);
        let compiled = kernel.launches.first().and_then(|&launch| session.kernels().get(launch));
        let registers = compiled.and_then(|kernel| kernel.usage().iter().map(|entry| entry.registers).max());
        note_registers(kernel, registers, machine);
    }
}

/// Kinds of kernels that the cost model distinguishes.
const KINDS: [GroupKind; 5] =
    [GroupKind::Row, GroupKind::Matmul, GroupKind::Attention, GroupKind::Copy, GroupKind::ScatterAdd];

fn class_errors(plan: &Plan, times: &[Duration]) -> Vec<ClassError> {
    let class = |kind: GroupKind| {
        let own = plan.groups.iter().zip(times).filter(|(group, _)| group.kind == kind);
        let pairs: Vec<(f64, f64)> =
            own.map(|(group, time)| (group.cost.total.us(), time.as_secs_f64() * 1e6)).collect();
        let mut errors: Vec<f64> =
            pairs.iter().map(|(predicted, measured)| (predicted - measured).abs() / measured.max(1e-9)).collect();
        errors.sort_by(f64::total_cmp);
        ClassError {
            class: kind.to_string(),
            kernels: pairs.len(),
            predicted_us: pairs.iter().map(|pair| pair.0).sum(),
            measured_us: pairs.iter().map(|pair| pair.1).sum(),
            median_error: errors.get(errors.len() / 2).copied().unwrap_or(0.0),
        }
    };
    KINDS.into_iter().map(class).filter(|class| class.kernels > 0).collect()
}
