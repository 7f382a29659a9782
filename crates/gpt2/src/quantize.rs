//! Int8 weights with one scale per row or column: `scale = absmax / 127`, rounded to nearest, ties to even.
//!
//! A row or column of zeros has the scale 0, and so has one whose scale would be denormal. One with a NaN or an infinity has
//! zeros and a scale that is not finite, so that what is computed from it is NaN. Where there is no memory, these unwind as
//! [`deuteron::memory`] says.

use std::panic::resume_unwind;

use deuteron::{Dtype, memory};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::checkpoint::Weight;

/// Rows of bytes.
pub(crate) struct Bytes {
    /// row by row
    pub bytes: Vec<u8>,
    /// one a row
    pub scales: Vec<f32>,
    /// bytes of a row
    pub width: usize,
}

/// Columns per strip: 3072 rows of them, widened, stay in the L2.
const STRIP: usize = 64;

/// Adding it leaves the nearest whole number in the lowest bits, for magnitudes below 2^22.
const ROUND: f32 = 12_582_912.0;

/// Each row of a matrix as bytes.
pub(crate) fn rows(weight: Weight<'_>) -> Bytes {
    let (count, width) = (weight.shape[0], weight.shape[1]);
    let row_bytes = width * weight.dtype.bytes();
    shared(count, width, 1, |first, bytes, scales| {
        let mut values = vec![0.0; width];
        for (at, (to, scale)) in bytes.chunks_exact_mut(width.max(1)).zip(scales).enumerate() {
            widen(weight.dtype, &weight.bytes[(first + at) * row_bytes..][..row_bytes], &mut values);
            let largest = values.iter().fold(0.0, |most, &value| largest(most, value));
            let inverse;
            (*scale, inverse) = scale_of(largest);
            if scale.is_finite() {
                to.iter_mut().zip(&values).for_each(|(to, &value)| *to = byte(value * inverse));
            }
        }
    })
}

/// Each column of a matrix `[in, out]` as a row of bytes.
pub(crate) fn columns(weight: Weight<'_>) -> Bytes {
    let (depth, count) = (weight.shape[0], weight.shape[1]);
    let element = weight.dtype.bytes();
    shared(count, depth, STRIP, |first, bytes, scales| {
        let mut values: Vec<f32> = memory::zeros(depth * STRIP);
        for (strip, scales) in scales.chunks_mut(STRIP).enumerate() {
            let (start, columns) = (first + strip * STRIP, scales.len());
            let mut most = [0.0; STRIP];
            for (row, line) in values.chunks_exact_mut(STRIP).enumerate() {
                let from = (row * count + start) * element;
                widen(weight.dtype, &weight.bytes[from..][..columns * element], &mut line[..columns]);
                most.iter_mut().zip(&*line).for_each(|(most, &value)| *most = largest(*most, value));
            }
            let mut inverses = [0.0; STRIP];
            for (at, scale) in scales.iter_mut().enumerate() {
                (*scale, inverses[at]) = scale_of(most[at]);
            }
            let to = &mut bytes[strip * STRIP * depth..][..columns * depth];
            for (row, line) in values.chunks_exact(STRIP).enumerate() {
                let mut narrow = [0u8; STRIP];
                let products = line.iter().zip(&inverses).map(|(value, inverse)| value * inverse);
                narrow.iter_mut().zip(products).for_each(|(to, value)| *to = byte(value));
                narrow[..columns].iter().enumerate().for_each(|(column, &byte)| to[column * depth + row] = byte);
            }
            let broken = scales.iter().enumerate().filter(|(_, scale)| !scale.is_finite());
            broken.for_each(|(column, _)| to[column * depth..][..depth].fill(0));
        }
    })
}

/// Int8 rows, computed on all cores: `make` gets the first row, the bytes and the scales of some rows, a multiple of `together`
/// except for the last ones.
fn shared(count: usize, width: usize, together: usize, make: impl Fn(usize, &mut [u8], &mut [f32]) + Sync) -> Bytes {
    let (mut bytes, mut scales) = (memory::zeros(count * width), memory::zeros(count));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = count.div_ceil(threads).next_multiple_of(together).max(1);
    if width > 0 {
        std::thread::scope(|scope| {
            let parts = bytes.chunks_mut(share * width).zip(scales.chunks_mut(share));
            let make = &make;
            let start = |(part, (bytes, scales))| scope.spawn(move || make(part * share, bytes, scales));
            let threads: Vec<_> = parts.enumerate().map(start).collect();
            // A thread that unwinds for want of memory does so here.
            threads.into_iter().for_each(|thread| thread.join().unwrap_or_else(|payload| resume_unwind(payload)));
        });
    }
    Bytes { bytes, scales, width }
}

