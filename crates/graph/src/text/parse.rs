//! Text to graph. Every mistake is an error with its line and column; no text causes a panic.

use std::str::FromStr;

use crate::activation::{Activation, Gelu};
use crate::block::Block;
use crate::composite::{Composite, Mask, ScoreWork};
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::graph::{Graph, is_name};
use crate::node::NodeId;
use crate::op::{BinaryOp, CompareOp, InputKind, Op, Opaque, ReduceOp, UnaryOp, View};
use crate::shape::{MAX_RANK, Shape};
use crate::text::nearest::nearest_operation;

/// The longest text that is read: far above GPT-2 XL forward and backward (about 2 MB), far below memory.
const MAX_TEXT: usize = 64 << 20;

impl FromStr for Graph {
    type Err = GraphError;

    fn from_str(text: &str) -> Result<Graph, GraphError> {
        if text.len() > MAX_TEXT {
            let message = format!("expected at most {MAX_TEXT} bytes of text, got {}", text.len());
            return Err(GraphError::Parse { line: 1, column: 1, message });
        }
        let mut parser = Parser { graph: Graph::new(""), block: None };
        for (index, line) in text.lines().enumerate() {
            for statement in statements(line, index + 1) {
                parser.statement(&statement?)?;
            }
        }
        if let Some(block) = parser.block {
            return Err(error(&block, "expected `}` before the end of the text"));
        }
        Ok(parser.graph)
    }
}

/// A word of the text and its position.
#[derive(Debug, Clone)]
struct Token {
    text: String,
    line: usize,
    column: usize,
}

fn error(at: &Token, message: impl Into<String>) -> GraphError {
    GraphError::Parse { line: at.line, column: at.column, message: message.into() }
}

/// Splits a line at semicolons and braces, and each statement into words, except within brackets.
fn statements(line: &str, number: usize) -> Vec<Result<Vec<Token>, GraphError>> {
    let mut all = Vec::new();
    let mut words: Vec<Token> = Vec::new();
    let mut word: Option<Token> = None;
    let mut depth = 0usize;
    for (index, c) in line.chars().enumerate() {
        let column = index + 1;
        let fresh = |text: String| Token { text, line: number, column };
        match c {
            '#' => break,
            '[' => {
                depth += 1;
                word.get_or_insert_with(|| fresh(String::new())).text.push('[');
            }
            ']' => {
                if depth == 0 {
                    return vec![Err(error(&fresh(String::new()), "expected `[` before `]`"))];
                }
                depth -= 1;
                word.get_or_insert_with(|| fresh(String::new())).text.push(']');
            }
            c if depth > 0 && c.is_whitespace() => {}
            c if depth > 0 => word.get_or_insert_with(|| fresh(String::new())).text.push(c),
            ';' => {
                words.extend(word.take());
                all.push(Ok(std::mem::take(&mut words)));
            }
            '{' | '}' => {
                words.extend(word.take());
                words.push(fresh(c.to_string()));
                all.push(Ok(std::mem::take(&mut words)));
            }
            c if c.is_whitespace() || c == ',' => words.extend(word.take()),
            c => word.get_or_insert_with(|| fresh(String::new())).text.push(c),
        }
    }
    words.extend(word.take());
    if depth > 0 {
        let end = Token { text: String::new(), line: number, column: line.chars().count() + 1 };
        return vec![Err(error(&end, "expected `]` before the end of the line"))];
    }
    all.push(Ok(words));
    all
}

struct Parser {
    graph: Graph,
    /// The name of the current block.
    block: Option<Token>,
}

