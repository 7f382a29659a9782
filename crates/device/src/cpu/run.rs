//! A loaded job: sizes checked, tasks prepared, its share of the workspace known.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deuteron_codegen::Execution;
use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::task::{CpuTask, Run, ScratchSizes, TaskError, Tasks, Workers};
use deuteron_graph::memory::OutOfMemory;

use crate::buffer::Buffer;
use crate::check::{check, check_borrowed, check_inputs, check_states};
use crate::cpu::pool::Pool;
use crate::cpu::workspace::{Need, Share, SharedWorkspace, Workspace};
use crate::device::{Executable, Inputs, Launching, Moment, States};
use crate::error::DeviceError;
use crate::job::{Job, Place, Step};
use crate::memory::{BorrowedMemory, Memory, Span};

pub(crate) struct CpuExecutable {
    pool: Arc<Pool>,
    tasks: Vec<Prepared>,
    /// Bytes each input must have.
    input_bytes: Vec<usize>,
    /// Bytes each state must have.
    state_bytes: Vec<usize>,
    /// Bytes each output has.
    output_bytes: Vec<usize>,
    /// Our own outputs, allocated by the first run that is not on the caller's memory.
    outputs: Vec<Buffer>,
    /// Addresses of inputs, states and outputs during a run.
    bound: Bound,
    /// Addresses of intermediates and workspace during a run.
    share: Share,
    /// Whether the next run starts with intermediates filled with NaN.
    poisoned: bool,
    /// Addresses of one step's arguments, reused by every step.
    addresses: Vec<*mut u8>,
}

/// Addresses of inputs, states and outputs.
#[derive(Default)]
struct Bound {
    inputs: Vec<*mut u8>,
    states: Vec<*mut u8>,
    outputs: Vec<*mut u8>,
}

// SAFETY: `addresses` and `bound` are filled anew within each `run`; the other fields own what they point to.
unsafe impl Send for CpuExecutable {}

/// A step made ready.
struct Prepared {
    task: Box<dyn CpuTask>,
    places: Vec<Place>,
}

impl CpuExecutable {
    pub fn new(job: Job, pool: Arc<Pool>, isa: Isa, workspace: &Arc<SharedWorkspace>) -> Result<Self, DeviceError> {
        let threads = pool.threads();
        let launched: Vec<Tasks> = job.steps.iter().enumerate().map(tasks).collect::<Result<_, _>>()?;
        let input_bytes = check(&job)?;
        let steps = job.steps.into_iter().zip(launched);
        let prepared =
            steps.map(|(step, tasks)| Ok(Prepared { task: tasks.prepare(threads, isa)?, places: step.places }));
        let tasks: Vec<Prepared> = prepared.collect::<Result<_, OutOfMemory>>()?;
        // They run one after the other, so all have the same memory.
        let scratch = tasks.iter().map(|prepared| prepared.task.scratch());
        let most = scratch.fold(ScratchSizes::default(), |most, sizes| ScratchSizes {
            worker: most.worker.max(sizes.worker),
            shared: most.shared.max(sizes.shared),
        });
        let widest = tasks.iter().map(|prepared| prepared.places.len()).max().unwrap_or(0);
        Ok(CpuExecutable {
            pool,
            tasks,
            bound: Bound {
                inputs: Vec::with_capacity(input_bytes.len()),
                states: Vec::with_capacity(job.states.len()),
                outputs: Vec::with_capacity(job.outputs.len()),
            },
            input_bytes,
            state_bytes: job.states,
            outputs: Vec::new(),
            output_bytes: job.outputs,
            share: workspace.join(Need::new(job.arena, most))?,
            poisoned: false,
            addresses: Vec::with_capacity(widest),
        })
    }
}

/// The tasks of a step, unless it is one of another device.
fn tasks((index, step): (usize, &Step)) -> Result<Tasks, DeviceError> {
    match step.launch.execution() {
        Execution::Tasks(tasks) => Ok(tasks.clone()),
        Execution::Grids(_) | Execution::Library(_) => Err(DeviceError::ForeignKernel { step: index }),
    }
}

