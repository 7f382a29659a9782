//! The body of a row kernel: loads, scalar expressions, reductions, stores. No backend in it.
//!
//! A body describes one row of `cols` columns. Its expressions form a hash-consed DAG: building the same expression
//! twice gives the same handle, so common subexpressions are shared by construction. Stages are in order: an expression
//! may use the row value of an earlier reduction.

use std::collections::HashMap;
use std::fmt;

use deuteron_graph::{BinaryOp, CompareOp, Dtype, ReduceOp, UnaryOp, named};

/// Handle of an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExprId(u32);

impl ExprId {
    /// Position in [`Body::exprs`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

named! {
    /// Arithmetic of two `i32`, wrapping.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum IntegerOp {
        /// `a + b`
        Add = "add_int",
        /// `a - b`
        Sub = "sub_int",
        /// `a * b`
        Mul = "mul_int",
    }
}

/// A scalar expression at (row, column). Constants are kept as bits so that expressions can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Expr {
    /// The element of an argument.
    Load(u16),
    /// An `f32` constant.
    Const(u32),
    /// An `i32` constant.
    ConstInt(i32),
    /// The column number, `i32`.
    ColumnIndex,
    /// The row's coordinate on a launch axis, `i32`.
    RowIndex(u16),
    /// A function of one value.
    Unary(UnaryOp, ExprId),
    /// A function of two values.
    Binary(BinaryOp, ExprId, ExprId),
    /// The same of two `i32`, wrapping.
    Integer(IntegerOp, ExprId, ExprId),
    /// 1 where the comparison holds, else 0.
    Compare(CompareOp, ExprId, ExprId),
    /// The second where the first is not 0, else the third.
    Select(ExprId, ExprId, ExprId),
    /// `i32` to `f32`.
    IntToFloat(ExprId),
    /// `f32` to the nearest `i32`, saturating; NaN becomes 0.
    FloatToInt(ExprId),
    /// To the nearest `i8`, saturating; NaN becomes 0.
    ToInt8(ExprId),
    /// To the nearest `f16` or `bf16`: a value that is stored in that type and read again.
    Rounded(Dtype, ExprId),
    /// To the nearest `f8e4m3`, saturating. Only stores take it.
    ToFp8(ExprId),
    /// 1 where Philox keeps the element, else 0.
    Keep {
        /// the seed, one for all
        seed: ExprId,
        /// second half of the key
        offset: u32,
        /// kept iff the random number is at least this
        threshold: u32,
    },
    /// The result of a row reduction.
    RowValue(u16),
}

/// How an argument is addressed from (row, column).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// `cols` contiguous elements at an offset that depends on the row (a stride of 0 repeats one row).
    Row,
    /// As `Row`, but the row is selected by the `i32` element of argument `index` (which is `PerRow`).
    GatheredRow {
        /// position of the index argument
        index: u16,
    },
    /// One element per row (strides of 0: one element for all).
    PerRow,
    /// Finished column sums: `cols` contiguous elements (or 1, if a scalar is summed), written once, after all rows.
    Columns,
}

/// One argument of a row kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ArgSpec {
    /// storage type; `f8e4m3` is only written
    pub dtype: Dtype,
    /// how it is addressed
    pub access: Access,
    /// whether it is written
    pub written: bool,
}

/// One step of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Reduces an expression over the row into row value `into`.
    RowReduce {
        /// the reduction (`Mean` has become `Sum` and a factor)
        op: ReduceOp,
        /// what is reduced
        value: ExprId,
        /// the row value it becomes
        into: u16,
    },
    /// Adds an expression to the column sums of an argument.
    ColumnSum {
        /// what is summed
        value: ExprId,
        /// the argument
        arg: u16,
        /// columns of the sum: the body's, or 1
        width: usize,
    },
    /// Stores an expression.
    Store {
        /// the kind of result
        value: ExprId,
        /// the argument
        arg: u16,
    },
}

impl Stage {
    /// What it reads.
    pub fn value(&self) -> ExprId {
        match *self {
            Stage::RowReduce { value, .. } | Stage::ColumnSum { value, .. } | Stage::Store { value, .. } => value,
        }
    }
}

/// The origin of a line of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// an expression of the body
    Expr(ExprId),
    /// a stage of the body, by position
    Stage(usize),
}

/// A row kernel without a backend.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Body {
    /// columns; 0 for a flat body
    pub cols: usize,
    /// no row structure: any range of elements is a row
    pub flat: bool,
    /// arguments in the order of the launch
    pub args: Vec<ArgSpec>,
    /// the expressions, operands before users
    pub exprs: Vec<Expr>,
    /// how many launch axes `RowIndex` uses
    pub axes: u16,
    /// how many row values there are
    pub row_values: u16,
    /// the steps, in order
    pub stages: Vec<Stage>,
}

