//! Differential test on this machine: random graphs, several plans each, against the f64 reference.

mod catalog;
mod mathematics;

pub use deuteron_reference::MOST_ELEMENTS;

pub use catalog::{Breadth, CatalogFailure, CatalogReport, OpRow, Part, beside_other_work, check_catalog};

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use deuteron_codegen::cpu::simd::Isa;
use deuteron_device::Cpu;
use deuteron_graph::{Dtype, Graph, NodeId, Output, extract};
use deuteron_plan::{MachineKind, Strategy};
use deuteron_reference::{
    Array, Case, Rounding, Shares, interpret_all, op_counts, random_bounded_case, random_case_within,
};
use serde::Serialize;

use crate::engine::Engine;
use crate::error::Error;
use crate::parallel;
use crate::session::Session;
use crate::tensor::Tensor;
use crate::verify::{Expected, Verification};

/// Which random graphs to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomGraphs {
    /// how many
    pub cases: usize,
    /// the seed of the first one; case `i` has seed `seed + i`
    pub seed: u64,
    /// largest target size of a graph's first input, in elements
    pub elements: usize,
    /// on a CPU, one in this many graphs also runs under the searched plan
    pub one_searched_in: u64,
    /// start no new graph after this time
    pub limit: Option<Duration>,
}

impl RandomGraphs {
    /// `cases` graphs from a seed on, of all sizes, one in eight also under the searched plan, without a time limit.
    pub fn new(cases: usize, seed: u64) -> RandomGraphs {
        RandomGraphs { cases, seed, elements: MOST_ELEMENTS, one_searched_in: 8, limit: None }
    }
}

/// The result of `check`.
#[derive(Debug, Clone, Serialize)]
pub struct CheckReport {
    /// graphs that were run
    pub cases: usize,
    /// the seed of the first one; case `i` has seed `seed + i`
    pub seed: u64,
    /// largest target size of a graph's first input, in elements
    pub elements: usize,
    /// graphs with a result outside of its bound
    pub failures: usize,
    /// the largest error as a share of its bound, over all results
    pub worst_ratio: f64,
    /// the seed of the case it came from
    pub worst_seed: u64,
    /// calls of each kind over all graphs
    pub op_counts: BTreeMap<String, usize>,
    /// median number of calls per graph
    pub median_ops: usize,
    /// graphs that were differentiated
    pub backward: usize,
    /// graphs of each dtype
    pub dtypes: BTreeMap<String, usize>,
    /// kernels run, over all plans
    pub kernels: usize,
    /// elements of results of each dtype, by their error as a share of their bound
    pub shares: BTreeMap<String, ShareCounts>,
    /// devices the cases were spread over: instruction set and threads
    pub devices: Vec<String>,
    /// seconds it took
    pub seconds: f64,
    /// each failure, reduced
    pub failed: Vec<Failure>,
}

/// Elements by their error as a share of their bound.
#[derive(Debug, Clone, Serialize)]
pub struct ShareCounts {
    /// exactly the reference
    pub exact: u64,
    /// up to 1/16, 1/8, 1/4, 1/2, 3/4 and 1 of the bound
    pub within: Vec<u64>,
    /// outside of the bound
    pub wrong: u64,
    /// without a bound: it depends on an undecided branch
    pub unbounded: u64,
}

impl From<Shares> for ShareCounts {
    fn from(shares: Shares) -> ShareCounts {
        let Shares { exact, within, wrong, unbounded } = shares;
        ShareCounts { exact, within: within.to_vec(), wrong, unbounded }
    }
}

/// A graph whose result is wrong.
#[derive(Debug, Clone, Serialize)]
pub struct Failure {
    /// seed of the case
    pub seed: u64,
    /// plan that failed
    pub plan: String,
    /// device it ran on
    pub device: String,
    /// the wrong output, or the error
    pub what: String,
    /// the smallest graph found that still fails, in text form
    pub graph: String,
}

