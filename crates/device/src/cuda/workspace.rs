//! Temporary memory of runs on callers' streams: intermediates and workspaces. All jobs share one
//! block per stream, as large as the largest job that ran there needs, so that a job keeps no such memory while it does not run.
//!
//! A stream does its work in order, and the block of a stream is locked while a run is enqueued, so the kernels of two runs never
//! interleave on it. A block is freed when its stream has passed the last run on it. CUDA graphs that callers capture are replayed on any
//! stream at any time: a captured run uses memory of its own executable, never a block of a stream.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::CudaError;
use crate::device::MemoryStats;
use crate::error::DeviceError;

/// Blocks have multiples of this many bytes, which is what the driver takes from the GPU at a time.
const GRAIN: usize = 2 << 20;
/// Streams whose blocks are kept; with more of them, blocks of idle streams are freed. PyTorch hands out 32 streams in turn.
const STREAMS: usize = 32;

/// The allocator of blocks, and the detection of a run's end. The context is entered in every call.
pub(crate) trait Blocks {
    /// Freed when it is dropped.
    type Block;
    /// The end of the work that was enqueued on a stream.
    type Mark;
    /// A block of this many bytes.
    fn allocate(&self, bytes: usize) -> Result<Self::Block, CudaError>;
    /// Its address.
    fn address(&self, block: &Self::Block) -> u64;
    /// Whether the stream has passed a mark.
    fn is_past(&self, mark: &Self::Mark) -> Result<bool, CudaError>;
    /// Waits until it has.
    fn wait(&self, mark: &Self::Mark) -> Result<(), CudaError>;
}

/// The work that a run enqueued on a stream.
pub(crate) enum Enqueued<M> {
    /// no kernel
    Nothing,
    /// kernels, followed by this event
    Until(M),
    /// Kernels without an event at their end.
    Unmarked,
}

/// The blocks of all streams, and the requirements of jobs.
pub(crate) struct Workspaces<B: Blocks> {
    streams: Mutex<HashMap<u64, Arc<Mutex<Workspace<B>>>>>,
    /// How many jobs need this many bytes.
    needs: Mutex<BTreeMap<usize, usize>>,
    /// Bytes that executables have for themselves.
    own: AtomicUsize,
    source: B,
}

/// The block of one stream.
struct Workspace<B: Blocks> {
    held: Option<Held<B>>,
}

struct Held<B: Blocks> {
    block: B::Block,
    bytes: usize,
    /// The last run on it; none before the first.
    last: Option<B::Mark>,
}

impl<B: Blocks> Workspaces<B> {
    pub fn new(source: B) -> Workspaces<B> {
        Workspaces { streams: Mutex::default(), needs: Mutex::default(), own: AtomicUsize::new(0), source }
    }

    /// Registers a job that needs this many bytes.
    pub fn join(&self, need: usize) {
        *lock(&self.needs).entry(need).or_default() += 1;
    }

    /// Removes it, and frees blocks that are too large for the remaining jobs.
    pub fn leave(&self, need: usize) {
        {
            let mut needs = lock(&self.needs);
            if let Some(count) = needs.get_mut(&need) {
                *count -= 1;
                if *count == 0 {
                    needs.remove(&need);
                }
            }
        }
        self.trim();
    }

    /// Counts memory that an executable has for itself.
    pub fn add_own(&self, bytes: usize) {
        self.own.fetch_add(bytes, Ordering::Relaxed);
    }

