//! The compiler and the GPU that tests use, where they are there.

pub mod attention;

use std::io::Write;
use std::path::{Path, PathBuf};

use deuteron_codegen::cuda::{Arch, CudaSource};
use deuteron_device::cuda::Options;
use deuteron_device::cuda::cache::DiskCache;
use deuteron_device::cuda::library::{self, Search};
use deuteron_device::cuda::nvrtc::{Compiler, Cubin, Request};
use deuteron_device::{Cuda, CudaError};

/// NVRTC in the environment that `DEUTERON_NVRTC_ENV` names or that the test command made, or a loud word that it is not there.
pub fn compiler() -> Option<Compiler> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/nvrtc");
    let named = std::env::var_os("DEUTERON_NVRTC_ENV").map(PathBuf::from);
    let search = Search { cuda_home: None, environments: named.iter().cloned().chain([workspace]).collect() };
    match library::nvrtc(&search) {
        Ok(token) => Some(Compiler::new(token)),
        Err(error) if named.is_some() => panic!("DEUTERON_NVRTC_ENV is set, and {error}"),
        Err(error) => {
            // Past the capture of the test harness: a skipped test must not look like one that ran.
            let _ = writeln!(std::io::stderr(), "\nSKIPPED, NOT TESTED: NVRTC is not here: {error}\n");
            None
        }
    }
}

/// What earlier runs of the tests compiled, where they were built.
fn kernels() -> Option<DiskCache> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    folder.is_dir().then(|| DiskCache::open(folder.join("kernels")))
}

/// Sources through the compiler, on all cores; one that it refuses fails the test.
pub fn compiled(compiler: &Compiler, sources: Vec<(CudaSource, Arch)>) -> Vec<Cubin> {
    let requests: Vec<Request<'_>> = sources
        .iter()
        .map(|(source, arch)| Request { name: &source.name, text: &source.text, arch: arch.name(), options: &[] })
        .collect();
    let made = sources.iter().zip(compiler.compile_all(&requests, kernels().as_ref()));
    made.map(|((source, arch), cubin)| {
        let cubin = cubin.unwrap_or_else(|error| panic!("{} for {arch}: {error}", source.name));
        assert!(!cubin.entries.is_empty(), "{} for {arch}", source.name);
        cubin
    })
    .collect()
}

/// Libraries in `CUDA_HOME`, in the Python environment that is active, and where systems keep them.
fn options(red_zones: bool) -> Options {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let mut environments: Vec<PathBuf> = folder("VIRTUAL_ENV").into_iter().chain(folder("CONDA_PREFIX")).collect();
    environments.extend(["/usr/local", "/usr", "/opt/conda"].map(PathBuf::from));
    let search = Search { cuda_home: folder("CUDA_HOME"), environments };
    Options { search, red_zones, ..Options::default() }
}

/// The GPU, or a word that there is none. Any other failure is one of the test.
pub fn gpu(red_zones: bool) -> Option<Cuda> {
    match Cuda::new(&options(red_zones)) {
        Ok(cuda) => Some(cuda),
        Err(error @ (CudaError::LibraryMissing { .. } | CudaError::NoDevice | CudaError::TooOld { .. })) => {
            println!("skipped, since this test needs a GPU: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}
