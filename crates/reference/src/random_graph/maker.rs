//! A random graph under construction: its live values and the small parts that steps are made of.

use deuteron_graph::{Dtype, Graph, GraphError, NodeId, Shape, UnaryOp};

use crate::array::Array;
use crate::generator::Generator;

/// What a step gives back.
pub(super) type Made = Result<(), GraphError>;

/// Magnitude from which a value is squashed before it is used again.
pub(super) const LARGE: f64 = 30.0;

/// A value that a later step may read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Live {
    pub id: NodeId,
    /// An estimate of its largest magnitude.
    pub size: f64,
    /// Whether something reads it.
    pub read: bool,
    /// A second result, such as a row's mean: not missed if nothing reads it.
    pub aside: bool,
}

/// A graph under construction.
pub(super) struct Maker {
    pub graph: Graph,
    pub inputs: Vec<Array>,
    pub generator: Generator,
    pub dtype: Dtype,
    pub live: Vec<Live>,
    /// Values that only an output may read: bytes, indices.
    pub stored: Vec<NodeId>,
    pub seed: Option<NodeId>,
    pub dropouts: u32,
}

impl Maker {
    pub(super) fn new(name: &str, generator: Generator, dtype: Dtype) -> Self {
        Maker {
            graph: Graph::new(name),
            inputs: Vec::new(),
            generator,
            dtype,
            live: Vec::new(),
            stored: Vec::new(),
            seed: None,
            dropouts: 0,
        }
    }

    /// The input from which the graph grows.
    pub(super) fn begin(&mut self, shape: &Shape) -> Made {
        let x = self.input(shape.clone(), self.dtype)?;
        self.push(x, 4.0);
        Ok(())
    }

    /// Everything unread becomes an output, sometimes a value on the way too. False if there are more than `most`.
    pub(super) fn declare_outputs(&mut self, most: usize) -> Result<bool, GraphError> {
        let mut outputs: Vec<NodeId> = Vec::new();
        for live in self.live.clone() {
            let is_input = self.graph.inputs().contains(&live.id);
            let wanted =
                if live.aside { self.generator.chance(0.2) } else { !live.read || self.generator.chance(0.05) };
            if wanted && !is_input {
                outputs.push(live.id);
            }
        }
        outputs.extend(&self.stored);
        for (position, &output) in outputs.iter().enumerate() {
            self.graph.output(&format!("y{position}"), output)?;
        }
        Ok((1..=most).contains(&outputs.len()))
    }

    /// A value to go on with, mostly one that nothing reads yet, squashed if it has grown.
    pub(super) fn take(&mut self) -> Result<Live, GraphError> {
        let unread: Vec<usize> = (0..self.live.len()).filter(|&i| !self.live[i].read && !self.live[i].aside).collect();
        let position = match unread.is_empty() || self.generator.chance(0.15) {
            true => self.generator.below(self.live.len()),
            false => self.generator.pick(&unread),
        };
        self.live[position].read = true;
        let x = self.live[position];
        if x.size <= LARGE {
            return Ok(x);
        }
        let (id, size) = match self.generator.below(3) {
            0 => (self.graph.unary(UnaryOp::Tanh, x.id)?, 1.0),
            1 => (self.graph.unary(UnaryOp::Sigmoid, x.id)?, 1.0),
            _ => {
                let weight = self.norm_weight(self.shape(x.id).cols(), self.dtype_of(x.id))?;
                let norm = self.graph.rms_norm(x.id, weight, 1e-5)?;
                self.aside(norm.rstd);
                (norm.y, 8.0)
            }
        };
        Ok(Live { id, size, read: true, aside: false })
    }

    pub(super) fn shape(&self, id: NodeId) -> Shape {
        self.graph.node(id).shape.clone()
    }

    pub(super) fn dtype_of(&self, id: NodeId) -> Dtype {
        self.graph.node(id).dtype
    }

    pub(super) fn push(&mut self, id: NodeId, size: f64) {
        self.live.push(Live { id, size, read: false, aside: false });
    }

    pub(super) fn result(&mut self, id: NodeId, size: f64) -> Made {
        self.push(id, size);
        Ok(())
    }

    pub(super) fn aside(&mut self, id: NodeId) {
        self.live.push(Live { id, size: LARGE, read: false, aside: true });
    }

    /// A fresh input of normal values.
    pub(super) fn input(&mut self, shape: Shape, dtype: Dtype) -> Result<NodeId, GraphError> {
        let array = Array::normal(shape.clone(), self.generator.bits());
        self.given(array, dtype, "x")
    }

    pub(super) fn given(&mut self, array: Array, dtype: Dtype, prefix: &str) -> Result<NodeId, GraphError> {
        let name = format!("{prefix}{}", self.graph.inputs().len());
        let id = match prefix {
            "w" => self.graph.weight(&name, dtype, array.shape.clone())?,
            _ => self.graph.input(&name, dtype, array.shape.clone())?,
        };
        self.inputs.push(array.rounded(dtype));
        Ok(id)
    }

    /// Around 1, as norms are initialised and then trained.
    pub(super) fn norm_weight(&mut self, cols: usize, dtype: Dtype) -> Result<NodeId, GraphError> {
        let bits = self.generator.bits();
        let mut array = Array::normal([cols], bits);
        array.values.iter_mut().for_each(|w| *w = 1.0 + 0.2 * *w);
        self.given(array, dtype, "w")
    }

    /// A second operand for `x`: another live value, or a fresh one that repeats along rows, columns, or both.
    pub(super) fn partner(&mut self, x: Live) -> Result<(NodeId, f64), GraphError> {
        let (shape, dtype) = (self.shape(x.id), self.dtype_of(x.id));
        let fits = |live: &Live| {
            let node = self.graph.node(live.id);
            live.id != x.id && node.dtype == dtype && live.size <= LARGE && node.shape.broadcasts_to(&shape)
        };
        let fitting: Vec<usize> = (0..self.live.len()).filter(|&i| fits(&self.live[i])).collect();
        if !fitting.is_empty() && self.generator.chance(0.5) {
            let position = self.generator.pick(&fitting);
            self.live[position].read = true;
            return Ok((self.live[position].id, self.live[position].size));
        }
        if self.generator.chance(0.15) {
            let value = self.generator.pick(&[-2.0, -0.5, 0.25, 1.0, 1.5, 3.0]);
            return Ok((self.graph.constant(value, dtype)?, 3.0));
        }
        let repeated = match self.generator.below(4) {
            0 => shape,
            1 => Shape::from([shape.cols()]),
            2 => shape.with_cols(1),
            _ => Shape::scalar(),
        };
        Ok((self.input(repeated, dtype)?, 4.0))
    }

    /// `|x| + 1/2`: where logarithms, roots and quotients are tame.
    pub(super) fn away_from_zero(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let magnitude = self.graph.unary(UnaryOp::Abs, x)?;
        let half = self.graph.constant(0.5, self.dtype_of(x))?;
        self.graph.add(magnitude, half)
    }
}
