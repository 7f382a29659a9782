//! Body to tile program.
//!
//! Expressions are sorted by level: the number of passes over the row before a value is known. Level `n` is
//! pass `n`. Values that are constant along a row become scalar work before the pass; an `f32` argument is read in place;
//! a value that a later pass needs is kept, and any other value is in a tile until its last reader.
//!
//! Compounds are recognised here: `a*b + c`, sums of products, GELU and SiLU in one instruction each.

use deuteron_graph::{Activation, BinaryOp, CompareOp, Dtype, ReduceOp, UnaryOp};

use crate::body::{Body, Expr, ExprId, Origin, Stage};
use crate::compound::{activation, binary};
use crate::cpu::program::{Access, Dst, Inst, LaneKind, Partial, Pass, Src, TileProgram, TileReduce, TileUnary};

/// Emits the tile program of a body.
pub fn emit(body: &Body) -> TileProgram {
    emit_with_origins(body).0
}

/// Origins of the instructions of one pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PassOrigins {
    /// of the row work
    pub row: Vec<Origin>,
    /// of the strip work
    pub strip: Vec<Origin>,
}

/// Emits the tile program of a body, with the origin of each instruction.
pub fn emit_with_origins(body: &Body) -> (TileProgram, Vec<PassOrigins>) {
    let mut emitter = Emitter::new(body);
    for pass in 0..emitter.passes {
        emitter.pass(pass);
    }
    let origins = std::mem::take(&mut emitter.origins);
    (emitter.finish(), origins)
}

/// How an expression is computed: as written, or as a compound of expressions further down.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    Plain,
    /// `a * b + c`
    MulAdd(ExprId, ExprId, ExprId),
    /// `a * b * c + d`
    MulMulAdd(ExprId, ExprId, ExprId, ExprId),
    /// `(a - b) * c * d + e`
    SubMulMulAdd([ExprId; 5]),
    /// `e^(a - b)`
    ExpSub(ExprId, ExprId),
    /// a function of `x`
    Compound(TileUnary, ExprId),
}

struct Emitter<'a> {
    body: &'a Body,
    uniform: Vec<bool>,
    levels: Vec<usize>,
    /// How often each expression is read in the body.
    uses: Vec<usize>,
    shapes: Vec<Shape>,
    /// How often each expression is read in each pass, a pass after the other, counting only reads that remain after compounds are found.
    read_in: Vec<usize>,
    place: Vec<Option<Src>>,
    passes: usize,
    scalars: u16,
    kept: u16,
    /// Free tiles, and the total number of tiles.
    free_tiles: Vec<u16>,
    tiles: u16,
    row_value_slots: Vec<u16>,
    partials: Vec<Partial>,
    out: Vec<Pass>,
    origins: Vec<PassOrigins>,
}

impl<'a> Emitter<'a> {
    fn new(body: &'a Body) -> Self {
        let uniform = body.uniform();
        let levels = body.levels();
        let uses = body.use_counts();
        let shapes = find_compounds(body, &uniform, &uses);
        let mut scalars = 0;
        let row_value_slots = (0..body.row_values).map(|_| next(&mut scalars)).collect();
        let passes = body.stages.iter().map(|stage| levels[stage.value().index()] + 1).max().unwrap_or(0);
        let mut emitter = Emitter {
            body,
            uniform,
            levels,
            uses,
            shapes,
            read_in: vec![0; passes * body.exprs.len()],
            place: vec![None; body.exprs.len()],
            passes,
            scalars,
            kept: 0,
            free_tiles: Vec::new(),
            tiles: 0,
            row_value_slots,
            partials: Vec::new(),
            out: Vec::new(),
            origins: Vec::new(),
        };
        emitter.find_readers();
        emitter
    }

