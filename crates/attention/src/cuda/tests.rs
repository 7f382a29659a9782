mod hopper;
mod rows;
mod scores;

use deuteron_codegen::argument::ArgBinding;
use deuteron_codegen::cuda::{Arch, CudaTarget, Grids, Word};
use deuteron_codegen::kernel::Kernel;
use deuteron_graph::{Dtype, Graph};

use super::super::MAX_WIDTH;
use super::forward::{self, ForwardVariant, clustered, even_ranges};
use super::hopper::{Groups, Walk};
use super::tiles::Tiles;
use super::words::{PARTS_AT, words};
use crate::ScoreRules;
use crate::kernel::{
    AttentionKernel, AttentionMask, AttentionOperand, AttentionResult, AttentionShape, DropoutRule, HeadStrides,
    LoweredAttention,
};

const ROW: HeadStrides = HeadStrides { batch: 12 * 100 * 64, head: 100 * 64, position: 64 };

fn kernel(dtype: Dtype, mask: AttentionMask) -> AttentionKernel {
    let result = AttentionResult::Values;
    let scores = ScoreRules::NONE;
    AttentionKernel { dtype, kv: dtype, width: 64, group: 1, scale: 0.125, mask, scores, dropout: None, result }
}

fn shape([batch, heads, queries, keys]: [usize; 4]) -> AttentionShape {
    let none = HeadStrides::default();
    let (q, mask, slopes, documents) = (ROW, none, none, none);
    AttentionShape { batch, heads, queries, keys, q, k: ROW, v: ROW, mask, slopes, documents, o: ROW }
}

fn lowered(kernel: &AttentionKernel, shape: AttentionShape, offset: usize) -> LoweredAttention {
    let base = Graph::new("test").input("x", Dtype::F32, [1]).unwrap();
    let binding = |&operand: &AttentionOperand| ArgBinding {
        base,
        dtype: kernel.operand_dtype(operand),
        written: operand == AttentionOperand::O,
        offset,
        leading: Vec::new(),
        table_rows: 0,
    };
    LoweredAttention { kernel: *kernel, shape, args: kernel.operands().iter().map(binding).collect() }
}

fn variant(kernel: AttentionKernel, shape: AttentionShape, offset: usize, arch: Arch) -> ForwardVariant {
    forward::choose(&lowered(&kernel, shape, offset), &CudaTarget::new(arch, 132))
}

/// The grids of a kernel.
fn grids(kernel: &Kernel) -> Grids {
    kernel.launch.grids().expect("grids").clone()
}