impl Parser {
    fn statement(&mut self, words: &[Token]) -> Result<(), GraphError> {
        let Some(first) = words.first() else { return Ok(()) };
        if words.iter().any(|word| word.text == "=") {
            return self.definition(words);
        }
        match (first.text.as_str(), &words[1..]) {
            ("graph", [name]) if is_name(&name.text) => {
                self.graph.set_name(&name.text);
                Ok(())
            }
            ("graph", _) => Err(error(first, "expected `graph NAME`")),
            ("out", _) if self.block.is_some() => Err(error(first, "expected `}` before `out`")),
            ("out", rest) if !rest.is_empty() => rest.iter().try_for_each(|word| self.output(word)),
            ("name", [node, name]) => {
                let id = self.value(node)?;
                self.graph.set_node_name(id, &name.text).map_err(|e| error(name, e.to_string()))
            }
            ("part", [number]) if self.block.is_some() => {
                let part = number.text.parse::<u8>().map_err(|_| error(number, "expected a part from 0 to 255"))?;
                self.graph.set_part(part);
                Ok(())
            }
            ("}", []) => match self.block.take() {
                Some(name) => {
                    self.graph.close_block(Block::named(&name.text));
                    Ok(())
                }
                None => Err(error(first, "expected an open block before `}`")),
            },
            (name, [brace]) if brace.text == "{" && is_name(name) && self.block.is_none() => {
                self.block = Some(first.clone());
                self.graph.open_block();
                Ok(())
            }
            _ => Err(error(first, "expected `value = op operands`, `out value`, `graph name` or a block")),
        }
    }

    fn output(&mut self, word: &Token) -> Result<(), GraphError> {
        let (name, value) = match word.text.split_once('=') {
            Some((name, value)) => (name, Token { text: value.to_string(), ..word.clone() }),
            None => (word.text.as_str(), word.clone()),
        };
        let node = self.value(&value)?;
        let name = if is_name(name) { name.to_string() } else { name.replace('%', "node") };
        self.graph.output(&name, node).map_err(|e| error(word, e.to_string()))
    }

    fn definition(&mut self, words: &[Token]) -> Result<(), GraphError> {
        let equals = words.iter().position(|word| word.text == "=").unwrap_or(0);
        let (targets, rest) = (&words[..equals], &words[equals + 1..]);
        let Some(op) = rest.first() else { return Err(error(&words[equals], "expected an operation after `=`")) };
        if targets.is_empty() {
            return Err(error(&words[equals], "expected a value before `=`"));
        }
        let results = self.operation(op, &rest[1..], targets)?;
        if targets.len() > results.len() {
            let message = format!("{} gives {} results, {} are named", op.text, results.len(), targets.len());
            return Err(error(&targets[results.len()], message));
        }
        for (target, &id) in targets.iter().zip(&results) {
            if target.text.starts_with('%') {
                if target.text != format!("%{}", id.index()) {
                    let message = format!("expected %{} (the next node) or a name, got {}", id.index(), target.text);
                    return Err(error(target, message));
                }
            } else {
                self.graph.set_node_name(id, &target.text).map_err(|e| error(target, e.to_string()))?;
            }
        }
        Ok(())
    }

    fn operation(&mut self, op: &Token, words: &[Token], targets: &[Token]) -> Result<Vec<NodeId>, GraphError> {
        let mut arguments = Arguments::split(words);
        if op.text == "input" || op.text == "weight" {
            return self.declaration(op, arguments, &targets[0]).map(|id| vec![id]);
        }
        let composite = self.composite(op, &mut arguments)?;
        // The number of a constant is no operand.
        let inputs = if op.text == "const" { Vec::new() } else { self.operands(&arguments.values)? };
        let results = match composite {
            Some(composite) if self.block.is_none() => {
                let composite = default_scale(composite, &self.graph, &inputs);
                self.graph.call(composite, &inputs)
            }
            Some(_) => return Err(error(op, "expected a primitive: blocks hold no composites")),
            None => {
                let primitive = primitive(op, &mut arguments)?;
                self.graph.push(primitive, &inputs).map(|id| vec![id])
            }
        };
        arguments.finish()?;
        results.map_err(|e| error(op, e.to_string()))
    }

