//! Matmuls on the matrix units of a warp: every cut is right by f64, and gives the same bits in every run, whatever the sizes, the dtype,
//! how operands lie and what follows.

use deuteron::{Dtype, Engine, Graph, Session, SessionOptions, Strategy, Tensor, seed};
use deuteron_codegen::cuda::CudaTarget;
use deuteron_kernels::Backend;
use deuteron_matmul::cuda::mma::{MmaKernel, MmaTile};
use deuteron_matmul::cuda::realigned::RealignedKernel;
use deuteron_plan::{Plan, plan};

use crate::support::{assert_holds, guarded_gpu, parsed, seeded, twice};

fn target(engine: &Engine) -> &CudaTarget {
    let Backend::Cuda(target) = engine.device().backend() else { panic!("a GPU") };
    target
}

fn planned(engine: &Engine, graph: &Graph) -> Plan {
    plan(graph, engine.device().target(), Strategy::Greedy, &[]).unwrap()
}

/// The kernel of a graph of one matmul; none where the GPU has no instructions for its type, or the plan has several kernels.
fn kernel(engine: &Engine, graph: &Graph) -> Option<MmaKernel> {
    let plan = planned(engine, graph);
    let [group] = plan.groups.as_slice() else { return None };
    MmaKernel::of(&group.draft(graph, &plan.placement), target(engine))
}

fn session(engine: &Engine, graph: &Graph, kernel: MmaKernel) -> Session {
    let kernel = kernel.kernel(target(engine));
    Session::new(engine, graph, SessionOptions::from(Strategy::Greedy).kernels([kernel])).unwrap()
}

/// Checks some cut of a graph's matmul, the next one each time; how many kernels were checked.
fn check(engine: &Engine, text: &str, dtype: Dtype, turn: usize) -> usize {
    let graph = parsed(text, dtype);
    let Some(kernel) = kernel(engine, &graph) else { return 0 };
    let tiles = kernel.tiles(target(engine), f64::INFINITY);
    let tile = tiles[turn % tiles.len()];
    let (inputs, expected) = seeded(&graph, 11);
    let mut session = session(engine, &graph, kernel.with_tile(tile));
    assert_holds(&expected, &graph, &twice(&mut session, &inputs), format_args!("{tile}, {dtype}\n{text}"));
    1
}

/// How operands lie, and what follows.
fn graphs([m, k, n]: [usize; 3]) -> Vec<String> {
    let (x, w) = (format!("x = input float[{m},{k}]"), format!("w = weight float[{k},{n}]"));
    let tied = format!("w = weight float[{n},{k}]");
    let (bias, residual) = (format!("c:float[{n}]"), format!("r = input float[{m},{n}]"));
    vec![
        format!("{x} ; {w} ; y = matmul x w ; out y"),
        format!("{x} ; {tied} ; y = matmul x w transpose_b ; z = cast y f32 ; out z"),
        format!("x = input float[{k},{m}] ; {w} ; y = matmul x w transpose_a ; out y"),
        format!("x = input float[{k},{m}] ; {tied} ; y = matmul x w transpose_a transpose_b ; out y"),
        format!("{x} ; {w} ; l = linear x w {bias} ; y = gelu l ; out y"),
        format!(
            "{x} ; {w} ; r = input f32[{m},{n}] ; a = cast x f32 ; b = cast w f32 ; p = matmul a b ; y = add p r ; out y"
        ),
        format!("{x} ; {w} ; {residual} ; l = linear x w {bias} ; y = add l r ; out y"),
        format!("{x} ; {tied} ; {residual} ; l = linear x w {bias} transposed ; h = silu l ; y = mul h r ; out y"),
        format!(
            "{x} ; {w} ; {residual} ; seed = input i32[] ; l = linear x w {bias} ; h = dropout l seed p=0.3 offset=5 ; y = add h r ; out y"
        ),
    ]
}

/// Sizes that are multiples of everything, of nothing, and small ones.
fn every_size(dtype: Dtype) {
    let Some(engine) = guarded_gpu() else { return };
    let sizes =
        [[256, 256, 256], [300, 649, 264], [129, 127, 1500], [1500, 130, 129], [33, 1, 17], [9, 63, 3], [65, 9, 1]];
    let mut checked = 0;
    for (at, size) in sizes.into_iter().enumerate() {
        for (turn, text) in graphs(size).iter().enumerate() {
            checked += check(&engine, text, dtype, at + turn);
        }
    }
    println!("{checked} kernels of {dtype} checked");
}

#[test]
fn every_size_in_bf16() {
    every_size(Dtype::Bf16);
}

#[test]
fn every_size_in_f16() {
    every_size(Dtype::F16);
}

#[test]
fn every_size_in_f32() {
    every_size(Dtype::F32);
}