    /// It is freed.
    pub fn remove_own(&self, bytes: usize) {
        self.own.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Enqueues a run on the block of a stream, which has at least `need` bytes and which nobody else uses meanwhile. `stream` is a number
    /// that no other stream has or had.
    pub fn run(
        &self,
        stream: u64,
        need: usize,
        enqueue: impl FnOnce(u64) -> (Enqueued<B::Mark>, Result<(), DeviceError>),
    ) -> Result<(), DeviceError> {
        let workspace = self.of_stream(stream);
        let mut workspace = lock(&workspace);
        let fits = |held: &Held<B>| held.bytes >= need && held.bytes <= self.largest().max(rounded(need));
        let mut held = match workspace.held.take() {
            Some(held) if fits(&held) => held,
            old => {
                // Freed first: both at once may be more than there is.
                workspace.held = old;
                self.free(&mut workspace)?;
                let bytes = rounded(need);
                Held { block: self.source.allocate(bytes)?, bytes, last: None }
            }
        };
        let (enqueued, result) = enqueue(self.source.address(&held.block));
        match enqueued {
            Enqueued::Nothing => workspace.held = Some(held),
            Enqueued::Until(mark) => {
                held.last = Some(mark);
                workspace.held = Some(held);
            }
            // Nothing tells when the block may be freed, so it never is. That takes a driver that fails twice in a row.
            Enqueued::Unmarked => std::mem::forget(held.block),
        }
        result
    }

    /// Bytes held now, and the number of jobs.
    pub fn stats(&self) -> MemoryStats {
        self.trim();
        let bytes = |workspace: &Arc<Mutex<Workspace<B>>>| lock(workspace).held.as_ref().map_or(0, |held| held.bytes);
        let shared: usize = self.every().iter().map(bytes).sum();
        let own = self.own.load(Ordering::Relaxed);
        let jobs = lock(&self.needs).values().sum();
        MemoryStats { held: shared + own, needed: self.largest() + own, jobs }
    }

    /// Frees every block, once its stream has passed the last run on it.
    pub fn release(&self) {
        for workspace in self.every() {
            // A block whose end cannot be waited for is kept.
            let _ = self.free(&mut lock(&workspace));
        }
        lock(&self.streams).retain(|_, workspace| Arc::strong_count(workspace) > 1 || lock(workspace).held.is_some());
    }

    /// Bytes of the block that serves every job.
    fn largest(&self) -> usize {
        lock(&self.needs).last_key_value().map_or(0, |(&need, _)| rounded(need))
    }

    /// The workspace of a stream, and no more of idle ones than are kept.
    fn of_stream(&self, stream: u64) -> Arc<Mutex<Workspace<B>>> {
        let mut streams = lock(&self.streams);
        if !streams.contains_key(&stream) && streams.len() >= STREAMS {
            streams.retain(|_, workspace| Arc::strong_count(workspace) > 1 || !self.is_idle(&lock(workspace)));
        }
        streams.entry(stream).or_insert_with(|| Arc::new(Mutex::new(Workspace { held: None }))).clone()
    }

    /// Frees blocks that are too large for any job, where that needs no wait. The next run or call frees the others.
    fn trim(&self) {
        let largest = self.largest();
        for workspace in self.every() {
            if let Ok(mut workspace) = workspace.try_lock()
                && workspace.held.as_ref().is_some_and(|held| held.bytes > largest)
                && self.is_idle(&workspace)
            {
                workspace.held = None;
            }
        }
    }

    fn every(&self) -> Vec<Arc<Mutex<Workspace<B>>>> {
        lock(&self.streams).values().cloned().collect()
    }

    /// Whether no run uses its block; false on a driver error.
    fn is_idle(&self, workspace: &Workspace<B>) -> bool {
        let last = workspace.held.as_ref().and_then(|held| held.last.as_ref());
        last.is_none_or(|mark| self.source.is_past(mark).unwrap_or(false))
    }

    /// Frees a block once its stream has passed it.
    fn free(&self, workspace: &mut Workspace<B>) -> Result<(), CudaError> {
        if let Some(mark) = workspace.held.as_ref().and_then(|held| held.last.as_ref()) {
            self.source.wait(mark)?;
        }
        workspace.held = None;
        Ok(())
    }
}

/// Bytes of a block for this many.
fn rounded(need: usize) -> usize {
    need.checked_next_multiple_of(GRAIN).unwrap_or(need)
}

/// After a panic, a workspace at worst lacks its block.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// The end of a run in the fake.
    type Mark = Arc<AtomicBool>;

    /// A GPU without one: blocks are numbers, and a run is over when its mark says so.
    #[derive(Clone, Default)]
    struct Fake(Arc<Mutex<State>>);

    #[derive(Default)]
    struct State {
        allocated: usize,
        live: usize,
        /// How often something waited for a mark.
        waits: usize,
        /// Blocks that were freed while a run used them.
        early: usize,
        /// A driver that cannot wait.
        broken: bool,
    }

    struct Block {
        fake: Fake,
        address: u64,
        bytes: usize,
        runs: Arc<Mutex<Vec<Mark>>>,
    }

    impl Drop for Block {
        fn drop(&mut self) {
            let mut state = lock(&self.fake.0);
            state.live -= self.bytes;
            if lock(&self.runs).iter().any(|mark| !mark.load(Ordering::Relaxed)) {
                state.early += 1;
            }
        }
    }

    impl Blocks for Fake {
        type Block = Block;
        type Mark = (Mark, Arc<Mutex<Vec<Mark>>>);

        fn allocate(&self, bytes: usize) -> Result<Block, CudaError> {
            let mut state = lock(&self.0);
            state.allocated += 1;
            state.live += bytes;
            Ok(Block { fake: self.clone(), address: (state.allocated as u64) << 32, bytes, runs: Arc::default() })
        }

