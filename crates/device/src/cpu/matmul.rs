//! Matrix products through the `gemm` crate, split into blocks of the result.
//!
//! `f32` operands are used as they lie. 16-bit operands are widened block by block into `f32`, multiplied, and the
//! result narrowed once. Blocks depend on the sizes alone, so the bits do not depend on the number of threads.

use std::cell::UnsafeCell;

use deuteron_codegen::MatmulShape;
use deuteron_codegen::cpu::PRODUCT_BLOCK as BLOCK;
use deuteron_codegen::cpu::simd::{self, Isa};
use deuteron_graph::Dtype;
use gemm::Parallelism;

use crate::cpu::pool::Pool;
use crate::error::DeviceError;

pub(crate) struct MatmulTask {
    dtype: Dtype,
    isa: Isa,
    shape: MatmulShape,
    offsets: [usize; 3],
    batches: usize,
    /// Blocks along the longer side of the result.
    blocks: usize,
    by_columns: bool,
    /// Widened operands and result, one set a worker. Empty for `f32`.
    scratch: Vec<Scratch>,
}

struct Scratch(UnsafeCell<Wide>);

// SAFETY: `run` gives each worker its own element.
unsafe impl Sync for Scratch {}

#[derive(Default)]
struct Wide {
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

/// Rows and columns of the result that one task makes.
#[derive(Clone, Copy)]
struct Part {
    row: usize,
    rows: usize,
    column: usize,
    columns: usize,
}

#[derive(Clone, Copy)]
struct Operands {
    a: *const u8,
    b: *const u8,
    c: *mut u8,
}

// SAFETY: only numbers; the tasks that use them write to disjoint blocks of c.
unsafe impl Send for Operands {}
// SAFETY: as above.
unsafe impl Sync for Operands {}

impl MatmulTask {
    pub fn new(
        dtype: Dtype,
        shape: MatmulShape,
        offsets: [usize; 3],
        threads: usize,
        isa: Isa,
    ) -> Result<MatmulTask, DeviceError> {
        let by_columns = shape.n > shape.m;
        let side = shape.n.max(shape.m);
        let blocks = side.div_ceil(BLOCK);
        let batches = shape.batch.iter().map(|axis| axis[0]).product();
        let (rows, columns) = if by_columns { (shape.m, BLOCK.min(shape.n)) } else { (BLOCK.min(shape.m), shape.n) };
        let wide = || match dtype {
            Dtype::F32 => Wide::default(),
            _ => Wide { a: vec![0.0; rows * shape.k], b: vec![0.0; shape.k * columns], c: vec![0.0; rows * columns] },
        };
        let scratch = (0..threads).map(|_| Scratch(UnsafeCell::new(wide()))).collect();
        Ok(MatmulTask { dtype, isa, shape, offsets, batches, blocks, by_columns, scratch })
    }

    /// # Safety
    /// As for a row task: addresses valid for the checked extents, c overlaps nothing and is ours alone.
    pub unsafe fn run(&mut self, pool: &Pool, addresses: &[*mut u8], step: usize) -> Result<(), DeviceError> {
        if self.shape.m == 0 || self.shape.n == 0 {
            return Ok(());
        }
        let element = self.dtype.bytes();
        // An operand without elements (an inner size of 0) may lie anywhere: numbers until they are used.
        let operands = Operands {
            a: addresses[0].wrapping_add(self.offsets[0] * element),
            b: addresses[1].wrapping_add(self.offsets[1] * element),
            c: addresses[2].wrapping_add(self.offsets[2] * element),
        };
        // The library takes `f32` where `f32` may stand; narrower operands are copied first.
        let misaligned = |address: *const u8| self.dtype == Dtype::F32 && !address.cast::<f32>().is_aligned();
        if misaligned(operands.a) || misaligned(operands.b) {
            return Err(DeviceError::Alignment { step, bytes: element });
        }
        let this = &*self;
        let work = |worker: usize, task: usize| {
            // SAFETY: each task has a block of one batch of c to itself, each worker its scratch.
            unsafe { this.block(worker, task, operands) };
        };
        pool.run(self.batches * self.blocks, &work).map_err(|_| DeviceError::WorkerPanicked { step })
    }

