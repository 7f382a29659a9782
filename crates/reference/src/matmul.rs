//! `C = A B` in `f64`, for operands with any strides, on all cores and with the vector unit at hand.
//!
//! Operands are packed into panels; a tile of `TILE_ROWS` x two vectors of C stays in registers while it runs over the
//! inner axis. The order of additions depends on the shape and the width of the vector unit, not on the number of threads.

use std::ops::Range;

use deuteron_graph::{Shape, memory};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::store::Store;
use crate::strided::{CHUNK, Strided};
use crate::threads::in_pieces;

/// Rows of a tile: with two vectors per row, 12 accumulators leave room for operands in 16 registers.
const TILE_ROWS: usize = 6;
/// Inner length of a panel: a panel of B (256 x 16 values) takes 32 KiB, most of a first-level cache.
const PANEL_DEPTH: usize = 256;
/// Rows of A that one task multiplies: 96 x 256 values are 192 KiB, within a second-level cache.
const TASK_ROWS: usize = 96;
/// Columns of B packed at a time: 256 x 2048 values are 4 MiB, shared by the cores.
const BLOCK_COLS: usize = 2048;

/// A matrix somewhere in a buffer.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    values: &'a [f64],
    row_stride: usize,
    col_stride: usize,
}

impl Matrix<'_> {
    #[inline(always)]
    fn at(&self, row: usize, col: usize) -> f64 {
        self.values[row * self.row_stride + col * self.col_stride]
    }
}

/// Sizes of one product: C is `rows` x `cols`, summed over `inner`.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    cols: usize,
    inner: usize,
}

/// The product of the last two axes, for every batch; a matrix as second operand serves all batches.
pub(crate) fn matmul(
    shape: &Shape,
    a: &Strided,
    b: &Strided,
    transpose_a: bool,
    transpose_b: bool,
    store: Store,
) -> Strided<'static> {
    let rank = shape.rank();
    let inner = a.shape[rank - if transpose_a { 2 } else { 1 }];
    let sizes = Sizes { rows: shape[rank - 2], cols: shape[rank - 1], inner };
    let mut values = store.buffer(shape.elements());
    let batch_size = sizes.rows * sizes.cols;
    if batch_size > 0 {
        in_pieces(&mut values, batch_size, |batch, c| {
            in_pieces(c, CHUNK, |_, chunk| chunk.fill(0.0));
            multiply(sizes, batch_of(a, batch, transpose_a), batch_of(b, batch, transpose_b), c);
            in_pieces(c, CHUNK, |_, chunk| store.finish(chunk));
        });
    }
    Strided::owned(shape.clone(), values)
}

fn batch_of<'a>(x: &'a Strided, batch: usize, transpose: bool) -> Matrix<'a> {
    let rank = x.shape.rank();
    let (mut rest, mut position) = (batch, x.offset);
    for axis in (0..rank - 2).rev() {
        position += rest % x.shape[axis] * x.strides[axis];
        rest /= x.shape[axis];
    }
    let (row_stride, col_stride) = match transpose {
        false => (x.strides[rank - 2], x.strides[rank - 1]),
        true => (x.strides[rank - 1], x.strides[rank - 2]),
    };
    // A matrix without elements may begin beyond the buffer.
    Matrix { values: x.buffer().get(position..).unwrap_or_default(), row_stride, col_stride }
}

fn multiply(sizes: Sizes, a: Matrix, b: Matrix, c: &mut [f64]) {
    let arch = Arch::new();
    let tile_cols = arch.dispatch(TileCols);
    // Packed panels are kept from block to block: fresh pages would cost more than the packing.
    let mut b_panels = Vec::new();
    for first_col in (0..sizes.cols).step_by(BLOCK_COLS) {
        let cols = BLOCK_COLS.min(sizes.cols - first_col);
        for first_inner in (0..sizes.inner).step_by(PANEL_DEPTH) {
            let depth = PANEL_DEPTH.min(sizes.inner - first_inner);
            let inner = first_inner..first_inner + depth;
            pack_b(&mut b_panels, b, inner.clone(), first_col..first_col + cols, tile_cols);
            let task = |a_panels: &mut Vec<f64>, (task, c): (usize, &mut [f64])| {
                let first_row = task * TASK_ROWS;
                let rows = c.len() / sizes.cols;
                pack_a(a_panels, a, first_row..first_row + rows, inner.clone());
                let c = Target { values: c, rows, row_length: sizes.cols, first_col, cols };
                arch.dispatch(Block { a_panels, b_panels: &b_panels, depth, c });
            };
            if sizes.rows <= TASK_ROWS {
                task(&mut Vec::new(), (0, c));
            } else {
                c.par_chunks_mut(TASK_ROWS * sizes.cols).enumerate().for_each_init(Vec::new, task);
            }
        }
    }
}

