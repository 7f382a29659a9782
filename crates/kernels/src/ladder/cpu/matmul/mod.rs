//! Matmuls below the shipped one.

mod l1_scalar;
mod l2_tiled;
mod l3_vectors;

use std::ops::Range;

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::cpu::family::assemble;
use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::task::{CpuLaunch, CpuSource, CpuTask, Run, ScratchSizes, TaskError};
use deuteron_codegen::kernel::Kernel;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::Dtype;
use deuteron_matmul::fit::{fit, lower_matmul};
use deuteron_matmul::kernel::LoweredMatmul;
use deuteron_plan::Draft;
use half::{bf16, f16};

use super::elements::{Element, Elements};

/// Rows of a task, a multiple of those that any step has in registers.
const TASK_ROWS: usize = 64;

/// A matmul of the ladder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// three loops
    Scalar,
    /// blocks of B that stay in the L1 cache, sums in registers
    Tiled,
    /// the same by vectors
    Vectors,
}

impl Step {
    /// The Rust source of its loops.
    pub fn text(self) -> &'static str {
        match self {
            Step::Scalar => include_str!("l1_scalar.rs"),
            Step::Tiled => include_str!("l2_tiled.rs"),
            Step::Vectors => include_str!("l3_vectors.rs"),
        }
    }

    /// Its kernel for a group that is a matmul with nothing around it, if it takes it.
    pub fn kernel(self, group: &Draft) -> Option<Kernel> {
        let LoweredMatmul { product, launch } = lower_matmul(group, fit(group)?);
        let is_alone = product.prologue.is_none() && product.epilogue.is_none();
        let is_plain = is_alone && product.rights == 1 && !product.routed && product.left == product.right;
        let shape = &launch.shape;
        let is_taken = match self {
            Step::Scalar => matches!(product.left, Dtype::F32 | Dtype::F16 | Dtype::Bf16),
            Step::Tiled | Step::Vectors => {
                let rows = [(shape.a.1, shape.k), (shape.b.1, shape.n), (shape.c.1, shape.n)];
                product.left == Dtype::F32
                    && product.result == Dtype::F32
                    && rows.iter().all(|&(stride, count)| stride == 1 || count <= 1)
            }
        };
        if !is_plain || !is_taken || !Elements::takes(product.result) {
            return None;
        }
        let arguments = product.arguments(&launch);
        let (operand, result) = (product.left, product.result);
        let source = CpuSource::described((self, operand, result), self.text().to_string());
        let tasks = MatmulTasks { step: self, operand, result, args: launch.args, shape: launch.shape };
        // SAFETY: tasks touch the elements of matrices of these sizes and strides, of which the reach was taken.
        Some(unsafe { assemble(source, arguments, tasks) })
    }
}

#[derive(Debug, Clone)]
struct MatmulTasks {
    step: Step,
    /// of both operands
    operand: Dtype,
    result: Dtype,
    /// the operands, then the result
    args: Vec<ArgBinding>,
    shape: MatmulShape,
}

impl CpuLaunch for MatmulTasks {
    fn prepare(&self, _: usize, isa: Isa) -> Box<dyn CpuTask> {
        Box::new(MatmulTask { tasks: self.clone(), isa })
    }
}

struct MatmulTask {
    tasks: MatmulTasks,
    isa: Isa,
}

/// The matrices of one matmul: `C = A B`.
#[derive(Clone, Copy)]
struct Matrices {
    m: usize,
    n: usize,
    k: usize,
    a: *const u8,
    b: *const u8,
    c: Elements,
    /// Elements from one row to the next, and from one column to the next.
    a_strides: (usize, usize),
    b_strides: (usize, usize),
    c_strides: (usize, usize),
}

