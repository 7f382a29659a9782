//! Tensors: memory with a dtype, a shape and strides.

use std::borrow::Cow;
use std::sync::Arc;

use deuteron_device::{Buffer, Device, Memory};
use deuteron_graph::{Dtype, MAX_RANK, Shape, View, memory, round_to_odd};
use deuteron_plan::Layout;
use deuteron_reference::{Array, round_to};
use half::{bf16, f16};

use crate::error::Error;

/// A dense tensor. Cloning and views share the memory.
#[derive(Debug, Clone)]
pub struct Tensor {
    memory: Arc<Memory>,
    dtype: Dtype,
    layout: Layout,
}

impl Tensor {
    /// Takes `f32` values in row-major order and stores them as `dtype`.
    pub fn from_f32(dtype: Dtype, shape: impl Into<Shape>, values: &[f32]) -> Result<Tensor, Error> {
        Tensor::build(dtype, shape.into(), values.len(), |index| values[index] as f64)
    }

    /// Takes indices in row-major order.
    pub fn from_i32(shape: impl Into<Shape>, values: &[i32]) -> Result<Tensor, Error> {
        Tensor::build(Dtype::I32, shape.into(), values.len(), |index| values[index] as f64)
    }

    /// Takes the values of a reference array and stores them as `dtype`.
    pub fn from_array(dtype: Dtype, array: &Array) -> Result<Tensor, Error> {
        Tensor::build(dtype, array.shape.clone(), array.values.len(), |index| array.values[index])
    }

    /// One value everywhere.
    pub fn filled(dtype: Dtype, shape: impl Into<Shape>, value: f64) -> Result<Tensor, Error> {
        let shape = shape.into();
        let count = shape.checked_elements().ok_or_else(|| Error::TensorTooLarge(shape.clone()))?;
        Tensor::build(dtype, shape, count, |_| value)
    }

