//! Finds models by name: a folder, or a downloaded model in the cache of Hugging Face's tools. Nothing is fetched.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::folder::is_plain;

/// Why no model was found under a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HubError {
    /// Neither a folder nor `NAME` or `OWNER/NAME`.
    #[error("`{0}` is neither a folder with a config.json nor the name of a model, such as openai-community/gpt2")]
    Name(String),
    /// Nothing downloaded.
    #[error(
        "no model `{name}`{}; to fetch it, add --download, or run: hf download {repository}",
        searched(.hub)
    )]
    NotFound {
        /// as asked
        name: String,
        /// the cache searched, if there is one
        hub: Option<PathBuf>,
        /// the repository to download
        repository: String,
    },
    /// An incomplete download.
    #[error("`{}` is incomplete; to complete it, add --download, or run: hf download {repository}", .folder.display())]
    Incomplete {
        /// the repository's folder in the cache
        folder: PathBuf,
        /// the repository
        repository: String,
    },
}

/// The cache of Hugging Face's tools, by their environment variables; `variable` looks one up.
pub fn hub_folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || path("HOME").or_else(|| path("USERPROFILE")).map(|home| home.join(".cache"));
    let tools = || path("XDG_CACHE_HOME").or_else(home).map(|cache| cache.join("huggingface"));
    path("HF_HUB_CACHE")
        .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| path("HF_HOME").or_else(tools).map(|tools| tools.join("hub")))
}

/// The folder of a model: `name` itself if it is a folder with a `config.json`, otherwise the `main` revision in the cache.
/// GPT-2's four names are found with or without their owner.
pub fn find_model(name: &str, hub: Option<&Path>) -> Result<PathBuf, HubError> {
    if Path::new(name).join("config.json").exists() {
        return Ok(PathBuf::from(name));
    }
    let repositories = repositories(name).ok_or_else(|| HubError::Name(name.to_string()))?;
    for repository in &repositories {
        let folder = hub.map(|hub| hub.join(format!("models--{}", repository.replace('/', "--"))));
        let Some(folder) = folder.filter(|folder| folder.is_dir()) else { continue };
        let revision = std::fs::read_to_string(folder.join("refs").join("main")).unwrap_or_default();
        let revision = revision.trim();
        let snapshot = folder.join("snapshots").join(revision);
        if is_plain(revision) && snapshot.join("config.json").exists() {
            return Ok(snapshot);
        }
        return Err(HubError::Incomplete { folder, repository: repository.clone() });
    }
    let hub = hub.map(Path::to_path_buf);
    Err(HubError::NotFound { name: name.to_string(), hub, repository: repositories[0].clone() })
}

/// The repositories a name may mean, the one to download first.
pub(crate) fn repositories(name: &str) -> Option<Vec<String>> {
    let parts: Vec<&str> = name.split('/').collect();
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let good =
        |part: &&str| is_plain(part) && part.chars().all(allowed) && !part.contains("--") && !part.contains("..");
    if parts.len() > 2 || !parts.iter().all(good) {
        return None;
    }
    let short = name.strip_prefix("openai-community/").unwrap_or(name);
    Some(match Config::find(short) {
        Ok(known) if known != Config::BOX => vec![format!("openai-community/{short}"), short.to_string()],
        _ => vec![name.to_string()],
    })
}

fn searched(hub: &Option<PathBuf>) -> String {
    hub.as_ref().map_or(String::new(), |hub| format!(" in `{}`", hub.display()))
}
