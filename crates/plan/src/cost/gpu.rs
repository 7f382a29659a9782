//! Time on a GPU: registers and shared memory give occupancy, occupancy and waves give the share of the peak that a
//! kernel can reach.

use deuteron_graph::{CompareOp, Mask, NodeId, Op};

use crate::chain::{Chain, Link, Reach, Structure};
use crate::cost::terms::{Parts, Resources};
use crate::draft::Draft;
use crate::machine::{Machine, Quantity};
use crate::rates::matrix_rate;
use crate::space::{matmul_size, node_space};
use crate::traffic::{Traffic, reads};
use crate::units::{Bytes, Seconds};
use crate::work::{Class, LANES, Work};

/// Threads of a block of a row kernel.
const ROW_BLOCK: f64 = 256.0;

/// Threads of a block of a matmul or attention kernel: two warpgroups that compute and one that loads.
const TILE_BLOCK: f64 = 384.0;

/// Rows of queries that a block of attention owns.
const QUERY_TILE: usize = 128;

/// The share of the matrix rate that a projection reaches in the launch of its attention, whose softmax runs concurrently. Fitted to
/// `h200-launches-peers.csv`.
const PROJECTION_SHARE: f64 = 0.67;

/// Accumulators and addresses of a matmul or attention kernel, before any epilogue.
const TILE_REGISTERS: u32 = 168;

pub(super) fn parts(draft: &Draft, machine: &Machine, work: &Work, traffic: Traffic, cached: Bytes) -> Parts {
    let chain = match draft.structure {
        Structure::Chain(chain) => chain,
        Structure::Row | Structure::Copy | Structure::ScatterAdd | Structure::Append | Structure::Opaque => {
            return row(draft, machine, work, traffic, cached);
        }
    };
    match chain.links.first() {
        Some(Link::Attention(_) | Link::AttentionGradient(_)) => {
            attention(draft, machine, work, traffic, cached, chain)
        }
        Some(Link::AttentionScores(_)) => scores(draft, machine, work, traffic, cached, chain),
        Some(Link::Matmul { .. } | Link::Routed { .. } | Link::CrossEntropy(_) | Link::CrossEntropyGradient(_))
        | None => matmul(draft, machine, work, traffic, cached, chain),
    }
}

/// Estimated registers of a row kernel: values that are alive across a reduction are in registers.
pub(crate) fn row_registers(draft: &Draft, live_rows: usize) -> u32 {
    let cols = draft.nodes.iter().map(|&id| node_space(draft.graph, id).cols).max().unwrap_or(1);
    let reduces = draft.nodes.iter().any(|&id| matches!(draft.graph.node(id).op, Op::RowReduce(_)));
    if reduces {
        return 24 + (cols.div_ceil(threads_per_row(cols)) * live_rows) as u32;
    }
    let tensors = reads(draft).len() + draft.outputs.len();
    16 + 4 * tensors as u32
}

/// A warp for short rows, more for longer ones, so that a thread holds at most 32 elements.
fn threads_per_row(cols: usize) -> usize {
    cols.div_ceil(32).next_power_of_two().clamp(32, 1024)
}

fn row(draft: &Draft, machine: &Machine, work: &Work, traffic: Traffic, cached: Bytes) -> Parts {
    let registers = row_registers(draft, work.live_rows);
    // What no register holds is kept in shared memory.
    let (registers, shared) =
        if registers > 255 { (64, machine.kilobytes(Quantity::BlockSharedKb)) } else { (registers, Bytes(0)) };
    let widest = draft.nodes.iter().map(|&id| node_space(draft.graph, id)).max_by_key(|space| space.rows * space.cols);
    let (rows, cols) = widest.map_or((1, 1), |space| (space.rows, space.cols));
    let blocks = match work.rows > 0.0 {
        true => (rows as f64 * threads_per_row(cols) as f64 / ROW_BLOCK).ceil(),
        // Eight elements a thread where rows do not matter.
        false => (rows as f64 * cols as f64 / (8.0 * ROW_BLOCK)).ceil(),
    };
    let resources = resources(machine, registers, shared, ROW_BLOCK, blocks.max(1.0));
    let speed = memory_speed(machine, &resources, ROW_BLOCK, blocks);
    let vector = Seconds(work.vector_flops() / machine.tflops(Quantity::VectorTflops).per_second);
    let filled = (blocks * ROW_BLOCK / (machine.get(Quantity::Processors) * 512.0)).min(1.0);
    Parts {
        reread: Bytes(0),
        resources,
        launch: Seconds::from_us(machine.get(Quantity::LaunchUs)),
        memory: (traffic.total() - cached) / machine.gbps(Quantity::DramGbps) * (1.0 / speed),
        cache: cached / machine.gbps(Quantity::CacheGbps) * (1.0 / speed),
        matrix: Seconds(0.0),
        vector: vector * (1.0 / filled.max(1e-3)),
        serial: 1.0,
    }
}

