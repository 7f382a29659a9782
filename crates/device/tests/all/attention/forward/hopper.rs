//! `hopper.cu`: through the real compiler, and on a Hopper GPU against f64, every way it is cut at every length.

use deuteron_attention::cuda::hopper::{Groups, Walk};
use deuteron_device::{DeviceError, DeviceMemory};

use super::*;
use crate::attention::shared::hopper;

const PLAIN: [AttentionMask; 2] = [AttentionMask::Full, AttentionMask::Causal];
const LENGTHS: [usize; 8] = [1, 17, 64, 127, 128, 129, 1000, 1024];
/// All widths of heads.
const WIDTHS: [usize; 10] = [16, 32, 48, 64, 80, 96, 112, 128, 192, 256];

/// All ways a block is cut for heads of a width.
fn groups(width: usize) -> Vec<Groups> {
    match width {
        0..=64 => vec![Groups::NARROW, Groups::NARROW_FEW],
        65..=128 => vec![Groups::WIDE, Groups { walk: Walk::InTurn, ..Groups::WIDE }],
        192 => vec![Groups { stages: 3, ..Groups::WIDEST }],
        _ => vec![Groups::WIDEST],
    }
}

fn variants(width: usize) -> Vec<Option<ForwardVariant>> {
    groups(width).into_iter().map(|groups| Some(ForwardVariant::Hopper(groups))).collect()
}

#[test]
fn every_cut_compiles_without_spills() {
    let Some(compiler) = compiler() else { return };
    let mut kernels = Vec::new();
    for (turn, width) in WIDTHS.into_iter().enumerate() {
        let dtypes = [[Dtype::F16, Dtype::Bf16], [Dtype::Bf16, Dtype::F16]][turn % 2];
        for (at, (mask, dtype)) in PLAIN.into_iter().zip(dtypes).enumerate() {
            let all = groups(width);
            // Of widths that few models have, masks and cuts take turns.
            for (index, &groups) in all.iter().enumerate() {
                if is_usual(width) || all.len() == 1 || index == at {
                    let kernel = named_kernel(dtype, width, mask, false);
                    kernels.push((kernel, ForwardVariant::Hopper(groups), Arch::Sm90a));
                }
            }
        }
    }
    compile(&compiler, &kernels);
}

fn check_lengths(device: &Cuda, dtype: Dtype, width: usize) {
    for (turn, length) in LENGTHS.into_iter().enumerate() {
        for mask in PLAIN {
            let case = Case::new(named_kernel(dtype, width, mask, false), [1 + turn % 2, 3, length, length], 1.0);
            variants(width).into_iter().for_each(|variant| case.check(device, variant));
        }
    }
    // Other numbers of keys than of queries. A causal diagonal stays on the corners of tiles.
    for (queries, keys) in [(70, 300), (500, 100), (9, 1000), (300, 65)] {
        let case = Case::new(named_kernel(dtype, width, AttentionMask::Full, false), [2, 3, queries, keys], 1.0);
        variants(width).into_iter().for_each(|variant| case.check(device, variant));
    }
    for (queries, keys) in [(100, 356), (500, 116), (129, 1), (9, 137)] {
        let case = Case::new(named_kernel(dtype, width, AttentionMask::Causal, false), [1, 2, queries, keys], 1.0);
        variants(width).into_iter().for_each(|variant| case.check(device, variant));
    }
}

#[test]
fn every_bf16_length_of_64_matches() {
    let Some(device) = hopper() else { return };
    check_lengths(&device, Dtype::Bf16, 64);
}

#[test]
fn every_f16_length_of_64_matches() {
    let Some(device) = hopper() else { return };
    check_lengths(&device, Dtype::F16, 64);
}

#[test]
fn every_bf16_length_of_128_matches() {
    let Some(device) = hopper() else { return };
    check_lengths(&device, Dtype::Bf16, 128);
}

#[test]
fn every_bf16_length_of_192_matches() {
    let Some(device) = hopper() else { return };
    check_lengths(&device, Dtype::Bf16, 192);
}

#[test]
fn every_bf16_length_of_256_matches() {
    let Some(device) = hopper() else { return };
    check_lengths(&device, Dtype::Bf16, 256);
}

#[test]
fn every_f16_length_of_256_matches() {
    let Some(device) = hopper() else { return };
    check_lengths(&device, Dtype::F16, 256);
}

#[test]
fn every_f16_length_of_128_matches() {
    let Some(device) = hopper() else { return };
    check_lengths(&device, Dtype::F16, 128);
}

