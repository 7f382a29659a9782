//! Row work in a matmul's kernel, mapped to its threads.

use deuteron_graph::Dtype;

use crate::argument::ArgBinding;
use crate::body::{Access, ArgSpec, Body};
use crate::cuda::grid::{Grid, Word};
use crate::cuda::row::emit::{
    Emission, TileArguments, emit_epilogue, emit_prologue, emit_rows_of_warps, emit_tile_rows, finish_grid, partials,
};
use crate::cuda::row::layout::{ArgLayout, layout};
use crate::cuda::row::passes::{Passes, passes};
use crate::cuda::row::words::{axis_words, words_at};
use crate::cuda::row_config::{Policy, RowConfig};

/// Columns of one argument that a thread of a prologue holds in registers, at most; longer rows are read by every sweep.
const HELD: usize = 32;

/// Rows of an argument that lie at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpacedRows {
    /// of the argument in the launch
    pub position: usize,
    /// elements before the first row
    pub start: usize,
    /// elements from one row to the next
    pub stride: usize,
}

/// The prologue or the epilogue of a matmul.
pub struct Side<'a> {
    /// the work
    pub body: &'a Body,
    /// The layout of each argument and its position in the launch; none for passed arguments.
    pub args: Vec<Option<(usize, &'a ArgBinding)>>,
    /// Arguments that are passed in registers or shared memory.
    pub handed: &'a [usize],
    /// (divide, modulo) of each launch axis.
    pub axes: &'a [(usize, usize)],
    /// Columns that a thread takes at once; they divide the columns of both sides.
    pub vector: usize,
    /// The dtype that passed values were rounded to, if any.
    pub rounded: Option<Dtype>,
}

