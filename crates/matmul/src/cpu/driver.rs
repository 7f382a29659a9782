//! Matmuls on threads: parts of the result are tasks. The prologue runs when a part needs its rows of the left operand, and the
//! epilogue on each block of accumulators while it is in the cache. If the epilogue needs whole rows, parts are strips of rows: their accumulators are kept in
//! memory of the worker, or in that of the strip if there are too few rows and columns are shared, and the worker that finishes a strip runs the epilogue. The
//! right operand is packed once for all strips.
//!
//! The bits of an element do not depend on the division of the result, nor on the number of threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use deuteron_codegen::cpu::bind::bind_axes;
use deuteron_codegen::cpu::program::TileProgram;
use deuteron_codegen::cpu::simd::lines::LINE;
use deuteron_codegen::cpu::simd::{Axis, Isa};
use deuteron_codegen::cpu::task::{CpuLaunch, CpuTask, Floats, PerWorker, Run, ScratchSizes, TaskError};
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::Dtype;

use super::row_work::{RowWork, SideBindings};
use super::{Left, Matrix, Packed, Part, PartKernel, Right, Spec, Store, SumBlock, Values, Wanted};
use crate::kernel::{Matmul, MatmulLaunch, Role};

/// A launch of a matmul.
#[derive(Debug)]
pub struct MatmulTasks {
    /// with tile programs around it; not routed
    pub product: Arc<Matmul<TileProgram>>,
    /// the run-time half
    pub launch: MatmulLaunch,
    /// bytes within reach of all arguments
    pub touched: usize,
}

impl CpuLaunch for MatmulTasks {
    fn prepare(&self, threads: usize, isa: Isa) -> Box<dyn CpuTask> {
        Box::new(MatmulTask::new(self, threads, isa))
    }
}

/// A launch of a matmul made ready.
pub struct MatmulTask {
    product: Arc<Matmul<TileProgram>>,
    isa: Isa,
    kernel: PartKernel,
    shape: MatmulShape,
    batches: usize,
    /// Bytes from the start of each buffer.
    offsets: Vec<usize>,
    /// Rows and columns of a part, and how many parts lie below and beside each other.
    part: (usize, usize),
    parts: (usize, usize),
    roles: Vec<Role>,
    prologue_axes: Vec<Axis>,
    axes: Vec<Axis>,
    workers: Vec<PerWorker<Worker>>,
    strips: Option<Strips>,
    /// Floats that each worker's scratch must have.
    floats: usize,
}

/// Rows whose sums wait until all their columns are there.
struct Strips {
    /// Floats of all sums: one set for each worker, or for each strip where columns are shared.
    sums: usize,
    /// Floats from one row of sums to the next, and from one set to the next.
    stride: usize,
    set: usize,
    /// Parts done of each strip.
    done: Vec<AtomicUsize>,
    /// Floats of the right operand, where all parts share it.
    packed: Option<usize>,
}

/// The private data of one worker.
struct Worker {
    before: Option<RowWork>,
    after: Option<RowWork>,
}

/// Where the operands and the result of the first batch begin; those that there are.
#[derive(Clone, Copy)]
struct Operands {
    a: *const u8,
    b: [*const u8; 2],
    c: *mut u8,
    /// Sums of strips, and the right operand as it was packed.
    sums: *mut f32,
    packed: Option<Packed>,
}

// SAFETY: only numbers; the tasks that use them write to disjoint blocks of the results.
unsafe impl Send for Operands {}
// SAFETY: as above.
unsafe impl Sync for Operands {}

/// A part of one batch.
#[derive(Clone, Copy)]
struct Piece<'a> {
    batch: usize,
    part: Part,
    /// Where its sums wait, if they do.
    strip: Option<Strip<'a>>,
}

/// The strip that a part is of.
#[derive(Clone, Copy)]
struct Strip<'a> {
    of: &'a Strips,
    index: usize,
    /// The first sum of its set.
    sums: *mut f32,
}

impl MatmulTask {
    /// Prepares it for this many threads.
    pub fn new(tasks: &MatmulTasks, threads: usize, isa: Isa) -> MatmulTask {
        let MatmulTasks { product, launch, touched } = tasks;
        let MatmulLaunch { args, shape, prologue_axes, axes } = launch;
        let kernel = PartKernel::new(isa, spec(product, shape));
        let batches = shape.batches();
        // Where there are many matmuls, each is one part.
        let sharing = if batches >= threads { 1 } else { threads };
        let whole_rows = product.epilogue.as_ref().is_some_and(|epilogue| epilogue.body.needs_whole_rows());
        let part = if whole_rows { kernel.strip(shape.n, threads) } else { kernel.part(shape.n, sharing) };
        let parts = (shape.m.div_ceil(part.0.max(1)), shape.n.div_ceil(part.1.max(1)));
        let side = |program: Option<&TileProgram>, role: fn(usize) -> Role| {
            let bindings = SideBindings::new(product, launch, role);
            program.map(|program| RowWork::new(program, &bindings, shape.m * batches, *touched))
        };
        let worker = || Worker {
            before: side(product.prologue.as_ref().map(|prologue| &prologue.body), Role::Prologue),
            after: side(product.epilogue.as_ref().map(|epilogue| &epilogue.body), Role::Epilogue),
        };
        MatmulTask {
            isa,
            kernel,
            batches,
            offsets: args.iter().map(|arg| arg.start()).collect(),
            part,
            parts,
            strips: whole_rows.then(|| Strips::new(&kernel, shape, part.0, parts, threads)),
            prologue_axes: bind_axes(prologue_axes),
            axes: bind_axes(axes),
            workers: (0..threads).map(|_| PerWorker::new(worker())).collect(),
            floats: kernel.scratch(part.0.min(shape.m), part.1.min(shape.n)),
            shape: shape.clone(),
            roles: product.roles(),
            product: product.clone(),
        }
    }

