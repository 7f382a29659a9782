//! Gradient graphs against central differences of the forward graph, in `f64`.
//!
//! The outputs are contracted with random numbers to one number `L`. A central difference over `h` is off by
//! `h^2 L'''/6` and by the rounding of `L` over `h`. The first is estimated by doubling `h`, which makes it four times
//! as large; the second is counted: an epsilon of the terms of `L` a node.

use deuteron_graph::{BinaryOp, Dtype, Graph, Mask, NodeId, ReduceOp, UnaryOp, differentiate};
use deuteron_reference::{Array, Rounding, interpret};

struct Check {
    forward: Graph,
    inputs: Vec<Array>,
    /// Positions of the inputs that are differentiated.
    wrt: Vec<usize>,
}

impl Check {
    /// The text makes outputs of inputs `x0`, `x1` and so on, which have these values.
    fn new(inputs: &[(Dtype, Array)], text: &str) -> Self {
        let given =
            inputs.iter().enumerate().map(|(i, (dtype, array))| format!("x{i} = input {dtype}{} ; ", array.shape));
        let text = given.collect::<String>() + text;
        let forward: Graph = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        let wrt = (0..inputs.len()).filter(|&position| inputs[position].0.is_float()).collect();
        Check { forward, inputs: inputs.iter().map(|(_, array)| array.clone()).collect(), wrt }
    }

    fn run(mut self) {
        let ids: Vec<NodeId> = self.wrt.iter().map(|&position| self.forward.inputs()[position]).collect();
        let differentiated = differentiate(&self.forward, &ids).unwrap();
        let graph = &differentiated.graph;
        let seeds: Vec<Array> = differentiated
            .seeds
            .iter()
            .map(|&seed| Array::normal(graph.node(seed).shape.clone(), seed.index() as u64))
            .collect();
        let all: Vec<Array> = self.inputs.iter().chain(&seeds).cloned().collect();
        let outputs = interpret(graph, &all, Rounding::Exact).unwrap().outputs;
        let gradients = &outputs[self.forward.outputs().len()..];
        assert_eq!(gradients.len(), self.wrt.len());
        for (&position, gradient) in self.wrt.clone().iter().zip(gradients) {
            assert_eq!(gradient.shape, self.inputs[position].shape);
            for element in 0..gradient.values.len() {
                self.check_element(position, element, gradient.values[element], &seeds);
            }
        }
    }

    fn check_element(&mut self, position: usize, element: usize, analytic: f64, seeds: &[Array]) {
        let x = self.inputs[position].values[element];
        // The step at which both errors are about equal: the cube root of epsilon.
        let step = f64::EPSILON.cbrt() * x.abs().max(1.0);
        let mut rounding = 0.0;
        let mut difference = |step: f64| {
            let mut at = |x: f64| {
                self.inputs[position].values[element] = x;
                let (value, magnitude) = self.contracted(seeds);
                rounding = f64::EPSILON * magnitude * self.forward.nodes().len() as f64 / step;
                value
            };
            (at(x + step) - at(x - step)) / (2.0 * step)
        };
        let (wide, narrow) = (difference(2.0 * step), difference(step));
        self.inputs[position].values[element] = x;
        let bound = (wide - narrow).abs() + rounding;
        assert!(
            (analytic - narrow).abs() <= bound,
            "d x{position}[{element}] is {analytic}, differences give {narrow}, bound {bound:e}, in {:?}",
            self.forward.nodes().iter().map(|node| node.op.name()).collect::<Vec<_>>()
        );
    }

    /// The sum of outputs times seeds, and of its magnitudes. Only outputs that depend on `wrt` have a seed.
    fn contracted(&self, seeds: &[Array]) -> (f64, f64) {
        let outputs = interpret(&self.forward, &self.inputs, Rounding::Exact).unwrap().outputs;
        let mut seeds = seeds.iter();
        let (mut value, mut magnitude) = (0.0, 0.0);
        for (output, declared) in outputs.iter().zip(self.forward.outputs()) {
            if !self.forward.node(declared.node).dtype.is_float() {
                continue;
            }
            let seed = seeds.next().expect("a seed for each float output");
            for (x, seed) in output.values.iter().zip(&seed.values) {
                value += x * seed;
                magnitude += (x * seed).abs();
            }
        }
        (value, magnitude)
    }
}

