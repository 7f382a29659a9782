//! Integers of 16 bits and more: exact in a graph that has 32 bits, and floats.

use crate::support::evaluated_at;
use crate::support::writer::{F32, Size, Value, Writer, tensor};
use deuteron_onnx::{Options, import};

const U8: u64 = 2;
const I8: u64 = 3;
const U16: u64 = 4;
const I16: u64 = 5;
const I32: u64 = 6;
const I64: u64 = 7;

const EDGES: [i64; 15] = [
    0,
    1,
    -1,
    2,
    -3,
    7,
    255,
    32_767,
    -32_768,
    65_536,
    -65_537,
    16_777_217,
    i32::MAX as i64,
    i32::MAX as i64 - 1,
    i32::MIN as i64,
];

/// The lowest bits of an integer, as a type has them.
fn kept(x: i64, element: u64) -> i64 {
    match element {
        U8 => i64::from(x as u8),
        I8 => i64::from(x as i8),
        U16 => i64::from(x as u16),
        I16 => i64::from(x as i16),
        _ => i64::from(x as i32),
    }
}

fn floor_mod(a: i64, b: i64) -> i64 {
    let rest = a.rem_euclid(b);
    if b < 0 && rest != 0 { rest + b } else { rest }
}

/// All operators of two integers, by their definitions, on all pairs of numbers that a type has.
#[test]
fn operators_of_two_integers() {
    type Definition<'a> = (&'a str, i64, &'a dyn Fn(i64, i64) -> i64);
    let operators: [Definition; 8] = [
        ("Add", 0, &|a, b| a + b),
        ("Sub", 0, &|a, b| a - b),
        ("Mul", 0, &|a, b| a * b),
        ("Div", 0, &|a, b| a / b),
        ("Mod", 0, &floor_mod),
        ("Mod", 1, &|a, b| a % b),
        ("Max", 0, &|a, b| a.max(b)),
        ("Min", 0, &|a, b| a.min(b)),
    ];
    for element in [I16, U16, I32, I64] {
        let mut numbers: Vec<i64> = EDGES.iter().map(|&x| kept(x, element)).collect();
        numbers.extend((0..20).map(|i: i64| kept(i * 0x9e37_79b9 / 7, element)));
        for (op, fmod, by_definition) in operators {
            let divides = matches!(op, "Div" | "Mod");
            let pairs = numbers.iter().flat_map(|&a| numbers.iter().map(move |&b| (a, b)));
            let pairs: Vec<(i64, i64)> = pairs.filter(|&(_, b)| !divides || b != 0).collect();
            let dims = [Size::Is(pairs.len())];
            let attributes = [("fmod", Value::Int(fmod))];
            let attributes = if op == "Mod" { &attributes[..] } else { &[] };
            let writer = Writer::default()
                .typed_input("a", element, &dims)
                .typed_input("b", element, &dims)
                .call(op, &["a", "b"], &["y"], attributes)
                .output("y");
            let a: Vec<f64> = pairs.iter().map(|&(a, _)| a as f64).collect();
            let b: Vec<f64> = pairs.iter().map(|&(_, b)| b as f64).collect();
            let got = evaluated_at(writer, 17, &[("a", &a), ("b", &b)]).remove(0).1;
            for (&(a, b), got) in pairs.iter().zip(got) {
                let expected = kept(by_definition(a, b), element) as f64;
                assert!(got == expected, "{op} {fmod} of type {element}: {a} and {b} give {got}, expected {expected}");
            }
        }
    }
}

#[test]
fn operators_of_one_integer() {
    type Definition<'a> = (&'a str, &'a dyn Fn(i64) -> i64);
    let operators: [Definition; 3] = [("Neg", &|x| -x), ("Abs", &|x| x.abs()), ("Sign", &|x| x.signum())];
    for element in [I16, I32, I64] {
        let x: Vec<i64> = EDGES.iter().map(|&x| kept(x, element)).collect();
        let data: Vec<f64> = x.iter().map(|&x| x as f64).collect();
        for (op, by_definition) in operators {
            let dims = [Size::Is(x.len())];
            let writer = Writer::default().typed_input("x", element, &dims).node(op, &["x"], "y").output("y");
            let expected: Vec<f64> = x.iter().map(|&x| kept(by_definition(x), element) as f64).collect();
            assert_eq!(evaluated_at(writer, 17, &[("x", &data)])[0].1, expected, "{op} of type {element}");
        }
    }
}