    /// Takes note of where everything lies; sums that wait are in `shared`.
    fn bind(&mut self, addresses: &[*mut u8], shared: *mut f32) -> Operands {
        let null = std::ptr::null_mut();
        let mut operands = Operands { a: null, b: [null; 2], c: null, sums: shared, packed: None };
        if let Some(strips) = &mut self.strips {
            let base = shared.wrapping_add(strips.sums);
            operands.packed = strips.packed.map(|_| Packed { base, columns: self.shape.n });
            strips.done.iter_mut().for_each(|done| *done.get_mut() = 0);
        }
        for (position, &role) in self.roles.iter().enumerate() {
            // An argument without elements may lie anywhere: a number until it is used.
            let address = addresses[position].wrapping_add(self.offsets[position]);
            match role {
                Role::Left => operands.a = address,
                Role::Right(which) => operands.b[which] = address,
                Role::Result => operands.c = address,
                // A routed matmul is another task.
                Role::Indices => {}
                Role::Prologue(arg) => self.workers.iter_mut().for_each(|worker| {
                    worker.get_mut().before.iter_mut().for_each(|rows| rows.args[arg].base = address);
                }),
                Role::Epilogue(arg) => self.workers.iter_mut().for_each(|worker| {
                    worker.get_mut().after.iter_mut().for_each(|rows| rows.args[arg].base = address);
                }),
            }
        }
        operands
    }

