//! Reductions over a row: 64 accumulator lanes, combined in one fixed tree.
//!
//! Column `c` goes to lane `c % 64`, and lanes are combined as `(i, i + 32)`, then `(i, i + 16)`, down to `(0, 1)`. The order
//! is the same for every vector width and for every split into strips. Lanes are in memory only between strips; a row
//! of one strip is reduced in registers.
#![allow(clippy::needless_range_loop, reason = "`v` counts vectors and columns at once, and is unrolled away")]

use super::lanes::{Arithmetic, Kernel, Simd};
use super::map::{Lanes, Made};
use super::sweep::Input;
use crate::cpu::program::{LANES, TileReduce};

/// A strip of a row, with the state of its reduction; or several rows of one strip each.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    /// Column of its first lane, a multiple of `LANES`.
    pub first: usize,
    pub length: usize,
    /// Whether it is the last strip.
    pub last: bool,
    /// Lanes between strips: `2 * LANES` elements, values and then (for `ArgMax`) columns.
    pub lanes: *mut f32,
    /// The destination of the result after the last strip: one vector of equal lanes.
    pub into: *mut f32,
    /// Its destination as one of the lanes that row work reads; that of the next row is beside it.
    pub lane: *mut f32,
    pub rows: usize,
    /// Elements from one row's result to the next one's.
    pub small: usize,
}

/// The source of a reduction's lanes.
trait Source: Copy {
    /// # Safety
    /// Columns `i .. i + WIDTH` are in the strip.
    unsafe fn full<S: Simd>(self, simd: S, i: usize) -> [S::Float; 2];
    /// # Safety
    /// Columns `i .. i + count` are in the strip, and `count < WIDTH`.
    unsafe fn partial<S: Simd>(self, simd: S, i: usize, count: usize) -> [S::Float; 2];
    /// Goes to the next row.
    fn next_row(&mut self);
}

/// Lanes that are read. The second operand counts for `Dot` and `Deviation`.
#[derive(Clone, Copy)]
pub(super) struct Read {
    pub a: Input,
    pub b: Input,
}

impl Source for Read {
    #[inline(always)]
    unsafe fn full<S: Simd>(self, simd: S, i: usize) -> [S::Float; 2] {
        // SAFETY: the caller's promise.
        unsafe { [self.a.load(simd, i), self.b.load(simd, i)] }
    }

    #[inline(always)]
    unsafe fn partial<S: Simd>(self, simd: S, i: usize, count: usize) -> [S::Float; 2] {
        // SAFETY: the caller's promise.
        unsafe { [self.a.load_partial(simd, i, count), self.b.load_partial(simd, i, count)] }
    }

    #[inline(always)]
    fn next_row(&mut self) {
        self.a.next_row();
        self.b.next_row();
    }
}

/// Lanes that are computed, stored and reduced in one sweep. Both operands of a `Dot` are the result.
impl<L: Lanes + Copy> Source for Made<L> {
    #[inline(always)]
    unsafe fn full<S: Simd>(self, simd: S, i: usize) -> [S::Float; 2] {
        // SAFETY: the caller's promise; `i` is a multiple of `WIDTH`.
        unsafe {
            let result = self.lanes.full(simd, i);
            self.output.store::<S, false>(simd, i, result);
            [result, result]
        }
    }

    #[inline(always)]
    unsafe fn partial<S: Simd>(self, simd: S, i: usize, count: usize) -> [S::Float; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let result = self.lanes.partial(simd, i, count);
            self.output.store_partial(simd, i, result, count);
            [result, result]
        }
    }

    #[inline(always)]
    fn next_row(&mut self) {
        self.lanes.next_row();
        self.output.next_row();
    }
}

/// Accumulates one strip of lanes that are read. Strips of a row come in order, starting at column 0.
///
/// # Safety
/// `length` lanes of the source can be read, and the other places written.
pub(super) unsafe fn reduce<S: Simd>(simd: S, op: TileReduce, source: Read, strip: Strip) {
    match op {
        TileReduce::ArgMax => simd.enter(GatherArgMax { a: source.a, strip }),
        _ => gather(simd, op, source, strip),
    }
}

/// Accumulates one strip of computed lanes. `ArgMax` cannot be combined with a computation.
///
/// # Safety
/// As for [`reduce`], and the output can be written.
pub(super) unsafe fn reduce_made<S: Simd>(simd: S, op: TileReduce, source: Made<impl Lanes + Copy>, strip: Strip) {
    gather(simd, op, source, strip);
}

fn gather<S: Simd, L: Source>(simd: S, op: TileReduce, source: L, strip: Strip) {
    with_step(op, Gathering { simd, source, strip });
}

struct Gathering<S, L> {
    simd: S,
    source: L,
    strip: Strip,
}

impl<S: Simd, L: Source> StepVisitor for Gathering<S, L> {
    type Output = ();

