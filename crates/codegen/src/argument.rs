//! Arguments of a kernel, in the form of kernel families and in the form that a device needs.

use deuteron_graph::{Dtype, Graph, NodeId};

/// The buffer and layout of an argument, as kernel families use it.
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

    /// A value of this type that the kernel passes on in its workspace: it is in no buffer of the plan.
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

/// The reach in elements of axes with these sizes and strides, with `run` elements at their end. It saturates:
/// a reach that wrapped around would fit a buffer that is too small.
pub fn strided_reach(axes: impl IntoIterator<Item = (usize, usize)>, run: usize) -> usize {
    let add = |reach: Option<usize>, (size, stride): (usize, usize)| {
        reach.filter(|_| size > 0).map(|reach| reach.saturating_add((size - 1).saturating_mul(stride)))
    };
    axes.into_iter().fold(Some(run), add).unwrap_or(0)
}

/// Number of elements of axes with these sizes, saturating.
pub fn saturating_elements(sizes: &[usize]) -> usize {
    if sizes.contains(&0) { 0 } else { sizes.iter().fold(1, |product, &size| product.saturating_mul(size)) }
}

/// Alignment of vectors: the widest that any kernel loads or stores at once.
pub const VECTOR_BYTES: usize = 16;

/// An argument as a device needs it: the device checks its reach against its buffer before a kernel runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Argument {
    /// the node that owns the buffer
    pub base: NodeId,
    /// storage type
    pub dtype: Dtype,
    /// whether it is written
    pub written: bool,
    /// required alignment of its buffer's address
    pub alignment: usize,
    /// bytes from the start of its buffer that the kernel may touch
    pub reach: usize,
    /// the argument whose memory it shares, if a result replaces an operand
    pub in_place_of: Option<usize>,
}

impl Argument {
    /// An argument with a reach of this many elements from its first one. Buffers are aligned to vectors.
    pub fn new(binding: &ArgBinding, elements: usize) -> Argument {
        let reach = binding.offset.saturating_add(elements).saturating_mul(binding.dtype.bytes());
        let reach = if elements == 0 { 0 } else { reach };
        let &ArgBinding { base, dtype, written, .. } = binding;
        Argument { base, dtype, written, alignment: VECTOR_BYTES, reach, in_place_of: None }
    }

    /// The same with access by single elements, for any alignment of the buffer.
    pub fn of_elements(self) -> Argument {
        Argument { alignment: self.dtype.bytes(), ..self }
    }
}

/// The location of an index that a kernel found out of range, for the error message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookup {
    /// the argument that the kernel names in its fault word
    pub argument: usize,
    /// the argument that holds the indices
    pub indices: usize,
    /// its first element
    pub offset: usize,
    /// (size, stride) of the axes into which a row's number is decomposed, outermost first
    pub axes: Vec<(usize, usize)>,
    /// rows of the table
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
