//! Lowers instructions of a tile program to operations on lanes.

use std::collections::HashMap;

use deuteron_graph::Dtype;

use super::values::{Code, Op, Recorder256, Recorder512, Value};
use super::vectors::Target;
use crate::cpu::program::{Dst, Inst, LANES, Src, TileProgram, TileReduce};
use crate::cpu::simd::format::{BrainFloat, ByteFormat, EightBitFloat, HalfFloat, HalfFormat, SignedByte, Truth};
use crate::cpu::simd::lanes::Arithmetic;
use crate::cpu::simd::philox::block_words;
use crate::cpu::simd::{Function, Step, StepVisitor, Visitor, destination, tree, visit, with_step};

/// The strip work of a pass as operations on lanes.
#[derive(Debug, Default)]
pub struct Strip {
    /// The operations on one vector of columns.
    pub ops: Vec<Op>,
    pub reductions: Vec<Reduction>,
    /// The generation of each set of random numbers, a group of `4 * WIDTH` at a time.
    pub keeps: Vec<Vec<Op>>,
}

/// A reduction of a pass.
#[derive(Debug)]
pub struct Reduction {
    /// The initial value of each lane.
    pub start: f32,
    /// Combines all lanes into one, stored in its scalar.
    pub tree: Vec<Op>,
}

impl Strip {
    /// Of the strip work `insts`.
    pub fn of(target: Target, program: &TileProgram, insts: &[Inst]) -> Strip {
        let mut reductions = Vec::new();
        let ops = record(target, program, |lowering| reductions = lowering.strip(insts));
        let tree = |(number, &(op, into)): (usize, &(TileReduce, u16))| Reduction {
            start: with_step(op, Start),
            tree: record(target, program, |lowering| lowering.tree(number as u16, op, into)),
        };
        let keeps = insts.iter().filter_map(|inst| match *inst {
            Inst::Keep { seed, offset, threshold, .. } => {
                Some(record(target, program, |lowering| lowering.dropped(seed, offset, threshold)))
            }
            _ => None,
        });
        Strip { keeps: keeps.collect(), reductions: reductions.iter().enumerate().map(tree).collect(), ops }
    }

    /// Operations per vector, about: random words are made once for four.
    pub fn work(&self) -> usize {
        self.ops.len() + self.keeps.iter().map(|ops| ops.len() / 4).sum::<usize>()
    }
}

/// The operations that `write` records for a target.
pub fn record(target: Target, program: &TileProgram, write: impl FnOnce(&dyn Notes)) -> Vec<Op> {
    let code = Code::new(target == Target::Avx512 { picks_bytes: true });
    match target {
        Target::Avx512 { .. } => write(&Lowering { simd: Recorder512(&code), code: &code, program }),
        Target::Avx2 => write(&Lowering { simd: Recorder256(&code), code: &code, program }),
    }
    code.finish(target.is_avx512())
}

/// Records instructions with one of the recorders.
struct Lowering<'a, S> {
    simd: S,
    code: &'a Code,
    program: &'a TileProgram,
}

/// Locations of values while a pass is recorded.
#[derive(Default)]
struct Known {
    tiles: HashMap<u16, Value>,
    kept: HashMap<u16, Value>,
    arguments: HashMap<u16, Value>,
}

/// Recording, for either recorder.
pub trait Notes {
    fn strip(&self, insts: &[Inst]) -> Vec<(TileReduce, u16)>;
    /// Row work that computes scalars of all rows in flight.
    fn scalars(&self, insts: &[Inst]);
    /// One element of an argument to a scalar of its row.
    fn load_one(&self, arg: u16, scalar: u16);
    /// The scalar of a row to one element of an argument.
    fn store_one(&self, arg: u16, from: Src);
    fn tree(&self, number: u16, op: TileReduce, into: u16);
    fn dropped(&self, seed: Src, offset: u32, threshold: u32);
}