/// Zeros stand in shared memory beyond the width, and nothing of them is stored.
#[test]
fn every_width_matches() {
    let Some(device) = hopper() else { return };
    for (turn, width) in WIDTHS.into_iter().enumerate() {
        let dtypes = [[Dtype::F16, Dtype::Bf16], [Dtype::Bf16, Dtype::F16]][turn % 2];
        for (mask, dtype) in PLAIN.into_iter().zip(dtypes) {
            for (group, [queries, keys]) in [(1, [129, 129]), (2, [1500, 1500]), (4, [127, 255]), (1, [72, 200])] {
                let kernel = AttentionKernel { group, ..named_kernel(dtype, width, mask, false) };
                let case = Case::new(kernel, [2, 4, queries, keys], 1.0);
                variants(width).into_iter().for_each(|variant| case.check(&device, variant));
            }
        }
    }
}

#[test]
fn long_sequences_match() {
    let Some(device) = hopper() else { return };
    for width in [64, 128] {
        let case = Case::new(named_kernel(Dtype::Bf16, width, AttentionMask::Causal, false), [1, 1, 4096, 4096], 1.0);
        variants(width).into_iter().for_each(|variant| case.check(&device, variant));
    }
}

/// More tiles than blocks, so that each block does several, forth and back; and more heads than one section has.
#[test]
fn rounds_and_sections_match() {
    let Some(device) = hopper() else { return };
    for (width, mask) in [
        (64, AttentionMask::Causal),
        (128, AttentionMask::Causal),
        (128, AttentionMask::Full),
        (256, AttentionMask::Causal),
    ] {
        let case = Case::new(named_kernel(Dtype::Bf16, width, mask, false), [7, 11, 300, 300], 1.0);
        variants(width).into_iter().for_each(|variant| case.check(&device, variant));
    }
    let kernel = AttentionKernel { group: 5, ..named_kernel(Dtype::Bf16, 64, AttentionMask::Full, false) };
    let case = Case::new(kernel, [1, 5, 16, 40_000], 1.0);
    variants(64).into_iter().for_each(|variant| case.check(&device, variant));
}

#[test]
fn heads_that_share_keys_match() {
    let Some(device) = hopper() else { return };
    for (group, heads) in [(3, 6), (4, 4), (2, 10)] {
        for width in [64, 128] {
            for (mask, length) in PLAIN.into_iter().zip([200, 333]) {
                let kernel = AttentionKernel { group, ..named_kernel(Dtype::Bf16, width, mask, false) };
                let case = Case::new(kernel, [3, heads, length, length], 1.0);
                variants(width).into_iter().for_each(|variant| case.check(&device, variant));
            }
        }
    }
}

/// What is chosen for a case on this GPU.
fn chosen(device: &Cuda, case: &Case) -> ForwardVariant {
    let Backend::Cuda(target) = device.backend() else { panic!("a GPU") };
    forward::choose(&case.lowered(), target)
}

/// In place where rows start at multiples of 16 bytes, and by another kernel where not.
#[test]
fn fused_operands_are_mapped_in_place() {
    let Some(device) = hopper() else { return };
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for width in [48, 64, 80, 128] {
            for length in [64, 67, 200] {
                for (start, maps) in [(0, true), (8, true), (1, false), (4, false)] {
                    let kernel = named_kernel(dtype, width, AttentionMask::Causal, false);
                    let case = Case::fused(kernel, [2, 3, length], start);
                    assert_eq!(
                        matches!(chosen(&device, &case), ForwardVariant::Hopper(_)),
                        maps,
                        "{width} {length} {start}"
                    );
                    case.check(&device, None);
                    if maps {
                        variants(width).into_iter().for_each(|variant| case.check(&device, variant));
                    }
                }
            }
        }
    }
}

#[test]
fn extreme_logits_hold() {
    let Some(device) = hopper() else { return };
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for width in [64, 128] {
            for mask in PLAIN {
                let kernel = named_kernel(dtype, width, mask, false);
                for variant in variants(width) {
                    // Scores of about 1e4: one key of a row has all the weight.
                    let got = Case::new(kernel, [1, 2, 300, 300], 1e4).run(&device, variant);
                    assert!(got.iter().all(|x| x.is_finite() && x.abs() <= 3.01), "{dtype} {width} {variant:?}");
                    rows_of_infinities(&device, kernel, variant);
                }
            }
        }
    }
}

/// A row whose scores are all -inf is zeros, one that has a +inf is NaN, and others do not notice.
fn rows_of_infinities(device: &Cuda, kernel: AttentionKernel, variant: Option<ForwardVariant>) {
    let (width, length) = (kernel.width, 200);
    let mut case = Case::new(kernel, [1, 1, length, length], 1.0);
    case.tensors[1].1.chunks_mut(width).for_each(|key| key[0] = 1.0);
    let clean = case.run(device, variant);
    let (hidden, infinite) = (70, 133);
    case.tensors[0].1[hidden * width] = f32::NEG_INFINITY;
    case.tensors[0].1[infinite * width] = f32::INFINITY;
    let got = case.run(device, variant);
    for (row, (got, clean)) in got.chunks(width).zip(clean.chunks(width)).enumerate() {
        let right = match row {
            row if row == hidden => got.iter().all(|&x| x == 0.0),
            row if row == infinite => got.iter().all(|x| x.is_nan()),
            _ => got == clean,
        };
        assert!(right, "row {row}: {:?} {kernel:?} {variant:?}", &got[..4]);
    }
}

