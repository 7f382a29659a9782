//! Strided blocks moved by threads: a block is divided along its outermost axis.

use deuteron_codegen::cpu::family::{CpuTarget, assemble};
use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::task::{CpuLaunch, CpuSource, CpuTask, Run, ScratchSizes, TaskError};
use deuteron_codegen::cpu::{PARALLEL_FROM, STREAM_FROM};
use deuteron_codegen::kernel::{Family, Kernel, Offer, Request, offered};
use deuteron_plan::Work;

use super::{Copy, Piece};

/// Copies by threads of the CPU.
pub(crate) struct CopyFamily;

impl Family<CpuTarget> for CopyFamily {
    fn offer<'a>(&self, request: Request<'a>, _: &'a CpuTarget) -> Option<Box<dyn Offer + 'a>> {
        let copy = Copy::lower(&request.group)?;
        let work = work(copy.element, &copy.pieces);
        offered(move || work.clone(), move || kernel(copy))
    }
}

/// The kernel of a copy.
pub(crate) fn kernel(copy: Copy) -> Kernel {
    let (arguments, Copy { element, pieces, .. }) = (copy.arguments(), copy);
    let source = CpuSource::described(element, format!("strided copy of {element}-byte elements\n"));
    // SAFETY: tasks touch the elements of each piece, as far as its arguments reach.
    unsafe { assemble(source, arguments, CopyTasks { element, pieces }) }
}

/// Rows that follow each other are moved as bytes, anything else element by element.
fn work(element: usize, pieces: &[Piece]) -> Work {
    let mut work = Work { chunks: 1.0, last_chunk: 1.0, stream_from: STREAM_FROM as f64, ..Work::default() };
    // Long runs are moved by the system's routine, which writes past the caches or without reading first.
    let bytes: usize = pieces.iter().map(|piece| 2 * element * piece.dims.iter().product::<usize>()).sum();
    work.streams = bytes >= STREAM_FROM;
    for piece in pieces {
        let elements: usize = piece.dims.iter().product();
        if elements == 0 {
            continue;
        }
        let rank = piece.dims.len();
        // Axes that follow each other on both sides are one run.
        let mut run = 1;
        let in_order = (0..rank).rev().take_while(|&axis| {
            let follows = piece.dims[axis] == 1 || (piece.from[axis] == run && piece.to[axis] == run);
            run *= if follows { piece.dims[axis] } else { 1 };
            follows
        });
        in_order.count();
        match run {
            1 => {
                work.copied += elements as f64;
                work.streams = false;
            }
            _ => work.rows += (elements / run) as f64,
        }
        let tasks = if elements * element < PARALLEL_FROM { 1 } else { (elements / run).clamp(1, 64) };
        work.chunks = work.chunks.max(tasks as f64);
    }
    work
}

/// A launch of a copy.
#[derive(Debug)]
struct CopyTasks {
    element: usize,
    pieces: Vec<Piece>,
}

impl CpuLaunch for CopyTasks {
    fn prepare(&self, _: usize, _: Isa) -> Box<dyn CpuTask> {
        let pieces = self.pieces.iter().filter(|piece| !piece.dims.contains(&0));
        let blocks = pieces.map(|piece| StridedBlock::new(piece, self.element)).collect();
        Box::new(CopyTask { element: self.element, blocks })
    }
}

struct CopyTask {
    element: usize,
    blocks: Vec<StridedBlock>,
}

impl CpuTask for CopyTask {
    fn scratch(&self) -> ScratchSizes {
        ScratchSizes::default()
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        let Some(&destination) = run.addresses.last() else { return Ok(()) };
        for block in &self.blocks {
            // SAFETY: the offsets lie inside the reach of the arguments.
            let (from, to) = unsafe {
                let from = run.addresses[block.source].add(block.from_offset * self.element);
                (from, destination.add(block.to_offset * self.element))
            };
            let ends = Ends { from, to };
            let work = |_: usize, task: usize| {
                // SAFETY: tasks take disjoint ranges of the outermost axis, and a block writes each element once.
                unsafe { block.run(self.element, ends, task) };
            };
            run.workers.run(block.tasks, &work)?;
        }
        Ok(())
    }
}

