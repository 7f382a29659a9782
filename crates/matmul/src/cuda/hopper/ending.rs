//! How what follows a matmul on Hopper is done: element by element on sums that pass through shared memory (`elementwise.cu`), or by rows
//! on sums where they are (`rows.cu`).

use deuteron_codegen::body::{Body, Expr, Stage};
use deuteron_codegen::cuda::row::TileArguments;
use deuteron_codegen::cuda::row::sides::Side;
use deuteron_codegen::tile::tensor_map::{Mapped, TensorMap};
use deuteron_graph::Dtype;

/// Columns that a thread has side by side, as the instruction gives sums.
pub(super) const PAIR: usize = 2;
/// Blocks of a cluster, at most, on every GPU that has clusters.
pub(super) const CLUSTER: usize = 8;

/// Whether what follows needs whole rows.
pub(super) fn reduces(body: &Body) -> bool {
    reductions(body) > 0
}

/// How many numbers it reduces each row to.
pub(super) fn reductions(body: &Body) -> usize {
    body.stages.iter().filter(|stage| matches!(stage, Stage::RowReduce { .. })).count()
}

/// How many sums over rows it makes.
pub(super) fn column_sums(body: &Body) -> usize {
    body.stages.iter().filter(|stage| matches!(stage, Stage::ColumnSum { .. })).count()
}

/// Whether it draws random numbers: beside all sums of a thread, those take more registers than there are.
pub(super) fn draws(body: &Body) -> bool {
    body.exprs.iter().any(|expr| matches!(expr, Expr::Keep { .. }))
}

/// How many results it stores.
pub(super) fn stores(body: &Body) -> usize {
    body.stages.iter().filter(|stage| matches!(stage, Stage::Store { .. })).count()
}

/// Arguments of what follows that have tensor maps: 16-bit ones whose rows lie at equal distances.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct MappedRows {
    /// operands, then results
    pub maps: Vec<TensorMap>,
    carried: Vec<usize>,
    put: Vec<usize>,
}

impl MappedRows {
    /// Those of a matmul of `batches` times `m` rows, in tiles of so many rows; at most so many operands.
    pub fn new(side: &Side, [batches, m]: [usize; 2], tile_rows: usize, operands: usize) -> MappedRows {
        let narrow = |arg: &usize| matches!(side.body.args[*arg].dtype, Dtype::F16 | Dtype::Bf16);
        let map = |arg: usize, lines: usize| -> Option<TensorMap> {
            let rows = side.evenly_spaced(arg)?;
            let fits = rows.start.is_multiple_of(8) && rows.stride.is_multiple_of(8) && rows.stride > 0;
            fits.then(|| TensorMap {
                of: Mapped::Argument(rows.position),
                offset: 2 * rows.start,
                rank: 3,
                sizes: [side.body.cols as u64, m as u64, batches as u64, 1, 1],
                strides: [2 * rows.stride as u64, (2 * rows.stride * m) as u64, 16, 16],
                tile: [64, lines as u32, 1, 1, 1],
            })
        };
        let all = |written: bool, lines: usize| -> Vec<(usize, TensorMap)> {
            let args = (0..side.body.args.len()).filter(|&arg| side.body.args[arg].written == written).filter(narrow);
            args.filter_map(|arg| Some((arg, map(arg, lines)?))).collect()
        };
        let mut carried = all(false, tile_rows);
        carried.truncate(operands);
        let put = all(true, 64);
        let maps = carried.iter().chain(&put).map(|&(_, map)| map).collect();
        let args = |list: Vec<(usize, TensorMap)>| list.into_iter().map(|(arg, _)| arg).collect();
        MappedRows { maps, carried: args(carried), put: args(put) }
    }

    /// The operands alone.
    pub fn operands(mut self) -> MappedRows {
        self.maps.truncate(self.carried.len());
        MappedRows { put: Vec::new(), ..self }
    }

    /// Positions of operands in the body.
    pub fn carried(&self) -> &[usize] {
        &self.carried
    }

    /// Positions of results.
    pub fn put(&self) -> &[usize] {
        &self.put
    }

    /// As the text takes them.
    pub fn arguments(&self) -> TileArguments<'_> {
        TileArguments { carried: &self.carried, put: &self.put }
    }
}
