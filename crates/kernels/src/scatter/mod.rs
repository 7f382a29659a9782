//! Rows added into a table: `table[indices[i]] += updates[i]`, from zeros.
//!
//! - Arguments: `indices: i32[count]`, `updates: [count, cols]`, `table: [rows, cols]`, written whole.
//! - Numbers: sums of `f32` in the order of the positions, no float atomics: the same bits on every run.
//! - Limits: positions and rows below 2^32, as both share one 64-bit sort key.

#[allow(unsafe_code)]
pub mod cpu;
pub mod cuda;

use deuteron_codegen::argument::{ArgBinding, Argument, Lookup};
use deuteron_graph::Dtype;
use deuteron_plan::{Draft, Structure};

/// Rows added into a table: sizes and layouts.
#[derive(Debug, Clone, PartialEq)]
pub struct Scatter {
    /// storage type of updates and table
    pub dtype: Dtype,
    /// indices, updates, table
    pub args: [ArgBinding; 3],
    /// how many rows are added
    pub count: usize,
    /// columns
    pub cols: usize,
    /// rows of the table
    pub rows: usize,
}

impl Scatter {
    /// The scatter of a group, if it is one that kernels support.
    pub(crate) fn lower(group: &Draft) -> Option<Scatter> {
        let (Structure::ScatterAdd, &[id]) = (group.structure, group.nodes) else { return None };
        let (graph, placement) = (group.graph, group.placement);
        let node = graph.node(id);
        let operand = |position: usize| {
            let placed = placement.get(node.inputs[position])?;
            Some(ArgBinding::whole(graph, placed.base, placed.layout.offset, false))
        };
        let count = graph.node(node.inputs[0]).shape.elements();
        let (rows, cols) = (node.shape[0], node.shape[1]);
        let args = [operand(0)?, operand(1)?, ArgBinding::whole(graph, id, 0, true)];
        let fits = count.max(rows) <= u32::MAX as usize;
        fits.then_some(Scatter { dtype: node.dtype, args, count, cols, rows })
    }

    /// Its arguments, as a device needs them.
    pub fn arguments(&self) -> Vec<Argument> {
        let [updates, table] = [self.count, self.rows].map(|rows| rows.saturating_mul(self.cols));
        let elements = [self.count, updates, table];
        self.args.iter().zip(elements).map(|(arg, elements)| Argument::new(arg, elements).of_elements()).collect()
    }

    pub(crate) fn lookups(&self) -> Vec<Lookup> {
        let offset = self.args[0].offset;
        vec![Lookup { argument: 0, indices: 0, offset, axes: vec![(self.count, 1)], table_rows: self.rows }]
    }
}
