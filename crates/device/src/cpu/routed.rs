//! Products of rows with the matrices that indices pick for them, on the pool.
//!
//! Rows of one expert are brought together, in their order, and multiplied with its matrix as one product: a few of them while the
//! matrix streams by once, more of them in tiles. No matrix is copied. Parts of these products are tasks; a task hands its rows of sums,
//! while they are hot, to what follows, each run of rows that lie side by side at once.
//!
//! Sums of bytes are exact, so no bit depends on the rows that come together, nor on the number of threads.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use deuteron_codegen::cpu::simd::{Axis, Fault, Isa};
use deuteron_codegen::kernels::matmul::cpu::{
    Block, Kernel, Left, Matrix, Part, Right, STREAMED_ROWS, Scratch, Spec, Store, Values,
};
use deuteron_codegen::{Geometry, MatmulShape, Role, Source};
use deuteron_graph::Dtype;

use crate::check::mismatch;
use crate::cpu::pool::Pool;
use crate::cpu::product::{Rows, product_of};
use crate::cpu::row::PerWorker;
use crate::error::DeviceError;
use crate::job::{self, Step};

/// Bytes of a matrix that a task streams for a few rows, about.
const STREAMED_BYTES: usize = 256 << 10;
/// Rows and columns of a tiled task, at most: what is packed of both stays within an L2.
const TILED: (usize, usize) = (512, 384);
/// Rows that a task brings together.
const COPIED: usize = 64;

pub(crate) struct RoutedTask {
    source: Arc<job::Kernel>,
    isa: Isa,
    /// For up to eight rows of an expert, and for more.
    few: Kernel,
    many: Kernel,
    shape: MatmulShape,
    experts: usize,
    /// Bytes from one expert's matrix to the next.
    stride: usize,
    offsets: Vec<usize>,
    roles: Vec<Role>,
    axes: Vec<Axis>,
    /// What each worker needs after a product, if anything follows.
    workers: Vec<PerWorker<Option<Rows>>>,
    /// Floats that each worker's scratch must have.
    pub floats: usize,
    /// Rows by expert, those of one in order.
    order: Vec<usize>,
    /// Where each expert's rows begin in `order`, and where the last one's end.
    starts: Vec<usize>,
    /// The first operand in that order.
    together: Vec<u8>,
    /// (expert, rows and columns of its product)
    parts: Vec<(usize, Part)>,
}

/// Where the operands and the result begin.
#[derive(Clone, Copy)]
struct Operands {
    left: *const u8,
    table: *const u8,
    indices: *const i32,
    result: *mut u8,
    together: *mut u8,
}

// SAFETY: only numbers; the tasks that use them write to disjoint rows or blocks.
unsafe impl Send for Operands {}
// SAFETY: as above.
unsafe impl Sync for Operands {}

impl RoutedTask {
    pub fn new(step: &Step, threads: usize, isa: Isa) -> Result<RoutedTask, DeviceError> {
        let (Source::Product(product), Geometry::Product { shape, axes, .. }) =
            (&step.kernel.source, &step.launch.geometry)
        else {
            return Err(mismatch(0, 0, "not a product".into()));
        };
        let roles = product.roles();
        let table = roles.iter().position(|role| *role == Role::Right(0)).map(|at| &step.launch.args[at]);
        let Some(&[(experts, stride)]) = table.map(|table| table.leading.as_slice()) else {
            return Err(mismatch(0, 1, "it is not a table of matrices".into()));
        };
        let spec = |rows: usize| Spec {
            rows,
            k: shape.k,
            left: Dtype::I8,
            right: Dtype::I8,
            right_strides: shape.b,
            rights: 1,
        };
        let (few, many) = (Kernel::new(isa, spec(STREAMED_ROWS)), Kernel::new(isa, spec(shape.m.max(1))));
        let columns = widths(shape, threads);
        let floats = few.scratch(STREAMED_ROWS, columns[0]).max(many.scratch(TILED.0.min(shape.m), columns[1]));
        let after = || {
            product.tail.as_ref().map(|tail| {
                let mut rows = Rows::new(step, &tail.body, shape.m, &roles, Role::Tail);
                // What is written is little next to the matrices, and is read soon.
                rows.args.iter_mut().for_each(|arg| arg.streaming = false);
                rows
            })
        };
        Ok(RoutedTask {
            isa,
            few,
            many,
            experts,
            stride,
            offsets: step.launch.args.iter().map(|arg| arg.offset * arg.dtype.bytes()).collect(),
            axes: axes.iter().map(|&(divide, modulo)| Axis { divide, modulo }).collect(),
            workers: (0..threads).map(|_| PerWorker::new(after())).collect(),
            floats,
            order: vec![0; shape.m],
            starts: vec![0; experts + 1],
            together: vec![0; shape.m * shape.k],
            parts: Vec::with_capacity(most_parts(shape, experts, columns)),
            shape: shape.clone(),
            source: step.kernel.clone(),
            roles,
        })
    }

