//! Copy bandwidth of this GPU: the upper limit of every row kernel.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use deuteron_codegen::{ArgBinding, Kernel};
use deuteron_graph::{Dtype, Graph};
use deuteron_kernels::copy::{self, Copy, Piece};

use super::Cuda;
use super::error::CudaError;
use super::gpu::Gpu;
use super::memory::{Allocation, CudaBuffer, Zones};
use super::record::Recording;
use super::run::CudaExecutable;
use super::stream::{Event, Stream};
use crate::device::{CopyProbe, Device, Executable, Inputs, Launching, NoStates};
use crate::error::DeviceError;
use crate::job::{Job, Place, Step};
use crate::memory::Memory;

/// Buffers together are at least this many times the last-level cache, so that no copy finds its data there.
const CACHES: usize = 4;
/// Pairs of buffers, at least and at most.
const PAIRS: (usize, usize) = (2, 256);
/// Maximum rounds over all pairs per measurement.
const MOST_ROUNDS: usize = 32;
/// Approximate bytes moved per measurement: half a millisecond of the fastest memory.
const BYTES: usize = 4 << 30;

/// Pairs of buffers, and copies from one to the other of each.
pub(crate) struct CudaCopyProbe {
    gpu: Arc<Gpu>,
    length: usize,
    sources: Vec<Memory>,
    /// Copies by our kernel, into outputs of its own.
    kernel: CudaExecutable,
    /// Where the driver's copies go.
    destinations: Vec<Allocation>,
    recording: Option<Recording>,
    events: [Event; 2],
    stream: Stream,
}

impl CudaCopyProbe {
    /// A probe that moves `bytes` bytes (at least a page) from one buffer to another.
    pub fn new(device: &Cuda, bytes: usize) -> Result<CudaCopyProbe, DeviceError> {
        let gpu = device.gpu.clone();
        let length = bytes.max(4096).next_multiple_of(16);
        let pairs = (CACHES * gpu.l2).div_ceil(2 * length).clamp(PAIRS.0, PAIRS.1);
        let kernel = device.executable(job(device, length)?)?;
        let context = gpu.context.clone();
        let _entered = context.enter()?;
        let stream = Stream::new(&context)?;
        let (mut sources, mut destinations) = (Vec::new(), Vec::new());
        for _ in 0..pairs {
            sources.push(Memory::Device(Box::new(CudaBuffer::filled(&context, &gpu.copies, length, 1)?)));
            let destination = Allocation::new(&context, length, Zones::Off)?;
            destination.fill(2, &stream)?;
            destinations.push(destination);
        }
        stream.wait()?;
        let events = [Event::new(&context)?, Event::new(&context)?];
        Ok(CudaCopyProbe { gpu, length, sources, kernel, destinations, recording: None, events, stream })
    }

    /// Rounds over all pairs that are timed together.
    fn rounds(&self) -> usize {
        (BYTES / (2 * self.length * self.sources.len())).clamp(1, MOST_ROUNDS)
    }

    /// Enqueues one copy of each pair by the driver.
    fn driver_copies(&self) -> Result<(), CudaError> {
        self.sources.iter().zip(&self.destinations).try_for_each(|(source, destination)| {
            let Memory::Device(source) = source else { return Ok(()) };
            let (to, from) = (destination.address(), source.address());
            // SAFETY: both have `length` bytes and live as long as the probe.
            let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, self.length, self.stream.handle()) };
            self.gpu.context.check("cuMemcpyDtoDAsync", code)
        })
    }
}

impl CopyProbe for CudaCopyProbe {
    fn bytes(&self) -> usize {
        2 * self.length
    }

    fn ordinary(&mut self) -> Result<Duration, DeviceError> {
        let rounds = self.rounds();
        let sources: Vec<_> = self.sources.iter().map(|source| move |_: usize| source).collect();
        let sets: Vec<Inputs> = sources.iter().map(|source| source as Inputs).collect();
        self.kernel.time(&sets, &mut NoStates, rounds * sets.len(), Launching::Graph)
    }

    fn streaming(&mut self) -> Result<Duration, DeviceError> {
        let context = self.gpu.context.clone();
        let _entered = context.enter()?;
        let rounds = self.rounds();
        let recording = match self.recording.take() {
            Some(recording) => recording,
            None => Recording::new(&context, &self.stream, None, || self.driver_copies())?,
        };
        let recording = self.recording.insert(recording);
        self.gpu.hold(&self.stream, Duration::from_micros(50))?;
        // SAFETY: our stream.
        unsafe { self.events[0].record(self.stream.handle())? };
        (0..rounds).try_for_each(|_| recording.replay(&self.stream))?;
        // SAFETY: our stream.
        unsafe { self.events[1].record(self.stream.handle())? };
        self.stream.wait()?;
        let copies = rounds * self.sources.len();
        Ok(self.events[1].since(&self.events[0])?.div_f64(copies as f64))
    }
}

impl Drop for CudaCopyProbe {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.context.enter() {
            // Buffers may be freed once nothing uses them.
            let _ = self.stream.wait();
        }
    }
}

/// One copy of `length` bytes, from the only input to the only output.
fn job(device: &Cuda, length: usize) -> Result<Job, DeviceError> {
    let mut graph = Graph::new("copy");
    let elements = length / 4;
    // Only a name for the buffer: the device never looks at it.
    let Ok(base) = graph.input("x", Dtype::F32, [elements]) else {
        return Err(DeviceError::OutOfMemory { bytes: length });
    };
    let arg = |written| ArgBinding::whole(&graph, base, 0, written);
    let piece = Piece { source: 0, dims: vec![elements], from: vec![1], from_offset: 0, to: vec![1], to_offset: 0 };
    let copy = Copy { element: 4, args: vec![arg(false), arg(true)], pieces: vec![piece] };
    let Kernel { source, launch } = copy::cuda::kernel(&copy);
    let kernel = device.compile(vec![source])?.swap_remove(0);
    let step = Step { kernel, launch, places: vec![Place::Input(0), Place::Output(0)] };
    Ok(Job { steps: vec![step], inputs: 1, states: Vec::new(), outputs: vec![length], arena: 0 })
}
