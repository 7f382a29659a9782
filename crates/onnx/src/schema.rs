//! The part of ONNX's schema that an import needs, borrowed from the file. Numbers are those of `onnx.proto`.

use std::rc::Rc;

use crate::error::OnnxError;
use crate::limits::{MAX_DIMS, MAX_NAME, MAX_NODES};
use crate::wire::{Packing, Reader, check_items};

/// `ModelProto`
#[derive(Debug, Default)]
pub(crate) struct Model<'a> {
    pub opsets: Vec<(&'a str, i64)>,
    pub graph: Option<GraphProto<'a>>,
    pub functions: Vec<Function<'a>>,
}

/// `GraphProto`
#[derive(Debug, Default)]
pub(crate) struct GraphProto<'a> {
    pub name: &'a str,
    pub nodes: Vec<NodeProto<'a>>,
    pub initializers: Vec<Tensor<'a>>,
    pub inputs: Vec<ValueInfo<'a>>,
    pub outputs: Vec<ValueInfo<'a>>,
    pub value_info: Vec<ValueInfo<'a>>,
}

/// `NodeProto`
#[derive(Debug, Default)]
pub(crate) struct NodeProto<'a> {
    pub inputs: Vec<&'a str>,
    pub outputs: Vec<&'a str>,
    pub name: &'a str,
    pub op: &'a str,
    pub domain: &'a str,
    pub attributes: Vec<Rc<Attribute<'a>>>,
}

/// `AttributeProto`
#[derive(Debug, Clone, Default)]
pub(crate) struct Attribute<'a> {
    pub name: &'a str,
    pub float: Option<f32>,
    pub int: Option<i64>,
    pub text: Option<Reader<'a>>,
    pub tensor: Option<Tensor<'a>>,
    /// Read when a branch is taken.
    pub graph: Option<Reader<'a>>,
    pub floats: Vec<f32>,
    pub ints: Vec<i64>,
    pub texts: Vec<Reader<'a>>,
    /// Within a function: the attribute of the call that it takes its value from.
    pub reference: &'a str,
}

/// `FunctionProto`
#[derive(Debug, Default)]
pub(crate) struct Function<'a> {
    pub name: &'a str,
    pub domain: &'a str,
    pub inputs: Vec<&'a str>,
    pub outputs: Vec<&'a str>,
    pub nodes: Vec<NodeProto<'a>>,
    pub defaults: Vec<Rc<Attribute<'a>>>,
    pub opsets: Vec<(&'a str, i64)>,
}

/// `TensorProto`. Data stay where they are.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tensor<'a> {
    pub name: &'a str,
    pub element: i64,
    pub dims: Vec<i64>,
    pub raw: Option<Reader<'a>>,
    /// A typed field, packed: its number and bytes.
    pub packed: Option<(u64, Reader<'a>)>,
    /// Numbers of a typed field that were written one by one.
    pub loose: Vec<u64>,
    pub external: Vec<(&'a str, &'a str)>,
    pub is_external: bool,
}

/// A size as the file gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dim<'a> {
    Size(i64),
    Name(&'a str),
    Unknown,
}

/// `ValueInfoProto` of a tensor.
#[derive(Debug, Default)]
pub(crate) struct ValueInfo<'a> {
    pub name: &'a str,
    pub element: Option<i64>,
    pub dims: Option<Vec<Dim<'a>>>,
}

/// The version of the default operator set among those that are imported.
pub(crate) fn default_opset(opsets: &[(&str, i64)]) -> Option<i64> {
    opsets.iter().find(|(domain, _)| matches!(*domain, "" | "ai.onnx")).map(|&(_, version)| version)
}

impl<'a> Model<'a> {
    pub fn read(mut reader: Reader<'a>) -> Result<Self, OnnxError> {
        let mut model = Model::default();
        while let Some(field) = reader.next()? {
            match field.number {
                7 => model.graph = Some(GraphProto::read(field.message()?)?),
                8 => model.opsets.push(opset(field.message()?)?),
                25 => push(&mut model.functions, Function::read(field.message()?)?)?,
                _ => {}
            }
        }
        Ok(model)
    }
}

