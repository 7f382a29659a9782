//! The division of work: by sizes only, so that any number of threads gives the same bits.

use super::super::Attention;
use super::TILE;

/// Up to this many queries a head is decoded: lanes run along the width and not along the queries.
const DECODE_QUERIES: usize = 4;
/// Keys are split until there are this many tasks, ...
const TASKS: usize = 32;
/// ... but never into ranges below this length: a range costs a row of `width + 2` numbers written and read.
const SPLIT_KEYS: usize = 256;
/// The same for backward, where a range costs a gradient of all queries.
const BACKWARD_TASKS: usize = 16;

/// The work of one forward task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Task {
    pub batch: usize,
    /// The head, or the key head when decoding.
    pub head: usize,
    pub query: usize,
    pub rows: usize,
    /// Which range of keys, and where it starts and ends.
    pub split: usize,
    pub first: usize,
    pub end: usize,
}

/// The rows that a task finishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// The sequence.
    pub batch: usize,
    /// The head; of a group that is decoded, its first.
    pub head: usize,
    /// The first query.
    pub query: usize,
    /// Queries.
    pub rows: usize,
}

impl Attention {
    /// Rows of queries.
    pub(super) fn rows(&self) -> usize {
        self.batch * self.heads * self.queries
    }

    /// Tasks of [`forward`](super::forward()).
    pub fn forward_tasks(&self) -> usize {
        self.units() * self.splits()
    }

    /// Ranges of keys whose results [`combine`](super::combine()) joins; with 1 there is nothing to join.
    pub fn splits(&self) -> usize {
        if self.units() == 0 {
            return 1;
        }
        TASKS.div_ceil(self.units()).min(self.keys.div_ceil(SPLIT_KEYS)).max(1)
    }

    /// `f32` elements that the ranges of keys need between the two steps: none with one range.
    pub fn partial_elements(&self) -> usize {
        if self.splits() == 1 { 0 } else { self.splits() * self.batch * self.heads * self.queries * (self.width + 2) }
    }

    /// Tasks of [`combine`](super::combine()): none with one range.
    pub fn combine_tasks(&self) -> usize {
        if self.splits() == 1 { 0 } else { self.row_tasks() }
    }

    /// Tasks that finish rows: those of [`forward`](super::forward()), or of [`combine`](super::combine()) if keys are split.
    pub fn ending_tasks(&self) -> usize {
        if self.splits() == 1 { self.forward_tasks() } else { self.combine_tasks() }
    }

    /// The rows that one of [`ending_tasks`](Self::ending_tasks) finishes.
    pub fn ended(&self, task: usize) -> Ended {
        let (batch, head, query, rows) = if self.splits() == 1 && self.decodes() {
            let Task { batch, head, query, rows, .. } = self.task(task);
            (batch, head * self.group(), query, rows)
        } else {
            self.row_task(task)
        };
        Ended { batch, head, query, rows }
    }

    /// Number of finishing tasks that a row of `joined` heads waits for.
    pub fn tasks_of_row(&self, joined: usize) -> usize {
        if self.splits() == 1 && self.decodes() { joined / self.group() } else { joined }
    }

    /// Tasks of [`backward`](super::backward()).
    pub fn backward_tasks(&self) -> usize {
        self.batch * self.kv_heads * self.backward_splits()
    }

    /// `f32` elements that [`backward`](super::backward()) leaves for [`finish`](super::finish()).
    pub fn gradient_elements(&self) -> usize {
        self.backward_splits() * self.batch * self.heads * self.queries * self.padded()
    }

    /// Tasks of [`finish`](super::finish()).
    pub fn finish_tasks(&self) -> usize {
        self.row_tasks()
    }

    /// Scores of one head that count; those that a window leaves are counted as if every query had all of it. Documents are not known.
    pub(crate) fn seen_scores(&self) -> f64 {
        self.seen_by_last_of(1).min(self.queries as f64 * self.most_seen_by(1))
    }

    /// Scores of one head that are computed: whole vectors of queries against all keys that one of their tile sees, and with a window whole
    /// tiles of keys.
    pub(crate) fn computed_scores(&self) -> f64 {
        if self.decodes() {
            return self.seen_scores();
        }
        let rest = (self.queries % TILE).next_multiple_of(16);
        // The last query sees all keys.
        let all = TILE as f64 * self.seen_by_last_of(TILE) + rest as f64 * self.keys as f64;
        let rows = (self.queries / TILE * TILE + rest) as f64;
        all.min(rows * self.most_seen_by(TILE))
    }

    /// Keys that some of so many neighbouring queries may see, at most.
    fn most_seen_by(&self, rows: usize) -> f64 {
        let Some(window) = self.scores.window else { return self.keys as f64 };
        let sides = if self.causal { 1 } else { 2 };
        // The first key is that of a tile.
        (sides * window + 2 * (rows - 1)).min(self.keys) as f64
    }