/// The share of full memory bandwidth at this number of threads: below a certain occupancy too few loads are in flight.
fn memory_speed(machine: &Machine, resources: &Resources, block: f64, blocks: f64) -> f64 {
    let places = machine.get(Quantity::Processors) * machine.get(Quantity::Threads);
    let resident = (blocks * block).min(resources.occupancy * places);
    (resident / (machine.get(Quantity::FullOccupancy) * places)).clamp(1e-3, 1.0)
}

fn resources(machine: &Machine, registers: u32, shared: Bytes, block: f64, blocks: f64) -> Resources {
    // Registers are given out in eights.
    let registers = registers.next_multiple_of(8).min(255);
    let by_registers = (machine.get(Quantity::Registers) / (registers as f64 * block)).floor();
    let by_shared = match shared.0 {
        0 => f64::INFINITY,
        bytes => (machine.kilobytes(Quantity::SharedKb).0 as f64 / bytes as f64).floor(),
    };
    let by_threads = (machine.get(Quantity::Threads) / block).floor();
    let resident = by_registers.min(by_shared).min(by_threads).max(1.0);
    let places = resident * machine.get(Quantity::Processors);
    let waves = blocks / places;
    let occupancy = (resident * block / machine.get(Quantity::Threads)).min(1.0);
    Resources { registers, shared, occupancy, waves, wave_efficiency: blocks / (waves.ceil().max(1.0) * places) }
}

/// The waits of a matmul with a norm over a cluster, in barriers over all blocks: the exchange of partial rows, and row work that no
/// matmul work hides.
const EXCHANGE: f64 = 3.0;

/// The waits of a matmul whose launch computes the rows of its left operand, in barriers over all blocks: the first tiles wait for their rows.
const MAKING: f64 = 2.0;

/// One matmul of a batch as the kernel runs it.
struct Product {
    m: usize,
    n: usize,
    k: usize,
    batch: usize,
    element: usize,
}

fn product(draft: &Draft, id: NodeId) -> Product {
    let node = draft.graph.node(id);
    let transpose_a = matches!(node.op, Op::Matmul { transpose_a: true, .. });
    let (m, n, k, batch) = matmul_size(draft.graph, id, transpose_a);
    let operand = draft.placement.base(node.inputs[0]).unwrap_or(node.inputs[0]);
    Product { m, n, k, batch, element: draft.graph.node(operand).dtype.bytes() }
}

fn products(draft: &Draft) -> Vec<Product> {
    let is_product = |id: &&NodeId| matches!(draft.graph.node(**id).op, Op::Matmul { .. });
    draft.nodes.iter().filter(is_product).map(|&id| product(draft, id)).collect()
}

