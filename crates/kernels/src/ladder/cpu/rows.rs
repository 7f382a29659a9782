//! Row work by scalar loops: an instruction of a tile program is a loop over a strip, one element at a time, on the calling thread.
//!
//! Functions are those of the standard library. Column sums, gathered rows, random numbers and a few instructions that no ladder has are not
//! covered. The number of each element passes through [`black_box`], so that the compiler makes no vectors of the loops.

use std::hint::black_box;
use std::sync::Arc;

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::body::IntegerOp;
use deuteron_codegen::cpu::emit::emit;
use deuteron_codegen::cpu::family::assemble;
use deuteron_codegen::cpu::program::{Access, Dst, Inst, LaneKind, STRIP, Src, TileProgram, TileReduce, TileUnary};
use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::task::{CpuLaunch, CpuSource, CpuTask, Run, ScratchSizes, TaskError};
use deuteron_codegen::kernel::Kernel;
use deuteron_codegen::lower::{LoweredRows, RowLaunch};
use deuteron_graph::{BinaryOp, CompareOp, UnaryOp, memory};
use half::{bf16, f16};

use super::elements::{Element, Elements};

/// The kernel of row work, if all of it is covered.
pub(super) fn kernel(lowered: LoweredRows) -> Option<Kernel> {
    let program = emit(&lowered.body);
    if !is_covered(&program) {
        return None;
    }
    let arguments = lowered.arguments_in_place(&[]);
    let text = format!("one element at a time, without vectors:\n{program}");
    let source = CpuSource::described(Scalar(program.clone()), text);
    let launch = RowTasks { program: Arc::new(program), launch: lowered.launch };
    // SAFETY: the program has the accesses of the body that the arguments' reach was taken of, and runs over the same rows and columns.
    Some(unsafe { assemble(source, arguments, launch) })
}

/// A program that runs without vectors: another kernel than the program itself.
#[derive(Debug, PartialEq)]
struct Scalar(TileProgram);

fn is_covered(program: &TileProgram) -> bool {
    let taken = |access: Access| matches!(access, Access::Row | Access::PerRow);
    let args = program.args.iter().all(|spec| taken(spec.access) && Elements::takes(spec.dtype));
    let insts = program.passes.iter().flat_map(|pass| pass.row.iter().chain(&pass.strip));
    args && program.partials.is_empty() && insts.into_iter().all(|&inst| is_inst_covered(inst))
}

fn is_inst_covered(inst: Inst) -> bool {
    match inst {
        Inst::Unary { op, .. } => {
            !matches!(op, TileUnary::Primitive(UnaryOp::Erf) | TileUnary::GeluErf | TileUnary::FloatToInt)
        }
        Inst::Reduce { op, .. } => op != TileReduce::ArgMax,
        Inst::Keep { .. } | Inst::ColumnAdd { .. } => false,
        Inst::Load { .. } | Inst::Binary { .. } | Inst::Integer { .. } | Inst::MulAdd { .. } => true,
        Inst::MulMulAdd { .. } | Inst::SubMulMulAdd { .. } | Inst::ExpSub { .. } | Inst::Compare { .. } => true,
        Inst::Select { .. } | Inst::ColumnIndex { .. } | Inst::RowIndex { .. } | Inst::Store { .. } => true,
    }
}

#[derive(Debug)]
struct RowTasks {
    program: Arc<TileProgram>,
    launch: RowLaunch,
}

impl CpuLaunch for RowTasks {
    fn prepare(&self, _: usize, _: Isa) -> Box<dyn CpuTask> {
        let RowLaunch { args, rows, cols, axes } = self.launch.clone();
        let program = self.program.clone();
        // A flat program takes all elements as one row.
        let (rows, cols) = if program.flat { (1, rows * cols) } else { (rows, cols) };
        Box::new(RowTask {
            tiles: memory::zeros(usize::from(program.tiles) * STRIP),
            kept: memory::zeros(usize::from(program.kept) * cols),
            scalars: memory::zeros(usize::from(program.scalars)),
            program,
            args,
            rows,
            cols,
            axes,
        })
    }
}

