//! Gradient graphs against central differences of the forward graph, in `f64`.
//!
//! The outputs are contracted with random numbers to one number `L`. A central difference over `h` is off by
//! `h^2 L'''/6` and by the rounding of `L` over `h`. The first is estimated by doubling `h`, which makes it four times
//! as large; the second is counted: an epsilon of the terms of `L` a node.

use deuteron_graph::{
    Activation, BinaryOp, CompareOp, Composite, Dtype, Gelu, Graph, GraphError, Mask, NodeId, ReduceOp, UnaryOp,
    differentiate,
};
use deuteron_reference::{Array, Rounding, interpret};

type Results = Result<Vec<NodeId>, GraphError>;

struct Check {
    forward: Graph,
    inputs: Vec<Array>,
    /// Positions of the inputs that are differentiated.
    wrt: Vec<usize>,
}

impl Check {
    /// `build` makes the outputs from inputs of these values; `i32` ones are given by [`integers`].
    fn new(inputs: &[(Dtype, Array)], build: impl FnOnce(&mut Graph, &[NodeId]) -> Results) -> Self {
        let mut forward = Graph::new("forward");
        let mut ids = Vec::new();
        for (position, (dtype, array)) in inputs.iter().enumerate() {
            ids.push(forward.input(&format!("x{position}"), *dtype, array.shape.clone()).unwrap());
        }
        let outputs = build(&mut forward, &ids).unwrap();
        for (position, output) in outputs.into_iter().enumerate() {
            forward.output(&format!("y{position}"), output).unwrap();
        }
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

fn check(inputs: &[Array], build: impl FnOnce(&mut Graph, &[NodeId]) -> Results) {
    let inputs: Vec<_> = inputs.iter().map(|array| (Dtype::F32, array.clone())).collect();
    Check::new(&inputs, build).run();
}

fn composite(composite: Composite, inputs: &[Array]) {
    check(inputs, |graph, x| graph.call(composite, x));
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
        check(&[x], |graph, x| Ok(vec![graph.unary(op, x[0])?]));
    }
}

#[test]
fn binary_primitives_with_every_broadcast() {
    let shapes: [&[usize]; 7] = [&[2, 3, 5], &[5], &[3, 1], &[1, 1, 1], &[], &[2, 1, 5], &[2, 1, 1]];
    for op in BinaryOp::ALL {
        for (index, shape) in shapes.into_iter().enumerate() {
            let (a, b) = (positive([2, 3, 5], 4), positive(shape, 5 + index as u64));
            check(&[a.clone(), b.clone()], |graph, x| Ok(vec![graph.binary(op, x[0], x[1])?]));
            check(&[b, a], |graph, x| Ok(vec![graph.binary(op, x[0], x[1])?]));
        }
        // Both repeat.
        check(&[positive([4, 1], 6), positive([3], 7)], |graph, x| Ok(vec![graph.binary(op, x[0], x[1])?]));
    }
}

#[test]
fn shared_operands() {
    for op in [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Div] {
        check(&[positive([3, 4], 8)], |graph, x| Ok(vec![graph.binary(op, x[0], x[0])?]));
    }
    check(&[normal([3, 4], 9)], |graph, x| {
        let a = graph.unary(UnaryOp::Tanh, x[0])?;
        let b = graph.mul(a, x[0])?;
        let c = graph.add(a, b)?;
        let d = graph.mul(c, b)?;
        Ok(vec![d])
    });
}

#[test]
fn an_output_that_is_also_used() {
    check(&[normal([3, 4], 10)], |graph, x| {
        let a = graph.unary(UnaryOp::Exp, x[0])?;
        let b = graph.unary(UnaryOp::Sigmoid, a)?;
        Ok(vec![a, b])
    });
    check(&[normal([3, 7], 11), normal([7], 12), normal([7], 13)], |graph, x| {
        let norm = graph.layer_norm(x[0], x[1], x[2], 1e-3)?;
        let y = graph.gelu(norm.y, Gelu::Tanh)?;
        Ok(vec![norm.y, norm.mean, norm.rstd, y])
    });
}

#[test]
fn an_input_that_is_an_output() {
    check(&[normal([4], 14)], |graph, x| Ok(vec![x[0], graph.unary(UnaryOp::Exp, x[0])?]));
}

#[test]
fn selections() {
    check(&[normal([3, 5], 15), normal([3, 5], 16), normal([5], 17)], |graph, x| {
        let limit = graph.constant(0.2, Dtype::F32)?;
        let condition = graph.compare(CompareOp::Gt, x[0], limit)?;
        Ok(vec![graph.select(condition, x[1], x[2])?, graph.select(condition, x[0], limit)?])
    });
    // A condition that repeats.
    check(&[normal([3, 1], 18), normal([3, 5], 19), normal([], 20)], |graph, x| {
        let zero = graph.constant(0.0, Dtype::F32)?;
        let condition = graph.compare(CompareOp::Le, x[0], zero)?;
        Ok(vec![graph.select(condition, x[1], x[2])?])
    });
}

#[test]
fn casts_pass_the_gradient() {
    let inputs = [(Dtype::F16, normal([2, 5], 21)), (Dtype::F32, normal([5], 22))];
    Check::new(&inputs, |graph, x| {
        let wide = graph.cast(x[0], Dtype::F32)?;
        let product = graph.mul(wide, x[1])?;
        Ok(vec![graph.cast(product, Dtype::Bf16)?])
    })
    .run();
}

#[test]
fn reductions() {
    for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::AbsMax] {
        check(&[normal([2, 3, 5], 23)], |graph, x| Ok(vec![graph.reduce(op, x[0])?]));
        check(&[normal([3, 1], 24)], |graph, x| Ok(vec![graph.reduce(op, x[0])?]));
        check(&[normal([4, 5], 25)], |graph, x| {
            let reduced = graph.reduce(op, x[0])?;
            Ok(vec![graph.mul(x[0], reduced)?])
        });
    }
    for shape in [vec![5], vec![3, 5], vec![2, 3, 5]] {
        check(&[normal(shape, 26)], |graph, x| Ok(vec![graph.column_sum(x[0])?]));
    }
}