    /// Marks where each expression is read, from the stages down, early passes first: an expression is computed in the
    /// pass of its first reader.
    fn find_readers(&mut self) {
        for pass in 0..self.passes {
            for stage in &self.body.stages {
                if self.levels[stage.value().index()] == pass {
                    self.stage_reads(stage).for_each(|value| self.read(value, pass));
                }
            }
        }
    }

    fn read(&mut self, id: ExprId, pass: usize) {
        let is_first = self.reads_of(id) == 0;
        self.read_in[pass * self.body.exprs.len() + id.index()] += 1;
        if is_first {
            self.reads(id).for_each(|operand| self.read(operand, pass));
        }
    }

    /// How often an expression is read from each pass on, in the order of passes.
    fn reads_by_pass(&self, id: ExprId) -> impl Iterator<Item = usize> + '_ {
        self.read_in.iter().skip(id.index()).step_by(self.body.exprs.len()).copied()
    }

    /// How often an expression is read in all passes.
    fn reads_of(&self, id: ExprId) -> usize {
        self.reads_by_pass(id).sum()
    }

    /// The operands of a stage, after a sum of products has become a dot and a cast part of its store.
    fn stage_reads(&self, stage: &Stage) -> impl Iterator<Item = ExprId> + use<> {
        let (first, second) = match *stage {
            Stage::RowReduce { op, value, .. } => {
                let (_, a, b) = self.reduction(op, value);
                (a, b)
            }
            Stage::Store { value, .. } => (self.stored(value), None),
            Stage::ColumnSum { value, .. } => (value, None),
        };
        [first].into_iter().chain(second)
    }

    /// The reduction of the tile machine: a product that is only summed is a dot, a squared difference a deviation.
    fn reduction(&self, op: ReduceOp, value: ExprId) -> (TileReduce, ExprId, Option<ExprId>) {
        // The product at the end of a GELU or SiLU belongs to its compound, which is worth more than a dot.
        let plain = !matches!(self.shapes[value.index()], Shape::Compound(..));
        let single = plain && self.uses[value.index()] == 1 && !self.uniform[value.index()];
        match self.body.expr(value) {
            Expr::Binary(BinaryOp::Mul, a, b) if op == ReduceOp::Sum && single => match self.centred(a) {
                Some((x, centre)) if a == b => (TileReduce::Deviation, x, Some(centre)),
                _ => (TileReduce::Dot, a, Some(b)),
            },
            _ => (tile_reduce(op), value, None),
        }
    }

    /// A value minus a number of its row, which is as cheap to recompute as to keep: the centred values of a layer norm.
    fn centred(&self, id: ExprId) -> Option<(ExprId, ExprId)> {
        let Expr::Binary(BinaryOp::Sub, x, centre) = self.body.expr(id) else { return None };
        let again = self.finder().only_centred(id);
        (again && self.uniform[centre.index()] && !self.uniform[x.index()]).then_some((x, centre))
    }

    fn finder(&self) -> Finder<'_> {
        Finder { body: self.body, uniform: &self.uniform, uses: &self.uses }
    }

    /// Stores convert, so a cast that is stored needs no instruction of its own.
    fn stored(&self, value: ExprId) -> ExprId {
        match self.body.expr(value) {
            Expr::ToInt8(a) | Expr::ToFp8(a) => a,
            _ => value,
        }
    }

    fn reads(&self, id: ExprId) -> impl Iterator<Item = ExprId> + use<> {
        let plain = match self.shapes[id.index()] {
            Shape::Plain => Some(self.body.expr(id).operands()),
            _ => None,
        };
        let compound = match self.shapes[id.index()] {
            Shape::Plain => [None; 5],
            Shape::MulAdd(a, b, c) => [Some(a), Some(b), Some(c), None, None],
            Shape::MulMulAdd(a, b, c, d) => [Some(a), Some(b), Some(c), Some(d), None],
            Shape::SubMulMulAdd(operands) => operands.map(Some),
            Shape::ExpSub(a, b) => [Some(a), Some(b), None, None, None],
            Shape::Compound(_, x) => [Some(x), None, None, None, None],
        };
        plain.into_iter().flatten().chain(compound.into_iter().flatten())
    }

    fn pass(&mut self, pass: usize) {
        self.out.push(Pass::default());
        self.origins.push(PassOrigins::default());
        // What the pass before left in tiles is gone: only kept values live on.
        self.free_tiles = (0..self.tiles).rev().collect();
        let mut remaining = self.reads_within(pass);
        for (position, stage) in self.body.stages.iter().enumerate() {
            if self.levels[stage.value().index()] != pass {
                continue;
            }
            for read in self.stage_reads(stage) {
                for id in self.still_to_compute(read) {
                    self.compute(id, pass, &mut remaining);
                }
            }
            self.stage(stage);
            self.note(pass, Origin::Stage(position));
            self.stage_reads(stage).for_each(|read| self.release(read, &mut remaining));
        }
        for id in self.body.ids() {
            if matches!(self.place[id.index()], Some(Src::Tile(_))) {
                self.place[id.index()] = None;
            }
        }
    }

    /// Records the origin of the instructions just emitted.
    fn note(&mut self, pass: usize, origin: Origin) {
        self.origins[pass].row.resize(self.out[pass].row.len(), origin);
        self.origins[pass].strip.resize(self.out[pass].strip.len(), origin);
    }

    /// How often each expression is still read within a pass.
    fn reads_within(&self, pass: usize) -> Vec<usize> {
        let count = self.body.exprs.len();
        self.read_in[pass * count..][..count].to_vec()
    }

    /// Missing operands of a value, operands first.
    fn still_to_compute(&self, value: ExprId) -> Vec<ExprId> {
        let mut found: Vec<ExprId> = Vec::new();
        let mut stack = vec![value];
        while let Some(id) = stack.pop() {
            if self.place[id.index()].is_none() && !found.contains(&id) {
                found.push(id);
                stack.extend(self.reads(id));
            }
        }
        found.sort();
        found
    }

    fn compute(&mut self, id: ExprId, pass: usize, remaining: &mut [usize]) {
        let index = id.index();
        match self.body.expr(id) {
            Expr::Const(bits) => self.place[index] = Some(Src::Const(f32::from_bits(bits))),
            Expr::ConstInt(value) => self.place[index] = Some(Src::ConstInt(value)),
            Expr::RowValue(value) => self.place[index] = Some(Src::Scalar(self.row_value_slots[value as usize])),
            Expr::Load(arg) if self.read_in_place(arg) => self.place[index] = Some(Src::Arg(arg)),
            _ if self.uniform[index] => self.scalar_work(id, pass),
            _ => self.strip_work(id, pass, remaining),
        }
    }

    fn read_in_place(&self, arg: u16) -> bool {
        let arg = &self.body.args[arg as usize];
        let by_row = matches!(arg.access, Access::Row | Access::GatheredRow { .. });
        by_row && matches!(arg.dtype, Dtype::F32 | Dtype::I32)
    }

    fn scalar_work(&mut self, id: ExprId, pass: usize) {
        let slot = next(&mut self.scalars);
        let insts = self.instructions(id, Dst::Scalar(slot));
        self.out[pass].row.extend(insts);
        self.note(pass, Origin::Expr(id));
        self.place[id.index()] = Some(Src::Scalar(slot));
    }

    fn strip_work(&mut self, id: ExprId, pass: usize, remaining: &mut [usize]) {
        let later = self.reads_by_pass(id).skip(pass + 1).any(|reads| reads > 0);
        let dst = match later {
            true => Dst::Kept(next(&mut self.kept)),
            // A tile of its own, so that the store can be folded into what makes it.
            false if self.is_only_stored(id) => Dst::Tile(next(&mut self.tiles)),
            false => Dst::Tile(self.take_tile()),
        };
        let insts = self.instructions(id, dst);
        self.out[pass].strip.extend(insts);
        self.note(pass, Origin::Expr(id));
        self.place[id.index()] = Some(match dst {
            Dst::Tile(tile) => Src::Tile(tile),
            Dst::Kept(row) => Src::Kept(row),
            Dst::Scalar(slot) => Src::Scalar(slot),
        });
        for operand in self.reads(id) {
            self.release(operand, remaining);
        }
    }

    fn is_only_stored(&self, id: ExprId) -> bool {
        let stores = |stage: &&Stage| matches!(stage, Stage::Store { .. }) && self.stored(stage.value()) == id;
        self.reads_of(id) == self.body.stages.iter().filter(stores).count()
    }

    fn take_tile(&mut self) -> u16 {
        self.free_tiles.pop().unwrap_or_else(|| next(&mut self.tiles))
    }

    /// Counts a read; after the last one of the pass the tile is free.
    fn release(&mut self, id: ExprId, remaining: &mut [usize]) {
        remaining[id.index()] = remaining[id.index()].saturating_sub(1);
        if let (0, Some(Src::Tile(tile))) = (remaining[id.index()], self.place[id.index()]) {
            if !self.is_only_stored(id) {
                self.free_tiles.push(tile);
            }
            self.place[id.index()] = None;
        }
    }

    fn src(&self, id: ExprId) -> Src {
        self.place[id.index()].expect("operands are computed before their readers")
    }

    fn instructions(&self, id: ExprId, dst: Dst) -> Vec<Inst> {
        match self.shapes[id.index()] {
            Shape::MulAdd(a, b, c) => {
                return vec![Inst::MulAdd { dst, a: self.src(a), b: self.src(b), c: self.src(c) }];
            }
            Shape::MulMulAdd(a, b, c, d) => {
                let (a, b, c, d) = (self.src(a), self.src(b), self.src(c), self.src(d));
                return vec![Inst::MulMulAdd { dst, a, b, c, d }];
            }
            Shape::SubMulMulAdd(operands) => {
                let [a, b, c, d, e] = operands.map(|operand| self.src(operand));
                return vec![Inst::SubMulMulAdd { dst, a, b, c, d, e }];
            }
            Shape::ExpSub(a, b) => return vec![Inst::ExpSub { dst, a: self.src(a), b: self.src(b) }],
            Shape::Compound(op, x) => return vec![Inst::Unary { op, dst, a: self.src(x) }],
            Shape::Plain => {}
        }
        vec![match self.body.expr(id) {
            Expr::Load(arg) => Inst::Load { dst, arg },
            Expr::ColumnIndex => Inst::ColumnIndex { dst },
            Expr::RowIndex(axis) => Inst::RowIndex { dst, axis },
            Expr::Unary(op, a) => Inst::Unary { op: TileUnary::Primitive(op), dst, a: self.src(a) },
            Expr::IntToFloat(a) => Inst::Unary { op: TileUnary::IntToFloat, dst, a: self.src(a) },
            Expr::FloatToInt(a) => Inst::Unary { op: TileUnary::FloatToInt, dst, a: self.src(a) },
            Expr::Binary(op, a, b) => Inst::Binary { op, dst, a: self.src(a), b: self.src(b) },
            Expr::Integer(op, a, b) => Inst::Integer { op, dst, a: self.src(a), b: self.src(b) },
            Expr::Compare(op, a, b) => {
                let kind = if self.body.is_int(a) { LaneKind::Int } else { LaneKind::Float };
                Inst::Compare { op, kind, dst, a: self.src(a), b: self.src(b) }
            }
            Expr::Select(c, a, b) => Inst::Select { dst, cond: self.src(c), a: self.src(a), b: self.src(b) },
            Expr::Keep { seed, offset, threshold } => Inst::Keep { dst, seed: self.src(seed), offset, threshold },
            Expr::ToInt8(a) => return to_int8(dst, self.src(a)),
            Expr::Rounded(Dtype::F16, a) => Inst::Unary { op: TileUnary::RoundF16, dst, a: self.src(a) },
            Expr::Rounded(_, a) => Inst::Unary { op: TileUnary::RoundBf16, dst, a: self.src(a) },
            Expr::ToFp8(_) => unreachable!("an fp8 value is only stored"),
            Expr::Const(_) | Expr::ConstInt(_) | Expr::RowValue(_) => unreachable!("these need no instruction"),
        }]
    }

    fn stage(&mut self, stage: &Stage) {
        let pass = self.levels[stage.value().index()];
        match *stage {
            Stage::RowReduce { op, value, into } => {
                let into = self.row_value_slots[into as usize];
                let (op, a, b) = self.reduction(op, value);
                let (a, b) = (self.src(a), b.map_or(Src::Const(0.0), |b| self.src(b)));
                self.out[pass].strip.push(Inst::Reduce { op, into, a, b });
            }
            Stage::ColumnSum { value, arg, width } => {
                let inst = Inst::ColumnAdd { partial: self.partials.len() as u16, a: self.src(value) };
                self.partials.push(Partial { arg, width });
                let once_a_row = width == 1 && self.uniform[value.index()];
                let list = if once_a_row { &mut self.out[pass].row } else { &mut self.out[pass].strip };
                list.push(inst);
            }
            Stage::Store { value, arg } => {
                let inst = Inst::Store { arg, a: self.src(self.stored(value)) };
                let once_a_row = self.body.args[arg as usize].access == Access::PerRow;
                let list = if once_a_row { &mut self.out[pass].row } else { &mut self.out[pass].strip };
                list.push(inst);
            }
        }
    }

    fn finish(self) -> TileProgram {
        TileProgram {
            cols: self.body.cols,
            flat: self.body.flat,
            args: self.body.args.clone(),
            tiles: self.tiles,
            kept: self.kept,
            scalars: self.scalars,
            partials: self.partials,
            axes: self.body.axes,
            passes: self.out,
        }
    }
}