/// Builds a body's expressions.
#[derive(Debug, Default)]
pub struct Exprs {
    list: Vec<Expr>,
    known: HashMap<Expr, ExprId>,
}

impl Exprs {
    /// The handle of an expression, new or known.
    pub fn make(&mut self, expr: Expr) -> ExprId {
        *self.known.entry(expr).or_insert_with(|| {
            self.list.push(expr);
            ExprId(self.list.len() as u32 - 1)
        })
    }

    /// An `f32` constant.
    pub fn constant(&mut self, value: f32) -> ExprId {
        self.make(Expr::Const(value.to_bits()))
    }

    /// The expression of a handle.
    pub fn get(&self, id: ExprId) -> Expr {
        self.list[id.index()]
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// All expressions.
    pub fn finish(self) -> Vec<Expr> {
        self.list
    }
}

impl Expr {
    /// The expressions this one reads.
    pub fn operands(self) -> impl Iterator<Item = ExprId> {
        let list: [Option<ExprId>; 3] = match self {
            Expr::Load(_) | Expr::Const(_) | Expr::ConstInt(_) | Expr::ColumnIndex => [None; 3],
            Expr::RowIndex(_) | Expr::RowValue(_) => [None; 3],
            Expr::Unary(_, a) | Expr::IntToFloat(a) | Expr::ToInt8(a) | Expr::ToFp8(a) => [Some(a), None, None],
            Expr::Rounded(_, a) | Expr::FloatToInt(a) => [Some(a), None, None],
            Expr::Keep { seed, .. } => [Some(seed), None, None],
            Expr::Binary(_, a, b) | Expr::Integer(_, a, b) | Expr::Compare(_, a, b) => [Some(a), Some(b), None],
            Expr::Select(a, b, c) => [Some(a), Some(b), Some(c)],
        };
        list.into_iter().flatten()
    }
}

impl Expr {
    /// The same expression of other operands.
    pub(crate) fn with_operands(self, of: impl Fn(ExprId) -> ExprId) -> Expr {
        match self {
            Expr::Load(_) | Expr::Const(_) | Expr::ConstInt(_) | Expr::ColumnIndex => self,
            Expr::RowIndex(_) | Expr::RowValue(_) => self,
            Expr::Unary(op, a) => Expr::Unary(op, of(a)),
            Expr::Binary(op, a, b) => Expr::Binary(op, of(a), of(b)),
            Expr::Compare(op, a, b) => Expr::Compare(op, of(a), of(b)),
            Expr::Select(c, a, b) => Expr::Select(of(c), of(a), of(b)),
            Expr::Integer(op, a, b) => Expr::Integer(op, of(a), of(b)),
            Expr::IntToFloat(a) => Expr::IntToFloat(of(a)),
            Expr::FloatToInt(a) => Expr::FloatToInt(of(a)),
            Expr::ToInt8(a) => Expr::ToInt8(of(a)),
            Expr::ToFp8(a) => Expr::ToFp8(of(a)),
            Expr::Rounded(dtype, a) => Expr::Rounded(dtype, of(a)),
            Expr::Keep { seed, offset, threshold } => Expr::Keep { seed: of(seed), offset, threshold },
        }
    }
}

impl Body {
    /// The expression of a handle.
    pub fn expr(&self, id: ExprId) -> Expr {
        self.exprs[id.index()]
    }

    /// Handles of all expressions, operands before users.
    pub fn ids(&self) -> impl Iterator<Item = ExprId> + use<> {
        (0..self.exprs.len() as u32).map(ExprId)
    }

    /// For each expression, whether it is the same for all columns of a row.
    pub fn uniform(&self) -> Vec<bool> {
        let mut uniform: Vec<bool> = Vec::with_capacity(self.exprs.len());
        for expr in &self.exprs {
            let own = match expr {
                Expr::Load(arg) => self.args[*arg as usize].access == Access::PerRow,
                Expr::ColumnIndex | Expr::Keep { .. } => false,
                _ => true,
            };
            uniform.push(own && expr.operands().all(|operand| uniform[operand.index()]));
        }
        uniform
    }

    /// For each expression, the number of passes over the row before its value is known.
    pub fn levels(&self) -> Vec<usize> {
        let mut reduced = vec![0; self.row_values as usize];
        let mut levels: Vec<usize> = vec![0; self.exprs.len()];
        // Stages are in order and expressions hash-consed in order, so two alternating walks settle every level, one sum at a time at
        // worst.
        for _ in 0..=self.row_values {
            for (index, expr) in self.exprs.iter().enumerate() {
                let own = if let Expr::RowValue(value) = expr { reduced[*value as usize] } else { 0 };
                levels[index] = expr.operands().map(|operand| levels[operand.index()]).max().unwrap_or(0).max(own);
            }
            let mut settled = true;
            for stage in &self.stages {
                if let Stage::RowReduce { value, into, .. } = stage {
                    let level = levels[value.index()] + 1;
                    settled &= reduced[*into as usize] == level;
                    reduced[*into as usize] = level;
                }
            }
            if settled {
                break;
            }
        }
        levels
    }

