//! Listings of the kernels of a graph.

use deuteron_codegen::cpu::machine::Uncovered;
use deuteron_codegen::cpu::task::TileUse;
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Grid, Tuning, without_library};
use deuteron_codegen::{Argument, Kernel, Launch, Source, Variant};
use deuteron_device::DeviceError;
use deuteron_device::cuda::EntryUsage;
use deuteron_device::cuda::nvrtc::{Compiler, Request};
use deuteron_graph::{Dtype, Graph, NodeId, Op};
use deuteron_kernels::ladder::{Ladder, Rung, WIDEST};
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_plan::{Draft, Group, Machine, Plan, Quantity, Strategy, Target, plan};
use deuteron_report::{SourceLine, TensorSheet};
use serde::Serialize;

use crate::catalog::FusedOp;
use crate::engine::Engine;
use crate::error::Error;
use crate::session::refuse_opaque;

/// One kernel. The JSON form of `kernel` is an array of these.
#[derive(Debug, Clone, Serialize)]
pub struct KernelListing {
    /// what it is
    pub name: String,
    /// its kind
    pub kind: String,
    /// bytes read
    pub bytes_read: u64,
    /// bytes written
    pub bytes_written: u64,
    /// strip-sized temporaries of a row kernel
    pub tiles: u16,
    /// row-sized temporaries of a row kernel
    pub kept_rows: u16,
    /// passes over a row
    pub passes: usize,
    /// of a kernel for a GPU
    #[serde(flatten)]
    pub compiled: Option<Compiled>,
    /// the tensors it reads and writes, in the order of its arguments
    pub arguments: Vec<ArgumentListing>,
    /// how it is started on a GPU: `row<<<1024, 96>>>`
    pub launches: Vec<String>,
    /// the language of the source: `cuda`, `tile program` or `library call`
    pub language: &'static str,
    /// the generated source
    pub source: String,
    /// the machine code of a row kernel on a CPU
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_code: Option<MachineCode>,
}

/// The machine code of a row kernel on a CPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineCode {
    /// code, a line for each instruction
    Lines(Vec<String>),
    /// no code: the kernel is interpreted, for this reason
    Interpreted(String),
}

impl From<Result<Vec<String>, Uncovered>> for MachineCode {
    fn from(code: Result<Vec<String>, Uncovered>) -> MachineCode {
        match code {
            Ok(lines) => MachineCode::Lines(lines),
            Err(reason) => MachineCode::Interpreted(reason.to_string()),
        }
    }
}

impl KernelListing {
    /// A kernel that is neither compiled nor has machine code.
    fn of(graph: &Graph, group: &Group, kernel: &Kernel) -> KernelListing {
        let Kernel { source, launch } = kernel;
        let TileUse { tiles, kept_rows, passes } = match source {
            Source::Cpu(program) => program.tiles,
            Source::Cuda(_) | Source::Library(_) => TileUse::default(),
        };
        KernelListing {
            name: group.name.clone(),
            kind: group.kind.to_string(),
            bytes_read: group.traffic.read.0,
            bytes_written: group.traffic.written.0,
            tiles,
            kept_rows,
            passes,
            compiled: None,
            arguments: launch.arguments().iter().map(|argument| ArgumentListing::of(graph, argument)).collect(),
            launches: launch.grids().map_or(Vec::new(), |grids| grids.list.iter().map(launch_of).collect()),
            language: match source {
                Source::Cuda(_) => "cuda",
                Source::Cpu(_) => "tile program",
                Source::Library(_) => "library call",
            },
            source: source.to_string(),
            machine_code: None,
        }
    }

    /// The source, with shared code named in comments instead of included.
    pub fn own_source(&self) -> String {
        match self.language {
            "cuda" => without_library(&self.source),
            _ => self.source.clone(),
        }
    }
}

/// A tensor that a kernel reads or writes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ArgumentListing {
    /// its name in the graph
    pub name: String,
    /// `bf16[1024,768]`
    pub tensor: String,
    /// whether it is written
    pub written: bool,
}

impl ArgumentListing {
    fn of(graph: &Graph, argument: &Argument) -> ArgumentListing {
        let TensorSheet { name, tensor, written } = tensor(graph, argument.base, argument.written);
        ArgumentListing { name, tensor, written }
    }
}

