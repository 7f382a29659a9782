//! Published transformers beside GPT-2, as graphs of their sizes: BERT, ViT and T5. Weights are inputs.
//!
//! The graphs are those of inference: no dropout, no padding. T5 has both halves, each with its relative positions.

mod layers;

use deuteron_graph::{Dtype, Gelu, Graph, GraphError, NodeId, UnaryOp};

use layers::{Layers, Order};

/// A published size of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// name on the command line
    pub name: &'static str,
    /// which architecture
    pub family: Family,
    /// blocks; for T5 those of each half
    pub layers: usize,
    /// attention heads
    pub heads: usize,
    /// width of the residual stream
    pub hidden: usize,
    /// width inside the MLP
    pub inner: usize,
}

/// An architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// an encoder that norms after each sum
    Bert,
    /// an encoder of images that norms before each branch
    Vit,
    /// an encoder and a decoder with RMS norms and relative positions
    T5,
}

/// What a graph is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PresetSizes {
    /// sequences, or images
    pub batch: usize,
    /// tokens of each; ignored for images, which have [`Preset::IMAGE_TOKENS`]
    pub sequence: usize,
    /// of weights and activations
    pub dtype: Dtype,
}

impl Preset {
    /// All presets.
    pub const ALL: [Preset; 7] = [
        Preset::sized("bert", Family::Bert, 12, 12, 768),
        Preset::sized("bert-large", Family::Bert, 24, 16, 1024),
        Preset::sized("vit", Family::Vit, 12, 12, 768),
        Preset::sized("vit-large", Family::Vit, 24, 16, 1024),
        Preset::sized("t5-small", Family::T5, 6, 8, 512),
        Preset::sized("t5", Family::T5, 12, 12, 768),
        Preset::sized("t5-large", Family::T5, 24, 16, 1024),
    ];
    /// Patches of 16 x 16 of an image of 224 x 224, and the token of its class.
    pub const IMAGE_TOKENS: usize = 197;
    /// Default tokens per sequence.
    pub const USUAL_SEQUENCE: usize = 512;

    const fn sized(name: &'static str, family: Family, layers: usize, heads: usize, hidden: usize) -> Preset {
        Preset { name, family, layers, heads, hidden, inner: 4 * hidden }
    }

    /// The variant with this name.
    pub fn find(name: &str) -> Option<Preset> {
        Preset::ALL.into_iter().find(|preset| preset.name == name)
    }

    /// The longest sequence, where positions are learnt; none where any length will do, or only one.
    pub fn longest(&self) -> Option<usize> {
        match self.family {
            Family::Bert => Some(512),
            Family::Vit | Family::T5 => None,
        }
    }

    /// The whole model.
    pub fn model(&self, sizes: &PresetSizes) -> Result<Graph, GraphError> {
        self.check(sizes)?;
        let mut layers = Layers::new(self.name, *self, *sizes);
        match self.family {
            Family::Bert => bert(&mut layers)?,
            Family::Vit => vit(&mut layers)?,
            Family::T5 => t5(&mut layers)?,
        }
        Ok(layers.graph)
    }

    /// One block of it, of T5 one of the encoder: the residual stream in, the residual stream out.
    pub fn block(&self, sizes: &PresetSizes) -> Result<Graph, GraphError> {
        self.check(sizes)?;
        let mut layers = Layers::new(&format!("{}-block", self.name), *self, *sizes);
        let x = layers.graph.input("x", sizes.dtype, layers.stream())?;
        let y = match self.family {
            Family::Bert => layers.block(x, "layer.0", Order::NormAfter)?,
            Family::Vit => layers.block(x, "layer.0", Order::NormBefore)?,
            Family::T5 => {
                let bias = layers.relative_bias("block.0")?;
                layers.encoder_block(x, bias, "block.0")?
            }
        };
        layers.graph.output("y", y)?;
        Ok(layers.graph)
    }

    fn check(&self, sizes: &PresetSizes) -> Result<(), GraphError> {
        let longest = self.longest().unwrap_or(usize::MAX);
        if sizes.sequence == 0 || sizes.sequence > longest {
            return Err(GraphError::Attribute {
                op: self.name.to_string(),
                attribute: "seq",
                expected: format!("from 1 to {longest}"),
                got: sizes.sequence.to_string(),
            });
        }
        Ok(())
    }
}

const BERT_TOKENS: usize = 30522;
const T5_TOKENS: usize = 32128;
const IMAGE_CLASSES: usize = 1000;
/// Numbers of a patch of 16 x 16 in three colours.
const PATCH: usize = 16 * 16 * 3;

