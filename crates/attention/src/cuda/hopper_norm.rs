//! What `hopper_rows.cu` and `hopper_block.cu` take, and their launches: attention, a projection or none, a residual and a norm.
//!
//! A row spans heads, or parts of the projection, that several blocks compute. A block has slots in shared memory (`hopper_norm.cuh`): the
//! residual is copied into a slot while the block multiplies, the sum is formed in place, and one word of global memory per 64 columns
//! publishes their mean and squares; its last bit says in which launch it was written. Warps beside those that multiply wait for the words
//! of a row, normalise it in the slot and store it while the others go on. A warp that times out releases its slot and normalises later
//! from memory. Work items are drawn from a counter, and an item only waits for items drawn before it or right after it, so any number of
//! resident blocks makes progress. Clusters that exchange statistics through distributed shared memory were slower (69 us against 49 at
//! 8 x 12 heads of 1024 on an H200): their blocks start and end together.

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::cuda::grid::{Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_codegen::tile::tensor_map::{MAP_WORDS, Mapped, TensorMap};
use deuteron_graph::Dtype;

use super::hopper::{Groups, Walk, section};
use super::text::{HOPPER, HOPPER_ATTEND, text};
use super::time::{Following, launch_us};
use super::words::{RESULT_AT, is_aligned, words};
use crate::kernel::{AttentionKernel, AttentionMask, AttentionShape, HeadStrides};
use crate::norm::{AddNorm, NormKind};

/// Columns whose statistics blocks tell each other, as in `hopper_norm.cuh`.
const UNIT: usize = 64;
/// Numbers of a block that wait for others, at most; those that wait for each other are fewer. As in `hopper_norm.cuh`.
const PLACES: usize = 64;
/// Threads of a block: two warpgroups that multiply, a warp that fetches and three that normalise.
const THREADS: u32 = 384;
/// The board of a block, as in `hopper_norm.cuh`.
const BOARD_BYTES: usize = (1 + PLACES) * 8 + 4 * 4;
/// Rows that are stored together.
const BATCH: usize = 32;
/// What is kept begins with how many numbers were drawn and how often it was launched.
const STATE_BYTES: usize = 256;
/// What a launch waits for, in barriers over all blocks, which is part of its time: the last rows are normalised when all else is done.
const WAITS: f64 = 1.5;
/// The same with a projection: besides, the first parts wait for heads, and while the last ones are computed blocks run out of work.
const PROJECTED_WAITS: f64 = 7.0;
/// Elements have 32-bit numbers.
const MAX_ELEMENTS: usize = 1 << 31;

/// A projection between attention and the residual.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Projection {
    /// whether columns of the weight lie together, and else what is summed
    pub transposed: bool,
    /// elements from one row of the weight, as it lies, to the next
    pub stride: usize,
    /// the weight's position in the launch
    pub weight: usize,
}

/// One launch of attention and all that follows it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowExchange {
    /// how a block is cut
    pub groups: Groups,
    /// columns of a row
    pub cols: usize,
    /// what follows
    pub norm: AddNorm,
    /// what stands in between
    pub projection: Option<Projection>,
}

/// What is computed, and where it lies.
#[derive(Clone, Copy)]
pub(super) struct ExchangeRequest<'a> {
    pub kernel: &'a AttentionKernel,
    /// heads of one sequence side by side
    pub shape: AttentionShape,
    pub norm: Option<&'a AddNorm>,
    /// of the projection
    pub product: Option<&'a MatmulShape>,
    /// operands of attention but for its result, the weight if there is one, then the rest
    pub args: &'a [ArgBinding],
}

/// The shape in which heads are those side by side in a row of so many columns: one head of each sequence is found as a sequence of
/// many heads.
pub(super) fn by_rows(kernel: &AttentionKernel, shape: &AttentionShape, cols: usize) -> AttentionShape {
    let joined = cols / kernel.width;
    let splits = shape.batch == 1 && kernel.group == 1 && joined > 0 && shape.heads.is_multiple_of(joined);
    if !splits || shape.heads == joined {
        return *shape;
    }
    let with_batch = |strides: HeadStrides| HeadStrides { batch: strides.head * joined, ..strides };
    let &AttentionShape { heads, q, k, v, mask, o, .. } = shape;
    let [q, k, v, mask, o] = [q, k, v, mask, o].map(with_batch);
    AttentionShape { batch: heads / joined, heads: joined, q, k, v, mask, o, ..*shape }
}

