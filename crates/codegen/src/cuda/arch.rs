//! Instruction sets of NVIDIA GPUs.

use std::fmt;
use std::str::FromStr;

/// A real architecture: what a cubin is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Arch {
    /// Turing
    Sm75,
    /// Ampere, A100
    Sm80,
    /// Ampere, RTX 30
    Sm86,
    /// Ada
    Sm89,
    /// Hopper, with its own instructions
    Sm90a,
    /// Blackwell, B200
    Sm100,
    /// Blackwell, RTX 50
    Sm120,
}

impl Arch {
    /// All of them, oldest first.
    pub const ALL: [Arch; 7] = [Arch::Sm75, Arch::Sm80, Arch::Sm86, Arch::Sm89, Arch::Sm90a, Arch::Sm100, Arch::Sm120];

    /// Its name for the compiler.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm75 => "sm_75",
            Arch::Sm80 => "sm_80",
            Arch::Sm86 => "sm_86",
            Arch::Sm89 => "sm_89",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100 => "sm_100",
            Arch::Sm120 => "sm_120",
        }
    }

    /// The one for a compute capability: the newest that its cubins run on.
    pub fn of(major: u32, minor: u32) -> Option<Arch> {
        match (major, minor) {
            (7, 5) => Some(Arch::Sm75),
            (8, 0) => Some(Arch::Sm80),
            (8, 6 | 7) => Some(Arch::Sm86),
            (8, 9) => Some(Arch::Sm89),
            (9, 0) => Some(Arch::Sm90a),
            (10, 0) => Some(Arch::Sm100),
            (12, 0) => Some(Arch::Sm120),
            _ => None,
        }
    }

    /// The one of a profile of ours.
    pub fn of_profile(name: &str) -> Option<Arch> {
        match name {
            "a100" => Some(Arch::Sm80),
            "rtx4090" => Some(Arch::Sm89),
            "h100" | "h200" => Some(Arch::Sm90a),
            _ => None,
        }
    }

    /// bf16 conversions, `max` that keeps NaN, asynchronous copies.
    pub fn is_ampere(self) -> bool {
        self >= Arch::Sm80
    }

    /// Thread-block clusters.
    pub fn has_clusters(self) -> bool {
        matches!(self, Arch::Sm90a | Arch::Sm100 | Arch::Sm120)
    }

    /// Programmatic dependent launch: grids that start before the previous one has ended, and wait for it by themselves.
    pub fn has_dependent_grids(self) -> bool {
        matches!(self, Arch::Sm90a | Arch::Sm100 | Arch::Sm120)
    }

    /// Products of a warpgroup: Hopper's alone, later ones have others.
    pub fn has_wgmma(self) -> bool {
        self == Arch::Sm90a
    }

    /// Bytes of shared memory one block may use.
    pub fn block_shared(self) -> usize {
        match self {
            Arch::Sm75 => 64 << 10,
            Arch::Sm80 => 163 << 10,
            Arch::Sm86 | Arch::Sm89 | Arch::Sm120 => 99 << 10,
            Arch::Sm90a | Arch::Sm100 => 227 << 10,
        }
    }

    /// Threads a multiprocessor holds.
    pub fn threads(self) -> usize {
        match self {
            Arch::Sm75 => 1024,
            Arch::Sm86 | Arch::Sm89 | Arch::Sm120 => 1536,
            Arch::Sm80 | Arch::Sm90a | Arch::Sm100 => 2048,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An unknown architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownArch(pub String);

impl fmt::Display for UnknownArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known: Vec<&str> = Arch::ALL.iter().map(|arch| arch.name()).collect();
        write!(f, "unknown architecture `{}`; expected one of {}", self.0, known.join(", "))
    }
}

impl std::error::Error for UnknownArch {}

impl FromStr for Arch {
    type Err = UnknownArch;
    fn from_str(text: &str) -> Result<Self, UnknownArch> {
        let wanted = if text == "sm_90" { "sm_90a" } else { text };
        Arch::ALL.into_iter().find(|arch| arch.name() == wanted).ok_or_else(|| UnknownArch(text.to_string()))
    }
}
