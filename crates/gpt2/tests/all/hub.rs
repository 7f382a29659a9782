//! Models in the cache of Hugging Face's tools.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::support::{Scratch, fixture};
use deuteron_gpt2::{Checkpoint, HubError, find_model, hub_folder};

#[test]
fn the_cache_is_where_the_variables_say() {
    let folder = |variables: &[(&str, &str)]| {
        hub_folder(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value)))
    };
    let path = |path: &str| Some(PathBuf::from(path));
    assert_eq!(folder(&[]), None);
    assert_eq!(folder(&[("HOME", "/h")]), path("/h/.cache/huggingface/hub"));
    assert_eq!(folder(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), path("/x/huggingface/hub"));
    assert_eq!(folder(&[("HOME", "/h"), ("HF_HOME", "/f")]), path("/f/hub"));
    assert_eq!(folder(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), path("/c"));
    assert_eq!(folder(&[("HOME", "/h"), ("HF_HUB_CACHE", "")]), path("/h/.cache/huggingface/hub"));
}

/// A cache as the tools make it: files are links into `blobs`.
#[cfg(unix)]
fn cached(repository: &str) -> Scratch {
    let hub = Scratch::new();
    hub.write(&format!("{repository}/refs/main"), "607a30d783dfa663caf39e06633721c8d4cfcd7e");
    let snapshot = hub.0.join(repository).join("snapshots/607a30d783dfa663caf39e06633721c8d4cfcd7e");
    std::fs::create_dir_all(&snapshot).unwrap();
    for (number, name) in ["config.json", "model.safetensors", "tokenizer.json"].iter().enumerate() {
        hub.write(&format!("{repository}/blobs/{number}"), std::fs::read(fixture("gelu").join(name)).unwrap());
        std::os::unix::fs::symlink(format!("../../blobs/{number}"), snapshot.join(name)).unwrap();
    }
    hub
}

#[cfg(unix)]
#[test]
fn downloaded_models_are_found_and_opened() {
    let hub = cached("models--openai-community--gpt2");
    for name in ["gpt2", "openai-community/gpt2"] {
        let folder = find_model(name, Some(&hub.0)).unwrap();
        assert_eq!(Checkpoint::open(&folder).unwrap().config().vocabulary, 320);
    }
    assert!(find_model("gpt2", Some(&cached("models--gpt2").0)).is_ok(), "as old tools name it");
    assert!(find_model("someone/tiny", Some(&cached("models--someone--tiny").0)).is_ok());
    assert!(matches!(find_model("gpt2-xl", Some(&hub.0)), Err(HubError::NotFound { .. })));
}

/// A link from a snapshot may lead to the repository's blobs only.
#[cfg(unix)]
#[test]
fn a_snapshot_links_to_blobs_alone() {
    let hub = cached("models--gpt2");
    let folder = find_model("gpt2", Some(&hub.0)).unwrap();
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    std::os::unix::fs::symlink(fixture("gelu/model.safetensors"), folder.join("model.safetensors")).unwrap();
    let error = Checkpoint::open(&folder).unwrap_err().to_string();
    assert!(error.contains("outside the folder"), "{error}");
}

#[cfg(unix)]
#[test]
fn unfinished_downloads_are_told() {
    for revision in ["", "missing", "../..", "/"] {
        let hub = cached("models--gpt2");
        hub.write("models--gpt2/refs/main", revision);
        assert!(matches!(find_model("gpt2", Some(&hub.0)), Err(HubError::Incomplete { .. })), "{revision}");
    }
}

#[test]
fn a_folder_is_itself() {
    let folder = fixture("gelu");
    assert_eq!(find_model(&folder.to_string_lossy(), None), Ok(folder));
}

#[test]
fn what_is_not_found_says_how_to_get_it() {
    let error = find_model("gpt2", Some(Path::new("/nowhere"))).unwrap_err().to_string();
    let words = "no model `gpt2` in `/nowhere`; to fetch it, add --download, or run: \
                 hf download openai-community/gpt2";
    assert_eq!(error, words);
    let error = find_model("someone/tiny", None).unwrap_err().to_string();
    assert!(error.starts_with("no model `someone/tiny`; ") && error.ends_with("hf download someone/tiny"), "{error}");
    for name in ["", "..", "../gpt2", "a/b/c", "a--b", "/etc", "a b", "gpt2/", "a\\b", "\u{0}"] {
        assert_eq!(find_model(name, None), Err(HubError::Name(name.to_string())));
    }
}