/// Panels of `TILE_ROWS` rows: all rows of one inner index side by side, zeros below the last row.
fn pack_a(packed: &mut Vec<f64>, a: Matrix, rows: Range<usize>, inner: Range<usize>) {
    let depth = inner.len();
    memory::clear_to(packed, rows.len().div_ceil(TILE_ROWS) * TILE_ROWS * depth);
    for (panel, first) in packed.chunks_exact_mut(TILE_ROWS * depth).zip(rows.clone().step_by(TILE_ROWS)) {
        for (lane, row) in (first..rows.end.min(first + TILE_ROWS)).enumerate() {
            for (step, k) in inner.clone().enumerate() {
                panel[step * TILE_ROWS + lane] = a.at(row, k);
            }
        }
    }
}

/// Panels of `tile_cols` columns: all columns of one inner index side by side, zeros beyond the last column.
fn pack_b(packed: &mut Vec<f64>, b: Matrix, inner: Range<usize>, cols: Range<usize>, tile_cols: usize) {
    let depth = inner.len();
    memory::clear_to(packed, cols.len().div_ceil(tile_cols) * tile_cols * depth);
    let pack = |index: usize, panel: &mut [f64]| {
        let first = cols.start + index * tile_cols;
        let count = tile_cols.min(cols.end - first);
        if b.col_stride == 1 {
            for (row, k) in panel.chunks_exact_mut(tile_cols).zip(inner.clone()) {
                row[..count].copy_from_slice(&b.values[k * b.row_stride + first..][..count]);
            }
        } else {
            for lane in 0..count {
                for (step, k) in inner.clone().enumerate() {
                    panel[step * tile_cols + lane] = b.at(k, first + lane);
                }
            }
        }
    };
    if packed.len() <= CHUNK {
        packed.chunks_exact_mut(tile_cols * depth).enumerate().for_each(|(index, panel)| pack(index, panel));
    } else {
        packed.par_chunks_exact_mut(tile_cols * depth).enumerate().for_each(|(index, panel)| pack(index, panel));
    }
}

/// The columns of a tile on the vector unit at hand: two vectors.
struct TileCols;

impl WithSimd for TileCols {
    type Output = usize;
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        2 * S::F64_LANES
    }
}

/// Where a block of the product is added.
struct Target<'a> {
    values: &'a mut [f64],
    rows: usize,
    row_length: usize,
    first_col: usize,
    cols: usize,
}

/// Adds the product of packed panels to C.
struct Block<'a> {
    a_panels: &'a [f64],
    b_panels: &'a [f64],
    depth: usize,
    c: Target<'a>,
}

impl WithSimd for Block<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Block { a_panels, b_panels, depth, c } = self;
        let tile_cols = 2 * S::F64_LANES;
        for (tile_col, b_panel) in b_panels.chunks_exact(tile_cols * depth).enumerate() {
            let start = tile_col * tile_cols;
            let count = tile_cols.min(c.cols - start);
            for (tile_row, a_panel) in a_panels.chunks_exact(TILE_ROWS * depth).enumerate() {
                let sums = tile_product(simd, a_panel, b_panel);
                let rows = tile_row * TILE_ROWS..c.rows.min((tile_row + 1) * TILE_ROWS);
                for (row, sums) in rows.zip(&sums) {
                    let out = &mut c.values[row * c.row_length + c.first_col + start..][..count];
                    add_row(simd, out, sums);
                }
            }
        }
    }
}

#[inline(always)]
fn tile_product<S: Simd>(simd: S, a_panel: &[f64], b_panel: &[f64]) -> [[S::f64s; 2]; TILE_ROWS] {
    let mut sums = [[simd.splat_f64s(0.0); 2]; TILE_ROWS];
    let (b_vectors, _) = S::as_simd_f64s(b_panel);
    for (a, b) in a_panel.chunks_exact(TILE_ROWS).zip(b_vectors.chunks_exact(2)) {
        for (sum, &a) in sums.iter_mut().zip(a) {
            let a = simd.splat_f64s(a);
            sum[0] = simd.mul_add_e_f64s(a, b[0], sum[0]);
            sum[1] = simd.mul_add_e_f64s(a, b[1], sum[1]);
        }
    }
    sums
}