    /// Takes raw bytes in row-major order, as a kernel wrote them.
    pub fn from_bytes(dtype: Dtype, shape: impl Into<Shape>, bytes: &[u8]) -> Result<Tensor, Error> {
        let shape = shape.into();
        check_bytes(dtype, &shape, bytes)?;
        Tensor::read(dtype, shape, |memory| {
            memory.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Takes raw bytes in row-major order to memory of a device.
    pub(crate) fn on(device: &dyn Device, dtype: Dtype, shape: Shape, bytes: &[u8]) -> Result<Tensor, Error> {
        check_bytes(dtype, &shape, bytes)?;
        let memory = Arc::new(device.upload(bytes)?);
        Ok(Tensor { memory, dtype, layout: Layout::contiguous(&shape) })
    }

    /// A tensor whose bytes, in row-major order, are written by a function.
    pub(crate) fn read(
        dtype: Dtype,
        shape: Shape,
        write: impl FnOnce(&mut [u8]) -> Result<(), Error>,
    ) -> Result<Tensor, Error> {
        let mut memory = Buffer::new(counted(&shape)? * dtype.bytes())?;
        write(memory.bytes_mut())?;
        Ok(Tensor::of(memory, dtype, &shape))
    }

    fn of(memory: Buffer, dtype: Dtype, shape: &Shape) -> Tensor {
        Tensor { memory: Arc::new(Memory::Host(memory)), dtype, layout: Layout::contiguous(shape) }
    }

    /// Fills a tensor from a function of the row-major index. The values are rounded to the dtype.
    pub fn build(dtype: Dtype, shape: Shape, got: usize, mut value: impl FnMut(usize) -> f64) -> Result<Tensor, Error> {
        let expected = counted(&shape)?;
        if expected != got {
            return Err(Error::TensorSize { dtype, shape, expected, got });
        }
        let mut memory = Buffer::new(expected * dtype.bytes())?;
        for (index, bytes) in memory.bytes_mut().chunks_exact_mut(dtype.bytes()).enumerate() {
            encode(dtype, value(index), bytes);
        }
        Ok(Tensor::of(memory, dtype, &shape))
    }

    /// Fills a tensor by repeating the first `period` values: quick for large ones.
    pub(crate) fn tiled(
        dtype: Dtype,
        shape: Shape,
        period: usize,
        mut value: impl FnMut(usize) -> f64,
    ) -> Result<Tensor, Error> {
        let count = counted(&shape)?;
        Tensor::read(dtype, shape, |bytes| {
            let first = period.min(count) * dtype.bytes();
            for (index, bytes) in bytes[..first].chunks_exact_mut(dtype.bytes()).enumerate() {
                encode(dtype, value(index), bytes);
            }
            let mut filled = first;
            while filled < bytes.len() {
                let more = filled.min(bytes.len() - filled);
                bytes.copy_within(..more, filled);
                filled += more;
            }
            Ok(())
        })
    }

    /// Its storage type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its shape.
    pub fn shape(&self) -> &Shape {
        &self.layout.shape
    }

    /// Its strides and offset, in elements.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A view of the same memory: another shape, another order of axes, a range of one.
    pub fn view(&self, view: &View) -> Result<Tensor, Error> {
        let shape = self.shape();
        let fail = |what, why: &str| Error::TensorView { what, shape: shape.clone(), why: why.to_string() };
        match view {
            View::Reshape(to) if to.checked_elements() != Some(shape.elements()) => {
                return Err(fail("reshape", &format!("{to} has another number of elements")));
            }
            View::Transpose(order) => {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                if !sorted.iter().copied().eq(0..shape.rank()) {
                    return Err(fail("transpose", "the axes are not a permutation"));
                }
            }
            View::Slice { axis, start, length } => {
                let fits = *axis < shape.rank() && start.checked_add(*length).is_some_and(|end| end <= shape[*axis]);
                if !fits {
                    return Err(fail("slice", "the range is outside of the axis"));
                }
            }
            View::Broadcast(to) if !shape.broadcasts_to(to) => return Err(fail("broadcast", "sizes differ")),
            View::Reshape(_) | View::Broadcast(_) => {}
        }
        let layout =
            self.layout.view(view).ok_or_else(|| fail("reshape", "its strides do not allow it; copy it first"))?;
        Ok(Tensor { memory: self.memory.clone(), dtype: self.dtype, layout })
    }

    /// The same values in row-major order: itself if it is so already, else a copy.
    pub fn contiguous(&self) -> Result<Tensor, Error> {
        if self.layout.is_contiguous() {
            return Ok(self.clone());
        }
        Tensor::from_array(self.dtype, &self.to_array()?)
    }

    /// The same tensor in memory of a device.
    pub(crate) fn uploaded(&self, device: &dyn Device) -> Result<Tensor, Error> {
        let memory = Arc::new(device.upload(&self.bytes()?)?);
        Ok(Tensor { memory, dtype: self.dtype, layout: self.layout.clone() })
    }

    /// Whether its memory is the host's.
    pub(crate) fn is_on_host(&self) -> bool {
        matches!(*self.memory, Memory::Host(_))
    }

    /// The bytes of the memory it looks into, fetched if they are not on the host.
    fn bytes(&self) -> Result<Cow<'_, [u8]>, Error> {
        match &*self.memory {
            Memory::Host(buffer) => Ok(Cow::Borrowed(buffer.bytes())),
            Memory::Device(memory) => {
                let mut bytes = reserved(memory.len())?;
                bytes.resize(memory.len(), 0);
                memory.read(&mut bytes)?;
                Ok(Cow::Owned(bytes))
            }
        }
    }

    /// Rows and values of an `i32` tensor, which is contiguous, if it is on the host. Allocates nothing.
    pub(crate) fn host_integers(&self) -> Option<impl Iterator<Item = (usize, i32)>> {
        let bytes = self.memory.host().filter(|_| self.dtype == Dtype::I32)?;
        let integers = bytes[..4 * self.shape().elements()].chunks_exact(4);
        Some(integers.map(|bytes| i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).enumerate())
    }

    /// The bytes of a tensor on the host that is contiguous and shares its memory with no other; none of any other tensor.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let length = self.shape().elements() * self.dtype.bytes();
        if !self.layout.is_contiguous() {
            return None;
        }
        match Arc::get_mut(&mut self.memory)? {
            Memory::Host(buffer) => buffer.bytes_mut().get_mut(..length),
            Memory::Device(_) => None,
        }
    }

    /// The bytes of all values, in row-major order.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let (size, bytes) = (self.dtype.bytes(), self.bytes()?);
        if self.layout.is_contiguous() {
            let mut copy = reserved(self.shape().elements() * size)?;
            copy.extend_from_slice(&bytes[..self.shape().elements() * size]);
            return Ok(copy);
        }
        let mut packed = reserved(self.shape().elements() * size)?;
        self.for_elements(|element| packed.extend_from_slice(&bytes[element * size..(element + 1) * size]));
        Ok(packed)
    }