fn check(inputs: &[Array], text: &str) {
    let inputs: Vec<_> = inputs.iter().map(|array| (Dtype::F32, array.clone())).collect();
    Check::new(&inputs, text).run();
}

fn normal(shape: impl Into<Vec<usize>>, seed: u64) -> Array {
    Array::normal(shape.into(), seed)
}

/// Away from 0 and from poles.
fn positive(shape: impl Into<Vec<usize>>, seed: u64) -> Array {
    Array::uniform(shape.into(), seed, 0.5, 2.0)
}

#[test]
fn unary_primitives() {
    for op in UnaryOp::ALL {
        let x = match op {
            UnaryOp::Log | UnaryOp::Sqrt | UnaryOp::Rsqrt | UnaryOp::Reciprocal => positive([2, 5], 1),
            UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Exp | UnaryOp::Tanh | UnaryOp::Erf => normal([2, 5], 2),
            UnaryOp::Sigmoid | UnaryOp::Round => normal([2, 5], 3),
        };
        check(&[x], &format!("y = {op} x0 ; out y"));
    }
}

#[test]
fn binary_primitives_with_every_broadcast() {
    let shapes: [&[usize]; 7] = [&[2, 3, 5], &[5], &[3, 1], &[1, 1, 1], &[], &[2, 1, 5], &[2, 1, 1]];
    for op in BinaryOp::ALL {
        let text = format!("y = {op} x0 x1 ; out y");
        for (index, shape) in shapes.into_iter().enumerate() {
            let (a, b) = (positive([2, 3, 5], 4), positive(shape, 5 + index as u64));
            check(&[a.clone(), b.clone()], &text);
            check(&[b, a], &text);
        }
        // Both repeat.
        check(&[positive([4, 1], 6), positive([3], 7)], &text);
    }
}

#[test]
fn shared_operands() {
    for op in [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Div] {
        check(&[positive([3, 4], 8)], &format!("y = {op} x0 x0 ; out y"));
    }
    check(&[normal([3, 4], 9)], "a = tanh x0 ; b = mul a x0 ; c = add a b ; d = mul c b ; out d");
}

#[test]
fn an_output_that_is_also_used() {
    check(&[normal([3, 4], 10)], "a = exp x0 ; b = sigmoid a ; out a b");
    let text = "n, mean, rstd = layer_norm x0 x1 x2 eps=1e-3 ; y = gelu n kind=tanh ; out n mean rstd y";
    check(&[normal([3, 7], 11), normal([7], 12), normal([7], 13)], text);
}

#[test]
fn an_input_that_is_an_output() {
    check(&[normal([4], 14)], "y = exp x0 ; out x0 y");
}

#[test]
fn selections() {
    let text = "limit = const 0.2 f32 ; c = gt x0 limit ; y = select c x1 x2 ; z = select c x0 limit ; out y z";
    check(&[normal([3, 5], 15), normal([3, 5], 16), normal([5], 17)], text);
    // A condition that repeats.
    check(&[normal([3, 1], 18), normal([3, 5], 19), normal([], 20)], "c = le x0 0 ; y = select c x1 x2 ; out y");
}

#[test]
fn casts_pass_the_gradient() {
    let inputs = [(Dtype::F16, normal([2, 5], 21)), (Dtype::F32, normal([5], 22))];
    Check::new(&inputs, "wide = cast x0 f32 ; p = mul wide x1 ; y = cast p bf16 ; out y").run();
}

#[test]
fn reductions() {
    for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::AbsMax] {
        check(&[normal([2, 3, 5], 23)], &format!("y = {op} x0 ; out y"));
        check(&[normal([3, 1], 24)], &format!("y = {op} x0 ; out y"));
        check(&[normal([4, 5], 25)], &format!("r = {op} x0 ; y = mul x0 r ; out y"));
    }
    for shape in [vec![5], vec![3, 5], vec![2, 3, 5]] {
        check(&[normal(shape, 26)], "y = column_sum x0 ; out y");
    }
}

