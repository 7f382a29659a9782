//! Rows added into a table on CUDA: positions sorted by their row, then one warp per row adds them in order.
//!
//! Sums are f32, in the order of the positions, with no float atomics: the same bits every time.

use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::tile::{self, Part};
use deuteron_graph::Dtype;
use deuteron_plan::primitive_work;

use super::Scatter;

/// Keys that one block sorts: 64 KiB of shared memory, which every GPU has.
const PIECE: usize = 8192;
/// Threads of the sorting kernels, as in `scatter.cu`.
const SORT_THREADS: usize = 1024;
/// Threads of the comparisons in global memory, as in `scatter.cu`.
const MERGE_THREADS: usize = 256;
/// Threads of the kernel that adds, one warp per row, as in `scatter.cu`.
const ADD_THREADS: usize = 256;
/// Columns of one warp, as in `scatter.cu`.
const WARP_COLUMNS: usize = 256;
/// Blocks of the second axis of a grid, at most.
const MAX_BLOCKS_Y: usize = 65535;

/// Rows added into a table on a GPU.
pub(crate) struct ScatterFamily;

impl Family<CudaTarget> for ScatterFamily {
    fn offer<'a>(&self, request: Request<'a>, _: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let scatter = Scatter::lower(&request.group)?;
        offered(move || primitive_work(&request.group), move || kernel(&scatter))
    }
}

/// The kernels of a scatter.
pub fn kernel(scatter: &Scatter) -> Kernel {
    let kind = match scatter.dtype {
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
        _ => 0,
    };
    let parts = tile::text(&[Part::Conversions]);
    let text = format!("constexpr int KIND = {kind};\n\n{parts}\n{}", include_str!("scatter.cu"));
    let launch = Launch::of_grids(scatter.arguments(), grids(scatter)).with_lookups(scatter.lookups());
    Kernel::new(Source::Cuda(CudaSource::new("scatter_add", text)), launch)
}

/// The sort, then the sums.
fn grids(scatter: &Scatter) -> Grids {
    let &Scatter { ref args, count, cols, rows, .. } = scatter;
    let [indices, updates, table] =
        [0, 1, 2].map(|position| Word::Argument { position, offset: args[position].start() });
    let keys = Word::Workspace(0);
    let number = |value: usize| Word::Number(value as u64);
    let mut list = Vec::new();
    let total = count.next_power_of_two().max(2);
    let piece = total.min(PIECE);
    if count > 0 {
        let words = vec![indices, keys, Word::Fault, number(count), number(rows), number(piece)];
        list.push(sorting("scatter_sort", total / piece, piece, words));
        let mut order = piece * 2;
        while order <= total {
            let mut distance = order / 2;
            while distance >= piece {
                let pairs = total / 2;
                let words = vec![keys, number(pairs), number(order), number(distance)];
                let blocks = pairs.div_ceil(MERGE_THREADS);
                list.push(Grid::new("scatter_merge_far", blocks, MERGE_THREADS as u32, words));
                distance /= 2;
            }
            let words = vec![keys, number(total / 2), number(order), number(piece / 2)];
            list.push(sorting("scatter_merge_near", total / piece, piece, words));
            order *= 2;
        }
    }
    if rows > 0 && cols > 0 {
        let (blocks, beside) = (rows.div_ceil(ADD_THREADS / 32), cols.div_ceil(WARP_COLUMNS).min(MAX_BLOCKS_Y));
        let words = vec![keys, updates, table, number(count), number(cols), number(rows)];
        let grid = Grid::new("scatter_add", blocks, ADD_THREADS as u32, words);
        list.push(Grid { blocks: [grid.blocks[0], beside as u32, 1], ..grid });
    }
    let workspace = if count > 0 { total * 8 } else { 0 };
    Grids { list, workspace, checks_indices: count > 0, ..Grids::default() }
}

fn sorting(entry: &'static str, blocks: usize, piece: usize, words: Vec<Word>) -> Grid {
    let grid = Grid::new(entry, blocks, (piece / 2).clamp(32, SORT_THREADS) as u32, words);
    Grid { shared: piece as u32 * 8, ..grid }
}

#[cfg(test)]
mod tests {
    use deuteron_graph::Graph;

    use super::*;
    use deuteron_codegen::argument::ArgBinding;

    fn entries(count: usize, cols: usize, rows: usize) -> Vec<(&'static str, [u32; 3], u32)> {
        let graph: Graph = "x = input bf16[1] ; out x".parse().unwrap();
        let arg = || ArgBinding::whole(&graph, graph.inputs()[0], 0, false);
        let scatter = Scatter { dtype: Dtype::Bf16, args: [arg(), arg(), arg()], count, cols, rows };
        grids(&scatter).list.iter().map(|grid| (grid.entry, grid.blocks, grid.shared)).collect()
    }

    #[test]
    fn few_positions_are_sorted_by_one_block() {
        let expected = [("scatter_sort", [1, 1, 1], 8 * 1024), ("scatter_add", [6283, 3, 1], 0)];
        assert_eq!(entries(1000, 768, 50257), expected);
        assert_eq!(entries(0, 768, 10), [("scatter_add", [2, 3, 1], 0)]);
        assert_eq!(entries(3, 0, 10), [("scatter_sort", [1, 1, 1], 32)]);
    }

    #[test]
    fn many_positions_take_a_pass_for_each_distance() {
        let names: Vec<&str> = entries(20_000, 64, 100).iter().map(|entry| entry.0).collect();
        let (far, near) = ("scatter_merge_far", "scatter_merge_near");
        assert_eq!(names, ["scatter_sort", far, near, far, far, near, "scatter_add"]);
        assert_eq!(entries(20_000, 64, 100)[1].1, [64, 1, 1]);
    }
}
