//! A loaded job on the GPU: memory owned, sizes checked, parameters laid out. A run patches what changed and launches.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

mod bind;
mod faults;
mod outside;

use super::error::CudaError;
use super::frame::{Fixed, Frame};
use super::gpu::{Counted, Gpu};
use super::load::{LoadedJob, Work};
use super::memory::{Allocation, Pinned, Zones};
use super::record::Recording;
use super::stream::{Event, Stream};
use crate::device::{Executable, Inputs, Launching, Moment, NoStates, Recorded, States};
use crate::error::DeviceError;
use crate::job::{Job, Place};
use crate::memory::{BorrowedMemory, Span};
use outside::Outside;

/// The oldest driver whose CUDA graphs preserve programmatic dependent launch.
const EARLY_IN_RECORDINGS: (u32, u32) = (12, 3);
/// Rounds of [`CudaExecutable::launch_cost`].
const COST_ROUNDS: usize = 20;

/// Host time of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchCost {
    /// by bare calls of the driver
    pub bare: Duration,
    /// by [`Executable::run_borrowed`]
    pub enqueued: Duration,
}

/// A job on the GPU, ready to run.
pub struct CudaExecutable {
    gpu: Arc<Gpu>,
    program: LoadedJob,
    /// The first is used for runs; the others for timing over rotating memory.
    frames: Vec<Frame>,
    /// Scratch of our own, made for the first run that is not on the workspace of a stream.
    workspace: Option<Allocation>,
    /// Persistent memory of steps.
    persistent: Option<Allocation>,
    faults: Option<Faults>,
    fixed: Fixed,
    /// The CUDA graph of one run, and the version of the frame it was captured for.
    recording: Option<(u64, Recording)>,
    /// One run of each frame, and their versions.
    series: Option<(Vec<u64>, Recording)>,
    events: Vec<Event>,
    /// Whether every step has been launched before: libraries load a kernel at its first launch, which cannot be captured.
    warm: bool,
    /// The last run on a caller's stream.
    outside: Option<Outside>,
    /// Whether the next run on the workspace of a stream begins with intermediates of NaN.
    poisoned: bool,
    /// Whether work was enqueued on a caller's stream without an event at its end.
    unmarked: bool,
    /// Whether a caller captured a run in its own CUDA graph, which uses our memory at every replay.
    captured: bool,
    /// The last caller's stream that was checked.
    known: Option<u64>,
    /// Its memory, counted.
    counted: Counted,
    /// Declared last, so that it is dropped after everything its work uses.
    stream: Stream,
}

/// Fault words of all steps, and their copy on the host.
struct Faults {
    words: Allocation,
    seen: Pinned,
}

impl CudaExecutable {
    /// Checks, and allocates what outlives runs. The context must be entered.
    pub(crate) fn new(gpu: Arc<Gpu>, job: Job) -> Result<CudaExecutable, DeviceError> {
        let program = LoadedJob::new(&gpu, job)?;
        let stream = Stream::new(&gpu.context)?;
        let allocate = |bytes: usize| match bytes {
            0 => Ok(None),
            bytes => Allocation::painted(&gpu.context, bytes, gpu.zones, &stream).map(Some),
        };
        let persistent = allocate(program.persistent)?;
        persistent.as_ref().map_or(Ok(()), |persistent| persistent.fill(0, &stream))?;
        let faults = match program.steps.iter().any(|step| step.checks_indices) {
            false => None,
            true => {
                let bytes = 8 * program.steps.len();
                let words = Allocation::new(&gpu.context, bytes, Zones::Off)?;
                words.fill(0xFF, &stream)?;
                Some(Faults { words, seen: Pinned::new(&gpu.context, bytes)? })
            }
        };
        let fixed = Fixed {
            persistent: persistent.as_ref().map_or(0, Allocation::address),
            faults: faults.as_ref().map_or(0, |faults| faults.words.address()),
        };
        let frame = Frame::new(&gpu, &program, fixed, &stream)?;
        stream.wait()?;
        let counted = Counted::new(&gpu, program.block().0, program.persistent);
        Ok(CudaExecutable {
            gpu,
            program,
            frames: vec![frame],
            workspace: None,
            persistent,
            faults,
            fixed,
            recording: None,
            series: None,
            events: Vec::new(),
            warm: false,
            outside: None,
            poisoned: false,
            unmarked: false,
            captured: false,
            known: None,
            counted,
            stream,
        })
    }

