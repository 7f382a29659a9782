//! Operators of ONNX to the canonical form, one by one, in the file's order.
//!
//! Functions are inlined, branches on known conditions taken, loops of known length written out. What has no counterpart becomes an opaque operation if
//! its results' shapes are known.

mod activation;
mod attention;
mod bits;
mod call;
mod cast;
mod contraction;
mod einsum;
mod elementwise;
mod flex;
mod fourier;
mod fused;
mod index;
mod known;
mod loss;
mod norm;
mod opaque;
mod optimizer;
mod quantize;
mod recurrent;
mod reduce;
mod resize;
mod sample;
mod scope;
mod sequence;
mod sizes;
mod unroll;
mod vectorize;
mod view;
mod window;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::rc::Rc;

use deuteron_graph::Shape;

use crate::constant::Constant;
use crate::element::Element;
use crate::error::OnnxError;
use crate::ir::{Id, Ir, Kind, OpaqueKind};
use crate::limits::{FOLD_FLOAT_ELEMENTS, MAX_DEPTH, MAX_DIMS, MAX_IR_NODES, MAX_PORTS, MAX_WORK};
use crate::options::Options;
use crate::schema::{Dim, Function, GraphProto, Model, NodeProto, Tensor, ValueInfo, default_opset, short};
use crate::weight::{StoredTensor, TensorData, shape_of};
use crate::wire::Reader;

use scope::Scope;
use sizes::{Guess, Sizes};

pub(crate) use call::{Call, NamedAttribute, Problem};

/// An input of the model.
#[derive(Debug, Clone)]
pub(crate) struct InputInfo {
    pub name: String,
    pub element: Element,
    pub shape: Shape,
}

/// Everything the translation gives.
#[derive(Debug)]
pub(crate) struct Translated {
    pub name: String,
    pub ir: Ir,
    pub inputs: Vec<InputInfo>,
    pub tensors: Vec<StoredTensor>,
    pub notes: Vec<String>,
    /// Values of inputs, by their name, without which sizes would not be known.
    pub assumed: BTreeMap<String, TensorData>,
}

/// Reads the file and translates its graph.
pub(crate) fn translate(file: &[u8], options: &Options) -> Result<Translated, OnnxError> {
    let model = Model::read(Reader::new(file))?;
    let graph = model.graph.as_ref().ok_or(OnnxError::NoGraph)?;
    // A model of other operators alone states no default set.
    let opset = default_opset(&model.opsets).unwrap_or(if model.opsets.is_empty() { 0 } else { NEWEST });
    // Before 7, operands were broadcast by attributes.
    if opset < 7 && !graph.nodes.iter().all(|node| UNCHANGED.contains(&node.op)) {
        return Err(OnnxError::Opset { got: opset });
    }
    let mut first: Option<(Result<(), OnnxError>, Translator)> = None;
    for guess in sizes::GUESSES {
        // Another guess may fit where the first does not.
        if first.as_ref().is_some_and(|(_, translator)| !translator.sizes.depends_on(guess)) {
            continue;
        }
        let mut translator = Translator::new(file, &model, options, opset, guess);
        let outcome = translator.top(graph);
        if outcome.is_ok() && !translator.has_misfit {
            return Ok(translator.finish(graph));
        }
        if let (Err(error), Some(fixed), Some(asked)) = (&outcome, translator.sizes.changed_batch(), options.batch) {
            return Err(OnnxError::FixedBatch { fixed, asked, why: error.to_string() });
        }
        // A file with a branch that is only described is better than none.
        if first.as_ref().is_none_or(|(before, _)| before.is_err() && outcome.is_ok()) {
            first = Some((outcome, translator));
        }
    }
    match first {
        Some((Ok(()), translator)) => Ok(translator.finish(graph)),
        Some((Err(error), _)) => Err(error),
        None => Err(OnnxError::NoGraph),
    }
}

/// Operators that mean in every set what they mean now; their attributes that no longer exist are refused as such.
const UNCHANGED: [&str; 18] = [
    "Abs",
    "Ceil",
    "Constant",
    "Conv",
    "Exp",
    "Floor",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "Identity",
    "Log",
    "MatMul",
    "Neg",
    "Not",
    "Reciprocal",
    "Relu",
    "Sigmoid",
    "Sqrt",
    "Tanh",
];

/// Values of an input of one element that sizes depend on, in the order they are tried: a scale that changes nothing or the smallest count, then
/// the side of an image.
const ASSUMED: [f64; 2] = [1.0, 256.0];

