//! Matmuls of rows with matrices that indices select (experts), on threads.
//!
//! Rows of one expert are gathered, in their order, and multiplied with its matrix as one matmul: a few rows while the
//! matrix is streamed once, more rows in tiles. No matrix is copied, and of the left operand only as many rows at a time as fit
//! [`TOGETHER_BYTES`]. Parts of these matmuls are tasks; a task passes its rows of accumulators, while they are in the cache, to the epilogue, each run of
//! consecutive rows at once.
//!
//! Sums of bytes are exact. The order of a sum of floats depends on how many rows its expert has, never on the number of threads.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use deuteron_codegen::cpu::bind::bind_axes;
use deuteron_codegen::cpu::program::TileProgram;
use deuteron_codegen::cpu::simd::{Axis, Fault, Isa};
use deuteron_codegen::cpu::task::{CpuLaunch, CpuTask, Floats, PerWorker, Run, ScratchSizes, TaskError};
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::memory;

use super::row_work::{RowWork, SideBindings};
use super::{Left, Matrix, Part, PartKernel, Right, STREAMED_ROWS, Spec, Store, SumBlock, Values};
use crate::kernel::{Matmul, MatmulLaunch, Role};
use crate::routed::LeftRows;

/// Bytes of a matrix that a task streams for a few rows, about.
const STREAMED_BYTES: usize = 256 << 10;
/// Rows and columns of a tiled task, at most: what is packed of both stays within an L2.
const TILED: (usize, usize) = (512, 384);
/// Rows that a task brings together.
const COPIED: usize = 64;
/// Bytes of the left operand that are brought together at a time, about.
const TOGETHER_BYTES: usize = 32 << 20;

/// A launch of a routed matmul.
#[derive(Debug)]
pub(super) struct RoutedTasks {
    /// with a tile program after it; routed
    pub product: Arc<Matmul<TileProgram>>,
    /// the run-time half
    pub launch: MatmulLaunch,
    /// matrices of the table, and elements from one to the next
    pub experts: (usize, usize),
    /// bytes within reach of all arguments
    pub touched: usize,
}

impl CpuLaunch for RoutedTasks {
    fn prepare(&self, threads: usize, isa: Isa) -> Box<dyn CpuTask> {
        let RoutedTasks { product, launch, experts: (experts, stride), touched } = self;
        let MatmulLaunch { args, shape, axes, .. } = launch;
        let spec = |rows: usize| Spec {
            rows,
            k: shape.k,
            left: product.left,
            right: product.right,
            right_strides: shape.b,
            rights: 1,
        };
        let (few, many) = (PartKernel::new(isa, spec(STREAMED_ROWS)), PartKernel::new(isa, spec(shape.m.max(1))));
        let bytes = product.left.bytes();
        let columns = widths(shape, bytes, threads);
        let chunk = (TOGETHER_BYTES / (shape.k * bytes).max(1)).max(TILED.0).min(shape.m);
        let bindings = SideBindings::new(product, launch, Role::Epilogue);
        let after = || {
            product.epilogue.as_ref().map(|epilogue| {
                let mut rows = RowWork::new(&epilogue.body, &bindings, shape.m, *touched);
                // What is written is little next to the matrices, and is read soon.
                rows.args.iter_mut().for_each(|arg| arg.streaming = false);
                rows
            })
        };
        Box::new(RoutedTask {
            isa,
            few,
            many,
            experts: *experts,
            stride: stride * bytes,
            bytes,
            left: LeftRows::of(&args[0]),
            chunk,
            offsets: args.iter().map(|arg| arg.start()).collect(),
            axes: bind_axes(axes),
            workers: (0..threads).map(|_| PerWorker::new(after())).collect(),
            floats: few.scratch(STREAMED_ROWS, columns[0]).max(many.scratch(TILED.0.min(shape.m), columns[1])),
            order: memory::zeros(shape.m),
            starts: vec![0; experts + 1],
            together: memory::zeros(chunk * shape.k * bytes),
            parts: memory::room(most_parts(shape, *experts, columns)),
            shape: shape.clone(),
            roles: product.roles(),
            product: product.clone(),
        })
    }
}