#[test]
fn casts_to_integers_cut_or_wrap() {
    let cast = |from: u64, to: u64, data: &[f64]| {
        let writer = Writer::default()
            .typed_input("x", from, &[Size::Is(data.len())])
            .call("Cast", &["x"], &["y"], &[("to", Value::Int(to as i64))])
            .output("y");
        evaluated_at(writer, 17, &[("x", data)]).remove(0).1
    };
    let floats = [0.0, 0.4, 0.5, 0.9, 1.5, -0.5, -0.9, -1.5, 100.99, -100.99, 8_388_607.5, 2e9];
    for to in [I32, I64] {
        assert_eq!(cast(F32, to, &floats), floats.map(f64::trunc));
    }
    let wide = EDGES.map(|x| x as f64);
    // A graph stores bytes as signed ones.
    let stored = |x: i64, to: u64| if to == U8 { kept(x, I8) } else { kept(x, to) } as f64;
    for to in [U8, I8, U16, I16] {
        assert_eq!(cast(I32, to, &wide), EDGES.map(|x| stored(x, to)), "to type {to}");
    }
    let bytes = [0.0, 1.0, 127.0, -128.0, -1.0];
    assert_eq!(cast(I8, I32, &bytes), bytes);
    assert_eq!(cast(U8, I64, &bytes), [0.0, 1.0, 127.0, 128.0, 255.0]);
    assert_eq!(cast(U16, I16, &[65_535.0, 32_768.0, 5.0]), [-1.0, -32_768.0, 5.0]);
    assert_eq!(cast(I16, U16, &[-1.0, -32_768.0, 5.0]), [65_535.0, 32_768.0, 5.0]);
}

#[test]
fn running_sums_of_integers() {
    for [rows, cols] in [[1, 1], [3, 7], [2, 16], [5, 0]] {
        let data: Vec<i64> = (0..rows * cols).map(|i| (i as i64 * 7_654_321) % 90_000_000 - 45_000_000).collect();
        let given: Vec<f64> = data.iter().map(|&x| x as f64).collect();
        for axis in [0, 1] {
            for (exclusive, reverse) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let attributes = [("exclusive", Value::Int(exclusive)), ("reverse", Value::Int(reverse))];
                let writer = Writer::default()
                    .typed_input("x", I64, &[Size::Is(rows), Size::Is(cols)])
                    .ints("axis", &[axis])
                    .call("CumSum", &["x", "axis"], &["y"], &attributes)
                    .output("y");
                let counts = |to: usize, from: usize| match (exclusive, reverse) {
                    (0, 0) => from <= to,
                    (0, _) => from >= to,
                    (_, 0) => from < to,
                    _ => from > to,
                };
                let sum = |index: usize| -> f64 {
                    let (row, col) = (index / cols, index % cols);
                    let terms: i64 = match axis {
                        0 => (0..rows).filter(|&i| counts(row, i)).map(|i| data[i * cols + col]).sum(),
                        _ => (0..cols).filter(|&i| counts(col, i)).map(|i| data[row * cols + i]).sum(),
                    };
                    terms as f64
                };
                let expected: Vec<f64> = (0..rows * cols).map(sum).collect();
                let got = evaluated_at(writer, 17, &[("x", &given)]).remove(0).1;
                assert_eq!(got, expected, "{rows}x{cols}, axis {axis}, {exclusive} {reverse}");
            }
        }
    }
}

#[test]
fn reductions_of_integers() {
    let data: Vec<i64> = (0..3 * 7 * 2).map(|i: i64| (i * 104_729_177) % 33_554_467 - 16_000_000).collect();
    let given: Vec<f64> = data.iter().map(|&x| x as f64).collect();
    let line = |row: usize, last: usize| (0..7).map(move |i| (row * 7 + i) * 2 + last);
    type Definition<'a> = (&'a str, &'a dyn Fn(Vec<i64>) -> i64);
    let operators: [Definition; 4] = [
        ("ReduceSum", &|x| x.iter().sum()),
        ("ReduceMax", &|x| x.into_iter().max().unwrap()),
        ("ReduceMin", &|x| x.into_iter().min().unwrap()),
        ("ArgMax", &|x| x.iter().position(|a| x.iter().all(|b| b <= a)).unwrap() as i64),
    ];
    for (op, by_definition) in operators {
        let input = Writer::default().typed_input("x", I32, &[Size::Is(3), Size::Is(7), Size::Is(2)]);
        let writer = match op {
            "ReduceSum" => input.ints("axes", &[1]).node(op, &["x", "axes"], "y"),
            "ArgMax" => input.call(op, &["x"], &["y"], &[("axis", Value::Int(1))]),
            _ => input.call(op, &["x"], &["y"], &[("axes", Value::Ints(&[1]))]),
        };
        let lines = (0..6).map(|index| line(index / 2, index % 2).map(|at| data[at]).collect());
        let expected: Vec<f64> = lines.map(|line| by_definition(line) as f64).collect();
        assert_eq!(evaluated_at(writer.output("y"), 17, &[("x", &given)])[0].1, expected, "{op}");
    }
}

