//! Options of an import.

use std::collections::BTreeMap;
use std::path::PathBuf;

use deuteron_graph::Dtype;

use crate::limits::FOLD_WORK;
use crate::weight::TensorData;

/// Options of an import.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Sizes of the dimensions that the file leaves open: by their name (`batch_size`), or by input and axis
    /// (`input_ids.0`), which comes first. Each must name a dimension of the file.
    pub dims: BTreeMap<String, usize>,
    /// The size of the batch: of every open dimension that counts sequences or images, and of the first axis of all inputs
    /// where the file fixes it.
    pub batch: Option<usize>,
    /// The size of every open dimension that counts tokens or steps of time.
    pub sequence: Option<usize>,
    /// The dtype of all floats of the graph, instead of the file's own.
    pub dtype: Option<Dtype>,
    /// Values of inputs, by their name in the file. They give open sizes, and what a shape depends on.
    pub values: BTreeMap<String, TensorData>,
    /// The folder beneath which external data may lie. [`crate::import_file`] sets it to the model's own.
    pub folder: Option<PathBuf>,
    /// Elements that may be touched while constants are folded.
    pub fold_work: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            dims: BTreeMap::new(),
            batch: None,
            sequence: None,
            dtype: None,
            values: BTreeMap::new(),
            folder: None,
            fold_work: FOLD_WORK,
        }
    }
}

impl Options {
    /// With the size of a dimension.
    pub fn with_dim(mut self, name: &str, size: usize) -> Self {
        self.dims.insert(name.to_string(), size);
        self
    }

    /// With the values of an input.
    pub fn with_value(mut self, name: &str, value: TensorData) -> Self {
        self.values.insert(name.to_string(), value);
        self
    }
}
