//! Products with what follows them, as a library of products has it: a bias along the columns, GELU, a residual.
//!
//! `c = f(a b + bias) + residual`, where each part may be missing, and GELU and residual exclude each other. Sums, bias,
//! GELU and residual are `f32`; the result is rounded once, when it is stored, where kernels of their own round at every
//! border.

use deuteron_graph::{BinaryOp, Dtype, Graph, Node, NodeId, Op, Shape, UnaryOp, View};
use deuteron_plan::{Draft, Layout, primitive_work};

use super::cuda::plain;
use super::shape::{Matrix, lower_matmul_shape};
use crate::argument::{ArgBinding, Argument};
use crate::cuda::target::CudaTarget;
use crate::kernel::{Execution, Family, Kernel, Launch, Offer, Request, Source, offered};
use crate::library::{Epilogue, LibraryCall, LibraryLaunch, LibraryMatmul, Operand};

/// Matmuls of a vendor's library.
pub(crate) struct LibraryFamily;

impl Family<CudaTarget> for LibraryFamily {
    fn offer<'a>(&self, request: Request<'a>, _: &'a CudaTarget) -> Option<Box<dyn Offer + 'a>> {
        let group = request.group;
        let lowered = lower(&group, &recognise(&group)?)?;
        offered(move || primitive_work(&group), move || kernel(&lowered))
    }
}

/// The call of the library, and a plain kernel of ours where it has no algorithm or is not installed.
pub fn kernel(matmul: &LibraryMatmul) -> Kernel {
    let LibraryMatmul { call, shape, args } = matmul;
    let reach = |operand: Operand| match operand {
        Operand::A => shape.reach(Matrix::A),
        Operand::B => shape.reach(Matrix::B),
        Operand::Bias if shape.reach(Matrix::C) == 0 => 0,
        Operand::Bias => shape.n,
        Operand::Residual | Operand::C => shape.reach(Matrix::C),
    };
    let operands = call.operands().iter().zip(args);
    let arguments = operands.map(|(&operand, arg)| Argument::new(arg, reach(operand))).collect();
    let launch = LibraryLaunch {
        shape: shape.clone(),
        offsets: args.iter().map(|arg| arg.offset).collect(),
        fallback: plain::source(call),
        grids: plain::grids(matmul),
    };
    let launch = Launch::new(arguments, Execution::Library(Box::new(launch)));
    Kernel::new(Source::Library(*call), launch)
}

fn lower(group: &Draft, fused: &Fused) -> Option<LibraryMatmul> {
    let (graph, placement) = (group.graph, group.placement);
    let (shape, [a, b]) = lower_matmul_shape(graph, placement, fused.product);
    let call = LibraryCall { dtype: fused.dtype, epilogue: fused.epilogue };
    let read = |value: Option<NodeId>| {
        let placed = placement.get(value?)?;
        Some(ArgBinding::whole(graph, placed.base, placed.layout.offset, false))
    };
    let args = call.operands().iter().map(|operand| match operand {
        Operand::A => Some(a.clone()),
        Operand::B => Some(b.clone()),
        Operand::Bias => read(fused.bias),
        Operand::Residual => read(fused.residual),
        Operand::C => Some(ArgBinding::whole(graph, fused.result, 0, true)),
    });
    Some(LibraryMatmul { call, shape, args: args.collect::<Option<_>>()? })
}

/// A product and what follows it, found in a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fused {
    /// which parts there are
    pub epilogue: Epilogue,
    /// storage type of everything; a product of i8 stands alone, and its result is f32
    pub dtype: Dtype,
    /// the product
    pub product: NodeId,
    /// the value added along the columns
    pub bias: Option<NodeId>,
    /// the value added element by element
    pub residual: Option<NodeId>,
    /// what is stored
    pub result: NodeId,
}

