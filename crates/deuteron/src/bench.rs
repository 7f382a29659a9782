//! Ready-made fused ops against unfused kernels, and against a copy of the same bytes.

mod crossover;
mod cuts;
mod device;
mod host;
mod ladder;
mod matmul;
mod once;
mod overhead;
mod turns;

pub use crossover::{Crossing, CrossoverRow, crossing, crossover};
pub(crate) use device::{Sets, copies, repeats, rotation, runs_of_a_sample};
pub use ladder::{LadderCheck, LadderRow, RungText, check_ladder, ladder, ladder_texts};
pub use matmul::{
    MatmulCase, MatmulEpilogue, MatmulRung, MatmulRungCheck, VariantCheck, VariantRow, VariantRun, check_matmul,
    check_matmul_ladder, matmul_ladder, matmul_texts, matmul_variants, run_fastest,
};
pub use once::{OnceKernel, OncePlan, OnceRow, OpPlan, once};
pub use overhead::{OverheadRow, overhead};

use std::time::Duration;

use deuteron_graph::{Dtype, Graph};
use deuteron_plan::{Bytes, GroupKind, MachineKind, Strategy};
use serde::Serialize;

use crate::catalog::{self, ExpertSizes, FusedOp, Heads, OperandType, Sizes};
use crate::engine::Engine;
use crate::error::Error;
use crate::seed;
use crate::session::Session;

/// One op at one size. The JSON form is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct BenchRow {
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
    /// where it ran
    pub device: String,
    /// median microseconds, fused; on a GPU, kernels are launched one by one without synchronising in between
    pub fused_us: f64,
    /// the same from a CUDA graph of all launches, on a device that supports it
    pub fused_graph_us: Option<f64>,
    /// median microseconds, a kernel per builder call
    pub unfused_us: f64,
    /// the same from a CUDA graph
    pub unfused_graph_us: Option<f64>,
    /// for attention ops: the same with one kernel per step and scores in memory, from a CUDA graph if there is one
    pub eager_us: Option<f64>,
    /// compulsory bytes of that plan
    pub bytes_eager: Option<u64>,
    /// unfused over fused time, from CUDA graphs if there are any
    pub speedup: f64,
    /// predicted microseconds, fused
    pub predicted_us: f64,
    /// predicted microseconds, unfused
    pub predicted_unfused_us: f64,
    /// compulsory bytes, fused
    pub bytes_fused: u64,
    /// compulsory bytes, unfused
    pub bytes_unfused: u64,
    /// of the fused bytes, those that are read
    pub bytes_read: u64,
    /// of the fused bytes, those that are written
    pub bytes_written: u64,
    /// registers a thread of the fused kernels, the most of them; on a GPU
    pub registers: Option<u32>,
    /// bytes a second of the fused kernels, in GB/s, from the recording where there is one
    pub gbps: f64,
    /// bytes a second of a copy of as many bytes, in the same run
    pub copy_gbps: f64,
    /// the ratio of the two
    pub fraction_of_copy: f64,
    /// kernels of the fused plan
    pub kernels_fused: usize,
    /// each kernel of the unfused plan
    pub unfused_kernels: Vec<KernelRow>,
}

/// One kernel of the unfused plan, on its own.
#[derive(Debug, Clone, Serialize)]
pub struct KernelRow {
    /// what it is
    pub name: String,
    /// median microseconds
    pub us: f64,
    /// what the planner predicts
    pub predicted_us: f64,
    /// compulsory bytes
    pub bytes: u64,
    /// bytes per second
    pub gbps: f64,
    /// as a share of the bandwidth of a copy of as many bytes
    pub fraction_of_copy: f64,
}

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub struct BenchCase {
    /// the op
    pub op: FusedOp,
    /// rows of its main operand
    pub rows: usize,
    /// columns of its main operand
    pub cols: usize,
    /// storage type
    pub dtype: Dtype,
    /// whether to measure its gradient instead
    pub backward: bool,
    /// sequences and heads of an attention op
    pub heads: Heads,
    /// experts of a routed op
    pub experts: ExpertSizes,
}

impl BenchCase {
    /// Types of its operands.
    pub fn operand_types(&self) -> Vec<OperandType> {
        let usual = Sizes::new(self.rows, self.cols, self.dtype);
        self.op.operand_types_of(&Sizes { heads: self.heads, experts: self.experts, ..usual })
    }
}