struct RowTask {
    program: Arc<TileProgram>,
    args: Vec<ArgBinding>,
    rows: usize,
    cols: usize,
    axes: Vec<(usize, usize)>,
    /// Values of a strip, of a whole row, of one row.
    tiles: Vec<f32>,
    kept: Vec<f32>,
    scalars: Vec<f32>,
}

/// Columns `first .. first + length` of a row, or its scalars.
#[derive(Clone, Copy)]
struct Columns {
    first: usize,
    length: usize,
}

/// The operand of an instruction.
#[derive(Clone, Copy)]
enum Lanes {
    /// an element per column
    Many(*const f32),
    /// one for all
    One(f32),
}

impl Lanes {
    /// # Safety
    /// There is such a column.
    unsafe fn at(self, column: usize) -> f32 {
        match self {
            // SAFETY: the caller's promise.
            Lanes::Many(base) => unsafe { base.add(column).read_unaligned() },
            Lanes::One(value) => value,
        }
    }
}

impl CpuTask for RowTask {
    fn scratch(&self) -> ScratchSizes {
        ScratchSizes::default()
    }

    unsafe fn run(&mut self, run: Run<'_>) -> Result<(), TaskError> {
        let program = self.program.clone();
        for row in 0..self.rows {
            let args: Vec<Elements> =
                (0..self.args.len()).map(|arg| self.row_of(arg, run.addresses[arg], row)).collect();
            for pass in &program.passes {
                for &inst in &pass.row {
                    // SAFETY: the caller's promise for the elements of this row.
                    unsafe { self.inst(inst, &args, row, Columns { first: 0, length: 1 }) };
                }
                for inst in &pass.strip {
                    if let &Inst::Reduce { op, into, .. } = inst {
                        self.scalars[usize::from(into)] = of_nothing(op);
                    }
                }
                for first in (0..self.cols).step_by(STRIP) {
                    let columns = Columns { first, length: STRIP.min(self.cols - first) };
                    for &inst in &pass.strip {
                        // SAFETY: as above.
                        unsafe { self.inst(inst, &args, row, columns) };
                    }
                }
            }
        }
        Ok(())
    }
}

impl RowTask {
    /// Where an argument's row starts.
    fn row_of(&self, arg: usize, address: *mut u8, row: usize) -> Elements {
        let binding = &self.args[arg];
        let (mut offset, mut rest) = (0, row);
        for &(size, stride) in binding.leading.iter().rev() {
            offset += rest % size.max(1) * stride;
            rest /= size.max(1);
        }
        // Rows without elements may lie anywhere: a number until it is used.
        let base = address.wrapping_add(binding.start()).wrapping_add(offset * binding.dtype.bytes());
        Elements { base, dtype: binding.dtype }
    }

    fn source(&self, source: Src, args: &[Elements], first: usize) -> Lanes {
        match source {
            Src::Tile(tile) => Lanes::Many(self.tiles[usize::from(tile) * STRIP..].as_ptr()),
            Src::Kept(kept) => Lanes::Many(self.kept[usize::from(kept) * self.cols + first..].as_ptr()),
            Src::Arg(arg) => Lanes::Many(args[usize::from(arg)].base.cast::<f32>().wrapping_add(first)),
            Src::Scalar(scalar) => Lanes::One(self.scalars[usize::from(scalar)]),
            Src::Const(value) => Lanes::One(value),
            Src::ConstInt(value) => Lanes::One(f32::from_bits(value as u32)),
        }
    }

    fn destination(&mut self, dst: Dst, first: usize) -> *mut f32 {
        match dst {
            Dst::Tile(tile) => self.tiles[usize::from(tile) * STRIP..].as_mut_ptr(),
            Dst::Kept(kept) => self.kept[usize::from(kept) * self.cols + first..].as_mut_ptr(),
            Dst::Scalar(scalar) => &mut self.scalars[usize::from(scalar)],
        }
    }