/// The version of the default operator set that this knows.
const NEWEST: i64 = 27;

pub(crate) struct Translator<'a, 'm> {
    file: &'a [u8],
    options: &'m Options,
    functions: HashMap<(&'a str, &'a str), &'m Function<'a>>,
    pub ir: Ir,
    inputs: Vec<InputInfo>,
    tensors: Vec<StoredTensor>,
    notes: Vec<String>,
    /// What the file states of values.
    infos: HashMap<&'a str, (Option<i64>, Option<Vec<Dim<'a>>>)>,
    scopes: Vec<Scope<'a>>,
    /// The version of the default operator set at the place that is read.
    opset: i64,
    sizes: Sizes<'m>,
    /// Inputs whose given values the graph depends on.
    specialised: BTreeSet<String>,
    /// Inputs of one element that sizes depend on, and the value that is assumed where none is given.
    assumed: BTreeMap<String, TensorData>,
    /// Quantised values as the floats that they stand for.
    floats: HashMap<Id, Id>,
    /// Values that the given inputs settle, or not.
    settled: HashMap<Id, Option<Rc<Constant>>>,
    /// Names read and written so far, functions inlined.
    work: usize,
    /// Whether neither branch of an `If` fits the sizes, so that it is only described.
    has_misfit: bool,
}

impl<'a, 'm> Translator<'a, 'm> {
    fn new(file: &'a [u8], model: &'m Model<'a>, options: &'m Options, opset: i64, guess: Guess) -> Self {
        let mut ir = Ir { folder: crate::fold::Folder::with_work(options.fold_work), ..Ir::default() };
        ir.enter(short(model.graph.as_ref().map_or("", |graph| graph.name)).to_string(), "graph");
        Translator {
            file,
            sizes: Sizes::new(options, guess),
            opset,
            options,
            functions: model.functions.iter().map(|function| ((function.domain, function.name), function)).collect(),
            ir,
            inputs: Vec::new(),
            tensors: Vec::new(),
            notes: Vec::new(),
            infos: HashMap::new(),
            scopes: vec![Scope::default()],
            specialised: BTreeSet::new(),
            assumed: BTreeMap::new(),
            floats: HashMap::new(),
            settled: HashMap::new(),
            work: 0,
            has_misfit: false,
        }
    }

    fn finish(self, graph: &GraphProto) -> Translated {
        let Translator { ir, inputs, tensors, mut notes, sizes, specialised, assumed, .. } = self;
        notes.splice(0..0, sizes.notes);
        for name in specialised {
            notes.push(match assumed.get(&name).and_then(|value| value.constant().uniform()) {
                Some(value) => {
                    format!("sizes depend on the value of `{name}`: {value} is assumed (--inputs gives another)")
                }
                None => {
                    format!("the graph depends on the values of `{name}`, and holds only for those that were given")
                }
            });
        }
        Translated { name: short(graph.name).to_string(), ir, inputs, tensors, notes, assumed }
    }

