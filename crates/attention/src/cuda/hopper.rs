//! What `hopper.cu` takes, how it is cut, and its launches.

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::cuda::grid::{Grid, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::tile::tensor_map::{Mapped, TensorMap};
use deuteron_graph::Dtype;

use super::words::words;
use crate::kernel::{AttentionKernel, AttentionMask, AttentionOperand, AttentionShape, HeadStrides};

/// Fewer keys do not fill a tile.
const LEAST_KEYS: usize = 64;
/// The kernel counts tiles in 32-bit numbers.
const MAX_ROWS: usize = 1 << 31;
/// A stride of a tensor map is below, in elements of two bytes.
const MAX_STRIDE: usize = 1 << 39;
/// Bytes of the L2 cache that keys and values of the heads worked on together may take: of an H200's 50 MB, the rest is
/// for queries and results.
const SECTION: usize = 32 << 20;
/// Threads that multiply.
const MULTIPLIERS: u32 = 256;
/// Bytes of the number of the tile that a block has drawn.
const NUMBER_BYTES: usize = 16;
/// Columns of a piece of a row in shared memory.
const PIECE: usize = 64;

/// How a block of `hopper.cu` is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// keys of a tile
    pub keys: usize,
    /// tiles of keys, and of values, in shared memory
    pub stages: usize,
    /// tiles of results in shared memory; none where they go out through the place of the queries
    pub slots: usize,
    /// blocks of a multiprocessor
    pub blocks: usize,
    /// whether the two warpgroups share 64 queries, and else have 64 each
    pub split: bool,
    /// whether they take turns at products
    pub turns: bool,
    /// how blocks come to their tiles of queries
    pub walk: Walk,
}

/// How blocks come to their tiles of queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Walk {
    /// each has one
    One,
    /// as many blocks as run at once go over all tiles, forth and back
    InTurn,
    /// as many blocks as run at once take the next tile from a counter when they have room for it
    Drawn,
}

impl Groups {
    // Times on an H200, causal bf16, in microseconds, by the ignored test `tiles_side_by_side`.

    /// Heads of up to 64: two blocks a multiprocessor hide each other's softmax. 8 x 12 heads of 1024 take 43, 4 x 12 of 4096 take 231.
    pub const NARROW: Groups =
        Groups { keys: 64, stages: 4, slots: 1, blocks: 2, split: false, turns: false, walk: Walk::One };
    /// Heads of up to 64 where tiles are few: half the queries a block, half the keys a warpgroup. 12 heads of 1024 take 11.4.
    pub const NARROW_FEW: Groups =
        Groups { keys: 64, stages: 6, slots: 1, blocks: 1, split: true, turns: false, walk: Walk::InTurn };
    /// Wider heads, up to 128. Blocks fetch the next tile's queries and keys while they finish one. 8 x 16 heads of 1024 took 93 with a block for
    /// each tile, 86 in turn and 82 drawn; 4 x 16 of 4096 took 453 with a
    /// block for each tile and 553 in turn: causal tiles differ too much in time for a fixed order.
    pub const WIDE: Groups =
        Groups { keys: 128, stages: 2, slots: 1, blocks: 1, split: false, turns: true, walk: Walk::Drawn };

    /// Heads of 256, and of 192 with one tile more in each ring: their result takes most registers, so a tile is of 64 keys and queries stay in
    /// shared memory, where results go out through their place.
    pub const WIDEST: Groups = Groups { keys: 64, slots: 0, ..Groups::WIDE };

    /// For a launch whose rows all start at multiples of 16 bytes, if the kernel takes it.
    pub fn new(kernel: &AttentionKernel, shape: &AttentionShape, target: &CudaTarget) -> Option<Groups> {
        let tiles = shape.batch * shape.heads * shape.queries.div_ceil(128);
        let groups = match kernel.width {
            // Fewer than fill the machine twice leave part of it idle in the second turn.
            0..=64 if tiles < 2 * target.processors => Groups::NARROW_FEW,
            0..=64 => Groups::NARROW,
            65..=128 => Groups::WIDE,
            192 => Groups { stages: 3, ..Groups::WIDEST },
            256 => Groups::WIDEST,
            _ => return None,
        };
        let rows = MappedRows::all(kernel, shape);
        (shape.keys >= LEAST_KEYS && fits(kernel, shape, target, groups.keys, &rows)).then_some(groups)
    }

