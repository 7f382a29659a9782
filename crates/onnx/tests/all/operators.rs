//! Values of operators beyond what the tests of the `onnx` package cover, and what their import refuses.

use std::collections::BTreeMap;
use std::f64::consts::PI;

use crate::support::evaluated;
use crate::support::writer::{F32, Size, Value, Writer, tensor};
use deuteron_onnx::{Options, import};

const U8: u64 = 2;
const I8: u64 = 3;
const I32: u64 = 6;

/// Numbers that differ.
fn numbers(count: usize) -> Vec<f64> {
    (0..count).map(|index| f64::from((index as f32 * 0.73).sin())).collect()
}

fn refusal(writer: Writer) -> String {
    match import(&writer.finish(), &Options::default()) {
        Ok(imported) => panic!("{}", imported.graph),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn near(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() < 1e-6, "element {index} is {got}, expected {expected}");
    }
}

fn einsum(equation: &str, shapes: &[&[usize]]) -> Writer {
    let names = ["a", "b", "c", "d"];
    let mut writer = Writer::default();
    for (name, shape) in names.iter().zip(shapes) {
        writer = writer.input(name, shape);
    }
    writer.call("Einsum", &names[..shapes.len()], &["y"], &[("equation", Value::Text(equation))]).output("y")
}

/// The sum over all letters, as the equation is defined: `output` has a letter for each axis of the result. A size of 1 repeats.
fn by_definition(terms: &[&str], output: &str, shapes: &[&[usize]], data: &[Vec<f64>]) -> Vec<f64> {
    let mut sizes: BTreeMap<char, usize> = BTreeMap::new();
    for (term, shape) in terms.iter().zip(shapes) {
        for (letter, &size) in term.chars().zip(*shape) {
            let known = sizes.entry(letter).or_insert(size);
            *known = size.max(*known);
        }
    }
    let letters: Vec<char> = sizes.keys().copied().collect();
    let mut result = vec![0.0; output.chars().map(|letter| sizes[&letter]).product()];
    let place = |term: &str, shape: &[usize], index: &[usize]| {
        term.chars().zip(shape).fold(0, |flat, (letter, &size)| {
            let at = index[letters.iter().position(|&other| other == letter).unwrap()];
            flat * size + if size == 1 { 0 } else { at }
        })
    };
    let dims: Vec<usize> = output.chars().map(|letter| sizes[&letter]).collect();
    let mut index = vec![0; letters.len()];
    for _ in 0..sizes.values().product() {
        let factors = terms.iter().zip(shapes).zip(data).map(|((term, shape), data)| data[place(term, shape, &index)]);
        result[place(output, &dims, &index)] += factors.product::<f64>();
        for axis in (0..index.len()).rev() {
            index[axis] += 1;
            if index[axis] < sizes[&letters[axis]] {
                break;
            }
            index[axis] = 0;
        }
    }
    result
}

