use deuteron_codegen::cuda::{Mapped, TensorMap};

use super::*;

const PLAIN: [AttentionMask; 2] = [AttentionMask::Full, AttentionMask::Causal];

/// Contiguous heads.
fn heads([batch, heads, queries, keys]: [usize; 4], kernel: &AttentionKernel) -> AttentionShape {
    let strides = |heads: usize, positions: usize| HeadStrides {
        batch: heads * positions * kernel.width,
        head: positions * kernel.width,
        position: kernel.width,
    };
    let (q, k) = (strides(heads, queries), strides(heads / kernel.group, keys));
    let none = HeadStrides::default();
    AttentionShape { batch, heads, queries, keys, q, k, v: k, mask: none, slopes: none, documents: none, o: q }
}

fn chosen(kernel: AttentionKernel, shape: AttentionShape) -> Option<Groups> {
    match variant(kernel, shape, 0, Arch::Sm90a) {
        ForwardVariant::Hopper(groups) => Some(groups),
        ForwardVariant::Plain
        | ForwardVariant::Tensor(_)
        | ForwardVariant::Decode { .. }
        | ForwardVariant::Scores(_) => None,
    }
}

#[test]
fn warpgroups_are_for_plain_attention_of_hopper() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for mask in PLAIN {
            let narrow = kernel(dtype, mask);
            let wide = AttentionKernel { width: 128, ..narrow };
            let groups = |kernel: AttentionKernel, sizes| chosen(kernel, heads(sizes, &kernel));
            assert_eq!(groups(narrow, [8, 12, 1024, 1024]), Some(Groups::NARROW));
            assert_eq!(groups(narrow, [1, 12, 1024, 1024]), Some(Groups::NARROW_FEW));
            assert_eq!(groups(wide, [4, 16, 4096, 4096]), Some(Groups::WIDE));
            assert_eq!(groups(wide, [2, 16, 1024, 1024]), Some(Groups::WIDE));
            assert_eq!(groups(AttentionKernel { group: 4, ..narrow }, [8, 12, 1000, 1000]), Some(Groups::NARROW));
            // Few queries are decoded, and few keys do not fill a tile.
            assert_eq!(groups(narrow, [8, 12, 8, 1024]), None);
            assert_eq!(groups(narrow, [8, 12, 63, 63]), None);
            assert_eq!(groups(narrow, [8, 12, 64, 64]), Some(Groups::NARROW_FEW));
            // Other widths, of whole products.
            assert_eq!(groups(AttentionKernel { width: 96, ..narrow }, [8, 12, 1024, 1024]), Some(Groups::WIDE));
            assert_eq!(groups(AttentionKernel { width: 80, ..narrow }, [1, 12, 1024, 1024]), Some(Groups::WIDE));
            assert_eq!(groups(AttentionKernel { width: 48, ..narrow }, [8, 12, 1024, 1024]), Some(Groups::NARROW));
            let narrower = Groups { stages: 3, ..Groups::WIDEST };
            for sizes in [[4, 16, 4096, 4096], [1, 16, 1024, 1024]] {
                assert_eq!(groups(AttentionKernel { width: 256, ..narrow }, sizes), Some(Groups::WIDEST));
                assert_eq!(groups(AttentionKernel { width: 192, ..narrow }, sizes), Some(narrower));
            }
            for width in [40, 72, 136, 144, 240] {
                assert_eq!(groups(AttentionKernel { width, ..narrow }, [8, 12, 1024, 1024]), None);
            }
            // Scales that cannot wait, dropout.
            assert_eq!(groups(AttentionKernel { scale: 0.0, ..narrow }, [8, 12, 1024, 1024]), None);
            assert_eq!(groups(AttentionKernel { scale: -0.125, ..narrow }, [8, 12, 1024, 1024]), None);
            let dropout = Some(DropoutRule { probability: 0.5, offset: 3 });
            assert_eq!(groups(AttentionKernel { dropout, ..narrow }, [8, 12, 1024, 1024]), None);
            for arch in Arch::ALL.into_iter().filter(|&arch| arch != Arch::Sm90a) {
                let other = variant(narrow, heads([8, 12, 1024, 1024], &narrow), 0, arch);
                assert!(!matches!(other, ForwardVariant::Hopper(_)), "{arch}");
            }
        }
    }
    for mask in [AttentionMask::Cached, AttentionMask::Additive(Dtype::F32)] {
        let kernel = kernel(Dtype::Bf16, mask);
        assert_eq!(chosen(kernel, heads([8, 12, 1024, 1024], &kernel)), None);
    }
    let single = kernel(Dtype::F32, AttentionMask::Causal);
    assert_eq!(chosen(single, heads([8, 12, 1024, 1024], &single)), None);
}

/// The last tile of keys of a block would hold values that none of its queries sees, and 0 times NaN is NaN.
#[test]
fn a_diagonal_that_crosses_tiles_is_left_to_the_kernel_that_clears_values() {
    let (causal, full) = (kernel(Dtype::Bf16, AttentionMask::Causal), kernel(Dtype::Bf16, AttentionMask::Full));
    let wide = AttentionKernel { width: 128, ..causal };
    for (queries, keys, narrow_too, wide_too) in [
        (1000, 1000, true, true),
        (1000, 1128, true, true),
        (1000, 1064, true, false),
        (1000, 936, true, false),
        (1000, 1001, false, false),
        (100, 333, false, false),
    ] {
        let takes = |kernel: AttentionKernel| chosen(kernel, heads([2, 3, queries, keys], &kernel)).is_some();
        assert_eq!([takes(causal), takes(wide), takes(full)], [narrow_too, wide_too, true], "{queries} {keys}");
    }
}