    fn declaration(&mut self, op: &Token, mut arguments: Arguments, target: &Token) -> Result<NodeId, GraphError> {
        let (dtype, shape) = arguments.typed_shape(op)?;
        arguments.finish()?;
        if self.block.is_some() {
            return Err(error(op, "expected inputs outside of blocks"));
        }
        let kind = if op.text == "input" { InputKind::Data } else { InputKind::Weight };
        // `%n = input ..` declares an input without a name of its own; sessions still need one.
        if target.text.starts_with('%') {
            return Err(error(target, "expected a name for an input"));
        }
        let declared = self.graph.input_of(kind, &target.text, dtype, shape);
        declared.map_err(|e| error(target, e.to_string()))
    }

    /// Values, inline inputs and numbers. A number takes the dtype of the first operand that is neither a number nor a
    /// truth value.
    fn operands(&mut self, words: &[Token]) -> Result<Vec<NodeId>, GraphError> {
        let mut ids: Vec<Option<NodeId>> = Vec::new();
        for word in words {
            ids.push(if number(&word.text).is_some() { None } else { Some(self.value(word)?) });
        }
        let mut dtypes = ids.iter().flatten().map(|&id| self.graph.node(id).dtype);
        let dtype = dtypes.find(|&dtype| dtype != Dtype::Bool).unwrap_or(Dtype::F32);
        let mut operands = Vec::new();
        for (word, id) in words.iter().zip(ids) {
            operands.push(match (id, number(&word.text)) {
                (Some(id), _) => id,
                (None, Some(value)) => self.graph.constant(value, dtype).map_err(|e| error(word, e.to_string()))?,
                (None, None) => return Err(error(word, "expected a value")),
            });
        }
        Ok(operands)
    }

    fn value(&mut self, word: &Token) -> Result<NodeId, GraphError> {
        if let Some(digits) = word.text.strip_prefix('%') {
            let index = digits.parse::<usize>().map_err(|_| error(word, "expected a node number after `%`"))?;
            let nodes = self.graph.nodes().len();
            return self.graph.id(index).ok_or_else(|| error(word, format!("expected a node below %{nodes}")));
        }
        if let Some(id) = self.graph.find(&word.text) {
            return Ok(id);
        }
        if word.text.contains('[') && self.block.is_none() {
            let head = word.text.split('[').next().unwrap_or_default();
            let (name, dtype) = match head.split_once(':') {
                Some((name, dtype)) => (name, dtype.parse::<Dtype>().map_err(|e| error(word, e.to_string()))?),
                None => (head, Dtype::F32),
            };
            let shape = shape(word, &word.text[head.len()..])?;
            return self.graph.input(name, dtype, shape).map_err(|e| error(word, e.to_string()));
        }
        Err(error(word, format!("unknown value `{}`; values are defined before they are used", word.text)))
    }

    fn composite(&self, op: &Token, arguments: &mut Arguments) -> Result<Option<Composite>, GraphError> {
        Ok(Some(match op.text.as_str() {
            "layer_norm" => Composite::LayerNorm { eps: arguments.number("eps", 1e-5)? },
            "rms_norm" => Composite::RmsNorm { eps: arguments.number("eps", 1e-5)? },
            "softmax" => Composite::Softmax,
            "causal_mask" => Composite::CausalMask,
            "gelu" => Composite::Activation(arguments.gelu()?.into()),
            "swiglu" => Composite::Swiglu,
            "geglu" => Composite::Geglu { kind: arguments.gelu()? },
            "dropout" => {
                Composite::Dropout { p: arguments.number("p", 0.5)?, offset: arguments.whole("offset", 0)? as u32 }
            }
            "linear" => Composite::Linear { transposed: arguments.flag("transposed") },
            "attention_scores" => {
                Composite::AttentionScores { mask: arguments.mask()?, scale: arguments.number("scale", f64::NAN)? }
            }
            "attention" => Composite::Attention {
                mask: arguments.mask()?,
                scale: arguments.number("scale", f64::NAN)?,
                p: arguments.number("p", 0.0)?,
                offset: arguments.whole("offset", 0)? as u32,
                work: arguments.score_work()?,
            },
            "quantize_int8" => Composite::QuantizeInt8,
            "quantize_fp8" => Composite::QuantizeFp8,
            "dequantize" => Composite::Dequantize { dtype: arguments.dtype(op)? },
            "quantized_linear" => Composite::QuantizedLinear { dtype: arguments.dtype(op)? },
            "expert_linear" => Composite::ExpertLinear { dtype: arguments.dtype(op)? },
            "routed_linear" => Composite::RoutedLinear,
            "weighted_sum" => Composite::WeightedSum,
            "cross_entropy" => Composite::CrossEntropy,
            "linear_cross_entropy" => Composite::LinearCrossEntropy {
                smoothing: arguments.number("smoothing", 0.0)?,
                ignored: arguments.integer("ignored")?,
            },
            "linear_cross_entropy_gradient" => {
                Composite::LinearCrossEntropyGradient { smoothing: arguments.number("smoothing", 0.0)? }
            }
            word => {
                let activation = Activation::ALL.into_iter().find(|activation| activation.kind().name() == word);
                return Ok(activation.map(Composite::Activation));
            }
        }))
    }
}

