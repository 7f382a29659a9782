//! Tensors inside the interpreter: a view with strides over shared values, and maps over such views.
//!
//! Transposes, slices and broadcasts only change strides, so a mask or a row statistic is never copied to full size.
//! A result has full size only along axes where an operand varies.

use std::ops::Deref;
use std::sync::Arc;

use deuteron_graph::{Shape, View, memory};
use rayon::prelude::*;

use crate::array::Array;
use crate::store::{Buffers, Store};
use crate::threads::{any, in_pieces};

/// Elements that one task computes: large enough to hide scheduling, small enough to stay in a second-level cache.
pub(crate) const CHUNK: usize = 1 << 14;

/// Values that are the caller's, or shared between views.
#[derive(Debug, Clone)]
enum Data<'a> {
    Borrowed(&'a [f64]),
    Shared(Arc<Vec<f64>>),
}

impl Deref for Data<'_> {
    type Target = [f64];
    fn deref(&self) -> &[f64] {
        match self {
            Data::Borrowed(values) => values,
            Data::Shared(values) => values,
        }
    }
}

/// A tensor as an affine map into a buffer. A stride of 0 repeats.
#[derive(Debug, Clone)]
pub(crate) struct Strided<'a> {
    pub shape: Shape,
    pub strides: Vec<usize>,
    pub offset: usize,
    data: Data<'a>,
}

impl<'a> Strided<'a> {
    pub fn owned(shape: Shape, values: Vec<f64>) -> Self {
        let strides = shape.strides();
        Strided { shape, strides, offset: 0, data: Data::Shared(Arc::new(values)) }
    }

    pub fn borrowed(array: &'a Array) -> Self {
        let strides = array.shape.strides();
        Strided { shape: array.shape.clone(), strides, offset: 0, data: Data::Borrowed(&array.values) }
    }

    pub fn scalar(value: f64) -> Self {
        Strided::owned(Shape::scalar(), vec![value])
    }

    /// The buffer; elements are where [`Strided::strides`] say.
    pub fn buffer(&self) -> &[f64] {
        &self.data
    }

    /// The values in row-major order, if they lie so already.
    pub fn as_slice(&self) -> Option<&[f64]> {
        let expected = self.shape.strides();
        let in_order = (0..self.shape.rank()).all(|axis| self.shape[axis] <= 1 || self.strides[axis] == expected[axis]);
        let count = self.shape.elements();
        if count == 0 {
            return Some(&[]);
        }
        in_order.then(|| &self.data[self.offset..self.offset + count])
    }

    /// Whether some element satisfies a condition. Where elements do not lie in order, the whole buffer is looked at.
    pub fn any(&self, condition: impl Fn(f64) -> bool + Send + Sync) -> bool {
        any(self.as_slice().unwrap_or(&self.data), |&x| condition(x))
    }

