//! Every method of every instruction set of this CPU, against sums in f64.

use deuteron_graph::Dtype;

use super::*;

/// Bytes that must not change around the result.
const CANARY: u8 = 0xA5;

/// Small pseudo-random numbers, the same for every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32) / (1u64 << 23) as f32 - 1.0
    }
}

/// A matrix in storage, and what its elements are worth.
struct Stored {
    bytes: Vec<u8>,
    /// Where in them the first element lies.
    start: usize,
    values: Vec<f64>,
    columns: usize,
    strides: (usize, usize),
}

/// How elements follow each other.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    Rows,
    Columns,
    Sparse,
}

const LIES: [Lie; 3] = [Lie::Rows, Lie::Columns, Lie::Sparse];

impl Stored {
    fn new(numbers: &mut Numbers, dtype: Dtype, (rows, columns): (usize, usize), lie: Lie) -> Stored {
        let strides = match lie {
            Lie::Rows => (columns + 3, 1),
            Lie::Columns => (1, rows + 1),
            Lie::Sparse => (2 * columns + 1, 2),
        };
        let span = if rows * columns == 0 { 0 } else { (rows - 1) * strides.0 + (columns - 1) * strides.1 + 1 };
        // Elements between those that count are NaN (or -128): they must not be used.
        let mut bytes = match dtype {
            Dtype::I8 => vec![0x80; span],
            _ => vec![0xff; span * dtype.bytes()],
        };
        let mut values = Vec::new();
        for row in 0..rows {
            for column in 0..columns {
                let x = numbers.next();
                let at = (row * strides.0 + column * strides.1) * dtype.bytes();
                values.push(encode(dtype, x, &mut bytes[at..at + dtype.bytes()]));
            }
        }
        Stored { bytes, start: 0, values, columns, strides }
    }

    fn matrix(&self) -> Matrix {
        Matrix { base: self.bytes[self.start..].as_ptr(), strides: self.strides }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.values[row * self.columns + column]
    }
}

fn encode(dtype: Dtype, x: f32, to: &mut [u8]) -> f64 {
    match dtype {
        Dtype::F16 => {
            let x = half::f16::from_f32(x);
            to.copy_from_slice(&x.to_bits().to_ne_bytes());
            x.to_f64()
        }
        Dtype::Bf16 => {
            let x = half::bf16::from_f32(x);
            to.copy_from_slice(&x.to_bits().to_ne_bytes());
            x.to_f64()
        }
        Dtype::I8 => {
            let x = (x * 128.0).floor() as i8;
            to[0] = x as u8;
            f64::from(x)
        }
        _ => {
            to.copy_from_slice(&x.to_ne_bytes());
            f64::from(x)
        }
    }
}

/// A product with everything that it needs, and its sums in f64.
struct Case {
    spec: Spec,
    columns: usize,
    left: Stored,
    rights: Vec<Stored>,
    row_scales: Option<Vec<f32>>,
    column_scales: Option<Vec<f32>>,
    /// Whether B is packed once for all parts, where the method does so.
    packs: bool,
}

impl Case {
    fn new((rows, k, columns): (usize, usize, usize), (left, right): (Dtype, Dtype), lies: (Lie, Lie)) -> Case {
        let mut numbers = Numbers((rows * 31 + k * 7 + columns) as u64);
        let a = Stored::new(&mut numbers, left, (rows, k), lies.0);
        let b = Stored::new(&mut numbers, right, (k, columns), lies.1);
        let spec = Spec { rows, k, left, right, right_strides: b.strides, rights: 1 };
        let scales = |count: usize, numbers: &mut Numbers| (0..count).map(|_| 0.01 + numbers.next().abs()).collect();
        let row_scales = (left == Dtype::I8).then(|| scales(rows, &mut numbers));
        let column_scales = (right == Dtype::I8).then(|| scales(columns, &mut numbers));
        Case { spec, columns, left: a, rights: vec![b], row_scales, column_scales, packs: false }
    }

    fn with_second(mut self) -> Case {
        let lie = if self.spec.right_strides.1 == 1 { Lie::Rows } else { Lie::Columns };
        let size = (self.spec.k, self.columns);
        self.rights.push(Stored::new(&mut Numbers(99), self.spec.right, size, lie));
        self.spec.rights = 2;
        self
    }

    /// The sum and the sum of magnitudes of an element.
    fn expected(&self, row: usize, column: usize, which: usize) -> (f64, f64) {
        let mut sums = (0.0, 0.0);
        for inner in 0..self.spec.k {
            let product = self.left.at(row, inner) * self.rights[which].at(inner, column);
            sums = (sums.0 + product, sums.1 + product.abs());
        }
        let by_row = self.row_scales.as_ref().map_or(1.0, |scales| f64::from(scales[row]));
        let by_column = self.column_scales.as_ref().map_or(1.0, |scales| f64::from(scales[column]));
        (sums.0 * by_row * by_column, sums.1 * by_row * by_column)
    }

