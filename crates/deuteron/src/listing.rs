//! The kernels of a graph, for a person to read.

use deuteron_codegen::{Source, render};
use deuteron_graph::Graph;
use deuteron_plan::{Strategy, plan};
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

/// Plans a graph and renders each kernel.
pub fn kernels(engine: &Engine, graph: &Graph, strategy: Strategy) -> Result<Vec<KernelListing>, Error> {
    let plan = plan(graph, engine.device().machine(), strategy, &[])?;
    let listings = plan.groups.iter().map(|group| {
        let (source, _) = render(graph, &plan.placement, group);
        let (tiles, kept_rows, passes) = match &source {
            Source::Row(program) => (program.tiles, program.kept, program.passes.len()),
            Source::Matmul(_) | Source::ScatterAdd(_) | Source::Copy(_) => (0, 0, 0),
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