fn matmul(draft: &Draft, machine: &Machine, work: &Work, traffic: Traffic, cached: Bytes, chain: &Chain) -> Parts {
    let mut all = products(draft);
    if let [Link::Routed { .. }] = chain.links.as_slice() {
        // One product of all rows, however they are spread over experts.
        all.iter_mut().for_each(|product| (product.m, product.batch) = (product.m * product.batch, 1));
    }
    let few = all.iter().all(|product| product.m <= machine.count(Quantity::FewRows));
    let registers = epilogue_registers(draft);
    let (prologue, epilogue) = (chain.prologue.reach, chain.epilogue.reach);
    // Whole rows of a result can be held by a cluster of blocks, with tiles like any other.
    let columns = all.iter().map(|product| product.n).max().unwrap_or(0);
    let most = machine.find(Quantity::ClusterColumns).unwrap_or(0.0);
    // Blocks of a matmul of bytes meet in memory, however many columns there are.
    let held = columns as f64 <= most || (most > 1.0 && all.iter().all(|product| product.element == 1));
    // Where there are clusters, blocks that run at once make rows of the left operand for each other.
    let made = prologue != Reach::None && most > 1.0;
    let whole_rows = (prologue == Reach::Rows && !made) || (epilogue == Reach::Rows && !held);
    let vector = Seconds(work.vector_flops() / machine.tflops(Quantity::VectorTflops).per_second);
    let mut launch = Seconds::from_us(machine.get(Quantity::LaunchUs));
    let dram = (traffic.total() - cached) / machine.gbps(Quantity::DramGbps);
    if few {
        // Weights are streamed once, whatever the tiles; a norm that needs the whole row waits at a barrier.
        if epilogue == Reach::Rows {
            launch = launch + Seconds::from_us(machine.get(Quantity::BarrierUs));
        }
        let blocks = machine.get(Quantity::Processors) * 2.0;
        let resources = resources(machine, 96 + registers, Bytes(32 << 10), ROW_BLOCK, blocks);
        // What is normed is read, and normed, by every multiprocessor.
        let rows: usize = all.iter().map(|product| product.m * product.k * product.element).sum();
        let again = match prologue {
            Reach::None => Bytes(0),
            _ => Bytes((rows as f64 * machine.get(Quantity::Processors)) as u64),
        };
        return Parts {
            reread: again,
            resources,
            launch,
            memory: dram,
            cache: (cached + again) / machine.gbps(Quantity::CacheGbps),
            matrix: Seconds(work.matrix_flops / matrix_rate(machine, work.matrix_bits).per_second * 16.0),
            vector: vector * if prologue == Reach::None { 1.0 } else { 8.0 },
            serial: 0.0,
        };
    }
    let mut matrix = Seconds(0.0);
    let (mut reread, mut blocks, mut loads) = (0.0, 0.0, 1.0f64);
    for product in &all {
        let tile = if whole_rows { whole_row_tile(product) } else { best_tile(machine, product) };
        let rate = matrix_rate(machine, 8 * product.element as u32).per_second * tile.share;
        matrix = matrix + Seconds(tile.padded_flops(product) / rate) * (1.0 / tile.efficiency(machine, product));
        reread += tile.bytes_loaded(product) / tile.multicast(machine);
        blocks += tile.count(product);
        loads = loads.max((product.n as f64 / tile.cols as f64).ceil());
    }
    let reread = Bytes((reread - traffic.read.0 as f64).max(0.0) as u64);
    let registers = TILE_REGISTERS + registers + if whole_rows { 255 } else { 0 };
    let shared = Bytes(4 * 64 * 2 * (machine.get(Quantity::TileRows) + machine.get(Quantity::TileCols)) as u64);
    if epilogue == Reach::Rows {
        launch = launch + Seconds::from_us(machine.get(Quantity::BarrierUs)) * EXCHANGE;
    }
    if made {
        // Little of it is hidden: the products leave little of the caches' rate to others.
        let bytes = all.first().map_or(0, |product| 2 * product.m * product.k * product.element);
        let rows = Bytes(bytes as u64) / machine.gbps(Quantity::DramGbps);
        launch = launch + rows + Seconds::from_us(machine.get(Quantity::BarrierUs)) * MAKING;
    }
    // Otherwise a pointwise prologue runs again for every column of tiles.
    let vector = if prologue == Reach::None || made { vector } else { vector * loads };
    Parts {
        reread,
        resources: resources(
            machine,
            registers,
            shared.min(machine.kilobytes(Quantity::BlockSharedKb)),
            TILE_BLOCK,
            blocks,
        ),
        launch,
        memory: dram,
        cache: (cached + reread) / machine.gbps(Quantity::CacheGbps),
        matrix,
        vector,
        serial: 1.0,
    }
}

