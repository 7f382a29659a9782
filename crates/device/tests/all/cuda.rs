//! The CUDA device itself: copies, scatters, recordings, borrowed streams, failures. Needs a GPU; says so and passes where
//! there is none.

mod workspace;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::gpu;
use cudarc::driver::CudaContext;
use deuteron_codegen::{ArgBinding, Kernel, Source};
use deuteron_device::{
    BorrowedMemory, Buffer, CompiledKernel, Cpu, Cuda, CudaError, Device, DeviceError, DeviceMemory, Executable,
    Inputs, Job, Launching, Memory, NoStates, Place, Recorded, Span, Step,
};
use deuteron_graph::{Dtype, Graph, NodeId};
use deuteron_kernels::copy::{self, Copy};
use deuteron_kernels::scatter;
use deuteron_kernels::{Backend, CpuCatalog, Piece, render};
use deuteron_plan::{Machine, Strategy, Target, plan};

/// Something to call a buffer by.
fn node() -> NodeId {
    Graph::new("test").input("x", Dtype::F32, [1]).unwrap()
}

fn arg(dtype: Dtype, written: bool, offset: usize) -> ArgBinding {
    ArgBinding { base: node(), dtype, written, offset, leading: Vec::new(), table_rows: 0 }
}

fn host(bytes: &[u8]) -> Memory {
    let mut buffer = Buffer::new(bytes.len()).unwrap();
    buffer.bytes_mut().copy_from_slice(bytes);
    Memory::Host(buffer)
}

/// Bytes that look random and are the same each time.
fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..count).map(step).collect()
}

fn read(executable: &dyn Executable, index: usize, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    executable.read(index, &mut read).unwrap();
    read
}

fn compiled(device: &dyn Device, source: Source) -> Arc<CompiledKernel> {
    device.compile(vec![source]).unwrap().swap_remove(0)
}

/// One step of a kernel.
fn step(device: &dyn Device, kernel: Kernel, places: Vec<Place>) -> Step {
    Step { kernel: compiled(device, kernel.source), launch: kernel.launch, places }
}

/// The only kernel of a graph on a CPU.
fn cpu_kernel(text: &str) -> Kernel {
    let graph: Graph = text.parse().unwrap();
    let target = Target { machine: &Machine::cpu(), catalog: &CpuCatalog };
    let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
    let [group] = plan.groups.as_slice() else { panic!("not one kernel: {plan}") };
    render(group.draft(&graph, &plan.placement), &Backend::Cpu).unwrap()
}

// Copies.

fn integer(bytes: usize) -> Dtype {
    match bytes {
        1 => Dtype::I8,
        2 => Dtype::F16,
        _ => Dtype::F32,
    }
}

fn contiguous(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis];
    }
    strides
}

/// A piece into a contiguous block.
fn piece(source: usize, dims: &[usize], from: &[usize], from_offset: usize, to_offset: usize) -> Piece {
    Piece { source, dims: dims.to_vec(), from: from.to_vec(), from_offset, to: contiguous(dims), to_offset }
}

fn reach(dims: &[usize], strides: &[usize], offset: usize) -> usize {
    if dims.contains(&0) {
        return 0;
    }
    offset + dims.iter().zip(strides).map(|(&size, &stride)| (size - 1) * stride).sum::<usize>() + 1
}

/// Elements that each source and the destination must have.
fn sizes(pieces: &[Piece], sources: usize) -> (Vec<usize>, usize) {
    let mut from = vec![1; sources];
    let mut to = 1;
    for piece in pieces {
        from[piece.source] = from[piece.source].max(reach(&piece.dims, &piece.from, piece.from_offset));
        to = to.max(reach(&piece.dims, &piece.to, piece.to_offset));
    }
    (from, to)
}

