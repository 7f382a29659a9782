//! NVIDIA GPUs: finding CUDA's libraries, and opening an engine.

pub use deuteron_codegen::cuda::{Arch, BadTuning, CudaTarget, RowConfig, Tuning};
pub use deuteron_device::cuda::library::{self, Search};
pub use deuteron_device::cuda::nvrtc::{Compiler, Request};
pub use deuteron_device::cuda::{CudaError, Options};
pub use deuteron_kernels::CudaCatalog;

use std::sync::Arc;

use deuteron_device::{Cuda, DeviceError};

use crate::engine::Engine;
use crate::error::Error;

/// An engine on a GPU.
pub fn open(options: &Options) -> Result<Engine, Error> {
    let device = Cuda::new(options).map_err(DeviceError::from)?;
    Ok(Engine::on(Arc::new(device)))
}

/// The compiler alone, which needs no GPU.
pub fn compiler(search: &Search) -> Result<Compiler, Error> {
    Ok(Compiler::new(library::nvrtc(search).map_err(DeviceError::from)?))
}

/// Whether a library of the toolkit was missing, so that more places should be searched.
pub fn is_missing_library(error: &Error) -> bool {
    matches!(cause(error), Some(CudaError::LibraryMissing { library, .. }) if *library != DRIVER)
}

/// Whether there is simply no GPU here: no driver, or a driver without a device.
pub fn is_no_gpu(error: &Error) -> bool {
    match cause(error) {
        Some(CudaError::LibraryMissing { library, .. }) => *library == DRIVER,
        Some(CudaError::NoDevice) => true,
        _ => false,
    }
}

const DRIVER: &str = "libcuda";

fn cause(error: &Error) -> Option<&CudaError> {
    match error {
        Error::Device(DeviceError::Cuda(error)) => Some(error),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(library: &'static str) -> Error {
        let error = CudaError::LibraryMissing { library, remedy: "", looked_in: Vec::new() };
        Error::Device(DeviceError::Cuda(error))
    }

    #[test]
    fn a_machine_without_a_gpu_is_told_from_one_without_a_compiler() {
        assert!(is_no_gpu(&missing("libcuda")) && !is_missing_library(&missing("libcuda")));
        assert!(!is_no_gpu(&missing("libnvrtc")) && is_missing_library(&missing("libnvrtc")));
        assert!(is_no_gpu(&Error::Device(DeviceError::Cuda(CudaError::NoDevice))));
        assert!(!is_no_gpu(&Error::Opaque(String::new())));
    }
}
