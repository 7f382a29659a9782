//! Which expressions each pass over the row computes, and which values are kept for a later one.
//!
//! Level `n` is pass `n`, as on the CPU. A value of an earlier pass that a later one needs is kept or recomputed,
//! whichever needs fewer registers: a centred value is recomputed from the loaded row, the sum of two tensors
//! is kept, and is held as the 16-bit type it was rounded to.

use std::collections::HashSet;

use deuteron_graph::{Activation, BinaryOp, Dtype, UnaryOp};

use crate::body::{Body, Expr, ExprId, Stage};
use crate::compound::{activation, gelu_tanh_gradient};

/// The sweeps of a body.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Passes {
    /// for each expression: the same for all columns
    pub uniform: Vec<bool>,
    /// for each expression: its level
    pub levels: Vec<usize>,
    /// in order
    pub list: Vec<Pass>,
    /// for each expression: the function it is the end of
    pub compounds: Vec<Option<Compound>>,
    /// values other than loads that wait for a later pass, and the type they are held in
    pub kept: Vec<(ExprId, Dtype)>,
}

impl Passes {
    /// The sweeps that read an argument along the row.
    pub fn sweeps_of(&self, body: &Body, arg: usize) -> Vec<usize> {
        let reads = |pass: &Pass| pass.lanes.iter().any(|&id| body.expr(id) == Expr::Load(arg as u16));
        (0..self.list.len()).filter(|&pass| reads(&self.list[pass])).collect()
    }
}

/// One sweep.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Pass {
    /// positions of the stages it serves
    pub stages: Vec<usize>,
    /// expressions that differ along the row, operands first; loads among them
    pub lanes: Vec<ExprId>,
}

/// Operations that may be done again instead of keeping a value.
const AGAIN: usize = 6;

/// Divides a body into passes. Without `keep`, every pass starts from memory. `shared[arg]`: all rows read the same there.
pub(crate) fn passes(body: &Body, shared: &[bool], keep: bool) -> Passes {
    let levels = body.levels();
    let count = body.stages.iter().map(|stage| levels[stage.value().index()] + 1).max().unwrap_or(0);
    let mut finder = Finder {
        body,
        shared,
        uniform: body.uniform(),
        compounds: compounds(body),
        kept: Vec::new(),
        made: HashSet::new(),
        held: HashSet::new(),
    };
    let mut list: Vec<Pass> = Vec::new();
    for level in 0..count {
        let of_level = |(_, stage): &(usize, &Stage)| levels[stage.value().index()] == level;
        let stages: Vec<usize> =
            body.stages.iter().enumerate().filter(of_level).map(|(position, _)| position).collect();
        let roots: Vec<ExprId> = stages.iter().map(|&position| stored(body, &body.stages[position])).collect();
        let mut lanes = HashSet::new();
        for root in roots {
            finder.need(root, keep, &mut lanes);
        }
        finder.made.extend(&lanes);
        let mut lanes: Vec<ExprId> = lanes.into_iter().collect();
        lanes.sort();
        list.push(Pass { stages, lanes });
    }
    Passes { uniform: finder.uniform, compounds: finder.compounds, levels, list, kept: finder.kept }
}

/// Expressions that are computed as one function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compound {
    /// an activation of a value
    Activation(Activation, ExprId),
    /// the gradient of GELU's tanh form: what comes in, and what GELU was applied to
    GeluTanhGradient(ExprId, ExprId),
}

fn compounds(body: &Body) -> Vec<Option<Compound>> {
    let uses = body.use_counts();
    let compound = |id: ExprId| {
        let activation = activation(body, &uses, id).map(|(activation, x)| Compound::Activation(activation, x));
        activation.or_else(|| gelu_tanh_gradient(body, &uses, id).map(|(g, x)| Compound::GeluTanhGradient(g, x)))
    };
    body.ids().map(compound).collect()
}

/// The expressions that one reads, after compounds are found.
pub(crate) fn reads(body: &Body, compounds: &[Option<Compound>], id: ExprId) -> Vec<ExprId> {
    match compounds[id.index()] {
        Some(Compound::Activation(_, x)) => vec![x],
        Some(Compound::GeluTanhGradient(g, x)) => vec![g, x],
        None => body.expr(id).operands().collect(),
    }
}