    /// Host time of one run, the least of several rounds of `runs`: by bare calls of the driver, and by
    /// [`Executable::run_borrowed`].
    pub fn launch_cost(&mut self, input: Inputs<'_, '_>, runs: u32) -> Result<LaunchCost, DeviceError> {
        self.run(input, &mut NoStates, Launching::Eager)?;
        let gpu = self.gpu.clone();
        let _entered = gpu.context.enter()?;
        let handle = self.stream.handle();
        let span =
            |(index, &bytes): (usize, &usize)| Span { address: self.frames[0].address(Place::Input(index)), bytes };
        let inputs: Vec<Span> = self.program.input_bytes.iter().enumerate().map(span).collect();
        let outputs: Vec<Span> = (0..self.program.outputs.len()).filter_map(|index| self.output(index)).collect();
        let mut cost = LaunchCost { bare: Duration::MAX, enqueued: Duration::MAX };
        for _ in 0..COST_ROUNDS {
            let start = Instant::now();
            for _ in 0..runs {
                // SAFETY: our stream; the run above set the inputs, which are borrowed until these runs were waited for.
                unsafe { self.launch(0, handle, self.all())? };
            }
            cost.bare = cost.bare.min(start.elapsed() / runs);
            self.stream.wait()?;
            let start = Instant::now();
            for _ in 0..runs {
                // SAFETY: as above; the outputs are ours.
                self.run_borrowed(unsafe { BorrowedMemory::new(&inputs, &[], &outputs, handle as u64) })?;
            }
            cost.enqueued = cost.enqueued.min(start.elapsed() / runs);
            self.join()?;
        }
        Ok(cost)
    }

    /// Waits for work on callers' streams, and checks indices and red zones.
    pub fn finish(&mut self) -> Result<(), DeviceError> {
        let gpu = self.gpu.clone();
        let _entered = gpu.context.enter()?;
        self.join()
    }

    /// Where an output of our own is, after the first run that has such. It stays there.
    pub fn output(&self, index: usize) -> Option<Span> {
        let memory = self.frames[0].output(index)?;
        Some(Span { address: memory.address(), bytes: memory.len() })
    }

    /// Waits for work on callers' streams, and checks its results.
    fn join(&mut self) -> Result<(), DeviceError> {
        if std::mem::take(&mut self.unmarked) {
            // SAFETY: the context is entered.
            self.gpu.context.check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
        }
        let Some(outside) = self.outside.as_mut().filter(|outside| outside.pending) else { return Ok(()) };
        outside.end.wait()?;
        outside.pending = false;
        if let Some(error) = self.earlier_fault(self.stream.handle())? {
            self.stream.wait()?;
            return Err(error);
        }
        self.check_red_zones(1)
    }

    /// Enqueues steps, each grid after the end of the one before it.
    ///
    /// # Safety
    /// The stream lives and is of our context; the inputs of the frame were set to memory that lives until it is done.
    unsafe fn launch(&self, frame: usize, stream: sys::CUstream, steps: Range<usize>) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.launch_steps(frame, stream, steps, false) }
    }

    /// Enqueues all steps for capture: grids that wait by themselves may start before the previous one has ended.
    ///
    /// # Safety
    /// The inputs of the frame were set to memory that lives until replays are done, or will be changed before.
    unsafe fn record(&self, frame: usize) -> Result<(), CudaError> {
        let early = self.gpu.context.driver().version() >= EARLY_IN_RECORDINGS;
        // SAFETY: the caller's; the stream is our own.
        unsafe { self.launch_steps(frame, self.stream.handle(), self.all(), early) }
    }

    /// # Safety
    /// As of [`CudaExecutable::launch`].
    unsafe fn launch_steps(
        &self,
        frame: usize,
        stream: sys::CUstream,
        steps: Range<usize>,
        early: bool,
    ) -> Result<(), CudaError> {
        let words = self.frames[frame].words();
        // Whether the launch before is a grid of this run that waits by itself.
        let mut follows = false;
        for step in &self.program.steps[steps] {
            match &step.work {
                Work::Grids(grids) => {
                    for grid in grids {
                        // SAFETY: `LoadedJob::new` checked that arguments stay inside their buffers, which live as long as
                        // the frame; inputs and stream are the caller's.
                        let code = unsafe { grid.launch(words, stream, early && follows && grid.waits) };
                        self.gpu.context.check("cuLaunchKernel", code)?;
                        follows = grid.waits;
                    }
                }
                Work::Library { call, words: range } => {
                    // SAFETY: as above.
                    unsafe { call.launch(stream, &words[range.clone()], self.frames[frame].workspace())? };
                    follows = false;
                }
            }
        }
        Ok(())
    }

    fn all(&self) -> Range<usize> {
        0..self.program.steps.len()
    }

    /// Enqueues one run on our stream.
    fn start(&mut self, launching: Launching) -> Result<(), CudaError> {
        if launching == Launching::Eager || !self.warm || self.program.launches() == 0 {
            // SAFETY: our stream; `bind` set the inputs, which are borrowed until the run has been waited for.
            unsafe { self.launch(0, self.stream.handle(), self.all())? };
            self.warm = true;
            return Ok(());
        }
        let version = self.frames[0].version();
        let (recorded, recording) = self.recording.take().unzip();
        let mut recording = match recording {
            Some(recording) if recorded == Some(version) => recording,
            old => Recording::new(&self.gpu.context, &self.stream, old, || {
                // SAFETY: as above; a recording for other inputs is changed before it is replayed.
                unsafe { self.record(0) }
            })?,
        };
        let replayed = recording.replay(&self.stream);
        self.recording = Some((version, recording));
        replayed
    }

    /// Ensures at least this many events.
    fn need_events(&mut self, count: usize) -> Result<(), CudaError> {
        while self.events.len() < count {
            self.events.push(Event::new(&self.gpu.context)?);
        }
        Ok(())
    }

    /// One run of each of the first frames, from one recording.
    fn record_series(&mut self, sets: usize) -> Result<(), CudaError> {
        let versions: Vec<u64> = self.frames[..sets].iter().map(Frame::version).collect();
        let (recorded, old) = self.series.take().unzip();
        let recording = match old {
            Some(recording) if recorded.as_ref() == Some(&versions) => recording,
            old => Recording::new(&self.gpu.context, &self.stream, old, || {
                // SAFETY: our stream; every frame was bound to inputs that live until the replays were waited for.
                (0..sets).try_for_each(|frame| unsafe { self.record(frame) })
            })?,
        };
        self.series = Some((versions, recording));
        Ok(())
    }
}