#[test]
fn an_index_has_no_gradient() {
    check(&[normal([3, 5], 27)], |graph, x| {
        Ok(vec![graph.reduce(ReduceOp::ArgMax, x[0])?, graph.unary(UnaryOp::Tanh, x[0])?])
    });
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
            check(&[a.clone(), b.clone()], |graph, x| {
                Ok(vec![graph.matmul_transposed(x[0], x[1], transpose_a, transpose_b)?])
            });
            check(&[a, b], |graph, x| {
                let (a, b) = (graph.unary(UnaryOp::Tanh, x[0])?, graph.unary(UnaryOp::Exp, x[1])?);
                let product = graph.matmul_transposed(a, b, transpose_a, transpose_b)?;
                Ok(vec![graph.unary(UnaryOp::Sigmoid, product)?])
            });
        }
    }
    check(&[normal([3, 3], 30)], |graph, x| Ok(vec![graph.matmul_transposed(x[0], x[0], false, true)?]));
}

#[test]
fn embeddings() {
    let indices = Array::new([2, 3], vec![1.0, 0.0, 1.0, 3.0, 1.0, 0.0]);
    let inputs = [(Dtype::F32, normal([4, 3], 31)), (Dtype::I32, indices.clone())];
    Check::new(&inputs, |graph, x| {
        let rows = graph.gather(x[0], x[1])?;
        Ok(vec![graph.unary(UnaryOp::Tanh, rows)?])
    })
    .run();
    let inputs = [(Dtype::F32, normal([2, 3, 5], 32)), (Dtype::I32, indices)];
    Check::new(&inputs, |graph, x| {
        let table = graph.scatter_add(x[1], x[0], 4)?;
        Ok(vec![graph.unary(UnaryOp::Tanh, table)?])
    })
    .run();
}

