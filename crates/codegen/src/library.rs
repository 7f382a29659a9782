//! A matmul by a vendor's library, as data: `c = f(a b + bias) + residual`, where each part is optional, and GELU and residual
//! exclude each other. The device uses the library, or runs our kernel that comes with the call.

use std::fmt;

use deuteron_graph::Dtype;

use crate::argument::ArgBinding;
use crate::cuda::grid::{CudaSource, Grids};
use crate::matmul_shape::MatmulShape;

/// The epilogue of a library matmul. The list is closed: these are the epilogues of cuBLASLt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LibraryEpilogue {
    /// `a b`
    None,
    /// `a b + bias`
    Bias,
    /// `gelu(a b)`, the tanh form
    Gelu,
    /// `gelu(a b + bias)`, the tanh form
    BiasGelu,
    /// `a b + residual`
    Residual,
    /// `a b + bias + residual`
    BiasResidual,
}

/// The role of an argument of a library call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// the first operand
    A,
    /// the second operand
    B,
    /// one number per column of the result, contiguous
    Bias,
    /// a tensor with the layout of the result
    Residual,
    /// the result
    C,
}

impl LibraryEpilogue {
    /// All of them.
    pub const ALL: [LibraryEpilogue; 6] = [
        LibraryEpilogue::None,
        LibraryEpilogue::Bias,
        LibraryEpilogue::Gelu,
        LibraryEpilogue::BiasGelu,
        LibraryEpilogue::Residual,
        LibraryEpilogue::BiasResidual,
    ];

    /// Whether a bias is added.
    pub fn has_bias(self) -> bool {
        matches!(self, LibraryEpilogue::Bias | LibraryEpilogue::BiasGelu | LibraryEpilogue::BiasResidual)
    }

    /// Whether GELU is applied.
    pub fn has_gelu(self) -> bool {
        matches!(self, LibraryEpilogue::Gelu | LibraryEpilogue::BiasGelu)
    }

    /// Whether a residual is added.
    pub fn has_residual(self) -> bool {
        matches!(self, LibraryEpilogue::Residual | LibraryEpilogue::BiasResidual)
    }

    /// The arguments of a launch, in order.
    pub fn operands(self) -> &'static [Operand] {
        use Operand::{A, B, Bias, C, Residual};
        match self {
            LibraryEpilogue::None | LibraryEpilogue::Gelu => &[A, B, C],
            LibraryEpilogue::Bias | LibraryEpilogue::BiasGelu => &[A, B, Bias, C],
            LibraryEpilogue::Residual => &[A, B, Residual, C],
            LibraryEpilogue::BiasResidual => &[A, B, Bias, Residual, C],
        }
    }

    /// As text, after "matrix product".
    pub fn name(self) -> &'static str {
        match self {
            LibraryEpilogue::None => "",
            LibraryEpilogue::Bias => " + bias",
            LibraryEpilogue::Gelu => " + gelu",
            LibraryEpilogue::BiasGelu => " + bias + gelu",
            LibraryEpilogue::Residual => " + residual",
            LibraryEpilogue::BiasResidual => " + bias + residual",
        }
    }
}

/// The compile-time parameters of a library matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LibraryCall {
    /// storage type of operands and result; of i8 the result is f32. Sums are f32, of i8 i32
    pub dtype: Dtype,
    /// what is done with the sums before they are stored
    pub epilogue: LibraryEpilogue,
}

impl LibraryCall {
    /// A matmul alone.
    pub fn plain(dtype: Dtype) -> LibraryCall {
        LibraryCall { dtype, epilogue: LibraryEpilogue::None }
    }

    /// Its arguments, in order.
    pub fn operands(&self) -> &'static [Operand] {
        self.epilogue.operands()
    }

    /// The storage type of an argument.
    pub fn operand_dtype(&self, operand: Operand) -> Dtype {
        match (self.dtype, operand) {
            (Dtype::I8, Operand::Bias | Operand::Residual | Operand::C) => Dtype::F32,
            (dtype, _) => dtype,
        }
    }
}

impl fmt::Display for LibraryCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dtype {
            Dtype::I8 => writeln!(f, "matrix product, i8 in, f32 out, i32 sums (plain kernel)"),
            dtype => {
                writeln!(f, "matrix product{}, {dtype} in and out, f32 sums (library kernel)", self.epilogue.name())
            }
        }
    }
}

/// A call with its sizes and arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct LibraryMatmul {
    /// what is known before the sizes
    pub call: LibraryCall,
    /// sizes and strides; a residual lies as c does
    pub shape: MatmulShape,
    /// as [`LibraryCall::operands`] lists them
    pub args: Vec<ArgBinding>,
}

/// How a call is run: by the library, or by grids of ours.
#[derive(Debug, Clone, PartialEq)]
pub struct LibraryLaunch {
    /// sizes and strides
    pub shape: MatmulShape,
    /// the first element of each argument
    pub offsets: Vec<usize>,
    /// the kernel of ours
    pub fallback: CudaSource,
    /// its grids
    pub grids: Grids,
}
