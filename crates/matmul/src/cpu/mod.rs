//! Matmuls on the CPU: one part of the result at a time, on the calling thread.
//!
//! | method       | operands (A, B)                       | sums                                                    |
//! |--------------|---------------------------------------|---------------------------------------------------------|
//! | stream       | 1 to 8 rows of any, B of any          | f32; B is read once, where it lies                      |
//! | floats       | any; widened to f32 on load           | f32, one chain of multiply-adds an element, `k` upwards |
//! | bf16         | bf16, bf16, with AMX                  | f32, pairs of `k` in order; denormals count as 0        |
//! | stream bytes | 1 to 8 rows of i8, i8 `[n, k]`        | i32, exact; B is read once, where it lies               |
//! | bytes        | i8, i8, with AMX, VNNI or any vectors | i32, exact                                              |
//!
//! - The bits of an element depend on the method, the instruction set, `k` and the operands, not on the part, the threads
//!   or the position of its row. Sums of bytes are exact for `k < 2^17` and rounded once to f32: the same bits by every method.
//! - NaN and infinities propagate, zeros are not skipped, and `k = 0` gives zeros.
//! - [`PartKernel::run`] allocates nothing and reads nothing outside of the operands.

// Registers are arrays, indexed by the number that also counts the memory beside them.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "x86_64")]
mod bytes;
pub mod driver;
pub mod family;
mod floats;
mod pack;
mod plain_bytes;
mod routed;
mod row_work;
mod store;
mod stream;
mod stream_bytes;
mod tiles;
mod words;
pub mod work;

#[cfg(test)]
mod tests;

use deuteron_codegen::cpu::simd::amx::Amx;
use deuteron_codegen::cpu::simd::lanes::Simd;
use deuteron_codegen::cpu::simd::{Isa, Task};
use deuteron_codegen::cpu::task::Floats;
use deuteron_graph::Dtype;
pub use store::Store;

/// Rows of A, at most, for which B is streamed.
pub const STREAMED_ROWS: usize = 8;

/// Rows of a strip, at least and at most. B comes by once a strip: of 1024 x 768 x 768 in f32, strips of 64 rows took 1 % to 5 % longer
/// with the attention before them than those of 256, whose sums stay within the L2 (Xeon shared with others, 2026-11-15).
pub const STRIP_ROWS: (usize, usize) = (64, 256);

/// Bytes of B that a part streams, about: 0.2 ms of a core's share of the memory.
const STREAMED_BYTES: usize = 2 << 20;

/// Bytes of a cache line: one request is enough for it.
const LINE: usize = 64;

/// Elements in memory.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// The first element. Any alignment.
    pub base: *const u8,
    /// Elements from one row to the next, and from one column to the next.
    pub strides: (usize, usize),
}

// SAFETY: an address is only a number until `PartKernel::run` uses it, and its callers answer for that.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

/// What is known before there are addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Rows of the whole product.
    pub rows: usize,
    /// The inner size.
    pub k: usize,
    /// The type of A's values; one of f32, f16, bf16, i8.
    pub left: Dtype,
    /// The type of B's values; one of f32, f16, bf16, i8.
    pub right: Dtype,
    /// The strides of every B, by which B is streamed or packed.
    pub right_strides: (usize, usize),
    /// B operands: 1 or 2.
    pub rights: usize,
}

/// How a product is computed; see the table above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Method(Algorithm);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Algorithm {
    Stream,
    Floats,
    Bf16(Amx),
    StreamBytes(stream_bytes::Unit),
    Bytes(Amx),
    #[cfg(target_arch = "x86_64")]
    BytesOfVectors(bytes::Vnni),
    PlainBytes,
}

impl Method {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self.0 {
            Algorithm::Stream => "stream",
            Algorithm::Floats => "floats",
            Algorithm::Bf16(_) => "bf16 tiles",
            Algorithm::StreamBytes(stream_bytes::Unit::Plain) => "plain byte stream",
            #[cfg(target_arch = "x86_64")]
            Algorithm::StreamBytes(stream_bytes::Unit::Vnni(_)) => "byte stream",
            Algorithm::Bytes(_) => "byte tiles",
            #[cfg(target_arch = "x86_64")]
            Algorithm::BytesOfVectors(_) => "byte vectors",
            Algorithm::PlainBytes => "plain bytes",
        }
    }
}