    /// Whether another tensor of the same dtype and shape has the same bits. Both must be contiguous and on the host, as
    /// outputs of a session are; others compare as different.
    pub fn is_bitwise(&self, other: &Tensor) -> bool {
        let contiguous = self.layout.is_contiguous() && other.layout.is_contiguous();
        let length = self.shape().elements() * self.dtype.bytes();
        match (self.memory.host(), other.memory.host()) {
            (Some(ours), Some(theirs)) if contiguous && self.dtype == other.dtype && self.shape() == other.shape() => {
                ours[..length] == theirs[..length]
            }
            _ => false,
        }
    }

    /// The values, ours and theirs, of the elements whose bits differ. Both tensors are as [`Tensor::is_bitwise`] asks.
    pub(crate) fn differences(&self, other: &Tensor) -> Result<Vec<(f64, f64)>, Error> {
        let (ours, theirs, size) = (self.bytes()?, other.bytes()?, self.dtype.bytes());
        let length = self.shape().elements() * size;
        let pairs = ours[..length].chunks_exact(size).zip(theirs[..length].chunks_exact(size));
        let different = || pairs.clone().filter(|(ours, theirs)| ours != theirs);
        let mut values = reserved(different().count())?;
        values.extend(different().map(|(ours, theirs)| (decode(self.dtype, ours), decode(self.dtype, theirs))));
        Ok(values)
    }

    /// Calls a function with the position in memory of every element, in row-major order.
    fn for_elements(&self, mut visit: impl FnMut(usize)) {
        let (shape, strides) = (self.shape(), &self.layout.strides);
        let mut index = vec![0usize; shape.rank()];
        for _ in 0..shape.elements() {
            visit(self.layout.offset + index.iter().zip(strides).map(|(i, s)| i * s).sum::<usize>());
            for axis in (0..shape.rank()).rev() {
                index[axis] += 1;
                if index[axis] < shape[axis] {
                    break;
                }
                index[axis] = 0;
            }
        }
    }

    /// All values as `f64`, in row-major order.
    pub fn to_array(&self) -> Result<Array, Error> {
        let (shape, bytes) = (self.shape(), self.bytes()?);
        let size = self.dtype.bytes();
        let at = |element: usize| decode(self.dtype, &bytes[element * size..(element + 1) * size]);
        let count = shape.elements();
        if self.layout.is_contiguous() {
            let mut values = reserved(count)?;
            values.extend((0..count).map(at));
            return Ok(Array::new(shape.clone(), values));
        }
        let mut values = reserved(count)?;
        self.for_elements(|element| values.push(at(element)));
        Ok(Array::new(shape.clone(), values))
    }

    /// All values as `f32`, in row-major order.
    pub fn to_f32(&self) -> Result<Vec<f32>, Error> {
        let bytes = match self.dtype {
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 if self.layout.is_contiguous() => self.bytes()?,
            _ => {
                let array = self.to_array()?;
                let mut values = reserved(array.values.len())?;
                values.extend(array.values.iter().map(|&value| value as f32));
                return Ok(values);
            }
        };
        let bytes = &bytes[..self.shape().elements() * self.dtype.bytes()];
        let (words, _) = bytes.as_chunks::<4>();
        let (halves, _) = bytes.as_chunks::<2>();
        let mut values = reserved(self.shape().elements())?;
        match self.dtype {
            Dtype::F16 => values.extend(halves.iter().map(|&half| f16::from_le_bytes(half).to_f32())),
            Dtype::Bf16 => values.extend(halves.iter().map(|&half| bf16::from_le_bytes(half).to_f32())),
            _ => values.extend(words.iter().map(|&word| f32::from_le_bytes(word))),
        }
        Ok(values)
    }

    /// The whole memory that this tensor looks into.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The same, mutable, if no other tensor shares the memory.
    pub(crate) fn memory_mut(&mut self) -> Option<&mut Memory> {
        Arc::get_mut(&mut self.memory)
    }
}

/// An empty list with room for this many elements.
fn reserved<T>(count: usize) -> Result<Vec<T>, Error> {
    Ok(memory::reserved(count)?)
}

