//! Protobuf's wire format: fields of a message, borrowed from the file.
//!
//! A reader knows where it stands in the whole file, so that errors give an offset and a tensor's bytes a place.

use crate::error::OnnxError;
use crate::limits::{MAX_DEPTH, MAX_ITEMS};

/// A message, or the rest of one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a> {
    file: &'a [u8],
    position: usize,
    end: usize,
    depth: usize,
}

/// One field's content.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Content<'a> {
    Varint(u64),
    Fixed64(u64),
    Fixed32(u32),
    /// A string, bytes, a message or packed numbers.
    Bytes(Reader<'a>),
}

/// One field.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field<'a> {
    pub number: u64,
    pub content: Content<'a>,
    offset: usize,
}

/// How the numbers of a repeated field are stored when packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    Varint,
    Fixed32,
}

impl<'a> Reader<'a> {
    /// The file as one message.
    pub fn new(file: &'a [u8]) -> Self {
        Reader { file, position: 0, end: file.len(), depth: 0 }
    }

    /// The bytes not yet read.
    pub fn bytes(&self) -> &'a [u8] {
        &self.file[self.position..self.end]
    }

    /// Where they begin in the file.
    pub fn offset(&self) -> usize {
        self.position
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.end - self.position
    }

    /// The next field, or `None` at the end.
    pub fn next(&mut self) -> Result<Option<Field<'a>>, OnnxError> {
        if self.position == self.end {
            return Ok(None);
        }
        let offset = self.position;
        let tag = self.varint()?;
        let content = match tag & 7 {
            0 => Content::Varint(self.varint()?),
            1 => Content::Fixed64(u64::from_le_bytes(self.take()?)),
            2 => {
                let length = self.varint()?;
                let left = self.len();
                let Some(length) = usize::try_from(length).ok().filter(|&length| length <= left) else {
                    return Err(self.error(offset, format!("a field of {length} bytes where {left} are left")));
                };
                let inner = Reader { end: self.position + length, depth: self.depth + 1, ..*self };
                self.position += length;
                Content::Bytes(inner)
            }
            5 => Content::Fixed32(u32::from_le_bytes(self.take()?)),
            kind => return Err(self.error(offset, format!("wire type {kind}, expected 0, 1, 2 or 5"))),
        };
        Ok(Some(Field { number: tag >> 3, content, offset }))
    }

    /// A base-128 number.
    pub fn varint(&mut self) -> Result<u64, OnnxError> {
        let start = self.position;
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.take()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.error(start, "a number of more than 10 bytes".to_string()))
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], OnnxError> {
        match self.bytes().first_chunk::<N>() {
            Some(chunk) => {
                self.position += N;
                Ok(*chunk)
            }
            None => Err(self.error(self.position, format!("{N} more bytes expected, {} are left", self.len()))),
        }
    }

    fn error(&self, offset: usize, problem: String) -> OnnxError {
        OnnxError::Wire { offset, problem }
    }
}

impl<'a> Field<'a> {
    /// A nested message.
    pub fn message(&self) -> Result<Reader<'a>, OnnxError> {
        match self.content {
            Content::Bytes(reader) if reader.depth > MAX_DEPTH => {
                Err(OnnxError::Limit { what: "nesting of messages", limit: MAX_DEPTH })
            }
            Content::Bytes(reader) => Ok(reader),
            _ => Err(self.unexpected("a message")),
        }
    }

    /// Raw bytes.
    pub fn bytes(&self) -> Result<Reader<'a>, OnnxError> {
        match self.content {
            Content::Bytes(reader) => Ok(reader),
            _ => Err(self.unexpected("bytes")),
        }
    }

    /// Text.
    pub fn text(&self) -> Result<&'a str, OnnxError> {
        std::str::from_utf8(self.bytes()?.bytes()).map_err(|_| self.unexpected("text in UTF-8"))
    }

    /// A signed number. Protobuf writes negative ones as their two's complement.
    pub fn int(&self) -> Result<i64, OnnxError> {
        match self.content {
            Content::Varint(value) => Ok(value as i64),
            _ => Err(self.unexpected("a number")),
        }
    }

    /// A 32-bit float.
    pub fn float(&self) -> Result<f32, OnnxError> {
        match self.content {
            Content::Fixed32(bits) => Ok(f32::from_bits(bits)),
            _ => Err(self.unexpected("a float")),
        }
    }

    /// Appends the numbers of a repeated field, packed or not, as their bits.
    pub fn numbers(&self, packing: Packing, into: &mut Vec<u64>) -> Result<(), OnnxError> {
        match (self.content, packing) {
            (Content::Varint(value), Packing::Varint) => into.push(value),
            (Content::Fixed32(value), Packing::Fixed32) => into.push(value.into()),
            (Content::Bytes(mut packed), _) => {
                while packed.len() > 0 {
                    if into.len() >= MAX_ITEMS {
                        break;
                    }
                    into.push(match packing {
                        Packing::Varint => packed.varint()?,
                        Packing::Fixed32 => u32::from_le_bytes(packed.take()?).into(),
                    });
                }
            }
            _ => return Err(self.unexpected("numbers")),
        }
        check_items(into)
    }

    fn unexpected(&self, expected: &str) -> OnnxError {
        OnnxError::Wire { offset: self.offset, problem: format!("field {}: expected {expected}", self.number) }
    }
}

/// Refuses a repeated field that no model needs.
pub(crate) fn check_items<T>(items: &[T]) -> Result<(), OnnxError> {
    if items.len() < MAX_ITEMS {
        Ok(())
    } else {
        Err(OnnxError::Limit { what: "entries of a field", limit: MAX_ITEMS })
    }
}