/// A part of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its first row.
    pub row: usize,
    /// How many.
    pub rows: usize,
    /// Its first column.
    pub column: usize,
    /// How many.
    pub columns: usize,
}

/// The left operand.
pub struct Left<'a> {
    /// Where its values come from.
    pub values: Values<'a>,
    /// What the sums of a row are multiplied with, by row of the product.
    pub scales: Option<&'a [f32]>,
}

/// The values of A.
pub enum Values<'a> {
    /// As they lie; the address is that of row 0, column 0.
    Lie(Matrix),
    /// Asked for block by block, each element of the part's rows once a part; rounded to [`Spec::left`] afterwards.
    Fill(&'a mut dyn FnMut(Wanted)),
}

/// A block of A to be filled: element `(r, i)` at `r * stride + i` is that of row `row + r` and inner index `inner + i`.
pub struct Wanted<'a> {
    /// The first row.
    pub row: usize,
    /// How many.
    pub rows: usize,
    /// The first inner index.
    pub inner: usize,
    /// How many.
    pub count: usize,
    /// From one row to the next.
    pub stride: usize,
    /// The values; those between rows do not matter.
    pub to: &'a mut [f32],
}

/// A right operand.
#[derive(Clone, Copy)]
pub struct Right<'a> {
    /// Its values; the address is that of row 0, column 0.
    pub matrix: Matrix,
    /// What the sums of a column are multiplied with, by column of the product.
    pub scales: Option<&'a [f32]>,
    /// All of its columns as [`PartKernel::pack`] left them; none: each part packs what it needs.
    pub packed: Option<Packed>,
}

/// A right operand that was packed once, for parts of all its columns.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    /// [`PartKernel::packed`] floats, from a cache line on.
    pub base: *mut f32,
    /// Columns of the product.
    pub columns: usize,
}

// SAFETY: an address is only a number until `PartKernel::run` or `PartKernel::pack` uses it, and their callers answer for that.
unsafe impl Send for Packed {}
// SAFETY: as above.
unsafe impl Sync for Packed {}

/// Finished sums: element `(r, c)` at `r * stride + c` is that of row `row + r` and column `column + c`.
pub struct SumBlock<'a> {
    /// The first row.
    pub row: usize,
    /// How many.
    pub rows: usize,
    /// The first column.
    pub column: usize,
    /// How many.
    pub columns: usize,
    /// From one row to the next.
    pub stride: usize,
    /// The sums with the first B; the caller may overwrite them.
    pub sums: &'a mut [f32],
    /// The sums with the second B; empty if there is none.
    pub second: &'a mut [f32],
}

/// A matmul that is ready to run, one part of its result at a time.
#[derive(Clone, Copy, Debug)]
pub struct PartKernel {
    isa: Isa,
    spec: Spec,
    method: Method,
}

impl PartKernel {
    /// With the fastest method.
    ///
    /// # Panics
    /// As [`PartKernel::methods`].
    pub fn new(isa: Isa, spec: Spec) -> PartKernel {
        PartKernel { isa, spec, method: PartKernel::methods(isa, spec)[0] }
    }

    /// With one of [`PartKernel::methods`].
    ///
    /// # Panics
    /// If it is none of them for these arguments.
    pub fn with(isa: Isa, spec: Spec, method: Method) -> PartKernel {
        assert!(PartKernel::methods(isa, spec).contains(&method), "{} for {spec:?}", method.name());
        PartKernel { isa, spec, method }
    }

