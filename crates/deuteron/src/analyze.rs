//! What to fuse, why, and what it is worth: a graph and a machine in, an [`Analysis`] out. Nothing is run.

mod flip;
mod recompute;
mod sheets;

pub use flip::{Knob, Variants, flips};

use std::time::Instant;

use deuteron_codegen::cpu::CpuCatalog;
use deuteron_graph::Graph;
use deuteron_plan::{Assessment, Catalog, Machine, MachineKind, Pin, Question, Target, assess};
use deuteron_report::Analysis;

use crate::error::Error;

/// How to analyse.
#[derive(Debug, Clone, PartialEq)]
pub struct AnalyzeOptions {
    /// the machine the plan is for
    pub machine: Machine,
    /// fusions forced and forbidden
    pub pins: Vec<Pin>,
    /// whether the source of every kernel is wanted, where it can be generated
    pub sources: bool,
    /// whether every forward value that backward reads is stored, instead of deciding by bytes
    pub keep_all: bool,
}

impl AnalyzeOptions {
    /// For a machine, nothing pinned.
    pub fn on(machine: Machine) -> AnalyzeOptions {
        AnalyzeOptions { machine, pins: Vec::new(), sources: false, keep_all: false }
    }
}

/// Analyses a graph.
pub fn analyze(graph: &Graph, options: &AnalyzeOptions) -> Result<Analysis, Error> {
    let start = Instant::now();
    let (planned, recompute) = recompute::decide(graph, options)?;
    let assessment = assessment(&planned, graph, options)?;
    let planning_ms = start.elapsed().as_secs_f64() * 1e3;
    Ok(Analysis { recompute, ..sheets::analysis(&planned, options, &assessment, planning_ms) })
}

/// What a plan for a machine may use: what can be generated for a CPU; for a profile of another machine, every skeleton.
pub(crate) fn target_of(machine: &Machine) -> Target<'_> {
    match machine.kind {
        MachineKind::Cpu => Target { machine, catalog: &CpuCatalog },
        MachineKind::Gpu => Target::conceivable(machine),
    }
}

/// The plans and fusions behind an analysis.
fn assessment(graph: &Graph, baseline: &Graph, options: &AnalyzeOptions) -> Result<Assessment, Error> {
    let target = target_of(&options.machine);
    let realizable: Option<&dyn Catalog> = match options.machine.kind {
        MachineKind::Cpu => Some(&CpuCatalog),
        MachineKind::Gpu => None,
    };
    Ok(assess(&Question { graph, baseline, target, realizable, pins: &options.pins })?)
}
