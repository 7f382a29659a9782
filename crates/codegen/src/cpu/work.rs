//! What the CPU's kernels do, counted on the programs that would run.

use deuteron_graph::{BinaryOp, Dtype, Op, UnaryOp};
use deuteron_plan::{Catalog, Class, Draft, GroupKind, LANES, Link, Reach, Structure, Work, primitive_work};

use crate::attention;
use crate::cpu::attention_work::{attention_work, backward_work};
use crate::cpu::chunks::{Chunks, SCATTER_COLUMNS, STREAM_FROM, chunks};
use crate::cpu::program::{Access, Inst, Program, STRIP, TileReduce, TileUnary};
use crate::cpu::simd::{Sweep, rows_in_flight, sources, spread, sweeps};
use crate::kernels::matmul::cpu::STRIP_ROWS;
use crate::product::{self, Product, Role};
use crate::source::{AppendShape, ArgBinding, Backend, Geometry, Launch, MatmulShape, Piece, Source, render};

/// What can be generated for a CPU: row kernels, one or two products with elementwise work after them and, for few rows, row work
/// before them, products of rows with weights picked for them, attention with its projection and row work after it and its gradient,
/// copies, scatters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuCatalog;

impl Catalog for CpuCatalog {
    fn offers_structure(&self, structure: &Structure) -> bool {
        let chain = match structure {
            Structure::Row | Structure::Copy | Structure::ScatterAdd | Structure::Append => return true,
            Structure::Opaque => return false,
            Structure::Chain(chain) => chain,
        };
        match chain.links.as_slice() {
            [Link::Matmul { nodes }] => nodes.len() <= 2 && chain.epilogue.reach != Reach::Rows,
            [Link::Routed { .. }] => chain.epilogue.reach != Reach::Rows,
            [Link::Attention(_), ..] | [Link::AttentionGradient(_)] => true,
            // Probabilities are a matmul and row work: the row is still in cache when it is softened.
            _ => false,
        }
    }

    fn offers(&self, draft: &Draft) -> bool {
        self.offers_structure(draft.structure)
            && match draft.structure.kind() {
                GroupKind::Matmul => product::fit(draft).is_some(),
                GroupKind::Attention => attention::fit(draft).is_some(),
                GroupKind::Row | GroupKind::Copy | GroupKind::ScatterAdd | GroupKind::Append | GroupKind::Opaque => {
                    true
                }
            }
    }

    fn offers_everything(&self) -> bool {
        false
    }

    fn work(&self, draft: &Draft) -> Work {
        let described = draft.nodes.iter().any(|&id| matches!(draft.graph.node(id).op, Op::Opaque(_)));
        if !self.offers_structure(draft.structure) || described {
            return primitive_work(draft);
        }
        let Ok((source, launch)) = render(draft, &Backend::Cpu) else { return primitive_work(draft) };
        match (&source, &launch.geometry) {
            (Source::Row(program), &Geometry::Row { rows, cols, .. }) => {
                Counter { program, launch: &launch, rows, cols }.work()
            }
            (Source::Product(kernel), Geometry::Product { shape, .. }) => product_with_sides(kernel, &launch, shape),
            (Source::AttentionBackward(kernel), Geometry::AttentionBackward(shape)) => backward_work(kernel, shape),
            (Source::AttentionRows(kernel), Geometry::AttentionRows { shape, .. }) => {
                let joined = kernel.tail.cols / kernel.attention.width;
                let rows = shape.batch * shape.heads / joined * shape.queries;
                let mut args = launch.args[kernel.operands()..].to_vec();
                args.insert(kernel.result, ArgBinding { dtype: kernel.attention.dtype, ..handed(&launch) });
                let tail = Launch { args, geometry: launch.geometry.clone() };
                with_tail(attention_work(&kernel.attention, shape), &kernel.tail, &tail, rows)
            }
            (Source::AttentionBlock(kernel), Geometry::AttentionBlock { attention, product, .. }) => {
                let left = ArgBinding { dtype: kernel.attention.dtype, ..handed(&launch) };
                let args = [left].into_iter().chain(launch.args[kernel.operands()..].iter().cloned()).collect();
                let second = Launch { args, geometry: launch.geometry.clone() };
                let next = product_with_sides(&kernel.product, &second, product);
                Work { next: Some(Box::new(next)), ..attention_work(&kernel.attention, attention) }
            }
            (Source::Attention(kernel), Geometry::Attention(shape)) => attention_work(kernel, shape),
            (Source::Copy(bytes), Geometry::Copy(pieces)) => copy_work(*bytes, pieces),
            (Source::Append(_), Geometry::Append(shape)) => append_work(shape),
            (Source::ScatterAdd(_), &Geometry::ScatterAdd { count, cols, rows }) => scatter_work(count, cols, rows),
            (_, _) => primitive_work(draft),
        }
    }
}

