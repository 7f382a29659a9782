//! Products with what follows them, as a library of products has it: a bias along the columns, GELU, a residual.
//!
//! `c = f(a b + bias) + residual`, where each part may be missing, and GELU and residual exclude each other. Sums, bias,
//! GELU and residual are `f32`; the result is rounded once, when it is stored, where kernels of their own round at every
//! border.

use deuteron_graph::{Composite, Dtype, Gelu, NodeId, Shape};
use deuteron_plan::{Chain, Draft, Layout, Link, Step, epilogue_steps};

/// What follows a product in its kernel. The list is closed: it is what cuBLASLt has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// `a b`
    None,
    /// `a b + bias`
    Bias,
    /// `gelu(a b)`, the tanh form
    Gelu,
    /// `gelu(a b + bias)`, the tanh form
    BiasGelu,
    /// `a b + residual`
    Residual,
    /// `a b + bias + residual`
    BiasResidual,
}

/// What an argument of a product is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// the first operand
    A,
    /// the second operand
    B,
    /// one number a column of the result, each after the other
    Bias,
    /// a tensor that lies as the result does
    Residual,
    /// the result
    C,
}

impl Epilogue {
    /// All of them.
    pub const ALL: [Epilogue; 6] = [
        Epilogue::None,
        Epilogue::Bias,
        Epilogue::Gelu,
        Epilogue::BiasGelu,
        Epilogue::Residual,
        Epilogue::BiasResidual,
    ];

    /// Whether a bias is added.
    pub fn has_bias(self) -> bool {
        matches!(self, Epilogue::Bias | Epilogue::BiasGelu | Epilogue::BiasResidual)
    }

    /// Whether GELU is applied.
    pub fn has_gelu(self) -> bool {
        matches!(self, Epilogue::Gelu | Epilogue::BiasGelu)
    }

    /// Whether a residual is added.
    pub fn has_residual(self) -> bool {
        matches!(self, Epilogue::Residual | Epilogue::BiasResidual)
    }

    /// The arguments of a launch, in order.
    pub fn operands(self) -> &'static [Operand] {
        use Operand::{A, B, Bias, C, Residual};
        match self {
            Epilogue::None | Epilogue::Gelu => &[A, B, C],
            Epilogue::Bias | Epilogue::BiasGelu => &[A, B, Bias, C],
            Epilogue::Residual => &[A, B, Residual, C],
            Epilogue::BiasResidual => &[A, B, Bias, Residual, C],
        }
    }

    /// In words, after "matrix product".
    pub fn name(self) -> &'static str {
        match self {
            Epilogue::None => "",
            Epilogue::Bias => " + bias",
            Epilogue::Gelu => " + gelu",
            Epilogue::BiasGelu => " + bias + gelu",
            Epilogue::Residual => " + residual",
            Epilogue::BiasResidual => " + bias + residual",
        }
    }
}

/// A matmul and its epilogue, as the library computes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LibraryFit {
    /// which parts there are
    pub epilogue: Epilogue,
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
    if operands == Dtype::I8 {
        let (epilogue, bias, residual) = (Epilogue::None, None, None);
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
            Step::Activation { function: Composite::Gelu { kind: Gelu::Tanh }, result: y }
                if !gelu && residual.is_none() && dtype == Dtype::Bf16 =>
            {
                (gelu, result) = (true, y);
            }
            Step::Round { .. } | Step::Add { .. } | Step::Activation { .. } => return None,
            Step::Norm { .. } | Step::Other => return None,
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