        fn address(&self, block: &Block) -> u64 {
            block.address
        }

        fn is_past(&self, mark: &Self::Mark) -> Result<bool, CudaError> {
            Ok(mark.0.load(Ordering::Relaxed))
        }

        fn wait(&self, mark: &Self::Mark) -> Result<(), CudaError> {
            let mut state = lock(&self.0);
            if state.broken {
                return Err(CudaError::NoDevice);
            }
            state.waits += 1;
            // A stream passes its marks in order: all runs before this one are over too.
            lock(&mark.1).iter().for_each(|mark| mark.store(true, Ordering::Relaxed));
            Ok(())
        }
    }

    /// Jobs on a fake GPU.
    struct Bench {
        fake: Fake,
        workspaces: Workspaces<Fake>,
        runs: Mutex<HashMap<u64, Arc<Mutex<Vec<Mark>>>>>,
    }

    impl Bench {
        fn new() -> Bench {
            let fake = Fake::default();
            Bench { workspaces: Workspaces::new(fake.clone()), fake, runs: Mutex::default() }
        }

        fn join(&self, needs: [usize; 2]) {
            needs.iter().for_each(|&need| self.workspaces.join(need));
        }

        /// Runs a job on a stream and gives the address of its block and the end of the run.
        fn run(&self, stream: u64, need: usize) -> (u64, Mark) {
            let mut found = (0, Mark::default());
            let end = found.1.clone();
            let run = |address| {
                found.0 = address;
                let runs = lock(&self.runs).entry(address).or_default().clone();
                lock(&runs).push(end.clone());
                (Enqueued::Until((end, runs)), Ok(()))
            };
            self.workspaces.run(stream, need, run).unwrap();
            // The block itself knows its runs, so that it can tell a free that comes too early.
            for workspace in self.workspaces.every() {
                if let Some(held) = lock(&workspace).held.as_mut().filter(|held| held.block.address == found.0) {
                    held.block.runs = lock(&self.runs)[&found.0].clone();
                }
            }
            found
        }

        fn early(&self) -> usize {
            lock(&self.fake.0).early
        }
    }

    const MIB: usize = 1 << 20;

    #[test]
    fn jobs_share_a_block_on_a_stream_and_have_others_on_other_streams() {
        let bench = Bench::new();
        bench.join([3 * MIB, 5 * MIB]);
        let first = bench.run(1, 5 * MIB).0;
        assert_eq!(bench.run(1, 3 * MIB).0, first);
        let other = bench.run(2, 3 * MIB).0;
        assert_ne!(other, first);
        assert_eq!((bench.run(1, 3 * MIB).0, bench.run(2, 1).0), (first, other));
        // Each as large as what ran there, in whole grains.
        assert_eq!(bench.workspaces.stats(), MemoryStats { held: 10 * MIB, needed: 6 * MIB, jobs: 2 });
        assert_eq!(lock(&bench.fake.0).waits, 0);
    }

    #[test]
    fn a_block_grows_when_its_stream_has_passed_it() {
        let bench = Bench::new();
        bench.join([MIB, 3 * MIB]);
        let (small, end) = bench.run(1, MIB);
        assert!(!end.load(Ordering::Relaxed));
        let (large, _) = bench.run(1, 3 * MIB);
        assert_ne!(small, large);
        assert!(end.load(Ordering::Relaxed), "it was waited for");
        // Never both at once.
        let state = lock(&bench.fake.0);
        assert_eq!((state.live, state.waits, state.early), (4 * MIB, 1, 0));
    }

    #[test]
    fn what_no_job_needs_is_freed_when_it_is_past() {
        let bench = Bench::new();
        bench.join([MIB, 9 * MIB]);
        let (_, end) = bench.run(1, 9 * MIB);
        bench.workspaces.leave(9 * MIB);
        // Still in use: kept, and neither waited for nor freed.
        assert_eq!(bench.workspaces.stats(), MemoryStats { held: 10 * MIB, needed: 2 * MIB, jobs: 1 });
        end.store(true, Ordering::Relaxed);
        assert_eq!(bench.workspaces.stats(), MemoryStats { held: 0, needed: 2 * MIB, jobs: 1 });
        bench.run(1, MIB);
        assert_eq!(bench.workspaces.stats().held, 2 * MIB);
        assert_eq!(bench.early(), 0);
    }

