//! Documents that name files: every path must exist.

use std::fs;
use std::path::Path;

/// Paths of a text between backticks, with `{a,b}` spelled out; what has no slash, or is no path, is left out.
fn paths(text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let is_path = |word: &&str| {
        let known = |c: char| c.is_ascii_alphanumeric() || "/._-{},*".contains(c);
        word.contains('/') && word.chars().all(known) && !word.starts_with('/')
    };
    quoted.filter(is_path).flat_map(expanded).collect()
}

fn expanded(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_string()] };
    let Some((names, after)) = rest.split_once('}') else { return vec![path.to_string()] };
    names.split(',').flat_map(|name| expanded(&format!("{before}{name}{after}"))).collect()
}

/// Whether a path, or one that a `*` stands for, is below the root or below `crates/`.
fn exists(root: &Path, path: &str) -> bool {
    let below = |folder: &Path| match path.rsplit_once('/') {
        Some((parent, name)) if name.contains('*') => {
            let (start, end) = name.split_once('*').unwrap_or((name, ""));
            let entries = fs::read_dir(folder.join(parent)).into_iter().flatten().flatten();
            entries
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .any(|file| file.starts_with(start) && file.ends_with(end))
        }
        _ => folder.join(path).exists(),
    };
    below(root) || below(&root.join("crates"))
}

/// What a build makes is there after it.
fn is_built(path: &str) -> bool {
    path.starts_with("target/") || path.ends_with(".so")
}

#[test]
fn every_path_that_documents_name_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for document in ["ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let text = fs::read_to_string(root.join(document)).unwrap();
        let paths = paths(&text);
        assert!(paths.len() > 10, "{document} names {} paths", paths.len());
        let missing: Vec<&String> = paths.iter().filter(|path| !is_built(path) && !exists(&root, path)).collect();
        assert!(missing.is_empty(), "{document} names {missing:?}");
    }
}

#[test]
fn the_map_is_short() {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../ARCHITECTURE.md")).unwrap();
    assert!(text.lines().count() <= 200, "{} lines", text.lines().count());
}

#[test]
fn paths_are_found_between_backticks() {
    let text = "see `plan/src/{a,b}.rs`, `x = y / z`, `word` and `bench/*.py`";
    assert_eq!(paths(text), ["plan/src/a.rs", "plan/src/b.rs", "bench/*.py"]);
}