/// NaN in a key or value reaches every row that sees it, and none of an earlier tile of queries; nor does what lies beyond
/// the last key, the next head's first.
#[test]
fn nan_reaches_who_sees_it_and_no_other_tile() {
    let Some(device) = hopper() else { return };
    for width in [64, 128] {
        for variant in variants(width) {
            for tensor in [1, 2] {
                for (queries, keys, bad) in [(500, 500, 130), (500, 500, 300), (500, 500, 499), (300, 428, 290)] {
                    let kernel = named_kernel(Dtype::Bf16, width, AttentionMask::Causal, false);
                    let mut case = Case::new(kernel, [1, 2, queries, keys], 1.0);
                    let clean = case.run(&device, variant);
                    // In the second head.
                    case.tensors[tensor].1[(keys + bad) * width..(keys + bad + 1) * width].fill(f32::NAN);
                    let got = case.run(&device, variant);
                    // The first query that sees it, and the first of its tile.
                    let sees = bad + queries - keys;
                    let tile = sees / 128 * 128;
                    let unseen = (queries + tile) * width;
                    assert!(got[..unseen] == clean[..unseen], "{queries} {keys} {bad} {variant:?}");
                    let seen = &got[(queries + sees) * width..];
                    assert!(seen.iter().all(|x| x.is_nan()), "{queries} {keys} {bad} {variant:?}");
                }
                // The tile of the first head's last keys ends beyond them.
                let kernel = named_kernel(Dtype::Bf16, width, AttentionMask::Full, false);
                let mut case = Case::new(kernel, [1, 2, 100, 100], 1.0);
                let clean = case.run(&device, variant);
                case.tensors[tensor].1[100 * width..].fill(f32::NAN);
                let got = case.run(&device, variant);
                assert!(got[..100 * width] == clean[..100 * width], "{variant:?}");
                assert!(got[100 * width..].iter().all(|x| x.is_nan()), "{variant:?}");
            }
        }
    }
}

/// Device memory that starts inside of another.
#[derive(Debug)]
struct Shifted {
    inner: Memory,
    by: usize,
}

impl DeviceMemory for Shifted {
    fn len(&self) -> usize {
        self.inner.len() - self.by
    }

    fn address(&self) -> u64 {
        match &self.inner {
            Memory::Device(memory) => memory.address() + self.by as u64,
            Memory::Host(_) => panic!("expected device memory"),
        }
    }

    fn read(&self, _: &mut [u8]) -> Result<(), DeviceError> {
        unreachable!("nobody reads it")
    }
}

/// Maps follow inputs that move, also in a graph that was recorded before; one that is nowhere to be mapped is copied first.
#[test]
fn maps_follow_inputs_that_move() {
    let Some(device) = hopper() else { return };
    let kernel = named_kernel(Dtype::Bf16, 64, AttentionMask::Causal, false);
    let cases = [1.0, 0.5, 2.0].map(|spread| Case::new(kernel, [2, 3, 200, 200], spread));
    assert!(matches!(chosen(&device, &cases[0]), ForwardVariant::Hopper(_)));
    let wanted = cases.each_ref().map(|case| case.run(&device, None));
    assert!(wanted[0] != wanted[1] && wanted[1] != wanted[2]);
    let (mut executable, _) = cases[0].load(&device, None);
    let operands = [AttentionOperand::Q, AttentionOperand::K, AttentionOperand::V];
    // By 2 bytes no map starts, and by 48 one does.
    for by in [0, 48, 2] {
        let memories = cases.each_ref().map(|case| {
            operands.map(|operand| {
                let bytes = [vec![0xFF; by], case.bytes(operand)].concat();
                Memory::Device(Box::new(Shifted { inner: device.upload(&bytes).unwrap(), by }))
            })
        });
        for launching in [Launching::Eager, Launching::Graph, Launching::Graph] {
            for (memory, wanted) in memories.iter().zip(&wanted) {
                executable.poison().unwrap();
                executable.run(&|index| &memory[index], &mut NoStates, launching).unwrap();
                let mut result = vec![0; wanted.len() * 2];
                executable.read(0, &mut result).unwrap();
                assert!(widened(kernel.dtype, &result) == *wanted, "{by} {launching:?}");
            }
        }
    }
}