#[test]
fn the_kernel_follows_from_sizes_storage_and_alignment() {
    let tall = ForwardVariant::Tensor(Tiles { warps: 4, atoms: 2, keys: 64, blocks: 2 });
    let low = ForwardVariant::Tensor(Tiles { warps: 4, atoms: 1, keys: 64, blocks: 2 });
    let causal = kernel(Dtype::Bf16, AttentionMask::Causal);
    let prompt = shape([8, 12, 1024, 1024]);
    assert_eq!(variant(causal, prompt, 0, Arch::Sm90a), ForwardVariant::Hopper(Groups::NARROW));
    assert_eq!(variant(causal, prompt, 64, Arch::Sm80), tall);
    // Few blocks; a mask that takes registers; offsets and strides of part of a vector; an old GPU; f32.
    assert_eq!(variant(causal, shape([1, 12, 1024, 1024]), 0, Arch::Sm80), low);
    assert_eq!(variant(kernel(Dtype::F16, AttentionMask::Additive(Dtype::F32)), prompt, 0, Arch::Sm90a), low);
    assert_eq!(variant(causal, prompt, 4, Arch::Sm90a), ForwardVariant::Plain);
    let odd = AttentionShape { k: HeadStrides { position: 65, ..ROW }, ..prompt };
    assert_eq!(variant(causal, odd, 0, Arch::Sm90a), ForwardVariant::Plain);
    assert_eq!(variant(AttentionKernel { width: 40, ..causal }, prompt, 0, Arch::Sm90a), ForwardVariant::Plain);
    assert_eq!(variant(causal, prompt, 0, Arch::Sm75), ForwardVariant::Plain);
    assert_eq!(variant(kernel(Dtype::F32, AttentionMask::Full), prompt, 0, Arch::Sm90a), ForwardVariant::Plain);
    // Keys and values of another type have no matrix units; their rows must be whole pieces as well.
    let mixed = AttentionKernel { kv: Dtype::Bf16, ..kernel(Dtype::F32, AttentionMask::Cached) };
    assert_eq!(variant(mixed, prompt, 0, Arch::Sm90a), ForwardVariant::Plain);
    assert_eq!(
        variant(AttentionKernel { dtype: Dtype::Bf16, kv: Dtype::F16, ..mixed }, prompt, 0, Arch::Sm90a),
        ForwardVariant::Plain
    );
    assert_eq!(
        variant(mixed, shape([1, 12, 1, 1024]), 8, Arch::Sm90a),
        ForwardVariant::Decode { rows: 1, vector: true }
    );
    assert_eq!(
        variant(mixed, shape([1, 12, 1, 1024]), 4, Arch::Sm90a),
        ForwardVariant::Decode { rows: 1, vector: false }
    );
    // One token more.
    let cached = kernel(Dtype::Bf16, AttentionMask::Cached);
    assert_eq!(
        variant(cached, shape([1, 12, 1, 1024]), 0, Arch::Sm90a),
        ForwardVariant::Decode { rows: 1, vector: true }
    );
    let grouped = AttentionKernel { group: 3, ..cached };
    assert_eq!(
        variant(grouped, shape([1, 12, 1, 1024]), 1, Arch::Sm90a),
        ForwardVariant::Decode { rows: 4, vector: false }
    );
    assert_eq!(
        variant(grouped, shape([1, 12, 8, 1024]), 0, Arch::Sm90a),
        ForwardVariant::Decode { rows: 8, vector: true }
    );
}

#[test]
fn offsets_are_in_bytes_of_each_operand() {
    let kernel = AttentionKernel { kv: Dtype::Bf16, ..kernel(Dtype::F32, AttentionMask::Cached) };
    let shape = shape([1, 12, 1, 100]);
    let words = words(&kernel, &shape, &lowered(&kernel, shape, 8).args, 1);
    let at = |position: usize, offset: usize| Word::Argument { position, offset };
    assert_eq!(words[..3], [at(0, 32), at(1, 16), at(2, 16)]);
}

#[test]
fn the_words_are_the_fields_of_the_parameter_in_order() {
    let dropout = Some(DropoutRule { probability: 0.5, offset: 3 });
    let kernel = AttentionKernel { group: 2, dropout, ..kernel(Dtype::Bf16, AttentionMask::Additive(Dtype::F32)) };
    let at = |first: usize| HeadStrides { batch: first, head: first + 1, position: first + 2 };
    let shape = AttentionShape { q: at(10), k: at(20), v: at(30), mask: at(40), o: at(50), ..shape([3, 4, 5, 600]) };
    let words = words(&kernel, &shape, &lowered(&kernel, shape, 7).args, 2);
    let at = |position: usize, offset: usize| Word::Argument { position, offset };
    let none = Word::Number(0);
    assert_eq!(words[..7], [at(0, 14), at(1, 14), at(2, 14), at(3, 28), at(4, 28), none, at(5, 14)]);
    assert_eq!(words[7..9], [Word::Workspace(0), Word::Workspace(3 * 4 * 5 * 2 * 2 * 4)]);
    let numbers = [3, 4, 2, 5, 600, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42, 50, 51, 52];
    assert_eq!(words[9..], numbers.map(Word::Number));
}

