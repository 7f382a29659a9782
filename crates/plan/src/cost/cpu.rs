//! Time on a CPU: the tile machine's instructions, and memory by the level of cache that holds a kernel's data.
//!
//! Instructions are counted by class ([`Work`]) and priced per vector; the number of threads and the last piece of
//! work determine how much runs in parallel. Bytes are priced by the cache level that holds them. The distance of an intermediate
//! is the number of bytes that this kernel touches; that of the graph's inputs and outputs is the sum of all of them, because
//! a caller's loop touches all of them before it returns to the first.

use deuteron_graph::Op;

use crate::cost::terms::{Parts, Resources};
use crate::draft::Draft;
use crate::kind::GroupKind;
use crate::machine::{Machine, Quantity};
use crate::rates::matrix_rate;
use crate::traffic::{ReadValue, Traffic};
use crate::units::{Bytes, Seconds};
use crate::work::{Class, Work};

pub(super) fn parts(draft: &Draft, machine: &Machine, work: &Work, traffic: Traffic, reads: &[ReadValue]) -> Parts {
    let processors = machine.get(Quantity::Processors);
    let mut parts = Parts {
        reread: Bytes(0),
        resources: Resources::NONE,
        launch: Seconds::from_us(machine.get(Quantity::LaunchUs)),
        memory: Seconds(0.0),
        cache: Seconds(0.0),
        matrix: Seconds(0.0),
        vector: Seconds(0.0),
        serial: 1.0,
    };
    // The first part is corrected as its kernel is, what follows it as products are.
    let mut correction = 1.0;
    let mut shares = Vec::new();
    let mut phase = Some(work);
    while let Some(work) = phase {
        let busy = busy_share(work, processors);
        let each = work.each.as_ref().map_or(0.0, |each| vector_ns(machine, each));
        let alone = work.finished * machine.get(Quantity::FinishNs) + each;
        let matrix = Seconds(work.padded_flops / matrix_rate(machine, work.matrix_bits).per_second);
        let products = work.products * machine.get(Quantity::ProductNs) + work.packed * machine.get(Quantity::PackNs);
        let shared = work.chunks > 1.0 && processors > 1.0;
        let fork = if shared { machine.get(Quantity::ForkUs) } else { 0.0 };
        parts.launch = parts.launch + Seconds::from_us(fork);
        let matrix = (matrix * (busy * processors) + Seconds(products * busy * 1e-9)) * correction;
        let vector = Seconds((vector_ns(machine, work) * busy + alone) * 1e-9) * correction;
        (parts.matrix, parts.vector) = (parts.matrix + matrix, parts.vector + vector);
        shares.push((busy, (matrix + vector).0));
        phase = work.next.as_deref();
        correction = machine.correction(GroupKind::Matmul) / machine.correction(draft.structure.kind());
    }
    // One thread alone moves its share of the bytes per second; of several phases, each moves as much as it computes.
    let all: f64 = shares.iter().map(|&(_, seconds)| seconds).sum();
    let first = busy_share(work, processors);
    let others: f64 = shares.iter().map(|&(busy, seconds)| (busy - first) * seconds / all.max(f64::MIN_POSITIVE)).sum();
    let busy = first + others;
    parts.memory = memory(draft, machine, work, traffic, reads) * (busy * processors);
    parts
}

/// The share of all work that the busiest thread does.
fn busy_share(work: &Work, processors: f64) -> f64 {
    let pieces = work.chunks.max(1.0);
    // All pieces are equal but the last one, which is handed out last.
    let total = pieces - 1.0 + work.last_chunk;
    if !total.is_finite() || total <= 0.0 {
        return 1.0 / processors;
    }
    let rounds = (pieces / processors).ceil();
    let last_alone = pieces - (rounds - 1.0) * processors <= 1.0;
    let most = if last_alone { rounds - 1.0 + work.last_chunk } else { rounds };
    (most / total).clamp(1.0 / processors, 1.0)
}

/// Nanoseconds of one core for all instructions.
fn vector_ns(machine: &Machine, work: &Work) -> f64 {
    let class_ns: f64 = Class::ALL.iter().map(|&class| work.of(class) * machine.get(quantity(class))).sum();
    let pieces = if work.chunks.is_finite() { work.chunks } else { 0.0 };
    class_ns
        + pieces * machine.get(Quantity::ChunkNs)
        + work.dispatches * machine.get(Quantity::DispatchNs)
        + work.tails * machine.get(Quantity::TailNs)
        + work.rows * machine.get(Quantity::RowNs)
        + work.flights * machine.get(Quantity::FlightNs)
        + work.row_arguments * machine.get(Quantity::RowArgumentNs)
        + work.row_scalars * machine.get(Quantity::RowScalarNs)
        + work.reductions * machine.get(Quantity::ReductionNs)
        + work.copied * machine.get(Quantity::CopyElementNs)
        + work.scattered * machine.get(Quantity::ScatterRowNs)
        + work.cleared * machine.get(Quantity::ClearRowNs)
}