    /// # Safety
    /// Each argument's elements at these columns can be read, or written if it is written.
    unsafe fn inst(&mut self, inst: Inst, args: &[Elements], row: usize, columns: Columns) {
        let Columns { first, length } = columns;
        let from = |source: Src| self.source(source, args, first);
        // SAFETY: the caller's promise for arguments; tiles, kept rows and scalars are places of the program.
        unsafe {
            match inst {
                Inst::Load { dst, arg } => {
                    let elements = args[usize::from(arg)];
                    each(self.destination(dst, first), length, |c| elements.read(first + c));
                }
                Inst::Store { arg, a } => {
                    let (elements, a) = (args[usize::from(arg)], from(a));
                    for c in 0..length {
                        let c = black_box(c);
                        elements.write(first + c, a.at(c));
                    }
                }
                Inst::Unary { op, dst, a } => {
                    let a = from(a);
                    each(self.destination(dst, first), length, |c| unary(op, a.at(c)));
                }
                Inst::Binary { op, dst, a, b } => {
                    let (a, b) = (from(a), from(b));
                    each(self.destination(dst, first), length, |c| binary(op, a.at(c), b.at(c)));
                }
                Inst::Integer { op, dst, a, b } => {
                    let (a, b) = (from(a), from(b));
                    each(self.destination(dst, first), length, |c| integer(op, a.at(c), b.at(c)));
                }
                Inst::MulAdd { dst, a, b, c } => {
                    let (a, b, d) = (from(a), from(b), from(c));
                    each(self.destination(dst, first), length, |c| a.at(c) * b.at(c) + d.at(c));
                }
                Inst::MulMulAdd { dst, a, b, c, d } => {
                    let [a, b, e, d] = [a, b, c, d].map(from);
                    each(self.destination(dst, first), length, |c| a.at(c) * b.at(c) * e.at(c) + d.at(c));
                }
                Inst::SubMulMulAdd { dst, a, b, c, d, e } => {
                    let [a, b, f, d, e] = [a, b, c, d, e].map(from);
                    let to = self.destination(dst, first);
                    each(to, length, |c| (a.at(c) - b.at(c)) * f.at(c) * d.at(c) + e.at(c));
                }
                Inst::ExpSub { dst, a, b } => {
                    let (a, b) = (from(a), from(b));
                    each(self.destination(dst, first), length, |c| (a.at(c) - b.at(c)).exp());
                }
                Inst::Compare { op, kind, dst, a, b } => {
                    let (a, b) = (from(a), from(b));
                    let to = self.destination(dst, first);
                    each(to, length, |c| f32::from(u8::from(compare(op, kind, a.at(c), b.at(c)))));
                }
                Inst::Select { dst, cond, a, b } => {
                    let [cond, a, b] = [cond, a, b].map(from);
                    let to = self.destination(dst, first);
                    each(to, length, |c| if cond.at(c) != 0.0 { a.at(c) } else { b.at(c) });
                }
                Inst::ColumnIndex { dst } => {
                    each(self.destination(dst, first), length, |c| f32::from_bits((first + c) as u32));
                }
                Inst::RowIndex { dst, axis } => {
                    let (divide, modulo) = self.axes[usize::from(axis)];
                    let index = row / divide % modulo;
                    each(self.destination(dst, first), length, |_| f32::from_bits(index as u32));
                }
                Inst::Reduce { op, into, a, b } => {
                    let (a, b) = (from(a), from(b));
                    let into = &mut self.scalars[usize::from(into)];
                    for c in 0..length {
                        let c = black_box(c);
                        *into = reduced(op, *into, a.at(c), b.at(c));
                    }
                }
                Inst::Keep { .. } | Inst::ColumnAdd { .. } => unreachable!("not covered: {inst:?}"),
            }
        }
    }
}