#[test]
fn a_cluster_joins_few_ranges_and_a_second_grid_joins_many() {
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let list = |kernel: AttentionKernel, sizes: [usize; 4]| {
        let made = forward::kernel(&lowered(&kernel, shape(sizes), 0), &target);
        let Grids { list, workspace, .. } = grids(&made);
        assert!(list.iter().all(|grid| grid.waits && grid.blocks[0].is_multiple_of(grid.cluster)));
        let grids: Vec<_> = list.iter().map(|grid| (grid.entry, grid.blocks[0], grid.cluster, grid.shared)).collect();
        (grids, workspace, list[0].words[PARTS_AT..PARTS_AT + 2].to_vec())
    };
    let causal = kernel(Dtype::Bf16, AttentionMask::Causal);
    let nowhere = vec![Word::Number(0); 2];
    // Sixteen ranges of 64 keys are eight of a cluster, each twice as long.
    let joined =
        |blocks, cluster: u32| (vec![("attention_decode", blocks, cluster, cluster * 66 * 4)], 0, nowhere.clone());
    assert_eq!(list(causal, [1, 12, 1, 129]), joined(36, 3));
    assert_eq!(list(causal, [1, 12, 1, 1024]), joined(96, 8));
    assert_eq!(list(causal, [1, 12, 1, 64]), (vec![("attention_decode", 12, 1, 0)], 0, nowhere.clone()));
    let (grids, workspace, words) = list(causal, [1, 12, 1, 1088]);
    assert_eq!(grids, [("attention_decode", 12 * 17, 1, 0), ("attention_combine", 3, 1, 0)]);
    assert_eq!((workspace, words[0]), (12 * 17 * 66 * 4, Word::Workspace(0)));
}

#[test]
fn ranges_keep_all_places_for_blocks_busy() {
    let ranges = |units, most| even_ranges(units, most, 6 * 132);
    // GPT-2's twelve heads of 1, 8, 32 and 64 sequences.
    assert_eq!([12, 96, 384, 768].map(|units| ranges(units, 16)), [16, 8, 2, 1]);
    assert_eq!((ranges(64, 64), ranges(500, 64), ranges(1, 1), ranges(0, 1)), (12, 3, 1, 1));
    // Short ranges are halved for a cluster, long ones are not.
    assert_eq!((clustered(12, 2048, 264), clustered(12, 4096, 264)), (Some((8, 2112)), None));
}

#[test]
fn launches_fill_the_machine_and_nothing_launches_nothing() {
    let target = CudaTarget::new(Arch::Sm80, 132);
    let list = |kernel: AttentionKernel, sizes: [usize; 4]| {
        let made = forward::kernel(&lowered(&kernel, shape(sizes), 0), &target);
        let Grids { list, workspace, .. } = grids(&made);
        let grids: Vec<_> = list.iter().map(|grid| (grid.entry, grid.blocks[0], grid.threads, grid.shared)).collect();
        (grids, workspace)
    };
    let causal = kernel(Dtype::Bf16, AttentionMask::Causal);
    assert_eq!(list(causal, [8, 12, 1024, 1024]), (vec![("attention_tensor", 768, 128, 36_864)], 0));
    let single = kernel(Dtype::F32, AttentionMask::Causal);
    assert_eq!(list(single, [1, 12, 65, 65]), (vec![("attention_plain", 24, 256, 0)], 0));
    // Twelve heads in 16 ranges of 64 keys.
    let decoded = vec![("attention_decode", 192, 128, 0), ("attention_combine", 3, 128, 0)];
    assert_eq!(list(causal, [1, 12, 1, 1024]), (decoded, 12 * 16 * 66 * 4));
    assert_eq!(list(causal, [64, 12, 1, 1024]), (vec![("attention_decode", 768, 128, 0)], 0));
    assert_eq!(list(causal, [1, 12, 1, 0]), (vec![("attention_decode", 12, 128, 0)], 0));
    for empty in [[0, 12, 9, 9], [1, 0, 9, 9], [1, 12, 0, 9]] {
        assert_eq!(list(causal, empty), (Vec::new(), 0));
    }
}

#[test]
fn shared_memory_is_what_every_architecture_has() {
    for width in (16..=MAX_WIDTH).step_by(16) {
        for mask in [AttentionMask::Causal, AttentionMask::Additive(Dtype::F32)] {
            let kernel = AttentionKernel { width, ..kernel(Dtype::Bf16, mask) };
            let tiles = Tiles::new(&kernel, &shape([8, 12, 1024, 1024]), 132);
            assert!(2 * tiles.keys >= tiles.queries(), "{tiles:?}");
            let least = Arch::ALL.iter().filter(|arch| arch.is_ampere()).map(|arch| arch.block_shared()).min();
            assert!(Some(tiles.shared(width)) <= least, "{width}: {} bytes", tiles.shared(width));
        }
    }
}