    fn visit<T: Step>(self, step: T) {
        self.simd.enter(Gather { step, source: self.source, strip: self.strip });
    }
}

/// What is done with the step of a reduction.
pub(in crate::cpu) trait StepVisitor {
    /// What that gives.
    type Output;
    /// Does it.
    fn visit<T: Step>(self, step: T) -> Self::Output;
}

/// Passes the step of a reduction to `visitor`; `ArgMax` has a separate loop.
pub(in crate::cpu) fn with_step<V: StepVisitor>(op: TileReduce, visitor: V) -> V::Output {
    match op {
        TileReduce::Sum => visitor.visit(Sum),
        TileReduce::Dot => visitor.visit(Dot),
        TileReduce::Deviation => visitor.visit(Deviation),
        TileReduce::Max => visitor.visit(Max),
        TileReduce::AbsMax => visitor.visit(AbsMax),
        TileReduce::ArgMax => unreachable!("has a loop of its own"),
    }
}

/// The result of no columns.
pub(super) fn of_nothing(op: TileReduce) -> f32 {
    match op {
        TileReduce::Sum | TileReduce::Dot | TileReduce::Deviation | TileReduce::AbsMax => 0.0,
        TileReduce::Max => f32::NEG_INFINITY,
        TileReduce::ArgMax => f32::from_bits(0),
    }
}

/// A reduction, lane by lane.
pub(in crate::cpu) trait Step: Copy {
    /// The initial value of a lane.
    const START: f32;
    fn take<S: Arithmetic>(self, simd: S, sum: S::Float, a: S::Float, b: S::Float) -> S::Float;
    /// Two lanes become one: by addition, unless the reduction is no sum.
    #[inline(always)]
    fn meet<S: Arithmetic>(self, simd: S, a: S::Float, b: S::Float) -> S::Float {
        simd.add(a, b)
    }
}

#[derive(Clone, Copy)]
struct Sum;

impl Step for Sum {
    const START: f32 = 0.0;
    #[inline(always)]
    fn take<S: Arithmetic>(self, simd: S, sum: S::Float, a: S::Float, _: S::Float) -> S::Float {
        simd.add(sum, a)
    }
}

#[derive(Clone, Copy)]
struct Dot;

impl Step for Dot {
    const START: f32 = 0.0;
    #[inline(always)]
    fn take<S: Arithmetic>(self, simd: S, sum: S::Float, a: S::Float, b: S::Float) -> S::Float {
        simd.mul_add(a, b, sum)
    }
}

#[derive(Clone, Copy)]
struct Deviation;

impl Step for Deviation {
    const START: f32 = 0.0;
    #[inline(always)]
    fn take<S: Arithmetic>(self, simd: S, sum: S::Float, a: S::Float, b: S::Float) -> S::Float {
        let centred = simd.sub(a, b);
        simd.mul_add(centred, centred, sum)
    }
}

#[derive(Clone, Copy)]
struct Max;

impl Step for Max {
    const START: f32 = f32::NEG_INFINITY;
    #[inline(always)]
    fn take<S: Arithmetic>(self, simd: S, best: S::Float, a: S::Float, _: S::Float) -> S::Float {
        simd.max(best, a)
    }
    #[inline(always)]
    fn meet<S: Arithmetic>(self, simd: S, a: S::Float, b: S::Float) -> S::Float {
        simd.max(a, b)
    }
}

#[derive(Clone, Copy)]
struct AbsMax;

impl Step for AbsMax {
    const START: f32 = 0.0;
    #[inline(always)]
    fn take<S: Arithmetic>(self, simd: S, best: S::Float, a: S::Float, _: S::Float) -> S::Float {
        simd.max_of_sizes(best, simd.abs(a))
    }
    #[inline(always)]
    fn meet<S: Arithmetic>(self, simd: S, a: S::Float, b: S::Float) -> S::Float {
        simd.max_of_sizes(a, b)
    }
}

/// Vectors in `LANES` lanes, at most: 16 of 4 lanes.
const VECTORS: usize = LANES / 4;

#[derive(Clone, Copy)]
struct Gather<T, L> {
    step: T,
    source: L,
    strip: Strip,
}

impl<T: Step, L: Source> Kernel for Gather<T, L> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        for row in 0..self.strip.rows {
            if row > 0 {
                self.source.next_row();
                self.strip.into = self.strip.into.wrapping_add(self.strip.small);
                self.strip.lane = self.strip.lane.wrapping_add(1);
            }
            self.row(simd);
        }
    }
}

