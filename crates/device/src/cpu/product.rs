//! Matrix products on the pool: parts of the result are tasks. What makes the first operand is done when a part asks for its rows, and
//! what follows the product on each block of sums while it is hot. Where that needs whole rows, parts are strips of rows: their sums wait
//! in memory of the worker, or in that of the strip where rows are too few and columns are shared, and whoever ends a strip goes on.
//! The second operand is packed once for all strips.
//!
//! The bits of an element do not depend on how the result is cut, so neither do they on the number of threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use deuteron_codegen::cpu::program::Program;
use deuteron_codegen::cpu::simd::{self, Axis, BoundArg, Fault, Isa};
use deuteron_codegen::kernels::matmul::cpu::{
    Block, Kernel, Left, Matrix, Packed, Part, Right, Scratch, Spec, Store, Values, Wanted,
};
use deuteron_codegen::{Geometry, Head, MatmulShape, Product, Role, Source, Tail};
use deuteron_graph::Dtype;

use crate::check::{Form, mismatch};
use crate::cpu::pool::Pool;
use crate::cpu::row::{PerWorker, bind};
use crate::error::DeviceError;
use crate::extent::extent;
use crate::job::{self, Step};

pub(crate) struct ProductTask {
    source: Arc<job::Kernel>,
    isa: Isa,
    kernel: Kernel,
    shape: MatmulShape,
    batches: usize,
    /// Bytes from the start of each buffer.
    offsets: Vec<usize>,
    /// Rows and columns of a part, and how many parts lie below and beside each other.
    part: (usize, usize),
    parts: (usize, usize),
    roles: Vec<Role>,
    head_axes: Vec<Axis>,
    axes: Vec<Axis>,
    workers: Vec<PerWorker<Worker>>,
    strips: Option<Strips>,
    /// Floats that each worker's scratch must have.
    pub floats: usize,
}

/// Floats of a cache line.
pub(super) const LINE_FLOATS: usize = 16;

/// Rows whose sums wait until all their columns are there.
struct Strips {
    /// Floats of all sums: one set for each worker, or for each strip where columns are shared.
    sums: usize,
    /// Floats from one row of sums to the next, and from one set to the next.
    stride: usize,
    set: usize,
    /// Parts done of each strip.
    done: Vec<AtomicUsize>,
    /// Floats of the second operand, where all parts share it.
    packed: Option<usize>,
}

/// What one worker has to itself.
struct Worker {
    before: Option<Rows>,
    after: Option<Rows>,
}

/// What a worker needs to run a row program before or after the product.
pub(super) struct Rows {
    /// Its arguments, those among them that are handed over.
    pub args: Vec<BoundArg>,
    memory: simd::Scratch,
}

/// Where the operands and the result of the first batch begin; those that there are.
#[derive(Clone, Copy)]
struct Operands {
    a: *const u8,
    b: [*const u8; 2],
    c: *mut u8,
    /// Sums of strips, and the second operand as it was packed.
    sums: *mut f32,
    packed: Option<Packed>,
}

// SAFETY: only numbers; the tasks that use them write to disjoint blocks of the results.
unsafe impl Send for Operands {}
// SAFETY: as above.
unsafe impl Sync for Operands {}

