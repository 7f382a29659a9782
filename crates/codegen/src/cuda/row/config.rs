//! The choice of a row kernel's config, which maps it to threads, from shape and machine.

use crate::body::{Access, Body, Expr, Stage};
use crate::cuda::row::layout::ArgLayout;
use crate::cuda::row::passes::Passes;
use crate::cuda::row_config::{Policy, RowConfig};
use crate::cuda::target::CudaTarget;

/// What the choice depends on.
pub(crate) struct Facts<'a> {
    pub body: &'a Body,
    pub layouts: &'a [ArgLayout],
    pub shared_rows: &'a [bool],
    pub passes: &'a Passes,
    pub rows: usize,
    pub cols: usize,
    pub target: &'a CudaTarget,
}

/// Threads of a block whose rows are short, or that knows no rows: small blocks start and end evenly.
const BLOCK: usize = 128;

/// Columns per thread if no value is kept across a reduction.
const PASSING: usize = 8;

/// Maximum columns per thread: more loads in flight do not help, and registers run out.
const HELD: usize = 32;

/// Registers per thread for its columns, besides addresses and temporaries.
const WORDS: f64 = 72.0;

/// Registers that random bits take.
const RANDOM: f64 = 36.0;

/// Registers of a thread beside its columns: addresses, counters.
const OTHER: f64 = 44.0;

/// Registers for addresses in shared memory.
const STAGED: f64 = 16.0;

/// Words of registers for a column that is read from shared memory ahead of its use.
const READ_AHEAD: f64 = 1.25;

/// Registers for the values of a sweep, one each up to this many.
const TEMPORARIES: usize = 28;

/// Registers per thread if rows are staged in shared memory: eight warps per multiprocessor are enough then.
const MANY: f64 = 232.0;

/// Bytes in flight per multiprocessor that hide memory latency: its share of the bandwidth for a microsecond and
/// a half.
const IN_FLIGHT: usize = 48 << 10;

/// The parameters of a config: a point in the search space of tuning.
#[derive(Debug, Clone, Copy)]
struct Point {
    /// columns that a thread holds, at most
    held: usize,
    /// threads of a block whose rows are short, or that knows no rows
    block: usize,
    /// threads per multiprocessor of persistent blocks that iterate over rows; 0 without persistent blocks
    resident: usize,
    /// whether the next rows are staged in shared memory
    staged: bool,
}