/// What a copy must leave, over bytes of ones.
fn copied(element: usize, pieces: &[Piece], sources: &[Vec<u8>], length: usize) -> Vec<u8> {
    let mut result = vec![0xFF; length];
    for piece in pieces {
        let count: usize = piece.dims.iter().product();
        for flat in 0..count {
            let (mut rest, mut from, mut to) = (flat, piece.from_offset, piece.to_offset);
            for axis in (0..piece.dims.len()).rev() {
                let index = rest % piece.dims[axis];
                rest /= piece.dims[axis];
                from += index * piece.from[axis];
                to += index * piece.to[axis];
            }
            let value = &sources[piece.source][from * element..][..element];
            result[to * element..][..element].copy_from_slice(value);
        }
    }
    result
}

fn copy_job(device: &dyn Device, element: usize, pieces: &[Piece], sources: usize) -> Job {
    let (_, to) = sizes(pieces, sources);
    let mut args: Vec<ArgBinding> = (0..sources).map(|_| arg(integer(element), false, 0)).collect();
    args.push(arg(integer(element), true, 0));
    let places = (0..sources).map(Place::Input).chain([Place::Output(0)]).collect();
    let kernel = copy::cuda::kernel(&Copy { element, args, pieces: pieces.to_vec() });
    Job {
        steps: vec![step(device, kernel, places)],
        inputs: sources,
        states: vec![],
        outputs: vec![to * element],
        arena: 0,
    }
}

fn check_copy(device: &Cuda, name: &str, element: usize, pieces: &[Piece]) {
    let sources = pieces.iter().map(|piece| piece.source + 1).max().unwrap_or(1);
    let (from, to) = sizes(pieces, sources);
    let data: Vec<Vec<u8>> = from.iter().enumerate().map(|(i, &n)| bytes(n * element, 7 + i as u64)).collect();
    let expected = copied(element, pieces, &data, to * element);
    let mut executable = device.load(copy_job(device, element, pieces, sources)).unwrap();
    let on_host: Vec<Memory> = data.iter().map(|data| host(data)).collect();
    let on_device: Vec<Memory> = data.iter().map(|data| device.upload(data).unwrap()).collect();
    for (inputs, launching) in
        [(&on_host, Launching::Eager), (&on_device, Launching::Eager), (&on_device, Launching::Graph)]
    {
        executable.poison().unwrap();
        executable
            .run(&|index| &inputs[index], &mut NoStates, launching)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let got = read(&*executable, 0, to * element);
        let first = got.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(first, None, "{name}, elements of {element} bytes, {launching:?}");
    }
}

#[test]
fn copies_of_every_kind_move_every_element() {
    let Some(device) = gpu(true) else { return };
    for element in [1, 2, 4] {
        let check = |name: &str, pieces: &[Piece]| check_copy(&device, name, element, pieces);
        for count in [1, 3, 127, 1024, 16_383, 16_384, 16_385, 100_003, 3 << 20] {
            check(&format!("{count} in a row"), &[piece(0, &[count], &[1], 0, 0)]);
        }
        for (from, to) in [(1, 0), (0, 1), (3, 5), (8, 8), (16, 3)] {
            check("shifted", &[piece(0, &[5001], &[1], from, to)]);
        }
        check("heads merged", &[piece(0, &[2, 37, 12, 64], &[37 * 768, 64, 37 * 64, 1], 0, 0)]);
        check("heads of odd size", &[piece(0, &[2, 5, 3, 33], &[5 * 99, 33, 5 * 33, 1], 0, 0)]);
        check("wide rows with gaps", &[piece(0, &[9, 40_000], &[50_000, 1], 16, 0)]);
        check("rows with gaps at odd places", &[piece(0, &[9, 12_345], &[12_347, 1], 1, 0)]);
        for (rows, cols) in [(64, 64), (63, 65), (1, 70), (70, 1), (8, 8), (7, 300), (513, 129)] {
            check("transposed", &[piece(0, &[3, cols, rows], &[rows * cols, 1, cols], 0, 0)]);
        }
        check("transposed with axes between", &[piece(0, &[20, 3, 30], &[1, 20 * 30, 20], 4, 2)]);
        check("one row repeated", &[piece(0, &[50, 300], &[0, 1], 0, 0)]);
        check("each element repeated", &[piece(0, &[300, 50], &[1, 0], 0, 0)]);
        check("every second element", &[piece(0, &[77, 45], &[200, 2], 1, 0)]);
        check("one element", &[piece(0, &[], &[], 3, 0)]);
        check("eight axes", &[piece(0, &[2, 3, 2, 3, 2, 3, 2, 3], &[1, 2, 6, 12, 36, 72, 216, 432], 0, 0)]);
        check("nothing", &[piece(0, &[4, 0, 3], &[3, 3, 1], 0, 0)]);
        // Concatenations: along the first and along the last axis.
        let first = piece(0, &[10, 64], &[64, 1], 0, 0);
        check("one below the other", &[first.clone(), piece(1, &[7, 64], &[64, 1], 0, 640)]);
        let beside =
            |source, cols, offset| Piece { to: vec![100, 1], ..piece(source, &[33, cols], &[cols, 1], 0, offset) };
        check("side by side", &[beside(0, 37, 0), beside(1, 63, 37)]);
        check("the same source twice", &[first, piece(0, &[10, 64], &[64, 1], 0, 640)]);
    }
}