/// An equation, the same with a letter for each axis and the result, and the shapes of the operands.
type Equation<'a> = (&'a str, &'a [&'a str], &'a str, &'a [&'a [usize]]);

#[test]
fn any_equation_of_einsum() {
    let cases: &[Equation] = &[
        ("ij->ji", &["ij"], "ji", &[&[2, 3]]),
        ("ij->", &["ij"], "", &[&[2, 3]]),
        ("ij->j", &["ij"], "j", &[&[2, 3]]),
        ("ba", &["ba"], "ab", &[&[2, 3]]),
        ("ii", &["ii"], "", &[&[4, 4]]),
        ("ii->i", &["ii"], "i", &[&[4, 4]]),
        ("ii->i", &["ii"], "i", &[&[1, 1]]),
        ("...ii->...i", &["abii"], "abi", &[&[2, 3, 4, 4]]),
        ("ijiji->ji", &["ijiji"], "ji", &[&[2, 3, 2, 3, 2]]),
        ("iji,jk->ik", &["iji", "jk"], "ik", &[&[2, 3, 2], &[3, 4]]),
        ("i,i", &["i", "i"], "", &[&[5], &[5]]),
        ("i,j->ij", &["i", "j"], "ij", &[&[2], &[3]]),
        ("i,j->ji", &["i", "j"], "ji", &[&[2], &[3]]),
        ("ij,jk", &["ij", "jk"], "ik", &[&[2, 3], &[3, 4]]),
        ("bij,bjk->bik", &["bij", "bjk"], "bik", &[&[2, 3, 4], &[2, 4, 5]]),
        ("bhqd,bhkd->bhqk", &["bhqd", "bhkd"], "bhqk", &[&[2, 2, 3, 4], &[2, 2, 5, 4]]),
        // Letters of one operand alone, and of none but the result's.
        ("ijk,kl->il", &["ijk", "kl"], "il", &[&[2, 3, 4], &[4, 5]]),
        ("ij,ij->i", &["ij", "ij"], "i", &[&[2, 3], &[2, 3]]),
        ("ij,ij->ij", &["ij", "ij"], "ij", &[&[2, 3], &[2, 3]]),
        ("ij,kl->", &["ij", "kl"], "", &[&[2, 3], &[2, 2]]),
        (",i->i", &["", "i"], "i", &[&[], &[3]]),
        // Dots repeat where one operand has fewer axes, or a size of 1.
        ("...ij,...jk->...ik", &["abij", "abjk"], "abik", &[&[2, 1, 3, 4], &[1, 5, 4, 2]]),
        ("...ij,...jk", &["abij", "bjk"], "abik", &[&[2, 3, 3, 4], &[3, 4, 2]]),
        ("i...,i...->...", &["iab", "ib"], "ab", &[&[2, 3, 4], &[2, 4]]),
        ("...,...", &["ab", "b"], "ab", &[&[2, 3], &[3]]),
        // Three and four operands.
        ("ij,jk,kl->il", &["ij", "jk", "kl"], "il", &[&[2, 3], &[3, 4], &[4, 2]]),
        ("ij,ik,il->jkl", &["ij", "ik", "il"], "jkl", &[&[2, 3], &[2, 4], &[2, 2]]),
        ("bi,ijk,bj->bk", &["bi", "ijk", "bj"], "bk", &[&[2, 3], &[3, 4, 5], &[2, 4]]),
        ("i,ij,jk,k", &["i", "ij", "jk", "k"], "", &[&[2], &[2, 3], &[3, 4], &[4]]),
        ("aB, Bc -> ca", &["aB", "Bc"], "ca", &[&[2, 3], &[3, 4]]),
    ];
    for &(equation, terms, output, shapes) in cases {
        let data: Vec<Vec<f64>> = shapes.iter().map(|shape| numbers(shape.iter().product())).collect();
        let named: Vec<(&str, &[f64])> = ["a", "b", "c", "d"].into_iter().zip(data.iter().map(Vec::as_slice)).collect();
        println!("{equation}");
        let results = evaluated(einsum(equation, shapes), &named);
        let expected = by_definition(terms, output, shapes, &data);
        near(&results[0].1, &expected);
    }
}

#[test]
fn equations_that_are_none() {
    let refused = |equation: &str, shapes: &[&[usize]], expected: &str| {
        let said = refusal(einsum(equation, shapes));
        assert_eq!(said, format!("Einsum at `y`: {expected} expected, got `{equation}`"));
    };
    let whole = "a result of different letters of the operands, and their dots";
    refused("ij->ik", &[&[2, 3]], whole);
    refused("ij->ii", &[&[2, 3]], whole);
    refused("...j->j", &[&[2, 3]], whole);
    refused("ij->i->j", &[&[2, 3]], whole);
    refused("ij,jk->ik", &[&[2, 3]], "an equation of 1 operands");
    refused("ij,jk->ik", &[&[2, 3], &[4, 5]], "equal sizes for each letter");
    refused("ii->i", &[&[2, 3]], "equal sizes for each letter");
    refused("ijk->i", &[&[2, 3]], "a letter for each axis of [2,3]");
    refused("i...jk->i", &[&[2, 3]], "a letter for each axis of [2,3]");
    refused("i1->i", &[&[2, 3]], "a letter for each axis of [2,3]");
    refused("......->", &[&[2, 3]], "a letter for each axis of [2,3]");
}

/// A signal of a length that is odd or even from the frequencies of its first half.
#[test]
fn a_real_signal_from_half_of_its_frequencies() {
    for (bins, length, stated) in [(4, 6, false), (4, 7, true), (4, 6, true), (4, 4, true), (3, 8, true)] {
        let data = numbers(bins * 2);
        let mut writer = Writer::default().input("x", &[1, bins, 2]).ints("axis", &[1]).ints("n", &[length as i64]);
        let attributes = [("inverse", Value::Int(1)), ("onesided", Value::Int(1))];
        writer = writer.call("DFT", &["x", if stated { "n" } else { "" }], &["y"], &attributes).output("y");
        let results = evaluated(writer, &[("x", &data)]);
        // All frequencies: those of the second half are the conjugates of those of the first.
        let part = |bin: usize, part: usize| if bin < bins { data[bin * 2 + part] } else { 0.0 };
        let expected: Vec<f64> = (0..length)
            .map(|at| {
                let term = |bin: usize| {
                    let own = bin.min(length - bin);
                    let sign = if own == bin { 1.0 } else { -1.0 };
                    let angle = 2.0 * PI * (bin * at) as f64 / length as f64;
                    // The first frequency and the one in the middle are real.
                    let is_real = own == 0 || 2 * own == length;
                    let imaginary = if is_real { 0.0 } else { sign * part(own, 1) };
                    part(own, 0) * angle.cos() - imaginary * angle.sin()
                };
                (0..length).map(term).sum::<f64>() / length as f64
            })
            .collect();
        assert_eq!(results[0].0, [1, length, 1]);
        near(&results[0].1, &expected);
    }
}

#[test]
fn frames_of_a_signal() {
    let data = numbers(10);
    let window = [0.5, 1.0, 2.0, 1.5];
    let writer = |attributes: &[(&str, Value)]| {
        Writer::default()
            .input("x", &[1, 10, 1])
            .input("w", &[4])
            .ints("step", &[3])
            .call("STFT", &["x", "step", "w"], &["y"], attributes)
            .output("y")
    };
    for (one_sided, bins) in [(1, 3), (0, 4)] {
        let results = evaluated(writer(&[("onesided", Value::Int(one_sided))]), &[("x", &data), ("w", &window)]);
        let mut expected = Vec::new();
        for frame in 0..3 {
            for bin in 0..bins {
                let angle = |at: usize| -2.0 * PI * (bin * at) as f64 / 4.0;
                let sum = |f: fn(f64) -> f64| -> f64 {
                    (0..4).map(|at| data[frame * 3 + at] * window[at] * f(angle(at))).sum()
                };
                expected.extend([sum(f64::cos), sum(f64::sin)]);
            }
        }
        assert_eq!(results[0].0, [1, 3, bins, 2]);
        near(&results[0].1, &expected);
    }
    let misfit = |x: &[usize], frame: i64| {
        let writer = Writer::default().input("x", x).input("w", &[4]).ints("step", &[3]).ints("n", &[frame]);
        refusal(writer.node("STFT", &["x", "step", "w", "n"], "y").output("y"))
    };
    assert_eq!(misfit(&[10], 4), "STFT at `y`: a signal [batch, n, 1 or 2] expected, got [10]");
    assert_eq!(misfit(&[1, 10, 1], 11), "STFT at `y`: a frame_length from 1 to 10 expected, got 11");
    assert_eq!(misfit(&[1, 10, 1], 5), "STFT at `y`: a window of frame_length elements, at most 10, expected, got 5");
    assert_eq!(misfit(&[1, 10, 2], 4), "STFT at `y`: a real signal expected where onesided is set");
}

#[test]
fn columns_that_are_no_image() {
    let said = |x: &[usize], image: &[i64], attributes: &[(&str, Value)]| {
        let writer = Writer::default().input("x", x).ints("image", image).ints("block", &[2, 2]);
        refusal(writer.call("Col2Im", &["x", "image", "block"], &["y"], attributes).output("y"))
    };
    let misfit = "Col2Im at `y`: columns [n, c * block, places] of an image expected, got";
    assert_eq!(said(&[1, 4, 9], &[3, 3], &[]), format!("{misfit} [1,4,9], image [3, 3] and block [2, 2]"));
    assert_eq!(said(&[1, 5, 4], &[3, 3], &[]), format!("{misfit} [1,5,4], image [3, 3] and block [2, 2]"));
    assert_eq!(said(&[1, 4, 4], &[3, 0], &[]), format!("{misfit} [1,4,4], image [3, 0] and block [2, 2]"));
    let strides = [("strides", Value::Ints(&[0, 1]))];
    assert_eq!(said(&[1, 4, 4], &[3, 3], &strides), "Col2Im at `y`: 2 strides of at least 1 expected");
}

#[test]
fn what_a_condition_picks() {
    let bools = |name: &str, values: &[u8]| tensor(name, 9, &[values.len()]).bytes(9, values);
    let writer = |condition: &[u8], attributes: &[(&str, Value)]| {
        Writer::default()
            .input("x", &[3, 2])
            .tensor(bools("c", condition))
            .call("Compress", &["x", "c"], &["y"], attributes)
            .output("y")
    };
    let x = &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0][..];
    let rows = evaluated(writer(&[0, 1, 1], &[("axis", Value::Int(0))]), &[("x", x)]);
    assert_eq!(rows, [(vec![2, 2], vec![3.0, 4.0, 5.0, 6.0])]);
    let elements = evaluated(writer(&[0, 1, 0, 0, 1], &[]), &[("x", x)]);
    assert_eq!(elements, [(vec![2], vec![2.0, 5.0])]);
    let said = refusal(writer(&[0, 1, 1], &[("axis", Value::Int(1))]));
    assert_eq!(said, "Compress at `y`: a condition of one axis of at most 2 expected, got [3]");
    let open = Writer::default().input("x", &[3]).typed_input("c", 9, &[Size::Is(3)]);
    let said = refusal(open.node("Compress", &["x", "c"], "y").output("y"));
    assert!(said.starts_with("Compress at `y`: how many elements it picks depends on the input"), "{said}");
}

