//! Matmuls of 1 to 8 rows of bytes with B by columns (`[n, k]`): every byte of B is read once, in place, and sums are
//! exact.
//!
//! VNNI multiplies unsigned bytes with signed ones. B has its sign bits flipped on its way into a register, which adds 128:
//! `sum a (b + 128) = sum a b + 128 sum a`. The second term is one number per row.

use deuteron_codegen::cpu::simd::format::{Format, SignedByte};
use deuteron_codegen::cpu::simd::lanes::{Kernel, Simd};

use super::pack::{LeftBlock, left};
use super::store::{Sums, finish_block};
use super::{Job, Matrix, Spec, SumBlock, Values};

#[cfg(target_arch = "x86_64")]
use super::bytes::Vnni;

/// Sums that stay in the L1, of all rows with every B: 16 KiB.
const SUMS: usize = 4096;
/// Bytes of a vector; rows of A are padded to it with zeros.
const VECTOR: usize = 64;

/// What multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Vnni(Vnni),
}

/// Rows that are computed: 1, 2, 4 or 8; what the others hold does not matter.
fn padded(rows: usize) -> usize {
    rows.next_power_of_two()
}

fn row_bytes(k: usize) -> usize {
    k.next_multiple_of(VECTOR)
}

fn run_columns(spec: &Spec, rows: usize) -> usize {
    SUMS / padded(rows) / spec.rights
}

/// Floats of scratch: A, the sums, and a row of A that is not bytes yet.
pub(super) fn scratch(spec: &Spec, rows: usize) -> usize {
    padded(rows) * row_bytes(spec.k) / 4 + SUMS + row_bytes(spec.k)
}

/// # Safety
/// The promise of [`super::PartKernel::run`]; `memory` has the floats that [`scratch`] asks for, the part is not empty, both operands
/// are bytes and B's columns are contiguous.
pub(super) unsafe fn run<S: Simd>(
    simd: S,
    unit: Unit,
    job: &Job,
    mut values: Values,
    memory: *mut f32,
    finish: &mut dyn FnMut(SumBlock<'_>),
) {
    let Job { spec, part, .. } = job;
    let stride = row_bytes(spec.k);
    let run = run_columns(spec, part.rows);
    let packed = memory.cast::<u8>();
    let sums = Sums {
        // SAFETY: the sums follow A in the scratch.
        base: unsafe { memory.add(padded(part.rows) * stride / 4) },
        second: padded(part.rows) * run,
        stride: run,
        whole: false,
    };
    // SAFETY: the stage follows the sums; A has room for the part's rows.
    unsafe { pack(simd, job, &mut values, sums.base.add(SUMS), packed) };
    for column in (0..part.columns).step_by(run) {
        let columns = run.min(part.columns - column);
        for (which, matrix) in job.rights[..spec.rights].iter().enumerate() {
            let pass = Pass {
                left: packed,
                left_stride: stride,
                right: matrix.base.wrapping_add((part.column + column) * matrix.strides.1),
                column_bytes: matrix.strides.1,
                // SAFETY: the sums with the second B lie behind those with the first.
                sums: unsafe { sums.base.add(which * sums.second) },
                sums_stride: run,
                rows: padded(part.rows),
                columns,
                k: spec.k,
            };
            match unit {
                Unit::Plain => simd.enter(Plain(pass)),
                // SAFETY: the unit proves the features; the pass is as large as it says.
                #[cfg(target_arch = "x86_64")]
                Unit::Vnni(_) => unsafe { vnni::columns(pass) },
            }
        }
        // SAFETY: the sums of these rows and columns were written.
        unsafe { finish_block(simd, job, sums, (0, part.rows), (column, columns), finish) };
    }
}

/// Copies the part's rows of A, zeros behind each.
///
/// # Safety
/// The job's promise for A; the stage has a row of floats, and `to` room for the rows.
unsafe fn pack<S: Simd>(simd: S, job: &Job, values: &mut Values, stage: *mut f32, to: *mut u8) {
    let (k, stride) = (job.spec.k, row_bytes(job.spec.k));
    for row in 0..padded(job.part.rows) {
        // SAFETY: rows of A are the part's, and each has its place at `to`.
        unsafe {
            let line = std::slice::from_raw_parts_mut(to.add(row * stride), stride);
            if row >= job.part.rows {
                line.fill(0);
                continue;
            }
            line[k..].fill(0);
            match values {
                Values::Lie(Matrix { base, strides }) if strides.1 == 1 => {
                    let from = base.wrapping_add((job.part.row + row) * strides.0);
                    std::ptr::copy_nonoverlapping(from, line.as_mut_ptr(), k);
                }
                _ => {
                    let wanted = LeftBlock { row: job.part.row + row, rows: 1, inner: 0, count: k, stride };
                    left(simd, job, values, wanted, stage);
                    simd.enter(Narrow { from: stage, line: &mut line[..k] });
                }
            }
        }
    }
}

/// Floats that are whole numbers to bytes.
struct Narrow<'a> {
    from: *const f32,
    line: &'a mut [u8],
}

impl Kernel for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (at, chunk) in self.line.chunks_mut(S::WIDTH).enumerate() {
            // SAFETY: the stage has as many floats as the line has bytes.
            unsafe {
                let from = self.from.add(at * S::WIDTH);
                let count = chunk.len();
                SignedByte::write_partial(simd, chunk.as_mut_ptr(), simd.load_partial(from, count), count);
            }
        }
    }
}

