//! Philox: published vectors, and every lane against one block at a time.

use deuteron_graph::Dtype;

use super::{Buffer, TILE, WIDTHS, flat_program, per_row, rows_program, try_run, writes};
use crate::cpu::program::{Dst, Inst, Pass, Src};
use crate::cpu::simd::philox::block_words_of_one;
use crate::cpu::simd::{Isa, Launch, Scratch, run};

/// Known answers of the authors' Random123 distribution (`philox4x32 10`).
#[test]
fn one_block_gives_the_published_words() {
    let ones = u32::MAX;
    assert_eq!(block_words_of_one([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    assert_eq!(block_words_of_one([ones; 2], [ones; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    assert_eq!(
        block_words_of_one([0xa409_3822, 0x299f_31d0], [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
        [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
    );
}

fn kept(seed: i32, offset: u32, threshold: u32, element: u64) -> f32 {
    let block = element / 4;
    let words = block_words_of_one([seed as u32, offset], [block as u32, (block >> 32) as u32, 0, 0]);
    f32::from(u8::from(words[(element % 4) as usize] >= threshold))
}

#[test]
fn rows_of_any_width_follow_the_element_number() {
    for isa in Isa::available() {
        for cols in WIDTHS {
            for (seed, offset, threshold) in [(42, 3, 1 << 30), (-7, 0, 0), (0, u32::MAX, u32::MAX)] {
                let rows = 3;
                let row = vec![Inst::Load { dst: Dst::Scalar(0), arg: 0 }];
                let keep = Inst::Keep { dst: TILE, seed: Src::Scalar(0), offset, threshold };
                let strip = vec![keep, Inst::Store { arg: 1, a: Src::Tile(0) }];
                let args = vec![per_row(Dtype::I32, false), writes(Dtype::F32)];
                let program = rows_program(cols, args, vec![Pass { row, strip }]);
                let mut seeds = Buffer::of_ints(&[seed], 0);
                let mut output = Buffer::new(4 * rows * cols, 4);
                try_run(isa, &program, &[seeds.bind(&[]), output.rows(rows, cols)], &[], rows).expect("no gather");
                output.assert_red_zones();
                let expected: Vec<f32> =
                    (0..(rows * cols) as u64).map(|element| kept(seed, offset, threshold, element)).collect();
                assert_eq!(output.floats(), expected, "{cols} columns on {}", isa.name());
            }
        }
    }
}

/// Blocks whose low counter word wraps within a vector. The argument's address is that of element 0, far before the
/// buffer: only the span's elements are touched.
#[test]
fn the_counter_carries_into_its_high_word() {
    let keep = Inst::Keep { dst: TILE, seed: Src::ConstInt(9), offset: 5, threshold: 1 << 31 };
    let program = flat_program(vec![writes(Dtype::Bool)], vec![keep, Inst::Store { arg: 0, a: Src::Tile(0) }]);
    for isa in Isa::available() {
        for before in [1usize, 22, 64, 333] {
            let start = (1usize << 34) - before;
            let length = 700;
            let mut output = Buffer::new(length, 0);
            let mut bound = output.bind(&[]);
            bound.base = bound.base.wrapping_sub(start);
            let launch = Launch { program: &program, args: &[bound], axes: &[], window: None };
            let mut scratch = Scratch::for_program(&program);
            // SAFETY: elements `start .. start + length` from that base are the buffer.
            unsafe { run(isa, &launch, start..start + length, &mut scratch, &mut []) }.expect("no gather");
            let expected: Vec<u8> = (0..length).map(|i| kept(9, 5, 1 << 31, (start + i) as u64) as u8).collect();
            assert_eq!(output.content(), expected, "{before} before the wrap on {}", isa.name());
        }
    }
}
