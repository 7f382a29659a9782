//! The interpreter: every primitive of a graph in `f64`, in order.
//!
//! - `Exact`: the mathematics. Only casts to `i8` and `f8e4m3` round, since that is their meaning.
//! - `Analysed`: the same, with the allowed error of a kernel for each value (`slack.rs`, `spread.rs`), which takes most of the time.
//! - `Storage`: every node's value is rounded to its dtype, as if each were stored; sums are accumulated in `f32`, and
//!   functions are as good as a kernel's library promises.
//!
//! A value is freed after its last use. Large gathered matrices never exist all at once (`picked.rs`).

use std::collections::HashMap;

use deuteron_graph::{Dtype, Graph, Node, NodeId, Op, Opaque, Shape, memory};

use crate::array::Array;
use crate::error::ReferenceError;
use crate::matmul::matmul;
use crate::philox::kept;
use crate::picked::{PICKED, picked_operands};
use crate::reduce::{OutOfRange, append, append_places, column_sum, gather, row_reduce, scatter_add};
use crate::round::round_to;
use crate::scalar;
use crate::slack::slack_of;
use crate::spread::{of_input, spread_of};
use crate::store::{Buffers, Store};
use crate::strided::{CHUNK, Strided, concat, map, map1, map2};
use crate::threads::{any, in_pieces};
use crate::value::{Spread, Value};

/// When the interpreter rounds, and whether it analyses what kernels round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Nowhere but in casts to `i8` and `f8e4m3`.
    Exact,
    /// The same; errors of kernels are analysed ([`Interpretation::slack`], [`Interpretation::spread`]).
    Analysed,
    /// After every node, to the node's dtype; after every term of a sum over rows or columns, to `f32`.
    Storage,
}

/// The outputs of a graph.
#[derive(Debug, Clone, PartialEq)]
pub struct Interpretation {
    /// In the order of [`Graph::outputs`].
    pub outputs: Vec<Array>,
    /// For each output, how far each element may lie off because a near tie in a comparison, or a rounding to integers
    /// near a half, could have fallen the other way. `None`: nowhere, or not asked for (only `Analysed` does).
    pub slack: Vec<Option<Vec<f64>>>,
    /// For each output, the standard deviation of the rounding error of each element. `None`: exact, or not asked for.
    pub spread: Vec<Option<Vec<f64>>>,
}

/// Computes the outputs.
pub fn interpret(graph: &Graph, inputs: &[Array], rounding: Rounding) -> Result<Interpretation, ReferenceError> {
    memory::caught(|| interpret_picking(graph, inputs, rounding, PICKED))?
}

/// The same, with at most this many elements of matrices that are picked for rows at once.
pub(crate) fn interpret_picking(
    graph: &Graph,
    inputs: &[Array],
    rounding: Rounding,
    most: usize,
) -> Result<Interpretation, ReferenceError> {
    check_inputs(graph, inputs)?;
    let mut last_use = last_uses(graph);
    let picked = picked_operands(graph, &mut last_use, most);
    reserve(graph, &last_use, rounding)?;
    let evaluation = Evaluation { graph, inputs, rounding, buffers: Buffers::default() };
    let mut values: Vec<Option<Value>> = Vec::with_capacity(graph.nodes().len());
    for (index, node) in graph.nodes().iter().enumerate() {
        values.push(None);
        if last_use[index].is_none() {
            continue;
        }
        values[index] = Some(match picked.get(&index) {
            Some(operand) => operand.multiplied(&evaluation, index, &values)?,
            None => evaluation.node(index, &values)?,
        });
        for input in node.inputs.iter().filter(|input| last_use[input.index()] == Some(index)) {
            if let Some(value) = values[input.index()].take() {
                value.main.recycle(&evaluation.buffers);
            }
        }
    }
    Ok(collect_outputs(graph, values))
}

/// Computes every node and keeps its value: for tests, on small graphs.
pub fn interpret_all(graph: &Graph, inputs: &[Array], rounding: Rounding) -> Result<Vec<Array>, ReferenceError> {
    check_inputs(graph, inputs)?;
    let evaluation = Evaluation { graph, inputs, rounding, buffers: Buffers::default() };
    let mut values = Vec::with_capacity(graph.nodes().len());
    for index in 0..graph.nodes().len() {
        let value = evaluation.node(index, &values)?;
        values.push(Some(value));
    }
    Ok(values.into_iter().flatten().map(|value| value.main.to_array()).collect())
}

fn check_inputs(graph: &Graph, inputs: &[Array]) -> Result<(), ReferenceError> {
    if graph.inputs().len() != inputs.len() {
        return Err(ReferenceError::InputCount { expected: graph.inputs().len(), got: inputs.len() });
    }
    for (&id, array) in graph.inputs().iter().zip(inputs) {
        let expected = &graph.node(id).shape;
        if *expected != array.shape {
            let (expected, got) = (expected.clone(), array.shape.clone());
            return Err(ReferenceError::InputShape { name: graph.label(id), expected, got });
        }
        if expected.elements() != array.values.len() {
            let (expected, got) = (expected.elements(), array.values.len());
            return Err(ReferenceError::InputLength { name: graph.label(id), expected, got });
        }
    }
    Ok(())
}