fn next(counter: &mut u16) -> u16 {
    *counter += 1;
    *counter - 1
}

fn tile_reduce(op: ReduceOp) -> TileReduce {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => TileReduce::Sum,
        ReduceOp::Max => TileReduce::Max,
        ReduceOp::AbsMax => TileReduce::AbsMax,
        ReduceOp::ArgMax => TileReduce::ArgMax,
    }
}

/// The value an `i8` store would leave: rounded, saturated, NaN as 0.
fn to_int8(dst: Dst, a: Src) -> Vec<Inst> {
    let here = match dst {
        Dst::Tile(tile) => Src::Tile(tile),
        Dst::Kept(row) => Src::Kept(row),
        Dst::Scalar(slot) => Src::Scalar(slot),
    };
    vec![
        // min and max keep NaN, so it is taken out first: a number equals itself.
        Inst::Compare { op: CompareOp::Eq, kind: LaneKind::Float, dst, a, b: a },
        Inst::Select { dst, cond: here, a, b: Src::Const(0.0) },
        Inst::Binary { op: BinaryOp::Max, dst, a: here, b: Src::Const(-128.0) },
        Inst::Binary { op: BinaryOp::Min, dst, a: here, b: Src::Const(127.0) },
        Inst::Unary { op: TileUnary::Primitive(UnaryOp::Round), dst, a: here },
    ]
}

