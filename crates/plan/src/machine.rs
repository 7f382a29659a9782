//! A machine: one number per line, each with its origin.
//!
//! Profiles are data files (`machines/*.toml`); a user's own file has the same format. A number that a file omits is
//! taken from the profile it is `based_on`, and keeps that profile's origin.

use std::collections::BTreeMap;
use std::fmt;

use deuteron_graph::named;
use serde::Deserialize;

use crate::kind::GroupKind;
use crate::units::{Bytes, Rate};

named! {
    /// The kind of a machine: which formulas price its kernels.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum MachineKind {
        /// Cores with vector units, and the tile machine.
        Cpu = "cpu",
        /// Multiprocessors with matrix units.
        Gpu = "gpu",
    }
}

macro_rules! quantities {
    ($($(#[doc = $text:literal])+ $variant:ident = $name:literal,)+) => {
        named! {
            /// Every number a machine may have. The name carries the unit.
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
            pub enum Quantity {
                $($(#[doc = $text])+ $variant = $name,)+
            }
        }

        impl Quantity {
            /// What it is.
            pub fn about(self) -> &'static str {
                match self {
                    $(Quantity::$variant => concat!($($text,)+).trim_ascii_start(),)+
                }
            }
        }
    };
}

quantities! {
    /// Main memory, read and written bytes both counted, GB/s.
    DramGbps = "dram_gbps",
    /// Last-level cache, GB/s.
    CacheGbps = "cache_gbps",
    /// Largest tensor that is still in the last-level cache when it is read, MB.
    CacheMb = "cache_mb",
    /// Second-level cache of all cores together, GB/s (CPU).
    InnerGbps = "inner_gbps",
    /// Second-level cache of all cores together, MB (CPU).
    InnerMb = "inner_mb",
    /// Stores past the caches, GB/s (CPU).
    StreamGbps = "stream_gbps",
    /// Matrix products of 16-bit operands with f32 sums, TFLOP/s.
    Matrix16Tflops = "matrix_16_tflops",
    /// Matrix products of f32 operands, TFLOP/s.
    Matrix32Tflops = "matrix_32_tflops",
    /// Plain f32 arithmetic, TFLOP/s.
    VectorTflops = "vector_tflops",
    /// Time between the end of one kernel and the full speed of the next, us.
    LaunchUs = "launch_us",
    /// The share of the shorter of memory and compute time that does not overlap with the longer.
    Exposed = "exposed",
    /// Tensors one kernel may read and write.
    KernelArguments = "kernel_arguments",
    /// Primitives one kernel may hold.
    KernelNodes = "kernel_nodes",
    /// Row-sized temporaries that one kernel may keep, KB.
    RowScratchKb = "row_scratch_kb",
    /// Cores, or multiprocessors.
    Processors = "processors",
    /// Registers of 32 bits a multiprocessor.
    Registers = "registers",
    /// Shared memory a multiprocessor, KB.
    SharedKb = "shared_kb",
    /// Shared memory a block may use, KB.
    BlockSharedKb = "block_shared_kb",
    /// Threads a multiprocessor holds.
    Threads = "threads",
    /// Lowest occupancy with full memory bandwidth.
    FullOccupancy = "full_occupancy",
    /// Rows of a matmul tile.
    TileRows = "tile_rows",
    /// Columns of a matmul tile.
    TileCols = "tile_cols",
    /// Blocks that share one load of a tile.
    Multicast = "multicast",
    /// Maximum rows at which a matmul streams its weights, so that a norm may be fused.
    FewRows = "few_rows",
    /// Maximum columns of a row that the blocks of a cluster hold between a matmul and work on whole rows; none without
    /// clusters.
    ClusterColumns = "cluster_columns",
    /// A barrier over all blocks of a kernel, us.
    BarrierUs = "barrier_us",
    /// Share of the matrix rate that attention reaches.
    AttentionShare = "attention_share",
    /// Distributing a kernel over the threads, us.
    ForkUs = "fork_us",
    /// Handing out one piece of a kernel's work, ns.
    ChunkNs = "chunk_ns",
    /// Handing out one instruction of the tile machine, ns.
    DispatchNs = "dispatch_ns",
    /// Starting a row of a row kernel, ns.
    RowNs = "row_ns",
    /// Starting a set of rows that are processed together, ns.
    FlightNs = "flight_ns",
    /// Addressing and fetching one argument for a set of rows, ns.
    RowArgumentNs = "row_argument_ns",
    /// One scalar operation of a row, ns.
    RowScalarNs = "row_scalar_ns",
    /// A partial vector, ns beyond a full one.
    TailNs = "tail_ns",
    /// Loading or storing 16 f32 of a strip, ns.
    MoveNs = "move_ns",
    /// Converting 16 values between f32 and a narrower type, ns.
    ConvertNs = "convert_ns",
    /// Additions, products, comparisons, selections of 16 values, ns.
    SimpleNs = "simple_ns",
    /// Division, square root, reciprocal of 16 values, ns.
    DivideNs = "divide_ns",
    /// Exponential of 16 values, ns.
    ExpNs = "exp_ns",
    /// Hyperbolic tangent, sigmoid, GELU or SiLU of 16 values, ns.
    TanhNs = "tanh_ns",
    /// Error function or logarithm of 16 values, ns.
    ErfNs = "erf_ns",
    /// Random bits of 16 values, ns.
    RandomNs = "random_ns",
    /// Reducing 16 values, ns.
    ReduceNs = "reduce_ns",
    /// Finishing the reduction of a row, ns.
    ReductionNs = "reduction_ns",
    /// Adding 16 values to a column sum, ns.
    ColumnNs = "column_ns",
    /// Adding up one element of the threads' column sums, ns.
    FinishNs = "finish_ns",
    /// One element moved by a strided copy, ns.
    CopyElementNs = "copy_element_ns",
    /// 64 columns of one row added into a table, ns.
    ScatterRowNs = "scatter_row_ns",
    /// 64 columns of a table's row written, ns.
    ClearRowNs = "clear_row_ns",
    /// One block of a product, beyond its arithmetic, ns.
    ProductNs = "product_ns",
    /// Packing one element of a product's operand, ns.
    PackNs = "pack_ns",
    /// Time of a reference kernel when the numbers were fitted, which measures the machine's speed at that time, us (CPU).
    AnchorUs = "anchor_us",
    /// Measured over predicted time of row kernels.
    CorrectRow = "correct_row",
    /// Measured over predicted time of matrix products.
    CorrectMatmul = "correct_matmul",
    /// Measured over predicted time of attention.
    CorrectAttention = "correct_attention",
    /// Measured over predicted time of copies.
    CorrectCopy = "correct_copy",
    /// Measured over predicted time of scatters.
    CorrectScatterAdd = "correct_scatter_add",
}

/// A number and its origin.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Number {
    /// the number, in the unit of its name
    pub value: f64,
    /// a datasheet, a measurement with its date, or a reason
    pub origin: String,
}

/// A machine: a name, a kind, and its numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// Name in reports.
    pub name: String,
    /// Which formulas apply.
    pub kind: MachineKind,
    numbers: BTreeMap<Quantity, Number>,
    /// the profile that a file builds on
    based_on: Option<String>,
}

/// Why a machine file was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum MachineError {
    /// Not TOML, or a key is missing or invalid.
    #[error("machine file: {0}")]
    Malformed(String),
    /// Too large.
    #[error("machine file: expected at most {limit} bytes, got {got}")]
    TooLarge {
        /// the limit
        limit: usize,
        /// bytes of the file
        got: usize,
    },
    /// An unknown number.
    #[error("machine file: unknown number `{name}`; known are {known}")]
    UnknownNumber {
        /// as written
        name: String,
        /// all names
        known: String,
    },
    /// A number out of range.
    #[error("machine file: `{name}` must be {expected}, got {value}")]
    Range {
        /// the number
        name: &'static str,
        /// its range
        expected: &'static str,
        /// the value found
        value: f64,
    },
    /// A missing number that this kind of machine needs.
    #[error(
        "machine file: `{name}` is missing; {about} Give it, or base the file on a profile with based_on = \"...\""
    )]
    Missing {
        /// the number
        name: &'static str,
        /// what it is
        about: &'static str,
    },
    /// A profile that does not exist.
    #[error("unknown machine `{name}`; expected {}, or a file", Machine::PROFILES.join(", "))]
    UnknownProfile {
        /// as given
        name: String,
    },
}

