//! Models from the Hugging Face Hub, put into its cache where its own tools look for them. Nothing calls this unasked.
//!
//! `curl` fetches: a stack of HTTP and TLS of our own would be more code than all the rest of this crate.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::folder::is_plain;
use crate::hub::{HubError, repositories};

/// Where models come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hub {
    /// `https://huggingface.co`, or a mirror
    pub endpoint: String,
    /// for models that are not public
    pub token: Option<String>,
}

/// Why a model was not downloaded. What was there before is as it was.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// No name of a model.
    #[error(transparent)]
    Name(#[from] HubError),
    /// No program that fetches.
    #[error("a download needs the program `curl`, which does not start: {0}")]
    NoCurl(String),
    /// Not fetched.
    #[error("`{url}`: {words}")]
    Fetch {
        /// what was asked for
        url: String,
        /// curl's own words
        words: String,
    },
    /// An answer that is none, or a model without a file that is needed.
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
        /// the system's words
        words: String,
    },
}

/// What the Hub says of a repository.
#[derive(Deserialize)]
struct Answer {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Hub {
    /// By the environment variables of Hugging Face's tools; `variable` looks one up.
    pub fn new(variable: impl Fn(&str) -> Option<String>) -> Hub {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Hub { endpoint: endpoint.trim_end_matches('/').to_string(), token: set("HF_TOKEN") }
    }

    /// Downloads a model into a cache folder, unless it is there, and gives its folder. `started` hears of each file.
    ///
    /// The name that makes a snapshot the current one is written last: a download that was broken off goes on where it was.
    pub fn download(&self, name: &str, cache: &Path, mut started: impl FnMut(&str)) -> Result<PathBuf, DownloadError> {
        let known = repositories(name).and_then(|all| all.into_iter().next());
        let repository = known.ok_or_else(|| HubError::Name(name.to_string()))?;
        let problem = |problem: String| DownloadError::Repository { repository: repository.clone(), problem };
        let answer = self.fetch(&format!("{}/api/models/{repository}/revision/main", self.endpoint), None)?;
        let answer: Answer = serde_json::from_slice(&answer)
            .map_err(|error| problem(format!("the Hub's answer is not understood: {error}")))?;
        if !is_plain(&answer.sha) || !answer.sha.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(problem(format!("`{}` is no revision", answer.sha)));
        }
        let names: Vec<&str> = answer.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
        let files = needed(&names).map_err(problem)?;

        let folder = cache.join(format!("models--{}", repository.replace('/', "--")));
        let snapshot = folder.join("snapshots").join(&answer.sha);
        create(&snapshot)?;
        for file in files.into_iter().filter(|file| !snapshot.join(file).exists()) {
            started(file);
            let part = snapshot.join(format!(".{file}.part"));
            let url = format!("{}/{repository}/resolve/{}/{file}", self.endpoint, answer.sha);
            self.fetch(&url, Some(&part))?;
            rename(&part, &snapshot.join(file))?;
        }
        let (references, current) = (folder.join("refs"), folder.join("refs").join("main"));
        create(&references)?;
        let part = references.join(".main.part");
        fs::write(&part, &answer.sha).map_err(|error| unwritten(&part, &error))?;
        rename(&part, &current)?;
        Ok(snapshot)
    }

    /// What lies at an address: into a file, from where an earlier attempt ended, or as bytes.
    fn fetch(&self, url: &str, into: Option<&Path>) -> Result<Vec<u8>, DownloadError> {
        let mut curl = Command::new("curl");
        curl.args(["--fail", "--silent", "--show-error", "--location", "--retry", "3", "--connect-timeout", "20"]);
        curl.args(["--proto", "=https,http", "--config", "-"]);
        match into {
            Some(path) => curl.args(["--continue-at", "-", "--output"]).arg(path),
            None => curl.args(["--max-filesize", "16777216"]),
        };
        curl.args(["--", url]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let failed = |words: String| DownloadError::Fetch { url: url.to_string(), words };
        let mut child = curl.spawn().map_err(|error| DownloadError::NoCurl(error.to_string()))?;
        if let (Some(mut stdin), Some(token)) = (child.stdin.take(), &self.token) {
            // Through a pipe, where other users of the machine do not see it. If curl is gone already, its code tells.
            let quoted = token.replace('\\', "\\\\").replace('"', "\\\"").replace(['\n', '\r'], "");
            let _ = stdin.write_all(format!("header = \"Authorization: Bearer {quoted}\"\n").as_bytes());
        }
        let done = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
        if !done.status.success() {
            return Err(failed(String::from_utf8_lossy(&done.stderr).trim().to_string()));
        }
        Ok(done.stdout)
    }
}

/// The files of a repository that running it takes.
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

fn rename(from: &Path, to: &Path) -> Result<(), DownloadError> {
    fs::rename(from, to).map_err(|error| unwritten(to, &error))
}

fn unwritten(path: &Path, error: &std::io::Error) -> DownloadError {
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
