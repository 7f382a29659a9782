//! Two matmuls with elementwise work between them, whose hidden values stay in the kernel: fit and lowering.

use deuteron_codegen::argument::{ArgBinding, Argument};
use deuteron_codegen::body::Body;
use deuteron_codegen::matmul_shape::{MatmulShape, Matrix, lower_matmul_shape};
use deuteron_codegen::rows::reach;
use deuteron_graph::{Dtype, NodeId};
use deuteron_plan::{Chain, Draft, Link};

use super::super::sides::storing;
use crate::fit::{MatmulFit, can_be_epilogue, can_be_prologue, lower_side};
use crate::kernel::{Epilogue, Prologue};

/// Two matmuls, each with what stands before and behind it; what is between them is the epilogue of the first.
#[derive(Debug, Clone, PartialEq)]
pub struct PairFit<'a> {
    /// with what makes its left operand, and with the work between
    pub first: MatmulFit<'a>,
    /// with what follows
    pub second: MatmulFit<'a>,
}

/// A pair, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredPair {
    /// what makes the left operand; none: it lies in memory
    pub prologue: Option<Prologue<Body>>,
    /// over the hidden rows
    pub between: Body,
    /// which of its arguments are the sums of the first matmul, and the left operand of the second
    pub handed: [usize; 2],
    /// what follows; it stores the sums where nothing else does
    pub epilogue: Epilogue<Body>,
    /// the first matmul and the second
    pub shapes: [MatmulShape; 2],
    /// in the order of `roles`
    pub args: Vec<ArgBinding>,
    /// what each argument is
    pub roles: Vec<PairRole>,
    /// (divide, modulo) of the launch axes of prologue, of the work between, and of the epilogue
    pub axes: [Vec<(usize, usize)>; 3],
}

/// What an argument of a pair is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PairRole {
    /// the left operand of the first matmul
    Left,
    /// an argument of the prologue
    Prologue(usize),
    /// the right operand of one of the matmuls
    Right(usize),
    /// an argument of the work between
    Between(usize),
    /// an argument of the epilogue
    Epilogue(usize),
}

/// The pair of a draft, if there is one of at most so many rows: hidden rows are read as they would lie, and only results are stored.
pub fn fit<'a>(draft: &Draft<'a>, rows: usize) -> Option<PairFit<'a>> {
    let Chain { prologue, links, epilogue } = draft.structure.chain()?;
    let [Link::Matmul { nodes: first }, Link::Between(between), Link::Matmul { nodes: second }] = links.as_slice()
    else {
        return None;
    };
    let one = |matmuls: &'a [NodeId], prologue: &'a [NodeId], epilogue: &'a [NodeId]| {
        let (shape, operands) = lower_matmul_shape(draft.graph, draft.placement, *matmuls.first()?);
        Some(MatmulFit { matmuls, gather: None, prologue, epilogue, shape, operands })
    };
    let first = one(first, &prologue.nodes, &between.nodes)?;
    let second = one(second, &[], &epilogue.nodes)?;
    let stored = |id: &NodeId| draft.outputs.contains(id);
    let inner = [first.matmuls, first.prologue, first.epilogue].concat();
    let hidden = draft.placement.get(draft.graph.node(second.matmuls[0]).inputs[0])?;
    let in_place = first.epilogue.contains(&hidden.base)
        && hidden.layout.is_contiguous()
        && (first.shape.m, first.shape.n) == (second.shape.m, second.shape.k)
        && second.shape.a == (second.shape.k, 1);
    let fits = (1..=rows).contains(&first.shape.m)
        && first.shape.batch.is_empty()
        && second.shape.batch.is_empty()
        && in_place
        && !inner.iter().any(stored)
        && (second.epilogue.is_empty() || !stored(&second.matmuls[0]))
        && (first.prologue.is_empty() || can_be_prologue(draft, &first, rows))
        && can_be_epilogue(draft, &first)
        && can_be_epilogue(draft, &second);
    fits.then_some(PairFit { first, second })
}

