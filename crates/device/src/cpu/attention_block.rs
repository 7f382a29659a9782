//! Attention and the projection of its result: attention stores into memory of the kernel, as it would into a buffer, then strips of its
//! rows are multiplied with the weight, and whoever ends a strip does what follows on its rows.
//!
//! The two run one after the other, each cut for all threads. A worker that multiplies the rows of the tile whose last head it ends
//! would leave the others idle where tiles are few, and finds those rows no closer: heads are the outer loop, so that keys stay in cache.

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::kernels::matmul::cpu::Scratch;
use deuteron_codegen::{ArgBinding, AttentionOperand, Geometry, Launch, Source};

use crate::check::mismatch;
use crate::cpu::attention::AttentionTask;
use crate::cpu::pool::Pool;
use crate::cpu::product::{LINE_FLOATS, ProductTask};
use crate::cpu::row::PerWorker;
use crate::error::DeviceError;
use crate::extent::attention;
use crate::job::Step;

pub(crate) struct AttentionBlockTask {
    attention: AttentionTask,
    product: ProductTask,
    /// How many arguments are attention's.
    operands: usize,
    /// Floats that the result of attention takes of the kernel's memory, in its dtype.
    result: usize,
    /// Addresses of the arguments of one of the two.
    addresses: Vec<*mut u8>,
}

impl AttentionBlockTask {
    /// The step is checked.
    pub fn new(step: &Step, threads: usize, isa: Isa) -> Result<AttentionBlockTask, DeviceError> {
        let (Source::AttentionBlock(kernel), Geometry::AttentionBlock { attention: shape, product, axes }) =
            (&step.kernel.source, step.launch.geometry.clone())
        else {
            return Err(mismatch(0, 0, "not attention with a projection".into()));
        };
        let operands = kernel.operands();
        let dtype = kernel.attention.dtype;
        let offsets = step.launch.args[..operands].iter().map(|arg| arg.offset).chain([0]);
        // The product reads the whole of what lies in memory of the kernel, whatever its name.
        let left = ArgBinding { dtype, written: false, offset: 0, leading: Vec::new(), ..step.launch.args[0].clone() };
        let args = [left].into_iter().chain(step.launch.args[operands..].iter().cloned()).collect();
        let geometry = Geometry::Product { shape: product, head_axes: Vec::new(), axes };
        let second = Step { kernel: step.kernel.clone(), launch: Launch { args, geometry }, places: Vec::new() };
        let elements = attention(&kernel.attention, &shape, AttentionOperand::O);
        Ok(AttentionBlockTask {
            attention: AttentionTask::new(kernel.attention, shape, offsets, threads, isa),
            product: ProductTask::new(&second, threads, isa)?,
            operands,
            result: (elements * dtype.bytes()).div_ceil(4).next_multiple_of(LINE_FLOATS),
            addresses: Vec::with_capacity(step.launch.args.len() + 1),
        })
    }

    /// Floats that each worker's scratch must have.
    pub fn floats(&self) -> usize {
        self.product.floats
    }

    /// Floats of the memory that all workers share while it runs.
    pub fn kernel_floats(&self) -> usize {
        self.result + self.product.kernel_floats()
    }

    /// # Safety
    /// `addresses` are the starts of the arguments' buffers, valid for the checked extents; what is written overlaps nothing
    /// and is ours alone. Each worker's scratch has [`AttentionBlockTask::floats`], and `memory`, from a cache line on,
    /// [`AttentionBlockTask::kernel_floats`].
    pub unsafe fn run(
        &mut self,
        pool: &Pool,
        addresses: &[*mut u8],
        scratch: &[PerWorker<Scratch>],
        memory: *mut f32,
        step: usize,
    ) -> Result<(), DeviceError> {
        let result: *mut u8 = memory.cast();
        let (operands, others) = addresses.split_at(self.operands);
        self.addresses.clear();
        self.addresses.extend(operands.iter().copied().chain([result]));
        // SAFETY: the caller's promise; the result is ours, and has room for all that attention stores.
        unsafe { self.attention.run(pool, &self.addresses, step)? };
        self.addresses.clear();
        self.addresses.extend([result].into_iter().chain(others.iter().copied()));
        // SAFETY: the caller's promise; the check of the launch found the first operand inside of the result.
        unsafe { self.product.run(pool, &self.addresses, scratch, memory.add(self.result), step) }
    }
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::body::Exprs;
    use deuteron_codegen::cpu::emit::emit;
    use deuteron_codegen::{
        Access, ArgSpec, AttentionBlock, AttentionKernel, AttentionMask, AttentionResult, AttentionShape, Body, Expr,
        HeadStrides, MatmulShape, Product, Stage, Tail,
    };
    use deuteron_graph::{BinaryOp, Dtype, ReduceOp};

    use super::*;
    use crate::cpu::attention::tests::argument;
    use crate::job::{Job, Place};
    use crate::{Cpu, Device, Launching, NoStates};

    /// What can be wrong with a job.
    struct Parts {
        kernel: AttentionBlock<Body>,
        attention: AttentionShape,
        product: MatmulShape,
        result: usize,
    }