impl CpuExecutable {
    /// Runs every step in order on the bound addresses.
    ///
    /// # Safety
    /// Every address of `bound` is valid for the bytes that the job has there until this returns; nothing else writes to inputs,
    /// or uses states and outputs, of which none overlaps another address.
    unsafe fn steps(&mut self, watch: Option<&mut dyn FnMut(Moment)>) -> Result<(), DeviceError> {
        let CpuExecutable { pool, tasks, bound, share, poisoned, addresses, .. } = self;
        let intermediates = share.need.arena;
        share.with(|workspace| {
            if std::mem::take(poisoned) {
                workspace.arena.bytes_mut()[..intermediates].fill(0xFF);
            }
            // SAFETY: the caller's; the workspace has all that this job needs.
            unsafe { run_steps(tasks, bound, addresses, pool, workspace, watch) }
        })
    }
}

/// # Safety
/// As of [`CpuExecutable::steps`]; the workspace is as large as the job of these tasks needs it.
unsafe fn run_steps(
    tasks: &mut [Prepared],
    bound: &Bound,
    addresses: &mut Vec<*mut u8>,
    pool: &Pool,
    workspace: &mut Workspace,
    mut watch: Option<&mut dyn FnMut(Moment)>,
) -> Result<(), DeviceError> {
    let shared = workspace.shared.pointer();
    for (index, prepared) in tasks.iter_mut().enumerate() {
        addresses.clear();
        for place in &prepared.places {
            addresses.push(match *place {
                Place::Input(input) => bound.inputs[input],
                Place::State(state) => bound.states[state],
                Place::Output(output) => bound.outputs[output],
                // SAFETY: `check` found the range inside the arena.
                Place::Arena { offset, .. } => unsafe { workspace.arena.address().add(offset) },
            });
        }
        if let Some(watch) = &mut watch {
            watch(Moment::Before(index));
        }
        let run = Run { workers: pool, addresses, scratch: &workspace.scratch, shared };
        // SAFETY: `check` found that every argument's reach lies inside its buffer, that inputs are only read, and that what
        // is written overlaps nothing else of the arena; what is bound is the caller's promise. Scratch is as large as any
        // task's, and tasks were made ready for as many threads as the pool has.
        let done = unsafe { prepared.task.run(run) };
        done.map_err(|error| match error {
            TaskError::Panicked => DeviceError::WorkerPanicked { step: index },
            TaskError::Index(fault) => DeviceError::Index { step: index, fault },
        })?;
        if let Some(watch) = &mut watch {
            watch(Moment::After(index));
        }
    }
    Ok(())
}

impl CpuExecutable {
    /// Runs on memory that is borrowed for it, and on our own outputs.
    fn run_borrowed(
        &mut self,
        input: Inputs<'_, '_>,
        states: &mut dyn States,
        watch: Option<&mut dyn FnMut(Moment)>,
    ) -> Result<(), DeviceError> {
        check_inputs(&self.input_bytes, input)?;
        self.bind_inputs(input)?;
        self.bind_states(states)?;
        self.own_outputs()?;
        self.bound.outputs.clear();
        self.bound.outputs.extend(self.outputs.iter_mut().map(Buffer::address));
        // SAFETY: the inputs are borrowed, the states borrowed for writing and the outputs ours, each of the size that was checked.
        unsafe { self.steps(watch) }
    }

    /// Notes where each input is.
    fn bind_inputs(&mut self, input: Inputs<'_, '_>) -> Result<(), DeviceError> {
        self.bound.inputs.clear();
        for (position, &expected) in self.input_bytes.iter().enumerate() {
            // The slice that is used is the one that is checked, whatever the function answers next time.
            let bytes = input(position).host().ok_or(DeviceError::InputPlace { input: position })?;
            if bytes.len() < expected {
                return Err(DeviceError::InputSize { input: position, expected, got: bytes.len() });
            }
            self.bound.inputs.push(bytes.as_ptr().cast_mut());
        }
        Ok(())
    }

