//! The canonical form of a model: every operator of every opset is one of these kinds, every value
//! has its shape and element type, and known values are constants. Composites are recognised here, before the graph
//! is built.

use std::rc::Rc;

use deuteron_graph::{BinaryOp, CompareOp, Composite, Shape, UnaryOp};

use crate::constant::Constant;
use crate::element::Element;
use crate::fold::Folder;

/// Handle of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id(u32);

impl Id {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Reductions over any axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum,
    Mean,
    Max,
    Min,
    ArgMax,
}

/// Operations on truth values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logic {
    Not,
    And,
    Or,
    Xor,
}

/// Elementwise functions that a graph has no primitive for: folded where known, written with primitives where not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    Sin,
    Cos,
    Tan,
    Asin,
    Acos,
    Atan,
    Sinh,
    Cosh,
    Asinh,
    Acosh,
    Atanh,
    Floor,
    Ceil,
    Sign,
    /// The remainder with the divisor's sign.
    Mod,
    /// The remainder with the dividend's sign, as C's `fmod`.
    Remainder,
    Pow,
}

impl Function {
    pub fn arity(self) -> usize {
        if matches!(self, Function::Mod | Function::Remainder | Function::Pow) { 2 } else { 1 }
    }
}

/// An opaque operation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OpaqueKind {
    pub op: String,
    pub why: String,
    pub flops: u64,
    pub elementwise: bool,
    /// Of each result. One result is the node itself; of several, each is a `Part` of it.
    pub results: Vec<(Element, Shape)>,
}

/// What a node computes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Kind {
    /// An input of the model, by position.
    Input(usize),
    /// An initializer, by position.
    Weight(usize),
    /// Known values, in the node's `constant`.
    Constant,
    Unary(UnaryOp),
    Binary(BinaryOp),
    /// To a constant power.
    Power(f64),
    Function(Function),
    Compare(CompareOp),
    Logic(Logic),
    Select,
    Cast(Element),
    Reduce {
        op: Reduction,
        axes: Vec<usize>,
        keep: bool,
    },
    /// Over the last axis.
    Softmax,
    /// Leading axes broadcast.
    Matmul {
        transpose_a: bool,
        transpose_b: bool,
    },
    /// Rows of a table of rank 2.
    Gather,
    Reshape(Shape),
    Transpose(Vec<usize>),
    Slice {
        axis: usize,
        start: usize,
        length: usize,
    },
    Broadcast(Shape),
    Concat {
        axis: usize,
    },
    /// A composite; its first result is the node itself.
    Composite(Composite),
    Opaque(OpaqueKind),
    /// One of several results.
    Part(usize),
}

/// One operation and its result.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub kind: Kind,
    pub inputs: Vec<Id>,
    pub shape: Shape,
    pub element: Element,
    /// The operator of the file that it came from.
    pub origin: usize,
    pub constant: Option<Rc<Constant>>,
    /// Whether it depends on nothing but constants and weights.
    pub is_fixed: bool,
}

/// An operator of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub name: String,
    pub op: String,
}

/// The operations, operands before users; recognition appends some that are read by earlier ones.
#[derive(Debug, Default)]
pub(crate) struct Ir {
    pub nodes: Vec<Node>,
    pub origins: Vec<Origin>,
    pub outputs: Vec<(String, Id)>,
    pub folder: Folder,
}

/// What was expected and what came, in words.
pub(crate) type Refusal = String;