    fn run(&self, kernel: PartKernel, isa: Isa, parts: &[Part], filled: bool) -> Vec<Vec<f32>> {
        let mut results = vec![vec![f32::NAN; self.spec.rows * self.columns]; self.rights.len()];
        let mut memory = kernel.packed(self.columns).filter(|_| self.packs).map(Floats::new);
        let packed = memory.as_mut().map(|memory| {
            memory.fill(f32::NAN);
            let packed = Packed { base: memory.pointer(), columns: self.columns };
            // SAFETY: the operand has all columns and inner indices, and there is room for every piece.
            let pack = |piece| unsafe { kernel.pack(self.rights[0].matrix(), packed, piece) };
            (0..kernel.pieces(self.columns)).rev().for_each(pack);
            packed
        });
        for &part in parts {
            let mut scratch = Floats::new(kernel.scratch(part.rows, part.columns));
            scratch.fill(f32::NAN);
            let mut fill = |wanted: Wanted| {
                for row in 0..wanted.rows {
                    for at in 0..wanted.count {
                        let value = self.left.at(wanted.row + row, wanted.inner + at);
                        wanted.to[row * wanted.stride + at] = value as f32;
                    }
                }
            };
            let values = if filled { Values::Fill(&mut fill) } else { Values::Lie(self.left.matrix()) };
            let left = Left { values, scales: self.row_scales.as_deref() };
            let scales = self.column_scales.as_deref();
            let right = |stored: &Stored| Right { matrix: stored.matrix(), scales, packed };
            let rights: Vec<Right> = self.rights.iter().map(right).collect();
            let strides = (self.columns, 1);
            let store = Store { base: results[0].as_mut_ptr().cast(), dtype: Dtype::F32, strides };
            let mut second: Vec<(usize, f32)> = Vec::new();
            let mut finish = |block: SumBlock| {
                assert!(block.row >= part.row && block.row + block.rows <= part.row + part.rows);
                assert!(block.column >= part.column && block.column + block.columns <= part.column + part.columns);
                // SAFETY: blocks are inside of the part, and the result has all rows and columns.
                unsafe { store.block(isa, &block) };
                if !block.second.is_empty() {
                    for row in 0..block.rows {
                        for column in 0..block.columns {
                            let at = (block.row + row) * self.columns + block.column + column;
                            second.push((at, block.second[row * block.stride + column]));
                        }
                    }
                }
            };
            // SAFETY: the operands have all rows, columns and inner indices.
            unsafe { kernel.run(left, &rights, part, &mut scratch, &mut finish) };
            for (at, sum) in second {
                results[1][at] = sum;
            }
        }
        results
    }

    fn whole(&self) -> Part {
        Part { row: 0, rows: self.spec.rows, column: 0, columns: self.columns }
    }

    fn check(&self, filled: bool) {
        for isa in Isa::available() {
            for method in PartKernel::methods(isa, self.spec) {
                let kernel = PartKernel::with(isa, self.spec, method);
                let results = self.run(kernel, isa, &[self.whole()], filled);
                for (which, result) in results.iter().enumerate() {
                    for (at, &got) in result.iter().enumerate() {
                        let (expected, magnitude) = self.expected(at / self.columns, at % self.columns, which);
                        // A chain of k roundings at worst; three more for scales.
                        let bound = f64::from(f32::EPSILON) * (self.spec.k as f64 + 3.0) * magnitude;
                        let name = (isa.name(), method.name(), which, at, filled, self.spec);
                        assert!((f64::from(got) - expected).abs() <= bound, "{name:?}: {got} for {expected}");
                    }
                }
            }
        }
    }
}

const SIZES: [(usize, usize, usize); 16] = [
    (1, 1, 1),
    (1, 127, 129),
    (3, 1500, 33),
    (5, 17, 4100),
    (8, 129, 127),
    (9, 31, 65),
    (13, 127, 15),
    (33, 769, 70),
    (129, 64, 127),
    (31, 385, 401),
    (47, 1500, 129),
    // One tile of rows, one column more than two blocks, two inner indices more than one.
    (8, 770, 193),
    // Rows for which blocks of columns are wide, and a row and a column more than whole tiles.
    (257, 20, 241),
    // Whole tiles and blocks.
    (24, 1536, 192),
    (16, 0, 5),
    (2, 0, 5),
];

const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

