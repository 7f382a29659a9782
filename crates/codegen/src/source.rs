//! What a device takes: a source to compile, and a launch to run it with.

use std::fmt;

use deuteron_graph::{Dtype, NodeId};
use deuteron_plan::{Draft, Structure};

use crate::attention::block::AttentionBlock;
use crate::attention::rows::AttentionRows;
use crate::attention::{AttentionKernel, AttentionShape};
use crate::body::{Body, Origin};
use crate::cpu::emit::{emit, emit_with_origins};
use crate::cpu::program::Program;
use crate::cuda::{self, CudaSource, CudaTarget};
use crate::epilogue::{Epilogue, Operand};
use crate::lower::{NoKernel, lower, lower_row_with_origins};
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
    /// attention, the projection of its result and row work on that
    AttentionBlock(AttentionBlock<Body>),
    /// the gradient of attention
    AttentionBackward(AttentionKernel),
    /// rows added into a table of this storage type
    ScatterAdd(Dtype),
    /// rows of elements of this many bytes written into a cache
    Append(usize),
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
    /// attention, the projection of its result and row work on that
    AttentionBlock(Box<AttentionBlock<Program>>),
    /// the gradient of attention
    AttentionBackward(AttentionKernel),
    /// rows added into a table of this storage type
    ScatterAdd(Dtype),
    /// rows of elements of this many bytes written into a cache
    Append(usize),
    /// elements of this many bytes moved
    Copy(usize),
}

