//! Downloads models from the Hugging Face Hub into its cache, where its own tools find them. Runs only on request.
//!
//! Transfers use `curl`: an HTTP and TLS stack would be more code than the rest of this crate.
//!
//! - One process at a time downloads a model into a cache: it holds a lock, which ends with the process. Waiting processes then find its files.
//! - A file gets its final name once its size, and its digest if the Hub states one, are right.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::folder::is_plain;
use crate::hub::{HubError, repositories};
use crate::transfer::{Expected, Source, sha256};

/// Maximum bytes of the Hub's answer about a repository.
const LONGEST_ANSWER: u64 = 16 << 20;

/// Where models come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hub {
    /// `https://huggingface.co`, or a mirror
    pub endpoint: String,
    /// for models that are not public
    pub token: Option<String>,
}

/// Why a model was not downloaded. Existing files are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// Not the name of a model.
    #[error(transparent)]
    Name(#[from] HubError),
    /// `curl` cannot be started.
    #[error("a download needs the program `curl`, which cannot be started: {0}")]
    NoCurl(String),
    /// Not fetched.
    #[error("`{url}`: {words}")]
    Fetch {
        /// the requested URL
        url: String,
        /// curl's message
        words: String,
    },
    /// The wrong length.
    #[error("`{url}`: expected {expected} bytes, got {got}; nothing was stored, run the command again")]
    Size {
        /// the requested URL
        url: String,
        /// as the Hub or the server says
        expected: u64,
        /// bytes received, or more
        got: u64,
    },
    /// The wrong digest.
    #[error("`{url}`: expected the SHA-256 {expected}, got {got}; nothing was stored, run the command again")]
    Digest {
        /// the requested URL
        url: String,
        /// as the Hub says
        expected: String,
        /// digest of the received bytes
        got: String,
    },
    /// An invalid answer, or a model without a required file.
    #[error("`{repository}`: {problem}")]
    Repository {
        /// the repository
        repository: String,
        /// what is wrong
        problem: String,
    },
    /// The cache cannot be written to.
    #[error("`{}` cannot be written: {words}", .path.display())]
    Write {
        /// the file or folder
        path: PathBuf,
        /// the system's message
        words: String,
    },
}

/// The Hub's answer about a repository.
#[derive(Deserialize)]
struct Answer {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

/// The Hub's answer about a large file.
#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
}

impl Sibling {
    fn expected(&self) -> Expected {
        let digest = self.lfs.as_ref().and_then(|lfs| sha256(lfs.sha256.as_deref()?));
        Expected { bytes: self.size, sha256: digest }
    }
}

impl Hub {
    /// By the environment variables of Hugging Face's tools; `variable` looks one up.
    pub fn new(variable: impl Fn(&str) -> Option<String>) -> Hub {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Hub { endpoint: endpoint.trim_end_matches('/').to_string(), token: set("HF_TOKEN") }
    }

    /// Downloads a model into a cache folder, unless it is there, and returns its folder. `started` is called for each file.
    ///
    /// The reference to the current snapshot is written last, so an interrupted download is resumed.
    pub fn download(&self, name: &str, cache: &Path, mut started: impl FnMut(&str)) -> Result<PathBuf, DownloadError> {
        let known = repositories(name).and_then(|all| all.into_iter().next());
        let repository = known.ok_or_else(|| HubError::Name(name.to_string()))?;
        let problem = |problem: String| DownloadError::Repository { repository: repository.clone(), problem };
        let source = |path: String| Source { url: format!("{}/{path}", self.endpoint), token: self.token.as_deref() };
        let answer = source(format!("api/models/{repository}/revision/main?blobs=true")).bytes(LONGEST_ANSWER)?;
        let answer: Answer = serde_json::from_slice(&answer)
            .map_err(|error| problem(format!("the Hub's answer cannot be parsed: {error}")))?;
        if !is_plain(&answer.sha) || !answer.sha.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(problem(format!("`{}` is not a revision", answer.sha)));
        }
        let names: Vec<&str> = answer.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
        let files = needed(&names).map_err(problem)?;