impl Matrices {
    /// Element `(i, l)` of A.
    ///
    /// # Safety
    /// There is such an element, of this type.
    #[inline(always)]
    unsafe fn a<E: Element>(&self, i: usize, l: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.a.cast::<E>().add(i * self.a_strides.0 + l * self.a_strides.1).read_unaligned().widen() }
    }

    /// Element `(l, j)` of B.
    ///
    /// # Safety
    /// As [`Matrices::a`].
    #[inline(always)]
    unsafe fn b<E: Element>(&self, l: usize, j: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.b.cast::<E>().add(l * self.b_strides.0 + j * self.b_strides.1).read_unaligned().widen() }
    }

    /// Stores element `(i, j)` of C.
    ///
    /// # Safety
    /// There is such an element, and nobody else touches it.
    #[inline(always)]
    unsafe fn store(&self, i: usize, j: usize, value: f32) {
        // SAFETY: the caller's promise.
        unsafe { self.c.write(i * self.c_strides.0 + j * self.c_strides.1, value) }
    }

    /// The first element of a row of each matrix in f32.
    ///
    /// # Safety
    /// The matrices are of f32, and there are such rows.
    #[inline(always)]
    unsafe fn rows(&self, i: usize, l: usize) -> (*const f32, *const f32, *mut f32) {
        let Matrices { a_strides, b_strides, c_strides, .. } = self;
        // SAFETY: the caller's promise.
        unsafe {
            let c = self.c.base.cast::<f32>().add(i * c_strides.0);
            (self.a.cast::<f32>().add(i * a_strides.0), self.b.cast::<f32>().add(l * b_strides.0), c)
        }
    }
}

impl CpuTask for MatmulTask {
    fn scratch(&self) -> ScratchSizes {
        ScratchSizes::default()
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        let MatmulTasks { args, shape, .. } = &self.tasks;
        // An argument without elements may lie anywhere: a number until it is used.
        let starts = [0, 1, 2].map(|at| Address(run.addresses[at].wrapping_add(args[at].start())));
        let strips = shape.m.div_ceil(TASK_ROWS);
        let this = &*self;
        let work = |_: usize, task: usize| {
            let first = task % strips * TASK_ROWS;
            let rows = first..(first + TASK_ROWS).min(this.tasks.shape.m);
            // SAFETY: the caller's promise; tasks have disjoint rows of the result.
            unsafe { this.strip(this.matrices(starts, task / strips), rows) };
        };
        run.workers.run(shape.batches() * strips, &work)?;
        Ok(())
    }
}

/// An address shared by tasks, which write disjoint rows.
#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: an address is only a number until a task uses it, which writes no other task's rows.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl MatmulTask {
    /// The matrices of a batch.
    fn matrices(&self, starts: [Address; 3], batch: usize) -> Matrices {
        let MatmulTasks { operand, result, shape, .. } = &self.tasks;
        let (mut offsets, mut rest) = ([0; 3], batch);
        for axis in shape.batch.iter().rev() {
            let index = rest % axis[0];
            rest /= axis[0];
            (0..3).for_each(|matrix| offsets[matrix] += index * axis[matrix + 1]);
        }
        let at = |matrix: usize, dtype: Dtype| starts[matrix].0.wrapping_add(offsets[matrix] * dtype.bytes());
        let &MatmulShape { m, n, k, a: a_strides, b: b_strides, c: c_strides, .. } = shape;
        let c = Elements { base: at(2, *result), dtype: *result };
        Matrices { m, n, k, a: at(0, *operand), b: at(1, *operand), c, a_strides, b_strides, c_strides }
    }

    /// # Safety
    /// The operands can be read and these rows of the result written, which nobody else touches.
    unsafe fn strip(&self, matrices: Matrices, rows: Range<usize>) {
        debug_assert!(rows.end <= matrices.m);
        // SAFETY: the caller's promise; steps in f32 are made for matrices of f32.
        unsafe {
            match (self.tasks.step, self.tasks.operand) {
                (Step::Scalar, Dtype::F16) => l1_scalar::rows::<f16>(&matrices, rows),
                (Step::Scalar, Dtype::Bf16) => l1_scalar::rows::<bf16>(&matrices, rows),
                (Step::Scalar, _) => l1_scalar::rows::<f32>(&matrices, rows),
                (Step::Tiled, _) => l2_tiled::rows(&matrices, rows),
                (Step::Vectors, _) => self.isa.dispatch(l3_vectors::Rows { matrices, rows }),
            }
        }
    }
}