    /// # Safety
    /// As for a product: addresses valid for the checked extents, what is written overlaps nothing and is ours alone. Each
    /// worker's scratch has [`RoutedTask::floats`].
    pub unsafe fn run(
        &mut self,
        pool: &Pool,
        addresses: &[*mut u8],
        scratch: &[PerWorker<Scratch>],
        step: usize,
    ) -> Result<(), DeviceError> {
        let null = std::ptr::null_mut();
        let together = self.together.as_mut_ptr();
        let mut operands = Operands { left: null, table: null, indices: null.cast(), result: null, together };
        for (position, &role) in self.roles.iter().enumerate() {
            // An argument without elements may lie anywhere: a number until it is used.
            let address = addresses[position].wrapping_add(self.offsets[position]);
            match role {
                Role::Left => operands.left = address,
                Role::Right(_) => operands.table = address,
                Role::Indices => operands.indices = address.cast(),
                Role::Result => operands.result = address,
                Role::Head(_) => {}
                Role::Tail(arg) => self.workers.iter_mut().for_each(|worker| {
                    worker.0.get_mut().iter_mut().for_each(|rows| rows.args[arg].base = address);
                }),
            }
        }
        // SAFETY: there is an index for each row.
        unsafe { self.sort(operands.indices) }.map_err(|fault| DeviceError::Index { step, fault })?;
        self.cut(pool.threads());
        let this = &*self;
        let bring = |_: usize, task: usize| {
            let rows = task * COPIED..((task + 1) * COPIED).min(this.shape.m);
            // SAFETY: each task has places of its own.
            unsafe { this.bring_together(operands, rows) };
        };
        pool.run(self.shape.m.div_ceil(COPIED), &bring).map_err(|_| DeviceError::WorkerPanicked { step })?;
        let fault: Mutex<Option<Fault>> = Mutex::new(None);
        let multiply = |worker: usize, task: usize| {
            // SAFETY: each task has a part of one expert's rows to itself, and a worker runs one task at a time, so its scratch
            // is its own.
            if let Err(found) = unsafe { this.part(worker, task, operands, &mut *scratch[worker].0.get()) } {
                fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(found);
            }
        };
        pool.run(self.parts.len(), &multiply).map_err(|_| DeviceError::WorkerPanicked { step })?;
        let fault = fault.into_inner().unwrap_or_else(PoisonError::into_inner);
        fault.map_or(Ok(()), |fault| Err(DeviceError::Index { step, fault }))
    }

    /// Sorts rows by expert. The first index that picks no expert is a fault.
    unsafe fn sort(&mut self, indices: *const i32) -> Result<(), Fault> {
        // SAFETY: `row` is below `shape.m`, and there are so many indices.
        let at = |row: usize| unsafe { indices.wrapping_add(row).read_unaligned() };
        self.starts.fill(0);
        for row in 0..self.shape.m {
            let index = at(row);
            match usize::try_from(index).ok().filter(|&expert| expert < self.experts) {
                Some(expert) => self.starts[expert + 1] += 1,
                None => return Err(Fault { arg: 1, row, index: index.into(), table_rows: self.experts }),
            }
        }
        for expert in 0..self.experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        for row in 0..self.shape.m {
            // Each start goes on to the next one's.
            let next = &mut self.starts[at(row) as usize];
            self.order[*next] = row;
            *next += 1;
        }
        self.starts.rotate_right(1);
        self.starts[0] = 0;
        Ok(())
    }

