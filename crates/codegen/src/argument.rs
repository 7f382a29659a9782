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
        self.leading.iter().map(|&(size, stride)| size.saturating_sub(1) * stride).sum()
    }
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
        let reach = if elements == 0 { 0 } else { (binding.offset + elements) * binding.dtype.bytes() };
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