/// Runs random graphs, distributed over the engines, and starts no new one after the time limit. Calls `progress` with the number done.
///
/// References are interpreted and kernels compiled on all cores; each engine's device runs one graph at a time.
pub fn check(engines: &[Engine], graphs: RandomGraphs, mut progress: impl FnMut(usize)) -> Result<CheckReport, Error> {
    let RandomGraphs { cases, seed, elements, one_searched_in: _, limit } = graphs;
    let begin = Instant::now();
    let beds: Vec<Bed> = engines.iter().map(Bed::new).collect();
    let mut outcomes: Vec<Option<Outcome>> = (0..cases).map(|_| None).collect();
    let mut done = 0;
    let run = |index: usize| {
        let in_time = limit.is_none_or(|limit| begin.elapsed() < limit);
        in_time.then(|| trial(&beds[index % beds.len()], seed.wrapping_add(index as u64), &graphs))
    };
    parallel::for_each(cases, run, |index, outcome| {
        outcomes[index] = outcome;
        done += 1;
        progress(done);
    });
    let mut report = CheckReport {
        cases,
        seed,
        elements,
        failures: 0,
        worst_ratio: 0.0,
        worst_seed: seed,
        op_counts: BTreeMap::new(),
        median_ops: 0,
        backward: 0,
        dtypes: BTreeMap::new(),
        kernels: 0,
        shares: BTreeMap::new(),
        devices: engines.iter().map(|engine| engine.device().describe()).collect(),
        seconds: 0.0,
        failed: Vec::new(),
    };
    let mut sizes = Vec::with_capacity(cases);
    let mut shares: BTreeMap<String, Shares> = BTreeMap::new();
    report.cases = outcomes.iter().flatten().count();
    for (index, outcome) in outcomes.into_iter().enumerate().filter_map(|(index, outcome)| Some((index, outcome?))) {
        let case_seed = seed.wrapping_add(index as u64);
        sizes.push(outcome.op_counts.values().sum::<usize>());
        for (name, count) in outcome.op_counts {
            *report.op_counts.entry(name).or_default() += count;
        }
        report.backward += outcome.backward as usize;
        *report.dtypes.entry(outcome.dtype.to_string()).or_default() += 1;
        report.kernels += outcome.kernels;
        outcome.shares.iter().for_each(|(dtype, own)| shares.entry(dtype.to_string()).or_default().add(own));
        if outcome.worst_ratio > report.worst_ratio {
            (report.worst_ratio, report.worst_seed) = (outcome.worst_ratio, case_seed);
        }
        if let Some((plan, what)) = outcome.failure {
            report.failures += 1;
            if report.failed.len() < 5 {
                let bed = &beds[index % beds.len()];
                let graph = minimise(bed, &random_case_within(case_seed, elements), plan).to_string();
                let device = bed.engine.device().describe();
                report.failed.push(Failure { seed: case_seed, plan: plan.to_string(), device, what, graph });
            }
        }
    }
    report.shares = shares.into_iter().map(|(dtype, shares)| (dtype, shares.into())).collect();
    sizes.sort_unstable();
    report.median_ops = sizes.get(sizes.len() / 2).copied().unwrap_or(0);
    report.seconds = begin.elapsed().as_secs_f64();
    Ok(report)
}

/// The best instruction set on all cores for most cases, each other one and odd thread counts for the rest.
pub fn cpu_engines() -> Vec<Engine> {
    let mut engines = vec![Engine::cpu()];
    for (index, isa) in Isa::available().into_iter().enumerate() {
        engines.push(Engine::on(Arc::new(Cpu::with(index + 1, isa))));
    }
    engines
}

/// An engine whose device is used by one thread at a time.
struct Bed<'a> {
    engine: &'a Engine,
    turn: Mutex<()>,
}