#[test]
fn sizes_and_dtypes_are_right() {
    for size in SIZES {
        for left in FLOATS {
            for right in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8] {
                Case::new(size, (left, right), (Lie::Rows, Lie::Rows)).check(false);
            }
        }
        Case::new(size, (Dtype::I8, Dtype::I8), (Lie::Rows, Lie::Rows)).check(false);
    }
}

#[test]
fn strides_are_right() {
    for size in [(7, 130, 37), (37, 130, 70)] {
        for left in LIES {
            for right in LIES {
                for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8] {
                    Case::new(size, (dtype, dtype), (left, right)).check(false);
                }
            }
        }
    }
}

#[test]
fn operands_may_lie_at_any_alignment() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for lie in [Lie::Rows, Lie::Columns] {
            let mut case = Case::new((21, 800, 103), (dtype, dtype), (Lie::Rows, lie));
            for stored in [&mut case.left, &mut case.rights[0]] {
                stored.bytes.insert(0, 0xff);
                stored.start = 1;
            }
            case.check(false);
        }
    }
}

#[test]
fn a_filled_operand_is_that_operand() {
    for size in [(6, 500, 40), (40, 800, 50)] {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8] {
            Case::new(size, (dtype, dtype), (Lie::Rows, Lie::Columns)).check(true);
        }
    }
}

#[test]
fn two_right_operands_share_the_left_one() {
    for size in [(4, 100, 90), (40, 900, 450)] {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::I8] {
            Case::new(size, (dtype, dtype), (Lie::Rows, Lie::Rows)).with_second().check(false);
        }
    }
}

#[test]
fn parts_do_not_change_a_bit() {
    for size in [(5, 900, 301), (61, 900, 301)] {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::I8] {
            for lie in [Lie::Rows, Lie::Columns] {
                let case = Case::new(size, (dtype, dtype), (Lie::Rows, lie));
                let mut parts = Vec::new();
                for (row, rows) in [(0, 3), (3, size.0 - 3)] {
                    for (column, columns) in [(0, 1), (1, 97), (98, 203)] {
                        parts.push(Part { row, rows, column, columns });
                    }
                }
                for isa in Isa::available() {
                    for method in PartKernel::methods(isa, case.spec) {
                        let kernel = PartKernel::with(isa, case.spec, method);
                        let whole = case.run(kernel, isa, &[case.whole()], false);
                        let split = case.run(kernel, isa, &parts, false);
                        let bits = |x: &Vec<Vec<f32>>| x[0].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        assert_eq!(bits(&whole), bits(&split), "{} {}", isa.name(), method.name());
                    }
                }
            }
        }
    }
}

#[test]
fn a_packed_operand_does_not_change_a_bit() {
    for size in [(61, 900, 301), (40, 1600, 90), (9, 31, 500), (70, 768, 384), (10, 0, 5)] {
        for dtypes in [(Dtype::F32, Dtype::F32), (Dtype::F16, Dtype::F16), (Dtype::Bf16, Dtype::Bf16)] {
            for lie in LIES {
                let mut case = Case::new(size, dtypes, (Lie::Rows, lie));
                let part = |row, rows| Part { row, rows, ..case.whole() };
                let parts = [part(0, 7), part(7, size.0 - 7)];
                for isa in Isa::available() {
                    for method in PartKernel::methods(isa, case.spec) {
                        let kernel = PartKernel::with(isa, case.spec, method);
                        assert_eq!(kernel.packed(size.2).is_some(), method.0 != Algorithm::Stream && size.1 > 0);
                        case.packs = false;
                        let whole = case.run(kernel, isa, &[case.whole()], false);
                        case.packs = true;
                        let packed = case.run(kernel, isa, &parts, false);
                        let bits = |x: &Vec<Vec<f32>>| x[0].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        assert_eq!(bits(&whole), bits(&packed), "{} {} {size:?} {lie:?}", isa.name(), method.name());
                    }
                }
            }
        }
    }
}

/// Strips cover all rows and columns, are no fewer than workers where columns allow it, and share columns only where rows are few.
#[test]
fn strips_are_enough_for_all_workers() {
    for rows in [1, 8, 9, 64, 100, 1000, 5000] {
        for threads in [1, 2, 7, 64] {
            let spec = Spec { rows, k: 768, left: Dtype::F32, right: Dtype::F32, right_strides: (768, 1), rights: 1 };
            let kernel = PartKernel::new(Isa::detect(), spec);
            let (tall, wide) = kernel.strip(768, threads);
            let (down, across) = (rows.div_ceil(tall), 768usize.div_ceil(wide));
            assert!(
                across == 1 || down < threads || rows <= STREAMED_ROWS,
                "{rows} rows, {threads} threads: {tall} by {wide}"
            );
            assert!(down * across >= threads.min(4), "{rows} rows, {threads} threads: {tall} by {wide}");
        }
    }
}

