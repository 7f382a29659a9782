//! Primitives that are not element by element: row and column reductions, gather, scatter.

use deuteron_graph::{ReduceOp, Shape, memory};

use crate::scalar::larger;
use crate::store::Store;
use crate::strided::{CHUNK, Run, Strided};
use crate::threads::in_pieces;

/// A number for each row of the last axis.
pub(crate) fn by_row(x: &Strided, store: Store, f: impl Fn(Run, usize) -> f64 + Sync) -> Strided<'static> {
    let shape = x.shape.with_cols(1);
    let cols = x.shape.cols();
    let mut values = memory::zeros(shape.elements());
    let rows_per_task = (CHUNK / cols.max(1)).max(1);
    in_pieces(&mut values, rows_per_task, |task, chunk| {
        for (position, value) in chunk.iter_mut().enumerate() {
            *value = f(x.row(task * rows_per_task + position), cols);
        }
        store.finish(chunk);
    });
    Strided::owned(shape, values)
}

pub(crate) fn row_reduce(op: ReduceOp, x: &Strided, store: Store) -> Strided<'static> {
    by_row(x, store, |row, cols| {
        let values = (0..cols).map(|i| row.at(i));
        match op {
            ReduceOp::Sum => store.sum(values),
            ReduceOp::Mean => store.sum(values) / cols as f64,
            ReduceOp::Max => values.fold(f64::NEG_INFINITY, larger),
            ReduceOp::AbsMax => values.map(f64::abs).fold(0.0, larger),
            ReduceOp::ArgMax => arg_max(values) as f64,
        }
    })
}

/// The first largest value, or the first NaN.
pub(crate) fn arg_max(values: impl Iterator<Item = f64>) -> usize {
    let (mut best, mut largest) = (0, f64::NEG_INFINITY);
    for (position, value) in values.enumerate() {
        if value.is_nan() {
            return position;
        }
        if value > largest {
            (best, largest) = (position, value);
        }
    }
    best
}

/// The sum over all axes but the last.
pub(crate) fn column_sum(x: &Strided, store: Store) -> Strided<'static> {
    /// Columns that one task sums: whole cache lines, and enough of them to stream.
    const COLS: usize = 64;
    let (rows, cols) = (x.shape.rows(), x.shape.cols());
    let mut sums = memory::zeros(cols);
    // Few elements are one task.
    let columns = if rows.saturating_mul(cols) <= CHUNK { cols.max(1) } else { COLS };
    in_pieces(&mut sums, columns, |task, sums| {
        for row in 0..rows {
            let row = x.row(row);
            for (position, sum) in sums.iter_mut().enumerate() {
                *sum = store.add(*sum, row.at(task * columns + position));
            }
        }
        store.finish(sums);
    });
    Strided::owned(Shape::from([cols]), sums)
}

/// An index that is not a row of the table.
#[derive(Debug, PartialEq)]
pub(crate) struct OutOfRange(pub f64);

fn checked_row(index: f64, rows: usize) -> Result<usize, OutOfRange> {
    let whole = index >= 0.0 && index < rows as f64 && index.fract() == 0.0;
    if whole { Ok(index as usize) } else { Err(OutOfRange(index)) }
}

/// Rows of `table`, one for each index.
pub(crate) fn gather(shape: &Shape, table: &Strided, indices: &Strided) -> Result<Strided<'static>, OutOfRange> {
    let cols = shape.cols();
    let indices = indices.to_array();
    let mut values = memory::room(shape.elements());
    for &index in &indices.values {
        let row = checked_row(index, table.shape[0])?;
        let row = table.row(row);
        values.extend((0..cols).map(|column| row.at(column)));
    }
    Ok(Strided::owned(shape.clone(), values))
}

/// Rows of `updates` added to the rows that the indices name.
pub(crate) fn scatter_add(
    shape: &Shape,
    indices: &Strided,
    updates: &Strided,
    store: Store,
) -> Result<Strided<'static>, OutOfRange> {
    let (rows, cols) = (shape[0], shape[1]);
    let indices = indices.to_array();
    let mut values = memory::zeros(shape.elements());
    for (update, &index) in indices.values.iter().enumerate() {
        let start = checked_row(index, rows)? * cols;
        let update = updates.row(update);
        for (column, sum) in values[start..start + cols].iter_mut().enumerate() {
            *sum = store.add(*sum, update.at(column));
        }
    }
    in_pieces(&mut values, CHUNK, |_, chunk| store.finish(chunk));
    Ok(Strided::owned(shape.clone(), values))
}