    /// The same elements, laid in row-major order.
    pub fn packed(&self) -> Strided<'a> {
        if self.as_slice().is_some() {
            return self.clone();
        }
        let mut values = memory::zeros(self.shape.elements());
        Walk::new(&self.shape, [self]).fill(&mut values, Store::PLAIN, |out, [run]| match run.stride {
            1 => out.copy_from_slice(&run.values[..out.len()]),
            _ => out.iter_mut().enumerate().for_each(|(i, x)| *x = run.at(i)),
        });
        Strided::owned(self.shape.clone(), values)
    }

    pub fn to_array(&self) -> Array {
        let packed = self.packed();
        let values = memory::copied(packed.as_slice().unwrap_or_default());
        Array { shape: self.shape.clone(), values }
    }

    /// Like [`Strided::to_array`], without a copy where the buffer has no other owner.
    pub fn into_array(self) -> Array {
        let packed = self.packed();
        drop(self);
        let count = packed.shape.elements();
        match packed.data {
            Data::Shared(values) if values.len() == count => {
                let values = Arc::try_unwrap(values).unwrap_or_else(|shared| memory::copied(&shared));
                Array { shape: packed.shape, values }
            }
            _ => packed.to_array(),
        }
    }

    /// Leaves the buffer for another value, if this was its last owner.
    pub fn recycle(self, buffers: &Buffers) {
        if let Data::Shared(values) = self.data
            && let Ok(values) = Arc::try_unwrap(values)
        {
            buffers.give(values);
        }
    }

    /// A change of index.
    pub fn view(&self, view: &View) -> Strided<'a> {
        match view {
            View::Reshape(shape) => self.reshape(shape),
            View::Transpose(permutation) => self.transpose(permutation),
            View::Slice { axis, start, length } => self.slice(*axis, *start, *length),
            View::Broadcast(shape) => self.broadcast(shape),
        }
    }

    pub fn reshape(&self, shape: &Shape) -> Strided<'a> {
        let packed = self.packed();
        Strided { shape: shape.clone(), strides: shape.strides(), ..packed }
    }

    pub fn transpose(&self, permutation: &[usize]) -> Strided<'a> {
        let shape = Shape::new(permutation.iter().map(|&axis| self.shape[axis]).collect::<Vec<_>>());
        let strides = permutation.iter().map(|&axis| self.strides[axis]).collect();
        Strided { shape, strides, ..self.clone() }
    }

    pub fn slice(&self, axis: usize, start: usize, length: usize) -> Strided<'a> {
        let mut dims = self.shape.to_vec();
        dims[axis] = length;
        let offset = self.offset + start * self.strides[axis];
        Strided { shape: Shape::new(dims), offset, ..self.clone() }
    }

    pub fn broadcast(&self, shape: &Shape) -> Strided<'a> {
        let missing = shape.rank() - self.shape.rank();
        let strides = (0..shape.rank())
            .map(|axis| match axis.checked_sub(missing) {
                Some(own) if self.shape[own] == shape[axis] => self.strides[own],
                _ => 0,
            })
            .collect();
        Strided { shape: shape.clone(), strides, ..self.clone() }
    }

    /// Start of row `row` of the last axis in the buffer.
    pub fn row_start(&self, row: usize) -> usize {
        let (mut rest, mut position) = (row, self.offset);
        for axis in (0..self.shape.rank().saturating_sub(1)).rev() {
            position += rest % self.shape[axis] * self.strides[axis];
            rest /= self.shape[axis];
        }
        position
    }

    /// One row of the last axis.
    pub fn row(&self, row: usize) -> Run<'_> {
        let stride = self.strides.last().copied().unwrap_or(1);
        // A row without elements may begin beyond the buffer.
        Run { values: self.data.get(self.row_start(row)..).unwrap_or_default(), stride }
    }
}

/// Part of a row of an operand.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pub values: &'a [f64],
    pub stride: usize,
}

impl Run<'_> {
    #[inline(always)]
    pub fn at(&self, position: usize) -> f64 {
        self.values[position * self.stride]
    }
}

/// Operands end to end along an axis.
pub(crate) fn concat(shape: &Shape, axis: usize, parts: &[&Strided]) -> Strided<'static> {
    let parts: Vec<Strided> = parts.iter().map(|part| part.packed()).collect();
    let blocks: usize = shape[..axis].iter().product();
    let mut values = memory::room(shape.elements());
    for block in 0..blocks {
        for part in &parts {
            let length: usize = part.shape[axis..].iter().product();
            values.extend_from_slice(&part.as_slice().unwrap_or_default()[block * length..][..length]);
        }
    }
    Strided::owned(shape.clone(), values)
}

/// `f` of one operand.
pub(crate) fn map1(a: &Strided, store: Store, f: impl Fn(f64) -> f64 + Sync) -> Strided<'static> {
    build(&a.shape, [a], store, |out, [a]| match a.stride {
        1 => out.iter_mut().zip(a.values).for_each(|(out, &a)| *out = f(a)),
        _ => out.iter_mut().enumerate().for_each(|(i, out)| *out = f(a.at(i))),
    })
}

/// `f` of two operands, broadcast to `shape`.
pub(crate) fn map2(
    shape: &Shape,
    operands: [&Strided; 2],
    store: Store,
    f: impl Fn(f64, f64) -> f64 + Sync,
) -> Strided<'static> {
    build(shape, operands, store, |out, [a, b]| match (a.stride, b.stride) {
        (1, 1) => out.iter_mut().zip(a.values.iter().zip(b.values)).for_each(|(out, (&a, &b))| *out = f(a, b)),
        (1, 0) => {
            let b = b.values[0];
            out.iter_mut().zip(a.values).for_each(|(out, &a)| *out = f(a, b));
        }
        (0, 1) => {
            let a = a.values[0];
            out.iter_mut().zip(b.values).for_each(|(out, &b)| *out = f(a, b));
        }
        _ => out.iter_mut().enumerate().for_each(|(i, out)| *out = f(a.at(i), b.at(i))),
    })
}

/// `f` of any number of operands, broadcast to `shape`.
pub(crate) fn map<const N: usize>(
    shape: &Shape,
    operands: [&Strided; N],
    store: Store,
    f: impl Fn([f64; N]) -> f64 + Sync,
) -> Strided<'static> {
    build(shape, operands, store, |out, runs| {
        out.iter_mut().enumerate().for_each(|(i, out)| *out = f(runs.map(|run| run.at(i))));
    })
}

