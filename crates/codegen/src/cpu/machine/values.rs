//! Straight-line code on lanes: the operations on one vector of columns, in static single assignment.
//!
//! The mathematics is not defined here. [`Recorder512`] and [`Recorder256`] implement the same interface as executing instruction sets
//! ([`Arithmetic`]), but record each operation instead of executing it.

use std::cell::RefCell;

use crate::cpu::simd::lanes::Arithmetic;

/// A value: the position of its operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value(pub u32);

impl Value {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Two operands to one result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Two {
    Add,
    Sub,
    Mul,
    Div,
    /// `a` where it is the smaller one, else `b`
    Lesser,
    Greater,
    /// The larger one of integers.
    GreaterInt,
    /// `a * 2^floor(b)`
    Scale,
    AddInt,
    SubInt,
    And,
    Or,
    Xor,
    /// 64-bit products of the even lanes
    MulEven,
    /// Even lanes of the first, odd lanes of the second.
    EvenOdd,
    /// The bytes of `b` whose numbers are the bytes of `a`, one of [`Bytes`]; only with AVX-512 and VBMI.
    PickBytes,
}

/// Numbers of bytes of a vector of 16 lanes: a conversion between their elements and elements of other sizes in one instruction, where
/// conversions and shifts take two or three.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bytes {
    /// 16-bit elements go to the upper halves of lanes. The lower halves are bytes of the vector's upper half, which are 0.
    ToUpperHalves,
    UpperHalves,
    LowerHalves,
    Lowest,
}

impl Bytes {
    pub fn numbers(self) -> [u8; 64] {
        let mut numbers = [0; 64];
        for lane in 0..16 {
            match self {
                Bytes::ToUpperHalves => {
                    numbers[4 * lane..][..4].copy_from_slice(&[63, 63, 2 * lane as u8, 2 * lane as u8 + 1])
                }
                Bytes::UpperHalves => {
                    numbers[2 * lane..][..2].copy_from_slice(&[4 * lane as u8 + 2, 4 * lane as u8 + 3])
                }
                Bytes::LowerHalves => numbers[2 * lane..][..2].copy_from_slice(&[4 * lane as u8, 4 * lane as u8 + 1]),
                Bytes::Lowest => numbers[lane] = 4 * lane as u8,
            }
        }
        numbers
    }
}

impl Two {
    pub fn commutes(self) -> bool {
        matches!(
            self,
            Two::Add | Two::GreaterInt | Two::Mul | Two::AddInt | Two::And | Two::Or | Two::Xor | Two::MulEven
        )
    }

    /// Whether its instruction of AVX-512 may leave lanes as they are.
    fn has_mask(self) -> bool {
        !matches!(self, Two::MulEven | Two::EvenOdd | Two::Div | Two::PickBytes)
    }
}

/// One operand to one result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum One {
    Sqrt,
    Round,
    Floor,
    /// What is above `floor`.
    Fraction,
    /// An estimate of the reciprocal, to 14 bits.
    Estimate,
    ToInt,
    ToFloat,
    ShiftLeft(u8),
    ShiftRight(u8),
    ShiftRightSigned(u8),
    /// Each odd lane goes to the even one before it; the odd lanes are anything.
    OddToEven,
    /// Each even lane goes to the odd one behind it; the even lanes are anything.
    EvenToOdd,
    /// Lane `i + half` to lane `i`.
    Upper(u8),
    ZeroExtend,
    SignExtend,
    Truncate,
    TruncateByte,
    WidenHalf,
    NarrowHalf,
}

/// Three operands to one result, bit by bit; only with AVX-512.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Three {
    /// `a ^ b ^ c`
    Xor,
    /// `a | b & c`
    OrAnd,
}

/// A comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    Less,
    /// Also where one is a NaN; only with AVX-512.
    NotLess,
    LessOrEqual,
    Equal,
    LessInt,
    /// only with AVX-512
    LessUnsigned,
    EqualInt,
}

