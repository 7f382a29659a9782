//! Analyses a graph for a machine: what to fuse, why, and the predicted gain, as an [`Analysis`]. No kernel is run.

mod flip;
mod recompute;
mod registers;
mod sheets;
mod tiles;
mod verdict;

pub use flip::{Knob, Variants, flips};
pub(crate) use tiles::note_registers;

use std::time::Instant;

use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_device::cuda::nvrtc::Compiler;
use deuteron_graph::Graph;
use deuteron_kernels::{Backend, CpuCatalog, CudaCatalog};
use deuteron_plan::{Assessment, Catalog, Machine, MachineKind, Pin, Quantity, Question, Scoring, Target, assess};
use deuteron_report::Analysis;

use crate::error::Error;

/// Options of an analysis.
#[derive(Debug, Clone)]
pub struct AnalyzeOptions {
    /// the machine the plan is for
    pub machine: Machine,
    /// fusions forced and forbidden
    pub pins: Vec<Pin>,
    /// the target of code generation; none for a GPU of unknown instruction set
    pub backend: Option<Backend>,
    /// whether to include the source of every kernel that can be generated
    pub sources: bool,
    /// compiles every CUDA kernel that can be generated, to report its registers
    pub compiler: Option<Compiler>,
    /// whether every forward value that backward reads is stored, instead of deciding by bytes
    pub keep_all: bool,
    /// which kernels plans may contain
    pub kernels: Kernels,
    /// how fusions are scored
    pub scoring: Scoring,
}

/// Which kernels plans may contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernels {
    /// only kernels that can be generated; the best plan with every skeleton is listed too if it differs
    Generated,
    /// every skeleton of the planner, whether or not it can be generated yet
    Conceivable,
}

impl AnalyzeOptions {
    /// The default options for a machine: no pins, only kernels that can be generated, which is what `fuse` would run there.
    pub fn on(machine: Machine) -> AnalyzeOptions {
        let target = |arch: Arch| CudaTarget::new(arch, machine.count(Quantity::Processors));
        let backend = match machine.kind {
            MachineKind::Cpu => Some(Backend::Cpu),
            MachineKind::Gpu => {
                machine.profile_name().and_then(Arch::of_profile).map(|arch| Backend::Cuda(target(arch)))
            }
        };
        AnalyzeOptions {
            machine,
            backend,
            pins: Vec::new(),
            sources: false,
            compiler: None,
            keep_all: false,
            kernels: Kernels::Generated,
            scoring: Scoring::default(),
        }
    }
}

/// Analyses a graph.
pub fn analyze(graph: &Graph, options: &AnalyzeOptions) -> Result<Analysis, Error> {
    let start = Instant::now();
    let (planned, recompute) = recompute::decide(graph, options)?;
    let assessment = assessment(&planned, graph, options)?;
    let planning_ms = start.elapsed().as_secs_f64() * 1e3;
    let mut analysis = sheets::analysis(&planned, options, &assessment, planning_ms, recompute);
    if let (Some(compiler), Some(Backend::Cuda(target))) = (&options.compiler, &options.backend) {
        registers::fill(&mut analysis, &planned, &assessment, (compiler, target), &options.machine)?;
    }
    Ok(analysis)
}

/// What a plan may use.
pub(crate) fn target_of(options: &AnalyzeOptions) -> Target<'_> {
    let machine = &options.machine;
    match options.kernels {
        Kernels::Generated => Target { machine, catalog: generated(options) },
        Kernels::Conceivable => Target::conceivable(machine),
    }
}

/// What can be generated for a machine.
pub(crate) fn generated(options: &AnalyzeOptions) -> &dyn Catalog {
    match (&options.backend, options.machine.kind) {
        (Some(backend @ Backend::Cuda(_)), _) => backend,
        (_, MachineKind::Cpu) => &CpuCatalog,
        // What every GPU of today does, where nothing says more.
        (_, MachineKind::Gpu) => CudaCatalog::of(Arch::Sm80),
    }
}

/// The plans and fusions behind an analysis.
fn assessment(graph: &Graph, baseline: &Graph, options: &AnalyzeOptions) -> Result<Assessment, Error> {
    let realizable = Some(generated(options));
    let (target, pins, scoring) = (target_of(options), &options.pins, options.scoring);
    Ok(assess(&Question { graph, baseline, target, realizable, pins, scoring })?)
}