/// At a tie there is no slope to compare with: each of the largest gets an equal share.
#[test]
fn the_largest_share_their_gradient() {
    let rows = Array::new([1, 4], vec![1.0, 3.0, -3.0, 3.0]);
    for (op, expected) in [(ReduceOp::Max, [0.0, 0.5, 0.0, 0.5]), (ReduceOp::AbsMax, [0.0, 1.0, -1.0, 1.0])] {
        let graph: Graph = format!("x = input f32[1,4] ; y = {op} x ; out y").parse().unwrap();
        let graph = differentiate(&graph, graph.inputs()).unwrap().graph;
        let seed = Array::filled([1, 1], if op == ReduceOp::Max { 1.0 } else { 3.0 });
        let outputs = interpret(&graph, &[rows.clone(), seed], Rounding::Exact).unwrap().outputs;
        assert_eq!(outputs.last().unwrap().values, expected, "{op}");
    }
}

#[test]
fn an_index_has_no_gradient() {
    check(&[normal([3, 5], 27)], "i = row_argmax x0 ; y = tanh x0 ; out i y");
}

/// Products of plain inputs, and of values that come out of other operations on both sides.
#[test]
fn matmuls() {
    let transposes = [(false, false), (true, false), (false, true), (true, true)];
    let batches: [(&[usize], &[usize]); 4] = [(&[], &[]), (&[2], &[2]), (&[2], &[]), (&[2, 1, 2], &[2, 1, 2])];
    for (transpose_a, transpose_b) in transposes {
        for (batch_a, batch_b) in batches {
            let (m, k, n) = (2, 3, 4);
            let a_tail = if transpose_a { [k, m] } else { [m, k] };
            let b_tail = if transpose_b { [n, k] } else { [k, n] };
            let a = normal([batch_a, &a_tail[..]].concat(), 28);
            let b = normal([batch_b, &b_tail[..]].concat(), 29);
            let how = [(transpose_a, "transpose_a"), (transpose_b, "transpose_b")];
            let how: Vec<&str> = how.into_iter().filter(|(is, _)| *is).map(|(_, word)| word).collect();
            let how = how.join(" ");
            check(&[a.clone(), b.clone()], &format!("y = matmul x0 x1 {how} ; out y"));
            check(&[a, b], &format!("a = tanh x0 ; b = exp x1 ; p = matmul a b {how} ; y = sigmoid p ; out y"));
        }
    }
    check(&[normal([3, 3], 30)], "y = matmul x0 x0 transpose_b ; out y");
}

#[test]
fn embeddings() {
    let indices = Array::new([2, 3], vec![1.0, 0.0, 1.0, 3.0, 1.0, 0.0]);
    let inputs = [(Dtype::F32, normal([4, 3], 31)), (Dtype::I32, indices.clone())];
    Check::new(&inputs, "r = gather x0 x1 ; y = tanh r ; out y").run();
    let inputs = [(Dtype::F32, normal([2, 3, 5], 32)), (Dtype::I32, indices)];
    Check::new(&inputs, "t = scatter_add x1 x0 rows=4 ; y = tanh t ; out y").run();
}

#[test]
fn views() {
    check(&[normal([2, 3, 4], 33)], "t = transpose x0 [2,0,1] ; f = reshape t [4,6] ; y = tanh f ; out y");
    check(&[normal([3, 1], 34)], "w = broadcast x0 [2,3,5] ; y = exp w ; out y");
    check(&[normal([3, 4], 35)], "y = broadcast x0 [3,4] ; out y");
    let parts = [normal([3, 2], 46), normal([3, 1], 47), normal([3, 4], 48)];
    check(&parts, "j = concat x0 x1 x2 axis=1 ; y = tanh j ; out y");
}