impl<T: Step, L: Source> Gather<T, L> {
    #[inline(always)]
    fn row<S: Simd>(&self, simd: S) {
        let Gather { step, source, strip: Strip { first, length, last, lanes, into, lane, .. } } = *self;
        let (vectors, width) = (LANES / S::WIDTH, S::WIDTH);
        let mut sums = [simd.splat(T::START); VECTORS];
        // SAFETY: `reduce`'s caller lets us read `length` columns of `a` and `b`, and use the lanes and the result.
        // Full blocks end by `length`, and each vector of the last one reads what is left, if anything.
        unsafe {
            if first > 0 {
                for v in 0..vectors {
                    sums[v] = simd.load(lanes.add(v * width));
                }
            }
            let mut i = 0;
            while i + LANES <= length {
                for v in 0..vectors {
                    let [a, b] = source.full(simd, i + v * width);
                    sums[v] = step.take(simd, sums[v], a, b);
                }
                i += LANES;
            }
            if i < length {
                for v in 0..vectors {
                    let at = i + v * width;
                    if at + width <= length {
                        let [a, b] = source.full(simd, at);
                        sums[v] = step.take(simd, sums[v], a, b);
                    } else if at < length {
                        let count = length - at;
                        let [a, b] = source.partial(simd, at, count);
                        sums[v] = simd.select(simd.first(count), step.take(simd, sums[v], a, b), sums[v]);
                    }
                }
            }
            if last {
                let result = simd.first_lane(tree(simd, step, &mut sums));
                simd.store(into, simd.splat(result));
                lane.write(result);
            } else {
                for v in 0..vectors {
                    simd.store(lanes.add(v * width), sums[v]);
                }
            }
        }
    }
}

/// The fixed tree over `LANES / WIDTH` vectors: whole vectors first, then the lanes of one. The first lane is the result.
#[inline(always)]
pub(in crate::cpu) fn tree<S: Arithmetic, T: Step>(simd: S, step: T, sums: &mut [S::Float]) -> S::Float {
    let mut half = LANES / S::WIDTH / 2;
    while half > 0 {
        for v in 0..half {
            sums[v] = step.meet(simd, sums[v], sums[v + half]);
        }
        half /= 2;
    }
    // Every lane meets one, and the first is what the tree gives: as many steps as if the others rested.
    let mut half = S::WIDTH / 2;
    while half > 0 {
        sums[0] = step.meet(simd, sums[0], simd.upper(sums[0], half));
        half /= 2;
    }
    sums[0]
}

struct GatherArgMax {
    a: Input,
    strip: Strip,
}

impl Kernel for GatherArgMax {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Strip { first, length, last, lanes, into, lane, .. } = self.strip;
        let a = self.a;
        // SAFETY: `reduce`'s caller lets us use both halves of the lanes, the result, and `length` columns of `a`.
        unsafe {
            if first == 0 {
                for lane in (0..LANES).step_by(S::WIDTH) {
                    simd.store(lanes.add(lane), simd.splat(f32::NEG_INFINITY));
                    // A lane that only ever sees -inf answers with its own first column.
                    let own = simd.add_int(simd.count_up(), simd.splat_int(lane as i32));
                    simd.store(lanes.add(LANES + lane), simd.reinterpret(own));
                }
            }
            let mut i = 0;
            while i < length {
                let count = (length - i).min(S::WIDTH);
                let x = if count == S::WIDTH {
                    a.load(simd, i)
                } else {
                    simd.select(simd.first(count), a.load_partial(simd, i, count), simd.splat(f32::NEG_INFINITY))
                };
                let (values, columns) = (lanes.add(i % LANES), lanes.add(LANES + i % LANES));
                let (best, column) = (simd.load(values), simd.load(columns));
                let here = simd.add_int(simd.count_up(), simd.splat_int((first + i) as i32));
                // Better: larger; or NaN where the best is a number. `x <= best` is false for both, and for a NaN best,
                // which stays.
                let keep = simd.less_or_equal(x, best);
                let next = simd.select(keep, best, x);
                let next_column = simd.select(keep, column, simd.reinterpret(here));
                let number = simd.equal(best, best);
                simd.store(values, simd.select(number, next, best));
                simd.store(columns, simd.select(number, next_column, column));
                i += count;
            }
            if last {
                let lanes = std::slice::from_raw_parts(lanes, 2 * LANES);
                let column = first_largest(&lanes[..LANES], &lanes[LANES..]);
                simd.store(into, simd.splat(f32::from_bits(column)));
                lane.write(f32::from_bits(column));
            }
        }
    }
}

/// The smallest column among the lanes that hold the largest value, or a NaN if one does.
fn first_largest(values: &[f32], columns: &[f32]) -> u32 {
    let (mut best, mut column) = (values[0], columns[0].to_bits());
    for (&value, candidate) in values.iter().zip(columns).skip(1) {
        let candidate = candidate.to_bits();
        let tied = value == best || (value.is_nan() && best.is_nan());
        let better = value > best || (value.is_nan() && !best.is_nan());
        if better || (tied && candidate < column) {
            (best, column) = (value, candidate);
        }
    }
    column
}
