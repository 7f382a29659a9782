//! How a matmul for Hopper is cut: all ways, which of them are possible, and the fastest.

use std::fmt;

use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::Dtype;

use super::time::{Following, tile_us};
use super::{ROWS, steps};

/// What is multiplied, and what its sums are handed over as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) struct Types {
    /// of both operands
    pub operands: Dtype,
    /// of the matmul
    pub sums: Dtype,
}

impl Types {
    /// Of operands whose sums are rounded to the same type; those of bytes are f32.
    pub fn of(operands: Dtype) -> Types {
        Types { operands, sums: if operands == Dtype::I8 { Dtype::F32 } else { operands } }
    }

    /// Whether sums are handed over as f32.
    pub fn has_float_sums(self) -> bool {
        self.sums == Dtype::F32
    }

    /// Whether they are sums of floats: the matrix units, which round towards zero, add up no more than a stage of them.
    pub fn adds_stages(self) -> bool {
        self.has_float_sums() && self.operands != Dtype::I8
    }
}

/// Widths of a tile that there are instructions for in `tile/wgmma.cuh`.
pub const WIDTHS: [usize; 8] = [64, 96, 128, 144, 160, 192, 224, 256];

/// What each of the two warpgroups of a block has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// whole tiles, in turn; the block walks over tiles, and so does a cluster that has rows together
    Turns,
    /// half of the rows of the block's one tile
    Rows,
    /// half of its columns
    Columns,
}

/// How a matmul for Hopper is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HopperTile {
    /// rows of a tile: 128, where rows are shared also 256, where columns are also 64
    pub rows: usize,
    /// columns of a tile, of all right operands together; one of [`WIDTHS`], or twice that where warpgroups share columns
    pub columns: usize,
    /// what each of two warpgroups has
    pub sharing: Sharing,
    /// blocks of a cluster that share K; 1 where warpgroups take turns
    pub split: usize,
    /// whether what follows works by rows on sums where they are, and not on sums that pass through shared memory; blocks that have rows
    /// together meet in a cluster, or where sums are of bytes in memory
    pub by_rows: bool,
    /// blocks of a cluster that have the same columns of B, each of which fetches its share for all; 1 where every block fetches its own
    pub sharers: usize,
}

impl HopperTile {
    /// Columns of a warpgroup's part.
    pub(super) fn part_columns(&self) -> usize {
        if self.sharing == Sharing::Columns { self.columns / 2 } else { self.columns }
    }

    /// Whether its rows can be gathered: there is a list of tiles of [`ROWS`]. Threads that gather leave others fewer registers.
    pub(super) fn can_be_routed(&self) -> bool {
        let has_registers = !self.by_rows || self.columns <= 128;
        self.rows == ROWS && self.split == 1 && self.sharers == 1 && self.sharing != Sharing::Columns && has_registers
    }

    /// Whether the sums of a warpgroup fit its registers, and those of a cluster its shared memory.
    fn is_possible(&self) -> bool {
        let &HopperTile { rows, columns, sharing, split, by_rows, sharers } = self;
        let (part, share) = (self.part_columns(), columns / split);
        let shared = match sharing {
            Sharing::Turns => rows == 128 && split == 1 && 2 * columns <= 384,
            Sharing::Rows => rows >= 128 && columns * rows / 128 <= 384,
            Sharing::Columns => rows <= 128 && part * rows / 64 <= 384 && by_rows,
        };
        let splits =
            split == 1 || (rows == 128 && !by_rows && columns.is_multiple_of(split) && share.is_multiple_of(8));
        let shares = sharers == 1 || (split == 1 && sharing != Sharing::Columns);
        shared && splits && shares && (!by_rows || part.is_multiple_of(64))
    }
}

impl fmt::Display for HopperTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HopperTile { rows, columns, sharing, split, by_rows, sharers } = self;
        write!(f, "tiles of {rows} x {columns}, ")?;
        match (sharing, split) {
            (Sharing::Turns, _) => f.write_str("two warpgroups in turn")?,
            (Sharing::Rows, 1) => f.write_str("one per block")?,
            (Sharing::Rows, split) => write!(f, "one per block, K over {split} blocks of a cluster")?,
            (Sharing::Columns, _) => f.write_str("one per block, warpgroups side by side")?,
        }
        if *by_rows {
            f.write_str(", epilogue in registers")?;
        }
        if *sharers > 1 { write!(f, ", B fetched once for {sharers} blocks") } else { Ok(()) }
    }
}

/// Blocks that share columns of B, where they do.
const SHARERS: usize = 2;

/// How a matmul is cut that nothing better is known of.
pub(super) const TURNS: HopperTile =
    HopperTile { rows: 128, columns: 128, sharing: Sharing::Turns, split: 1, by_rows: false, sharers: 1 };

/// All ways to cut a matmul.
pub(super) fn tiles(shape: &MatmulShape, types: Types) -> impl Iterator<Item = HopperTile> {
    let steps = steps(shape, types.operands);
    let all = WIDTHS.into_iter().flat_map(|columns| {
        let one = |rows, split| HopperTile { rows, columns, sharing: Sharing::Rows, split, ..TURNS };
        let by_rows = |rows| HopperTile { by_rows: true, ..one(rows, 1) };
        let beside = |rows| HopperTile { columns: 2 * columns, sharing: Sharing::Columns, ..by_rows(rows) };
        let split = [1, 2, 4, 8].map(|split| one(128, split));
        let turns = HopperTile { columns, ..TURNS };
        let turns_by_rows = HopperTile { by_rows: true, ..turns };
        let others = [turns, turns_by_rows, one(256, 1), by_rows(128), by_rows(256), beside(64), beside(128)];
        split.into_iter().chain(others).flat_map(|tile| [1, SHARERS].map(|sharers| HopperTile { sharers, ..tile }))
    });
    // Whole sums take twice the registers of rounded ones while they are finished; those of a stage are held beside those of all.
    let [turns, shared] = if types.adds_stages() { [96, 160] } else { [128, 256] };
    let widest = move |tile: &HopperTile| if tile.sharing == Sharing::Turns { turns } else { shared };
    let whole = move |tile: &HopperTile| {
        let sums_stay = !tile.by_rows || (types.operands == Dtype::I8 && tile.sharing != Sharing::Columns);
        tile.split == 1 && tile.rows == ROWS && sums_stay && tile.columns <= widest(tile)
    };
    all.filter(move |tile| tile.is_possible() && tile.split <= steps && (!types.has_float_sums() || whole(tile)))
}

/// The widest of those whose blocks walk over tiles that are predicted to be done within 5 % of the first: they read less shared memory
/// per product than the formula of time knows.
pub(in crate::cuda) fn fastest_walk(shape: &MatmulShape, processors: usize) -> HopperTile {
    let alone = |tile: &HopperTile| tile.sharing == Sharing::Turns && !tile.by_rows && tile.sharers == 1;
    let walks = || tiles(shape, Types::of(Dtype::Bf16)).filter(alone);
    let first = walks().map(|tile| walk_us(&tile, shape, processors)).fold(f64::INFINITY, f64::min);
    let widest =
        walks().filter(|tile| walk_us(tile, shape, processors) <= 1.05 * first).max_by_key(|tile| tile.columns);
    widest.unwrap_or(TURNS)
}

/// Time of a matmul whose blocks walk over tiles, roughly.
pub(in crate::cuda) fn walk_us(tile: &HopperTile, shape: &MatmulShape, processors: usize) -> f64 {
    tile_us(tile, shape, Following::default(), 1, processors)
}