/// Lowers a pair.
pub fn lower(draft: &Draft, fit: PairFit) -> LoweredPair {
    let PairFit { first, second } = fit;
    let (mut args, mut roles) = (Vec::new(), Vec::new());
    let mut add = |side: Vec<ArgBinding>, handed: &[usize], role: fn(usize) -> PairRole| {
        let positions = (0..side.len() + handed.len()).filter(|arg| !handed.contains(arg));
        roles.extend(positions.map(role));
        args.extend(side);
    };
    let [left, right] = first.operands;
    let [hidden, second_right] = second.operands;
    let (mut prologue, mut prologue_axes) = (None, Vec::new());
    if first.prologue.is_empty() {
        add(vec![left], &[], |_| PairRole::Left);
    } else {
        let side = lower_side(&Draft { nodes: first.prologue, outputs: &[left.base], ..*draft }, &[left.base]);
        add(side.others, &side.handed, PairRole::Prologue);
        prologue_axes = side.axes;
        prologue = Some(Prologue { body: side.body, made: side.handed[0] });
    }
    add(vec![right], &[], |_| PairRole::Right(0));
    let outputs = [hidden.base];
    let inner = Draft { nodes: first.epilogue, outputs: &outputs, ..*draft };
    let between = lower_side(&inner, &[first.matmuls[0], hidden.base]);
    add(between.others, &between.handed, PairRole::Between);
    add(vec![second_right], &[], |_| PairRole::Right(1));
    let (epilogue, axes) = if second.epilogue.is_empty() {
        let result = ArgBinding::whole(draft.graph, second.matmuls[0], 0, true);
        let stored = storing(second.shape.n, result.dtype, 1);
        let leading = vec![(second.shape.m, second.shape.n)];
        add(vec![ArgBinding { leading, ..result }], &stored.sums, PairRole::Epilogue);
        (stored, Vec::new())
    } else {
        let side = lower_side(&Draft { nodes: second.epilogue, ..*draft }, second.matmuls);
        add(side.others, &side.handed, PairRole::Epilogue);
        (Epilogue { body: side.body, sums: side.handed }, side.axes)
    };
    LoweredPair {
        prologue,
        between: between.body,
        handed: [between.handed[0], between.handed[1]],
        epilogue,
        shapes: [first.shape, second.shape],
        args,
        roles,
        axes: [prologue_axes, between.axes, axes],
    }
}

impl LoweredPair {
    /// Storage type of the operands.
    pub fn dtype(&self) -> Dtype {
        let right = self.position(PairRole::Right(0));
        right.map_or(Dtype::F32, |position| self.args[position].dtype)
    }

    /// The position of an argument.
    pub fn position(&self, role: PairRole) -> Option<usize> {
        self.roles.iter().position(|&known| known == role)
    }

    /// What a device has to know of the arguments.
    pub fn arguments(&self) -> Vec<Argument> {
        let [first, second] = &self.shapes;
        let of_body = |body: &Body, at: usize, arg: &ArgBinding, cols: usize| reach(&body.args[at], arg, first.m, cols);
        let elements = |role: PairRole, arg: &ArgBinding| match role {
            PairRole::Left => first.reach(Matrix::A),
            PairRole::Prologue(at) => {
                self.prologue.as_ref().map_or(0, |prologue| of_body(&prologue.body, at, arg, first.k))
            }
            PairRole::Right(0) => first.reach(Matrix::B),
            PairRole::Right(_) => second.reach(Matrix::B),
            PairRole::Between(at) => of_body(&self.between, at, arg, first.n),
            PairRole::Epilogue(at) => of_body(&self.epilogue.body, at, arg, second.n),
        };
        self.roles.iter().zip(&self.args).map(|(&role, arg)| Argument::new(arg, elements(role, arg))).collect()
    }
}