/// The default scale is `1 / sqrt(d)`.
fn default_scale(composite: Composite, graph: &Graph, inputs: &[NodeId]) -> Composite {
    let features = inputs.first().map_or(1, |&q| graph.node(q).shape.cols()).max(1);
    let usual = 1.0 / (features as f64).sqrt();
    match composite {
        Composite::AttentionScores { mask, scale } if scale.is_nan() => {
            Composite::AttentionScores { mask, scale: usual }
        }
        Composite::Attention { mask, scale, p, offset, work } if scale.is_nan() => {
            Composite::Attention { mask, scale: usual, p, offset, work }
        }
        other => other,
    }
}

fn primitive(op: &Token, arguments: &mut Arguments) -> Result<Op, GraphError> {
    let name = op.text.as_str();
    let elementwise = UnaryOp::find(name).map(Op::Unary).or_else(|| BinaryOp::find(name).map(Op::Binary));
    let others = || CompareOp::find(name).map(Op::Compare).or_else(|| ReduceOp::find(name).map(Op::RowReduce));
    if let Some(found) = elementwise.or_else(others) {
        return Ok(found);
    }
    Ok(match name {
        "const" => {
            let value = match arguments.values.as_slice() {
                [value] => number(&value.text).ok_or_else(|| error(value, "expected a number"))?,
                _ => return Err(error(op, "expected `const NUMBER DTYPE`")),
            };
            Op::Const { value, dtype: arguments.dtype(op)? }
        }
        "iota" => Op::Iota { axis: arguments.required("axis", op)?, shape: arguments.shape(op)? },
        "random" => Op::Random {
            drop: arguments.number("drop", 0.5)?,
            offset: arguments.whole("offset", 0)? as u32,
            shape: arguments.shape(op)?,
        },
        "select" => Op::Select,
        "cast" => Op::Cast(arguments.dtype(op)?),
        "column_sum" => Op::ColumnSum,
        "matmul" => {
            Op::Matmul { transpose_a: arguments.flag("transpose_a"), transpose_b: arguments.flag("transpose_b") }
        }
        "gather" => Op::Gather,
        "scatter_add" => Op::ScatterAdd { rows: arguments.required("rows", op)? },
        "append" => Op::Append { batch: arguments.required("batch", op)? },
        "reshape" => Op::View(View::Reshape(arguments.shape(op)?)),
        "broadcast" => Op::View(View::Broadcast(arguments.shape(op)?)),
        "transpose" => Op::View(View::Transpose(arguments.shape(op)?.to_vec())),
        "slice" => Op::View(View::Slice {
            axis: arguments.required("axis", op)?,
            start: arguments.required("start", op)?,
            length: arguments.required("length", op)?,
        }),
        "concat" => Op::Concat { axis: arguments.required("axis", op)? },
        "stop_gradient" => Op::StopGradient,
        "opaque" => {
            let name = arguments.take("name").map_or("opaque".to_string(), |word| word.text);
            if !is_name(&name) {
                return Err(error(op, GraphError::BadName(name).to_string()));
            }
            let (dtype, shape) = arguments.typed_shape(op)?;
            let (bytes, flops) = (arguments.count("bytes")?, arguments.count("flops")?.unwrap_or(0));
            Op::Opaque(Opaque { name, dtype, shape, bytes, flops, elementwise: arguments.flag("elementwise") })
        }
        _ => {
            let nearest = nearest_operation(name).map_or(String::new(), |known| format!("; did you mean `{known}`?"));
            return Err(error(op, format!("unknown operation `{name}`{nearest}")));
        }
    })
}