/// An operation. Effects are operations without a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// The bits of all lanes.
    Const(u32),
    /// 0, 1, 2, ...
    CountUp,
    /// Numbers of bytes.
    Bytes(Bytes),
    /// A scalar of the row, in all lanes.
    Scalar(u16),
    /// A scalar of all rows in flight, a lane each.
    Lanes(u16),
    /// Elements of an argument as they are stored.
    Load(u16),
    /// Lanes of a kept row.
    Kept(u16),
    /// Lanes of a column sum, whose elements start this many behind the first sum's.
    Partial(u32),
    /// The first column of the vector, in all lanes.
    Column,
    /// Whether random numbers keep an element, as 1 or 0.
    Keep(u16),
    /// The same as a truth value; only with AVX-512.
    IsKept(u16),
    /// The low (0) or high (1) half of the number of a block of random words, in all lanes.
    Block(u8),
    /// The lanes that a reduction gathers from this vector.
    Gathered(u16),
    /// The lanes that it gathers from the vector of this number.
    GatheredFrom(u16, u8),
    Two(Two, Value, Value),
    One(One, Value),
    /// `a * b + c`
    MulAdd(Value, Value, Value),
    /// `c - a * b`
    NegMulAdd(Value, Value, Value),
    /// A truth value for each lane.
    Compare(Question, Value, Value),
    /// `mask ? yes : no`
    Select(Value, Value, Value),
    /// `mask ? a . b : no` in one instruction: mask, a, b, no.
    SelectTwo(Two, [Value; 4]),
    /// The first, but where the second is a NaN, that one, quiet.
    KeepNan(Value, Value),
    Three(Three, Value, Value, Value),
    /// Effect: elements of an argument, as they are stored.
    Store(u16, Value),
    /// Effect: lanes of a kept row.
    Keeping(u16, Value),
    /// Effect: lanes of a column sum.
    AddColumn(u32, Value),
    /// Effect: the lanes that a reduction gathers.
    Gather(u16, Value),
    /// Effect: a scalar of all rows in flight.
    SetLanes(u16, Value),
    /// Effect: lane 0 is a scalar of this row.
    SetScalar(u16, Value),
    /// Effect: a truth value for one word of each block of random words.
    Dropped(u8, Value),
}

impl Op {
    /// What it reads.
    pub fn operands(self) -> impl Iterator<Item = Value> {
        let operands = match self {
            Op::SelectTwo(_, all) => all.map(Some),
            Op::Two(_, a, b) | Op::Compare(_, a, b) | Op::KeepNan(a, b) => [Some(a), Some(b), None, None],
            Op::MulAdd(a, b, c) | Op::NegMulAdd(a, b, c) | Op::Select(a, b, c) | Op::Three(_, a, b, c) => {
                [Some(a), Some(b), Some(c), None]
            }
            Op::One(_, a) => [Some(a), None, None, None],
            Op::Store(_, a) | Op::Keeping(_, a) | Op::AddColumn(_, a) | Op::Gather(_, a) => [Some(a), None, None, None],
            Op::SetLanes(_, a) | Op::SetScalar(_, a) | Op::Dropped(_, a) => [Some(a), None, None, None],
            _ => [None; 4],
        };
        operands.into_iter().flatten()
    }

    /// Makes no value.
    pub fn is_effect(self) -> bool {
        matches!(
            self,
            Op::Store(..)
                | Op::Keeping(..)
                | Op::AddColumn(..)
                | Op::Gather(..)
                | Op::SetLanes(..)
                | Op::SetScalar(..)
                | Op::Dropped(..)
        )
    }

    /// Can be recomputed at any time without a register.
    pub fn is_leaf(self) -> bool {
        matches!(self, Op::Const(_) | Op::CountUp | Op::Bytes(_) | Op::Scalar(_))
    }

    /// Makes truth values, of which there are few registers.
    pub fn is_question(self) -> bool {
        matches!(self, Op::Compare(..) | Op::IsKept(_))
    }

    fn touches_memory(self) -> bool {
        self.is_effect() || matches!(self, Op::Load(_) | Op::Kept(_) | Op::Partial(_) | Op::Gathered(_) | Op::Lanes(_))
    }
}

/// Operations in order.
#[derive(Debug)]
pub struct Code {
    ops: RefCell<Vec<Op>>,
    /// Whether [`Two::PickBytes`] may be recorded.
    picks_bytes: bool,
}

impl Code {
    pub fn new(picks_bytes: bool) -> Code {
        Code { ops: RefCell::default(), picks_bytes }
    }

    /// Records an operation; equal operations share a value.
    pub fn push(&self, op: Op) -> Value {
        let mut ops = self.ops.borrow_mut();
        let known = match op.touches_memory() {
            true => None,
            false => ops.iter().position(|&known| known == op),
        };
        Value(known.unwrap_or_else(|| {
            ops.push(op);
            ops.len() - 1
        }) as u32)
    }