fn bytes(writer: Writer, element: u64, name: &str, dims: &[usize], values: &[i8]) -> Writer {
    let raw: Vec<u8> = values.iter().map(|&value| value as u8).collect();
    writer.tensor(tensor(name, element, dims).bytes(9, &raw))
}

/// Rows of the first operand, columns of the second and rows of the result have scales and zero points of their own.
#[test]
fn a_product_of_bytes_with_scales_of_rows_and_columns() {
    let mut writer = Writer::default()
        .typed_input("a", I8, &[Size::Is(2), Size::Is(3)])
        .typed_input("b", I8, &[Size::Is(3), Size::Is(2)])
        .floats("sa", &[2], &[0.5, 0.25])
        .floats("sb", &[2], &[0.5, 2.0])
        .floats("sy", &[2], &[0.5, 4.0]);
    writer = bytes(writer, I8, "za", &[2], &[1, -2]);
    writer = bytes(writer, I8, "zb", &[2], &[3, 0]);
    writer = bytes(writer, U8, "zy", &[2], &[10, 20]);
    let writer = writer.node("QLinearMatMul", &["a", "sa", "za", "b", "sb", "zb", "sy", "zy"], "y").output("y");
    let (a, b) = ([1.0, 2.0, -3.0, 4.0, 5.0, 100.0], [7.0, -8.0, 9.0, 1.0, 2.0, 3.0]);
    let results = evaluated(writer, &[("a", &a), ("b", &b)]);
    // (0 1 -4; 6 7 102) times (4 -8; 6 1; -1 3), times (0.5 2; 0.03125 0.125), plus 10 and 20.
    let product = [[10.0, -11.0], [-36.0, 265.0]];
    let factor = [[0.5, 2.0], [0.03125, 0.125]];
    let value = |i: usize, j: usize| {
        let scaled: f64 = product[i][j] * factor[i][j];
        (scaled.round_ties_even() + [10.0, 20.0][i]).clamp(0.0, 255.0)
    };
    near(&unsigned(&results[0].1), &[value(0, 0), value(0, 1), value(1, 0), value(1, 1)]);
}