/// Device memory that starts inside of another.
#[derive(Debug)]
struct Shifted {
    inner: Memory,
    by: usize,
}

impl DeviceMemory for Shifted {
    fn len(&self) -> usize {
        self.inner.len() - self.by
    }

    fn address(&self) -> u64 {
        span(&self.inner).address + self.by as u64
    }

    fn read(&self, _: &mut [u8]) -> Result<(), DeviceError> {
        unreachable!("nobody reads it")
    }
}

fn span(memory: &Memory) -> Span {
    match memory {
        Memory::Device(memory) => Span { address: memory.address(), bytes: memory.len() },
        Memory::Host(_) => panic!("expected device memory"),
    }
}

fn downloaded(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    match memory {
        Memory::Device(memory) => memory.read(&mut bytes).unwrap(),
        Memory::Host(_) => panic!("expected device memory"),
    }
    bytes
}

#[test]
fn an_input_may_start_anywhere() {
    let Some(device) = gpu(true) else { return };
    let pieces = [piece(0, &[100, 33], &[40, 1], 0, 0)];
    let data = bytes(4 * 4000, 3);
    for by in [1, 2, 4, 8, 12, 16] {
        let mut executable = device.load(copy_job(&device, 4, &pieces, 1)).unwrap();
        let memory = Memory::Device(Box::new(Shifted { inner: device.upload(&data).unwrap(), by }));
        executable.poison().unwrap();
        executable.run(&|_| &memory, &mut NoStates, Launching::Eager).unwrap();
        let expected = copied(4, &pieces, &[data[by..].to_vec()], 100 * 33 * 4);
        assert_eq!(read(&*executable, 0, 100 * 33 * 4), expected, "shifted by {by}");
    }
}

// Scatters.

struct Scatter {
    dtype: Dtype,
    cols: usize,
    rows: usize,
    indices: Vec<i32>,
    updates: Vec<u8>,
}

impl Scatter {
    fn new(dtype: Dtype, count: usize, cols: usize, rows: usize, pick: impl Fn(u64) -> u64) -> Scatter {
        let random = bytes(8 * count, 11);
        let word = |i: usize| u64::from_le_bytes(random[8 * i..][..8].try_into().unwrap());
        let indices = (0..count).map(|i| (pick(word(i)) % rows.max(1) as u64) as i32).collect();
        let noise = bytes(2 * count * cols, 12);
        let value = |i: usize| (f32::from(noise[2 * i]) - 127.5) * f32::from(noise[2 * i + 1]) / 1000.0;
        let values = (0..count * cols).map(value);
        let updates = match dtype {
            Dtype::F16 => values.flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect(),
            Dtype::Bf16 => values.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect(),
            _ => values.flat_map(f32::to_le_bytes).collect(),
        };
        Scatter { dtype, cols, rows, indices, updates }
    }

    fn table_bytes(&self) -> usize {
        self.rows * self.cols * self.dtype.bytes()
    }