/// Registers that an epilogue adds: each tensor it reads, each row statistic it carries.
fn epilogue_registers(draft: &Draft) -> u32 {
    let tensors = reads(draft).len().saturating_sub(2) + draft.outputs.len().saturating_sub(1);
    4 * tensors as u32
}

#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    cols: usize,
    /// share of the matrix rate that a tile of this size reaches
    share: f64,
}

impl Tile {
    fn count(&self, product: &Product) -> f64 {
        (product.m.div_ceil(self.rows) * product.n.div_ceil(self.cols) * product.batch) as f64
    }

    fn padded_flops(&self, product: &Product) -> f64 {
        self.count(product) * (self.rows * self.cols) as f64 * 2.0 * product.k as f64
    }

    /// Share of busy multiprocessors over all waves; above zero, so that a matmul without elements takes no time instead of an
    /// undefined one.
    fn efficiency(&self, machine: &Machine, product: &Product) -> f64 {
        let waves = self.count(product) / machine.get(Quantity::Processors);
        (waves / waves.ceil().max(1.0)).max(1e-6)
    }

    fn bytes_loaded(&self, product: &Product) -> f64 {
        self.count(product) * ((self.rows + self.cols) * product.k * product.element) as f64
    }

    fn multicast(&self, machine: &Machine) -> f64 {
        machine.get(Quantity::Multicast).max(1.0)
    }
}

/// A block that computes whole rows: its accumulators leave room for few rows, so every weight is loaded again for each few.
fn whole_row_tile(product: &Product) -> Tile {
    Tile { rows: 16, cols: product.n.max(1).next_multiple_of(64), share: 0.3 }
}

/// The tile size with the shortest time: large tiles reach the peak, small ones fill the machine.
fn best_tile(machine: &Machine, product: &Product) -> Tile {
    let (rows, cols) = (machine.count(Quantity::TileRows), machine.count(Quantity::TileCols));
    let tiles = [(rows, cols, 1.0), (128, 128, 0.9), (64, 128, 0.75), (64, 64, 0.55), (32, 64, 0.35)];
    let time = |tile: &Tile| tile.padded_flops(product) / tile.share / tile.efficiency(machine, product);
    let tiles = tiles.map(|(rows, cols, share)| Tile { rows, cols, share });
    tiles.into_iter().min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(tiles[0])
}

fn attention(draft: &Draft, machine: &Machine, work: &Work, traffic: Traffic, cached: Bytes, chain: &Chain) -> Parts {
    let all = products(draft);
    let share = machine.get(Quantity::AttentionShare);
    let rate = matrix_rate(machine, work.matrix_bits).per_second;
    let halved = if is_causal(draft, chain) { 0.5 } else { 1.0 };
    // Scores and product see half of the keys under a causal mask; a projection is a product like any other.
    let of_scores = |p: &&Product| p.batch > 1;
    let score_flops = match chain.links.first() {
        // There are no other matmuls in a gradient, and its kernels may do some of them more than once.
        Some(Link::AttentionGradient(_)) => work.matrix_flops,
        _ => all.iter().filter(of_scores).map(|p| 2.0 * (p.m * p.n * p.k * p.batch) as f64).sum(),
    };
    let other_flops = work.matrix_flops - score_flops;
    let matrix = Seconds((score_flops * halved / share + other_flops / PROJECTION_SHARE) / rate);
    let vector = Seconds(work.vector_flops() * halved / machine.tflops(Quantity::VectorTflops).per_second);
    let blocks: f64 =
        all.iter().filter(of_scores).map(|p| (p.m.div_ceil(QUERY_TILE) * p.batch) as f64).fold(1.0, f64::max);
    let first = all.iter().find(of_scores);
    let reread =
        first.map_or(0.0, |p| (2 * p.n * p.k * p.element * p.batch) as f64 * p.m.div_ceil(QUERY_TILE) as f64 * halved);
    let reread = Bytes((reread - traffic.read.0 as f64).max(0.0) as u64);
    let resources =
        resources(machine, TILE_REGISTERS + epilogue_registers(draft), Bytes(160 << 10), TILE_BLOCK, blocks);
    let busy = (blocks / machine.get(Quantity::Processors)).min(1.0);
    let waits = Seconds::from_us(machine.get(Quantity::BarrierUs)) * work.waits;
    Parts {
        reread,
        resources,
        launch: Seconds::from_us(machine.get(Quantity::LaunchUs)) + waits,
        memory: (traffic.total() - cached) / machine.gbps(Quantity::DramGbps),
        cache: (cached + reread) / machine.gbps(Quantity::CacheGbps),
        matrix: matrix * (1.0 / busy.max(1e-3)),
        vector: vector * (1.0 / busy.max(1e-3)),
        serial: 0.3,
    }
}

