//! Arguments of a kernel: how a family binds them, and what a device has to know of them.

use deuteron_graph::{Dtype, Graph, NodeId};

/// Which buffer an argument is, and how it lies there: what a kernel family works with.
#[derive(Debug, Clone, PartialEq)]
pub struct ArgBinding {
    /// the node that owns the buffer
    pub base: NodeId,
    /// storage type
    pub dtype: Dtype,
    /// whether it is written
    pub written: bool,
    /// first element
    pub offset: usize,
    /// (size, stride) of the leading axes, outermost first
    pub leading: Vec<(usize, usize)>,
    /// rows of a gathered table, else 0
    pub table_rows: usize,
}

impl ArgBinding {
    /// A buffer from an element on.
    pub fn whole(graph: &Graph, base: NodeId, offset: usize, written: bool) -> ArgBinding {
        ArgBinding { base, dtype: graph.node(base).dtype, written, offset, leading: Vec::new(), table_rows: 0 }
    }

    /// A value that the kernel hands over in memory of its own, of this type: it is in no buffer of the plan.
    pub fn internal(&self, dtype: Dtype) -> ArgBinding {
        ArgBinding { dtype, written: false, offset: 0, leading: Vec::new(), table_rows: 0, ..self.clone() }
    }

    /// Bytes before its first element.
    pub fn start(&self) -> usize {
        self.offset * self.dtype.bytes()
    }

    /// Elements from its first one to the first one of the last row.
    pub fn last_row(&self) -> usize {
        strided_reach(self.leading.iter().map(|&(size, stride)| (size.max(1), stride)), 0)
    }
}

/// Elements from the first one on that axes of these sizes and strides reach, with `run` elements at their end. What no number
/// holds is the largest number: a reach that wrapped around would fit a buffer that is too small.
pub fn strided_reach(axes: impl IntoIterator<Item = (usize, usize)>, run: usize) -> usize {
    let add = |reach: Option<usize>, (size, stride): (usize, usize)| {
        reach.filter(|_| size > 0).map(|reach| reach.saturating_add((size - 1).saturating_mul(stride)))
    };
    axes.into_iter().fold(Some(run), add).unwrap_or(0)
}

/// Elements of axes of these sizes; the largest number where no number holds them.
pub fn saturating_elements(sizes: &[usize]) -> usize {
    if sizes.contains(&0) { 0 } else { sizes.iter().fold(1, |product, &size| product.saturating_mul(size)) }
}

/// Starts of vectors: the widest that any kernel loads or stores at once.
pub const VECTOR_BYTES: usize = 16;

/// What a device has to know of an argument: it checks the reach of each against its buffer before a kernel runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Argument {
    /// the node that owns the buffer
    pub base: NodeId,
    /// storage type
    pub dtype: Dtype,
    /// whether it is written
    pub written: bool,
    /// what the address of its buffer must be a multiple of
    pub alignment: usize,
    /// bytes from the start of its buffer that the kernel may touch
    pub reach: usize,
    /// the argument whose memory it is, where a result takes the place of an operand
    pub in_place_of: Option<usize>,
}

impl Argument {
    /// An argument of which so many elements from its first one on may be touched. Buffers start where vectors do.
    pub fn new(binding: &ArgBinding, elements: usize) -> Argument {
        let reach = binding.offset.saturating_add(elements).saturating_mul(binding.dtype.bytes());
        let reach = if elements == 0 { 0 } else { reach };
        let &ArgBinding { base, dtype, written, .. } = binding;
        Argument { base, dtype, written, alignment: VECTOR_BYTES, reach, in_place_of: None }
    }

    /// The same where elements are accessed one by one, wherever the buffer starts.
    pub fn of_elements(self) -> Argument {
        Argument { alignment: self.dtype.bytes(), ..self }
    }
}

/// Where the index stands that a kernel looked up and found outside of its table: what an error message needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookup {
    /// the argument that the kernel names in its fault word
    pub argument: usize,
    /// the argument that holds the indices
    pub indices: usize,
    /// its first element
    pub offset: usize,
    /// (size, stride) of the axes that a row's number is taken apart into, outermost first
    pub axes: Vec<(usize, usize)>,
    /// how many rows there are to pick from
    pub table_rows: usize,
}

impl Lookup {
    /// The element of the index of a row.
    pub fn element(&self, row: usize) -> usize {
        let (mut element, mut rest) = (self.offset, row);
        for &(size, stride) in self.axes.iter().rev() {
            element += rest % size.max(1) * stride;
            rest /= size.max(1);
        }
        element
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reach_that_no_number_holds_does_not_wrap_around() {
        assert_eq!(strided_reach([(3, 10), (2, 4)], 5), 29);
        assert_eq!(strided_reach([(3, 10), (0, 4)], 5), 0);
        // Two strides whose sum wraps around to 1.
        assert_eq!(strided_reach([(2, usize::MAX), (2, 1)], 1), usize::MAX);
        assert_eq!(strided_reach([(3, usize::MAX / 2 + 1)], 1), usize::MAX);
        assert_eq!(saturating_elements(&[1 << 40, 1 << 40, 3]), usize::MAX);
        assert_eq!(saturating_elements(&[usize::MAX, 2, 0]), 0);
        let arg = |offset| ArgBinding {
            base: deuteron_graph::Graph::new("g").input("x", Dtype::F32, [1]).unwrap(),
            dtype: Dtype::F32,
            written: false,
            offset,
            leading: vec![(2, usize::MAX)],
            table_rows: 0,
        };
        assert_eq!(Argument::new(&arg(usize::MAX - 3), 4).reach, usize::MAX);
        assert_eq!(Argument::new(&arg(1 << 62), 1).reach, usize::MAX, "four times it wraps around to 4");
        assert_eq!(arg(0).last_row(), usize::MAX);
    }
}
