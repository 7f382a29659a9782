//! Products of few rows on a GPU: each is one kernel of ours, and right by f64, whatever the sizes, the dtype, the layout of the weights
//! and the work around it.

use deuteron::{Dtype, Engine, Graph, Session, Strategy, Tensor, seed};
use deuteron_codegen::Source;

use crate::support::{assert_holds, guarded_gpu, parsed, seeded, set, twice};

/// Runs a graph twice over poisoned results.
fn run(engine: &Engine, graph: &Graph, inputs: &[Tensor]) -> Vec<Tensor> {
    let mut session = Session::new(engine, graph, Strategy::Greedy).unwrap();
    let is_ours = |source: &Source| matches!(source, Source::Cuda(source) if ["skinny", "matmul_strips"].contains(&source.name.as_str()));
    let kernels = session.kernels();
    assert!(kernels.len() == 1 && is_ours(&kernels[0].source), "one kernel of ours: {}", session.plan());
    twice(&mut session, inputs)
}

fn check(engine: &Engine, text: &str, dtype: Dtype) {
    let graph = parsed(text, dtype);
    let (inputs, expected) = seeded(&graph, 7);
    assert_holds(&expected, &graph, &run(engine, &graph, &inputs), format_args!("{dtype}\n{text}"));
}

/// Graphs of one kernel: both ways that weights lie, with and without row work before and elementwise work after.
fn graphs([m, k, n]: [usize; 3]) -> Vec<String> {
    let x = format!("x = input float[{m},{k}]");
    let norm = format!("h = layer_norm x w:float[{k}] b:float[{k}]");
    let tied = format!("m = weight float[{n},{k}] ; t = transpose m [1,0]");
    let mut all = vec![
        format!("{x} ; y = matmul x m:float[{k},{n}] ; out y"),
        format!("{x} ; l = linear x m:float[{k},{n}] c:float[{n}] ; y = gelu l ; out y"),
        format!("{x} ; {tied} ; y = matmul x t ; out y"),
        format!("{x} ; {tied} ; y = matmul x t ; z = cast y f32 ; out z"),
    ];
    // A head has several columns.
    if k > 1 {
        all.extend([
            format!("{x} ; {norm} ; l = linear h m:float[{k},{n}] c:float[{n}] ; y = gelu l ; out y"),
            format!(
                "{x} ; h = rms_norm x w:float[{k}] ; l = matmul h m:float[{k},{n}] ; r = input float[{m},{n}]
y = add l r ; out y"
            ),
            format!("{x} ; seed = input i32[] ; h = dropout x seed p=0.3 offset=5 ; y = matmul h m:float[{k},{n}] ; out y"),
            format!("{x} ; {tied} ; {norm} ; y = matmul h t ; out y"),
            format!("{x} ; {tied} ; r = input float[{m},{k}] ; s = add x r ; h = softmax s ; l = matmul h t ; y = silu l ; out y"),
        ]);
    }
    all
}

/// A test for each type: the compiler takes one source at a time in a process.
fn every_number_of_rows(dtype: Dtype) {
    let Some(engine) = guarded_gpu() else { return };
    // More than 8 rows are of few rows where matrix units multiply them.
    let most = if dtype == Dtype::F32 { 8 } else { 16 };
    for rows in [1, 2, 3, 4, 5, 6, 8, 9, 16].into_iter().filter(|&rows| rows <= most) {
        graphs([rows, 256, 384]).iter().for_each(|text| check(&engine, text, dtype));
    }
}

#[test]
fn every_number_of_rows_in_f32() {
    every_number_of_rows(Dtype::F32);
}

#[test]
fn every_number_of_rows_in_f16() {
    every_number_of_rows(Dtype::F16);
}

#[test]
fn every_number_of_rows_in_bf16() {
    every_number_of_rows(Dtype::Bf16);
}

#[test]
fn odd_sizes() {
    let Some(engine) = guarded_gpu() else { return };
    let sizes =
        [[1, 1, 1], [1, 2, 1], [2, 127, 129], [3, 129, 127], [7, 1500, 33], [5, 33, 1500], [8, 36, 10], [4, 770, 6]];
    for dtype in Dtype::FLOATS {
        for size in sizes {
            graphs(size).iter().for_each(|text| check(&engine, text, dtype));
        }
    }
}

#[test]
fn the_products_of_gpt2() {
    let Some(engine) = guarded_gpu() else { return };
    for size in [[1, 768, 2304], [1, 768, 768], [4, 768, 3072], [1, 3072, 768], [4, 3072, 768], [2, 768, 5000]] {
        graphs(size).iter().for_each(|text| check(&engine, text, Dtype::Bf16));
    }
    // By matrix units: strips that are walked over, and parts of K.
    for size in [[8, 768, 2304], [12, 768, 768], [16, 3072, 768], [5, 768, 5000]] {
        graphs(size)[1..3].iter().for_each(|text| check(&engine, text, Dtype::Bf16));
    }
    for rows in [2, 7] {
        let head = graphs([rows, 768, 50257]).swap_remove(2);
        check(&engine, &head, Dtype::Bf16);
    }
}

#[test]
fn operands_that_are_parts_of_others() {
    let Some(engine) = guarded_gpu() else { return };
    for dtype in Dtype::FLOATS {
        // Rows apart, and addresses and sizes that no vector divides.
        check(
            &engine,
            "a = input float[3,300] ; x = slice a axis=1 start=7 length=129 ; y = matmul x m:float[129,65] ; out y",
            dtype,
        );
        check(
            &engine,
            "x = input float[3,64] ; v = weight float[64,130] ; w = slice v axis=1 start=3 length=64 ; y = matmul x w ; out y",
            dtype,
        );
        for rows in [3, 11] {
            let text = format!(
                "x = input float[{rows},64] ; v = weight float[64,192] ; w = slice v axis=1 start=64 length=64 ; y = matmul x w ; out y"
            );
            if rows < 9 || dtype != Dtype::F32 {
                check(&engine, &text, dtype);
            }
        }
    }
}

#[test]
fn what_is_no_number_stays_in_its_row() {
    let Some(engine) = guarded_gpu() else { return };
    for (size, dtype) in [([3, 129, 65], Dtype::F32), ([9, 136, 72], Dtype::Bf16)] {
        for text in graphs(size).iter().filter(|text| !text.contains("dropout") && !text.contains("softmax")) {
            let graph = parsed(text, dtype);
            let mut inputs = seed::inputs(&graph, 3).unwrap();
            set(&mut inputs[0], 128, f32::NAN);
            let outputs = run(&engine, &graph, &inputs);
            let values = outputs[0].to_f32().unwrap();
            assert!(values[..size[2]].iter().all(|value| value.is_nan()), "{text}");
            assert!(values[size[2]..].iter().all(|value| value.is_finite()), "{text}");
        }
    }
}
