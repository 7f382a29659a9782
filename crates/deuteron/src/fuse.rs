//! The main job: plan a graph, run it unfused and fused, prove both against f64, measure.

use std::time::{Duration, Instant};

use deuteron_graph::Graph;
use deuteron_plan::{Plan, Strategy};
use deuteron_reference::Array;
use serde::Serialize;

use crate::engine::Engine;
use crate::error::Error;
use crate::seed;
use crate::session::Session;
use crate::tensor::Tensor;
use crate::verify::{Expected, Verification};

/// What `fuse` found. The JSON form has these fields.
#[derive(Debug, Clone, Serialize)]
pub struct FuseReport {
    /// name of the graph
    pub graph: String,
    /// where it ran
    pub device: String,
    /// whether every output of both plans is within its bound
    pub verified: bool,
    /// largest error against f64, of the output nearest to its bound
    pub max_error: f64,
    /// the bound of that output
    pub bound: f64,
    /// the largest error as a share of its bound
    pub worst_ratio: f64,
    /// the output nearest to its bound
    pub worst_output: String,
    /// a kernel a builder call
    pub unfused: PlanReport,
    /// row ops merged wherever it is legal
    pub fused: PlanReport,
    /// unfused time over fused time
    pub speedup: f64,
    /// the kernels of the fused plan, in order
    pub groups: Vec<GroupReport>,
    /// every pair of neighbours of the fused plan that stays apart
    pub refusals: Vec<RefusalReport>,
    /// seconds the f64 reference took
    pub reference_seconds: f64,
}

/// One plan, measured.
#[derive(Debug, Clone, Serialize)]
pub struct PlanReport {
    /// how many
    pub kernels: usize,
    /// compulsory traffic of all kernels
    pub bytes: u64,
    /// median time of a run
    pub ms: f64,
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
    /// time to spend on measuring, about
    pub budget: Duration,
}

impl Default for FuseOptions {
    fn default() -> Self {
        FuseOptions { seed: 1, backward: false, budget: Duration::from_millis(1500) }
    }
}

/// Where `fuse` is, for a progress bar.
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

/// Runs the main job on one graph.
pub fn fuse(
    engine: &Engine,
    graph: &Graph,
    options: &FuseOptions,
    mut progress: impl FnMut(Stage),
) -> Result<FuseReport, Error> {
    progress(Stage::Inputs);
    let tensors = seed::inputs(graph, options.seed)?;
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    progress(Stage::Compiling);
    let mut unfused = Session::new(engine, graph, Strategy::Unfused)?;
    let mut fused = Session::new(engine, graph, Strategy::Fused)?;
    progress(Stage::Reference);
    let begin = Instant::now();
    let arrays: Vec<Array> = tensors.iter().map(Tensor::to_array).collect();
    let expected = Expected::new(graph, &arrays, options.backward)?;
    drop(arrays);
    let reference_seconds = begin.elapsed().as_secs_f64();
    progress(Stage::Verifying);
    let checked = [verify(&mut unfused, &inputs, &expected)?, verify(&mut fused, &inputs, &expected)?];
    drop(expected);
    progress(Stage::Measuring);
    let times = measure(&mut unfused, &mut fused, &inputs, options.budget)?;
    Ok(report(engine, graph, [&unfused, &fused], &checked, times, reference_seconds))
}

fn verify(session: &mut Session, inputs: &[&Tensor], expected: &Expected) -> Result<Verification, Error> {
    session.poison();
    session.run(inputs)?;
    let outputs: Vec<Tensor> =
        (0..session.graph().outputs().len()).map(|index| session.output(index)).collect::<Result<_, _>>()?;
    Ok(expected.verify(session.graph(), &outputs))
}

struct Times {
    unfused: Duration,
    fused: Duration,
    groups: Vec<Duration>,
}

/// Runs both plans in turn, so that what disturbs the machine disturbs both, and takes medians.
fn measure(unfused: &mut Session, fused: &mut Session, inputs: &[&Tensor], budget: Duration) -> Result<Times, Error> {
    let (mut slow, mut fast) = (Vec::new(), Vec::new());
    let mut groups: Vec<Vec<Duration>> = vec![Vec::new(); fused.plan().groups.len()];
    let begin = Instant::now();
    while slow.len() < 3 || (begin.elapsed() < budget && slow.len() < 1001) {
        let start = Instant::now();
        unfused.run_timed(inputs)?;
        slow.push(start.elapsed());
        let start = Instant::now();
        let times = fused.run_timed(inputs)?;
        fast.push(start.elapsed());
        groups.iter_mut().zip(times).for_each(|(all, &time)| all.push(time));
    }
    let groups = groups.into_iter().map(median).collect();
    Ok(Times { unfused: median(slow), fused: median(fast), groups })
}

/// The middle of the sorted list; zero of an empty one.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(Duration::ZERO)
}

fn report(
    engine: &Engine,
    graph: &Graph,
    sessions: [&Session; 2],
    checked: &[Verification; 2],
    times: Times,
    reference_seconds: f64,
) -> FuseReport {
    let worst = checked.iter().filter_map(Verification::worst);
    let worst = worst.max_by(|a, b| a.comparison.ratio.total_cmp(&b.comparison.ratio));
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let plan_report = |plan: &Plan, time: Duration| PlanReport {
        kernels: plan.groups.len(),
        bytes: plan.bytes().0,
        ms: milliseconds(time),
        arena: plan.arena.bytes,
    };
    let fused_plan = sessions[1].plan();
    let groups = fused_plan.groups.iter().zip(&times.groups).map(|(group, &time)| GroupReport {
        name: group.name.clone(),
        kind: group.kind.to_string(),
        ops: group.nodes.len(),
        bytes: group.traffic.total().0,
        ms: milliseconds(time),
    });
    let refusals = fused_plan.refusals.iter().map(|refusal| RefusalReport {
        producer: refusal.producer,
        consumer: refusal.consumer,
        code: refusal.reason.code().to_string(),
        text: refusal.reason.to_string(),
    });
    FuseReport {
        graph: graph.name().to_string(),
        device: engine.device().describe(),
        verified: checked.iter().all(Verification::holds),
        max_error: worst.map_or(0.0, |worst| worst.comparison.max_error),
        bound: worst.map_or(0.0, |worst| worst.comparison.bound),
        worst_ratio: worst.map_or(0.0, |worst| worst.comparison.ratio),
        worst_output: worst.map_or(String::new(), |worst| worst.name.clone()),
        unfused: plan_report(sessions[0].plan(), times.unfused),
        fused: plan_report(fused_plan, times.fused),
        speedup: times.unfused.as_secs_f64() / times.fused.as_secs_f64().max(1e-12),
        groups: groups.collect(),
        refusals: refusals.collect(),
        reference_seconds,
    }
}