    fn folder(&self) -> Option<&'m Path> {
        self.options.folder.as_deref()
    }

    fn top(&mut self, graph: &GraphProto<'a>) -> Result<(), OnnxError> {
        if graph.inputs.len() + graph.outputs.len() > MAX_PORTS + graph.initializers.len() {
            return Err(OnnxError::Limit { what: "inputs and outputs", limit: MAX_PORTS });
        }
        self.note_infos(graph);
        self.initializers(graph)?;
        self.sizes.look_at(graph);
        for input in &graph.inputs {
            // Up to IR version 3, initializers are inputs too.
            if self.lookup(input.name).is_none() {
                self.input(input)?;
            }
        }
        self.sizes.all_used(graph)?;
        self.run(&graph.nodes)?;
        for output in &graph.outputs {
            let undefined =
                || OnnxError::Undefined { reader: "graph output".to_string(), value: output.name.to_string() };
            let id = self.lookup(output.name).ok_or_else(undefined)?;
            self.ir.outputs.push((output.name.to_string(), id));
        }
        Ok(())
    }

    fn note_infos(&mut self, graph: &GraphProto<'a>) {
        for info in graph.value_info.iter().chain(&graph.outputs) {
            if info.dims.is_some() {
                self.infos.insert(info.name, (info.element, info.dims.clone()));
            }
        }
    }

    fn initializers(&mut self, graph: &GraphProto<'a>) -> Result<(), OnnxError> {
        for tensor in &graph.initializers {
            let id = self.tensor(tensor, tensor.name)?;
            self.bind(tensor.name, id);
        }
        Ok(())
    }

    /// A tensor of the file: known at once if it is small enough to matter for shapes and masks, else a weight.
    pub fn tensor(&mut self, tensor: &Tensor<'a>, name: &str) -> Result<Id, OnnxError> {
        let stored = self.find(tensor, name)?;
        if stored.element == Element::F64 && stored.shape.elements() > 1 {
            self.notes.push(format!("`{name}` is f64 and becomes f32"));
        }
        self.note_width(name, stored.element);
        let elements = stored.shape.elements();
        let is_vector = stored.shape.iter().filter(|&&size| size != 1).count() <= 1;
        let is_light = match stored.element {
            element if element.is_float() => is_vector && elements <= FOLD_FLOAT_ELEMENTS,
            element if element.bits() <= 8 && element != Element::Bool => {
                elements <= 1 || (is_vector && elements <= FOLD_FLOAT_ELEMENTS)
            }
            _ => true,
        };
        let width = if stored.element == Element::Bool { 1 } else { 8 };
        let is_light = is_light || stored.is_mask(self.file);
        let constant = if is_light && self.ir.folder.spend(elements, elements * width) {
            Some(Rc::new(stored.decode(self.file)?))
        } else {
            None
        };
        let (shape, element) = (stored.shape.clone(), stored.element);
        self.tensors.push(stored);
        let id = self.ir.raw(Kind::Weight(self.tensors.len() - 1), &[], shape, element);
        self.ir.nodes[id.index()].constant = constant;
        Ok(id)
    }

    fn input(&mut self, input: &ValueInfo<'a>) -> Result<(), OnnxError> {
        let (Some(number), Some(dims)) = (input.element, &input.dims) else {
            return Err(OnnxError::NotATensor(input.name.to_string()));
        };
        let element = Element::from_number(number)
            .ok_or_else(|| OnnxError::ElementType { value: input.name.to_string(), got: number })?;
        self.note_width(input.name, element);
        let sizes = self.sizes.of_input(input, dims)?;
        let shape = shape_of(input.name, &sizes)?;
        self.inputs.push(InputInfo { name: input.name.to_string(), element, shape: shape.clone() });
        let id = self.ir.raw(Kind::Input(self.inputs.len() - 1), &[], shape, element);
        self.bind(input.name, id);
        Ok(())
    }

    /// Says where a graph takes more memory than the file, whose type it does not have.
    fn note_width(&mut self, name: &str, element: Element) {
        let (bits, dtype) = (element.bits(), element.input_dtype(None));
        if bits < 8 || (bits == 8 && dtype.bytes() > 1) {
            self.notes.push(format!("`{}` has elements of {bits} bits and becomes {dtype}", short(name)));
        }
    }

    /// The given values of an input, by which the graph is settled.
    pub fn given(&mut self, id: Id) -> Option<Rc<Constant>> {
        self.given_within(id, 0)
    }

    fn given_within(&mut self, id: Id, depth: usize) -> Option<Rc<Constant>> {
        if let Some(constant) = &self.ir.node(id).constant {
            return Some(constant.clone());
        }
        let node = self.ir.node(id);
        if let Kind::Input(position) = node.kind {
            let name = &self.inputs[position].name;
            let value = self.options.values.get(name).or_else(|| self.assumed.get(name))?;
            self.specialised.insert(name.clone());
            return Some(Rc::new(value.constant()));
        }
        // Only small values shape a graph, a few operations after an input.
        let is_small = node.shape.elements() <= MAX_DIMS * MAX_DIMS;
        let is_any_known = !self.options.values.is_empty() || !self.assumed.is_empty();
        if !is_any_known || matches!(node.kind, Kind::Weight(_)) || !is_small || depth > MAX_DEPTH {
            return None;
        }
        if let Some(known) = self.settled.get(&id) {
            return known.clone();
        }
        let (kind, shape, element) = (node.kind.clone(), node.shape.clone(), node.element);
        let inputs = node.inputs.clone();
        let from = self.ir.element(*inputs.first()?);
        let operands = inputs.iter().map(|&input| self.given_within(input, depth + 1)).collect::<Option<Vec<_>>>();
        let settled = operands.and_then(|operands| {
            let operands: Vec<&Constant> = operands.iter().map(Rc::as_ref).collect();
            self.ir.folder.fold(&kind, &operands, from, element, &shape).map(Rc::new)
        });
        self.settled.insert(id, settled.clone());
        settled
    }

    /// Whether the given values of an input, if it is one, have a property.
    pub fn is_given(&self, id: Id, property: impl Fn(f64) -> bool) -> bool {
        let Kind::Input(position) = self.ir.node(id).kind else { return false };
        let value = self.options.values.get(&self.inputs[position].name);
        value.is_some_and(|value| value.constant().distinct().any(property))
    }

    /// A number that is known, or given with the inputs.
    pub fn scalar(&mut self, id: Id) -> Option<f64> {
        self.ir.scalar(id).or_else(|| self.given(id)?.uniform())
    }

    /// Counts what functions and branches could repeat without end.
    fn spend(&mut self, work: usize) -> Result<(), OnnxError> {
        self.work = self.work.saturating_add(work);
        if self.work <= MAX_WORK {
            return Ok(());
        }
        Err(OnnxError::Limit { what: "operands of operations, functions inlined", limit: MAX_WORK })
    }

    /// A tensor checked and located. Within functions, whose bodies are read again at each call, its length counts.
    pub fn find(&mut self, tensor: &Tensor<'a>, name: &str) -> Result<StoredTensor, OnnxError> {
        if self.scopes.len() > 1 {
            self.spend((tensor.packed.map_or(0, |(_, packed)| packed.len()) + tensor.loose.len()) / 64)?;
        }
        StoredTensor::find(tensor, name, self.folder())
    }

    fn run(&mut self, nodes: &[NodeProto<'a>]) -> Result<(), OnnxError> {
        nodes.iter().try_for_each(|node| self.node(node))
    }

    fn node(&mut self, node: &NodeProto<'a>) -> Result<(), OnnxError> {
        self.spend(1 + node.inputs.len() + node.outputs.len() + node.attributes.len())?;
        if self.ir.nodes.len() > MAX_IR_NODES {
            return Err(OnnxError::Limit { what: "operations after translation", limit: MAX_IR_NODES });
        }
        let label = node.label();
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for &name in &node.inputs {
            inputs.push(match name {
                "" => None,
                name => {
                    let undefined = || OnnxError::Undefined { reader: label.clone(), value: name.to_string() };
                    Some(self.lookup(name).ok_or_else(undefined)?)
                }
            });
        }
        let attributes = self.resolve(&node.attributes);
        self.ir.enter(label.clone(), short(node.op));
        if let Some(&function) = self.functions.get(&(node.domain, node.op)) {
            return self.function(function, node, inputs, attributes);
        }
        let call = Call::new(node, self.opset, attributes, inputs);
        if node.op == "If" && self.branch(&call, node)? {
            return Ok(());
        }
        let mut computed = self.computed(&call);
        if matches!(computed, Err(Problem::Opaque(_))) && self.lacks_shape(&call) {
            computed = self.computed_by_assuming(&call).unwrap_or(computed);
        }
        let results = match computed {
            Ok(results) => results,
            Err(Problem::Refused(problem)) => {
                return Err(OnnxError::Node { node: label, op: node.op.to_string(), problem });
            }
            Err(Problem::Failed(error)) => return Err(error),
            Err(Problem::Opaque(why)) => self.described(&call, why)?,
        };
        for (&name, id) in node.outputs.iter().zip(results) {
            if !name.is_empty() {
                self.bind(name, id);
            }
        }
        Ok(())
    }

    /// The results of an operator, all attributes of which must have been looked at.
    fn computed(&mut self, call: &Call<'a, '_>) -> Result<Vec<Id>, Problem> {
        let first = self.ir.nodes.len();
        let results = self.operator(call)?;
        // What is only described claims nothing about its attributes.
        if self.is_described(&results, first) {
            return Ok(results);
        }
        call.all_read()?;
        let missing = |index: &usize| call.wants(*index) && *index >= results.len();
        match (0..call.node.outputs.len()).find(missing) {
            Some(index) => Err(Problem::Opaque(format!("its result {index} is not computed"))),
            None => Ok(results),
        }
    }

    /// The same where its sizes depend on inputs of one element, by assuming their values.
    fn computed_by_assuming(&mut self, call: &Call<'a, '_>) -> Option<Result<Vec<Id>, Problem>> {
        // How often a loop runs is not a size.
        if ["If", "Loop", "Scan"].contains(&call.node.op) {
            return None;
        }
        let mut positions = BTreeSet::new();
        for id in call.all() {
            positions.extend(self.single_inputs(id).unwrap_or_default());
        }
        let known =
            |input: &InputInfo| self.options.values.contains_key(&input.name) || self.assumed.contains_key(&input.name);
        let inputs = positions.into_iter().map(|position| &self.inputs[position]);
        let open: Vec<InputInfo> = inputs.filter(|input| !known(input)).cloned().collect();
        let specialised = self.specialised.clone();
        for value in ASSUMED.into_iter().filter(|_| !open.is_empty()) {
            for InputInfo { name, element, shape } in &open {
                let value = TensorData::of_values(element.dtype(), shape.clone(), [value].into_iter());
                self.assumed.insert(name.clone(), value);
            }
            self.settled.clear();
            let computed = self.computed(call);
            if computed.is_ok() {
                return Some(computed);
            }
        }
        open.iter().for_each(|input| {
            self.assumed.remove(&input.name);
        });
        self.specialised = specialised;
        self.settled.clear();
        None
    }

    /// The inputs of one element each that a small value is computed from; `None` where it depends on something else.
    fn single_inputs(&self, id: Id) -> Option<BTreeSet<usize>> {
        let (mut found, mut open, mut seen) = (BTreeSet::new(), vec![id], BTreeSet::from([id]));
        while let Some(id) = open.pop() {
            let node = self.ir.node(id);
            match node.kind {
                _ if node.constant.is_some() => {}
                Kind::Input(position) if node.shape.elements() == 1 => {
                    found.insert(position);
                }
                Kind::Input(_) | Kind::Weight(_) => return None,
                _ if node.shape.elements() > MAX_DIMS * MAX_DIMS || seen.len() > MAX_DEPTH * MAX_DEPTH => return None,
                _ => open.extend(node.inputs.iter().filter(|&&input| seen.insert(input))),
            }
        }
        Some(found)
    }

    /// Whether a result has no shape unless it is computed.
    fn lacks_shape(&self, call: &Call<'a, '_>) -> bool {
        let outputs = &call.node.outputs;
        outputs.iter().any(|name| !name.is_empty() && self.stated(name).is_none() && self.guessed(call).is_none())
    }

    /// Whether results of an operator whose nodes begin at `start` are only described.
    fn is_described(&self, results: &[Id], start: usize) -> bool {
        let kind = |id: &Id| &self.ir.node(*id).kind;
        results.first().is_some_and(|first| match kind(first) {
            _ if first.index() < start => false,
            Kind::Opaque(_) => true,
            Kind::Part(_) => matches!(kind(&self.ir.node(*first).inputs[0]), Kind::Opaque(_)),
            _ => false,
        })
    }

    /// An operator without counterpart, if the shapes of its results are known.
    fn described(&mut self, call: &Call<'a, '_>, why: String) -> Result<Vec<Id>, OnnxError> {
        let mut results = Vec::new();
        for &name in &call.node.outputs {
            let unknown = || OnnxError::UnknownShape {
                node: call.node.label(),
                op: call.node.op.to_string(),
                value: name.to_string(),
                why: why.clone(),
            };
            // A result that is not asked for takes a place and no memory.
            let unused = || name.is_empty().then(|| (Element::F32, Shape::from([0])));
            results.push(unused().or_else(|| self.stated(name)).or_else(|| self.guessed(call)).ok_or_else(unknown)?);
        }
        let elementwise = opaque::is_elementwise(call.node.op);
        Ok(self.opaque(call, why, opaque::flops(&results), elementwise, results))
    }

    /// Element type and shape that the file states of a value.
    fn stated(&self, name: &str) -> Option<(Element, Shape)> {
        let (number, dims) = self.infos.get(name)?;
        let sizes: Option<Vec<i64>> =
            dims.as_ref()?.iter().enumerate().map(|(axis, dim)| self.sizes.stated(name, axis, dim)).collect();
        Some((Element::from_number((*number)?)?, shape_of(name, &sizes?).ok()?))
    }

    /// Appends an opaque operation and gives its results.
    pub fn opaque(
        &mut self,
        call: &Call,
        why: String,
        flops: u64,
        elementwise: bool,
        results: Vec<(Element, Shape)>,
    ) -> Vec<Id> {
        let Some((element, shape)) = results.first().cloned() else { return Vec::new() };
        let inputs = call.all();
        let count = results.len();
        let parts: Vec<_> = results.clone();
        let kind = Kind::Opaque(OpaqueKind { op: short(call.node.op).to_string(), why, flops, elementwise, results });
        let whole = self.ir.raw(kind, &inputs, shape, element);
        if count == 1 {
            return vec![whole];
        }
        let part = |(index, (element, shape)): (usize, (Element, Shape))| {
            self.ir.raw(Kind::Part(index), &[whole], shape, element)
        };
        parts.into_iter().enumerate().map(part).collect()
    }
}
