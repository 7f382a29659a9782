//! Loads and stores of every dtype, over every pattern or a dense sweep.

use deuteron_graph::Dtype;
use half::{bf16, f16};

use super::{Buffer, TILE, WIDTHS, assert_same, flat_program, mixed, reads, run_all, scramble, writes};
use crate::cpu::program::{Inst, Src};
use crate::cpu::simd::{Isa, copy, narrow, widen};

/// Elements at `bytes`, as lanes.
fn load(isa: Isa, dtype: Dtype, bytes: &[u8], misalign: usize) -> Vec<f32> {
    let length = bytes.len() / dtype.bytes();
    let insts = vec![Inst::Load { dst: TILE, arg: 0 }, Inst::Store { arg: 1, a: Src::Tile(0) }];
    let program = flat_program(vec![reads(dtype), writes(Dtype::F32)], insts);
    let mut input = Buffer::of_bytes(bytes, misalign);
    let mut output = Buffer::new(4 * length, misalign);
    run_all(isa, &program, &[input.bind(&[]), output.bind(&[])], length);
    output.assert_red_zones();
    output.floats()
}

/// Lanes as elements.
fn stored(isa: Isa, dtype: Dtype, lanes: &[f32], misalign: usize, streaming: bool) -> Vec<u8> {
    let insts = vec![Inst::Store { arg: 1, a: Src::Arg(0) }];
    let program = flat_program(vec![reads(Dtype::F32), writes(dtype)], insts);
    let mut input = Buffer::of(lanes, 4);
    let mut output = Buffer::new(dtype.bytes() * lanes.len(), misalign);
    let mut target = output.bind(&[]);
    target.streaming = streaming;
    run_all(isa, &program, &[input.bind(&[]), target], lanes.len());
    output.assert_red_zones();
    output.content().to_vec()
}

