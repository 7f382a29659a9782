//! Steps that several ops are built of.

use deuteron_graph::{Composite, GraphError, Mask, NodeId, ScoreWork};

use super::Norm;
use super::entry::{Builder, Built, Made};
use super::products::{Attend, attend};

type Value = Result<NodeId, GraphError>;

impl Builder<'_> {
    /// The activation, if there is one.
    pub fn act(&mut self, x: NodeId) -> Value {
        self.a.act.map_or(Ok(x), |act| self.g.activation(x, act))
    }

    /// The norm; its weights are the operands from `first` on.
    pub fn norm(&mut self, x: NodeId, first: usize) -> Value {
        let weights = &self.v[first..];
        match self.a.norm {
            Norm::Layer => Ok(self.g.layer_norm(x, weights[0], weights[1], self.a.eps)?.y),
            Norm::Rms => Ok(self.g.rms_norm(x, weights[0], self.a.eps)?.y),
        }
    }

    /// The norm of a residual stream, and the stream.
    pub fn normed_sum(&mut self, s: NodeId, first: usize) -> Made {
        let y = self.norm(s, first)?;
        Ok(Built { outputs: vec![("y", y), ("s", s)], ..Built::default() })
    }

    /// Dropout; nothing if `p` is 0, so that evaluation draws no random numbers.
    pub fn dropped(&mut self, x: NodeId, seed: NodeId) -> Value {
        if self.a.p == 0.0 { Ok(x) } else { self.g.dropout(x, seed, self.a.p, 0) }
    }

    /// A linear layer; its weight is the operand `first`, its bias the next.
    pub fn linear(&mut self, x: NodeId, first: usize) -> Value {
        let (w, b) = (self.v[first], self.v[first + 1]);
        Ok(self.g.call(Composite::Linear { transposed: self.transposed.contains(&w) }, &[x, w, b])?[0])
    }

    /// A value and its gate.
    pub fn gated(&mut self) -> Result<(NodeId, NodeId), GraphError> {
        if !self.a.packed {
            return Ok((self.v[0], self.v[1]));
        }
        let x = self.v[0];
        let shape = self.g.node(x).shape.clone();
        let (axis, half) = (shape.rank().saturating_sub(1), shape.cols() / 2);
        if !shape.cols().is_multiple_of(2) {
            return Err(GraphError::Attribute {
                op: "a packed gate".into(),
                attribute: "columns",
                expected: "an even number: x, then its gate".into(),
                got: shape.cols().to_string(),
            });
        }
        Ok((self.g.slice(x, axis, 0, half)?, self.g.slice(x, axis, half, half)?))
    }

    /// Scale, mask, softmax and dropout, where present.
    pub fn softmax(&mut self) -> Value {
        let mut x = self.v[0];
        if let Some(scale) = self.a.scale {
            x = self.g.scale(x, scale)?;
        }
        match self.a.mask {
            Mask::Full => {}
            Mask::Causal => x = self.g.causal_mask(x)?,
            Mask::Cached => {
                let (expected, got) = ("full, causal or additive".to_string(), "cached".to_string());
                return Err(GraphError::Attribute { op: "softmax".to_string(), attribute: "mask", expected, got });
            }
            Mask::Additive => x = self.g.add(x, self.v[1])?,
        }
        let y = self.g.softmax(x)?;
        self.dropped(y, self.v[self.v.len() - 1])
    }

    /// Attention of ungrouped heads, which then lie side by side: `[batch, sequence, heads * features]`.
    pub fn merged_heads(&mut self) -> Value {
        let plain = Attend { mask: self.a.mask, scale: None, p: 0.0, work: ScoreWork::NONE, group: 1 };
        let attended = attend(self.g, &self.v[..3], plain)?;
        let shape = self.g.node(attended).shape.clone();
        let merged = self.g.transpose(attended, &[0, 2, 1, 3])?;
        self.g.reshape(merged, [shape[0], shape[2], shape[1] * shape[3]])
    }
}