impl ProductTask {
    pub fn new(step: &Step, threads: usize, isa: Isa) -> Result<ProductTask, DeviceError> {
        let Geometry::Product { shape, head_axes, axes } = &step.launch.geometry else {
            return Err(mismatch(0, 0, "not a product".into()));
        };
        let product = product_of(&step.kernel);
        let spec = Spec {
            rows: shape.m,
            k: shape.k,
            left: product.left,
            right: product.right,
            right_strides: shape.b,
            rights: product.rights,
        };
        let kernel = Kernel::new(isa, spec);
        if product.head.is_some() && !kernel.fills_whole_rows() {
            return Err(mismatch(0, 0, "rows of its first operand are asked for in pieces".into()));
        }
        let batches: usize = shape.batch.iter().map(|axis| axis[0]).product();
        // Where there are many products, each is one part.
        let sharing = if batches >= threads { 1 } else { threads };
        let whole_rows = product.tail.as_ref().is_some_and(|tail| tail.body.needs_whole_rows());
        if whole_rows && (!shape.batch.is_empty() || product.rights != 1) {
            return Err(mismatch(0, 0, "what follows it needs whole rows of several products".into()));
        }
        let part = if whole_rows { kernel.strip(shape.n, threads) } else { kernel.part(shape.n, sharing) };
        let parts = (shape.m.div_ceil(part.0.max(1)), shape.n.div_ceil(part.1.max(1)));
        let floats = kernel.scratch(part.0.min(shape.m), part.1.min(shape.n));
        let roles = product.roles();
        let rows = shape.m * batches;
        let worker = || Worker {
            before: product.head.as_ref().map(|head| Rows::new(step, &head.body, rows, &roles, Role::Head)),
            after: product.tail.as_ref().map(|tail| Rows::new(step, &tail.body, rows, &roles, Role::Tail)),
        };
        let bound = |axes: &[(usize, usize)]| axes.iter().map(|&(divide, modulo)| Axis { divide, modulo }).collect();
        Ok(ProductTask {
            isa,
            kernel,
            batches,
            offsets: step.launch.args.iter().map(|arg| arg.offset * arg.dtype.bytes()).collect(),
            part,
            parts,
            strips: whole_rows.then(|| Strips::new(&kernel, shape, part.0, parts, threads)),
            head_axes: bound(head_axes),
            axes: bound(axes),
            workers: (0..threads).map(|_| PerWorker::new(worker())).collect(),
            floats,
            shape: shape.clone(),
            source: step.kernel.clone(),
            roles,
        })
    }

    /// Floats of the memory that all workers share while it runs.
    pub fn kernel_floats(&self) -> usize {
        self.strips.as_ref().map_or(0, |strips| strips.sums + strips.packed.unwrap_or(0))
    }