impl Facts<'_> {
    /// The suggested config.
    pub fn choose(&self) -> RowConfig {
        let point = self.suggested();
        if self.body.flat { self.flat(point) } else { self.rows(point) }
    }

    /// Configs worth measuring, the suggested one first.
    pub fn candidates(&self) -> Vec<RowConfig> {
        let mut all = vec![self.choose()];
        let residents: &[usize] = if self.has_column_sums() { &[256, 384, 512, 768, 1024] } else { &[0] };
        let stagings: &[bool] = if self.can_stage() { &[true, false] } else { &[false] };
        let waits = residents.iter().flat_map(|&resident| stagings.iter().map(move |&staged| (resident, staged)));
        for held in [8, 16, 24, 32] {
            for block in [128, 256] {
                for (resident, staged) in waits.clone() {
                    let point = Point { held, block, resident, staged };
                    let config = if self.body.flat { self.flat(point) } else { self.rows(point) };
                    if !all.iter().any(|known: &RowConfig| known.is_same(&config)) {
                        all.push(RowConfig { why: "measured".into(), ..config });
                    }
                }
            }
        }
        all
    }

    fn suggested(&self) -> Point {
        let sums = self.has_column_sums();
        let passing = Point { held: PASSING, block: BLOCK, resident: 0, staged: false };
        if self.body.flat || (!sums && !self.reduces()) {
            return passing;
        }
        // Too few elements to fill the multiprocessors: then more threads share a row.
        let share = self.rows * self.cols / (1024 * self.target.processors.max(1));
        let wanted = share.next_multiple_of(HELD / 4).clamp(HELD / 4, HELD);
        if !sums {
            let by_registers = (WORDS / self.words_a_column(false).max(0.25)) as usize;
            return Point { held: wanted.min(by_registers), ..passing };
        }
        let staged = self.can_stage();
        let most = ((240.0 - self.other_registers()) / self.words_walking(staged)) as usize;
        let wanted = (share / 2).next_multiple_of(HELD / 4).clamp(HELD / 4, HELD);
        let held = most.min(wanted);
        let point =
            |held: usize, columns: usize| Point { held, resident: self.resident(columns, staged), staged, ..passing };
        if self.cols <= 32 * held {
            return point(held, self.cols.div_ceil(32 * self.vector()) * self.vector());
        }
        if !self.reduces() {
            return point(PASSING, PASSING);
        }
        if staged {
            // Many columns per thread: fewer threads meet at a barrier, and fewer blocks share a row.
            let held = (8..=held).rev().find(|&columns| self.registers(columns, staged) <= MANY).unwrap_or(8);
            return point(held, held);
        }
        // Fewer columns a thread where more would leave too few threads to hide the barriers.
        let half = (HELD / 2).min(held).max(1);
        let held = if self.resident(half, staged) >= 512 { half } else { (HELD / 4).min(half) };
        Point { resident: self.resident(held, staged).max(512), ..point(held, held) }
    }

    /// Threads per multiprocessor of persistent blocks, by their registers.
    fn resident(&self, columns: usize, staged: bool) -> usize {
        ((65536.0 / self.registers(columns, staged)) as usize / 64 * 64).clamp(256, 1024)
    }

    /// Approximate registers per thread of persistent blocks.
    fn registers(&self, columns: usize, staged: bool) -> f64 {
        let draws = self.body.exprs.iter().any(|expr| matches!(expr, Expr::Keep { .. }));
        let words = self.words_walking(staged) + if staged { READ_AHEAD } else { 0.0 };
        let addresses = if staged { STAGED } else { 0.0 } + if draws { RANDOM } else { 0.0 };
        words * columns as f64 + self.other_registers() + addresses
    }

    /// Registers of a thread beside its columns.
    fn other_registers(&self) -> f64 {
        let longest = self.passes.list.iter().map(|pass| pass.lanes.len()).max().unwrap_or(0);
        OTHER + longest.min(TEMPORARIES) as f64
    }

    /// Registers per column in persistent blocks, which hold the next row besides this one.
    fn words_walking(&self, staged: bool) -> f64 {
        self.words_a_column(staged) + if staged { 0.0 } else { self.words_ahead() }
    }

    /// Whether rows can be copied to shared memory past the registers: four bytes at least at a time.
    fn can_stage(&self) -> bool {
        let vector = self.vector();
        let copies = |(alignment, size): (usize, usize)| alignment.min(vector * size) >= 4;
        let any = self.staged_loads().next().is_some();
        any && self.has_column_sums() && self.target.arch.is_ampere() && self.streams().all(copies)
    }

    /// Adds as many stages as fit shared memory to a config with persistent blocks; none if there is not even
    /// room for two.
    fn staged(&self, config: RowConfig) -> Option<RowConfig> {
        let stage = self.stage_bytes(&config);
        let room = self.target.arch.block_shared();
        let fixed = self.fixed_shared(&config);
        let stages = |resident: usize| (room / resident).saturating_sub(fixed + 1024) / stage.max(1);
        let resident = (1..=config.resident).rev().find(|&resident| stages(resident) >= 2)?;
        let enough = 1 + IN_FLIGHT.div_ceil(stage.max(1) * resident);
        Some(RowConfig { resident, stages: stages(resident).min(enough).clamp(2, 4), ..config })
    }

    /// Bytes of shared memory per staged row of a block.
    pub fn stage_bytes(&self, config: &RowConfig) -> usize {
        let columns = config.threads() * config.chunks * config.vector;
        let loads = self.staged_loads().map(|arg| self.body.args[arg].dtype.bytes().max(4 / config.vector));
        columns * loads.sum::<usize>()
    }

    /// Shared memory beside the rows: sums of a block's rows, reductions.
    fn fixed_shared(&self, config: &RowConfig) -> usize {
        let sums = if config.rows_per_block > 1 { 4 * self.cols * self.column_sums() } else { 0 };
        sums + RESERVED / 4
    }

    /// Arguments whose rows differ and are loaded along the row.
    fn staged_loads(&self) -> impl Iterator<Item = usize> {
        let args = self.body.args.iter().zip(self.shared_rows).enumerate();
        let own = args.filter(|(_, (spec, shared))| is_loaded(spec.access) && !spec.written && !**shared);
        own.map(|(arg, _)| arg)
    }

    fn flat(&self, point: Point) -> RowConfig {
        let vector = self.vector();
        RowConfig {
            policy: Policy::Flat,
            vector,
            threads_per_row: point.block,
            rows_per_block: 1,
            chunks: (point.held / vector).max(1),
            parts: 1,
            cluster: false,
            resident: 0,
            stages: 0,
            wide: self.rows * self.cols > i32::MAX as usize,
            why: "no row structure".into(),
        }
    }

    /// Arguments that are read or written along the row: alignment in bytes and bytes of an element.
    fn streams(&self) -> impl Iterator<Item = (usize, usize)> {
        let along = self.body.args.iter().zip(self.layouts).filter(|(spec, layout)| {
            let moves = !layout.axes.is_empty() || self.body.flat;
            matches!(spec.access, Access::GatheredRow { .. }) || (spec.access == Access::Row && moves)
        });
        along.map(|(spec, layout)| (layout.alignment, spec.dtype.bytes()))
    }

    /// Columns that one access takes: 16 bytes of the narrowest operand, as far as all rows start at such a multiple.
    fn vector(&self) -> usize {
        let narrowest = self.streams().map(|(_, size)| size).min().unwrap_or(4);
        let fits = |vector: &usize| {
            let divides = self.body.flat || self.cols.is_multiple_of(*vector);
            divides && self.streams().all(|(alignment, size)| alignment >= (vector * size).min(16))
        };
        [8, 4, 2, 1].into_iter().filter(|vector| vector * narrowest <= 16).find(fits).unwrap_or(1)
    }

    fn column_sums(&self) -> usize {
        let wide = |stage: &&Stage| matches!(stage, Stage::ColumnSum { width, .. } if *width > 1 || self.cols == 1);
        self.body.stages.iter().filter(wide).count()
    }

    fn has_column_sums(&self) -> bool {
        self.body.stages.iter().any(|stage| matches!(stage, Stage::ColumnSum { .. }))
    }

    fn reduces(&self) -> bool {
        self.body.stages.iter().any(|stage| matches!(stage, Stage::RowReduce { .. }))
    }

    /// Words of registers that a column takes while it waits: rows as loaded, kept values, sums over rows.
    fn words_a_column(&self, staged: bool) -> f64 {
        let sums = self.has_column_sums();
        let waits = |arg: &usize| {
            let spec = &self.body.args[*arg];
            // Weights that one sweep reads are loaded there where a block walks over rows.
            let here = sums && self.shared_rows[*arg] && self.passes.sweeps_of(self.body, *arg).len() < 2;
            let in_stages = staged && !self.shared_rows[*arg];
            is_loaded(spec.access) && !spec.written && !here && !in_stages
        };
        let loads = (0..self.body.args.len()).filter(waits).map(|arg| self.body.args[arg].dtype.bytes());
        let loads: usize = loads.sum();
        let kept: usize = self.passes.kept.iter().map(|(_, dtype)| dtype.bytes()).sum();
        (loads + kept) as f64 / 4.0 + self.column_sums() as f64
    }

    /// Words of registers that a column of the next row takes.
    fn words_ahead(&self) -> f64 {
        self.staged_loads().map(|arg| self.body.args[arg].dtype.bytes()).sum::<usize>() as f64 / 4.0
    }

    fn rows(&self, point: Point) -> RowConfig {
        let vector = self.vector();
        let pieces = self.cols.div_ceil(vector);
        let held = (point.held / vector).max(1);
        let base = self.base(vector);
        let config = if pieces <= 32 * held {
            self.within_a_warp(base, pieces, held, point.block)
        } else if !self.reduces() {
            self.split(base, pieces, held, point.block)
        } else {
            self.by_blocks(base, pieces, held, point.staged)
        };
        let config = match point.resident {
            0 => return config,
            threads => {
                // Four rows a block at least, as each block's sums are written and read again.
                let rows = self.rows * config.parts / (4 * self.target.processors * config.rows_per_block).max(1);
                RowConfig { resident: (threads / config.threads()).min(rows).max(1), ..config }
            }
        };
        if !point.staged || config.policy != Policy::Registers {
            return config;
        }
        self.staged(config).unwrap_or_else(|| {
            let held = HELD / 4;
            self.rows(Point { held, resident: self.resident(held, false), staged: false, ..point })
        })
    }

    /// The initial config: one warp per row.
    fn base(&self, vector: usize) -> RowConfig {
        RowConfig {
            policy: Policy::Registers,
            vector,
            threads_per_row: 32,
            rows_per_block: 1,
            chunks: 1,
            parts: 1,
            cluster: false,
            resident: 0,
            stages: 0,
            wide: self.rows > i32::MAX as usize,
            why: String::new(),
        }
    }

    /// For a block of another kernel that walks over some rows with all of its threads and their registers: a warp or a part of one a
    /// row, else all of the block. Rows that no registers hold are read again for each sweep.
    pub fn following(&self, threads: usize, registers: usize) -> RowConfig {
        let vector = self.vector();
        let pieces = self.cols.div_ceil(vector).max(1);
        let fits = |columns: &usize| self.registers(*columns, false) <= registers as f64;
        let held = ((1..=HELD).rev().find(fits).unwrap_or(1) / vector).max(1);
        let base = RowConfig { resident: 1, ..self.base(vector) };
        if pieces <= 32 * held {
            return self.within_a_warp(base, pieces, held, threads);
        }
        let chunks = pieces.div_ceil(threads);
        let (policy, why) = match chunks <= held {
            true => (Policy::Registers, format!("{} warps hold the row", threads / 32)),
            false => (Policy::Streamed, "the row does not fit registers".into()),
        };
        RowConfig { policy, threads_per_row: threads, chunks, why, ..base }
    }

    /// A warp or a part of one a row: no barrier is needed.
    fn within_a_warp(&self, base: RowConfig, pieces: usize, held: usize, block: usize) -> RowConfig {
        let chunks = |threads: usize| pieces.div_ceil(threads).max(1);
        let waste = |threads: &usize| (threads * chunks(*threads)) as f64 / pieces.max(1) as f64;
        let candidates = [32, 16, 8, 4, 2, 1].into_iter().filter(|&threads| chunks(threads) <= held);
        let candidates: Vec<usize> = candidates.collect();
        let good = candidates.iter().copied().find(|threads| waste(threads) <= 1.15);
        let least = candidates.iter().copied().min_by(|a, b| waste(a).total_cmp(&waste(b)));
        let threads = good.or(least).unwrap_or(32);
        let why = match threads {
            32 => "a warp holds the row".into(),
            _ => format!("{} columns fill a part of a warp", self.cols),
        };
        RowConfig { threads_per_row: threads, rows_per_block: block / threads, chunks: chunks(threads), why, ..base }
    }

    /// No reduction along the row: blocks take pieces of it.
    fn split(&self, base: RowConfig, pieces: usize, held: usize, block: usize) -> RowConfig {
        let chunks = held.min(4);
        let threads = (pieces.div_ceil(chunks).div_ceil(32) * 32).min(block);
        let parts = pieces.div_ceil(threads * chunks);
        RowConfig { threads_per_row: threads, chunks, parts, why: "columns do not depend on each other".into(), ..base }
    }

    /// Several warps a row, then several blocks.
    fn by_blocks(&self, base: RowConfig, pieces: usize, held: usize, staged: bool) -> RowConfig {
        let crowded = self.has_column_sums() && (staged || self.resident(held * base.vector, staged) < 448);
        let most = if crowded { 256 } else { 512 };
        let spread = |pieces: usize| {
            let least = (held / 2).max(1);
            let threads = |chunks: usize| pieces.div_ceil(chunks).div_ceil(32) * 32;
            let waste = |chunks: &usize| threads(*chunks) * chunks;
            let chunks = (least..=held).rev().min_by_key(waste).unwrap_or(held);
            (threads(chunks), chunks)
        };
        let (threads, chunks) = spread(pieces);
        // One block of more than 512 threads fills a multiprocessor, and its loads wait for its own stores. A row in
        // shared memory leaves room for several.
        let long =
            RowConfig { policy: Policy::Shared, threads_per_row: 512, chunks: pieces.div_ceil(512), ..base.clone() };
        let shared = self.shared_bytes(&long);
        let many = self.rows >= self.target.processors || !self.target.arch.has_clusters();
        let fits = 2 * (shared + RESERVED) <= self.target.arch.block_shared();
        if threads > 512 && many && fits && !self.has_column_sums() {
            let why = format!("{} KiB of shared memory hold a row, so that several blocks fit", shared >> 10);
            return RowConfig { why, ..long };
        }
        if threads <= most {
            let why = format!("{} warps hold the row", threads / 32);
            return RowConfig { threads_per_row: threads, chunks, why, ..base };
        }
        let clusters = [2, 4, 8, 16].into_iter().find(|parts| spread(pieces.div_ceil(*parts)).0 <= most);
        if let (Some(parts), true) = (clusters, self.target.arch.has_clusters()) {
            let (threads, chunks) = spread(pieces.div_ceil(parts));
            let why = format!("the row needs the registers of {parts} blocks");
            return RowConfig { threads_per_row: threads, chunks, parts, cluster: true, why, ..base };
        }
        let chunks = pieces.div_ceil(512);
        let threads = pieces.div_ceil(chunks).div_ceil(32) * 32;
        let config = RowConfig { threads_per_row: threads, chunks, ..base };
        let shared = self.shared_bytes(&config);
        if shared <= self.target.arch.block_shared() - RESERVED {
            let why = format!("the row does not fit registers, {} KiB of shared memory hold it", shared >> 10);
            return RowConfig { policy: Policy::Shared, why, ..config };
        }
        RowConfig { policy: Policy::Streamed, why: "the row fits neither registers nor shared memory".into(), ..config }
    }

    /// Bytes of shared memory that hold a row between sweeps.
    pub fn shared_bytes(&self, config: &RowConfig) -> usize {
        let loads: usize =
            self.waiting_loads().map(|arg| self.body.args[arg].dtype.bytes().max(4 / config.vector)).sum();
        let kept: usize = self.passes.kept.iter().map(|(_, dtype)| dtype.bytes().max(4 / config.vector)).sum();
        let columns = config.threads_per_row * config.chunks * config.vector;
        columns * (loads + kept)
    }

    /// Arguments that more than one sweep reads.
    pub fn waiting_loads(&self) -> impl Iterator<Item = usize> {
        (0..self.body.args.len()).filter(|&arg| self.passes.sweeps_of(self.body, arg).len() > 1)
    }
}

/// Shared memory that reductions and the like need beside the row.
pub(crate) const RESERVED: usize = 8 << 10;

fn is_loaded(access: Access) -> bool {
    matches!(access, Access::Row | Access::GatheredRow { .. })
}
