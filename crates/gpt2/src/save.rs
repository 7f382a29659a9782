//! Checkpoints written as Hugging Face lays them out: what [`Checkpoint::open`](crate::Checkpoint::open) and the transformers library read.
//!
//! Files are written and flushed to the disk. For an atomic folder, the caller writes a folder under another name
//! and renames it.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use deuteron::{Activation, Dtype, Engine, Shape, Tensor};
use memmap2::Mmap;
use serde_json::{Map, Value, json};

use crate::checkpoint::{CONFIG, SINGLE};
use crate::config::Config;
use crate::folder::{FileError, Folder};
use crate::safetensors::{self, HeaderError};
use crate::tokenizer::Tokenizer;

/// Alignment of the data, so that a mapped tensor can be read in place.
const ALIGNMENT: usize = 64;

/// Why tensors were not written or read. Messages name the file.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The system refused.
    #[error("cannot write `{}`: {problem}", .path.display())]
    Write {
        /// the file
        path: PathBuf,
        /// why
        problem: io::Error,
    },
    /// A file cannot be opened.
    #[error("`{}` {problem}", .path.display())]
    File {
        /// the file
        path: PathBuf,
        /// why
        problem: FileError,
    },
    /// A file is damaged.
    #[error("`{}`: {problem}", .path.display())]
    Header {
        /// the file
        path: PathBuf,
        /// why
        problem: HeaderError,
    },
    /// A tensor is missing or of another type.
    #[error("`{}`: tensor `{tensor}`: expected {expected}, got {got}; does the folder belong to this run?", .path.display())]
    Tensor {
        /// the file
        path: PathBuf,
        /// its name
        tensor: String,
        /// what the reader needs
        expected: String,
        /// what the file has
        got: String,
    },
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] deuteron::Error),
}

/// Writes sizes, weights and tokenizer into an existing folder. Weights are in the order of [`Config::weights`].
pub fn write_checkpoint(
    folder: &Path,
    config: &Config,
    tokenizer: &Tokenizer,
    weights: &[&Tensor],
) -> Result<(), SaveError> {
    write_text(&folder.join(CONFIG), &config.to_json(tokenizer.end_of_text(), weights.first().map(|w| w.dtype())))?;
    let named = config.weights().into_iter().zip(weights).map(|((name, _), &weight)| match name.as_str() {
        "lm_head.weight" => (name, weight),
        _ => (format!("transformer.{name}"), weight),
    });
    write_tensors(&folder.join(SINGLE), &named.collect::<Vec<_>>())?;
    write_text(&folder.join("tokenizer.json"), &tokenizer.to_json())?;
    let end = tokenizer.end_of_text().map(|_| crate::tokenizer::END_OF_TEXT);
    let settings = json!({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end,
                          "unk_token": end, "model_max_length": config.context, "clean_up_tokenization_spaces": false});
    write_text(&folder.join("tokenizer_config.json"), &format!("{settings:#}\n"))
}

/// Writes named tensors as one safetensors file.
pub fn write_tensors(path: &Path, tensors: &[(String, &Tensor)]) -> Result<(), SaveError> {
    let failed = |problem| SaveError::Write { path: path.to_path_buf(), problem };
    let mut header = Map::from_iter([("__metadata__".to_string(), json!({"format": "pt"}))]);
    let mut end = 0;
    for (name, tensor) in tensors {
        let begin = end;
        end += tensor.shape().elements() * tensor.dtype().bytes();
        let entry =
            json!({"dtype": name_of(tensor.dtype()), "shape": &tensor.shape()[..], "data_offsets": [begin, end]});
        header.insert(name.clone(), entry);
    }
    let mut header = Value::Object(header).to_string();
    header += &" ".repeat((8 + header.len()).next_multiple_of(ALIGNMENT) - 8 - header.len());
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    file.write_all(header.as_bytes()).map_err(failed)?;
    for (_, tensor) in tensors {
        file.write_all(&tensor.to_bytes()?).map_err(failed)?;
    }
    let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)
}

/// Writes a text file and flushes it to the disk.
fn write_text(path: &Path, text: &str) -> Result<(), SaveError> {
    let written = File::create(path).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|problem| SaveError::Write { path: path.to_path_buf(), problem })
}

/// An open safetensors file.
pub struct TensorFile {
    path: PathBuf,
    map: Mmap,
    entries: std::collections::BTreeMap<String, safetensors::Entry>,
}

impl TensorFile {
    /// Opens a file of a folder. No tensor is read.
    pub fn open(folder: &Path, name: &str) -> Result<TensorFile, SaveError> {
        let path = folder.join(name);
        let file = |problem| SaveError::File { path: path.clone(), problem };
        let map = Folder::new(folder).and_then(|folder| folder.map(name)).map_err(file)?;
        let entries = safetensors::parse(&map).map_err(|problem| SaveError::Header { path: path.clone(), problem })?;
        Ok(TensorFile { path, map, entries })
    }

    /// A tensor in memory that an engine's kernels read and write.
    pub fn upload(&self, engine: &Engine, name: &str, dtype: Dtype, shape: &Shape) -> Result<Tensor, SaveError> {
        let entry = self.entries.get(name);
        let right = entry.filter(|entry| entry.dtype == name_of(dtype) && entry.shape == *shape);
        let bytes = right.and_then(|entry| self.map.get(entry.bytes.clone()));
        let Some(bytes) = bytes else {
            let got = entry.map_or("nothing".to_string(), |entry| format!("{}{}", entry.dtype, entry.shape));
            let (path, expected) = (self.path.clone(), format!("{}{shape}", name_of(dtype)));
            return Err(SaveError::Tensor { path, tensor: name.to_string(), expected, got });
        };
        Ok(Tensor::upload(engine, dtype, shape.clone(), bytes)?)
    }
}

impl Config {
    /// The sizes as a `config.json`. `stored` is the type of the weights.
    pub fn to_json(&self, end_of_text: Option<u32>, stored: Option<Dtype>) -> String {
        let activation = match self.activation {
            Activation::GeluTanh => "gelu_new",
            Activation::GeluErf => "gelu",
            Activation::Silu => "silu",
            Activation::Relu => "relu",
        };
        let dtype = match stored {
            Some(Dtype::F16) => "float16",
            Some(Dtype::Bf16) => "bfloat16",
            _ => "float32",
        };
        let file = json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_embd": self.hidden,
            "n_inner": self.inner,
            "n_positions": self.context,
            "vocab_size": self.vocabulary,
            "activation_function": activation,
            "layer_norm_epsilon": self.epsilon,
            "scale_attn_weights": self.scaled,
            "tie_word_embeddings": self.tied,
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
            "dtype": dtype,
        });
        format!("{file:#}\n")
    }
}

/// A type's name in the file.
fn name_of(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "F32",
        Dtype::F16 => "F16",
        Dtype::Bf16 => "BF16",
        Dtype::I32 => "I32",
        Dtype::I8 => "I8",
        Dtype::F8e4m3 => "F8_E4M3",
        Dtype::Bool => "BOOL",
    }
}
