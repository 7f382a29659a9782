//! What a device takes: a source to compile, and a launch to run it with.

use std::fmt;

use deuteron_graph::{Dtype, NodeId};
use deuteron_plan::{Draft, Form};

use crate::attention::rows::AttentionRows;
use crate::attention::{AttentionKernel, AttentionShape};
use crate::body::{Body, Origin};
use crate::cpu::emit::{emit, emit_with_origins};
use crate::cpu::program::Program;
use crate::cuda::{self, CudaSource, CudaTarget};
use crate::epilogue::{Epilogue, Operand};
use crate::lower::{lower, lower_row_with_origins};
use crate::product::Product;

/// A group, lowered: what is compiled and what is launched.
#[derive(Debug, Clone, PartialEq)]
pub struct Lowered {
    /// the compile-time half
    pub kernel: Kernel,
    /// the run-time half
    pub launch: Launch,
}

/// The compile-time half before a target is chosen.
#[derive(Debug, Clone, PartialEq)]
pub enum Kernel {
    /// a row kernel
    Row(Body),
    /// a matrix product of a library
    Matmul(MatmulKernel),
    /// a matrix product of our own
    Product(Product<Body>),
    /// attention
    Attention(AttentionKernel),
    /// attention and row work on its result
    AttentionRows(AttentionRows<Body>),
    /// the gradient of attention
    AttentionBackward(AttentionKernel),
    /// rows added into a table of this storage type
    ScatterAdd(Dtype),
    /// elements of this many bytes moved
    Copy(usize),
}

/// What sources are rendered for.
#[derive(Debug, Clone, PartialEq)]
pub enum Backend {
    /// tile programs
    Cpu,
    /// CUDA text
    Cuda(CudaTarget),
}

/// A kernel. Two sources that are equal are one compiled kernel.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// a tile program
    Row(Program),
    /// a CUDA translation unit
    Cuda(CudaSource),
    /// a matrix product of a library
    Matmul(MatmulKernel),
    /// a matrix product of our own
    Product(Box<Product<Program>>),
    /// attention
    Attention(AttentionKernel),
    /// attention and row work on its result
    AttentionRows(Box<AttentionRows<Program>>),
    /// the gradient of attention
    AttentionBackward(AttentionKernel),
    /// rows added into a table of this storage type
    ScatterAdd(Dtype),
    /// elements of this many bytes moved
    Copy(usize),
}

/// A matrix product of a library: what is known of it before its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatmulKernel {
    /// storage type of operands and result; sums are f32
    pub dtype: Dtype,
    /// what is done with the sums before they are stored
    pub epilogue: Epilogue,
}

impl MatmulKernel {
    /// A product alone.
    pub fn plain(dtype: Dtype) -> MatmulKernel {
        MatmulKernel { dtype, epilogue: Epilogue::None }
    }

    /// Its arguments, in order.
    pub fn operands(&self) -> &'static [Operand] {
        self.epilogue.operands()
    }
}

/// The run-time half: buffers, strides, sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// in the order of the source's arguments
    pub args: Vec<ArgBinding>,
    /// the sizes
    pub geometry: Geometry,
}

/// Which buffer an argument is, and how it lies there.
#[derive(Debug, Clone, PartialEq)]
pub struct ArgBinding {
    /// the node that owns the buffer
    pub base: NodeId,
    /// storage type
    pub dtype: Dtype,
    /// whether it is written
    pub written: bool,
    /// first element
    pub offset: usize,
    /// (size, stride) of the leading axes, outermost first
    pub leading: Vec<(usize, usize)>,
    /// rows of a gathered table, else 0
    pub table_rows: usize,
}

/// Sizes of a launch.
#[derive(Debug, Clone, PartialEq)]
pub enum Geometry {
    /// rows and columns, and the divisors of the row coordinates
    Row {
        /// rows; elements over columns in a flat kernel
        rows: usize,
        /// columns
        cols: usize,
        /// (divide, modulo) of each launch axis
        axes: Vec<(usize, usize)>,
    },
    /// a batched product: arguments as [`MatmulKernel::operands`] lists them; a residual lies as c does
    Matmul(MatmulShape),
    /// a batched product of our own: its operands, then its result, or the arguments of what follows but for the sums
    Product {
        /// the product, its result row after row
        shape: MatmulShape,
        /// (divide, modulo) of each launch axis of what follows
        axes: Vec<(usize, usize)>,
    },
    /// arguments as [`AttentionKernel::operands`] lists them
    Attention(AttentionShape),
    /// operands of attention but for its result, then the arguments of what follows but for that result
    AttentionRows {
        /// strides of the result are those of the rows that follow
        shape: AttentionShape,
        /// (divide, modulo) of each launch axis of what follows
        axes: Vec<(usize, usize)>,
    },
    /// arguments as [`AttentionKernel::backward_operands`] lists them; strides of the result are those of its gradient
    AttentionBackward(AttentionShape),
    /// arguments indices, updates, table
    ScatterAdd {
        /// how many rows are added
        count: usize,
        /// columns
        cols: usize,
        /// rows of the table
        rows: usize,
    },
    /// sources, then the destination
    Copy(Vec<Piece>),
}