    /// The work of a task, by its worker.
    fn piece(&self, worker: usize, task: usize, operands: &Operands) -> Piece<'_> {
        let (down, across) = self.parts;
        let (batch, rest) = (task / (down * across), task % (down * across));
        let (row, column) = (rest % down * self.part.0, rest / down * self.part.1);
        let part = Part {
            row,
            rows: self.part.0.min(self.shape.m - row),
            column,
            columns: self.part.1.min(self.shape.n - column),
        };
        let strip = self.strips.as_ref().map(|strips| {
            let set = if across == 1 { worker } else { rest % down };
            Strip { of: strips, index: rest % down, sums: operands.sums.wrapping_add(set * strips.set) }
        });
        Piece { batch, part, strip }
    }

    /// # Safety
    /// As for [`CpuTask::run`]; the task runs once, and worker and scratch are of this thread.
    unsafe fn part(&self, worker: usize, task: usize, operands: Operands, scratch: &mut Floats) {
        let piece = self.piece(worker, task, &operands);
        let product = &*self.product;
        let [in_a, in_b, _] = self.batch_offset(piece.batch);
        let left = Matrix { base: operands.a.wrapping_add(in_a * product.left.bytes()), strides: self.shape.a };
        let right = |base: *const u8| Right {
            matrix: Matrix { base: base.wrapping_add(in_b * product.right.bytes()), strides: self.shape.b },
            scales: None,
            packed: operands.packed,
        };
        // SAFETY: a worker runs one task at a time, so this is its own.
        let Worker { before, after } = unsafe { self.workers[worker].get() };
        // SAFETY: the caller's promise; blocks are disjoint.
        let mut finish = |block: SumBlock<'_>| unsafe { self.finish(&piece, &operands, after, block) };
        let mut fill = |wanted: Wanted<'_>| {
            if let (Some(prologue), Some(rows)) = (&product.prologue, &mut *before) {
                // SAFETY: the caller's promise; nothing is written but what is wanted.
                unsafe { rows.fill(self.isa, prologue, &self.prologue_axes, wanted) };
            }
        };
        let values = if product.prologue.is_some() { Values::Fill(&mut fill) } else { Values::Lie(left) };
        let rights = operands.b.map(right);
        // SAFETY: batch, row and column are inside the sizes, so all elements are inside the reach of the arguments.
        unsafe {
            let left = Left { values, scales: None };
            self.kernel.run(left, &rights[..product.rights], piece.part, scratch, &mut finish);
        }
        // SAFETY: the caller's promise; this part of the strip is done.
        unsafe { self.end_of_part(&piece, after) };
    }

    /// Handles a block of accumulators: it is stored, passed to the epilogue, or kept for the rest of its rows.
    ///
    /// # Safety
    /// As for [`MatmulTask::part`]; the block is one of the piece.
    unsafe fn finish(&self, piece: &Piece<'_>, operands: &Operands, after: &mut Option<RowWork>, block: SumBlock<'_>) {
        let product = &*self.product;
        match (piece.strip, &product.epilogue, after) {
            (Some(Strip { of, sums, .. }), ..) => {
                let base = sums.wrapping_sub(piece.part.row * of.stride).cast();
                let store = Store { base, dtype: Dtype::F32, strides: (of.stride, 1) };
                // SAFETY: a set has room for the rows of a part, and these columns of it are this part's alone.
                unsafe { store.block(self.isa, &block) };
            }
            // SAFETY: the caller's promise; blocks are disjoint.
            (None, Some(epilogue), Some(rows)) => unsafe {
                let row = piece.batch * self.shape.m + block.row;
                // No index is looked up, so there is no fault.
                let _ = rows.follow(self.isa, epilogue, &self.axes, SumBlock { row, ..block });
            },
            _ => {
                let [.., in_c] = self.batch_offset(piece.batch);
                let to = operands.c.wrapping_add(in_c * product.result.bytes());
                let store = Store { base: to, dtype: product.result, strides: self.shape.c };
                // SAFETY: as above.
                unsafe { store.block(self.isa, &block) };
            }
        }
    }

    /// Counts a part of a strip, and goes on with the strip's rows where it was the last one.
    ///
    /// # Safety
    /// As for [`MatmulTask::part`]; the sums of the piece are written.
    unsafe fn end_of_part(&self, piece: &Piece<'_>, after: &mut Option<RowWork>) {
        let (Some(strip), Some(epilogue), Some(rows)) = (piece.strip, &self.product.epilogue, after) else { return };
        // The worker that counts last sees what the others wrote before they counted.
        if strip.of.done[strip.index].fetch_add(1, Ordering::AcqRel) + 1 < self.parts.1 {
            return;
        }
        // SAFETY: all accumulators of the strip are complete, and no other worker has any left; the caller's promise for its rows.
        unsafe {
            let sums = std::slice::from_raw_parts_mut(strip.sums, strip.of.set);
            let (columns, stride, second) = (self.shape.n, strip.of.stride, &mut [][..]);
            let Part { row, rows: count, .. } = piece.part;
            let block = SumBlock { row, rows: count, column: 0, columns, stride, sums, second };
            let _ = rows.follow(self.isa, epilogue, &self.axes, block);
        }
    }

    /// Elements from the start of a, b and c to a batch.
    fn batch_offset(&self, batch: usize) -> [usize; 3] {
        let mut rest = batch;
        let mut offset = [0; 3];
        for axis in self.shape.batch.iter().rev() {
            let index = rest % axis[0];
            rest /= axis[0];
            (0..3).for_each(|operand| offset[operand] += index * axis[operand + 1]);
        }
        offset
    }
}

impl CpuTask for MatmulTask {
    fn scratch(&self) -> ScratchSizes {
        let shared = self.strips.as_ref().map_or(0, |strips| strips.sums + strips.packed.unwrap_or(0));
        ScratchSizes { worker: self.floats, shared }
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        let operands = self.bind(run.addresses, run.shared);
        let this = &*self;
        if let Some(packed) = operands.packed {
            let right = Matrix { base: operands.b[0], strides: self.shape.b };
            // SAFETY: the caller's promise for the right operand; pieces are disjoint.
            let pack = |_: usize, piece: usize| unsafe { this.kernel.pack(right, packed, piece) };
            run.workers.run(self.kernel.pieces(self.shape.n), &pack)?;
        }
        let scratch = run.scratch;
        let work = |worker: usize, task: usize| {
            // SAFETY: each task has a part of one batch to itself, and a worker runs one task at a time, so its scratch is its
            // own.
            unsafe { this.part(worker, task, operands, scratch[worker].get()) };
        };
        run.workers.run(self.batches * self.parts.0 * self.parts.1, &work)?;
        Ok(())
    }
}

/// What its kernel is to know.
pub(super) fn spec<T>(product: &Matmul<T>, shape: &MatmulShape) -> Spec {
    let &MatmulShape { m: rows, k, b: right_strides, .. } = shape;
    Spec { rows, k, left: product.left, right: product.right, right_strides, rights: product.rights }
}

impl Strips {
    fn new(kernel: &PartKernel, shape: &MatmulShape, rows: usize, parts: (usize, usize), threads: usize) -> Strips {
        // A cache line more, for the sets of the cache.
        let stride = shape.n.next_multiple_of(LINE) + LINE;
        let set = rows.min(shape.m) * stride;
        let (down, across) = parts;
        let packed = if across == 1 && down > 1 { kernel.packed(shape.n) } else { None };
        Strips {
            sums: (set * if across == 1 { threads } else { down }).next_multiple_of(LINE),
            stride,
            set,
            done: (0..down).map(|_| AtomicUsize::new(0)).collect(),
            packed,
        }
    }
}
