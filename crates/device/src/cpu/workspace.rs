//! Memory that a run uses between its first step and its last: intermediates and scratch. All jobs of a device share one workspace, as
//! large as the largest of them needs, so that a job keeps no memory while it does not run.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use deuteron_codegen::cpu::task::{Floats, PerWorker, ScratchSizes};
use deuteron_graph::memory;

use crate::buffer::Buffer;
use crate::device::MemoryStats;
use crate::error::DeviceError;

/// A job's requirement of the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Need {
    /// bytes of intermediates
    pub arena: usize,
    /// floats of each worker
    pub worker: usize,
    /// floats of all workers together
    pub shared: usize,
}

impl Need {
    pub fn new(arena: usize, scratch: ScratchSizes) -> Need {
        Need { arena, worker: scratch.worker, shared: scratch.shared }
    }

    /// The maximum of both.
    fn max(self, other: Need) -> Need {
        Need {
            arena: self.arena.max(other.arena),
            worker: self.worker.max(other.worker),
            shared: self.shared.max(other.shared),
        }
    }

    fn bytes(self, threads: usize) -> usize {
        self.arena + (self.worker * threads + self.shared) * size_of::<f32>()
    }
}

/// The memory itself.
pub(crate) struct Workspace {
    need: Need,
    pub arena: Buffer,
    /// scratch of each worker, and of all of them together
    pub scratch: Vec<PerWorker<Floats>>,
    pub shared: Floats,
}

impl Workspace {
    fn new(need: Need, threads: usize) -> Result<Workspace, DeviceError> {
        let scratch = || (0..threads).map(|_| PerWorker::new(Floats::new(need.worker))).collect();
        Ok(Workspace {
            need,
            arena: Buffer::new(need.arena)?,
            scratch: memory::caught(scratch)?,
            shared: memory::caught(|| Floats::new(need.shared))?,
        })
    }
}

/// The workspace of a device, and the requirements of its jobs. One run uses it at a time.
pub(crate) struct SharedWorkspace {
    threads: usize,
    needs: Mutex<Needs>,
    memory: Mutex<Option<Workspace>>,
}

/// The requirements of all jobs, and their maximum.
#[derive(Default)]
struct Needs {
    jobs: HashMap<Need, usize>,
    largest: Need,
}

impl SharedWorkspace {
    pub fn new(threads: usize) -> SharedWorkspace {
        SharedWorkspace { threads, needs: Mutex::default(), memory: Mutex::new(None) }
    }

    /// Registers a job, and enlarges the workspace unless a run is in progress: then the first run of the job does.
    pub fn join(self: &Arc<Self>, need: Need) -> Result<Share, DeviceError> {
        let largest = {
            let mut needs = lock(&self.needs);
            *needs.jobs.entry(need).or_default() += 1;
            needs.largest = needs.largest.max(need);
            needs.largest
        };
        let share = Share { workspace: self.clone(), need };
        if let Ok(mut memory) = self.memory.try_lock() {
            self.fit(&mut memory, need, largest)?;
        }
        Ok(share)
    }

    /// Bytes held now, and the number of jobs.
    pub fn stats(&self) -> MemoryStats {
        let needs = lock(&self.needs);
        let needed = needs.largest.bytes(self.threads);
        let jobs = needs.jobs.values().sum();
        drop(needs);
        let held = lock(&self.memory).as_ref().map_or(0, |memory| memory.need.bytes(self.threads));
        MemoryStats { held, needed, jobs }
    }

    /// Frees the memory after the current run. The next run allocates it again.
    pub fn release(&self) {
        *lock(&self.memory) = None;
    }

    /// At least `need`, and where that takes new memory, `largest` at once.
    fn fit(&self, memory: &mut Option<Workspace>, need: Need, largest: Need) -> Result<(), DeviceError> {
        if memory.as_ref().is_none_or(|held| held.need.max(need) != held.need) {
            // Freed first: both at once may be more than there is.
            *memory = None;
            *memory = Some(Workspace::new(largest, self.threads)?);
        }
        Ok(())
    }

