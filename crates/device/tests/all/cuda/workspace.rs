//! Workspaces of streams: executables share one per stream, on other streams they have others, and graphs of callers are left alone.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode_enum};
use deuteron_device::cuda::CudaExecutable;
use deuteron_device::{BorrowedMemory, Cuda, Device, Executable, Launching, Memory, MemoryStats, NoStates};

use super::{bytes, chain, downloaded, outside, read, span};
use crate::support::gpu;

const COLS: usize = 77;
/// What blocks are rounded to.
const GRAIN: usize = 2 << 20;

/// A chain of copies through the workspace, with its input and its result.
struct Chain {
    executable: CudaExecutable,
    data: Vec<u8>,
    input: Memory,
    result: Memory,
    arena: usize,
}

impl Chain {
    fn new(device: &Cuda, rows: usize, seed: u64) -> Chain {
        let data = bytes(rows * COLS * 2, seed);
        let (input, result) = (device.upload(&data).unwrap(), device.upload(&vec![0; data.len()]).unwrap());
        let job = chain(device, rows, COLS);
        let arena = job.arena;
        Chain { executable: device.executable(job).unwrap(), data, input, result, arena }
    }

    /// Enqueues a run.
    fn enqueue(&mut self, stream: &CudaStream) {
        let (given, taken) = ([span(&self.input)], [span(&self.result)]);
        // SAFETY: the tests keep the stream, and this keeps input and result, until the stream was waited for.
        let borrowed = unsafe { BorrowedMemory::new(&given, &[], &taken, stream.cu_stream() as u64) };
        self.executable.run_borrowed(borrowed).unwrap();
    }

    /// That the result is right; it is cleared.
    fn check(&mut self, device: &Cuda, stream: &CudaStream, name: &str) {
        stream.synchronize().unwrap();
        assert!(downloaded(&self.result) == self.data, "{name}");
        self.result = device.upload(&vec![0; self.data.len()]).unwrap();
    }

    fn block(&self) -> usize {
        self.arena.next_multiple_of(GRAIN)
    }
}

fn streams<const N: usize>() -> [Arc<CudaStream>; N] {
    let context = outside();
    std::array::from_fn(|_| context.new_stream().unwrap())
}

#[test]
fn two_programs_on_a_stream_share_the_larger_workspace() {
    let Some(device) = gpu(false) else { return };
    let [stream] = streams();
    let (mut small, mut large) = (Chain::new(&device, 130, 1), Chain::new(&device, 20_000, 2));
    assert_eq!(device.memory_stats(), MemoryStats { held: 0, needed: large.block(), jobs: 2 });
    for round in 0..3 {
        small.enqueue(&stream);
        large.enqueue(&stream);
        small.enqueue(&stream);
        small.check(&device, &stream, &format!("small, round {round}"));
        large.check(&device, &stream, &format!("large, round {round}"));
        assert_eq!(device.memory_stats(), MemoryStats { held: large.block(), needed: large.block(), jobs: 2 });
    }
    let (kept, needed) = (small.block(), large.block());
    assert!(kept < needed);
    drop(large);
    assert_eq!(device.memory_stats(), MemoryStats { held: 0, needed: kept, jobs: 1 });
    small.enqueue(&stream);
    small.check(&device, &stream, "after the larger one is gone");
    drop(small);
    assert_eq!(device.memory_stats(), MemoryStats::default());
}

#[test]
fn programs_on_two_streams_do_not_share() {
    let Some(device) = gpu(false) else { return };
    let streams: [_; 2] = streams();
    let mut chains = [3, 4].map(|seed| Chain::new(&device, 20_000, seed));
    // Nothing orders the two streams: in one block each would overwrite what the other has not read yet.
    for round in 0..20 {
        for (chain, stream) in chains.iter_mut().zip(&streams) {
            chain.enqueue(stream);
        }
        for (chain, stream) in chains.iter_mut().zip(&streams) {
            chain.check(&device, stream, &format!("round {round}"));
        }
    }
    assert_eq!(device.memory_stats().held, 2 * chains[0].block());
    // One program on both.
    let [chain, _] = &mut chains;
    for stream in streams.iter().cycle().take(9) {
        chain.enqueue(stream);
    }
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    chain.check(&device, &streams[0], "one program on two streams");
}