    /// # Safety
    /// As for a row task: addresses valid for the checked extents, what is written overlaps nothing and is ours alone. Each
    /// worker's scratch has [`ProductTask::floats`], and `memory`, from a cache line on, [`ProductTask::kernel_floats`].
    pub unsafe fn run(
        &mut self,
        pool: &Pool,
        addresses: &[*mut u8],
        scratch: &[PerWorker<Scratch>],
        memory: *mut f32,
        step: usize,
    ) -> Result<(), DeviceError> {
        let null = std::ptr::null_mut();
        let mut operands = Operands { a: null, b: [null; 2], c: null, sums: std::ptr::null_mut(), packed: None };
        if let Some(strips) = &mut self.strips {
            operands.sums = memory;
            let base = memory.wrapping_add(strips.sums);
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
                // A routed product is another task.
                Role::Indices => {}
                Role::Head(arg) => self.workers.iter_mut().for_each(|worker| {
                    worker.0.get_mut().before.iter_mut().for_each(|rows| rows.args[arg].base = address);
                }),
                Role::Tail(arg) => self.workers.iter_mut().for_each(|worker| {
                    worker.0.get_mut().after.iter_mut().for_each(|rows| rows.args[arg].base = address);
                }),
            }
        }
        let this = &*self;
        let panicked = |_| DeviceError::WorkerPanicked { step };
        if let Some(packed) = operands.packed {
            let right = Matrix { base: operands.b[0], strides: self.shape.b };
            // SAFETY: the caller's promise for the second operand; pieces are disjoint.
            let pack = |_: usize, piece: usize| unsafe { this.kernel.pack(right, packed, piece) };
            pool.run(self.kernel.pieces(self.shape.n), &pack).map_err(panicked)?;
        }
        let work = |worker: usize, task: usize| {
            // SAFETY: each task has a part of one batch to itself, and a worker runs one task at a time, so its scratch is its
            // own.
            unsafe { this.part(worker, task, operands, &mut *scratch[worker].0.get()) };
        };
        let tasks = self.batches * self.parts.0 * self.parts.1;
        pool.run(tasks, &work).map_err(panicked)
    }

    unsafe fn part(&self, worker: usize, task: usize, operands: Operands, scratch: &mut Scratch) {
        let (down, across) = self.parts;
        let (batch, rest) = (task / (down * across), task % (down * across));
        let (row, column) = (rest % down * self.part.0, rest / down * self.part.1);
        let part = Part {
            row,
            rows: self.part.0.min(self.shape.m - row),
            column,
            columns: self.part.1.min(self.shape.n - column),
        };
        let product = product_of(&self.source);
        let [in_a, in_b, in_c] = self.batch_offset(batch);
        let left = Matrix { base: operands.a.wrapping_add(in_a * product.left.bytes()), strides: self.shape.a };
        let right = |base: *const u8| Right {
            matrix: Matrix { base: base.wrapping_add(in_b * product.right.bytes()), strides: self.shape.b },
            scales: None,
            packed: operands.packed,
        };
        // SAFETY: a worker runs one task at a time, so this is its own.
        let Worker { before, after } = unsafe { &mut *self.workers[worker].0.get() };
        let waiting = self.strips.as_ref().map(|strips| {
            let set = if across == 1 { worker } else { rest % down };
            (strips, operands.sums.wrapping_add(set * strips.set))
        });
        let mut finish = |block: Block<'_>| match (waiting, &product.tail, &mut *after) {
            (Some((strips, sums)), ..) => {
                let base = sums.wrapping_sub(row * strips.stride).cast();
                let store = Store { base, dtype: Dtype::F32, strides: (strips.stride, 1) };
                // SAFETY: a set has room for the rows of a part, and these columns of it are this part's alone.
                unsafe { store.block(self.isa, &block) };
            }
            // SAFETY: the caller's promise; blocks are disjoint.
            (None, Some(tail), Some(rows)) => unsafe {
                let row = batch * self.shape.m + block.row;
                // No index is looked up, so there is no fault.
                let _ = rows.follow(self.isa, tail, &self.axes, Block { row, ..block });
            },
            _ => {
                let to = operands.c.wrapping_add(in_c * product.result.bytes());
                let store = Store { base: to, dtype: product.result, strides: self.shape.c };
                // SAFETY: as above.
                unsafe { store.block(self.isa, &block) };
            }
        };
        let mut fill = |wanted: Wanted<'_>| {
            if let (Some(head), Some(rows)) = (&product.head, &mut *before) {
                // SAFETY: the caller's promise; nothing is written but what is wanted.
                unsafe { self.make(head, wanted, rows) };
            }
        };
        let values = if product.head.is_some() { Values::Fill(&mut fill) } else { Values::Lie(left) };
        let rights = operands.b.map(right);
        // SAFETY: batch, row and column are inside the sizes, so all elements are inside the checked extents.
        unsafe {
            let left = Left { values, scales: None };
            self.kernel.run(left, &rights[..product.rights], part, scratch, &mut finish);
        }
        let (Some((strips, sums)), Some(tail), Some(rows)) = (waiting, &product.tail, after) else { return };
        // What others wrote before they counted is seen by the one who counts last.
        if strips.done[rest % down].fetch_add(1, Ordering::AcqRel) + 1 < across {
            return;
        }
        // SAFETY: all sums of the strip are there, and nobody else has any left to do; the caller's promise for its rows.
        unsafe {
            let sums = std::slice::from_raw_parts_mut(sums, strips.set);
            let (columns, stride, second) = (self.shape.n, strips.stride, &mut [][..]);
            let block = Block { row, rows: part.rows, column: 0, columns, stride, sums, second };
            let _ = rows.follow(self.isa, tail, &self.axes, block);
        }
    }

    /// Makes rows of the first operand.
    unsafe fn make(&self, head: &Head<Program>, wanted: Wanted<'_>, rows: &mut Rows) {
        debug_assert_eq!((wanted.inner, wanted.count), (0, self.shape.k), "whole rows");
        // The program counts rows of the whole operand; those that are wanted lie at `to`.
        let made = &mut rows.args[head.made];
        made.base = wanted.to.as_mut_ptr().wrapping_sub(wanted.row * wanted.stride).cast();
        made.dims[0].stride = wanted.stride;
        let launch = simd::Launch { program: &head.body, args: &rows.args, axes: &self.head_axes, window: None };
        let span = wanted.row..wanted.row + wanted.rows;
        // SAFETY: the caller's promise for these rows of what is read; `to` has room for whole rows. No index is looked up, so
        // there is no fault.
        let _ = unsafe { simd::run(self.isa, &launch, span, &mut rows.memory, &mut []) };
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

impl Strips {
    fn new(kernel: &Kernel, shape: &MatmulShape, rows: usize, parts: (usize, usize), threads: usize) -> Strips {
        // A cache line more, for the sets of the cache.
        let stride = shape.n.next_multiple_of(16) + 16;
        let set = rows.min(shape.m) * stride;
        let (down, across) = parts;
        let packed = if across == 1 && down > 1 { kernel.packed(shape.n) } else { None };
        Strips {
            sums: (set * if across == 1 { threads } else { down }).next_multiple_of(LINE_FLOATS),
            stride,
            set,
            done: (0..down).map(|_| AtomicUsize::new(0)).collect(),
            packed,
        }
    }
}

/// The product of a kernel that is known to have one.
pub(super) fn product_of(kernel: &job::Kernel) -> &Product<Program> {
    match &kernel.source {
        Source::Product(product) => product,
        Source::AttentionBlock(block) => &block.product,
        _ => unreachable!("checked by whoever made the task"),
    }
}

impl Rows {
    /// For a program over so many rows, without addresses.
    pub fn new(step: &Step, program: &Program, rows: usize, roles: &[Role], role: fn(usize) -> Role) -> Rows {
        let form = Form::Product(product_of(&step.kernel).into());
        let touched: usize = (0..step.launch.args.len()).map(|position| extent(&form, &step.launch, position)).sum();
        let bound = |arg: usize| match roles.iter().position(|&known| known == role(arg)) {
            Some(position) => {
                let arg = &step.launch.args[position];
                bind(&arg.leading, arg.table_rows, touched)
            }
            // Handed over: how far its rows are apart is known with each block.
            None => bind(&[(rows, 0)], 0, 0),
        };
        Rows { args: (0..program.args.len()).map(bound).collect(), memory: simd::Scratch::for_program(program) }
    }

    /// Does what follows a product on a block of sums, whose rows are counted over all batches.
    ///
    /// # Safety
    /// The arguments have addresses, valid for the rows and columns of the block, and what is written there is ours alone.
    pub unsafe fn follow(
        &mut self,
        isa: Isa,
        tail: &Tail<Program>,
        axes: &[Axis],
        block: Block<'_>,
    ) -> Result<(), Fault> {
        // The program counts rows and columns of the whole result; the block is where its own are.
        let back = block.row * block.stride + block.column;
        for (&arg, values) in tail.sums.iter().zip([block.sums, block.second]) {
            let sums = &mut self.args[arg];
            sums.base = values.as_mut_ptr().wrapping_sub(back).cast();
            sums.dims[0].stride = block.stride;
        }
        let window = (block.columns < tail.body.cols).then_some((block.column, block.column + block.columns));
        let launch = simd::Launch { program: &tail.body, args: &self.args, axes, window };
        // SAFETY: the caller's promise for the rows and columns of the block; its sums are the worker's own.
        unsafe { simd::run(isa, &launch, block.row..block.row + block.rows, &mut self.memory, &mut []) }
    }
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::{Epilogue, Launch, MatmulKernel};

    use super::*;
    use crate::{Cpu, Device, Job};

    #[test]
    fn a_product_of_a_library_is_one_for_another_device() {
        let cpu = Cpu::with(1, Isa::detect());
        for epilogue in Epilogue::ALL {
            let source = Source::Matmul(MatmulKernel { dtype: Dtype::F32, epilogue });
            let kernel = cpu.compile(vec![source]).unwrap().remove(0);
            let shape = MatmulShape { m: 1, n: 1, k: 1, batch: vec![], a: (1, 1), b: (1, 1), c: (1, 1) };
            let launch = Launch { args: vec![], geometry: Geometry::Matmul(shape) };
            let job = Job {
                steps: vec![Step { kernel, launch, places: vec![] }],
                inputs: 0,
                states: vec![],
                outputs: vec![],
                arena: 0,
            };
            assert!(matches!(cpu.load(job), Err(DeviceError::ForeignKernel { step: 0 })), "{epilogue:?}");
        }
    }
}