#[test]
fn rows_that_no_tensor_map_reaches_are_left_to_others() {
    let causal = kernel(Dtype::Bf16, AttentionMask::Causal);
    let shape = heads([8, 12, 1024, 1024], &causal);
    let with = |k: HeadStrides| chosen(causal, AttentionShape { k, ..shape });
    assert_eq!(with(HeadStrides { batch: 0, ..shape.k }), None);
    assert_eq!(with(HeadStrides { position: 1 << 39, ..shape.k }), None);
    assert_eq!(with(HeadStrides { position: 65, ..shape.k }), None);
    // Offsets of part of a piece of 16 bytes.
    assert_eq!(variant(causal, shape, 8, Arch::Sm90a), ForwardVariant::Hopper(Groups::NARROW));
    assert_eq!(variant(causal, shape, 4, Arch::Sm90a), ForwardVariant::Plain);
    // An axis of one index may have any stride.
    let alone = heads([1, 12, 1024, 1024], &causal);
    let q = HeadStrides { batch: 0, ..alone.q };
    assert_eq!(chosen(causal, AttentionShape { q, ..alone }), Some(Groups::NARROW_FEW));
}

#[test]
fn the_parameter_is_three_maps_the_fields_and_the_section() {
    // Queries, keys and values side by side, as GPT-2 has them: [batch, positions, 3, heads, width].
    for (width, pieces) in [(48, 1), (64, 1), (80, 1), (128, 2), (192, 3), (256, 4)] {
        let kernel = AttentionKernel { width, ..kernel(Dtype::Bf16, AttentionMask::Causal) };
        let row = 3 * 12 * width;
        let fused = HeadStrides { batch: 1024 * row, head: width, position: row };
        let shape = AttentionShape { q: fused, k: fused, v: fused, ..heads([8, 12, 1024, 1024], &kernel) };
        let args = lowered(&kernel, shape, 64).args;
        let ForwardVariant::Hopper(groups) = variant(kernel, shape, 64, Arch::Sm90a) else { panic!("Hopper") };
        let grid = groups.grid(&kernel, &shape, &args, 132);
        let bytes = |elements: usize| 2 * elements as u64;
        let map = |position: usize, rows: u32| {
            let (p, h, b) = (bytes(row), bytes(width), bytes(1024 * row));
            let (rank, sizes, strides, tile) = match pieces {
                1 => (4, [width as u64, 1024, 12, 8, 1], [p, h, b, 16], [64, rows, 1, 1, 1]),
                _ => {
                    let (sizes, tile) = ([64, 1024, pieces, 12, 8], [64, rows, pieces as u32, 1, 1]);
                    (5, sizes, [p, 128, h, b], tile)
                }
            };
            Word::Map(TensorMap { of: Mapped::Argument(position), offset: 128, rank, sizes, strides, tile })
        };
        let keys = groups.keys as u32;
        assert_eq!(grid.words[..3], [map(0, 128), map(1, keys), map(2, keys)]);
        assert_eq!(grid.words[3..33], words(&kernel, &shape, &args, 1)[..]);
        // 96 heads of 192 KiB to 1 MiB of keys and values, in 32 MiB.
        let together = match width {
            128 => 48,
            192.. => 32,
            _ => 96,
        };
        let counter = if groups.walk == Walk::Drawn { Word::Persistent(0) } else { Word::Number(0) };
        assert_eq!(grid.words[33..], [Word::Number(together), counter]);
        // A multiple of the alignment of a map.
        assert_eq!(grid.words.iter().map(Word::count).sum::<usize>() * 8 % 128, 0);
    }
}

#[test]
fn warpgroups_fill_the_machine_and_its_shared_memory() {
    let grid = |width: usize, sizes: [usize; 4]| {
        let kernel = AttentionKernel { width, ..kernel(Dtype::Bf16, AttentionMask::Causal) };
        let shape = heads(sizes, &kernel);
        let grid = chosen(kernel, shape).unwrap().grid(&kernel, &shape, &lowered(&kernel, shape, 0).args, 132);
        (grid.entry, grid.blocks, grid.threads, grid.shared)
    };
    let entry = "attention_hopper";
    assert_eq!(grid(64, [8, 12, 1024, 1024]), (entry, [768, 1, 1], 288, 99_472));
    assert_eq!(grid(64, [1, 12, 1024, 1024]), (entry, [132, 1, 1], 384, 134_352));
    assert_eq!(grid(64, [1, 1, 129, 129]), (entry, [3, 1, 1], 384, 134_352));
    assert_eq!(grid(128, [4, 16, 4096, 4096]), (entry, [132, 1, 1], 384, 197_728));
    assert_eq!(grid(128, [2, 16, 1024, 1024]), (entry, [132, 1, 1], 384, 197_728));
    assert_eq!(grid(32, [8, 12, 1024, 1024]), (entry, [768, 1, 1], 288, 99_472));
    assert_eq!(grid(80, [2, 16, 1024, 1024]), (entry, [132, 1, 1], 384, 197_728));
    assert_eq!(grid(192, [2, 16, 1024, 1024]), (entry, [132, 1, 1], 384, 197_760));
    assert_eq!(grid(256, [4, 16, 4096, 4096]), (entry, [132, 1, 1], 384, 197_728));
    for (groups, width) in [(Groups::NARROW, 64), (Groups::NARROW_FEW, 64), (Groups::WIDE, 128), (Groups::WIDEST, 256)]
    {
        // A block is lent a KiB more than it asks for.
        let taken = groups.blocks * (groups.shared(width) + 1024);
        assert!(taken <= Arch::Sm90a.block_shared() + 1024, "{groups:?}: {taken}");
    }
}