mod gradient {
    use super::super::backward::{self, BackwardTiles, BackwardVariant, SideTiles};
    use super::*;
    use crate::backward::BackwardOperand;
    use crate::backward::LoweredBackward;

    fn gradient(kernel: &AttentionKernel, shape: AttentionShape, offset: usize) -> LoweredBackward {
        let base = Graph::new("test").input("x", Dtype::F32, [1]).unwrap();
        let binding = |operand: BackwardOperand| {
            let written = matches!(operand, BackwardOperand::Gradient(_));
            let dtype = match operand {
                BackwardOperand::Operand(operand) => kernel.operand_dtype(operand),
                BackwardOperand::ResultGradient | BackwardOperand::Gradient(_) => kernel.dtype,
            };
            let offset = if written { 0 } else { offset };
            ArgBinding { base, dtype, written, offset, leading: Vec::new(), table_rows: 0 }
        };
        let args = kernel.backward_operands().map(binding).collect();
        LoweredBackward::apart(*kernel, shape, args)
    }

    fn chosen(kernel: AttentionKernel, shape: AttentionShape, offset: usize, arch: Arch) -> BackwardVariant {
        backward::choose(&gradient(&kernel, shape, offset), &CudaTarget::new(arch, 132))
    }

    #[test]
    fn kernels_follow_from_sizes_storage_and_alignment() {
        let causal = kernel(Dtype::Bf16, AttentionMask::Causal);
        let atoms = |kernel, shape, offset, arch| match chosen(kernel, shape, offset, arch) {
            BackwardVariant::Tensor(BackwardTiles { queries, keys, .. }) => Some((queries.atoms, keys.atoms)),
            BackwardVariant::Plain | BackwardVariant::Hopper => None,
        };
        let prompt = shape([8, 12, 1024, 1024]);
        assert_eq!(atoms(causal, prompt, 0, Arch::Sm80), Some((2, 2)));
        assert_eq!(atoms(causal, prompt, 64, Arch::Sm80), Some((2, 2)));
        assert_eq!(atoms(causal, shape([8, 12, 1024, 15]), 0, Arch::Sm80), None);
        // Few keys; few blocks; dropout that takes registers; offsets of part of a vector; an old GPU; f32; halves of odd size.
        assert_eq!(atoms(causal, shape([8, 12, 1024, 64]), 0, Arch::Sm80), Some((2, 1)));
        assert_eq!(atoms(causal, shape([1, 12, 1024, 1024]), 0, Arch::Sm80), Some((1, 1)));
        let dropout = Some(DropoutRule { probability: 0.5, offset: 3 });
        assert_eq!(atoms(AttentionKernel { dropout, ..causal }, prompt, 0, Arch::Sm90a), Some((1, 1)));
        assert_eq!(atoms(causal, prompt, 4, Arch::Sm80), None);
        assert_eq!(atoms(causal, prompt, 0, Arch::Sm75), None);
        assert_eq!(atoms(kernel(Dtype::F32, AttentionMask::Full), prompt, 0, Arch::Sm90a), None);
        assert_eq!(atoms(AttentionKernel { width: 176, ..causal }, prompt, 0, Arch::Sm80), None);
        assert_eq!(atoms(AttentionKernel { width: 192, ..causal }, prompt, 0, Arch::Sm80), Some((1, 1)));
    }