    /// Every method that can compute the product, fastest first.
    ///
    /// # Panics
    /// For other dtypes, and for no or more than two B.
    pub fn methods(isa: Isa, spec: Spec) -> Vec<Method> {
        assert!(PartKernel::computes(spec), "expected f32, f16, bf16 or i8, and one or two B: {spec:?}");
        if (spec.left, spec.right) == (Dtype::I8, Dtype::I8) {
            return PartKernel::methods_of_bytes(isa, spec);
        }
        let mut found = Vec::new();
        if PartKernel::streams(spec) {
            found.push(Method(Algorithm::Stream));
        }
        if (spec.left, spec.right) == (Dtype::Bf16, Dtype::Bf16) {
            found.extend(amx(isa).map(|amx| Method(Algorithm::Bf16(amx))));
        }
        found.push(Method(Algorithm::Floats));
        found
    }

    /// Whether there is a method for it: of these dtypes, and one or two B.
    pub fn computes(spec: Spec) -> bool {
        let known = |dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::I8);
        known(spec.left) && known(spec.right) && (1..=2).contains(&spec.rights)
    }

    /// Whether B is streamed as floats, on every instruction set: then a part asks for its rows of A as a whole, each once.
    pub fn streams(spec: Spec) -> bool {
        let floats = (spec.left, spec.right) != (Dtype::I8, Dtype::I8);
        let lies = spec.right_strides.0 == 1 || spec.right_strides.1 == 1;
        floats && lies && spec.rows <= STREAMED_ROWS
    }

    fn methods_of_bytes(isa: Isa, spec: Spec) -> Vec<Method> {
        use stream_bytes::Unit;
        let mut found = Vec::new();
        if spec.rows <= STREAMED_ROWS && spec.right_strides.0 == 1 {
            #[cfg(target_arch = "x86_64")]
            found.extend(bytes::Vnni::detect(isa).map(|vnni| Algorithm::StreamBytes(Unit::Vnni(vnni))));
            found.push(Algorithm::StreamBytes(Unit::Plain));
        }
        found.extend(amx(isa).map(Algorithm::Bytes));
        #[cfg(target_arch = "x86_64")]
        found.extend(bytes::Vnni::detect(isa).map(Algorithm::BytesOfVectors));
        found.push(Algorithm::PlainBytes);
        found.into_iter().map(Method).collect()
    }

    /// The method in use.
    pub fn method(&self) -> Method {
        self.method
    }

    /// [`Floats`] that a part of at most this many rows and columns needs.
    pub fn scratch(&self, rows: usize, columns: usize) -> usize {
        self.isa.dispatch(Size { kernel: self, rows, columns })
    }

    /// Rows and columns of the parts that `threads` workers share best: all parts of one size but the last ones.
    pub fn part(&self, columns: usize, threads: usize) -> (usize, usize) {
        let rows = self.spec.rows.max(1);
        if matches!(self.method.0, Algorithm::Stream | Algorithm::StreamBytes(_)) {
            // Runs of columns in whole cache lines of bytes: one a worker, several where B is large, so that a worker that is
            // held up leaves some to the others.
            let share = columns.div_ceil(threads.max(1));
            let runs = (share * self.spec.k * self.spec.right.bytes()).div_ceil(STREAMED_BYTES).clamp(1, 16);
            return (rows, share.div_ceil(runs).next_multiple_of(64));
        }
        // Two parts a worker even out what workers lose; a packed part of A and its sums should stay within the L2.
        let wanted = 2 * threads.max(1);
        let tall = rows.min(512);
        let strips = rows.div_ceil(tall);
        let wide = columns.div_ceil(wanted.div_ceil(strips)).clamp(192, 1536).next_multiple_of(32);
        (rows.div_ceil(strips).next_multiple_of(32), wide)
    }

    /// Rows and columns of parts for work that needs whole rows of the result: parts of all columns where rows are enough for
    /// `threads` workers, so that accumulators stay with their worker.
    pub fn strip(&self, columns: usize, threads: usize) -> (usize, usize) {
        let rows = self.spec.rows.max(1);
        if matches!(self.method.0, Algorithm::Stream | Algorithm::StreamBytes(_)) {
            return self.part(columns, threads);
        }
        // Two strips a worker even out what workers lose.
        let tall = rows.div_ceil(2 * threads.max(1)).clamp(STRIP_ROWS.0, STRIP_ROWS.1).next_multiple_of(32);
        let across = threads.max(1).div_ceil(rows.div_ceil(tall));
        let wide = if across == 1 { columns } else { columns.div_ceil(across).max(192) };
        (tall, wide.next_multiple_of(32))
    }

    /// Floats of a packed B with this many columns; none if parts read B in place, or with several B.
    pub fn packed(&self, columns: usize) -> Option<usize> {
        let pieces = self.pieces(columns);
        (pieces > 0).then(|| pieces * self.isa.dispatch(Piece { kernel: self, columns }))
    }

    /// Pieces that a B of this many columns is packed in; 0 where it is not packed.
    pub fn pieces(&self, columns: usize) -> usize {
        match self.method.0 {
            Algorithm::Floats if self.spec.rights == 1 => floats::pieces(&self.spec, columns),
            Algorithm::Bf16(_) if self.spec.rights == 1 => tiles::pieces(&self.spec, columns),
            _ => 0,
        }
    }

    /// Packs one of the [`PartKernel::pieces`] of B. Pieces are disjoint.
    ///
    /// # Panics
    /// If there is no such piece, or the strides are not those of the spec.
    ///
    /// # Safety
    /// B's columns can be read, at the strides given, and the piece's part of [`PartKernel::packed`] floats be written.
    pub unsafe fn pack(&self, right: Matrix, to: Packed, piece: usize) {
        assert!(piece < self.pieces(to.columns), "piece {piece} of {}", self.pieces(to.columns));
        assert_eq!(right.strides, self.spec.right_strides, "strides of B");
        self.isa.dispatch(Pack { kernel: self, right, to, piece });
    }

    /// Computes a part and hands every element of it to `finish` once, in blocks.
    ///
    /// # Panics
    /// If B operands or their strides are not those of the spec, the part has rows that the product has not, the scratch is
    /// too small, scales do not reach the part's end, or B is packed and the part has not all of its columns.
    ///
    /// # Safety
    /// - Elements of the part's rows of A (if it lies) and of the part's columns of every B can be read, at the strides
    ///   given.
    /// - `finish` and the filling of A do not write to them.
    /// - Where B is packed, all of its pieces were, by a kernel of the same spec and method, and nobody writes to them.
    pub unsafe fn run(
        &self,
        left: Left<'_>,
        rights: &[Right<'_>],
        part: Part,
        scratch: &mut Floats,
        finish: &mut dyn FnMut(SumBlock<'_>),
    ) {
        assert_eq!(rights.len(), self.spec.rights, "B operands");
        let strides = self.spec.right_strides;
        assert!(rights.iter().all(|right| right.matrix.strides == strides), "expected strides {strides:?} of B");
        assert!(part.row + part.rows <= self.spec.rows, "{part:?} of {} rows", self.spec.rows);
        assert!(self.scratch(part.rows, part.columns) <= scratch.count(), "scratch of a part {part:?}");
        let reaches = |scales: Option<&[f32]>, end: usize| scales.is_none_or(|scales| scales.len() >= end);
        assert!(reaches(left.scales, part.row + part.rows), "scales of rows");
        assert!(rights.iter().all(|right| reaches(right.scales, part.column + part.columns)), "scales of columns");
        let packed = rights[0].packed;
        let whole =
            |packed: Packed| part.column == 0 && part.columns == packed.columns && self.pieces(part.columns) > 0;
        assert!(packed.is_none_or(whole), "packed columns of a part {part:?}");
        if part.rows == 0 || part.columns == 0 {
            return;
        }
        let scales = Scales { rows: left.scales, columns: [rights[0].scales, rights.last().and_then(|r| r.scales)] };
        let matrices = [rights[0].matrix, rights[rights.len() - 1].matrix];
        let job = Job { spec: self.spec, part, rights: matrices, packed, scales };
        self.isa.dispatch(Run { method: self.method, job, values: left.values, scratch: scratch.pointer(), finish });
    }
}

/// AMX, where it is there and `isa` lets it be used.
fn amx(isa: Isa) -> Option<Amx> {
    if isa.is_avx512() { Amx::detect() } else { None }
}

/// One call of [`PartKernel::run`].
#[derive(Clone, Copy)]
struct Job<'a> {
    spec: Spec,
    part: Part,
    /// The first `spec.rights` count.
    rights: [Matrix; 2],
    packed: Option<Packed>,
    scales: Scales<'a>,
}