impl Executable for CudaExecutable {
    fn run(&mut self, input: Inputs<'_, '_>, states: &mut dyn States, launching: Launching) -> Result<(), DeviceError> {
        let gpu = self.gpu.clone();
        let _entered = gpu.context.enter()?;
        self.join()?;
        let bound = self.bind_states(1, states).and_then(|()| self.bind(0, input));
        let started = bound.and_then(|()| Ok(self.start(launching)?));
        self.settle(started, 1)
    }

    fn run_borrowed(&mut self, borrowed: BorrowedMemory<'_>) -> Result<(), DeviceError> {
        let gpu = self.gpu.clone();
        let _entered = gpu.context.enter()?;
        self.run_outside(&borrowed)
    }

    fn run_timed(
        &mut self,
        input: Inputs<'_, '_>,
        states: &mut dyn States,
        times: &mut [Duration],
    ) -> Result<(), DeviceError> {
        let gpu = self.gpu.clone();
        let _entered = gpu.context.enter()?;
        self.join()?;
        let steps = self.program.steps.len();
        self.need_events(steps + 1)?;
        let bound = self.bind_states(1, states).and_then(|()| self.bind(0, input));
        let started = bound.and_then(|()| Ok(self.start_timed()?));
        self.settle(started, 1)?;
        for (time, ends) in times.iter_mut().zip(self.events.windows(2)).take(steps) {
            *time = ends[1].since(&ends[0])?;
        }
        Ok(())
    }

    fn run_watched(
        &mut self,
        _: Inputs<'_, '_>,
        _: &mut dyn States,
        _: &mut dyn FnMut(Moment),
    ) -> Result<(), DeviceError> {
        Err(DeviceError::Unwatched)
    }

    fn time(
        &mut self,
        sets: &[Inputs<'_, '_>],
        states: &mut dyn States,
        runs: usize,
        launching: Launching,
    ) -> Result<Duration, DeviceError> {
        if sets.is_empty() || runs == 0 {
            return Ok(Duration::ZERO);
        }
        let gpu = self.gpu.clone();
        let _entered = gpu.context.enter()?;
        self.join()?;
        self.need_events(2)?;
        let bound = self.bind_sets(sets).and_then(|()| self.bind_states(sets.len(), states));
        let started = bound.and_then(|()| Ok(self.start_series(sets.len(), runs, launching)?));
        let runs = started.as_ref().map_or(1, |runs| *runs);
        self.settle(started.map(|_| ()), sets.len())?;
        Ok(self.events[1].since(&self.events[0])?.div_f64(runs as f64))
    }