impl<'a> Bed<'a> {
    fn new(engine: &'a Engine) -> Bed<'a> {
        Bed { engine, turn: Mutex::new(()) }
    }

    /// Poisons the outputs of a session, runs it, and reads them.
    fn run(&self, session: &mut Session, inputs: &[&Tensor]) -> Result<Vec<Tensor>, Error> {
        // Who panicked while it had its turn left no state behind.
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        session.poison()?;
        session.run(inputs)?;
        (0..session.graph().outputs().len()).map(|index| session.output(index)).collect()
    }
}

struct Trial<'a> {
    bed: &'a Bed<'a>,
    graph: &'a Graph,
    inputs: &'a [Array],
}

/// The plans under which a graph is run.
///
/// On a CPU planning takes longer than running: a search prices a hundred groups of an average graph. Every graph is run with
/// one kernel per primitive, per composite, and per group of the greedy plan, and some by the plan that a search finds too. On a GPU each kernel has to go
/// through a compiler: every graph is run by the plan that a search finds, one in four with one kernel per composite too, and one in sixteen with one
/// kernel per primitive.
fn plans(engine: &Engine, seed: u64, one_searched_in: u64) -> &'static [Strategy] {
    const PLANS: [Strategy; 4] = [Strategy::Naive, Strategy::Eager, Strategy::Greedy, Strategy::Fused];
    // Six seeds in a row have every dtype and direction, and every device of a CPU takes some of them.
    match engine.device().machine().kind {
        MachineKind::Cpu if (seed / 6).is_multiple_of(one_searched_in.max(1)) => &PLANS,
        MachineKind::Cpu => &PLANS[..3],
        MachineKind::Gpu if seed.is_multiple_of(16) => &[Strategy::Naive, Strategy::Eager, Strategy::Fused],
        MachineKind::Gpu if seed.is_multiple_of(4) => &[Strategy::Eager, Strategy::Fused],
        MachineKind::Gpu => &[Strategy::Fused],
    }
}

struct Outcome {
    op_counts: BTreeMap<String, usize>,
    dtype: Dtype,
    backward: bool,
    kernels: usize,
    /// of every output of every plan
    shares: Vec<(Dtype, Shares)>,
    worst_ratio: f64,
    failure: Option<(Strategy, String)>,
}

/// Runs the graph of a seed under every plan.
fn trial(bed: &Bed<'_>, seed: u64, graphs: &RandomGraphs) -> Outcome {
    let (case, expected) = match random_bounded_case(seed, graphs.elements) {
        Ok((case, bounded)) => (case, Ok(Expected::of(bounded))),
        Err(error) => (random_case_within(seed, graphs.elements), Err(error)),
    };
    let outcome = Outcome {
        op_counts: op_counts(&case.graph),
        dtype: case.dtype,
        backward: case.backward,
        kernels: 0,
        shares: Vec::new(),
        worst_ratio: 0.0,
        failure: expected.as_ref().err().map(|error| (Strategy::Naive, error.to_string())),
    };
    let Ok(expected) = expected else { return outcome };
    let trial = Trial { bed, graph: &case.graph, inputs: &case.inputs };
    trial.all_plans(plans(bed.engine, seed, graphs.one_searched_in), &expected, outcome)
}

