//! Two matmuls of few rows with elementwise work between them as one launch, from Hopper on: `pair/kernel.cu`, whose text is its contract.
//!
//! - Takes: 16-bit operands of one type, up to [`ROWS`] rows, sizes that are multiples of 16, weights either way; row work that makes the
//!   left operand, elementwise work between and behind. All else is two launches.
//! - Traffic: every weight once, the left operand once a block, shares of the result once a cluster, both from the L2.
//! - In flight: all halves of units that fit the shared memory, 96 KiB of a block where GPT-2 124M has its weights. Two launches have the
//!   weights of the second in flight too, but wait for the end of the first before they multiply.

mod lowered;

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::body::Body;
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Tiling, Word};
use deuteron_codegen::cuda::row::sides::Side;
use deuteron_codegen::cuda::row::{PRELUDE, PRELUDE_PARTS};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::linear::earlier_sums;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_codegen::tile::{Part, text_beside};
use deuteron_graph::Dtype;
use deuteron_plan::primitive_work;

use self::lowered::{LoweredPair, PairFit, PairRole, fit, lower};

/// Rows, at most: two matrices of the left operand of `mma`.
pub const ROWS: usize = 32;
/// Hidden columns that are made and multiplied at a time, and what sizes are multiples of.
const UNIT: usize = 16;
/// Blocks that add up their shares together.
const CLUSTER: usize = 8;
/// Threads of a block.
const THREADS: usize = 256;
/// Warps of a block.
const WARPS: usize = THREADS / 32;
/// Matrices of 16 by 16 sums that a warp holds, at most: half of its registers.
const HELD: usize = 16;
/// Columns that the work beside the matmuls takes at once.
const VECTOR: usize = 4;

/// Two matmuls of few rows on a GPU.
pub struct PairFamily;

impl Family<CudaTarget> for PairFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let found = fit(&group, ROWS)?;
        let config = Config::of(&found, target)?;
        offered(
            move || primitive_work(&group),
            move || PairKernel { pair: with_earlier_sums(lower(&group, found.clone())), config }.kernel(target),
        )
    }
}

fn with_earlier_sums(mut pair: LoweredPair) -> LoweredPair {
    if let Some(prologue) = &mut pair.prologue {
        prologue.body = earlier_sums(&prologue.body).body;
    }
    pair
}

/// How a pair is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Config {
    /// rounded up to whole matrices
    rows: usize,
    /// units of a block
    units: usize,
    /// clusters of the grid
    clusters: usize,
    /// halves of units in shared memory
    slots: usize,
    /// bytes of shared memory
    shared: usize,
}

impl Config {
    /// Of as few units a block as let all blocks run at once; `None` for operands that the kernel does not take.
    fn of(found: &PairFit, target: &CudaTarget) -> Option<Config> {
        let PairFit { first, second } = found;
        let [k, hidden, n] = [first.shape.k, first.shape.n, second.shape.n];
        let dtype = first.operands[1].dtype;
        let operands = [&first.operands[0], &first.operands[1], &second.operands[0], &second.operands[1]];
        let alike = matches!(dtype, Dtype::F16 | Dtype::Bf16) && operands.iter().all(|arg| arg.dtype == dtype);
        let vectors = 16 / dtype.bytes();
        let by_lines = |shape: &MatmulShape, arg: &ArgBinding| {
            (shape.b.0 == 1 || shape.b.1 == 1)
                && line(shape).is_multiple_of(vectors)
                && arg.offset.is_multiple_of(vectors)
        };
        let left = first.shape.a.1 == 1
            && first.shape.a.0.is_multiple_of(vectors)
            && first.operands[0].offset.is_multiple_of(vectors);
        let whole = [k, hidden, n].iter().all(|&size| size > 0 && size.is_multiple_of(UNIT) && size < 1 << 24);
        let lies = by_lines(&first.shape, &first.operands[1]) && by_lines(&second.shape, &second.operands[1]);
        if !(target.arch.has_clusters() && alike && whole && lies && (left || !first.prologue.is_empty())) {
            return None;
        }
        let rows = first.shape.m.next_multiple_of(16);
        let blocks = target.processors / CLUSTER * CLUSTER;
        let units = (hidden / UNIT).div_ceil(blocks.max(CLUSTER));
        let clusters = (hidden / UNIT).div_ceil(units).div_ceil(CLUSTER);
        // As `SLOT`, `LEFT`, `PITCH`, `HIDDEN` and `SHARE` of the text.
        let slot = 32 * k.max(n) + 256;
        let beside = rows * (2 * k + 16) + WARPS * rows * (UNIT + 4) * 4 + rows * (2 * UNIT + 16);
        let slots = (target.arch.block_shared().saturating_sub(beside + 1024) / slot).min(2 * units);
        let shares = CLUSTER * rows * (n / UNIT).div_ceil(CLUSTER) * UNIT * 4;
        let shared = (slots * slot + beside).max(shares);
        let held = (n / UNIT).div_ceil(WARPS) * (rows / 16);
        let fits = slots >= 2 && held <= HELD && shared + 1024 <= target.arch.block_shared();
        fits.then_some(Config { rows, units, clusters, slots, shared })
    }
}