/// All rows against a run of columns.
#[derive(Clone, Copy)]
struct Pass {
    left: *const u8,
    left_stride: usize,
    right: *const u8,
    column_bytes: usize,
    sums: *mut f32,
    sums_stride: usize,
    rows: usize,
    columns: usize,
    k: usize,
}

/// Without byte instructions: what the compiler makes of it.
struct Plain(Pass);

impl Kernel for Plain {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let pass = self.0;
        for column in 0..pass.columns {
            for row in 0..pass.rows {
                // SAFETY: rows, columns and inner indices are those of the pass, which answers for its operands.
                unsafe {
                    let a = std::slice::from_raw_parts(pass.left.add(row * pass.left_stride).cast::<i8>(), pass.k);
                    let b = pass.right.wrapping_add(column * pass.column_bytes).cast::<i8>();
                    let b = std::slice::from_raw_parts(b, pass.k);
                    let sum: i32 = a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum();
                    *pass.sums.add(row * pass.sums_stride + column) = sum as f32;
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod vnni {
    use std::arch::x86_64::*;

    use super::{Pass, VECTOR};

    /// # Safety
    /// AVX-512 with VNNI is there; A, B and the sums are as large as the pass says, of 1, 2, 4 or 8 rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub(super) unsafe fn columns(pass: Pass) {
        // SAFETY: the caller's promise.
        unsafe {
            match pass.rows {
                1 => several::<1, 4>(pass),
                2 => several::<2, 4>(pass),
                4 => several::<4, 4>(pass),
                _ => several::<8, 2>(pass),
            }
        }
    }

    /// `N` columns at a time, which share the loads of A; the last ones alone.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn several<const R: usize, const N: usize>(pass: Pass) {
        let whole = pass.columns / N * N;
        // SAFETY: columns stay below `columns`.
        unsafe {
            let offsets = row_offsets::<R>(pass);
            for column in (0..whole).step_by(N) {
                dots::<R, N>(pass, column, offsets);
            }
            for column in whole..pass.columns {
                dots::<R, 1>(pass, column, offsets);
            }
        }
    }

    /// `128 sum a` of each row.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn row_offsets<const R: usize>(pass: Pass) -> [i32; R] {
        let factor = _mm512_set1_epi8(i8::MIN); // 128 as an unsigned byte
        std::array::from_fn(|row| {
            let mut sum = _mm512_setzero_si512();
            for inner in (0..pass.left_stride).step_by(VECTOR) {
                // SAFETY: a row of A has `left_stride` bytes.
                let a = unsafe { _mm512_loadu_si512(pass.left.add(row * pass.left_stride + inner).cast()) };
                sum = _mm512_dpbusd_epi32(sum, factor, a);
            }
            _mm512_reduce_add_epi32(sum)
        })
    }

    /// The sums of columns `column .. column + N`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn dots<const R: usize, const N: usize>(pass: Pass, column: usize, offsets: [i32; R]) {
        let flip = _mm512_set1_epi8(i8::MIN);
        let right = pass.right.wrapping_add(column * pass.column_bytes);
        let mut dots = [[_mm512_setzero_si512(); 4]; R];
        let mut inner = 0;
        // SAFETY: rows below R, columns below N and inner indices below `k` are there; a row of A goes on to the next
        // multiple of a vector. The sums have a place for each.
        unsafe {
            while inner + VECTOR <= pass.k {
                let mut lanes = [flip; N];
                for next in 0..N {
                    let from = right.add(next * pass.column_bytes + inner);
                    lanes[next] = _mm512_xor_si512(_mm512_loadu_si512(from.cast()), flip);
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(N * pass.column_bytes).cast());
                }
                for row in 0..R {
                    let a = _mm512_loadu_si512(pass.left.add(row * pass.left_stride + inner).cast());
                    for next in 0..N {
                        dots[row][next] = _mm512_dpbusd_epi32(dots[row][next], lanes[next], a);
                    }
                }
                inner += VECTOR;
            }
            let count = pass.k - inner;
            if count > 0 {
                let mask = (1u64 << count) - 1;
                for next in 0..N {
                    let from = right.add(next * pass.column_bytes + inner);
                    let lanes = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, from.cast()), flip);
                    for row in 0..R {
                        let a = _mm512_loadu_si512(pass.left.add(row * pass.left_stride + inner).cast());
                        dots[row][next] = _mm512_dpbusd_epi32(dots[row][next], lanes, a);
                    }
                }
            }
            for row in 0..R {
                let sums = _mm_sub_epi32(add_lanes(dots[row]), _mm_set1_epi32(offsets[row]));
                let to = pass.sums.add(row * pass.sums_stride + column);
                _mm_mask_storeu_ps(to, (1 << N) - 1, _mm_cvtepi32_ps(sums));
            }
        }
    }

    /// The sum of each vector's lanes.
    #[target_feature(enable = "avx512f,avx512vl")]
    fn add_lanes([a, b, c, d]: [__m512i; 4]) -> __m128i {
        let low = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let high = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        let four = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
        let two = _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64::<1>(four));
        _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256::<1>(two))
    }
}
