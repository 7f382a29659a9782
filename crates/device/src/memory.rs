//! Memory that tensors live in: the host's, or a device's.

use std::fmt;

use crate::buffer::Buffer;
use crate::error::DeviceError;

/// Bytes on the host or on a device.
#[derive(Debug)]
pub enum Memory {
    /// host memory
    Host(Buffer),
    /// memory of a device
    Device(Box<dyn DeviceMemory>),
}

/// Bytes that the host reaches by copies alone.
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// How many.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Where they begin, on the device.
    fn address(&self) -> u64;
    /// Copies the first bytes to the host, as many as `into` has.
    fn read(&self, into: &mut [u8]) -> Result<(), DeviceError>;
}

impl Memory {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        match self {
            Memory::Host(buffer) => buffer.len(),
            Memory::Device(memory) => memory.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, if they are on the host.
    pub fn host(&self) -> Option<&[u8]> {
        match self {
            Memory::Host(buffer) => Some(buffer.bytes()),
            Memory::Device(_) => None,
        }
    }
}