/// Tokens to the last hidden state and the pooled first token.
fn bert(layers: &mut Layers) -> Result<(), GraphError> {
    let PresetSizes { batch, sequence, .. } = layers.sizes;
    let hidden = layers.preset.hidden;
    let tokens = layers.graph.input("tokens", Dtype::I32, [batch, sequence])?;
    let segments = layers.graph.input("segments", Dtype::I32, [batch, sequence])?;
    let words = layers.weight("embeddings.word", &[BERT_TOKENS, hidden])?;
    let kinds = layers.weight("embeddings.segment", &[2, hidden])?;
    let places = layers.weight("embeddings.position", &[512, hidden])?;
    let word = layers.graph.gather(words, tokens)?;
    let kind = layers.graph.gather(kinds, segments)?;
    let place = layers.graph.slice(places, 0, 0, sequence)?;
    let sum = layers.graph.add(word, kind)?;
    let sum = layers.graph.add(sum, place)?;
    let mut x = layers.norm(sum, "embeddings.norm")?;
    for layer in 0..layers.preset.layers {
        x = layers.block(x, &format!("layer.{layer}"), Order::NormAfter)?;
    }
    let first = layers.first_token(x)?;
    let pooled = layers.linear(first, "pooler", hidden)?;
    let pooled = layers.graph.unary(UnaryOp::Tanh, pooled)?;
    layers.graph.output("last_hidden_state", x)?;
    layers.graph.output("pooled", pooled)
}

/// Patches to the logits of classes. The convolution that cuts an image into patches is a matmul of their numbers.
fn vit(layers: &mut Layers) -> Result<(), GraphError> {
    let PresetSizes { batch, dtype, .. } = layers.sizes;
    let hidden = layers.preset.hidden;
    let patches = layers.graph.input("patches", dtype, [batch, Preset::IMAGE_TOKENS - 1, PATCH])?;
    let embedded = layers.linear(patches, "embeddings.patch", hidden)?;
    let class = layers.weight("embeddings.class", &[1, 1, hidden])?;
    let class = layers.graph.broadcast(class, [batch, 1, hidden])?;
    let places = layers.weight("embeddings.position", &[Preset::IMAGE_TOKENS, hidden])?;
    let joined = layers.graph.concat(&[class, embedded], 1)?;
    let mut x = layers.graph.add(joined, places)?;
    for layer in 0..layers.preset.layers {
        x = layers.block(x, &format!("layer.{layer}"), Order::NormBefore)?;
    }
    let x = layers.norm(x, "norm")?;
    let first = layers.first_token(x)?;
    let logits = layers.linear(first, "head", IMAGE_CLASSES)?;
    layers.graph.output("logits", logits)
}

/// Tokens of both languages to logits; the table of tokens is the head too.
fn t5(layers: &mut Layers) -> Result<(), GraphError> {
    let PresetSizes { batch, sequence, .. } = layers.sizes;
    let (hidden, blocks) = (layers.preset.hidden, layers.preset.layers);
    let tokens = layers.graph.input("tokens", Dtype::I32, [batch, sequence])?;
    let written = layers.graph.input("decoder_tokens", Dtype::I32, [batch, sequence])?;
    let table = layers.weight("shared", &[T5_TOKENS, hidden])?;
    let mut x = layers.graph.gather(table, tokens)?;
    let bias = layers.relative_bias("encoder")?;
    for block in 0..blocks {
        x = layers.encoder_block(x, bias, &format!("encoder.block.{block}"))?;
    }
    let read = layers.rms_norm(x, "encoder.norm")?;
    let mut y = layers.graph.gather(table, written)?;
    let bias = layers.relative_bias("decoder")?;
    let bias = layers.graph.causal_mask(bias)?;
    for block in 0..blocks {
        y = layers.decoder_block(y, read, bias, &format!("decoder.block.{block}"))?;
    }
    let y = layers.rms_norm(y, "decoder.norm")?;
    let y = layers.graph.scale(y, 1.0 / (hidden as f64).sqrt())?;
    let logits = layers.graph.matmul_transposed(y, table, false, true)?;
    layers.graph.output("logits", logits)
}

/// The activation between the matmuls of an MLP, of BERT and ViT.
fn gelu(graph: &mut Graph, x: NodeId) -> Result<NodeId, GraphError> {
    graph.gelu(x, Gelu::Erf)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(graph: &Graph) -> usize {
        let weights = graph.inputs().iter().filter(|&&id| graph.node(id).dtype.is_float());
        weights.map(|&id| graph.node(id).shape.iter().product::<usize>()).sum()
    }

    /// The published counts; T5 has a table of relative positions in each half.
    #[test]
    fn models_have_the_parameters_of_their_checkpoints() {
        let sizes = PresetSizes { batch: 1, sequence: 8, dtype: Dtype::Bf16 };
        let of = |name: &str| parameters(&Preset::find(name).unwrap().model(&sizes).unwrap());
        assert_eq!(of("bert"), 109_482_240);
        // Patches are data, no weights.
        assert_eq!(of("vit") - 196 * PATCH, 86_567_656);
        assert_eq!(of("t5-small"), 60_506_624);
        assert_eq!(of("t5"), 222_903_552);
    }

    #[test]
    fn a_sequence_beyond_the_learnt_positions_is_refused() {
        let sizes = PresetSizes { batch: 1, sequence: 513, dtype: Dtype::F32 };
        let error = Preset::find("bert").unwrap().model(&sizes).unwrap_err().to_string();
        assert!(error.contains("from 1 to 512"), "{error}");
        assert!(Preset::find("t5-small").unwrap().block(&sizes).is_ok());
    }
}
