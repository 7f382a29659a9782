//! Shape and element type of every kind of operation.

use deuteron_graph::{Composite, Shape};

use crate::element::Element;
use crate::ir::{Id, Ir, Kind, Logic, Reduction, Refusal};

impl Ir {
    /// What an operation on `inputs` gives, or what it expected.
    pub fn infer(&self, kind: &Kind, inputs: &[Id]) -> Result<(Shape, Element), Refusal> {
        let first = || inputs.first().copied().ok_or_else(|| "an operand expected, got none".to_string());
        let arity = |count: usize| match inputs.len() == count {
            true => Ok(()),
            false => Err(format!("{count} operands expected, got {}", inputs.len())),
        };
        let takes_one = matches!(
            kind,
            Kind::Cast(_)
                | Kind::Reduce { .. }
                | Kind::Softmax
                | Kind::Reshape(_)
                | Kind::Transpose(_)
                | Kind::Slice { .. }
                | Kind::Broadcast(_)
                | Kind::Part(_)
        );
        if takes_one {
            arity(1)?;
        }
        Ok(match kind {
            Kind::Input(_) | Kind::Weight(_) | Kind::Constant => return Err("a leaf takes no operands".to_string()),
            Kind::Unary(_) | Kind::Power(_) => {
                arity(1)?;
                (self.shape(inputs[0]).clone(), self.element(inputs[0]))
            }
            Kind::Binary(_) => {
                arity(2)?;
                (self.common(inputs)?, self.element(inputs[0]))
            }
            Kind::Function(function) => {
                arity(function.arity())?;
                (self.common(inputs)?, self.element(inputs[0]))
            }
            Kind::Compare(_) | Kind::Logic(Logic::And | Logic::Or | Logic::Xor) => {
                arity(2)?;
                (self.common(inputs)?, Element::Bool)
            }
            Kind::Logic(Logic::Not) => {
                arity(1)?;
                (self.shape(inputs[0]).clone(), Element::Bool)
            }
            Kind::Select => {
                arity(3)?;
                (self.common(inputs)?, self.element(inputs[1]))
            }
            Kind::Cast(element) => (self.shape(first()?).clone(), *element),
            Kind::Reduce { op, axes, keep } => {
                let from = self.shape(first()?);
                if axes.iter().any(|&axis| axis >= from.rank()) {
                    return Err(format!("axes {axes:?} expected below the rank of {from}"));
                }
                let dims = from.iter().enumerate().filter_map(|(axis, &size)| match (axes.contains(&axis), keep) {
                    (true, true) => Some(1),
                    (true, false) => None,
                    (false, _) => Some(size),
                });
                let element = if *op == Reduction::ArgMax { Element::I64 } else { self.element(first()?) };
                (dims.collect::<Vec<_>>().into(), element)
            }
            Kind::Softmax => (self.shape(first()?).clone(), self.element(first()?)),
            Kind::Matmul { transpose_a, transpose_b } => {
                arity(2)?;
                (self.product(inputs, *transpose_a, *transpose_b)?, self.element(inputs[0]))
            }
            Kind::Gather => {
                arity(2)?;
                let (table, indices) = (self.shape(inputs[0]), self.shape(inputs[1]));
                if table.rank() != 2 {
                    return Err(format!("a table of rank 2 expected, got {table}"));
                }
                let dims: Vec<usize> = indices.iter().copied().chain([table[1]]).collect();
                (dims.into(), self.element(inputs[0]))
            }
            Kind::Reshape(shape) => {
                let from = self.shape(first()?);
                if shape.checked_elements() != Some(from.elements()) {
                    return Err(format!("a shape of {} elements expected for {from}, got {shape}", from.elements()));
                }
                (shape.clone(), self.element(first()?))
            }
            Kind::Transpose(permutation) => {
                let from = self.shape(first()?);
                let mut sorted = permutation.clone();
                sorted.sort_unstable();
                if sorted != (0..from.rank()).collect::<Vec<_>>() {
                    return Err(format!("a permutation of {} axes expected, got {permutation:?}", from.rank()));
                }
                let dims: Vec<usize> = permutation.iter().map(|&axis| from[axis]).collect();
                (dims.into(), self.element(first()?))
            }
            Kind::Slice { axis, start, length } => {
                let from = self.shape(first()?);
                if *axis >= from.rank() || start.checked_add(*length).is_none_or(|end| end > from[*axis]) {
                    return Err(format!("{length} indices from {start} on axis {axis} expected within {from}"));
                }
                let mut dims = from.to_vec();
                dims[*axis] = *length;
                (dims.into(), self.element(first()?))
            }
            Kind::Broadcast(shape) => {
                let from = self.shape(first()?);
                if !from.broadcasts_to(shape) {
                    return Err(format!("a shape that repeats into {shape} expected, got {from}"));
                }
                (shape.clone(), self.element(first()?))
            }
            Kind::Concat { axis } => (self.concat(inputs, *axis)?, self.element(first()?)),
            Kind::Composite(composite) => (self.composite(composite, inputs)?, self.element(first()?)),
            Kind::Opaque(opaque) => {
                let (element, shape) = opaque.results.first().cloned().ok_or("a result expected, got none")?;
                (shape, element)
            }
            Kind::Part(index) => match &self.node(first()?).kind {
                Kind::Opaque(opaque) => {
                    let (element, shape) = opaque.results.get(*index).cloned().ok_or("fewer results than asked for")?;
                    (shape, element)
                }
                // Statistics of a norm: one a row, f32.
                _ => (self.shape(first()?).with_cols(1), Element::F32),
            },
        })
    }

