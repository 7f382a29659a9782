//! Matrix products on the pool: parts of the result are tasks, and what follows the product is done on each block of sums
//! while it is hot.
//!
//! The bits of an element do not depend on how the result is cut, so neither do they on the number of threads.

use std::sync::Arc;

use deuteron_codegen::cpu::program::Program;
use deuteron_codegen::cpu::simd::{self, Axis, BoundArg, Isa};
use deuteron_codegen::kernels::matmul::cpu::{Block, Kernel, Left, Matrix, Part, Right, Scratch, Spec, Store, Values};
use deuteron_codegen::{Geometry, MatmulShape, Product, Source, Tail};

use crate::check::{Form, after_sums};
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
    axes: Vec<Axis>,
    workers: Vec<PerWorker<Worker>>,
}

/// What one worker has to itself.
struct Worker {
    product: Scratch,
    /// Arguments of what follows, the sums among them, and its memory.
    args: Vec<BoundArg>,
    after: Option<simd::Scratch>,
}

/// Where the operands and the result of one batch begin.
#[derive(Clone, Copy)]
struct Operands {
    a: *const u8,
    b: *const u8,
    c: *mut u8,
}

// SAFETY: only numbers; the tasks that use them write to disjoint blocks of the results.
unsafe impl Send for Operands {}
// SAFETY: as above.
unsafe impl Sync for Operands {}

impl ProductTask {
    pub fn new(step: &Step, threads: usize, isa: Isa) -> Result<ProductTask, DeviceError> {
        let (Source::Product(product), Geometry::Product { shape, axes }) =
            (&step.kernel.source, &step.launch.geometry)
        else {
            return Err(DeviceError::Job { step: 0, argument: 0, problem: "not a product".into() });
        };
        let spec = Spec {
            rows: shape.m,
            k: shape.k,
            left: product.left,
            right: product.right,
            right_strides: shape.b,
            rights: 1,
        };
        let kernel = Kernel::new(isa, spec);
        let batches: usize = shape.batch.iter().map(|axis| axis[0]).product();
        // Where there are many products, each is one part.
        let sharing = if batches >= threads { 1 } else { threads };
        let part = kernel.part(shape.n, sharing);
        let floats = kernel.scratch(part.0.min(shape.m), part.1.min(shape.n));
        let args = tail_arguments(step, product, shape.m * batches);
        let worker = || Worker {
            product: Scratch::new(floats),
            args: args.clone(),
            after: product.tail.as_ref().map(|tail| simd::Scratch::for_program(&tail.body)),
        };
        Ok(ProductTask {
            isa,
            kernel,
            batches,
            offsets: step.launch.args.iter().map(|arg| arg.offset * arg.dtype.bytes()).collect(),
            part,
            parts: (shape.m.div_ceil(part.0.max(1)), shape.n.div_ceil(part.1.max(1))),
            axes: axes.iter().map(|&(divide, modulo)| Axis { divide, modulo }).collect(),
            workers: (0..threads).map(|_| PerWorker::new(worker())).collect(),
            shape: shape.clone(),
            source: step.kernel.clone(),
        })
    }

    fn product(&self) -> &Product<Program> {
        let Source::Product(product) = &self.source.source else { unreachable!("checked in `new`") };
        product
    }

    /// # Safety
    /// As for a row task: addresses valid for the checked extents, what is written overlaps nothing and is ours alone.
    pub unsafe fn run(&mut self, pool: &Pool, addresses: &[*mut u8], step: usize) -> Result<(), DeviceError> {
        // An argument without elements may lie anywhere: numbers until they are used.
        let base = |position: usize| addresses[position].wrapping_add(self.offsets[position]);
        let operands = Operands { a: base(0), b: base(1), c: base(2) };
        let sums = self.product().tail.as_ref().map(|tail| tail.sums);
        if let Some(sums) = sums {
            for position in 2..addresses.len() {
                let address = base(position);
                for worker in &mut self.workers {
                    worker.0.get_mut().args[after_sums(position, sums)].base = address;
                }
            }
        }
        let this = &*self;
        let work = |worker: usize, task: usize| {
            // SAFETY: each task has a part of one batch to itself, each worker its scratch.
            unsafe { this.part(worker, task, operands) };
        };
        let tasks = self.batches * self.parts.0 * self.parts.1;
        pool.run(tasks, &work).map_err(|_| DeviceError::WorkerPanicked { step })
    }