        let model = format!("models--{}", repository.replace('/', "--"));
        let _lock = lock(&cache.join(".locks").join(&model))?;
        let folder = cache.join(model);
        let snapshot = folder.join("snapshots").join(&answer.sha);
        create(&snapshot)?;
        for file in files {
            let sibling = answer.siblings.iter().find(|sibling| sibling.rfilename == file);
            let expected = sibling.map(Sibling::expected).unwrap_or_default();
            if !is_there(&snapshot.join(file), &expected) {
                started(file);
                source(format!("{repository}/resolve/{}/{file}", answer.sha)).file(&snapshot, file, &expected)?;
            }
        }
        let references = folder.join("refs");
        create(&references)?;
        write(&references, "main", &answer.sha)?;
        Ok(snapshot)
    }
}

/// Waits until no other process downloads the model. The cache has a folder for the locks of Hugging Face's tools and ours.
fn lock(folder: &Path) -> Result<File, DownloadError> {
    create(folder)?;
    let path = folder.join("deuteron.lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let locked = file.and_then(|file| file.lock().map(|()| file));
    locked.map_err(|error| unwritten(&path, &error))
}

/// Whether a complete file exists. A file of another size is outdated or damaged.
fn is_there(path: &Path, expected: &Expected) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && expected.bytes.is_none_or(|bytes| bytes == found.len()))
}

/// Stores a text under a name. The caller holds the lock of the folder.
fn write(folder: &Path, name: &str, text: &str) -> Result<(), DownloadError> {
    let (part, path) = (folder.join(format!(".{name}.part")), folder.join(name));
    let wrong = |error| unwritten(&part, &error);
    if fs::symlink_metadata(&part).is_ok() {
        fs::remove_file(&part).map_err(wrong)?;
    }
    let mut file = File::options().write(true).create_new(true).open(&part).map_err(wrong)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(wrong)?;
    fs::rename(&part, &path).map_err(|error| unwritten(&path, &error))
}

/// The files of a repository that are needed to run it.
fn needed<'a>(names: &[&'a str]) -> Result<Vec<&'a str>, String> {
    let find = |wanted: &str| names.iter().copied().find(|&name| name == wanted);
    let config = find("config.json").ok_or("has no config.json, so it is no model for transformers")?;
    let mut files = vec![config];
    match (find("model.safetensors"), find("model.safetensors.index.json")) {
        (Some(weights), _) => files.push(weights),
        (None, Some(index)) => {
            files.push(index);
            let shard = |name: &&str| name.starts_with("model-") && name.ends_with(".safetensors") && is_plain(name);
            files.extend(names.iter().copied().filter(shard));
        }
        (None, None) => return Err("has no model.safetensors; weights in other formats are not read".into()),
    }
    match (find("tokenizer.json"), find("vocab.json"), find("merges.txt")) {
        (Some(tokenizer), _, _) => files.push(tokenizer),
        (None, Some(vocabulary), Some(merges)) => files.extend([vocabulary, merges]),
        _ => return Err("has neither tokenizer.json nor vocab.json and merges.txt".into()),
    }
    Ok(files)
}

fn create(folder: &Path) -> Result<(), DownloadError> {
    fs::create_dir_all(folder).map_err(|error| unwritten(folder, &error))
}

pub(crate) fn unwritten(path: &Path, error: &std::io::Error) -> DownloadError {
    DownloadError::Write { path: path.to_path_buf(), words: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_running_takes_is_fetched_and_nothing_else() {
        let whole =
            ["README.md", "config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json", "vocab.json"];
        assert_eq!(needed(&whole).unwrap(), ["config.json", "model.safetensors", "tokenizer.json"]);
        let names = [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-../x.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "merges.txt",
            "vocab.json",
        ];
        let files = [
            "config.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "vocab.json",
            "merges.txt",
        ];
        assert_eq!(needed(&names).unwrap(), files);
        assert!(needed(&["config.json", "pytorch_model.bin"]).unwrap_err().contains("model.safetensors"));
        assert!(needed(&["model.safetensors"]).unwrap_err().contains("config.json"));
        assert!(needed(&["config.json", "model.safetensors"]).unwrap_err().contains("tokenizer.json"));
    }

    #[test]
    fn mirrors_and_tokens_come_from_the_environment() {
        let hub = Hub::new(|name| (name == "HF_ENDPOINT").then(|| "http://mirror/".to_string()));
        assert_eq!(hub, Hub { endpoint: "http://mirror".into(), token: None });
        let hub = Hub::new(|name| (name == "HF_TOKEN").then(|| "secret".to_string()));
        assert_eq!(hub, Hub { endpoint: "https://huggingface.co".into(), token: Some("secret".into()) });
    }
}