#[derive(Clone, Copy)]
struct Scales<'a> {
    rows: Option<&'a [f32]>,
    columns: [Option<&'a [f32]>; 2],
}

struct Size<'a> {
    kernel: &'a PartKernel,
    rows: usize,
    columns: usize,
}

impl Task for Size<'_> {
    type Output = usize;

    fn with<S: Simd>(self, _: S) -> usize {
        let (spec, rows, columns) = (&self.kernel.spec, self.rows, self.columns);
        match self.kernel.method.0 {
            Algorithm::Stream => stream::scratch(spec, rows),
            Algorithm::Floats => floats::scratch::<S>(spec, rows, columns),
            Algorithm::StreamBytes(_) => stream_bytes::scratch(spec, rows),
            Algorithm::Bf16(_) | Algorithm::Bytes(_) | Algorithm::PlainBytes => tiles::scratch(spec, rows, columns),
            #[cfg(target_arch = "x86_64")]
            Algorithm::BytesOfVectors(_) => tiles::scratch(spec, rows, columns),
        }
    }
}

/// Floats of a piece of a packed B.
struct Piece<'a> {
    kernel: &'a PartKernel,
    columns: usize,
}

impl Task for Piece<'_> {
    type Output = usize;

    fn with<S: Simd>(self, _: S) -> usize {
        match self.kernel.method.0 {
            Algorithm::Bf16(_) => tiles::piece_floats(&self.kernel.spec, self.columns),
            _ => floats::piece_floats::<S>(&self.kernel.spec, self.columns),
        }
    }
}