/// The longest machine file that is read; ours have 5 KB.
const MAX_FILE: usize = 1 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    kind: Option<String>,
    based_on: Option<String>,
    #[serde(default)]
    numbers: BTreeMap<String, Number>,
}

impl File {
    fn parse(text: &str) -> Result<File, MachineError> {
        if text.len() > MAX_FILE {
            return Err(MachineError::TooLarge { limit: MAX_FILE, got: text.len() });
        }
        toml::from_str(text).map_err(|error| MachineError::Malformed(error.to_string()))
    }
}

impl Machine {
    /// The profiles that come with Deuteron.
    pub const PROFILES: [&str; 5] = ["cpu", "a100", "h100", "h200", "rtx4090"];

    /// The text of a profile.
    pub fn profile_text(name: &str) -> Result<&'static str, MachineError> {
        Ok(match name {
            "cpu" => include_str!("../machines/cpu.toml"),
            "a100" => include_str!("../machines/a100.toml"),
            "h100" => include_str!("../machines/h100.toml"),
            "h200" => include_str!("../machines/h200.toml"),
            "rtx4090" => include_str!("../machines/rtx4090.toml"),
            other => return Err(MachineError::UnknownProfile { name: other.to_string() }),
        })
    }

    /// A profile by name.
    pub fn profile(name: &str) -> Result<Machine, MachineError> {
        Machine::parse(Machine::profile_text(name)?)
    }

    /// The shipped CPU profile, before any calibration.
    pub fn cpu() -> Machine {
        // A test parses every profile, so the fall-back is never taken.
        Machine::profile("cpu").unwrap_or(Machine {
            name: "cpu".into(),
            kind: MachineKind::Cpu,
            numbers: BTreeMap::new(),
            based_on: None,
        })
    }

    /// Reads a machine file.
    pub fn parse(text: &str) -> Result<Machine, MachineError> {
        Machine::parse_within(text, 4)
    }

    fn parse_within(text: &str, depth: usize) -> Result<Machine, MachineError> {
        let file = File::parse(text)?;
        let base = match &file.based_on {
            Some(_) if depth == 0 => return Err(MachineError::Malformed("`based_on` leads nowhere".into())),
            Some(name) => Some(Machine::parse_within(Machine::profile_text(name)?, depth - 1)?),
            None => None,
        };
        let kind = match (file.kind.as_deref(), &base) {
            (Some("cpu"), _) => MachineKind::Cpu,
            (Some("gpu"), _) => MachineKind::Gpu,
            (Some(other), _) => return Err(MachineError::Malformed(format!("kind must be cpu or gpu, got `{other}`"))),
            (None, Some(base)) => base.kind,
            (None, None) => return Err(MachineError::Malformed("`kind` is missing; expected cpu or gpu".into())),
        };
        let mut numbers = base.map(|base| base.numbers).unwrap_or_default();
        for (name, number) in file.numbers {
            let quantity = Quantity::named(name)?;
            quantity.check(number.value)?;
            numbers.insert(quantity, number);
        }
        for quantity in Quantity::ALL {
            if quantity.is_needed(kind) && !numbers.contains_key(&quantity) {
                return Err(MachineError::Missing { name: quantity.name(), about: quantity.about() });
            }
        }
        // A stored file of a profile's machine is that machine.
        let based_on = file.based_on.filter(|base| *base != file.name);
        Ok(Machine { name: file.name, kind, numbers, based_on })
    }

    /// The profile it is, or is based on, if any.
    pub fn profile_name(&self) -> Option<&str> {
        let own = Machine::PROFILES.contains(&self.name.as_str()).then_some(self.name.as_str());
        own.or(self.based_on.as_deref())
    }

    /// A number; 1 if the machine has none, which only applies to corrections.
    pub fn get(&self, quantity: Quantity) -> f64 {
        self.numbers.get(&quantity).map_or(1.0, |number| number.value)
    }

    /// A number, if the machine has it.
    pub fn find(&self, quantity: Quantity) -> Option<f64> {
        self.numbers.get(&quantity).map(|number| number.value)
    }

    /// A number that counts things.
    pub fn count(&self, quantity: Quantity) -> usize {
        self.get(quantity) as usize
    }

    /// A rate given in GB/s.
    pub fn gbps(&self, quantity: Quantity) -> Rate {
        Rate { per_second: self.get(quantity) * 1e9 }
    }

    /// A rate given in TFLOP/s.
    pub fn tflops(&self, quantity: Quantity) -> Rate {
        Rate { per_second: self.get(quantity) * 1e12 }
    }

    /// A size given in KB.
    pub fn kilobytes(&self, quantity: Quantity) -> Bytes {
        Bytes((self.get(quantity) * 1024.0) as u64)
    }

    /// A size given in MB.
    pub fn megabytes(&self, quantity: Quantity) -> Bytes {
        Bytes((self.get(quantity) * 1048576.0) as u64)
    }

    /// All numbers it has, in the order of [`Quantity::ALL`].
    pub fn numbers(&self) -> impl Iterator<Item = (Quantity, &Number)> {
        self.numbers.iter().map(|(&quantity, number)| (quantity, number))
    }

    /// The same machine with one number replaced.
    pub fn with(mut self, quantity: Quantity, value: f64, origin: &str) -> Result<Machine, MachineError> {
        quantity.check(value)?;
        self.numbers.insert(quantity, Number { value, origin: origin.to_string() });
        Ok(self)
    }

    /// Where its numbers come from.
    pub fn basis(&self) -> Basis {
        let shipped = Machine::profile(&self.name).ok();
        let own = |quantity: Quantity, number: &Number| {
            shipped.as_ref().is_none_or(|shipped| shipped.numbers.get(&quantity) != Some(number))
        };
        let any =
            |is: &dyn Fn(&Number) -> bool| self.numbers().any(|(quantity, number)| own(quantity, number) && is(number));
        let like_another = shipped.is_none() && self.name.contains("(like ");
        match shipped.is_some() || like_another {
            _ if any(&Number::is_learnt) => Basis::Learnt,
            true if any(&Number::is_calibrated) => Basis::Calibrated,
            true if self.kind == MachineKind::Cpu || like_another => Basis::Guessed,
            _ => Basis::Given,
        }
    }

    /// The same with a number that `fuse` learnt. Calibrated numbers are not changed.
    pub fn learn(self, quantity: Quantity, value: f64, origin: &str) -> Result<Machine, MachineError> {
        self.with(quantity, value, &format!("{LEARNT} {origin}"))
    }

    /// Whether a number may be learnt: there is none yet, or it was learnt before.
    pub fn may_learn(&self, quantity: Quantity) -> bool {
        self.numbers.get(&quantity).is_none_or(Number::is_learnt)
    }

    /// The same without learnt numbers.
    pub fn without_learnt(mut self) -> Machine {
        self.numbers.retain(|_, number| !number.is_learnt());
        self
    }

    /// The learnt numbers, as a separate data file.
    pub fn learnt_text(&self) -> String {
        let mut text = format!("name = {}\n\n[numbers]\n", quoted(&self.name));
        let learnt = self.numbers().filter(|(_, number)| number.is_learnt());
        learnt.for_each(|(quantity, number)| text += &number_line(quantity, number));
        text
    }

    /// The same with the numbers of a file from [`Machine::learnt_text`]. Calibrated numbers are not changed.
    pub fn with_learnt(mut self, text: &str) -> Result<Machine, MachineError> {
        let file = File::parse(text)?;
        for (name, number) in file.numbers {
            let quantity = Quantity::named(name)?;
            quantity.check(number.value)?;
            if self.may_learn(quantity) && number.is_learnt() {
                self.numbers.insert(quantity, number);
            }
        }
        Ok(self)
    }

    /// The number that corrects a class of kernels by measurements.
    pub fn correction(&self, kind: GroupKind) -> f64 {
        match kind {
            GroupKind::Row => self.get(Quantity::CorrectRow),
            GroupKind::Matmul => self.get(Quantity::CorrectMatmul),
            GroupKind::Attention => self.get(Quantity::CorrectAttention),
            GroupKind::Copy | GroupKind::Append => self.get(Quantity::CorrectCopy),
            GroupKind::ScatterAdd => self.get(Quantity::CorrectScatterAdd),
            GroupKind::Opaque => 1.0,
        }
    }
}

