//! A loaded job: memory owned, sizes checked, tasks prepared.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deuteron_codegen::cpu::program::Access;
use deuteron_codegen::cpu::simd::{Isa, MAX_LEADING};
use deuteron_codegen::{Geometry, Source};

use crate::buffer::Buffer;
use crate::cpu::copy::CopyTask;
use crate::cpu::extent::extent;
use crate::cpu::matmul::MatmulTask;
use crate::cpu::pool::Pool;
use crate::cpu::row::RowTask;
use crate::cpu::scatter::ScatterTask;
use crate::error::DeviceError;
use crate::job::{Job, Place, Step};
use crate::{Executable, Inputs, Launching};

pub(crate) struct CpuExecutable {
    pool: Arc<Pool>,
    tasks: Vec<Prepared>,
    /// Bytes each input must have.
    input_bytes: Vec<usize>,
    outputs: Vec<Buffer>,
    arena: Buffer,
    /// Addresses of one step's arguments, reused by every step.
    addresses: Vec<*mut u8>,
}

// SAFETY: `addresses` is filled anew within each `run`; the other fields own what they point to.
unsafe impl Send for CpuExecutable {}

struct Prepared {
    task: Task,
    places: Vec<Place>,
}

enum Task {
    Row(RowTask),
    Matmul(MatmulTask),
    ScatterAdd(ScatterTask),
    Copy(CopyTask),
}

impl CpuExecutable {
    pub fn new(job: Job, pool: Arc<Pool>, isa: Isa) -> Result<Self, DeviceError> {
        let mut input_bytes = vec![0; job.inputs];
        for (index, step) in job.steps.iter().enumerate() {
            check_step(index, step, &job, &mut input_bytes)?;
        }
        let threads = pool.threads();
        let mut tasks = Vec::with_capacity(job.steps.len());
        for (index, step) in job.steps.into_iter().enumerate() {
            let task = match (&step.kernel.source, step.launch.geometry.clone()) {
                (Source::Row(_), Geometry::Row { .. }) => Task::Row(RowTask::new(&step, threads, isa)?),
                (Source::Matmul(dtype), Geometry::Matmul(shape)) => {
                    let offsets = [0, 1, 2].map(|i| step.launch.args[i].offset);
                    Task::Matmul(MatmulTask::new(*dtype, shape, offsets, threads, isa)?)
                }
                (Source::ScatterAdd(dtype), Geometry::ScatterAdd { count, cols, rows }) => {
                    let offsets = [0, 1, 2].map(|i| step.launch.args[i].offset);
                    Task::ScatterAdd(ScatterTask::new(*dtype, count, cols, rows, offsets)?)
                }
                (Source::Copy(bytes), Geometry::Copy(pieces)) => Task::Copy(CopyTask::new(*bytes, pieces)),
                (Source::Cuda(_), _) => return Err(DeviceError::ForeignKernel { step: index }),
                _ => return Err(mismatch(index, 0, "its sizes are those of another kind of kernel".into())),
            };
            tasks.push(Prepared { task, places: step.places });
        }
        let widest = tasks.iter().map(|prepared| prepared.places.len()).max().unwrap_or(0);
        Ok(CpuExecutable {
            pool,
            tasks,
            input_bytes,
            outputs: job.outputs.iter().map(|&bytes| Buffer::new(bytes)).collect::<Result<_, _>>()?,
            arena: Buffer::new(job.arena)?,
            addresses: Vec::with_capacity(widest),
        })
    }

    fn check_inputs(&self, input: Inputs<'_, '_>) -> Result<(), DeviceError> {
        for (index, &expected) in self.input_bytes.iter().enumerate() {
            let got = input(index).len();
            if got < expected {
                return Err(DeviceError::InputSize { input: index, expected, got });
            }
        }
        Ok(())
    }
}

/// Every argument stays inside its buffer, inputs are not written, and what is written overlaps nothing else.
fn check_step(index: usize, step: &Step, job: &Job, input_bytes: &mut [usize]) -> Result<(), DeviceError> {
    let arguments = match &step.kernel.source {
        Source::Row(program) => program.args.len(),
        Source::Matmul(_) | Source::ScatterAdd(_) => 3,
        Source::Copy(_) => step.launch.args.len(),
        Source::Cuda(_) => return Err(DeviceError::ForeignKernel { step: index }),
    };
    if step.places.len() != arguments || step.launch.args.len() != arguments {
        return Err(mismatch(index, 0, format!("expected {arguments} arguments, got {}", step.places.len())));
    }
    check_launch(step).map_err(|(argument, problem)| mismatch(index, argument, problem.into()))?;
    for (position, place) in step.places.iter().enumerate() {
        let needed = extent(&step.kernel.source, &step.launch, position);
        let available = match *place {
            Place::Input(input) if input < job.inputs && !step.launch.args[position].written => {
                input_bytes[input] = input_bytes[input].max(needed);
                needed
            }
            Place::Output(output) => job.outputs.get(output).copied().unwrap_or(0),
            Place::Arena { offset, bytes } if offset.checked_add(bytes).is_some_and(|end| end <= job.arena) => bytes,
            Place::Input(_) | Place::Arena { .. } => 0,
        };
        if needed > available {
            return Err(mismatch(index, position, format!("it touches {needed} bytes, its buffer has {available}")));
        }
        let overlapping = step.places.iter().enumerate().find(|&(other, place_of_other)| {
            let written = step.launch.args[position].written || step.launch.args[other].written;
            other != position && written && overlap(place, place_of_other)
        });
        if let Some((other, _)) = overlapping {
            return Err(mismatch(index, position, format!("it overlaps argument {other}, and one is written")));
        }
    }
    Ok(())
}

