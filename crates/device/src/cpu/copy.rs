//! Strided blocks moved: views written out, and concatenations.

use deuteron_codegen::Piece;

use crate::cpu::pool::Pool;
use crate::error::DeviceError;

/// Bytes from which a copy is worth a second thread.
pub(crate) const PARALLEL_FROM: usize = 64 << 10;

pub(crate) struct CopyTask {
    element: usize,
    pieces: Vec<Block>,
}

/// A piece with neighbouring axes merged and its outermost axis cut into tasks.
struct Block {
    source: usize,
    from_offset: usize,
    to_offset: usize,
    /// (size, stride in the source, stride in the destination), outermost first.
    axes: Vec<[usize; 3]>,
    tasks: usize,
}

impl CopyTask {
    pub fn new(element: usize, pieces: Vec<Piece>) -> CopyTask {
        let pieces = pieces.iter().filter(|piece| !piece.dims.contains(&0)).map(|piece| Block::new(piece, element));
        CopyTask { element, pieces: pieces.collect() }
    }

    /// # Safety
    /// As for a row task: addresses valid for the checked extents, the destination overlaps nothing and is ours alone.
    pub unsafe fn run(&mut self, pool: &Pool, addresses: &[*mut u8], step: usize) -> Result<(), DeviceError> {
        let destination = addresses[addresses.len() - 1];
        for block in &self.pieces {
            // SAFETY: the offsets lie inside the checked extents.
            let (from, to) = unsafe {
                let from = addresses[block.source].add(block.from_offset * self.element);
                (from, destination.add(block.to_offset * self.element))
            };
            let ends = Ends { from, to };
            let work = |_: usize, task: usize| {
                // SAFETY: tasks take disjoint ranges of the outermost axis, and a block writes each element once.
                unsafe { block.run(self.element, ends, task) };
            };
            pool.run(block.tasks, &work).map_err(|_| DeviceError::WorkerPanicked { step })?;
        }
        Ok(())
    }
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

impl Block {
    fn new(piece: &Piece, element: usize) -> Block {
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
        Block { source: piece.source, from_offset: piece.from_offset, to_offset: piece.to_offset, axes, tasks }
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
        // SAFETY: every address is inside the block, whose reach was checked; source and destination differ.
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

unsafe fn each<T: Copy>(count: usize, from: *const T, to: *mut T, from_stride: usize, to_stride: usize) {
    for index in 0..count {
        // SAFETY: the caller's.
        unsafe { to.add(index * to_stride).write_unaligned(from.add(index * from_stride).read_unaligned()) };
    }
}