/// A tensor by the name of its output, or else by its own.
pub(crate) fn tensor(graph: &Graph, id: NodeId, written: bool) -> TensorSheet {
    let node = graph.node(id);
    let output = graph.outputs().iter().find(|output| output.node == id);
    let name = output.map_or_else(|| graph.label(id), |output| output.name.clone());
    TensorSheet { name, tensor: format!("{}{}", node.dtype, node.shape), written }
}

/// A grid as CUDA writes it.
pub(crate) fn launch_of(grid: &Grid) -> String {
    let [x, y, z] = grid.blocks;
    let blocks = if (y, z) == (1, 1) { x.to_string() } else { format!("dim3({x}, {y}, {z})") };
    let shared = if grid.shared > 0 { format!(", {}", grid.shared) } else { String::new() };
    let cluster = if grid.cluster > 1 { format!(" in clusters of {}", grid.cluster) } else { String::new() };
    format!("{}<<<{blocks}, {}{shared}>>>{cluster}", grid.entry, grid.threads)
}

/// Facts about a compiled CUDA kernel.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compiled {
    /// registers per thread, of the function that needs the most
    pub registers: u32,
    /// what the planner expected
    pub predicted_registers: u32,
    /// spilled bytes per thread
    pub spill_bytes: u32,
    /// shared memory per block, of the launch that needs the most
    pub shared_bytes: u32,
    /// share of a multiprocessor's threads that fit at once, of the first launch
    pub occupancy: f64,
    /// how the kernel is spread over threads, and why
    pub config: String,
    /// the key of its measured config; empty if there is nothing to measure
    pub key: String,
}

/// The source of one kernel that can be generated, each line with the operation it came from.
pub(crate) fn tagged_source(graph: &Graph, plan: &Plan, group: &Group, backend: &Backend) -> Vec<SourceLine> {
    // A group that no family takes has no source.
    let lines = deuteron_kernels::tagged_source(&group.draft(graph, &plan.placement), backend).unwrap_or_default();
    let op = |node: Option<NodeId>| node.map_or(String::new(), |id| graph.call_name(graph.node(id).call).to_string());
    lines.into_iter().map(|line| SourceLine { op: op(line.node), text: line.text }).collect()
}

/// The kernel of a group for a GPU; none for a CPU, or where no family takes the group.
pub(crate) fn cuda_kernel(graph: &Graph, plan: &Plan, group: &Group, backend: Option<&Backend>) -> Option<Kernel> {
    match backend? {
        Backend::Cpu => None,
        backend @ Backend::Cuda(_) => render(group.draft(graph, &plan.placement), backend).ok(),
    }
}

/// Whether a kernel holds an operation that is only described.
pub(crate) fn holds_opaque(graph: &Graph, group: &Group) -> bool {
    group.nodes.iter().any(|&id| matches!(graph.node(id).op, Op::Opaque(_)))
}

/// The names under which a profiler sees the launches of a kernel, in order; empty where a library chooses them.
pub(crate) fn launches(draft: &Draft, backend: &Backend) -> Vec<String> {
    render(draft, backend).map_or(Vec::new(), |kernel| entries(&kernel))
}

/// The same of a kernel that is made already.
pub(crate) fn entries(kernel: &Kernel) -> Vec<String> {
    kernel.launch.grids().map_or(Vec::new(), |grids| grids.list.iter().map(|grid| grid.entry.to_string()).collect())
}

/// A GPU that need not be present: kernels are compiled for it but not run.
pub struct OfflineGpu {
    /// what the planner assumes
    pub machine: Machine,
    /// what sources are rendered for
    backend: Backend,
    /// none where sources are only read
    compiler: Option<Compiler>,
}

impl OfflineGpu {
    /// An instruction set with the numbers of a machine.
    pub fn new(arch: Arch, machine: Machine, compiler: impl Into<Option<Compiler>>) -> OfflineGpu {
        let backend = Backend::Cuda(CudaTarget::new(arch, machine.count(Quantity::Processors)));
        OfflineGpu { machine, backend, compiler: compiler.into() }
    }

    /// The same with measured launch shapes.
    pub fn with_tuning(self, tuning: Tuning) -> OfflineGpu {
        let backend = match self.backend {
            Backend::Cuda(target) => Backend::Cuda(CudaTarget { tuning, ..target }),
            Backend::Cpu => Backend::Cpu,
        };
        OfflineGpu { backend, ..self }
    }