/// Places at which all rows fit: the first is 0.
pub(crate) fn append_places(cache: &Shape, rows: &Shape) -> usize {
    let axis = cache.rank() - 2;
    cache[axis] - rows[axis] + 1
}

/// A cache with the rows of each sequence of the axis `batch` from its position on.
pub(crate) fn append(
    cache: &Strided,
    rows: &Strided,
    positions: &Strided,
    batch: usize,
) -> Result<Strided<'static>, OutOfRange> {
    let (shape, places) = (cache.shape.clone(), append_places(&cache.shape, &rows.shape));
    let positions = positions.to_array().values;
    let positions: Vec<usize> = positions.iter().map(|&at| checked_row(at, places)).collect::<Result<_, _>>()?;
    let axis = shape.rank() - 2;
    let (capacity, count, cols) = (shape[axis], rows.shape[axis], shape.cols());
    // Heads of one sequence follow each other.
    let inner: usize = shape[batch + 1..axis].iter().product();
    let mut values = cache.to_array().values;
    for row in 0..rows.shape.rows() {
        let (block, at) = (row / count, row % count);
        let position = positions[block / inner % shape[batch]] + at;
        let to = (block * capacity + position) * cols;
        let from = rows.row(row);
        values[to..to + cols].iter_mut().enumerate().for_each(|(column, value)| *value = from.at(column));
    }
    Ok(Strided::owned(shape, values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::Array;

    fn reduce(op: ReduceOp, values: &[f64]) -> f64 {
        let array = Array::new([values.len()], values.to_vec());
        row_reduce(op, &Strided::borrowed(&array), Store::PLAIN).to_array().values[0]
    }

    #[test]
    fn nan_and_infinity_in_rows() {
        let row = [1.0, f64::NAN, 3.0, f64::NAN];
        assert!(reduce(ReduceOp::Max, &row).is_nan());
        assert!(reduce(ReduceOp::AbsMax, &row).is_nan());
        assert_eq!(reduce(ReduceOp::ArgMax, &row), 1.0);
        assert_eq!(reduce(ReduceOp::ArgMax, &[1.0, 3.0, 3.0]), 1.0);
        assert_eq!(reduce(ReduceOp::ArgMax, &[f64::NEG_INFINITY; 3]), 0.0);
        assert_eq!(reduce(ReduceOp::AbsMax, &[1.0, -4.0]), 4.0);
        assert_eq!(reduce(ReduceOp::Max, &[f64::NEG_INFINITY; 2]), f64::NEG_INFINITY);
    }

    #[test]
    fn empty_rows_and_tables() {
        let empty = Array::filled([3, 0], 1.0);
        let sums = row_reduce(ReduceOp::Sum, &Strided::borrowed(&empty), Store::PLAIN).to_array();
        assert_eq!(sums, Array::filled([3, 1], 0.0));
        let none = Array::filled([0, 4], 1.0);
        assert_eq!(column_sum(&Strided::borrowed(&none), Store::PLAIN).to_array(), Array::filled([4], 0.0));
        assert_eq!(row_reduce(ReduceOp::Max, &Strided::borrowed(&none), Store::PLAIN).to_array().values, []);
    }

    #[test]
    fn scatter_adds_what_gather_took() {
        let table = Array::normal([4, 3], 1);
        let indices = Array::new([2, 2], vec![3.0, 0.0, 3.0, 1.0]);
        let (table, indices) = (Strided::borrowed(&table), Strided::borrowed(&indices));
        let taken = gather(&Shape::from([2, 2, 3]), &table, &indices).unwrap();
        let back = scatter_add(&Shape::from([4, 3]), &indices, &taken, Store::PLAIN).unwrap().to_array();
        for (row, count) in [1.0, 1.0, 0.0, 2.0].into_iter().enumerate() {
            assert!((0..3).all(|column| back.at(&[row, column]) == count * table.row(row).at(column)));
        }
        for bad in [4.0, -1.0, 0.5, f64::NAN] {
            let bad = Array::filled([1], bad);
            assert!(gather(&Shape::from([1, 3]), &table, &Strided::borrowed(&bad)).is_err());
        }
    }
}
