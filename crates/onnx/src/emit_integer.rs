//! Integers and truth values in a graph that computes with floats.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, GraphError, NodeId, ReduceOp, Shape, UnaryOp};

use crate::element::Element;
use crate::emit::{Emitter, unsupported};
use crate::ir::{Function, Id, Kind, Reduction};

impl Emitter<'_> {
    /// Bytes and truth values as floats.
    pub(crate) fn byte_value(&mut self, x: NodeId, element: Element) -> Result<NodeId, GraphError> {
        self.cast(x, element, Element::F32)
    }

    /// Truth values and bytes are selected as floats.
    pub(crate) fn select(&mut self, operands: &[NodeId], element: Element) -> Result<NodeId, GraphError> {
        let dtype = element.dtype();
        if !matches!(dtype, Dtype::Bool | Dtype::I8) {
            return self.graph.select(operands[0], operands[1], operands[2]);
        }
        let (a, b) = (self.graph.cast(operands[1], Dtype::F32)?, self.graph.cast(operands[2], Dtype::F32)?);
        let chosen = self.graph.select(operands[0], a, b)?;
        if dtype == Dtype::I8 { self.graph.cast(chosen, dtype) } else { self.cast(chosen, Element::F32, element) }
    }

    /// Bytes are computed with as floats, which hold all sums and products of two of them; the results wrap.
    pub(crate) fn byte_arithmetic(&mut self, id: Id, operands: &[NodeId]) -> Result<NodeId, GraphError> {
        let node = self.ir.node(id);
        let mut floats = Vec::with_capacity(operands.len());
        for (&operand, &input) in operands.iter().zip(&node.inputs) {
            floats.push(self.byte_value(operand, self.ir.element(input))?);
        }
        let result = match (&node.kind, &floats[..]) {
            (Kind::Unary(op), &[x]) => self.graph.unary(*op, x)?,
            (Kind::Binary(op), &[a, b]) => {
                let result = self.graph.binary(*op, a, b)?;
                if *op == BinaryOp::Div { self.trunc(result)? } else { result }
            }
            (Kind::Function(function), floats) => self.function(*function, floats)?,
            (Kind::Reduce { op: op @ Reduction::ArgMax, axes, .. }, &[x]) => {
                return self.reduce(x, *op, axes, &node.shape);
            }
            (Kind::Reduce { op: op @ (Reduction::Max | Reduction::Min), axes, .. }, &[x]) => {
                self.reduce(x, *op, axes, &node.shape)?
            }
            _ => return Err(unsupported("sums of bytes are not a primitive")),
        };
        self.wrapped_byte(result)
    }

    /// The lowest 8 bits of a whole number.
    fn wrapped_byte(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let above = self.plus(x, 128.0)?;
        let share = self.graph.scale(above, 1.0 / 256.0)?;
        let turns = self.floor(share)?;
        let excess = self.graph.scale(turns, 256.0)?;
        let signed = self.graph.sub(x, excess)?;
        self.graph.cast(signed, Dtype::I8)
    }

    /// An unsigned byte is stored as the signed one of the same bits.
    pub(crate) fn cast(&mut self, x: NodeId, from: Element, to: Element) -> Result<NodeId, GraphError> {
        let (own, target) = (self.graph.node(x).dtype, self.dtype(to));
        if from == Element::U8 && target.is_float() {
            let signed = self.graph.cast(x, target)?;
            let wrap = self.graph.constant(256.0, target)?;
            let upper = self.graph.add(signed, wrap)?;
            let zero = self.graph.constant(0.0, target)?;
            let is_upper = self.graph.compare(CompareOp::Lt, signed, zero)?;
            return self.graph.select(is_upper, upper, signed);
        }
        if to == Element::U8 && own.is_float() {
            let whole = self.trunc_of(x)?;
            let wrap = self.graph.constant(-256.0, own)?;
            let lower = self.graph.add(whole, wrap)?;
            let most = self.graph.constant(127.0, own)?;
            let is_upper = self.graph.compare(CompareOp::Gt, whole, most)?;
            let signed = self.graph.select(is_upper, lower, whole)?;
            return self.graph.cast(signed, Dtype::I8);
        }
        if to == Element::I8 && own.is_float() {
            let whole = self.trunc_of(x)?;
            return self.graph.cast(whole, Dtype::I8);
        }
        match (own, target) {
            (Dtype::I32, Dtype::I32) if !to.holds(from) => self.low_bits(x, to.bits(), to == Element::U16),
            (same, dtype) if same == dtype => {
                let shape = self.graph.node(x).shape.clone();
                self.graph.reshape(x, shape)
            }
            (dtype, Dtype::Bool) if dtype.is_float() || dtype == Dtype::I32 => {
                let zero = self.graph.constant(0.0, dtype)?;
                self.graph.compare(CompareOp::Ne, x, zero)
            }
            (Dtype::Bool, Dtype::I32) => {
                let one = self.graph.constant(1.0, Dtype::I32)?;
                let zero = self.graph.constant(0.0, Dtype::I32)?;
                self.graph.select(x, one, zero)
            }
            (Dtype::Bool, Dtype::I8) => {
                let float = self.graph.cast(x, Dtype::F32)?;
                self.graph.cast(float, Dtype::I8)
            }
            (Dtype::I32, Dtype::I8) => {
                let low = self.low_bits(x, 8, false)?;
                let float = self.graph.cast(low, Dtype::F32)?;
                self.graph.cast(float, Dtype::I8)
            }
            (Dtype::I8, Dtype::I32) => {
                let float = self.byte_value(x, from)?;
                self.graph.cast(float, Dtype::I32)
            }
            (dtype, Dtype::I32) if dtype.is_float() => {
                let whole = self.trunc_of(x)?;
                self.graph.cast(whole, Dtype::I32)
            }
            (_, dtype) => self.graph.cast(x, dtype),
        }
    }

    /// Towards zero, where the value is not whole already.
    pub(crate) fn trunc_of(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        match self.graph.node(x).dtype {
            Dtype::F32 => self.trunc(x),
            dtype => {
                let wide = self.graph.cast(x, Dtype::F32)?;
                let whole = self.trunc(wide)?;
                self.graph.cast(whole, dtype)
            }
        }
    }

    /// Arithmetic of two integers of 16 bits or more, in 32 bits.
    pub(crate) fn integer_binary(
        &mut self,
        op: BinaryOp,
        a: NodeId,
        b: NodeId,
        element: Element,
    ) -> Result<NodeId, GraphError> {
        let result = match op {
            BinaryOp::Div => {
                let division = self.division(a, b)?;
                self.towards_zero(a, b, &division)?.quotient
            }
            op => self.graph.binary(op, a, b)?,
        };
        match op {
            BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div => self.wrapped(result, element),
            BinaryOp::Max | BinaryOp::Min => Ok(result),
        }
    }

    /// All else that is computed of integers.
    pub(crate) fn integer_arithmetic(&mut self, id: Id, operands: &[NodeId]) -> Result<NodeId, GraphError> {
        let node = self.ir.node(id);
        let zero = self.graph.constant(0.0, Dtype::I32)?;
        match (&node.kind, operands) {
            (Kind::Unary(UnaryOp::Neg), &[x]) => {
                let negative = self.graph.sub(zero, x)?;
                self.wrapped(negative, node.element)
            }
            (Kind::Unary(UnaryOp::Abs), &[x]) => {
                let negative = self.graph.sub(zero, x)?;
                let size = self.graph.binary(BinaryOp::Max, x, negative)?;
                self.wrapped(size, node.element)
            }
            (Kind::Function(Function::Sign), &[x]) => {
                let (one, minus) = (self.graph.constant(1.0, Dtype::I32)?, self.graph.constant(-1.0, Dtype::I32)?);
                let most = self.graph.binary(BinaryOp::Min, x, one)?;
                self.graph.binary(BinaryOp::Max, most, minus)
            }
            (Kind::Function(Function::Mod), &[a, b]) => {
                let division = self.division(a, b)?;
                let differs = self.differs(division.rest, b)?;
                let above = self.graph.add(division.rest, b)?;
                self.graph.select(differs, above, division.rest)
            }
            (Kind::Function(Function::Remainder), &[a, b]) => {
                let division = self.division(a, b)?;
                Ok(self.towards_zero(a, b, &division)?.rest)
            }
            (Kind::Power(exponent), &[x]) if exponent.fract() == 0.0 && (1.0..=8.0).contains(exponent) => {
                let mut power = x;
                for _ in 1..*exponent as usize {
                    power = self.graph.mul(power, x)?;
                }
                self.wrapped(power, node.element)
            }
            (Kind::Reduce { op, axes, .. }, &[x]) => {
                let result = self.integer_reduce(x, *op, axes, &node.shape)?;
                if *op == Reduction::Sum { self.wrapped(result, node.element) } else { Ok(result) }
            }
            _ => Err(unsupported("this function of integers is not a primitive")),
        }
    }

    /// A reduction of integers: halves of the axis are combined until one number is left.
    fn integer_reduce(
        &mut self,
        x: NodeId,
        op: Reduction,
        axes: &[usize],
        shape: &Shape,
    ) -> Result<NodeId, GraphError> {
        let combine = match op {
            Reduction::Sum => BinaryOp::Add,
            Reduction::Max | Reduction::ArgMax => BinaryOp::Max,
            Reduction::Min => BinaryOp::Min,
            Reduction::Mean => return Err(unsupported("means of integers are not a primitive")),
        };
        let rows = self.rows(x, axes)?;
        let axis = self.graph.node(rows).shape.rank() - 1;
        let mut rest = rows;
        loop {
            let cols = self.graph.node(rest).shape.cols();
            if cols <= 1 {
                break;
            }
            let half = cols / 2;
            let (low, high) = (self.graph.slice(rest, axis, 0, half)?, self.graph.slice(rest, axis, half, half)?);
            let combined = self.graph.binary(combine, low, high)?;
            rest = match cols % 2 {
                0 => combined,
                _ => {
                    let last = self.graph.slice(rest, axis, cols - 1, 1)?;
                    self.graph.concat(&[combined, last], axis)?
                }
            };
        }
        if self.graph.node(rest).shape.cols() == 0 {
            if op != Reduction::Sum {
                return Err(unsupported("the largest of no integers is not defined"));
            }
            let zero = self.graph.constant(0.0, Dtype::I32)?;
            return self.graph.broadcast(zero, shape.clone());
        }
        if op == Reduction::ArgMax {
            let is_largest = self.graph.compare(CompareOp::Eq, rows, rest)?;
            let counted = self.graph.cast(is_largest, Dtype::F32)?;
            rest = self.graph.reduce(ReduceOp::ArgMax, counted)?;
        }
        if self.graph.node(rest).shape == *shape { Ok(rest) } else { self.graph.reshape(rest, shape.clone()) }
    }

    /// What an element type of 16 bits keeps of a result; of wider ones the graph keeps 32 bits.
    fn wrapped(&mut self, x: NodeId, element: Element) -> Result<NodeId, GraphError> {
        self.is_narrowed |= element.bits() > 32 || element == Element::U32;
        if element.bits() < 32 { self.low_bits(x, element.bits(), element == Element::U16) } else { Ok(x) }
    }

    /// The lowest bits of an integer, with or without a sign.
    fn low_bits(&mut self, x: NodeId, bits: usize, is_unsigned: bool) -> Result<NodeId, GraphError> {
        let span = f64::powi(2.0, bits as i32);
        let float = self.graph.cast(x, Dtype::F32)?;
        let share = self.graph.scale(float, 1.0 / span)?;
        let turns = self.graph.cast(share, Dtype::I32)?;
        let width = self.graph.constant(span, Dtype::I32)?;
        let excess = self.graph.mul(turns, width)?;
        // As the float was rounded, this is at most a little beyond half of the span.
        let rest = self.graph.sub(x, excess)?;
        let (least, most) = if is_unsigned { (0.0, span - 1.0) } else { (-span / 2.0, span / 2.0 - 1.0) };
        let (least, most) = (self.graph.constant(least, Dtype::I32)?, self.graph.constant(most, Dtype::I32)?);
        let (above, below) = (self.graph.add(rest, width)?, self.graph.sub(rest, width)?);
        let is_below = self.graph.compare(CompareOp::Lt, rest, least)?;
        let is_above = self.graph.compare(CompareOp::Gt, rest, most)?;
        let rest = self.graph.select(is_below, above, rest)?;
        self.graph.select(is_above, below, rest)
    }

    /// A quotient next to the exact one, and what it leaves, whose size is below the divisor's. Floats find it in two steps: the
    /// first leaves a few hundred divisors at most, the second less than one.
    fn division(&mut self, a: NodeId, b: NodeId) -> Result<Division, GraphError> {
        let divisor = self.graph.cast(b, Dtype::F32)?;
        let mut division: Option<Division> = None;
        for _ in 0..2 {
            let left = division.as_ref().map_or(a, |division| division.rest);
            let float = self.graph.cast(left, Dtype::F32)?;
            let share = self.graph.binary(BinaryOp::Div, float, divisor)?;
            // Halves and other simple fractions are not near where rounding turns.
            let share = self.plus(share, 0.181)?;
            let step = self.graph.cast(share, Dtype::I32)?;
            let taken = self.graph.mul(step, b)?;
            let rest = self.graph.sub(left, taken)?;
            let quotient = match &division {
                Some(division) => self.graph.add(division.quotient, step)?,
                None => step,
            };
            division = Some(Division { quotient, rest });
        }
        division.ok_or_else(|| unsupported("a division without steps"))
    }

    /// A division whose rest has the dividend's sign.
    fn towards_zero(&mut self, a: NodeId, b: NodeId, division: &Division) -> Result<Division, GraphError> {
        let differs = self.differs(division.rest, a)?;
        let zero = self.graph.constant(0.0, Dtype::I32)?;
        let one = self.graph.constant(1.0, Dtype::I32)?;
        let minus = self.graph.constant(-1.0, Dtype::I32)?;
        let is_a_negative = self.graph.compare(CompareOp::Lt, a, zero)?;
        let is_b_negative = self.graph.compare(CompareOp::Lt, b, zero)?;
        // One divisor more or less, whichever brings the rest to the dividend's side.
        let (of_negative, of_positive) =
            (self.graph.select(is_b_negative, one, minus)?, self.graph.select(is_b_negative, minus, one)?);
        let step = self.graph.select(is_a_negative, of_negative, of_positive)?;
        let step = self.graph.select(differs, step, zero)?;
        let quotient = self.graph.sub(division.quotient, step)?;
        let given = self.graph.mul(step, b)?;
        let rest = self.graph.add(division.rest, given)?;
        Ok(Division { quotient, rest })
    }

    /// Whether a number is not zero and has another sign than another one.
    fn differs(&mut self, x: NodeId, other: NodeId) -> Result<NodeId, GraphError> {
        let (zero, one) = (self.graph.constant(0.0, Dtype::I32)?, self.graph.constant(1.0, Dtype::I32)?);
        let minus = self.graph.constant(-1.0, Dtype::I32)?;
        let is_negative = self.graph.compare(CompareOp::Lt, other, zero)?;
        let is_above = self.graph.compare(CompareOp::Gt, x, zero)?;
        let is_below = self.graph.compare(CompareOp::Lt, x, zero)?;
        let wrong_above = self.graph.select(is_above, one, zero)?;
        let wrong_below = self.graph.select(is_below, minus, zero)?;
        let wrong = self.graph.select(is_negative, wrong_above, wrong_below)?;
        self.graph.compare(CompareOp::Ne, wrong, zero)
    }
}

/// A quotient and what it leaves.
struct Division {
    quotient: NodeId,
    rest: NodeId,
}