#[test]
fn views() {
    check(&[normal([2, 3, 4], 33)], |graph, x| {
        let turned = graph.transpose(x[0], &[2, 0, 1])?;
        let flat = graph.reshape(turned, [4, 6])?;
        Ok(vec![graph.unary(UnaryOp::Tanh, flat)?])
    });
    check(&[normal([3, 1], 34)], |graph, x| {
        let wide = graph.broadcast(x[0], [2, 3, 5])?;
        Ok(vec![graph.unary(UnaryOp::Exp, wide)?])
    });
    check(&[normal([3, 4], 35)], |graph, x| Ok(vec![graph.broadcast(x[0], [3, 4])?]));
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
        check(&[normal([3, 6], 36)], |graph, x| {
            let base = graph.unary(UnaryOp::Tanh, x[0])?;
            cut.iter()
                .map(|&(axis, start, length)| {
                    let part = graph.slice(base, axis, start, length)?;
                    graph.unary(UnaryOp::Exp, part)
                })
                .collect()
        });
        // Beside a reader of the whole.
        check(&[normal([3, 6], 37)], |graph, x| {
            let whole = graph.mul(x[0], x[0])?;
            let mut outputs = vec![whole];
            for &(axis, start, length) in cut {
                outputs.push(graph.slice(x[0], axis, start, length)?);
            }
            Ok(outputs)
        });
    }
}

#[test]
fn concatenations() {
    for axis in [0, 1] {
        let (a, b) = (normal([2, 3], 38), normal(if axis == 0 { [1, 3] } else { [2, 4] }, 39));
        check(&[a, b], |graph, x| {
            let joined = graph.concat(&[x[0], x[1], x[0]], axis)?;
            Ok(vec![graph.unary(UnaryOp::Tanh, joined)?])
        });
    }
}

#[test]
fn no_gradient_passes_a_stop() {
    let mut graph = Graph::new("stop");
    let x = graph.input("x", Dtype::F32, [4]).unwrap();
    let stopped = graph.stop_gradient(x).unwrap();
    let product = graph.mul(x, stopped).unwrap();
    graph.output("y", product).unwrap();
    let differentiated = differentiate(&graph, &[x]).unwrap();
    let (value, seed) = (normal([4], 40), normal([4], 41));
    let outputs = interpret(&differentiated.graph, &[value.clone(), seed.clone()], Rounding::Exact).unwrap().outputs;
    // d (x stop(x)) = stop(x), not 2x.
    for index in 0..4 {
        assert_eq!(outputs[1].values[index], seed.values[index] * value.values[index]);
    }
}

#[test]
fn activations() {
    for kind in [Gelu::Tanh, Gelu::Erf] {
        composite(Composite::Activation(kind.into()), &[normal([3, 7], 42)]);
        composite(Composite::Geglu { kind }, &[normal([3, 7], 43), normal([3, 7], 44)]);
    }
    for one in [Activation::Silu, Activation::Relu] {
        composite(Composite::Activation(one), &[normal([3, 7], 45)]);
    }
    composite(Composite::Swiglu, &[normal([3, 7], 46), normal([3, 7], 47)]);
    // Both halves of one tensor, as a feed-forward layer has them.
    check(&[normal([3, 8], 48)], |graph, x| {
        let (value, gate) = (graph.slice(x[0], 1, 0, 4)?, graph.slice(x[0], 1, 4, 4)?);
        Ok(vec![graph.swiglu(value, gate)?])
    });
}