    fn read(&self, index: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        let _entered = self.gpu.context.enter()?;
        if let Some(outside) = &self.outside {
            outside.end.wait()?;
        }
        let Some(memory) = self.frames[0].output(index) else {
            return Err(DeviceError::Output { outputs: self.program.outputs.len(), index });
        };
        let length = into.len().min(memory.len());
        // SAFETY: not more than the output has; every run was waited for.
        unsafe { self.gpu.copies.download(memory.address(), &mut into[..length])? };
        Ok(())
    }

    fn poison(&mut self) -> Result<(), DeviceError> {
        let gpu = self.gpu.clone();
        let _entered = gpu.context.enter()?;
        self.join()?;
        for frame in 0..self.frames.len() {
            self.use_own_scratch(frame)?;
            self.frames[frame].use_own_outputs(&self.gpu, &self.program, &self.stream)?;
            self.frames[frame].poison(&self.stream)?;
        }
        self.poisoned = true;
        Ok(self.stream.wait()?)
    }

    fn is_captured(&self) -> bool {
        self.captured
    }

    fn recorded(&self) -> Result<Option<Recorded>, DeviceError> {
        let _entered = self.gpu.context.enter()?;
        if let Some((_, recording)) = &self.recording {
            return Ok(Some(recording.nodes()?));
        }
        let Some((versions, recording)) = &self.series else { return Ok(None) };
        // Every run of a series launches the same; what is no kernel is not rounded away.
        let (all, runs) = (recording.nodes()?, versions.len().max(1));
        Ok(Some(Recorded { kernels: all.kernels.div_ceil(runs), others: all.others.div_ceil(runs) }))
    }
}

impl CudaExecutable {
    /// Waits for what was started. If starting failed, waits all the same, so that nothing uses borrowed memory later.
    fn settle(&mut self, started: Result<(), DeviceError>, frames: usize) -> Result<(), DeviceError> {
        match started {
            Ok(()) => self.check_results(frames),
            Err(error) => {
                // A failure to wait says nothing that the first failure does not.
                let _ = self.stream.wait();
                Err(error)
            }
        }
    }

    /// Enqueues one run with an event before each step and one at the end.
    fn start_timed(&mut self) -> Result<(), CudaError> {
        self.gpu.hold(&self.stream, Duration::from_micros(20 + 8 * self.program.launches() as u64))?;
        let stream = self.stream.handle();
        for step in 0..self.program.steps.len() {
            // SAFETY: our stream.
            unsafe { self.events[step].record(stream)? };
            // SAFETY: our stream; `bind` set the inputs, which are borrowed until the run has been waited for.
            unsafe { self.launch(0, stream, step..step + 1)? };
        }
        // SAFETY: our stream.
        unsafe { self.events[self.program.steps.len()].record(stream) }
    }

    /// Enqueues `runs` runs, or somewhat more, between the first two events; gives how many.
    fn start_series(&mut self, sets: usize, runs: usize, launching: Launching) -> Result<usize, CudaError> {
        let recorded = launching == Launching::Graph && self.program.launches() > 0;
        if !self.warm {
            // SAFETY: our stream; the first frame was bound to inputs that live until the end was waited for.
            unsafe { self.launch(0, self.stream.handle(), self.all())? };
            self.warm = true;
        }
        if recorded {
            self.record_series(sets)?;
        }
        // The stream is busy until the first work has been enqueued behind the event.
        self.gpu.hold(&self.stream, Duration::from_micros(50))?;
        // SAFETY: our stream.
        unsafe { self.events[0].record(self.stream.handle())? };
        let replays = runs.div_ceil(sets);
        if let Some((_, recording)) = self.series.as_mut().filter(|_| recorded) {
            (0..replays).try_for_each(|_| recording.replay(&self.stream))?;
        } else {
            for run in 0..runs {
                // SAFETY: our stream; every frame was bound to inputs that live until the end was waited for.
                unsafe { self.launch(run % sets, self.stream.handle(), self.all())? };
            }
        }
        // SAFETY: our stream.
        unsafe { self.events[1].record(self.stream.handle())? };
        Ok(if recorded { replays * sets } else { runs })
    }
}

impl Drop for CudaExecutable {
    fn drop(&mut self) {
        // Memory may be freed once nothing uses it. A context that is lost has nothing running.
        if let Ok(_entered) = self.gpu.context.enter() {
            let _ = self.stream.wait();
            if let Some(outside) = &self.outside {
                let _ = outside.end.wait();
            }
            if self.unmarked {
                // SAFETY: the context is entered.
                let _ = unsafe { sys::cuCtxSynchronize() };
            }
        }
        // Before the functions and the memory that they point to.
        self.recording = None;
        self.series = None;
    }
}