    /// Keys that the last query of each whole tile of `rows` queries sees if there is no window, summed over tiles. Under a causal mask these are
    /// the terms of an arithmetic series, after the tiles that see none: there may be too many queries to iterate over.
    fn seen_by_last_of(&self, rows: usize) -> f64 {
        let tiles = self.queries / rows;
        if !self.causal {
            return tiles as f64 * self.keys as f64;
        }
        let blind = self.queries.saturating_sub(self.keys) / rows;
        if blind >= tiles {
            return 0.0;
        }
        let last_of = |tile: usize| self.seen(tile * rows + rows - 1, self.keys).1 as f64;
        (tiles - blind) as f64 * (last_of(blind) + last_of(tiles - 1)) / 2.0
    }

    /// Queries that keys are read for at once.
    pub(crate) fn tile_queries(&self) -> usize {
        self.queries.clamp(1, TILE)
    }

    pub(crate) fn decodes(&self) -> bool {
        self.queries <= DECODE_QUERIES
    }

    /// `width` up to a whole number of the widest vectors.
    pub(super) fn padded(&self) -> usize {
        self.width.next_multiple_of(16)
    }

    pub(crate) fn backward_splits(&self) -> usize {
        let units = (self.batch * self.kv_heads).max(1);
        BACKWARD_TASKS.div_ceil(units).min(self.keys.div_ceil(SPLIT_KEYS)).max(1)
    }

    /// Keys of a range of backward: whole tiles.
    pub(super) fn backward_range(&self) -> usize {
        self.keys.div_ceil(self.backward_splits()).next_multiple_of(TILE)
    }

    /// The task of a number.
    pub(crate) fn task(&self, index: usize) -> Task {
        let splits = self.splits();
        let (unit, split) = (index / splits, index % splits);
        let range = self.keys.div_ceil(splits).next_multiple_of(TILE);
        let (first, end) = (split * range, (split + 1) * range);
        if self.decodes() {
            let (batch, head) = (unit / self.kv_heads, unit % self.kv_heads);
            return Task { batch, head, query: 0, rows: self.queries, split, first, end };
        }
        let (batch, head, query, rows) = self.row_task(unit);
        Task { batch, head, query, rows, split, first, end }
    }

    /// Batch, head, first query and rows of the numbered tile of queries. Tiles of a head are neighbours, so that its keys
    /// stay in L2; the last queries come first: under a causal mask they have the most keys.
    pub(super) fn row_task(&self, index: usize) -> (usize, usize, usize, usize) {
        let tiles = self.query_tiles();
        let tile = tiles - 1 - index % tiles;
        let (batch, head) = (index / tiles / self.heads, index / tiles % self.heads);
        (batch, head, tile * TILE, TILE.min(self.queries - tile * TILE))
    }

    /// The tiles of keys that a task of forward goes over: the first key of the first, and the end of the last.
    pub(crate) fn keys_of(&self, task: &Task, used: usize) -> (usize, usize) {
        let (first, end) = self.seen_by(task.query, task.rows, used);
        (task.first.max(first / TILE * TILE), end.min(task.end))
    }

    fn query_tiles(&self) -> usize {
        self.queries.div_ceil(TILE)
    }

    fn row_tasks(&self) -> usize {
        self.batch * self.heads * self.query_tiles()
    }

    fn units(&self) -> usize {
        if self.decodes() { self.batch * self.kv_heads * self.queries.min(1) } else { self.row_tasks() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::plain;
    use deuteron_graph::Dtype;

    #[test]
    fn scores_are_those_of_all_queries_one_by_one() {
        for causal in [false, true] {
            for queries in [0, 1, 4, 5, 63, 64, 65, 100, 128, 130, 300] {
                for keys in [0, 1, 3, 17, 64, 65, 129, 299, 1000] {
                    let attention = Attention { causal, ..plain(Dtype::F32, [1, 1], [queries, keys, 8]) };
                    let seen: usize = (0..queries).map(|query| attention.seen(query, keys).1).sum();
                    let tile = |first: usize| {
                        let rows = TILE.min(queries - first);
                        rows.next_multiple_of(16) * attention.seen(first + rows - 1, keys).1
                    };
                    let tiles: usize = (0..queries).step_by(TILE).map(tile).sum();
                    let computed = if attention.decodes() { seen } else { tiles };
                    assert_eq!(attention.seen_scores(), seen as f64, "{queries} queries, {keys} keys, {causal}");
                    assert_eq!(
                        attention.computed_scores(),
                        computed as f64,
                        "{queries} queries, {keys} keys, {causal}"
                    );
                }
            }
        }
    }
}
