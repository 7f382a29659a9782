//! Memory of tensors: the host's, a device's, or the caller's.

use std::fmt;

use crate::buffer::Buffer;
use crate::error::DeviceError;

/// A range of memory that the caller owns, by its address on the host or on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// where it begins
    pub address: u64,
    /// its length
    pub bytes: usize,
}

/// Memory of the caller for one run: tensors of PyTorch, arrays of NumPy. A run takes it by value: the promise of
/// [`BorrowedMemory::new`] is for one.
///
/// ```compile_fail
/// # fn runs(executable: &mut dyn deuteron_device::Executable, borrowed: deuteron_device::BorrowedMemory<'_>) {
/// executable.run_borrowed(borrowed).unwrap();
/// executable.run_borrowed(borrowed).unwrap(); // what it borrowed may be gone
/// # }
/// ```
#[derive(Debug)]
pub struct BorrowedMemory<'a> {
    pub(crate) inputs: &'a [Span],
    pub(crate) states: &'a [Span],
    pub(crate) outputs: &'a [Span],
    pub(crate) stream: u64,
}

impl<'a> BorrowedMemory<'a> {
    /// Memory for one run, and the stream that it is enqueued on: a handle of the driver, 0 for its default stream. A device
    /// without streams has no use for it.
    ///
    /// # Safety
    /// Each span is valid for its bytes, where the device that runs can use it, until the run has ended. Nothing writes to inputs
    /// meanwhile, nothing else reads or writes states and outputs, and no state or output overlaps another span. The stream
    /// lives.
    pub unsafe fn new(inputs: &'a [Span], states: &'a [Span], outputs: &'a [Span], stream: u64) -> BorrowedMemory<'a> {
        BorrowedMemory { inputs, states, outputs, stream }
    }
}

/// Bytes on the host or on a device.
#[derive(Debug)]
pub enum Memory {
    /// host memory
    Host(Buffer),
    /// memory of a device
    Device(Box<dyn DeviceMemory>),
}

/// Bytes that the host accesses only by copies.
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
