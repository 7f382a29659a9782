//! A checkpoint: a folder as Hugging Face lays it out, its weights mapped into memory.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;
use std::path::{Path, PathBuf};

use deuteron::{Dtype, Shape};
use memmap2::{Mmap, UncheckedAdvice};
use serde::Deserialize;

use crate::config::Config;
use crate::config_file::ConfigError;
use crate::folder::{FileError, Folder};
use crate::safetensors::{self, Entry, HeaderError};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const HEAD: &str = "lm_head.weight";

/// Why a checkpoint was not opened. Messages name the file, and what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CheckpointError {
    /// A file cannot be opened.
    #[error("`{}` {problem}", .path.display())]
    File {
        /// the file
        path: PathBuf,
        /// why
        problem: FileError,
    },
    /// A folder without weights.
    #[error("`{}` has neither {SINGLE} nor {INDEX}; only safetensors can be read{}", .folder.display(), pickle_advice(.pickle))]
    NoWeights {
        /// the folder
        folder: PathBuf,
        /// whether it has weights as a pickle
        pickle: bool,
    },
    /// The configuration is refused.
    #[error("`{}`: {problem}", .path.display())]
    Config {
        /// the file
        path: PathBuf,
        /// why
        problem: ConfigError,
    },
    /// The index of shards is malformed.
    #[error("`{}` is not an index of shards: {why}", .path.display())]
    Index {
        /// the file
        path: PathBuf,
        /// why
        why: String,
    },
    /// A file of weights is damaged.
    #[error("`{}`: {problem}", .path.display())]
    Header {
        /// the file
        path: PathBuf,
        /// why
        problem: HeaderError,
    },
    /// A tensor is not what the configuration says.
    #[error("`{}`: tensor `{tensor}` {problem}", .path.display())]
    Tensor {
        /// the file
        path: PathBuf,
        /// the tensor, as the file or the graph names it
        tensor: String,
        /// why
        problem: TensorError,
    },
}

/// What is wrong with a tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// Not in the file.
    #[error("is missing; is config.json from the same model?")]
    Missing,
    /// Not of a GPT-2.
    #[error("is not a tensor of a GPT-2 of these sizes; is config.json from the same model?")]
    Unknown,
    /// In two places.
    #[error("occurs twice, with and without `transformer.` or in two shards")]
    Twice,
    /// Not where the index says.
    #[error("is not in this shard, although the index says so")]
    Misplaced,
    /// Not a float of 16 or 32 bits.
    #[error("is stored as {0}; expected F32, F16 or BF16")]
    Dtype(String),
    /// Of another shape.
    #[error("has shape {got}, but config.json implies {expected}")]
    Shape {
        /// by config.json
        expected: Shape,
        /// in the file
        got: Shape,
    },
    /// A separate head in a model with a tied head.
    #[error("differs from wte.weight, but config.json ties them; set `tie_word_embeddings` to false to use it")]
    Untied,
}

/// A weight in the mapped file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weight<'a> {
    /// storage type: f32, f16 or bf16
    pub dtype: Dtype,
    /// sizes
    pub shape: &'a Shape,
    /// little-endian elements, row by row; not aligned to anything
    pub bytes: &'a [u8],
}

/// An open checkpoint: every weight of the graph, with the right shape.
pub struct Checkpoint {
    config: Config,
    shards: Vec<Shard>,
    places: HashMap<String, Place>,
}

/// A file of weights.
enum Shard {
    Mapped(Mmap),
    /// a part of the program
    Included(&'static [u8]),
}

impl Deref for Shard {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Shard::Mapped(map) => map,
            Shard::Included(bytes) => bytes,
        }
    }
}

struct Place {
    shard: usize,
    dtype: Dtype,
    entry: Entry,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Checkpoint { config, shards, places } = self;
        let sizes: Vec<usize> = shards.iter().map(|shard| shard.len()).collect();
        f.debug_struct("Checkpoint")
            .field("config", config)
            .field("shards", &sizes)
            .field("weights", &places.len())
            .finish()
    }
}

impl Checkpoint {
    /// Opens a folder and checks that it has every weight. No weight is read or copied.
    pub fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let folder =
            Folder::new(path).map_err(|problem| CheckpointError::File { path: path.to_path_buf(), problem })?;
        let text = read(&folder, CONFIG)?;
        let config = Config::from_json(&text)
            .map_err(|problem| CheckpointError::Config { path: folder.path(CONFIG), problem })?;
        let files = match (folder.has(SINGLE), folder.has(INDEX)) {
            (true, _) => BTreeMap::from([(SINGLE.to_string(), Vec::new())]),
            (false, true) => shards(&folder)?,
            (false, false) => {
                let pickle = folder.has("pytorch_model.bin");
                return Err(CheckpointError::NoWeights { folder: path.to_path_buf(), pickle });
            }
        };
        let mut loading = Loading::new(folder.root(), config);
        for (name, promised) in &files {
            let map = folder.map(name);
            let map = map.map_err(|problem| CheckpointError::File { path: folder.path(name), problem })?;
            loading.add(name, Shard::Mapped(map), promised)?;
        }
        loading.finish()
    }

    /// A checkpoint that is part of the program; `root` is its name in messages.
    pub(crate) fn included(root: &Path, config: &str, weights: &'static [u8]) -> Result<Checkpoint, CheckpointError> {
        let path = || root.join(CONFIG);
        let config = Config::from_json(config).map_err(|problem| CheckpointError::Config { path: path(), problem })?;
        let mut loading = Loading::new(root, config);
        loading.add(SINGLE, Shard::Included(weights), &[])?;
        loading.finish()
    }

    /// The sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// A weight by its name in the graph, as in [`Config::weights`]; `None` for any other name.
    pub fn weight(&self, name: &str) -> Option<Weight<'_>> {
        let Place { shard, dtype, entry } = self.places.get(name)?;
        let bytes = self.shards.get(*shard)?.get(entry.bytes.clone())?;
        Some(Weight { dtype: *dtype, shape: &entry.shape, bytes })
    }

    /// Returns the memory of a weight's part of the file to the system. A later read of the weight reads the file
    /// again.
    #[expect(unsafe_code, reason = "advice about the one memory map")]
    pub fn release(&self, name: &str) {
        let Some(Place { shard, entry, .. }) = self.places.get(name) else { return };
        let Some(Shard::Mapped(map)) = self.shards.get(*shard) else { return };
        // SAFETY: the map is of a file and nobody writes to it, so a page that is dropped comes back as the file has it.
        let advised =
            unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, entry.bytes.start, entry.bytes.len()) };
        // Advice that the system does not take costs memory, not the weight.
        drop(advised);
    }
}

