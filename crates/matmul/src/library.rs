//! Matmuls with epilogues that a library supports: a bias along the columns, GELU, a residual.
//!
//! `c = f(a b + bias) + residual`, where each part may be missing, and GELU and residual exclude each other. Sums, bias,
//! GELU and residual are `f32`; the result is rounded once, when it is stored, where kernels of their own round at every
//! border.

use deuteron_codegen::argument::{ArgBinding, Argument};
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_codegen::kernel::{Family, Kernel, Launch, Offer, Request, Source, offered};
use deuteron_codegen::library::{LibraryCall, LibraryEpilogue, LibraryLaunch, LibraryMatmul, Operand};
use deuteron_codegen::matmul_shape::{Matrix, lower_matmul_shape};
use deuteron_graph::{Activation, Composite, Dtype, NodeId, Shape};
use deuteron_plan::{Chain, Draft, Layout, Link, Step, Work, epilogue_steps, primitive_work};

use super::cuda::{hopper, mma, plain};

/// Matmuls of a vendor's library.
pub struct LibraryFamily;

impl Family<CudaTarget> for LibraryFamily {
    fn offer<'a>(&self, request: Request<'a>, target: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let lowered = lower(&group, &fit(&group)?)?;
        let microseconds = microseconds(&lowered, target);
        offered(move || Work { microseconds, ..primitive_work(&group) }, move || kernel(&lowered))
    }
}

/// Time of a call, where it was measured: floats on Hopper.
fn microseconds(matmul: &LibraryMatmul, target: &CudaTarget) -> Option<f64> {
    let LibraryMatmul { call, shape, .. } = matmul;
    match call.dtype {
        _ if !target.arch.has_wgmma() => None,
        Dtype::F16 | Dtype::Bf16 => Some(hopper::library_in_plan_us(shape, call.epilogue)),
        Dtype::F32 => Some(mma::library_f32_us(shape, target)),
        Dtype::I8 | Dtype::F8e4m3 | Dtype::I32 | Dtype::Bool => None,
    }
}

/// The library call, with our plain kernel for when the library has no algorithm or is not installed.
pub fn kernel(matmul: &LibraryMatmul) -> Kernel {
    let LibraryMatmul { call, shape, args } = matmul;
    let launch = LibraryLaunch {
        shape: shape.clone(),
        offsets: args.iter().map(|arg| arg.offset).collect(),
        fallback: plain::source(call),
        grids: plain::grids(matmul),
    };
    Kernel::new(Source::Library(*call), Launch::of_library(arguments(matmul), launch))
}

/// Its operands as a device needs them, in the order of the call.
pub fn arguments(matmul: &LibraryMatmul) -> Vec<Argument> {
    let LibraryMatmul { call, shape, args } = matmul;
    let reach = |operand: Operand| match operand {
        Operand::A => shape.reach(Matrix::A),
        Operand::B => shape.reach(Matrix::B),
        Operand::Bias if shape.reach(Matrix::C) == 0 => 0,
        Operand::Bias => shape.n,
        Operand::Residual | Operand::C => shape.reach(Matrix::C),
    };
    let operands = call.operands().iter().zip(args);
    operands.map(|(&operand, arg)| Argument::new(arg, reach(operand))).collect()
}

/// Its operands, in the order of the call.
pub fn lower(group: &Draft, fit: &LibraryFit) -> Option<LibraryMatmul> {
    let (graph, placement) = (group.graph, group.placement);
    let (shape, [a, b]) = lower_matmul_shape(graph, placement, fit.matmul);
    let call = LibraryCall { dtype: fit.dtype, epilogue: fit.epilogue };
    let read = |value: Option<NodeId>| {
        let placed = placement.get(value?)?;
        Some(ArgBinding::whole(graph, placed.base, placed.layout.offset, false))
    };
    let args = call.operands().iter().map(|operand| match operand {
        Operand::A => Some(a.clone()),
        Operand::B => Some(b.clone()),
        Operand::Bias => read(fit.bias),
        Operand::Residual => read(fit.residual),
        Operand::C => Some(ArgBinding::whole(graph, fit.result, 0, true)),
    });
    Some(LibraryMatmul { call, shape, args: args.collect::<Option<_>>()? })
}

/// A matmul and its epilogue, as the library computes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LibraryFit {
    /// which parts there are
    pub epilogue: LibraryEpilogue,
    /// storage type of everything; a matmul of i8 stands alone, and its result is f32
    pub dtype: Dtype,
    /// the matmul
    pub matmul: NodeId,
    /// the value added along the columns
    pub bias: Option<NodeId>,
    /// the value added element by element
    pub residual: Option<NodeId>,
    /// what is stored
    pub result: NodeId,
}

