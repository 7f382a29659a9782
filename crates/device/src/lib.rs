//! Devices: kernels run here, buffers live here.
//!
//! A device takes sources and a job (kernels in order, with the place of each argument) and gives an [`Executable`]: all
//! memory allocated, all sizes checked, ready to run many times without allocating. It never sees an operation.

mod buffer;
pub mod cpu;
mod error;
mod job;

pub use buffer::Buffer;
pub use cpu::Cpu;
pub use error::DeviceError;
pub use job::{Job, Place, Step};

use std::sync::Arc;
use std::time::Duration;

use deuteron_codegen::Source;
use deuteron_plan::{Catalog, Machine, Target};

/// Something that compiles and runs kernels.
pub trait Device: Send + Sync {
    /// Name and properties for a person.
    fn describe(&self) -> String;
    /// What the planner may assume.
    fn machine(&self) -> &Machine;
    /// What can be generated for it.
    fn catalog(&self) -> &dyn Catalog;
    /// Both: what a plan is for.
    fn target(&self) -> Target<'_> {
        Target { machine: self.machine(), catalog: self.catalog() }
    }
    /// Compiles a source, or finds it compiled.
    fn compile(&self, source: Source) -> Result<Arc<Source>, DeviceError>;
    /// Checks a job against its kernels and allocates what it needs.
    fn load(&self, job: Job) -> Result<Box<dyn Executable>, DeviceError>;
    /// Copies of `bytes` bytes to time: what "copy" means in every report.
    fn copy_probe(&self, bytes: usize) -> Result<Box<dyn CopyProbe>, DeviceError>;
}

/// Copies on a device, timed.
pub trait CopyProbe {
    /// Bytes that one copy moves, read and written both counted.
    fn bytes(&self) -> usize;
    /// One copy with stores that go through the caches.
    fn ordinary(&mut self) -> Result<Duration, DeviceError>;
    /// One copy with stores that go past them.
    fn streaming(&mut self) -> Result<Duration, DeviceError>;
}

/// The bytes of each input of a job, by position. A function, so that a run allocates no list.
pub type Inputs<'f, 'a> = &'f dyn Fn(usize) -> &'a [u8];

/// A job ready to run.
pub trait Executable: Send {
    /// Runs every step in order. `input(i)` gives the bytes of the job's i-th input; `times`, if given, receives one
    /// duration a step.
    fn run(&mut self, input: Inputs<'_, '_>, times: Option<&mut [Duration]>) -> Result<(), DeviceError>;
    /// The bytes of an output of the last run.
    fn output(&self, index: usize) -> &[u8];
    /// Fills all outputs and intermediates with `0xFF` bytes (NaN in every float type), so that what a run does not
    /// write shows.
    fn poison(&mut self);
}