fn all_halves() -> Vec<u8> {
    (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect()
}

#[test]
fn every_16_bit_pattern_widens_exactly() {
    for isa in Isa::available() {
        let expected: Vec<f32> = (0..=u16::MAX).map(|x| f16::from_bits(x).to_f32()).collect();
        assert_same(&load(isa, Dtype::F16, &all_halves(), 0), &expected, isa.name());
        let expected: Vec<f32> = (0..=u16::MAX).map(|x| bf16::from_bits(x).to_f32()).collect();
        assert_same(&load(isa, Dtype::Bf16, &all_halves(), 0), &expected, isa.name());
    }
}

#[test]
fn every_byte_loads() {
    let bytes: Vec<u8> = (0..=255).collect();
    for isa in Isa::available() {
        let expected: Vec<f32> = bytes.iter().map(|&x| f32::from(x as i8)).collect();
        assert_same(&load(isa, Dtype::I8, &bytes, 0), &expected, isa.name());
        assert_same(&load(isa, Dtype::Bool, &[0, 1, 1, 0, 1], 0), &[0.0, 1.0, 1.0, 0.0, 1.0], isa.name());
    }
}

/// A sweep of all floats, the ties of every format, and the ends of their ranges.
fn hard_floats() -> Vec<f32> {
    let mut floats: Vec<f32> = (0..=u32::MAX).step_by(4099).map(f32::from_bits).collect();
    floats.extend((0..=u32::MAX).step_by(1 << 12).map(f32::from_bits)); // ties of f16, bf16 and f8e4m3
    floats.extend((-300..300).flat_map(|i| [i as f32, i as f32 + 0.5, i as f32 * 0.51]));
    floats.extend([448.0, 464.0, 465.0, 480.0, 65504.0, 65519.9, 65520.0, -65520.0, 1.0 / 1024.0, 3.0 / 1024.0]);
    floats
}

/// The nearest finite value of the format by search; ties to the even code.
fn nearest_eight_bit_float(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let size = f64::from(x.abs()).min(448.0);
    let value = |code: u8| {
        let (exponent, fraction) = (i32::from(code >> 3), f64::from(code & 7));
        if exponent == 0 {
            fraction * f64::powi(2.0, -9)
        } else {
            (1.0 + fraction / 8.0) * f64::powi(2.0, exponent - 7)
        }
    };
    let code = (0..0x7fu8)
        .min_by(|&a, &b| {
            let (near, far) = ((value(a) - size).abs(), (value(b) - size).abs());
            near.total_cmp(&far).then((a & 1).cmp(&(b & 1)))
        })
        .expect("the range is not empty");
    sign | code
}

#[test]
fn floats_round_to_nearest_even() {
    let floats = hard_floats();
    for isa in Isa::available() {
        let halves =
            |bytes: Vec<u8>| -> Vec<u16> { bytes.chunks_exact(2).map(|x| u16::from_ne_bytes([x[0], x[1]])).collect() };
        let got = halves(stored(isa, Dtype::F16, &floats, 0, false));
        for (x, got) in floats.iter().zip(got) {
            assert_eq!(got, f16::from_f32(*x).to_bits(), "{x:e} to f16 on {}", isa.name());
        }
        let got = halves(stored(isa, Dtype::Bf16, &floats, 0, false));
        for (x, got) in floats.iter().zip(got) {
            assert_eq!(got, bf16::from_f32(*x).to_bits(), "{x:e} to bf16 on {}", isa.name());
        }
        for (x, got) in floats.iter().zip(stored(isa, Dtype::I8, &floats, 0, false)) {
            assert_eq!(got as i8, x.round_ties_even() as i8, "{x:e} to i8 on {}", isa.name());
        }
        for (x, got) in floats.iter().zip(stored(isa, Dtype::Bool, &floats, 0, false)) {
            assert_eq!(got, u8::from(*x != 0.0), "{x:e} to bool on {}", isa.name());
        }
    }
}

#[test]
fn eight_bit_floats_round_to_nearest_even() {
    let floats: Vec<f32> = hard_floats().into_iter().step_by(5).collect();
    let expected: Vec<u8> = floats.iter().map(|&x| nearest_eight_bit_float(x)).collect();
    for isa in Isa::available() {
        for ((x, got), expected) in floats.iter().zip(stored(isa, Dtype::F8e4m3, &floats, 0, false)).zip(&expected) {
            assert_eq!(got, *expected, "{x:e} to f8e4m3 on {}", isa.name());
        }
    }
}

#[test]
fn words_pass_unchanged() {
    let words: Vec<f32> = (0..5000).map(|i| f32::from_bits(scramble(i))).collect();
    let bits = |floats: &[f32]| -> Vec<u8> { floats.iter().flat_map(|x| x.to_ne_bytes()).collect() };
    for isa in Isa::available() {
        for dtype in [Dtype::F32, Dtype::I32] {
            let loaded = load(isa, dtype, &bits(&words), 0);
            assert_eq!(bits(&loaded), bits(&words), "{dtype} on {}", isa.name());
            assert_eq!(stored(isa, dtype, &words, 0, true), bits(&words), "{dtype} on {}", isa.name());
        }
    }
}

#[test]
fn every_width_alignment_and_kind_of_store_agree() {
    for isa in Isa::available() {
        for dtype in Dtype::ALL {
            for width in WIDTHS {
                let lanes = mixed(width, 7);
                let expected = stored(Isa::available()[Isa::available().len() - 1], dtype, &lanes, 0, false);
                for misalign in [0, 1, 4, 32, 60] {
                    for streaming in [false, true] {
                        let got = stored(isa, dtype, &lanes, misalign, streaming);
                        assert_eq!(got, expected, "{dtype} x {width} at {misalign}, {streaming}, {}", isa.name());
                    }
                }
            }
        }
    }
}

#[test]
fn every_width_and_alignment_of_a_load_agree() {
    for isa in Isa::available() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8, Dtype::I32, Dtype::Bool] {
            let range = if dtype == Dtype::Bool { 2 } else { 256 };
            for width in WIDTHS {
                let bytes: Vec<u8> = (0..width * dtype.bytes()).map(|i| (scramble(i as u32) % range) as u8).collect();
                let last = Isa::available()[Isa::available().len() - 1];
                let expected = load(last, dtype, &bytes, 0);
                for misalign in [0, 1, 2, 4, 60] {
                    let what = format!("{dtype} x {width} at {misalign} on {}", isa.name());
                    assert_same(&load(isa, dtype, &bytes, misalign), &expected, &what);
                }
            }
        }
    }
}

#[test]
fn slices_copy_and_convert() {
    for isa in Isa::available() {
        for width in WIDTHS {
            let from = mixed(width + 1, 3);
            for (first, streaming) in [(0, false), (0, true), (1, true)] {
                let mut to = vec![0.0; width + 1];
                copy(isa, &mut to[first..], &from[first..], streaming);
                assert_same(&to[first..], &from[first..], isa.name());
            }
            let mut bytes = vec![0; 2 * from.len()];
            let mut back = vec![0.0; from.len()];
            narrow(isa, Dtype::F16, &from, &mut bytes);
            widen(isa, Dtype::F16, &bytes, &mut back);
            let expected: Vec<f32> = from.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
            assert_same(&back, &expected, isa.name());
            narrow(isa, Dtype::Bf16, &from, &mut bytes);
            widen(isa, Dtype::Bf16, &bytes, &mut back);
            let expected: Vec<f32> = from.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
            assert_same(&back, &expected, isa.name());
        }
    }
}