impl ExchangeRequest<'_> {
    fn rows(&self) -> usize {
        self.shape.batch * self.shape.queries
    }

    /// Columns of a row of attention's result.
    fn inner(&self) -> usize {
        self.shape.heads * self.kernel.width
    }

    /// The arguments of attention alone, its result in the workspace.
    fn alone(&self) -> Option<Vec<ArgBinding>> {
        let operands = self.kernel.operands().len() - 1;
        let mut args = self.args.get(..operands)?.to_vec();
        let result = args.first()?.internal(self.kernel.dtype);
        args.push(ArgBinding { written: true, ..result });
        Some(args)
    }

    /// Whether heads lie side by side in rows that follow each other, queries after queries.
    fn lies_in_rows(&self) -> bool {
        let AttentionShape { batch, heads, queries, o, .. } = self.shape;
        let (width, inner) = (self.kernel.width, self.inner());
        let steps = [(heads, o.head, width), (queries, o.position, inner), (batch, o.batch, queries * inner)];
        steps.iter().all(|&(size, step, expected)| size <= 1 || step == expected)
    }

    /// Elements from one row of an argument to the next, where that is the same for all.
    fn row_stride(&self, position: usize) -> Option<usize> {
        let mut stride = None;
        let mut inner = 1;
        for &(size, step) in self.args.get(position)?.leading.iter().rev().filter(|&&(size, _)| size > 1) {
            match stride {
                None => stride = Some(step),
                Some(first) if step == first * inner => {}
                Some(_) => return None,
            }
            inner *= size;
        }
        stride.or(Some(self.cols())).filter(|&step| step > 0)
    }

    fn cols(&self) -> usize {
        self.product.map_or(self.inner(), |product| product.n)
    }

    fn starts_whole(&self, position: usize) -> bool {
        self.args.get(position).is_some_and(|arg| (arg.offset * arg.dtype.bytes()).is_multiple_of(16))
    }
}

impl RowExchange {
    /// For a launch, if a kernel takes it.
    pub(super) fn new(request: ExchangeRequest<'_>, target: &CudaTarget) -> Option<RowExchange> {
        let (Some(&norm), Some(alone)) = (request.norm, request.alone()) else { return None };
        let cols = request.cols();
        // Heads fill whole pieces of a row of the result.
        let whole = matches!(request.kernel.width, 64 | 128);
        let groups = Groups::new(request.kernel, &request.shape, target).filter(|_| whole)?;
        // Columns that do not fill a part of 128 have parts of 64.
        let groups = match request.product {
            Some(_) if !cols.is_multiple_of(groups.queries()) && request.kernel.width == 64 => Groups::NARROW_FEW,
            _ => groups,
        };
        // What is left of shared memory. A part has two slots, and 64 of the inner size of both operands fill two stages.
        let (stages, slots) = match (request.kernel.width, groups.blocks, request.product) {
            (64, 2, None) => (3, 3),
            (64, ..) => (groups.stages, 2),
            _ => (groups.stages, 1),
        };
        let groups = Groups { walk: Walk::InTurn, stages, slots, ..groups };
        let projection = match request.product {
            None => None,
            Some(product) => {
                let weight = request.kernel.operands().len() - 1;
                let (transposed, stride) = match product.b {
                    (stride, 1) => (true, stride),
                    (1, stride) => (false, stride),
                    _ => return None,
                };
                let alike = product.k == request.inner() && product.m == request.rows() && product.batch.is_empty();
                let of_type = request.args.get(weight).is_some_and(|arg| arg.dtype == request.kernel.dtype);
                let least = if transposed { product.n } else { product.k };
                let whole = (stride * 2).is_multiple_of(16) && (least..MAX_ELEMENTS).contains(&stride);
                let whole = whole && product.a == (product.k, 1);
                // Whatever the cut, which depends on the machine, a launch is taken or not.
                let parts = cols.is_multiple_of(groups.queries()) && cols / request.kernel.width < PLACES;
                let fits = alike && of_type && whole && parts && request.starts_whole(weight);
                Some(Projection { transposed, stride, weight }).filter(|_| fits)?.into()
            }
        };
        let AddNorm { added, residual, weight, bias, sum, result, .. } = norm;
        let given = [Some(residual), Some(weight), bias, sum, Some(result), added].into_iter().flatten();
        let stride = request.row_stride(residual)?;
        let fits = request.lies_in_rows()
            && is_aligned(request.kernel, &request.shape, &alone)
            && cols.is_multiple_of(UNIT)
            && request.shape.heads < PLACES
            && request.shape.batch * request.shape.queries.div_ceil(groups.queries()).pow(2) < 1 << 32
            && (request.product.is_none()
                || request.kernel.mask == AttentionMask::Full
                || request.shape.keys >= request.shape.queries)
            && norm.weights.is_float()
            && norm.eps >= f64::from(f32::MIN_POSITIVE)
            && given.into_iter().all(|position| request.starts_whole(position))
            && (stride * 2).is_multiple_of(16)
            && request.rows() * cols.max(stride).max(request.inner()) < MAX_ELEMENTS;
        fits.then_some(RowExchange { groups, cols, norm, projection })
    }