impl Ir {
    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[id.index()]
    }

    pub fn shape(&self, id: Id) -> &Shape {
        &self.node(id).shape
    }

    pub fn element(&self, id: Id) -> Element {
        self.node(id).element
    }

    pub fn constant(&self, id: Id) -> Option<&Constant> {
        self.node(id).constant.as_deref()
    }

    /// The value of a constant that is the same everywhere. A vector of the file is no such constant, even if its values
    /// happen to be equal: a bias of zeros is still a bias.
    pub fn scalar(&self, id: Id) -> Option<f64> {
        let node = self.node(id);
        let is_vector = matches!(node.kind, Kind::Weight(_)) && node.shape.elements() > 1;
        node.constant.as_ref().filter(|_| !is_vector)?.uniform()
    }

    pub fn ids(&self) -> impl DoubleEndedIterator<Item = Id> + use<> {
        (0..self.nodes.len() as u32).map(Id)
    }

    /// Which nodes the outputs need. Operands of what is known are not needed.
    pub fn needed(&self) -> Vec<bool> {
        let mut needed = vec![false; self.nodes.len()];
        let mut stack: Vec<Id> = self.outputs.iter().map(|&(_, id)| id).collect();
        while let Some(id) = stack.pop() {
            if !std::mem::replace(&mut needed[id.index()], true) && self.node(id).constant.is_none() {
                stack.extend(&self.node(id).inputs);
            }
        }
        needed
    }

    /// The name of the operator that a node came from.
    pub fn name(&self, id: Id) -> &str {
        &self.origins[self.node(id).origin].name
    }

    /// Operators read from now on.
    pub fn enter(&mut self, name: String, op: &str) {
        self.origins.push(Origin { name, op: op.to_string() });
    }

    /// Appends a node as it is.
    pub fn raw(&mut self, kind: Kind, inputs: &[Id], shape: Shape, element: Element) -> Id {
        let id = Id(self.nodes.len() as u32);
        let is_leaf = matches!(kind, Kind::Weight(_) | Kind::Constant);
        let is_fixed = is_leaf
            || (!inputs.is_empty() && inputs.iter().all(|&input| self.node(input).is_fixed))
                && !matches!(kind, Kind::Opaque(_) | Kind::Composite(_));
        let origin = self.origins.len().saturating_sub(1);
        self.nodes.push(Node { kind, inputs: inputs.to_vec(), shape, element, origin, constant: None, is_fixed });
        id
    }

    /// Appends known values.
    pub fn known(&mut self, constant: Constant, element: Element) -> Id {
        let id = self.raw(Kind::Constant, &[], constant.shape.clone(), element);
        self.nodes[id.index()].constant = Some(Rc::new(constant));
        id
    }

    /// One known value.
    pub fn known_scalar(&mut self, value: f64, element: Element) -> Id {
        self.known(Constant::filled(Shape::scalar(), value), element)
    }

    /// Appends an operation: refused if its operands do not go together, folded if they are all known, and left out if
    /// it changes nothing.
    pub fn push(&mut self, kind: Kind, inputs: &[Id]) -> Result<Id, Refusal> {
        let (shape, element) = self.infer(&kind, inputs)?;
        if shape.rank() > deuteron_graph::MAX_RANK || shape.checked_elements().is_none() {
            return Err(format!(
                "a result of shape {shape} is too large; at most 2^48 elements and rank 8 are allowed"
            ));
        }
        if let Some(same) = self.unchanged(&kind, inputs, &shape) {
            return Ok(same);
        }
        let (kind, inputs) = self.combined(kind, inputs);
        if let Some(same) = self.unchanged(&kind, &inputs, &shape) {
            return Ok(same);
        }
        let operands: Option<Vec<Rc<Constant>>> =
            inputs.iter().map(|&input| self.node(input).constant.clone()).collect();
        if let Some(operands) = operands.filter(|operands| !operands.is_empty()) {
            let operands: Vec<&Constant> = operands.iter().map(Rc::as_ref).collect();
            let from = self.element(inputs[0]);
            if let Some(constant) = self.folder.fold(&kind, &operands, from, element, &shape) {
                return Ok(self.known(constant, element));
            }
        }
        Ok(self.raw(kind, &inputs, shape, element))
    }

    /// The operand, where the operation is the identity on it.
    fn unchanged(&self, kind: &Kind, inputs: &[Id], shape: &Shape) -> Option<Id> {
        let first = *inputs.first()?;
        let neutral = |id: Id, value: f64| self.scalar(id) == Some(value);
        let same = match kind {
            Kind::Reshape(_) | Kind::Broadcast(_) | Kind::Slice { .. } => true,
            Kind::Concat { .. } => inputs.len() == 1,
            Kind::Transpose(permutation) => permutation.iter().enumerate().all(|(i, &axis)| i == axis),
            Kind::Cast(element) => {
                let from = self.element(first);
                from.dtype() == element.dtype() && element.holds(from) && self.constant(first).is_none()
            }
            Kind::Power(exponent) => *exponent == 1.0,
            Kind::Reduce { axes, op, keep } => axes.is_empty() && *keep && *op != Reduction::ArgMax,
            Kind::Binary(BinaryOp::Add) if neutral(first, 0.0) && self.shape(inputs[1]) == shape => {
                return Some(inputs[1]);
            }
            Kind::Binary(BinaryOp::Mul) if neutral(first, 1.0) && self.shape(inputs[1]) == shape => {
                return Some(inputs[1]);
            }
            Kind::Binary(BinaryOp::Add | BinaryOp::Sub) => neutral(inputs[1], 0.0),
            Kind::Binary(BinaryOp::Mul | BinaryOp::Div) => neutral(inputs[1], 1.0),
            Kind::Select => match self.scalar(first) {
                Some(condition) => {
                    let picked = if condition != 0.0 { inputs[1] } else { inputs[2] };
                    return (self.shape(picked) == shape).then_some(picked);
                }
                None => false,
            },
            _ => false,
        };
        (same && self.shape(first) == shape).then_some(first)
    }

    /// Views of views are one view.
    fn combined(&self, kind: Kind, inputs: &[Id]) -> (Kind, Vec<Id>) {
        if let [input] = *inputs {
            let inner = self.node(input);
            match (&kind, &inner.kind) {
                (Kind::Reshape(_), Kind::Reshape(_)) => return (kind, inner.inputs.clone()),
                (Kind::Transpose(outer), Kind::Transpose(first)) => {
                    let both = outer.iter().map(|&axis| first[axis]).collect();
                    return (Kind::Transpose(both), inner.inputs.clone());
                }
                _ => {}
            }
        }
        (kind, inputs.to_vec())
    }

    /// The matrices of the last two axes, turned.
    pub fn swap_last(&mut self, id: Id) -> Result<Id, Refusal> {
        let rank = self.shape(id).rank();
        if rank < 2 {
            return Err(format!("a matrix expected, got shape {}", self.shape(id)));
        }
        let mut permutation: Vec<usize> = (0..rank).collect();
        permutation.swap(rank - 1, rank - 2);
        self.push(Kind::Transpose(permutation), &[id])
    }

    pub fn reshape(&mut self, id: Id, dims: Vec<usize>) -> Result<Id, Refusal> {
        self.push(Kind::Reshape(Shape::new(dims)), &[id])
    }

    pub fn broadcast(&mut self, id: Id, shape: &Shape) -> Result<Id, Refusal> {
        self.push(Kind::Broadcast(shape.clone()), &[id])
    }

    pub fn binary(&mut self, op: BinaryOp, a: Id, b: Id) -> Result<Id, Refusal> {
        self.push(Kind::Binary(op), &[a, b])
    }

    pub fn unary(&mut self, op: UnaryOp, x: Id) -> Result<Id, Refusal> {
        self.push(Kind::Unary(op), &[x])
    }

    pub fn compare(&mut self, op: CompareOp, a: Id, b: Id) -> Result<Id, Refusal> {
        self.push(Kind::Compare(op), &[a, b])
    }

    pub fn select(&mut self, condition: Id, a: Id, b: Id) -> Result<Id, Refusal> {
        self.push(Kind::Select, &[condition, a, b])
    }

    pub fn reduce(&mut self, op: Reduction, x: Id, axes: Vec<usize>, keep: bool) -> Result<Id, Refusal> {
        self.push(Kind::Reduce { op, axes, keep }, &[x])
    }

    pub fn cast(&mut self, x: Id, element: Element) -> Result<Id, Refusal> {
        self.push(Kind::Cast(element), &[x])
    }

    /// A number of the type of `x`.
    pub fn number(&mut self, value: f64, x: Id) -> Id {
        self.known_scalar(value, self.element(x))
    }

    /// A comparison with a number.
    pub fn compare_number(&mut self, op: CompareOp, x: Id, value: f64) -> Result<Id, Refusal> {
        let value = self.number(value, x);
        self.compare(op, x, value)
    }

    /// `x + value`
    pub fn offset(&mut self, x: Id, value: f64) -> Result<Id, Refusal> {
        let value = self.number(value, x);
        self.binary(BinaryOp::Add, x, value)
    }

    /// Values along one axis, shaped so that they meet that axis of a tensor of `rank` axes.
    pub fn along(&mut self, x: Id, axis: usize, rank: usize) -> Result<Id, Refusal> {
        let mut dims = vec![1; rank];
        dims[axis] = self.shape(x).elements();
        self.reshape(x, dims)
    }

    /// An axis made the last one, by exchanging the two. Twice gives back what was.
    pub fn exchange(&mut self, x: Id, axis: usize) -> Result<Id, Refusal> {
        let rank = self.shape(x).rank();
        let mut permutation: Vec<usize> = (0..rank).collect();
        permutation.swap(axis, rank - 1);
        self.push(Kind::Transpose(permutation), &[x])
    }

    /// A linear map of one axis: `matrix [new, old]`, in row-major order.
    pub fn linear_map(&mut self, x: Id, axis: usize, new: usize, matrix: Vec<f64>) -> Result<Id, Refusal> {
        let old = self.shape(x)[axis];
        let matrix = Constant::dense(Shape::from([new, old]), matrix, false);
        let matrix = self.known(matrix, self.element(x));
        let last = self.exchange(x, axis)?;
        // A vector is a matrix of one row.
        let is_vector = self.shape(last).rank() == 1;
        let rows = if is_vector { self.reshape(last, vec![1, old])? } else { last };
        let mapped = self.push(Kind::Matmul { transpose_a: false, transpose_b: true }, &[rows, matrix])?;
        let mapped = if is_vector { self.reshape(mapped, vec![new])? } else { mapped };
        self.exchange(mapped, axis)
    }

    /// `x * factor`
    pub fn scale(&mut self, x: Id, factor: f64) -> Result<Id, Refusal> {
        let factor = self.known_scalar(factor, self.element(x));
        self.binary(BinaryOp::Mul, x, factor)
    }
}

impl Kind {
    /// Whether each element of the result depends on the same element of the operands alone.
    pub fn is_elementwise(&self) -> bool {
        matches!(
            self,
            Kind::Unary(_)
                | Kind::Binary(_)
                | Kind::Power(_)
                | Kind::Function(_)
                | Kind::Compare(_)
                | Kind::Select
                | Kind::Cast(_)
        )
    }
}