/// Two functions of the same operands, broadcast to `shape`.
pub(crate) fn map_pair<const N: usize>(
    shape: &Shape,
    operands: [&Strided; N],
    f: impl Fn([f64; N]) -> [f64; 2] + Sync,
) -> [Strided<'static>; 2] {
    let operands = operands.map(|operand| operand.broadcast(shape));
    let computed = varying(shape, &operands);
    let walk = Walk::new(&computed, operands.each_ref());
    let mut values = [0, 1].map(|_| memory::zeros(computed.elements()));
    let [first, second] = &mut values;
    let task = |(index, (first, second)): (usize, (&mut [f64], &mut [f64]))| {
        walk.in_runs(index * CHUNK, first.len(), |start, length, runs| {
            let both = first[start..start + length].iter_mut().zip(&mut second[start..start + length]);
            both.enumerate().for_each(|(i, (first, second))| [*first, *second] = f(runs.map(|run| run.at(i))));
        });
    };
    if first.len() <= CHUNK {
        task((0, (first, second)));
    } else {
        first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK)).enumerate().for_each(task);
    }
    values.map(|values| Strided::owned(computed.clone(), values).broadcast(shape))
}

fn build<const N: usize>(
    shape: &Shape,
    operands: [&Strided; N],
    store: Store,
    body: impl Fn(&mut [f64], [Run; N]) + Sync,
) -> Strided<'static> {
    let operands = operands.map(|operand| operand.broadcast(shape));
    let computed = varying(shape, &operands);
    let mut values = store.buffer(computed.elements());
    Walk::new(&computed, operands.each_ref()).fill(&mut values, store, body);
    Strided::owned(computed, values).broadcast(shape)
}

/// The shape of what is computed: along an axis where every operand repeats, one value is, and repeats in turn.
fn varying(shape: &Shape, operands: &[Strided]) -> Shape {
    let varies = |axis: usize| operands.iter().any(|operand| operand.strides[axis] != 0);
    let size = |axis: usize| if varies(axis) { shape[axis] } else { shape[axis].min(1) };
    Shape::new((0..shape.rank()).map(size).collect::<Vec<usize>>())
}

/// The order in which runs of the operands meet runs of the result.
struct Walk<'a, const N: usize> {
    buffers: [&'a [f64]; N],
    offsets: [usize; N],
    /// Size and strides of each outer axis.
    outer: Vec<(usize, [usize; N])>,
    inner: usize,
    inner_strides: [usize; N],
}