    unsafe fn block(&self, worker: usize, task: usize, operands: Operands) {
        let (batch, block) = (task / self.blocks, task % self.blocks);
        let side = block * BLOCK;
        let length = BLOCK.min(self.shape.n.max(self.shape.m) - side);
        let part = match self.by_columns {
            true => Part { row: 0, rows: self.shape.m, column: side, columns: length },
            false => Part { row: side, rows: length, column: 0, columns: self.shape.n },
        };
        let offset = self.batch_offset(batch);
        let shape = &self.shape;
        let a = offset[0] + part.row * shape.a.0;
        let b = offset[1] + part.column * shape.b.1;
        let c = offset[2] + part.row * shape.c.0 + part.column * shape.c.1;
        let element = self.dtype.bytes();
        // SAFETY: batch, row and column are inside the sizes, so the addresses are inside the checked extents.
        unsafe {
            let (a, b) = (operands.a.wrapping_add(a * element), operands.b.wrapping_add(b * element));
            let c = operands.c.add(c * element);
            match self.dtype {
                Dtype::F32 => {
                    product(part, shape.k, c.cast(), shape.c, a.cast(), shape.a, b.cast(), shape.b);
                }
                _ => self.wide_block(worker, part, a, b, c),
            }
        }
    }

    unsafe fn wide_block(&self, worker: usize, part: Part, a: *const u8, b: *const u8, c: *mut u8) {
        let k = self.shape.k;
        // SAFETY: a worker runs one task at a time, so its scratch is its own; sizes were chosen for the largest part,
        // and the operands reach as far as the checked extents.
        unsafe {
            let wide = &mut *self.scratch[worker].0.get();
            self.widen(a, self.shape.a, part.rows, k, &mut wide.a);
            self.widen(b, self.shape.b, k, part.columns, &mut wide.b);
            let (a, b, c_wide) = (wide.a.as_ptr(), wide.b.as_ptr(), wide.c.as_mut_ptr());
            product(part, k, c_wide, (part.columns, 1), a, (k, 1), b, (part.columns, 1));
            for row in 0..part.rows {
                let from = &wide.c[row * part.columns..(row + 1) * part.columns];
                let to = c.add(row * self.shape.c.0 * self.dtype.bytes());
                let bytes = std::slice::from_raw_parts_mut(to, part.columns * self.dtype.bytes());
                simd::narrow(self.isa, self.dtype, from, bytes);
            }
        }
    }

    /// Copies a strided matrix into contiguous rows of `f32`.
    unsafe fn widen(&self, from: *const u8, strides: (usize, usize), rows: usize, cols: usize, to: &mut [f32]) {
        let element = self.dtype.bytes();
        for row in 0..rows {
            let line = &mut to[row * cols..(row + 1) * cols];
            // SAFETY: row < rows and column < cols are inside the operand.
            unsafe {
                let start = from.add(row * strides.0 * element);
                if strides.1 == 1 {
                    simd::widen(self.isa, self.dtype, std::slice::from_raw_parts(start, cols * element), line);
                } else {
                    for (column, value) in line.iter_mut().enumerate() {
                        let bits = start.add(column * strides.1 * element).cast::<u16>().read_unaligned();
                        *value = match self.dtype {
                            Dtype::F16 => half::f16::from_bits(bits).to_f32(),
                            _ => half::bf16::from_bits(bits).to_f32(),
                        };
                    }
                }
            }
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

/// `c = a b` for one part; strides are (row, column).
#[allow(clippy::too_many_arguments)] // three matrices, each an address and its strides
unsafe fn product(
    part: Part,
    k: usize,
    c: *mut f32,
    c_strides: (usize, usize),
    a: *const f32,
    a_strides: (usize, usize),
    b: *const f32,
    b_strides: (usize, usize),
) {
    // SAFETY: the caller's addresses are valid for the part's rows and columns at these strides, and c overlaps neither.
    unsafe {
        gemm::gemm(
            part.rows,
            part.columns,
            k,
            c,
            c_strides.1 as isize,
            c_strides.0 as isize,
            false,
            a,
            a_strides.1 as isize,
            a_strides.0 as isize,
            b,
            b_strides.1 as isize,
            b_strides.0 as isize,
            0.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::{Epilogue, Geometry, Launch, MatmulKernel, Source};

    use super::*;
    use crate::{Cpu, Device, Job, Step};

    #[test]
    fn a_product_with_an_epilogue_is_one_for_another_device() {
        let cpu = Cpu::with(1, Isa::detect());
        for epilogue in Epilogue::ALL {
            let source = Source::Matmul(MatmulKernel { dtype: Dtype::F32, epilogue });
            let kernel = cpu.compile(vec![source]).unwrap().remove(0);
            let shape = MatmulShape { m: 1, n: 1, k: 1, batch: vec![], a: (1, 1), b: (1, 1), c: (1, 1) };
            let launch = Launch { args: vec![], geometry: Geometry::Matmul(shape) };
            let job =
                Job { steps: vec![Step { kernel, launch, places: vec![] }], inputs: 0, outputs: vec![], arena: 0 };
            let refused = matches!(cpu.load(job), Err(DeviceError::ForeignKernel { step: 0 }));
            assert_eq!(refused, epilogue != Epilogue::None, "{epilogue:?}");
        }
    }
}