/// A draft as one call of the library, or `None` where it is more, less or something else. Nothing but the end of the chain may leave
/// the kernel, and all of it is of the matmul's storage type.
pub fn fit(draft: &Draft) -> Option<LibraryFit> {
    let Chain { prologue, links, epilogue: side } = draft.structure.chain()?;
    let [Link::Matmul { nodes }] = links.as_slice() else { return None };
    let &[matmul] = nodes.as_slice() else { return None };
    let node = draft.graph.node(matmul);
    let leaks = draft.nodes.len() > 1 && draft.outputs != [*draft.nodes.last()?];
    if leaks || !prologue.nodes.is_empty() {
        return None;
    }
    let operands = draft.graph.node(node.inputs[0]).dtype;
    let base = |operand: &NodeId| draft.placement.base(*operand).map(|base| draft.graph.node(base).dtype);
    if node.inputs.iter().any(|operand| base(operand).is_some_and(|lies| lies != draft.graph.node(*operand).dtype)) {
        return None;
    }
    if operands == Dtype::I8 {
        let (epilogue, bias, residual) = (LibraryEpilogue::None, None, None);
        let plain = LibraryFit { epilogue, dtype: operands, matmul, bias, residual, result: matmul };
        return side.nodes.is_empty().then_some(plain);
    }
    let in_shape = |&id: &NodeId| {
        let shape = &draft.graph.node(id).shape;
        shape.elements() == node.shape.elements() && shape.cols() == node.shape.cols()
    };
    if !side.nodes.iter().all(in_shape) {
        return None;
    }
    let dtype = node.dtype;
    let (mut bias, mut gelu, mut residual, mut result) = (None, false, None, matmul);
    for step in epilogue_steps(draft) {
        match step {
            // Rounding at the end of a call: the library stays in f32.
            Step::Round { to, result: rounded } if to == dtype || to == Dtype::F32 => result = rounded,
            Step::Add { value, result: sum } if !gelu => {
                match addend(draft, value, &draft.graph.node(sum).shape, dtype)? {
                    Addend::Row if bias.is_none() => bias = Some(value),
                    Addend::Full if residual.is_none() => residual = Some(value),
                    Addend::Row | Addend::Full => return None,
                }
                result = sum;
            }
            // The library's GELU is good to eleven bits: enough for bf16 alone.
            Step::Activation { function: Composite::Activation(Activation::GeluTanh), result: y }
                if !gelu && residual.is_none() && dtype == Dtype::Bf16 =>
            {
                (gelu, result) = (true, y);
            }
            Step::Round { .. } | Step::Add { .. } | Step::Activation { .. } => return None,
            Step::Norm { .. } | Step::Other => return None,
        }
    }
    let epilogue = match (bias.is_some(), gelu, residual.is_some()) {
        (false, false, false) => LibraryEpilogue::None,
        (true, false, false) => LibraryEpilogue::Bias,
        (false, true, false) => LibraryEpilogue::Gelu,
        (true, true, false) => LibraryEpilogue::BiasGelu,
        (false, false, true) => LibraryEpilogue::Residual,
        (true, false, true) => LibraryEpilogue::BiasResidual,
        (_, true, true) => return None,
    };
    let fit = LibraryFit { epilogue, dtype, matmul, bias, residual, result };
    (draft.graph.node(result).dtype == dtype).then_some(fit)
}

/// How a value that is added lies.
enum Addend {
    /// one row, the same for all rows
    Row,
    /// a tensor of the same shape
    Full,
}

/// Something from outside, of the same type, that is added to every row, or element by element.
fn addend(draft: &Draft, value: NodeId, reader: &Shape, dtype: Dtype) -> Option<Addend> {
    let placed = draft.placement.get(value)?;
    let foreign = draft.nodes.contains(&placed.base) || draft.graph.node(placed.base).dtype != dtype;
    if foreign || !placed.layout.shape.broadcasts_to(reader) {
        return None;
    }
    let seen = placed.layout.broadcast(reader);
    if is_vector(&seen) {
        return Some(Addend::Row);
    }
    let in_order = Layout { offset: 0, ..seen }.is_contiguous();
    in_order.then_some(Addend::Full)
}

/// One number per column, each after the other, the same for all rows.
fn is_vector(layout: &Layout) -> bool {
    let rank = layout.shape.rank();
    let Some(last) = rank.checked_sub(1) else { return false };
    let rows_repeat = (0..last).all(|axis| layout.shape[axis] == 1 || layout.strides[axis] == 0);
    rows_repeat && (layout.shape[last] == 1 || layout.strides[last] == 1)
}
