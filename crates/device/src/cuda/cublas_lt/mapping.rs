//! Conversion of a strided matmul to cuBLASLt's column-major matrices, with one stride between the matrices
//! of a batch.
//!
//! Our results are row-major, which equals the column-major transposed result: `c^T = b^T a^T`. So the library's first
//! operand is our b, its second our a, and a bias along our columns is one along its rows, the only kind it supports.

use deuteron_codegen::MatmulShape;

/// An operand as the library sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Matrix {
    /// length of a column
    pub rows: usize,
    /// columns
    pub cols: usize,
    /// elements from one column to the next
    pub leading: usize,
    /// elements from one matrix of the batch to the next
    pub stride: usize,
    /// whether it is transposed
    pub transposed: bool,
}

/// What one call of the library computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Problem {
    /// our b
    pub first: Matrix,
    /// our a
    pub second: Matrix,
    /// c and a residual
    pub result: Matrix,
    /// matrices
    pub batch: usize,
}

/// A product as calls of the library: all of one problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Calls {
    pub problem: Problem,
    /// the first elements of a, b and c in each call
    pub starts: Vec<[usize; 3]>,
}

/// Sizes and strides that the library counts in 32 bits.
const LARGEST: usize = i32::MAX as usize;

/// The calls that compute a matmul, or `None` if the library cannot express it: an operand without a contiguous axis, rows
/// that overlap, nothing to sum, sizes beyond 32 bits.
pub(super) fn calls(shape: &MatmulShape) -> Option<Calls> {
    let &MatmulShape { m, n, k, .. } = shape;
    let axes = merged(&shape.batch);
    // The longest axis is the library's batch; the others are calls.
    let longest = (0..axes.len()).max_by_key(|&axis| axes[axis][0]);
    let [batch, a_stride, b_stride, c_stride] = longest.map_or([1, 0, 0, 0], |axis| axes[axis]);
    let c_leading = leading(n, m, shape.c.1, shape.c.0)?;
    let problem = Problem {
        first: operand((n, k), (shape.b.1, shape.b.0), b_stride)?,
        second: operand((k, m), (shape.a.1, shape.a.0), a_stride)?,
        result: Matrix { rows: n, cols: m, leading: c_leading, stride: c_stride, transposed: false },
        batch,
    };
    let sizes = [m, n, k, batch, problem.first.leading, problem.second.leading, problem.result.leading];
    if sizes.iter().any(|&size| size == 0 || size > LARGEST) {
        return None;
    }
    let mut starts = vec![[0; 3]];
    for (axis, &[size, a, b, c]) in axes.iter().enumerate() {
        if Some(axis) != longest {
            let shifted =
                |start: &[usize; 3], index: usize| [start[0] + index * a, start[1] + index * b, start[2] + index * c];
            starts = starts.iter().flat_map(|start| (0..size).map(move |index| shifted(start, index))).collect();
        }
    }
    Some(Calls { problem, starts })
}

/// Batch axes without those of size 1; neighbours that follow each other in all three operands are one.
fn merged(batch: &[[usize; 4]]) -> Vec<[usize; 4]> {
    let mut axes: Vec<[usize; 4]> = Vec::new();
    for &axis in batch.iter().filter(|axis| axis[0] != 1) {
        match axes.last_mut() {
            Some(outer) if (1..4).all(|operand| outer[operand] == axis[operand] * axis[0]) => {
                *outer = [outer[0] * axis[0], axis[1], axis[2], axis[3]];
            }
            _ => axes.push(axis),
        }
    }
    axes
}

/// A matrix of `rows` x `cols` with the strides of both axes, transposed if necessary. A vector fits both ways: it is taken as
/// one column, which says most about how its elements are aligned.
fn operand((rows, cols): (usize, usize), (down, across): (usize, usize), stride: usize) -> Option<Matrix> {
    let straight =
        leading(rows, cols, down, across).map(|leading| Matrix { rows, cols, leading, stride, transposed: false });
    let turned = leading(cols, rows, across, down).map(|leading| Matrix {
        rows: cols,
        cols: rows,
        leading,
        stride,
        transposed: true,
    });
    if rows == 1 { turned.or(straight) } else { straight.or(turned) }
}

