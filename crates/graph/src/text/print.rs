//! Graph to text.

use std::fmt;

use crate::activation::Gelu;
use crate::block::Block;
use crate::composite::{Composite, ScoreWork};
use crate::graph::{Call, Callee, Graph};
use crate::node::NodeId;
use crate::op::{Op, View};

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.name().is_empty() {
            writeln!(f, "graph {}", self.name())?;
        }
        for call in self.calls() {
            match &call.callee {
                Callee::Primitive => primitive(f, self, call.start)?,
                Callee::Composite(composite) => self.print_composite(f, composite, call)?,
                Callee::Block(block) => self.print_block(f, block, call)?,
            }
        }
        for output in self.outputs() {
            if self.given_name(output.node) == Some(output.name.as_str()) {
                writeln!(f, "out {}", output.name)?;
            } else {
                writeln!(f, "out {}={}", output.name, self.label(output.node))?;
            }
        }
        Ok(())
    }
}

impl Graph {
    fn print_composite(&self, f: &mut fmt::Formatter<'_>, composite: &Composite, call: &Call) -> fmt::Result {
        let join =
            |ids: &[NodeId], between: &str| ids.iter().map(|&id| self.label(id)).collect::<Vec<_>>().join(between);
        let name = composite.name();
        write!(f, "{} = {name} {}", join(&call.outputs, ", "), join(&call.inputs, " "))?;
        writeln!(f, "{}", composite_attributes(composite))?;
        // Interior nodes have no line of their own, so a name one was given needs a statement.
        for position in call.start..call.end {
            let id = NodeId(position as u32);
            if let (Some(name), false) = (self.given_name(id), call.outputs.contains(&id)) {
                writeln!(f, "name %{position} {name}")?;
            }
        }
        Ok(())
    }

    fn print_block(&self, f: &mut fmt::Formatter<'_>, block: &Block, call: &Call) -> fmt::Result {
        writeln!(f, "{block} {{")?;
        let mut part = 0;
        for position in call.start..call.end {
            let node = &self.nodes()[position];
            if node.part != part {
                part = node.part;
                writeln!(f, "  part {part}")?;
            }
            f.write_str("  ")?;
            primitive(f, self, position)?;
        }
        writeln!(f, "}}")
    }
}

fn primitive(f: &mut fmt::Formatter<'_>, graph: &Graph, position: usize) -> fmt::Result {
    let node = &graph.nodes()[position];
    write!(f, "{} = {}", graph.label(NodeId(position as u32)), node.op.name())?;
    for &input in &node.inputs {
        write!(f, " {}", graph.label(input))?;
    }
    match &node.op {
        Op::Input { dtype, shape, .. } => write!(f, " {dtype}{shape}"),
        Op::Const { value, dtype } => write!(f, " {value:?} {dtype}"),
        Op::Iota { axis, shape } => write!(f, " {shape} axis={axis}"),
        Op::Random { drop, offset, shape } => write!(f, " {shape} drop={drop:?} offset={offset}"),
        Op::Cast(dtype) => write!(f, " {dtype}"),
        Op::Matmul { transpose_a, transpose_b } => {
            f.write_str(if *transpose_a { " transpose_a" } else { "" })?;
            f.write_str(if *transpose_b { " transpose_b" } else { "" })
        }
        Op::ScatterAdd { rows } => write!(f, " rows={rows}"),
        Op::Append { batch } => write!(f, " batch={batch}"),
        Op::View(View::Reshape(shape) | View::Broadcast(shape)) => write!(f, " {shape}"),
        Op::View(View::Transpose(permutation)) => {
            let axes: Vec<String> = permutation.iter().map(usize::to_string).collect();
            write!(f, " [{}]", axes.join(","))
        }
        Op::View(View::Slice { axis, start, length }) => write!(f, " axis={axis} start={start} length={length}"),
        Op::Concat { axis } => write!(f, " axis={axis}"),
        Op::Opaque(opaque) => {
            write!(f, " {}{} name={} flops={}", opaque.dtype, opaque.shape, opaque.name, opaque.flops)?;
            opaque.bytes.map_or(Ok(()), |bytes| write!(f, " bytes={bytes}"))?;
            f.write_str(if opaque.elementwise { " elementwise" } else { "" })
        }
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select => Ok(()),
        Op::RowReduce(_) | Op::ColumnSum | Op::Gather | Op::StopGradient => Ok(()),
    }?;
    writeln!(f)
}

fn composite_attributes(composite: &Composite) -> String {
    match composite {
        Composite::LayerNorm { eps } | Composite::RmsNorm { eps } => format!(" eps={eps:?}"),
        Composite::Activation(activation) => {
            activation.gelu().map_or(String::new(), |kind| format!(" kind={}", gelu_word(kind)))
        }
        Composite::Geglu { kind } => format!(" kind={}", gelu_word(*kind)),
        Composite::Dropout { p, offset } => format!(" p={p:?} offset={offset}"),
        Composite::Linear { transposed } => if *transposed { " transposed" } else { "" }.to_string(),
        Composite::AttentionScores { mask, scale } => format!(" mask={mask} scale={scale:?}"),
        Composite::Attention { mask, scale, p, offset, work } => {
            format!(" mask={mask} scale={scale:?} p={p:?} offset={offset}") + &score_work(work)
        }
        Composite::Dequantize { dtype } | Composite::QuantizedLinear { dtype } => format!(" {dtype}"),
        Composite::ExpertLinear { dtype } => format!(" {dtype}"),
        Composite::Softmax | Composite::CausalMask => String::new(),
        Composite::Swiglu | Composite::QuantizeInt8 | Composite::QuantizeFp8 => String::new(),
        Composite::CrossEntropy | Composite::RoutedLinear | Composite::WeightedSum => String::new(),
        Composite::LinearCrossEntropy { smoothing, ignored } => {
            format!(" smoothing={smoothing:?}")
                + &ignored.map_or(String::new(), |ignored| format!(" ignored={ignored}"))
        }
        Composite::LinearCrossEntropyGradient { smoothing } => format!(" smoothing={smoothing:?}"),
    }
}

/// Nothing where there is no work.
fn score_work(work: &ScoreWork) -> String {
    let mut text = work.soft_cap.map_or(String::new(), |cap| format!(" soft_cap={cap:?}"));
    text += &work.window.map_or(String::new(), |window| format!(" window={window}"));
    let words: Vec<&str> = work.operand_words().into_iter().filter(|word| word.1).map(|word| word.0).collect();
    if words.is_empty() { text } else { text + " with=" + &words.join("+") }
}

pub(super) fn gelu_word(kind: Gelu) -> &'static str {
    match kind {
        Gelu::Tanh => "tanh",
        Gelu::Erf => "erf",
    }
}
