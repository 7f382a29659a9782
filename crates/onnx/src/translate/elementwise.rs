//! Elementwise operators, reductions, and the table of all operators.

use deuteron_graph::{Activation, BinaryOp, CompareOp, Composite, UnaryOp};

use super::call::{Results, axes_of, axis_of};
use super::{Call, Problem, Translator};
use crate::element::Element;
use crate::ir::{Function, Id, Kind, Logic, Reduction};

impl<'a> Translator<'a, '_> {
    /// One operator. A match, because that is what a table of operators is.
    pub(super) fn operator(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.domain {
            "" | "ai.onnx" | "com.microsoft" | "ai.onnx.contrib" => {}
            domain => return Err(Problem::Opaque(format!("the domain `{domain}` is not known"))),
        }
        match call.node.op {
            "Neg" => self.unary(call, UnaryOp::Neg),
            "Abs" => self.unary(call, UnaryOp::Abs),
            "Exp" => self.unary(call, UnaryOp::Exp),
            "Log" => self.unary(call, UnaryOp::Log),
            "Sqrt" => self.unary(call, UnaryOp::Sqrt),
            "Reciprocal" => self.unary(call, UnaryOp::Reciprocal),
            "Tanh" => self.unary(call, UnaryOp::Tanh),
            "Erf" => self.unary(call, UnaryOp::Erf),
            "Sigmoid" => self.unary(call, UnaryOp::Sigmoid),
            "Round" => self.unary(call, UnaryOp::Round),
            "Sin" => self.elementwise(call, Kind::Function(Function::Sin)),
            "Cos" => self.elementwise(call, Kind::Function(Function::Cos)),
            "Floor" => self.elementwise(call, Kind::Function(Function::Floor)),
            "Ceil" => self.elementwise(call, Kind::Function(Function::Ceil)),
            "Sign" => self.elementwise(call, Kind::Function(Function::Sign)),
            "Mod" => self.elementwise(call, Kind::Function(Function::Mod)),
            "Add" => self.variadic(call, BinaryOp::Add),
            "Sub" => self.variadic(call, BinaryOp::Sub),
            "Mul" => self.variadic(call, BinaryOp::Mul),
            "Div" => self.variadic(call, BinaryOp::Div),
            "Max" => self.variadic(call, BinaryOp::Max),
            "Min" => self.variadic(call, BinaryOp::Min),
            "Sum" => self.variadic(call, BinaryOp::Add),
            "Mean" => self.mean(call),
            "Pow" => self.power(call),
            "Clip" => self.clip(call),
            "Equal" => self.elementwise(call, Kind::Compare(CompareOp::Eq)),
            "Less" => self.elementwise(call, Kind::Compare(CompareOp::Lt)),
            "LessOrEqual" => self.elementwise(call, Kind::Compare(CompareOp::Le)),
            "Greater" => self.elementwise(call, Kind::Compare(CompareOp::Gt)),
            "GreaterOrEqual" => self.elementwise(call, Kind::Compare(CompareOp::Ge)),
            "IsNaN" => {
                let x = call.input(0)?;
                Ok(vec![self.ir.push(Kind::Compare(CompareOp::Ne), &[x, x])?])
            }
            "Not" => self.elementwise(call, Kind::Logic(Logic::Not)),
            "And" => self.elementwise(call, Kind::Logic(Logic::And)),
            "Or" => self.elementwise(call, Kind::Logic(Logic::Or)),
            "Xor" => self.elementwise(call, Kind::Logic(Logic::Xor)),
            "Where" => self.elementwise(call, Kind::Select),
            "Cast" => self.cast(call),
            "CastLike" => {
                let element = self.ir.element(call.input(1)?);
                Ok(vec![self.ir.push(Kind::Cast(element), &[call.input(0)?])?])
            }
            "Identity" => Ok(vec![call.input(0)?]),
            "Dropout" => self.dropout(call),
            "Relu" => self.composite(call, Composite::Activation(Activation::Relu)),
            "Gelu" => match call.text("approximate") {
                Some("tanh") => self.composite(call, Composite::Activation(Activation::GeluTanh)),
                _ => self.composite(call, Composite::Activation(Activation::GeluErf)),
            },
            "Swish" if call.float("alpha", 1.0) == 1.0 => self.composite(call, Composite::Activation(Activation::Silu)),
            "LeakyRelu" if (0.0..=1.0).contains(&call.float("alpha", 0.01)) => {
                let x = call.input(0)?;
                let scaled = self.ir.scale(x, call.float("alpha", 0.01))?;
                Ok(vec![self.ir.binary(BinaryOp::Max, x, scaled)?])
            }
            "ReduceMean" => self.reduce(call, Reduction::Mean),
            "ReduceSum" => self.reduce(call, Reduction::Sum),
            "ReduceMax" => self.reduce(call, Reduction::Max),
            "ReduceMin" => self.reduce(call, Reduction::Min),
            "ReduceL2" | "ReduceSumSquare" => self.sum_of_squares(call),
            "GlobalAveragePool" => {
                let x = call.input(0)?;
                let axes = (2..self.ir.shape(x).rank()).collect();
                Ok(vec![self.ir.push(Kind::Reduce { op: Reduction::Mean, axes, keep: true }, &[x])?])
            }
            "ArgMax" if call.int("select_last_index", 0) == 0 => self.arg_max(call),
            "Shape" | "Size" | "Constant" | "ConstantOfShape" | "Range" | "Trilu" | "CumSum" | "EyeLike"
            | "NonZero" | "ScatterND" => self.known(call),
            "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" | "Transpose" | "Expand" | "Slice" | "Split" | "Concat"
            | "Tile" | "Pad" => self.view(call),
            "Gather" | "GatherND" | "GatherElements" | "TopK" | "OneHot" => self.index(call),
            "MatMul" | "Gemm" | "FusedMatMul" | "Conv" | "Einsum" => self.contraction(call),
            "Softmax"
            | "LogSoftmax"
            | "LayerNormalization"
            | "RMSNormalization"
            | "SimplifiedLayerNormalization"
            | "SkipLayerNormalization"
            | "SkipSimplifiedLayerNormalization" => self.norm(call),
            "Attention" | "MultiHeadAttention" | "BiasGelu" | "FastGelu" | "QuickGelu" | "GroupQueryAttention" => {
                self.fused(call)
            }
            _ => Err(Problem::Opaque("the operator has no counterpart".to_string())),
        }
    }

    pub(super) fn elementwise(&mut self, call: &Call, kind: Kind) -> Results {
        Ok(vec![self.ir.push(kind, &call.all())?])
    }

    fn unary(&mut self, call: &Call, op: UnaryOp) -> Results {
        self.elementwise(call, Kind::Unary(op))
    }

    pub(super) fn composite(&mut self, call: &Call, composite: Composite) -> Results {
        Ok(vec![self.ir.push(Kind::Composite(composite), &[call.input(0)?])?])
    }

    fn variadic(&mut self, call: &Call, op: BinaryOp) -> Results {
        let mut result = call.input(0)?;
        for &operand in &call.all()[1..] {
            result = self.ir.binary(op, result, operand)?;
        }
        Ok(vec![result])
    }

    fn mean(&mut self, call: &Call) -> Results {
        let sum = self.variadic(call, BinaryOp::Add)?[0];
        Ok(vec![self.ir.scale(sum, 1.0 / call.all().len() as f64)?])
    }

    fn power(&mut self, call: &Call) -> Results {
        let (base, exponent) = (call.input(0)?, call.input(1)?);
        let element = self.ir.element(base);
        match self.ir.scalar(exponent) {
            // A shape that the exponent widens would be lost.
            Some(value) if self.ir.shape(exponent).broadcasts_to(self.ir.shape(base)) => Ok(vec![match value {
                0.5 => self.ir.push(Kind::Unary(UnaryOp::Sqrt), &[base])?,
                -0.5 => self.ir.push(Kind::Unary(UnaryOp::Rsqrt), &[base])?,
                -1.0 if element.is_float() => self.ir.push(Kind::Unary(UnaryOp::Reciprocal), &[base])?,
                value => self.ir.push(Kind::Power(value), &[base])?,
            }]),
            _ => self.elementwise(call, Kind::Function(Function::Pow)),
        }
    }

    fn clip(&mut self, call: &Call) -> Results {
        let mut x = call.input(0)?;
        if let Some(least) = call.optional(1) {
            x = self.ir.binary(BinaryOp::Max, x, least)?;
        }
        if let Some(most) = call.optional(2) {
            x = self.ir.binary(BinaryOp::Min, x, most)?;
        }
        Ok(vec![x])
    }

    fn cast(&mut self, call: &Call) -> Results {
        let number = call.int("to", 0);
        let element = Element::from_number(number)
            .ok_or_else(|| Problem::Opaque(format!("it casts to ONNX element type {number}, which is not known")))?;
        Ok(vec![self.ir.push(Kind::Cast(element), &[call.input(0)?])?])
    }

    /// The identity, which it is in inference.
    fn dropout(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        let training = call.optional(2).and_then(|id| self.ir.scalar(id)).is_some_and(|value| value != 0.0);
        if training {
            self.notes.push(format!("dropout at `{}` is left out", call.node.label()));
        }
        let mut results = vec![x];
        if call.wants(1) {
            let all = crate::constant::Constant::filled(self.ir.shape(x).clone(), 1.0);
            results.push(self.ir.known(all, Element::Bool));
        }
        Ok(results)
    }

    /// Axes of a reduction: an attribute up to opset 17, an operand since.
    fn reduced_axes(&self, call: &Call, x: Id) -> Result<Vec<usize>, Problem> {
        let rank = self.ir.shape(x).rank();
        let axes = match (call.ints("axes"), call.optional(1)) {
            (Some(axes), _) => axes.to_vec(),
            (None, Some(axes)) => self.integers(axes, "axes")?,
            (None, None) => Vec::new(),
        };
        if axes.is_empty() {
            let none = call.int("noop_with_empty_axes", 0) != 0;
            return Ok(if none { Vec::new() } else { (0..rank).collect() });
        }
        Ok(axes_of(&axes, rank)?)
    }

    fn reduce(&mut self, call: &Call, op: Reduction) -> Results {
        let x = call.input(0)?;
        let axes = self.reduced_axes(call, x)?;
        Ok(vec![self.ir.push(Kind::Reduce { op, axes, keep: call.int("keepdims", 1) != 0 }, &[x])?])
    }

    fn sum_of_squares(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        let (axes, keep) = (self.reduced_axes(call, x)?, call.int("keepdims", 1) != 0);
        let square = self.ir.binary(BinaryOp::Mul, x, x)?;
        let sum = self.ir.push(Kind::Reduce { op: Reduction::Sum, axes, keep }, &[square])?;
        match call.node.op {
            "ReduceL2" => Ok(vec![self.ir.push(Kind::Unary(UnaryOp::Sqrt), &[sum])?]),
            _ => Ok(vec![sum]),
        }
    }

    fn arg_max(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        let axes = vec![axis_of(call.int("axis", 0), self.ir.shape(x).rank())?];
        let kind = Kind::Reduce { op: Reduction::ArgMax, axes, keep: call.int("keepdims", 1) != 0 };
        Ok(vec![self.ir.push(kind, &[x])?])
    }
}