/// Finds compounds from the top down, so that the largest wins.
fn find_compounds(body: &Body, uniform: &[bool], uses: &[usize]) -> Vec<Shape> {
    let finder = Finder { body, uniform, uses };
    body.ids()
        .map(|id| match uniform[id.index()] {
            true => Shape::Plain,
            false => finder.find(id).unwrap_or(Shape::Plain),
        })
        .collect()
}

struct Finder<'a> {
    body: &'a Body,
    uniform: &'a [bool],
    uses: &'a [usize],
}

impl Finder<'_> {
    fn find(&self, id: ExprId) -> Option<Shape> {
        self.activation(id).or_else(|| self.exp_sub(id)).or_else(|| self.mul_add(id))
    }

    fn exp_sub(&self, id: ExprId) -> Option<Shape> {
        let Expr::Unary(UnaryOp::Exp, difference) = self.body.expr(id) else { return None };
        let (a, b) = self.binary(BinaryOp::Sub, difference)?;
        self.is_read_once(difference).then_some(Shape::ExpSub(a, b))
    }

    fn mul_add(&self, id: ExprId) -> Option<Shape> {
        let (a, b) = self.binary(BinaryOp::Add, id)?;
        let (product, rest) = match (self.product(a), self.product(b)) {
            (Some(product), _) => (product, b),
            (None, Some(product)) => (product, a),
            (None, None) => return None,
        };
        match self.product(product.0) {
            Some(inner) if !self.uniform[product.0.index()] => match self.binary(BinaryOp::Sub, inner.0) {
                Some((x, centre)) if self.only_centred(inner.0) => {
                    Some(Shape::SubMulMulAdd([x, centre, inner.1, product.1, rest]))
                }
                _ => Some(Shape::MulMulAdd(inner.0, inner.1, product.1, rest)),
            },
            _ => Some(Shape::MulAdd(product.0, product.1, rest)),
        }
    }

    fn is_read_once(&self, id: ExprId) -> bool {
        self.uses[id.index()] == 1
    }

    /// Whether a difference is read only by a norm: by its own square, which is summed, and by the product that scales it.
    fn only_centred(&self, id: ExprId) -> bool {
        // Twice by the square and once by the product.
        if self.uses[id.index()] != 3 {
            return false;
        }
        let square = Expr::Binary(BinaryOp::Mul, id, id);
        let readers: Vec<ExprId> =
            self.body.ids().filter(|reader| self.body.expr(*reader).operands().any(|operand| operand == id)).collect();
        let stored = self.body.stages.iter().any(|stage| stage.value() == id);
        let summed = readers.iter().any(|&reader| self.body.expr(reader) == square && self.is_read_once(reader));
        let scaled = readers.iter().any(|&reader| {
            let product = matches!(self.body.expr(reader), Expr::Binary(BinaryOp::Mul, a, b) if a == id && b != id);
            product && self.is_read_once(reader) && self.is_scaled_and_shifted(reader)
        });
        readers.len() == 2 && summed && scaled && !stored
    }

    /// Whether a product goes, through one more product, into a sum, and nowhere else.
    fn is_scaled_and_shifted(&self, product: ExprId) -> bool {
        self.body.ids().any(|outer| {
            let scales = matches!(self.body.expr(outer), Expr::Binary(BinaryOp::Mul, a, _) if a == product);
            let shifts = |sum: ExprId| {
                matches!(self.body.expr(sum), Expr::Binary(BinaryOp::Add, a, _) if a == outer)
                    && !self.uniform[sum.index()]
            };
            scales && self.is_read_once(outer) && self.body.ids().any(shifts)
        })
    }

    /// The factors of a product with no other reader.
    fn product(&self, id: ExprId) -> Option<(ExprId, ExprId)> {
        self.binary(BinaryOp::Mul, id).filter(|_| self.is_read_once(id))
    }

    fn activation(&self, id: ExprId) -> Option<Shape> {
        let (activation, x) = activation(self.body, self.uses, id)?;
        Some(Shape::Compound(tile_activation(activation)?, x))
    }

    fn binary(&self, op: BinaryOp, id: ExprId) -> Option<(ExprId, ExprId)> {
        binary(self.body, op, id)
    }
}

fn tile_activation(activation: Activation) -> Option<TileUnary> {
    match activation {
        Activation::GeluTanh => Some(TileUnary::GeluTanh),
        Activation::GeluErf => Some(TileUnary::GeluErf),
        Activation::Silu => Some(TileUnary::Silu),
        Activation::Relu => None,
    }
}