/// Graphs hold bytes as signed ones of the same bits.
fn unsigned(values: &[f64]) -> Vec<f64> {
    values.iter().map(|&value| if value < 0.0 { value + 256.0 } else { value }).collect()
}

/// The weight has a scale and a zero point per channel of the result, and there is a bias of integers.
#[test]
fn a_convolution_of_bytes_with_scales_of_channels() {
    let mut writer = Writer::default()
        .typed_input("x", I8, &[Size::Is(1), Size::Is(1), Size::Is(4)])
        .floats("sx", &[], &[0.5])
        .floats("sw", &[2], &[0.5, 2.0])
        .floats("sy", &[], &[2.0]);
    writer = bytes(writer, I8, "zx", &[], &[2]);
    writer = bytes(writer, I8, "w", &[2, 1, 2], &[1, 3, -2, 5]);
    writer = bytes(writer, I8, "zw", &[2], &[1, 0]);
    writer = bytes(writer, I8, "zy", &[], &[-7]);
    let bias: Vec<u8> = [100_i32, -30].iter().flat_map(|value| value.to_le_bytes()).collect();
    let writer = writer
        .tensor(tensor("bias", I32, &[2]).bytes(9, &bias))
        .call(
            "QLinearConv",
            &["x", "sx", "zx", "w", "sw", "zw", "sy", "zy", "bias"],
            &["y"],
            &[("pads", Value::Ints(&[1, 0]))],
        )
        .output("y");
    let results = evaluated(writer, &[("x", &[3.0, -4.0, 10.0, 60.0])]);
    let x = [0.0, 1.0, -6.0, 8.0, 58.0];
    let weights = [[0.0, 2.0], [-2.0, 5.0]];
    let mut expected = Vec::new();
    for (channel, weight) in weights.iter().enumerate() {
        for place in 0..4 {
            let sum = x[place] * weight[0] + x[place + 1] * weight[1] + [100.0, -30.0][channel];
            let scaled: f64 = sum * 0.5 * [0.5, 2.0][channel] / 2.0;
            expected.push((scaled.round_ties_even() - 7.0).clamp(-128.0, 127.0));
        }
    }
    assert_eq!(results[0].0, [1, 2, 4]);
    near(&results[0].1, &expected);
}