    fn own_outputs(&mut self) -> Result<(), DeviceError> {
        if self.outputs.len() < self.output_bytes.len() {
            self.outputs = self.output_bytes.iter().map(|&bytes| Buffer::new(bytes)).collect::<Result<_, _>>()?;
        }
        Ok(())
    }

    /// Notes where each state is.
    fn bind_states(&mut self, states: &mut dyn States) -> Result<(), DeviceError> {
        check_states(&self.state_bytes, states)?;
        let (sizes, bound) = (&self.state_bytes, &mut self.bound.states);
        bound.clear();
        let mut problem = None;
        // Everything passed is mutably borrowed as long as the states are, so no two of them overlap.
        states.each(&mut |memory| {
            let state = bound.len();
            let (None, Some(&expected)) = (&problem, sizes.get(state)) else { return };
            match memory {
                Some(Memory::Host(buffer)) if buffer.len() >= expected => bound.push(buffer.address()),
                Some(Memory::Host(buffer)) => {
                    problem = Some(DeviceError::StateSize { state, expected, got: buffer.len() });
                }
                Some(Memory::Device(_)) => problem = Some(DeviceError::StatePlace { state, expected: "the host" }),
                None => problem = Some(DeviceError::SharedState { state }),
            }
        });
        match problem {
            Some(problem) => Err(problem),
            // Fewer were passed than `count` states.
            None if bound.len() < sizes.len() => Err(DeviceError::SharedState { state: bound.len() }),
            None => Ok(()),
        }
    }
}

impl Executable for CpuExecutable {
    fn run(&mut self, input: Inputs<'_, '_>, states: &mut dyn States, _: Launching) -> Result<(), DeviceError> {
        self.run_borrowed(input, states, None)
    }

    fn run_borrowed(&mut self, borrowed: BorrowedMemory<'_>) -> Result<(), DeviceError> {
        check_borrowed(&borrowed, &self.input_bytes, &self.state_bytes, &self.output_bytes)?;
        let at = |spans: &[Span], list: &mut Vec<*mut u8>| {
            list.clear();
            list.extend(spans.iter().map(|span| span.address as usize as *mut u8));
        };
        at(borrowed.inputs, &mut self.bound.inputs);
        at(borrowed.states, &mut self.bound.states);
        at(borrowed.outputs, &mut self.bound.outputs);
        // SAFETY: promised by the caller of `BorrowedMemory::new`; sizes were checked.
        unsafe { self.steps(None) }
    }

    fn run_timed(
        &mut self,
        input: Inputs<'_, '_>,
        states: &mut dyn States,
        times: &mut [Duration],
    ) -> Result<(), DeviceError> {
        let mut start = Instant::now();
        self.run_watched(input, states, &mut |moment| match moment {
            Moment::Before(_) => start = Instant::now(),
            Moment::After(step) => {
                if let Some(time) = times.get_mut(step) {
                    *time = start.elapsed();
                }
            }
        })
    }

    fn run_watched(
        &mut self,
        input: Inputs<'_, '_>,
        states: &mut dyn States,
        watch: &mut dyn FnMut(Moment),
    ) -> Result<(), DeviceError> {
        self.run_borrowed(input, states, Some(watch))
    }

    fn time(
        &mut self,
        sets: &[Inputs<'_, '_>],
        states: &mut dyn States,
        runs: usize,
        launching: Launching,
    ) -> Result<Duration, DeviceError> {
        let start = Instant::now();
        for index in 0..runs {
            if let Some(input) = sets.get(index % sets.len().max(1)) {
                self.run(*input, states, launching)?;
            }
        }
        Ok(start.elapsed() / runs.max(1) as u32)
    }

    fn read(&self, index: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        let outputs = self.output_bytes.len();
        let output = self.outputs.get(index).ok_or(DeviceError::Output { outputs, index })?;
        into.copy_from_slice(output.bytes());
        Ok(())
    }

    fn poison(&mut self) -> Result<(), DeviceError> {
        self.own_outputs()?;
        self.poisoned = true;
        self.outputs.iter_mut().for_each(|output| output.bytes_mut().fill(0xFF));
        Ok(())
    }
}