    fn job(&self, device: &dyn Device, kernel: Kernel) -> Job {
        let places = vec![Place::Input(0), Place::Input(1), Place::Output(0)];
        let steps = vec![step(device, kernel, places)];
        Job { steps, inputs: 2, states: vec![], outputs: vec![self.table_bytes()], arena: 0 }
    }

    fn cpu_kernel(&self) -> Kernel {
        let (count, Scatter { dtype, cols, rows, .. }) = (self.indices.len(), self);
        cpu_kernel(&format!(
            "i = input i32[{count}] ; u = input {dtype}[{count},{cols}] ; y = scatter_add i u rows={rows} ; out y"
        ))
    }

    fn gpu_kernel(&self) -> Kernel {
        scatter::cuda::kernel(&scatter::Scatter {
            dtype: self.dtype,
            args: [arg(Dtype::I32, false, 0), arg(self.dtype, false, 0), arg(self.dtype, true, 0)],
            count: self.indices.len(),
            cols: self.cols,
            rows: self.rows,
        })
    }

    fn inputs(&self) -> [Memory; 2] {
        let indices: Vec<u8> = self.indices.iter().flat_map(|index| index.to_le_bytes()).collect();
        [host(&indices), host(&self.updates)]
    }

    fn on_cpu(&self) -> Result<Vec<u8>, DeviceError> {
        let cpu = Cpu::new();
        let mut executable = cpu.load(self.job(&cpu, self.cpu_kernel()))?;
        let inputs = self.inputs();
        executable.run(&|index| &inputs[index], &mut NoStates, Launching::Eager)?;
        Ok(read(&*executable, 0, self.table_bytes()))
    }

    fn on_gpu(&self, device: &Cuda, runs: usize) -> Result<Vec<Vec<u8>>, DeviceError> {
        let mut executable = device.load(self.job(device, self.gpu_kernel()))?;
        let inputs = self.inputs();
        let mut results = Vec::new();
        for run in 0..runs {
            let launching = if run % 2 == 0 { Launching::Eager } else { Launching::Graph };
            executable.poison()?;
            executable.run(&|index| &inputs[index], &mut NoStates, launching)?;
            results.push(read(&*executable, 0, self.table_bytes()));
        }
        Ok(results)
    }
}

#[test]
fn scatters_give_the_bits_of_the_cpu_on_every_run() {
    let Some(device) = gpu(true) else { return };
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let shapes = [
            (1, 1, 1),
            (5, 7, 3),
            (1000, 768, 5000),
            (8192, 64, 100),
            (8193, 64, 100),
            (20_000, 33, 1024),
            (70_000, 8, 64),
            (300, 1025, 40),
            (64, 257, 1),
            (0, 16, 9),
        ];
        for (count, cols, rows) in shapes {
            let spread = Scatter::new(dtype, count, cols, rows, |word| word);
            // Most positions in a few rows.
            let crowded =
                Scatter::new(dtype, count, cols, rows, |word| if word % 4 == 0 { word >> 8 } else { word % 3 });
            let one = Scatter::new(dtype, count, cols, rows, |_| rows as u64 - 1);
            for (name, scatter) in [("spread", spread), ("crowded", crowded), ("one row", one)] {
                let expected = scatter.on_cpu().unwrap();
                for (run, got) in scatter.on_gpu(&device, 3).unwrap().iter().enumerate() {
                    let wrong = got.iter().zip(&expected).position(|(a, b)| a != b);
                    assert_eq!(wrong, None, "{name}, {dtype}, {count} of {cols} into {rows}, run {run}");
                }
            }
        }
    }
}

