//! Listing of a tile program.

use std::fmt;

use crate::cpu::program::{Dst, Inst, Src, TileProgram, TileReduce, TileUnary};

impl fmt::Display for TileProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.flat {
            true => write!(f, "tile program, flat")?,
            false => write!(f, "tile program, {} columns", self.cols)?,
        }
        writeln!(f, "; {} tiles, {} kept rows, {} scalars", self.tiles, self.kept, self.scalars)?;
        for (index, arg) in self.args.iter().enumerate() {
            writeln!(f, "  a{index}  {arg}")?;
        }
        for (index, pass) in self.passes.iter().enumerate() {
            writeln!(f, "pass {index}")?;
            for inst in &pass.row {
                writeln!(f, "  row    {inst}")?;
            }
            for inst in &pass.strip {
                writeln!(f, "  strip  {inst}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Src {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Src::Tile(tile) => write!(f, "t{tile}"),
            Src::Kept(row) => write!(f, "k{row}"),
            Src::Arg(arg) => write!(f, "a{arg}"),
            Src::Scalar(slot) => write!(f, "s{slot}"),
            Src::Const(value) => write!(f, "{value:?}"),
            Src::ConstInt(value) => write!(f, "{value}"),
        }
    }
}

impl fmt::Display for Dst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dst::Tile(tile) => write!(f, "t{tile}"),
            Dst::Kept(row) => write!(f, "k{row}"),
            Dst::Scalar(slot) => write!(f, "s{slot}"),
        }
    }
}

impl fmt::Display for Inst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Inst::Load { dst, arg } => write!(f, "{dst} = load a{arg}"),
            Inst::Unary { op, dst, a } => write!(f, "{dst} = {} {a}", unary_name(*op)),
            Inst::Binary { op, dst, a, b } => write!(f, "{dst} = {} {a} {b}", op.name()),
            Inst::Integer { op, dst, a, b } => write!(f, "{dst} = {} {a} {b}", op.name()),
            Inst::MulAdd { dst, a, b, c } => write!(f, "{dst} = mul_add {a} {b} {c}"),
            Inst::MulMulAdd { dst, a, b, c, d } => write!(f, "{dst} = mul_mul_add {a} {b} {c} {d}"),
            Inst::SubMulMulAdd { dst, a, b, c, d, e } => write!(f, "{dst} = sub_mul_mul_add {a} {b} {c} {d} {e}"),
            Inst::ExpSub { dst, a, b } => write!(f, "{dst} = exp_sub {a} {b}"),
            Inst::Compare { op, dst, a, b, .. } => write!(f, "{dst} = {} {a} {b}", op.name()),
            Inst::Select { dst, cond, a, b } => write!(f, "{dst} = select {cond} {a} {b}"),
            Inst::ColumnIndex { dst } => write!(f, "{dst} = column"),
            Inst::RowIndex { dst, axis } => write!(f, "{dst} = coordinate {axis}"),
            Inst::Keep { dst, seed, offset, threshold } => {
                write!(f, "{dst} = keep seed {seed} offset {offset} at {threshold:#x}")
            }
            Inst::Reduce { op: TileReduce::Dot, into, a, b } => write!(f, "s{into} = dot {a} {b}"),
            Inst::Reduce { op: TileReduce::Deviation, into, a, b } => write!(f, "s{into} = deviation {a} {b}"),
            Inst::Reduce { op, into, a, .. } => write!(f, "s{into} = {} {a}", reduce_name(*op)),
            Inst::ColumnAdd { partial, a } => write!(f, "partial {partial} += {a}"),
            Inst::Store { arg, a } => write!(f, "a{arg} = {a}"),
        }
    }
}

fn unary_name(op: TileUnary) -> &'static str {
    match op {
        TileUnary::Primitive(op) => op.name(),
        TileUnary::GeluTanh => "gelu_tanh",
        TileUnary::GeluErf => "gelu_erf",
        TileUnary::Silu => "silu",
        TileUnary::IntToFloat => "float",
        TileUnary::FloatToInt => "int",
        TileUnary::RoundF16 => "round_f16",
        TileUnary::RoundBf16 => "round_bf16",
    }
}

fn reduce_name(op: TileReduce) -> &'static str {
    match op {
        TileReduce::Sum => "sum",
        TileReduce::Dot => "dot",
        TileReduce::Deviation => "deviation",
        TileReduce::Max => "max",
        TileReduce::AbsMax => "absmax",
        TileReduce::ArgMax => "argmax",
    }
}