    /// How often each expression is read, by expressions and stages.
    pub(crate) fn use_counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.exprs.len()];
        self.exprs.iter().flat_map(|expr| expr.operands()).for_each(|operand| counts[operand.index()] += 1);
        self.stages.iter().for_each(|stage| counts[stage.value().index()] += 1);
        counts
    }

    /// Whether an expression's lanes are `i32`.
    pub fn is_int(&self, id: ExprId) -> bool {
        match self.expr(id) {
            Expr::Load(arg) => self.args[arg as usize].dtype == Dtype::I32,
            Expr::ConstInt(_) | Expr::ColumnIndex | Expr::RowIndex(_) => true,
            Expr::Integer(..) | Expr::FloatToInt(_) => true,
            Expr::Select(_, a, _) => self.is_int(a),
            Expr::RowValue(value) => self
                .stages
                .iter()
                .any(|stage| matches!(stage, Stage::RowReduce { op: ReduceOp::ArgMax, into, .. } if *into == value)),
            Expr::Const(_) | Expr::Unary(..) | Expr::Binary(..) | Expr::Compare(..) | Expr::IntToFloat(_) => false,
            Expr::ToInt8(_) | Expr::ToFp8(_) | Expr::Rounded(..) | Expr::Keep { .. } => false,
        }
    }

    /// Checks that handles point backwards and stages name what exists.
    pub fn verify(&self) -> Result<(), String> {
        for (index, expr) in self.exprs.iter().enumerate() {
            if expr.operands().any(|operand| operand.index() >= index) {
                return Err(format!("expression {index} reads a later one"));
            }
        }
        for stage in &self.stages {
            let (value, arg) = match *stage {
                Stage::RowReduce { value, .. } => (value, None),
                Stage::ColumnSum { value, arg, .. } | Stage::Store { value, arg } => (value, Some(arg)),
            };
            if value.index() >= self.exprs.len() || arg.is_some_and(|arg| arg as usize >= self.args.len()) {
                return Err("a stage names what does not exist".into());
            }
        }
        Ok(())
    }
}

impl fmt::Display for ArgSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:<4} ", if self.written { "write" } else { "read " }, self.dtype)?;
        match self.access {
            Access::Row => f.write_str("row"),
            Access::GatheredRow { index } => write!(f, "row picked by a{index}"),
            Access::PerRow => f.write_str("one a row"),
            Access::Columns => f.write_str("sums over rows"),
        }
    }
}

impl fmt::Display for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.flat {
            true => writeln!(f, "body, flat")?,
            false => writeln!(f, "body, {} columns", self.cols)?,
        }
        for (index, arg) in self.args.iter().enumerate() {
            writeln!(f, "  a{index}  {arg}")?;
        }
        for (index, expr) in self.exprs.iter().enumerate() {
            writeln!(f, "  e{index} = {expr}")?;
        }
        for stage in &self.stages {
            match stage {
                Stage::RowReduce { op, value, into } => writeln!(f, "  r{into} = {} e{}", op.name(), value.0)?,
                Stage::ColumnSum { value, arg, .. } => writeln!(f, "  a{arg} += e{}", value.0)?,
                Stage::Store { value, arg } => writeln!(f, "  a{arg} = e{}", value.0)?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Expr::Load(arg) => write!(f, "load a{arg}"),
            Expr::Const(bits) => write!(f, "{:?}", f32::from_bits(bits)),
            Expr::ConstInt(value) => write!(f, "{value}"),
            Expr::ColumnIndex => write!(f, "column"),
            Expr::RowIndex(axis) => write!(f, "coordinate {axis}"),
            Expr::Unary(op, a) => write!(f, "{} e{}", op.name(), a.0),
            Expr::Binary(op, a, b) => write!(f, "{} e{} e{}", op.name(), a.0, b.0),
            Expr::Compare(op, a, b) => write!(f, "{} e{} e{}", op.name(), a.0, b.0),
            Expr::Select(c, a, b) => write!(f, "select e{} e{} e{}", c.0, a.0, b.0),
            Expr::Integer(op, a, b) => write!(f, "{} e{} e{}", op.name(), a.0, b.0),
            Expr::IntToFloat(a) => write!(f, "float e{}", a.0),
            Expr::FloatToInt(a) => write!(f, "int e{}", a.0),
            Expr::ToInt8(a) => write!(f, "int8 e{}", a.0),
            Expr::ToFp8(a) => write!(f, "fp8 e{}", a.0),
            Expr::Rounded(dtype, a) => write!(f, "{dtype} e{}", a.0),
            Expr::Keep { seed, offset, threshold } => write!(f, "keep e{} offset {offset} at {threshold:#x}", seed.0),
            Expr::RowValue(value) => write!(f, "r{value}"),
        }
    }
}
