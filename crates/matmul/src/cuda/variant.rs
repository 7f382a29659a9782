//! The ways to compute a matmul on a GPU, to be measured beside each other.

use std::fmt;

use deuteron_codegen::Kernel;
use deuteron_codegen::cuda::target::CudaTarget;
use deuteron_plan::Draft;

use super::hopper::{HopperKernel, HopperTile};
use super::mma::{MmaKernel, MmaTile};
use super::realigned::RealignedKernel;
use super::skinny::SkinnyKernel;
use super::strips::StripsKernel;
use crate::library;

/// A way to compute a matmul on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatmulVariant {
    /// a call of the vendor's library
    Library,
    /// few rows, every weight once
    FewRows,
    /// few rows, every weight once, by matrix units
    Strips,
    /// on Hopper's matrix units
    Hopper(HopperTile),
    /// the same, of copies of operands that tensor maps cannot take
    Realigned,
    /// on the matrix units of a warp
    Mma(MmaTile),
}

impl MatmulVariant {
    /// All that take a group. Of those that differ in how they are cut, the ones that are predicted to take at most so many times the time
    /// of the fastest.
    pub fn all(group: &Draft, target: &CudaTarget, times: f64) -> Vec<MatmulVariant> {
        let one = [MatmulVariant::Library, MatmulVariant::FewRows, MatmulVariant::Strips, MatmulVariant::Realigned];
        let mut all: Vec<MatmulVariant> =
            one.into_iter().filter(|variant| variant.kernel(group, target).is_some()).collect();
        if let Some(ours) = HopperKernel::of(group, target) {
            all.extend(ours.tiles(target, times).into_iter().map(MatmulVariant::Hopper));
        }
        if let Some(ours) = MmaKernel::of(group, target) {
            all.extend(ours.tiles(target, times).into_iter().map(MatmulVariant::Mma));
        }
        all
    }

    /// The kernel of a group by this variant, if it takes it.
    pub fn kernel(&self, group: &Draft, target: &CudaTarget) -> Option<Kernel> {
        match *self {
            MatmulVariant::Library => Some(library::kernel(&library::lower(group, &library::fit(group)?)?)),
            MatmulVariant::FewRows => Some(SkinnyKernel::of(group, target)?.kernel(target)),
            MatmulVariant::Strips => Some(StripsKernel::of(group, target)?.kernel(target)),
            MatmulVariant::Realigned => Some(RealignedKernel::of(group, target)?.kernel(target)),
            MatmulVariant::Mma(tile) => Some(MmaKernel::of(group, target)?.with_tile(tile).kernel(target)),
            MatmulVariant::Hopper(tile) => Some(HopperKernel::of(group, target)?.with_tile(tile).kernel(target)),
        }
    }
}

impl fmt::Display for MatmulVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MatmulVariant::Library => f.write_str("library"),
            MatmulVariant::FewRows => f.write_str("few rows"),
            MatmulVariant::Strips => f.write_str("few rows by matrix units"),
            MatmulVariant::Hopper(tile) => write!(f, "{tile}"),
            MatmulVariant::Realigned => f.write_str("warpgroups, of copied operands"),
            MatmulVariant::Mma(tile) => write!(f, "{tile}"),
        }
    }
}