/// Elements from one column to the next, if columns are contiguous and do not overlap.
fn leading(rows: usize, cols: usize, down: usize, across: usize) -> Option<usize> {
    let contiguous = rows <= 1 || down == 1;
    let apart = cols <= 1 || across >= rows;
    (contiguous && apart).then_some(if cols <= 1 { rows } else { across })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(batch: Vec<[usize; 4]>) -> MatmulShape {
        MatmulShape { m: 5, n: 7, k: 3, batch, a: (3, 1), b: (7, 1), c: (7, 1) }
    }

    fn matrix(rows: usize, cols: usize, leading: usize, stride: usize, transposed: bool) -> Matrix {
        Matrix { rows, cols, leading, stride, transposed }
    }

    /// What the library would read and write, by its own rules, against what the shape says.
    fn check(shape: &MatmulShape) {
        let calls = calls(shape).unwrap_or_else(|| panic!("{shape:?}"));
        let Problem { first, second, result, batch } = calls.problem;
        let at = |matrix: &Matrix, row: usize, column: usize| {
            let (row, column) = if matrix.transposed { (column, row) } else { (row, column) };
            assert!(row < matrix.rows && column < matrix.cols && matrix.leading >= matrix.rows);
            row + column * matrix.leading
        };
        let mut seen: Vec<[usize; 3]> = Vec::new();
        for start in &calls.starts {
            for index in 0..batch {
                let strides = [second.stride, first.stride, result.stride];
                seen.push([0, 1, 2].map(|operand| start[operand] + index * strides[operand]));
            }
        }
        let mut expected = vec![[0; 3]];
        for &[size, a, b, c] in &shape.batch {
            let moved = expected
                .iter()
                .flat_map(|&[x, y, z]| (0..size).map(move |index| [x + index * a, y + index * b, z + index * c]));
            expected = moved.collect();
        }
        seen.sort_unstable();
        expected.sort_unstable();
        assert_eq!(seen, expected, "{shape:?}");
        for (i, j, l) in (0..shape.m).flat_map(|i| (0..shape.n).flat_map(move |j| (0..shape.k).map(move |l| (i, j, l))))
        {
            assert_eq!(at(&second, l, i), i * shape.a.0 + l * shape.a.1, "{shape:?}");
            assert_eq!(at(&first, j, l), l * shape.b.0 + j * shape.b.1, "{shape:?}");
            assert_eq!(at(&result, j, i), i * shape.c.0 + j * shape.c.1, "{shape:?}");
        }
    }

    #[test]
    fn rows_become_columns() {
        let Calls { problem, starts } = calls(&shape(vec![])).unwrap();
        assert_eq!(problem.first, matrix(7, 3, 7, 0, false));
        assert_eq!(problem.second, matrix(3, 5, 3, 0, false));
        assert_eq!(problem.result, matrix(7, 5, 7, 0, false));
        assert_eq!((problem.batch, starts), (1, vec![[0; 3]]));
    }

    #[test]
    fn every_element_is_where_the_shape_says() {
        for (m, n, k) in [(5, 7, 3), (1, 7, 3), (5, 1, 3), (5, 7, 1), (1, 1, 3), (1, 7, 1), (5, 1, 1), (1, 1, 1)] {
            for a in [(k, 1), (1, m), (k + 4, 1), (1, m + 4)] {
                for b in [(n, 1), (1, k), (n + 2, 1), (1, k + 2)] {
                    for c in [(n, 1), (n + 3, 1)] {
                        check(&MatmulShape { m, n, k, batch: vec![], a, b, c });
                        let batch = vec![[2, 1000, 0, 1000], [3, 100, 500, 2000]];
                        check(&MatmulShape { m, n, k, batch, a, b, c });
                    }
                }
            }
        }
    }

    #[test]
    fn batch_axes_that_follow_each_other_are_one() {
        let Calls { problem, starts } =
            calls(&shape(vec![[2, 180, 252, 420], [1, 9, 9, 9], [4, 45, 63, 105], [3, 15, 21, 35]])).unwrap();
        assert_eq!((problem.batch, starts.len()), (24, 1));
        assert_eq!([problem.second.stride, problem.first.stride, problem.result.stride], [15, 21, 35]);
        // A weight that all share is no hindrance.
        assert_eq!(calls(&shape(vec![[2, 60, 0, 140], [4, 15, 0, 35]])).unwrap().problem.batch, 8);
    }

    #[test]
    fn the_longest_of_several_axes_is_the_batch_and_the_others_are_calls() {
        // Heads of a fused projection: neither axis follows the other.
        let Calls { problem, starts } = calls(&shape(vec![[2, 1000, 2000, 70], [6, 5, 5, 35 * 4]])).unwrap();
        assert_eq!((problem.batch, problem.second.stride), (6, 5));
        assert_eq!(starts, [[0, 0, 0], [1000, 2000, 70]]);
    }

    #[test]
    fn what_the_library_cannot_say_is_left_to_us() {
        let refused = |shape: MatmulShape| assert_eq!(calls(&shape), None, "{shape:?}");
        refused(MatmulShape { a: (6, 2), ..shape(vec![]) });
        refused(MatmulShape { b: (0, 1), ..shape(vec![]) });
        refused(MatmulShape { c: (1, 5), ..shape(vec![]) });
        refused(MatmulShape { k: 0, ..shape(vec![]) });
        refused(MatmulShape { a: (1 << 31, 1), ..shape(vec![]) });
    }
}
