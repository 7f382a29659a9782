//! The real compiler, where there is one: no GPU and no driver are needed.
//!
//! It is looked for in the Python environment named by `DEUTERON_NVRTC_ENV`, in `target/nvrtc` of the workspace, and
//! where a user's would be found.

use crate::support::compiler;
use deuteron_device::cuda::cache::{DiskCache, Key, Origin};
use deuteron_device::cuda::error::CudaError;
use deuteron_device::cuda::library;
use deuteron_device::cuda::nvrtc::{Cubin, Request};

/// One entry that needs little, one with static shared memory and a barrier, one that must spill 96 values a thread.
const KERNELS: &str = r#"
extern "C" __global__ void plain(float* y, const float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * 2.0f;
}
extern "C" __global__ void shared_row(float* y, const float* x, int n) {
  __shared__ float s_row[1024];
  s_row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += s_row[i & 1023];
  y[threadIdx.x] = sum;
}
extern "C" __global__ void __launch_bounds__(1024) spills(float* y, const float* x) {
  float r_row[96];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 96; ++i) r_row[i] = x[i * 1024 + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 96; ++i) sum += r_row[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) y[i * 1024 + threadIdx.x] = r_row[i] - sum;
}
"#;

/// Registers for a group of warps can be set on `sm_90a` only.
const HOPPER: &str = r#"
extern "C" __global__ void __launch_bounds__(128) hopper() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
"#;

fn request<'a>(text: &'a str, arch: &'a str) -> Request<'a> {
    Request { name: "kernels.cu", text, arch, options: &[] }
}

#[test]
fn kernels_compile_for_every_architecture_with_their_usage() {
    let Some(compiler) = compiler() else { return };
    assert!(compiler.version() >= library::OLDEST);
    for arch in ["sm_75", "sm_80", "sm_89", "sm_90a"] {
        let cubin = compiler.compile(&request(KERNELS, arch)).unwrap_or_else(|error| panic!("{error}"));
        assert!(cubin.image.starts_with(b"\x7fELF"), "{arch}");
        assert_eq!(cubin.entries.len(), 3, "{arch}: {:?}", cubin.entries);
        let entry = |name: &str| cubin.entry(name).unwrap_or_else(|| panic!("{arch}: no entry {name}"));

        let plain = entry("plain");
        assert!((4..=24).contains(&plain.registers), "{arch}: {plain:?}");
        assert_eq!((plain.spill_stores, plain.spill_loads, plain.stack, plain.shared), (0, 0, 0, 0), "{arch}");
        // Two pointers and an integer, at least, where the number is given.
        assert!(plain.constant.is_none_or(|bytes| bytes >= 20), "{arch}: {plain:?}");

        let shared = entry("shared_row");
        assert_eq!((shared.shared, shared.spill_stores), (4096, 0), "{arch}");
        assert!(shared.barriers >= 1, "{arch}: {shared:?}");

        // A block of 1024 threads leaves 64 registers per thread, and 96 values of 4 bytes do not fit.
        let spills = entry("spills");
        assert_eq!(spills.registers, 64, "{arch}");
        assert!(
            spills.spill_stores >= 4 * (96 - 64) && spills.spill_loads >= spills.spill_stores,
            "{arch}: {spills:?}"
        );
        assert!(spills.stack >= 4 * (96 - 64), "{arch}: {spills:?}");
    }
}

#[test]
fn the_architecture_is_the_one_asked_for() {
    let Some(compiler) = compiler() else { return };
    assert!(compiler.compile(&request(HOPPER, "sm_90a")).is_ok());
    let Err(CudaError::Compile { arch, log, .. }) = compiler.compile(&request(HOPPER, "sm_80")) else {
        panic!("expected a compile error")
    };
    assert_eq!(arch, "sm_80");
    assert!(log.contains("setmaxnreg"), "{log}");
}

#[test]
fn an_error_carries_log_and_numbered_source() {
    let Some(compiler) = compiler() else { return };
    let text = "extern \"C\" __global__ void broken(float* y) {\n  y[0] = undefined_name;\n}\n";
    let error = compiler.compile(&request(text, "sm_90a")).unwrap_err();
    let CudaError::Compile { kernel, arch, log, source } = &error else { panic!("{error}") };
    assert_eq!((kernel.as_str(), arch.as_str(), source.as_str()), ("kernels.cu", "sm_90a", text));
    assert!(log.contains("kernels.cu(2)") && log.contains("undefined_name"), "{log}");
    let message = error.to_string();
    assert!(message.starts_with("kernel `kernels.cu` did not compile for sm_90a\n"), "{message}");
    let numbered =
        "   1 | extern \"C\" __global__ void broken(float* y) {\n   2 |   y[0] = undefined_name;\n   3 | }\n";
    assert!(message.ends_with(numbered), "{message}");
}

#[test]
fn wrong_requests_are_errors_with_the_compilers_words() {
    let Some(compiler) = compiler() else { return };
    let log = |request: &Request<'_>| match compiler.compile(request) {
        Err(CudaError::Compile { log, .. }) => log,
        other => panic!("expected a compile error, got {other:?}"),
    };
    assert!(log(&request(KERNELS, "sm_1")).contains("--gpu-architecture"));
    let options = Request { options: &["--no-such-option"], ..request(KERNELS, "sm_80") };
    assert!(log(&options).contains("--no-such-option"));
    assert!(log(&request("int x;\0", "sm_80")).contains("NUL"));
}

#[test]
fn threads_compile_at_once_and_get_the_same_bytes() {
    let Some(compiler) = compiler() else { return };
    let texts: Vec<String> =
        (0..8).map(|index| format!("{KERNELS}__constant__ float c_unused{index} = {index};")).collect();
    let compile = |text: &str| compiler.compile(&request(text, "sm_80")).unwrap();
    let alone: Vec<Cubin> = texts.iter().map(|text| compile(text)).collect();
    let together: Vec<Cubin> = std::thread::scope(|scope| {
        let threads: Vec<_> = texts.iter().map(|text| scope.spawn(|| compile(text))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(alone == together, "a cubin depends on what other threads compile");
}

#[test]
fn a_compiled_kernel_comes_back_from_disk() {
    let Some(compiler) = compiler() else { return };
    let folder = std::env::temp_dir().join(format!("deuteron-nvrtc-{}", std::process::id()));
    let request = request(KERNELS, "sm_90a");
    let key = Key::new(&request, compiler.version());
    let get = || DiskCache::open(folder.clone()).get_or_build(&key, || compiler.compile(&request)).unwrap();
    let ((built, first), (read, second)) = (get(), get());
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!((first, second), (Origin::Built, Origin::Disk));
    assert!(built == read);
}