/// What reads the sums as floats gets them; zero points are per row and per column.
#[test]
fn sums_of_bytes_with_zero_points_of_rows_and_columns() {
    let mut writer = Writer::default().typed_input("a", I8, &[Size::Is(2), Size::Is(2)]).typed_input(
        "b",
        I8,
        &[Size::Is(2), Size::Is(3)],
    );
    writer = bytes(writer, I8, "za", &[2], &[1, 2]);
    writer = bytes(writer, I8, "zb", &[3], &[0, 1, -1]);
    let writer = writer
        .node("MatMulInteger", &["a", "b", "za", "zb"], "s")
        .call("Cast", &["s"], &["y"], &[("to", Value::Int(F32 as i64))])
        .output("y");
    let results = evaluated(writer, &[("a", &[1.0, 2.0, 3.0, 4.0]), ("b", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])]);
    // (0 1; 1 2) times (1 1 4; 4 4 7)
    assert_eq!(results, [(vec![2, 3], vec![4.0, 4.0, 7.0, 9.0, 9.0, 18.0])]);
    let said = |zero: &[usize]| {
        let mut writer = Writer::default().typed_input("a", I8, &[Size::Is(2), Size::Is(2)]).typed_input(
            "b",
            I8,
            &[Size::Is(2), Size::Is(3)],
        );
        writer = bytes(writer, I8, "z", zero, &vec![1; zero.iter().product()]);
        refusal(writer.node("MatMulInteger", &["a", "b", "z"], "s").output("s"))
    };
    assert_eq!(
        said(&[1, 1, 2, 2]),
        "MatMulInteger at `s`: a zero point, or one per index of axis 0 of [2,2], expected, got [1,1,2,2]"
    );
}