    /// Queries of a block.
    pub fn queries(&self) -> usize {
        if self.split { 64 } else { 128 }
    }

    /// Threads of a block: beside one block of a multiprocessor a whole warpgroup fetches, as only such give registers away.
    pub fn threads(&self) -> u32 {
        MULTIPLIERS + if self.blocks == 1 { 128 } else { 32 }
    }

    /// Bytes of shared memory that are used: queries, rings of keys and values, results; what warpgroups join; barriers; the number of a tile.
    pub(super) fn used(&self, width: usize) -> usize {
        let rows = (1 + self.slots) * self.queries() + 2 * self.stages * self.keys;
        let joined = if self.split { (width / 2 + 4) * 128 * 4 } else { 0 };
        let number = if self.walk == Walk::Drawn { NUMBER_BYTES } else { 0 };
        rows * padded(width) * 2 + joined + (4 * self.stages + 2) * 8 + number
    }

    /// The same, and what the start is moved by to be a multiple of 1024.
    pub fn shared(&self, width: usize) -> usize {
        self.used(width) + 1024
    }

    /// The constants of a text that takes so many bytes of shared memory.
    pub(super) fn constants(&self, shared: usize) -> String {
        let Groups { keys, stages, slots, blocks, split, turns, .. } = self;
        format!(
            "constexpr int KEYS = {keys};\nconstexpr int STAGES = {stages};\nconstexpr int SLOTS = {slots};\n\
             constexpr int BLOCKS = {blocks};\nconstexpr bool SPLIT = {split};\nconstexpr bool TURNS = {turns};\nconstexpr int SHARED = {shared};\n"
        )
    }

    /// How queries, keys and values are found.
    pub(super) fn maps(&self, kernel: &AttentionKernel, shape: &AttentionShape, args: &[ArgBinding]) -> [Word; 3] {
        let rows = |operand| if operand == AttentionOperand::Q { self.queries() } else { self.keys };
        MappedRows::all(kernel, shape).map(|all| Word::Map(all.map(kernel, args, rows(all.operand))))
    }

    /// Bytes that are kept from launch to launch, zeros between them.
    pub(super) fn persistent(&self) -> usize {
        if self.walk == Walk::Drawn { 8 } else { 0 }
    }

    /// The grid of a launch.
    pub(super) fn grid(
        &self,
        kernel: &AttentionKernel,
        shape: &AttentionShape,
        args: &[ArgBinding],
        processors: usize,
    ) -> Grid {
        let tiles = shape.batch * shape.heads * shape.queries.div_ceil(self.queries());
        let blocks = if self.walk == Walk::One { tiles } else { tiles.min(processors * self.blocks) };
        let maps = self.maps(kernel, shape, args);
        // As `hopper.cu` lists them.
        let counter = if self.walk == Walk::Drawn { Word::Persistent(0) } else { Word::Number(0) };
        let ending = [Word::Number(section(kernel, shape) as u64), counter];
        let words = maps.into_iter().chain(words(kernel, shape, args, 1)).chain(ending).collect();
        let grid = Grid::new("attention_hopper", blocks, self.threads(), words);
        Grid { shared: self.shared(kernel.width) as u32, ..grid }
    }
}

/// Whether attention, or its gradient, is one for warpgroups, with tiles of so many keys and these rows by tensor maps.
pub(super) fn fits(
    kernel: &AttentionKernel,
    shape: &AttentionShape,
    target: &CudaTarget,
    tile: usize,
    rows: &[MappedRows],
) -> bool {
    let plain = kernel.dropout.is_none() && kernel.scale >= 1e-30;
    let narrow = matches!(kernel.dtype, Dtype::F16 | Dtype::Bf16) && kernel.kv == kernel.dtype;
    let masked = match kernel.mask {
        AttentionMask::Full => true,
        AttentionMask::Causal => shape.keys.abs_diff(shape.queries).is_multiple_of(tile),
        AttentionMask::Additive(_) | AttentionMask::Cached => false,
    };
    let sized = shape.batch * shape.heads * shape.queries.max(shape.keys) < MAX_ROWS && kernel.width.is_multiple_of(16);
    target.arch.has_wgmma() && narrow && plain && masked && sized && rows.iter().all(MappedRows::has_map)
}