#[test]
fn norms_and_softmax() {
    for cols in [1, 2, 7] {
        let (x, w, b) = (normal([2, 3, cols], 49), normal([cols], 50), normal([cols], 51));
        composite(Composite::LayerNorm { eps: 0.1 }, &[x.clone(), w.clone(), b]);
        composite(Composite::RmsNorm { eps: 0.1 }, &[x.clone(), w]);
        composite(Composite::Softmax, std::slice::from_ref(&x));
        check(&[x], |graph, x| {
            let masked = graph.causal_mask(x[0])?;
            Ok(vec![graph.softmax(masked)?])
        });
    }
}

#[test]
fn dropouts_and_losses() {
    let inputs = [(Dtype::F32, normal([4, 7], 52)), (Dtype::I32, Array::scalar(9.0))];
    Check::new(&inputs, |graph, x| Ok(vec![graph.dropout(x[0], x[1], 0.3, 2)?])).run();
    let inputs = [(Dtype::F32, normal([2, 3, 7], 53)), (Dtype::I32, Array::indices([2, 3], 54, 7))];
    Check::new(&inputs, |graph, x| {
        let result = graph.cross_entropy(x[0], x[1])?;
        Ok(vec![result.loss, result.logsumexp])
    })
    .run();
}

#[test]
fn quantisation_scales() {
    check(&[normal([3, 7], 55)], |graph, x| Ok(vec![graph.quantize_int8(x[0])?.scale]));
    let bytes = Array::from_fn([3, 7], |index| index as f64 - 10.0);
    let inputs = [(Dtype::I8, bytes), (Dtype::F32, positive([3, 1], 56))];
    Check::new(&inputs, |graph, x| Ok(vec![graph.dequantize(x[0], x[1], Dtype::F32)?])).run();
}

#[test]
fn linear_layers() {
    for transposed in [false, true] {
        let w = normal(if transposed { [4, 3] } else { [3, 4] }, 57);
        composite(Composite::Linear { transposed }, &[normal([2, 5, 3], 58), w.clone()]);
        composite(Composite::Linear { transposed }, &[normal([5, 3], 59), w, normal([4], 60)]);
    }
    // Two layers with an activation between: gradients pass from product to product.
    check(&[normal([2, 3], 61), normal([3, 4], 62), normal([4], 63), normal([4, 2], 64)], |graph, x| {
        let hidden = graph.linear(x[0], x[1], Some(x[2]))?;
        let hidden = graph.gelu(hidden, Gelu::Tanh)?;
        Ok(vec![graph.linear(hidden, x[3], None)?])
    });
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
            Check::new(&scores, |graph, x| graph.call(Composite::AttentionScores { mask, scale: 0.7 }, x)).run();
            for p in [0.0, 0.3] {
                let seed = (p > 0.0).then_some(&seed);
                let inputs: Vec<_> = qkv.iter().chain(&additive).chain(seed).cloned().collect();
                let attention = Composite::Attention { mask, scale: 0.7, p, offset: 1 };
                Check::new(&inputs, |graph, x| graph.call(attention, x)).run();
            }
        }
    }
}

/// The attention half of a block: one product, split into heads, attention, merged, projected, added.
#[test]
fn a_block_with_heads() {
    let (tokens, heads, features) = (3, 2, 2);
    let width = heads * features;
    let inputs = [normal([tokens, width], 69), normal([width, 3 * width], 70), normal([width, width], 71)];
    check(&inputs, |graph, x| {
        let qkv = graph.linear(x[0], x[1], None)?;
        let mut parts = Vec::new();
        for part in 0..3 {
            let slice = graph.slice(qkv, 1, part * width, width)?;
            let split = graph.reshape(slice, [tokens, heads, features])?;
            parts.push(graph.transpose(split, &[1, 0, 2])?);
        }
        let attended = graph.attention(parts[0], parts[1], parts[2], Mask::Causal, 0.7)?;
        let merged = graph.transpose(attended, &[1, 0, 2])?;
        let merged = graph.reshape(merged, [tokens, width])?;
        let projected = graph.linear(merged, x[2], None)?;
        Ok(vec![graph.add(x[0], projected)?])
    });
}
