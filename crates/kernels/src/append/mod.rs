//! Rows written into a cache, from a position of each sequence on.
//!
//! - Arguments: cache, new rows, `positions: i32[sequences]`, result. Cache and result are contiguous, and so is a row.
//! - In place the result is the cache's own memory, and only the new rows are written; else the cache is copied first.
//! - A position at which the rows do not fit is a fault, and nothing is written.

#[allow(unsafe_code)]
pub mod cpu;
pub mod cuda;

use deuteron_codegen::argument::{ArgBinding, Argument, Lookup, saturating_elements, strided_reach};
use deuteron_codegen::kernel::{InPlace, Request};
use deuteron_graph::Op;
use deuteron_plan::Structure;

/// The argument that is the cache.
const CACHE: usize = 0;
/// The argument that holds positions.
const POSITIONS: usize = 2;

/// Rows written into a cache.
#[derive(Debug, Clone, PartialEq)]
pub struct Append {
    /// bytes of an element
    pub element: usize,
    /// cache, rows, positions, result
    pub args: [ArgBinding; 4],
    /// sizes and strides
    pub shape: AppendShape,
}

/// Sizes and strides of an append.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppendShape {
    /// (size, stride in the new rows) of the axes before the rows, outermost first
    pub leading: Vec<(usize, usize)>,
    /// which of them counts sequences
    pub batch: usize,
    /// new rows of a sequence
    pub rows: usize,
    /// from one new row to the next
    pub stride: usize,
    /// rows of a sequence in the cache
    pub capacity: usize,
    /// elements of a row
    pub cols: usize,
    /// whether the result is the cache's own memory: then only the new rows are written
    pub in_place: bool,
}

impl AppendShape {
    /// Runs of `capacity` rows.
    pub fn blocks(&self) -> usize {
        self.leading.iter().fold(1, |blocks: usize, &(size, _)| blocks.saturating_mul(size))
    }

    /// Places where the new rows fit, from 0 on; none where they are too many.
    pub fn places(&self) -> usize {
        self.capacity.saturating_add(1).saturating_sub(self.rows)
    }

    /// Sequences, of which each has a position.
    pub fn sequences(&self) -> usize {
        self.leading.get(self.batch).map_or(0, |&(size, _)| size)
    }

    /// The sequence of a block, and the first element of its new rows.
    pub fn source(&self, block: usize) -> (usize, usize) {
        let (mut rest, mut sequence, mut element) = (block, 0, 0);
        for (axis, &(size, stride)) in self.leading.iter().enumerate().rev() {
            let index = rest % size.max(1);
            rest /= size.max(1);
            element += index * stride;
            if axis == self.batch {
                sequence = index;
            }
        }
        (sequence, element)
    }

    /// Elements of the new rows that are touched.
    fn row_elements(&self) -> usize {
        let rows = [(self.rows, self.stride), (self.cols.min(1), 0)];
        strided_reach(self.leading.iter().copied().chain(rows), self.cols)
    }
}

impl Append {
    /// The append of a group, if it is one that kernels support.
    pub(crate) fn lower(request: &Request) -> Option<Append> {
        let group = &request.group;
        let (Structure::Append, &[id]) = (group.structure, group.nodes) else { return None };
        let (graph, placement) = (group.graph, group.placement);
        let node = graph.node(id);
        let Op::Append { batch } = node.op else { return None };
        let read = |operand: usize| {
            let placed = placement.get(node.inputs[operand])?;
            Some(ArgBinding::whole(graph, placed.base, placed.layout.offset, false))
        };
        let (rows, axis) = (&placement.get(node.inputs[1])?.layout, node.shape.rank() - 2);
        let shape = AppendShape {
            leading: (0..axis).map(|i| (node.shape[i], rows.strides[i])).collect(),
            batch,
            rows: rows.shape[axis],
            stride: rows.strides[axis],
            capacity: node.shape[axis],
            cols: node.shape.cols(),
            in_place: false,
        };
        let args = [read(CACHE)?, read(1)?, read(POSITIONS)?, ArgBinding::whole(graph, id, 0, true)];
        // What is written may be the cache, but nothing else that is read.
        let [cache, rows, positions, result] = args.each_ref().map(|arg| arg.base);
        let apart = rows != cache && positions != cache && args[CACHE].offset == 0;
        let wanted = request.in_place.contains(&InPlace { operand: cache, result });
        let shape = AppendShape { in_place: apart && wanted, ..shape };
        Some(Append { element: node.dtype.bytes(), args, shape })
    }

    /// Its arguments, as a device needs them.
    pub fn arguments(&self) -> Vec<Argument> {
        let whole = saturating_elements(&[self.shape.blocks(), self.shape.capacity, self.shape.cols]);
        let elements = [whole, self.shape.row_elements(), self.shape.sequences(), whole];
        let args = self.args.iter().zip(elements).map(|(arg, elements)| Argument::new(arg, elements).of_elements());
        let mut arguments: Vec<Argument> = args.collect();
        arguments[3].in_place_of = self.shape.in_place.then_some(CACHE);
        arguments
    }

    pub(crate) fn lookups(&self) -> Vec<Lookup> {
        let (offset, axes) = (self.args[POSITIONS].offset, vec![(self.shape.sequences(), 1)]);
        let (argument, indices, table_rows) = (POSITIONS, POSITIONS, self.shape.places());
        vec![Lookup { argument, indices, offset, axes, table_rows }]
    }
}
