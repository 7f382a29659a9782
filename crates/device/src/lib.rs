//! Devices, which run kernels and hold buffers.
//!
//! A device takes sources and a job (kernels in order, with the place of each argument) and gives an [`Executable`]: all
//! memory is allocated, all sizes are checked, and it can run many times without allocating. On a CPU jobs share the memory of
//! their intermediates. A device knows no operations.

mod buffer;
mod check;
pub mod cpu;
pub mod cuda;
mod device;
mod error;
mod job;
mod kept;
mod memory;

pub use buffer::Buffer;
pub use cpu::Cpu;
pub use cuda::{Cuda, CudaError};
pub use device::{CopyProbe, Device, Executable, Inputs, Launching, MemoryStats, Moment, NoStates, Recorded, States};
pub use error::DeviceError;
pub use job::{CompiledKernel, Job, Place, Step};
pub use memory::{BorrowedMemory, DeviceMemory, Memory, Span};
