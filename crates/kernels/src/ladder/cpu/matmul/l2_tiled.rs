//! Blocks of B that stay in the L1 cache, and 4 x 4 sums in registers: an element that was loaded is used four times,
//! and a block of B by all rows of the task. Sums wait in C from one block of the inner size to the next.

use std::ops::Range;

use super::Matrices;

/// Rows and columns of a block of B: 32 KiB.
const DEEP: usize = 128;
const WIDE: usize = 64;
/// Rows and columns of the sums in registers.
const SIDE: usize = 4;

/// # Safety
/// The operands, of f32 and with contiguous rows, can be read and these rows of the result written, which nobody else
/// touches.
pub(super) unsafe fn rows(p: &Matrices, rows: Range<usize>) {
    if p.k == 0 {
        // SAFETY: the caller's promise.
        rows.clone().for_each(|i| (0..p.n).for_each(|j| unsafe { p.store(i, j, 0.0) }));
    }
    for depth in (0..p.k).step_by(DEEP) {
        let inner = depth..p.k.min(depth + DEEP);
        for column in (0..p.n).step_by(WIDE) {
            let columns = column..p.n.min(column + WIDE);
            for i in rows.clone().step_by(SIDE) {
                for j in columns.clone().step_by(SIDE) {
                    let (height, width) = (SIDE.min(rows.end - i), SIDE.min(columns.end - j));
                    // SAFETY: the tile is one of these rows, and there are such inner indices.
                    unsafe {
                        match (height, width) {
                            (SIDE, SIDE) => tile(p, (i, SIDE), (j, SIDE), inner.clone()),
                            _ => tile(p, (i, height), (j, width), inner.clone()),
                        }
                    }
                }
            }
        }
    }
}

/// Adds the products of some inner indices to a tile of C, given as first row and rows, first column and columns.
///
/// # Safety
/// As [`rows`], of this tile.
#[inline(always)]
unsafe fn tile(p: &Matrices, (i, height): (usize, usize), (j, width): (usize, usize), inner: Range<usize>) {
    let mut sums = [[0.0f32; SIDE]; SIDE];
    // SAFETY: the caller's promise.
    unsafe {
        for (r, sums) in sums.iter_mut().enumerate().take(height).filter(|_| inner.start > 0) {
            let (_, _, c) = p.rows(i + r, 0);
            for (s, sum) in sums.iter_mut().enumerate().take(width) {
                *sum = c.add(j + s).read_unaligned();
            }
        }
        for l in inner {
            let (_, b, _) = p.rows(i, l);
            for (r, sums) in sums.iter_mut().enumerate().take(height) {
                let (a, ..) = p.rows(i + r, l);
                let a = a.add(l).read_unaligned();
                for (s, sum) in sums.iter_mut().enumerate().take(width) {
                    *sum += a * b.add(j + s).read_unaligned();
                }
            }
        }
        for (r, sums) in sums.iter().enumerate().take(height) {
            let (_, _, c) = p.rows(i + r, 0);
            for (s, &sum) in sums.iter().enumerate().take(width) {
                c.add(j + s).write_unaligned(sum);
            }
        }
    }
}