    fn op(&self, value: Value) -> Op {
        self.ops.borrow()[value.index()]
    }

    /// The result of an integer operation that constants determine: those of random numbers have many.
    fn folded(&self, what: Two, a: Value, b: Value) -> Option<Value> {
        match (what, self.op(a), self.op(b)) {
            (Two::AddInt, Op::Const(a), Op::Const(b)) => Some(self.push(Op::Const(a.wrapping_add(b)))),
            (Two::Xor, _, Op::Const(0)) | (Two::MulEven, Op::Const(0), _) => Some(a),
            (Two::Xor, Op::Const(0), _) => Some(b),
            _ => None,
        }
    }

    /// Picks bytes of a value, where the CPU has the instruction.
    fn picked(&self, bytes: Bytes, from: Value) -> Option<Value> {
        self.picks_bytes.then(|| self.push(Op::Two(Two::PickBytes, self.push(Op::Bytes(bytes)), from)))
    }

    /// The recorded operations, without unused values; with `merges`, some as one instruction that only AVX-512 has.
    pub fn finish(self, merges: bool) -> Vec<Op> {
        let mut ops = self.ops.into_inner();
        if merges {
            merge(&mut ops);
        }
        let mut is_read = vec![false; ops.len()];
        for (at, op) in ops.iter().enumerate().rev() {
            if op.is_effect() || is_read[at] {
                op.operands().for_each(|operand| is_read[operand.index()] = true);
            }
        }
        let mut renamed = vec![Value(0); ops.len()];
        let mut kept = Vec::with_capacity(ops.len());
        for (at, op) in ops.into_iter().enumerate() {
            if op.is_effect() || is_read[at] {
                renamed[at] = Value(kept.len() as u32);
                kept.push(rename(op, &renamed));
            }
        }
        kept
    }
}

/// Replaces pairs of operations by one, where nothing else reads the first of them.
fn merge(ops: &mut [Op]) {
    let mut readers = vec![0; ops.len()];
    ops.iter().flat_map(|op| op.operands()).for_each(|operand| readers[operand.index()] += 1);
    for at in 0..ops.len() {
        if let Op::Select(mask, yes, no) = ops[at]
            && readers[mask.index()] == 1
        {
            let is_zero = |value: Value| ops[value.index()] == Op::Const(0);
            // Selections of 0 where the question is denied: an instruction with a mask makes zeros.
            let denied = match ops[mask.index()] {
                Op::Compare(Question::Equal, kept, zero) if is_zero(zero) => match ops[kept.index()] {
                    Op::Keep(keep) => Some(Op::IsKept(keep)),
                    _ => None,
                },
                Op::Compare(Question::Less, a, b) if is_zero(yes) => Some(Op::Compare(Question::NotLess, a, b)),
                _ => None,
            };
            if let Some(denied) = denied {
                ops[mask.index()] = denied;
                ops[at] = Op::Select(mask, no, yes);
            }
        }
        let only = |value: Value| (readers[value.index()] == 1).then_some(ops[value.index()]);
        let merged = match ops[at] {
            Op::Select(mask, yes, no) => match only(yes) {
                Some(Op::Two(what, a, b)) if what.has_mask() => Some(Op::SelectTwo(what, [mask, a, b, no])),
                _ => None,
            },
            Op::Two(Two::Xor, a, b) => match (only(a), only(b)) {
                (Some(Op::Two(Two::Xor, c, d)), _) => Some(Op::Three(Three::Xor, b, c, d)),
                (_, Some(Op::Two(Two::Xor, c, d))) => Some(Op::Three(Three::Xor, a, c, d)),
                _ => None,
            },
            Op::Two(Two::Or, a, b) => match (only(a), only(b)) {
                (Some(Op::Two(Two::And, c, d)), _) => Some(Op::Three(Three::OrAnd, b, c, d)),
                (_, Some(Op::Two(Two::And, c, d))) => Some(Op::Three(Three::OrAnd, a, c, d)),
                _ => None,
            },
            _ => None,
        };
        ops[at] = merged.unwrap_or(ops[at]);
    }
}

