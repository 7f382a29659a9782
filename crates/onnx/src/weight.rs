//! Weights: the location of their data, and access to it.

use std::path::Path;

use deuteron_graph::{Dtype, Shape, memory};

use crate::constant::Constant;
use crate::element::{Element, encode};
use crate::error::OnnxError;
use crate::external::{self, ExternalPlace};
use crate::limits::HIDDEN;
use crate::schema::Tensor;
use crate::wire::Reader;

/// Where the data of a weight are.
#[derive(Debug, Clone, PartialEq)]
pub enum Location {
    /// In the model's file, as the element type's bytes, little-endian.
    Model {
        /// first byte
        offset: usize,
        /// bytes
        length: usize,
    },
    /// In a file beside it.
    External(ExternalPlace),
    /// Computed by the import, or stored in a form that had to be decoded: the bytes, in the graph's dtype.
    Folded(Vec<u8>),
}

/// A weight of the graph.
#[derive(Debug, Clone, PartialEq)]
pub struct Weight {
    /// The name of the graph's input.
    pub name: String,
    /// The name in the model; of a folded constant, that of the node which gave it.
    pub original: String,
    /// Its dtype in the graph.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Shape,
    /// Where its data are.
    pub location: Location,
    element: Element,
}

/// The values of a weight, as the graph takes them.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorData {
    /// The dtype.
    pub dtype: Dtype,
    /// The shape.
    pub shape: Shape,
    /// The elements in row-major order, little-endian.
    pub bytes: Vec<u8>,
}

impl TensorData {
    /// The values as numbers, in row-major order.
    pub fn values(&self) -> Vec<f64> {
        let element = Element::of(self.dtype);
        self.bytes.chunks_exact(self.dtype.bytes()).map(|bytes| element.decode(bytes)).collect()
    }

    /// Values in a dtype.
    pub fn of_values(dtype: Dtype, shape: Shape, values: impl Iterator<Item = f64>) -> Self {
        let mut bytes = Vec::with_capacity(shape.elements() * dtype.bytes());
        values.for_each(|value| encode(dtype, value, &mut bytes));
        TensorData { dtype, shape, bytes }
    }

    pub(crate) fn constant(&self) -> Constant {
        Constant::dense(self.shape.clone(), self.values(), self.dtype == Dtype::Bool)
    }
}

/// Reads a tensor from a file of its own (`TensorProto`, such as `input_0.pb`): its name and its values.
pub fn read_tensor(file: &[u8]) -> Result<(String, TensorData), OnnxError> {
    let tensor = Tensor::read(Reader::new(file))?;
    let stored = StoredTensor::find(&tensor, tensor.name, None)?;
    let values = stored.decode(file)?;
    let fits = |value: f64| (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&value);
    if stored.element.dtype() == Dtype::I32
        && let Some(value) = values.distinct().find(|&value| !fits(value))
    {
        let problem = format!("expected integers that i32 holds, got {value}");
        return Err(OnnxError::Tensor { tensor: tensor.name.to_string(), problem });
    }
    let weight = Weight::stored(tensor.name.to_string(), &stored, stored.element.dtype());
    Ok((tensor.name.to_string(), weight.read(file)?))
}

fn converted(bytes: &[u8], from: Dtype, to: Dtype) -> Vec<u8> {
    let mut result = memory::room(bytes.len() / from.bytes() * to.bytes());
    let element = Element::of(from);
    bytes.chunks_exact(from.bytes()).for_each(|bytes| encode(to, element.decode(bytes), &mut result));
    result
}

impl Weight {
    /// An initializer, located but not read.
    pub(crate) fn stored(name: String, tensor: &StoredTensor, dtype: Dtype) -> Self {
        // What had to be decoded is stored in the dtype of its element type.
        let location = match &tensor.location {
            Location::Folded(bytes) if dtype != tensor.element.dtype() => {
                Location::Folded(converted(bytes, tensor.element.dtype(), dtype))
            }
            Location::Folded(bytes) => Location::Folded(memory::copied(bytes)),
            location => location.clone(),
        };
        Weight {
            name,
            original: tensor.name.clone(),
            dtype,
            shape: tensor.shape.clone(),
            location,
            element: tensor.element,
        }
    }

    /// A folded constant.
    pub(crate) fn folded(name: String, original: String, element: Element, dtype: Dtype, constant: &Constant) -> Self {
        let mut bytes = memory::room(constant.shape.elements() * dtype.bytes());
        constant.values().for_each(|value| encode(dtype, value, &mut bytes));
        let shape = constant.shape.clone();
        Weight { name, original, dtype, shape, location: Location::Folded(bytes), element }
    }

    /// Its values. `model` is the file that was imported.
    pub fn read(&self, model: &[u8]) -> Result<TensorData, OnnxError> {
        memory::caught(|| self.decoded(model))?
    }

    fn decoded(&self, model: &[u8]) -> Result<TensorData, OnnxError> {
        let (dtype, shape) = (self.dtype, self.shape.clone());
        let stored = match &self.location {
            Location::Folded(bytes) => return Ok(TensorData { dtype, shape, bytes: memory::copied(bytes) }),
            Location::Model { offset, length } => {
                let end = offset.saturating_add(*length);
                let short = || OnnxError::TensorLength {
                    tensor: self.original.clone(),
                    expected: end as u64,
                    got: model.len() as u64,
                };
                memory::copied(model.get(*offset..end).ok_or_else(short)?)
            }
            Location::External(place) => external::read(place)?,
        };
        let is_as_stored = self.element.dtype() == dtype && self.element.bits() == 8 * dtype.bytes();
        let bytes = if !is_as_stored {
            let mut bytes = memory::room(shape.elements() * dtype.bytes());
            let values = self.element.values(&stored, shape.elements());
            values.for_each(|value| encode(dtype, value, &mut bytes));
            bytes
        } else {
            stored
        };
        Ok(TensorData { dtype, shape, bytes })
    }
}