/// Threads, registers and shared memory of a block that stores probabilities.
const SCORES_BLOCK: f64 = 128.0;
const SCORES_REGISTERS: u32 = 128;
const SCORES_SHARED: Bytes = Bytes(36 << 10);

/// Stored probabilities: two passes over the keys, each with a matmul and an exponential, and the result is written
/// once. f32 scores are stored in the result instead of being recomputed: it is written, read and written again.
fn scores(draft: &Draft, machine: &Machine, work: &Work, traffic: Traffic, cached: Bytes, chain: &Chain) -> Parts {
    let halved = if is_causal(draft, chain) { 0.5 } else { 1.0 };
    let waits = work.matrix_bits > 16;
    let rate = matrix_rate(machine, work.matrix_bits).per_second * machine.get(Quantity::AttentionShare);
    let matrix = Seconds(work.matrix_flops * halved * if waits { 1.0 } else { 2.0 } / rate);
    let again = work.of(Class::Exp) * Class::Exp.flops() * LANES as f64;
    let vector = Seconds((work.vector_flops() + again) * halved / machine.tflops(Quantity::VectorTflops).per_second);
    let all = products(draft);
    // Tiles of half the height where tall ones are too few.
    let processors = machine.get(Quantity::Processors);
    let count = |tile: usize| all.iter().map(|p| (p.m.div_ceil(tile) * p.batch) as f64).fold(1.0, f64::max);
    let tile = if count(QUERY_TILE) < 2.0 * processors { QUERY_TILE / 2 } else { QUERY_TILE };
    let blocks = count(tile);
    let keys = |p: &Product| (p.n * p.k * p.element * p.batch * p.m.div_ceil(tile)) as f64;
    let reread = all.iter().map(keys).sum::<f64>() * halved * if waits { 1.0 } else { 2.0 };
    let reread = Bytes((reread - traffic.read.0 as f64).max(0.0) as u64);
    let held = Bytes((traffic.written.0 as f64 * halved * if waits { 2.0 } else { 0.0 }) as u64);
    let busy = (blocks / processors).clamp(1e-3, 1.0);
    Parts {
        reread,
        resources: resources(machine, SCORES_REGISTERS, SCORES_SHARED, SCORES_BLOCK, blocks),
        launch: Seconds::from_us(machine.get(Quantity::LaunchUs)),
        memory: (traffic.total() - cached + held) / machine.gbps(Quantity::DramGbps),
        cache: (cached + reread) / machine.gbps(Quantity::CacheGbps),
        matrix: matrix * (1.0 / busy),
        vector: vector * (1.0 / busy),
        serial: 0.3,
    }
}

fn is_causal(draft: &Draft, chain: &Chain) -> bool {
    match chain.links.first() {
        Some(Link::Attention(link) | Link::AttentionScores(link)) => link.request.mask == Mask::Causal,
        // Its operands may be unknown; only its causal mask asks which of two numbers is smaller, a softmax which are equal.
        Some(Link::AttentionGradient(_)) => {
            draft.nodes.iter().any(|&id| matches!(draft.graph.node(id).op, Op::Compare(CompareOp::Le)))
        }
        Some(Link::Matmul { .. } | Link::Routed { .. } | Link::CrossEntropy(_) | Link::CrossEntropyGradient(_))
        | None => false,
    }
}
