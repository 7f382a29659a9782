//! GPT-2 as a graph. Weights are inputs, named as in published checkpoints; matrices are `[in, out]`. Int8 matrices are `[out, in]`,
//! followed by one scale per row.

use deuteron::{Composite, Dtype, Graph, GraphError, Mask, NodeId, Quantized, ScoreWork, differentiate};

use crate::config::Config;
use crate::weights::Weights;

/// The sizes and options of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// sequences
    pub batch: usize,
    /// tokens of each
    pub sequence: usize,
    /// form of the weights; int8 has no gradient
    pub weights: Weights,
    /// whether to compute the loss and the gradients of all weights
    pub backward: bool,
}

/// The whole model: tokens to logits, or, with `backward`, to the loss and the gradients of all weights.
pub fn model(config: &Config, options: &Options) -> Result<Graph, GraphError> {
    check_sequence(config, options)?;
    let mut builder = Builder::new(config.name, config, options);
    let tokens = builder.graph.input("tokens", Dtype::I32, [options.batch, options.sequence])?;
    let (x, head) = builder.last_rows(tokens, None)?;
    if !options.backward {
        let logits = builder.logits(x, head)?;
        builder.graph.output("logits", logits)?;
        return Ok(builder.graph);
    }
    builder.output_loss(x, head)?;
    with_gradients(builder.graph)
}

/// The mean loss of all tokens, without gradients. With a `dropout` above 0, elements of the embedding, of the probabilities of
/// attention and of what each half of a block adds to the stream are dropped with this probability, as GPT-2 was trained; masks come from
/// an input `seed: i32[]`. Inputs besides it are `tokens` and `targets`, both `i32[batch, sequence]`, and the weights.
pub fn loss(config: &Config, options: &Options, dropout: f64) -> Result<Graph, GraphError> {
    check_sequence(config, options)?;
    let mut builder = Builder::new(&format!("{}-loss", config.name), config, options);
    let tokens = builder.graph.input("tokens", Dtype::I32, [options.batch, options.sequence])?;
    if dropout > 0.0 {
        let seed = builder.graph.input("seed", Dtype::I32, [])?;
        builder.dropout = Some(Dropout { seed, p: dropout, next: 0 });
    }
    let (x, head) = builder.last_rows(tokens, None)?;
    builder.output_loss(x, head)?;
    Ok(builder.graph)
}

/// The sizes of a graph for generation: some tokens of each sequence, and a cache for them and the earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Piece {
    /// sequences
    pub batch: usize,
    /// tokens of each
    pub sequence: usize,
    /// capacity of the cache in tokens
    pub capacity: usize,
    /// the positions of the tokens
    pub start: Start,
}

/// The positions of a piece's tokens in their sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Start {
    /// at the start of each sequence: the cache is not read
    Zero,
    /// after the cached tokens of each sequence
    Anywhere,
}

/// The model for generation: computes the logits of one position per sequence, and appends keys and values to a cache.
///
/// Inputs are `tokens: i32[batch, sequence]`, `places: i32[batch, sequence]` (the position of each token), `positions: i32[batch]`
/// (that of each sequence's first token), `last: i32[batch]` (the token whose logits are needed, counted over the whole batch:
/// `index * sequence + token`), for each layer its cache `[2, batch, heads, capacity, head]`, keys and then values as [`Weights::cache`] has
/// them, then the
/// weights in the order of [`Config::weights`], int8 ones each followed by its scales. Padding tokens only affect cache entries after them.
/// Outputs are the logits `[batch, vocabulary]`, then the caches.
pub fn next_logits(config: &Config, piece: &Piece, weights: Weights) -> Result<Graph, GraphError> {
    let Piece { batch, sequence, capacity, start } = *piece;
    let options = &Options { batch, sequence, weights, backward: false };
    check_sequence(config, options)?;
    check_sequence(config, &Options { sequence: capacity, ..*options })?;
    let mut builder = Builder::new(&format!("{}-next", config.name), config, options);
    let tokens = builder.graph.input("tokens", Dtype::I32, [batch, sequence])?;
    let places = builder.graph.input("places", Dtype::I32, [batch, sequence])?;
    let positions = builder.graph.input("positions", Dtype::I32, [batch])?;
    let last = builder.graph.input("last", Dtype::I32, [batch])?;
    let shape = [2, batch, config.heads, capacity, config.head()];
    let cache = |layer: usize| builder.graph.input(&format!("h.{layer}.cache"), weights.cache(), shape);
    let caches = (0..config.layers).map(cache).collect::<Result<Vec<NodeId>, GraphError>>()?;
    builder.past = Some(Past { places, positions, caches, start });
    let (x, head) = builder.last_rows(tokens, Some(last))?;
    let logits = builder.logits(x, head)?;
    builder.graph.output("logits", logits)?;
    for (layer, &cache) in builder.appended.iter().enumerate() {
        builder.graph.output(&format!("h.{layer}.cache"), cache)?;
    }
    Ok(builder.graph)
}