/// The prefix of a learnt number's origin.
const LEARNT: &str = "learnt:";
/// The same in version 0.1, which mixed learnt numbers with calibrated ones.
const LEARNT_BEFORE: &str = "measured over predicted, by ";

impl Number {
    fn is_learnt(&self) -> bool {
        self.origin.starts_with(LEARNT) || self.origin.starts_with(LEARNT_BEFORE)
    }

    fn is_calibrated(&self) -> bool {
        self.origin.contains("doctor --calibrate")
    }
}

named! {
    /// The origin of a machine's numbers.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Basis {
        /// Fitted on this machine by `doctor --calibrate`.
        Calibrated = "calibrated",
        /// Corrected by what `fuse` measured on this machine.
        Learnt = "learnt",
        /// Those of another machine.
        Guessed = "guessed",
        /// Those of a profile or a file that the user named.
        Given = "given",
    }
}

impl Quantity {
    fn named(name: String) -> Result<Quantity, MachineError> {
        let unknown = |name| MachineError::UnknownNumber { name, known: Quantity::ALL.map(Quantity::name).join(", ") };
        Quantity::find(&name).ok_or_else(|| unknown(name))
    }

    /// Whether it is a count, with whole values.
    fn is_count(self) -> bool {
        use Quantity::*;
        let of_kernels = [KernelArguments, KernelNodes, TileRows, TileCols, Multicast, FewRows, ClusterColumns];
        of_kernels.contains(&self) || [Processors, Registers, Threads].contains(&self)
    }

