//! A row kernel with its config: its text, its launch, and the candidate configs for tuning.

use crate::body::{Access, Origin};
use crate::cuda::grid::{CudaSource, Grid, Grids, Word};
use crate::cuda::row::config::Facts;
use crate::cuda::row::emit::{Emission, Line, Lines, PRELUDE, emit, finish_grid, partials};
use crate::cuda::row::facts::with_facts;
use crate::cuda::row::passes::passes;
use crate::cuda::row::words::{argument_words, axis_words};
use crate::cuda::row_config::{Policy, RowConfig};
use crate::cuda::target::CudaTarget;
use crate::kernel::{Kernel, Launch, Source};
use crate::linear::{Earlier, earlier_sums};
use crate::lower::{LoweredRows, RowLaunch};
use crate::rows::ArgUpdate;

/// A row kernel with its config.
#[derive(Debug, Clone, PartialEq)]
pub struct RowVariant {
    /// sums taken as early as they can be
    pub lowered: LoweredRows,
    /// how it is spread over threads
    pub config: RowConfig,
    /// bytes of dynamic shared memory
    pub shared: usize,
    /// under which a measured config of it is kept
    pub key: String,
    /// results in place of operands; of a flat kernel, of which each thread loads all its elements before it stores any
    pub updates: Vec<ArgUpdate>,
}

impl RowVariant {
    /// With the measured config, or the suggested one.
    pub fn new(lowered: LoweredRows, target: &CudaTarget) -> RowVariant {
        let LoweredRows { body, launch } = lowered;
        let lowered = LoweredRows { body: earlier_sums(&body).body, launch };
        let (config, shared, key) = with_facts(&lowered.body, &lowered.launch, target, |facts| {
            let key = key(facts);
            let config = config(facts, target.tuning.get(&key));
            let shared = match config.policy {
                Policy::Shared => facts.shared_bytes(&config),
                Policy::Flat | Policy::Registers | Policy::Streamed => config.stages * facts.stage_bytes(&config),
            };
            (config, shared, key)
        });
        RowVariant { lowered, config, shared, key, updates: Vec::new() }
    }

    /// The lines of its text, each with what it came from.
    fn lines(&self, target: &CudaTarget) -> Lines {
        let LoweredRows { body, launch } = &self.lowered;
        with_facts(body, launch, target, |facts| {
            let again = passes(body, facts.shared_rows, false);
            let sweeps = if self.config.policy == Policy::Streamed { &again } else { facts.passes };
            let config = &self.config;
            emit(&Emission { body, layouts: facts.layouts, passes: sweeps, config, handed: &[], rounded: None })
        })
    }

    /// The kernel.
    pub fn kernel(self, target: &CudaTarget) -> Kernel {
        let lines = self.lines(target);
        let own = |lines: &[Line]| lines.iter().flat_map(|line| [line.text.as_str(), "\n"]).collect::<String>();
        // What the kernel itself writes is no constant memory: loads stay before the stores that follow them.
        let ordinary = if self.updates.is_empty() { "" } else { "#define MEETS\n" };
        let text = [ordinary, &own(&lines.constants), &PRELUDE, &own(&lines.kernel)].concat();
        self.with_source(CudaSource::new("row", text), target)
    }

    /// The kernel with another text that takes the same parameter.
    pub fn with_source(self, source: CudaSource, target: &CudaTarget) -> Kernel {
        let launch = Launch::of_grids(self.lowered.arguments_in_place(&self.updates), self.grids(target))
            .with_lookups(self.lowered.lookups())
            .with_variant(self.config.to_string(), self.key);
        Kernel::new(Source::Cuda(source), launch)
    }