/// A tensor of the file: checked and located.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    pub name: String,
    pub element: Element,
    pub shape: Shape,
    pub location: Location,
}

impl StoredTensor {
    /// Checks type, shape and length, and finds the data.
    pub fn find(tensor: &Tensor, name: &str, folder: Option<&Path>) -> Result<Self, OnnxError> {
        let Some(element) = Element::from_number(tensor.element) else {
            return Err(OnnxError::ElementType { value: name.to_string(), got: tensor.element });
        };
        let shape = shape_of(name, &tensor.dims)?;
        let elements = shape.elements();
        let location = if tensor.is_external {
            Location::External(external::locate(tensor, element.bytes_of(elements) as u64, folder)?)
        } else {
            inline(tensor, name, element, elements)?
        };
        Ok(StoredTensor { name: name.to_string(), element, shape, location })
    }

    /// Whether a float matrix in the file begins like a mask: a row that sees its first column and not the second, as
    /// truth values or as what is added, or that hides nothing. No weight matrix does, unless it is zero.
    pub fn is_mask(&self, file: &[u8]) -> bool {
        let Location::Model { offset, .. } = self.location else { return false };
        let Some([rows, cols]) = self.shape.last_chunk::<2>().copied() else { return false };
        let is_square = rows == cols && rows > 1 && self.shape.elements() > 0;
        let size = self.element.bytes_of(1);
        let value = |index: usize| file.get(offset + index * size..offset + (index + 1) * size);
        let (Some(first), Some(second), true) = (value(0), value(1), is_square) else { return false };
        match (self.element.decode(first), self.element.decode(second)) {
            (1.0, 0.0) | (0.0, 1.0) | (0.0, 0.0) => true,
            (0.0, hidden) => hidden <= HIDDEN,
            _ => false,
        }
    }

    /// Its values as a constant.
    pub fn decode(&self, file: &[u8]) -> Result<Constant, OnnxError> {
        let element = self.element;
        let values = |bytes: &[u8], stored: Element| {
            let values = stored.values(bytes, self.shape.elements());
            Constant::dense(self.shape.clone(), memory::collected(values), element == Element::Bool)
        };
        Ok(match &self.location {
            Location::Model { offset, length } => {
                values(file.get(*offset..offset + length).unwrap_or_default(), element)
            }
            Location::External(place) => values(&external::read(place)?, element),
            // An unsigned byte is stored as the signed one of the same bits.
            Location::Folded(bytes) if element == Element::U8 => values(bytes, element),
            Location::Folded(bytes) => values(bytes, Element::of(element.dtype())),
        })
    }
}

/// Data within the model's file. Raw bytes and packed floats are left where they are; packed varints are decoded.
fn inline(tensor: &Tensor, name: &str, element: Element, elements: usize) -> Result<Location, OnnxError> {
    let expected = element.bytes_of(elements);
    // Parts of bytes are packed, also in a field of numbers.
    let (is_packed, numbers) = if element.bits() < 8 { (true, expected) } else { (false, elements) };
    let wrong_length =
        |got: usize| OnnxError::TensorLength { tensor: name.to_string(), expected: expected as u64, got: got as u64 };
    let in_place = |reader: Reader| match reader.len() == expected {
        true => Ok(Location::Model { offset: reader.offset(), length: expected }),
        false => Err(wrong_length(reader.len())),
    };
    if let Some(raw) = tensor.raw {
        return in_place(raw);
    }
    let packed = tensor.packed.map_or(0, |(_, packed)| packed.len());
    let mut bits = memory::room(tensor.loose.len() + packed.min(numbers + 1));
    bits.extend_from_slice(&tensor.loose);
    match tensor.packed {
        Some((4, packed)) if element == Element::F32 => return in_place(packed),
        Some((10, packed)) if element == Element::F64 => return in_place(packed),
        Some((5 | 7 | 11, mut packed)) => {
            while packed.len() > 0 && bits.len() <= numbers {
                bits.push(packed.varint()?);
            }
        }
        Some((number, _)) => {
            let problem = format!("data of field {number} do not go with its element type; write it as raw_data");
            return Err(OnnxError::Tensor { tensor: name.to_string(), problem });
        }
        None => {}
    }
    if bits.len() != numbers {
        return Err(wrong_length(element.bytes_of(bits.len())));
    }
    let mut bytes = memory::room(elements * element.dtype().bytes());
    if is_packed {
        let packed: Vec<u8> = bits.into_iter().map(|bits| bits as u8).collect();
        element.values(&packed, elements).for_each(|value| element.encode(value, &mut bytes));
        return Ok(Location::Folded(bytes));
    }
    bits.into_iter().for_each(|bits| element.encode(element.value_of_bits(bits), &mut bytes));
    Ok(Location::Folded(bytes))
}

/// Sizes that are sizes, and whose product can be counted.
pub(crate) fn shape_of(value: &str, dims: &[i64]) -> Result<Shape, OnnxError> {
    let mut sizes = Vec::with_capacity(dims.len());
    for (axis, &size) in dims.iter().enumerate() {
        let bad = || OnnxError::BadDim { value: value.to_string(), axis, got: size };
        sizes.push(usize::try_from(size).map_err(|_| bad())?);
    }
    let shape = Shape::new(sizes);
    if shape.rank() > deuteron_graph::MAX_RANK || shape.checked_elements().is_none() {
        return Err(deuteron_graph::GraphError::TooLarge { op: value.to_string(), shape }.into());
    }
    Ok(shape)
}