/// Elements from one line of a right operand to the next.
fn line(shape: &MatmulShape) -> usize {
    if shape.b.1 == 1 { shape.b.0 } else { shape.b.1 }
}

struct PairKernel {
    pair: LoweredPair,
    config: Config,
}

impl PairKernel {
    fn kernel(&self, target: &CudaTarget) -> Kernel {
        let Config { rows, units, clusters, slots, .. } = self.config;
        let own = text_beside(&[Part::Matrix, Part::Signals], &PRELUDE_PARTS);
        let text =
            [&self.constants(), PRELUDE.as_str(), &own, &self.sides(), include_str!("pair/kernel.cu")].join("\n");
        let tiling = Tiling {
            entry: "matmul_pair",
            by: "mma.sync",
            tile: [rows, units * UNIT],
            stages: Some(slots),
            walked: None,
            resident: 1,
        };
        let name = format!("every weight once, {} hidden columns a block, {clusters} clusters", units * UNIT);
        let launch = Launch::of_grids(self.pair.arguments(), self.grids(target))
            .with_variant(name, String::new())
            .with_tiling(tiling);
        Kernel::new(Source::Cuda(CudaSource::new("matmul_pair", text)), launch)
    }

    fn constants(&self) -> String {
        let ([first, second], config) = (&self.pair.shapes, &self.config);
        let mut text = format!(
            "// two matmuls of {} rows: {} x {}, then {} columns\n#define WAITS\n#define HEAD {}\n",
            first.m,
            first.k,
            first.n,
            second.n,
            u8::from(self.pair.prologue.is_some())
        );
        let kind = if self.pair.dtype() == Dtype::F16 { 1 } else { 2 };
        let numbers = [
            ("V", VECTOR),
            ("M", config.rows),
            ("K", first.k),
            ("F_COLUMNS", first.n),
            ("N", second.n),
            ("UNITS", config.units),
            ("SLOTS", config.slots),
            ("CLUSTER", CLUSTER),
            ("CLUSTERS", config.clusters),
            ("KIND", kind),
            ("SHARED", self.shared_words().len() / 4),
        ];
        text.extend(numbers.map(|(name, value)| format!("constexpr int {name} = {value};\n")));
        // Long lines run along the rows of the first operand's columns, and along those of the second's rows.
        let long = [("LONG_FIRST", first.b.0 == 1), ("LONG_SECOND", second.b.1 == 1)];
        text.extend(long.map(|(name, value)| format!("constexpr bool {name} = {value};\n")));
        text
    }

    fn sides(&self) -> String {
        let prologue = match self.prologue() {
            Some(prologue) => prologue.prologue(self.pair.shapes[0].m, THREADS),
            None => include_str!("no_head.cuh").to_string(),
        };
        [prologue, self.between().between(), self.epilogue().epilogue()].join("\n")
    }

