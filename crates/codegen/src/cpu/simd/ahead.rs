//! Prefetches of the next row or the next strip.
//!
//! While an instruction computes on tiles, no loads are in flight, and hardware prefetchers stop at the end of
//! a page. So each instruction of a strip first prefetches its share of the next lines.

use super::lanes::Simd;
use super::launch::Launch;
use super::store::LINE;

/// Lines still to prefetch.
pub(super) struct Ahead {
    /// Arguments read or written along the row, in any pass.
    reads: Vec<usize>,
    /// Instructions of all strips of all rows in flight.
    steps: usize,
    /// Steps that the planned ranges are spread over.
    parts: usize,
    /// Planned ranges; as many as `reads`, at most.
    ranges: Vec<Range>,
}

#[derive(Clone, Copy)]
struct Range {
    /// Address of the next line. Never dereferenced.
    next: usize,
    lines: usize,
    /// Lines of one step.
    share: usize,
    /// Whether they will be written.
    written: bool,
}

impl Ahead {
    pub fn new(reads: Vec<usize>, steps: usize, rows: usize) -> Ahead {
        Ahead { ranges: Vec::with_capacity(reads.len() * rows), reads, steps: steps * rows, parts: 1 }
    }

    /// Drops the remaining prefetches, and distributes those planned from now on over `parts` steps.
    pub fn start(&mut self, parts: usize) {
        self.ranges.clear();
        self.parts = parts;
    }

    /// Adds `bytes` from `address` on.
    pub fn plan(&mut self, address: usize, bytes: usize, written: bool) {
        let lines = bytes.div_ceil(LINE);
        if lines > 0 {
            self.ranges.push(Range { next: address, lines, share: lines.div_ceil(self.parts), written });
        }
    }

    /// Plans prefetches of the next rows, at `next` (offsets of all arguments for each of `rows` rows), of every argument
    /// whose row changes. Consecutive rows are one range.
    pub fn next_rows(&mut self, launch: &Launch<'_>, next: &[usize], rows: usize, cols: usize) {
        self.start(self.steps);
        let args = launch.args.len();
        for at in 0..self.reads.len() {
            let arg = self.reads[at];
            let written = launch.program.args[arg].written;
            // What streams past the caches must not be fetched into them.
            if written && launch.args[arg].streaming {
                continue;
            }
            let bytes = launch.program.args[arg].dtype.bytes();
            let (mut first, mut last) = (0, 0);
            for row in 0..rows {
                let offset = next[row * args + arg];
                if row > 0 && offset == last + cols {
                    last = offset;
                    continue;
                }
                if row > 0 && offset != last {
                    self.plan(launch.args[arg].base as usize + first * bytes, (last - first + cols) * bytes, written);
                }
                (first, last) = (offset, offset);
            }
            // One row for all, such as a bias, is in the cache already.
            if rows > 1 && first == last && launch.args[arg].rank > 0 && next[arg] == next[(rows - 1) * args + arg] {
                continue;
            }
            self.plan(launch.args[arg].base as usize + first * bytes, (last - first + cols) * bytes, written);
        }
    }

    /// Prefetches one step's share.
    #[inline]
    pub fn issue<S: Simd>(&mut self, simd: S) {
        for range in &mut self.ranges {
            let lines = range.share.min(range.lines);
            for line in 0..lines {
                let address = std::ptr::without_provenance(range.next + line * LINE);
                if range.written { simd.prefetch_to_write(address) } else { simd.prefetch(address) }
            }
            range.next += lines * LINE;
            range.lines -= lines;
        }
    }
}
