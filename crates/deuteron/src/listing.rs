//! The kernels of a graph, for a person to read.

use deuteron_codegen::cpu::CpuCatalog;
use deuteron_codegen::{Source, render};
use deuteron_graph::{Graph, NodeId, Op};
use deuteron_plan::{Catalog, Group, Plan, Strategy, plan};
use deuteron_report::SourceLine;
use serde::Serialize;

use crate::engine::Engine;
use crate::error::Error;

/// One kernel. The JSON form of `kernel` is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct KernelListing {
    /// what it is
    pub name: String,
    /// its kind
    pub kind: String,
    /// bytes read
    pub bytes_read: u64,
    /// bytes written
    pub bytes_written: u64,
    /// strip-sized temporaries of a row kernel
    pub tiles: u16,
    /// row-sized temporaries of a row kernel
    pub kept_rows: u16,
    /// sweeps over a row
    pub passes: usize,
    /// the generated source
    pub source: String,
}

/// The source of one kernel of a plan for the CPU, each line with the operation it came from. Empty where a kernel holds
/// something that is only described.
pub(crate) fn tagged_source(graph: &Graph, plan: &Plan, group: &Group) -> Vec<SourceLine> {
    if holds_opaque(graph, group) || !CpuCatalog.offers(group.form) {
        return Vec::new();
    }
    let lines = deuteron_codegen::tagged_source(&group.draft(graph, &plan.placement));
    let op = |node: Option<NodeId>| node.map_or(String::new(), |id| graph.call_name(graph.node(id).call).to_string());
    lines.into_iter().map(|line| SourceLine { op: op(line.node), text: line.text }).collect()
}

/// Whether a kernel holds an operation that is only described.
pub(crate) fn holds_opaque(graph: &Graph, group: &Group) -> bool {
    group.nodes.iter().any(|&id| matches!(graph.node(id).op, Op::Opaque(_)))
}

/// Plans a graph and renders each kernel.
pub fn kernels(engine: &Engine, graph: &Graph, strategy: Strategy) -> Result<Vec<KernelListing>, Error> {
    let plan = plan(graph, engine.device().target(), strategy, &[])?;
    let listings = plan.groups.iter().map(|group| {
        let (source, _) = render(&group.draft(graph, &plan.placement), engine.device().backend());
        let (tiles, kept_rows, passes) = match &source {
            Source::Row(program) => (program.tiles, program.kept, program.passes.len()),
            Source::Cuda(_) | Source::Matmul(_) | Source::ScatterAdd(_) | Source::Copy(_) => (0, 0, 0),
        };
        KernelListing {
            name: group.name.clone(),
            kind: group.kind.to_string(),
            bytes_read: group.traffic.read.0,
            bytes_written: group.traffic.written.0,
            tiles,
            kept_rows,
            passes,
            source: source.to_string(),
        }
    });
    Ok(listings.collect())
}