    fn leave(&self, need: Need) {
        let mut needs = lock(&self.needs);
        if let Some(count) = needs.jobs.get_mut(&need) {
            *count -= 1;
            if *count == 0 {
                needs.jobs.remove(&need);
                needs.largest = needs.jobs.keys().fold(Need::default(), |most, &need| most.max(need));
            }
        }
        let (largest, none) = (needs.largest, needs.jobs.is_empty());
        drop(needs);
        // A run that holds it may be long; the next caller frees it then.
        if let Ok(mut memory) = self.memory.try_lock()
            && memory.as_ref().is_some_and(|held| none || held.need.max(largest) != largest)
        {
            *memory = None;
        }
    }
}

/// A job's share of the workspace of its device.
pub(crate) struct Share {
    workspace: Arc<SharedWorkspace>,
    pub need: Need,
}

impl Share {
    /// Runs a function with exclusive access to the workspace.
    pub fn with<T>(&self, work: impl FnOnce(&mut Workspace) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        let mut memory = lock(&self.workspace.memory);
        let largest = lock(&self.workspace.needs).largest;
        self.workspace.fit(&mut memory, self.need, largest)?;
        memory.as_mut().map_or(Err(DeviceError::OutOfMemory { bytes: self.need.arena }), work)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.workspace.leave(self.need);
    }
}

/// A workspace stays usable after a panic of a run.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(arena: usize) -> Need {
        Need { arena, worker: 3, shared: 5 }
    }

    /// Bytes of the arena that a run of a job finds.
    fn arena_of(share: &Share) -> usize {
        share.with(|memory| Ok(memory.arena.len())).unwrap()
    }

    #[test]
    fn jobs_share_the_largest_workspace_and_give_it_back() {
        let workspace = Arc::new(SharedWorkspace::new(2));
        let bytes = |arena: usize| need(arena).bytes(2);
        assert_eq!(workspace.stats(), MemoryStats { held: 0, needed: 0, jobs: 0 });
        let small = workspace.join(need(100)).unwrap();
        let large = workspace.join(need(1000)).unwrap();
        let again = workspace.join(need(1000)).unwrap();
        assert_eq!(workspace.stats(), MemoryStats { held: bytes(1000), needed: bytes(1000), jobs: 3 });
        assert_eq!(small.with(|memory| Ok((memory.arena.len(), memory.scratch.len()))), Ok((1000, 2)));
        drop(large);
        assert_eq!(workspace.stats().held, bytes(1000));
        drop(again);
        // Too large for those that are left: freed, and made anew by the next run.
        assert_eq!(workspace.stats(), MemoryStats { held: 0, needed: bytes(100), jobs: 1 });
        assert_eq!(arena_of(&small), 100);
        assert_eq!(workspace.stats().held, bytes(100));
        workspace.release();
        assert_eq!(workspace.stats().held, 0);
        assert_eq!(arena_of(&small), 100);
        drop(small);
        assert_eq!(workspace.stats(), MemoryStats { held: 0, needed: 0, jobs: 0 });
    }

    #[test]
    fn a_job_that_joins_during_a_run_waits_for_its_own_run() {
        let workspace = Arc::new(SharedWorkspace::new(1));
        let running = workspace.join(need(10)).unwrap();
        let late = running
            .with(|memory| {
                let late = workspace.join(need(1000))?;
                assert_eq!(memory.arena.len(), 10);
                Ok(late)
            })
            .unwrap();
        assert_eq!(arena_of(&late), 1000);
    }

    #[test]
    fn threads_have_it_in_turn() {
        let workspace = Arc::new(SharedWorkspace::new(1));
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let share = workspace.join(need(64 << thread)).unwrap();
                scope.spawn(move || {
                    for _ in 0..100 {
                        let whole = |memory: &mut Workspace| {
                            memory.arena.bytes_mut()[..64 << thread].fill(thread);
                            std::thread::yield_now();
                            Ok(memory.arena.bytes()[..64 << thread].iter().all(|&byte| byte == thread))
                        };
                        assert!(share.with(whole).unwrap());
                    }
                });
            }
        });
        assert_eq!(workspace.stats().jobs, 0);
    }
}