/// The words after an operation, sorted: values, `key=value` attributes, flags, a dtype, a shape.
struct Arguments {
    values: Vec<Token>,
    attributes: Vec<(String, Token)>,
    flags: Vec<Token>,
    dtype: Option<(Dtype, Token)>,
    shape: Option<(Option<Dtype>, Token)>,
}

impl Arguments {
    fn split(words: &[Token]) -> Arguments {
        let mut sorted =
            Arguments { values: Vec::new(), attributes: Vec::new(), flags: Vec::new(), dtype: None, shape: None };
        for word in words {
            let before_bracket = word.text.split('[').next().unwrap_or_default();
            let typed = before_bracket.parse::<Dtype>().ok();
            if let Some((key, value)) = word.text.split_once('=') {
                sorted.attributes.push((key.to_string(), Token { text: value.to_string(), ..word.clone() }));
            } else if matches!(word.text.as_str(), "transpose_a" | "transpose_b" | "transposed" | "elementwise") {
                sorted.flags.push(word.clone());
            } else if word.text.contains('[') && (before_bracket.is_empty() || typed.is_some()) {
                sorted.shape = Some((typed, word.clone()));
            } else if let Some(dtype) = typed {
                sorted.dtype = Some((dtype, word.clone()));
            } else {
                sorted.values.push(word.clone());
            }
        }
        sorted
    }

    fn take(&mut self, key: &str) -> Option<Token> {
        let position = self.attributes.iter().position(|(name, _)| name == key)?;
        Some(self.attributes.remove(position).1)
    }

    fn number(&mut self, key: &str, default: f64) -> Result<f64, GraphError> {
        match self.take(key) {
            None => Ok(default),
            Some(word) => number(&word.text).ok_or_else(|| error(&word, format!("expected a number for {key}"))),
        }
    }

    fn whole(&mut self, key: &str, default: usize) -> Result<usize, GraphError> {
        let Some(word) = self.take(key) else { return Ok(default) };
        let parsed = word.text.parse::<u32>();
        parsed.map(|n| n as usize).map_err(|_| error(&word, format!("expected a whole number below 2^32 for {key}")))
    }

    fn integer(&mut self, key: &str) -> Result<Option<i32>, GraphError> {
        let Some(word) = self.take(key) else { return Ok(None) };
        let parsed = word.text.parse::<i32>();
        parsed.map(Some).map_err(|_| error(&word, format!("expected a whole number of 32 bits for {key}")))
    }

    fn count(&mut self, key: &str) -> Result<Option<u64>, GraphError> {
        let Some(word) = self.take(key) else { return Ok(None) };
        word.text.parse::<u64>().map(Some).map_err(|_| error(&word, format!("expected a whole number for {key}")))
    }

    fn required(&mut self, key: &str, op: &Token) -> Result<usize, GraphError> {
        let word = self.take(key).ok_or_else(|| error(op, format!("{} needs {key}=NUMBER", op.text)))?;
        word.text.parse::<usize>().map_err(|_| error(&word, format!("expected a whole number for {key}")))
    }

    fn flag(&mut self, name: &str) -> bool {
        let before = self.flags.len();
        self.flags.retain(|flag| flag.text != name);
        self.flags.len() < before
    }