#[test]
fn integers_are_picked_by_index() {
    let writer = Writer::default()
        .typed_input("x", I64, &[Size::Is(4), Size::Is(3)])
        .typed_input("at", I64, &[Size::Is(5)])
        .node("Gather", &["x", "at"], "y")
        .output("y");
    let data: Vec<f64> = (0..12).map(|i| f64::from(i * 178_956_970 - 1_000_000_000)).collect();
    let picks = [3.0, 0.0, 0.0, 2.0, 1.0];
    let expected: Vec<f64> = picks.iter().flat_map(|&at| data[at as usize * 3..][..3].to_vec()).collect();
    assert_eq!(evaluated_at(writer, 17, &[("x", &data), ("at", &picks)])[0].1, expected);
}

/// Sums of few products of bytes are whole floats; of more they are only described, unless what reads them are floats.
#[test]
fn products_of_bytes_as_integers() {
    let model = |terms: usize| {
        let ones = tensor("w", U8, &[terms, 1]).bytes(9, &vec![255; terms]);
        Writer::default().typed_input("x", U8, &[Size::Is(1), Size::Is(terms)]).tensor(ones).node(
            "MatMulInteger",
            &["x", "w"],
            "y",
        )
    };
    let given = vec![-1.0; 300];
    let got = evaluated_at(model(258).output("y"), 17, &[("x", &given[..258])]).remove(0).1;
    assert_eq!(got, [258.0 * 255.0 * 255.0]);
    let imported = import(&model(259).output("y").finish(), &Options::default()).unwrap();
    assert_eq!(imported.opaque[0].why, "sums of 259 products of bytes are not exact in floats");
    let scaled = model(259).call("Cast", &["y"], &["f"], &[("to", Value::Int(1))]).output("f");
    assert_eq!(evaluated_at(scaled, 17, &[("x", &given[..259])])[0].1, [259.0 * 255.0 * 255.0]);
}

#[test]
fn a_note_says_where_integers_lose_bits() {
    let sum = |element: u64| {
        let dims = [Size::Is(3)];
        let writer = Writer::default().typed_input("x", element, &dims).node("Add", &["x", "x"], "y").output("y");
        import(&writer.finish(), &Options::default()).unwrap().notes
    };
    assert_eq!(sum(I64), ["64-bit and unsigned integers are computed in 32 bits, where larger results wrap"]);
    assert!(sum(I32).is_empty() && sum(U16).is_empty());
}

#[test]
fn bits_are_shifted_and_turned() {
    let stored = |x: i64, element: u64| if element == U8 { kept(x, I8) } else { kept(x, element) } as f64;
    for element in [U8, U16, I32] {
        let numbers: Vec<i64> = EDGES.iter().map(|&x| kept(x, element)).filter(|&x| x >= 0).collect();
        let most = if element == U8 { 8 } else { 16 };
        let pairs: Vec<(i64, i64)> = numbers.iter().flat_map(|&x| (0..most).map(move |by| (x, by))).collect();
        let dims = [Size::Is(pairs.len())];
        let x: Vec<f64> = pairs.iter().map(|&(x, _)| stored(x, element)).collect();
        let by: Vec<f64> = pairs.iter().map(|&(_, by)| by as f64).collect();
        for direction in ["LEFT", "RIGHT"] {
            let writer = Writer::default()
                .typed_input("x", element, &dims)
                .typed_input("by", element, &dims)
                .call("BitShift", &["x", "by"], &["y"], &[("direction", Value::Text(direction))])
                .output("y");
            let shift = |(x, by): (i64, i64)| if direction == "LEFT" { x << by } else { x >> by };
            let expected: Vec<f64> = pairs.iter().map(|&pair| stored(shift(pair), element)).collect();
            let got = evaluated_at(writer, 11, &[("x", &x), ("by", &by)]).remove(0).1;
            assert_eq!(got, expected, "{direction} of type {element}");
        }
        let writer = Writer::default().typed_input("x", element, &dims).node("BitwiseNot", &["x"], "y").output("y");
        let expected: Vec<f64> = pairs.iter().map(|&(x, _)| stored(!x, element)).collect();
        assert_eq!(evaluated_at(writer, 18, &[("x", &x)])[0].1, expected, "type {element}");
    }
    let writer = Writer::default()
        .typed_input("x", I32, &[Size::Is(1)])
        .call("BitShift", &["x", "x"], &["y"], &[("direction", Value::Text("UP"))])
        .output("y");
    let error = import(&writer.finish(), &Options::default()).unwrap_err().to_string();
    assert_eq!(error, "BitShift at `y`: direction of LEFT, RIGHT expected, got `UP`");
}