impl<'a, const N: usize> Walk<'a, N> {
    /// Axes that all operands walk as one are merged, so that runs are long.
    fn new(shape: &Shape, operands: [&'a Strided; N]) -> Self {
        let mut axes: Vec<(usize, [usize; N])> = Vec::new();
        for axis in (0..shape.rank()).filter(|&axis| shape[axis] != 1) {
            let strides = operands.map(|operand| operand.strides[axis]);
            match axes.last_mut() {
                Some((size, outer)) if (0..N).all(|k| outer[k] == strides[k] * shape[axis]) => {
                    *size *= shape[axis];
                    *outer = strides;
                }
                _ => axes.push((shape[axis], strides)),
            }
        }
        let (inner, inner_strides) = axes.pop().unwrap_or((1, [0; N]));
        Walk {
            buffers: operands.map(|operand| operand.buffer()),
            offsets: operands.map(|operand| operand.offset),
            outer: axes,
            inner,
            inner_strides,
        }
    }

    fn fill(&self, out: &mut [f64], store: Store, body: impl Fn(&mut [f64], [Run; N]) + Sync) {
        in_pieces(out, CHUNK, |index, chunk| {
            self.in_runs(index * CHUNK, chunk.len(), |start, length, runs| {
                body(&mut chunk[start..start + length], runs);
            });
            store.finish(chunk);
        });
    }

    /// Calls `see` with each run of `count` elements from `first` on: where it starts among them, its length, and the operands.
    fn in_runs(&self, first: usize, count: usize, mut see: impl FnMut(usize, usize, [Run<'a>; N])) {
        let mut done = 0;
        while done < count {
            let (row, column) = ((first + done) / self.inner, (first + done) % self.inner);
            let length = (self.inner - column).min(count - done);
            see(done, length, self.runs(row, column));
            done += length;
        }
    }

    fn runs(&self, row: usize, column: usize) -> [Run<'a>; N] {
        let (mut rest, mut positions) = (row, self.offsets);
        for (size, strides) in self.outer.iter().rev() {
            let index = rest % size;
            rest /= size;
            for (position, stride) in positions.iter_mut().zip(strides) {
                *position += index * stride;
            }
        }
        std::array::from_fn(|k| Run {
            values: &self.buffers[k][positions[k] + column * self.inner_strides[k]..],
            stride: self.inner_strides[k],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counting(shape: impl Into<Shape>) -> Array {
        Array::from_fn(shape, |i| i as f64)
    }

    #[test]
    fn views_move_no_element_to_the_wrong_place() {
        let array = counting([2, 3, 5]);
        let x = Strided::borrowed(&array);
        let turned = x.transpose(&[2, 0, 1]).slice(0, 1, 3).to_array();
        assert_eq!(turned.shape, Shape::from([3, 2, 3]));
        for (i, j, k) in (0..18).map(|n| (n / 6, n / 3 % 2, n % 3)) {
            assert_eq!(turned.at(&[i, j, k]), array.at(&[j, k, i + 1]));
        }
        let reshaped = x.transpose(&[1, 0, 2]).reshape(&Shape::from([6, 5])).to_array();
        assert_eq!(reshaped.row(1), array.row(3));
    }

    /// Every pair of operands that repeat along some axes, against the definition.
    #[test]
    fn maps_broadcast() {
        let shape = Shape::from([3, 129, 5]);
        let variants = [vec![3, 129, 5], vec![5], vec![129, 1], vec![1, 129, 5], vec![3, 1, 1], vec![], vec![3, 1, 5]];
        let index = |array: &Array, i: [usize; 3]| {
            let missing = 3 - array.shape.rank();
            let own: Vec<usize> =
                (0..array.shape.rank()).map(|axis| i[axis + missing].min(array.shape[axis] - 1)).collect();
            array.at(&own)
        };
        for a in &variants {
            for b in &variants {
                let (a, b) = (counting(a.clone()), counting(b.clone()));
                let shape = if a.shape.broadcast(&b.shape) == Some(shape.clone()) { shape.clone() } else { continue };
                let got =
                    map2(&shape, [&Strided::borrowed(&a), &Strided::borrowed(&b)], Store::PLAIN, |a, b| a - 7.0 * b);
                let same =
                    map(&shape, [&Strided::borrowed(&a), &Strided::borrowed(&b)], Store::PLAIN, |[a, b]| a - 7.0 * b);
                let (got, same) = (got.to_array(), same.to_array());
                for (i, j, k) in (0..shape.elements()).map(|n| (n / (129 * 5), n / 5 % 129, n % 5)) {
                    let expected = index(&a, [i, j, k]) - 7.0 * index(&b, [i, j, k]);
                    assert_eq!(got.at(&[i, j, k]), expected, "{} with {}", a.shape, b.shape);
                    assert_eq!(same.at(&[i, j, k]), expected, "{} with {}", a.shape, b.shape);
                }
            }
        }
    }

    #[test]
    fn chunks_meet_without_a_seam() {
        let array = counting([3 * CHUNK + 17]);
        let doubled = map1(&Strided::borrowed(&array), Store::PLAIN, |x| 2.0 * x).to_array();
        assert!(doubled.values.iter().enumerate().all(|(i, &x)| x == 2.0 * i as f64));
        let square = counting([129, 257]);
        let turned = map1(&Strided::borrowed(&square).transpose(&[1, 0]), Store::PLAIN, |x| x).to_array();
        assert!((0..257 * 129).all(|n| turned.values[n] == square.at(&[n % 129, n / 129])));
    }

    #[test]
    fn a_pair_of_maps_is_both_of_them() {
        // More elements than one chunk.
        let shape = Shape::from([2 * CHUNK / 129, 129]);
        let (a, b) = (counting(shape.clone()), counting([129]));
        let operands = [&Strided::borrowed(&a), &Strided::borrowed(&b)];
        let [sums, products] = map_pair(&shape, operands, |[a, b]| [a + b, a * b]);
        assert_eq!(sums.to_array(), map2(&shape, operands, Store::PLAIN, |a, b| a + b).to_array());
        assert_eq!(products.to_array(), map2(&shape, operands, Store::PLAIN, |a, b| a * b).to_array());
        let turned = [&operands[0].transpose(&[1, 0]), &operands[1].reshape(&Shape::from([129, 1]))];
        let [sums, _] = map_pair(&Shape::from([129, shape[0]]), turned, |[a, b]| [a + b, a * b]);
        assert_eq!(sums.to_array().at(&[128, 1]), a.at(&[1, 128]) + 128.0);
    }

    #[test]
    fn a_repeated_result_is_computed_once() {
        let row = counting([4]);
        let wide = Strided::borrowed(&row).broadcast(&Shape::from([1000, 4]));
        let result = map1(&wide, Store::PLAIN, |x| x + 1.0);
        assert_eq!(result.buffer().len(), 4);
        assert_eq!(result.to_array().row(999), [1.0, 2.0, 3.0, 4.0]);
    }
}
