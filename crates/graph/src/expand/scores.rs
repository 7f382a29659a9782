//! Work on the scores of attention: primitives over `[.., heads, queries, keys]`.

use crate::composite::ScoreWork;
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::expand::{Expansion, Value};
use crate::node::NodeId;
use crate::op::{CompareOp, UnaryOp};
use crate::shape::Shape;

/// What positions of queries are, and which keys follow them.
pub(super) struct ScorePlace {
    /// of each sequence's first query, in a cache
    pub positions: Option<NodeId>,
    /// whether the mask hides keys after the query's own
    pub causal: bool,
}

impl Expansion<'_> {
    /// The soft cap, slopes, what is added, the window, documents: in this order, on scaled scores. What hides keys comes last, so that
    /// nothing is added to `-inf`. `bias` is an additive mask.
    pub(super) fn score_work(
        &mut self,
        x: NodeId,
        work: &ScoreWork,
        bias: Option<NodeId>,
        operands: &[NodeId],
        place: &ScorePlace,
    ) -> Value {
        let mut operands = operands.iter().copied();
        let mut next = |is_there: bool| if is_there { operands.next() } else { None };
        let (slopes, own_bias, documents) = (next(work.slopes), next(work.bias), next(work.documents));
        let mut x = match work.soft_cap {
            Some(cap) => self.soft_cap(x, cap)?,
            None => x,
        };
        let shape = self.graph.node(x).shape.clone();
        let places = if work.slopes || work.window.is_some() { Some(self.places(&shape, place)?) } else { None };
        if let (Some(slopes), Some((key, position))) = (slopes, places) {
            let distance = self.graph.sub(key, position)?;
            let added = self.graph.mul(distance, slopes)?;
            x = self.graph.add(x, added)?;
        }
        if let Some(bias) = own_bias.or(bias) {
            let bias = self.cast(bias, Dtype::F32)?;
            x = self.graph.add(x, bias)?;
        }
        if let (Some(window), Some((key, position))) = (work.window, places) {
            let window = self.constant(window as f64)?;
            let before = self.graph.sub(position, window)?;
            x = self.visible(CompareOp::Gt, key, before, x)?;
            // Keys after the query's own are hidden by the mask.
            if !place.causal {
                let after = self.graph.add(position, window)?;
                x = self.visible(CompareOp::Lt, key, after, x)?;
            }
        }
        match documents {
            Some(documents) => self.one_document(x, documents),
            None => Ok(x),
        }
    }

    fn soft_cap(&mut self, x: NodeId, cap: f64) -> Value {
        let inverse = self.constant(1.0 / cap)?;
        let cap = self.constant(cap)?;
        let small = self.graph.mul(x, inverse)?;
        let bent = self.graph.unary(UnaryOp::Tanh, small)?;
        self.graph.mul(bent, cap)
    }

    /// The key and the position of the query of each score. Both are exact as `f32` below 2^24.
    fn places(&mut self, shape: &Shape, place: &ScorePlace) -> Result<(NodeId, NodeId), GraphError> {
        let rank = shape.rank();
        let key = self.graph.iota(shape.clone(), rank - 1)?;
        let key = self.cast(key, Dtype::F32)?;
        let row = self.graph.iota(shape.clone(), rank - 2)?;
        let row = self.cast(row, Dtype::F32)?;
        let first = match place.positions {
            Some(positions) => {
                let mut dims = vec![1; rank];
                dims[0] = shape[0];
                let first = self.graph.reshape(positions, Shape::new(dims))?;
                self.cast(first, Dtype::F32)?
            }
            None => self.constant(shape[rank - 1] as f64 - shape[rank - 2] as f64)?,
        };
        Ok((key, self.graph.add(row, first)?))
    }

    /// `x` where `key op limit`, else `-inf`.
    fn visible(&mut self, op: CompareOp, key: NodeId, limit: NodeId, x: NodeId) -> Value {
        let visible = self.graph.compare(op, key, limit)?;
        let lowest = self.constant(f64::NEG_INFINITY)?;
        self.graph.select(visible, x, lowest)
    }

    /// `x` where the key is of the query's document, else `-inf`. The last key is the last query's own.
    fn one_document(&mut self, x: NodeId, documents: NodeId) -> Value {
        let shape = self.graph.node(x).shape.clone();
        let (rank, axis) = (shape.rank(), self.graph.node(documents).shape.rank() - 1);
        let (queries, keys) = (shape[rank - 2], shape[rank - 1]);
        let mut dims = vec![1; rank];
        if axis == 1 {
            dims[0] = shape[0];
        }
        let own = match queries == keys {
            true => documents,
            false => self.graph.slice(documents, axis, keys - queries, queries)?,
        };
        (dims[rank - 2], dims[rank - 1]) = (queries, 1);
        let own = self.graph.reshape(own, Shape::new(dims.clone()))?;
        (dims[rank - 2], dims[rank - 1]) = (1, keys);
        let others = self.graph.reshape(documents, Shape::new(dims))?;
        self.visible(CompareOp::Eq, own, others, x)
    }
}