/// Refuses a graph whose values the memory at hand does not hold, before any is computed: what is reserved here is given
/// back at once. Views are written out where they are outputs.
fn reserve(graph: &Graph, last_use: &[Option<usize>], rounding: Rounding) -> Result<(), ReferenceError> {
    // Beside each value its slack and the two parts of its spread, and as many again on the way to them.
    let copies = if rounding == Rounding::Analysed { 4 } else { 1 };
    let elements = |index: usize| match &graph.nodes()[index] {
        Node { op: Op::View(_), .. } if last_use[index] != Some(usize::MAX) => 0,
        node => node.shape.elements(),
    };
    let (mut live, mut most) = (0usize, 0usize);
    for (index, node) in graph.nodes().iter().enumerate().filter(|(index, _)| last_use[*index].is_some()) {
        live = live.saturating_add(elements(index));
        most = most.max(live);
        let done = node.inputs.iter().filter(|input| last_use[input.index()] == Some(index));
        live = done.fold(live, |live, input| live.saturating_sub(elements(input.index())));
    }
    let bytes = most.saturating_mul(copies * size_of::<f64>());
    Ok(memory::reserved::<u8>(bytes).map(drop)?)
}

/// Where each node is read last; outputs are read at the end. `None`: no output needs the node.
fn last_uses(graph: &Graph) -> Vec<Option<usize>> {
    let mut last_use = vec![None; graph.nodes().len()];
    graph.outputs().iter().for_each(|output| last_use[output.node.index()] = Some(usize::MAX));
    for (index, node) in graph.nodes().iter().enumerate().rev() {
        if last_use[index].is_some() {
            node.inputs.iter().for_each(|input| last_use[input.index()] = last_use[input.index()].or(Some(index)));
        }
    }
    last_use
}

fn collect_outputs(graph: &Graph, mut values: Vec<Option<Value>>) -> Interpretation {
    let mut remaining: HashMap<NodeId, usize> = HashMap::new();
    graph.outputs().iter().for_each(|output| *remaining.entry(output.node).or_default() += 1);
    let mut interpretation = Interpretation { outputs: Vec::new(), slack: Vec::new(), spread: Vec::new() };
    for output in graph.outputs() {
        let slot = &mut values[output.node.index()];
        let count = remaining.entry(output.node).or_default();
        *count -= 1;
        // The last output of a node takes its buffer; others copy it.
        let value = if *count == 0 { slot.take() } else { slot.clone() };
        if let Some(value) = value {
            let spread = (!value.spread.is_exact()).then(|| value.spread.total(&value.main.shape));
            let spread = spread.map(|spread| spread.broadcast(&value.main.shape).into_array().values);
            interpretation.outputs.push(value.main.into_array());
            interpretation.slack.push(value.slack.map(|slack| slack.into_array().values));
            interpretation.spread.push(spread);
        }
    }
    interpretation
}

/// One run of a graph.
pub(crate) struct Evaluation<'g, 'a> {
    pub graph: &'g Graph,
    inputs: &'a [Array],
    rounding: Rounding,
    buffers: Buffers,
}

