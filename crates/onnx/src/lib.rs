//! ONNX models as graphs.
//!
//! An import reads the file without copying weights, settles every shape, folds what is known, finds composites in
//! decomposed operators by dataflow, and builds a [`deuteron_graph::Graph`]. An operator without primitives is kept as
//! an opaque operation with its shapes and cost, so that the rest can still be analysed. Patterns that are nearly a composite are
//! reported by name, with what is missing.
//!
//! ```no_run
//! use deuteron_onnx::{Options, import_file};
//!
//! let options = Options::default().with_dim("batch_size", 1).with_dim("sequence_length", 1024);
//! let imported = import_file("model.onnx".as_ref(), &options)?;
//! println!("{}", imported.graph);
//! for near in &imported.near_misses {
//!     println!("{near}");
//! }
//! # Ok::<(), deuteron_onnx::OnnxError>(())
//! ```
//!
//! The path, one module per step: `wire` (protobuf) and `schema` (ONNX's messages) read, `translate` gives the canonical form
//! of `ir`, `recognise` finds composites in it, `emit` builds the graph. A file is not trusted: nothing panics, nesting and
//! counts have limits (`limits`), and memory stays within the file's size plus a bound.
#![forbid(unsafe_code)]

mod constant;
mod element;
mod emit;
mod emit_constant;
mod emit_function;
mod emit_integer;
mod error;
mod external;
mod fold;
mod imported;
mod infer;
mod ir;
mod limits;
mod options;
mod recognise;
mod schema;
mod small_float;
mod translate;
mod weight;
mod wire;

use std::path::Path;

use deuteron_graph::memory;

pub use error::{ExternalProblem, OnnxError};
pub use external::ExternalPlace;
pub use imported::{Imported, NearMiss, OpaqueOp, Port, Recognised};
pub use options::Options;
pub use weight::{Location, TensorData, Weight, read_tensor};

/// Imports a model from the bytes of its file.
pub fn import(bytes: &[u8], options: &Options) -> Result<Imported, OnnxError> {
    memory::caught(|| imported(bytes, options))?
}

fn imported(bytes: &[u8], options: &Options) -> Result<Imported, OnnxError> {
    let mut translated = translate::translate(bytes, options)?;
    let found = recognise::recognise(&mut translated.ir);
    let emitted = emit::emit(&translated, options.dtype)?;
    if emitted.is_narrowed {
        translated
            .notes
            .push("64-bit and unsigned integers are computed in 32 bits, where larger results wrap".to_string());
    }
    let recognised = found.composites.into_iter().filter_map(|found| {
        let node = emitted.places[found.id.index()]?;
        Some(Recognised { what: found.what, at: found.at, node, operations: found.operations })
    });
    Ok(Imported {
        recognised: recognised.collect(),
        near_misses: found.near_misses,
        graph: emitted.graph,
        opaque: emitted.opaque,
        weights: emitted.weights,
        inputs: emitted.inputs,
        notes: translated.notes,
    })
}

/// Imports a model from its file. External data are looked for beneath the file's folder, unless the options name
/// another.
pub fn import_file(path: &Path, options: &Options) -> Result<Imported, OnnxError> {
    let failed = |error: std::io::Error| OnnxError::Unreadable { path: path.to_path_buf(), why: error.to_string() };
    let bytes = std::fs::read(path).map_err(failed)?;
    let mut options = options.clone();
    if options.folder.is_none() {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        options.folder = Some(parent.unwrap_or(Path::new(".")).to_path_buf());
    }
    import(&bytes, &options)
}

/// ONNX's numbers of the element types of a model's inputs and outputs; `None` where one is no tensor.
pub fn port_types(bytes: &[u8]) -> Result<Vec<Option<i64>>, OnnxError> {
    let model = schema::Model::read(wire::Reader::new(bytes))?;
    let graph = model.graph.ok_or(OnnxError::NoGraph)?;
    Ok(graph.inputs.iter().chain(&graph.outputs).map(|port| port.element).collect())
}
