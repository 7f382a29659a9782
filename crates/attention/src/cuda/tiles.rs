//! How blocks of the kernels without warpgroups are cut.

use crate::kernel::{AttentionKernel, AttentionMask, AttentionShape};

/// Queries of a block, as in `plain.cu`.
pub(super) const PLAIN_QUERIES: usize = 64;
/// Threads of a block, as in `plain.cu`.
pub(super) const PLAIN_THREADS: u32 = 256;

/// How a block of `tensor.cu` or of `scores.cu` is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// warps of a block
    pub warps: usize,
    /// sixteens of queries of a warp
    pub atoms: usize,
    /// keys of a tile; in `tensor.cu` twice as many are at least the queries of a block
    pub keys: usize,
    /// blocks of a multiprocessor that registers are left for
    pub blocks: usize,
}

impl Tiles {
    /// Two sixteens of queries a warp halve what is read of shared memory for a product, and cost registers: for narrow heads,
    /// and where tiles of half the height are not needed to fill the machine. Nothing spills up to a width of 128.
    pub fn new(kernel: &AttentionKernel, shape: &AttentionShape, processors: usize) -> Tiles {
        let tall = shape.batch * shape.heads * shape.queries.div_ceil(128);
        let many = shape.queries > 64 && tall >= 2 * processors;
        let plain = kernel.dropout.is_none() && !matches!(kernel.mask, AttentionMask::Additive(_));
        match kernel.width {
            0..=64 if many && plain => Tiles { warps: 4, atoms: 2, keys: 64, blocks: 2 },
            0..=64 => Tiles { warps: 4, atoms: 1, keys: 64, blocks: 2 },
            65..=128 if plain => Tiles { warps: 4, atoms: 1, keys: 64, blocks: 2 },
            65..=128 => Tiles { warps: 4, atoms: 1, keys: 32, blocks: 2 },
            _ => Tiles { warps: 4, atoms: 1, keys: 32, blocks: 1 },
        }
    }

    /// Queries of a block.
    pub fn queries(&self) -> usize {
        self.warps * self.atoms * 16
    }

    pub(super) fn constants(&self) -> String {
        let Tiles { warps, atoms, keys, blocks } = self;
        format!(
            "constexpr int WARPS = {warps};\nconstexpr int ATOMS = {atoms};\nconstexpr int KEYS = {keys};\n\
             constexpr int BLOCKS = {blocks};\n"
        )
    }

    /// Bytes of shared memory: two stages of keys and values; wide queries stay beside them.
    pub fn shared(&self, width: usize) -> usize {
        let row = (width + 8) * 2;
        let held = if width <= 128 { 0 } else { self.queries() };
        (4 * self.keys + held) * row
    }
}