/// Counts a tile program over rows and columns.
struct Counter<'a> {
    program: &'a Program,
    launch: &'a Launch,
    rows: usize,
    cols: usize,
}

impl Counter<'_> {
    fn work(&self) -> Work {
        let program = self.program;
        let Chunks { length, chunk, chunks } = chunks(program, self.rows, self.cols);
        let last = length - chunks.saturating_sub(1) * chunk;
        let mut work = Work {
            live_rows: program.kept.into(),
            chunks: chunks.max(1) as f64,
            last_chunk: last as f64 / chunk as f64,
            streams: self.touched() >= STREAM_FROM,
            stream_from: STREAM_FROM as f64,
            ..Work::default()
        };
        let width: usize = program.partials.iter().map(|partial| partial.width).sum();
        work.finished = (chunks * width) as f64;
        // A chunk of a flat program is one long row.
        let rows = if program.flat { chunks } else { self.rows } as f64;
        work.rows = if program.flat { 0.0 } else { rows };
        // Row work is done for all rows in flight at once, a lane each.
        let flights = (rows / rows_in_flight(program) as f64).ceil();
        if !program.flat {
            let along = program.args.iter().filter(|spec| spec.access == Access::Row).count();
            (work.flights, work.row_arguments) = (flights, flights * along as f64);
        }
        for pass in &program.passes {
            pass.row.iter().for_each(|inst| self.row_step(&mut work, inst, rows, flights));
            work.row_scalars += rows * spread(program, pass).len() as f64;
            sweeps(program, pass).iter().for_each(|sweep| self.sweep(&mut work, sweep));
        }
        work
    }

    /// Bytes within reach of the launch, as the device counts them.
    fn touched(&self) -> usize {
        let reach = |(arg, access): (&ArgBinding, Access)| {
            let leading: usize = arg.leading.iter().map(|&(size, stride)| size.saturating_sub(1) * stride).sum();
            let elements = match access {
                Access::Row if self.program.flat => self.rows * self.cols,
                Access::Row | Access::GatheredRow { .. } => leading + self.cols,
                Access::PerRow | Access::Columns => leading + 1,
            };
            (arg.offset + elements) * arg.dtype.bytes()
        };
        let accesses = self.program.args.iter().map(|spec| spec.access);
        self.launch.args.iter().zip(accesses).map(reach).sum()
    }

    /// Vectors of a sweep over all rows.
    fn vectors(&self) -> f64 {
        if self.program.flat {
            return (self.rows * self.cols).div_ceil(LANES) as f64;
        }
        (self.rows * self.cols.div_ceil(LANES)) as f64
    }

    /// Strips of all rows.
    fn strips(&self) -> f64 {
        if self.program.flat {
            return (self.rows * self.cols).div_ceil(STRIP) as f64;
        }
        (self.rows * self.cols.div_ceil(STRIP)) as f64
    }

    /// Rows whose last vector is not full.
    fn ragged(&self) -> f64 {
        if self.program.flat || self.cols.is_multiple_of(LANES) { 0.0 } else { self.rows as f64 }
    }

    /// One instruction of the row work: loads and stores a row at a time, the rest a vector for all rows in flight.
    fn row_step(&self, work: &mut Work, inst: &Inst, rows: f64, flights: f64) {
        match inst {
            Inst::Load { .. } | Inst::Store { .. } | Inst::RowIndex { .. } | Inst::ColumnAdd { .. } => {
                work.row_scalars += rows;
            }
            inst => {
                work.dispatches += flights;
                self.arithmetic(work, inst, flights);
            }
        }
    }

    fn sweep(&self, work: &mut Work, sweep: &Sweep) {
        let (vectors, strips) = (self.vectors(), self.strips());
        work.dispatches += strips;
        work.tails += self.ragged();
        self.arithmetic(work, &sweep.inst, vectors);
        if let Inst::Keep { .. } = sweep.inst {
            // The mask goes through a place of its own.
            work.dispatches += strips;
            work.tails += self.ragged();
            work.add(Class::Move, vectors);
        }
        if sweep.reduce.is_some() || matches!(sweep.inst, Inst::Reduce { .. }) {
            work.add(Class::Reduce, vectors);
            work.reductions += self.rows as f64;
        }
        if let Inst::Reduce { op: TileReduce::ArgMax, .. } = sweep.inst {
            // A chain through memory for each vector, and the lanes one by one at the end.
            work.add(Class::Reduce, 4.0 * vectors);
            work.row_scalars += 32.0 * self.rows as f64;
        }
        // A tile whose lines are not those of the argument is written first and copied past the caches then: the lines
        // that fill up, and what stands before and after them.
        let misaligned = !self.program.flat && !self.cols.is_multiple_of(LANES);
        if sweep.store.is_some() && work.streams && misaligned {
            work.dispatches += 3.0 * strips;
            work.tails += 2.0 * self.ragged();
            work.add(Class::Move, vectors);
        }
    }

    /// Operands, arithmetic and result of one instruction over so many vectors.
    fn arithmetic(&self, work: &mut Work, inst: &Inst, vectors: f64) {
        let is_narrow = |arg: u16| !matches!(self.program.args[usize::from(arg)].dtype, Dtype::F32 | Dtype::I32);
        let convert = |work: &mut Work, arg: u16| {
            if is_narrow(arg) {
                work.add(Class::Convert, vectors)
            }
        };
        // Two operands come with the arithmetic; each further one takes a load of its own.
        let operands = sources(*inst).iter().flatten().count();
        let moved = match inst {
            Inst::Load { .. } | Inst::Store { .. } | Inst::ColumnAdd { .. } => 1,
            _ => operands.saturating_sub(2),
        };
        work.add(Class::Move, moved as f64 * vectors);
        match *inst {
            Inst::Load { arg, .. } | Inst::Store { arg, .. } => convert(work, arg),
            // A tanh of full accuracy takes longer than the sigmoid inside of GELU and SiLU: 224 us and 123 us for
            // 400 x 800 on one Xeon core with AVX-512, 2026-11-15.
            Inst::Unary { op: TileUnary::Primitive(UnaryOp::Tanh), .. } => work.add(Class::Tanh, 1.7 * vectors),
            Inst::Unary { op, .. } => work.add(unary_class(op), vectors),
            Inst::Binary { op: BinaryOp::Div, .. } => work.add(Class::Divide, vectors),
            Inst::ExpSub { .. } => work.add(Class::Exp, vectors),
            Inst::MulMulAdd { .. } | Inst::SubMulMulAdd { .. } => work.add(Class::Simple, vectors),
            Inst::Keep { .. } => work.add(Class::Random, self.random_vectors()),
            Inst::ColumnAdd { .. } => work.add(Class::Column, vectors),
            Inst::Reduce { .. } => {}
            Inst::Binary { .. } | Inst::MulAdd { .. } | Inst::Compare { .. } | Inst::Select { .. } => {
                work.add(Class::Simple, vectors);
            }
            Inst::ColumnIndex { .. } | Inst::RowIndex { .. } => work.add(Class::Simple, vectors),
        }
    }

    /// Random bits come four vectors at a time, whatever the row needs of them.
    fn random_vectors(&self) -> f64 {
        let block = 4 * LANES;
        if self.program.flat {
            return self.vectors();
        }
        // A row starts anywhere in a block of four elements, so that it reaches two further on the average.
        let blocks = |length: usize| (length as f64 / block as f64).ceil().max((length as f64 + 1.5) / block as f64);
        let (full, rest) = (self.cols / STRIP, self.cols % STRIP);
        let a_row = full as f64 * blocks(STRIP) + if rest > 0 { blocks(rest) } else { 0.0 };
        self.rows as f64 * a_row * 4.0
    }
}

