//! Tensor maps: the descriptors by which the tensor memory accelerator copies tiles (`tma.cuh`).

/// Words of a map in a parameter.
pub const MAP_WORDS: usize = 16;

/// Memory that has a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapped {
    /// the argument of the launch at this position
    Argument(usize),
    /// the launch's workspace
    Workspace,
}

/// A tensor of two-byte elements with up to five axes, the innermost first and contiguous, and the tiles that are copied of it. A
/// tile is at most 128 bytes along that axis, in the 128-byte swizzle; beyond the sizes it is zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    /// what it is a map of
    pub of: Mapped,
    /// bytes from its start; a multiple of 16
    pub offset: usize,
    /// axes, at least 3
    pub rank: usize,
    /// elements along each axis, at least 1 and at most 2^32
    pub sizes: [u64; 5],
    /// bytes from one index to the next along each axis but the innermost: multiples of 16 below 2^40
    pub strides: [u64; 4],
    /// elements of a tile along each axis, at most 256
    pub tile: [u32; 5],
}