struct RoutedTask {
    product: Arc<Matmul<TileProgram>>,
    isa: Isa,
    /// For up to eight rows of an expert, and for more.
    few: PartKernel,
    many: PartKernel,
    shape: MatmulShape,
    experts: usize,
    /// Bytes from one expert's matrix to the next, and of an element.
    stride: usize,
    bytes: usize,
    /// How rows of the left operand lie.
    left: LeftRows,
    /// Rows that are brought together at a time.
    chunk: usize,
    offsets: Vec<usize>,
    roles: Vec<Role>,
    axes: Vec<Axis>,
    /// What each worker needs after a matmul, if anything follows.
    workers: Vec<PerWorker<Option<RowWork>>>,
    /// Floats that each worker's scratch must have.
    floats: usize,
    /// Rows by expert, those of one in order.
    order: Vec<usize>,
    /// Where each expert's rows begin in `order`, and where the last one's end.
    starts: Vec<usize>,
    /// Some of the left operand in that order.
    together: Vec<u8>,
    /// (expert, rows and columns of its matmul)
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

impl CpuTask for RoutedTask {
    fn scratch(&self) -> ScratchSizes {
        ScratchSizes { worker: self.floats, shared: 0 }
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        let operands = self.bind(run.addresses);
        // SAFETY: there is an index for each row.
        unsafe { self.sort(operands.indices) }?;
        let fault: Mutex<Option<Fault>> = Mutex::new(None);
        let scratch = run.scratch;
        for start in (0..self.shape.m).step_by(self.chunk.max(1)) {
            let places = start..(start + self.chunk).min(self.shape.m);
            self.cut(run.workers.threads(), &places);
            let this = &*self;
            let bring = |_: usize, task: usize| {
                let first = start + task * COPIED;
                // SAFETY: each task has places of its own.
                unsafe { this.bring_together(operands, start, first..(first + COPIED).min(places.end)) };
            };
            run.workers.run(places.len().div_ceil(COPIED), &bring)?;
            let multiply = |worker: usize, task: usize| {
                // SAFETY: each task has a part of one expert's rows to itself, and a worker runs one task at a time, so its scratch
                // is its own.
                if let Err(found) = unsafe { this.part(worker, task, operands, start, scratch[worker].get()) } {
                    fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(found);
                }
            };
            run.workers.run(self.parts.len(), &multiply)?;
        }
        let fault = fault.into_inner().unwrap_or_else(PoisonError::into_inner);
        fault.map_or(Ok(()), |fault| Err(fault.into()))
    }
}

impl RoutedTask {
    /// Takes note of where everything lies.
    fn bind(&mut self, addresses: &[*mut u8]) -> Operands {
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
                Role::Prologue(_) => {}
                Role::Epilogue(arg) => self.workers.iter_mut().for_each(|worker| {
                    worker.get_mut().iter_mut().for_each(|rows| rows.args[arg].base = address);
                }),
            }
        }
        operands
    }

    /// Sorts rows by expert. The first index that picks no expert is a fault.
    unsafe fn sort(&mut self, indices: *const i32) -> Result<(), Fault> {
        // SAFETY: `row` is below `shape.m`, and there are this many indices.
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

    /// Whether the matrix of an expert streams by its rows.
    fn is_streamed(&self, expert: usize) -> bool {
        self.starts[expert + 1] - self.starts[expert] <= STREAMED_ROWS
    }

    /// Cuts the experts' matmuls with rows at these places into parts. Rows of a part count from the expert's first.
    fn cut(&mut self, threads: usize, places: &Range<usize>) {
        self.parts.clear();
        let [streamed, tiled] = widths(&self.shape, self.bytes, threads);
        for expert in 0..self.experts {
            let first = self.starts[expert];
            let (start, end) = (first.max(places.start), self.starts[expert + 1].min(places.end));
            let (tall, wide) = if self.is_streamed(expert) { (STREAMED_ROWS, streamed) } else { (TILED.0, tiled) };
            for row in (start..end).step_by(tall) {
                for column in (0..self.shape.n).step_by(wide) {
                    let (rows, columns) = (tall.min(end - row), wide.min(self.shape.n - column));
                    let row = row - first;
                    self.parts.push((expert, Part { row, rows, column, columns }));
                }
            }
        }
    }

    /// Copies rows of the left operand to their places, which are counted from `start` on.
    unsafe fn bring_together(&self, operands: Operands, start: usize, places: Range<usize>) {
        let row = self.shape.k * self.bytes;
        for place in places {
            let from = operands.left.wrapping_add(self.left.at(self.order[place]) * self.bytes);
            // SAFETY: the row is one of the operand, whose bytes are side by side; the place is one of `together`.
            unsafe { std::ptr::copy_nonoverlapping(from, operands.together.wrapping_add((place - start) * row), row) };
        }
    }

    /// `start` is the place of the first row that was brought together.
    ///
    /// # Safety
    /// As for [`CpuTask::run`]; the task runs once, and worker and scratch are of this thread.
    unsafe fn part(
        &self,
        worker: usize,
        task: usize,
        operands: Operands,
        start: usize,
        scratch: &mut Floats,
    ) -> Result<(), Fault> {
        let (expert, part) = self.parts[task];
        let (k, first) = (self.shape.k, self.starts[expert]);
        let kernel = if self.is_streamed(expert) { &self.few } else { &self.many };
        let row = k * self.bytes;
        // Where the expert's first row would be: that may be before the first one that is there, which the part begins behind.
        let base = operands.together.wrapping_add(first * row).wrapping_sub(start * row);
        let left = Matrix { base, strides: (k, 1) };
        let right = Matrix { base: operands.table.wrapping_add(expert * self.stride), strides: self.shape.b };
        // SAFETY: a worker runs one task at a time, so this is its own.
        let after = unsafe { self.workers[worker].get() };
        let mut done = Ok(());
        let mut finish = |block: SumBlock<'_>| {
            let rows = &self.order[first + block.row..first + block.row + block.rows];
            // SAFETY: the caller's promise; rows and columns of parts are disjoint.
            done = done.and(unsafe { self.finish(rows, operands, after, block) });
        };
        let left = Left { values: Values::Lie(left), scales: None };
        let right = Right { matrix: right, scales: None, packed: None };
        // SAFETY: the part is inside the expert's rows and columns, all inside the reach of the arguments and `together`.
        unsafe { kernel.run(left, &[right], part, scratch, &mut finish) };
        done
    }

    /// Passes a block of accumulators, those of `rows`, to the epilogue.
    ///
    /// # Safety
    /// As for [`RoutedTask::part`]; rows and columns of the block are its own.
    unsafe fn finish(
        &self,
        rows: &[usize],
        operands: Operands,
        after: &mut Option<RowWork>,
        block: SumBlock<'_>,
    ) -> Result<(), Fault> {
        let (mut start, mut done) = (0, Ok(()));
        // Rows that lie side by side are finished together.
        for run in rows.chunk_by(|one, next| one + 1 == *next) {
            // The last row ends with its last sum.
            let end = ((start + run.len()) * block.stride).min(block.sums.len());
            let piece = SumBlock {
                row: run[0],
                rows: run.len(),
                sums: &mut block.sums[start * block.stride..end],
                second: &mut [],
                ..block
            };
            start += run.len();
            match (&self.product.epilogue, &mut *after) {
                (Some(epilogue), Some(rows)) => {
                    // SAFETY: the caller's promise.
                    let ran = unsafe { rows.follow(self.isa, epilogue, &self.axes, piece) };
                    done = done.and(ran);
                }
                _ => {
                    let store = Store { base: operands.result, dtype: self.product.result, strides: self.shape.c };
                    // SAFETY: as above.
                    unsafe { store.block(self.isa, &piece) };
                }
            }
        }
        done
    }
}

/// Parts, at most: each expert may have few rows, and strips of many rows come besides.
fn most_parts(shape: &MatmulShape, experts: usize, columns: [usize; 2]) -> usize {
    let across = columns.map(|wide| shape.n.div_ceil(wide));
    (experts.min(shape.m) + shape.m / TILED.0) * across[0].max(across[1])
}

/// Columns of a task of few rows, and of one of many, of elements of this many bytes: no more than a worker's share, whole cache lines.
fn widths(shape: &MatmulShape, bytes: usize, threads: usize) -> [usize; 2] {
    let share = shape.n.div_ceil(threads.max(1));
    [STREAMED_BYTES / (shape.k * bytes).max(1), TILED.1].map(|most| share.min(most).max(1).next_multiple_of(64))
}
