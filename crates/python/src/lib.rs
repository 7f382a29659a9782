//! The native part of the Python package: [`Program`]s over PyTorch tensors, NumPy arrays and objects with DLPack, and the
//! command.
//!
//! A call reads the address, shape and strides of each operand, finds the executable compiled for them ([`program`]), has the library of
//! the first operand allocate the results, and runs on all of them in place. Memory of Python's libraries is borrowed for
//! the run only; nothing here copies or keeps it.
//!
//! - **One operator for everything.** Ops and graphs of users go through the same two operators of torch, forward and backward, whose first
//!   argument is text; a new op of the catalogue needs no glue, and a compiled graph shows what it is.
//! - **Seeds come in batches** ([`seeds`]). A seed is a tensor on the device; drawing each by a kernel of torch cost more than the dropout. 256
//!   are drawn at a time, and the state of torch's generator, which each draw advances, says which comes next: a checkpoint that
//!   restores the state drops the same elements again. A CUDA graph that is being captured draws its own, anew at each replay.
//! - **Outputs are allocated late.** An executable owns outputs only if a run asks for them; runs on borrowed memory never do.
//! - **Forks.** A child forgets engines and compiled programs without freeing them: its threads are in the parent. Locks that a fork could
//!   meet are taken with the interpreter held.
//! - **Threads** are those of the OpenMP runtime that torch runs on ([`threads`]), once torch is loaded: two pools would compete for the cores.
//! - **`float64` runs on the reference interpreter**: exact and slow, so that `gradcheck` checks the graphs themselves.

mod array;
mod dlpack;
mod engines;
mod errors;
mod numpy;
mod operand;
mod program;
mod repeated;
mod run;
mod seeds;
mod states;
mod threads;
mod torch;

use std::collections::HashMap;
use std::ffi::OsString;

use deuteron::analyze::{AnalyzeOptions, analyze as analyze_graph};
use deuteron::report::{html, parse};
use deuteron::{Engine, Graph, MemoryStats, differentiate};
use deuteron_cli::analyze::{text, usual_options};
use pyo3::prelude::*;

use crate::array::Array;
use crate::errors::{bad_value, failed};
use crate::program::Program;
use crate::seeds::SeedBatches;

/// The engine of the package `deuteron`.
#[pymodule(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<Program>()?;
    module.add_class::<Array>()?;
    module.add_class::<SeedBatches>()?;
    module.add_function(wrap_pyfunction!(analyze, module)?)?;
    module.add_function(wrap_pyfunction!(analysis_html, module)?)?;
    module.add_function(wrap_pyfunction!(analysis_text, module)?)?;
    module.add_function(wrap_pyfunction!(doctor, module)?)?;
    module.add_function(wrap_pyfunction!(empty_cache, module)?)?;
    module.add_function(wrap_pyfunction!(memory_stats, module)?)?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    module.add_function(wrap_pyfunction!(threads::set_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(threads::get_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(forked, module)?)
}

/// What to fuse in a graph, as JSON. Runs nothing.
#[pyfunction]
#[pyo3(signature = (graph, device = "auto", backward = false))]
fn analyze(py: Python<'_>, graph: &str, device: &str, backward: bool) -> PyResult<String> {
    let places = engines::package_folders(py)?;
    py.detach(|| {
        let mut graph: Graph = graph.parse().map_err(bad_value)?;
        if graph.name().is_empty() {
            graph.set_name("graph");
        }
        if backward {
            let wrt: Vec<_> = graph.inputs().iter().copied().filter(|&id| graph.node(id).dtype.is_float()).collect();
            graph = differentiate(&graph, &wrt).map_err(bad_value)?.graph;
        }
        let usual = usual_options(device, &places).map_err(|error| bad_value(format!("{error:#}")))?;
        let options = AnalyzeOptions { sources: true, ..usual };
        let analysis = analyze_graph(&graph, &options).map_err(|error| errors::of("analyze", error))?;
        serde_json::to_string(&analysis).map_err(failed)
    })
}

/// The page of an analysis.
#[pyfunction]
fn analysis_html(py: Python<'_>, analysis: &str) -> PyResult<String> {
    py.detach(|| Ok(html(&parse(analysis).map_err(bad_value)?)))
}

/// An analysis as the command prints it.
#[pyfunction]
fn analysis_text(py: Python<'_>, analysis: &str) -> PyResult<String> {
    py.detach(|| text(&parse(analysis).map_err(bad_value)?, false).map_err(failed))
}

/// Devices and libraries, as JSON.
#[pyfunction]
fn doctor(py: Python<'_>) -> PyResult<String> {
    let places = engines::package_folders(py)?;
    py.detach(|| {
        let wrong = |error: anyhow::Error| failed(format!("{error:#}"));
        let engine = deuteron_cli::device::cpu(None).map_err(wrong)?;
        let report = deuteron_cli::doctor::report(&engine, &[32 << 20], &places).map_err(wrong)?;
        serde_json::to_string(&report).map_err(failed)
    })
}

/// Frees workspaces that no run has now, and returns free memory of the heap to the system.
#[pyfunction]
fn empty_cache(py: Python<'_>) {
    let engines = engines::opened();
    py.detach(|| {
        engines.iter().for_each(|(_, engine)| engine.release_memory());
        program::return_free_memory();
    });
}

/// The memory of each device that was used, by its name.
#[pyfunction]
fn memory_stats(py: Python<'_>) -> HashMap<String, HashMap<&'static str, usize>> {
    let engines = engines::opened();
    let stats = |(place, engine): &(engines::Place, Engine)| {
        let MemoryStats { held, needed, jobs } = engine.memory_stats();
        (place.to_string(), HashMap::from([("workspace_bytes", held), ("needed_bytes", needed), ("programs", jobs)]))
    };
    py.detach(|| engines.iter().map(stats).collect())
}

/// The command `deuteron`. Gives its exit code.
#[pyfunction]
fn main(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| deuteron_cli::run([OsString::from("deuteron")].into_iter().chain(arguments)))
}

/// Forgets what the process had that this one was forked from: its threads and its GPUs are not here.
#[pyfunction(name = "_forked")]
fn forked() {
    engines::forget();
}