/// Sizes whose product no number holds, behind an axis of size 0.
#[test]
fn empty_operands_of_great_sizes() {
    let great = 1_usize << 40;
    for (equation, shape) in [("eij,eij->e", vec![0, great, great]), ("eii->e", vec![0, great, great])] {
        let shapes = vec![&shape[..]; equation.matches(',').count() + 1];
        // What comes of it does not matter.
        let _ = import(&einsum(equation, &shapes).finish(), &Options::default());
    }
    let writer = Writer::default().input("x", &[0, great, great]).input("w", &[great, 1, 4]);
    let _ = import(&writer.node("CausalConvWithState", &["x", "w"], "y").output("y").finish(), &Options::default());
    let writer = Writer::default().input("x", &[great, great, 0]).input("w", &[great, 1, 4]);
    let _ = import(&writer.node("CausalConvWithState", &["x", "w"], "y").output("y").finish(), &Options::default());
    let writer = Writer::default().input("x", &[0, great, great]).ints("image", &[3, 3]).ints("block", &[1, 4]);
    let _ = import(&writer.node("Col2Im", &["x", "image", "block"], "y").output("y").finish(), &Options::default());
    let qkv = Writer::default().input("q", &[1, 0, great]).input("k", &[1, 0, great]).input("v", &[1, 0, great]);
    let heads = ("q_num_heads", Value::Int(great as i64));
    let attributes = [heads, ("kv_num_heads", Value::Int(1)), ("update_rule", Value::Text("linear"))];
    let writer = qkv.call("LinearAttention", &["q", "k", "v"], &["y"], &attributes).output("y");
    let _ = import(&writer.finish(), &Options::default());
}

#[test]
fn states_that_do_not_fit() {
    let convolution = |x: &[usize], w: &[usize], past: &[usize], activation: &str| {
        let writer = Writer::default().input("x", x).input("w", w).input("past", past);
        let attributes = [("activation", Value::Text(activation))];
        refusal(writer.call("CausalConvWithState", &["x", "w", "", "past"], &["y"], &attributes).output("y"))
    };
    let at = "CausalConvWithState at `y`:";
    assert_eq!(
        convolution(&[2, 3, 5], &[3, 2, 4], &[2, 3, 3], "none"),
        format!("{at} x [n, c, length] and a weight [c, 1, k] expected, got [2,3,5] and [3,2,4]")
    );
    assert_eq!(
        convolution(&[2, 3, 5], &[4, 1, 4], &[2, 3, 3], "none"),
        format!("{at} a weight [3, 1, k] expected, got [4,1,4]")
    );
    assert_eq!(
        convolution(&[2, 3, 5], &[3, 1, 4], &[2, 3, 4], "none"),
        format!("{at} a state [2,3,3] expected, got [2,3,4]")
    );
    assert_eq!(
        convolution(&[2, 3, 5], &[3, 1, 4], &[2, 3, 3], "gelu"),
        format!("{at} activation of none, silu, swish expected, got `gelu`")
    );
    let attention = |steps: usize, width: usize, rule: &str, heads: i64| {
        let writer = Writer::default().input("q", &[1, steps, 8]).input("k", &[1, steps, width]);
        let writer = writer.input("v", &[1, steps, 4]).input("beta", &[1, steps, 3]);
        let inputs = ["q", "k", "v", "", "", "beta"];
        let attributes =
            [("update_rule", Value::Text(rule)), ("q_num_heads", Value::Int(4)), ("kv_num_heads", Value::Int(heads))];
        refusal(writer.call("LinearAttention", &inputs, &["y"], &attributes).output("y"))
    };
    let at = "LinearAttention at `y`:";
    assert_eq!(
        attention(2, 4, "linear", 2),
        format!(
            "{at} a decay where update_rule is gated and a beta where it is delta expected, got linear with none and a beta"
        )
    );
    assert_eq!(
        attention(2, 4, "delta", 3),
        format!(
            "{at} q, k and v [batch, steps, heads * size] expected, got [1,2,8], [1,2,4] and [1,2,4] of 4 and 3 heads"
        )
    );
    assert_eq!(
        attention(2, 4, "delta", 2),
        format!("{at} a beta per head, or one, [1, steps, 2] expected, got [1,2,3]")
    );
    let said = attention(129, 4, "delta", 2);
    assert!(said.contains("it takes 129 steps, and at most 128 are unrolled"), "{said}");
    let cache = |update: &[usize], starts: &[i64], mode: &str| {
        let writer = Writer::default().input("cache", &[2, 4, 3]).input("u", update).ints("at", starts);
        let attributes = [("mode", Value::Text(mode))];
        refusal(writer.call("TensorScatter", &["cache", "u", "at"], &["y"], &attributes).output("y"))
    };
    let at = "TensorScatter at `y`:";
    assert_eq!(
        cache(&[2, 5, 3], &[0, 0], "linear"),
        format!("{at} rows within the cache [2,4,3] on axis 1 expected, got [2,5,3]")
    );
    assert_eq!(cache(&[2, 2, 3], &[0, 3], "linear"), format!("{at} 2 write_indices below 3 expected, got [0, 3]"));
    assert_eq!(cache(&[2, 2, 3], &[0, 4], "circular"), format!("{at} 2 write_indices below 4 expected, got [0, 4]"));
}

