//! Arithmetic of `i32`: it wraps, casts from floats saturate, and gathers pick from integer tables, on every instruction set and on GPUs.

use std::path::Path;

use deuteron::cuda::Arch;
use deuteron::emulate::{Choice, emulate};
use deuteron::{Dtype, Engine, Graph, Isa, Machine, Strategy, Target, Tensor, plan};
use deuteron_codegen::Source;
use deuteron_codegen::cuda::CudaTarget;
use deuteron_device::cuda::nvrtc::Request;
use deuteron_kernels::{Backend, CudaCatalog, render};

use crate::support::{assert_holds, compiler, cpu, emulator, expected, gpu, outputs, ran};

const STRATEGIES: [Strategy; 3] = [Strategy::Naive, Strategy::Unfused, Strategy::Fused];

/// Numbers near the ends of `i32` among others.
fn integers(count: usize, seed: u32) -> Vec<i32> {
    let edges = [0, 1, -1, i32::MAX, i32::MIN, 65_536, -65_537];
    let scrambled =
        |index: usize| (index as u32).wrapping_mul(0x9e37_79b9).wrapping_add(seed.wrapping_mul(0x85eb_ca6b));
    (0..count)
        .map(|index| if index % 3 == 0 { edges[(index / 3 + seed as usize) % 7] } else { scrambled(index) as i32 })
        .collect()
}

fn tensor(shape: [usize; 2], values: &[i32]) -> Tensor {
    let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor::from_bytes(Dtype::I32, shape, &raw).unwrap()
}

fn of(output: &Tensor) -> Vec<i32> {
    output.to_array().unwrap().values.iter().map(|&value| value as i32).collect()
}

fn engines() -> Vec<Engine> {
    let cpus = Isa::available().into_iter().flat_map(|isa| [1, 3].map(|threads| cpu(threads, isa)));
    cpus.chain(gpu()).collect()
}

#[test]
fn sums_and_products_wrap() {
    type Definition = fn(i32, i32) -> i32;
    let definitions: [(&str, Definition); 5] = [
        ("add", i32::wrapping_add),
        ("sub", i32::wrapping_sub),
        ("mul", i32::wrapping_mul),
        ("max", |a, b| a.max(b)),
        ("min", |a, b| a.min(b)),
    ];
    for [rows, cols] in [[1, 1], [3, 129], [40, 7], [0, 5]] {
        let (a, b) = (integers(rows * cols, 1), integers(rows * cols, 2));
        let text = definitions
            .map(|(name, _)| format!("{name} = {name} a b ; r{name} = {name} {name} r ; c{name} = {name} 77777 a"));
        let outs = definitions.map(|(name, _)| format!("out {name} ; out r{name} ; out c{name}"));
        let text = format!(
            "a = input i32[{rows},{cols}] ; b = input i32[{rows},{cols}] ; r = input i32[{rows},1] ; {} ; {}",
            text.join(" ; "),
            outs.join(" ; ")
        );
        let graph: Graph =
            text.replace(" 77777 a", " k a").replace("a = input", "k = const 77777 i32 ; a = input").parse().unwrap();
        let row = integers(rows, 5);
        let inputs = [tensor([rows, cols], &a), tensor([rows, cols], &b), tensor([rows, 1], &row)];
        let mut wanted = Vec::new();
        for (_, apply) in definitions {
            let first: Vec<i32> = a.iter().zip(&b).map(|(&a, &b)| apply(a, b)).collect();
            let second = first.iter().enumerate().map(|(index, &x)| apply(x, row[index / cols])).collect();
            let third = a.iter().map(|&a| apply(77_777, a)).collect();
            wanted.extend([first, second, third]);
        }
        for engine in engines() {
            for strategy in STRATEGIES {
                let session = ran(&engine, &graph, strategy, &inputs);
                let got: Vec<Vec<i32>> = outputs(&session).iter().map(of).collect();
                assert_eq!(got, wanted, "{rows}x{cols} {strategy:?}: {}", session.plan());
            }
        }
    }
}