/// Adds one row of a tile, of which only what fits counts.
#[inline(always)]
fn add_row<S: Simd>(simd: S, out: &mut [f64], sums: &[S::f64s; 2]) {
    let (vectors, rest) = S::as_mut_simd_f64s(out);
    for (out, &sum) in vectors.iter_mut().zip(sums) {
        *out = simd.add_f64s(*out, sum);
    }
    if let Some(&sum) = sums.get(vectors.len()) {
        let partial = simd.add_f64s(simd.partial_load_f64s(rest), sum);
        simd.partial_store_f64s(rest, partial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::Array;

    fn naive(sizes: Sizes, a: Matrix, b: Matrix) -> (Vec<f64>, Vec<f64>) {
        let (mut sums, mut magnitudes) = (Vec::new(), Vec::new());
        for row in 0..sizes.rows {
            for col in 0..sizes.cols {
                let terms = || (0..sizes.inner).map(|k| a.at(row, k) * b.at(k, col));
                sums.push(terms().sum());
                magnitudes.push(terms().map(f64::abs).sum());
            }
        }
        (sums, magnitudes)
    }

    /// Any order of `terms` additions differs from the exact sum by at most `terms * eps` of the summed magnitudes.
    fn check(got: &[f64], expected: &[f64], magnitudes: &[f64], terms: usize) {
        for ((got, expected), magnitude) in got.iter().zip(expected).zip(magnitudes) {
            let bound = 2.0 * terms as f64 * f64::EPSILON * magnitude;
            assert!((got - expected).abs() <= bound, "{got} against {expected}, bound {bound}");
        }
    }

    #[test]
    fn all_transposes_and_odd_sizes_agree_with_three_loops() {
        let sizes = [(1, 1, 1), (7, 5, 3), (127, 129, 65), (97, 17, 300), (6, 16, 257), (3, 2049, 2)];
        for (index, (rows, cols, inner)) in sizes.into_iter().enumerate() {
            for (transpose_a, transpose_b) in [(false, false), (true, false), (false, true), (true, true)] {
                let a = Array::normal(if transpose_a { [inner, rows] } else { [rows, inner] }, index as u64);
                let b = Array::normal(if transpose_b { [cols, inner] } else { [inner, cols] }, 99);
                let (a, b) = (Strided::borrowed(&a), Strided::borrowed(&b));
                let got = matmul(&Shape::from([rows, cols]), &a, &b, transpose_a, transpose_b, Store::PLAIN).to_array();
                let sizes = Sizes { rows, cols, inner };
                let (expected, magnitudes) = naive(sizes, batch_of(&a, 0, transpose_a), batch_of(&b, 0, transpose_b));
                check(&got.values, &expected, &magnitudes, inner);
            }
        }
    }

    #[test]
    fn batches_share_a_matrix_and_walk_through_views() {
        let (a, b) = (Array::normal([5, 2, 9], 1), Array::normal([9, 4], 2));
        let (a, b) = (Strided::borrowed(&a).transpose(&[1, 0, 2]), Strided::borrowed(&b));
        let got = matmul(&Shape::from([2, 5, 4]), &a, &b, false, false, Store::PLAIN).to_array();
        for batch in 0..2 {
            let sizes = Sizes { rows: 5, cols: 4, inner: 9 };
            let (expected, magnitudes) = naive(sizes, batch_of(&a, batch, false), batch_of(&b, batch, false));
            check(&got.values[batch * 20..][..20], &expected, &magnitudes, 9);
        }
    }

    #[test]
    fn an_empty_inner_axis_gives_zeros() {
        let (a, b) = (Array::filled([3, 0], 1.0), Array::filled([0, 2], 1.0));
        let got =
            matmul(&Shape::from([3, 2]), &Strided::borrowed(&a), &Strided::borrowed(&b), false, false, Store::PLAIN);
        assert_eq!(got.to_array(), Array::filled([3, 2], 0.0));
    }

    #[test]
    fn one_nan_spoils_its_row_only() {
        let mut a = Array::filled([7, 3], 1.0);
        a.values[4] = f64::NAN;
        let b = Array::filled([3, 20], f64::INFINITY);
        let got =
            matmul(&Shape::from([7, 20]), &Strided::borrowed(&a), &Strided::borrowed(&b), false, false, Store::PLAIN);
        for (index, value) in got.to_array().values.into_iter().enumerate() {
            assert!(if index / 20 == 1 { value.is_nan() } else { value == f64::INFINITY });
        }
    }
}