    /// Finite and not negative; divisors above zero; counts whole.
    fn check(self, value: f64) -> Result<(), MachineError> {
        let bad = |expected| Err(MachineError::Range { name: self.name(), expected, value });
        let may_be_zero =
            matches!(self, Quantity::LaunchUs | Quantity::ForkUs | Quantity::BarrierUs | Quantity::Exposed)
                || self.name().ends_with("_ns");
        match may_be_zero {
            true if !(0.0..1e9).contains(&value) => bad("from 0 to 1e9"),
            false if self.is_count() && !((1.0..=1e6).contains(&value) && value.fract() == 0.0) => {
                bad("a whole number from 1 to 1000000")
            }
            false if !(1e-9..1e12).contains(&value) => bad("above 0 and below 1e12"),
            _ => Ok(()),
        }
    }

    fn is_needed(self, kind: MachineKind) -> bool {
        use Quantity::*;
        match self {
            DramGbps | CacheGbps | CacheMb | Matrix16Tflops | Matrix32Tflops | VectorTflops | LaunchUs | Exposed => {
                true
            }
            KernelArguments | KernelNodes | RowScratchKb | Processors | FewRows => true,
            Registers | SharedKb | BlockSharedKb | Threads | FullOccupancy | TileRows | TileCols | Multicast
            | BarrierUs | AttentionShare => kind == MachineKind::Gpu,
            InnerGbps | InnerMb | StreamGbps | ForkUs | ChunkNs | DispatchNs | RowNs | FlightNs => {
                kind == MachineKind::Cpu
            }
            RowArgumentNs | RowScalarNs | TailNs | MoveNs | ConvertNs | SimpleNs | DivideNs | ExpNs | TanhNs
            | ErfNs | RandomNs | ReduceNs | ReductionNs | ColumnNs | FinishNs | CopyElementNs | ScatterRowNs
            | ClearRowNs | ProductNs | PackNs => kind == MachineKind::Cpu,
            ClusterColumns | AnchorUs | CorrectRow | CorrectMatmul | CorrectAttention | CorrectCopy
            | CorrectScatterAdd => false,
        }
    }
}

