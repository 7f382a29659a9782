//! Operators of ONNX to the canonical form, one by one, in the file's order.
//!
//! Functions are inlined and branches on known conditions taken. What has no counterpart becomes an opaque operation if
//! its results' shapes are known.

mod call;
mod contraction;
mod elementwise;
mod fused;
mod index;
mod known;
mod norm;
mod opaque;
mod scope;
mod view;

use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;

use deuteron_graph::Shape;

use crate::element::Element;
use crate::error::{MissingDim, OnnxError};
use crate::ir::{Id, Ir, Kind, OpaqueKind};
use crate::limits::{FOLD_FLOAT_ELEMENTS, MAX_IR_NODES, MAX_PORTS, MAX_WORK};
use crate::options::Options;
use crate::schema::{Dim, Function, GraphProto, Model, NodeProto, Tensor, ValueInfo, short};
use crate::weight::{StoredTensor, shape_of};
use crate::wire::Reader;

use scope::Scope;

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
}

/// Reads the file and translates its graph.
pub(crate) fn translate(file: &[u8], options: &Options) -> Result<Translated, OnnxError> {
    let model = Model::read(Reader::new(file))?;
    let graph = model.graph.as_ref().ok_or(OnnxError::NoGraph)?;
    let default = model.opsets.iter().find(|(domain, _)| matches!(*domain, "" | "ai.onnx"));
    let opset = default.map_or(0, |&(_, version)| version);
    // From 13 on, operators changed only in ways that their operands tell: axes as an attribute or as an operand.
    if opset < 13 {
        return Err(OnnxError::Opset { got: opset });
    }
    let mut ir = Ir { folder: crate::fold::Folder::with_work(options.fold_work), ..Ir::default() };
    ir.enter(short(graph.name).to_string(), "graph");
    let mut translator = Translator {
        file,
        options,
        functions: model.functions.iter().map(|function| ((function.domain, function.name), function)).collect(),
        ir,
        inputs: Vec::new(),
        tensors: Vec::new(),
        notes: Vec::new(),
        infos: HashMap::new(),
        scopes: vec![Scope::default()],
        work: 0,
    };
    translator.top(graph)?;
    let Translator { ir, inputs, tensors, notes, .. } = translator;
    Ok(Translated { name: short(graph.name).to_string(), ir, inputs, tensors, notes })
}

/// Sums and products of names, as exporters call what they derived: `past + sequence`, `2*heads`.
fn expression(text: &str, set: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
    let number = |factor: &str| set(factor.trim()).or_else(|| factor.trim().parse().ok());
    let product = |term: &str| term.split('*').try_fold(1i64, |product, factor| product.checked_mul(number(factor)?));
    text.split('+').try_fold(0i64, |sum, term| sum.checked_add(product(term)?))
}

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
    /// Names read and written so far, functions inlined.
    work: usize,
}

impl<'a, 'm> Translator<'a, 'm> {
    fn folder(&self) -> Option<&'m Path> {
        self.options.folder.as_deref()
    }

    fn top(&mut self, graph: &GraphProto<'a>) -> Result<(), OnnxError> {
        if graph.inputs.len() + graph.outputs.len() > MAX_PORTS + graph.initializers.len() {
            return Err(OnnxError::Limit { what: "inputs and outputs", limit: MAX_PORTS });
        }
        self.note_infos(graph);
        self.initializers(graph)?;
        let mut missing = Vec::new();
        for input in &graph.inputs {
            // Up to IR version 3, initializers are inputs too.
            if self.lookup(input.name).is_none() {
                self.input(input, &mut missing)?;
            }
        }
        if !missing.is_empty() {
            missing.dedup_by(|a, b| a.name.is_some() && a.name == b.name);
            return Err(OnnxError::MissingDims(missing));
        }
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
        let elements = stored.shape.elements();
        let is_vector = stored.shape.iter().filter(|&&size| size != 1).count() <= 1;
        let is_light = match stored.element {
            element if element.is_float() => is_vector && elements <= FOLD_FLOAT_ELEMENTS,
            Element::I8 | Element::U8 | Element::F8e4m3 => {
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

    fn input(&mut self, input: &ValueInfo<'a>, missing: &mut Vec<MissingDim>) -> Result<(), OnnxError> {
        let (Some(number), Some(dims)) = (input.element, &input.dims) else {
            return Err(OnnxError::NotATensor(input.name.to_string()));
        };
        let element = Element::from_number(number)
            .ok_or_else(|| OnnxError::ElementType { value: input.name.to_string(), got: number })?;
        let mut sizes = Vec::new();
        for (axis, dim) in dims.iter().enumerate() {
            match self.size(input.name, axis, dim) {
                Some(size) => sizes.push(size),
                None => {
                    let name = if let Dim::Name(name) = dim { Some(name.to_string()) } else { None };
                    missing.push(MissingDim { name, input: input.name.to_string(), axis });
                }
            }
        }
        if sizes.len() < dims.len() {
            return Ok(());
        }
        let shape = shape_of(input.name, &sizes)?;
        self.inputs.push(InputInfo { name: input.name.to_string(), element, shape: shape.clone() });
        let id = self.ir.raw(Kind::Input(self.inputs.len() - 1), &[], shape, element);
        self.bind(input.name, id);
        Ok(())
    }

    /// A size: as set for this axis, as the file says, or as set for its name.
    fn size(&self, value: &str, axis: usize, dim: &Dim) -> Option<i64> {
        let set = |key: &str| self.options.dims.get(key).map(|&size| i64::try_from(size).unwrap_or(i64::MAX));
        match dim {
            Dim::Size(size) => Some(*size),
            Dim::Name(name) => set(&format!("{value}.{axis}")).or_else(|| set(name)).or_else(|| expression(name, &set)),
            Dim::Unknown => set(&format!("{value}.{axis}")),
        }
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
        let call = Call { node, attributes, inputs };
        if node.op == "If" && self.branch(&call, node)? {
            return Ok(());
        }
        let results = match self.operator(&call) {
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
            dims.as_ref()?.iter().enumerate().map(|(axis, dim)| self.size(name, axis, dim)).collect();
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
        let inputs: Vec<Id> = call.inputs.iter().flatten().copied().collect();
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
