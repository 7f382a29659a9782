//! A small writer of ONNX files: enough for tests to say what they mean, and to write what no exporter would.

/// ONNX's number of `f32`.
pub const F32: u64 = 1;
/// ONNX's number of `i64`.
pub const I64: u64 = 7;

/// A protobuf message.
#[derive(Debug, Clone, Default)]
pub struct Message(pub Vec<u8>);

impl Message {
    pub fn varint(mut self, value: u64) -> Self {
        let mut rest = value;
        while rest >= 0x80 {
            self.0.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        self.0.push(rest as u8);
        self
    }

    pub fn number(self, field: u64, value: u64) -> Self {
        self.varint(field << 3).varint(value)
    }

    pub fn float(self, field: u64, value: f32) -> Self {
        let mut message = self.varint(field << 3 | 5);
        message.0.extend(value.to_le_bytes());
        message
    }

    pub fn bytes(self, field: u64, bytes: &[u8]) -> Self {
        let mut message = self.varint(field << 3 | 2).varint(bytes.len() as u64);
        message.0.extend(bytes);
        message
    }

    pub fn text(self, field: u64, text: &str) -> Self {
        self.bytes(field, text.as_bytes())
    }

    pub fn message(self, field: u64, inner: &Message) -> Self {
        self.bytes(field, &inner.0)
    }
}

/// A size of an input.
#[derive(Debug, Clone, Copy)]
pub enum Size<'a> {
    Is(usize),
    Named(&'a str),
    Open,
}

/// An attribute's value.
#[derive(Debug, Clone)]
pub enum Value<'a> {
    Int(i64),
    Float(f32),
    Ints(&'a [i64]),
    Floats(&'a [f32]),
    Text(&'a str),
    Graph(Message),
    /// The attribute of the surrounding function's call.
    Reference(&'a str),
}

/// A graph, as text would have it: one call per line.
#[derive(Debug, Clone, Default)]
pub struct Writer {
    pub graph: Message,
    pub functions: Vec<Message>,
}

impl Writer {
    pub fn input(self, name: &str, dims: &[usize]) -> Self {
        self.typed_input(name, F32, &dims.iter().map(|&size| Size::Is(size)).collect::<Vec<_>>())
    }

    pub fn typed_input(mut self, name: &str, element: u64, dims: &[Size]) -> Self {
        self.graph = self.graph.message(11, &value_info(name, element, Some(dims)));
        self
    }

    pub fn weight(self, name: &str, dims: &[usize]) -> Self {
        let count = dims.iter().product();
        let values: Vec<f32> = (0..count).map(|i| (i as f32 * 0.37).sin()).collect();
        self.floats(name, dims, &values)
    }

    pub fn floats(self, name: &str, dims: &[usize], values: &[f32]) -> Self {
        let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(tensor(name, F32, dims).bytes(9, &raw))
    }

    pub fn scalar(self, name: &str, value: f32) -> Self {
        self.floats(name, &[], &[value])
    }

    pub fn ints(self, name: &str, values: &[i64]) -> Self {
        let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(tensor(name, I64, &[values.len()]).bytes(9, &raw))
    }

    pub fn tensor(mut self, tensor: Message) -> Self {
        self.graph = self.graph.message(5, &tensor);
        self
    }

    /// A node of one result; its name is the result's.
    pub fn node(self, op: &str, inputs: &[&str], output: &str) -> Self {
        self.call(op, inputs, &[output], &[])
    }

    pub fn call(mut self, op: &str, inputs: &[&str], outputs: &[&str], attributes: &[(&str, Value)]) -> Self {
        self.graph = self.graph.message(1, &node(op, "", inputs, outputs, attributes));
        self
    }

    pub fn domain_call(
        mut self,
        domain: &str,
        op: &str,
        inputs: &[&str],
        outputs: &[&str],
        attributes: &[(&str, Value)],
    ) -> Self {
        self.graph = self.graph.message(1, &node(op, domain, inputs, outputs, attributes));
        self
    }

    /// States the shape of a value.
    pub fn stated(mut self, name: &str, dims: &[usize]) -> Self {
        let dims: Vec<Size> = dims.iter().map(|&size| Size::Is(size)).collect();
        self.graph = self.graph.message(13, &value_info(name, F32, Some(&dims)));
        self
    }

    pub fn function(mut self, function: Message) -> Self {
        self.functions.push(function);
        self
    }

    pub fn output(mut self, name: &str) -> Self {
        self.graph = self.graph.message(12, &value_info(name, F32, None));
        self
    }

    pub fn finish(self) -> Vec<u8> {
        self.finish_at(17)
    }

    pub fn finish_at(self, opset: u64) -> Vec<u8> {
        let mut model = Message::default().number(1, 8).message(7, &self.graph.text(2, "test"));
        for function in &self.functions {
            model = model.message(25, function);
        }
        model.message(8, &Message::default().text(1, "").number(2, opset)).0
    }
}

pub fn node(op: &str, domain: &str, inputs: &[&str], outputs: &[&str], attributes: &[(&str, Value)]) -> Message {
    let mut node = Message::default();
    for input in inputs {
        node = node.text(1, input);
    }
    for output in outputs {
        node = node.text(2, output);
    }
    node = node.text(3, outputs.first().unwrap_or(&op)).text(4, op).text(7, domain);
    for (name, value) in attributes {
        let attribute = Message::default().text(1, name);
        node = node.message(
            5,
            &match value {
                Value::Int(value) => attribute.number(3, *value as u64),
                Value::Float(value) => attribute.float(2, *value),
                Value::Ints(values) => {
                    values.iter().fold(attribute, |attribute, &value| attribute.number(8, value as u64))
                }
                Value::Floats(values) => values.iter().fold(attribute, |attribute, &value| attribute.float(7, value)),
                Value::Text(text) => attribute.text(4, text),
                Value::Graph(graph) => attribute.message(6, graph),
                Value::Reference(name) => attribute.text(21, name),
            },
        );
    }
    node
}

pub fn tensor(name: &str, element: u64, dims: &[usize]) -> Message {
    let tensor = Message::default().text(8, name).number(2, element);
    dims.iter().fold(tensor, |tensor, &size| tensor.number(1, size as u64))
}

pub fn value_info(name: &str, element: u64, dims: Option<&[Size]>) -> Message {
    let mut kind = Message::default().number(1, element);
    if let Some(dims) = dims {
        let shape = dims.iter().fold(Message::default(), |shape, size| {
            shape.message(
                1,
                &match size {
                    Size::Is(size) => Message::default().number(1, *size as u64),
                    Size::Named(name) => Message::default().text(2, name),
                    Size::Open => Message::default(),
                },
            )
        });
        kind = kind.message(2, &shape);
    }
    Message::default().text(1, name).message(2, &Message::default().message(1, &kind))
}