/// The larger magnitude; NaN stays.
fn largest(most: f32, value: f32) -> f32 {
    let value = value.abs();
    // False for a NaN on either side, of which the first one stays.
    if most >= value || most.is_nan() { most } else { value }
}

/// The scale of a row with this largest magnitude, and the factor for its values.
fn scale_of(largest: f32) -> (f32, f32) {
    let scale = largest / 127.0;
    if scale < f32::MIN_POSITIVE { (0.0, 0.0) } else { (scale, 1.0 / scale) }
}

/// The nearest whole number, of a value within 127.5.
fn byte(value: f32) -> u8 {
    (value + ROUND).to_bits() as u8
}

/// Stored elements as floats.
fn widen(dtype: Dtype, bytes: &[u8], to: &mut [f32]) {
    match dtype {
        Dtype::F16 => {
            let mut halves = [f16::ZERO; STRIP];
            for (to, bytes) in to.chunks_mut(STRIP).zip(bytes.chunks(2 * STRIP)) {
                let pairs = bytes.as_chunks::<2>().0;
                halves.iter_mut().zip(pairs).for_each(|(half, &bytes)| *half = f16::from_le_bytes(bytes));
                halves[..to.len()].convert_to_f32_slice(to);
            }
        }
        Dtype::Bf16 => {
            let pairs = bytes.as_chunks::<2>().0;
            to.iter_mut().zip(pairs).for_each(|(to, &bytes)| *to = bf16::from_le_bytes(bytes).to_f32());
        }
        // A checkpoint stores no other.
        _ => to.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, &bytes)| *to = f32::from_le_bytes(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use deuteron::Shape;

    use super::*;

    fn stored(values: &[f32], dtype: Dtype) -> Vec<u8> {
        match dtype {
            Dtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            Dtype::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }

    /// Numbers from -1 to 1 that all stored types hold.
    fn values(count: usize) -> Vec<f32> {
        (0..count).map(|index| ((index * 97 + index / 13) % 257) as f32 / 128.0 - 1.0).collect()
    }

    #[test]
    fn every_byte_is_the_nearest_and_columns_are_rows_the_other_way() {
        for (depth, count) in [(1, 1), (7, 129), (127, 64), (130, 65), (64, 1), (5, 300)] {
            let shape = Shape::from([depth, count]);
            let values = values(depth * count);
            let mut turned = vec![0.0; depth * count];
            for (index, &value) in values.iter().enumerate() {
                turned[index % count * depth + index / count] = value;
            }
            for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                let got = columns(Weight { dtype, shape: &shape, bytes: &stored(&values, dtype) });
                assert_eq!((got.width, got.scales.len()), (depth, count));
                let shape = Shape::from([count, depth]);
                let by_rows = rows(Weight { dtype, shape: &shape, bytes: &stored(&turned, dtype) });
                assert_eq!((&got.bytes, &got.scales), (&by_rows.bytes, &by_rows.scales));
                for (index, (&byte, &value)) in got.bytes.iter().zip(&turned).enumerate() {
                    let scale = got.scales[index / depth];
                    let error = (f32::from(byte as i8) * scale - value).abs();
                    assert!(error <= 0.5001 * scale, "{dtype}: {byte} of {value} by {scale}");
                }
            }
        }
    }

    #[test]
    fn zeros_and_what_is_not_finite() {
        let table = [
            ([0.0, -0.0, 0.0], 0.0),
            ([1e-40, 0.0, -1e-41], 0.0),
            ([f32::NAN, 1.0, 2.0], f32::NAN),
            ([1.0, f32::NAN, f32::INFINITY], f32::NAN),
            ([1.0, f32::NEG_INFINITY, 0.0], f32::INFINITY),
        ];
        for (values, scale) in table {
            for shape in [[1, 3], [3, 1]] {
                let bytes = stored(&values, Dtype::F32);
                let weight = Weight { dtype: Dtype::F32, shape: &Shape::from(shape), bytes: &bytes };
                let got = if shape[0] == 1 { rows(weight) } else { columns(weight) };
                assert_eq!(got.bytes, [0; 3], "{values:?}");
                assert_eq!(got.scales[0].to_bits() & 0x7fc0_0000, scale.to_bits() & 0x7fc0_0000, "{values:?}");
            }
        }
        let largest = stored(&[f32::MAX, -f32::MAX, 1.0], Dtype::F32);
        let got = rows(Weight { dtype: Dtype::F32, shape: &Shape::from([1, 3]), bytes: &largest });
        assert_eq!(got.bytes, [127, 129, 0]);
    }
}