    /// The kernel, then the sums of its blocks added up.
    fn grids(&self, target: &CudaTarget) -> Grids {
        let LoweredRows { body, launch: RowLaunch { args, rows, cols, axes } } = &self.lowered;
        let config = &self.config;
        let length = if body.flat { rows * cols } else { *rows };
        let blocks = config.blocks(length, target.processors);
        let mut words = Vec::new();
        for (position, (spec, binding)) in body.args.iter().zip(args).enumerate() {
            words.extend(argument_words(spec, body.flat, binding, position));
        }
        words.extend(axis_words(axes));
        words.extend([Word::Number(length as u64), Word::Fault, Word::Workspace(0)]);
        let mut list = Vec::new();
        if blocks > 0 {
            list.push(Grid {
                entry: "row",
                blocks: [(blocks * config.parts) as u32, 1, 1],
                threads: config.threads() as u32,
                cluster: if config.cluster { config.parts as u32 } else { 1 },
                shared: self.shared as u32,
                waits: config.waits() && target.arch.has_dependent_grids(),
                walks: false,
                words,
            });
        }
        let partials = partials(body);
        let width: usize = partials.iter().map(|&(_, width)| width).sum();
        if !partials.is_empty() {
            let mut words = vec![Word::Workspace(0), Word::Number(blocks as u64)];
            words.extend(partials.iter().map(|&(position, _)| Word::Argument {
                position,
                offset: args[position].offset * body.args[position].dtype.bytes(),
            }));
            list.push(finish_grid(&partials, words));
        }
        let checks_indices = body.args.iter().any(|spec| matches!(spec.access, Access::GatheredRow { .. }));
        Grids { list, workspace: blocks * width * 4, checks_indices, ..Grids::default() }
    }
}

/// Launch shapes worth measuring for row work, the suggested one first.
pub fn candidates(lowered: &LoweredRows, target: &CudaTarget) -> Vec<RowConfig> {
    let body = earlier_sums(&lowered.body).body;
    with_facts(&body, &lowered.launch, target, |facts| facts.candidates())
}

/// The lines of a kernel, each with what it came from in the body; one line stands for what all row kernels share.
pub fn tagged_lines(lowered: &LoweredRows, target: &CudaTarget) -> Vec<(String, Option<Origin>)> {
    let Earlier { exprs, stages, .. } = earlier_sums(&lowered.body);
    let Lines { constants, kernel } = RowVariant::new(lowered.clone(), target).lines(target);
    let before = |origin: Origin| match origin {
        Origin::Expr(id) => Origin::Expr(exprs[id.index()]),
        Origin::Stage(position) => Origin::Stage(stages[position]),
    };
    let shared = format!("// prelude: {} lines that all row kernels share", PRELUDE.lines().count());
    let shared = Line { text: shared, origin: None };
    let all = constants.into_iter().chain([shared]).chain(kernel);
    all.map(|line| (line.text, line.origin.map(before))).collect()
}

/// The measured config, if it is one that this kernel can have: a table may be old, or written by hand.
fn config(facts: &Facts, measured: Option<&RowConfig>) -> RowConfig {
    let fits = |config: &&RowConfig| facts.candidates().iter().any(|known| known.is_same(config));
    match (measured.filter(fits), measured) {
        (Some(config), _) => config.clone(),
        (None, None) => facts.choose(),
        (None, Some(_)) => {
            let config = facts.choose();
            let why = format!("{}; the measured launch shape does not fit", config.why);
            RowConfig { why, ..config }
        }
    }
}

/// The key of a measured config: arithmetic, dtypes, columns, alignments, and rows up to a factor of two.
fn key(facts: &Facts) -> String {
    let alignments: Vec<(usize, usize)> =
        facts.layouts.iter().map(|layout| (layout.axes.len(), layout.alignment)).collect();
    let length = if facts.body.flat { facts.rows * facts.cols } else { facts.rows };
    let text = format!("{} {alignments:?}", facts.body);
    // FNV-1a: short, and the same on every machine.
    let hash =
        text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x100_0000_01b3));
    format!("{}-{hash:016x}-{}", facts.target.arch, length.max(1).next_power_of_two().trailing_zeros())
}
