//! Groups as tile programs: graph in, listing out.

use deuteron_graph::Graph;
use deuteron_kernels::{Backend, CpuCatalog, render};
use deuteron_plan::{Draft, Machine, Strategy, Target, plan};

/// The listings of all kernels of the fused plan.
fn listing(text: &str) -> String {
    let graph: Graph = text.parse().unwrap();
    let plan = plan(&graph, Target { machine: &Machine::cpu(), catalog: &CpuCatalog }, Strategy::Greedy, &[]).unwrap();
    let listing = |draft: Draft| render(draft, &Backend::Cpu).unwrap().source.to_string();
    plan.groups.iter().map(|group| listing(group.draft(&graph, &plan.placement))).collect()
}

fn check(text: &str, expected: &str) {
    let strip = |text: &str| text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n");
    let got = listing(text);
    assert_eq!(strip(&got), strip(expected), "\n{got}");
}

#[test]
fn a_layer_norm_and_gelu_take_three_sweeps() {
    check(
        "x = input f32[64,768] ; y, mean, rstd = layer_norm x w[768] b[768] ; z = gelu y ; out z",
        "tile program, 768 columns; 2 tiles, 0 kept rows, 6 scalars
         a0  read  f32  row
         a1  read  f32  row
         a2  read  f32  row
         a3  write f32  row
         pass 0
         strip  s0 = sum a0
         pass 1
         row    s2 = mul s0 0.0013020834
         strip  s1 = deviation a0 s2
         pass 2
         row    s3 = mul s1 0.0013020834
         row    s4 = add s3 1e-5
         row    s5 = rsqrt s4
         strip  t0 = sub_mul_mul_add a0 s2 s5 a1 a2
         strip  t1 = gelu_tanh t0
         strip  a3 = t1",
    );
}

#[test]
fn a_masked_softmax_keeps_its_exponentials() {
    check(
        "x = input f32[8,16,16] ; m = causal_mask x ; y = softmax m ; out y",
        "tile program, 16 columns; 3 tiles, 2 kept rows, 8 scalars
         a0  read  f32  row
         a1  write f32  row
         pass 0
         row    s2 = coordinate 0
         strip  t0 = column
         strip  t1 = le t0 s2
         strip  k0 = select t1 a0 -inf
         strip  s0 = max k0
         pass 1
         row    s3 = eq s0 -inf
         row    s4 = select s3 0.0 s0
         strip  k1 = exp_sub k0 s4
         strip  s1 = sum k1
         pass 2
         row    s5 = eq s1 0.0
         row    s6 = select s5 1.0 s1
         row    s7 = reciprocal s6
         strip  t2 = mul k1 s7
         strip  a1 = t2",
    );
}

#[test]
fn elementwise_chains_are_flat_and_round_where_the_graph_says() {
    check(
        "x = input bf16[64,96] ; r = input bf16[64,96] ; s = add x r ; y = gelu s ; out y s",
        "tile program, flat; 4 tiles, 0 kept rows, 0 scalars
         a0  read  bf16 row
         a1  read  bf16 row
         a2  write bf16 row
         a3  write bf16 row
         pass 0
         strip  t0 = load a0
         strip  t1 = load a1
         strip  t2 = add t0 t1
         strip  a2 = t2
         strip  t1 = round_bf16 t2
         strip  t3 = gelu_tanh t1
         strip  a3 = t3",
    );
}

#[test]
fn sums_over_rows_are_partials_in_the_same_sweep() {
    let got = listing(
        "x = input f32[64,96] ; g = input f32[64,96] ; p = mul x g ; s = column_sum p ; t = column_sum g ; out s t",
    );
    assert!(got.contains("partial 0 += t0") && got.contains("partial 1 += a1"), "{got}");
}

#[test]
fn a_number_per_row_is_stored_once_a_row() {
    let got = listing("x = input f32[64,96] ; m = row_max x ; y = sub x m ; out m y");
    assert!(got.contains("row    a1 = s0") && got.contains("strip  a2 = t0"), "{got}");
}

#[test]
fn a_product_on_either_side_is_part_of_the_sum() {
    let given = "x = input f32[64,96] ; y = input f32[64,96] ; z = input f32[64,96] ; p = mul x y";
    for sum in ["add p z", "add z p"] {
        let got = listing(&format!("{given} ; s = {sum} ; out s"));
        assert!(got.contains("t0 = mul_add a0 a1 a2"), "{sum}\n{got}");
    }
}

#[test]
fn bytes_that_are_read_again_are_those_that_are_stored() {
    let got = listing("x = input f32[4,8] ; y = cast x i8 ; z = cast y f32 ; s = mul z 2.0 ; out y s");
    let bytes = ["select", "max t0 -128.0", "min t0 127.0", "round t0"].iter().map(|part| got.find(part));
    let places: Option<Vec<usize>> = bytes.collect();
    assert!(places.is_some_and(|places| places.is_sorted()), "{got}");
}

#[test]
fn an_embedding_is_a_load() {
    let got = listing("t = input i32[9] ; w = weight f16[50,32] ; e = gather w t ; y = relu e ; out y");
    assert!(got.contains("row picked by a0") && got.contains("pass 0"), "{got}");
}

#[test]
fn a_sum_of_an_activation_keeps_the_compound() {
    let text = listing("x = input f32[640,160] ; g = gelu x ; s = row_sum g ; out s");
    assert!(text.contains("gelu_tanh") && text.contains("sum"), "{text}");
}