#[test]
fn an_index_outside_of_its_table_is_the_error_of_the_cpu_and_does_no_harm() {
    let Some(device) = gpu(true) else { return };
    for (count, at, index) in [(10, 3, 100), (10, 9, -1), (9000, 8500, i32::MAX), (1, 0, 40)] {
        let mut scatter = Scatter::new(Dtype::F32, count, 20, 40, |word| word);
        scatter.indices[at] = index;
        if count > 5 {
            scatter.indices[at.max(4)] = index;
        }
        let (expected, got) = (scatter.on_cpu().unwrap_err(), scatter.on_gpu(&device, 1).unwrap_err());
        assert_eq!(got, expected);
        let mut executable = device.load(scatter.job(&device, scatter.gpu_kernel())).unwrap();
        let inputs = scatter.inputs();
        for launching in [Launching::Eager, Launching::Graph, Launching::Graph] {
            assert_eq!(
                executable.run(&|index| &inputs[index], &mut NoStates, launching).unwrap_err(),
                expected,
                "{launching:?}"
            );
        }
        // The next run of the same executable, with indices that are right, is right.
        scatter.indices.iter_mut().for_each(|index| *index = 0);
        let inputs = scatter.inputs();
        executable.run(&|index| &inputs[index], &mut NoStates, Launching::Graph).unwrap();
        assert_eq!(read(&*executable, 0, scatter.table_bytes()), scatter.on_cpu().unwrap());
    }
}

// Jobs of several steps.

/// Three copies, one after another, through two ranges of the arena: a transpose there and back.
fn chain(device: &dyn Device, rows: usize, cols: usize) -> Job {
    let bytes = 2 * rows * cols;
    let second = bytes.next_multiple_of(256);
    let step = |piece: Piece, from: Place, to: Place| {
        let args = vec![arg(Dtype::F16, false, 0), arg(Dtype::F16, true, 0)];
        step(device, copy::cuda::kernel(&Copy { element: 2, args, pieces: vec![piece] }), vec![from, to])
    };
    let [a, b] = [0, second].map(|offset| Place::Arena { offset, bytes });
    let steps = vec![
        step(piece(0, &[cols, rows], &[1, cols], 0, 0), Place::Input(0), a),
        step(piece(0, &[rows * cols], &[1], 0, 0), a, b),
        step(piece(0, &[rows, cols], &[1, rows], 0, 0), b, Place::Output(0)),
    ];
    Job { steps, inputs: 1, states: vec![], outputs: vec![bytes], arena: second + bytes }
}

#[test]
fn recordings_follow_their_inputs() {
    for red_zones in [false, true] {
        let Some(device) = gpu(red_zones) else { return };
        let mut executable = device.load(chain(&device, 130, 77)).unwrap();
        let data: Vec<Vec<u8>> = (0..4).map(|seed| bytes(130 * 77 * 2, seed)).collect();
        let inputs: Vec<Memory> = data.iter().map(|data| device.upload(data).unwrap()).collect();
        let on_host = host(&data[3]);
        for launching in [Launching::Graph, Launching::Eager, Launching::Graph] {
            for (input, data) in inputs.iter().zip(&data).chain([(&on_host, &data[3])]) {
                executable.poison().unwrap();
                executable.run(&|_| input, &mut NoStates, launching).unwrap();
                assert_eq!(&read(&*executable, 0, data.len()), data, "{launching:?}");
            }
        }
    }
}

#[test]
fn the_driver_counts_what_is_recorded() {
    let Some(device) = gpu(false) else { return };
    let data = bytes(130 * 77 * 2, 1);
    let inputs: Vec<Memory> = (0..2).map(|_| device.upload(&data).unwrap()).collect();
    let three = Some(Recorded { kernels: 3, others: 0 });
    let mut executable = device.load(chain(&device, 130, 77)).unwrap();
    // The first run is launched one by one, whatever is asked for, and so is what is asked to be.
    for launching in [Launching::Graph, Launching::Eager] {
        executable.run(&|_| &inputs[0], &mut NoStates, launching).unwrap();
        assert_eq!(executable.recorded().unwrap(), None, "{launching:?}");
    }
    // A new recording, the same again, and one that is changed for another input.
    for input in [&inputs[0], &inputs[0], &inputs[1]] {
        executable.run(&|_| input, &mut NoStates, Launching::Graph).unwrap();
        assert_eq!(executable.recorded().unwrap(), three);
    }
    // A recording of several runs counts as one of them.
    let mut executable = device.load(chain(&device, 130, 77)).unwrap();
    let sources: Vec<_> = inputs.iter().map(|memory| move |_: usize| memory).collect();
    let sets: Vec<Inputs> = sources.iter().map(|source| source as Inputs).collect();
    executable.time(&sets, &mut NoStates, 4, Launching::Graph).unwrap();
    assert_eq!(executable.recorded().unwrap(), three);
}

