//! Probabilities that are stored: which kernel, how it is launched, what it is given.

use super::super::scores::Scores;
use super::*;

fn probabilities(dtype: Dtype, mask: AttentionMask) -> AttentionKernel {
    AttentionKernel { result: AttentionResult::Probabilities, ..kernel(dtype, mask) }
}

/// Contiguous results, and masks of all heads.
fn stored([batch, heads, queries, keys]: [usize; 4]) -> AttentionShape {
    let o = HeadStrides { batch: heads * queries * keys, head: queries * keys, position: keys };
    let mask = HeadStrides { batch: 0, head: 0, position: keys };
    AttentionShape { o, mask, ..shape([batch, heads, queries, keys]) }
}

fn chosen(kernel: AttentionKernel, shape: AttentionShape, offset: usize, arch: Arch) -> Scores {
    match variant(kernel, shape, offset, arch) {
        ForwardVariant::Scores(scores) => scores,
        variant => panic!("{variant:?}"),
    }
}

#[test]
fn the_kernel_follows_from_sizes_storage_and_alignment() {
    let causal = probabilities(Dtype::Bf16, AttentionMask::Causal);
    let many = stored([8, 12, 1024, 1024]);
    let atoms = |kernel, shape, offset, arch| match chosen(kernel, shape, offset, arch) {
        Scores::Tensor { tiles, together } => Some((tiles.atoms, together)),
        Scores::Plain => None,
    };
    assert_eq!(atoms(causal, many, 0, Arch::Sm90a), Some((2, 8)));
    assert_eq!(atoms(causal, many, 8, Arch::Sm80), Some((2, 8)));
    assert_eq!(atoms(AttentionKernel { width: 128, ..causal }, many, 0, Arch::Sm90a), Some((2, 8)));
    assert_eq!(atoms(AttentionKernel { width: 256, ..causal }, many, 0, Arch::Sm90a), Some((1, 8)));
    // Few blocks; one query is a tile like any other.
    assert_eq!(atoms(causal, stored([1, 12, 1024, 1024]), 0, Arch::Sm90a), Some((1, 8)));
    assert_eq!(atoms(causal, stored([8, 12, 1, 1024]), 0, Arch::Sm90a), Some((1, 8)));
    // Rows of the result that do not end with whole pieces.
    assert_eq!(atoms(causal, stored([8, 12, 1024, 1020]), 0, Arch::Sm90a), Some((1, 4)));
    assert_eq!(atoms(causal, stored([8, 12, 1024, 1022]), 0, Arch::Sm90a), Some((1, 2)));
    assert_eq!(atoms(causal, stored([8, 12, 1024, 1023]), 0, Arch::Sm90a), Some((1, 1)));
    let apart = AttentionShape { o: HeadStrides { position: 1026, ..many.o }, ..many };
    assert_eq!(atoms(causal, apart, 0, Arch::Sm90a), Some((1, 2)));
    // So do those of a mask: four of f32 are 16 bytes as eight of bf16 are.
    let added = |dtype| probabilities(Dtype::Bf16, AttentionMask::Additive(dtype));
    let masked = |position| AttentionShape { mask: HeadStrides { position, ..many.mask }, ..many };
    assert_eq!(atoms(added(Dtype::F32), masked(1028), 0, Arch::Sm90a), Some((2, 8)));
    assert_eq!(atoms(added(Dtype::Bf16), masked(1028), 0, Arch::Sm90a), Some((1, 4)));
    assert_eq!(atoms(added(Dtype::F32), masked(1025), 0, Arch::Sm90a), Some((1, 1)));
    // Queries and keys of part of a piece; f32; an old GPU; a width of half a step.
    assert_eq!(atoms(causal, many, 4, Arch::Sm90a), None);
    assert_eq!(atoms(causal, AttentionShape { k: HeadStrides { position: 65, ..ROW }, ..many }, 0, Arch::Sm90a), None);
    assert_eq!(atoms(probabilities(Dtype::F32, AttentionMask::Full), many, 0, Arch::Sm90a), None);
    assert_eq!(atoms(causal, many, 0, Arch::Sm75), None);
    assert_eq!(atoms(AttentionKernel { width: 40, ..causal }, many, 0, Arch::Sm90a), None);
}

#[test]
fn a_launch_is_one_grid() {
    let target = CudaTarget::new(Arch::Sm90a, 132);
    let grid = |kernel: AttentionKernel, sizes: [usize; 4]| {
        let made = forward::kernel(&lowered(&kernel, stored(sizes), 0), &target);
        let Grids { list, workspace, .. } = grids(&made);
        assert!(workspace == 0 && list.len() <= 1);
        list.first().map(|grid| (grid.entry, grid.blocks[0], grid.threads, grid.shared))
    };
    let causal = probabilities(Dtype::Bf16, AttentionMask::Causal);
    assert_eq!(grid(causal, [8, 12, 1024, 1024]), Some(("attention_scores", 768, 128, 36_864)));
    assert_eq!(grid(causal, [1, 12, 65, 100]), Some(("attention_scores", 24, 128, 27_648)));
    let single = probabilities(Dtype::F32, AttentionMask::Causal);
    assert_eq!(grid(single, [1, 12, 65, 65]), Some(("attention_scores_plain", 24, 256, 0)));
    for empty in [[0, 12, 9, 9], [1, 0, 9, 9], [1, 12, 0, 9]] {
        assert_eq!(grid(causal, empty), None);
    }
}

#[test]
fn shared_memory_is_what_every_architecture_has() {
    let least = Arch::ALL.iter().filter(|arch| arch.is_ampere()).map(|arch| arch.block_shared()).min();
    for width in (16..=MAX_WIDTH).step_by(16) {
        for sizes in [[8, 12, 1024, 1024], [1, 1, 9, 1000]] {
            let kernel = AttentionKernel { width, ..probabilities(Dtype::Bf16, AttentionMask::Causal) };
            let scores = chosen(kernel, stored(sizes), 0, Arch::Sm80);
            assert!(Some(scores.shared(width)) <= least, "{width}: {} bytes", scores.shared(width));
        }
    }
}

#[test]
fn there_are_no_values_among_the_words() {
    let at = |position: usize, offset: usize| Word::Argument { position, offset };
    let none = Word::Number(0);
    let shape = stored([3, 4, 50, 600]);
    let of = |mask: AttentionMask| {
        let kernel = probabilities(Dtype::Bf16, mask);
        words(&kernel, &shape, &lowered(&kernel, shape, 8).args, 1)
    };
    assert_eq!(of(AttentionMask::Causal)[..9], [at(0, 16), at(1, 16), none, none, none, none, at(2, 16), none, none]);
    let added = of(AttentionMask::Additive(Dtype::F32));
    assert_eq!(added[..9], [at(0, 16), at(1, 16), none, at(2, 32), none, none, at(3, 16), none, none]);
    let cached = of(AttentionMask::Cached);
    assert_eq!(cached[..9], [at(0, 16), at(1, 16), none, none, none, at(2, 32), at(3, 16), none, none]);
    assert_eq!(cached[9..15], [3, 4, 1, 50, 600, 1].map(Word::Number));
    assert_eq!(cached[27..], [120_000, 30_000, 600].map(Word::Number));
}