#[test]
fn a_captured_graph_outlives_the_workspace_of_its_stream() {
    let Some(device) = gpu(false) else { return };
    let [stream, other] = streams();
    let (mut small, mut large) = (Chain::new(&device, 5000, 5), Chain::new(&device, 50_000, 6));
    small.enqueue(&stream);
    small.check(&device, &stream, "before the capture");
    stream.begin_capture(CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    small.enqueue(&stream);
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("three kernels were captured");
    assert!(small.executable.is_captured());
    let own = small.arena;
    assert_eq!(device.memory_stats().held, small.block() + own);
    // The workspace of the stream grows, is used, and is freed; the graph has memory of its program.
    large.enqueue(&stream);
    graph.launch().unwrap();
    large.enqueue(&stream);
    stream.synchronize().unwrap();
    assert!(downloaded(&small.result) == small.data, "beside a larger workspace");
    large.check(&device, &stream, "beside a replay");
    assert_eq!(device.memory_stats().held, large.block() + own);
    device.release_memory();
    assert_eq!(device.memory_stats().held, own);
    let mut middle = Chain::new(&device, 9000, 7);
    for _ in 0..5 {
        middle.enqueue(&stream);
        graph.launch().unwrap();
        middle.enqueue(&stream);
    }
    middle.check(&device, &stream, "around replays");
    assert!(downloaded(&small.result) == small.data, "after the workspace was freed");
    large.enqueue(&other);
    large.check(&device, &other, "on another stream");
}

#[test]
fn a_run_of_its_own_keeps_memory_of_its_own() {
    let Some(device) = gpu(false) else { return };
    let [stream] = streams();
    let mut chain = Chain::new(&device, 5000, 8);
    for launching in [Launching::Eager, Launching::Graph, Launching::Graph] {
        // In turn with runs on the workspace of a stream: the recording follows.
        chain.executable.run(&|_| &chain.input, &mut NoStates, launching).unwrap();
        assert!(read(&chain.executable, 0, chain.data.len()) == chain.data, "{launching:?}");
        chain.executable.poison().unwrap();
        chain.enqueue(&stream);
        chain.check(&device, &stream, "on a stream");
    }
    assert_eq!(device.memory_stats().held, chain.block() + chain.arena);
    drop(chain);
    assert_eq!(device.memory_stats(), MemoryStats::default());
}

#[test]
fn released_memory_comes_back() {
    let Some(device) = gpu(false) else { return };
    let [stream] = streams();
    let mut chain = Chain::new(&device, 20_000, 9);
    for round in 0..3 {
        chain.enqueue(&stream);
        // Without a wait here: it waits for the stream itself.
        device.release_memory();
        assert_eq!(device.memory_stats(), MemoryStats { held: 0, needed: chain.block(), jobs: 1 });
        chain.check(&device, &stream, &format!("round {round}"));
    }
}

#[test]
fn many_sizes_take_the_workspace_of_the_largest() {
    let Some(device) = gpu(false) else { return };
    let [stream] = streams();
    let mut chains: Vec<Chain> = (0..60).map(|index| Chain::new(&device, 64 + 331 * (index * 37 % 60), 10)).collect();
    chains.iter_mut().for_each(|chain| chain.enqueue(&stream));
    chains.iter_mut().for_each(|chain| chain.check(&device, &stream, "many sizes"));
    let largest = chains.iter().map(Chain::block).max().unwrap();
    assert_eq!(device.memory_stats(), MemoryStats { held: largest, needed: largest, jobs: 60 });
    assert!(chains.iter().map(|chain| chain.arena).sum::<usize>() > 10 * largest);
}

#[test]
fn threads_share_a_stream() {
    let Some(device) = gpu(false) else { return };
    let [stream] = streams();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (device, stream) = (&device, &stream);
            scope.spawn(move || {
                let mut chain = Chain::new(device, 3000 + 1000 * thread, 20 + thread as u64);
                for round in 0..50 {
                    chain.enqueue(stream);
                    if round % 10 == 9 {
                        chain.check(device, stream, &format!("thread {thread}, round {round}"));
                    }
                    if round % 20 == 5 {
                        device.release_memory();
                    }
                }
            });
        }
    });
    assert_eq!(device.memory_stats(), MemoryStats::default());
}
