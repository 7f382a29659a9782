//! Sizes of inputs: given, stated by the file, or assumed with a note.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::OnnxError;
use crate::options::Options;
use crate::schema::{Dim, GraphProto, ValueInfo, short};

/// Sizes of dimensions that the file leaves open.
const BATCH: i64 = 1;
const CHANNELS: i64 = 3;
const SAMPLES: i64 = 16_000;

/// Sizes that are assumed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Guess {
    /// Height and width.
    pub image: (i64, i64),
    pub sequence: i64,
}

const FIRST: Guess = Guess { image: (224, 224), sequence: 128 };

/// What is tried in turn: images of classifiers, of lines of text, of detectors; sequences of audio, and of models whose tables of
/// positions are short; a second of sound for models that cut samples into frames themselves.
pub(super) const GUESSES: [Guess; 11] = [
    FIRST,
    Guess { image: (48, 320), ..FIRST },
    Guess { image: (32, 320), ..FIRST },
    Guess { image: (64, 256), ..FIRST },
    Guess { image: (640, 640), ..FIRST },
    Guess { image: (800, 608), ..FIRST },
    Guess { sequence: 512, ..FIRST },
    Guess { sequence: 64, ..FIRST },
    Guess { sequence: 16, ..FIRST },
    Guess { sequence: 8, ..FIRST },
    Guess { sequence: SAMPLES, ..FIRST },
];

/// What an open dimension counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Batch,
    Sequence,
    /// Tokens of a cache and those that are new.
    Total,
    Channels,
    Image,
    Samples,
}

/// Sizes of dimensions, and which of the given ones were used.
#[derive(Debug)]
pub(super) struct Sizes<'m> {
    options: &'m Options,
    /// Sizes by the name of the dimension.
    assumed: BTreeMap<String, i64>,
    used: BTreeSet<String>,
    is_batch_used: bool,
    is_sequence_used: bool,
    /// The batch that the file fixes, where another is asked for.
    fixed_batch: Option<i64>,
    has_cache: bool,
    guess: Guess,
    is_image_assumed: bool,
    is_sequence_assumed: bool,
    pub notes: Vec<String>,
}

impl<'m> Sizes<'m> {
    pub fn new(options: &'m Options, guess: Guess) -> Self {
        Sizes {
            options,
            assumed: BTreeMap::new(),
            used: BTreeSet::new(),
            is_batch_used: false,
            is_sequence_used: false,
            fixed_batch: None,
            has_cache: false,
            guess,
            is_image_assumed: false,
            is_sequence_assumed: false,
            notes: Vec::new(),
        }
    }

    /// Looks at all inputs together: which batch they share, and whether there is a cache.
    pub fn look_at(&mut self, graph: &GraphProto) {
        let stored: BTreeSet<&str> = graph.initializers.iter().map(|tensor| tensor.name).collect();
        let inputs = || graph.inputs.iter().filter(|input| !stored.contains(input.name));
        let dims = || inputs().filter_map(|input| input.dims.as_ref());
        self.has_cache = dims().flatten().any(|dim| matches!(dim, Dim::Name(name) if name.contains("past")));
        let mut first = dims().filter_map(|dims| dims.first());
        let fixed = first.next().and_then(|dim| if let Dim::Size(size) = dim { Some(*size) } else { None });
        let is_shared = fixed.is_some() && first.all(|dim| matches!(dim, Dim::Size(size) if Some(*size) == fixed));
        self.fixed_batch = fixed.filter(|_| is_shared && self.options.batch.is_some());
    }

    /// The sizes of an input.
    pub fn of_input(&mut self, input: &ValueInfo, dims: &[Dim]) -> Result<Vec<i64>, OnnxError> {
        if let Some(value) = self.options.values.get(input.name) {
            let sizes: Vec<i64> = value.shape.iter().map(|&size| size as i64).collect();
            let fits = sizes.len() == dims.len()
                && dims
                    .iter()
                    .zip(&sizes)
                    .all(|(dim, size)| !matches!(dim, Dim::Size(own) if *own >= 0 && own != size));
            if !fits {
                let (input, got) = (input.name.to_string(), value.shape.to_string());
                return Err(OnnxError::GivenShape { input, expected: written(dims), got });
            }
            for (dim, &size) in dims.iter().zip(&sizes) {
                if let Dim::Name(name) = dim {
                    self.assumed.insert(name.to_string(), size);
                }
            }
            return Ok(sizes);
        }
        Ok((0..dims.len()).map(|axis| self.of_axis(input.name, axis, &dims[axis], dims.len())).collect())
    }