struct Pack<'a> {
    kernel: &'a PartKernel,
    right: Matrix,
    to: Packed,
    piece: usize,
}

impl Task for Pack<'_> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        let Pack { kernel, right, to, piece } = self;
        // SAFETY: `PartKernel::pack` found that there is such a piece, and passes on the caller's promise.
        unsafe {
            match kernel.method.0 {
                Algorithm::Bf16(amx) => tiles::pack_piece(simd, tiles::Bf16(amx), &kernel.spec, right, to, piece),
                _ => floats::pack_piece(simd, &kernel.spec, right, to, piece),
            }
        }
    }
}

struct Run<'job, 'values, 'finish> {
    method: Method,
    job: Job<'job>,
    values: Values<'values>,
    scratch: *mut f32,
    finish: &'finish mut dyn FnMut(SumBlock<'_>),
}

impl Task for Run<'_, '_, '_> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        let Run { method, job, values, scratch, finish } = self;
        // SAFETY: `PartKernel::run` checked the scratch, and passes on the caller's promise for the operands.
        unsafe {
            match method.0 {
                Algorithm::Stream => stream::run(simd, &job, values, scratch, finish),
                Algorithm::Floats => floats::run(simd, &job, values, scratch, finish),
                Algorithm::Bf16(amx) => tiles::run(simd, tiles::Bf16(amx), &job, values, scratch, finish),
                Algorithm::StreamBytes(unit) => stream_bytes::run(simd, unit, &job, values, scratch, finish),
                Algorithm::PlainBytes => {
                    let machine = plain_bytes::PlainBytes(simd);
                    tiles::run(simd, machine, &job, values, scratch, finish);
                }
                Algorithm::Bytes(amx) => tiles::run(simd, tiles::Bytes(amx), &job, values, scratch, finish),
                #[cfg(target_arch = "x86_64")]
                Algorithm::BytesOfVectors(vnni) => tiles::run(simd, vnni, &job, values, scratch, finish),
            }
        }
    }
}
