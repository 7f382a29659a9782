//! Epilogues of a matmul on Hopper without a GPU: one kernel each, which the emulator runs and f64 judges, and the real compiler takes.

use std::path::Path;

use deuteron::emulate::{Choice, emulate};
use deuteron::{Dtype, Machine, Strategy, Target, plan};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_device::cuda::nvrtc::Request;
use deuteron_kernels::{Backend, CudaCatalog, render};

use crate::support::{compiler, emulator, parsed};

/// Names, and what follows `l = linear x w c`, where `m` and `n` are rows and columns.
const EPILOGUES: [(&str, &str); 4] = [
    ("mask_of_values", "r = input float[m,n] ; s = mul l 0.125 ; k = gt r 0 ; y = select k s -3e4 ; out y"),
    ("mask_of_places", "i = iota [m,n] axis=0 ; j = iota [m,n] axis=1 ; k = ge i j ; y = select k l -3e4 ; out y"),
    ("dropout", "seed = input i32[] ; h = dropout l seed p=0.3 offset=5 ; r = input float[m,n] ; y = add h r ; out y"),
    (
        "layer_norm_statistics",
        "r = input float[m,n] ; s = add l r ; y, mean, rstd = layer_norm s g:float[n] b:float[n] eps=1e-5
         out s ; out y ; out mean ; out rstd",
    ),
];

fn text(epilogue: &str, [m, k, n]: [usize; 3]) -> String {
    let sized = epilogue.replace("[m,n]", &format!("[{m},{n}]")).replace("[n]", &format!("[{n}]"));
    format!("x = input float[{m},{k}] ; l = linear x w:float[{k},{n}] c:float[{n}] ; {sized}")
}

/// The only kernel of a graph, for Hopper.
fn source(text: &str, dtype: Dtype) -> CudaSource {
    let graph = parsed(text, dtype);
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    let plan = plan(&graph, target, Strategy::Greedy, &[]).unwrap();
    let [group] = plan.groups.as_slice() else { panic!("{} kernels: {text}", plan.groups.len()) };
    let backend = Backend::Cuda(CudaTarget::new(Arch::Sm90a, 132));
    let Kernel { source, launch } = render(group.draft(&graph, &plan.placement), &backend).unwrap();
    let Source::Cuda(source) = source else { panic!("not ours: {text}") };
    assert_eq!(launch.grids().expect("grids").list[0].entry, "matmul_hopper", "{text}");
    source
}

/// Rows, inner sizes and columns that fill no tile.
const ODD: [usize; 3] = [150, 72, 136];

#[test]
fn epilogues_are_right_on_the_emulator() {
    let Some(toolchain) = emulator() else { return };
    for (turn, (name, epilogue)) in EPILOGUES.into_iter().enumerate() {
        let (text, dtype) = (text(epilogue, ODD), if turn % 2 == 0 { Dtype::Bf16 } else { Dtype::F16 });
        source(&text, dtype);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("epilogues").join(name);
        let graph = parsed(&text, dtype);
        let emulation = emulate(toolchain, &folder, &graph, Strategy::Greedy, &Choice::default(), 1).unwrap();
        assert!(emulation.verification.holds(), "{dtype}\n{text}: {:?}", emulation.verification.worst());
        assert_eq!(emulation.kernels.len(), 1, "{text}");
    }
}

/// Names, graphs whose epilogues reduce rows, and the kernels of their greedy plans. One column of tiles, several, and more parts of a row than a
/// thread reads at once; of several matrices and of floats routed to experts the rows do not stay in the launch.
const WHOLE_ROWS: [(&str, &str, usize); 5] = [
    (
        "bytes_normed",
        "x = input i8[150,64] ; w = input i8[136,64] ; t = matmul x w transpose_b ; s = mul t 0.001
         y, mean, rstd = layer_norm s g:f32[136] b:f32[136] eps=1e-5 ; out y ; out mean ; out rstd",
        1,
    ),
    (
        "wide_bytes_normed",
        "x = input i8[20,64] ; w = input i8[2200,64] ; t = matmul x w transpose_b ; s = mul t 0.001
         y, mean, rstd = layer_norm s g:f32[2200] b:f32[2200] eps=1e-5 ; out y ; out mean ; out rstd",
        1,
    ),
    (
        "bytes_with_largest_and_sum",
        "x = input i8[70,64] ; w = input i8[300,64] ; t = matmul x w transpose_b ; s = mul t 0.001 ; y = softmax s ; out y",
        1,
    ),
    (
        "matrices_of_bytes",
        "x = input i8[2,4,64] ; w = input i8[2,32,64] ; t = matmul x w transpose_b ; s = mul t 0.001 ; y = softmax s ; out y",
        2,
    ),
    (
        "routed_floats",
        "x = input bf16[8,256] ; e = input i32[8,1] ; w = weight bf16[2,128,256] ; c = weight bf16[2,128]
         l = routed_linear x e w c ; y, mean, rstd = layer_norm l g:bf16[128] b:bf16[128] eps=1e-5 ; out y ; out mean",
        2,
    ),
];

#[test]
fn whole_rows_of_bytes_are_right_on_the_emulator() {
    let Some(toolchain) = emulator() else { return };
    for (name, text, kernels) in WHOLE_ROWS {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("epilogues").join(name);
        let graph = text.parse().unwrap();
        let emulation = emulate(toolchain, &folder, &graph, Strategy::Greedy, &Choice::default(), 1).unwrap();
        assert!(emulation.verification.holds(), "{text}: {:?}", emulation.verification.worst());
        let names: Vec<&str> = emulation.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        assert_eq!(names.len(), kernels, "{name}: {names:?}");
    }
}

#[test]
fn epilogues_compile_without_spills() {
    let Some(compiler) = compiler() else { return };
    for (name, epilogue) in EPILOGUES {
        for sizes in [ODD, [8192, 768, 768]] {
            let source = source(&text(epilogue, sizes), Dtype::Bf16);
            let request = Request { name: &source.name, text: &source.text, arch: Arch::Sm90a.name(), options: &[] };
            let compiled = compiler.compile(&request).unwrap_or_else(|error| panic!("{name}: {error}"));
            for entry in &compiled.entries {
                assert_eq!((entry.spill_stores, entry.spill_loads), (0, 0), "{name} {sizes:?}");
            }
        }
    }
}