fn quantity(class: Class) -> Quantity {
    match class {
        Class::Move => Quantity::MoveNs,
        Class::Convert => Quantity::ConvertNs,
        Class::Simple => Quantity::SimpleNs,
        Class::Divide => Quantity::DivideNs,
        Class::Exp => Quantity::ExpNs,
        Class::Tanh => Quantity::TanhNs,
        Class::Erf => Quantity::ErfNs,
        Class::Random => Quantity::RandomNs,
        Class::Reduce => Quantity::ReduceNs,
        Class::Column => Quantity::ColumnNs,
    }
}

/// The cost of a written byte relative to a read one: a store that misses reads the line first, and the
/// line is written back later. Fitted on one core of a Xeon, 2026-11-15: 1.49.
const WRITTEN: f64 = 1.5;

/// The same for both sides of a strided copy, which reads one element of each line it touches and at best finds the others
/// in the cache later. Fitted to transposes of 0.6 to 6 MB on the same core.
const STRIDED: f64 = 2.0;

/// The same for a table that is written 64 columns at a time, a pattern that prefetchers do not follow. Fitted to tables of 3 MB
/// and 200 MB on the same core.
const SCATTERED: f64 = 2.5;

/// Time to move a kernel's bytes, with all cores.
fn memory(draft: &Draft, machine: &Machine, work: &Work, traffic: Traffic, reads: &[ReadValue]) -> Seconds {
    let own = traffic.total().0 as f64;
    let around = own.max(resident(draft, machine));
    let mut seconds = 0.0;
    for value in reads {
        let given = matches!(draft.graph.node(value.base).op, Op::Input { .. });
        // Its maker read about as much as it wrote, and wrote past the caches if that was too much for them.
        let streamed = work.stream_from > 0.0 && 2.0 * value.bytes.0 as f64 >= work.stream_from;
        let reach = match (given, streamed) {
            (true, _) => around,
            (false, true) => f64::INFINITY,
            (false, false) => own,
        };
        seconds += value.bytes.0 as f64 * seconds_a_byte(machine, reach);
    }
    let written = traffic.written.0 as f64;
    seconds += match work.streams {
        true => written / machine.gbps(Quantity::StreamGbps).per_second,
        false => written * seconds_a_byte(machine, own) * WRITTEN,
    };
    Seconds(match () {
        () if work.cleared > 0.0 => seconds * SCATTERED,
        () if work.copied > 0.0 && work.products == 0.0 => seconds * STRIDED,
        () => seconds,
    })
}

/// Bytes of the graph's inputs and outputs, capped at several times the last-level cache.
fn resident(draft: &Draft, machine: &Machine) -> f64 {
    let graph = draft.graph;
    let cache = machine.megabytes(Quantity::CacheMb).0 as usize;
    let enough = (8 * cache) as f64;
    let (mut sum, mut large) = (0.0, Vec::new());
    for &(id, bytes) in draft.placement.ends() {
        if bytes > cache {
            large.push(id)
        } else {
            sum += bytes as f64
        }
        if sum > enough {
            return sum;
        }
    }
    // Of a table that is only looked up, the rows that are picked count.
    for table in large {
        let mut picked = 0;
        let only_picked = graph.nodes().iter().filter(|node| node.inputs.contains(&table)).all(|node| {
            picked += node.bytes();
            matches!(node.op, Op::Gather) && node.inputs[0] == table
        });
        let bytes = graph.node(table).bytes();
        sum += if only_picked && picked > 0 { picked.min(bytes) } else { bytes } as f64;
    }
    sum
}

/// Seconds per byte when `touched` bytes are accessed between two uses. Between two cache levels the cost changes smoothly:
/// caches keep part of what is a little too large for them.
fn seconds_a_byte(machine: &Machine, touched: f64) -> f64 {
    let beyond = |size: Quantity| {
        let ratio = touched / machine.megabytes(size).0.max(1) as f64;
        1.0 - 1.0 / (1.0 + ratio.powi(4))
    };
    let [inner, cache, dram] = [Quantity::InnerGbps, Quantity::CacheGbps, Quantity::DramGbps]
        .map(|quantity| 1.0 / machine.gbps(quantity).per_second);
    let near = inner + (cache - inner) * beyond(Quantity::InnerMb);
    near + (dram - cache) * beyond(Quantity::CacheMb)
}