/// The operand of a stage: stores convert, so a stored cast needs no instruction.
pub(crate) fn stored(body: &Body, stage: &Stage) -> ExprId {
    match (stage, body.expr(stage.value())) {
        (Stage::Store { .. }, Expr::ToInt8(a) | Expr::ToFp8(a)) => a,
        _ => stage.value(),
    }
}

/// The narrowest type that holds an expression exactly.
pub(crate) fn held_in(body: &Body, id: ExprId) -> Dtype {
    match body.expr(id) {
        Expr::Load(arg) => body.args[arg as usize].dtype,
        Expr::Rounded(dtype, _) => dtype,
        Expr::Compare(..) | Expr::Keep { .. } => Dtype::Bool,
        _ if body.is_int(id) => Dtype::I32,
        _ => Dtype::F32,
    }
}

struct Finder<'a> {
    body: &'a Body,
    shared: &'a [bool],
    uniform: Vec<bool>,
    compounds: Vec<Option<Compound>>,
    kept: Vec<(ExprId, Dtype)>,
    /// made in an earlier pass
    made: HashSet<ExprId>,
    /// loads that wait in registers for a later pass
    held: HashSet<ExprId>,
}

impl Finder<'_> {
    fn is_kept(&self, id: ExprId) -> bool {
        self.kept.iter().any(|&(kept, _)| kept == id)
    }

    /// Adds what a pass must compute for a value.
    fn need(&mut self, id: ExprId, keep: bool, lanes: &mut HashSet<ExprId>) {
        if self.uniform[id.index()] || lanes.contains(&id) || self.is_kept(id) {
            return;
        }
        if keep && self.made.contains(&id) && !matches!(self.body.expr(id), Expr::Load(_)) && self.is_worth_keeping(id)
        {
            self.kept.push((id, held_in(self.body, id)));
            return;
        }
        if self.made.contains(&id) && matches!(self.body.expr(id), Expr::Load(_)) {
            self.held.insert(id);
        }
        lanes.insert(id);
        for operand in reads(self.body, &self.compounds, id) {
            self.need(operand, keep, lanes);
        }
    }

    /// Keeping a value takes its bytes; computing it again takes the bytes of what it comes from, where those would not
    /// be held anyway.
    fn is_worth_keeping(&self, id: ExprId) -> bool {
        match self.again(id, AGAIN) {
            Some(bytes) => self.bytes(id) < bytes,
            None => true,
        }
    }

    fn bytes(&self, id: ExprId) -> usize {
        held_in(self.body, id).bytes()
    }

    /// Bytes that must be held so that a value can be computed again in a few operations; none if that costs too much.
    fn again(&self, id: ExprId, operations: usize) -> Option<usize> {
        if self.uniform[id.index()] || self.is_kept(id) {
            return Some(0);
        }
        if let Expr::Load(arg) = self.body.expr(id) {
            // A row that all rows share is in the nearest cache.
            let free = self.shared[arg as usize] || self.held.contains(&id);
            return Some(if free { 0 } else { self.bytes(id) });
        }
        let left = operations.checked_sub(1)?;
        if self.compounds[id.index()].is_some() || is_costly(self.body.expr(id)) {
            return None;
        }
        let mut bytes = 0;
        for operand in self.body.expr(id).operands() {
            // An operand is kept itself where it cannot be computed again for less.
            let kept = self.made.contains(&operand).then(|| self.bytes(operand));
            bytes += match (self.again(operand, left), kept) {
                (Some(again), Some(kept)) => again.min(kept),
                (again, kept) => again.or(kept)?,
            };
        }
        Some(bytes)
    }
}

fn is_costly(expr: Expr) -> bool {
    match expr {
        Expr::Keep { .. } | Expr::Binary(BinaryOp::Div, ..) => true,
        Expr::Unary(op, _) => !matches!(op, UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Round),
        Expr::Load(_) | Expr::Const(_) | Expr::ConstInt(_) | Expr::ColumnIndex | Expr::RowIndex(_) => false,
        Expr::Binary(..) | Expr::Compare(..) | Expr::Select(..) | Expr::IntToFloat(_) | Expr::RowValue(_) => false,
        Expr::ToInt8(_) | Expr::ToFp8(_) | Expr::Rounded(..) | Expr::Integer(..) | Expr::FloatToInt(_) => false,
    }
}