/// One transformer block: the residual stream in, the residual stream out.
pub fn block(config: &Config, options: &Options) -> Result<Graph, GraphError> {
    check_sequence(config, options)?;
    let mut builder = Builder::new(&format!("{}-block", config.name), config, options);
    let x =
        builder.graph.input("x", options.weights.activations(), [options.batch, options.sequence, config.hidden])?;
    let y = builder.block(x, "h.0")?;
    builder.graph.output("y", y)?;
    if options.backward { with_gradients(builder.graph) } else { Ok(builder.graph) }
}

/// Half a transformer block: from the QKV matmul of normed rows to the residual stream with their
/// attention, and its norm.
pub fn attention_layer(config: &Config, options: &Options) -> Result<Graph, GraphError> {
    check_sequence(config, options)?;
    let mut builder = Builder::new(&format!("{}-attention-layer", config.name), config, options);
    let (dtype, shape) = (options.weights.activations(), [options.batch, options.sequence, config.hidden]);
    let [x, normed] = [builder.graph.input("x", dtype, shape)?, builder.graph.input("normed", dtype, shape)?];
    let Stream { x, normed } = builder.attend(Stream { x, normed }, "h.0")?;
    builder.graph.output("x", x)?;
    builder.graph.output("normed", normed)?;
    Ok(builder.graph)
}

fn check_sequence(config: &Config, options: &Options) -> Result<(), GraphError> {
    if options.sequence == 0 || options.sequence > config.context {
        return Err(GraphError::Attribute {
            op: config.name.to_string(),
            attribute: "seq",
            expected: format!("from 1 to {}", config.context),
            got: options.sequence.to_string(),
        });
    }
    Ok(())
}

/// Gradients with respect to every float input.
fn with_gradients(graph: Graph) -> Result<Graph, GraphError> {
    let is_float = |id: &&NodeId| graph.node(**id).dtype.is_float();
    let wrt: Vec<NodeId> = graph.inputs().iter().filter(is_float).copied().collect();
    Ok(differentiate(&graph, &wrt)?.graph)
}

struct Builder<'a> {
    graph: Graph,
    config: &'a Config,
    options: &'a Options,
    /// the earlier tokens, if there is a cache
    past: Option<Past>,
    /// the caches of the layers so far, with the tokens
    appended: Vec<NodeId>,
    dropout: Option<Dropout>,
}

/// Dropout during training.
struct Dropout {
    seed: NodeId,
    p: f64,
    /// distinguishes the masks of one graph
    next: u32,
}

impl Dropout {
    /// The seed, the probability and the offset of one more mask.
    fn mask(&mut self) -> (NodeId, f64, u32) {
        self.next += 1;
        (self.seed, self.p, self.next - 1)
    }
}

/// The token table: the embedding of the input, and the weight of the head.
#[derive(Clone, Copy)]
enum Table {
    Floats(NodeId),
    Bytes(Quantized),
}

/// The residual stream, and its norm.
struct Stream {
    x: NodeId,
    normed: NodeId,
}

/// The earlier tokens.
struct Past {
    places: NodeId,
    positions: NodeId,
    caches: Vec<NodeId>,
    start: Start,
}