/// The launch says of every argument what the kernel says: all later checks read the one and the loops use the other.
fn check_launch(step: &Step) -> Result<(), (usize, &'static str)> {
    let last = step.launch.args.len().saturating_sub(1);
    for (position, arg) in step.launch.args.iter().enumerate() {
        let (dtype_bytes, written) = match &step.kernel.source {
            Source::Row(program) => (program.args[position].dtype.bytes(), program.args[position].written),
            Source::Matmul(dtype) => (dtype.bytes(), position == last),
            Source::ScatterAdd(_) if position == 0 => (4, false),
            Source::ScatterAdd(dtype) => (dtype.bytes(), position == last),
            Source::Copy(bytes) => (*bytes, position == last),
            Source::Cuda(_) => return Err((position, "it is of a kernel for another device")),
        };
        if arg.dtype.bytes() != dtype_bytes || arg.written != written {
            return Err((position, "its dtype and direction are not those of the kernel"));
        }
    }
    let (Source::Row(program), Geometry::Row { cols, axes, .. }) = (&step.kernel.source, &step.launch.geometry) else {
        return Ok(());
    };
    if !program.flat && program.cols != *cols {
        return Err((0, "its columns are not those of the kernel"));
    }
    if axes.len() != usize::from(program.axes) || axes.iter().any(|&(divide, modulo)| divide == 0 || modulo == 0) {
        return Err((0, "its axes are not those of the kernel"));
    }
    for partial in &program.partials {
        let spec = program.args.get(usize::from(partial.arg));
        if !spec.is_some_and(|spec| spec.access == Access::Columns && spec.written) {
            return Err((usize::from(partial.arg), "it is no argument for column sums"));
        }
    }
    for (position, (arg, spec)) in step.launch.args.iter().zip(&program.args).enumerate() {
        let gathered = matches!(spec.access, Access::GatheredRow { .. });
        let is_table = arg.leading.len() == 1 && arg.leading[0].0 == arg.table_rows;
        if arg.leading.len() > MAX_LEADING || (gathered && !is_table) {
            return Err((position, "its leading axes are not those of a table or of rows"));
        }
    }
    Ok(())
}

fn overlap(a: &Place, b: &Place) -> bool {
    match (*a, *b) {
        (Place::Arena { offset: x, bytes: n }, Place::Arena { offset: y, bytes: m }) => x < y + m && y < x + n,
        (a, b) => a == b,
    }
}

fn mismatch(step: usize, argument: usize, problem: String) -> DeviceError {
    DeviceError::Job { step, argument, problem }
}

impl CpuExecutable {
    /// Runs every step in order.
    fn steps(&mut self, input: Inputs<'_, '_>, mut times: Option<&mut [Duration]>) -> Result<(), DeviceError> {
        self.check_inputs(input)?;
        for (index, prepared) in self.tasks.iter_mut().enumerate() {
            self.addresses.clear();
            for place in &prepared.places {
                self.addresses.push(match *place {
                    // The slice that is used is the one that is checked, whatever the function answers next time.
                    Place::Input(position) => {
                        let (bytes, expected) = (on_host(input, position)?, self.input_bytes[position]);
                        if bytes.len() < expected {
                            let got = bytes.len();
                            return Err(DeviceError::InputSize { input: position, expected, got });
                        }
                        bytes.as_ptr().cast_mut()
                    }
                    Place::Output(output) => self.outputs[output].address(),
                    // SAFETY: `check_step` found the range inside the arena.
                    Place::Arena { offset, .. } => unsafe { self.arena.address().add(offset) },
                });
            }
            let start = times.is_some().then(Instant::now);
            // SAFETY: `check_step` and `check_inputs` found that every argument's reach lies inside its buffer, that inputs
            // are only read, and that what is written overlaps nothing else; `&mut self` and the borrowed inputs keep
            // the memory alive and unshared while the task runs.
            let done = unsafe {
                match &mut prepared.task {
                    Task::Row(task) => task.run(&self.pool, &self.addresses, index),
                    Task::Matmul(task) => task.run(&self.pool, &self.addresses, index),
                    Task::ScatterAdd(task) => task.run(&self.pool, &self.addresses, index),
                    Task::Copy(task) => task.run(&self.pool, &self.addresses, index),
                }
            };
            done?;
            let slot = times.as_deref_mut().and_then(|times| times.get_mut(index));
            if let (Some(slot), Some(start)) = (slot, start) {
                *slot = start.elapsed();
            }
        }
        Ok(())
    }
}

/// The bytes of an input, which must be where the CPU reads.
fn on_host<'a>(input: Inputs<'_, 'a>, position: usize) -> Result<&'a [u8], DeviceError> {
    input(position).host().ok_or(DeviceError::InputPlace { input: position })
}

impl Executable for CpuExecutable {
    fn run(&mut self, input: Inputs<'_, '_>, _: Launching) -> Result<(), DeviceError> {
        self.steps(input, None)
    }

    fn run_timed(&mut self, input: Inputs<'_, '_>, times: &mut [Duration]) -> Result<(), DeviceError> {
        self.steps(input, Some(times))
    }

    fn time(&mut self, sets: &[Inputs<'_, '_>], runs: usize, launching: Launching) -> Result<Duration, DeviceError> {
        let start = Instant::now();
        for index in 0..runs {
            if let Some(input) = sets.get(index % sets.len().max(1)) {
                self.run(*input, launching)?;
            }
        }
        Ok(start.elapsed() / runs.max(1) as u32)
    }

    fn read(&self, index: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        into.copy_from_slice(self.outputs[index].bytes());
        Ok(())
    }

    fn poison(&mut self) -> Result<(), DeviceError> {
        self.arena.bytes_mut().fill(0xFF);
        self.outputs.iter_mut().for_each(|output| output.bytes_mut().fill(0xFF));
        Ok(())
    }
}
