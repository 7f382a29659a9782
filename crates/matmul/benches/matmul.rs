//! Matrix products against the `gemm` crate, with two threads, alternately:
//! `cargo bench -p deuteron-matmul --features gemm --bench matmul`.
//!
//! Times are what the threads run, on average: other work on the machine counts only by what it does to caches and memory.
//! Arguments choose lines that contain them. Streamed products are set against the speed at which the same threads read a
//! large array.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use deuteron_codegen::cpu::simd::Isa;
use deuteron_codegen::cpu::task::Floats;
use deuteron_graph::Dtype;
use deuteron_matmul::cpu::{Left, Matrix, Part, PartKernel, Right, STREAMED_ROWS, Spec, Store, SumBlock, Values};

const THREADS: usize = 2;
const ROUNDS: usize = 15;

/// Rows, inner size, columns, whether B lies by columns.
const SHAPES: [(usize, usize, usize, bool); 11] = [
    (1024, 768, 2304, false),
    (1024, 768, 768, false),
    (1024, 768, 3072, false),
    (1024, 768, 3072, true),
    (1024, 3072, 768, false),
    (128, 768, 3072, false),
    (1, 768, 50257, true),
    (8, 768, 50257, true),
    (1, 768, 3072, false),
    (8, 768, 3072, false),
    (1, 4096, 14336, false),
];

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let isa = Isa::detect();
    println!("{} with {THREADS} threads; reads {:.1} GB/s", isa.name(), read_speed());
    for (rows, k, columns, transposed) in SHAPES {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::I8] {
            let name = format!("{rows}x{k}x{columns}{} {dtype}", if transposed { "t" } else { "" });
            if wanted.iter().all(|word| name.contains(word)) {
                measure(&name, isa, (rows, k, columns), transposed, dtype);
            }
        }
    }
}

/// One product of one dtype, and the same through the library in f32.
fn measure(name: &str, isa: Isa, (rows, k, columns): (usize, usize, usize), transposed: bool, dtype: Dtype) {
    let strides = if transposed { (1, k) } else { (columns, 1) };
    let (a, b) = (numbers(rows * k), numbers(k * columns));
    let left_dtype = if rows <= STREAMED_ROWS { Dtype::F32 } else { dtype };
    // A streamed weight is read from memory: enough copies that none stays in the cache.
    let copies = if rows <= STREAMED_ROWS { (512 << 20) / (b.len() * dtype.bytes()) + 1 } else { 1 };
    let (left, right) = (encode(left_dtype, &a), encode(dtype, &b).repeat(copies));
    let mut result = vec![0.0f32; rows * columns];
    let mut other = vec![0.0f32; rows * columns];

    let spec = Spec { rows, k, left: left_dtype, right: dtype, right_strides: strides, rights: 1 };
    let kernel = PartKernel::new(isa, spec);
    let (part_rows, part_columns) = kernel.part(columns, THREADS);
    let mut parts = Vec::new();
    for column in (0..columns).step_by(part_columns) {
        for row in (0..rows).step_by(part_rows) {
            let (part_rows, part_columns) = (part_rows.min(rows - row), part_columns.min(columns - column));
            parts.push(Part { row, rows: part_rows, column, columns: part_columns });
        }
    }
    let needed = kernel.scratch(part_rows, part_columns);
    let mut scratches: Vec<Floats> = (0..THREADS).map(|_| Floats::new(needed)).collect();
    let scales = (vec![1.0 / 128.0; rows], vec![1.0 / 128.0; columns]);
    let by_row = (left_dtype == Dtype::I8).then_some(&scales.0[..]);
    let by_column = (dtype == Dtype::I8).then_some(&scales.1[..]);
    let store = Store { base: result.as_mut_ptr().cast(), dtype: Dtype::F32, strides: (columns, 1) };
    let left = Matrix { base: left.as_ptr(), strides: (k, 1) };

    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let copy = round % copies * b.len() * dtype.bytes();
        let right = Matrix { base: right[copy..].as_ptr(), strides };
        ours.push(time(|busy| {
            let next = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for scratch in &mut scratches {
                    let (next, parts, kernel) = (&next, &parts, &kernel);
                    scope.spawn(move || {
                        let _clock = Clock::start(busy);
                        while let Some(&part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                            // SAFETY: the result has the block's rows and columns, and parts do not overlap.
                            let mut finish = |block: SumBlock<'_>| unsafe { store.block(isa, &block) };
                            let left = Left { values: Values::Lie(left), scales: by_row };
                            let rights = [Right { matrix: right, scales: by_column, packed: None }];
                            // SAFETY: the operands are whole matrices of these strides.
                            unsafe { kernel.run(left, &rights, part, scratch, &mut finish) };
                        }
                    });
                }
            });
        }));
        let to = other.as_mut_ptr() as usize;
        theirs.push(time(|busy| {
            let (a, b) = (a.as_ptr() as usize, b.as_ptr() as usize);
            let by_columns = columns > rows;
            let side = if by_columns { columns } else { rows };
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (start, end) = (side * thread / THREADS, side * (thread + 1) / THREADS);
                    let (row, m) = if by_columns { (0, rows) } else { (start, end - start) };
                    let (column, n) = if by_columns { (start, end - start) } else { (0, columns) };
                    // SAFETY: every thread has its own rows or columns of whole matrices.
                    scope.spawn(move || unsafe {
                        let _clock = Clock::start(busy);
                        gemm::gemm(
                            m,
                            n,
                            k,
                            (to as *mut f32).add(row * columns + column),
                            1,
                            columns as isize,
                            false,
                            (a as *const f32).add(row * k),
                            1,
                            k as isize,
                            (b as *const f32).add(column * strides.1),
                            strides.1 as isize,
                            strides.0 as isize,
                            0.0,
                            1.0,
                            false,
                            false,
                            false,
                            gemm::Parallelism::None,
                        );
                    });
                }
            });
        }));
    }
    let far = result.iter().zip(&other).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
    let (ours, theirs) = (median(&mut ours), median(&mut theirs));
    let work = 2.0 * (rows * k * columns) as f64;
    println!(
        "{name:24} {:12} {:9.1} us {:7.0} GFLOP/s {:6.1} GB/s of B   gemm f32 {:9.1} us {:5.0} GFLOP/s   {:5.2}x   off by {far:.1e}",
        kernel.method().name(),
        1e6 * ours,
        1e-9 * work / ours,
        1e-9 * (k * columns * dtype.bytes()) as f64 / ours,
        1e6 * theirs,
        1e-9 * work / theirs,
        theirs / ours,
    );
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919) % 255) as f32 / 128.0 - 127.0 / 128.0).collect()
}