fn unary_class(op: TileUnary) -> Class {
    match op {
        TileUnary::GeluTanh | TileUnary::Silu => Class::Tanh,
        TileUnary::GeluErf => Class::Erf,
        TileUnary::IntToFloat => Class::Simple,
        TileUnary::RoundF16 | TileUnary::RoundBf16 => Class::Convert,
        TileUnary::Primitive(op) => match op {
            UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Round => Class::Simple,
            UnaryOp::Exp => Class::Exp,
            UnaryOp::Log | UnaryOp::Erf => Class::Erf,
            UnaryOp::Sqrt | UnaryOp::Rsqrt | UnaryOp::Reciprocal => Class::Divide,
            UnaryOp::Tanh | UnaryOp::Sigmoid => Class::Tanh,
        },
    }
}

/// Rows or columns of one block of a product, as its price counts them: the machine's numbers were fitted to products that were
/// cut so. The kernels cut by threads and caches, which a price does not know.
const PRODUCT_BLOCK: usize = 256;

/// Products with what stands around them: every worker makes the first operand for itself, and the tile program of the tail runs once
/// over the result, whose sums it finds in cache.
fn product_with_sides(kernel: &Product<Program>, launch: &Launch, shape: &MatmulShape) -> Work {
    let mut work = product_work(kernel, shape);
    let roles = kernel.roles();
    // The arguments of a side, those that are handed over like any other of f32.
    let side = |program: &Program, role: fn(usize) -> Role| {
        let known = |arg| roles.iter().position(|&known| known == role(arg)).map(|at| launch.args[at].clone());
        let args = (0..program.args.len()).map(|arg| known(arg).unwrap_or_else(|| handed(launch))).collect();
        Launch { args, geometry: launch.geometry.clone() }
    };
    if let Some(tail) = &kernel.tail {
        let rows = shape.m * shape.batch.iter().map(|axis| axis[0]).product::<usize>();
        let launch = side(&tail.body, Role::Tail);
        if tail.body.needs_whole_rows() {
            // Sums that wait for the rest of their row are copied. Strips of rows share what follows: of few rows, one worker does it.
            work.add(Class::Move, 2.0 * (rows * tail.body.cols.div_ceil(LANES)) as f64);
            let (least, strips) = (STRIP_ROWS.0, rows.div_ceil(STRIP_ROWS.0).max(1));
            let shared = Work {
                chunks: strips as f64,
                last_chunk: (rows - (strips - 1) * least) as f64 / least as f64,
                ..Work::default()
            };
            work.next = Some(Box::new(with_tail(shared, &tail.body, &launch, rows)));
        } else {
            work = with_tail(work, &tail.body, &launch, rows);
        }
    }
    if let Some(head) = &kernel.head {
        let launch = side(&head.body, Role::Head);
        let before = Counter { program: &head.body, launch: &launch, rows: shape.m, cols: shape.k }.work();
        work.each = Some(Box::new(Work { chunks: 1.0, streams: false, stream_from: 0.0, ..before }));
    }
    work
}

