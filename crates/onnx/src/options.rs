//! What an import is told.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::limits::FOLD_WORK;

/// Options of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Sizes of the dimensions that the file leaves open: by their name (`batch_size`), or by input and axis
    /// (`input_ids.0`), which comes first.
    pub dims: BTreeMap<String, usize>,
    /// The folder beneath which external data may lie. [`crate::import_file`] sets it to the model's own.
    pub folder: Option<PathBuf>,
    /// Elements that may be touched while constants are folded.
    pub fold_work: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { dims: BTreeMap::new(), folder: None, fold_work: FOLD_WORK }
    }
}

impl Options {
    /// With the size of a dimension.
    pub fn with_dim(mut self, name: &str, size: usize) -> Self {
        self.dims.insert(name.to_string(), size);
        self
    }
}