    fn grids(&self, target: &CudaTarget) -> Grids {
        let ([first, second], config) = (&self.pair.shapes, &self.config);
        let mut words = match self.prologue() {
            Some(prologue) => prologue.words(first.m),
            None => vec![Word::Number(0)],
        };
        words.extend(self.between().words(first.m));
        words.extend(self.epilogue().words(first.m));
        let bytes = |elements: usize| Word::Number((elements * self.pair.dtype().bytes()) as u64);
        let place = |role: PairRole| {
            let position = self.pair.position(role)?;
            Some((position, self.pair.args[position].start()))
        };
        let left = place(PairRole::Left).map(|(position, offset)| Word::Argument { position, offset });
        words.extend([left.unwrap_or(Word::Number(0)), bytes(first.a.0)]);
        for (index, shape) in [first, second].into_iter().enumerate() {
            // Of the first operand a unit is columns, of the second rows.
            let unit = UNIT * if index == 0 { shape.b.1 } else { shape.b.0 };
            let at = place(PairRole::Right(index));
            let address = at.map(|(position, offset)| Word::Argument { position, offset });
            let given = at.map(|(position, offset)| Word::Unwritten { position, offset });
            let none = Word::Number(0);
            words.extend([address.unwrap_or(none), bytes(line(shape)), bytes(unit), given.unwrap_or(none)]);
        }
        words.extend([Word::Number(first.m as u64), Word::Persistent(0), Word::Workspace(0)]);
        words.extend(self.shared_words());
        let grid = Grid {
            entry: "matmul_pair",
            blocks: [(config.clusters * CLUSTER) as u32, 1, 1],
            threads: THREADS as u32,
            cluster: CLUSTER as u32,
            shared: config.shared as u32,
            waits: target.arch.has_dependent_grids(),
            words,
        };
        let workspace = if config.clusters > 1 { config.clusters * config.rows * second.n * 4 } else { 0 };
        Grids { list: vec![grid], workspace, persistent: CLUSTER * 4, ..Grids::default() }
    }

    /// What all rows share beside the weights, four words each: the address if it is given, the bytes, those that a block or a rank of the
    /// clusters reads (0: all), and whether it is by rank. One that is nothing where there is none.
    fn shared_words(&self) -> Vec<Word> {
        let share = (self.pair.shapes[1].n / UNIT).div_ceil(CLUSTER) * UNIT;
        let all = |side: &Side, strip: usize, by_rank: bool| -> Vec<Word> {
            let words = |(position, binding, dtype): (usize, &ArgBinding, Dtype)| {
                let size = dtype.bytes();
                let numbers = [side.body.cols * size, strip * size, usize::from(by_rank)];
                let address = Word::Unwritten { position, offset: binding.offset * size };
                [vec![address], numbers.map(|number| Word::Number(number as u64)).to_vec()].concat()
            };
            side.shared_rows().flat_map(words).collect()
        };
        let mut words = self.prologue().map_or(Vec::new(), |prologue| all(&prologue, 0, false));
        words.extend(all(&self.between(), self.config.units * UNIT, false));
        words.extend(all(&self.epilogue(), share, true));
        if words.is_empty() { vec![Word::Number(0); 4] } else { words }
    }

    fn prologue(&self) -> Option<Side<'_>> {
        let prologue = self.pair.prologue.as_ref()?;
        let made = std::slice::from_ref(&prologue.made);
        Some(self.side(&prologue.body, made, PairRole::Prologue, &self.pair.axes[0]))
    }

    fn between(&self) -> Side<'_> {
        self.side(&self.pair.between, &self.pair.handed, PairRole::Between, &self.pair.axes[1])
    }

    fn epilogue(&self) -> Side<'_> {
        let epilogue = &self.pair.epilogue;
        self.side(&epilogue.body, &epilogue.sums, PairRole::Epilogue, &self.pair.axes[2])
    }

    fn side<'a>(
        &'a self,
        body: &'a Body,
        handed: &'a [usize],
        role: fn(usize) -> PairRole,
        axes: &'a [(usize, usize)],
    ) -> Side<'a> {
        let arg = |arg: usize| self.pair.position(role(arg)).map(|position| (position, &self.pair.args[position]));
        Side { body, args: (0..body.args.len()).map(arg).collect(), handed, axes, vector: VECTOR, rounded: None }
    }
}