#[test]
fn timings_cover_every_step_and_every_set() {
    let Some(device) = gpu(false) else { return };
    let (rows, cols) = (4096, 1024);
    let mut executable = device.load(chain(&device, rows, cols)).unwrap();
    let data = bytes(rows * cols * 2, 5);
    let memory: Vec<Memory> = (0..3).map(|_| device.upload(&data).unwrap()).chain([host(&data)]).collect();
    let mut times = [Duration::ZERO; 3];
    executable.run_timed(&|_| &memory[0], &mut NoStates, &mut times).unwrap();
    assert!(times.iter().all(|time| *time > Duration::ZERO && *time < Duration::from_millis(10)), "{times:?}");
    let sources: Vec<_> = memory.iter().map(|memory| move |_: usize| memory).collect();
    let sets: Vec<Inputs> = sources.iter().map(|source| source as Inputs).collect();
    for launching in [Launching::Eager, Launching::Graph, Launching::Graph] {
        let time = executable.time(&sets, &mut NoStates, 100, launching).unwrap();
        println!("{launching:?}: {time:?} a run, steps {times:?}");
        assert!(time > Duration::from_micros(3) && time < Duration::from_millis(10), "{time:?}");
        assert_eq!(read(&*executable, 0, data.len()), data);
    }
    assert_eq!(executable.time(&[], &mut NoStates, 5, Launching::Graph).unwrap(), Duration::ZERO);
}

#[test]
fn a_launch_costs_the_host_little() {
    let Some(device) = gpu(false) else { return };
    let launches = 200;
    let mut job = copy_job(&device, 4, &[piece(0, &[64], &[1], 0, 0)], 1);
    job.steps = vec![job.steps[0].clone(); launches];
    let mut executable = device.load(job).unwrap();
    let memory = device.upload(&bytes(256, 1)).unwrap();
    for launching in [Launching::Eager, Launching::Graph] {
        for _ in 0..3 {
            executable.run(&|_| &memory, &mut NoStates, launching).unwrap();
        }
        let start = Instant::now();
        for _ in 0..20 {
            executable.run(&|_| &memory, &mut NoStates, launching).unwrap();
        }
        println!("{launching:?}: {:?} a launch, waiting included", start.elapsed() / (20 * launches as u32));
    }
}

/// A context of someone else. It must not synchronise itself at its first stream, which would end captures of other tests.
fn outside() -> Arc<CudaContext> {
    let context = CudaContext::new(0).unwrap();
    // SAFETY: tests order their streams themselves.
    unsafe { context.disable_event_tracking() };
    context
}

#[test]
fn a_stream_of_someone_else_is_used_as_it_is() {
    let Some(device) = gpu(true) else { return };
    let data = [bytes(130 * 77 * 2, 21), bytes(130 * 77 * 2, 22)];
    let inputs = data.each_ref().map(|data| device.upload(data).unwrap());
    let mut executable = device.executable(chain(&device, 130, 77)).unwrap();
    let context = outside();
    let streams = [context.new_stream().unwrap(), context.new_stream().unwrap()];
    let handles = [0, streams[0].cu_stream() as u64, streams[1].cu_stream() as u64, 0];
    let mut results = Vec::new();
    for (round, handle) in handles.into_iter().cycle().take(12).enumerate() {
        let result = device.upload(&vec![0; data[0].len()]).unwrap();
        let (given, taken) = ([span(&inputs[round % 2])], [span(&result)]);
        // SAFETY: the streams live to the end of the test, and so do the inputs and the results.
        executable.run_borrowed(unsafe { BorrowedMemory::new(&given, &[], &taken, handle) }).unwrap();
        if round % 3 == 0 {
            executable.finish().unwrap();
        }
        results.push(result);
    }
    executable.finish().unwrap();
    for (round, result) in results.iter().enumerate() {
        assert_eq!(downloaded(result), data[round % 2], "round {round}");
    }
    // Our own stream goes on after theirs.
    executable.run(&|_| &inputs[0], &mut NoStates, Launching::Eager).unwrap();
    assert_eq!(read(&executable, 0, data[0].len()), data[0]);
    let output = executable.output(0).unwrap();
    assert_eq!((output.bytes, output.address % 256), (data[0].len(), 0));
}