#[test]
fn grids_that_do_not_fit() {
    let grid = |matrices: &[usize], size: &[i64]| {
        let writer = Writer::default().input("m", matrices).ints("size", size);
        refusal(writer.call("AffineGrid", &["m", "size"], &["y"], &[("align_corners", Value::Int(1))]).output("y"))
    };
    let misfit = "AffineGrid at `y`: a size [n, c, ..] of 2 or 3 axes and matrices [n, axes, axes + 1] expected, got";
    assert_eq!(grid(&[2, 3, 4], &[2, 1, 5, 6]), format!("{misfit} [2, 1, 5, 6] and [2,3,4]"));
    assert_eq!(grid(&[2, 2, 3], &[3, 1, 5, 6]), format!("{misfit} [3, 1, 5, 6] and [2,2,3]"));
    assert_eq!(grid(&[2, 2, 3], &[2, 1, 5, 0]), format!("{misfit} [2, 1, 5, 0] and [2,2,3]"));
    assert_eq!(grid(&[2, 1, 2], &[2, 1, 5]), format!("{misfit} [2, 1, 5] and [2,1,2]"));
    let said = grid(&[2, 2, 3], &[2, 1, 5, 1]);
    assert!(said.starts_with("AffineGrid at `y`: a single place has no corners to align"), "{said}");
}

#[test]
fn determinants_of_small_matrices() {
    for size in 1..=5 {
        let data = numbers(2 * size * size);
        let writer = Writer::default().input("x", &[2, size, size]).node("Det", &["x"], "y").output("y");
        if size == 5 {
            let said = refusal(writer);
            assert!(said.contains("determinants of 5 rows are not supported"), "{said}");
            continue;
        }
        // By elimination.
        let expected: Vec<f64> = data
            .chunks(size * size)
            .map(|matrix| {
                let mut rows: Vec<Vec<f64>> = matrix.chunks(size).map(<[f64]>::to_vec).collect();
                let mut product = 1.0;
                for col in 0..size {
                    let pivot = (col..size).max_by(|&a, &b| rows[a][col].abs().total_cmp(&rows[b][col].abs())).unwrap();
                    product *= if pivot == col { rows[pivot][col] } else { -rows[pivot][col] };
                    rows.swap(pivot, col);
                    for row in col + 1..size {
                        let factor = rows[row][col] / rows[col][col];
                        (0..size).for_each(|at| rows[row][at] -= factor * rows[col][at]);
                    }
                }
                product
            })
            .collect();
        near(&evaluated(writer, &[("x", &data)])[0].1, &expected);
    }
    let said = refusal(Writer::default().input("x", &[2, 3]).node("Det", &["x"], "y").output("y"));
    assert_eq!(said, "Det at `y`: square matrices expected, got [2,3]");
}

