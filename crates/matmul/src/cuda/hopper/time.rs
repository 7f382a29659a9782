//! How long a matmul takes on an H200, roughly: what the choice between ways to cut it, and between us and the vendor's library, is made by.
//!
//! Fitted to matmuls of random sizes (`h200-matmul-choice.csv`), to GPT-2's with 1024 to 32768 rows, plain, with GELU, with a residual, and with
//! a residual and a norm (`h200-matmul.csv`), and to those of 16 to 128 rows (`h200-matmul-few-rows.csv`).

use deuteron_codegen::body::{Body, Expr};
use deuteron_codegen::cuda::row::gcd;
use deuteron_codegen::library::LibraryEpilogue;
use deuteron_codegen::matmul_shape::MatmulShape;
use deuteron_graph::{BinaryOp, UnaryOp};

use super::tf32::split_us;
use super::tile::{HopperTile, Sharing, Types};
use super::{DEPTH, steps};

/// What follows a matmul, as far as time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Following {
    /// 16-bit operands that are as large as the result
    pub operands: usize,
    /// functions of an element that are more than arithmetic
    pub functions: usize,
    /// whether it needs whole rows
    pub whole_rows: bool,
}

impl Following {
    /// Of a body.
    pub fn new(body: &Body, operands: usize, whole_rows: bool) -> Following {
        let simple = |op: UnaryOp| matches!(op, UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Round);
        let uniform = body.uniform();
        let costly = |expr: Expr| match expr {
            Expr::Unary(op, _) => !simple(op),
            Expr::Binary(op, ..) => op == BinaryOp::Div,
            _ => false,
        };
        let functions = body.ids().filter(|&id| costly(body.expr(id)) && !uniform[id.index()]).count();
        Following { operands, functions, whole_rows }
    }

    /// The same without what needs whole rows.
    pub fn elementwise(self) -> Following {
        Following { whole_rows: false, ..self }
    }

    /// Time of operands that come beside the matmul's, of which most is hidden: 6 MB per microsecond.
    fn operands_us(self, shape: &MatmulShape) -> f64 {
        self.operands as f64 * (0.3 + megabytes(shape) / 6.0)
    }
}

/// Of the result, in two bytes.
fn megabytes(shape: &MatmulShape) -> f64 {
    2e-6 * (shape.m * shape.n * shape.batches()) as f64
}

/// Time of the vendor's library with 16-bit operands: that of its best tile, as if pairs of blocks shared columns of B, and of what it writes, which
/// it does not hide. Fitted to 95 matmuls of random sizes and of GPT-2: off by 4 % in the median.
pub(super) fn library_us(shape: &MatmulShape, epilogue: LibraryEpilogue) -> f64 {
    let steps = shape.k.div_ceil(DEPTH) as f64;
    let tile = |[rows, columns]: [usize; 2]| {
        let blocks = (shape.m.div_ceil(rows) * shape.n.div_ceil(columns) * shape.batches()) as f64;
        let (busy, area) = ((blocks / PROCESSORS).min(1.0), (rows * columns) as f64 / 128.0);
        let lines = rows as f64 * crossed(shape.a) + columns as f64 / 2.0 * crossed(shape.b);
        let stage = joined(&[area * (0.00121 + 0.00135 * busy), lines * (0.00049 + 0.00039 * busy), 0.1]);
        (blocks / PROCESSORS).ceil() * (steps * stage + 0.0044 * area)
    };
    let best = LIBRARY_TILES.into_iter().map(tile).fold(f64::INFINITY, f64::min);
    let residual = if epilogue.has_residual() { 0.24 + 0.169 * megabytes(shape) } else { 0.0 };
    let gelu = if epilogue.has_gelu() { 0.068 } else { 0.0 };
    let follows = if epilogue == LibraryEpilogue::None { 0.0 } else { 0.153 };
    let us = 3.24 + best + residual + (0.084 + gelu + follows) * megabytes(shape);
    // Asked for sums in one order, it does not share K among blocks, and has only slow algorithms for few rows and columns and a long K: 74 to
    // 76 us for 16 to 128 rows of 3072 -> 768, 197 for 144 of 7064 -> 376.
    let is_slow = shape.m <= FEW_ROWS && shape.n < FEW_COLUMNS && shape.k > LONG && shape.batches() == 1;
    let slow = if is_slow { 1.6 * steps } else { 0.0 };
    // Rows that do not start at multiples of 16 bytes it takes in small pieces: 88 TFLOP/s at 50257 columns.
    let uneven = [shape.a, shape.b, shape.c].iter().any(|&(row, column)| !row.max(column).is_multiple_of(8));
    let flops = 2.0 * (shape.m * shape.n * shape.batches()) as f64 * shape.k as f64;
    let pieces = if uneven { flops / 88e6 } else { 0.0 };
    us.max(slow).max(pieces)
}