impl Trial<'_> {
    fn all_plans(&self, plans: &[Strategy], expected: &Expected, mut outcome: Outcome) -> Outcome {
        for &strategy in plans {
            match parallel::guarded(|| self.plan(strategy, expected)) {
                Ok(Ok((kernels, verification))) => {
                    outcome.kernels += kernels;
                    let outputs = verification.outputs.iter();
                    outcome.shares.extend(outputs.map(|output| (output.dtype, output.comparison.shares)));
                    let worst = verification.worst();
                    let ratio = worst.map_or(0.0, |worst| worst.comparison.ratio);
                    outcome.worst_ratio = outcome.worst_ratio.max(ratio);
                    if let (false, Some(worst), None) = (verification.holds(), worst, &outcome.failure) {
                        let what = format!("output {}: {:?}", worst.name, worst.comparison);
                        outcome.failure = Some((strategy, what));
                    }
                }
                Ok(Err(error)) => outcome.failure = outcome.failure.or(Some((strategy, error.to_string()))),
                Err(panic) => outcome.failure = outcome.failure.or(Some((strategy, panic))),
            }
        }
        outcome
    }

    fn plan(&self, strategy: Strategy, expected: &Expected) -> Result<(usize, Verification), Error> {
        let mut session = Session::new(self.bed.engine, self.graph, strategy)?;
        let tensors = tensors(self.graph, self.inputs)?;
        let outputs = self.bed.run(&mut session, &tensors.iter().collect::<Vec<_>>())?;
        Ok((session.plan().groups.len(), expected.verify(self.graph, &outputs)?))
    }

    fn fails(&self, strategy: Strategy) -> bool {
        let Ok(expected) = Expected::new(self.graph, self.inputs) else { return false };
        match parallel::guarded(|| self.plan(strategy, &expected)) {
            Ok(Ok((_, verification))) => !verification.holds(),
            Ok(Err(_)) | Err(_) => true,
        }
    }
}

/// Reference arrays as tensors of the graph's input types.
pub fn tensors(graph: &Graph, inputs: &[Array]) -> Result<Vec<Tensor>, Error> {
    graph.inputs().iter().zip(inputs).map(|(&id, array)| Tensor::from_array(graph.node(id).dtype, array)).collect()
}

/// Time limit for reducing a failure.
const MINIMISE: Duration = Duration::from_secs(10);

/// Looks for a smaller graph that still fails: one output, then any inner value turned into an input.
fn minimise(bed: &Bed<'_>, case: &Case, strategy: Strategy) -> Graph {
    let deadline = Instant::now() + MINIMISE;
    let (mut graph, mut inputs) = (case.graph.clone(), case.inputs.to_vec());
    loop {
        let mut smaller = None;
        for (outputs, cut) in reductions(&graph) {
            if Instant::now() > deadline {
                return graph;
            }
            let Some((candidate, values)) = reduced(&graph, &inputs, &outputs, cut) else { continue };
            let is_smaller = candidate.nodes().len() < graph.nodes().len() || outputs.len() < graph.outputs().len();
            let trial = Trial { bed, graph: &candidate, inputs: &values };
            if is_smaller && trial.fails(strategy) {
                smaller = Some((candidate, values));
                break;
            }
        }
        match smaller {
            Some(found) => (graph, inputs) = found,
            None => return graph,
        }
    }
}

fn reductions(graph: &Graph) -> Vec<(Vec<Output>, Option<NodeId>)> {
    let mut all = Vec::new();
    if graph.outputs().len() > 1 {
        all.extend(graph.outputs().iter().map(|output| (vec![output.clone()], None)));
    }
    // From the end: the later the cut, the more falls away.
    all.extend(graph.ids().rev().map(|id| (graph.outputs().to_vec(), Some(id))));
    all
}

fn reduced(graph: &Graph, inputs: &[Array], outputs: &[Output], cut: Option<NodeId>) -> Option<(Graph, Vec<Array>)> {
    let values = interpret_all(graph, inputs, Rounding::Storage).ok()?;
    let boundary: Vec<NodeId> = graph.inputs().iter().copied().chain(cut).collect();
    let candidate = extract(graph, outputs, &boundary).ok()?;
    let value_of = |name: &str| {
        let id = graph.find(name).or_else(|| name.strip_prefix("node").and_then(|n| graph.id(n.parse().ok()?)));
        id.map(|id| values[id.index()].clone())
    };
    let arrays = candidate.inputs().iter().map(|&id| value_of(&candidate.label(id))).collect::<Option<_>>()?;
    Some((candidate, arrays))
}