impl<'a> Builder<'a> {
    fn new(name: &str, config: &'a Config, options: &'a Options) -> Builder<'a> {
        Builder { graph: Graph::new(name), config, options, past: None, appended: Vec::new(), dropout: None }
    }

    /// The operands of the logits: normed rows, of every position or only those of `last` (`batch` rows), and the table of the head.
    fn last_rows(&mut self, tokens: NodeId, last: Option<NodeId>) -> Result<(NodeId, Table), GraphError> {
        let (config, options) = (self.config, self.options);
        let wte = self.table("wte")?;
        let wpe = self.graph.weight("wpe.weight", options.weights.activations(), [config.context, config.hidden])?;
        let token = self.embedding(wte, tokens)?;
        let position = match &self.past {
            Some(past) => self.graph.gather(wpe, past.places)?,
            None => self.graph.slice(wpe, 0, 0, options.sequence)?,
        };
        let x = self.graph.add(token, position)?;
        let mut x = self.dropped(x)?;
        for layer in 0..config.layers {
            x = self.block(x, &format!("h.{layer}"))?;
        }
        if let Some(last) = last {
            let rows = self.graph.reshape(x, [options.batch * options.sequence, config.hidden])?;
            x = self.graph.gather(rows, last)?;
        }
        let x = self.norm(x, "ln_f")?;
        let head = match config.tied {
            true => wte,
            false => self.table("lm_head")?,
        };
        Ok((x, head))
    }

    fn output_loss(&mut self, x: NodeId, head: Table) -> Result<(), GraphError> {
        let targets = self.graph.input("targets", Dtype::I32, [self.options.batch, self.options.sequence])?;
        let loss = self.loss(x, head, targets)?;
        self.graph.output("loss", loss)
    }

    /// The mean loss of all tokens. With float weights, logits are not stored.
    fn loss(&mut self, x: NodeId, head: Table, targets: NodeId) -> Result<NodeId, GraphError> {
        let Table::Floats(weight) = head else {
            let logits = self.logits(x, head)?;
            return Ok(self.graph.cross_entropy(logits, targets)?.loss);
        };
        let rows = self.options.batch * self.options.sequence;
        let (x, targets) = (self.graph.reshape(x, [rows, self.config.hidden])?, self.graph.reshape(targets, [rows])?);
        let losses = self.graph.linear_cross_entropy([x, weight, targets], 0.0, None)?.loss;
        let share = self.graph.scale(losses, 1.0 / rows as f64)?;
        let mean = self.graph.column_sum(share)?;
        self.graph.reshape(mean, [])
    }

    fn logits(&mut self, x: NodeId, head: Table) -> Result<NodeId, GraphError> {
        match head {
            Table::Floats(head) => self.graph.matmul_transposed(x, head, false, true),
            Table::Bytes(head) => {
                let x = self.graph.quantize_int8(x)?;
                self.graph.quantized_linear(x, head, None, Dtype::F32)
            }
        }
    }

    /// A row for each token.
    fn table(&mut self, name: &str) -> Result<Table, GraphError> {
        let shape = [self.config.vocabulary, self.config.hidden];
        match self.options.weights {
            Weights::Int8 => Ok(Table::Bytes(self.bytes(name, shape)?)),
            weights => Ok(Table::Floats(self.graph.weight(&format!("{name}.weight"), weights.activations(), shape)?)),
        }
    }

    fn embedding(&mut self, table: Table, tokens: NodeId) -> Result<NodeId, GraphError> {
        let Quantized { q, scale } = match table {
            Table::Floats(table) => return self.graph.gather(table, tokens),
            Table::Bytes(bytes) => bytes,
        };
        let scale = self.graph.reshape(scale, [self.config.vocabulary, 1])?;
        let (q, scale) = (self.graph.gather(q, tokens)?, self.graph.gather(scale, tokens)?);
        self.graph.dequantize(q, scale, Dtype::F32)
    }

    /// An int8 matrix with one scale per row.
    fn bytes(&mut self, name: &str, [rows, columns]: [usize; 2]) -> Result<Quantized, GraphError> {
        let q = self.graph.weight(&format!("{name}.weight"), Dtype::I8, [rows, columns])?;
        let scale = self.graph.weight(&format!("{name}.scale"), Dtype::F32, [rows])?;
        Ok(Quantized { q, scale })
    }

    fn block(&mut self, x: NodeId, name: &str) -> Result<NodeId, GraphError> {
        let (hidden, inner) = (self.config.hidden, self.config.inner());
        let normed = self.norm(x, &format!("{name}.ln_1"))?;
        let Stream { x, normed } = self.attend(Stream { x, normed }, name)?;
        let wide = self.linear(normed, &format!("{name}.mlp.c_fc"), hidden, inner)?;
        let wide = self.narrowed(wide)?;
        let activated = self.graph.activation(wide, self.config.activation)?;
        let narrow = self.linear(activated, &format!("{name}.mlp.c_proj"), inner, hidden)?;
        let narrow = self.dropped(narrow)?;
        self.graph.add(x, narrow)
    }

    /// Values after dropout, if there is any.
    fn dropped(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        match &mut self.dropout {
            Some(dropout) => {
                let (seed, p, offset) = dropout.mask();
                self.graph.dropout(x, seed, p, offset)
            }
            None => Ok(x),
        }
    }

    /// Values outside of the residual stream, in the dtype of the cache.
    fn narrowed(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let narrow = self.options.weights.cache();
        if self.graph.node(x).dtype == narrow { Ok(x) } else { self.graph.cast(x, narrow) }
    }

    /// The first half of a block.
    fn attend(&mut self, Stream { x, normed }: Stream, name: &str) -> Result<Stream, GraphError> {
        let hidden = self.config.hidden;
        let attended = self.attention(normed, name)?;
        let projected = self.linear(attended, &format!("{name}.attn.c_proj"), hidden, hidden)?;
        let projected = self.dropped(projected)?;
        let x = self.graph.add(x, projected)?;
        Ok(Stream { x, normed: self.norm(x, &format!("{name}.ln_2"))? })
    }

    /// Heads are views of the fused projection, without copies. They have the cache's dtype, with or without a cache.
    fn attention(&mut self, x: NodeId, name: &str) -> Result<NodeId, GraphError> {
        let (hidden, heads, head) = (self.config.hidden, self.config.heads, self.config.head());
        let (batch, sequence) = (self.options.batch, self.options.sequence);
        let qkv = self.linear(x, &format!("{name}.attn.c_attn"), hidden, 3 * hidden)?;
        // Of all columns, queries too: so it is work on the rows of the product that makes them.
        let qkv = self.narrowed(qkv)?;
        let mut parts = Vec::new();
        for part in 0..3 {
            let slice = self.graph.slice(qkv, 2, part * hidden, hidden)?;
            let split = self.graph.reshape(slice, [batch, sequence, heads, head])?;
            parts.push(self.graph.transpose(split, &[0, 2, 1, 3])?);
        }
        let scale = if self.config.scaled { 1.0 / (head as f64).sqrt() } else { 1.0 };
        let mixed = match self.cached(qkv)? {
            Some(([k, v], positions)) => self.graph.cached_attention([parts[0], k, v], positions, scale)?,
            None => self.attended([parts[0], parts[1], parts[2]], scale)?,
        };
        let merged = self.graph.transpose(mixed, &[0, 2, 1, 3])?;
        self.graph.reshape(merged, [batch, sequence, hidden])
    }

    /// Attention among the tokens themselves.
    fn attended(&mut self, [q, k, v]: [NodeId; 3], scale: f64) -> Result<NodeId, GraphError> {
        let Some(dropout) = &mut self.dropout else { return self.graph.attention(q, k, v, Mask::Causal, scale) };
        let (seed, p, offset) = dropout.mask();
        let composite = Composite::Attention { mask: Mask::Causal, scale, p, offset, work: ScoreWork::NONE };
        Ok(self.graph.call(composite, &[q, k, v, seed])?[0])
    }

    /// Writes keys and values of the next layer into its cache, if there is one. Returns all of them, and the positions of the queries
    /// if they see cached keys.
    fn cached(&mut self, qkv: NodeId) -> Result<Option<([NodeId; 2], NodeId)>, GraphError> {
        let Some(Past { positions, caches, start, .. }) = &self.past else { return Ok(None) };
        let (hidden, heads, head) = (self.config.hidden, self.config.heads, self.config.head());
        let (batch, sequence) = (self.options.batch, self.options.sequence);
        let (positions, cache, start) = (*positions, caches[self.appended.len()], *start);
        let rows = self.graph.slice(qkv, 2, hidden, 2 * hidden)?;
        let rows = self.graph.reshape(rows, [batch, sequence, 2, heads, head])?;
        let rows = self.graph.transpose(rows, &[2, 0, 3, 1, 4])?;
        let cache = self.graph.append(cache, rows, positions, 1)?;
        self.appended.push(cache);
        if start == Start::Zero {
            return Ok(None);
        }
        let shape = self.graph.node(cache).shape[1..].to_vec();
        let mut part = |which: usize| {
            let part = self.graph.slice(cache, 0, which, 1)?;
            self.graph.reshape(part, shape.as_slice())
        };
        Ok(Some(([part(0)?, part(1)?], positions)))
    }

    fn norm(&mut self, x: NodeId, name: &str) -> Result<NodeId, GraphError> {
        let (dtype, hidden) = (self.options.weights.activations(), self.config.hidden);
        let w = self.graph.weight(&format!("{name}.weight"), dtype, [hidden])?;
        let b = self.graph.weight(&format!("{name}.bias"), dtype, [hidden])?;
        Ok(self.graph.layer_norm(x, w, b, self.config.epsilon)?.y)
    }

    fn linear(&mut self, x: NodeId, name: &str, from: usize, to: usize) -> Result<NodeId, GraphError> {
        let dtype = self.options.weights.activations();
        let bias = format!("{name}.bias");
        if self.options.weights == Weights::Int8 {
            let w = self.bytes(name, [to, from])?;
            let b = self.graph.weight(&bias, dtype, [to])?;
            let x = self.graph.quantize_int8(x)?;
            return self.graph.quantized_linear(x, w, Some(b), dtype);
        }
        let w = self.graph.weight(&format!("{name}.weight"), dtype, [from, to])?;
        let b = self.graph.weight(&bias, dtype, [to])?;
        self.graph.linear(x, w, Some(b))
    }
}
