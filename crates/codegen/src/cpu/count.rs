//! The work of a tile program, counted on its instructions.

use deuteron_graph::{BinaryOp, Dtype, UnaryOp};
use deuteron_plan::{Class, LANES, Work};

use crate::argument::ArgBinding;
use crate::cpu::chunks::{Chunks, STREAM_FROM, chunks};
use crate::cpu::program::{Access, Inst, IntegerOp, STRIP, TileProgram, TileReduce, TileUnary};
use crate::cpu::simd::{Sweep, rows_in_flight, sources, spread, sweeps};

/// Counts a tile program over rows and columns.
pub struct Counter<'a> {
    /// the program
    pub program: &'a TileProgram,
    /// its arguments
    pub args: &'a [ArgBinding],
    /// rows
    pub rows: usize,
    /// columns
    pub cols: usize,
}

impl Counter<'_> {
    /// The work of all rows.
    pub fn work(&self) -> Work {
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

    /// Bytes within reach of the launch, which determine whether results use streaming stores.
    fn touched(&self) -> usize {
        let reach = |(arg, access): (&ArgBinding, Access)| {
            let leading = arg.last_row();
            let elements = match access {
                Access::Row if self.program.flat => self.rows * self.cols,
                Access::Row | Access::GatheredRow { .. } => leading + self.cols,
                Access::PerRow | Access::Columns => leading + 1,
            };
            (arg.offset + elements) * arg.dtype.bytes()
        };
        let accesses = self.program.args.iter().map(|spec| spec.access);
        self.args.iter().zip(accesses).map(reach).sum()
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

    /// Rows whose last vector is partial.
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

    /// Operands, arithmetic and result of one instruction over this many vectors.
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
            // Products of integers take a handful of instructions.
            Inst::Integer { op: IntegerOp::Mul, .. } => work.add(Class::Simple, 5.0 * vectors),
            Inst::Integer { .. } => work.add(Class::Simple, vectors),
            Inst::ColumnIndex { .. } | Inst::RowIndex { .. } => work.add(Class::Simple, vectors),
        }
    }

    /// Random bits are generated four vectors at a time, regardless of how many the row needs.
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
        TileUnary::FloatToInt => Class::Convert,
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

/// A kernel with row work after it: the tile program runs once over the rows of the result, which it finds in cache.
pub fn with_epilogue(before: Work, epilogue: &TileProgram, args: &[ArgBinding], rows: usize) -> Work {
    let after = Counter { program: epilogue, args, rows, cols: epilogue.cols }.work();
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