    fn gelu(&mut self) -> Result<Gelu, GraphError> {
        match self.take("kind") {
            None => Ok(Gelu::Tanh),
            Some(word) => [Gelu::Tanh, Gelu::Erf]
                .into_iter()
                .find(|&kind| super::print::gelu_word(kind) == word.text)
                .ok_or_else(|| error(&word, "expected kind=tanh or kind=erf")),
        }
    }

    fn score_work(&mut self) -> Result<ScoreWork, GraphError> {
        let cap = self.take("soft_cap");
        let cap = cap.map(|word| number(&word.text).ok_or_else(|| error(&word, "expected a number for soft_cap")));
        let mut work = ScoreWork {
            soft_cap: cap.transpose()?,
            window: self.count("window")?.map(|keys| keys as usize),
            ..ScoreWork::NONE
        };
        let Some(word) = self.take("with") else { return Ok(work) };
        for name in word.text.split('+') {
            let operand = match name {
                "slopes" => &mut work.slopes,
                "bias" => &mut work.bias,
                "documents" => &mut work.documents,
                _ => {
                    return Err(error(
                        &word,
                        "expected with=slopes, with=bias, with=documents, or several joined by +",
                    ));
                }
            };
            if std::mem::replace(operand, true) {
                return Err(error(&word, format!("expected {name} once")));
            }
        }
        Ok(work)
    }

    fn mask(&mut self) -> Result<Mask, GraphError> {
        match self.take("mask") {
            None => Ok(Mask::Full),
            Some(word) => Mask::find(&word.text)
                .ok_or_else(|| error(&word, "expected mask=full, mask=causal, mask=additive or mask=cached")),
        }
    }

    fn dtype(&mut self, op: &Token) -> Result<Dtype, GraphError> {
        self.dtype.take().map(|(dtype, _)| dtype).ok_or_else(|| error(op, format!("{} needs a dtype", op.text)))
    }

    fn shape(&mut self, op: &Token) -> Result<Shape, GraphError> {
        match self.shape.take() {
            Some((_, word)) => shape(&word, &word.text[word.text.find('[').unwrap_or(0)..]),
            None => Err(error(op, format!("{} needs a shape such as [4,8]", op.text))),
        }
    }

    fn typed_shape(&mut self, op: &Token) -> Result<(Dtype, Shape), GraphError> {
        match self.shape.take() {
            Some((Some(dtype), word)) => Ok((dtype, shape(&word, &word.text[word.text.find('[').unwrap_or(0)..])?)),
            _ => Err(error(op, format!("{} needs a type such as f32[4,8]", op.text))),
        }
    }

    /// Checks that every word was used.
    fn finish(self) -> Result<(), GraphError> {
        let left = self.attributes.into_iter().map(|(_, word)| word).chain(self.flags);
        let left = left.chain(self.dtype.map(|(_, word)| word)).chain(self.shape.map(|(_, word)| word)).next();
        match left {
            Some(word) => Err(error(&word, "this operation has no such attribute")),
            None => Ok(()),
        }
    }
}

fn number(text: &str) -> Option<f64> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let looks_numeric = digits == "inf" || digits.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if looks_numeric { text.parse().ok() } else { None }
}

fn shape(at: &Token, text: &str) -> Result<Shape, GraphError> {
    let inside = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let inside = inside.ok_or_else(|| error(at, "expected a shape such as [4,8]"))?;
    if inside.is_empty() {
        return Ok(Shape::scalar());
    }
    let size = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse::<usize>().ok()).flatten();
    let dims: Option<Vec<usize>> = inside.split(',').map(size).collect();
    let dims = dims.ok_or_else(|| error(at, format!("expected whole sizes, got [{inside}]")))?;
    if dims.len() > MAX_RANK {
        return Err(error(at, format!("expected at most {MAX_RANK} axes, got {}", dims.len())));
    }
    Ok(Shape::new(dims))
}