/// One element after another. The compiler does not know that the numbers follow each other, so it makes no vectors.
///
/// # Safety
/// This many floats can be written.
unsafe fn each(to: *mut f32, length: usize, value: impl Fn(usize) -> f32) {
    for c in 0..length {
        let c = black_box(c);
        // SAFETY: the caller's promise.
        unsafe { to.add(c).write_unaligned(value(c)) };
    }
}

fn unary(op: TileUnary, x: f32) -> f32 {
    match op {
        TileUnary::Primitive(UnaryOp::Neg) => -x,
        TileUnary::Primitive(UnaryOp::Abs) => x.abs(),
        TileUnary::Primitive(UnaryOp::Exp) => x.exp(),
        TileUnary::Primitive(UnaryOp::Log) => x.ln(),
        TileUnary::Primitive(UnaryOp::Sqrt) => x.sqrt(),
        TileUnary::Primitive(UnaryOp::Rsqrt) => 1.0 / x.sqrt(),
        TileUnary::Primitive(UnaryOp::Reciprocal) => 1.0 / x,
        TileUnary::Primitive(UnaryOp::Tanh) => x.tanh(),
        TileUnary::Primitive(UnaryOp::Sigmoid) => sigmoid(x),
        TileUnary::Primitive(UnaryOp::Round) => x.round_ties_even(),
        TileUnary::GeluTanh => x * sigmoid(1.595_769 * (x + 0.044_715 * x * x * x)),
        TileUnary::Silu => x * sigmoid(x),
        TileUnary::IntToFloat => x.to_bits() as i32 as f32,
        TileUnary::RoundF16 => f16::narrow(x).widen(),
        TileUnary::RoundBf16 => bf16::narrow(x).widen(),
        TileUnary::Primitive(UnaryOp::Erf) | TileUnary::GeluErf | TileUnary::FloatToInt => {
            unreachable!("not covered: {op:?}")
        }
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn binary(op: BinaryOp, a: f32, b: f32) -> f32 {
    match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a * b,
        BinaryOp::Div => a / b,
        BinaryOp::Max => {
            if a > b || a.is_nan() {
                a
            } else {
                b
            }
        }
        BinaryOp::Min => {
            if a < b || a.is_nan() {
                a
            } else {
                b
            }
        }
    }
}

fn integer(op: IntegerOp, a: f32, b: f32) -> f32 {
    let (a, b) = (a.to_bits(), b.to_bits());
    f32::from_bits(match op {
        IntegerOp::Add => a.wrapping_add(b),
        IntegerOp::Sub => a.wrapping_sub(b),
        IntegerOp::Mul => a.wrapping_mul(b),
    })
}

fn compare(op: CompareOp, kind: LaneKind, a: f32, b: f32) -> bool {
    match kind {
        LaneKind::Float => ordered(op, &a, &b),
        LaneKind::Int => ordered(op, &(a.to_bits() as i32), &(b.to_bits() as i32)),
    }
}

fn ordered<T: PartialOrd>(op: CompareOp, a: &T, b: &T) -> bool {
    match op {
        CompareOp::Lt => a < b,
        CompareOp::Le => a <= b,
        CompareOp::Eq => a == b,
        CompareOp::Ne => a != b,
        CompareOp::Gt => a > b,
        CompareOp::Ge => a >= b,
    }
}

fn of_nothing(op: TileReduce) -> f32 {
    if op == TileReduce::Max { f32::NEG_INFINITY } else { 0.0 }
}

/// A reduction with one element more.
fn reduced(op: TileReduce, before: f32, a: f32, b: f32) -> f32 {
    let larger = |value: f32| if value > before || value.is_nan() { value } else { before };
    match op {
        TileReduce::Sum => before + a,
        TileReduce::Dot => before + a * b,
        TileReduce::Deviation => before + (a - b) * (a - b),
        TileReduce::Max => larger(a),
        TileReduce::AbsMax => larger(a.abs()),
        TileReduce::ArgMax => unreachable!("not covered: {op:?}"),
    }
}