#[test]
fn floats_become_the_nearest_integers() {
    let edges = [0.5, 1.5, -0.5, -2.5, 2_097_153.0, -8_388_607.5, 2.0e9, 2_147_483_520.0, 2_147_483_648.0, -1e30];
    let others = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, -2_147_483_648.0, 16_777_217.0, 77.49];
    let values: Vec<f32> = edges.into_iter().chain(others).collect();
    for dtype in Dtype::FLOATS {
        let graph: Graph =
            format!("x = input {dtype}[1,17] ; y = cast x i32 ; z = cast y f32 ; out y ; out z").parse().unwrap();
        let input = Tensor::from_f32(dtype, [1, 17], &values).unwrap();
        let nearest: Vec<i32> = input.to_f32().unwrap().iter().map(|x| x.round_ties_even() as i32).collect();
        for engine in engines() {
            for strategy in STRATEGIES {
                let got = outputs(&ran(&engine, &graph, strategy, std::slice::from_ref(&input)));
                assert_eq!(of(&got[0]), nearest, "{dtype} {strategy:?}");
                assert_eq!(got[1].to_f32().unwrap(), nearest.iter().map(|&x| x as f32).collect::<Vec<_>>());
            }
        }
    }
}

/// All of the arithmetic, with one number per row.
const ARITHMETIC: &str = "a = input i32[5,37] ; b = input i32[5,37] ; r = input i32[5,1] ; x = input f32[5,37] ; s = add a b ; d = sub s r
p = mul d a ; m = max p b ; l = min m r ; e = mul x 10.0 ; i = cast e i32 ; y = add l i ; f = cast y f32 ; out y ; out f";

/// Integers among floats: indices that are computed, integers after a matmul, after a norm and in sums over rows.
const MIXED: [&str; 4] = [
    "x = input f32[33,24] ; t = input i32[9,3] ; s = row_absmax x ; q = sigmoid s ; p = mul q 8.0 ; i = cast p i32
one = const 1 i32 ; j = max i one ; k = reshape j [33] ; y = gather t k ; z = add y j ; out y ; out z",
    "x = input f32[17,40] ; w = weight f32[40,33] ; m = matmul x w ; h = mul m 4.0 ; r = round h ; i = cast r i32
c = iota [17,33] axis=1 ; j = mul i c ; k = sub j i ; f = cast k f32 ; y = add f m ; out y ; out k",
    "x = input bf16[12,64] ; n, mean, rstd = layer_norm x w[64] b[64] ; g = cast n f32 ; e = mul g 100.0 ; r = round e
i = cast r i32 ; two = const 2 i32 ; j = mul i two ; f = cast j bf16 ; y = add f x ; out y ; out j",
    "x = input f32[65,30] ; t = input i32[65,30] ; a = add t t ; f = cast a f32 ; h = mul f 0.0000001 ; s = add h x
y = column_sum s ; z = row_sum s ; out y ; out z",
];

fn mixed() -> impl Iterator<Item = (Graph, Vec<Tensor>)> {
    MIXED.into_iter().map(|text| {
        let graph: Graph = text.parse().unwrap();
        let inputs = deuteron::seed::inputs(&graph, 3).unwrap();
        (graph, inputs)
    })
}

#[test]
fn integers_among_floats() {
    for (graph, inputs) in mixed() {
        let expected = expected(&graph, &inputs);
        for engine in engines() {
            for strategy in STRATEGIES {
                let session = ran(&engine, &graph, strategy, &inputs);
                assert_holds(&expected, &graph, &outputs(&session), session.plan());
            }
        }
    }
}

/// The real compiler takes the text that the emulator runs.
#[test]
fn kernels_of_a_gpu_compile() {
    let Some(compiler) = compiler() else { return };
    let machine = Machine::profile("h200").unwrap();
    let target = CudaTarget::new(Arch::Sm90a, 132);
    for graph in [ARITHMETIC, MIXED[0], MIXED[2], MIXED[3]].map(|text| text.parse::<Graph>().unwrap()) {
        let plan =
            plan(&graph, Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) }, Strategy::Fused, &[]);
        let plan = plan.unwrap();
        for group in &plan.groups {
            let kernel = render(group.draft(&graph, &plan.placement), &Backend::Cuda(target.clone())).unwrap();
            let Source::Cuda(source) = &kernel.source else { continue };
            let request = Request { name: &source.name, text: &source.text, arch: target.arch.name(), options: &[] };
            compiler.compile(&request).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

#[test]
fn kernels_of_a_gpu_compute_with_integers() {
    let Some(toolchain) = emulator() else { return };
    for (index, text) in [ARITHMETIC, MIXED[0]].into_iter().enumerate() {
        let graph: Graph = text.parse().unwrap();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("integers{index}"));
        let emulation = emulate(toolchain, &folder, &graph, Strategy::Fused, &Choice::default(), 1).unwrap();
        assert!(emulation.verification.holds(), "{graph}: {:?}", emulation.verification.worst());
    }
}
