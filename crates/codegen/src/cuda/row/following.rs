//! Row work that a block of another kernel runs as soon as some rows are complete.
//!
//! The text is a namespace, `rows`, with the code that row kernels include, a parameter and `run(p, first, end, s_memory)`. Its operands may
//! have been written by other blocks of the same launch, so no load uses the read-only cache.

use crate::body::Body;
use crate::cuda::grid::Word;
use crate::cuda::row::emit::{Emission, PRELUDE, emit_following};
use crate::cuda::row::facts::with_facts;
use crate::cuda::row::passes::passes;
use crate::cuda::row::words::{axis_words, words_at};
use crate::cuda::row_config::{Policy, RowConfig};
use crate::cuda::target::CudaTarget;
use crate::lower::RowLaunch;

/// Row work as text, and how it is spread over the threads of the block.
pub struct Following {
    /// the namespace
    pub text: String,
    /// how it is spread
    pub config: RowConfig,
}

/// The work of a body on the rows of a launch, for a block of this many threads with this many registers each.
pub fn following(body: &Body, launch: &RowLaunch, target: &CudaTarget, threads: usize, registers: usize) -> Following {
    with_facts(body, launch, target, |facts| {
        let config = facts.following(threads, registers);
        let again = passes(body, facts.shared_rows, false);
        let sweeps = if config.policy == Policy::Streamed { &again } else { facts.passes };
        let own = emit_following(&Emission {
            body,
            layouts: facts.layouts,
            passes: sweeps,
            config: &config,
            handed: &[],
            rounded: None,
        });
        let (vector, prelude) = (config.vector, PRELUDE.as_str());
        let text = format!("#define MEETS\nnamespace rows {{\nconstexpr int V = {vector};\n{prelude}\n{own}}}\n");
        Following { text, config }
    })
}

/// The words of its parameter; `address` says where each argument of the launch lies.
pub fn following_words(body: &Body, launch: &RowLaunch, address: impl Fn(usize) -> Word) -> Vec<Word> {
    let RowLaunch { args, rows, axes, .. } = launch;
    let args = body.args.iter().zip(args).enumerate();
    let mut words: Vec<Word> =
        args.flat_map(|(arg, (spec, binding))| words_at(address(arg), spec, false, binding)).collect();
    words.extend(axis_words(axes));
    // It looks up nothing and sums over no rows, so it needs neither fault nor workspace.
    words.extend([Word::Number(*rows as u64), Word::Number(0), Word::Number(0)]);
    words
}
