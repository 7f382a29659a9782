//! On a GPU: products of the library and of our own kernel against f64 on the host. Without one, every test says so.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::sys;
use deuteron_codegen::cuda::{Arch, Word};
use deuteron_codegen::{ArgBinding, LibraryCall, LibraryEpilogue, LibraryMatmul, MatmulShape, Operand};
use deuteron_graph::{Dtype, Graph};
use deuteron_matmul::cuda::plain;
use half::{bf16, f16};

use super::{Library, Prepared};
use crate::cuda::compile::compile;
use crate::cuda::context::Context;
use crate::cuda::library::{self, Search};
use crate::cuda::memory::{Allocation, Zones};
use crate::cuda::module::Module;
use crate::cuda::nvrtc::Compiler;
use crate::cuda::record::Recording;
use crate::cuda::stream::Stream;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const SIZES: [usize; 4] = [1, 127, 129, 1500];
/// Products up to which every element is compared; beyond, a few thousand spread over the result.
const ALL_UP_TO: usize = 1 << 24;
/// Elements compared of a larger one.
const SAMPLES: usize = 4001;

fn search() -> Search {
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/nvrtc");
    let named = ["DEUTERON_NVRTC_ENV", "VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folder);
    Search {
        cuda_home: folder("CUDA_HOME").or_else(|| folder("CUDA_PATH")),
        environments: named.chain([beside]).collect(),
    }
}

/// Past the capture of the test harness: a skipped test must not look like one that ran.
fn skipped<T>(why: impl std::fmt::Display) -> Option<T> {
    let _ = writeln!(std::io::stderr(), "\nSKIPPED, NOT TESTED: {why}\n");
    None
}

/// What a test prints for a person, past the capture.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn compiler() -> Option<Compiler> {
    library::nvrtc(&search()).map(Compiler::new).map_or_else(|error| skipped(format!("no NVRTC: {error}")), Some)
}

/// A GPU, the library on it, and the compiler for our own kernel.
struct Gpu {
    context: Arc<Context>,
    stream: Stream,
    library: Library,
    compiler: Compiler,
    arch: Arch,
    /// Our own kernels, each compiled once.
    modules: RefCell<HashMap<LibraryCall, Rc<Module>>>,
}

impl Gpu {
    fn new() -> Option<Gpu> {
        let driver = match library::driver(&search()) {
            Ok(driver) => driver,
            Err(error) => return skipped(format!("no driver: {error}")),
        };
        let context = match Context::new(driver, 0) {
            Ok(context) => context,
            Err(error) => return skipped(format!("no GPU: {error}")),
        };
        // On a machine with a GPU nothing is skipped: what is missing is a failure.
        let entered = context.enter().unwrap();
        use sys::CUdevice_attribute_enum::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        let (major, minor) = (context.attribute(MAJOR).unwrap(), context.attribute(MINOR).unwrap());
        let arch = Arch::of(major as u32, minor as u32).unwrap();
        let library = Library::new(&search()).unwrap_or_else(|error| panic!("{error}"));
        let compiler = Compiler::new(library::nvrtc(&search()).unwrap_or_else(|error| panic!("{error}")));
        let stream = Stream::new(&context).unwrap();
        drop(entered);
        Some(Gpu { context, stream, library, compiler, arch, modules: RefCell::default() })
    }

    fn module(&self, kernel: &LibraryCall) -> Rc<Module> {
        if let Some(known) = self.modules.borrow().get(kernel) {
            return known.clone();
        }
        let compiled = compile(&self.compiler, None, self.arch.name(), &[&plain::source(kernel)]);
        let cubin = compiled.unwrap_or_else(|error| panic!("{error}")).swap_remove(0);
        let module = Rc::new(Module::new(&self.context, cubin).unwrap());
        self.modules.borrow_mut().insert(*kernel, module.clone());
        module
    }

    fn upload(&self, bytes: &[u8]) -> Allocation {
        let memory = Allocation::new(&self.context, bytes.len(), Zones::Off).unwrap();
        // In the order of the stream: a copy from pageable memory returns before its last bytes are on the device.
        let stream = self.stream.handle();
        // SAFETY: both are as long as the bytes, which the call has taken over when it returns.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(memory.address(), bytes.as_ptr().cast(), bytes.len(), stream) };
        self.context.check("cuMemcpyHtoDAsync", code).unwrap();
        memory
    }