#[test]
fn a_run_may_be_part_of_a_recording_of_someone_else() {
    use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode_enum};
    let Some(device) = gpu(false) else { return };
    let data = bytes(130 * 77 * 2, 31);
    let input = device.upload(&data).unwrap();
    let mut executable = device.executable(chain(&device, 130, 77)).unwrap();
    executable.run(&|_| &input, &mut NoStates, Launching::Eager).unwrap();
    let context = outside();
    let stream = context.new_stream().unwrap();
    let result = device.upload(&vec![0; data.len()]).unwrap();
    stream.begin_capture(CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let (given, taken) = ([span(&input)], [span(&result)]);
    // SAFETY: the stream, the input and the result live to the end of the test.
    executable.run_borrowed(unsafe { BorrowedMemory::new(&given, &[], &taken, stream.cu_stream() as u64) }).unwrap();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("three kernels were recorded");
    executable.poison().unwrap();
    graph.launch().unwrap();
    stream.synchronize().unwrap();
    assert_eq!(downloaded(&result), data);
}

// Failures.

#[test]
fn inputs_that_kernels_cannot_read_are_refused() {
    let Some(device) = gpu(false) else { return };
    let mut executable = device.executable(chain(&device, 16, 16)).unwrap();
    let memory = device.upload(&bytes(512, 1)).unwrap();
    let good = span(&memory);
    let result = device.upload(&[0; 512]).unwrap();
    let taken = span(&result);
    let misplaced = |span: Span| DeviceError::OutputPlace {
        output: 0,
        expected: 512,
        alignment: 16,
        got: span.bytes,
        address: span.address,
    };
    let (short, shifted) = (Span { bytes: 511, ..taken }, Span { address: taken.address + 8, ..taken });
    let wrong = [
        (vec![], vec![taken], DeviceError::InputCount { expected: 1, got: 0 }),
        (vec![Span { bytes: 511, ..good }], vec![taken], DeviceError::InputSize { input: 0, expected: 512, got: 511 }),
        (
            vec![Span { address: good.address + 1, ..good }],
            vec![taken],
            DeviceError::InputAlignment { input: 0, bytes: 2 },
        ),
        (vec![good], vec![], DeviceError::OutputCount { expected: 1, got: 0 }),
        (vec![good], vec![short], misplaced(short)),
        (vec![good], vec![shifted], misplaced(shifted)),
    ];
    for (given, taken, expected) in wrong {
        // SAFETY: the default stream; each of these is refused before it is used.
        assert_eq!(executable.run_borrowed(unsafe { BorrowedMemory::new(&given, &[], &taken, 0) }), Err(expected));
    }
    let (given, taken) = ([good], [taken]);
    // SAFETY: as above, with memory that lives.
    executable.run_borrowed(unsafe { BorrowedMemory::new(&given, &[], &taken, 0) }).unwrap();
    executable.finish().unwrap();
    assert_eq!(downloaded(&result), bytes(512, 1));
    let short = host(&bytes(10, 1));
    let error = executable.run(&|_| &short, &mut NoStates, Launching::Eager).unwrap_err();
    assert_eq!(error, DeviceError::InputSize { input: 0, expected: 512, got: 10 });
}

