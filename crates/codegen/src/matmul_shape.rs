//! Sizes and strides of a matmul and its operands.

use deuteron_graph::{Graph, NodeId, Op};
use deuteron_plan::{Layout, Placed, Placement};

use crate::argument::{ArgBinding, strided_reach};

/// A batched matmul over strided operands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatmulShape {
    /// rows of c
    pub m: usize,
    /// columns of c
    pub n: usize,
    /// the inner size
    pub k: usize,
    /// (size, stride in a, stride in b, stride in c) of the batch axes
    pub batch: Vec<[usize; 4]>,
    /// (row, column) strides of a, as a matrix m x k
    pub a: (usize, usize),
    /// (row, column) strides of b, as a matrix k x n
    pub b: (usize, usize),
    /// (row, column) strides of c
    pub c: (usize, usize),
}

/// An operand of a matmul, or its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// `m x k`
    A,
    /// `k x n`
    B,
    /// `m x n`
    C,
}

impl MatmulShape {
    /// Matmuls of all batch axes.
    pub fn batches(&self) -> usize {
        self.batch.iter().map(|axis| axis[0]).fold(1, usize::saturating_mul)
    }

    /// Elements from the first one on that a matrix reaches.
    pub fn reach(&self, matrix: Matrix) -> usize {
        // Sizes, strides, and which of the batch strides counts.
        let (sizes, strides, batch) = match matrix {
            Matrix::A => ((self.m, self.k), self.a, 1),
            Matrix::B => ((self.k, self.n), self.b, 2),
            Matrix::C => ((self.m, self.n), self.c, 3),
        };
        let batch = self.batch.iter().map(|axis| (axis[0], axis[batch]));
        strided_reach(batch.chain([(sizes.0, strides.0), (sizes.1, strides.1)]), 1)
    }
}

/// Sizes and strides of a matmul whose result is contiguous, and its operands.
pub fn lower_matmul_shape(graph: &Graph, placement: &Placement, product: NodeId) -> (MatmulShape, [ArgBinding; 2]) {
    let node = graph.node(product);
    let Op::Matmul { transpose_a, transpose_b } = node.op else { unreachable!("a matmul group holds a matmul") };
    let place = |operand: usize| placement.get(node.inputs[operand]).expect("operands of a product are placed");
    let (a, b) = (place(0), place(1));
    let rank = node.shape.rank();
    let (m, n) = (node.shape[rank - 2], node.shape[rank - 1]);
    let a_rank = a.layout.shape.rank();
    let k = a.layout.shape[if transpose_a { a_rank - 2 } else { a_rank - 1 }];
    let matrix = |layout: &Layout, transposed: bool| {
        let rank = layout.strides.len();
        let (row, column) = (layout.strides[rank - 2], layout.strides[rank - 1]);
        if transposed { (column, row) } else { (row, column) }
    };
    let own = Layout::contiguous(&node.shape);
    let batch_stride =
        |layout: &Layout, axis: usize| if layout.strides.len() == rank { layout.strides[axis] } else { 0 };
    let batch = (0..rank - 2)
        .map(|axis| [node.shape[axis], batch_stride(&a.layout, axis), batch_stride(&b.layout, axis), own.strides[axis]])
        .collect();
    let (a_matrix, b_matrix) = (matrix(&a.layout, transpose_a), matrix(&b.layout, transpose_b));
    let shape = MatmulShape { m, n, k, batch, a: a_matrix, b: b_matrix, c: (n, 1) };
    let read = |placed: &Placed| ArgBinding::whole(graph, placed.base, placed.layout.offset, false);
    (merge_batch_into_rows(shape), [read(a), read(b)])
}

/// Batches that share b and follow each other in a and c are more rows of one matmul.
fn merge_batch_into_rows(mut shape: MatmulShape) -> MatmulShape {
    while let Some(&[size, a, b, c]) = shape.batch.last() {
        let follows = a == shape.a.0 * shape.m && c == shape.c.0 * shape.m;
        if b != 0 || !follows {
            break;
        }
        shape.m *= size;
        shape.batch.pop();
    }
    shape
}
