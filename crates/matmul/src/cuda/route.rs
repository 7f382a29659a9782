//! How rows find their experts on a GPU: one block sorts them by the expert that an index picks for each, and cuts each expert's rows into
//! tiles (`route.cu`). The kernel that multiplies reads the list.

use deuteron_codegen::argument::{ArgBinding, Lookup};
use deuteron_codegen::cuda::grid::{Grid, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::Dtype;
use deuteron_plan::Work;

/// The kernel that sorts.
pub(super) const TEXT: &str = include_str!("route.cu");
/// Threads and warps of the block that sorts, as in `route.cu`.
const THREADS: u32 = 1024;
const WARPS: usize = 32;
/// Experts, at most: a thread has the rows of one.
const MAX_EXPERTS: usize = 1024;
/// Bytes of shared memory that it takes besides the counts, at most.
const SUMS_BYTES: usize = 1024;
/// Rows, columns and tiles, at most: they are counted by 32 bits.
const MAX_SIZE: usize = 1 << 24;
const MAX_TILES: usize = 1 << 30;
/// Microseconds to sort rows and to look up the first tiles, which is a chain of reads that wait for each other, and for each row. Fitted to
/// `h200-experts.csv`.
const SORT: f64 = 9.5;
const SORT_ROW: f64 = 0.0005;
/// Bytes of memory per microsecond and multiprocessor of an H200.
const MEMORY: f64 = 31e3;
/// Positions among the arguments of a routed matmul.
pub(super) const LEFT: usize = 0;
pub(super) const TABLE: usize = 1;
pub(super) const INDICES: usize = 2;

/// Rows that are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Routing {
    /// how many
    pub rows: usize,
    /// matrices of the table
    pub experts: usize,
    /// rows of a tile
    pub tile: usize,
}

impl Routing {
    /// Of the rows of a matmul and its arguments.
    pub fn new(shape: &MatmulShape, table: &ArgBinding, tile: usize) -> Routing {
        let experts = table.leading.first().map_or(0, |&(experts, _)| experts);
        Routing { rows: shape.m, experts, tile }
    }

    /// Whether there is room to sort them, and the tiles of a matmul with so many columns can be counted.
    pub fn fits(&self, shape: &MatmulShape, target: &CudaTarget) -> bool {
        let sized = [shape.m, shape.n, self.experts].iter().all(|size| (1..MAX_SIZE).contains(size));
        sized
            && self.experts <= MAX_EXPERTS
            && self.shared() + SUMS_BYTES <= target.arch.block_shared()
            && self.row_tiles() * shape.n.div_ceil(64) < MAX_TILES
    }

    /// Tiles along the rows, at most: each expert may have one that is not full.
    pub fn row_tiles(&self) -> usize {
        self.rows / self.tile + self.rows.min(self.experts)
    }

    /// The same as if every expert's last tile were half full, or each had one.
    pub fn usual_row_tiles(&self) -> usize {
        let used = self.rows.min(self.experts);
        (self.rows.div_ceil(self.tile) + used / 2).max(used)
    }

    /// Time of a launch on an H200, roughly, whose tiles take so long where nothing waits for memory. Each matrix that a row may pick is read once.
    pub fn microseconds(&self, shape: &MatmulShape, operands: Dtype, multiplied: f64, processors: usize) -> f64 {
        let matrices = self.rows.min(self.experts) * shape.n * shape.k;
        let bytes = (matrices + self.rows * (shape.k + shape.n)) * operands.bytes();
        SORT + SORT_ROW * self.rows as f64 + multiplied.max(bytes as f64 / (MEMORY * processors as f64))
    }

    /// What stands before the text.
    pub fn constants(&self) -> String {
        let bits = self.experts.next_power_of_two().ilog2();
        format!("constexpr int EXPERTS = {};\nconstexpr int BITS = {bits};\n", self.experts)
    }

    /// Bytes of the workspace: a number for each row, then the list of tiles.
    pub fn workspace(&self) -> usize {
        self.list_at() + 16 * (1 + self.row_tiles())
    }

    /// Where rows in order and the list of tiles lie in the workspace.
    pub fn lists(&self) -> [Word; 2] {
        [Word::Workspace(0), Word::Workspace(self.list_at())]
    }

    fn list_at(&self) -> usize {
        (4 * self.rows).next_multiple_of(16)
    }

    /// Bytes of shared memory for counts.
    fn shared(&self) -> usize {
        4 * WARPS * self.experts
    }

    /// The grid that sorts.
    pub fn grid(&self, args: &[ArgBinding], target: &CudaTarget) -> Grid {
        let indices = Word::Argument { position: INDICES, offset: args[INDICES].start() };
        let numbers = [self.rows, TABLE].map(|number| Word::Number(number as u64));
        Grid {
            entry: "route",
            blocks: [1; 3],
            threads: THREADS,
            cluster: 1,
            shared: self.shared() as u32,
            waits: target.arch.has_dependent_grids(),
            walks: false,
            words: [indices].into_iter().chain(self.lists()).chain([Word::Fault]).chain(numbers).collect(),
        }
    }

    /// What is looked up: an index that picks no expert is a fault.
    pub fn lookup(&self, args: &[ArgBinding]) -> Lookup {
        Lookup {
            argument: TABLE,
            indices: INDICES,
            offset: args[INDICES].offset,
            axes: vec![(self.rows, 1)],
            table_rows: self.experts,
        }
    }
}

/// One matmul of all rows, in so much time if that is known.
pub(super) fn work(shape: &MatmulShape, operands: Dtype, microseconds: Option<f64>) -> Work {
    Work {
        microseconds,
        matrix_flops: 2.0 * (shape.m * shape.n) as f64 * shape.k as f64,
        matrix_bits: 8 * operands.bytes() as u32,
        matrix_rows: shape.m,
        products: 1.0,
        ..Work::default()
    }
}
