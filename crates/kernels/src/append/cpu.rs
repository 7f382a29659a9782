//! Rows written into a cache by threads, one block per sequence.

use std::sync::Arc;

use deuteron_codegen::cpu::family::{CpuTarget, assemble};
use deuteron_codegen::cpu::simd::{Fault, Isa};
use deuteron_codegen::cpu::task::{CpuLaunch, CpuSource, CpuTask, Run, ScratchSizes, TaskError};
use deuteron_codegen::cpu::{PARALLEL_FROM, STREAM_FROM};
use deuteron_codegen::kernel::{Family, Kernel, Offer, Request, offered};
use deuteron_graph::Dtype;
use deuteron_plan::Work;

use super::{Append, AppendShape, CACHE, POSITIONS};

/// The argument that is the new rows.
const ROWS: usize = 1;
/// The argument that is the result.
const RESULT: usize = 3;

/// Appends by threads of the CPU.
pub(crate) struct AppendFamily;

impl Family<CpuTarget> for AppendFamily {
    fn offer<'a>(&self, request: Request<'a>, _: &'a CpuTarget) -> Option<Box<dyn Offer + 'a>> {
        let append = Append::lower(&request).filter(fits)?;
        // The new rows alone: a cache is kept in place.
        let rows = (append.shape.blocks() * append.shape.rows) as f64;
        let work =
            move || Work { chunks: 1.0, last_chunk: 1.0, stream_from: STREAM_FROM as f64, rows, ..Work::default() };
        offered(work, move || make(append))
    }
}

/// The kernel of an append, or none where its sizes contradict each other.
pub fn kernel(append: Append) -> Option<Kernel> {
    fits(&append).then(|| make(append))
}

fn make(append: Append) -> Kernel {
    let (element, arguments) = (append.element, append.arguments());
    let source = CpuSource::described(element, format!("rows of {element}-byte elements written into a cache\n"));
    // SAFETY: of an append that fits, tasks touch rows of the shape that the arguments' reach is taken of, at positions that the cache has.
    unsafe { assemble(source, arguments, AppendTasks(Arc::new(append))) }
}

/// Whether the sequence axis exists, the rows fit the cache, and the arguments match their use.
fn fits(append: &Append) -> bool {
    let Append { element, args, shape } = append;
    let counted = shape.batch < shape.leading.len() && shape.rows <= shape.capacity;
    let sized = [CACHE, ROWS, RESULT].iter().all(|&at| args[at].dtype.bytes() == *element);
    let directed = args.iter().enumerate().all(|(at, arg)| arg.written == (at == RESULT));
    let kept = !shape.in_place || args[CACHE].offset == args[RESULT].offset;
    counted && sized && directed && kept && args[POSITIONS].dtype == Dtype::I32
}

/// A launch of an append.
#[derive(Debug)]
struct AppendTasks(Arc<Append>);

impl CpuLaunch for AppendTasks {
    fn prepare(&self, _: usize, _: Isa) -> Box<dyn CpuTask> {
        Box::new(AppendTask { append: self.0.clone() })
    }
}

struct AppendTask {
    append: Arc<Append>,
}

impl CpuTask for AppendTask {
    fn scratch(&self) -> ScratchSizes {
        ScratchSizes::default()
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        let Append { element, args, shape } = &*self.append;
        let at = |argument: usize| run.addresses[argument].wrapping_add(args[argument].start());
        let positions = at(POSITIONS).cast_const().cast::<i32>();
        for row in 0..shape.sequences() {
            // SAFETY: there is a position for each sequence.
            let index = i64::from(unsafe { positions.add(row).read_unaligned() });
            if index < 0 || index >= shape.places() as i64 {
                return Err(Fault { arg: POSITIONS, row, index, table_rows: shape.places() }.into());
            }
        }
        let ends = Ends { cache: at(CACHE), rows: at(ROWS), positions, result: at(RESULT) };
        let this = &*self;
        let work = |_: usize, block: usize| {
            // SAFETY: the caller's promise; blocks are disjoint, and all positions are places where the rows fit.
            unsafe { this.block(ends, block) };
        };
        let blocks = shape.blocks();
        let written = if shape.in_place { shape.rows } else { shape.capacity };
        if blocks * written * shape.cols * element < PARALLEL_FROM {
            (0..blocks).for_each(|block| work(0, block));
            return Ok(());
        }
        run.workers.run(blocks, &work)?;
        Ok(())
    }
}

impl AppendTask {
    /// The rows of one block, after the block itself where the cache is not kept in place.
    unsafe fn block(&self, ends: Ends, block: usize) {
        let Append { element, shape, .. } = &*self.append;
        let AppendShape { rows, stride, capacity, cols, in_place, .. } = *shape;
        let (sequence, from) = shape.source(block);
        let (row, whole) = (cols * element, capacity * cols * element);
        // SAFETY: the caller's promise; cache and result are one or apart, and the rows overlap neither.
        unsafe {
            let result = ends.result.add(block * whole);
            if !in_place {
                std::ptr::copy_nonoverlapping(ends.cache.add(block * whole), result, whole);
            }
            let position = ends.positions.add(sequence).read_unaligned() as usize;
            let to = result.add(position * row);
            for index in 0..rows {
                let from = ends.rows.add((from + index * stride) * element);
                std::ptr::copy_nonoverlapping(from, to.add(index * row), row);
            }
        }
    }
}

/// Where the arguments begin.
#[derive(Clone, Copy)]
struct Ends {
    cache: *const u8,
    rows: *const u8,
    positions: *const i32,
    result: *mut u8,
}

// SAFETY: only numbers; the tasks that use them write to disjoint blocks.
unsafe impl Send for Ends {}
// SAFETY: as above.
unsafe impl Sync for Ends {}
