//! The inputs of tuning: seeded inputs of the graph, and intermediate results where a kernel reads the result
//! of another.

use std::collections::HashMap;

use deuteron_codegen::Argument;
use deuteron_graph::NodeId;

use super::Subject;
use crate::engine::Engine;
use crate::error::Error;
use crate::seed;
use crate::session::Session;
use crate::tensor::Tensor;

const SEED: u64 = 1;

/// The buffers that the kernels of one plan read.
pub(super) struct Values {
    known: HashMap<NodeId, Tensor>,
}

impl Values {
    /// Runs the graph once if a kernel reads what another one makes.
    pub fn new(engine: &Engine, subjects: &[Subject]) -> Result<Values, Error> {
        let Some(Subject { graph, plan, .. }) = subjects.first() else { return Ok(Values { known: HashMap::new() }) };
        let inputs = seed::inputs(graph, SEED)?;
        let mut made: Vec<NodeId> = subjects.iter().flat_map(|subject| bases(&subject.arguments, false)).collect();
        made.retain(|base| !graph.inputs().contains(base));
        made.sort_unstable();
        made.dedup();
        let mut known = HashMap::new();
        if !made.is_empty() {
            let mut shown = (*graph).clone();
            for base in &made {
                shown.output(&format!("tuned{}", base.index()), *base)?;
            }
            let mut session = Session::new(engine, &shown, plan.strategy)?;
            session.run(&inputs.iter().collect::<Vec<_>>())?;
            for (position, base) in made.into_iter().enumerate() {
                known.insert(base, session.output(graph.outputs().len() + position)?);
            }
        }
        known.extend(graph.inputs().iter().copied().zip(inputs));
        Ok(Values { known })
    }

    /// Those of a list of buffers.
    pub fn of(&self, bases: &[NodeId]) -> Vec<Tensor> {
        bases.iter().filter_map(|base| self.known.get(base).cloned()).collect()
    }
}

/// The buffers that are read, or those that are written, each once.
pub(super) fn bases(arguments: &[Argument], written: bool) -> Vec<NodeId> {
    let mut bases = Vec::new();
    for arg in arguments.iter().filter(|arg| arg.written == written) {
        if !bases.contains(&arg.base) {
            bases.push(arg.base);
        }
    }
    bases
}
