//! Differential test on this machine: random graphs, every plan, against the f64 reference.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deuteron_codegen::cpu::simd::Isa;
use deuteron_device::Cpu;
use deuteron_graph::{Graph, NodeId, Output, extract};
use deuteron_plan::Strategy;
use deuteron_reference::{Array, Case, Rounding, interpret_all, op_counts, random_case};
use serde::Serialize;

use crate::engine::Engine;
use crate::error::Error;
use crate::session::Session;
use crate::tensor::Tensor;
use crate::verify::{Expected, Verification};

/// What `check` found.
#[derive(Debug, Clone, Serialize)]
pub struct CheckReport {
    /// graphs that were run
    pub cases: usize,
    /// the seed of the first one; case `i` has seed `seed + i`
    pub seed: u64,
    /// graphs with a result outside of its bound
    pub failures: usize,
    /// the largest error as a share of its bound, over all results
    pub worst_ratio: f64,
    /// the seed of the case it came from
    pub worst_seed: u64,
    /// calls of each kind over all graphs
    pub op_counts: BTreeMap<String, usize>,
    /// median number of calls a graph
    pub median_ops: usize,
    /// graphs that were differentiated
    pub backward: usize,
    /// graphs of each dtype
    pub dtypes: BTreeMap<String, usize>,
    /// kernels run, over all plans
    pub kernels: usize,
    /// devices the cases were spread over: instruction set and threads
    pub devices: Vec<String>,
    /// seconds it took
    pub seconds: f64,
    /// each failure, made small
    pub failed: Vec<Failure>,
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
    /// output that is wrong, or what went wrong
    pub what: String,
    /// the smallest graph found that still fails, in text form
    pub graph: String,
}

/// Runs `cases` random graphs from `seed` on. `progress` is told after each.
pub fn check(cases: usize, seed: u64, mut progress: impl FnMut(usize)) -> Result<CheckReport, Error> {
    let begin = Instant::now();
    let engines = engines();
    let mut report = CheckReport {
        cases,
        seed,
        failures: 0,
        worst_ratio: 0.0,
        worst_seed: seed,
        op_counts: BTreeMap::new(),
        median_ops: 0,
        backward: 0,
        dtypes: BTreeMap::new(),
        kernels: 0,
        devices: engines.iter().map(|engine| engine.device().describe()).collect(),
        seconds: 0.0,
        failed: Vec::new(),
    };
    let mut sizes = Vec::with_capacity(cases);
    for index in 0..cases {
        let case_seed = seed.wrapping_add(index as u64);
        let case = random_case(case_seed);
        let engine = &engines[index % engines.len()];
        let counts = op_counts(&case.graph);
        sizes.push(counts.values().sum::<usize>());
        for (name, count) in counts {
            *report.op_counts.entry(name).or_default() += count;
        }
        report.backward += case.backward as usize;
        *report.dtypes.entry(case.dtype.to_string()).or_default() += 1;
        let trial = Trial { engine, graph: &case.graph, inputs: &case.inputs, backward: case.backward };
        let outcome = trial.all_plans();
        report.kernels += outcome.kernels;
        if outcome.worst_ratio > report.worst_ratio {
            (report.worst_ratio, report.worst_seed) = (outcome.worst_ratio, case_seed);
        }
        if let Some((plan, what)) = outcome.failure {
            report.failures += 1;
            if report.failed.len() < 5 {
                let graph = minimise(engine, &case, plan).to_string();
                let device = engine.device().describe();
                report.failed.push(Failure { seed: case_seed, plan: plan.to_string(), device, what, graph });
            }
        }
        progress(index + 1);
    }
    sizes.sort_unstable();
    report.median_ops = sizes.get(sizes.len() / 2).copied().unwrap_or(0);
    report.seconds = begin.elapsed().as_secs_f64();
    Ok(report)
}

/// The best instruction set on all cores for most cases, each other one and odd thread counts for the rest.
fn engines() -> Vec<Engine> {
    let mut engines = vec![Engine::cpu()];
    for (index, isa) in Isa::available().into_iter().enumerate() {
        engines.push(Engine::on(Arc::new(Cpu::with(index + 1, isa))));
    }
    engines
}

struct Trial<'a> {
    engine: &'a Engine,
    graph: &'a Graph,
    inputs: &'a [Array],
    backward: bool,
}

#[derive(Default)]
struct Outcome {
    kernels: usize,
    worst_ratio: f64,
    failure: Option<(Strategy, String)>,
}

impl Trial<'_> {
    fn all_plans(&self) -> Outcome {
        let mut outcome = Outcome::default();
        let expected = match Expected::new(self.graph, self.inputs, self.backward) {
            Ok(expected) => expected,
            Err(error) => {
                outcome.failure = Some((Strategy::Naive, error.to_string()));
                return outcome;
            }
        };
        for strategy in [Strategy::Naive, Strategy::Eager, Strategy::Fused] {
            match self.plan(strategy, &expected) {
                Ok((kernels, verification)) => {
                    outcome.kernels += kernels;
                    let worst = verification.worst();
                    let ratio = worst.map_or(0.0, |worst| worst.comparison.ratio);
                    outcome.worst_ratio = outcome.worst_ratio.max(ratio);
                    if let (false, Some(worst), None) = (verification.holds(), worst, &outcome.failure) {
                        let what = format!("output {}: {:?}", worst.name, worst.comparison);
                        outcome.failure = Some((strategy, what));
                    }
                }
                Err(error) => outcome.failure = outcome.failure.or(Some((strategy, error.to_string()))),
            }
        }
        outcome
    }

    fn plan(&self, strategy: Strategy, expected: &Expected) -> Result<(usize, Verification), Error> {
        let mut session = Session::new(self.engine, self.graph, strategy)?;
        let tensors = tensors(self.graph, self.inputs)?;
        let inputs: Vec<&Tensor> = tensors.iter().collect();
        session.poison()?;
        session.run(&inputs)?;
        let outputs: Vec<Tensor> =
            (0..self.graph.outputs().len()).map(|index| session.output(index)).collect::<Result<_, _>>()?;
        Ok((session.plan().groups.len(), expected.verify(self.graph, &outputs)?))
    }

    fn fails(&self, strategy: Strategy) -> bool {
        let Ok(expected) = Expected::new(self.graph, self.inputs, self.backward) else { return false };
        match self.plan(strategy, &expected) {
            Ok((_, verification)) => !verification.holds(),
            Err(_) => true,
        }
    }
}

/// Reference arrays as tensors of the graph's input types.
pub fn tensors(graph: &Graph, inputs: &[Array]) -> Result<Vec<Tensor>, Error> {
    graph.inputs().iter().zip(inputs).map(|(&id, array)| Tensor::from_array(graph.node(id).dtype, array)).collect()
}

/// The time a failure may be made smaller for.
const MINIMISE: Duration = Duration::from_secs(10);

/// Looks for a smaller graph that still fails: one output, then any inner value turned into an input.
fn minimise(engine: &Engine, case: &Case, strategy: Strategy) -> Graph {
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
            let trial = Trial { engine, graph: &candidate, inputs: &values, backward: case.backward };
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