/// A checkpoint while its shards are added.
struct Loading<'a> {
    root: &'a Path,
    config: Config,
    expected: HashMap<String, Shape>,
    names: Vec<String>,
    shards: Vec<Shard>,
    places: HashMap<String, Place>,
}

impl<'a> Loading<'a> {
    fn new(root: &'a Path, config: Config) -> Self {
        let mut expected: HashMap<String, Shape> = config.weights().into_iter().collect();
        // A tied head may be stored all the same.
        expected.insert(HEAD.to_string(), Shape::from([config.vocabulary, config.hidden]));
        Loading { root, config, expected, names: Vec::new(), shards: Vec::new(), places: HashMap::new() }
    }

    fn add(&mut self, name: &str, bytes: Shard, promised: &[String]) -> Result<(), CheckpointError> {
        let path = self.root.join(name);
        let entries =
            safetensors::parse(&bytes).map_err(|problem| CheckpointError::Header { path: path.clone(), problem })?;
        let wrong = |tensor: &str, problem| {
            Err(CheckpointError::Tensor { path: path.clone(), tensor: tensor.to_string(), problem })
        };
        if let Some(tensor) = promised.iter().find(|tensor| !entries.contains_key(*tensor)) {
            return wrong(tensor, TensorError::Misplaced);
        }
        for (tensor, entry) in entries {
            let short = tensor.strip_prefix("transformer.").unwrap_or(&tensor);
            if is_mask(short) {
                continue;
            }
            let Some(expected) = self.expected.get(short) else { return wrong(&tensor, TensorError::Unknown) };
            if entry.shape != *expected {
                let (expected, got) = (expected.clone(), entry.shape);
                return wrong(&tensor, TensorError::Shape { expected, got });
            }
            let Some(dtype) = dtype(&entry.dtype) else { return wrong(&tensor, TensorError::Dtype(entry.dtype)) };
            if self.places.contains_key(short) {
                return wrong(&tensor, TensorError::Twice);
            }
            self.places.insert(short.to_string(), Place { shard: self.shards.len(), dtype, entry });
        }
        self.shards.push(bytes);
        self.names.push(name.to_string());
        Ok(())
    }

    fn finish(self) -> Result<Checkpoint, CheckpointError> {
        let missing = self.config.weights().into_iter().find(|(name, _)| !self.places.contains_key(name));
        if let Some((tensor, _)) = missing {
            let path = self.root.join(if self.names.len() == 1 { &self.names[0] } else { INDEX });
            return Err(CheckpointError::Tensor { path, tensor, problem: TensorError::Missing });
        }
        let head = self.places.get(HEAD).filter(|_| self.config.tied).map(|place| place.shard);
        let path = head.map(|shard| self.root.join(&self.names[shard]));
        let mut checkpoint = Checkpoint { config: self.config, shards: self.shards, places: self.places };
        if let Some(path) = path {
            if checkpoint.weight(HEAD) != checkpoint.weight("wte.weight") {
                let tensor = HEAD.to_string();
                return Err(CheckpointError::Tensor { path, tensor, problem: TensorError::Untied });
            }
            checkpoint.places.remove(HEAD);
        }
        Ok(checkpoint)
    }
}

/// The shards of an index, each with the tensors it should have.
fn shards(folder: &Folder) -> Result<BTreeMap<String, Vec<String>>, CheckpointError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = read(folder, INDEX)?;
    let index: Index = serde_json::from_str(&text)
        .map_err(|error| CheckpointError::Index { path: folder.path(INDEX), why: error.to_string() })?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, file) in index.weight_map {
        shards.entry(file).or_default().push(tensor);
    }
    Ok(shards)
}

fn read(folder: &Folder, name: &str) -> Result<String, CheckpointError> {
    folder.text(name).map_err(|problem| CheckpointError::File { path: folder.path(name), problem })
}

/// The causal mask, which old checkpoints store in every block.
fn is_mask(name: &str) -> bool {
    name.starts_with("h.") && (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"))
}

fn dtype(name: &str) -> Option<Dtype> {
    match name {
        "F32" => Some(Dtype::F32),
        "F16" => Some(Dtype::F16),
        "BF16" => Some(Dtype::Bf16),
        _ => None,
    }
}

fn pickle_advice(pickle: &bool) -> &'static str {
    if *pickle { ", pytorch_model.bin may run code when it is loaded; convert it with save_pretrained" } else { "" }
}
