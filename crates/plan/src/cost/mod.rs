//! The cost of a group: bytes, work, and predicted time. Every term is kept for reports.

mod cpu;
mod gpu;
mod terms;

pub use terms::{Bound, Cost, Resources};

use deuteron_graph::Op;

use crate::catalog::Catalog;
use crate::draft::Draft;
use crate::machine::{Machine, MachineKind, Quantity};
use crate::traffic::{ReadValue, reads, traffic_of};
use crate::units::Bytes;

/// Prices a draft.
pub fn cost(draft: &Draft, machine: &Machine, catalog: &dyn Catalog) -> Cost {
    let work = catalog.work(draft);
    let reads = reads(draft);
    let traffic = traffic_of(draft, &reads);
    let cached = cached(draft, machine, &reads);
    let parts = match machine.kind {
        MachineKind::Gpu => gpu::parts(draft, machine, &work, traffic, cached),
        MachineKind::Cpu => cpu::parts(draft, machine, &work, traffic, &reads),
    };
    parts.into_cost(machine, machine.correction(draft.structure.kind()), &work, traffic, cached)
}

/// Bytes read from intermediates that are small enough to be still in the cache. Inputs and weights come from main memory.
fn cached(draft: &Draft, machine: &Machine, reads: &[ReadValue]) -> Bytes {
    let room = machine.megabytes(Quantity::CacheMb);
    let is_made = |value: &&ReadValue| {
        !matches!(draft.graph.node(value.base).op, Op::Input { .. })
            && Bytes(draft.graph.node(value.base).bytes() as u64) <= room
    };
    reads.iter().filter(is_made).map(|value| value.bytes).sum()
}
