//! Plans run exactly once, for profilers: the launches in order, and their predictions.

use deuteron_graph::{Graph, named};
use deuteron_plan::Strategy;
use serde::Serialize;

use super::{BenchCase, graph};
use crate::catalog;
use crate::engine::Engine;
use crate::error::Error;
use crate::listing::launches;
use crate::seed;
use crate::session::Session;
use crate::tensor::Tensor;

named! {
    /// How an op is divided into kernels.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum OpPlan {
        /// a kernel per composite, attention with its scores in memory
        Eager = "eager",
        /// a kernel per builder call
        Unfused = "unfused",
        /// as the ready-made op runs
        Fused = "fused",
    }
}

impl OpPlan {
    fn strategy(self, graph: &Graph) -> Strategy {
        match self {
            OpPlan::Eager => Strategy::Eager,
            OpPlan::Unfused => Strategy::Unfused,
            OpPlan::Fused => catalog::strategy(graph),
        }
    }
}

/// One op at one size. The JSON form of `bench --once` is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct OnceRow {
    /// name in the catalogue
    pub op: String,
    /// `forward` or `backward`
    pub direction: String,
    /// rows of the main operand
    pub rows: usize,
    /// its columns
    pub cols: usize,
    /// its storage type
    pub dtype: String,
    /// in the order they ran
    pub plans: Vec<OncePlan>,
}

/// One plan that ran.
#[derive(Debug, Clone, Serialize)]
pub struct OncePlan {
    /// `eager`, `unfused` or `fused`
    pub plan: String,
    /// in order
    pub kernels: Vec<OnceKernel>,
}

/// One kernel that ran.
#[derive(Debug, Clone, Serialize)]
pub struct OnceKernel {
    /// what it is
    pub name: String,
    /// its kind
    pub kind: String,
    /// the function names of its launches as a profiler shows them, in order; empty if a library chooses them
    pub launches: Vec<String>,
    /// compulsory bytes read
    pub bytes_read: u64,
    /// compulsory bytes written
    pub bytes_written: u64,
    /// bytes read that are predicted to be in the cache
    pub bytes_cached: u64,
    /// predicted microseconds
    pub predicted_us: f64,
    /// predicted registers per thread
    pub predicted_registers: u32,
    /// predicted share of the threads a multiprocessor holds
    pub predicted_occupancy: f64,
}

/// Runs each of these plans once, on inputs in device memory.
pub fn once(engine: &Engine, case: &BenchCase, wanted: &[OpPlan]) -> Result<OnceRow, Error> {
    let graph = graph(case)?;
    let tensors =
        seed::inputs(&graph, 1)?.iter().map(|tensor| tensor.to_device(engine)).collect::<Result<Vec<_>, _>>()?;
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let mut plans = Vec::new();
    for plan in wanted {
        let mut session = Session::new(engine, &graph, plan.strategy(&graph))?;
        session.run(&inputs)?;
        let kernels = session.plan().groups.iter().map(|group| OnceKernel {
            name: group.name.clone(),
            kind: group.kind.to_string(),
            launches: launches(&group.draft(&graph, &session.plan().placement), engine.device().backend()),
            bytes_read: group.traffic.read.0,
            bytes_written: group.traffic.written.0,
            bytes_cached: group.cost.cached.0,
            predicted_us: group.cost.total.us(),
            predicted_registers: group.cost.resources.registers,
            predicted_occupancy: group.cost.resources.occupancy,
        });
        plans.push(OncePlan { plan: plan.name().to_string(), kernels: kernels.collect() });
    }
    Ok(OnceRow {
        op: case.op.name().to_string(),
        direction: if case.backward { "backward" } else { "forward" }.to_string(),
        rows: case.rows,
        cols: case.cols,
        dtype: case.dtype.to_string(),
        plans,
    })
}
