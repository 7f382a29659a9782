//! The device-side library of CUDA kernels, in files by topic, with the names of the PTX manual.
//!
//! A kernel names the parts that it uses, [`text`] puts them before its own text, in one order and each once. No other text of
//! a kernel has inline assembly for these instructions, so that any family can use them and one emulator
//! (`emulator/src/machine/tile/`, with a file per part) implements them on a CPU. Parts need no `#include` and define only `static` functions and types, so that
//! unused functions cost nothing.
//!
//! Programmatic dependent launch (`dependent_launch.cuh`): on Hopper and later a captured grid in which every thread waits for earlier grids by
//! itself ([`crate::cuda::Grid::waits`]) may start before the previous grid has ended, if that one waits too. Before the wait it prefetches
//! data that no kernel of the job writes ([`crate::cuda::Word::Unwritten`]): weights into registers; norms, bias and cached keys into the L2.
//! Grids of persistent blocks over rows, and library calls, start after the end of the previous grid.

pub mod tensor_map;

/// A file of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// integer types by their width
    Words,
    /// random words of Philox4x32-10
    Philox,
    /// programmatic dependent launch, prefetches into the L2
    DependentLaunch,
    /// addresses of shared memory as instructions take them
    SharedAddress,
    /// approximate functions, conversions between f32 and storage types
    Conversions,
    /// shuffles and votes of a warp
    Warp,
    /// loads and stores of global memory with cache hints
    GlobalMemory,
    /// cp.async and its commit groups
    AsyncCopy,
    /// ldmatrix, stmatrix and mma of a warp
    Matrix,
    /// barriers in shared memory that count arrivals and bytes
    Mbarrier,
    /// barriers of some warps of a block
    NamedBarrier,
    /// clusters and distributed shared memory
    Cluster,
    /// bulk copies by tensor maps
    Tma,
    /// ordered loads, stores and atomics between blocks and warps
    Signals,
    /// register reallocation and hints for live ranges
    Registers,
    /// matrix multiply-accumulate of a warpgroup
    Wgmma,
}

impl Part {
    /// All parts, each behind those that it needs.
    pub const ALL: [Part; 16] = [
        Part::Words,
        Part::Philox,
        Part::DependentLaunch,
        Part::SharedAddress,
        Part::Conversions,
        Part::Warp,
        Part::GlobalMemory,
        Part::AsyncCopy,
        Part::Matrix,
        Part::Mbarrier,
        Part::NamedBarrier,
        Part::Cluster,
        Part::Tma,
        Part::Signals,
        Part::Registers,
        Part::Wgmma,
    ];

    /// The name of its file, here and in the emulator, without an ending.
    pub fn name(self) -> &'static str {
        match self {
            Part::Words => "words",
            Part::Philox => "philox",
            Part::DependentLaunch => "dependent_launch",
            Part::SharedAddress => "shared_address",
            Part::Conversions => "conversions",
            Part::Warp => "warp",
            Part::GlobalMemory => "global_memory",
            Part::AsyncCopy => "async_copy",
            Part::Matrix => "matrix",
            Part::Mbarrier => "mbarrier",
            Part::NamedBarrier => "named_barrier",
            Part::Cluster => "cluster",
            Part::Tma => "tma",
            Part::Signals => "signals",
            Part::Registers => "registers",
            Part::Wgmma => "wgmma",
        }
    }

    /// Its text.
    pub fn text(self) -> &'static str {
        match self {
            Part::Words => include_str!("words.cuh"),
            Part::Philox => include_str!("philox.cuh"),
            Part::DependentLaunch => include_str!("dependent_launch.cuh"),
            Part::SharedAddress => include_str!("shared_address.cuh"),
            Part::Conversions => include_str!("conversions.cuh"),
            Part::Warp => include_str!("warp.cuh"),
            Part::GlobalMemory => include_str!("global_memory.cuh"),
            Part::AsyncCopy => include_str!("async_copy.cuh"),
            Part::Matrix => include_str!("matrix.cuh"),
            Part::Mbarrier => include_str!("mbarrier.cuh"),
            Part::NamedBarrier => include_str!("named_barrier.cuh"),
            Part::Cluster => include_str!("cluster.cuh"),
            Part::Tma => include_str!("tma.cuh"),
            Part::Signals => include_str!("signals.cuh"),
            Part::Registers => include_str!("registers.cuh"),
            Part::Wgmma => include_str!("wgmma.cuh"),
        }
    }

    /// The parts that it needs before it.
    fn needs(self) -> &'static [Part] {
        match self {
            Part::Words | Part::DependentLaunch | Part::NamedBarrier => &[],
            Part::Philox | Part::SharedAddress | Part::Conversions | Part::Warp => &[Part::Words],
            Part::GlobalMemory | Part::Signals | Part::Registers => &[Part::Words],
            Part::AsyncCopy | Part::Matrix | Part::Mbarrier => &[Part::Words, Part::SharedAddress],
            Part::Cluster | Part::Tma => &[Part::Words, Part::SharedAddress, Part::Mbarrier],
            Part::Wgmma => &[Part::Words, Part::SharedAddress],
        }
    }
}