    unsafe fn part(&self, worker: usize, task: usize, operands: Operands) {
        let (down, across) = self.parts;
        let (batch, rest) = (task / (down * across), task % (down * across));
        let (row, column) = (rest % down * self.part.0, rest / down * self.part.1);
        let part = Part {
            row,
            rows: self.part.0.min(self.shape.m - row),
            column,
            columns: self.part.1.min(self.shape.n - column),
        };
        let product = self.product();
        let [in_a, in_b, in_c] = self.batch_offset(batch);
        let left = Matrix { base: operands.a.wrapping_add(in_a * product.left.bytes()), strides: self.shape.a };
        let right = Matrix { base: operands.b.wrapping_add(in_b * product.right.bytes()), strides: self.shape.b };
        // SAFETY: a worker runs one task at a time, so this is its own.
        let Worker { product: scratch, args, after } = unsafe { &mut *self.workers[worker].0.get() };
        let mut finish = |block: Block<'_>| match (&product.tail, &mut *after) {
            // SAFETY: the caller's promise; blocks are disjoint.
            (Some(tail), Some(after)) => unsafe { self.follow(tail, block, batch, args, after) },
            _ => {
                let to = operands.c.wrapping_add(in_c * product.result.bytes());
                let store = Store { base: to, dtype: product.result, strides: self.shape.c };
                // SAFETY: as above.
                unsafe { store.block(self.isa, &block) };
            }
        };
        let left = Left { values: Values::Lie(left), scales: None };
        let right = Right { matrix: right, scales: None };
        // SAFETY: batch, row and column are inside the sizes, so all elements are inside the checked extents.
        unsafe { self.kernel.run(left, &[right], part, scratch, &mut finish) };
    }

    /// Does what follows the product on a block of sums.
    unsafe fn follow(
        &self,
        tail: &Tail<Program>,
        block: Block<'_>,
        batch: usize,
        args: &mut [BoundArg],
        scratch: &mut simd::Scratch,
    ) {
        let first = batch * self.shape.m + block.row;
        // The program counts rows and columns of the whole result; the block is where its own are.
        let sums = &mut args[tail.sums];
        sums.base = block.sums.as_mut_ptr().wrapping_sub(first * block.stride + block.column).cast();
        sums.dims[0].stride = block.stride;
        let window = Some((block.column, block.column + block.columns));
        let launch = simd::Launch { program: &tail.body, args, axes: &self.axes, window };
        // SAFETY: the caller's promise for the rows and columns of the block; its sums are the worker's own. No index is
        // looked up, so there is no fault.
        let _ = unsafe { simd::run(self.isa, &launch, first..first + block.rows, scratch, &mut []) };
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

/// Arguments of what follows a product of so many rows, without addresses.
fn tail_arguments(step: &Step, product: &Product<Program>, rows: usize) -> Vec<BoundArg> {
    let Some(tail) = &product.tail else { return Vec::new() };
    let form = Form::ProductRow([product.left, product.right], (&tail.body).into(), tail.sums);
    let touched: usize = (0..step.launch.args.len()).map(|position| extent(&form, &step.launch, position)).sum();
    let others = step.launch.args[2..].iter().map(|arg| bind(&arg.leading, arg.table_rows, touched));
    let mut args: Vec<BoundArg> = others.collect();
    // How far its rows are apart is known with each block.
    args.insert(tail.sums, bind(&[(rows, 0)], 0, 0));
    args
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::{Epilogue, Launch, MatmulKernel};
    use deuteron_graph::Dtype;

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