/// ONNX Runtime's optimiser writes a convolution or a `Gemm` with what follows it as one operator.
#[test]
fn fused_operators_give_what_their_parts_do() {
    let activations: [(&str, &[(&str, f32)]); 6] = [
        ("Relu", &[]),
        ("Tanh", &[]),
        ("Sigmoid", &[]),
        ("LeakyRelu", &[("alpha", 0.25)]),
        ("HardSigmoid", &[("alpha", 0.3), ("beta", 0.4)]),
        ("HardSwish", &[]),
    ];
    let (x, z) = (numbers(2 * 3 * 5 * 4), numbers(2 * 4 * 5 * 4));
    let pads = || ("pads", Value::Ints(&[1, 1, 1, 1]));
    let image = || {
        Writer::default()
            .input("x", &[2, 3, 5, 4])
            .input("z", &[2, 4, 5, 4])
            .weight("w", &[4, 3, 3, 3])
            .weight("b", &[4])
    };
    let data = [("x", &x[..]), ("z", &z[..])];
    for (name, parameters) in activations {
        let attributes: Vec<(&str, Value)> =
            parameters.iter().map(|&(name, value)| (name, Value::Float(value))).collect();
        let values: Vec<f32> = parameters.iter().map(|&(_, value)| value).collect();
        let parts = image()
            .call("Conv", &["x", "w", "b"], &["c"], &[pads()])
            .node("Add", &["c", "z"], "sum")
            .call(name, &["sum"], &["y"], &attributes)
            .output("y");
        let fused = [pads(), ("activation", Value::Text(name)), ("activation_params", Value::Floats(&values))];
        let whole =
            image().domain_call("com.microsoft", "FusedConv", &["x", "w", "b", "z"], &["y"], &fused).output("y");
        let (got, expected) = (evaluated(whole, &data), evaluated(parts, &data));
        assert_eq!(got[0].0, expected[0].0, "{name}");
        near(&got[0].1, &expected[0].1);
    }
    let bounded = [("activation", Value::Text("Clip")), ("activation_params", Value::Floats(&[-0.5, 0.5]))];
    let whole = image().domain_call("com.microsoft", "FusedConv", &["x", "w"], &["y"], &bounded).output("y");
    let parts = image().node("Conv", &["x", "w"], "c").scalar("least", -0.5).scalar("most", 0.5);
    let parts = parts.node("Clip", &["c", "least", "most"], "y").output("y");
    near(&evaluated(whole, &data)[0].1, &evaluated(parts, &data)[0].1);

    let matrix = || Writer::default().input("x", &[3, 5]).weight("w", &[5, 4]).weight("b", &[4]);
    let fused = [("activation", Value::Text("LeakyRelu")), ("activation_alpha", Value::Float(0.25))];
    let whole = matrix().domain_call("com.microsoft", "FusedGemm", &["x", "w", "b"], &["y"], &fused).output("y");
    let parts = matrix().node("Gemm", &["x", "w", "b"], "g");
    let parts = parts.call("LeakyRelu", &["g"], &["y"], &[("alpha", Value::Float(0.25))]).output("y");
    near(&evaluated(whole, &[("x", &x[..15])])[0].1, &evaluated(parts, &[("x", &x[..15])])[0].1);

    let unknown = [("activation", Value::Text("Strange"))];
    let said = refusal(image().domain_call("com.microsoft", "FusedConv", &["x", "w"], &["y"], &unknown).output("y"));
    assert!(said.contains("its activation `Strange` has no counterpart"), "{said}");
}
