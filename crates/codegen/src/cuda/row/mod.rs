//! Row kernels on CUDA: the same body as on the CPU, spread over threads by a config.
//!
//! - Reads every argument once and writes every result once, unless a row is so long that it is read again.
//! - Sums are of `f32`, in an order that depends on the config alone: the same bits on every run.
//! - Rows, strides and addresses are words of the parameter; columns, dtypes and alignments are compiled in.

mod config;
mod emit;
mod following;
mod layout;
mod passes;
mod sides;

pub use config::{Policy, RowConfig};
pub(crate) use emit::{Line, Lines, PRELUDE, type_name};
pub(crate) use following::{Following, following, following_words};
pub(crate) use layout::gcd;
pub(crate) use sides::Side;

use crate::body::{Access, ArgSpec, Body};
use crate::cuda::row::config::Facts;
use crate::cuda::row::emit::{Emission, partials};
use crate::cuda::row::layout::layouts;
use crate::cuda::row::passes::passes;
use crate::cuda::{CudaSource, CudaTarget, Family, Grid, Grids, Word};
use crate::source::{ArgBinding, Geometry, Launch};

/// What is known of a compiled row kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct RowKernel {
    /// its arguments, in the order of the launch
    pub args: Vec<ArgSpec>,
    /// columns; 0 of a flat kernel
    pub cols: usize,
    /// whether it knows no rows
    pub flat: bool,
    /// launch axes that it takes coordinates of
    pub axes: u16,
    /// (argument, width) of its sums over rows
    pub partials: Vec<(usize, usize)>,
    /// how it is spread over threads
    pub config: RowConfig,
    /// bytes of dynamic shared memory
    pub shared: usize,
    /// under which a measured config of it is kept
    pub key: String,
}

/// Renders a body for a launch.
pub(crate) fn render(body: &Body, launch: &Launch, target: &CudaTarget) -> CudaSource {
    let (lines, kernel) = lines(body, launch, target);
    let own = |lines: &[Line]| lines.iter().flat_map(|line| [line.text.as_str(), "\n"]).collect::<String>();
    let text = own(&lines.constants) + &PRELUDE + &own(&lines.kernel);
    CudaSource { name: "row".into(), text, family: Family::Row(Box::new(kernel)) }
}