/// An argument that is handed over in cache.
fn handed(launch: &Launch) -> ArgBinding {
    ArgBinding { dtype: Dtype::F32, written: false, offset: 0, leading: Vec::new(), ..launch.args[0].clone() }
}

/// A product or attention with what follows it: the tile program runs once over the rows of the result, which it finds in cache.
fn with_tail(before: Work, tail: &Program, launch: &Launch, rows: usize) -> Work {
    let after = Counter { program: tail, launch, rows, cols: tail.cols }.work();
    let mut work = before;
    for (sum, more) in work.vectors.iter_mut().zip(after.vectors) {
        *sum += more;
    }
    work.tails += after.tails;
    work.dispatches += after.dispatches;
    work.row_scalars += after.row_scalars;
    work.reductions += after.reductions;
    work
}

fn product_work(kernel: &Product<Program>, shape: &MatmulShape) -> Work {
    let &MatmulShape { m, n, k, .. } = shape;
    let (dtype, rights) = (kernel.left, kernel.rights);
    let batch: usize = shape.batch.iter().map(|axis| axis[0]).product();
    let side = m.max(n);
    let blocks = side.div_ceil(PRODUCT_BLOCK);
    let last = side - blocks.saturating_sub(1) * PRODUCT_BLOCK;
    let mut work = Work {
        chunks: (batch * blocks).max(1) as f64,
        last_chunk: if batch == 1 { last as f64 / PRODUCT_BLOCK.min(side).max(1) as f64 } else { 1.0 },
        products: (batch * blocks * rights) as f64,
        matrix_flops: 2.0 * (m * n * k * batch * rights) as f64,
        // Kernels hold whole vectors of a row of the result.
        padded_flops: 2.0 * (m * n.next_multiple_of(LANES) * k * batch * rights) as f64,
        matrix_bits: 8 * dtype.bytes() as u32,
        matrix_rows: m,
        ..Work::default()
    };
    // The operand along the blocks is packed once, the other one for each block.
    let (times_left, times_right) = if n > m { (blocks, 1) } else { (1, blocks) };
    work.packed = (batch * (m * k * times_left + rights * (k * n * times_right + m * n))) as f64;
    // A first operand that lies transposed is packed element by element, and so is any that is widened first.
    let a = if shape.a.1 == 1 { 0 } else { m * k * times_left };
    work.copied = (batch * a) as f64;
    // Bytes are multiplied as they are.
    if !matches!(dtype, Dtype::F32 | Dtype::I8) {
        work.add(Class::Convert, work.packed / LANES as f64);
        let b = if shape.b.1 == 1 { 0 } else { k * n * times_right };
        work.copied += (batch * rights * b) as f64;
    }
    work
}

