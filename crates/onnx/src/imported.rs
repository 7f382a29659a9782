//! The result of an import.

use std::fmt;

use deuteron_graph::{Graph, NodeId};

use crate::error::OnnxError;
use crate::weight::{TensorData, Weight};

/// A composite found in the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recognised {
    /// The composite's name: `layer_norm`, `attention`.
    pub what: &'static str,
    /// The operator of the model that gives its result.
    pub at: String,
    /// The result in the graph.
    pub node: NodeId,
    /// Operations that it stands for; 1 where the model has it as one operator.
    pub operations: usize,
}

/// Operations that are almost a composite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NearMiss {
    /// The composite that it almost is.
    pub what: &'static str,
    /// The operator of the model that would give its result.
    pub at: String,
    /// What is missing.
    pub missing: String,
}

impl fmt::Display for NearMiss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nearly {} at `{}`: {}", self.what, self.at, self.missing)
    }
}

/// An opaque operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpaqueOp {
    /// The node's name in the model.
    pub name: String,
    /// Its operator.
    pub op_type: String,
    /// Why it is opaque.
    pub why: String,
    /// Its first result in the graph.
    pub node: NodeId,
}

/// An input of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct Port {
    /// Its name in the file.
    pub original: String,
    /// Its name in the graph.
    pub name: String,
    /// The least and the largest value of the file's type, where the graph's type holds more.
    pub range: Option<(f64, f64)>,
    /// The value that was assumed, because sizes depend on it and none was given.
    pub assumed: Option<TensorData>,
}

/// A model as a graph.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// The graph: inputs in the model's order, then weights as they are needed.
    pub graph: Graph,
    /// Composites that were found, in the order of their results.
    pub recognised: Vec<Recognised>,
    /// Near misses.
    pub near_misses: Vec<NearMiss>,
    /// Opaque operators.
    pub opaque: Vec<OpaqueOp>,
    /// The weights of the graph, in its order, and where their data are.
    pub weights: Vec<Weight>,
    /// The model's inputs, in its order.
    pub inputs: Vec<Port>,
    /// Further notes for the user.
    pub notes: Vec<String>,
}

impl Imported {
    /// The values of a weight, by its name in the graph. `model` is the file that was imported.
    pub fn weight(&self, name: &str, model: &[u8]) -> Result<TensorData, OnnxError> {
        let weight = self.weights.iter().find(|weight| weight.name == name);
        weight.ok_or_else(|| OnnxError::UnknownWeight(name.to_string()))?.read(model)
    }

    /// How many composites of a name were found.
    pub fn count(&self, what: &str) -> usize {
        self.recognised.iter().filter(|recognised| recognised.what == what).count()
    }
}