fn opset<'a>(mut reader: Reader<'a>) -> Result<(&'a str, i64), OnnxError> {
    let mut result = ("", 0);
    while let Some(field) = reader.next()? {
        match field.number {
            1 => result.0 = field.text()?,
            2 => result.1 = field.int()?,
            _ => {}
        }
    }
    Ok(result)
}

impl<'a> GraphProto<'a> {
    pub fn read(mut reader: Reader<'a>) -> Result<Self, OnnxError> {
        let mut graph = GraphProto::default();
        while let Some(field) = reader.next()? {
            match field.number {
                1 => push(&mut graph.nodes, NodeProto::read(field.message()?)?)?,
                2 => graph.name = field.text()?,
                5 => push(&mut graph.initializers, Tensor::read(field.message()?)?)?,
                11 => push(&mut graph.inputs, ValueInfo::read(field.message()?)?)?,
                12 => push(&mut graph.outputs, ValueInfo::read(field.message()?)?)?,
                13 => push(&mut graph.value_info, ValueInfo::read(field.message()?)?)?,
                15 => {
                    let problem = "sparse initializers are not read; store them dense".to_string();
                    return Err(OnnxError::Tensor { tensor: graph.name.to_string(), problem });
                }
                _ => {}
            }
        }
        Ok(graph)
    }
}

impl<'a> NodeProto<'a> {
    fn read(mut reader: Reader<'a>) -> Result<Self, OnnxError> {
        let mut node = NodeProto::default();
        while let Some(field) = reader.next()? {
            match field.number {
                1 => node.inputs.push(field.text()?),
                2 => node.outputs.push(field.text()?),
                3 => node.name = field.text()?,
                4 => node.op = field.text()?,
                5 => node.attributes.push(Rc::new(Attribute::read(field.message()?)?)),
                7 => node.domain = field.text()?,
                _ => {}
            }
        }
        check_items(&node.inputs)?;
        check_items(&node.outputs)?;
        Ok(node)
    }

    /// Its name, or what tells it apart.
    pub fn label(&self) -> String {
        match (self.name, self.outputs.first()) {
            ("", Some(output)) => format!("{} -> {}", short(self.op), short(output)),
            ("", None) => short(self.op).to_string(),
            (name, _) => short(name).to_string(),
        }
    }
}

impl<'a> Attribute<'a> {
    fn read(mut reader: Reader<'a>) -> Result<Self, OnnxError> {
        let mut attribute = Attribute::default();
        let (mut floats, mut ints) = (Vec::new(), Vec::new());
        while let Some(field) = reader.next()? {
            match field.number {
                1 => attribute.name = field.text()?,
                2 => attribute.float = Some(field.float()?),
                3 => attribute.int = Some(field.int()?),
                4 => attribute.text = Some(field.bytes()?),
                5 => attribute.tensor = Some(Tensor::read(field.message()?)?),
                6 => attribute.graph = Some(field.message()?),
                7 => field.numbers(Packing::Fixed32, &mut floats)?,
                8 => field.numbers(Packing::Varint, &mut ints)?,
                9 => attribute.texts.push(field.bytes()?),
                21 => attribute.reference = field.text()?,
                _ => {}
            }
        }
        attribute.floats = floats.into_iter().map(|bits| f32::from_bits(bits as u32)).collect();
        attribute.ints = ints.into_iter().map(|bits| bits as i64).collect();
        Ok(attribute)
    }
}

impl<'a> Function<'a> {
    fn read(mut reader: Reader<'a>) -> Result<Self, OnnxError> {
        let mut function = Function::default();
        while let Some(field) = reader.next()? {
            match field.number {
                1 => function.name = field.text()?,
                4 => function.inputs.push(field.text()?),
                5 => function.outputs.push(field.text()?),
                7 => push(&mut function.nodes, NodeProto::read(field.message()?)?)?,
                9 => function.opsets.push(opset(field.message()?)?),
                10 => function.domain = field.text()?,
                11 => function.defaults.push(Rc::new(Attribute::read(field.message()?)?)),
                _ => {}
            }
        }
        check_items(&function.inputs)?;
        check_items(&function.outputs)?;
        Ok(function)
    }
}

