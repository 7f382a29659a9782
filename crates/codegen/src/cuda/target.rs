//! The target of CUDA kernels.

use crate::cuda::arch::Arch;
use crate::cuda::tuning::Tuning;

/// The target of CUDA sources.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaTarget {
    /// the instruction set
    pub arch: Arch,
    /// multiprocessors
    pub processors: usize,
    /// measured launch shapes; others are chosen by their shape
    pub tuning: Tuning,
}

impl CudaTarget {
    /// Without measured launch shapes.
    pub fn new(arch: Arch, processors: usize) -> CudaTarget {
        CudaTarget { arch, processors, tuning: Tuning::default() }
    }
}
