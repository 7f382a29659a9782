//! Errors of CUDA: its libraries, its compiler, its driver, and our kernel cache.

use std::path::PathBuf;

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::{DriverError, sys};

/// A CUDA error. The list is closed, so that a caller handles every case.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library that was not found.
    #[error("{library} was not found; {remedy}; looked in:{}", bullets(.looked_in))]
    LibraryMissing {
        /// the library
        library: &'static str,
        /// how to get it
        remedy: &'static str,
        /// every place searched, in order, with the loader's error if a file was found but did not load
        looked_in: Vec<String>,
    },
    /// A library or driver that is older than we can use.
    #[error(
        "{what} is too old: expected version {}.{} or newer, got {}.{}; {remedy}",
        needed.0, needed.1, found.0, found.1
    )]
    TooOld {
        /// what, and where it was loaded from
        what: String,
        /// the oldest version that works: major, minor
        needed: (u32, u32),
        /// the version found: major, minor
        found: (u32, u32),
        /// how to get a newer one
        remedy: &'static str,
    },
    /// A kernel that does not compile, with everything needed to reproduce it.
    #[error("kernel `{kernel}` did not compile for {arch}\n{}\n{}", log.trim_end(), numbered(.source))]
    Compile {
        /// the name of the source
        kernel: String,
        /// the architecture asked for
        arch: String,
        /// the compiler's log
        log: String,
        /// the whole text given to the compiler (written raw: this is no cause to walk to)
        r#source: String,
    },
    /// The compiler itself failed, independently of a kernel.
    #[error("{call} failed: expected success, got {name} ({code})")]
    Compiler {
        /// the function that failed
        call: &'static str,
        /// its number
        code: i32,
        /// its name
        name: String,
    },
    /// A driver without a GPU.
    #[error(
        "no CUDA device: the driver is installed, but expected at least one GPU, got none; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use the CPU"
    )]
    NoDevice,
    /// No memory on the device.
    #[error(
        "out of device memory: expected {bytes} free bytes, got {free} of {total}; use a smaller batch or sequence, or stop \
         other programs on this GPU"
    )]
    OutOfMemory {
        /// how much was asked for
        bytes: u64,
        /// how much was free
        free: u64,
        /// how much there is
        total: u64,
    },
    /// A failed driver call without further effects.
    #[error("{call} failed: expected success, got {name} ({code}){}", hint(*.code))]
    Driver {
        /// the function that failed
        call: &'static str,
        /// its number
        code: i32,
        /// its name
        name: String,
    },
    /// A kernel broke the context: no call of this process will succeed any more.
    #[error(
        "{call} failed: {name} ({code}); the CUDA context of this process is lost and every further call will fail: restart \
         the process (`compute-sanitizer` finds the kernel that did it)"
    )]
    Sticky {
        /// the function that reported it, often a later one than the launch that caused it
        call: &'static str,
        /// its number
        code: i32,
        /// its name
        name: String,
    },
    /// A call of cuBLASLt that failed.
    #[error("{call} failed: expected success, got {name} ({code})")]
    Cublas {
        /// the function that failed
        call: &'static str,
        /// its number
        code: i32,
        /// its name
        name: String,
    },
    /// An operation of the kernel cache failed. Never fatal: see `DiskCache::problem`.
    #[error("kernel cache: could not {action} {}: {problem}; the kernel was compiled instead", path.display())]
    Cache {
        /// the operation
        action: &'static str,
        /// the file or folder
        path: PathBuf,
        /// the error
        problem: String,
    },
    /// Something that this device, driver or library does not support.
    #[error("{what} is not supported here: expected {expected}, got {got}")]
    Unsupported {
        /// the feature
        what: String,
        /// what it needs
        expected: String,
        /// what is available
        got: String,
    },
}

