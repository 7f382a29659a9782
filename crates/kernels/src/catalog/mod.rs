//! Which family makes the kernel of a group, for each target.

mod cpu;
mod cuda;

pub use cpu::CpuCatalog;
pub use cuda::CudaCatalog;

use deuteron_codegen::body::Origin;
use deuteron_codegen::cuda::row::many::{self, Member};
use deuteron_codegen::cuda::row::variant;
use deuteron_codegen::cuda::row_config::RowConfig;
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Kernel, Request};
use deuteron_codegen::lower::lower_with_origins;
use deuteron_graph::{Graph, NodeId, Op};
use deuteron_plan::{Catalog, Draft, Structure, Work};

use crate::copy::{self, Copy};
use crate::row;

/// What kernels are generated for.
#[derive(Debug, Clone, PartialEq)]
pub enum Backend {
    /// tile programs and hand-written SIMD
    Cpu,
    /// CUDA text
    Cuda(CudaTarget),
}

/// What can be generated for a backend. On a GPU it depends on the number of multiprocessors: blocks that exchange numbers in memory must
/// all run at once.
impl Catalog for Backend {
    fn offers_structure(&self, structure: &Structure) -> bool {
        match self {
            Backend::Cpu => CpuCatalog.offers_structure(structure),
            Backend::Cuda(target) => cuda::offers_structure(structure, target.arch),
        }
    }

    fn offers(&self, draft: &Draft) -> bool {
        match self {
            Backend::Cpu => CpuCatalog.offers(draft),
            Backend::Cuda(target) => cuda::offers(draft, target),
        }
    }

    fn offers_everything(&self) -> bool {
        false
    }

    fn work(&self, draft: &Draft) -> Work {
        match self {
            Backend::Cpu => CpuCatalog.work(draft),
            Backend::Cuda(target) => cuda::work(draft, target),
        }
    }

    fn widens_operands(&self) -> bool {
        match self {
            Backend::Cpu => CpuCatalog.widens_operands(),
            Backend::Cuda(target) => target.arch.is_ampere(),
        }
    }
}

/// No kernel of a target computes a group. Plans made with the target's catalogue contain no such group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{target} has no kernel of the form `{structure}` for these operands")]
pub struct NoKernel {
    /// the structure of the group
    pub structure: &'static str,
    /// the target
    pub target: &'static str,
}

/// Whether a group holds an operation that is only described, which no kernel computes.
fn is_described(group: &Draft) -> bool {
    group.nodes.iter().any(|&id| matches!(group.graph.node(id).op, Op::Opaque(_)))
}

/// Generates the kernel of a group.
pub fn render<'a>(request: impl Into<Request<'a>>, backend: &'a Backend) -> Result<Kernel, NoKernel> {
    let request = request.into();
    let offer = match backend {
        Backend::Cpu => cpu::offer(request),
        Backend::Cuda(target) => cuda::offer(request, target),
    };
    let target = match backend {
        Backend::Cpu => "CPUs",
        Backend::Cuda(_) => "CUDA",
    };
    let structure = request.group.structure.name();
    offer.map(|offer| offer.kernel()).ok_or(NoKernel { structure, target })
}

/// Generates the kernels of groups, in order. On a GPU, neighbours that do the same elementwise work on tensors of any size are one kernel, or a
/// few if one cannot take all their arguments. `independent` says of two groups, the earlier one first, whether neither needs the other.
pub fn render_joined(
    requests: &[Request],
    backend: &Backend,
    independent: &dyn Fn(usize, usize) -> bool,
) -> Result<Vec<Kernel>, NoKernel> {
    let Backend::Cuda(target) = backend else {
        return requests.iter().map(|&request| render(request, backend)).collect();
    };
    let mut kernels = Vec::with_capacity(requests.len());
    let mut start = 0;
    while start < requests.len() {
        let mut members: Vec<Member> = member(requests[start]).into_iter().collect();
        while let Some(first) = members.first()
            && let at = start + members.len()
            && let Some(next) = requests.get(at).and_then(|&request| member(request))
            && next.fits(first)
            && (start..at).all(|before| independent(before, at))
        {
            members.push(next);
        }
        if members.len() > 1 {
            start += members.len();
            kernels.extend(many::kernels(&members, target));
        } else {
            kernels.push(render(requests[start], backend)?);
            start += 1;
        }
    }
    Ok(kernels)
}

/// A group that may share its grid with others; none of a described operation.
fn member(request: Request) -> Option<Member> {
    if is_described(&request.group) { None } else { row::cuda::member(request) }
}

/// Generates a copy of a value, whole and contiguous, into the buffer of another node of its type: source, then destination.
pub fn render_copy(graph: &Graph, from: NodeId, to: NodeId, backend: &Backend) -> Kernel {
    let whole = Copy::whole(graph, from, to);
    match backend {
        Backend::Cpu => copy::cpu::kernel(whole),
        Backend::Cuda(_) => copy::cuda::kernel(&whole),
    }
}

/// Launch shapes worth measuring for a row kernel, the suggested one first; none for a kernel of another kind.
pub fn candidates(group: &Draft, target: &CudaTarget) -> Vec<RowConfig> {
    match group.structure {
        Structure::Row if !is_described(group) => variant::candidates(&lower_with_origins(group).0, target),
        _ => Vec::new(),
    }
}

/// One line of a kernel's source, and the node it came from, if it came from one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaggedLine {
    /// as the source prints it
    pub text: String,
    /// the node
    pub node: Option<NodeId>,
}

/// The source of a group, line by line, each with the node it came from. The library that all CUDA row kernels share is one line.
pub fn tagged_source(group: &Draft, backend: &Backend) -> Result<Vec<TaggedLine>, NoKernel> {
    if *group.structure != Structure::Row || is_described(group) {
        let node = group.nodes.first().copied();
        let source = render(group, backend)?.source.to_string();
        return Ok(source.lines().map(|text| TaggedLine { text: text.to_string(), node }).collect());
    }
    let (lowered, origins) = lower_with_origins(group);
    let lines = match backend {
        Backend::Cpu => row::cpu::tagged_lines(&lowered),
        Backend::Cuda(target) => variant::tagged_lines(&lowered, target),
    };
    let node = |origin: Origin| match origin {
        Origin::Expr(id) => origins.exprs.get(id.index()).copied(),
        Origin::Stage(position) => origins.stages.get(position).copied(),
    };
    Ok(lines.into_iter().map(|(text, origin)| TaggedLine { text, node: origin.and_then(node) }).collect())
}