    #[test]
    fn warpgroups_are_for_plain_gradients_of_hopper() {
        let takes = |kernel, shape, offset, arch| chosen(kernel, shape, offset, arch) == BackwardVariant::Hopper;
        let prompt = shape([8, 12, 1024, 1024]);
        for (dtype, mask) in [(Dtype::Bf16, AttentionMask::Causal), (Dtype::F16, AttentionMask::Full)] {
            let plain = kernel(dtype, mask);
            assert!(takes(plain, prompt, 0, Arch::Sm90a) && !takes(plain, prompt, 0, Arch::Sm80));
            assert!(takes(AttentionKernel { width: 128, ..plain }, prompt, 0, Arch::Sm90a));
            // Rows of these strides may be of any width that is whole products.
            for (width, whole) in
                [(16, true), (24, false), (80, true), (96, true), (136, false), (144, true), (256, true)]
            {
                assert_eq!(takes(AttentionKernel { width, ..plain }, prompt, 0, Arch::Sm90a), whole, "{width}");
            }
            assert!(takes(AttentionKernel { group: 4, ..plain }, prompt, 0, Arch::Sm90a));
            assert!(!takes(AttentionKernel { scale: -1.0, ..plain }, prompt, 0, Arch::Sm90a));
            let dropout = Some(DropoutRule { probability: 0.5, offset: 3 });
            assert!(!takes(AttentionKernel { dropout, ..plain }, prompt, 0, Arch::Sm90a));
            assert!(!takes(plain, prompt, 4, Arch::Sm90a), "rows that start at part of a vector");
            assert!(!takes(plain, shape([8, 12, 1024, 15]), 0, Arch::Sm90a), "few keys");
            // A map has no stride of 0.
            let shared = AttentionShape { k: HeadStrides { head: 0, ..ROW }, ..prompt };
            assert!(!takes(plain, shared, 0, Arch::Sm90a));
            // A diagonal through tiles would have values in a block's last tile that none of its queries sees.
            assert!(takes(plain, shape([8, 12, 1000, 1064]), 0, Arch::Sm90a));
            assert_eq!(takes(plain, shape([8, 12, 1000, 1001]), 0, Arch::Sm90a), mask == AttentionMask::Full);
        }
        assert!(!takes(kernel(Dtype::Bf16, AttentionMask::Additive(Dtype::F32)), prompt, 0, Arch::Sm90a));
        assert!(!takes(kernel(Dtype::F32, AttentionMask::Causal), prompt, 0, Arch::Sm90a));
    }

    #[test]
    fn a_launch_is_two_grids_and_what_they_share() {
        let list = |kernel: AttentionKernel, sizes: [usize; 4], arch: Arch| {
            let shape = shape(sizes);
            let target = CudaTarget::new(arch, 132);
            let made = backward::kernel(&gradient(&kernel, shape, 0), &target);
            let Grids { list, workspace, .. } = grids(&made);
            let grids: Vec<_> =
                list.iter().map(|grid| (grid.entry, grid.blocks[0], grid.threads, grid.shared)).collect();
            (grids, workspace)
        };
        let causal = kernel(Dtype::Bf16, AttentionMask::Causal);
        let both = vec![("backward_queries", 768, 128, 73_728), ("backward_keys", 768, 128, 74_752)];
        assert_eq!(list(causal, [8, 12, 1024, 1024], Arch::Sm80), (both, 8 * 12 * 1024 * 8));
        // Beside a mask that is added sums of rows are kept too.
        let added = kernel(Dtype::Bf16, AttentionMask::Additive(Dtype::F32));
        assert_eq!(list(added, [1, 12, 1024, 1024], Arch::Sm90a).1, 12 * 1024 * 12);
        // Blocks that run at once go over all rows; statistics have room for whole blocks.
        let both = vec![("backward_queries", 132, 384, 134_224), ("backward_keys", 132, 384, 134_224)];
        assert_eq!(list(causal, [8, 12, 1024, 1024], Arch::Sm90a), (both, 8 * 12 * 1024 * 8));
        let both = vec![("backward_queries", 24, 384, 134_224), ("backward_keys", 12, 384, 134_224)];
        assert_eq!(list(causal, [1, 12, 129, 65], Arch::Sm90a), (both, 12 * 256 * 8));
        // Keys of a head that several heads read are gone over once.
        let both = vec![("backward_queries", 24, 384, 199_760), ("backward_keys", 6, 384, 199_760)];
        let grouped = AttentionKernel { group: 4, width: 96, ..causal };
        assert_eq!(list(grouped, [1, 12, 129, 193], Arch::Sm90a), (both, 12 * 256 * 8));
        // Wide heads: 64 keys a block.
        let both = vec![("backward_queries", 24, 384, 231_488), ("backward_keys", 12, 384, 231_536)];
        let grouped = AttentionKernel { group: 4, width: 256, ..causal };
        assert_eq!(list(grouped, [1, 12, 129, 193], Arch::Sm90a), (both, 12 * 256 * 8));
        let single = kernel(Dtype::F32, AttentionMask::Causal);
        let both = vec![("backward_queries", 24, 256, 0), ("backward_keys", 36, 256, 0)];
        assert_eq!(list(single, [1, 12, 65, 129], Arch::Sm90a), (both, 12 * 65 * 16));
        // Without keys or queries the other side is written all the same.
        assert_eq!(list(single, [1, 12, 65, 0], Arch::Sm90a).0, [("backward_queries", 24, 256, 0)]);
        assert_eq!(list(single, [1, 12, 0, 65], Arch::Sm90a).0, [("backward_keys", 24, 256, 0)]);
        assert_eq!(list(causal, [0, 12, 9, 9], Arch::Sm90a), (Vec::new(), 0));
    }

