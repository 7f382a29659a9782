//! How long attention and its gradient take on an H200, roughly: what the planner chooses among kernels by.
//!
//! Attention by warpgroups (`hopper.cu`), a multiprocessor computes squares of 128 queries by 128 keys one after another, and begins and ends tiles of
//! queries. Two blocks that share a multiprocessor compute at half the rate each. Fitted to the rows of attention in `h200-attention.csv`,
//! `h200-attention-peers.csv` (heads of 64), `h200-heads.csv` and `h200-crossover.csv`: 12 to 800 heads, 128 to 16384 positions, widths of 32 to 256,
//! with and without a causal mask; what follows to `h200-crossover.csv` and `h200-launches-peers.csv`.

use super::hopper::Groups;
use crate::kernel::{AttentionKernel, AttentionMask, AttentionShape};

/// Microseconds to start a launch and to end it.
const START: f64 = 2.3;
/// Queries and keys of a square.
const SIDE: usize = 128;
/// Microseconds of a square on a multiprocessor: its softmax, and its products for each column of a head.
const SOFTMAX: f64 = 0.6;
const COLUMN: f64 = 0.0073;
/// How much longer a square takes in tiles of 64 keys whose result takes most registers.
const WIDEST: f64 = 1.2;
/// Microseconds to begin and to end a tile of queries, and for each column of its first keys and of its result.
const TILE: f64 = 0.7;
const TILE_COLUMN: f64 = 0.0185;
/// How much longer that takes where two warpgroups join their results.
const JOIN: f64 = 1.25;
/// Microseconds that a residual and a norm add, and bytes of residual, sum and result that pass in one beside products.
const NORM: f64 = 2.1;
const NORM_BYTES: f64 = 10e6;
/// Microseconds that a projection adds, and its operations in one, of parts of 128 and of 64 columns.
const PROJECTION: f64 = 5.4;
const PROJECTED: f64 = 550e6;
const PROJECTED_NARROW: f64 = 250e6;
/// What a launch with a projection is priced over its time. It is at most 2 % faster than several (`h200-crossover.csv`), and predictions are not
/// better than this.
const MARGIN: f64 = 1.05;

/// Microseconds of a square of the gradient for each column of a product, and to begin and to end a tile of queries and one of keys. From the rows of
/// `h200-attention.csv` and `h200-attention-peers.csv`: heads of 64 and 128, 512 to 16384 positions, within 15 %.
const GRADIENT_COLUMN: f64 = 0.008;
const GRADIENT_TILE: f64 = 3.0;
/// How much longer it takes without warpgroups, product by product: forward and gradient of 8 x 16 x 1024 took 1636 and 2000 us with heads of 192 and 256 before warpgroups
/// (an H200, 2026-11-19, c3d06720), 695 and 917 since.
pub(super) const WITHOUT_WARPGROUPS: f64 = 2.3;

/// Work that follows attention in its launch, as far as time goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Following {
    /// bytes of the residual, the sum and the result
    pub bytes: usize,
    /// operations of a projection, if there is one
    pub projection: Option<f64>,
}

/// Time of attention with what follows, by warpgroups.
pub(super) fn launch_us(
    groups: &Groups,
    kernel: &AttentionKernel,
    shape: &AttentionShape,
    following: Following,
    processors: usize,
) -> f64 {
    let rows = attention_us(groups, kernel, shape, processors) + NORM + following.bytes as f64 / NORM_BYTES;
    let rate = if groups.split { PROJECTED_NARROW } else { PROJECTED };
    following.projection.map_or(rows, |operations| MARGIN * (rows + PROJECTION + operations / rate))
}

