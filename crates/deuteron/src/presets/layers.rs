//! The parts that the families are built from.

use deuteron_graph::{Dtype, Graph, GraphError, Mask, NodeId, ScoreOptions};

use super::{Family, Preset, PresetSizes, gelu};

/// The position of a block's norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// before attention and before the MLP
    NormBefore,
    /// after each sum with the residual stream
    NormAfter,
}

/// A graph that grows layer by layer.
pub(super) struct Layers {
    pub graph: Graph,
    pub preset: Preset,
    pub sizes: PresetSizes,
}

/// Number of distances with a bias in T5.
const BUCKETS: usize = 32;

impl Layers {
    pub fn new(name: &str, preset: Preset, sizes: PresetSizes) -> Layers {
        let sequence = if preset.family == Family::Vit { Preset::IMAGE_TOKENS } else { sizes.sequence };
        Layers { graph: Graph::new(name), preset, sizes: PresetSizes { sequence, ..sizes } }
    }

    /// The shape of the residual stream.
    pub fn stream(&self) -> [usize; 3] {
        [self.sizes.batch, self.sizes.sequence, self.preset.hidden]
    }

    pub fn weight(&mut self, name: &str, shape: &[usize]) -> Result<NodeId, GraphError> {
        self.graph.weight(name, self.sizes.dtype, shape)
    }

    /// A matmul with a bias.
    pub fn linear(&mut self, x: NodeId, name: &str, to: usize) -> Result<NodeId, GraphError> {
        let from = self.graph.node(x).shape.cols();
        let w = self.weight(&format!("{name}.weight"), &[from, to])?;
        let b = self.weight(&format!("{name}.bias"), &[to])?;
        self.graph.linear(x, w, Some(b))
    }

    /// A matmul without one.
    fn product(&mut self, x: NodeId, name: &str, to: usize) -> Result<NodeId, GraphError> {
        let from = self.graph.node(x).shape.cols();
        let w = self.weight(&format!("{name}.weight"), &[from, to])?;
        self.graph.linear(x, w, None)
    }

    pub fn norm(&mut self, x: NodeId, name: &str) -> Result<NodeId, GraphError> {
        let w = self.weight(&format!("{name}.weight"), &[self.preset.hidden])?;
        let b = self.weight(&format!("{name}.bias"), &[self.preset.hidden])?;
        Ok(self.graph.layer_norm(x, w, b, 1e-12)?.y)
    }

    pub fn rms_norm(&mut self, x: NodeId, name: &str) -> Result<NodeId, GraphError> {
        let w = self.weight(&format!("{name}.weight"), &[self.preset.hidden])?;
        Ok(self.graph.rms_norm(x, w, 1e-6)?.y)
    }

    /// The first token of every sequence, as a row.
    pub fn first_token(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let first = self.graph.slice(x, 1, 0, 1)?;
        self.graph.reshape(first, [self.sizes.batch, self.preset.hidden])
    }

    /// A block of BERT or ViT.
    pub fn block(&mut self, x: NodeId, name: &str, order: Order) -> Result<NodeId, GraphError> {
        let (hidden, inner) = (self.preset.hidden, self.preset.inner);
        let (first, second) = (format!("{name}.norm_1"), format!("{name}.norm_2"));
        let before = |layers: &mut Layers, x, norm: &str| match order {
            Order::NormBefore => layers.norm(x, norm),
            Order::NormAfter => Ok(x),
        };
        let after = |layers: &mut Layers, x, norm: &str| match order {
            Order::NormBefore => Ok(x),
            Order::NormAfter => layers.norm(x, norm),
        };
        let read = before(self, x, &first)?;
        let [q, k, v] = ["query", "key", "value"].map(|part| format!("{name}.attention.{part}"));
        let parts = [self.linear(read, &q, hidden)?, self.linear(read, &k, hidden)?, self.linear(read, &v, hidden)?];
        let mixed = self.attention(parts, None)?;
        let projected = self.linear(mixed, &format!("{name}.attention.out"), hidden)?;
        let sum = self.graph.add(x, projected)?;
        let x = after(self, sum, &first)?;
        let read = before(self, x, &second)?;
        let wide = self.linear(read, &format!("{name}.mlp.in"), inner)?;
        let wide = gelu(&mut self.graph, wide)?;
        let narrow = self.linear(wide, &format!("{name}.mlp.out"), hidden)?;
        let sum = self.graph.add(x, narrow)?;
        after(self, sum, &second)
    }