fn counted(shape: &Shape) -> Result<usize, Error> {
    let fits = shape.rank() <= MAX_RANK;
    shape.checked_elements().filter(|_| fits).ok_or_else(|| Error::TensorTooLarge(shape.clone()))
}

/// Checks that bytes fill a shape.
fn check_bytes(dtype: Dtype, shape: &Shape, bytes: &[u8]) -> Result<(), Error> {
    let expected = counted(shape)?;
    if bytes.len() != expected * dtype.bytes() {
        let (shape, got) = (shape.clone(), bytes.len() / dtype.bytes());
        return Err(Error::TensorSize { dtype, shape, expected, got });
    }
    Ok(())
}

fn encode(dtype: Dtype, value: f64, to: &mut [u8]) {
    match dtype {
        Dtype::F32 => to.copy_from_slice(&(value as f32).to_le_bytes()),
        // Their own `from_f64` takes what is just above the middle of two neighbours for the middle.
        Dtype::F16 => to.copy_from_slice(&f16::from_f32(round_to_odd(value)).to_le_bytes()),
        Dtype::Bf16 => to.copy_from_slice(&bf16::from_f32(round_to_odd(value)).to_le_bytes()),
        Dtype::I32 => to.copy_from_slice(&(value as i32).to_le_bytes()),
        Dtype::I8 => to[0] = (round_to(Dtype::I8, value) as i8) as u8,
        Dtype::F8e4m3 => to[0] = encode_fp8(value),
        Dtype::Bool => to[0] = (value != 0.0) as u8,
    }
}

fn decode(dtype: Dtype, from: &[u8]) -> f64 {
    match dtype {
        Dtype::F32 => f32::from_le_bytes([from[0], from[1], from[2], from[3]]) as f64,
        Dtype::F16 => f16::from_le_bytes([from[0], from[1]]).to_f64(),
        Dtype::Bf16 => bf16::from_le_bytes([from[0], from[1]]).to_f64(),
        Dtype::I32 => i32::from_le_bytes([from[0], from[1], from[2], from[3]]) as f64,
        Dtype::I8 => from[0] as i8 as f64,
        Dtype::F8e4m3 => decode_fp8(from[0]),
        Dtype::Bool => from[0] as f64,
    }
}

fn decode_fp8(byte: u8) -> f64 {
    let sign = if byte & 0x80 != 0 { -1.0 } else { 1.0 };
    let (exponent, fraction) = ((byte >> 3) & 15, (byte & 7) as f64);
    match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => sign * fraction * f64::powi(2.0, -9),
        _ => sign * (1.0 + fraction / 8.0) * f64::powi(2.0, exponent as i32 - 7),
    }
}

/// The byte whose value is nearest, found among all: tensors of this type are small and made for tests.
fn encode_fp8(value: f64) -> u8 {
    let rounded = round_to(Dtype::F8e4m3, value);
    let matches = |&byte: &u8| {
        let decoded = decode_fp8(byte);
        decoded == rounded && decoded.is_sign_negative() == rounded.is_sign_negative()
    };
    (0..=255).find(matches).unwrap_or(0x7F)
}

#[cfg(test)]
mod tests {
    use deuteron_reference::Generator;

    use super::*;

    /// Midpoints of neighbouring values, values one bit beside them, and values that no format represents.
    #[test]
    fn values_are_rounded_as_the_reference_rounds_them() {
        let mut random = Generator::new(9);
        let mut values =
            vec![0.0, -0.0, 1e-320, 1e300, -1e300, 65519.999, 65520.0, 3.4e38, f64::INFINITY, f64::NEG_INFINITY];
        for _ in 0..2000 {
            let exponent = random.below(300) as i32 - 160;
            for bits in [7, 10] {
                let whole = 1.0 + random.below(1 << bits) as f64 / f64::from(1 << bits);
                let middle = (whole + f64::powi(2.0, -bits - 1)) * f64::powi(2.0, exponent);
                let sign = if random.chance(0.5) { 1.0 } else { -1.0 };
                values.extend([middle.next_down(), middle, middle.next_up()].map(|value| sign * value));
            }
        }
        for dtype in [Dtype::F16, Dtype::Bf16] {
            for &value in &values {
                let mut bytes = [0; 2];
                encode(dtype, value, &mut bytes);
                let stored = decode(dtype, &bytes);
                assert_eq!(stored.to_bits(), round_to(dtype, value).to_bits(), "{value:e} as {dtype}: {stored:e}");
            }
        }
    }
}