    #[test]
    fn a_block_that_is_too_large_is_replaced_by_the_next_run() {
        let bench = Bench::new();
        bench.join([MIB, 9 * MIB]);
        bench.run(1, 9 * MIB);
        bench.workspaces.leave(9 * MIB);
        bench.run(1, MIB);
        let state = lock(&bench.fake.0);
        assert_eq!((state.live, state.waits, state.early), (2 * MIB, 1, 0));
    }

    #[test]
    fn released_blocks_come_back_with_the_next_run() {
        let bench = Bench::new();
        bench.workspaces.join(MIB);
        bench.workspaces.add_own(7);
        let ends = [1, 2].map(|stream| bench.run(stream, MIB).1);
        bench.workspaces.release();
        assert!(ends.iter().all(|end| end.load(Ordering::Relaxed)), "they were waited for");
        assert_eq!(bench.workspaces.stats(), MemoryStats { held: 7, needed: 2 * MIB + 7, jobs: 1 });
        assert!(lock(&bench.workspaces.streams).is_empty());
        bench.run(1, MIB);
        assert_eq!(bench.workspaces.stats().held, 2 * MIB + 7);
        bench.workspaces.remove_own(7);
        bench.workspaces.leave(MIB);
        assert_eq!(bench.early(), 0);
    }

    #[test]
    fn a_block_that_cannot_be_waited_for_is_kept() {
        let bench = Bench::new();
        bench.join([MIB, 3 * MIB]);
        bench.run(1, MIB);
        lock(&bench.fake.0).broken = true;
        bench.workspaces.release();
        assert_eq!(bench.workspaces.stats().held, 2 * MIB);
        let error = bench.workspaces.run(1, 3 * MIB, |_| (Enqueued::Nothing, Ok(())));
        assert_eq!(error, Err(CudaError::NoDevice.into()));
        assert_eq!((bench.workspaces.stats().held, bench.early()), (2 * MIB, 0));
    }

    #[test]
    fn a_run_that_fails_leaves_its_block_in_order() {
        let bench = Bench::new();
        bench.workspaces.join(MIB);
        let failed = || Err(DeviceError::OutOfMemory { bytes: 1 });
        assert_eq!(bench.workspaces.run(1, MIB, |_| (Enqueued::Nothing, failed())), failed());
        assert_eq!(bench.workspaces.stats().held, 2 * MIB);
        // Kernels are on the stream and nothing tells their end: the block is neither freed nor used again.
        let (first, _) = bench.run(1, MIB);
        assert_eq!(bench.workspaces.run(1, MIB, |_| (Enqueued::Unmarked, failed())), failed());
        assert_ne!(bench.run(1, MIB).0, first);
        let state = lock(&bench.fake.0);
        assert_eq!((state.live, state.early), (4 * MIB, 0));
    }

    #[test]
    fn streams_that_come_and_go_leave_a_bounded_number_of_blocks() {
        let bench = Bench::new();
        bench.workspaces.join(MIB);
        let (busy, end) = bench.run(u64::MAX, MIB);
        for stream in 0..1000 {
            bench.run(stream, MIB).1.store(true, Ordering::Relaxed);
        }
        assert!(bench.workspaces.stats().held <= (STREAMS + 1) * 2 * MIB);
        assert_eq!((bench.run(u64::MAX, MIB).0, end.load(Ordering::Relaxed)), (busy, false));
        assert_eq!(bench.early(), 0);
    }

    #[test]
    fn random_sizes_take_the_memory_of_the_largest() {
        let bench = Bench::new();
        let (mut state, mut largest) = (1u64, 0);
        let mut kept = std::collections::VecDeque::new();
        for _ in 0..2000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let need = (state >> 36) as usize;
            bench.workspaces.join(need);
            kept.push_back(need);
            bench.run(1, need);
            largest = largest.max(need);
            if kept.len() > 256 {
                bench.workspaces.leave(kept.pop_front().unwrap());
            }
            assert!(bench.workspaces.stats().held <= rounded(largest));
        }
        let allocated = lock(&bench.fake.0).allocated;
        // A new largest size is rare, and so is one that leaves.
        assert!(allocated < 100, "{allocated} blocks");
        assert_eq!(bench.early(), 0);
    }

    #[test]
    fn runs_of_several_threads_do_not_interleave_on_a_stream() {
        let bench = Bench::new();
        bench.workspaces.join(MIB);
        let (inside, mixed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let run = |_| {
                            mixed.fetch_add(inside.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
                            std::thread::yield_now();
                            inside.fetch_sub(1, Ordering::SeqCst);
                            (Enqueued::Nothing, Ok(()))
                        };
                        bench.workspaces.run(1, MIB, run).unwrap();
                    }
                });
            }
        });
        assert_eq!(mixed.into_inner(), 0);
    }
}