pub fn rename(op: Op, to: &[Value]) -> Op {
    let to = |value: Value| to[value.index()];
    match op {
        Op::Two(what, a, b) => Op::Two(what, to(a), to(b)),
        Op::One(what, a) => Op::One(what, to(a)),
        Op::MulAdd(a, b, c) => Op::MulAdd(to(a), to(b), to(c)),
        Op::NegMulAdd(a, b, c) => Op::NegMulAdd(to(a), to(b), to(c)),
        Op::Compare(what, a, b) => Op::Compare(what, to(a), to(b)),
        Op::Select(mask, a, b) => Op::Select(to(mask), to(a), to(b)),
        Op::SelectTwo(what, all) => Op::SelectTwo(what, all.map(to)),
        Op::KeepNan(a, b) => Op::KeepNan(to(a), to(b)),
        Op::Three(what, a, b, c) => Op::Three(what, to(a), to(b), to(c)),
        Op::Store(arg, a) => Op::Store(arg, to(a)),
        Op::Keeping(row, a) => Op::Keeping(row, to(a)),
        Op::AddColumn(at, a) => Op::AddColumn(at, to(a)),
        Op::Gather(into, a) => Op::Gather(into, to(a)),
        Op::SetLanes(scalar, a) => Op::SetLanes(scalar, to(a)),
        Op::SetScalar(scalar, a) => Op::SetScalar(scalar, to(a)),
        Op::Dropped(word, a) => Op::Dropped(word, to(a)),
        leaf => leaf,
    }
}

/// Recorder for AVX-512.
#[derive(Debug, Clone, Copy)]
pub struct Recorder512<'a>(pub &'a Code);

/// Recorder for AVX2.
#[derive(Debug, Clone, Copy)]
pub struct Recorder256<'a>(pub &'a Code);

