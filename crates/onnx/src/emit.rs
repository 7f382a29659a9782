//! Converts the canonical form to a graph. Operations without a primitive become opaque.

use std::collections::{HashMap, HashSet};

use deuteron_graph::{BinaryOp, CompareOp, Dtype, Graph, GraphError, NodeId, OpaqueCost, ReduceOp, Shape, UnaryOp};

use crate::element::Element;
use crate::error::OnnxError;
use crate::imported::{OpaqueOp, Port};
use crate::ir::{Id, Ir, Kind, Logic, Reduction};
use crate::translate::Translated;
use crate::weight::Weight;

/// A graph under construction, with its inputs and weights.
#[derive(Debug)]
pub(crate) struct Emitted {
    pub graph: Graph,
    pub weights: Vec<Weight>,
    pub opaque: Vec<OpaqueOp>,
    pub inputs: Vec<Port>,
    /// For each node of the canonical form, the graph's, if it was needed.
    pub places: Vec<Option<NodeId>>,
    /// Whether integers of 64 bits, or unsigned ones of 32, are computed in 32 bits.
    pub is_narrowed: bool,
}

/// Builds the graph of what the outputs need.
pub(crate) fn emit(translated: &Translated, float: Option<Dtype>) -> Result<Emitted, OnnxError> {
    let ir = &translated.ir;
    let mut emitter = Emitter {
        translated,
        ir,
        float,
        graph: Graph::new(&translated.name),
        weights: Vec::new(),
        opaque: Vec::new(),
        inputs: Vec::new(),
        places: vec![None; ir.nodes.len()],
        results: vec![Vec::new(); ir.nodes.len()],
        names: HashSet::new(),
        repeats: HashMap::new(),
        tables: HashMap::new(),
        is_narrowed: false,
    };
    emitter.add_inputs()?;
    let needed = ir.needed();
    for id in ir.ids().filter(|id| needed[id.index()]) {
        emitter.with_operands(id)?;
    }
    for (name, id) in &ir.outputs {
        let name = emitter.name("out", name);
        if let Some(node) = emitter.places[id.index()] {
            emitter.graph.output(&name, node)?;
        }
    }
    let Emitter { graph, weights, opaque, inputs, places, is_narrowed, .. } = emitter;
    Ok(Emitted { graph, weights, opaque, inputs, places, is_narrowed })
}

pub(crate) struct Emitter<'t> {
    translated: &'t Translated,
    pub ir: &'t Ir,
    /// The dtype of all floats, where one is asked for.
    float: Option<Dtype>,
    pub graph: Graph,
    pub weights: Vec<Weight>,
    opaque: Vec<OpaqueOp>,
    inputs: Vec<Port>,
    places: Vec<Option<NodeId>>,
    /// Whether integers of 64 bits, or unsigned ones of 32, are computed in 32 bits.
    pub is_narrowed: bool,
    /// All results of nodes that have several.
    results: Vec<Vec<NodeId>>,
    /// Names taken, inputs and outputs apart.
    names: HashSet<String>,
    repeats: HashMap<String, usize>,
    /// Folded constants that are weights already, by the hash of their bytes.
    pub tables: HashMap<u64, Vec<(usize, NodeId)>>,
}