/// The sums of a case without scales, by every method.
fn each_sum_of_bytes(mut case: Case, check: impl Fn(&Case, &[f32], &str)) {
    case.row_scales = None;
    case.column_scales = None;
    for isa in Isa::available() {
        for method in PartKernel::methods(isa, case.spec) {
            let result = case.run(PartKernel::with(isa, case.spec, method), isa, &[case.whole()], false);
            check(&case, &result[0], &format!("{} {} {:?}", isa.name(), method.name(), case.spec));
        }
    }
}

#[test]
fn products_of_bytes_are_exact() {
    for rows in [1, 2, 3, 5, 8, 40] {
        for lie in LIES {
            for k in [1, 63, 64, 65, 770, 3072] {
                let case = Case::new((rows, k, 37), (Dtype::I8, Dtype::I8), (Lie::Rows, lie));
                each_sum_of_bytes(case, |case, result, name| {
                    for (at, &got) in result.iter().enumerate() {
                        let inner = 0..case.spec.k;
                        let of = |i: usize| case.left.at(at / 37, i) * case.rights[0].at(i, at % 37);
                        assert_eq!(got, inner.map(of).sum::<f64>() as f32, "{name}: {at}");
                    }
                });
            }
        }
    }
}

#[test]
fn the_largest_sums_of_bytes_are_exact() {
    // -128 times -128, as often as i32 holds their sum.
    for (rows, k) in [(1, 1000), (40, 1000), (2, (1 << 17) - 1), (17, (1 << 17) - 1)] {
        let mut case = Case::new((rows, k, 3), (Dtype::I8, Dtype::I8), (Lie::Rows, Lie::Columns));
        for stored in [&mut case.left, &mut case.rights[0]] {
            stored.bytes.fill(0x80);
            stored.values.fill(-128.0);
        }
        let expected = (k * 128 * 128) as i32 as f32;
        each_sum_of_bytes(case, |_, result, name| assert!(result.iter().all(|&x| x == expected), "{name}"));
    }
}

#[test]
fn nan_and_infinity_go_through() {
    for rows in [2, 20] {
        for dtype in FLOATS {
            for lie in [Lie::Rows, Lie::Columns] {
                let mut case = Case::new((rows, 70, 37), (dtype, dtype), (Lie::Rows, lie));
                // Row 0 of A has a NaN, row 1 an infinity that meets a 0 in column 1.
                let bytes = dtype.bytes();
                let left_row = case.left.strides.0 * bytes;
                encode(dtype, f32::NAN, &mut case.left.bytes[..bytes]);
                encode(dtype, f32::INFINITY, &mut case.left.bytes[left_row..left_row + bytes]);
                let column = case.rights[0].strides.1 * bytes;
                encode(dtype, 0.0, &mut case.rights[0].bytes[column..column + bytes]);
                for isa in Isa::available() {
                    for method in PartKernel::methods(isa, case.spec) {
                        let result = case.run(PartKernel::with(isa, case.spec, method), isa, &[case.whole()], false);
                        let name = (isa.name(), method.name(), dtype, lie);
                        assert!(result[0][..37].iter().all(|x| x.is_nan()), "{name:?}");
                        assert!(result[0][37].is_infinite() && result[0][38].is_nan(), "{name:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_store_writes_its_elements_only() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8] {
        for strides in [(40, 1), (2, 50)] {
            for isa in Isa::available() {
                let bytes = dtype.bytes();
                let mut memory = vec![CANARY; 2000 * bytes];
                let mut sums: Vec<f32> = (0..3 * 48).map(|i| i as f32 - 60.0).collect();
                let to = Store { base: memory.as_mut_ptr(), dtype, strides };
                let block =
                    SumBlock { row: 2, rows: 3, column: 1, columns: 35, stride: 48, sums: &mut sums, second: &mut [] };
                // SAFETY: row 4, column 35 are inside of the memory at both strides.
                unsafe { to.block(isa, &block) };
                let mut expected = vec![CANARY; 2000 * bytes];
                for row in 0..3 {
                    for column in 0..35 {
                        let at = ((row + 2) * strides.0 + (column + 1) * strides.1) * bytes;
                        let sum = sums[row * 48 + column];
                        match dtype {
                            Dtype::I8 => expected[at] = sum as i8 as u8,
                            _ => _ = encode(dtype, sum, &mut expected[at..at + bytes]),
                        }
                    }
                }
                assert_eq!(memory, expected, "{} {dtype} {strides:?}", isa.name());
            }
        }
    }
}
