//! What all tests of attention do with a kernel: bind its arguments, load it, run it, time it.

use std::fmt::Debug;

use deuteron_attention::kernel::LoweredAttention;
use deuteron_attention::{AttentionKernel, AttentionOperand, AttentionShape};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{ArgBinding, Kernel, Source};
use deuteron_device::cuda::nvrtc::{Compiler, Cubin};
use deuteron_device::{Cuda, Device, Executable, Job, Launching, Memory, NoStates, Place, Step};
use deuteron_graph::{Dtype, Graph};
use deuteron_kernels::Backend;

use crate::support::attention::Numbers;
use crate::support::{compiled, gpu};

/// An argument of a launch: its type, whether it is written, and the element at which it starts.
pub fn argument(dtype: Dtype, written: bool, offset: usize) -> ArgBinding {
    let base = Graph::new("test").input("x", Dtype::F32, [1]).unwrap();
    ArgBinding { base, dtype, written, offset, leading: Vec::new(), table_rows: 0 }
}

/// Attention with its arguments.
pub fn lowered(
    kernel: &AttentionKernel,
    shape: AttentionShape,
    offsets: impl Fn(AttentionOperand) -> usize,
) -> LoweredAttention {
    let bound = |&operand: &AttentionOperand| {
        argument(kernel.operand_dtype(operand), operand == AttentionOperand::O, offsets(operand))
    };
    LoweredAttention { kernel: *kernel, shape, args: kernel.operands().iter().map(bound).collect() }
}

/// The text of a kernel does not depend on sizes.
pub const ANY_SIZES: [usize; 4] = [2, 12, 300, 300];

/// Compiles kernels, each of a variant for an architecture; one that spills registers and may not fails the test.
pub fn check_compiled<V: Debug>(
    compiler: &Compiler,
    kernels: &[(AttentionKernel, V, Arch)],
    render: impl Fn(&AttentionKernel, &V, &CudaTarget) -> Kernel,
    may_spill: impl Fn(&AttentionKernel, &V, u32) -> bool,
) -> Vec<Cubin> {
    let source = |(kernel, variant, arch): &(AttentionKernel, V, Arch)| {
        (text_of(render(kernel, variant, &CudaTarget::new(*arch, 132))), *arch)
    };
    let cubins = compiled(compiler, kernels.iter().map(source).collect());
    for ((kernel, variant, arch), cubin) in kernels.iter().zip(&cubins) {
        for entry in &cubin.entries {
            let (name, registers, spilled) = (&entry.name, entry.registers, entry.spill_stores + entry.spill_loads);
            println!("{variant:?} {kernel:?} {arch}: {name} takes {registers} registers, spills {spilled}");
            let holds = spilled == 0 || may_spill(kernel, variant, spilled);
            assert!(holds, "{variant:?} {kernel:?} for {arch}: {entry:?}");
        }
    }
    cubins
}

/// Checks kernels of a storage type where there is a GPU.
pub fn on_gpu(check: impl FnOnce(&Cuda, Dtype), dtype: Dtype) {
    if let Some(device) = gpu(true) {
        check(&device, dtype);
    }
}

/// The GPU, if it is a Hopper.
pub fn hopper() -> Option<Cuda> {
    let device = gpu(true)?;
    let Backend::Cuda(target) = device.backend() else { panic!("a GPU") };
    let is_one = target.arch.has_wgmma();
    if !is_one {
        println!("skipped, since this test needs a Hopper GPU: this one is {}", target.arch);
    }
    is_one.then_some(device)
}

/// What is compiled of a kernel.
pub fn text_of(kernel: Kernel) -> CudaSource {
    match kernel.source {
        Source::Cuda(source) => source,
        source => panic!("{source}"),
    }
}

/// What is added to scores: some keys are hidden, and there is a row that sees nothing.
pub fn added(numbers: &mut Numbers, [batch, queries, keys]: [usize; 3]) -> Vec<f32> {
    let hidden = |x: f32| if x > 1.5 { f32::NEG_INFINITY } else { x };
    let mut mask: Vec<f32> = numbers.take(batch * queries * keys, 1.0).into_iter().map(hidden).collect();
    let row = queries / 2 * keys;
    mask[row..row + keys].fill(f32::NEG_INFINITY);
    mask
}

