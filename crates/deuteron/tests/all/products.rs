//! Products with what stands around them on the CPU: row work that makes the first operand of few rows, two products of one operand,
//! elementwise work on the sums. All of it against f64, against the same work in kernels of its own, and bit by bit.

use deuteron::{Dtype, Engine, Graph, GroupKind, Isa, Machine, Session, Strategy, Target, Tensor, plan, seed};
use deuteron_kernels::CpuCatalog;

use crate::support::{assert_holds, cpu, outputs, parsed, ran, seeded};

fn run(engine: &Engine, graph: &Graph, strategy: Strategy, inputs: &[Tensor]) -> (usize, Vec<Tensor>) {
    let session = ran(engine, graph, strategy, inputs);
    (session.plan().groups.len(), outputs(&session))
}

fn check(text: &str, dtype: Dtype, same_bits: bool) {
    check_plan(text, dtype, Strategy::Greedy, same_bits);
}

/// Runs a graph in one kernel, and in several, and compares both with f64; `same_bits`: and with each other.
fn check_plan(text: &str, dtype: Dtype, strategy: Strategy, same_bits: bool) {
    let graph = parsed(text, dtype);
    let (inputs, expected) = seeded(&graph, 7);
    for isa in Isa::available() {
        let (groups, fused) = run(&cpu(1, isa), &graph, strategy, &inputs);
        assert_eq!(groups, 1, "{dtype} {isa:?}\n{text}");
        assert_holds(&expected, &graph, &fused, format_args!("{dtype} {isa:?}\n{text}"));
        for threads in [3, 8] {
            let (_, again) = run(&cpu(threads, isa), &graph, strategy, &inputs);
            assert!(
                again.iter().zip(&fused).all(|(a, b)| a.is_bitwise(b)),
                "{dtype} {threads} threads {isa:?}\n{text}"
            );
        }
        let (groups, apart) = run(&cpu(2, isa), &graph, Strategy::Unfused, &inputs);
        assert!(groups > 1, "{dtype} {isa:?}\n{text}");
        let alike = !same_bits || apart.iter().zip(&fused).all(|(a, b)| a.is_bitwise(b));
        assert!(alike, "{dtype} {isa:?}: one kernel gives other bits\n{text}");
    }
}

/// Rows, inner size, columns.
const SIZES: [[usize; 3]; 8] =
    [[1, 2, 1], [1, 768, 300], [2, 127, 129], [3, 129, 127], [4, 1500, 33], [5, 64, 1500], [7, 200, 1], [8, 3, 70]];

#[test]
fn a_norm_is_made_where_its_product_reads_it() {
    for dtype in Dtype::FLOATS {
        for [m, k, n] in SIZES {
            let x = format!("x = input float[{m},{k}]");
            let linear = format!("y = linear h m:float[{k},{n}] c:float[{n}] ; out y");
            check(&format!("{x} ; h = layer_norm x w:float[{k}] b:float[{k}] ; {linear}"), dtype, true);
            check(&format!("{x} ; h = rms_norm x w:float[{k}] ; {linear}"), dtype, true);
            // Weights by rows of the result, as a tied head has them.
            let tied = format!("m = weight float[{n},{k}] ; t = transpose m [1,0] ; y = matmul h t ; out y");
            check(&format!("{x} ; h = layer_norm x w:float[{k}] b:float[{k}] ; {tied}"), dtype, true);
        }
    }
}

#[test]
fn any_row_work_makes_an_operand_and_any_elementwise_work_follows() {
    for dtype in Dtype::FLOATS {
        for [m, k, n] in SIZES {
            let x = format!("x = input float[{m},{k}]");
            let linear = format!("l = linear h m:float[{k},{n}] c:float[{n}]");
            let norm = format!("layer_norm x w:float[{k}] b:float[{k}]");
            check(&format!("{x} ; h = gelu x ; {linear} ; out l"), dtype, true);
            check(&format!("{x} ; g = {norm} ; h = gelu g ; {linear} ; out l"), dtype, false);
            check(&format!("{x} ; h = {norm} ; {linear} ; y = gelu l ; out y"), dtype, true);
            check(
                &format!("{x} ; h = softmax x ; {linear} ; r = input float[{m},{n}] ; y = add l r ; out y"),
                dtype,
                false,
            );
            let sum = format!("r = input float[{m},{k}] ; s = add x r ; h = layer_norm s w:float[{k}] b:float[{k}]");
            check(&format!("{x} ; {sum} ; {linear} ; out l"), dtype, false);
            let dropped = "seed = input i32[] ; h = dropout x seed p=0.3 offset=5";
            check(&format!("{x} ; {dropped} ; {linear} ; out l"), dtype, true);
        }
    }
}

#[test]
fn batches_of_few_rows_are_rows_of_one_product() {
    let text = "x = input float[2,1,3,40] ; h = layer_norm x w:float[40] b:float[40]
y = linear h m:float[40,24] c:float[24] ; z = gelu y ; out z";
    Dtype::FLOATS.into_iter().for_each(|dtype| check(text, dtype, true));
}

