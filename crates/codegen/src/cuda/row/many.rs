//! Flat row kernels of equal arithmetic in one grid, each with arguments and a length of its own: the update of all weights of a model.
//!
//! - The parameter has the arguments of each set, and the number of its first block. A block finds its set by bisection over those numbers,
//!   which all its threads do alike.
//! - One config for all, that of the longest set. Sets neither read nor write what another one writes.
//! - A parameter has at most 4096 bytes, so that many sets take several launches.

use crate::argument::Argument;
use crate::cuda::grid::{CudaSource, Grid, Grids, Word};
use crate::cuda::row::emit::{Emission, Line, PRELUDE, emit_many};
use crate::cuda::row::facts::with_facts;
use crate::cuda::row::variant::RowVariant;
use crate::cuda::row::words::argument_words;
use crate::cuda::row_config::{Policy, RowConfig};
use crate::cuda::target::CudaTarget;
use crate::kernel::{Kernel, Launch, Source};
use crate::lower::LoweredRows;
use crate::rows::ArgUpdate;

/// Bytes of a parameter that every GPU takes.
const LONGEST: usize = 4096;

/// Row work whose results may be in place of operands.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// the work
    pub lowered: LoweredRows,
    /// results in place of operands
    pub updates: Vec<ArgUpdate>,
}

impl Member {
    /// Whether it can be in one grid with another one: both are flat, of the same arithmetic, and begin where their buffers do.
    pub fn fits(&self, other: &Member) -> bool {
        let [own, others] = [self, other].map(|member| &member.lowered);
        let starts = |lowered: &LoweredRows| {
            lowered.launch.axes.is_empty() && lowered.launch.args.iter().all(|arg| arg.offset == 0)
        };
        own.body.flat && own.body == others.body && self.updates == other.updates && starts(own) && starts(others)
    }

    fn length(&self) -> usize {
        self.lowered.launch.rows * self.lowered.launch.cols
    }
}

/// The kernels of several members that fit each other: as few as their parameters allow.
pub fn kernels(members: &[Member], target: &CudaTarget) -> Vec<Kernel> {
    let Some(longest) = members.iter().max_by_key(|member| member.length()) else { return Vec::new() };
    let variant = RowVariant::new(longest.lowered.clone(), target);
    // Words of a member: its arguments, its length, two that flat kernels do not use, and its first block.
    let words = longest.lowered.launch.args.len() + 4;
    let sets = (LONGEST / 8 / words).max(1);
    let parts = members.len().div_ceil(sets);
    let each = members.len().div_ceil(parts.max(1));
    members.chunks(each.max(1)).map(|members| kernel(members, &variant, target)).collect()
}

fn kernel(members: &[Member], variant: &RowVariant, target: &CudaTarget) -> Kernel {
    let RowVariant { lowered, config, .. } = variant;
    debug_assert_eq!(config.policy, Policy::Flat);
    let lines = with_facts(&lowered.body, &lowered.launch, target, |facts| {
        let passes = facts.passes;
        let (body, layouts) = (&lowered.body, facts.layouts);
        let emission = Emission { body, layouts, passes, config, handed: &[], rounded: None };
        emit_many(&emission, members.len())
    });
    let own = |lines: &[Line]| lines.iter().flat_map(|line| [line.text.as_str(), "\n"]).collect::<String>();
    // What the kernel itself writes is no constant memory: loads stay before the stores that follow them.
    let ordinary = if members.iter().all(|member| member.updates.is_empty()) { "" } else { "#define MEETS\n" };
    let text = [ordinary, &own(&lines.constants), &PRELUDE, &own(&lines.kernel)].concat();
    let name = format!("{} sets of arguments, each: {config}", members.len());
    let launch = Launch::of_grids(arguments(members), grids(members, config, target)).with_variant(name, String::new());
    Kernel::new(Source::Cuda(CudaSource::new("row", text)), launch)
}

/// The arguments of all members, one after another.
fn arguments(members: &[Member]) -> Vec<Argument> {
    let mut all: Vec<Argument> = Vec::new();
    for member in members {
        let before = all.len();
        let own = member.lowered.arguments_in_place(&member.updates).into_iter();
        all.extend(own.map(|argument| {
            let in_place_of = argument.in_place_of.map(|position| before + position);
            Argument { in_place_of, ..argument }
        }));
    }
    all
}

fn grids(members: &[Member], config: &RowConfig, target: &CudaTarget) -> Grids {
    let (mut words, mut firsts, mut blocks, mut position) = (Vec::new(), Vec::new(), 0, 0);
    for member in members {
        let LoweredRows { body, launch } = &member.lowered;
        for (spec, binding) in body.args.iter().zip(&launch.args) {
            words.extend(argument_words(spec, body.flat, binding, position));
            position += 1;
        }
        words.extend([Word::Number(member.length() as u64), Word::Fault, Word::Workspace(0)]);
        firsts.push(Word::Number(blocks as u64));
        blocks += config.blocks(member.length(), target.processors);
    }
    words.extend(firsts);
    let waits = config.waits() && target.arch.has_dependent_grids();
    let grid = Grid { waits, ..Grid::new("row", blocks, config.threads() as u32, words) };
    Grids { list: if blocks > 0 { vec![grid] } else { Vec::new() }, ..Grids::default() }
}