/// The text of some parts and of those that they need, each once, whatever order they are listed in.
pub fn text(parts: &[Part]) -> String {
    text_beside(parts, &[])
}

/// The same where the text of other parts stands before it.
pub fn text_beside(parts: &[Part], present: &[Part]) -> String {
    let among = |part: &Part, list: &[Part]| list.iter().any(|listed| listed == part || listed.needs().contains(part));
    let wanted = |part: &Part| among(part, parts) && !among(part, present);
    let texts: Vec<&str> = Part::ALL.into_iter().filter(wanted).map(Part::text).collect();
    texts.join("\n")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    #[test]
    fn parts_stand_once_and_behind_what_they_need() {
        assert!(Part::ALL.is_sorted());
        for part in Part::ALL {
            for need in part.needs() {
                assert!(need < &part, "{need:?} for {part:?}");
                // One step finds them all.
                assert!(need.needs().iter().all(|further| part.needs().contains(further)), "{need:?} for {part:?}");
            }
        }
        let rest = text_beside(&[Part::Wgmma, Part::Mbarrier], &[Part::Mbarrier]);
        assert_eq!(rest, Part::Wgmma.text());
        let twice = text(&[Part::Wgmma, Part::Mbarrier, Part::Mbarrier]);
        assert_eq!(twice, [Part::Words, Part::SharedAddress, Part::Mbarrier, Part::Wgmma].map(Part::text).join("\n"));
    }

    /// Files of the crate with one of some endings, and their texts.
    fn files(endings: &[&str]) -> Vec<(PathBuf, String)> {
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        let mut found = Vec::new();
        while let Some(folder) = folders.pop() {
            for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
                if path.is_dir() {
                    folders.push(path);
                } else if endings.iter().any(|&ending| path.extension().is_some_and(|own| own == ending)) {
                    let text = fs::read_to_string(&path).unwrap();
                    found.push((path, text));
                }
            }
        }
        found
    }

    /// `hold.cu` reads the clock, which no kernel that computes does.
    #[test]
    fn no_other_file_has_instructions_of_its_own() {
        let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tile");
        for (path, text) in files(&["cu", "cuh"]) {
            let allowed = path.starts_with(&library) || path.ends_with("hold.cu");
            assert!(allowed || !text.contains("asm"), "{}", path.display());
        }
    }

    #[test]
    fn no_family_includes_a_file_of_another() {
        let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels");
        for (path, text) in files(&["rs"]).into_iter().filter(|(path, _)| path.starts_with(&families)) {
            assert!(!text.contains("include_str!(\"../"), "{}", path.display());
        }
    }

    #[test]
    fn parts_are_short_and_free_of_includes() {
        for part in Part::ALL {
            let text = part.text();
            assert!(text.starts_with("// ") && text.ends_with('\n') && !text.contains("#include"), "{part:?}");
            assert!(text.lines().count() < 200, "{part:?}");
        }
    }
}