    #[test]
    fn the_words_are_those_of_attention_and_then_what_is_made() {
        let dropout = Some(DropoutRule { probability: 0.5, offset: 3 });
        let kernel = AttentionKernel { dropout, ..kernel(Dtype::Bf16, AttentionMask::Additive(Dtype::F32)) };
        let shape = shape([3, 4, 50, 600]);
        let target = CudaTarget::new(Arch::Sm90a, 132);
        let words = grids(&backward::kernel(&gradient(&kernel, shape, 8), &target)).list.remove(0).words;
        let at = |position: usize, offset: usize| Word::Argument { position, offset };
        // The gradient that comes in is where attention has its result.
        let none = Word::Number(0);
        assert_eq!(words[..7], [at(0, 16), at(1, 16), at(2, 16), at(3, 32), at(4, 32), none, at(5, 16)]);
        let (made, strides) = words[words.len() - 13..].split_at(4);
        assert_eq!(made, [Word::Workspace(0), at(6, 0), at(7, 0), at(8, 0)]);
        let of_heads = |positions: u64| [4 * positions * 64, positions * 64, 64].map(Word::Number);
        assert_eq!(strides, [of_heads(50), of_heads(600), of_heads(600)].concat());
        assert_eq!(words.len(), 9 + 6 + 15 + 4 + 9);
    }

    #[test]
    fn blocks_of_warpgroups_have_room() {
        let most = Arch::Sm90a.block_shared();
        for width in (16..=MAX_WIDTH).step_by(16) {
            let gradient = gradient(
                &AttentionKernel { width, ..kernel(Dtype::Bf16, AttentionMask::Full) },
                shape([1, 1, 64, 64]),
                0,
            );
            let made = backward::with_variant(&gradient, &BackwardVariant::Hopper, &CudaTarget::new(Arch::Sm90a, 132));
            let shared: Vec<usize> = grids(&made).list.iter().map(|grid| grid.shared as usize).collect();
            assert!(shared.len() == 2 && shared.iter().all(|&bytes| bytes <= most), "{width}: {shared:?} of {most}");
        }
    }

    #[test]
    fn shared_memory_is_what_every_architecture_has() {
        let least = Arch::ALL.iter().filter(|arch| arch.is_ampere()).map(|arch| arch.block_shared()).min().unwrap();
        for width in (16..=MAX_WIDTH).step_by(16).filter(|width| *width <= 128 || width.is_multiple_of(32)) {
            for mask in [AttentionMask::Causal, AttentionMask::Additive(Dtype::F32)] {
                let kernel = AttentionKernel { width, ..kernel(Dtype::Bf16, mask) };
                let BackwardVariant::Tensor(tiles) = chosen(kernel, shape([8, 12, 1024, 1024]), 0, Arch::Sm80) else {
                    panic!("matrix units for {width}")
                };
                assert!(tiles.shared(width).iter().all(|&bytes| bytes <= least), "{width}: {:?}", tiles.shared(width));
                let whole = |side: SideTiles| side.tile.is_multiple_of(side.inner) && side.inner.is_multiple_of(16);
                assert!(whole(tiles.queries) && whole(tiles.keys) && (width / 16).is_multiple_of(tiles.parts));
            }
        }
    }
}