    fn of_axis(&mut self, input: &str, axis: usize, dim: &Dim, rank: usize) -> i64 {
        let place = format!("{input}.{axis}");
        if let Some(size) = self.set(&place) {
            return size;
        }
        match dim {
            Dim::Size(size) if *size >= 0 => match (self.fixed_batch, self.options.batch) {
                (Some(_), Some(batch)) if axis == 0 => {
                    self.is_batch_used = true;
                    counted(batch)
                }
                _ => *size,
            },
            Dim::Name(name) => {
                if let Some(size) = self.set(name).or_else(|| self.assumed.get(*name).copied()) {
                    self.assumed.insert(name.to_string(), size);
                    return size;
                }
                let parts: Vec<&str> = name.split(['+', '*']).map(str::trim).collect();
                let is_derived = parts.len() > 1 && parts.iter().all(|part| is_plain(part));
                if is_derived {
                    parts.iter().for_each(|part| self.assume(part, part, axis, rank));
                    if let Some(size) = expression(name, &|part| self.assumed.get(part).copied()) {
                        self.assumed.insert(name.to_string(), size);
                        return size;
                    }
                }
                self.assume(name, name, axis, rank);
                self.assumed[*name]
            }
            Dim::Size(_) | Dim::Unknown => {
                // States of recurrent layers are `[layers, batch, features]`.
                let name = if axis == 1 && rank == 3 && is_state(input) { "batch" } else { "" };
                self.assume(&place, name, axis, rank);
                self.assumed[&place]
            }
        }
    }

    /// A size that the file states of a value, by names that inputs have settled.
    pub fn stated(&self, value: &str, axis: usize, dim: &Dim) -> Option<i64> {
        let set = |key: &str| self.options.dims.get(key).map(|&size| counted(size));
        match dim {
            // The file's own numbers hold for its own batch only.
            Dim::Size(size) => self.changed_batch().is_none().then_some(*size),
            Dim::Name(name) => {
                let known = |key: &str| set(key).or_else(|| self.assumed.get(key).copied());
                set(&format!("{value}.{axis}")).or_else(|| known(name)).or_else(|| expression(name, &known))
            }
            Dim::Unknown => set(&format!("{value}.{axis}")),
        }
    }

    /// Refuses sizes that were given and not used.
    pub fn all_used(&self, graph: &GraphProto) -> Result<(), OnnxError> {
        let names = || graph.inputs.iter().filter_map(|input| input.dims.as_ref()).flatten();
        let mut known: Vec<String> = names()
            .filter_map(|dim| if let Dim::Name(name) = dim { Some(short(name).to_string()) } else { None })
            .collect();
        known.sort_unstable();
        known.dedup();
        let stated = |name: &str| {
            graph.value_info.iter().chain(&graph.outputs).any(|info| {
                name.rsplit_once('.').is_some_and(|(value, _)| value == info.name)
                    || info.dims.iter().flatten().any(|dim| matches!(dim, Dim::Name(own) if *own == name))
            })
        };
        if let Some(name) = self.options.dims.keys().find(|name| !self.used.contains(*name) && !stated(name)) {
            return Err(OnnxError::UnknownDim { name: name.clone(), known });
        }
        for (value, is_used, what, flag) in [
            (self.options.batch, self.is_batch_used, "batch", "--batch"),
            (self.options.sequence, self.is_sequence_used, "sequence", "--seq"),
        ] {
            if value.is_some() && !is_used {
                return Err(OnnxError::UnusedSize { what, flag, known });
            }
        }
        if let Some(name) =
            self.options.values.keys().find(|name| !graph.inputs.iter().any(|input| input.name == **name))
        {
            let inputs = graph.inputs.iter().map(|input| short(input.name).to_string()).collect();
            return Err(OnnxError::UnknownInput { name: name.clone(), inputs });
        }
        Ok(())
    }

    /// Whether another guess would give other sizes.
    pub fn depends_on(&self, other: Guess) -> bool {
        (self.is_image_assumed && other.image != self.guess.image)
            || (self.is_sequence_assumed && other.sequence != self.guess.sequence)
    }

    /// The batch that the file fixes and that was changed.
    pub fn changed_batch(&self) -> Option<i64> {
        self.fixed_batch.filter(|&fixed| self.options.batch.map(counted) != Some(fixed))
    }

