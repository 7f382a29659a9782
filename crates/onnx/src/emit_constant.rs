//! Known values in a graph: scalars, counts and causal masks need no tensor; others become weights.

use std::hash::{DefaultHasher, Hash, Hasher};

use deuteron_graph::{CompareOp, Dtype, GraphError, NodeId, Shape};

use crate::constant::Constant;
use crate::element::Element;
use crate::emit::Emitter;
use crate::ir::{Id, Kind};
use crate::weight::{Location, Weight};

impl Emitter<'_> {
    pub(crate) fn constant(&mut self, id: Id) -> Result<NodeId, GraphError> {
        let ir = self.ir;
        let node = ir.node(id);
        let Some(constant) = node.constant.as_deref() else {
            return Err(GraphError::BadName(ir.name(id).to_string()));
        };
        // One value that came from a vector in the file is still a weight: a bias of zeros is one by chance.
        let is_scalar = !matches!(node.kind, Kind::Weight(_)) || node.shape.elements() == 1;
        if let (Some(value), true) = (constant.uniform(), is_scalar)
            && let Some(scalar) = self.scalar(value, node.element)?
        {
            return self.repeated(scalar, &node.shape);
        }
        let compact = constant.compact();
        if node.element.dtype() == Dtype::I32
            && let Some((axis, start, length)) = counting(&compact)
        {
            let line = self.graph.iota([start + length], 0)?;
            let line = if start > 0 { self.graph.slice(line, 0, start, length)? } else { line };
            let dims: Vec<usize> = (0..compact.shape.rank()).map(|i| if i == axis { length } else { 1 }).collect();
            let shaped = if dims.len() == 1 { line } else { self.graph.reshape(line, dims)? };
            return self.repeated(shaped, &node.shape);
        }
        if node.element == Element::Bool && compact.is_causal(|value| value != 0.0) {
            let (rows, cols) = (compact.shape[compact.shape.rank() - 2], compact.shape.cols());
            let column = self.graph.iota(compact.shape.clone(), compact.shape.rank() - 1)?;
            // Rows are counted from the end of the columns, so they begin further on where there are more columns.
            let line = self.graph.iota([cols], 0)?;
            let line = if cols > rows { self.graph.slice(line, 0, cols - rows, rows)? } else { line };
            let row = self.graph.reshape(line, [rows, 1])?;
            let visible = self.graph.compare(CompareOp::Le, column, row)?;
            return self.repeated(visible, &node.shape);
        }
        if let Kind::Weight(position) = node.kind {
            return self.weight(position);
        }
        let input = self.folded(ir.name(id), node.element, &compact)?;
        self.repeated(input, &node.shape)
    }

    /// A folded constant as a weight. Layers often compute the same tables: each is passed once.
    fn folded(&mut self, name: &str, element: Element, constant: &Constant) -> Result<NodeId, GraphError> {
        let mut weight =
            Weight::folded(String::new(), format!("constant.{name}"), element, self.input_dtype(element), constant);
        let mut hasher = DefaultHasher::new();
        if let Location::Folded(bytes) = &weight.location {
            bytes.hash(&mut hasher);
        }
        let key = hasher.finish();
        for &(position, node) in self.tables.get(&key).into_iter().flatten() {
            let other = &self.weights[position];
            if (other.dtype, &other.shape, &other.location) == (weight.dtype, &weight.shape, &weight.location) {
                return Ok(node);
            }
        }
        let name = self.name("in", &weight.original);
        let node = self.graph.weight(&name, weight.dtype, weight.shape.clone())?;
        self.tables.entry(key).or_default().push((self.weights.len(), node));
        weight.name = name;
        self.weights.push(weight);
        Ok(node)
    }

    /// A scalar of any dtype that has one.
    fn scalar(&mut self, value: f64, element: Element) -> Result<Option<NodeId>, GraphError> {
        Ok(match self.dtype(element) {
            _ if value.is_nan() => None,
            Dtype::I32 => Some(self.graph.constant(value.clamp(i32::MIN.into(), i32::MAX.into()).trunc(), Dtype::I32)?),
            dtype if dtype.is_float() => Some(self.graph.constant(value, dtype)?),
            Dtype::Bool => {
                let a = self.graph.constant(value.abs().min(1.0), Dtype::F32)?;
                let b = self.graph.constant(0.0, Dtype::F32)?;
                Some(self.graph.compare(CompareOp::Ne, a, b)?)
            }
            _ => None,
        })
    }

    fn repeated(&mut self, node: NodeId, shape: &Shape) -> Result<NodeId, GraphError> {
        if self.graph.node(node).shape == *shape { Ok(node) } else { self.graph.broadcast(node, shape.clone()) }
    }
}

/// The axis, start and length of values that count upwards by one along one axis.
fn counting(constant: &Constant) -> Option<(usize, usize, usize)> {
    let mut axes = (0..constant.shape.rank()).filter(|&axis| constant.shape[axis] != 1);
    let (axis, None) = (axes.next()?, axes.next()) else { return None };
    let mut values = constant.values();
    let start = values.next()?;
    let counts = values.zip(1..).all(|(value, index)| value == start + f64::from(index));
    let fits = start >= 0.0 && start + constant.shape[axis] as f64 <= f64::from(i32::MAX);
    (counts && fits).then_some((axis, start as usize, constant.shape[axis]))
}