/// What hides keys and is finite: the smallest `f32`, as models' masks have it, the smallest `bf16`, and what is far below all scores.
pub const HIDDEN: [f32; 3] = [f32::MIN, -3.389_531_4e38, -1e30];

/// Hides keys of rows, which take turns, by a finite number: all; the first, which are padding; all but the last; every second, of which the others are
/// `-inf`; all, some of them by less. Every sixth row stays.
pub fn hide(mask: &mut [f32], keys: usize, hidden: f32) {
    for (row, of_row) in mask.chunks_mut(keys).enumerate() {
        for (key, x) in of_row.iter_mut().enumerate() {
            match row % 6 {
                0 => *x = hidden,
                1 if key <= keys / 2 => *x = hidden,
                2 if key + 1 < keys => *x = hidden,
                3 => *x = if key % 2 == 0 { hidden } else { f32::NEG_INFINITY },
                4 => *x = if key % 2 == 0 { hidden } else { hidden / 4.0 },
                _ => {}
            }
        }
    }
}

/// A kernel made ready, whose arguments are its inputs and then its outputs of this many bytes.
pub fn loaded(
    device: &Cuda,
    kernel: Kernel,
    inputs: &[Vec<u8>],
    outputs: Vec<usize>,
) -> (Box<dyn Executable>, Vec<Memory>) {
    let Kernel { source, launch } = kernel;
    let kernel = device.compile(vec![source]).unwrap().swap_remove(0);
    let places = (0..inputs.len()).map(Place::Input).chain((0..outputs.len()).map(Place::Output)).collect();
    let steps = vec![Step { kernel, launch, places }];
    let job = Job { steps, inputs: inputs.len(), states: Vec::new(), outputs, arena: 0 };
    let executable = device.load(job).unwrap();
    (executable, inputs.iter().map(|bytes| device.upload(bytes).unwrap()).collect())
}

/// Runs it over poison, twice and once more as a graph: the outputs, whose bits must be the same.
pub fn outputs(executable: &mut dyn Executable, memory: &[Memory], sizes: &[usize]) -> Vec<Vec<u8>> {
    let mut results = [Launching::Eager, Launching::Eager, Launching::Graph].map(|launching| {
        executable.poison().unwrap();
        executable.run(&|index| &memory[index], &mut NoStates, launching).unwrap();
        let read = |(output, &bytes): (usize, &usize)| {
            let mut result = vec![0; bytes];
            executable.read(output, &mut result).unwrap();
            result
        };
        sizes.iter().enumerate().map(read).collect::<Vec<_>>()
    });
    assert!(results[0] == results[1] && results[1] == results[2], "other bits");
    std::mem::take(&mut results[0])
}

/// Microseconds of a run as a graph: the median of five times twenty.
pub fn microseconds(executable: &mut dyn Executable, memory: &[Memory]) -> f64 {
    let input = |index: usize| &memory[index];
    executable.run(&input, &mut NoStates, Launching::Eager).unwrap();
    let mut time = || executable.time(&[&input], &mut NoStates, 20, Launching::Graph).unwrap().as_secs_f64() * 1e6;
    let mut times = [(); 5].map(|()| time());
    times.sort_by(f64::total_cmp);
    times[2]
}

/// What belongs to one of this many sequences that lie one after another.
pub fn part<T>(values: &[T], batch: usize, index: usize) -> &[T] {
    let length = values.len() / batch;
    &values[index * length..][..length]
}

/// Whether numbers are the same, or both none.
pub fn same(left: &[f64], right: &[f64]) -> bool {
    let equal = |(left, right): (&f64, &f64)| left.to_bits() == right.to_bits() || (left.is_nan() && right.is_nan());
    left.len() == right.len() && left.iter().zip(right).all(equal)
}