/// Sees a draft as one product of a library with its epilogue, or `None` where it is more, less or something else. Nothing
/// but the end of the chain may leave the kernel, and all of it is of the product's storage type.
pub fn recognise(draft: &Draft) -> Option<Fused> {
    let (&product, rest) = draft.nodes.split_first()?;
    let node = draft.graph.node(product);
    let leaks = draft.nodes.len() > 1 && draft.outputs != [*draft.nodes.last()?];
    if !matches!(node.op, Op::Matmul { .. }) || leaks {
        return None;
    }
    let operands = draft.graph.node(node.inputs[0]).dtype;
    if operands == Dtype::I8 {
        let (epilogue, bias, residual) = (Epilogue::None, None, None);
        return rest.is_empty().then_some(Fused {
            epilogue,
            dtype: operands,
            product,
            bias,
            residual,
            result: product,
        });
    }
    let mut chain = Chain { draft, shape: &node.shape, dtype: node.dtype, at: product, rest };
    let (mut bias, mut gelu, mut residual) = (None, false, None);
    while let Some(link) = chain.next()? {
        match link {
            Link::Bias(value) if bias.is_none() && !gelu => bias = Some(value),
            Link::Full(value) if residual.is_none() && !gelu => residual = Some(value),
            // The library's GELU is good to eleven bits: enough for bf16 alone.
            Link::Gelu if !gelu && residual.is_none() && node.dtype == Dtype::Bf16 => gelu = true,
            Link::Bias(_) | Link::Full(_) | Link::Gelu => return None,
        }
    }
    let epilogue = match (bias.is_some(), gelu, residual.is_some()) {
        (false, false, false) => Epilogue::None,
        (true, false, false) => Epilogue::Bias,
        (false, true, false) => Epilogue::Gelu,
        (true, true, false) => Epilogue::BiasGelu,
        (false, false, true) => Epilogue::Residual,
        (true, false, true) => Epilogue::BiasResidual,
        (_, true, true) => return None,
    };
    let result = chain.at;
    (draft.graph.node(result).dtype == node.dtype).then_some(Fused {
        epilogue,
        dtype: node.dtype,
        product,
        bias,
        residual,
        result,
    })
}

/// One step from a value to the next.
enum Link {
    /// a vector along the columns was added
    Bias(NodeId),
    /// a tensor of the same shape was added
    Full(NodeId),
    Gelu,
}

/// The nodes of a draft after the product, taken in order.
struct Chain<'a> {
    draft: &'a Draft<'a>,
    /// of the product
    shape: &'a Shape,
    /// of the product
    dtype: Dtype,
    /// the last value that was made
    at: NodeId,
    rest: &'a [NodeId],
}

