//! Types of at most 8 bits: their values, their rounding, their packing and their arithmetic.

use crate::support::writer::{F32, Message, Size, Value, Writer, tensor};
use crate::support::{evaluated_at, values};
use deuteron_graph::Dtype;
use deuteron_onnx::{Imported, Options, import, read_tensor};

const U8: u64 = 2;
const I8: u64 = 3;
const I32: u64 = 6;
const F8E4M3: u64 = 17;
const F8E8M0: u64 = 24;
const U4: u64 = 21;
const I4: u64 = 22;
const U2: u64 = 25;
const I2: u64 = 26;

/// ONNX's numbers of the small floats, with their bits.
const SMALL_FLOATS: [(u64, u32); 5] = [(F8E4M3, 8), (18, 8), (19, 8), (20, 8), (23, 4)];

fn is_same(a: f64, b: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

/// What a type's patterns stand for, read from a tensor.
fn patterns(element: u64, bits: u32) -> Vec<f64> {
    let count = 1usize << bits;
    let raw: Vec<u8> = match bits {
        8 => (0..=255).collect(),
        4 => (0..8).map(|pair| (2 * pair) | (2 * pair + 1) << 4).collect(),
        _ => vec![0b1110_0100],
    };
    let (_, data) = read_tensor(&tensor("w", element, &[count]).bytes(9, &raw).0).unwrap();
    data.values()
}

fn cast(values: &[f64], to: u64, attributes: &[(&str, Value)]) -> Vec<f64> {
    let attributes = [&[("to", Value::Int(to as i64))], attributes].concat();
    let writer = Writer::default().input("x", &[values.len()]).call("Cast", &["x"], &["y"], &attributes).output("y");
    evaluated_at(writer, 25, &[("x", values)]).remove(0).1
}

/// Numbers around all values of a type: the values, what lies in the middle of two, and their next neighbours.
fn probes(known: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = known.iter().copied().filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let middles: Vec<f64> = sorted.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
    let mut probes: Vec<f64> = sorted.iter().chain(&middles).copied().collect();
    for index in 0..probes.len() {
        let near = probes[index] as f32;
        probes.extend([near.next_up(), near.next_down()].map(f64::from));
    }
    let most = sorted[sorted.len() - 1];
    probes.extend([1.01 * most, 1.5 * most, 3.0e38, f64::INFINITY, 1e-30, 0.0]);
    probes.extend(probes.clone().iter().map(|value| -value));
    probes.push(f64::NAN);
    probes
}

/// The nearest of the finite values; of two, the one with the even pattern.
fn nearest(known: &[f64], x: f64) -> f64 {
    let finite = known.iter().enumerate().filter(|(_, value)| value.is_finite());
    let ordered = finite.min_by(|(a, left), (b, right)| {
        let distance = |value: f64| (value - x).abs();
        distance(**left).total_cmp(&distance(**right)).then((a & 1).cmp(&(b & 1)))
    });
    *ordered.unwrap().1
}

#[test]
fn small_floats_are_rounded_to_the_nearest() {
    for (element, bits) in SMALL_FLOATS {
        let known = patterns(element, bits);
        let probes = probes(&known);
        let most = known.iter().copied().filter(|value| value.is_finite()).fold(0.0, f64::max);
        let has_nan = known.iter().any(|value| value.is_nan());
        let results = cast(&probes, element, &[]);
        for (&x, &got) in probes.iter().zip(&results) {
            let expected = match x {
                _ if x.is_nan() => {
                    if has_nan {
                        f64::NAN
                    } else {
                        0.0
                    }
                }
                _ if x.abs() > most => most.copysign(x),
                _ => nearest(&known, x),
            };
            assert!(is_same(got, expected), "type {element}: {x} becomes {got}, expected {expected}");
        }
        // Without saturation, what lies beyond the largest after rounding is infinity or NaN, where there is one.
        let beyond = match known.iter().any(|value| value.is_infinite()) {
            true => f64::INFINITY,
            false => {
                if has_nan {
                    f64::NAN
                } else {
                    most
                }
            }
        };
        let results = cast(&probes, element, &[("saturate", Value::Int(0))]);
        // The last step below the largest is as wide as the one above it would be.
        let mut sizes: Vec<f64> = known.iter().copied().filter(|value| value.is_finite()).map(f64::abs).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup();
        let step = most - sizes[sizes.len() - 2];
        let is_even = (most / step) % 2.0 == 0.0;
        for (&x, &got) in probes.iter().zip(&results) {
            let rounds_down = x.abs() < most + step / 2.0 || (is_even && x.abs() == most + step / 2.0);
            let expected = match x {
                _ if x.is_nan() => {
                    if has_nan {
                        f64::NAN
                    } else {
                        0.0
                    }
                }
                _ if !rounds_down => beyond.copysign(x),
                _ if x.abs() > most => most.copysign(x),
                _ => nearest(&known, x),
            };
            assert!(is_same(got, expected), "type {element}, unsaturated: {x} becomes {got}, expected {expected}");
        }
        assert!(cast(&[], element, &[]).is_empty());
    }
}

#[test]
fn small_floats_are_read_as_what_they_are() {
    for (element, bits) in SMALL_FLOATS {
        let known = patterns(element, bits);
        let dims = [Size::Is(known.len())];
        let writer = Writer::default()
            .typed_input("x", element, &dims)
            .call("Cast", &["x"], &["y"], &[("to", Value::Int(1))])
            .output("y");
        let results = evaluated_at(writer, 25, &[("x", &known)]).remove(0).1;
        assert!(results.iter().zip(&known).all(|(&got, &expected)| is_same(got, expected)), "{results:?}");
    }
}

#[test]
fn powers_of_two_are_above_below_or_near() {
    let x = [0.0, 1.0, 1.1, 1.4, 1.5, 1.9, 2.0, -3.0, 3.0e38, f64::INFINITY, f64::NAN, 2f64.powi(-126)];
    let x = x.map(|x| f64::from(x as f32));
    let least = 2f64.powi(-127);
    let (most, nan) = (2f64.powi(127), f64::NAN);
    let expected = [
        ("up", [least, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 4.0, most, nan, nan, 2.0 * least]),
        ("down", [least, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, most, nan, nan, 2.0 * least]),
        ("nearest", [least, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 4.0, most, nan, nan, 2.0 * least]),
    ];
    for (mode, expected) in expected {
        let got = cast(&x, F8E8M0, &[("round_mode", Value::Text(mode))]);
        assert!(got.iter().zip(&expected).all(|(&got, &expected)| is_same(got, expected)), "{mode}: {got:?}");
    }
    let unsaturated = cast(&x, F8E8M0, &[("round_mode", Value::Text("up")), ("saturate", Value::Int(0))]);
    assert!(unsaturated[8].is_nan() && unsaturated[7] == 4.0);
}

#[test]
fn parts_of_bytes_wrap() {
    let x: Vec<f64> = (-20..40).map(|i| f64::from(i) * 0.5).collect();
    for (element, bits, is_signed) in [(U4, 4, false), (I4, 4, true), (U2, 2, false), (I2, 2, true)] {
        let expected = x.iter().map(|x| {
            let low = (x.trunc() as i64).rem_euclid(1 << bits);
            (if is_signed && low >= 1 << (bits - 1) { low - (1 << bits) } else { low }) as f64
        });
        assert_eq!(cast(&x, element, &[]), expected.collect::<Vec<_>>());
    }
}

fn imported(writer: Writer) -> (Imported, Vec<u8>) {
    let file = writer.finish_at(25);
    (import(&file, &Options::default()).unwrap_or_else(|error| panic!("{error}")), file)
}

/// A weight that is read back after a product with a scale.
fn weight(stored: Message, count: usize) -> Writer {
    Writer::default()
        .input("x", &[count])
        .tensor(stored)
        .scalar("scale", 0.5)
        .node("DequantizeLinear", &["w", "scale"], "f")
        .node("Mul", &["f", "x"], "y")
        .output("y")
}

#[test]
fn packed_weights_are_read_raw_and_as_numbers() {
    // More elements than are folded, and not a whole number of bytes.
    let count: usize = 301;
    for (element, bits, is_signed) in [(U4, 4, false), (I4, 4, true), (U2, 2, false), (I2, 2, true)] {
        let span = 1i64 << bits;
        let value = |index: usize| {
            let low = (index as i64 * 5 + 3) % span;
            (if is_signed && low >= span / 2 { low - span } else { low }) as f64
        };
        let mut raw = vec![0u8; (count * bits).div_ceil(8)];
        for index in 0..count {
            let low = (index as i64 * 5 + 3) % span;
            raw[index * bits / 8] |= (low << (index * bits % 8)) as u8;
        }
        let numbers = raw.iter().fold(Message::default(), |packed, &byte| packed.varint(byte.into()));
        let expected: Vec<f64> = (0..count).map(value).collect();
        for stored in
            [tensor("w", element, &[count]).bytes(9, &raw), tensor("w", element, &[count]).message(5, &numbers)]
        {
            let (imported, file) = imported(weight(stored, count));
            let data = imported.weight("w", &file).unwrap();
            assert_eq!((data.dtype, data.values()), (Dtype::I8, expected.clone()));
            assert_eq!(imported.notes, [format!("`w` has elements of {bits} bits and becomes i8")]);
            let results = evaluated_at(
                weight(tensor("w", element, &[count]).bytes(9, &raw), count),
                25,
                &[("x", &vec![1.0; count])],
            );
            assert_eq!(results[0].1, expected.iter().map(|value| value * 0.5).collect::<Vec<_>>());
        }
        let short = weight(tensor("w", element, &[count]).bytes(9, &raw[1..]), count).finish_at(25);
        let error = import(&short, &Options::default()).unwrap_err().to_string();
        assert_eq!(error, format!("tensor `w`: expected {} bytes of data, got {}", raw.len(), raw.len() - 1));
        let few = numbers.0[..numbers.0.len() - 2].to_vec();
        let short = weight(tensor("w", element, &[count]).bytes(5, &few), count).finish_at(25);
        assert!(import(&short, &Options::default()).is_err());
    }
}

#[test]
fn blocks_of_four_bits_have_their_scales() {
    let raw: Vec<u8> = (0..8).map(|i| i | (15 - i) << 4).collect();
    let writer = Writer::default()
        .typed_input("x", F32, &[Size::Is(2)])
        .tensor(tensor("w", I4, &[2, 8]).bytes(9, &raw))
        .floats("scale", &[2, 2], &[1.0, 2.0, 3.0, 4.0])
        .call("DequantizeLinear", &["w", "scale"], &["f"], &[("axis", Value::Int(1)), ("block_size", Value::Int(4))])
        .node("MatMul", &["x", "f"], "y")
        .output("y");
    let signed = |pattern: u8| if pattern > 7 { f64::from(pattern) - 16.0 } else { f64::from(pattern) };
    let values: Vec<f64> = raw.iter().flat_map(|&byte| [signed(byte & 15), signed(byte >> 4)]).collect();
    let row = |row: usize, col: usize| values[row * 8 + col] * [1.0, 2.0, 3.0, 4.0][row * 2 + col / 4];
    let expected: Vec<f64> = (0..8).map(|col| 2.0 * row(0, col) - row(1, col)).collect();
    assert_eq!(evaluated_at(writer, 25, &[("x", &[2.0, -1.0])])[0].1, expected);
}

/// An 8-bit number as a graph stores it.
fn stored(x: i64) -> f64 {
    f64::from(x as u8 as i8)
}

#[test]
fn arithmetic_of_bytes_wraps() {
    let samples: Vec<i64> = vec![-128, -127, -100, -7, -1, 0, 1, 2, 3, 16, 99, 126, 127];
    let pairs: Vec<(i64, i64)> = samples.iter().flat_map(|&a| samples.iter().map(move |&b| (a, b))).collect();
    for (element, shift) in [(I8, 0), (U8, 128)] {
        let pairs: Vec<(i64, i64)> = pairs.iter().map(|&(a, b)| (a + shift, b + shift)).collect();
        let floor_mod = |a: i64, b: i64| a - b * a.div_euclid(b) + if b < 0 && a.rem_euclid(b) != 0 { b } else { 0 };
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
        for (op, fmod, by_definition) in operators {
            let divides = matches!(op, "Div" | "Mod");
            let pairs: Vec<(i64, i64)> = pairs.iter().copied().filter(|&(_, b)| !divides || b != 0).collect();
            let dims = [Size::Is(pairs.len())];
            let attributes = [("fmod", Value::Int(fmod))];
            let attributes = if op == "Mod" { &attributes[..] } else { &[] };
            let writer = Writer::default()
                .typed_input("a", element, &dims)
                .typed_input("b", element, &dims)
                .call(op, &["a", "b"], &["y"], attributes)
                .output("y");
            let a: Vec<f64> = pairs.iter().map(|&(a, _)| stored(a)).collect();
            let b: Vec<f64> = pairs.iter().map(|&(_, b)| stored(b)).collect();
            let expected: Vec<f64> = pairs.iter().map(|&(a, b)| stored(by_definition(a, b))).collect();
            assert_eq!(evaluated_at(writer, 17, &[("a", &a), ("b", &b)])[0].1, expected, "{op} of type {element}");
        }
    }
}

#[test]
fn pools_of_bytes_are_padded_with_their_least() {
    for (element, data) in [(I8, [-128i64, -100, -3, -90]), (U8, [200, 100, 7, 255])] {
        let attributes = [("kernel_shape", Value::Ints(&[2])), ("pads", Value::Ints(&[1, 1]))];
        let writer = Writer::default()
            .typed_input("x", element, &[Size::Is(1), Size::Is(1), Size::Is(4)])
            .call("MaxPool", &["x"], &["y"], &attributes)
            .output("y");
        let x: Vec<f64> = data.iter().map(|&value| stored(value)).collect();
        let most = |range: &[i64]| stored(range.iter().copied().max().unwrap());
        let expected = [&data[..1], &data[..2], &data[1..3], &data[2..], &data[3..]].map(most);
        assert_eq!(evaluated_at(writer, 17, &[("x", &x)])[0].1, expected);
    }
}

#[test]
fn wide_integers_are_cut_to_parts_of_bytes() {
    let data = [1, -9, 300, i32::MAX, i32::MIN, -1];
    let expected = [1.0, 7.0, -4.0, -1.0, 0.0, -1.0];
    let cast = |writer: Writer| writer.call("Cast", &["x"], &["y"], &[("to", Value::Int(I4 as i64))]).output("y");
    let given = cast(Writer::default().typed_input("x", I32, &[Size::Is(6)]));
    assert_eq!(evaluated_at(given, 25, &[("x", &data.map(f64::from))])[0].1, expected);
    let known = cast(Writer::default().tensor(tensor("x", I32, &[6]).bytes(9, &data.map(i32::to_le_bytes).concat())));
    let file = known.finish_at(25);
    let imported = import(&file, &Options::default()).unwrap();
    assert_eq!(values(&imported.weights[0].read(&file).unwrap()).values, expected);
}