/// Slices that tile an axis, overlap, leave gaps, cut two axes, or repeat.
#[test]
fn slices() {
    let cuts: [&[(usize, usize, usize)]; 6] = [
        &[(1, 0, 2), (1, 2, 2), (1, 4, 2)],
        &[(1, 1, 3), (1, 2, 3)],
        &[(1, 1, 2), (1, 4, 1)],
        &[(0, 1, 2), (1, 3, 2)],
        &[(1, 0, 6), (1, 0, 6)],
        &[(0, 0, 1), (1, 5, 1), (0, 0, 1), (1, 2, 2)],
    ];
    for cut in cuts {
        // Each slice is `s#`.
        let slices = |of: &str, then: &str| -> String {
            let slice = |(i, (axis, start, length)): (usize, &(usize, usize, usize))| {
                let then = then.replace('#', &i.to_string());
                format!(" ; s{i} = slice {of} axis={axis} start={start} length={length} ; {then}")
            };
            cut.iter().enumerate().map(slice).collect()
        };
        check(&[normal([3, 6], 36)], &format!("base = tanh x0{}", slices("base", "y# = exp s# ; out y#")));
        // Beside a reader of the whole.
        check(&[normal([3, 6], 37)], &format!("whole = mul x0 x0 ; out whole{}", slices("x0", "out s#")));
    }
}

#[test]
fn concatenations() {
    for axis in [0, 1] {
        let (a, b) = (normal([2, 3], 38), normal(if axis == 0 { [1, 3] } else { [2, 4] }, 39));
        check(&[a, b], &format!("j = concat x0 x1 x0 axis={axis} ; y = tanh j ; out y"));
    }
}

#[test]
fn no_gradient_passes_a_stop() {
    let graph: Graph = "x = input f32[4] ; s = stop_gradient x ; y = mul x s ; out y".parse().unwrap();
    let differentiated = differentiate(&graph, graph.inputs()).unwrap();
    let (value, seed) = (normal([4], 40), normal([4], 41));
    let outputs = interpret(&differentiated.graph, &[value.clone(), seed.clone()], Rounding::Exact).unwrap().outputs;
    // d (x stop(x)) = stop(x), not 2x.
    for index in 0..4 {
        assert_eq!(outputs[1].values[index], seed.values[index] * value.values[index]);
    }
}

#[test]
fn activations() {
    for text in ["gelu x0 kind=tanh", "gelu x0 kind=erf", "silu x0", "relu x0"] {
        check(&[normal([3, 7], 42)], &format!("y = {text} ; out y"));
    }
    for text in ["geglu x0 x1 kind=tanh", "geglu x0 x1 kind=erf", "swiglu x0 x1"] {
        check(&[normal([3, 7], 43), normal([3, 7], 44)], &format!("y = {text} ; out y"));
    }
    // Both halves of one tensor, as a feed-forward layer has them.
    let halves = "v = slice x0 axis=1 start=0 length=4 ; g = slice x0 axis=1 start=4 length=4";
    check(&[normal([3, 8], 48)], &format!("{halves} ; y = swiglu v g ; out y"));
}

#[test]
fn norms_and_softmax() {
    for cols in [1, 2, 7] {
        let (x, w, b) = (normal([2, 3, cols], 49), normal([cols], 50), normal([cols], 51));
        check(&[x.clone(), w.clone(), b], "y, mean, rstd = layer_norm x0 x1 x2 eps=0.1 ; out y mean rstd");
        check(&[x.clone(), w], "y, rstd = rms_norm x0 x1 eps=0.1 ; out y rstd");
        check(std::slice::from_ref(&x), "y = softmax x0 ; out y");
        check(&[x], "m = causal_mask x0 ; y = softmax m ; out y");
    }
}

#[test]
fn dropouts_and_losses() {
    let inputs = [(Dtype::F32, normal([4, 7], 52)), (Dtype::I32, Array::scalar(9.0))];
    Check::new(&inputs, "y = dropout x0 x1 p=0.3 offset=2 ; out y").run();
    let inputs = [(Dtype::F32, normal([2, 3, 7], 53)), (Dtype::I32, Array::indices([2, 3], 54, 7))];
    Check::new(&inputs, "loss, sum = cross_entropy x0 x1 ; out loss sum").run();
}

