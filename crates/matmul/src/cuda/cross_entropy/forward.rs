//! Losses of rows.

use deuteron_codegen::argument::{ArgBinding, Argument, Lookup};
use deuteron_codegen::cuda::grid::{CudaSource, Grid, Grids, Word};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Kernel, Launch, Source};
use deuteron_graph::NodeId;
use deuteron_plan::{CrossEntropyLink, Draft};

use super::{Logits, TARGETS, namespace};
use crate::cuda::hopper::{HopperKernel, ZEROS, walk_us};

/// Threads of a block of `combine.cu`.
const COMBINE_THREADS: usize = 256;
/// Microseconds that it takes at any size, and bytes that it reads in one.
const COMBINE_US: f64 = 2.0;
const COMBINE_RATE: f64 = 2e6;
/// The grid that multiplies, in the text.
const STATISTICS: &str = "cross_entropy_statistics";
/// Bytes of a partial, and of a total.
const PARTIAL: usize = 8;
const TOTAL: usize = 4;
/// Positions of the results among the arguments of a launch.
const LOSS: usize = 3;
const LOGSUMEXP: usize = 4;
/// A target that no `i32` is.
const NONE: u64 = 1 << 40;

/// Losses of rows, compiled for their sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct ForwardKernel {
    /// rows, weight and targets
    pub logits: Logits,
    /// a target whose row has no loss
    pub ignored: Option<i32>,
    /// losses, and logsumexp where it is stored
    pub results: Vec<ArgBinding>,
}

impl ForwardKernel {
    /// The kernel of a link, if it takes it.
    pub fn fit(draft: &Draft, link: &CrossEntropyLink, target: &CudaTarget) -> Option<ForwardKernel> {
        let logits = Logits::fit(draft, link.operands, link.smoothing, target)?;
        let stored = |id: &NodeId| draft.outputs.contains(id);
        let results: Vec<NodeId> = [link.loss, link.logsumexp].into_iter().filter(stored).collect();
        if results.len() != draft.outputs.len() || results.first() != Some(&link.loss) {
            return None;
        }
        let results = results.iter().map(|&id| ArgBinding::whole(draft.graph, id, 0, true)).collect();
        Some(ForwardKernel { logits, ignored: link.ignored, results })
    }

    /// Its time: that of the matmul, and of the grid that combines what tiles leave.
    pub(super) fn microseconds(&self, target: &CudaTarget) -> f64 {
        let product = self.logits.product(self.logits.classes, target.processors);
        let tiles = self.logits.classes.div_ceil(product.tile.columns);
        walk_us(&product.tile, &product.launch.shape, target.processors)
            + COMBINE_US
            + (self.logits.rows * tiles * PARTIAL) as f64 / COMBINE_RATE
    }

    /// What is compiled and launched.
    pub fn kernel(&self, target: &CudaTarget) -> Kernel {
        let product = self.logits.product(self.logits.classes, target.processors);
        let text = [
            &self.logits.constants(),
            include_str!("forward.cuh"),
            &namespace("logits", &product, &[ZEROS, include_str!("pairs.cu"), include_str!("statistics.cu")]),
            include_str!("combine.cu"),
        ];
        let results = self.results.iter().map(|arg| Argument::new(arg, self.logits.rows));
        let arguments: Vec<Argument> = self.logits.arguments().into_iter().chain(results).collect();
        let targets = &self.logits.args[TARGETS];
        let lookup = Lookup {
            argument: TARGETS,
            indices: TARGETS,
            offset: targets.offset,
            axes: vec![(self.logits.rows, 1)],
            table_rows: self.logits.classes,
        };
        let launch = Launch::of_grids(arguments, self.grids(&product, target))
            .with_lookups(vec![lookup])
            .with_variant(product.describe(), String::new())
            .with_tiling(product.tiling(STATISTICS));
        Kernel::new(Source::Cuda(CudaSource::new("cross_entropy", text.join("\n"))), launch)
    }

    fn grids(&self, product: &HopperKernel, target: &CudaTarget) -> Grids {
        let &Logits { rows, classes, smoothing, .. } = &self.logits;
        let tiles = classes.div_ceil(product.tile.columns);
        // Where things lie in the workspace.
        let totals = rows * tiles * PARTIAL;
        let picked = totals + if smoothing == 0.0 { 0 } else { rows * tiles * TOTAL };
        let logsumexp = picked + rows * 4;
        let targets = Word::Argument { position: TARGETS, offset: self.logits.args[TARGETS].start() };
        let tail = [
            targets,
            Word::Workspace(0),
            Word::Workspace(totals),
            Word::Workspace(picked),
            Word::Number(classes as u64),
        ];
        let maps = self.logits.maps(0, classes, &product.tile);
        let statistics = product.grid(STATISTICS, maps, tail, target);
        let stored = self.results.len() > 1;
        let sums = if stored { Word::Argument { position: LOGSUMEXP, offset: 0 } } else { Word::Workspace(logsumexp) };
        let ignored = self.ignored.map_or(NONE, |ignored| i64::from(ignored) as u64);
        let mut words = tail.to_vec();
        words.extend([
            Word::Number(rows as u64),
            Word::Number(tiles as u64),
            Word::Argument { position: LOSS, offset: 0 },
            sums,
            Word::Number(ignored),
            Word::Number(TARGETS as u64),
            Word::Fault,
        ]);
        let blocks = rows.div_ceil(COMBINE_THREADS / 32);
        let waits = target.arch.has_dependent_grids();
        let combine = Grid { waits, ..Grid::new("cross_entropy_rows", blocks, COMBINE_THREADS as u32, words) };
        Grids {
            list: vec![statistics, combine],
            workspace: logsumexp + rows * 4,
            checks_indices: true,
            ..Grids::default()
        }
    }
}