impl CudaError {
    /// Converts a failed driver call. Running out of memory stays a `Driver` error here: only the caller knows the requested size.
    pub fn driver(call: &'static str, error: DriverError) -> CudaError {
        let code = error.0 as i32;
        // The enum's own name, and not `cuGetErrorName`: it must work when the driver does not.
        let name = format!("{:?}", error.0);
        match error.0 {
            sys::CUresult::CUDA_ERROR_NO_DEVICE => CudaError::NoDevice,
            fault if loses_context(fault) => CudaError::Sticky { call, code, name },
            _ => CudaError::Driver { call, code, name },
        }
    }

    /// A failed call of cuBLASLt.
    pub fn cublas(call: &'static str, error: CublasError) -> CudaError {
        CudaError::Cublas { call, code: error.0 as i32, name: format!("{:?}", error.0) }
    }

    /// Whether the process has to be restarted.
    pub fn is_sticky(&self) -> bool {
        matches!(self, CudaError::Sticky { .. })
    }
}

/// The faults after which CUDA documents that "the process must be terminated and relaunched", and those of the hardware.
fn loses_context(fault: sys::CUresult) -> bool {
    use sys::CUresult::*;
    matches!(
        fault,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_EXTERNAL_DEVICE
    )
}

/// Hints for the failures that a user can fix.
fn hint(code: i32) -> &'static str {
    use sys::CUresult::*;
    let is = |result: sys::CUresult| code == result as i32;
    if is(CUDA_ERROR_STUB_LIBRARY) {
        "; this libcuda is the toolkit's stub: take its `stubs` folder out of the library path"
    } else if is(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH) {
        "; libcuda and the kernel's driver differ in version: reboot, or install them together"
    } else if is(CUDA_ERROR_NO_BINARY_FOR_GPU) || is(CUDA_ERROR_INVALID_IMAGE) {
        "; the kernel was compiled for another GPU or by a compiler newer than the driver"
    } else {
        ""
    }
}

/// The lines of a source with their numbers, as compilers count them.
fn numbered(source: &str) -> String {
    let mut text = String::with_capacity(source.len() + 8 * source.lines().count());
    for (number, line) in source.lines().enumerate() {
        text.push_str(&format!("{:>4} | {line}\n", number + 1));
    }
    text
}

fn bullets(places: &[String]) -> String {
    places.iter().map(|place| format!("\n  {place}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compile_error_prints_the_log_and_the_numbered_source() {
        let error = CudaError::Compile {
            kernel: "copy".to_string(),
            arch: "sm_80".to_string(),
            log: "copy(2): error: identifier \"y\" is undefined\n".to_string(),
            source: "void f() {\n  y = 1;\n}".to_string(),
        };
        let expected = "kernel `copy` did not compile for sm_80\ncopy(2): error: identifier \"y\" is undefined\n   \
                        1 | void f() {\n   2 |   y = 1;\n   3 | }\n";
        assert_eq!(error.to_string(), expected);
        assert!(std::error::Error::source(&error).is_none());
    }

    #[test]
    fn driver_failures_are_sorted_by_what_can_be_done() {
        let sort = |code| CudaError::driver("cuCall", DriverError(code));
        assert_eq!(sort(sys::CUresult::CUDA_ERROR_NO_DEVICE), CudaError::NoDevice);
        let lost = sort(sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert!(lost.is_sticky());
        let begin = "cuCall failed: CUDA_ERROR_ILLEGAL_ADDRESS (700); the CUDA context of this process is lost";
        assert!(lost.to_string().starts_with(begin), "{lost}");
        let plain = sort(sys::CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(plain.to_string(), "cuCall failed: expected success, got CUDA_ERROR_INVALID_VALUE (1)");
        let stub = sort(sys::CUresult::CUDA_ERROR_STUB_LIBRARY);
        assert!(stub.to_string().ends_with("take its `stubs` folder out of the library path"), "{stub}");
    }

    #[test]
    fn a_missing_library_says_where_it_was_looked_for() {
        let error = CudaError::LibraryMissing {
            library: "libnvrtc",
            remedy: "install it",
            looked_in: vec!["a".to_string(), "b".to_string()],
        };
        assert_eq!(error.to_string(), "libnvrtc was not found; install it; looked in:\n  a\n  b");
    }
}