#[test]
fn what_is_no_number_stays_in_its_row() {
    let text = "x = input float[3,129] ; h = layer_norm x w:float[129] b:float[129]
y = linear h m:float[129,65] c:float[65] ; out y";
    for dtype in Dtype::FLOATS {
        let graph = parsed(text, dtype);
        let mut inputs = seed::inputs(&graph, 3).unwrap();
        let mut x = inputs[0].to_f32().unwrap();
        (x[5], x[130], x[129 + 128]) = (f32::NAN, f32::INFINITY, 1.0);
        inputs[0] = Tensor::from_f32(dtype, [3, 129], &x).unwrap();
        for isa in Isa::available() {
            let (groups, outputs) = run(&cpu(2, isa), &graph, Strategy::Greedy, &inputs);
            let values = outputs[0].to_f32().unwrap();
            assert_eq!(groups, 1);
            assert!(values[..130].iter().all(|value| value.is_nan()), "{dtype} {isa:?}");
            assert!(values[130..].iter().all(|value| value.is_finite()), "{dtype} {isa:?}");
        }
    }
}

#[test]
fn two_products_of_one_operand_are_one_kernel() {
    for dtype in Dtype::FLOATS {
        // Few rows stream the weights, many go through tiles.
        for [m, k, n] in SIZES.into_iter().chain([[33, 129, 127], [70, 900, 500]]) {
            let x = format!("x = input float[{m},{k}]");
            let gated = format!(
                "a = matmul h u:float[{k},{n}] ; b = matmul h v:float[{k},{n}] ; s = silu a ; y = mul s b ; out y"
            );
            // One column is a number per row, worked on by other instructions than a row.
            check(&format!("{x} ; {}", gated.replace("matmul h", "matmul x")), dtype, n > 1);
            if m <= 8 && k > 3 {
                // The greedy plan looks at the norm before both products are together; the search sees both, and for rows of
                // three its price says otherwise.
                let text = format!("{x} ; h = rms_norm x w:float[{k}] ; {gated}");
                check_plan(&text, dtype, Strategy::Fused, n > 1);
            }
        }
    }
}

/// Kernels that the greedy plan has.
fn kernels(text: &str) -> usize {
    let graph = parsed(text, Dtype::F32);
    let machine = Machine::cpu();
    plan(&graph, Target { machine: &machine, catalog: &CpuCatalog }, Strategy::Greedy, &[]).unwrap().groups.len()
}

#[test]
fn what_one_kernel_cannot_do_stays_apart() {
    let norm = "h = layer_norm x w:float[64] b:float[64]";
    let linear = "l = linear h m:float[64,32] c:float[32]";
    assert_eq!(kernels(&format!("x = input float[8,64] ; {norm} ; {linear} ; out l")), 1);
    // One number per row is worked on alone, and not along the row.
    let narrow = "x = input float[8,1] ; h = gelu x ; l = linear h m:float[1,32] c:float[32] ; out l";
    assert_eq!(kernels(narrow), 2);
    // Too many rows to hold.
    assert_eq!(kernels(&format!("x = input float[9,64] ; {norm} ; {linear} ; out l")), 2);
    assert_eq!(kernels(&format!("x = input float[9,64] ; h = gelu x ; {linear} ; out l")), 2);
    // What the head makes is needed elsewhere.
    assert_eq!(kernels(&format!("x = input float[8,64] ; {norm} ; {linear} ; out l h")), 2);
    // Rows that are looked up.
    let table = "t = weight float[100,64] ; i = input i32[8] ; x = gather t i";
    assert!(kernels(&format!("{table} ; {norm} ; {linear} ; out l")) > 1);
    // A second operand that is made, and products that lie differently.
    assert_eq!(kernels("x = input float[8,64] ; w = input float[64,32] ; g = gelu w ; y = matmul x g ; out y"), 2);
    let pair = "x = input float[8,64] ; v = weight float[32,64] ; t = transpose v [1,0] ; a = matmul x u:float[64,32]";
    assert!(kernels(&format!("{pair} ; b = matmul x t ; y = mul a b ; out y")) > 1);
}

#[test]
fn the_search_makes_a_norm_part_of_the_product_of_one_row() {
    let engine = Engine::cpu();
    let text = "x = input float[1,768] ; h = layer_norm x w:float[768] b:float[768]
l = linear h m:float[768,3072] c:float[3072] ; g = gelu l ; y = linear g o:float[3072,768] d:float[768] ; z = add y x ; out z";
    for dtype in Dtype::FLOATS {
        let session = Session::new(&engine, &parsed(text, dtype), Strategy::Fused).unwrap();
        let kinds: Vec<GroupKind> = session.plan().groups.iter().map(|group| group.kind).collect();
        assert_eq!(kinds, [GroupKind::Matmul; 2], "{}", session.plan());
    }
}
