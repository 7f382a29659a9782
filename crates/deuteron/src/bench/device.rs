//! Times on a GPU, measured by the GPU: runs are enqueued back to back, over sets of buffers that together do not
//! fit the cache.

use std::time::Duration;

use deuteron_device::{CopyProbe, Launching};
use deuteron_graph::{Graph, Output, extract};
use deuteron_plan::{Group, GroupKind, Machine, Quantity, Strategy};

use super::Measured;
use crate::engine::Engine;
use crate::error::Error;
use crate::seed;
use crate::session::Session;
use crate::tensor::Tensor;
use crate::times::median;

/// Total size of all sets of buffers, relative to the last-level cache.
const ROTATE: f64 = 4.0;

/// Maximum number of sets; more would be needed only for runs so small that the launch dominates.
const SETS: usize = 64;

/// Approximate length of one sample.
const SAMPLE: Duration = Duration::from_millis(3);

/// Maximum number of runs per sample.
const RUNS: usize = 600;

/// Samples of each variant, taken in turn.
const ROUNDS: usize = 7;

/// Inputs of several runs, each on the device.
pub(crate) type Sets = Vec<Vec<Tensor>>;

/// Times both plans, each kernel of the unfused one, and copies.
pub(super) fn measure(
    engine: &Engine,
    unfused: &mut Session,
    fused: &mut Session,
    tensors: &[Tensor],
    probe: &mut dyn CopyProbe,
) -> Result<Measured, Error> {
    let sets = rotation(engine, fused, tensors)?;
    let mut kernels = Vec::new();
    for group in &unfused.plan().groups {
        kernels.push(match group.kind {
            GroupKind::Row => Some(Alone::new(engine, unfused.graph(), group)?),
            _ => None,
        });
    }
    let runs = [repeats(fused, &sets)?, repeats(unfused, &sets)?];
    let mut graph: [Vec<Duration>; 2] = Default::default();
    let mut eager: [Vec<Duration>; 2] = Default::default();
    let mut copies: [Vec<Duration>; 2] = Default::default();
    for _ in 0..ROUNDS {
        graph[0].push(fused.time(&sets, runs[0], Launching::Graph)?);
        graph[1].push(unfused.time(&sets, runs[1], Launching::Graph)?);
        copies[0].push(probe.ordinary()?);
        copies[1].push(probe.streaming()?);
        for kernel in kernels.iter_mut().flatten() {
            kernel.sample()?;
        }
        eager[0].push(fused.time(&sets, runs[0], Launching::Eager)?);
        eager[1].push(unfused.time(&sets, runs[1], Launching::Eager)?);
    }
    let [fused_graph, unfused_graph] = graph.map(median);
    let [fused, unfused] = eager.map(median);
    Ok(Measured {
        fused,
        fused_graph: Some(fused_graph),
        unfused,
        unfused_graph: Some(unfused_graph),
        kernels: kernels.into_iter().map(|kernel| kernel.map(|kernel| median(kernel.times))).collect(),
        copy: copies.into_iter().map(median).min().unwrap_or_default(),
    })
}

/// Copies of the inputs on the device, enough that no run finds its data in the cache.
pub(crate) fn rotation(engine: &Engine, session: &Session, tensors: &[Tensor]) -> Result<Sets, Error> {
    copies(engine, session.plan().bytes().0, tensors)
}

/// The same for a run that moves this many bytes.
pub(crate) fn copies(engine: &Engine, bytes: u64, tensors: &[Tensor]) -> Result<Sets, Error> {
    let sets = set_count(engine.device().machine(), bytes);
    (0..sets).map(|_| tensors.iter().map(|tensor| tensor.to_device(engine)).collect()).collect()
}

fn set_count(machine: &Machine, bytes: u64) -> usize {
    // The profile's number is the half of the cache that one tensor can count on.
    let cache = 2.0 * machine.get(Quantity::CacheMb) * 1048576.0;
    ((ROTATE * cache / bytes.max(1) as f64).ceil() as usize).clamp(1, SETS)
}

/// The number of runs per sample. Runs everything once to find it.
pub(crate) fn repeats(session: &mut Session, sets: &Sets) -> Result<usize, Error> {
    session.time(sets, sets.len(), Launching::Eager)?;
    session.time(sets, sets.len(), Launching::Graph)?;
    let once = session.time(sets, sets.len().max(3), Launching::Graph)?;
    Ok(runs_of_a_sample(once, sets.len()))
}

/// The number of runs of this length per sample.
pub(crate) fn runs_of_a_sample(once: Duration, sets: usize) -> usize {
    let runs = (SAMPLE.as_secs_f64() / once.as_secs_f64().max(1e-7)) as usize;
    // Whole turns, so that every set counts alike.
    runs.clamp(3, RUNS).max(sets).next_multiple_of(sets)
}

/// One kernel of a plan as a separate session, so that its time includes neither launches nor neighbours.
pub(crate) struct Alone {
    session: Session,
    sets: Sets,
    runs: usize,
    pub times: Vec<Duration>,
}

impl Alone {
    pub fn new(engine: &Engine, graph: &Graph, group: &Group) -> Result<Alone, Error> {
        let part = part(graph, group)?;
        let mut session = Session::new(engine, &part, Strategy::Unfused)?;
        let sets = rotation(engine, &session, &seed::inputs(&part, 2)?)?;
        let runs = repeats(&mut session, &sets)?;
        Ok(Alone { session, sets, runs, times: Vec::new() })
    }

    pub fn sample(&mut self) -> Result<(), Error> {
        self.times.push(self.session.time(&self.sets, self.runs, Launching::Graph)?);
        Ok(())
    }
}

/// A kernel of a plan as a graph of its own.
fn part(graph: &Graph, group: &Group) -> Result<Graph, Error> {
    let outputs = group.outputs.iter().map(|&node| Output { name: format!("out{}", node.index()), node });
    Ok(extract(graph, &outputs.collect::<Vec<_>>(), &group.inputs)?)
}

#[cfg(test)]
mod tests {
    use deuteron_codegen::cuda::Arch;
    use deuteron_graph::Dtype;
    use deuteron_kernels::CudaCatalog;
    use deuteron_plan::{Target, plan};

    use super::*;
    use crate::catalog::FusedOp;

    #[test]
    fn every_unfused_kernel_stands_alone() {
        let machine = Machine::profile("h200").unwrap();
        let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
        for op in FusedOp::variants() {
            for backward in [false, true].into_iter().filter(|backward| !backward || op.has_backward()) {
                let types = op.operand_types(64, 48, Dtype::Bf16);
                let graph = if backward { op.backward_graph(&types) } else { op.graph(&types) }.unwrap();
                let whole = plan(&graph, target, Strategy::Unfused, &[]).unwrap();
                for group in whole.groups.iter().filter(|group| group.kind == GroupKind::Row) {
                    let part = part(&graph, group).unwrap();
                    let alone = plan(&part, target, Strategy::Unfused, &[]).unwrap();
                    let label = format!("{op:?} {backward}: {}\n{part}", group.name);
                    assert_eq!(alone.groups.len(), 1, "{label}");
                    assert_eq!(alone.groups[0].traffic, group.traffic, "{label}");
                }
            }
        }
    }

    #[test]
    fn sets_pass_the_cache_together() {
        let machine = Machine::profile("h200").unwrap();
        assert_eq!(set_count(&machine, 1 << 30), 1);
        assert_eq!(set_count(&machine, 25 << 20), 8);
        assert_eq!(set_count(&machine, 0), SETS);
    }
}