/// A piece with neighbouring axes merged and its outermost axis cut into tasks.
struct StridedBlock {
    source: usize,
    from_offset: usize,
    to_offset: usize,
    /// (size, stride in the source, stride in the destination), outermost first.
    axes: Vec<[usize; 3]>,
    tasks: usize,
}

/// Where a block begins; the ranges of its tasks are disjoint.
#[derive(Clone, Copy)]
struct Ends {
    from: *const u8,
    to: *mut u8,
}

// SAFETY: only numbers; the tasks that use them write to disjoint ranges.
unsafe impl Send for Ends {}
// SAFETY: as above.
unsafe impl Sync for Ends {}

impl StridedBlock {
    fn new(piece: &Piece, element: usize) -> StridedBlock {
        let mut axes: Vec<[usize; 3]> = Vec::new();
        for axis in 0..piece.dims.len() {
            let next = [piece.dims[axis], piece.from[axis], piece.to[axis]];
            match axes.last_mut() {
                _ if next[0] == 1 => {}
                Some(last) if last[1] == next[1] * next[0] && last[2] == next[2] * next[0] => {
                    *last = [last[0] * next[0], next[1], next[2]];
                }
                _ => axes.push(next),
            }
        }
        if axes.is_empty() {
            axes.push([1, 0, 0]);
        }
        let bytes = piece.dims.iter().product::<usize>() * element;
        let tasks = if bytes < PARALLEL_FROM { 1 } else { axes[0][0].min(64) };
        StridedBlock { source: piece.source, from_offset: piece.from_offset, to_offset: piece.to_offset, axes, tasks }
    }

    unsafe fn run(&self, element: usize, ends: Ends, task: usize) {
        let outer = self.axes[0];
        let per_task = outer[0].div_ceil(self.tasks);
        let range = task * per_task..((task + 1) * per_task).min(outer[0]);
        if range.is_empty() {
            return;
        }
        // SAFETY: the range lies inside the outermost axis.
        unsafe {
            let from = ends.from.add(range.start * outer[1] * element);
            let to = ends.to.add(range.start * outer[2] * element);
            walk(&self.axes, range.len(), element, from, to);
        }
    }
}

/// Moves `count` indices of the first axis of `axes`.
unsafe fn walk(axes: &[[usize; 3]], count: usize, element: usize, from: *const u8, to: *mut u8) {
    let [_, from_stride, to_stride] = axes[0];
    match axes {
        // SAFETY: every address is inside the block, whose reach is inside the buffers; source and destination differ.
        [_] if from_stride == 1 && to_stride == 1 => unsafe {
            std::ptr::copy_nonoverlapping(from, to, count * element);
        },
        // SAFETY: as above.
        [_] => unsafe { strided(count, element, from, to, from_stride, to_stride) },
        [_, inner @ ..] => {
            for index in 0..count {
                // SAFETY: as above; `index` is within the axis.
                unsafe {
                    let from = from.add(index * from_stride * element);
                    let to = to.add(index * to_stride * element);
                    walk(inner, inner[0][0], element, from, to);
                }
            }
        }
        [] => {}
    }
}

unsafe fn strided(count: usize, element: usize, from: *const u8, to: *mut u8, from_stride: usize, to_stride: usize) {
    // SAFETY: the caller's; reads and writes are unaligned on purpose, inputs may start anywhere.
    unsafe {
        match element {
            4 => each::<u32>(count, from.cast(), to.cast(), from_stride, to_stride),
            2 => each::<u16>(count, from.cast(), to.cast(), from_stride, to_stride),
            _ => each::<u8>(count, from, to, from_stride, to_stride),
        }
    }
}

unsafe fn each<T: std::marker::Copy>(count: usize, from: *const T, to: *mut T, from_stride: usize, to_stride: usize) {
    for index in 0..count {
        // SAFETY: the caller's.
        unsafe { to.add(index * to_stride).write_unaligned(from.add(index * from_stride).read_unaligned()) };
    }
}