/// Median times of one case.
struct Measured {
    fused: Duration,
    fused_graph: Option<Duration>,
    unfused: Duration,
    unfused_graph: Option<Duration>,
    /// of each kernel of the unfused plan; none if it was not measured
    kernels: Vec<Option<Duration>>,
    /// of the faster kind of copy
    copy: Duration,
}

/// Measures one case: fused, unfused and copies in turn, medians of each.
pub fn bench(engine: &Engine, case: &BenchCase) -> Result<BenchRow, Error> {
    let graph = graph(case)?;
    let mut unfused = Session::new(engine, &graph, Strategy::Unfused)?;
    let mut fused = Session::new(engine, &graph, catalog::strategy(&graph))?;
    let traffic = |read: bool, session: &Session| -> Bytes {
        session.plan().groups.iter().map(|group| if read { group.traffic.read } else { group.traffic.written }).sum()
    };
    let bytes_fused = fused.plan().bytes().0;
    let mut probe = engine.device().copy_probe(bytes_fused as usize / 2)?;
    let tensors = seed::inputs(&graph, 1)?;
    let mut measure = |unfused: &mut Session, fused: &mut Session| match engine.device().machine().kind {
        MachineKind::Cpu => host::measure(unfused, fused, &tensors.iter().collect::<Vec<_>>(), &mut *probe),
        MachineKind::Gpu => device::measure(engine, unfused, fused, &tensors, &mut *probe),
    };
    let measured = measure(&mut unfused, &mut fused)?;
    let mut eager = None;
    if !case.op.is_rows() {
        let mut session = Session::new(engine, &graph, Strategy::Eager)?;
        if session.plan().groups.len() != unfused.plan().groups.len() {
            let measured = measure(&mut session, &mut fused)?;
            eager = Some((measured.unfused_graph.unwrap_or(measured.unfused), session.plan().bytes().0));
        }
    }
    let copy_gbps = gbps(probe.bytes() as u64, measured.copy);
    let kernels = unfused.plan().groups.iter().zip(&measured.kernels);
    let row_kernels = kernels.filter(|(group, _)| group.kind == GroupKind::Row);
    let unfused_kernels = row_kernels.filter_map(|(group, time)| {
        let (bytes, time) = (group.traffic.total().0, (*time)?);
        let gbps = gbps(bytes, time);
        let (name, predicted_us) = (group.name.clone(), group.cost.total.us());
        let fraction_of_copy = gbps / copy_gbps;
        Some(KernelRow { name, us: microseconds(time), predicted_us, bytes, gbps, fraction_of_copy })
    });
    let best_fused = measured.fused_graph.unwrap_or(measured.fused);
    let best_unfused = measured.unfused_graph.unwrap_or(measured.unfused);
    let fused_gbps = gbps(bytes_fused, best_fused);
    Ok(BenchRow {
        op: case.op.name().to_string(),
        direction: if case.backward { "backward" } else { "forward" }.to_string(),
        rows: case.rows,
        cols: case.cols,
        dtype: case.dtype.to_string(),
        device: engine.device().describe(),
        fused_us: microseconds(measured.fused),
        fused_graph_us: measured.fused_graph.map(microseconds),
        unfused_us: microseconds(measured.unfused),
        unfused_graph_us: measured.unfused_graph.map(microseconds),
        eager_us: eager.map(|(time, _)| microseconds(time)),
        bytes_eager: eager.map(|(_, bytes)| bytes),
        speedup: microseconds(best_unfused) / microseconds(best_fused).max(1e-6),
        predicted_us: fused.plan().time().us(),
        predicted_unfused_us: unfused.plan().time().us(),
        bytes_fused,
        bytes_unfused: unfused.plan().bytes().0,
        bytes_read: traffic(true, &fused).0,
        bytes_written: traffic(false, &fused).0,
        registers: fused.registers(),
        gbps: fused_gbps,
        copy_gbps,
        fraction_of_copy: fused_gbps / copy_gbps,
        kernels_fused: fused.plan().groups.len(),
        unfused_kernels: unfused_kernels.collect(),
    })
}

/// The graph of a case.
pub fn graph(case: &BenchCase) -> Result<Graph, Error> {
    let types = case.operand_types();
    if case.backward { case.op.backward_graph(&types) } else { case.op.graph(&types) }
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn gbps(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(1e-12) / 1e9
}