impl Side<'_> {
    /// The text of a prologue, for a block of this many threads and as many rows as it can have.
    pub fn prologue(&self, rows: usize, threads: usize) -> String {
        // A warp has a row to itself, or the whole block has the only row: so no barrier is between several rows.
        let threads_per_row = if rows == 1 { threads } else { 32 };
        let chunks = self.body.cols.div_ceil(threads_per_row * self.vector).max(1);
        let policy = if chunks * self.vector <= HELD { Policy::Registers } else { Policy::Streamed };
        let config = self.config(policy, threads_per_row, threads / threads_per_row, chunks);
        let layouts = self.layouts();
        let sweeps = passes(self.body, &self.shared(&layouts), policy == Policy::Registers);
        emit_prologue(&self.emission(&layouts, &sweeps, &config))
    }

    /// The text of row work with one warp per row and no passed arguments. Rows that a warp cannot hold are read again by every pass.
    pub fn rows_of_warps(&self) -> String {
        let chunks = self.body.cols.div_ceil(32 * self.vector).max(1);
        let policy = if chunks * self.vector <= HELD { Policy::Registers } else { Policy::Streamed };
        // What rows share is loaded where it is used: registers are few.
        let config = RowConfig { resident: 1, ..self.config(policy, 32, 1, chunks) };
        let layouts = self.layouts();
        let sweeps = passes(self.body, &self.shared(&layouts), policy == Policy::Registers);
        emit_rows_of_warps(&self.emission(&layouts, &sweeps, &config))
    }

    /// The text of an epilogue.
    pub fn epilogue(&self) -> String {
        let config = self.config(Policy::Streamed, 1, 1, 1);
        let layouts = self.layouts();
        let sweeps = passes(self.body, &self.shared(&layouts), false);
        emit_epilogue(&self.emission(&layouts, &sweeps, &config))
    }

    /// The text of an epilogue on the sums of tiles so wide, of which this many blocks share a row; four neighbouring threads have a row of a
    /// tile.
    pub fn tile_rows(&self, columns: usize, parts: usize, arguments: TileArguments) -> String {
        let config = self.config(Policy::Registers, 4, 1, columns / (4 * self.vector));
        let config = RowConfig { parts, ..config };
        let layouts = self.layouts();
        // Sums are each row's own.
        let shared = self.shared(&layouts).into_iter().enumerate();
        let shared: Vec<bool> = shared.map(|(arg, shared)| shared && !self.handed.contains(&arg)).collect();
        let sweeps = passes(self.body, &shared, true);
        emit_tile_rows(&self.emission(&layouts, &sweeps, &config), arguments)
    }

    fn emission<'e>(&'e self, layouts: &'e [ArgLayout], passes: &'e Passes, config: &'e RowConfig) -> Emission<'e> {
        let &Side { body, handed, rounded, .. } = self;
        Emission { body, layouts, passes, config, handed, rounded }
    }

    /// How the rows of an argument lie, if they are at equal distances.
    pub fn evenly_spaced(&self, arg: usize) -> Option<SpacedRows> {
        let &(position, binding) = self.args.get(arg)?.as_ref()?;
        let layout = layout(self.body.args[arg].access, false, binding);
        match (self.body.args[arg].access, layout.axes.as_slice()) {
            (Access::Row, &[(_, stride)]) => Some(SpacedRows { position, start: binding.offset, stride }),
            _ => None,
        }
    }

    /// The words of its parameter, as `emit::fields` names them.
    pub fn words(&self, rows: usize) -> Vec<Word> {
        let address = |position: usize, start: usize| Word::Argument { position, offset: start };
        self.words_at(rows, address)
    }

    /// The same; `address` says where the argument at a position of the launch lies, from this many bytes on.
    pub fn words_at(&self, rows: usize, address: impl Fn(usize, usize) -> Word) -> Vec<Word> {
        let mut words = Vec::new();
        for (spec, &(position, binding)) in self.specs() {
            let start = binding.offset * spec.dtype.bytes();
            words.extend(words_at(address(position, start), spec, false, binding));
        }
        words.extend(axis_words(self.axes));
        // It looks up nothing, so it needs no fault; and a workspace where it sums over rows.
        let workspace = if self.column_sums() > 0 { Word::Workspace(0) } else { Word::Number(0) };
        words.extend([Word::Number(rows as u64), Word::Number(0), workspace]);
        words
    }

    /// How many sums over rows it makes.
    pub fn column_sums(&self) -> usize {
        partials(self.body).len()
    }

    /// The grid that adds up sums over rows, of which the kernel has stored `parts` of each in the workspace, and the bytes that they take.
    /// None if it makes no such sums.
    pub fn finish(&self, parts: usize) -> Option<(Grid, usize)> {
        let sums = partials(self.body);
        let arguments = sums.iter().filter_map(|&(arg, _)| {
            let &(position, binding) = self.args[arg].as_ref()?;
            Some(Word::Argument { position, offset: binding.offset * self.body.args[arg].dtype.bytes() })
        });
        let words = [Word::Workspace(0), Word::Number(parts as u64)].into_iter().chain(arguments).collect();
        let width = sums.iter().map(|&(_, width)| width).max()?;
        Some((finish_grid(&sums, words), 4 * parts * sums.len() * width))
    }

    /// Arguments of which all rows read the same columns: position in the launch, how they lie, and their type.
    pub fn shared_rows(&self) -> impl Iterator<Item = (usize, &ArgBinding, Dtype)> {
        let shared = |spec: &ArgSpec, binding: &ArgBinding| {
            !spec.written && spec.access == Access::Row && layout(spec.access, false, binding).axes.is_empty()
        };
        self.specs()
            .filter(move |(spec, (_, binding))| shared(spec, binding))
            .map(|(spec, &(position, binding))| (position, binding, spec.dtype))
    }

    fn specs(&self) -> impl Iterator<Item = (&ArgSpec, &(usize, &ArgBinding))> {
        self.body.args.iter().zip(&self.args).filter_map(|(spec, arg)| Some((spec, arg.as_ref()?)))
    }

    fn layouts(&self) -> Vec<ArgLayout> {
        let handed = ArgLayout { axes: Vec::new(), alignment: 16 };
        let args = self.body.args.iter().zip(&self.args);
        args.map(|(spec, arg)| arg.map_or(handed.clone(), |(_, binding)| layout(spec.access, false, binding))).collect()
    }

    fn shared(&self, layouts: &[ArgLayout]) -> Vec<bool> {
        let args = self.body.args.iter().zip(layouts);
        args.map(|(spec, layout)| spec.access == Access::Row && layout.axes.is_empty()).collect()
    }

    fn config(&self, policy: Policy, threads_per_row: usize, rows_per_block: usize, chunks: usize) -> RowConfig {
        RowConfig {
            policy,
            vector: self.vector,
            threads_per_row,
            rows_per_block,
            chunks,
            parts: 1,
            cluster: false,
            resident: 0,
            stages: 0,
            wide: false,
            why: String::new(),
        }
    }
}
