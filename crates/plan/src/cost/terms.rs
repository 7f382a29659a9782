//! The terms of a kernel's predicted time, and how they add up.

use deuteron_graph::named;

use crate::machine::{Machine, Quantity};
use crate::traffic::Traffic;
use crate::units::{Bytes, Seconds};
use crate::work::Work;

named! {
    /// The bottleneck of a kernel.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Bound {
        /// starting it
        Launch = "launch",
        /// main memory
        Memory = "memory",
        /// the last-level cache
        Cache = "cache",
        /// matrix units
        Matrix = "matrix",
        /// vector units
        Vector = "vector",
    }
}

/// Threads, registers and waves of a kernel on a GPU; ones and zeros on a CPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Resources {
    /// registers per thread
    pub registers: u32,
    /// shared memory per block
    pub shared: Bytes,
    /// share of the threads a multiprocessor can hold
    pub occupancy: f64,
    /// blocks divided by resident block slots
    pub waves: f64,
    /// share of the slots of all waves that are filled
    pub wave_efficiency: f64,
}

impl Resources {
    /// For a kernel where none of this applies.
    pub(crate) const NONE: Resources =
        Resources { registers: 0, shared: Bytes(0), occupancy: 1.0, waves: 1.0, wave_efficiency: 1.0 };
}

/// Every term of the predicted time of one launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Cost {
    /// unique bytes in and out
    pub traffic: Traffic,
    /// the part of the bytes read that an earlier kernel left in the last-level cache
    pub cached: Bytes,
    /// bytes read again, served by the last-level cache
    pub reread: Bytes,
    /// matrix flops
    pub matrix_flops: f64,
    /// vector flops
    pub vector_flops: f64,
    /// threads, registers, waves
    pub resources: Resources,
    /// to start it
    pub launch: Seconds,
    /// main memory
    pub memory: Seconds,
    /// last-level cache
    pub cache: Seconds,
    /// matrix units
    pub matrix: Seconds,
    /// vector units
    pub vector: Seconds,
    /// the total: `launch + max(memory + cache, compute) + exposed * min`; for a kernel whose family states its time, that time, or
    /// `launch + memory` if that is longer. `matrix` then holds all of it beyond the launch, including the cache's part.
    pub total: Seconds,
    /// what limits it
    pub bound: Bound,
    /// why a search does not choose it
    pub drawback: Option<&'static str>,
}

impl Cost {
    /// Flops over unique bytes.
    pub fn intensity(&self) -> f64 {
        (self.matrix_flops + self.vector_flops) / (self.traffic.total().0.max(1) as f64)
    }
}

/// Times of the parts, from which the total is computed.
pub(crate) struct Parts {
    pub reread: Bytes,
    pub resources: Resources,
    pub launch: Seconds,
    pub memory: Seconds,
    pub cache: Seconds,
    pub matrix: Seconds,
    pub vector: Seconds,
    /// overlap of matrix and vector work: 1 sequential, 0 concurrent
    pub serial: f64,
}

impl Parts {
    /// Time after the launch, from the parts.
    fn busy(&self, machine: &Machine) -> Seconds {
        let both = self.matrix.max(self.vector) + self.matrix.min(self.vector) * self.serial;
        let moved = self.memory + self.cache;
        both.max(moved) + both.min(moved) * machine.get(Quantity::Exposed)
    }

    pub fn into_cost(self, machine: &Machine, correction: f64, work: &Work, traffic: Traffic, cached: Bytes) -> Cost {
        let (matrix, cache, busy) = match work.microseconds {
            Some(us) => {
                let stated = (Seconds::from_us(us) - self.launch).max(Seconds(0.0));
                (stated, Seconds(0.0), stated.max(self.memory))
            }
            None => (self.matrix, self.cache, self.busy(machine)),
        };
        // A correction never makes a kernel faster than main memory delivers its bytes.
        let total = self.launch + (busy * correction).max(self.memory.min(busy));
        let longest = [
            (self.launch, Bound::Launch),
            (self.memory, Bound::Memory),
            (cache, Bound::Cache),
            (matrix, Bound::Matrix),
            (self.vector, Bound::Vector),
        ];
        let bound =
            longest.into_iter().max_by(|a, b| a.0.0.total_cmp(&b.0.0)).map_or(Bound::Launch, |(_, bound)| bound);
        Cost {
            traffic,
            cached,
            reread: self.reread,
            matrix_flops: work.all_matrix_flops(),
            vector_flops: work.vector_flops(),
            resources: self.resources,
            launch: self.launch,
            memory: self.memory,
            cache,
            matrix,
            vector: self.vector,
            total,
            bound,
            drawback: work.drawback,
        }
    }
}