/// The data file, as [`Machine::parse`] reads it.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "name = {}", quoted(&self.name))?;
        writeln!(f, "kind = \"{}\"", self.kind.name())?;
        if let Some(profile) = &self.based_on {
            writeln!(f, "based_on = {}", quoted(profile))?;
        }
        writeln!(f, "\n[numbers]")?;
        self.numbers().try_for_each(|(quantity, number)| f.write_str(&number_line(quantity, number)))
    }
}

fn number_line(quantity: Quantity, number: &Number) -> String {
    format!("{} = {{ value = {:?}, origin = {} }}\n", quantity.name(), number.value, quoted(&number.origin))
}

fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out += &format!("\\u{:04X}", c as u32),
            c => out.push(c),
        }
    }
    out + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_reads_and_prints_back() {
        for name in Machine::PROFILES {
            let machine = Machine::profile(name).unwrap();
            assert_eq!(machine.name, name);
            assert_eq!(Machine::parse(&machine.to_string()).unwrap(), machine);
            assert!(machine.numbers().all(|(_, number)| number.origin.len() > 5), "{name}: every number has an origin");
        }
    }

    #[test]
    fn a_machine_says_where_its_numbers_come_from() {
        assert_eq!(Machine::cpu().basis(), Basis::Guessed);
        assert_eq!(Machine::profile("h200").unwrap().basis(), Basis::Given);
        let fitted = "fitted by doctor --calibrate to 3 kernels, 2026-11-18";
        let calibrated = Machine::cpu().with(Quantity::DramGbps, 31.0, fitted).unwrap();
        assert_eq!(calibrated.basis(), Basis::Calibrated);
        let learnt = calibrated.clone().learn(Quantity::CorrectRow, 0.9, "by `fuse act`").unwrap();
        assert_eq!(learnt.basis(), Basis::Learnt);
        assert!(learnt.may_learn(Quantity::CorrectRow) && !learnt.may_learn(Quantity::DramGbps));
        assert_eq!(learnt.clone().without_learnt(), calibrated);
        // What was learnt has a file of its own, which changes nothing that a calibration fitted.
        let text = learnt.learnt_text();
        assert_eq!(text.lines().filter(|line| line.contains("origin")).count(), 1, "{text}");
        assert_eq!(calibrated.clone().with_learnt(&text).unwrap(), learnt);
        let fitted_row = calibrated.with(Quantity::CorrectRow, 1.3, fitted).unwrap();
        assert_eq!(fitted_row.clone().with_learnt(&text).unwrap(), fitted_row);
    }

    #[test]
    fn a_users_file_keeps_what_it_does_not_say() {
        let text = "name = \"mine\"\nbased_on = \"h200\"\n[numbers]\ndram_gbps = { value = 1000, origin = \"me\" }";
        let machine = Machine::parse(text).unwrap();
        assert_eq!(machine.get(Quantity::DramGbps), 1000.0);
        assert_eq!(machine.kind, MachineKind::Gpu);
        let h200 = Machine::profile("h200").unwrap();
        assert_eq!(machine.get(Quantity::CacheGbps), h200.get(Quantity::CacheGbps));
    }

    #[test]
    fn bad_files_say_what_is_wrong() {
        let refused = |text: &str| Machine::parse(text).unwrap_err().to_string();
        assert!(refused("name = \"x\"").contains("`kind` is missing"));
        assert!(refused("name = \"x\"\nkind = \"gpu\"").contains("`dram_gbps` is missing"));
        let number = |line: &str| format!("name = \"x\"\nbased_on = \"h200\"\n[numbers]\n{line}");
        assert!(refused(&number("drum = { value = 1, origin = \"\" }")).contains("unknown number `drum`"));
        assert!(refused(&number("dram_gbps = { value = -1, origin = \"\" }")).contains("must be above 0"));
        assert!(refused(&number("dram_gbps = { value = nan, origin = \"\" }")).contains("must be above 0"));
        for count in ["processors", "registers", "threads", "kernel_arguments", "kernel_nodes", "few_rows"] {
            for value in ["0.5", "0", "1.5", "1e7", "nan"] {
                let message = refused(&number(&format!("{count} = {{ value = {value}, origin = \"\" }}")));
                assert!(message.contains("must be a whole number from 1 to 1000000"), "{message}");
            }
        }
        assert!(refused(&number("tile_rows = { value = 0.5, origin = \"\" }")).contains("a whole number"));
        assert!(refused("name = \"x\"\nbased_on = \"cray\"").contains("expected cpu, a100"));
    }
}