/// What both instruction sets do in the same way; then what the first one has instructions for.
macro_rules! recorder {
    ($recorder:ident, $width:literal, { $($more:tt)* }) => {
        impl $recorder<'_> {
            fn one(self, what: One, a: Value) -> Value {
                match (what, self.0.op(a)) {
                    (One::OddToEven | One::EvenToOdd, Op::Const(_)) => a,
                    _ => self.0.push(Op::One(what, a)),
                }
            }

            fn two(self, what: Two, a: Value, b: Value) -> Value {
                let known = self.0.folded(what, a, b);
                known.unwrap_or_else(|| self.0.push(Op::Two(what, a, b)))
            }

            fn compare(self, what: Question, a: Value, b: Value) -> Value {
                self.0.push(Op::Compare(what, a, b))
            }
        }

        impl Arithmetic for $recorder<'_> {
            const WIDTH: usize = $width;
            type Float = Value;
            type Int = Value;
            type Mask = Value;
            type Half = Value;
            type Byte = Value;

            fn splat(self, x: f32) -> Value { self.0.push(Op::Const(x.to_bits())) }
            fn add(self, a: Value, b: Value) -> Value { self.two(Two::Add, a, b) }
            fn sub(self, a: Value, b: Value) -> Value { self.two(Two::Sub, a, b) }
            fn mul(self, a: Value, b: Value) -> Value { self.two(Two::Mul, a, b) }
            fn div(self, a: Value, b: Value) -> Value { self.two(Two::Div, a, b) }
            fn sqrt(self, a: Value) -> Value { self.one(One::Sqrt, a) }
            fn mul_add(self, a: Value, b: Value, c: Value) -> Value { self.0.push(Op::MulAdd(a, b, c)) }
            fn neg_mul_add(self, a: Value, b: Value, c: Value) -> Value { self.0.push(Op::NegMulAdd(a, b, c)) }
            fn lesser(self, a: Value, b: Value) -> Value { self.two(Two::Lesser, a, b) }
            fn greater(self, a: Value, b: Value) -> Value { self.two(Two::Greater, a, b) }
            fn round(self, a: Value) -> Value { self.one(One::Round, a) }
            fn floor(self, a: Value) -> Value { self.one(One::Floor, a) }
            fn less(self, a: Value, b: Value) -> Value { self.compare(Question::Less, a, b) }
            fn less_or_equal(self, a: Value, b: Value) -> Value { self.compare(Question::LessOrEqual, a, b) }
            fn equal(self, a: Value, b: Value) -> Value { self.compare(Question::Equal, a, b) }
            fn select(self, mask: Value, yes: Value, no: Value) -> Value { self.0.push(Op::Select(mask, yes, no)) }
            fn upper(self, a: Value, half: usize) -> Value { self.one(One::Upper(half as u8), a) }
            fn splat_int(self, x: i32) -> Value { self.0.push(Op::Const(x as u32)) }
            fn count_up(self) -> Value { self.0.push(Op::CountUp) }
            fn bits(self, a: Value) -> Value { a }
            fn reinterpret(self, a: Value) -> Value { a }
            fn add_int(self, a: Value, b: Value) -> Value { self.two(Two::AddInt, a, b) }
            fn sub_int(self, a: Value, b: Value) -> Value { self.two(Two::SubInt, a, b) }
            fn and(self, a: Value, b: Value) -> Value { self.two(Two::And, a, b) }
            fn or(self, a: Value, b: Value) -> Value { self.two(Two::Or, a, b) }
            fn xor(self, a: Value, b: Value) -> Value { self.two(Two::Xor, a, b) }
            fn shift_left<const N: u32>(self, a: Value) -> Value {
                let picked = match self.0.op(a) {
                    Op::One(One::ZeroExtend, elements) if N == 16 => self.0.picked(Bytes::ToUpperHalves, elements),
                    _ => None,
                };
                picked.unwrap_or_else(|| self.one(One::ShiftLeft(N as u8), a))
            }
            fn shift_right<const N: u32>(self, a: Value) -> Value { self.one(One::ShiftRight(N as u8), a) }
            fn shift_right_signed<const N: u32>(self, a: Value) -> Value { self.one(One::ShiftRightSigned(N as u8), a) }
            fn less_int(self, a: Value, b: Value) -> Value { self.compare(Question::LessInt, a, b) }
            fn equal_int(self, a: Value, b: Value) -> Value { self.compare(Question::EqualInt, a, b) }
            fn mul_even(self, a: Value, b: Value) -> Value { self.two(Two::MulEven, a, b) }
            fn odd_to_even(self, a: Value) -> Value { self.one(One::OddToEven, a) }
            fn alternate(self, even: Value, odd: Value) -> Value {
                self.two(Two::EvenOdd, even, self.one(One::EvenToOdd, odd))
            }
            fn to_int(self, a: Value) -> Value { self.one(One::ToInt, a) }
            fn to_float(self, a: Value) -> Value { self.one(One::ToFloat, a) }
            fn zero_extend(self, a: Value) -> Value { self.one(One::ZeroExtend, a) }
            fn truncate(self, a: Value) -> Value {
                let picked = match self.0.op(a) {
                    Op::One(One::ShiftRight(16), lanes) => self.0.picked(Bytes::UpperHalves, lanes),
                    _ => self.0.picked(Bytes::LowerHalves, a),
                };
                picked.unwrap_or_else(|| self.one(One::Truncate, a))
            }
            fn sign_extend(self, a: Value) -> Value { self.one(One::SignExtend, a) }
            fn truncate_to_byte(self, a: Value) -> Value {
                self.0.picked(Bytes::Lowest, a).unwrap_or_else(|| self.one(One::TruncateByte, a))
            }
            fn max_of_sizes(self, a: Value, b: Value) -> Value { self.two(Two::GreaterInt, a, b) }
            fn widen_f16(self, a: Value) -> Value { self.one(One::WidenHalf, a) }
            fn narrow_f16(self, a: Value) -> Value { self.one(One::NarrowHalf, a) }
            $($more)*
        }
    };
}

recorder!(Recorder256, 8, {});
recorder!(Recorder512, 16, {
    fn reciprocal_from_one(self, d: Value) -> Value {
        let estimate = self.one(One::Estimate, d);
        let error = self.neg_mul_add(d, estimate, self.splat(1.0));
        let number = self.greater(error, self.splat(-1.0));
        self.mul_add(number, estimate, estimate)
    }
    fn scale(self, p: Value, n: Value) -> Value {
        self.two(Two::Scale, p, n)
    }
    fn fraction(self, y: Value) -> Value {
        self.one(One::Fraction, y)
    }
    fn scale_by_floor(self, p: Value, y: Value) -> Value {
        self.two(Two::Scale, p, y)
    }
    fn clamp_exponent(self, y: Value) -> Value {
        self.greater(self.splat(-126.0), y)
    }
    fn less_unsigned(self, a: Value, b: Value) -> Value {
        self.compare(Question::LessUnsigned, a, b)
    }
    fn or_quiet_nan(self, bits: Value, a: Value) -> Value {
        self.0.push(Op::KeepNan(bits, a))
    }
});