#[test]
fn batches_and_parts_of_tensors() {
    let Some(engine) = guarded_gpu() else { return };
    let graphs = [
        "x = input float[3,40,137] ; w = input float[3,137,72] ; y = matmul x w ; z = silu y ; out z",
        "x = input float[3,2,40,136] ; w = input float[3,2,72,136] ; y = matmul x w transpose_b ; out y",
        "x = input float[3,2,137,40] ; w = weight float[137,71] ; y = matmul x w transpose_a ; out y",
        "a = input float[130,401] ; x = slice a axis=1 start=7 length=136 ; w = weight float[136,72] ; y = matmul x w ; out y",
        "x = input float[130,64] ; v = weight float[64,192] ; w = slice v axis=1 start=3 length=65 ; y = matmul x w ; out y",
        // No axis of the left operand is contiguous.
        "a = input float[40,72,3] ; x = transpose a [2,0,1] ; w = input float[3,72,65] ; y = matmul x w ; out y",
    ];
    for dtype in Dtype::FLOATS {
        for (turn, text) in graphs.iter().enumerate() {
            check(&engine, text, dtype, turn);
            check(&engine, text, dtype, turn + 1);
        }
    }
}

/// On Hopper, operands that tensor maps cannot take are copied once.
#[test]
fn copies_of_operands() {
    let Some(engine) = guarded_gpu() else { return };
    let graphs = [
        "x = input float[130,1023] ; w = weight float[1023,72] ; y = matmul x w ; z = silu y ; out z",
        "x = input float[129,131] ; w = weight float[129,257] ; y = matmul x w transpose_a ; out y",
        "x = input float[3,40,137] ; w = input float[3,65,137] ; y = matmul x w transpose_b ; out y",
        "a = input float[130,401] ; x = slice a axis=1 start=7 length=136 ; w = weight float[136,72] ; y = matmul x w ; out y",
    ];
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for text in graphs {
            let graph = parsed(text, dtype);
            let plan = planned(&engine, &graph);
            let [group] = plan.groups.as_slice() else { continue };
            let kernel = RealignedKernel::of(&group.draft(&graph, &plan.placement), target(&engine));
            let Some(kernel) = kernel else { continue };
            let (inputs, expected) = seeded(&graph, 11);
            let options = SessionOptions::from(Strategy::Greedy).kernels([kernel.kernel(target(&engine))]);
            let mut session = Session::new(&engine, &graph, options).unwrap();
            assert_holds(&expected, &graph, &twice(&mut session, &inputs), format_args!("copied, {dtype}\n{text}"));
        }
    }
}

/// Sums of bytes are exact.
#[test]
fn bytes() {
    let Some(engine) = guarded_gpu() else { return };
    for (turn, [m, k, n]) in [[128, 256, 128], [129, 127, 131], [1500, 64, 17], [9, 1000, 48]].into_iter().enumerate() {
        for (at, text) in [
            format!("x = input i8[{m},{k}] ; w = weight i8[{k},{n}] ; y = matmul x w ; out y"),
            format!("x = input i8[{m},{k}] ; w = weight i8[{n},{k}] ; y = matmul x w transpose_b ; s = input f32[{m},1] ; z = mul y s ; out z"),
            format!("x = input i8[{k},{m}] ; w = weight i8[{k},{n}] ; y = matmul x w transpose_a ; z = silu y ; out z"),
        ]
        .iter()
        .enumerate()
        {
            check(&engine, text, Dtype::F32, turn + at);
        }
    }
}

/// What is not a number in one row stays in it, and infinities are kept, in three passes too.
#[test]
fn numbers_that_are_none() {
    let Some(engine) = guarded_gpu() else { return };
    for dtype in Dtype::FLOATS {
        let graph = parsed("x = input float[200,136] ; w = weight float[136,72] ; y = matmul x w ; out y", dtype);
        let Some(kernel) = kernel(&engine, &graph) else { continue };
        let mut inputs = seed::inputs(&graph, 5).unwrap();
        let mut x = inputs[0].to_array().unwrap();
        (x.values[3 * 136 + 7], x.values[150 * 136]) = (f64::NAN, f64::INFINITY);
        inputs[0] = Tensor::from_array(dtype, &x).unwrap();
        let weights = inputs[1].to_f32().unwrap();
        for tile in [MmaTile { rows: 64, columns: 64 }, MmaTile { rows: 64, columns: 128 }] {
            let mut session = session(&engine, &graph, kernel.clone().with_tile(tile));
            session.run(&inputs.iter().collect::<Vec<_>>()).unwrap();
            let found = session.output(0).unwrap().to_f32().unwrap();
            for (row, values) in found.chunks(72).enumerate() {
                for (column, &value) in values.iter().enumerate() {
                    match row {
                        3 => assert!(value.is_nan(), "{tile}, {dtype}"),
                        // Infinity has the sign of its weight, the first of the column.
                        150 if weights[column] != 0.0 => {
                            assert_eq!(value, f32::INFINITY * weights[column], "{tile}, {dtype}, column {column}");
                        }
                        150 => {}
                        _ => assert!(value.is_finite(), "{tile}, {dtype}, row {row}"),
                    }
                }
            }
        }
    }
}