/// A matrix product of a library: what is known of it before its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatmulKernel {
    /// storage type of operands and result; of i8 the result is f32. Sums are f32, of i8 i32
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

    /// The storage type of an argument.
    pub fn operand_dtype(&self, operand: Operand) -> Dtype {
        match (self.dtype, operand) {
            (Dtype::I8, Operand::Bias | Operand::Residual | Operand::C) => Dtype::F32,
            (dtype, _) => dtype,
        }
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
    /// batched products of our own: arguments as [`Product::roles`] lists them
    Product {
        /// the product, or each of two; its result row after row
        shape: MatmulShape,
        /// (divide, modulo) of each launch axis of what makes the first operand
        head_axes: Vec<(usize, usize)>,
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
    /// operands of attention but for its result, then the arguments of the product but for that result
    AttentionBlock {
        /// strides of the result are those that the product reads
        attention: AttentionShape,
        /// the product; its result row after row
        product: MatmulShape,
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
    /// arguments cache, rows, positions, result
    Append(AppendShape),
    /// sources, then the destination
    Copy(Vec<Piece>),
}

/// Rows written into a cache from a position of each sequence on. Cache and result are contiguous, and so is a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppendShape {
    /// (size, stride in the new rows) of the axes before the rows, outermost first
    pub leading: Vec<(usize, usize)>,
    /// which of them counts sequences
    pub batch: usize,
    /// new rows of a sequence
    pub rows: usize,
    /// from one new row to the next
    pub stride: usize,
    /// rows of a sequence in the cache
    pub capacity: usize,
    /// elements of a row
    pub cols: usize,
    /// whether the result is the cache's own memory: then only the new rows are written
    pub in_place: bool,
}

impl AppendShape {
    /// Runs of `capacity` rows.
    pub fn blocks(&self) -> usize {
        self.leading.iter().map(|&(size, _)| size).product()
    }

    /// Places where the new rows fit, from 0 on; none where they are too many.
    pub fn places(&self) -> usize {
        (self.capacity + 1).saturating_sub(self.rows)
    }

    /// Sequences, of which each has a position.
    pub fn sequences(&self) -> usize {
        self.leading.get(self.batch).map_or(0, |&(size, _)| size)
    }

    /// The sequence of a block, and the first element of its new rows.
    pub fn source(&self, block: usize) -> (usize, usize) {
        let (mut rest, mut sequence, mut element) = (block, 0, 0);
        for (axis, &(size, stride)) in self.leading.iter().enumerate().rev() {
            let index = rest % size.max(1);
            rest /= size.max(1);
            element += index * stride;
            if axis == self.batch {
                sequence = index;
            }
        }
        (sequence, element)
    }
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
pub fn render(group: &Draft, backend: &Backend) -> Result<(Source, Launch), NoKernel> {
    let Lowered { kernel, launch } = lower(group, backend)?;
    let source = match backend {
        Backend::Cpu => render_cpu(kernel),
        Backend::Cuda(target) => cuda::render(kernel, &launch, target),
    };
    Ok((source, launch))
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
        Kernel::AttentionBlock(kernel) => Source::AttentionBlock(Box::new(kernel.map(|body| emit(&body)))),
        Kernel::ScatterAdd(dtype) => Source::ScatterAdd(dtype),
        Kernel::Append(bytes) => Source::Append(bytes),
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
pub fn tagged_source(group: &Draft, backend: &Backend) -> Result<Vec<TaggedLine>, NoKernel> {
    if *group.structure != Structure::Row {
        let node = group.nodes.first().copied();
        let source = render(group, backend)?.0.to_string();
        return Ok(source.lines().map(|text| TaggedLine { text: text.to_string(), node }).collect());
    }
    let (lowered, origins) = lower_row_with_origins(group.graph, group.placement, group);
    let Kernel::Row(body) = lowered.kernel else { return Ok(Vec::new()) };
    let lines = match backend {
        Backend::Cpu => program_lines(&body),
        Backend::Cuda(target) => cuda::row_lines(&body, &lowered.launch, target),
    };
    let node = |origin: Origin| match origin {
        Origin::Expr(id) => origins.exprs.get(id.index()).copied(),
        Origin::Stage(position) => origins.stages.get(position).copied(),
    };
    Ok(lines.into_iter().map(|(text, origin)| TaggedLine { text, node: origin.and_then(node) }).collect())
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
            Source::Matmul(MatmulKernel { dtype: Dtype::I8, .. }) => {
                writeln!(f, "matrix product, i8 in, f32 out, i32 sums (plain kernel)")
            }
            Source::Matmul(MatmulKernel { dtype, epilogue }) => {
                writeln!(f, "matrix product{}, {dtype} in and out, f32 sums (library kernel)", epilogue.name())
            }
            Source::Product(product) => write_product(f, product),
            Source::Attention(kernel) => writeln!(f, "{}", kernel.describe()),
            Source::AttentionBackward(kernel) => {
                writeln!(f, "gradients of {}, scores computed again", kernel.describe())
            }
            Source::AttentionRows(kernel) => {
                let AttentionRows { attention, tail, result, .. } = &**kernel;
                let heads = tail.cols / attention.width.max(1);
                writeln!(f, "{}", attention.describe())?;
                writeln!(f, "rows of {heads} heads side by side, while they (argument {result}) are hot:")?;
                write!(f, "{tail}")
            }
            Source::AttentionBlock(kernel) => {
                writeln!(f, "{}", kernel.attention.describe())?;
                f.write_str("then, of its rows and a weight: ")?;
                write_product(f, &kernel.product)
            }
            Source::ScatterAdd(dtype) => writeln!(f, "rows added into a table, {dtype}, in order of the indices"),
            Source::Append(bytes) => writeln!(f, "rows of {bytes}-byte elements written into a cache"),
            Source::Copy(bytes) => writeln!(f, "strided copy of {bytes}-byte elements"),
        }
    }
}

fn write_product(f: &mut fmt::Formatter<'_>, product: &Product<Program>) -> fmt::Result {
    let Product { left, right, result, rights, routed, head, tail } = product;
    let sums = if (*left, *right) == (Dtype::I8, Dtype::I8) { "exact" } else { "f32" };
    let products = match (*routed, *rights) {
        (true, _) => "matrix products of rows and the experts that indices pick for them",
        (false, 1) => "matrix product",
        (false, _) => "two matrix products of one operand",
    };
    writeln!(f, "{products}, {left} by {right}, {sums} sums, blocks of the result")?;
    if let Some(head) = head {
        write!(f, "first its rows of the first operand (argument {}):\n{}", head.made, head.body)?;
    }
    match tail {
        Some(tail) => {
            let sums: Vec<String> = tail.sums.iter().map(usize::to_string).collect();
            let sums = sums.join(" and ");
            let unit = if tail.body.needs_whole_rows() { "each row" } else { "each block" };
            write!(f, "{unit}, while its sums (argument {sums}) are hot:\n{}", tail.body)
        }
        None => writeln!(f, "each block stored as {result}"),
    }
}