    fn common(&self, inputs: &[Id]) -> Result<Shape, Refusal> {
        inputs.iter().try_fold(Shape::scalar(), |shape, &input| {
            shape
                .broadcast(self.shape(input))
                .ok_or_else(|| format!("shapes that broadcast expected, got {}", self.shapes(inputs)))
        })
    }

    /// The shapes of operands, for a message.
    pub fn shapes(&self, inputs: &[Id]) -> String {
        inputs.iter().map(|&input| self.shape(input).to_string()).collect::<Vec<_>>().join(" and ")
    }

    fn product(&self, inputs: &[Id], transpose_a: bool, transpose_b: bool) -> Result<Shape, Refusal> {
        let (a, b) = (self.shape(inputs[0]), self.shape(inputs[1]));
        let refuse = || format!("matrices whose inner sizes agree expected, got {}", self.shapes(inputs));
        if a.rank() < 2 || b.rank() < 2 {
            return Err(refuse());
        }
        let last = |shape: &Shape, swap: bool| {
            let (rows, cols) = (shape[shape.rank() - 2], shape[shape.rank() - 1]);
            if swap { (cols, rows) } else { (rows, cols) }
        };
        let ((m, k), (inner, n)) = (last(a, transpose_a), last(b, transpose_b));
        let leading = |shape: &Shape| Shape::from(&shape[..shape.rank() - 2]);
        let batch = leading(a).broadcast(&leading(b)).ok_or_else(refuse)?;
        if k != inner {
            return Err(refuse());
        }
        let dims: Vec<usize> = batch.iter().copied().chain([m, n]).collect();
        Ok(dims.into())
    }

    fn concat(&self, inputs: &[Id], axis: usize) -> Result<Shape, Refusal> {
        let refuse = || format!("shapes that differ only in axis {axis} expected, got {}", self.shapes(inputs));
        let mut dims = self.shape(*inputs.first().ok_or_else(refuse)?).to_vec();
        if axis >= dims.len() {
            return Err(refuse());
        }
        for &input in &inputs[1..] {
            let shape = self.shape(input);
            if shape.rank() != dims.len() || (0..dims.len()).any(|i| i != axis && shape[i] != dims[i]) {
                return Err(refuse());
            }
            dims[axis] = dims[axis].saturating_add(shape[axis]);
        }
        Ok(dims.into())
    }

    fn composite(&self, composite: &Composite, inputs: &[Id]) -> Result<Shape, Refusal> {
        let (least, most) = composite.arity();
        if inputs.len() < least || inputs.len() > most {
            return Err(format!("{least} to {most} operands expected, got {}", inputs.len()));
        }
        let x = self.shape(inputs[0]);
        match composite {
            Composite::Linear { transposed } => self.product(&inputs[..2], false, *transposed),
            Composite::Attention { .. } => {
                let (k, v) = (self.shape(inputs[1]), self.shape(inputs[2]));
                let fits = x.rank() >= 2
                    && k.rank() == x.rank()
                    && v.rank() == x.rank()
                    && x[..x.rank() - 2] == k[..k.rank() - 2]
                    && x[..x.rank() - 2] == v[..v.rank() - 2]
                    && x.cols() == k.cols()
                    && k[k.rank() - 2] == v[v.rank() - 2];
                if !fits {
                    return Err(format!(
                        "q [.., m, d], k and v [.., n, d] expected, got {}",
                        self.shapes(&inputs[..3])
                    ));
                }
                Ok(x.with_cols(v.cols()))
            }
            _ => Ok(x.clone()),
        }
    }
}
