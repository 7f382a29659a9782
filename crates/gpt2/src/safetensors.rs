//! The safetensors format: eight bytes with the length of a JSON header, the header, the data. The header names tensors with
//! dtype, shape and range; the ranges must cover the data without gap or overlap.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use deuteron::Shape;
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The longest header, as in the format's own library. A GPT-2 XL needs 80 KB.
const MOST_HEADER: usize = 100_000_000;

/// A tensor of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// the dtype's name in the file, such as `BF16`
    pub dtype: String,
    /// sizes
    pub shape: Shape,
    /// its bytes, counted from the start of the file
    pub bytes: Range<usize>,
}

/// Why a file is not a valid safetensors file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Less than the eight bytes of a length.
    #[error("the file has {0} bytes; a safetensors file has at least 10")]
    TooShort(usize),
    /// The header is longer than the file or than any header.
    #[error(
        "the header should have {header} bytes, but the file has {file}; it is truncated or not a safetensors file"
    )]
    Length {
        /// what the first eight bytes say
        header: u64,
        /// bytes of the file
        file: usize,
    },
    /// The header is not the JSON that is expected.
    #[error("the header is damaged: {0}")]
    Json(String),
    /// A dtype of no known size.
    #[error("tensor `{tensor}` has the unknown dtype `{dtype}`")]
    Dtype {
        /// the tensor
        tensor: String,
        /// its dtype
        dtype: String,
    },
    /// The range does not have as many bytes as the shape needs.
    #[error("tensor `{tensor}` of {dtype}{shape} occupies bytes {begin}..{end}, which is not its size")]
    Size {
        /// the tensor
        tensor: String,
        /// its dtype
        dtype: String,
        /// its shape
        shape: Shape,
        /// first byte, counted from the start of the data
        begin: usize,
        /// byte after the last
        end: usize,
    },
    /// Two tensors overlap, or bytes belong to none.
    #[error("tensor `{tensor}` starts at byte {got} of the data, expected {expected}: tensors overlap or leave a gap")]
    Place {
        /// the tensor
        tensor: String,
        /// the end of the tensor before
        expected: usize,
        /// its own start
        got: usize,
    },
    /// The data is longer or shorter than the tensors.
    #[error("the tensors end at byte {expected} of the data, but the file has {got}; copy or download it again")]
    End {
        /// the end of the last tensor
        expected: usize,
        /// bytes of data
        got: usize,
    },
}

/// The tensors of a file, by name. Accepted ranges are inside the file and do not overlap.
pub fn parse(file: &[u8]) -> Result<BTreeMap<String, Entry>, HeaderError> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(HeaderError::TooShort(file.len()));
    };
    let header = u64::from_le_bytes(*length);
    let length = usize::try_from(header).ok().filter(|&length| length <= MOST_HEADER.min(rest.len()));
    let length = length.ok_or(HeaderError::Length { header, file: file.len() })?;
    let (text, data) = rest.split_at(length);
    let Header(raw) = serde_json::from_slice(text).map_err(|error| HeaderError::Json(error.to_string()))?;
    check_places(&raw, data.len())?;
    let mut entries = BTreeMap::new();
    for (tensor, Raw { dtype, shape, data_offsets: [begin, end] }) in raw {
        let shape = Shape::new(shape);
        let Some(bits) = bits(&dtype) else { return Err(HeaderError::Dtype { tensor, dtype }) };
        let needed = shape.checked_elements().and_then(|elements| elements.checked_mul(bits));
        if needed != Some((end - begin) * 8) {
            return Err(HeaderError::Size { tensor, dtype, shape, begin, end });
        }
        entries.insert(tensor, Entry { dtype, shape, bytes: 8 + length + begin..8 + length + end });
    }
    Ok(entries)
}

fn check_places(raw: &BTreeMap<String, Raw>, data: usize) -> Result<(), HeaderError> {
    let mut places: Vec<([usize; 2], &String)> = raw.iter().map(|(name, raw)| (raw.data_offsets, name)).collect();
    places.sort();
    let mut reached = 0;
    for ([begin, end], tensor) in places {
        if begin != reached || end < begin {
            return Err(HeaderError::Place { tensor: tensor.clone(), expected: reached, got: begin });
        }
        reached = end;
    }
    if reached != data {
        return Err(HeaderError::End { expected: reached, got: data });
    }
    Ok(())
}

/// Bits of an element.
fn bits(dtype: &str) -> Option<usize> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

/// The header's object, in which names must be unique.
struct Header(BTreeMap<String, Raw>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut tensors = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let tensor = map.next_value()?;
            if tensors.contains_key(&name) {
                return Err(A::Error::custom(format_args!("tensor `{name}` occurs twice")));
            }
            tensors.insert(name, tensor);
        }
        Ok(Header(tensors))
    }
}
