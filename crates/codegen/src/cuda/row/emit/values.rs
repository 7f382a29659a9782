//! Expressions as text lines: numbers of a row, and values along it.

use deuteron_graph::{BinaryOp, Dtype};

use super::Writer;
use super::names::{
    Kind, activation_name, compare_sign, float_literal, int_literal, lane_type, scalar_type, type_name,
};
use crate::body::{Expr, ExprId, Origin};
use crate::cuda::row::passes::{Compound, reads, stored};
use crate::cuda::row_config::Policy;

impl Writer<'_> {
    /// A number of the row.
    pub(super) fn number(&mut self, id: ExprId) {
        let body = self.it.body;
        if self.names.contains_key(&id) {
            return;
        }
        let name = format!("e{}", id.index());
        self.origin = Some(Origin::Expr(id));
        let value = match body.expr(id) {
            Expr::Const(_) | Expr::ConstInt(_) | Expr::RowValue(_) => {
                self.origin = None;
                return;
            }
            Expr::Load(arg) if let Some(sums) = self.handed_sums(arg) => format!("at({sums}, 0)"),
            Expr::Load(arg) => {
                let at = if body.flat { format!("(const char*)p.a{arg}") } else { format!("g{arg}") };
                format!("load_one({}{{}}, {at})", self.type_of(arg as usize))
            }
            Expr::RowIndex(axis) => {
                let wide = if self.it.config.wide { "u64" } else { "u32" };
                format!("(int)(({wide})row / ({wide})p.divide{axis} % ({wide})p.modulo{axis})")
            }
            other => self.formula(id, other, true),
        };
        self.line(format!("const {} {name} = {value};", scalar_type(self.kind(id))));
        self.origin = None;
        self.names.insert(id, name);
    }

    /// A value along the row, for one chunk.
    pub(super) fn lanes(&mut self, id: ExprId, level: usize) {
        let (body, config) = (self.it.body, self.it.config);
        let name = format!("e{}", id.index());
        self.origin = Some(Origin::Expr(id));
        let value = match body.expr(id) {
            Expr::Load(arg) if let Some(sums) = self.handed_sums(arg) => sums,
            Expr::Load(arg) => {
                let arg = arg as usize;
                let raw = match config.policy {
                    Policy::Registers if self.is_late(arg) => self.load(arg),
                    Policy::Registers if config.stages > 0 && !self.is_hoisted(arg) => {
                        format!("w{arg}[c * T * ROWS]")
                    }
                    Policy::Flat | Policy::Registers => format!("w{arg}[c]"),
                    Policy::Streamed => self.load(arg),
                    Policy::Shared => {
                        let sweeps = self.sweeps_of(arg);
                        let load = self.load(arg);
                        match sweeps.len() > 1 {
                            true if sweeps[0] == level => format!("w{arg}[c * T] = {load}"),
                            true => format!("w{arg}[c * T]"),
                            false => load,
                        }
                    }
                };
                format!("value({raw})")
            }
            Expr::ColumnIndex => "lanes<I>([&](int i) { return col + i; })".to_string(),
            Expr::Keep { seed, offset, threshold } => {
                let seed = self.name_for(seed, Kind::Int);
                let (first, in_step) = match body.flat {
                    true => ("(u64)element".to_string(), true),
                    false => (
                        "(u64)row * COLS + col".to_string(),
                        body.cols.is_multiple_of(config.vector.clamp(1, 4)) && body.cols.is_multiple_of(4),
                    ),
                };
                format!("keep<{in_step}>({first}, (u32){seed}, {offset}u, {threshold}u)")
            }
            other => self.formula(id, other, false),
        };
        self.line(format!("const {} {name} = {value};", lane_type(self.kind(id))));
        self.names.insert(id, name.clone());
        let kept = self.it.passes.kept.iter().find(|&&(kept, _)| kept == id);
        if let (Some(&(_, dtype)), true) = (kept, self.it.passes.levels[id.index()] <= level) {
            let slot = if config.policy == Policy::Shared { "c * T" } else { "c" };
            let held = type_name(dtype);
            self.line(format!("k{}[{slot}] = Packer<{held}>::pack({name});", id.index()));
        }
        self.origin = None;
    }

    /// Whether a passed value was rounded to a dtype.
    fn is_rounded(&self, id: ExprId, dtype: Dtype) -> bool {
        let handed = matches!(self.it.body.expr(id), Expr::Load(arg) if self.handed_sums(arg).is_some());
        handed && self.it.rounded == Some(dtype)
    }

    /// The accumulators of an argument that a matmul passes.
    fn handed_sums(&self, arg: u16) -> Option<String> {
        let position = self.it.handed.iter().position(|&handed| handed == usize::from(arg))?;
        Some(format!("sums[{position}]"))
    }

    /// How many expressions and stages read a value.
    fn readers(&self, id: ExprId) -> usize {
        let body = self.it.body;
        let stages = body.stages.iter().filter(|stage| stored(body, stage) == id).count();
        let reads_it = |other: &ExprId| reads(body, &self.it.passes.compounds, *other).contains(&id);
        stages + self.reachable().iter().filter(|other| reads_it(other)).count()
    }

    /// Values that an earlier sweep kept are read back where they are needed.
    pub(super) fn formula(&mut self, id: ExprId, expr: Expr, uniform: bool) -> String {
        for operand in reads(self.it.body, &self.it.passes.compounds, id) {
            self.fetch(operand);
        }
        match self.it.passes.compounds[id.index()] {
            Some(Compound::Activation(activation, x)) => {
                if let Some(function) = activation_name(activation) {
                    return format!("{function}1({})", self.name_for(x, Kind::Float));
                }
            }
            Some(Compound::GeluTanhGradient(g, x)) => {
                let (g, x) = (self.name_for(g, Kind::Float), self.name_for(x, Kind::Float));
                return format!("gelu_tanh_gradient2({g}, {x})");
            }
            None => {}
        }
        let float = |writer: &Self, id: ExprId| writer.name_for(id, Kind::Float);
        match expr {
            Expr::Unary(op, a) => format!("{}1({})", op.name(), float(self, a)),
            Expr::Binary(op, a, b) => {
                // A product that is read more than once must have the same value for all readers: the compiler must not make it
                // part of a multiply-add for one of them, or what should cancel does not.
                let name = if op == BinaryOp::Mul && self.readers(id) > 1 { "whole" } else { op.name() };
                format!("{name}2({}, {})", float(self, a), float(self, b))
            }
            Expr::Compare(op, a, b) => {
                let both_int = self.kind(a) == Kind::Int && self.kind(b) == Kind::Int;
                let kind = if both_int { Kind::Int } else { Kind::Float };
                let (a, b) = (self.name_for(a, kind), self.name_for(b, kind));
                match uniform {
                    true => format!("{a} {} {b}", compare_sign(op)),
                    false => format!("{}({a}, {b})", op.name()),
                }
            }
            Expr::Select(c, a, b) => {
                let kind = self.kind(id);
                let condition = self.name_for(c, Kind::Truth);
                let (a, b) = (self.name_for(a, kind), self.name_for(b, kind));
                match uniform {
                    true => format!("{condition} ? {a} : {b}"),
                    false => format!("select<{}>({condition}, {a}, {b})", lane_type(kind)),
                }
            }
            Expr::Integer(op, a, b) => {
                format!("{}({}, {})", op.name(), self.name_for(a, Kind::Int), self.name_for(b, Kind::Int))
            }
            Expr::FloatToInt(a) => format!("nearest_int({})", float(self, a)),
            Expr::IntToFloat(a) => float(self, a),
            Expr::ToInt8(a) => format!("int8_1({})", float(self, a)),
            Expr::Rounded(dtype, a) if self.is_rounded(a, dtype) => float(self, a),
            Expr::Rounded(Dtype::F16, a) => format!("round_f16({})", float(self, a)),
            Expr::Rounded(_, a) => format!("round_bf16({})", float(self, a)),
            Expr::ToFp8(a) => float(self, a),
            Expr::Load(_) | Expr::Const(_) | Expr::ConstInt(_) | Expr::ColumnIndex | Expr::RowIndex(_) => String::new(),
            Expr::Keep { .. } | Expr::RowValue(_) => String::new(),
        }
    }

    /// Names a kept value, if this is one that the sweep has not named yet.
    pub(super) fn fetch(&mut self, id: ExprId) {
        let Some(&(_, _)) = self.it.passes.kept.iter().find(|&&(kept, _)| kept == id) else { return };
        if self.names.contains_key(&id) {
            return;
        }
        let slot = if self.it.config.policy == Policy::Shared { "c * T" } else { "c" };
        let name = format!("e{}", id.index());
        let reader = self.origin.replace(Origin::Expr(id));
        self.line(format!("const {} {name} = value(k{}[{slot}]);", lane_type(self.kind(id)), id.index()));
        self.origin = reader;
        self.names.insert(id, name);
    }

    pub(super) fn kind(&self, id: ExprId) -> Kind {
        match self.it.body.expr(id) {
            Expr::Compare(..) | Expr::Keep { .. } => Kind::Truth,
            Expr::Load(arg) if self.it.body.args[arg as usize].dtype == Dtype::Bool => Kind::Truth,
            _ if self.it.body.is_int(id) => Kind::Int,
            _ => Kind::Float,
        }
    }

    pub(super) fn kind_stored(&self, arg: u16) -> Kind {
        match self.it.body.args[arg as usize].dtype {
            Dtype::I32 => Kind::Int,
            Dtype::Bool => Kind::Truth,
            _ => Kind::Float,
        }
    }

    /// The text of an operand, as a kind of value.
    pub(super) fn name_for(&self, id: ExprId, wanted: Kind) -> String {
        let name = match self.it.body.expr(id) {
            Expr::Const(bits) => float_literal(f32::from_bits(bits)),
            Expr::ConstInt(value) => int_literal(value),
            Expr::RowValue(value) => format!("r{value}"),
            _ => self.names.get(&id).cloned().unwrap_or_else(|| format!("e{}", id.index())),
        };
        match (self.kind(id), wanted) {
            (Kind::Truth | Kind::Int, Kind::Float) => format!("as_float({name})"),
            (Kind::Float | Kind::Int, Kind::Truth) => format!("as_truth({name})"),
            (Kind::Truth | Kind::Float, Kind::Int) => format!("(int)({name})"),
            (Kind::Float, Kind::Float) | (Kind::Int, Kind::Int) | (Kind::Truth, Kind::Truth) => name,
        }
    }

    /// Expressions that some stage needs, operands first.
    pub(super) fn reachable(&self) -> Vec<ExprId> {
        let body = self.it.body;
        let mut needed = vec![false; body.exprs.len()];
        body.stages.iter().for_each(|stage| needed[stored(body, stage).index()] = true);
        for id in body.ids().collect::<Vec<_>>().into_iter().rev() {
            if needed[id.index()] {
                reads(body, &self.it.passes.compounds, id)
                    .into_iter()
                    .for_each(|operand| needed[operand.index()] = true);
            }
        }
        body.ids().filter(|id| needed[id.index()]).collect()
    }
}
