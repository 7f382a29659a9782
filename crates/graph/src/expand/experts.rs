//! Rows routed to experts: each is multiplied by the weight that an index selects.
//!
//! Weights are selected by a gather, which kernels for routed rows never store.

use super::{Expansion, Value};
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::node::NodeId;

impl Expansion<'_> {
    /// Parts: 0 the matmuls, each row with its selected weight, 1 scales, bias and cast.
    pub(super) fn expert_linear(&mut self, inputs: &[NodeId], dtype: Dtype) -> Result<Vec<NodeId>, GraphError> {
        let weights = self.graph.node(inputs[3]).shape.clone();
        let (rows, inner) = (self.graph.node(inputs[0]).shape[0], weights[2]);
        let table = self.graph.reshape(inputs[3], [weights[0], weights[1] * inner])?;
        let picked = self.graph.gather(table, inputs[2])?;
        let picked = self.graph.reshape(picked, [rows, weights[1], inner])?;
        let x = self.graph.reshape(inputs[0], [rows, 1, inner])?;
        let sums = self.graph.matmul_transposed(x, picked, false, true)?;
        let sums = self.graph.reshape(sums, [rows, weights[1]])?;
        self.graph.set_part(1);
        let scaled = self.graph.mul(sums, inputs[1])?;
        let scales = self.graph.gather(inputs[4], inputs[2])?;
        let mut y = self.graph.mul(scaled, scales)?;
        if let Some(&biases) = inputs.get(5) {
            let bias = self.graph.gather(biases, inputs[2])?;
            let bias = self.cast(bias, Dtype::F32)?;
            y = self.graph.add(y, bias)?;
        }
        Ok(vec![self.cast(y, dtype)?])
    }

    /// Parts: 0 the matmuls, each row with its selected weight, 1 bias and cast.
    pub(super) fn routed_linear(&mut self, inputs: &[NodeId]) -> Result<Vec<NodeId>, GraphError> {
        let &[x, picked, weight, ..] = inputs else { return Ok(Vec::new()) };
        let rows: Vec<usize> = self.graph.node(picked).shape.to_vec();
        let sums = self.routed_sums(x, picked, weight, &rows)?;
        let Some(&biases) = inputs.get(3) else { return Ok(vec![sums]) };
        self.graph.set_part(1);
        let dtype = self.graph.node(sums).dtype;
        let wide = self.cast(sums, Dtype::F32)?;
        let bias = self.graph.gather(biases, picked)?;
        let bias = self.cast(bias, Dtype::F32)?;
        let y = self.graph.add(wide, bias)?;
        Ok(vec![self.cast(y, dtype)?])
    }

    /// `[..rows, out]`: a matmul of one row for each index.
    fn routed_sums(&mut self, x: NodeId, picked: NodeId, weight: NodeId, rows: &[usize]) -> Value {
        let weights = self.graph.node(weight).shape.clone();
        let with = |sizes: &[usize]| [rows, sizes].concat();
        let table = self.graph.reshape(weight, [weights[0], weights[1] * weights[2]])?;
        let matrices = self.graph.gather(table, picked)?;
        let matrices = self.graph.reshape(matrices, with(&[weights[1], weights[2]]))?;
        let given = self.graph.node(x).shape.clone();
        let x = match given.leading() == rows {
            true => self.graph.reshape(x, with(&[1, weights[2]]))?,
            // All choices of a row read the same one.
            false => {
                let x = self.graph.reshape(x, [given[0], 1, 1, weights[2]])?;
                self.graph.broadcast(x, with(&[1, weights[2]]))?
            }
        };
        let sums = self.graph.matmul_transposed(x, matrices, false, true)?;
        self.graph.reshape(sums, with(&[weights[1]]))
    }

    /// One choice after the other, in f32.
    pub(super) fn weighted_sum(&mut self, inputs: &[NodeId]) -> Result<Vec<NodeId>, GraphError> {
        let (x, weights) = (inputs[0], inputs[1]);
        let (dtype, shape) = (self.graph.node(x).dtype, self.graph.node(x).shape.clone());
        let axis = shape.rank() - 2;
        let leading = &shape[..axis];
        let (row, number) = ([leading, &[shape.cols()]].concat(), [leading, &[1]].concat());
        let mut sum: Option<NodeId> = None;
        for choice in 0..shape[axis] {
            let part = self.graph.slice(x, axis, choice, 1)?;
            let part = self.graph.reshape(part, row.clone())?;
            let part = self.cast(part, Dtype::F32)?;
            let weight = self.graph.slice(weights, axis, choice, 1)?;
            let weight = self.graph.reshape(weight, number.clone())?;
            let weight = self.cast(weight, Dtype::F32)?;
            let weighted = self.graph.mul(part, weight)?;
            sum = Some(sum.map_or(Ok(weighted), |sum| self.graph.add(sum, weighted))?);
        }
        sum.map_or(Ok(Vec::new()), |sum| Ok(vec![self.cast(sum, dtype)?]))
    }
}