/// Rows that follow each other are moved as bytes, anything else element by element.
/// The new rows alone: a cache is kept in place.
fn append_work(shape: &AppendShape) -> Work {
    let rows = (shape.blocks() * shape.rows) as f64;
    Work { chunks: 1.0, last_chunk: 1.0, stream_from: STREAM_FROM as f64, rows, ..Work::default() }
}

fn copy_work(element: usize, pieces: &[Piece]) -> Work {
    let mut work = Work { chunks: 1.0, last_chunk: 1.0, stream_from: STREAM_FROM as f64, ..Work::default() };
    // Long runs are moved by the system's routine, which writes past the caches or without reading first.
    let bytes: usize = pieces.iter().map(|piece| 2 * element * piece.dims.iter().product::<usize>()).sum();
    work.streams = bytes >= STREAM_FROM;
    for piece in pieces {
        let elements: usize = piece.dims.iter().product();
        if elements == 0 {
            continue;
        }
        let rank = piece.dims.len();
        // Axes that follow each other on both sides are one run.
        let mut run = 1;
        let in_order = (0..rank).rev().take_while(|&axis| {
            let follows = piece.dims[axis] == 1 || (piece.from[axis] == run && piece.to[axis] == run);
            run *= if follows { piece.dims[axis] } else { 1 };
            follows
        });
        in_order.count();
        match run {
            1 => {
                work.copied += elements as f64;
                work.streams = false;
            }
            _ => work.rows += (elements / run) as f64,
        }
        // The same limits as the device's.
        let tasks = if elements * element < 64 << 10 { 1 } else { (elements / run).clamp(1, 64) };
        work.chunks = work.chunks.max(tasks as f64);
    }
    work
}

/// Every block of columns walks over the table's rows, and over the rows that are added.
fn scatter_work(count: usize, cols: usize, rows: usize) -> Work {
    let blocks = cols.div_ceil(SCATTER_COLUMNS);
    Work {
        chunks: blocks.max(1) as f64,
        last_chunk: 1.0,
        scattered: (blocks * count) as f64,
        cleared: (blocks * rows) as f64,
        ..Work::default()
    }
}
