//! The operations of GPT-2, with the launches that compute them before and after fusion.

pub const TOKENS: usize = 8192;
pub const HIDDEN: usize = 1600;
pub const SEQUENCE: usize = 1024;
pub const HEADS: usize = 25;

/// An operation with what its cost is made of.
#[derive(Clone)]
pub struct Op {
    pub name: String,
    pub label: String,
    pub kind: &'static str,
    pub reads: Vec<usize>,
    pub before: usize,
    pub after: usize,
    pub layer: usize,
    /// rows and columns of its result, and the length of the sum behind each element
    pub rows: usize,
    pub cols: usize,
    pub inner: usize,
}

struct Builder {
    ops: Vec<Op>,
    launch: usize,
    layer: usize,
}

impl Builder {
    /// Adds an operation; it joins the launch of the last one if `joins`.
    fn add(&mut self, name: &str, size: [usize; 3], reads: &[usize], joins: bool) -> usize {
        let kind = match name {
            _ if name.contains("matmul") => "matmul",
            "embedding" => "copy",
            "grad(embedding)" => "scatter_add",
            _ => "row",
        };
        if !joins {
            self.launch += 1;
        }
        let id = self.ops.len();
        self.ops.push(Op {
            name: name.into(),
            label: String::new(),
            kind,
            reads: reads.to_vec(),
            before: id,
            after: self.launch - 1,
            layer: self.layer,
            rows: size[0],
            cols: size[1],
            inner: size[2],
        });
        id
    }

    fn label(&mut self, id: usize, label: String) {
        self.ops[id].label = label;
    }
}

/// What a layer leaves for its gradient: the operations, in order.
struct Layer {
    ids: Vec<usize>,
}

pub fn ops(layers: usize, backward: bool) -> Vec<Op> {
    let wide = [TOKENS, HIDDEN, 1];
    let mut builder = Builder { ops: Vec::new(), launch: 0, layer: 0 };
    let token = builder.add("embedding", wide, &[], false);
    let mut stream = builder.add("add", wide, &[token], false);
    builder.label(stream, "hidden".into());
    let mut done = Vec::new();
    for layer in 0..layers {
        builder.layer = layer;
        let (ids, next) = forward(&mut builder, stream, layer);
        stream = next;
        done.push(Layer { ids });
    }
    let normed = builder.add("layer_norm", wide, &[stream], true);
    let logits = builder.add("matmul", [TOKENS, 50257, HIDDEN], &[normed], false);
    builder.label(logits, "logits".into());
    if backward {
        let loss = builder.add("cross_entropy", [TOKENS, 50257, 1], &[logits], false);
        let start = builder.add("grad(cross_entropy)", [TOKENS, 50257, 1], &[loss, logits], true);
        let mut gradient = builder.add("grad(matmul)", [TOKENS, HIDDEN, 50257], &[start], false);
        gradient = builder.add("grad(layer_norm)", wide, &[gradient, stream], false);
        for (layer, forward) in done.iter().enumerate().rev() {
            builder.layer = layer;
            gradient = backward_layer(&mut builder, gradient, &forward.ids);
        }
        builder.add("grad(embedding)", [50257, HIDDEN, 1], &[gradient], false);
    }
    builder.ops
}

fn forward(builder: &mut Builder, stream: usize, layer: usize) -> (Vec<usize>, usize) {
    let wide = [TOKENS, HIDDEN, 1];
    let scores_size = [TOKENS * HEADS, SEQUENCE, HIDDEN / HEADS];
    let norm = builder.add("layer_norm", wide, &[stream], true);
    let qkv = builder.add("matmul", [TOKENS, 3 * HIDDEN, HIDDEN], &[norm], false);
    builder.label(qkv, format!("h.{layer}.qkv"));
    let scores = builder.add("batched_matmul", scores_size, &[qkv], false);
    let weights = builder.add("softmax", [TOKENS * HEADS, SEQUENCE, 1], &[scores], true);
    let context = builder.add("batched_matmul", [TOKENS, HIDDEN, SEQUENCE], &[weights, qkv], true);
    let projected = builder.add("matmul", [TOKENS, HIDDEN, HIDDEN], &[context], false);
    let middle = builder.add("add", wide, &[projected, stream], false);
    let second = builder.add("layer_norm", wide, &[middle], true);
    let up = builder.add("matmul", [TOKENS, 4 * HIDDEN, HIDDEN], &[second], false);
    let active = builder.add("gelu", [TOKENS, 4 * HIDDEN, 1], &[up], false);
    let down = builder.add("matmul", [TOKENS, HIDDEN, 4 * HIDDEN], &[active], false);
    let out = builder.add("add", wide, &[down, middle], false);
    (vec![norm, qkv, scores, weights, context, projected, middle, second, up, active, down, out], out)
}

fn backward_layer(builder: &mut Builder, gradient: usize, ids: &[usize]) -> usize {
    let wide = [TOKENS, HIDDEN, 1];
    let &[norm, qkv, scores, weights, _, projected, middle, second, up, active, _, _] = ids else { return gradient };
    let scores_size = [TOKENS * HEADS, SEQUENCE, HIDDEN / HEADS];
    let down = builder.add("grad(matmul)", [TOKENS, 4 * HIDDEN, HIDDEN], &[gradient], false);
    builder.add("grad(matmul)", [4 * HIDDEN, HIDDEN, TOKENS], &[gradient, active], false);
    let act = builder.add("grad(gelu)", [TOKENS, 4 * HIDDEN, 1], &[down, up], false);
    builder.add("row_sum", [1, 4 * HIDDEN, TOKENS], &[act], true);
    let fc = builder.add("grad(matmul)", [TOKENS, HIDDEN, 4 * HIDDEN], &[act], false);
    builder.add("grad(matmul)", [HIDDEN, 4 * HIDDEN, TOKENS], &[act, second], false);
    let normed = builder.add("grad(layer_norm)", wide, &[fc, middle], false);
    let sum = builder.add("add", wide, &[normed, gradient], true);
    builder.add("row_sum", [1, HIDDEN, TOKENS], &[fc], true);
    let context = builder.add("grad(matmul)", [TOKENS, HIDDEN, HIDDEN], &[sum], false);
    builder.add("grad(matmul)", [HIDDEN, HIDDEN, TOKENS], &[sum, projected], false);
    let values = builder.add("grad(batched_matmul)", scores_size, &[context, qkv], false);
    let soft = builder.add("grad(softmax)", [TOKENS * HEADS, SEQUENCE, 1], &[values, weights], true);
    let query = builder.add("grad(batched_matmul)", [TOKENS, HIDDEN, SEQUENCE], &[soft, scores, qkv], true);
    let key = builder.add("grad(batched_matmul)", [TOKENS, HIDDEN, SEQUENCE], &[soft, qkv], true);
    let packed = builder.add("concat", [TOKENS, 3 * HIDDEN, 1], &[query, key], false);
    let back = builder.add("grad(matmul)", [TOKENS, HIDDEN, 3 * HIDDEN], &[packed], false);
    builder.add("grad(matmul)", [HIDDEN, 3 * HIDDEN, TOKENS], &[packed, norm], false);
    builder.add("row_sum", [1, 3 * HIDDEN, TOKENS], &[packed], false);
    let first = builder.add("grad(layer_norm)", wide, &[back, sum], false);
    builder.add("row_sum", [1, HIDDEN, TOKENS], &[back], true);
    builder.add("add", wide, &[first, sum], true)
}