/// The largest of integers, and of more floats than are found one after the other.
#[test]
fn the_largest_of_many() {
    for (element, size, count) in [(I64, 1, 1), (I64, 7, 3), (I32, 7, 7), (F32, 40, 17), (F32, 40, 40)] {
        let value = |index: usize| match element {
            F32 if index % 13 == 5 => f64::NAN,
            F32 => f64::from(((index * 37 % 23) as f32 - 11.0) / 4.0),
            _ => ((index as i64 * 77_777_777) % 33_554_433 - 16_777_216).min(9_000_000) as f64,
        };
        let x: Vec<f64> = (0..3 * size).map(value).collect();
        for axis in [0, 1] {
            let dims = if axis == 1 { [3, size] } else { [size, 3] };
            for largest in [0, 1] {
                let attributes = [("axis", Value::Int(axis)), ("largest", Value::Int(largest))];
                let writer = Writer::default()
                    .typed_input("x", element, &dims.map(Size::Is))
                    .ints("k", &[count as i64])
                    .call("TopK", &["x", "k"], &["values", "places"], &attributes)
                    .output("values")
                    .output("places");
                let results = evaluated_at(writer, 17, &[("x", &x)]);
                for line in 0..3 {
                    let at = |place: usize, length: usize| {
                        if axis == 1 { line * length + place } else { place * 3 + line }
                    };
                    let mut order: Vec<usize> = (0..size).collect();
                    let key = |place: usize| match x[at(place, size)] {
                        value if value.is_nan() => f64::INFINITY,
                        value => {
                            if largest == 1 {
                                value
                            } else {
                                -value
                            }
                        }
                    };
                    order.sort_by(|&a, &b| key(b).total_cmp(&key(a)));
                    for (rank, &place) in order[..count].iter().enumerate() {
                        let (got, value) = (results[0].1[at(rank, count)], x[at(place, size)]);
                        assert!(got == value || (got.is_nan() && value.is_nan()), "{got}, expected {value}");
                        assert_eq!(results[1].1[at(rank, count)], place as f64, "{element} {size} {axis} {largest}");
                    }
                }
            }
        }
    }
}

#[test]
fn pools_give_the_places_of_the_largest() {
    let (batch, channels, height, width) = (2, 3, 7, 5);
    let x: Vec<f64> = (0..batch * channels * height * width).map(|i| f64::from((i * 37 % 29) as f32 - 14.0)).collect();
    for by_columns in [0, 1] {
        let attributes = [
            ("kernel_shape", Value::Ints(&[3, 2])),
            ("strides", Value::Ints(&[2, 1])),
            ("dilations", Value::Ints(&[1, 2])),
            ("pads", Value::Ints(&[1, 1, 1, 1])),
            ("storage_order", Value::Int(by_columns)),
        ];
        let writer = Writer::default()
            .input("x", &[batch, channels, height, width])
            .call("MaxPool", &["x"], &["y", "places"], &attributes)
            .output("y")
            .output("places");
        let results = evaluated_at(writer, 17, &[("x", &x)]);
        let (rows, cols) = (4, 5);
        assert_eq!(results[1].0, [batch, channels, rows, cols]);
        for index in 0..batch * channels * rows * cols {
            let (image, row, col) = (index / (rows * cols), index / cols % rows, index % cols);
            let mut best: Option<(f64, usize)> = None;
            for i in 0..3 {
                for j in 0..2 {
                    let (at_row, at_col) = (2 * row + i, col + 2 * j);
                    if !(1..=height).contains(&at_row) || !(1..=width).contains(&at_col) {
                        continue;
                    }
                    let (at_row, at_col) = (at_row - 1, at_col - 1);
                    let value = x[image * height * width + at_row * width + at_col];
                    let place = if by_columns == 1 { at_col * height + at_row } else { at_row * width + at_col };
                    if best.is_none_or(|(most, _)| value > most) {
                        best = Some((value, image * height * width + place));
                    }
                }
            }
            let (value, place) = best.unwrap();
            assert_eq!((results[0].1[index], results[1].1[index]), (value, place as f64));
        }
    }
}

/// What a caller may pass: less than the graph's type holds, but for bytes, whose bits are the same.
#[test]
fn inputs_have_the_range_of_the_file_s_type() {
    let types = [
        (1, None),
        (5, Some((-32_768.0, 32_767.0))),
        (4, Some((0.0, 65_535.0))),
        (7, None),
        (2, None),
        (22, Some((-8.0, 7.0))),
    ];
    for (number, range) in types {
        let writer = Writer::default().typed_input("x", number, &[Size::Is(3)]).call(
            "Cast",
            &["x"],
            &["y"],
            &[("to", Value::Int(1))],
        );
        let imported = import(&writer.output("y").finish_at(21), &Options::default()).unwrap();
        assert_eq!(imported.inputs[0].range, range, "{number}");
    }
}