    fn set(&mut self, key: &str) -> Option<i64> {
        let size = counted(*self.options.dims.get(key)?);
        self.used.insert(key.to_string());
        Some(size)
    }

    /// Assumes a size for `key`, by what its name says, else by its place. A number is no name.
    fn assume(&mut self, key: &str, name: &str, axis: usize, rank: usize) {
        if self.assumed.contains_key(key) || key.parse::<i64>().is_ok() {
            return;
        }
        if let Some(size) = self.set(key) {
            self.assumed.insert(key.to_string(), size);
            return;
        }
        let role = named(name).unwrap_or_else(|| placed(axis, rank));
        let sequence = self.options.sequence.map_or(self.guess.sequence, counted);
        let size = match role {
            Role::Batch => self.options.batch.map_or(BATCH, counted),
            Role::Sequence => sequence,
            Role::Total => sequence.saturating_mul(1 + i64::from(self.has_cache)),
            Role::Channels => CHANNELS,
            Role::Image if axis + 1 == rank => self.guess.image.1,
            Role::Image => self.guess.image.0,
            Role::Samples => SAMPLES,
        };
        self.is_image_assumed |= role == Role::Image;
        self.is_sequence_assumed |= matches!(role, Role::Sequence | Role::Total) && self.options.sequence.is_none();
        self.is_batch_used |= role == Role::Batch;
        self.is_sequence_used |= matches!(role, Role::Sequence | Role::Total);
        self.assumed.insert(key.to_string(), size);
        let is_given = match role {
            Role::Batch => self.options.batch.is_some(),
            Role::Sequence | Role::Total => self.options.sequence.is_some(),
            Role::Channels | Role::Image | Role::Samples => false,
        };
        if !is_given {
            let flag = match role {
                Role::Batch => ", --batch",
                Role::Sequence => ", --seq",
                _ => "",
            };
            let key = short(key);
            self.notes.push(format!("the file leaves `{key}` open: {size} is assumed (--dim {key}=N{flag})"));
        }
    }
}

fn counted(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.'))
}

/// What a dimension's name says that it counts.
fn named(name: &str) -> Option<Role> {
    let name = name.to_ascii_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let is = |names: &[&str]| names.contains(&name.as_str());
    if has(&["batch"]) || is(&["n", "b", "bs"]) {
        Some(Role::Batch)
    } else if has(&["total"]) {
        Some(Role::Total)
    } else if has(&["sample", "audio"]) {
        Some(Role::Samples)
    } else if has(&["seq", "len", "time", "token", "frame", "context", "past"]) || is(&["t", "s", "l"]) {
        Some(Role::Sequence)
    } else if has(&["height", "width", "image_size"]) || is(&["h", "w"]) {
        Some(Role::Image)
    } else if has(&["channel"]) || is(&["c"]) {
        Some(Role::Channels)
    } else {
        None
    }
}

/// Whether an input's name says that it is the state of a recurrent layer.
fn is_state(input: &str) -> bool {
    let name = input.to_ascii_lowercase();
    name.contains("state") || name.contains("hidden") || matches!(name.as_str(), "h" | "c" | "h0" | "c0" | "hn" | "cn")
}

/// What an axis counts as a rule: images are `[batch, channels, height, width]`, all else `[batch, sequence, ..]`.
fn placed(axis: usize, rank: usize) -> Role {
    match (axis, rank) {
        (0, _) => Role::Batch,
        (1, 4..) => Role::Channels,
        (_, 4..) => Role::Image,
        _ => Role::Sequence,
    }
}

/// Sums and products of names, as exporters call what they derived: `past + sequence`, `2*heads`.
fn expression(text: &str, set: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
    let number = |factor: &str| set(factor.trim()).or_else(|| factor.trim().parse().ok());
    let product = |term: &str| term.split('*').try_fold(1i64, |product, factor| product.checked_mul(number(factor)?));
    text.split('+').try_fold(0i64, |sum, term| sum.checked_add(product(term)?))
}

/// Dimensions as the file states them, for a message.
fn written(dims: &[Dim]) -> String {
    let word = |dim: &Dim| match dim {
        Dim::Size(size) if *size >= 0 => size.to_string(),
        Dim::Name(name) => short(name).to_string(),
        Dim::Size(_) | Dim::Unknown => "?".to_string(),
    };
    format!("[{}]", dims.iter().map(word).collect::<Vec<_>>().join(","))
}