/// Rows that come by a tensor map.
#[derive(Debug, Clone, Copy)]
pub(super) struct MappedRows {
    pub operand: AttentionOperand,
    pub strides: HeadStrides,
    pub batch: usize,
    pub heads: usize,
    pub positions: usize,
}

impl MappedRows {
    fn all(kernel: &AttentionKernel, shape: &AttentionShape) -> [MappedRows; 3] {
        let &AttentionShape { batch, heads, queries, keys, q, k, v, .. } = shape;
        let key_heads = heads / kernel.group.max(1);
        [
            MappedRows { operand: AttentionOperand::Q, strides: q, batch, heads, positions: queries },
            MappedRows { operand: AttentionOperand::K, strides: k, batch, heads: key_heads, positions: keys },
            MappedRows { operand: AttentionOperand::V, strides: v, batch, heads: key_heads, positions: keys },
        ]
    }

    /// Positions, heads and sequences: how many, and elements from one to the next.
    fn axes(&self) -> [(usize, usize); 3] {
        let HeadStrides { batch, head, position } = self.strides;
        [(self.positions, position), (self.heads, head), (self.batch, batch)]
    }

    /// Whether there is a map: no axis of more than one index repeats, and none goes too far.
    fn has_map(&self) -> bool {
        self.axes().iter().all(|&(size, step)| size <= 1 || (1..MAX_STRIDE).contains(&step))
    }

    /// A row of 128 elements is two pieces of 64, an axis of their own: a tile is the first pieces of its rows, then the
    /// second ones. Likewise of more pieces. Of other rows a tile is one piece, zeros beyond their end.
    pub fn map(&self, kernel: &AttentionKernel, args: &[ArgBinding], rows: usize) -> TensorMap {
        let position = kernel.operands().iter().position(|&known| known == self.operand).unwrap_or(0);
        let offset = args.get(position).map_or(0, |arg| arg.offset * kernel.dtype.bytes());
        let of = Mapped::Argument(position);
        // An axis of one index may have any stride, and a map has none of 0.
        let [(p, by_p), (h, by_h), (b, by_b)] =
            self.axes().map(|(size, step)| (size as u64, if size <= 1 { 16 } else { 2 * step as u64 }));
        let rows = rows as u32;
        let (pieces, width) = (kernel.width / PIECE, kernel.width as u64);
        match kernel.width.is_multiple_of(PIECE) && pieces > 1 {
            true => {
                let (sizes, strides) = ([64, p, pieces as u64, h, b], [by_p, 128, by_h, by_b]);
                TensorMap { of, offset, rank: 5, sizes, strides, tile: [64, rows, pieces as u32, 1, 1] }
            }
            false => {
                let (sizes, strides) = ([width, p, h, b, 1], [by_p, by_h, by_b, 16]);
                TensorMap { of, offset, rank: 4, sizes, strides, tile: [64, rows, 1, 1, 1] }
            }
        }
    }
}

/// Columns of a row in shared memory: whole pieces.
pub(super) fn padded(width: usize) -> usize {
    width.next_multiple_of(PIECE)
}

/// Heads of queries worked on together: those of as many heads of keys as have room in the cache, evened out.
pub(super) fn section(kernel: &AttentionKernel, shape: &AttentionShape) -> usize {
    let group = kernel.group.max(1);
    group * evened(shape.batch * shape.heads / group, shape.keys * kernel.width * 4)
}

/// How many of some heads are worked on together, each of which has so many bytes that are read again and again.
pub(super) fn evened(heads: usize, bytes: usize) -> usize {
    let fit = (SECTION / bytes.max(1)).max(1);
    heads.div_ceil(heads.div_ceil(fit).max(1)).max(1)
}