impl Chain<'_> {
    /// The next link; `Some(None)` at the end of the nodes, `None` where they are something else.
    #[allow(clippy::option_option)] // the end of a chain is no break in it
    fn next(&mut self) -> Option<Option<Link>> {
        while let Some((&id, rest)) = self.rest.split_first() {
            let node = self.graph().node(id);
            if node.shape.elements() != self.shape.elements() || node.shape.cols() != self.shape.cols() {
                return None;
            }
            match node.op {
                // Rounding at a border of composites: the chain stays in f32.
                Op::Cast(to) if (to == self.dtype || to == Dtype::F32) && self.is_at(node.inputs[0]) => {
                    (self.at, self.rest) = (id, rest);
                }
                Op::Binary(BinaryOp::Add) => {
                    let other = match (self.is_at(node.inputs[0]), self.is_at(node.inputs[1])) {
                        (true, false) => node.inputs[1],
                        (false, true) => node.inputs[0],
                        _ => return None,
                    };
                    let link = self.addend(other, &node.shape)?;
                    (self.at, self.rest) = (id, rest);
                    return Some(Some(link));
                }
                Op::Binary(BinaryOp::Mul) => {
                    let (nodes, rest) = self.rest.split_at_checked(GELU_NODES)?;
                    self.at = self.gelu(nodes)?;
                    self.rest = rest;
                    return Some(Some(Link::Gelu));
                }
                _ => return None,
            }
        }
        Some(None)
    }

    fn graph(&self) -> &Graph {
        self.draft.graph
    }

    /// Whether a value is the last one of the chain, element by element in order.
    fn is_at(&self, value: NodeId) -> bool {
        self.is_node(value, self.at)
    }

    fn is_node(&self, value: NodeId, id: NodeId) -> bool {
        let placed = self.draft.placement.get(value);
        placed.is_some_and(|placed| {
            placed.base == id
                && placed.layout.is_contiguous()
                && placed.layout.shape.elements() == self.graph().node(id).shape.elements()
        })
    }

    /// Something from outside that is added to every row, or element by element.
    fn addend(&self, value: NodeId, reader: &Shape) -> Option<Link> {
        let placed = self.draft.placement.get(value)?;
        let foreign = self.draft.nodes.contains(&placed.base) || self.graph().node(placed.base).dtype != self.dtype;
        if foreign || !placed.layout.shape.broadcasts_to(reader) {
            return None;
        }
        let seen = placed.layout.broadcast(reader);
        if is_vector(&seen) {
            return Some(Link::Bias(value));
        }
        let in_order = Layout { offset: 0, ..seen }.is_contiguous();
        in_order.then_some(Link::Full(value))
    }

    /// `x sigmoid((x slope) (0.044715 x^2 + 1))` in the seven steps of the composite's expansion; the last of them.
    fn gelu(&self, nodes: &[NodeId]) -> Option<NodeId> {
        let &[square, scaled, factor, steep, argument, gate, result] = nodes else { return None };
        let node = |id: NodeId| self.graph().node(id);
        let binary = |id: NodeId, op: BinaryOp| (node(id).op == Op::Binary(op)).then(|| &node(id).inputs);
        let is_x = |value: NodeId| self.is_at(value);
        let is_constant = |value: NodeId, wanted: f64| constant(self.graph(), value) == Some(wanted as f32);
        let slope = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
        let found = {
            let (square_of, scaled_of) = (binary(square, BinaryOp::Mul)?, binary(scaled, BinaryOp::Mul)?);
            let (factor_of, steep_of) = (binary(factor, BinaryOp::Add)?, binary(steep, BinaryOp::Mul)?);
            let (argument_of, result_of) = (binary(argument, BinaryOp::Mul)?, binary(result, BinaryOp::Mul)?);
            is_x(square_of[0])
                && is_x(square_of[1])
                && self.is_node(scaled_of[0], square)
                && is_constant(scaled_of[1], 0.044715)
                && self.is_node(factor_of[0], scaled)
                && is_constant(factor_of[1], 1.0)
                && is_x(steep_of[0])
                && is_constant(steep_of[1], slope)
                && self.is_node(argument_of[0], steep)
                && self.is_node(argument_of[1], factor)
                && is_sigmoid(node(gate))
                && self.is_node(node(gate).inputs[0], argument)
                && is_x(result_of[0])
                && self.is_node(result_of[1], gate)
        };
        found.then_some(result)
    }
}

/// Nodes of GELU's tanh form that compute.
const GELU_NODES: usize = 7;

fn is_sigmoid(node: &Node) -> bool {
    node.op == Op::Unary(UnaryOp::Sigmoid)
}

/// One number a column, each after the other, the same for all rows.
fn is_vector(layout: &Layout) -> bool {
    let rank = layout.shape.rank();
    let Some(last) = rank.checked_sub(1) else { return false };
    let rows_repeat = (0..last).all(|axis| layout.shape[axis] == 1 || layout.strides[axis] == 0);
    rows_repeat && (layout.shape[last] == 1 || layout.strides[last] == 1)
}

/// The number behind a constant, however it is spread.
fn constant(graph: &Graph, id: NodeId) -> Option<f32> {
    match &graph.node(id).op {
        Op::Const { value, dtype: Dtype::F32 } => Some(*value as f32),
        Op::View(View::Broadcast(_) | View::Reshape(_)) => constant(graph, graph.node(id).inputs[0]),
        _ => None,
    }
}