/// What a call of the library costs in a plan beyond its time alone: it neither starts before the kernel ahead of it ends nor lets the next one
/// start early, as ours do. GPT-2's prompt of 1024 tokens took 0.793 ms with it priced as alone, and 0.774 with this (`h200-gpt2.csv`).
const BETWEEN_US: f64 = 1.0;

/// Time of the vendor's library in a plan.
pub(crate) fn library_in_plan_us(shape: &MatmulShape, epilogue: LibraryEpilogue) -> f64 {
    library_us(shape, epilogue) + BETWEEN_US
}

/// Multiprocessors of an H200.
const PROCESSORS: f64 = 132.0;
/// Tiles that the library may take.
const LIBRARY_TILES: [[usize; 2]; 8] =
    [[128, 256], [256, 128], [128, 192], [128, 128], [64, 256], [128, 64], [64, 128], [64, 64]];
/// Rows and columns that the library is slow for, at most, and what K is longer than then.
const FEW_ROWS: usize = 160;
const FEW_COLUMNS: usize = 1024;
const LONG: usize = 2048;

/// Time of things that go on at once: a little more than that of the longest.
fn joined(times: &[f64]) -> f64 {
    times.iter().map(|time| time.powi(5)).sum::<f64>().powf(0.2)
}

/// Time of a row kernel that reads and writes one value as large as the result.
pub(super) fn rows_us(shape: &MatmulShape) -> f64 {
    2.0 + 2.0 * megabytes(shape) / 6.0
}

/// Rows of a left operand that can be made in some time beside multiplications, which leave little of the L2: 0.6 rows of 768 columns per
/// microsecond on a multiprocessor.
pub(super) fn made_beside(shape: &MatmulShape, us: f64, processors: usize) -> usize {
    (us * 0.6 * processors as f64 * 768.0 / shape.k.max(1) as f64) as usize
}

/// Time that rows of a left operand add to the multiplications: until the first ones are there, which all warps make, and what the others
/// take of the L2. Fitted to a norm of 1024 and 8192 rows of 768 columns, before 2304 and 3072 columns: 5.2, 4.6, 16.0 and 14.5.
pub(super) fn made_us(shape: &MatmulShape, first: usize, processors: usize) -> f64 {
    let each = first.div_ceil(12 * processors).max(1) as f64;
    let beside = 0.0019 * shape.m.saturating_sub(first) as f64;
    3.5 + (1.2 * each + beside) * shape.k as f64 / 768.0
}

/// Lines of 128 bytes of memory that 128 bytes of an operand lie in, on average: more than one where lines of the operand do not start at
/// multiples of 128 bytes.
fn crossed((row, column): (usize, usize)) -> f64 {
    let bytes = 2 * row.max(column);
    2.0 - gcd(bytes, 128) as f64 / 128.0
}