    /// The sums less the largest of their row.
    fn body() -> Body {
        let mut exprs = Exprs::default();
        let load = exprs.make(Expr::Load(0));
        let largest = exprs.make(Expr::RowValue(0));
        let value = exprs.make(Expr::Binary(BinaryOp::Sub, load, largest));
        let spec = |written| ArgSpec { dtype: Dtype::F32, access: Access::Row, written };
        Body {
            cols: 3,
            flat: false,
            args: vec![spec(false), spec(true)],
            exprs: exprs.finish(),
            axes: 0,
            row_values: 1,
            stages: vec![Stage::RowReduce { op: ReduceOp::Max, value: load, into: 0 }, Stage::Store { value, arg: 1 }],
        }
    }

    /// Two heads of width 2 side by side, two queries, one key, by a weight of three columns.
    fn parts() -> Parts {
        let attention = AttentionKernel {
            dtype: Dtype::F32,
            kv: Dtype::F32,
            width: 2,
            group: 1,
            scale: 1.0,
            mask: AttentionMask::Full,
            dropout: None,
            result: AttentionResult::Values,
        };
        let product = Product {
            left: Dtype::F32,
            right: Dtype::F32,
            result: Dtype::F32,
            rights: 1,
            routed: false,
            head: None,
            tail: Some(Tail { body: body(), sums: vec![0] }),
        };
        let strides = |head, position| HeadStrides { batch: 0, head, position };
        let (q, k, o) = (strides(4, 2), strides(2, 2), strides(2, 4));
        let mask = HeadStrides::default();
        Parts {
            kernel: AttentionBlock { attention, product, norm: None },
            attention: AttentionShape { batch: 1, heads: 2, queries: 2, keys: 1, q, k, v: k, mask, o },
            product: MatmulShape { m: 2, n: 3, k: 4, batch: vec![], a: (4, 1), b: (3, 1), c: (3, 1) },
            result: 24,
        }
    }

    fn job(cpu: &Cpu, change: impl Fn(&mut Parts)) -> Job {
        let mut parts = parts();
        change(&mut parts);
        let Parts { kernel, attention, product, result } = parts;
        let source = Source::AttentionBlock(Box::new(kernel.map(|body| emit(&body))));
        let kernel = cpu.compile(vec![source]).unwrap().remove(0);
        let arg = |position: usize| ArgBinding {
            leading: if position == 4 { vec![(2, 3)] } else { Vec::new() },
            ..argument(position == 4)
        };
        let geometry = Geometry::AttentionBlock { attention, product, axes: Vec::new() };
        let launch = Launch { args: (0..5).map(arg).collect(), geometry };
        let places = vec![Place::Input(0), Place::Input(1), Place::Input(1), Place::Input(2), Place::Output(0)];
        Job {
            steps: vec![Step { kernel, launch, places }],
            inputs: 3,
            states: Vec::new(),
            outputs: vec![result],
            arena: 0,
        }
    }

    #[test]
    fn one_key_gives_its_values_by_the_weight() {
        for threads in [1, 3] {
            let cpu = Cpu::with(threads, Isa::detect());
            let mut executable = cpu.load(job(&cpu, |_| {})).unwrap();
            let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
            let weight = [1.0, 0.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0];
            let values = [&[0.0; 8][..], &[1.0, 2.0, 3.0, 4.0], &weight];
            let memory = values.map(|values| cpu.upload(&bytes(values)).unwrap());
            // Twice: what is counted is counted anew.
            for _ in 0..2 {
                executable.poison().unwrap();
                executable.run(&|index| &memory[index], &mut NoStates, Launching::Eager).unwrap();
                let mut result = [0; 24];
                executable.read(0, &mut result).unwrap();
                // Sums 5, 2 and 5 in both rows.
                assert_eq!(result.to_vec(), bytes(&[0.0, -3.0, 0.0, 0.0, -3.0, 0.0]));
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let cpu = Cpu::with(1, Isa::detect());
        let refused =
            |change: fn(&mut Parts)| matches!(cpu.load(job(&cpu, change)), Err(DeviceError::Job { step: 0, .. }));
        assert!(!refused(|_| {}));
        assert!(refused(|parts| parts.result = 23), "a result of 24 bytes");
        assert!(refused(|parts| parts.product.m = 3), "rows that attention does not give");
        assert!(refused(|parts| parts.product.k = 5), "columns that attention does not give");
        assert!(refused(|parts| parts.product.a = (5, 1)), "rows further apart than those of attention");
        assert!(refused(|parts| parts.product.n = 4), "columns that what follows has not");
        assert!(
            refused(|parts| parts.product.batch = vec![[1, 0, 0, 0]])
                && refused(|parts| parts.kernel.product.rights = 2)
        );
        assert!(refused(|parts| parts.kernel.product.left = Dtype::F16), "another dtype than that of attention");
        assert!(refused(|parts| parts.kernel.attention.width = 0) && refused(|parts| parts.kernel.attention.group = 3));
        assert!(refused(|parts| parts.kernel.product.tail.as_mut().unwrap().sums = vec![1]), "sums that are written");
    }
}
