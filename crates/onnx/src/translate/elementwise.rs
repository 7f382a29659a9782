//! Elementwise operators, and the table of all operators.

use deuteron_graph::{BinaryOp, CompareOp, Composite, UnaryOp};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Function, Kind, Logic};

impl<'a> Translator<'a, '_> {
    /// One operator. A match, because that is what a table of operators is.
    pub(super) fn operator(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.domain {
            "" | "ai.onnx" | "com.microsoft" | "ai.onnx.contrib" => {}
            "ai.onnx.preview" if call.node.op == "FlexAttention" => return self.flex_attention(call),
            "ai.onnx.ml" if call.node.op == "Binarizer" => return self.binarized(call),
            "ai.onnx.ml" if call.node.op == "ArrayFeatureExtractor" => return self.features(call),
            "ai.onnx.preview.training" if matches!(call.node.op, "Adam" | "Adagrad" | "Momentum") => {
                return self.optimizer(call);
            }
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
            "Sin" => self.function_of(call, Function::Sin),
            "Cos" => self.function_of(call, Function::Cos),
            "Tan" => self.function_of(call, Function::Tan),
            "Asin" => self.function_of(call, Function::Asin),
            "Acos" => self.function_of(call, Function::Acos),
            "Atan" => self.function_of(call, Function::Atan),
            "Sinh" => self.function_of(call, Function::Sinh),
            "Cosh" => self.function_of(call, Function::Cosh),
            "Asinh" => self.function_of(call, Function::Asinh),
            "Acosh" => self.function_of(call, Function::Acosh),
            "Atanh" => self.function_of(call, Function::Atanh),
            "Floor" => self.function_of(call, Function::Floor),
            "Ceil" => self.function_of(call, Function::Ceil),
            "Sign" => self.function_of(call, Function::Sign),
            "Mod" => match call.int("fmod", 0) {
                0 => self.function_of(call, Function::Mod),
                _ => self.function_of(call, Function::Remainder),
            },
            "Add" => self.two(call, BinaryOp::Add),
            "Sub" => self.two(call, BinaryOp::Sub),
            "Mul" => self.two(call, BinaryOp::Mul),
            "Div" => self.two(call, BinaryOp::Div),
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
                Ok(vec![self.ir.compare(CompareOp::Ne, x, x)?])
            }
            "IsInf" => self.is_infinite(call),
            "Not" => self.elementwise(call, Kind::Logic(Logic::Not)),
            "And" => self.elementwise(call, Kind::Logic(Logic::And)),
            "Or" => self.elementwise(call, Kind::Logic(Logic::Or)),
            "Xor" => self.elementwise(call, Kind::Logic(Logic::Xor)),
            "Where" => self.elementwise(call, Kind::Select),
            "Cast" => self.cast(call),
            "CastLike" => self.cast_like(call),
            "Identity" => Ok(vec![call.input(0)?]),
            "Dropout" => self.dropout(call),
            "Relu" | "Gelu" | "Swish" | "LeakyRelu" | "PRelu" | "Elu" | "Selu" | "Celu" | "HardSigmoid"
            | "HardSwish" | "Softplus" | "Softsign" | "Mish" | "ThresholdedRelu" | "Shrink" => self.activation(call),
            "ReduceMean"
            | "ReduceSum"
            | "ReduceMax"
            | "ReduceMin"
            | "ReduceL1"
            | "ReduceL2"
            | "ReduceSumSquare"
            | "ReduceLogSum"
            | "ReduceLogSumExp"
            | "ReduceProd"
            | "ArgMax"
            | "ArgMin"
            | "Hardmax"
            | "CumSum"
            | "CumProd"
            | "LpNormalization"
            | "MeanVarianceNormalization" => self.reduction(call),
            "Shape" | "Size" | "Constant" | "ConstantOfShape" | "Range" | "Trilu" | "EyeLike" | "NonZero"
            | "HannWindow" | "HammingWindow" | "BlackmanWindow" => self.known(call),
            "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" | "Transpose" | "Expand" | "Slice" | "Split" | "Concat"
            | "Tile" | "Pad" | "DepthToSpace" | "SpaceToDepth" | "CenterCropPad" => self.view(call),
            "Gather" | "GatherND" | "GatherElements" | "TopK" | "OneHot" | "ScatterND" | "ScatterElements"
            | "Scatter" | "ReverseSequence" | "Compress" => self.index(call),
            "MatMul" | "Gemm" | "FusedMatMul" | "FusedGemm" | "AffineGrid" => self.contraction(call),
            "BitShift" | "BitwiseNot" | "BitCast" => self.bits(call),
            "GridSample" => self.grid_sample(call),
            "RoiAlign" => self.roi_align(call),
            "TfIdfVectorizer" => self.vectorize(call),
            "OptionalHasElement" => self.optional_has_element(call),
            "OptionalGetElement" => Ok(vec![call.input(0)?]),
            "Det" => Ok(vec![self.determinant(call)?]),
            "Einsum" => self.einsum(call),
            "MatMulInteger" => self.integer_matmul(call),
            "QLinearMatMul" => Ok(vec![self.quantized_matmul(call)?]),
            "Conv" | "FusedConv" | "ConvInteger" | "QLinearConv" | "ConvTranspose" | "MaxPool" | "AveragePool"
            | "LpPool" | "GlobalAveragePool" | "GlobalMaxPool" | "GlobalLpPool" | "LRN" | "Col2Im" => self.window(call),
            "Resize" | "Upsample" => self.resize(call),
            "RNN" | "GRU" | "LSTM" => self.recurrent(call),
            "Loop" | "Scan" => self.unroll(call),
            "CausalConvWithState" | "LinearAttention" | "TensorScatter" => self.sequence(call),
            "DynamicQuantizeLSTM" => self.quantized_lstm(call),
            "DFT" | "STFT" => self.fourier(call),
            "NegativeLogLikelihoodLoss" | "SoftmaxCrossEntropyLoss" => self.loss(call),
            "QuantizeLinear" | "DequantizeLinear" | "DynamicQuantizeLinear" => self.quantize(call),
            "Softmax"
            | "LogSoftmax"
            | "LayerNormalization"
            | "RMSNormalization"
            | "SimplifiedLayerNormalization"
            | "SkipLayerNormalization"
            | "SkipSimplifiedLayerNormalization"
            | "BatchNormalization"
            | "InstanceNormalization"
            | "GroupNormalization" => self.norm(call),
            "Attention" if call.node.domain != "com.microsoft" => self.attention(call),
            "RotaryEmbedding" if call.node.domain != "com.microsoft" => self.rotary(call),
            "MultiHeadAttention" | "BiasGelu" | "FastGelu" | "QuickGelu" | "Attention" | "GroupQueryAttention" => {
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

    fn function_of(&mut self, call: &Call, function: Function) -> Results {
        self.elementwise(call, Kind::Function(function))
    }

    fn two(&mut self, call: &Call, op: BinaryOp) -> Results {
        Ok(vec![self.ir.binary(op, call.input(0)?, call.input(1)?)?])
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
        let (base, mut exponent) = (call.input(0)?, call.input(1)?);
        let element = self.ir.element(base);
        if element.is_float() {
            exponent = self.ir.cast(exponent, element)?;
        }
        match self.ir.scalar(exponent) {
            // A shape that the exponent widens would be lost.
            Some(value) if self.ir.shape(exponent).broadcasts_to(self.ir.shape(base)) => Ok(vec![match value {
                0.5 => self.ir.push(Kind::Unary(UnaryOp::Sqrt), &[base])?,
                -0.5 => self.ir.push(Kind::Unary(UnaryOp::Rsqrt), &[base])?,
                -1.0 if element.is_float() => self.ir.push(Kind::Unary(UnaryOp::Reciprocal), &[base])?,
                value => self.ir.push(Kind::Power(value), &[base])?,
            }]),
            _ => Ok(vec![self.ir.push(Kind::Function(Function::Pow), &[base, exponent])?]),
        }
    }

    /// Bounds are attributes up to opset 10, operands since.
    fn clip(&mut self, call: &Call) -> Results {
        let mut x = call.input(0)?;
        let bounds = [("min", 1, BinaryOp::Max), ("max", 2, BinaryOp::Min)];
        for (name, position, op) in bounds {
            let attribute = call.attribute(name).and_then(|attribute| attribute.float);
            let bound = attribute.map(|value| self.ir.number(value.into(), x)).or_else(|| call.optional(position));
            if let Some(bound) = bound {
                x = self.ir.binary(op, x, bound)?;
            }
        }
        Ok(vec![x])
    }

    fn is_infinite(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        let above = self.ir.compare_number(CompareOp::Eq, x, f64::INFINITY)?;
        let below = self.ir.compare_number(CompareOp::Eq, x, f64::NEG_INFINITY)?;
        let result = match (call.int("detect_positive", 1) != 0, call.int("detect_negative", 1) != 0) {
            (true, true) => self.ir.push(Kind::Logic(Logic::Or), &[above, below])?,
            (true, false) => above,
            (false, true) => below,
            (false, false) => self.ir.known(Constant::filled(self.ir.shape(x).clone(), 0.0), Element::Bool),
        };
        Ok(vec![result])
    }

    /// 1 above a threshold, else 0.
    fn binarized(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        let is_above = self.ir.compare_number(CompareOp::Gt, x, call.float("threshold", 0.0))?;
        Ok(vec![self.ir.cast(is_above, self.ir.element(x))?])
    }

    /// A tensor is an optional that has an element.
    fn optional_has_element(&mut self, call: &Call) -> Results {
        let has = f64::from(call.optional(0).is_some());
        Ok(vec![self.ir.known_scalar(has, Element::Bool)])
    }

    /// The identity, which it is in inference.
    fn dropout(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        call.without_effect(&["seed", "is_test"]);
        // The ratio is an attribute up to opset 11, an operand since.
        let ratio = match call.optional(1) {
            Some(ratio) => self.scalar(ratio),
            None => Some(call.float("ratio", 0.5)),
        };
        let training = match call.optional(2) {
            Some(training) => self.scalar(training).map(|value| value != 0.0),
            None => Some(false),
        };
        if training != Some(false) && ratio != Some(0.0) {
            let why = match training {
                None => "whether it drops depends on the input; set training_mode to false",
                Some(_) => "it drops at random (training_mode is true); export the model for inference",
            };
            return Err(Problem::Opaque(why.to_string()));
        }
        let mut results = vec![x];
        if call.wants(1) {
            let all = Constant::filled(self.ir.shape(x).clone(), 1.0);
            results.push(self.ir.known(all, Element::Bool));
        }
        Ok(results)
    }
}