fn encode(dtype: Dtype, from: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::Bf16 => from.iter().flat_map(|&x| half::bf16::from_f32(x).to_bits().to_ne_bytes()).collect(),
        Dtype::I8 => from.iter().map(|&x| (x * 128.0) as i8 as u8).collect(),
        _ => from.iter().flat_map(|x| x.to_ne_bytes()).collect(),
    }
}

/// GB/s of both threads adding up an array that no cache holds.
fn read_speed() -> f64 {
    let large = vec![1u64; (512 << 20) / 8];
    let mut seconds: Vec<f64> = (0..7)
        .map(|_| {
            time(|busy| {
                std::thread::scope(|scope| {
                    for half in large.chunks(large.len() / THREADS) {
                        scope.spawn(move || {
                            let _clock = Clock::start(busy);
                            let mut sums = [0u64; 32];
                            for chunk in half.chunks_exact(32) {
                                for (sum, x) in sums.iter_mut().zip(chunk) {
                                    *sum = sum.wrapping_add(*x);
                                }
                            }
                            std::hint::black_box(sums);
                        });
                    }
                });
            })
        })
        .collect();
    1e-9 * (large.len() * 8) as f64 / median(&mut seconds)
}

/// Seconds that a thread works, on average.
fn time(work: impl FnOnce(&AtomicU64)) -> f64 {
    let busy = AtomicU64::new(0);
    work(&busy);
    1e-9 * busy.into_inner() as f64 / THREADS as f64
}

/// Adds up what this thread runs while it lives.
struct Clock<'a> {
    start: u64,
    busy: &'a AtomicU64,
}

impl<'a> Clock<'a> {
    fn start(busy: &'a AtomicU64) -> Clock<'a> {
        Clock { start: thread_nanoseconds(), busy }
    }
}

impl Drop for Clock<'_> {
    fn drop(&mut self) {
        self.busy.fetch_add(thread_nanoseconds() - self.start, Ordering::Relaxed);
    }
}

/// The time that this thread has run.
#[cfg(target_os = "linux")]
fn thread_nanoseconds() -> u64 {
    const CLOCK_THREAD_CPUTIME_ID: i32 = 3;
    unsafe extern "C" {
        fn clock_gettime(clock: i32, to: *mut [i64; 2]) -> i32;
    }
    let mut now = [0i64; 2];
    // SAFETY: the C library fills in seconds and nanoseconds.
    unsafe { clock_gettime(CLOCK_THREAD_CPUTIME_ID, &mut now) };
    now[0] as u64 * 1_000_000_000 + now[1] as u64
}

/// Elsewhere, the time that has passed.
#[cfg(not(target_os = "linux"))]
fn thread_nanoseconds() -> u64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_nanos() as u64
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