/// Time of a launch that is cut so; rows of a result are shared by a cluster of so many blocks. Fitted to 1,250 variants of matmuls of random
/// sizes and of GPT-2: off by 5 % in the median and 12 % at the 90th percentile. What is taken by it and by the library's takes 1 % more time
/// than the fastest of all, on average.
pub(super) fn tile_us(
    tile: &HopperTile,
    shape: &MatmulShape,
    following: Following,
    cluster: usize,
    processors: usize,
) -> f64 {
    let &HopperTile { rows, columns, sharing, split, by_rows, sharers } = tile;
    let blocks = shape.m.div_ceil(rows).next_multiple_of(sharers) * shape.n.div_ceil(columns) * shape.batches() * split;
    let steps = shape.k.div_ceil(DEPTH).div_ceil(split) as f64;
    // Multiprocessors that are left over where clusters must be neighbours.
    let places =
        if cluster * split > 2 { processors * 15 / 16 / (cluster * split) * (cluster * split) } else { processors };
    let waves = blocks.div_ceil(places.max(1)) as f64;
    let multiplied = steps * stage_us(tile, shape, (blocks as f64 / processors as f64).min(1.0));
    // What follows works on pieces of 64 columns.
    let area = (rows * columns.next_multiple_of(64)) as f64 / 128.0;
    let (functions, operands) = (following.functions.min(4) as f64, following.operands as f64);
    let us = match sharing {
        Sharing::Turns if following.whole_rows => {
            let finish = 1.0 + 0.064 * area;
            2.9 + waves * multiplied.max((multiplied + finish) / 2.0) + finish / 2.0
        }
        Sharing::Turns => {
            // What follows is hidden behind the multiplications of the other warpgroup, but for the power that it takes, unless it takes longer.
            let crossed = crossed(shape.c) - 1.0;
            let uneven = 1.0 + 0.646 * crossed;
            let finish = area * (0.0121 + 0.002 * functions + 0.0162 * operands) * uneven;
            let hidden = multiplied * (1.0 + 0.0306 * functions);
            // One warpgroup finishes the only tile of its block alone.
            let alone = if waves < 2.0 { 0.0041 } else { 0.0 };
            let last = area * (0.0126 + 0.008 * functions + alone);
            let by_rows = if by_rows { 0.00136 * waves * area } else { 0.0 };
            let written = (0.0685 + 0.0972 * crossed) * megabytes(shape) + following.operands_us(shape);
            2.9 + (waves * hidden + last + by_rows + written).max(waves * finish)
        }
        Sharing::Rows | Sharing::Columns => {
            let staged = if by_rows { 0.001 } else { 0.003 };
            let finish = area / split as f64 * (0.0104 + 0.0062 * functions + staged * operands);
            // Sums that blocks send to each other.
            let exchange = if split == 1 { 0.0 } else { 0.041 * columns as f64 };
            let whole_rows = if following.whole_rows { 1.3 + 0.007 * area } else { 0.0 };
            let each = multiplied + finish + exchange + whole_rows;
            3.36 + waves * each + 0.81 * (waves - 1.0) + following.operands_us(shape)
        }
    };
    us.max(3.0 + memory_us(shape, operands))
}

/// Time of a stage: its multiplications are slower the more multiprocessors draw power, and its lines come from the L2 more slowly the more of
/// them want some.
fn stage_us(tile: &HopperTile, shape: &MatmulShape, busy: f64) -> f64 {
    let &HopperTile { rows, columns, sharers, .. } = tile;
    // Rows of B come in pieces of 64 columns.
    let wide = if shape.b.1 == 1 { columns.next_multiple_of(64) } else { columns };
    let lines = rows as f64 * crossed(shape.a) + wide as f64 / sharers as f64 * crossed(shape.b);
    let multiplied = (rows * columns) as f64 / 128.0 * (0.00097 + 0.00162 * busy);
    // Those that share a stage wait for each other.
    let wait = if sharers > 1 { 0.034 } else { 0.0 };
    joined(&[multiplied, lines * (0.00047 + 0.00079 * busy)]) + wait
}

/// Time of what must come from memory and go there, in bytes of two each.
fn memory_us(shape: &MatmulShape, operands: f64) -> f64 {
    let MatmulShape { m, n, k, .. } = shape;
    let read = 2e-6 * (m * k + k * n) as f64 * shape.batches() as f64;
    (read + megabytes(shape) * (1.0 + operands)) / 3.8
}

/// Bytes per microsecond and multiprocessor of tiles that are fetched, and of those whose rows are gathered.
pub(super) const FETCHED: f64 = 97e3;
pub(super) const GATHERED: f64 = 76e3;

/// Time of a launch whose blocks finish tiles by warps, fitted to matmuls of bytes: GPT-2's with GELU, 1024 to 8192 rows, and 4096 and 8192
/// cubed. A stage has as many bytes of any operands, and takes as long. `rate` is that of loads.
pub(super) fn warps_us(tile: &HopperTile, shape: &MatmulShape, types: Types, processors: usize, rate: f64) -> f64 {
    let tiles = shape.m.div_ceil(tile.rows) * shape.n.div_ceil(tile.columns) * shape.batches();
    let (columns, steps) = (tile.columns as f64, steps(shape, types.operands) as f64);
    let (waves, busy) = (tiles.div_ceil(processors) as f64, tiles.min(processors) as f64 / processors as f64);
    // Fewer multiprocessors get more of the L2 each.
    let loads = ((tile.rows + tile.columns) * DEPTH * 2) as f64 / rate * busy;
    // Sums of a stage are added while the matrix units wait, but for those of the other warpgroup.
    let added = if types.adds_stages() { 1.25 } else { 1.0 };
    let multiply = steps * loads.max(columns * 0.0027 * added);
    // Where rows need all of their tiles, blocks wait for each other, and results go to memory in small pieces.
    let [alone, shared, last] = match tile.by_rows {
        true => [8.0 + columns * 0.075, 3.9 + columns * 0.039, 8.0 + columns * 0.075],
        false => [columns * 0.0285, columns * 0.017, columns * 0.024],
    };
    match tile.sharing {
        Sharing::Turns => 2.4 + waves * multiply.max(alone) + last,
        Sharing::Rows | Sharing::Columns => 2.4 + waves * (multiply + shared),
    }
}