impl<S> Notes for Lowering<'_, S>
where
    S: Arithmetic<Float = Value, Int = Value, Mask = Value, Half = Value, Byte = Value>,
{
    /// Records the strip work of a pass; returns its reductions and their destinations.
    fn strip(&self, insts: &[Inst]) -> Vec<(TileReduce, u16)> {
        let mut known = Known::default();
        let mut reductions = Vec::new();
        let mut keeps = 0;
        for &inst in insts {
            match inst {
                Inst::Reduce { op, into, a, b } => {
                    let number = reductions.len() as u16;
                    reductions.push((op, into));
                    let (a, b) = (self.source(&mut known, a), self.source(&mut known, b));
                    let lanes = self.code.push(Op::Gathered(number));
                    let next = with_step(op, Take { simd: self.simd, lanes, a, b });
                    self.code.push(Op::Gather(number, next));
                }
                Inst::ColumnAdd { partial, a } => {
                    let before = &self.program.partials[..usize::from(partial)];
                    let at = before.iter().map(|partial| partial.width as u32).sum();
                    let a = self.source(&mut known, a);
                    let sum = self.simd.add(self.code.push(Op::Partial(at)), a);
                    self.code.push(Op::AddColumn(at, sum));
                }
                Inst::Store { arg, a } => {
                    let lanes = self.source(&mut known, a);
                    self.store(arg, lanes);
                    // The argument may be the memory of another one.
                    known.arguments.clear();
                }
                inst => {
                    let result = match inst {
                        Inst::Load { arg, .. } => self.load(arg),
                        Inst::ColumnIndex { .. } => self.simd.add_int(self.simd.count_up(), self.code.push(Op::Column)),
                        Inst::Keep { .. } => {
                            keeps += 1;
                            self.code.push(Op::Keep(keeps - 1))
                        }
                        inst => self.computed(inst, |source| self.source(&mut known, source)),
                    };
                    match destination(inst) {
                        Some(Dst::Tile(tile)) => drop(known.tiles.insert(tile, result)),
                        Some(Dst::Kept(row)) => {
                            known.kept.insert(row, result);
                            self.code.push(Op::Keeping(row, result));
                        }
                        Some(Dst::Scalar(_)) | None => unreachable!("strips make lanes, got {inst:?}"),
                    }
                }
            }
        }
        reductions
    }

    fn scalars(&self, insts: &[Inst]) {
        let mut known: HashMap<u16, Value> = HashMap::new();
        for &inst in insts {
            let result = self.computed(inst, |source| match source {
                Src::Scalar(scalar) => *known.entry(scalar).or_insert_with(|| self.code.push(Op::Lanes(scalar))),
                source => self.source(&mut Known::default(), source),
            });
            let Some(Dst::Scalar(scalar)) = destination(inst) else {
                unreachable!("row work makes scalars, got {inst:?}")
            };
            known.insert(scalar, result);
            self.code.push(Op::SetLanes(scalar, result));
        }
    }

    fn load_one(&self, arg: u16, scalar: u16) {
        let lanes = self.load(arg);
        self.code.push(Op::SetScalar(scalar, lanes));
    }

    fn store_one(&self, arg: u16, from: Src) {
        let lanes = self.source(&mut Known::default(), from);
        self.store(arg, lanes);
    }

    /// The lanes of a reduction to one: whole vectors first, then the lanes of one.
    fn tree(&self, number: u16, op: TileReduce, into: u16) {
        let vectors = LANES / S::WIDTH;
        let sums = (0..vectors as u8).map(|vector| self.code.push(Op::GatheredFrom(number, vector))).collect();
        let result = with_step(op, Tree { simd: self.simd, sums });
        self.code.push(Op::SetScalar(into, result));
    }

    /// Which elements of a group of `4 * WIDTH` random words are dropped.
    fn dropped(&self, seed: Src, offset: u32, threshold: u32) {
        let simd = self.simd;
        let seed = self.source(&mut Known::default(), seed);
        let (low, high) = (self.code.push(Op::Block(0)), self.code.push(Op::Block(1)));
        let lows = simd.add_int(low, simd.count_up());
        // Where the low half has wrapped around, the high one is one more.
        let wrapped = simd.less_unsigned(lows, low);
        let highs = simd.select_int(wrapped, simd.add_int(high, simd.splat_int(1)), high);
        let words = block_words(simd, [seed, simd.splat_int(offset as i32)], [lows, highs]);
        let threshold = simd.splat_int(threshold as i32);
        for (word, lanes) in words.into_iter().enumerate() {
            let below = simd.less_unsigned(lanes, threshold);
            self.code.push(Op::Dropped(word as u8, below));
        }
    }
}