/// The lines of a kernel, each with what it came from.
pub(crate) fn lines(body: &Body, launch: &Launch, target: &CudaTarget) -> (Lines, RowKernel) {
    with_facts(body, launch, target, |facts| {
        let key = key(facts);
        let config = config(facts, target.tuning.get(&key));
        let shared = match config.policy {
            Policy::Shared => facts.shared_bytes(&config),
            Policy::Flat | Policy::Registers | Policy::Streamed => config.stages * facts.stage_bytes(&config),
        };
        let again = passes(body, facts.shared_rows, false);
        let sweeps = if config.policy == Policy::Streamed { &again } else { facts.passes };
        let lines =
            emit::emit(&Emission { body, layouts: facts.layouts, passes: sweeps, config: &config, handed: &[] });
        let kernel = RowKernel {
            args: body.args.clone(),
            cols: body.cols,
            flat: body.flat,
            axes: body.axes,
            partials: partials(body),
            config,
            shared,
            key,
        };
        (lines, kernel)
    })
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

/// Configs worth measuring for a body and a launch, the suggested one first.
pub(crate) fn candidates(body: &Body, launch: &Launch, target: &CudaTarget) -> Vec<RowConfig> {
    with_facts(body, launch, target, |facts| facts.candidates())
}

fn with_facts<R>(body: &Body, launch: &Launch, target: &CudaTarget, f: impl FnOnce(&Facts) -> R) -> R {
    let (rows, cols) = match launch.geometry {
        Geometry::Row { rows, cols, .. } => (rows, cols),
        Geometry::Matmul(_)
        | Geometry::Product { .. }
        | Geometry::Attention(_)
        | Geometry::AttentionRows { .. }
        | Geometry::AttentionBlock { .. }
        | Geometry::AttentionBackward(_)
        | Geometry::ScatterAdd { .. }
        | Geometry::Append(_)
        | Geometry::Copy(_) => (0, 0),
    };
    let layouts = layouts(body, launch);
    let is_shared =
        |(spec, layout): (&ArgSpec, &layout::ArgLayout)| spec.access == Access::Row && layout.axes.is_empty();
    let shared_rows: Vec<bool> = body.args.iter().zip(&layouts).map(is_shared).collect();
    let kept = passes(body, &shared_rows, true);
    f(&Facts { body, layouts: &layouts, shared_rows: &shared_rows, passes: &kept, rows, cols, target })
}

/// What a measured config belongs to: arithmetic, dtypes, columns, alignments, and rows up to a factor of two.
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

/// The words of an argument: its address, then what its rows' numbers are taken apart by.
fn argument_words(spec: &ArgSpec, flat: bool, binding: &ArgBinding, position: usize) -> Vec<Word> {
    let address = Word::Argument { position, offset: binding.offset * spec.dtype.bytes() };
    words_at(address, spec, flat, binding)
}

/// The same of what lies at an address.
fn words_at(address: Word, spec: &ArgSpec, flat: bool, binding: &ArgBinding) -> Vec<Word> {
    let size = spec.dtype.bytes();
    let mut words = vec![address];
    let layout = layout::layout(spec.access, flat, binding);
    if matches!(spec.access, Access::GatheredRow { .. }) {
        let stride = layout.axes.first().map_or(0, |&(_, stride)| stride);
        words.extend([Word::Number((stride * size) as u64), Word::Number(binding.table_rows as u64)]);
        return words;
    }
    for (axis, &(count, stride)) in layout.axes.iter().enumerate() {
        words.push(Word::Number((stride * size) as u64));
        if axis > 0 {
            words.push(Word::Number(count as u64));
        }
    }
    words
}

fn axis_words(axes: &[(usize, usize)]) -> impl Iterator<Item = Word> {
    axes.iter().flat_map(|&(divide, modulo)| [Word::Number(divide as u64), Word::Number(modulo as u64)])
}

/// The grids of a launch: the kernel, then the sums of its blocks added up.
pub(crate) fn grids(kernel: &RowKernel, launch: &Launch, target: &CudaTarget) -> Grids {
    let Geometry::Row { rows, cols, ref axes } = launch.geometry else { return Grids::default() };
    let config = &kernel.config;
    let length = if kernel.flat { rows * cols } else { rows };
    let blocks = config.blocks(length, target.processors);
    let mut words = Vec::new();
    for (position, (spec, binding)) in kernel.args.iter().zip(&launch.args).enumerate() {
        words.extend(argument_words(spec, kernel.flat, binding, position));
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
            shared: kernel.shared as u32,
            waits: config.waits() && target.arch.has_dependent_grids(),
            words,
        });
    }
    let width: usize = kernel.partials.iter().map(|&(_, width)| width).sum();
    if let Some(widest) = kernel.partials.iter().map(|&(_, width)| width).max() {
        let mut words = vec![Word::Workspace(0), Word::Number(blocks as u64)];
        words.extend(kernel.partials.iter().map(|&(position, _)| Word::Argument {
            position,
            offset: launch.args[position].offset * kernel.args[position].dtype.bytes(),
        }));
        let blocks = [widest.div_ceil(32).max(1) as u32, kernel.partials.len() as u32, 1];
        list.push(Grid { entry: "finish", blocks, threads: 1024, cluster: 1, shared: 0, waits: false, words });
    }
    let checks_indices = kernel.args.iter().any(|spec| matches!(spec.access, Access::GatheredRow { .. }));
    Grids { list, workspace: blocks * width * 4, checks_indices, ..Grids::default() }
}