/// Operations of TF32 that a multiprocessor does in a microsecond. Fitted, with what is read of shared memory, to 4096^3 by three widths of tiles (1121 us by 128 x 128),
/// 8192x768x3072 (362), 1000x777x1333 (28.7) and 300x2048x2048 (52.8 by 128 x 64): off by 9 % at most.
const TF32_RATE: f64 = 3.5e6;

/// Time of a matmul of f32: that of splitting its operands, and of three products of TF32.
pub(super) fn tf32_us(tile: &HopperTile, shape: &MatmulShape, processors: usize) -> f64 {
    let tiles =
        shape.m.div_ceil(tile.rows).next_multiple_of(tile.sharers) * shape.n.div_ceil(tile.columns) * shape.batches();
    let waves = tiles.div_ceil(processors) as f64;
    let [rows, columns] = [tile.rows, tile.columns].map(|size| size as f64);
    // Two stages have the same 32 of K.
    let pairs = shape.k.div_ceil(DEPTH / 2) as f64;
    let multiplied = 3.0 * 2.0 * rows * columns * (DEPTH / 2) as f64 / TF32_RATE;
    // What is fetched, and read from shared memory for each 64 rows: 128 bytes a cycle.
    let shared = 2.0 * (rows + columns) + rows / 64.0 * 12.0 * (16.0 + columns / 4.0);
    let each = pairs * joined(&[multiplied, shared / 2.5e3]);
    // What follows a tile is hidden where warpgroups take turns, but so is no addition of stages then.
    let multiply = match tile.sharing {
        Sharing::Turns => waves * each * 1.15 + columns * 0.024,
        Sharing::Rows | Sharing::Columns => waves * (each + columns * 0.02),
    };
    split_us(shape, processors) + 2.4 + multiply
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(m: usize, k: usize, n: usize) -> MatmulShape {
        MatmulShape { m, n, k, batch: Vec::new(), a: (k, 1), b: (n, 1), c: (n, 1) }
    }

    /// Within a fifth of what was measured, in microseconds.
    #[test]
    fn times_are_near_what_was_measured() {
        let mut off = Vec::new();
        let plain = Following::default();
        let (residual, gelu) = (Following { operands: 1, ..plain }, Following { functions: 2, ..plain });
        let norm = Following { whole_rows: true, ..residual };
        let tile =
            |rows, columns, sharing, by_rows| HopperTile { rows, columns, sharing, split: 1, by_rows, sharers: 1 };
        let (turns, one) = (tile(128, 192, Sharing::Turns, false), |columns| tile(128, columns, Sharing::Rows, false));
        let tall = |columns| tile(256, columns, Sharing::Rows, false);
        let pair = |tile: HopperTile| HopperTile { sharers: 2, ..tile };
        let split = |columns, split| HopperTile { split, ..tile(128, columns, Sharing::Rows, false) };
        for (size, tile, following, cluster, measured) in [
            ([1024, 768, 768], tile(64, 128, Sharing::Columns, true), plain, 1, 5.93),
            ([1024, 768, 768], one(64), plain, 1, 5.75),
            ([26952, 2472, 2160], pair(tall(192)), plain, 1, 481.0),
            ([26952, 2472, 2160], tile(128, 384, Sharing::Columns, true), plain, 1, 477.0),
            ([15369, 1864, 2232], pair(turns), gelu, 1, 234.0),
            ([15369, 1864, 2232], turns, gelu, 1, 308.0),
            ([6400, 4000, 6104], pair(turns), plain, 1, 458.0),
            ([6400, 4000, 6104], turns, plain, 1, 608.0),
            ([128, 3072, 768], split(64, 8), plain, 1, 7.71),
            ([128, 3072, 768], split(64, 4), plain, 1, 7.71),
            ([128, 3072, 768], split(128, 8), plain, 1, 10.66),
            ([128, 3072, 768], split(192, 8), plain, 1, 14.47),
            ([16, 3072, 768], split(64, 8), plain, 1, 9.1),
            ([64, 3072, 768], split(96, 4), plain, 1, 9.48),
            ([128, 768, 2304], one(64), plain, 1, 5.64),
            ([128, 768, 2304], split(64, 2), plain, 1, 6.59),
            ([128, 768, 2304], split(128, 4), plain, 1, 9.86),
            ([1024, 768, 2304], one(160), plain, 1, 9.74),
            ([1024, 768, 3072], one(192), plain, 1, 10.34),
            ([2048, 768, 768], one(96), plain, 1, 7.49),
            ([2048, 768, 2304], tall(144), plain, 1, 15.1),
            ([2048, 768, 3072], tall(192), plain, 1, 18.2),
            ([2048, 768, 3072], turns, plain, 1, 16.6),
            ([2048, 3072, 768], tile(128, 128, Sharing::Columns, true), plain, 1, 18.6),
            ([8192, 768, 768], turns, plain, 1, 16.9),
            ([8192, 768, 768], tall(192), plain, 1, 19.5),
            ([8192, 768, 2304], turns, plain, 1, 42.0),
            ([8192, 768, 3072], turns, plain, 1, 55.0),
            ([8192, 768, 50257], turns, plain, 1, 1102.0),
            ([1024, 768, 50257], turns, plain, 1, 143.0),
            ([8192, 3072, 768], turns, plain, 1, 54.6),
            ([8192, 3072, 768], tall(192), plain, 1, 57.4),
            ([8192, 768, 768], turns, residual, 1, 19.7),
            ([8192, 3072, 768], tile(256, 192, Sharing::Rows, true), residual, 1, 57.6),
            ([32768, 768, 768], turns, residual, 1, 68.0),
            ([1024, 768, 768], tile(64, 128, Sharing::Columns, true), norm, 6, 8.4),
            ([2048, 768, 768], tile(128, 128, Sharing::Rows, true), norm, 6, 11.6),
            ([2048, 3072, 768], tile(128, 128, Sharing::Rows, true), norm, 6, 22.8),
            ([8192, 768, 768], tile(128, 384, Sharing::Columns, true), norm, 2, 28.3),
            ([8192, 3072, 768], tile(128, 384, Sharing::Columns, true), norm, 2, 64.6),
            ([32768, 768, 768], tile(128, 384, Sharing::Columns, true), norm, 2, 100.8),
        ] {
            let [m, k, n] = size;
            let us = tile_us(&tile, &shape(m, k, n), following, cluster, 132);
            if (us / measured - 1.0_f64).abs() >= 0.2 {
                off.push(format!("{size:?} {tile}: {us:.1} for {measured}"));
            }
        }
        assert!(off.is_empty(), "{}", off.join("\n"));
    }

    /// The same.
    #[test]
    fn the_library_is_near_what_was_measured() {
        let mut off = Vec::new();
        for (size, epilogue, measured) in [
            ([16, 3072, 768], LibraryEpilogue::None, 74.0),
            ([128, 3072, 768], LibraryEpilogue::None, 76.1),
            ([16, 768, 2304], LibraryEpilogue::None, 4.37),
            ([128, 768, 2304], LibraryEpilogue::None, 4.9),
            ([1024, 768, 768], LibraryEpilogue::None, 4.99),
            ([1024, 768, 2304], LibraryEpilogue::None, 8.46),
            ([1024, 768, 768], LibraryEpilogue::BiasResidual, 6.66),
            ([1024, 3072, 768], LibraryEpilogue::None, 10.5),
            ([2048, 768, 2304], LibraryEpilogue::None, 13.6),
            ([2048, 768, 3072], LibraryEpilogue::BiasGelu, 19.7),
            ([2048, 3072, 768], LibraryEpilogue::None, 16.5),
            ([8192, 768, 768], LibraryEpilogue::None, 17.5),
            ([8192, 768, 768], LibraryEpilogue::BiasResidual, 21.2),
            ([8192, 768, 2304], LibraryEpilogue::None, 48.6),
            ([8192, 3072, 768], LibraryEpilogue::BiasResidual, 60.6),
            ([8192, 768, 3072], LibraryEpilogue::BiasGelu, 69.3),
            ([26952, 2472, 2160], LibraryEpilogue::None, 431.0),
            ([4888, 2808, 1944], LibraryEpilogue::None, 79.0),
            ([144, 7064, 376], LibraryEpilogue::BiasResidual, 197.0),
            ([1024, 768, 50257], LibraryEpilogue::None, 894.0),
            ([8192, 768, 50257], LibraryEpilogue::None, 7160.0),
            ([128, 1600, 312], LibraryEpilogue::None, 6.2),
        ] {
            let [m, k, n] = size;
            let us = library_us(&shape(m, k, n), epilogue);
            if (us / measured - 1.0_f64).abs() >= 0.2 {
                off.push(format!("{size:?}: {us:.1} for {measured}"));
            }
        }
        assert!(off.is_empty(), "{}", off.join("\n"));
    }
}