impl<'a> Tensor<'a> {
    pub fn read(mut reader: Reader<'a>) -> Result<Self, OnnxError> {
        let mut tensor = Tensor::default();
        let mut dims = Vec::new();
        while let Some(field) = reader.next()? {
            match field.number {
                1 => field.numbers(Packing::Varint, &mut dims)?,
                2 => tensor.element = field.int()?,
                number @ (4 | 5 | 7 | 10 | 11) => match field.content {
                    crate::wire::Content::Bytes(packed) if tensor.packed.is_none() => {
                        tensor.packed = Some((number, packed));
                    }
                    crate::wire::Content::Bytes(_) => {
                        let problem = "data in more than one packed field; write it as raw_data".to_string();
                        return Err(OnnxError::Tensor { tensor: tensor.name.to_string(), problem });
                    }
                    crate::wire::Content::Varint(bits) | crate::wire::Content::Fixed64(bits) => tensor.loose.push(bits),
                    crate::wire::Content::Fixed32(bits) => tensor.loose.push(bits.into()),
                },
                8 => tensor.name = field.text()?,
                9 => tensor.raw = Some(field.bytes()?),
                13 => tensor.external.push(entry(field.message()?)?),
                14 => tensor.is_external = field.int()? == 1,
                _ => {}
            }
        }
        if dims.len() > MAX_DIMS {
            return Err(OnnxError::Limit { what: "axes of a tensor", limit: MAX_DIMS });
        }
        tensor.dims = dims.into_iter().map(|bits| bits as i64).collect();
        Ok(tensor)
    }
}

fn entry<'a>(mut reader: Reader<'a>) -> Result<(&'a str, &'a str), OnnxError> {
    let mut result = ("", "");
    while let Some(field) = reader.next()? {
        match field.number {
            1 => result.0 = field.text()?,
            2 => result.1 = field.text()?,
            _ => {}
        }
    }
    Ok(result)
}

impl<'a> ValueInfo<'a> {
    fn read(mut reader: Reader<'a>) -> Result<Self, OnnxError> {
        let mut info = ValueInfo::default();
        while let Some(field) = reader.next()? {
            match field.number {
                1 => info.name = field.text()?,
                2 => info.read_type(field.message()?)?,
                _ => {}
            }
        }
        Ok(info)
    }

    /// `TypeProto`: only its tensor types matter.
    fn read_type(&mut self, mut reader: Reader<'a>) -> Result<(), OnnxError> {
        while let Some(field) = reader.next()? {
            if field.number != 1 {
                continue;
            }
            let mut tensor = field.message()?;
            while let Some(field) = tensor.next()? {
                match field.number {
                    1 => self.element = Some(field.int()?),
                    2 => self.dims = Some(shape(field.message()?)?),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

fn shape<'a>(mut reader: Reader<'a>) -> Result<Vec<Dim<'a>>, OnnxError> {
    let mut dims = Vec::new();
    while let Some(field) = reader.next()? {
        if field.number != 1 {
            continue;
        }
        let mut dim = Dim::Unknown;
        let mut reader = field.message()?;
        while let Some(field) = reader.next()? {
            match field.number {
                1 => dim = Dim::Size(field.int()?),
                2 if !field.text()?.is_empty() => dim = Dim::Name(field.text()?),
                _ => {}
            }
        }
        dims.push(dim);
        if dims.len() > MAX_DIMS {
            return Err(OnnxError::Limit { what: "axes of a tensor", limit: MAX_DIMS });
        }
    }
    Ok(dims)
}

/// The beginning of a name: messages and reports quote names, and a hostile one may fill the file.
pub(crate) fn short(name: &str) -> &str {
    let end = (0..=MAX_NAME.min(name.len())).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
    &name[..end]
}

fn push<T>(list: &mut Vec<T>, item: T) -> Result<(), OnnxError> {
    if list.len() >= MAX_NODES {
        return Err(OnnxError::Limit { what: "nodes, tensors or functions", limit: MAX_NODES });
    }
    list.push(item);
    Ok(())
}