/// Time of attention alone, by warpgroups.
pub(super) fn attention_us(
    groups: &Groups,
    kernel: &AttentionKernel,
    shape: &AttentionShape,
    processors: usize,
) -> f64 {
    let (side, width) = (groups.queries(), kernel.width as f64);
    let Seen { all, first, last } = Seen::new([shape.queries, shape.keys], side, kernel.mask == AttentionMask::Causal);
    let (heads, share) = ((shape.batch * shape.heads) as f64, 1.0 / processors as f64);
    let tiles = heads * shape.queries.div_ceil(side) as f64;
    let steps = if groups.slots == 0 { WIDEST } else { 1.0 };
    let square = (SOFTMAX + COLUMN * width) * steps * (side * side) as f64 / (SIDE * SIDE) as f64;
    let tile = (TILE + TILE_COLUMN * width) * if groups.split { JOIN } else { 1.0 };
    let blocks = groups.blocks as f64;
    let (mean, rounds) = (heads * all * share, tiles * share / blocks);
    // The longest tile goes on when all others would have ended.
    let longer = (last - mean / blocks).max(0.0);
    // In the last round some blocks have no tile. It is of those that see least.
    let idle = if rounds > 1.0 { rounds.ceil() - rounds } else { 0.0 };
    let last_round = blocks * idle * (first * square + tile);
    START + (mean + longer) * square + (tiles * share).max(1.0) * tile + last_round
}

/// Time of the gradient by warpgroups, of so many products, where a block owns so many queries, or as many keys or half.
pub(super) fn gradient_us(
    products: usize,
    side: usize,
    kernel: &AttentionKernel,
    shape: &AttentionShape,
    processors: usize,
) -> f64 {
    let seen = Seen::new([shape.queries, shape.keys], side, kernel.mask == AttentionMask::Causal);
    let (heads, share) = ((shape.batch * shape.heads) as f64, 1.0 / processors as f64);
    let square = GRADIENT_COLUMN * (products * kernel.width) as f64;
    let tiles = heads * shape.queries.div_ceil(side) as f64;
    let mean = heads * seen.all * share;
    // Both kernels begin with the longest tile, and neither ends before it.
    let longest = mean.max(seen.last);
    2.0 * START + longest * square + (tiles * share).max(1.0) * GRADIENT_TILE
}

/// Squares that hold a pair which counts.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Seen {
    /// of a head
    all: f64,
    /// of its first queries
    first: f64,
    /// of its last ones
    last: f64,
}

impl Seen {
    /// A tile of queries sees one square more than the tile before it, between none and all.
    fn new(sizes: [usize; 2], side: usize, causal: bool) -> Seen {
        let [queries, keys] = sizes;
        let [tiles, most] = sizes.map(|count| count.div_ceil(side) as i64);
        let before = if causal { -(queries as i64 - keys as i64).div_euclid(side as i64) } else { most };
        let up_to = |tile: i64| {
            let rising = tile.clamp(0, most);
            rising * (rising + 1) / 2 + (tile - rising).max(0) * most
        };
        let end = before + tiles;
        let [first, last] = [before + 1, end].map(|tile| tile.clamp(0, most) as f64);
        Seen { all: (up_to(end) - up_to(before)) as f64, first, last }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_are_those_of_every_tile() {
        for (queries, keys) in
            [(0, 5), (1, 1), (127, 128), (129, 1000), (1000, 129), (1500, 1500), (640, 64), (4096, 8192)]
        {
            for side in [64, 128] {
                let seen = |tile: usize| ((tile + 1) * side + keys).saturating_sub(queries).min(keys).div_ceil(side);
                let each: Vec<usize> = (0..queries.div_ceil(side)).map(seen).collect();
                let found = Seen::new([queries, keys], side, true);
                assert_eq!(found.all, each.iter().sum::<usize>() as f64, "{queries} {keys}");
                if let [first, ..] = each[..] {
                    assert_eq!([found.first, found.last], [first, each[each.len() - 1]].map(|count| count as f64));
                }
                let all = keys.div_ceil(side);
                let full = Seen { all: (each.len() * all) as f64, first: all as f64, last: all as f64 };
                assert_eq!(Seen::new([queries, keys], side, false), full, "{queries} {keys}");
            }
        }
    }
}
