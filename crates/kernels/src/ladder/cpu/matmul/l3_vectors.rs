//! The same blocks with vectors: a vector of B is multiplied by one element of A, which is the same in all lanes, for
//! four rows at a time, by a multiply-add where there is one.

use std::ops::Range;

use deuteron_codegen::cpu::simd::Task;
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};

use super::Matrices;

/// Inner indices and columns of a block of B: 32 KiB.
const DEEP: usize = 128;
const WIDE: usize = 64;
/// Rows of sums in registers, and vectors of each.
const SIDE: usize = 4;
const VECTORS: usize = 2;

/// Some rows of a matmul of f32 with contiguous rows.
pub(super) struct Rows {
    pub matrices: Matrices,
    pub rows: Range<usize>,
}

impl Task for Rows {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        simd.enter(self);
    }
}

impl Kernel for Rows {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Rows { matrices: p, rows } = self;
        if p.k == 0 {
            // SAFETY: the rows are those of the task.
            rows.clone().for_each(|i| (0..p.n).for_each(|j| unsafe { p.store(i, j, 0.0) }));
        }
        for depth in (0..p.k).step_by(DEEP) {
            let inner = depth..p.k.min(depth + DEEP);
            for column in (0..p.n).step_by(WIDE) {
                let columns = column..p.n.min(column + WIDE);
                for i in rows.clone().step_by(SIDE) {
                    let height = SIDE.min(rows.end - i);
                    for j in columns.clone().step_by(VECTORS * S::WIDTH) {
                        let width = (VECTORS * S::WIDTH).min(columns.end - j);
                        let tile = Tile { i, height, j, width, inner: inner.clone() };
                        // SAFETY: the tile is one of these rows, and there are such inner indices.
                        unsafe {
                            match (height, width == VECTORS * S::WIDTH) {
                                (SIDE, true) => add::<S, SIDE, true>(simd, &p, tile),
                                (SIDE, false) => add::<S, SIDE, false>(simd, &p, tile),
                                _ => (0..height).for_each(|r| {
                                    let row = Tile { i: i + r, height: 1, inner: inner.clone(), ..tile };
                                    add::<S, 1, false>(simd, &p, row);
                                }),
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A tile of C and the inner indices whose products are added to it.
struct Tile {
    i: usize,
    height: usize,
    j: usize,
    width: usize,
    inner: Range<usize>,
}

/// # Safety
/// The tile's elements of A and B can be read and those of C written, which nobody else touches. It has `HEIGHT` rows, and
/// `VECTORS` vectors of columns if it is `WHOLE`, else not more.
#[inline(always)]
unsafe fn add<S: Simd, const HEIGHT: usize, const WHOLE: bool>(simd: S, p: &Matrices, tile: Tile) {
    debug_assert_eq!(tile.height, HEIGHT);
    // Columns of a vector; those of a tile that is not whole may end anywhere.
    let count = |v: usize| if WHOLE { S::WIDTH } else { tile.width.saturating_sub(v * S::WIDTH).min(S::WIDTH) };
    // SAFETY: the caller's promise; a vector has `count` columns of the tile.
    unsafe {
        let load = |from: *const f32, count: usize| match count == S::WIDTH {
            true => simd.load(from),
            false => simd.load_partial(from, count),
        };
        let mut sums = [[simd.splat(0.0); VECTORS]; HEIGHT];
        for (r, row) in sums.iter_mut().enumerate().filter(|_| tile.inner.start > 0) {
            let (_, _, c) = p.rows(tile.i + r, 0);
            for (v, sum) in row.iter_mut().enumerate() {
                *sum = load(c.wrapping_add(tile.j + v * S::WIDTH), count(v));
            }
        }
        for l in tile.inner.clone() {
            let (_, b, _) = p.rows(tile.i, l);
            let b: [S::Float; VECTORS] = std::array::from_fn(|v| load(b.wrapping_add(tile.j + v * S::WIDTH), count(v)));
            for (r, row) in sums.iter_mut().enumerate() {
                let (a, ..) = p.rows(tile.i + r, l);
                let a = simd.splat(a.add(l).read_unaligned());
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = simd.mul_add(a, b[v], *sum);
                }
            }
        }
        for (r, row) in sums.iter().enumerate() {
            let (_, _, c) = p.rows(tile.i + r, 0);
            for (v, &sum) in row.iter().enumerate() {
                let to = c.wrapping_add(tile.j + v * S::WIDTH);
                match count(v) == S::WIDTH {
                    true => simd.store(to, sum),
                    false => simd.store_partial(to, sum, count(v)),
                }
            }
        }
    }
}