impl Emitter<'_> {
    /// A name that the graph's text form can read back, and that is free among inputs (`in`) or outputs (`out`).
    pub fn name(&mut self, space: &'static str, wanted: &str) -> String {
        // Words of the text form are no names: `f32`, `inf`, `transposed`.
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '/');
        let mut clean: String =
            crate::schema::short(wanted).chars().map(|c| if allowed(c) { c } else { '_' }).collect();
        if !deuteron_graph::is_name(&clean) {
            clean.insert(0, '_');
        }
        let mut name = clean.clone();
        while !self.names.insert(format!("{space}:{name}")) {
            // Counted per name, so that many equal names are made unique without trying each number.
            let count = self.repeats.entry(format!("{space}:{clean}")).or_insert(1);
            *count += 1;
            name = format!("{clean}_{count}");
        }
        name
    }

    /// What an element type is in this graph.
    pub fn dtype(&self, element: Element) -> Dtype {
        element.dtype_with(self.float)
    }

    /// What an element type is as an input of this graph.
    pub fn input_dtype(&self, element: Element) -> Dtype {
        element.input_dtype(self.float)
    }

    /// An initializer as a weight of the graph, whose data stay where they are.
    pub fn weight(&mut self, position: usize) -> Result<NodeId, GraphError> {
        let tensor = &self.translated.tensors[position];
        let name = self.name("in", &tensor.name);
        let dtype = self.input_dtype(tensor.element);
        let input = self.graph.weight(&name, dtype, tensor.shape.clone())?;
        self.weights.push(Weight::stored(name, tensor, dtype));
        Ok(input)
    }

    /// All inputs of the model, needed or not: the caller passes all of them.
    fn add_inputs(&mut self) -> Result<(), OnnxError> {
        let mut nodes = Vec::new();
        for input in &self.translated.inputs {
            let name = self.name("in", &input.name);
            let dtype = self.input_dtype(input.element);
            nodes.push(self.graph.input(&name, dtype, input.shape.clone())?);
            // The bits of a byte are those of the graph's, signed or not.
            let is_byte = dtype == Dtype::I8 && input.element.bits() == 8;
            let range = input.element.range().filter(|_| !is_byte);
            let assumed = self.translated.assumed.get(&input.name).cloned();
            self.inputs.push(Port { original: input.name.clone(), name, range, assumed });
        }
        for id in self.ir.ids() {
            if let Kind::Input(position) = self.ir.node(id).kind {
                self.places[id.index()] = nodes.get(position).copied();
            }
        }
        Ok(())
    }

    /// A node after its operands. No recursion: operands that recognition appended lie behind their readers.
    fn with_operands(&mut self, id: Id) -> Result<(), OnnxError> {
        let mut stack = vec![id];
        while let Some(&top) = stack.last() {
            if self.places[top.index()].is_some() {
                stack.pop();
                continue;
            }
            let ir = self.ir;
            let leaf = ir.node(top).constant.is_some();
            let open: Vec<Id> =
                ir.node(top).inputs.iter().copied().filter(|input| self.places[input.index()].is_none()).collect();
            if leaf || open.is_empty() {
                self.places[top.index()] = Some(self.node(top)?);
                stack.pop();
            } else {
                stack.extend(open);
            }
        }
        Ok(())
    }

    fn node(&mut self, id: Id) -> Result<NodeId, OnnxError> {
        let node = self.ir.node(id);
        if node.constant.is_some() {
            return Ok(self.constant(id)?);
        }
        if let Kind::Weight(position) = node.kind {
            return Ok(self.weight(position)?);
        }
        let operands: Vec<NodeId> = node.inputs.iter().filter_map(|input| self.places[input.index()]).collect();
        match self.operation(id, &operands) {
            Ok(result) => Ok(result),
            // A shape is refused for its size; operands, for types that the graph does not compute with.
            Err(error @ GraphError::TooLarge { .. }) => Err(error.into()),
            Err(error) => self.described(id, &operands, &why(node.element, &error)),
        }
    }

    /// Operators of the file that are only described.
    fn described(&mut self, id: Id, operands: &[NodeId], why: &str) -> Result<NodeId, OnnxError> {
        let node = self.ir.node(id);
        let origin = &self.ir.origins[node.origin];
        let (op, why, flops, elementwise, results) = match &node.kind {
            Kind::Opaque(opaque) => {
                (opaque.op.as_str(), opaque.why.as_str(), opaque.flops, opaque.elementwise, opaque.results.clone())
            }
            kind => {
                let elementwise = kind.is_elementwise();
                (
                    origin.op.as_str(),
                    why,
                    node.shape.elements() as u64,
                    elementwise,
                    vec![(node.element, node.shape.clone())],
                )
            }
        };
        let typed: Vec<(Dtype, Shape)> =
            results.into_iter().map(|(element, shape)| (self.dtype(element), shape)).collect();
        let cost = OpaqueCost { bytes: None, flops, elementwise };
        let nodes = self.graph.opaque(op, operands, &typed, cost)?;
        self.opaque.push(OpaqueOp {
            name: origin.name.clone(),
            op_type: op.to_string(),
            why: why.to_string(),
            node: nodes[0],
        });
        self.results[id.index()] = nodes.clone();
        Ok(nodes[0])
    }

    fn operation(&mut self, id: Id, operands: &[NodeId]) -> Result<NodeId, GraphError> {
        let ir = self.ir;
        let node = ir.node(id);
        let x = operands.first().copied();
        let first = || x.ok_or_else(|| unsupported("an operation without operands"));
        let are = |dtype: Dtype| node.inputs.iter().all(|&input| ir.element(input).dtype() == dtype);
        match &node.kind {
            Kind::Unary(_) | Kind::Binary(_) | Kind::Function(_) | Kind::Reduce { .. } if are(Dtype::I8) => {
                self.byte_arithmetic(id, operands)
            }
            Kind::Unary(_) | Kind::Function(_) | Kind::Power(_) | Kind::Reduce { .. } if are(Dtype::I32) => {
                self.integer_arithmetic(id, operands)
            }
            Kind::Unary(op) => self.graph.unary(*op, first()?),
            Kind::Binary(op) => {
                let (a, b) = self.scalars(id, operands)?;
                match node.element.dtype() {
                    Dtype::I32 => self.integer_binary(*op, a, b, node.element),
                    _ => self.graph.binary(*op, a, b),
                }
            }
            Kind::Power(exponent) => self.power(first()?, *exponent),
            Kind::Function(function) => self.function(*function, operands),
            Kind::Compare(op) => {
                let (mut a, mut b) = self.scalars(id, operands)?;
                let element = ir.element(node.inputs[0]);
                if matches!(element, Element::Bool | Element::I8 | Element::U8) {
                    (a, b) = (self.byte_value(a, element)?, self.byte_value(b, element)?);
                }
                self.graph.compare(*op, a, b)
            }
            Kind::Logic(op) => self.logic(*op, operands),
            Kind::Select => self.select(operands, node.element),
            Kind::Cast(element) => self.cast(first()?, ir.element(node.inputs[0]), *element),
            Kind::Reduce { op, axes, .. } => self.reduce(first()?, *op, axes, &node.shape),
            Kind::Softmax => self.graph.softmax(first()?),
            Kind::Matmul { transpose_a, transpose_b } => self.matmul(operands, *transpose_a, *transpose_b, &node.shape),
            Kind::Gather if node.element == Element::Bool => {
                let table = self.graph.cast(operands[0], Dtype::F32)?;
                let rows = self.graph.gather(table, operands[1])?;
                self.cast(rows, Element::F32, Element::Bool)
            }
            Kind::Gather => self.graph.gather(operands[0], operands[1]),
            Kind::Reshape(shape) => self.graph.reshape(first()?, shape.clone()),
            Kind::Transpose(permutation) => self.graph.transpose(first()?, permutation),
            Kind::Slice { axis, start, length } => self.graph.slice(first()?, *axis, *start, *length),
            Kind::Broadcast(shape) => self.graph.broadcast(first()?, shape.clone()),
            Kind::Concat { axis } => self.graph.concat(operands, *axis),
            Kind::Composite(composite) => {
                let results = self.graph.call(*composite, operands)?;
                let result = results[0];
                self.results[id.index()] = results;
                Ok(result)
            }
            Kind::Part(index) => {
                let results = &self.results[node.inputs[0].index()];
                results.get(*index).copied().ok_or_else(|| unsupported("a result that the operation does not give"))
            }
            Kind::Opaque(_) | Kind::Input(_) | Kind::Weight(_) | Kind::Constant => Err(unsupported("only described")),
        }
    }

    /// Two operands, where a uniform constant that does not widen the result is a plain scalar.
    fn scalars(&mut self, id: Id, operands: &[NodeId]) -> Result<(NodeId, NodeId), GraphError> {
        let node = self.ir.node(id);
        let mut both = [operands[0], operands[1]];
        for (index, operand) in both.iter_mut().enumerate() {
            let (own, other) = (node.inputs[index], node.inputs[1 - index]);
            if let (Some(value), true) = (self.ir.scalar(own), *self.ir.shape(other) == node.shape) {
                let dtype = self.dtype(self.ir.element(own));
                if self.ir.shape(own).rank() > 0 && (dtype.is_float() || dtype == Dtype::I32) && !value.is_nan() {
                    *operand = self.graph.constant(value, dtype)?;
                }
            }
        }
        Ok((both[0], both[1]))
    }

    fn logic(&mut self, op: Logic, operands: &[NodeId]) -> Result<NodeId, GraphError> {
        let zero = self.graph.constant(0.0, Dtype::F32)?;
        let floats = operands.iter().map(|&x| self.graph.cast(x, Dtype::F32)).collect::<Result<Vec<_>, _>>()?;
        match (op, &floats[..]) {
            (Logic::Not, [x]) => self.graph.compare(CompareOp::Eq, *x, zero),
            (Logic::And, [a, b]) => {
                let both = self.graph.mul(*a, *b)?;
                self.graph.compare(CompareOp::Ne, both, zero)
            }
            (Logic::Or, [a, b]) => {
                let any = self.graph.binary(BinaryOp::Max, *a, *b)?;
                self.graph.compare(CompareOp::Ne, any, zero)
            }
            (Logic::Xor, [a, b]) => self.graph.compare(CompareOp::Ne, *a, *b),
            _ => Err(unsupported("one or two truth values")),
        }
    }

    /// Some axes moved to the end and made one.
    pub fn rows(&mut self, x: NodeId, axes: &[usize]) -> Result<NodeId, GraphError> {
        let from = self.graph.node(x).shape.clone();
        let kept: Vec<usize> = (0..from.rank()).filter(|axis| !axes.contains(axis)).collect();
        let permutation: Vec<usize> = kept.iter().chain(axes).copied().collect();
        let mut rows = x;
        if permutation.iter().enumerate().any(|(i, &axis)| i != axis) {
            rows = self.graph.transpose(x, &permutation)?;
        }
        let dims: Vec<usize> =
            kept.iter().map(|&axis| from[axis]).chain([axes.iter().map(|&axis| from[axis]).product()]).collect();
        let flat = Shape::new(dims);
        if self.graph.node(rows).shape == flat { Ok(rows) } else { self.graph.reshape(rows, flat) }
    }

    /// A reduction over any axes.
    pub fn reduce(&mut self, x: NodeId, op: Reduction, axes: &[usize], shape: &Shape) -> Result<NodeId, GraphError> {
        let rows = self.rows(x, axes)?;
        let reduced = match op {
            Reduction::Sum => self.graph.reduce(ReduceOp::Sum, rows)?,
            Reduction::Mean => self.graph.reduce(ReduceOp::Mean, rows)?,
            Reduction::Max => self.graph.reduce(ReduceOp::Max, rows)?,
            Reduction::ArgMax => self.graph.reduce(ReduceOp::ArgMax, rows)?,
            Reduction::Min => {
                let negative = self.graph.unary(UnaryOp::Neg, rows)?;
                let largest = self.graph.reduce(ReduceOp::Max, negative)?;
                self.graph.unary(UnaryOp::Neg, largest)?
            }
        };
        if self.graph.node(reduced).shape == *shape { Ok(reduced) } else { self.graph.reshape(reduced, shape.clone()) }
    }

    /// Leading axes are repeated where they differ, except those of a second operand of rank 2.
    fn matmul(
        &mut self,
        operands: &[NodeId],
        transpose_a: bool,
        transpose_b: bool,
        shape: &Shape,
    ) -> Result<NodeId, GraphError> {
        let batch = &shape[..shape.rank() - 2];
        let mut widen = |x: NodeId, keep_matrix: bool| {
            let from = self.graph.node(x).shape.clone();
            let leading = &from[..from.rank() - 2];
            if leading == batch || (keep_matrix && leading.is_empty()) {
                return Ok(x);
            }
            let dims: Vec<usize> = batch.iter().chain(&from[from.rank() - 2..]).copied().collect();
            self.graph.broadcast(x, dims)
        };
        let (a, b) = (widen(operands[0], false)?, widen(operands[1], true)?);
        self.graph.matmul_transposed(a, b, transpose_a, transpose_b)
    }
}

/// Told in the report of opaque operations: the graph computes with floats, and compares integers.
fn why(element: Element, error: &GraphError) -> String {
    match error {
        GraphError::Attribute { expected, .. } => expected.clone(),
        GraphError::Operands { .. } if !element.is_float() => {
            format!("{} arithmetic is not a primitive", element.dtype())
        }
        other => other.to_string(),
    }
}

/// A refusal that ends as an opaque operation.
pub(crate) fn unsupported(expected: &str) -> GraphError {
    let (op, got) = (String::new(), String::new());
    GraphError::Attribute { op, attribute: "kind", expected: expected.to_string(), got }
}