impl<S> Lowering<'_, S>
where
    S: Arithmetic<Float = Value, Int = Value, Mask = Value, Half = Value, Byte = Value>,
{
    /// An instruction that computes lanes from lanes.
    fn computed(&self, inst: Inst, source: impl FnMut(Src) -> Value) -> Value {
        visit(inst, Apply { simd: self.simd, source })
            .unwrap_or_else(|| unreachable!("moves are not computed, got {inst:?}"))
    }

    fn source(&self, known: &mut Known, source: Src) -> Value {
        match source {
            Src::Tile(tile) => known.tiles[&tile],
            Src::Kept(row) => *known.kept.entry(row).or_insert_with(|| self.code.push(Op::Kept(row))),
            Src::Arg(arg) => *known.arguments.entry(arg).or_insert_with(|| self.code.push(Op::Load(arg))),
            Src::Scalar(scalar) => self.code.push(Op::Scalar(scalar)),
            Src::Const(value) => self.simd.splat(value),
            Src::ConstInt(value) => self.simd.splat_int(value),
        }
    }

    fn dtype(&self, arg: u16) -> Dtype {
        self.program.args[usize::from(arg)].dtype
    }

    /// Elements of an argument as lanes.
    fn load(&self, arg: u16) -> Value {
        let elements = self.code.push(Op::Load(arg));
        match self.dtype(arg) {
            Dtype::F32 | Dtype::I32 => elements,
            Dtype::F16 => HalfFloat::widen(self.simd, elements),
            Dtype::Bf16 => BrainFloat::widen(self.simd, elements),
            Dtype::I8 => SignedByte::widen(self.simd, elements),
            Dtype::Bool => Truth::widen(self.simd, elements),
            Dtype::F8e4m3 => EightBitFloat::widen(self.simd, elements),
        }
    }

    /// Lanes to elements of an argument.
    fn store(&self, arg: u16, lanes: Value) {
        let elements = match self.dtype(arg) {
            Dtype::F32 | Dtype::I32 => lanes,
            Dtype::F16 => HalfFloat::narrow(self.simd, lanes),
            Dtype::Bf16 => BrainFloat::narrow(self.simd, lanes),
            Dtype::I8 => SignedByte::narrow(self.simd, lanes),
            Dtype::Bool => Truth::narrow(self.simd, lanes),
            Dtype::F8e4m3 => EightBitFloat::narrow(self.simd, lanes),
        };
        self.code.push(Op::Store(arg, elements));
    }
}

struct Apply<S, F> {
    simd: S,
    source: F,
}

impl<S: Arithmetic<Float = Value>, R: FnMut(Src) -> Value> Visitor for Apply<S, R> {
    type Output = Value;

    fn visit<F: Function<N>, const N: usize>(mut self, function: F, operands: [Src; N]) -> Value {
        function.apply(self.simd, operands.map(&mut self.source))
    }
}

/// One step of a reduction.
struct Take<S> {
    simd: S,
    lanes: Value,
    a: Value,
    b: Value,
}

impl<S: Arithmetic<Float = Value>> StepVisitor for Take<S> {
    type Output = Value;

    fn visit<T: Step>(self, step: T) -> Value {
        step.take(self.simd, self.lanes, self.a, self.b)
    }
}

/// The end of a reduction.
struct Tree<S> {
    simd: S,
    sums: Vec<Value>,
}

impl<S: Arithmetic<Float = Value>> StepVisitor for Tree<S> {
    type Output = Value;

    fn visit<T: Step>(mut self, step: T) -> Value {
        tree(self.simd, step, &mut self.sums)
    }
}

/// The initial lanes of a reduction.
struct Start;

impl StepVisitor for Start {
    type Output = f32;

    fn visit<T: Step>(self, _: T) -> f32 {
        T::START
    }
}