    /// An instruction set with the numbers of a profile of its generation.
    pub fn of_arch(arch: Arch, compiler: impl Into<Option<Compiler>>) -> Result<OfflineGpu, Error> {
        let profile = match arch {
            Arch::Sm75 | Arch::Sm80 => "a100",
            Arch::Sm86 | Arch::Sm89 | Arch::Sm120 => "rtx4090",
            Arch::Sm90a | Arch::Sm100 => "h200",
        };
        Ok(OfflineGpu::new(arch, Machine::profile(profile)?, compiler))
    }
}

/// Plans a graph for an engine and renders each kernel; on a GPU compiles it too.
pub fn kernels(engine: &Engine, graph: &Graph, strategy: Strategy) -> Result<Vec<KernelListing>, Error> {
    let device = engine.device();
    let usage = |source: &Source| -> Result<Option<Vec<EntryUsage>>, Error> {
        match (device.backend(), source) {
            (Backend::Cuda(_), Source::Cuda(_)) => Ok(Some(device.compile(vec![source.clone()])?[0].usage().to_vec())),
            _ => Ok(None),
        }
    };
    let machine_code = |launch: &Launch| device.machine_code(launch).map(MachineCode::from);
    let rendering = Rendering { backend: device.backend(), usage: &usage, machine_code: &machine_code };
    list(graph, strategy, device.target(), &rendering)
}

/// Plans a graph for a GPU that need not be present, and compiles each kernel for it, if there is a compiler.
pub fn kernels_for(gpu: &OfflineGpu, graph: &Graph, strategy: Strategy) -> Result<Vec<KernelListing>, Error> {
    let Backend::Cuda(target) = &gpu.backend else { return Ok(Vec::new()) };
    let usage = |source: &Source| -> Result<Option<Vec<EntryUsage>>, Error> {
        match (source, &gpu.compiler) {
            (Source::Cuda(source), Some(compiler)) => self::usage(compiler, source, target).map(Some),
            _ => Ok(None),
        }
    };
    let planned_for = Target { machine: &gpu.machine, catalog: &gpu.backend };
    let rendering = Rendering { backend: &gpu.backend, usage: &usage, machine_code: &|_| None };
    list(graph, strategy, planned_for, &rendering)
}

/// Resources of the functions of a source, as the compiler reports them.
pub(crate) fn usage(compiler: &Compiler, source: &CudaSource, target: &CudaTarget) -> Result<Vec<EntryUsage>, Error> {
    let request = Request { name: &source.name, text: &source.text, arch: target.arch.name(), options: &[] };
    Ok(compiler.compile(&request).map_err(DeviceError::from)?.entries)
}

/// Resources of the functions of a source; none if it was not compiled.
type Usage<'a> = &'a dyn Fn(&Source) -> Result<Option<Vec<EntryUsage>>, Error>;

/// The target of kernels, and the machine that predicts them.
struct Rendering<'a> {
    backend: &'a Backend,
    usage: Usage<'a>,
    machine_code: &'a dyn Fn(&Launch) -> Option<MachineCode>,
}

fn list(
    graph: &Graph,
    strategy: Strategy,
    target: Target<'_>,
    rendering: &Rendering<'_>,
) -> Result<Vec<KernelListing>, Error> {
    let Rendering { backend, usage, machine_code } = *rendering;
    refuse_opaque(graph)?;
    let plan = plan(graph, target, strategy, &[])?;
    let listing = |group: &Group| -> Result<KernelListing, Error> {
        let kernel = render(group.draft(graph, &plan.placement), backend)?;
        let predicted = group.cost.resources.registers;
        let compiled = usage(&kernel.source)?;
        let compiled = compiled.map(|usage| Compiled::new(&kernel.launch, &usage, target.machine, predicted));
        let machine_code = machine_code(&kernel.launch);
        Ok(KernelListing { compiled, machine_code, ..KernelListing::of(graph, group, &kernel) })
    };
    plan.groups.iter().map(listing).collect()
}

/// Rows and columns of the op of which [`rung`] lists a rung, and columns of the weight of a matmul.
const LISTED: [usize; 3] = [1024, 768, 3072];