/// A batched matrix product over strided operands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatmulShape {
    /// rows of c
    pub m: usize,
    /// columns of c
    pub n: usize,
    /// the inner size
    pub k: usize,
    /// (size, stride in a, stride in b, stride in c) of the batch axes
    pub batch: Vec<[usize; 4]>,
    /// (row, column) strides of a, as a matrix m x k
    pub a: (usize, usize),
    /// (row, column) strides of b, as a matrix k x n
    pub b: (usize, usize),
    /// (row, column) strides of c
    pub c: (usize, usize),
}

/// One strided block moved from a source argument into the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// position of the source argument
    pub source: usize,
    /// sizes of the block
    pub dims: Vec<usize>,
    /// strides in the source
    pub from: Vec<usize>,
    /// first element in the source
    pub from_offset: usize,
    /// strides in the destination
    pub to: Vec<usize>,
    /// first element in the destination
    pub to_offset: usize,
}

/// Lowers a group and renders it for a backend.
pub fn render(group: &Draft, backend: &Backend) -> (Source, Launch) {
    let Lowered { kernel, launch } = lower(group, backend);
    let source = match backend {
        Backend::Cpu => render_cpu(kernel),
        Backend::Cuda(target) => cuda::render(kernel, &launch, target),
    };
    (source, launch)
}

fn render_cpu(kernel: Kernel) -> Source {
    match kernel {
        Kernel::Row(body) => {
            debug_assert_eq!(body.verify(), Ok(()));
            Source::Row(emit(&body))
        }
        Kernel::Matmul(kernel) => Source::Matmul(kernel),
        Kernel::Product(product) => Source::Product(Box::new(product.map(|body| emit(&body)))),
        Kernel::Attention(kernel) => Source::Attention(kernel),
        Kernel::AttentionBackward(kernel) => Source::AttentionBackward(kernel),
        Kernel::AttentionRows(kernel) => Source::AttentionRows(Box::new(kernel.map(|body| emit(&body)))),
        Kernel::ScatterAdd(dtype) => Source::ScatterAdd(dtype),
        Kernel::Copy(bytes) => Source::Copy(bytes),
    }
}

/// One line of a kernel's source, and the node it came from, if it came from one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaggedLine {
    /// as [`Source`] prints it
    pub text: String,
    /// the node
    pub node: Option<NodeId>,
}

/// The source of a group, line by line, each with the node it came from. What all row kernels of CUDA share is one line.
pub fn tagged_source(group: &Draft, backend: &Backend) -> Vec<TaggedLine> {
    if group.form != Form::Row {
        let node = group.nodes.first().copied();
        let source = render(group, backend).0.to_string();
        return source.lines().map(|text| TaggedLine { text: text.to_string(), node }).collect();
    }
    let (lowered, origins) = lower_row_with_origins(group.graph, group.placement, group);
    let Kernel::Row(body) = lowered.kernel else { return Vec::new() };
    let lines = match backend {
        Backend::Cpu => program_lines(&body),
        Backend::Cuda(target) => cuda::row_lines(&body, &lowered.launch, target),
    };
    let node = |origin: Origin| match origin {
        Origin::Expr(id) => origins.exprs.get(id.index()).copied(),
        Origin::Stage(position) => origins.stages.get(position).copied(),
    };
    lines.into_iter().map(|(text, origin)| TaggedLine { text, node: origin.and_then(node) }).collect()
}

/// The lines of a tile program, each with what it came from in the body.
fn program_lines(body: &Body) -> Vec<(String, Option<Origin>)> {
    let (program, passes) = emit_with_origins(body);
    // The listing has a line an instruction, row work before strip work, after a line for each pass.
    let mut instructions = passes.iter().flat_map(|pass| pass.row.iter().chain(&pass.strip)).copied();
    let is_instruction = |text: &str| text.starts_with("  row ") || text.starts_with("  strip ");
    let listing = program.to_string();
    let lines = listing.lines().map(|text| {
        let origin = if is_instruction(text) { instructions.next() } else { None };
        (text.to_string(), origin)
    });
    lines.collect()
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Row(program) => write!(f, "{program}"),
            Source::Cuda(source) => f.write_str(&source.text),
            Source::Matmul(MatmulKernel { dtype, epilogue }) => {
                writeln!(f, "matrix product{}, {dtype} in and out, f32 sums (library kernel)", epilogue.name())
            }
            Source::Product(product) => {
                let Product { left, right, result, tail } = &**product;
                writeln!(f, "matrix product, {left} by {right}, f32 sums, blocks of the result")?;
                match tail {
                    Some(tail) => {
                        write!(f, "each block, while its sums (argument {}) are hot:\n{}", tail.sums, tail.body)
                    }
                    None => writeln!(f, "each block stored as {result}"),
                }
            }
            Source::Attention(kernel) => writeln!(f, "{}", kernel.describe()),
            Source::AttentionBackward(kernel) => {
                writeln!(f, "gradients of {}, scores computed again", kernel.describe())
            }
            Source::AttentionRows(kernel) => {
                let AttentionRows { attention, tail } = &**kernel;
                let heads = tail.body.cols / attention.width.max(1);
                writeln!(f, "{}", attention.describe())?;
                writeln!(f, "rows of {heads} heads side by side, while they (argument {}) are hot:", tail.sums)?;
                write!(f, "{}", tail.body)
            }
            Source::ScatterAdd(dtype) => writeln!(f, "rows added into a table, {dtype}, in order of the indices"),
            Source::Copy(bytes) => writeln!(f, "strided copy of {bytes}-byte elements"),
        }
    }
}