#[test]
fn losses_without_logits() {
    let mut targets = Array::indices([5], 57, 7);
    targets.values[3] = -100.0;
    let inputs = [(Dtype::F32, normal([5, 4], 58)), (Dtype::F32, normal([7, 4], 59)), (Dtype::I32, targets)];
    for attributes in ["ignored=-100", "ignored=-100 smoothing=0.25"] {
        for outputs in ["loss", "sum", "loss sum"] {
            let text = format!("loss, sum = linear_cross_entropy x0 x1 x2 {attributes} ; out {outputs}");
            Check::new(&inputs, &text).run();
        }
    }
}

#[test]
fn quantisation_scales() {
    check(&[normal([3, 7], 55)], "q, scale = quantize_int8 x0 ; out scale");
    let bytes = Array::from_fn([3, 7], |index| index as f64 - 10.0);
    let inputs = [(Dtype::I8, bytes), (Dtype::F32, positive([3, 1], 56))];
    Check::new(&inputs, "y = dequantize x0 x1 f32 ; out y").run();
}

#[test]
fn linear_layers() {
    for (how, shape) in [("", [3, 4]), ("transposed", [4, 3])] {
        let w = normal(shape, 57);
        check(&[normal([2, 5, 3], 58), w.clone()], &format!("y = linear x0 x1 {how} ; out y"));
        check(&[normal([5, 3], 59), w, normal([4], 60)], &format!("y = linear x0 x1 x2 {how} ; out y"));
    }
    // Two layers with an activation between: gradients pass from product to product.
    let inputs = [normal([2, 3], 61), normal([3, 4], 62), normal([4], 63), normal([4, 2], 64)];
    check(&inputs, "l = linear x0 x1 x2 ; h = gelu l kind=tanh ; y = linear h x3 ; out y");
}

#[test]
fn attentions() {
    let seed = (Dtype::I32, Array::scalar(3.0));
    for (queries, keys) in [(3, 3), (2, 4)] {
        let operand = |length, seed| (Dtype::F32, normal([2, length, 2], seed));
        let qkv = [operand(queries, 65), operand(keys, 66), operand(keys, 67)];
        for mask in [Mask::Full, Mask::Causal, Mask::Additive] {
            let additive = (mask == Mask::Additive).then(|| (Dtype::F32, normal([queries, keys], 68)));
            let scores: Vec<_> = qkv[..2].iter().chain(&additive).cloned().collect();
            let operands = |count: usize| (0..count).map(|i| format!("x{i} ")).collect::<String>();
            let text = format!("y = attention_scores {}mask={mask} scale=0.7 ; out y", operands(scores.len()));
            Check::new(&scores, &text).run();
            for p in [0.0, 0.3] {
                let seed = (p > 0.0).then_some(&seed);
                let inputs: Vec<_> = qkv.iter().chain(&additive).chain(seed).cloned().collect();
                let operands = operands(inputs.len());
                Check::new(&inputs, &format!("y = attention {operands}mask={mask} scale=0.7 p={p} offset=1 ; out y"))
                    .run();
            }
        }
    }
}

/// The attention half of a block: one product, split into heads, attention, merged, projected, added.
#[test]
fn a_block_with_heads() {
    let part = |name: &str, start: usize| {
        format!(
            "s{name} = slice qkv axis=1 start={start} length=4 ; h{name} = reshape s{name} [3,2,2] ; {name} = transpose h{name} [1,0,2]"
        )
    };
    let parts = [part("q", 0), part("k", 4), part("v", 8)].join(" ; ");
    let inputs = [normal([3, 4], 69), normal([4, 12], 70), normal([4, 4], 71)];
    check(
        &inputs,
        &format!(
            "qkv = linear x0 x1 ; {parts} ; a = attention q k v mask=causal scale=0.7
t = transpose a [1,0,2] ; m = reshape t [3,4] ; p = linear m x2 ; y = add x0 p ; out y"
        ),
    );
}