/// The kernel of a rung of a ladder as an H200 launches it, of 1024 rows of 768 in bf16; not compiled.
pub fn rung(ladder: Ladder, rung: &Rung) -> Result<KernelListing, Error> {
    let [rows, cols, columns] = LISTED;
    let graph = match ladder {
        Ladder::Matmul => {
            format!("graph matmul ; x = input bf16[{rows},{cols}] ; y = linear x w:bf16[{cols},{columns}] ; out y")
                .parse()?
        }
        Ladder::AddAct | Ladder::NormAct | Ladder::Softmax | Ladder::Attention | Ladder::AttentionAddNorm => {
            let op = FusedOp::find(ladder.op())?;
            op.graph(&op.operand_types(rows, cols, Dtype::Bf16))?
        }
    };
    let machine = Machine::profile("h200")?;
    let target = CudaTarget::new(Arch::Sm90a, machine.count(Quantity::Processors));
    let planned_for = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    let plan = plan(&graph, planned_for, Strategy::Greedy, &[])?;
    let [group] = plan.groups.as_slice() else { return Err(Error::SeveralKernels(plan.groups.len())) };
    let kernel = rung.kernel(&group.draft(&graph, &plan.placement), &target);
    let refused = || Error::NoRung { rung: rung.name, graph: graph.name().to_string(), widest: WIDEST };
    Ok(KernelListing::of(&graph, group, &kernel.ok_or_else(refused)?))
}

impl Compiled {
    pub(crate) fn new(launch: &Launch, usage: &[EntryUsage], machine: &Machine, predicted: u32) -> Compiled {
        let Variant { name: config, key } = launch.variant().clone();
        let grids: &[Grid] = launch.grids().map_or(&[], |grids| &grids.list);
        let of = |grid: &Grid| usage.iter().find(|entry| entry.name == grid.entry);
        let shared = |grid: &Grid| grid.shared + of(grid).map_or(0, |entry| entry.shared);
        let first = grids.first();
        Compiled {
            registers: usage.iter().map(|entry| entry.registers).max().unwrap_or(0),
            predicted_registers: predicted,
            spill_bytes: usage.iter().map(|entry| entry.spill_stores + entry.spill_loads).sum(),
            shared_bytes: grids.iter().map(shared).max().unwrap_or(0),
            occupancy: first.map_or(0.0, |grid| {
                let registers = of(grid).map_or(0, |entry| entry.registers);
                occupancy(machine, grid.threads, registers, shared(grid))
            }),
            config,
            key,
        }
    }
}

/// The share of a multiprocessor's threads that fit at once.
pub(crate) fn occupancy(machine: &Machine, threads: u32, registers: u32, shared: u32) -> f64 {
    let blocks = resident_blocks(machine, threads, registers, shared);
    (blocks * threads.next_multiple_of(32).max(32) as usize) as f64 / machine.get(Quantity::Threads)
}

/// Resident blocks per multiprocessor. Registers are allocated to warps in units of 256, shared memory in units of 128 bytes, plus 1 KiB per
/// block for the system.
pub(crate) fn resident_blocks(machine: &Machine, threads: u32, registers: u32, shared: u32) -> usize {
    let warps = threads.div_ceil(32).max(1) as usize;
    let lot = (registers.max(1) as usize * 32).next_multiple_of(256);
    let by_registers = machine.count(Quantity::Registers) / lot / warps;
    let by_threads = machine.count(Quantity::Threads) / (32 * warps);
    let a_block = (shared as usize).next_multiple_of(128) + 1024;
    let by_shared = machine.kilobytes(Quantity::SharedKb).0 as usize / a_block;
    by_registers.min(by_threads).min(by_shared).min(32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn occupancy_is_what_the_scarcest_thing_allows() {
        let h200 = Machine::profile("h200").unwrap();
        assert_eq!(occupancy(&h200, 256, 32, 0), 1.0);
        assert_eq!(occupancy(&h200, 256, 64, 0), 0.5, "registers");
        assert_eq!(occupancy(&h200, 256, 32, 100 << 10), 0.25, "shared memory: two blocks");
        assert_eq!(occupancy(&h200, 32, 16, 0), 0.5, "blocks: 32 of a warp");
        assert_eq!(occupancy(&h200, 1024, 80, 0), 0.0, "a block that does not fit");
    }
}