#[test]
fn kernels_of_another_device_are_refused() {
    let Some(device) = gpu(false) else { return };
    let source = cpu_kernel("x = input f32[4] ; y = concat x x axis=0 ; out y").source;
    assert_eq!(device.compile(vec![source.clone()]).unwrap_err(), DeviceError::ForeignKernel { step: 0 });
    let cpu = Cpu::new();
    let job = copy_job(&device, 4, &[piece(0, &[8], &[1], 0, 0)], 1);
    assert_eq!(cpu.load(job.clone()).err(), Some(DeviceError::ForeignKernel { step: 0 }));
    let mut foreign = job;
    foreign.steps[0].kernel = compiled(&cpu, source);
    assert_eq!(device.load(foreign).err(), Some(DeviceError::ForeignKernel { step: 0 }));
}

#[test]
fn a_source_that_does_not_compile_is_an_error_with_its_log() {
    let Some(device) = gpu(false) else { return };
    let pieces = vec![piece(0, &[8], &[1], 0, 0)];
    let args = vec![arg(Dtype::F32, false, 0), arg(Dtype::F32, true, 0)];
    let right = copy::cuda::kernel(&Copy { element: 4, args, pieces }).source;
    let Source::Cuda(mut source) = right.clone() else { panic!("{right}") };
    source.text.push_str("\nextern \"C\" __global__ void broken() { undefined = 1; }\n");
    match device.compile(vec![Source::Cuda(source)]) {
        Err(DeviceError::Cuda(CudaError::Compile { log, .. })) => assert!(log.contains("undefined"), "{log}"),
        other => panic!("expected a compile error, got {other:?}"),
    }
    assert!(device.compile(vec![right]).is_ok());
}

#[test]
fn after_running_out_of_memory_a_smaller_call_works() {
    let Some(device) = gpu(false) else { return };
    let mut large = copy_job(&device, 4, &[piece(0, &[8], &[1], 0, 0)], 1);
    for bytes in [1 << 45, usize::MAX / 2, usize::MAX] {
        large.outputs = vec![bytes];
        // Outputs are allocated when something asks for them.
        match device.load(large.clone()).and_then(|mut loaded| loaded.poison()).err() {
            Some(DeviceError::Cuda(CudaError::OutOfMemory { .. })) => {}
            other => panic!("expected to run out of memory, got {other:?}"),
        }
    }
    check_copy(&device, "after running out of memory", 4, &[piece(0, &[1000], &[1], 0, 0)]);
}

// Memory and probes.

#[test]
fn what_is_uploaded_comes_back() {
    let Some(device) = gpu(false) else { return };
    for count in [0, 1, 5, 8 << 20, (8 << 20) + 1, 40_000_003] {
        let data = bytes(count, 9);
        let Memory::Device(memory) = device.upload(&data).unwrap() else { panic!("expected device memory") };
        let mut back = vec![0; count];
        memory.read(&mut back).unwrap();
        assert!(back == data, "{count} bytes");
    }
}

#[test]
fn copies_are_timed_both_ways() {
    let Some(device) = gpu(false) else { return };
    println!("{}", device.describe());
    for bytes in [1 << 20, 64 << 20, 256 << 20] {
        let mut probe = device.copy_probe(bytes).unwrap();
        assert_eq!(probe.bytes(), 2 * bytes);
        for _ in 0..2 {
            let (ordinary, streaming) = (probe.ordinary().unwrap(), probe.streaming().unwrap());
            let rate = |time: Duration| probe.bytes() as f64 / time.as_secs_f64() / 1e9;
            println!("{bytes} bytes: our kernel {:.0} GB/s, the driver {:.0} GB/s", rate(ordinary), rate(streaming));
            assert!(rate(ordinary) > 50.0 && rate(ordinary) < 50_000.0);
        }
    }
}

#[test]
fn several_threads_share_a_device() {
    let Some(device) = gpu(false) else { return };
    let device = &device;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                for round in 0..5 {
                    let name = format!("thread {thread}, round {round}");
                    check_copy(device, &name, 2, &[piece(0, &[3, 70, 65], &[70 * 65, 1, 70], 0, 0)]);
                }
            });
        }
    });
    assert_eq!(device.compiled(), 1);
}
