//! Tensor maps: how a GPU's unit that copies tiles finds them.

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

/// What the unit that copies tiles into shared memory has to know of a tensor: elements of two bytes, up to five axes, the
/// innermost first and contiguous. A tile is at most 128 bytes along that axis and swizzled by as much; beyond the sizes it is
/// zeros.
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