    /// Cuts the experts' products into parts.
    fn cut(&mut self, threads: usize) {
        self.parts.clear();
        let [streamed, tiled] = widths(&self.shape, threads);
        for expert in 0..self.experts {
            let count = self.starts[expert + 1] - self.starts[expert];
            let (tall, wide) = if count <= STREAMED_ROWS { (STREAMED_ROWS, streamed) } else { (TILED.0, tiled) };
            for row in (0..count).step_by(tall) {
                for column in (0..self.shape.n).step_by(wide) {
                    let (rows, columns) = (tall.min(count - row), wide.min(self.shape.n - column));
                    self.parts.push((expert, Part { row, rows, column, columns }));
                }
            }
        }
    }

    /// Copies rows of the first operand to their places.
    unsafe fn bring_together(&self, operands: Operands, places: Range<usize>) {
        let k = self.shape.k;
        for place in places {
            let from = operands.left.wrapping_add(self.order[place] * self.shape.a.0);
            // SAFETY: the row is one of the operand, whose bytes are side by side; the place is one of `together`.
            unsafe { std::ptr::copy_nonoverlapping(from, operands.together.wrapping_add(place * k), k) };
        }
    }

    unsafe fn part(&self, worker: usize, task: usize, operands: Operands, scratch: &mut Scratch) -> Result<(), Fault> {
        let (expert, part) = self.parts[task];
        let (product, k, first) = (product_of(&self.source), self.shape.k, self.starts[expert]);
        let kernel = if part.rows <= STREAMED_ROWS && part.row == 0 { &self.few } else { &self.many };
        let left = Matrix { base: operands.together.wrapping_add(first * k), strides: (k, 1) };
        let right = Matrix { base: operands.table.wrapping_add(expert * self.stride), strides: self.shape.b };
        // SAFETY: a worker runs one task at a time, so this is its own.
        let after = unsafe { &mut *self.workers[worker].0.get() };
        let mut done = Ok(());
        let mut finish = |block: Block<'_>| {
            let rows = &self.order[first + block.row..first + block.row + block.rows];
            let mut start = 0;
            // Rows that lie side by side are finished together.
            for run in rows.chunk_by(|one, next| one + 1 == *next) {
                // The last row ends with its last sum.
                let end = ((start + run.len()) * block.stride).min(block.sums.len());
                let piece = Block {
                    row: run[0],
                    rows: run.len(),
                    sums: &mut block.sums[start * block.stride..end],
                    second: &mut [],
                    ..block
                };
                start += run.len();
                match (&product.tail, &mut *after) {
                    (Some(tail), Some(rows)) => {
                        // SAFETY: the caller's promise; rows and columns of parts are disjoint.
                        let ran = unsafe { rows.follow(self.isa, tail, &self.axes, piece) };
                        done = done.and(ran);
                    }
                    _ => {
                        let store = Store { base: operands.result, dtype: product.result, strides: self.shape.c };
                        // SAFETY: as above.
                        unsafe { store.block(self.isa, &piece) };
                    }
                }
            }
        };
        let left = Left { values: Values::Lie(left), scales: None };
        let right = Right { matrix: right, scales: None, packed: None };
        // SAFETY: the part is inside the expert's rows and columns, all inside the checked extents and `together`.
        unsafe { kernel.run(left, &[right], part, scratch, &mut finish) };
        done
    }
}

/// Parts, at most: each expert may have few rows, and strips of many rows come besides.
fn most_parts(shape: &MatmulShape, experts: usize, columns: [usize; 2]) -> usize {
    let across = columns.map(|wide| shape.n.div_ceil(wide));
    (experts.min(shape.m) + shape.m / TILED.0) * across[0].max(across[1])
}

/// Columns of a task of few rows, and of one of many: no more than a worker's share, whole cache lines of bytes.
fn widths(shape: &MatmulShape, threads: usize) -> [usize; 2] {
    let share = shape.n.div_ceil(threads.max(1));
    [STREAMED_BYTES / shape.k.max(1), TILED.1].map(|most| share.min(most).max(1).next_multiple_of(64))
}