impl<'a> Evaluation<'_, 'a> {
    fn node(&self, index: usize, values: &[Option<Value<'a>>]) -> Result<Value<'a>, ReferenceError> {
        let node = &self.graph.nodes()[index];
        if let Op::Input { .. } = node.op {
            let position = self.graph.inputs().iter().position(|id| id.index() == index).unwrap_or_default();
            let main = stored_input(&self.inputs[position], node.dtype, self.rounding);
            let spread = match self.rounding {
                Rounding::Analysed => of_input(index, node.dtype, &main),
                Rounding::Exact | Rounding::Storage => Spread::default(),
            };
            return Ok(Value { dtype: node.dtype, main, slack: None, spread });
        }
        let operands: Vec<&Value> = node.inputs.iter().filter_map(|id| values[id.index()].as_ref()).collect();
        self.computed(index, node, &operands)
    }

    /// The value of a node, which is the one at `index` or has some of its rows.
    pub fn computed(&self, index: usize, node: &Node, operands: &[&Value<'a>]) -> Result<Value<'a>, ReferenceError> {
        let rounding = match node.op {
            // The meaning of these casts is to round.
            Op::Cast(dtype @ (Dtype::I8 | Dtype::I32 | Dtype::F8e4m3)) => Some(dtype),
            _ => (self.rounding == Rounding::Storage && node.dtype.is_float()).then_some(node.dtype),
        };
        if let Op::Opaque(opaque) = &node.op {
            return Err(ReferenceError::Opaque { name: opaque.name.clone() });
        }
        let store = Store { rounding, buffers: Some(&self.buffers) };
        let main = primitive(node, operands, store).map_err(|OutOfRange(asked)| ReferenceError::IndexRange {
            op: node.op.name(),
            node: index,
            index: asked,
            rows: match node.op {
                Op::ScatterAdd { rows } => rows,
                Op::Append { .. } => append_places(&operands[0].main.shape, &operands[1].main.shape),
                _ => operands[0].main.shape[0],
            },
        })?;
        let (slack, spread) = match self.rounding {
            Rounding::Analysed => {
                (slack_of(self.graph, node, operands, &main), spread_of(self.graph, index, node, operands, &main))
            }
            Rounding::Exact | Rounding::Storage => (None, Spread::default()),
        };
        Ok(Value { dtype: node.dtype, main, slack, spread })
    }
}

/// Inputs are borrowed unless storing them would change them.
fn stored_input<'a>(array: &'a Array, dtype: Dtype, rounding: Rounding) -> Strided<'a> {
    let borrowed = Strided::borrowed(array);
    let changes = |x: &f64| !x.is_nan() && round_to(dtype, *x) != *x;
    if rounding != Rounding::Storage || !any(&array.values, changes) {
        return borrowed;
    }
    map1(&borrowed, Store { rounding: Some(dtype), buffers: None }, |x| x)
}

fn primitive<'a>(node: &Node, operands: &[&Value<'a>], store: Store) -> Result<Strided<'a>, OutOfRange> {
    let operand = |position: usize| &operands[position].main;
    Ok(match &node.op {
        // Handled by the caller, which holds the arrays and refuses what is only described.
        Op::Input { shape, .. } | Op::Opaque(Opaque { shape, .. }) => Strided::scalar(0.0).broadcast(shape),
        Op::Const { value, .. } => map1(&Strided::scalar(*value), store, |x| x),
        Op::Iota { axis, shape } => iota(shape, *axis),
        Op::Random { drop, offset, shape } => random(shape, operand(0), *drop, *offset),
        Op::Unary(op) => match store.rounding {
            Some(_) => map1(operand(0), store, |x| scalar::library(*op, x)),
            None => map1(operand(0), store, |x| op.apply(x)),
        },
        Op::Binary(op) if node.dtype == Dtype::I32 => {
            map2(&node.shape, [operand(0), operand(1)], store, |a, b| scalar::integer(*op, a, b))
        }
        Op::Binary(op) => map2(&node.shape, [operand(0), operand(1)], store, |a, b| scalar::binary(*op, a, b)),
        Op::Compare(op) => map2(&node.shape, [operand(0), operand(1)], store, |a, b| f64::from(op.holds(a, b))),
        Op::Select => {
            // What it picks from is rounded already.
            let store = Store { rounding: None, ..store };
            let pick = |[condition, a, b]: [f64; 3]| if condition != 0.0 { a } else { b };
            map(&node.shape, [operand(0), operand(1), operand(2)], store, pick)
        }
        Op::Cast(_) => match store.rounding {
            Some(_) => map1(operand(0), store, |x| x),
            None => operand(0).clone(),
        },
        Op::RowReduce(op) => row_reduce(*op, operand(0), store),
        Op::ColumnSum => column_sum(operand(0), store),
        Op::Matmul { transpose_a, transpose_b } => {
            matmul(&node.shape, operand(0), operand(1), *transpose_a, *transpose_b, store)
        }
        Op::Gather => gather(&node.shape, operand(0), operand(1))?,
        Op::ScatterAdd { .. } => scatter_add(&node.shape, operand(0), operand(1), store)?,
        Op::Append { batch } => append(operand(0), operand(1), operand(2), *batch)?,
        Op::View(change) => operand(0).view(change),
        Op::Concat { axis } => {
            let parts: Vec<&Strided> = operands.iter().map(|operand| &operand.main).collect();
            concat(&node.shape, *axis, &parts)
        }
        Op::StopGradient => operand(0).clone(),
    })
}

fn iota(shape: &Shape, axis: usize) -> Strided<'static> {
    let mut dims = vec![1; shape.rank()];
    dims[axis] = shape[axis];
    Strided::owned(Shape::new(dims), memory::collected((0..shape[axis]).map(|i| i as f64))).broadcast(shape)
}

fn random(shape: &Shape, seed: &Strided, drop: f64, offset: u32) -> Strided<'static> {
    // A negative seed is the same bits as an unsigned word.
    let seed = seed.to_array().values[0] as i64 as u32;
    let mut values = memory::zeros(shape.elements());
    in_pieces(&mut values, CHUNK, |task, chunk| {
        for (position, value) in chunk.iter_mut().enumerate() {
            *value = kept((task * CHUNK + position) as u64, seed, offset, drop);
        }
    });
    Strided::owned(shape.clone(), values)
}