    /// T5's bias of scores by the distance of query and key, `[1, heads, sequence, sequence]`.
    pub fn relative_bias(&mut self, name: &str) -> Result<NodeId, GraphError> {
        let (heads, sequence) = (self.preset.heads, self.sizes.sequence);
        let buckets = self.graph.input(&format!("{name}.buckets"), Dtype::I32, [sequence, sequence])?;
        let table = self.weight(&format!("{name}.relative_bias"), &[BUCKETS, heads])?;
        let bias = self.graph.gather(table, buckets)?;
        let bias = self.graph.transpose(bias, &[2, 0, 1])?;
        self.graph.reshape(bias, [1, heads, sequence, sequence])
    }

    /// A block of T5's encoder.
    pub fn encoder_block(&mut self, x: NodeId, bias: NodeId, name: &str) -> Result<NodeId, GraphError> {
        let normed = self.rms_norm(x, &format!("{name}.norm_1"))?;
        let x = self.attend(x, [normed, normed], Some(bias), &format!("{name}.attention"))?;
        self.mlp(x, name)
    }

    /// A block of T5's decoder, which reads the encoder's result.
    pub fn decoder_block(&mut self, x: NodeId, read: NodeId, bias: NodeId, name: &str) -> Result<NodeId, GraphError> {
        let normed = self.rms_norm(x, &format!("{name}.norm_1"))?;
        let x = self.attend(x, [normed, normed], Some(bias), &format!("{name}.attention"))?;
        let normed = self.rms_norm(x, &format!("{name}.norm_cross"))?;
        let x = self.attend(x, [normed, read], None, &format!("{name}.cross"))?;
        self.mlp(x, name)
    }

    /// Attention of queries over keys and values, added to the residual stream.
    fn attend(
        &mut self,
        x: NodeId,
        [queries, read]: [NodeId; 2],
        bias: Option<NodeId>,
        name: &str,
    ) -> Result<NodeId, GraphError> {
        let hidden = self.preset.hidden;
        let q = self.product(queries, &format!("{name}.query"), hidden)?;
        let k = self.product(read, &format!("{name}.key"), hidden)?;
        let v = self.product(read, &format!("{name}.value"), hidden)?;
        let mixed = self.attention([q, k, v], bias)?;
        let projected = self.product(mixed, &format!("{name}.out"), hidden)?;
        self.graph.add(x, projected)
    }

    fn mlp(&mut self, x: NodeId, name: &str) -> Result<NodeId, GraphError> {
        let (hidden, inner) = (self.preset.hidden, self.preset.inner);
        let normed = self.rms_norm(x, &format!("{name}.norm_2"))?;
        let wide = self.product(normed, &format!("{name}.mlp.in"), inner)?;
        let wide = self.graph.relu(wide)?;
        let narrow = self.product(wide, &format!("{name}.mlp.out"), hidden)?;
        self.graph.add(x, narrow)
    }

    /// Attention of all heads. T5, whose heads have a bias, does not scale its scores.
    fn attention(&mut self, parts: [NodeId; 3], bias: Option<NodeId>) -> Result<NodeId, GraphError> {
        let [batch, sequence, hidden] = self.stream();
        let head = hidden / self.preset.heads;
        let mut split = [parts[0]; 3];
        for (into, part) in split.iter_mut().zip(parts) {
            let heads = self.graph.reshape(part, [batch, sequence, self.preset.heads, head])?;
            *into = self.graph.transpose(heads, &[0, 2, 1, 3])?;
        }
        let [q, k, v] = split;
        let scale = if self.preset.family == Family::T5 { 1.0 } else { 1.0 / (head as f64).sqrt() };
        let mixed = match bias {
            None => self.graph.attention(q, k, v, Mask::Full, scale)?,
            Some(bias) => {
                let options = ScoreOptions { mask: Some(bias), ..ScoreOptions::default() };
                self.graph.worked_attention([q, k, v], Mask::Additive, scale, options)?
            }
        };
        let merged = self.graph.transpose(mixed, &[0, 2, 1, 3])?;
        self.graph.reshape(merged, [batch, sequence, hidden])
    }
}
