//! Tests of the tile machine, on every instruction set of this CPU, against models of one element at a time.

#[cfg(target_arch = "x86_64")]
mod baseline;
mod formats;
mod guard;
mod instructions;
mod math;
mod random;
mod reductions;
mod rows;

use deuteron_graph::Dtype;

use super::{Axis, BoundArg, Dim, Fault, Isa, Launch, MAX_LEADING, Scratch, run};
use crate::cpu::program::{Access, ArgSpec, Dst, Inst, Pass, Src, TileProgram};

/// Widths around every boundary: vectors of 4, 8 and 16, the 64 lanes of a reduction, strips of 1024.
pub const WIDTHS: [usize; 17] = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 768, 1023, 1024, 1025, 1500, 4096];

/// Bytes that must not change around a buffer.
const RED_ZONE: usize = 128;
const CANARY: u8 = 0xA5;

/// Elements between two red zones, at a chosen distance from a multiple of 64 bytes.
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Buffer {
    pub fn new(length: usize, misalign: usize) -> Buffer {
        let mut bytes = vec![CANARY; length + 2 * RED_ZONE + 128];
        let start = bytes.as_ptr().align_offset(64) + RED_ZONE + misalign;
        bytes[start..start + length].fill(0);
        Buffer { bytes, start, length }
    }

    pub fn of(elements: &[f32], misalign: usize) -> Buffer {
        let mut buffer = Buffer::new(4 * elements.len(), misalign);
        for (at, x) in elements.iter().enumerate() {
            buffer.content_mut()[4 * at..4 * at + 4].copy_from_slice(&x.to_ne_bytes());
        }
        buffer
    }

    pub fn of_ints(elements: &[i32], misalign: usize) -> Buffer {
        let floats: Vec<f32> = elements.iter().map(|&x| f32::from_bits(x as u32)).collect();
        Buffer::of(&floats, misalign)
    }

    pub fn of_bytes(content: &[u8], misalign: usize) -> Buffer {
        let mut buffer = Buffer::new(content.len(), misalign);
        buffer.content_mut().copy_from_slice(content);
        buffer
    }

    pub fn content(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.length]
    }

    pub fn content_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }

    pub fn floats(&self) -> Vec<f32> {
        self.content().chunks_exact(4).map(|x| f32::from_ne_bytes(x.try_into().expect("4 bytes"))).collect()
    }

    pub fn bits(&self) -> Vec<u32> {
        self.floats().into_iter().map(f32::to_bits).collect()
    }

    /// Binds `rows` rows that are `stride` elements apart.
    pub fn rows(&mut self, rows: usize, stride: usize) -> BoundArg {
        self.bind(&[Dim { size: rows, stride }])
    }

    pub fn bind(&mut self, leading: &[Dim]) -> BoundArg {
        let mut dims = [Dim { size: 1, stride: 0 }; MAX_LEADING];
        dims[..leading.len()].copy_from_slice(leading);
        let base = self.content_mut().as_mut_ptr();
        BoundArg { base, dims, rank: leading.len(), table_rows: 0, streaming: false }
    }

    pub fn assert_red_zones(&self) {
        let outside = self.bytes[..self.start].iter().chain(&self.bytes[self.start + self.length..]);
        assert!(outside.clone().all(|&byte| byte == CANARY), "a red zone was written");
    }
}

pub fn reads(dtype: Dtype) -> ArgSpec {
    ArgSpec { dtype, access: Access::Row, written: false }
}

pub fn writes(dtype: Dtype) -> ArgSpec {
    ArgSpec { dtype, access: Access::Row, written: true }
}

pub fn per_row(dtype: Dtype, written: bool) -> ArgSpec {
    ArgSpec { dtype, access: Access::PerRow, written }
}

/// A program with room for 4 tiles, 2 kept rows and 8 scalars.
pub fn rows_program(cols: usize, args: Vec<ArgSpec>, passes: Vec<Pass>) -> TileProgram {
    TileProgram { cols, flat: false, args, tiles: 4, kept: 2, scalars: 8, partials: vec![], axes: 0, passes }
}

/// A flat program of one sweep.
pub fn flat_program(args: Vec<ArgSpec>, strip: Vec<Inst>) -> TileProgram {
    let passes = vec![Pass { row: vec![], strip }];
    TileProgram { cols: 0, flat: true, args, tiles: 4, kept: 0, scalars: 8, partials: vec![], axes: 0, passes }
}

pub fn try_run(isa: Isa, program: &TileProgram, args: &[BoundArg], axes: &[Axis], rows: usize) -> Result<(), Fault> {
    let mut scratch = Scratch::for_program(program);
    let mut partials = vec![0.0; program.partials.iter().map(|partial| partial.width).sum()];
    let launch = Launch { program, args, axes, window: None };
    // SAFETY: the tests bind buffers that hold `rows` rows, and use them on this thread alone.
    unsafe { run(isa, &launch, 0..rows, &mut scratch, &mut partials) }
}

pub fn run_all(isa: Isa, program: &TileProgram, args: &[BoundArg], rows: usize) {
    try_run(isa, program, args, &[], rows).expect("no index is out of range");
}

/// `inst` reads argument 0 (and 1, 2) in place and writes tile 0: its result for every element.
pub fn apply(isa: Isa, inst: Inst, inputs: &[&[f32]]) -> Vec<f32> {
    let length = inputs[0].len();
    let mut args = vec![reads(Dtype::F32); inputs.len()];
    args.push(writes(Dtype::F32));
    let store = Inst::Store { arg: inputs.len() as u16, a: Src::Tile(0) };
    let program = flat_program(args, vec![inst, store]);
    let mut buffers: Vec<Buffer> = inputs.iter().map(|input| Buffer::of(input, 0)).collect();
    let mut output = Buffer::new(4 * length, 0);
    let mut bound: Vec<BoundArg> = buffers.iter_mut().map(|buffer| buffer.bind(&[])).collect();
    bound.push(output.bind(&[]));
    run_all(isa, &program, &bound, length);
    output.assert_red_zones();
    output.floats()
}

pub const TILE: Dst = Dst::Tile(0);

/// Numbers of every size and sign, with the special ones among them; the same for the same seed.
pub fn mixed(length: usize, seed: u32) -> Vec<f32> {
    const SPECIAL: [f32; 10] =
        [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40, -1e-40, f32::MAX, f32::MIN, 0.5];
    (0..length)
        .map(|i| {
            let hash = scramble(seed.wrapping_mul(0x9E37_79B9).wrapping_add(i as u32));
            match hash % 16 {
                0 => SPECIAL[(hash >> 8) as usize % SPECIAL.len()],
                1 => f32::from_bits(scramble(hash)),
                2 => ((hash >> 8) % 9) as f32 - 4.0,
                _ => tame(hash),
            }
        })
        .collect()
}

/// Ordinary numbers in (-4, 4).
pub fn ordinary(length: usize, seed: u32) -> Vec<f32> {
    (0..length).map(|i| tame(scramble(seed.wrapping_mul(0x9E37_79B9).wrapping_add(i as u32)))).collect()
}

fn tame(hash: u32) -> f32 {
    (hash as i32 as f32) * (4.0 / 2_147_483_648.0)
}

pub fn scramble(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// Equal bits, or both NaN (whose payload the instruction sets choose differently).
#[track_caller]
pub fn assert_same(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let same = g.to_bits() == e.to_bits() || (g.is_nan() && e.is_nan());
        assert!(same, "{what}: element {i}: expected {e:e} ({:08x}), got {g:e} ({:08x})", e.to_bits(), g.to_bits());
    }
}