    /// Time of a launch on an H200, roughly.
    pub(super) fn microseconds(&self, request: ExchangeRequest<'_>, target: &CudaTarget) -> f64 {
        let (rows, cols) = (request.rows(), request.cols());
        let projection = self.projection.map(|_| 2.0 * (rows * cols) as f64 * request.inner() as f64);
        let following = Following { bytes: 3 * rows * cols * request.kernel.dtype.bytes(), projection };
        launch_us(&self.groups, request.kernel, &request.shape, following, target.processors)
    }

    /// What a launch waits for beyond the sums of its kernels, in barriers over all blocks.
    pub fn waits(&self) -> f64 {
        if self.projection.is_some() { PROJECTED_WAITS } else { WAITS }
    }

    /// Why separate kernels are faster, if they are: up to 1.9x on an H200 (`h200-crossover.csv`).
    pub fn drawback(&self) -> Option<&'static str> {
        let ragged = self.projection.is_some() && !self.cols.is_multiple_of(128);
        ragged.then_some("columns of the projection do not fill parts of 128, so its heads are cut for few tiles")
    }

    /// The kernel's name.
    pub fn name(&self) -> &'static str {
        if self.projection.is_some() { "attention_block_hopper" } else { "attention_rows_hopper" }
    }

    /// Number of parts in which statistics are passed to the normalising warps.
    fn handoffs(&self, width: usize) -> usize {
        self.projection.map_or(1, |_| self.groups.queries() / width)
    }

    /// Bytes of shared memory, which starts at a multiple of 1024: that of attention, barriers of slots and numbers, the board, barriers of
    /// parts.
    fn shared(&self, width: usize) -> usize {
        let Groups { stages, keys, slots, .. } = self.groups;
        let chunks = self.projection.map_or(0, |_| stages * keys * width / (self.groups.queries() * UNIT));
        self.groups.used(width) + (3 * slots + 2) * 8 + BOARD_BYTES + 2 * chunks * 8
    }

    /// The text.
    pub(super) fn text(&self, kernel: &AttentionKernel) -> String {
        let cols = self.cols;
        let storage = match self.norm.weights {
            Dtype::F16 => 1,
            Dtype::Bf16 => 2,
            _ => 0,
        };
        let mut constants = self.groups.constants(self.shared(kernel.width));
        constants += &format!(
            "constexpr bool RMS = {};\nconstexpr float EPSILON = {:e}f;\nconstexpr int WEIGHT_STORAGE = {storage};\n\
             constexpr bool STORED = {};\nconstexpr int COLS = {cols};\nconstexpr int HANDOFFS = {};\n",
            self.norm.norm == NormKind::RootMeanSquare,
            self.norm.eps as f32,
            self.norm.sum.is_some(),
            self.handoffs(kernel.width)
        );
        let own = match self.projection {
            None => include_str!("hopper_rows.cu"),
            Some(projection) => {
                let biased = self.norm.added.is_some();
                let transposed = projection.transposed;
                constants += &format!("constexpr bool TRANSPOSED = {transposed};\nconstexpr bool BIASED = {biased};\n");
                include_str!("hopper_block.cu")
            }
        };
        let own = [include_str!("hopper.cuh"), HOPPER_ATTEND, include_str!("hopper_norm.cuh"), own].join("\n");
        text(kernel, &constants, HOPPER, &own)
    }

    /// The grid of a launch; none where there is nothing to write.
    pub(super) fn grids(&self, request: ExchangeRequest<'_>, target: &CudaTarget) -> Grids {
        let ExchangeRequest { kernel, ref shape, args, .. } = request;
        let (Some(alone), Some(stride)) = (request.alone(), request.row_stride(self.norm.residual)) else {
            return Grids::default();
        };
        let (rows, cols, queries) = (request.rows(), request.cols(), self.groups.queries());
        if rows == 0 {
            return Grids::default();
        }
        let tiles = shape.queries.div_ceil(queries);
        let groups = shape.batch * tiles;
        let parts = self.projection.map_or(0, |_| cols / queries);
        let numbers = groups * (shape.heads + parts);
        let places = target.processors * self.groups.blocks;
        let blocks = numbers.min(places);

        let ready = self.projection.map_or(0, |_| (groups * 4).next_multiple_of(STATE_BYTES));
        let o_bytes = self.projection.map_or(0, |_| rows * request.inner() * 2);
        // A sum that nobody wants is still read once more.
        let sum_bytes = if self.norm.sum.is_some() { 0 } else { rows * cols * 2 };
        let sum = self.norm.sum.map_or(Word::Workspace(o_bytes), |position| argument(args, position));

        let mut attention = words(kernel, shape, &alone, 1);
        attention[RESULT_AT] = if self.projection.is_some() { Word::Workspace(0) } else { Word::Number(0) };
        let map = |of: Mapped, offset: usize, [x, y, z]: [usize; 3], [by_y, by_z]: [usize; 2], rows: usize| {
            let sizes = [x, y, z, 1, 1].map(|size| size as u64);
            let strides = [2 * by_y as u64, if z > 1 { 2 * by_z as u64 } else { 16 }, 16, 16];
            let tile = [UNIT as u32, rows as u32, 1, 1, 1];
            Word::Map(TensorMap { of, offset, rank: 3, sizes, strides, tile })
        };
        let in_launch = |position: usize| {
            let offset = args.get(position).map_or(0, ArgBinding::start);
            (Mapped::Argument(position), offset)
        };
        let rows_map = |(of, offset): (Mapped, usize), cols: usize, stride: usize, rows: usize| {
            map(of, offset, [cols, shape.queries, shape.batch], [stride, shape.queries * stride], rows)
        };
        let inner = request.inner();
        let kept_sum = self.norm.sum.map_or((Mapped::Workspace, o_bytes), in_launch);
        let mut words: Vec<Word> = self.groups.maps(kernel, shape, &alone).to_vec();
        words.push(rows_map(in_launch(self.norm.residual), cols, stride, queries));
        words.extend([kept_sum, in_launch(self.norm.result)].map(|place| rows_map(place, cols, cols, BATCH)));
        if let Some(projection) = self.projection {
            words.push(rows_map((Mapped::Workspace, 0), inner, inner, queries));
            let (of, offset) = in_launch(projection.weight);
            words.push(match projection.transposed {
                true => map(of, offset, [cols, inner, 1], [projection.stride, 0], UNIT),
                false => map(of, offset, [inner, cols, 1], [projection.stride, 0], queries),
            });
        }
        words.extend(attention);
        let optional = |position: Option<usize>| position.map_or(Word::Number(0), |at| argument(args, at));
        let number = |value: usize| Word::Number(value as u64);
        words.extend([
            sum,
            argument(args, self.norm.result),
            argument(args, self.norm.weight),
            optional(self.norm.bias),
            Word::Persistent(STATE_BYTES + ready),
            Word::Persistent(0),
            number(numbers),
            number((1 << 32) / tiles + 1),
        ]);
        let together = (section(kernel, shape) / shape.heads).max(1);
        if self.projection.is_some() {
            // Parts of some queries come as much later as all places take to finish their heads, and three quarters.
            let lag = ((places + places * 3 / 4) / shape.heads).clamp(1, groups);
            words.extend([optional(self.norm.added), Word::Persistent(STATE_BYTES)]);
            words.extend([number(together), number(inner), number(lag)]);
        } else {
            words.push(number(together));
        }
        let count: usize = words.iter().map(Word::count).sum();
        words.extend(std::iter::repeat_n(Word::Number(0), count.next_multiple_of(MAP_WORDS) - count));
        let grid = Grid::new(self.name(), blocks, THREADS, words);
        let grid = Grid { shared: self.shared(kernel.width) as u32, ..grid };
        let persistent = STATE_BYTES + ready + groups * queries * (cols / UNIT) * 8;
        Grids { list: vec![grid], workspace: o_bytes + sum_bytes, persistent, checks_indices: false }
    }
}

fn argument(args: &[ArgBinding], position: usize) -> Word {
    let offset = args.get(position).map_or(0, ArgBinding::start);
    Word::Argument { position, offset }
}