    fn download(&self, memory: &Allocation) -> Vec<u8> {
        self.stream.wait().unwrap();
        let mut bytes = vec![0; memory.len()];
        // SAFETY: both are as long as the bytes, and nothing writes to the memory any more.
        let code = unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory.address(), bytes.len()) };
        self.context.check("cuMemcpyDtoH", code).unwrap();
        bytes
    }
}

/// A product to try.
#[derive(Debug, Clone)]
struct Case {
    kernel: LibraryCall,
    shape: MatmulShape,
    /// First elements of the arguments.
    offsets: Vec<usize>,
}

/// Its operands on the host, as numbers that the storage type holds.
struct Host {
    values: Vec<Vec<f32>>,
}

/// Which of two ways a product is made.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Executor {
    Library,
    Ours,
}

fn round(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_f32(value).to_f32(),
        Dtype::Bf16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

fn decode(dtype: Dtype, bytes: &[u8]) -> f64 {
    match dtype {
        Dtype::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        Dtype::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        _ => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
    }
}

/// Half the distance between 1 and the next number.
fn unit(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => 2f64.powi(-11),
        Dtype::Bf16 => 2f64.powi(-8),
        _ => 2f64.powi(-24),
    }
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

impl Case {
    fn new(kernel: LibraryCall, shape: MatmulShape) -> Case {
        let offsets = vec![0; kernel.operands().len()];
        Case { kernel, shape, offsets }
    }

    /// a and b as they lie, or transposed; c row by row.
    fn plain(kernel: LibraryCall, (m, n, k): (usize, usize, usize), (turn_a, turn_b): (bool, bool)) -> Case {
        let a = if turn_a { (1, m) } else { (k, 1) };
        let b = if turn_b { (1, k) } else { (n, 1) };
        Case::new(kernel, MatmulShape { m, n, k, batch: vec![], a, b, c: (n, 1) })
    }

    /// Sizes and places that any library of products serves.
    fn is_ordinary(&self) -> bool {
        let MatmulShape { m, n, k, batch, .. } = &self.shape;
        let precise = !self.kernel.epilogue.has_gelu() || self.kernel.dtype == Dtype::Bf16;
        precise
            && [*m, *n, *k].iter().all(|size| size.is_multiple_of(8))
            && batch.is_empty()
            && self.offsets.iter().all(|&at| at == 0)
    }

    fn batches(&self) -> usize {
        self.shape.batch.iter().map(|axis| axis[0]).product()
    }

    /// Elements from the start of a, b and c to a matrix of the batch.
    fn starts(&self, batch: usize) -> [usize; 3] {
        let mut rest = batch;
        let mut starts = [0; 3];
        for axis in self.shape.batch.iter().rev() {
            let index = rest % axis[0];
            rest /= axis[0];
            (0..3).for_each(|operand| starts[operand] += index * axis[operand + 1]);
        }
        starts
    }

    fn position(&self, operand: Operand) -> Option<usize> {
        self.kernel.operands().iter().position(|&known| known == operand)
    }

    /// Elements of an argument's buffer.
    fn length(&self, position: usize) -> usize {
        let MatmulShape { m, n, k, .. } = self.shape;
        let (rows, cols, strides, batch) = match self.kernel.operands()[position] {
            Operand::A => (m, k, self.shape.a, 1),
            Operand::B => (k, n, self.shape.b, 2),
            Operand::Bias => (1, n, (0, 1), 0),
            Operand::Residual | Operand::C => (m, n, self.shape.c, 3),
        };
        let reach = |axis: &[usize; 4]| if batch == 0 { 0 } else { axis[0].saturating_sub(1) * axis[batch] };
        let batches: usize = self.shape.batch.iter().map(reach).sum();
        let matrix = rows.saturating_sub(1) * strides.0 + cols.saturating_sub(1) * strides.1;
        self.offsets[position] + batches + matrix + 1
    }

    /// Numbers between -1 and 1, the same for the same case.
    fn host(&self) -> Host {
        let mut state = 0x9e37_79b9_7f4a_7c15u64 ^ (self.shape.m * 31 + self.shape.n * 7 + self.shape.k) as u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
        };
        let count = self.kernel.operands().len();
        let values = (0..count)
            .map(|position| (0..self.length(position)).map(|_| round(self.kernel.dtype, next())).collect::<Vec<f32>>());
        Host { values: values.collect() }
    }

    /// Runs it; the bytes of c, which were all ones before.
    fn run(&self, gpu: &Gpu, host: &Host, way: Executor) -> Vec<u8> {
        let c = self.kernel.operands().len() - 1;
        let mut memory: Vec<Allocation> =
            host.values[..c].iter().map(|values| gpu.upload(&encode(self.kernel.dtype, values))).collect();
        memory.push(gpu.upload(&vec![0xff; self.length(c) * self.kernel.dtype.bytes()]));
        let addresses: Vec<u64> = memory.iter().map(Allocation::address).collect();
        match way {
            Executor::Library => self.run_library(gpu, &self.prepared(gpu), &addresses),
            Executor::Ours => self.run_ours(gpu, &addresses),
        }
        gpu.download(&memory[c])
    }

    fn prepared(&self, gpu: &Gpu) -> Prepared {
        let prepared = gpu.library.prepare(&self.kernel, &self.shape, &self.offsets).unwrap();
        prepared.unwrap_or_else(|| panic!("the library has no algorithm for {self:?}"))
    }

    fn run_library(&self, gpu: &Gpu, prepared: &Prepared, addresses: &[u64]) {
        let scratch = gpu.upload(&vec![0xff; prepared.workspace().max(1)]);
        // SAFETY: buffers are as long as `length` says and live until `download` has waited; so does the scratch memory,
        // for which this waits.
        unsafe { prepared.launch(gpu.stream.handle(), addresses, scratch.address()).unwrap() };
        gpu.stream.wait().unwrap();
    }

    fn matmul(&self) -> LibraryMatmul {
        let base = Graph::new("test").input("x", Dtype::F32, [1]).unwrap();
        let operands = self.kernel.operands().iter().zip(&self.offsets);
        let args = operands.map(|(&operand, &offset)| ArgBinding {
            base,
            dtype: self.kernel.operand_dtype(operand),
            written: operand == Operand::C,
            offset,
            leading: Vec::new(),
            table_rows: 0,
        });
        LibraryMatmul { call: self.kernel, shape: self.shape.clone(), args: args.collect() }
    }

    fn run_ours(&self, gpu: &Gpu, addresses: &[u64]) {
        let module = gpu.module(&self.kernel);
        for grid in plain::grids(&self.matmul()).list {
            let function = module.function(&grid).unwrap();
            let mut words: Vec<u64> = grid
                .words
                .iter()
                .map(|word| match *word {
                    Word::Number(number) => number,
                    Word::Argument { position, offset } => addresses[position] + offset as u64,
                    Word::Unwritten { .. } | Word::Workspace(_) | Word::Persistent(_) => panic!("{grid:?}"),
                    Word::Fault | Word::Map(_) => panic!("{grid:?}"),
                })
                .collect();
            let mut parameters = [words.as_mut_ptr().cast::<std::ffi::c_void>()];
            let [x, y, z] = grid.blocks;
            // SAFETY: `function` compared the parameter's length; the addresses are those of buffers that are long enough.
            let code = unsafe {
                sys::cuLaunchKernel(
                    function.0,
                    x,
                    y,
                    z,
                    grid.threads,
                    1,
                    1,
                    grid.shared,
                    gpu.stream.handle(),
                    parameters.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            gpu.context.check("cuLaunchKernel", code).unwrap();
        }
        gpu.stream.wait().unwrap();
    }

    /// Compares with f64; the largest share of the bound that an error takes.
    fn check(&self, host: &Host, got: &[u8], way: Executor) -> f64 {
        let MatmulShape { m, n, k, a, b, c, .. } = self.shape;
        let (dtype, bytes) = (self.kernel.dtype, self.kernel.dtype.bytes());
        let from = |position: usize| &host.values[position][self.offsets[position]..];
        let (first, second) = (from(0), from(1));
        let value = |operand: Operand, at: usize| f64::from(from(self.position(operand).unwrap())[at]);
        let total = self.batches() * m * n;
        let step = if total * k.max(1) <= ALL_UP_TO { 1 } else { (total / SAMPLES).max(1) };
        let mut worst: f64 = 0.0;
        for index in (0..total).step_by(step).chain(total.checked_sub(1)) {
            let (batch, row, column) = (index / (m * n), index / n % m, index % n);
            let [in_a, in_b, in_c] = self.starts(batch);
            let (mut sum, mut magnitude) = (0.0, 0.0);
            for l in 0..k {
                let x = f64::from(first[in_a + row * a.0 + l * a.1]);
                let y = f64::from(second[in_b + l * b.0 + column * b.1]);
                sum += x * y;
                magnitude += (x * y).abs();
            }
            let at = in_c + row * c.0 + column * c.1;
            let epilogue = self.kernel.epilogue;
            let (product, mut rounded_between) = (sum, 0.0);
            if epilogue.has_bias() {
                let bias = value(Operand::Bias, column);
                (sum, magnitude) = (sum + bias, magnitude + bias.abs());
                // At some sizes the library rounds the product before it adds the bias.
                rounded_between = product.abs();
            }
            if epilogue.has_residual() {
                let residual = value(Operand::Residual, at);
                (sum, magnitude) = (sum + residual, magnitude + residual.abs());
                // With a bias too, the sum with one of the two before it adds the other.
                let first = (sum - residual).abs().max((product + residual).abs());
                rounded_between += if epilogue.has_bias() { first } else { 0.0 };
            }
            // Roundings of a sum grow like the root of their number where signs vary; two for each addend of an epilogue.
            let mut bound = 2.0 * unit(Dtype::F32) * ((k + 4) as f64).sqrt() * magnitude;
            let mut expected = sum;
            if epilogue.has_gelu() {
                expected = gelu(sum);
                // Its slope is below 1.13. The function itself is good to the storage type: a few roundings in f32.
                bound = 1.13 * bound + 4.0 * unit(dtype) * sum.abs().min(1.0 + expected.abs());
            }
            bound += unit(dtype) * (expected.abs() + 1.13 * rounded_between) + f64::from(f32::MIN_POSITIVE);
            if dtype == Dtype::F16 {
                bound += 2f64.powi(-25);
            }
            let position = self.position(Operand::C).unwrap();
            let start = (self.offsets[position] + at) * bytes;
            let found = decode(dtype, &got[start..start + bytes]);
            let error = (found - expected).abs();
            assert!(
                error <= bound,
                "{way:?} {self:?}\nbatch {batch} row {row} column {column}: expected {expected}, got {found}, off by \
                 {error:e}, allowed {bound:e}"
            );
            worst = worst.max(error / bound);
        }
        self.check_untouched(got);
        worst
    }

    /// What is no element of c is as it was.
    fn check_untouched(&self, got: &[u8]) {
        let bytes = self.kernel.dtype.bytes();
        let mut written = vec![false; got.len() / bytes];
        let first = self.offsets[self.position(Operand::C).unwrap()];
        for batch in 0..self.batches() {
            let start = first + self.starts(batch)[2];
            for row in 0..self.shape.m {
                for column in 0..self.shape.n {
                    written[start + row * self.shape.c.0 + column * self.shape.c.1] = true;
                }
            }
        }
        let damaged =
            (0..written.len()).find(|&at| !written[at] && got[at * bytes..][..bytes].iter().any(|&b| b != 0xff));
        assert_eq!(damaged, None, "written between the elements of c: {self:?}");
    }

    /// Runs it one way twice and compares: with f64, and bit by bit.
    fn try_way(&self, gpu: &Gpu, way: Executor) -> f64 {
        let host = self.host();
        let got = self.run(gpu, &host, way);
        let worst = self.check(&host, &got, way);
        assert!(got == self.run(gpu, &host, way), "{way:?}: other bits the second time: {self:?}");
        worst
    }
}

fn kernels() -> impl Iterator<Item = LibraryCall> {
    DTYPES.into_iter().flat_map(|dtype| LibraryEpilogue::ALL.map(|epilogue| LibraryCall { dtype, epilogue }))
}

/// Runs cases one way; prints how near the errors came to their bounds.
fn try_all(gpu: &Gpu, what: &str, cases: impl IntoIterator<Item = Case>, way: Executor) {
    let _entered = gpu.context.enter().unwrap();
    let (mut count, mut refused, mut worst) = (0, 0, 0.0f64);
    for case in cases {
        // What the library has no algorithm for, the device gives to our kernel.
        let ours = way == Executor::Library
            && gpu.library.prepare(&case.kernel, &case.shape, &case.offsets).unwrap().is_none();
        assert!(!ours || !case.is_ordinary(), "the library has no algorithm for {case:?}");
        worst = worst.max(case.try_way(gpu, if ours { Executor::Ours } else { way }));
        (count, refused) = (count + 1, refused + usize::from(ours));
    }
    say(&format!(
        "{what}: {count} products, {way:?}, {refused} of them left to our kernel; the largest error is {:.0} % of its bound",
        100.0 * worst
    ));
}

#[test]
fn every_transpose_of_every_size_in_every_type() {
    let Some(gpu) = Gpu::new() else { return };
    let loaded = library::cublaslt(&search()).unwrap();
    say(&format!("cuBLASLt {:?} from {}", loaded.version(), loaded.path().display()));
    for dtype in DTYPES {
        let mut cases = Vec::new();
        for (m, n) in SIZES.into_iter().flat_map(|m| SIZES.map(|n| (m, n))) {
            for k in SIZES {
                let turns = [(false, false), (false, true), (true, false), (true, true)];
                cases.extend(turns.map(|turns| Case::plain(LibraryCall::plain(dtype), (m, n, k), turns)));
            }
        }
        try_all(&gpu, &format!("{dtype}"), cases, Executor::Library);
    }
}

#[test]
fn every_epilogue_in_every_type() {
    let Some(gpu) = Gpu::new() else { return };
    for kernel in kernels() {
        let sizes = [(1, 129, 127), (129, 127, 1500), (127, 1500, 1), (256, 3072, 768), (1500, 768, 129), (5, 1, 64)];
        let cases = sizes
            .into_iter()
            .flat_map(|size| [(false, false), (false, true)].map(|turns| Case::plain(kernel, size, turns)));
        try_all(&gpu, &format!("{}{}", kernel.dtype, kernel.epilogue.name()), cases, Executor::Library);
    }
}

fn batched(kernel: LibraryCall) -> Vec<Case> {
    let (m, n, k) = (33, 40, 17);
    let shape = |batch: Vec<[usize; 4]>| MatmulShape { m, n, k, batch, a: (k, 1), b: (n, 1), c: (n, 1) };
    let (a, b, c) = (m * k, k * n, m * n);
    let mut cases = vec![
        Case::new(kernel, shape(vec![[5, a, b, c]])),
        // Axes that are one, an operand that repeats, an axis that repeats in one operand.
        Case::new(kernel, shape(vec![[2, 3 * a, 3 * b, 3 * c], [3, a, b, c]])),
        Case::new(kernel, shape(vec![[6, a, 0, c]])),
        Case::new(kernel, shape(vec![[6, 0, b, c]])),
        Case::new(kernel, shape(vec![[2, a, 0, 3 * c], [3, 0, b, c]])),
        // Three axes of which none follows another.
        Case::new(kernel, shape(vec![[2, a, 6 * b, 6 * c], [3, 2 * a, 2 * b, c], [2, 6 * a, b, 3 * c]])),
    ];
    // Heads that lie side by side in rows of a fused projection: q k^T and its product with v.
    let (heads, width, tokens, batch) = (4, 16, 37, 3);
    let row = 3 * heads * width;
    let scores = heads * tokens * tokens;
    let axes = vec![[batch, tokens * row, tokens * row, scores], [heads, width, width, tokens * tokens]];
    let shape = MatmulShape { m: tokens, n: tokens, k: width, batch: axes, a: (row, 1), b: (1, row), c: (tokens, 1) };
    let mut case = Case::new(kernel, shape);
    case.offsets[1] = heads * width;
    cases.push(case);
    let axes =
        vec![[batch, scores, tokens * row, tokens * heads * width], [heads, tokens * tokens, width, tokens * width]];
    let shape = MatmulShape { m: tokens, n: width, k: tokens, batch: axes, a: (tokens, 1), b: (row, 1), c: (width, 1) };
    let mut case = Case::new(kernel, shape);
    case.offsets[1] = 2 * heads * width;
    cases.push(case);
    cases
}

#[test]
fn batches_of_several_axes() {
    let Some(gpu) = Gpu::new() else { return };
    for kernel in kernels() {
        let what = format!("batches, {}{}", kernel.dtype, kernel.epilogue.name());
        try_all(&gpu, &what, batched(kernel), Executor::Library);
        try_all(&gpu, &what, batched(kernel), Executor::Ours);
    }
}

#[test]
fn rows_that_lie_apart_and_operands_that_start_anywhere() {
    let Some(gpu) = Gpu::new() else { return };
    for kernel in kernels() {
        let mut cases = Vec::new();
        for offset in [0, 1, 3, 4, 8] {
            for gap in [0, 1, 8] {
                let (m, n, k) = (70, 72, 64);
                let shape = MatmulShape { m, n, k, batch: vec![], a: (k + gap, 1), b: (1, k + gap), c: (n + gap, 1) };
                let mut case = Case::new(kernel, shape);
                for (position, operand) in kernel.operands().iter().enumerate() {
                    // A bias of the library starts at a multiple of 16 bytes.
                    case.offsets[position] = offset * if *operand == Operand::Bias { 8 } else { position };
                }
                cases.push(case);
            }
        }
        try_all(&gpu, &format!("apart, {}{}", kernel.dtype, kernel.epilogue.name()), cases, Executor::Library);
    }
}

#[test]
fn our_kernel_takes_what_the_library_does_not() {
    let Some(gpu) = Gpu::new() else { return };
    for kernel in kernels() {
        let (m, n, k) = (65, 67, 19);
        let shape = MatmulShape { m, n, k, batch: vec![], a: (k, 1), b: (n, 1), c: (n, 1) };
        let cases = [
            // Nothing to sum, no contiguous axis, rows that repeat, a result that lies column by column.
            MatmulShape { k: 0, ..shape.clone() },
            MatmulShape { a: (2 * k + 3, 2), ..shape.clone() },
            MatmulShape { b: (0, 1), ..shape.clone() },
            MatmulShape { b: (3, 3 * k), ..shape.clone() },
            MatmulShape { c: (1, m + 1), ..shape.clone() },
        ];
        let mut cases: Vec<Case> = cases.into_iter().map(|shape| Case::new(kernel, shape)).collect();
        if let Some(bias) = kernel.operands().iter().position(|&operand| operand == Operand::Bias) {
            let mut misplaced = Case::new(kernel, shape);
            misplaced.offsets[bias] = 1;
            cases.push(misplaced);
        }
        for case in &cases {
            let prepared = gpu.library.prepare(&case.kernel, &case.shape, &case.offsets).unwrap();
            assert!(prepared.is_none(), "{case:?}");
        }
        let what = format!("ours, {}{}", kernel.dtype, kernel.epilogue.name());
        try_all(&gpu, &what, cases, Executor::Ours);
        let sizes = [(1, 129, 127), (129, 127, 300), (127, 500, 1), (64, 64, 64), (5, 1, 64)];
        let turned = sizes.into_iter().flat_map(|size| {
            [(false, false), (false, true), (true, false), (true, true)].map(|turns| Case::plain(kernel, size, turns))
        });
        try_all(&gpu, &what, turned, Executor::Ours);
    }
}

#[test]
fn nothing_to_write_launches_nothing() {
    let Some(gpu) = Gpu::new() else { return };
    let _entered = gpu.context.enter().unwrap();
    for (m, n, batch) in [(0, 3, vec![]), (3, 0, vec![]), (3, 3, vec![[0, 9, 9, 9]])] {
        let shape = MatmulShape { m, n, k: 3, batch, a: (3, 1), b: (3, 1), c: (3, 1) };
        let prepared = gpu.library.prepare(&LibraryCall::plain(Dtype::F32), &shape, &[0, 0, 0]).unwrap().unwrap();
        assert_eq!(prepared.workspace(), 0);
        // SAFETY: with nothing to write, no address is used.
        unsafe { prepared.launch(gpu.stream.handle(), &[0, 0, 0], 0).unwrap() };
        gpu.stream.wait().unwrap();
    }
}

#[test]
fn a_recording_gives_the_same_bits_and_a_plan_is_made_once() {
    let Some(gpu) = Gpu::new() else { return };
    let _entered = gpu.context.enter().unwrap();
    for kernel in kernels() {
        // Several calls of the library in one product.
        let case = batched(kernel).swap_remove(6);
        let host = case.host();
        if gpu.library.prepare(&case.kernel, &case.shape, &case.offsets).unwrap().is_none() {
            say(&format!("not recorded, left to our kernel: {case:?}"));
            continue;
        }
        let expected = case.run(&gpu, &host, Executor::Library);
        let planned = super::locked(&gpu.library.plans).len();
        let c = case.kernel.operands().len() - 1;
        let mut memory: Vec<Allocation> =
            host.values[..c].iter().map(|values| gpu.upload(&encode(kernel.dtype, values))).collect();
        memory.push(gpu.upload(&vec![0xff; case.length(c) * kernel.dtype.bytes()]));
        let addresses: Vec<u64> = memory.iter().map(Allocation::address).collect();
        let prepared = case.prepared(&gpu);
        let scratch = gpu.upload(&vec![0xff; prepared.workspace().max(1)]);
        let enqueue = || {
            // SAFETY: all memory lives until `download` has waited for the replay.
            unsafe { prepared.launch(gpu.stream.handle(), &addresses, scratch.address()) }
        };
        let mut recording = Recording::new(&gpu.context, &gpu.stream, None, enqueue).unwrap();
        for _ in 0..3 {
            memory[c].fill(0xff, &gpu.stream).unwrap();
            recording.replay(&gpu.stream).unwrap();
            assert!(gpu.download(&memory[c]) == expected, "{kernel:?}");
        }
        assert_eq!(super::locked(&gpu.library.plans).len(), planned, "planned again");
    }
}

#[test]
fn large_products_are_the_same_bits_every_time() {
    let Some(gpu) = Gpu::new() else { return };
    let _entered = gpu.context.enter().unwrap();
    // Long inner axes are what a library likes to split.
    for (m, n, k) in [(64, 64, 65536), (8, 768, 50257), (1024, 3072, 768), (1, 50257, 768)] {
        for dtype in DTYPES {
            let case = Case::plain(LibraryCall::plain(dtype), (m, n, k), (false, true));
            let host = case.host();
            let first = case.run(&gpu, &host, Executor::Library);
            let worst = case.check(&host, &first, Executor::Library);
            for _ in 0..10 {
                assert!(case.run(&gpu, &host, Executor::Library) == first, "other bits: {case:?}");
            }
            let workspace = case.prepared(&gpu).workspace();
            say(&format!("{dtype} {m}x{n}x{k}: {:.0} % of the bound, {workspace} bytes of scratch", 100.0 * worst));
        }
    }
}

#[test]
fn our_kernel_compiles_for_every_architecture() {
    let Some(compiler) = compiler() else { return };
    for arch in [Arch::Sm75, Arch::Sm80, Arch::Sm89, Arch::Sm90a] {
        let last =
            |kernel: &LibraryCall| matches!(kernel.epilogue, LibraryEpilogue::BiasGelu | LibraryEpilogue::BiasResidual);
        for kernel in kernels().filter(last).chain([LibraryCall::plain(Dtype::I8)]) {
            let cubins = compile(&compiler, None, arch.name(), &[&plain::source(&kernel)]);
            let cubins = cubins.unwrap_or_else(|error| panic!("{error}"));
            let usage = cubins[0].entry("product").unwrap_or_else(|| panic!("{arch}: {:?}", cubins[0].entries));
            assert_eq!((usage.spill_stores, usage.spill_loads, usage.stack), (0, 0, 0), "{arch} {kernel:?}: {usage:?}");
        }
    }
}

#[test]
fn alignment_is_that_of_the_worst_call() {
    let kernel = |epilogue| LibraryCall { dtype: Dtype::Bf16, epilogue };
    let starts = [[0, 0, 0], [24, 4, 64]];
    assert_eq!(super::alignment(&kernel(LibraryEpilogue::None), &[0, 0, 0], &starts), [16, 8, 16, 16]);
    assert_eq!(super::alignment(&kernel(LibraryEpilogue::None), &[8, 1, 2], &starts), [16, 2, 4, 4]);
    // A residual counts for itself.
    assert_eq!(super::alignment(&kernel(LibraryEpilogue::BiasResidual), &[0, 0, 0, 1, 0], &starts), [16, 8, 2, 16]);
    let wide = LibraryCall::plain(Dtype::F32);
    assert_eq!(super::alignment(&wide, &[1, 2, 4], &[[0, 0, 0]]), [4, 8, 16, 16]);
}
