//! Epilogues of a matmul on Hopper without a GPU: one kernel each, which the emulator runs and f64 judges, and the real compiler takes.

use std::path::Path;

use deuteron::emulate::{Choice, Toolchain, emulate};
use deuteron::{Dtype, Machine, Strategy, Target, plan};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget};
use deuteron_codegen::{Kernel, Source};
use deuteron_device::cuda::nvrtc::Request;
use deuteron_kernels::{Backend, CudaCatalog, render};

use crate::support::{compiler, parsed};

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
    let Ok(toolchain) = Toolchain::find(&std::env::var("CXX").unwrap_or_else(|_| "c++".into())) else {
        println!("skipped: no C++ compiler");
        return;
    };
    for (turn, (name, epilogue)) in EPILOGUES.into_iter().enumerate() {
        let (text, dtype) = (text(epilogue, ODD), if turn % 2 == 0 { Dtype::Bf16 } else { Dtype::F16 });
        source(&text, dtype);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("epilogues").join(name);
        let graph = parsed(&text, dtype);
        let emulation = emulate(&toolchain, &folder, &graph, Strategy::Greedy, &Choice::default(), 1).unwrap();
        assert!(emulation.verification.holds(), "{dtype}\n{text}: {:?}", emulation.verification.worst());
        assert_eq!(emulation.kernels.len(), 1, "{text}");
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
