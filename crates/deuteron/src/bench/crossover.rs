//! At which sizes one launch wins: attention with its residual and norm as one kernel, against the best plan without that kernel, measured and predicted.

use std::time::Duration;

use deuteron_graph::Graph;
use deuteron_plan::{GroupKind, Pin, Plan, PlanError, Strategy, plan};
use serde::Serialize;

use super::cuts::Chain;
use super::turns::in_turn;
use super::{BenchCase, graph, microseconds};
use crate::engine::Engine;
use crate::error::Error;
use crate::seed;
use crate::session::{Session, SessionOptions};

/// One size. The JSON form of `bench --crossover` is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct CrossoverRow {
    /// name in the catalogue
    pub op: String,
    /// sequences
    pub batch: usize,
    /// positions of each
    pub sequence: usize,
    /// columns of a row
    pub hidden: usize,
    /// features of a head
    pub head: usize,
    /// the storage type
    pub dtype: String,
    /// where it ran
    pub device: String,
    /// the measurements
    #[serde(flatten)]
    pub crossing: Crossing,
}

/// A graph with attention, residual and norm in one launch, and in several.
#[derive(Debug, Clone, Serialize)]
pub struct Crossing {
    /// kernels of the best plan without the launch
    pub apart_kernels: usize,
    /// launches in its CUDA graph, counted by the driver; none on a device without CUDA graphs
    pub apart_launches: Option<usize>,
    /// its median microseconds
    pub apart_us: f64,
    /// its predicted microseconds
    pub apart_predicted_us: f64,
    /// kernels of the best plan with it; none where the device has no such kernel
    pub one_kernels: Option<usize>,
    /// launches in its CUDA graph, counted by the driver
    pub one_launches: Option<usize>,
    /// its median microseconds
    pub one_us: Option<f64>,
    /// its predicted microseconds
    pub one_predicted_us: Option<f64>,
    /// whether the plan chooses the one launch
    pub takes_one: bool,
    /// time of the planner's choice relative to the faster one
    pub over_best: f64,
}

/// Measures an op at one size. None for an op that does not continue after attention.
pub fn crossover(engine: &Engine, case: &BenchCase) -> Result<Option<CrossoverRow>, Error> {
    let Some(crossing) = crossing(engine, &graph(case)?)? else { return Ok(None) };
    let types = case.operand_types();
    let sizes = types.first().map_or(&[][..], |(_, shape)| shape.dims());
    let size = |axis: usize| sizes.get(axis).copied().unwrap_or(0);
    Ok(Some(CrossoverRow {
        op: case.op.name().to_string(),
        batch: size(0),
        sequence: size(2),
        hidden: case.cols,
        head: size(3),
        dtype: case.dtype.to_string(),
        device: engine.device().describe(),
        crossing,
    }))
}

/// Measures a graph that ends with attention, residual and norm, with or without a projection in between. None for other graphs.
pub fn crossing(engine: &Engine, graph: &Graph) -> Result<Option<Crossing>, Error> {
    let Some(chain) = Chain::of(graph, engine.device().target())? else { return Ok(None) };
    let pinned = |pins: Vec<Pin>| Session::new(engine, graph, SessionOptions::default().pins(pins));
    let mut sessions = vec![pinned(chain.apart())?];
    match pinned(chain.one()) {
        Err(Error::Plan(PlanError::Pin { .. })) => {}
        session => sessions.push(session?),
    }
    let times = in_turn(engine, &mut sessions, &seed::inputs(graph, 1)?)?.times;
    let takes_one = is_one(graph, &plan(graph, engine.device().target(), Strategy::Fused, &[])?);
    let best = times.iter().min().copied().unwrap_or(Duration::ZERO);
    let taken = times[if takes_one { times.len() - 1 } else { 0 }];
    let recorded = sessions.iter().map(Session::recorded_launches).collect::<Result<Vec<_>, Error>>()?;
    let launches = |index: usize| recorded.get(index).copied().flatten().map(|recorded| recorded.kernels);
    let (kernels, predicted) = (|own: &Session| own.plan().groups.len(), |own: &Session| own.plan().time().us());
    Ok(Some(Crossing {
        apart_kernels: kernels(&sessions[0]),
        apart_launches: launches(0),
        apart_us: microseconds(times[0]),
        apart_predicted_us: predicted(&sessions[0]),
        one_kernels: sessions.get(1).map(kernels),
        one_launches: launches(1),
        one_us: times.get(1).copied().map(microseconds),
        one_predicted_us: sessions.get(1).map(predicted),
        takes_one,
        over_best: taken.as_secs_f64() / best.as_secs_f64().max(1e-12),
    }))
}

/// Whether the last kernel of the graph includes attention.
fn is_one(graph: &Graph, plan: &Plan) -> bool {
    let last = graph.outputs().last().map(|output| output.node);
    let ends =
        |kind: GroupKind, nodes: &[_]| kind == GroupKind::Attention && last.is_some_and(|id| nodes.contains(&id));
    plan.groups.iter().any(|group| ends(group.kind, &group.nodes))
}
