//! Modules of this crate import one way.

use std::fs;
use std::path::{Path, PathBuf};

/// Each module may use those before it.
const LAYERS: [&str; 30] = [
    "units", "bits", "between", "order", "min_cut", "layout", "space", "kind", "calls", "chain", "machine", "rates",
    "reason", "draft", "traffic", "work", "catalog", "steps", "cost", "rules", "error", "strategy", "target",
    "grouping", "search", "group", "memory", "plan", "score", "assess",
];

/// Uses nothing but vocabulary, and nobody uses it.
const APART: &str = "recompute";

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        match path.is_dir() {
            true => files(&path, found),
            // Tests of a module look at whatever they need.
            false if is_source && !path.ends_with("tests.rs") && !path.ends_with("lib.rs") => found.push(path),
            false => {}
        }
    }
}

#[test]
fn no_module_imports_upward() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    files(&source, &mut all);
    assert!(all.len() > LAYERS.len(), "{all:?}");
    for path in all {
        let inside = path.strip_prefix(&source).unwrap().with_extension("");
        let own = inside.iter().next().unwrap().to_str().unwrap();
        let layer = LAYERS.iter().position(|&name| name == own);
        assert!(layer.is_some() || own == APART, "{own} has no layer");
        let text = fs::read_to_string(&path).unwrap();
        let used = text.split("crate::").skip(1).map(|rest| {
            let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
            &rest[..end.unwrap_or(rest.len())]
        });
        for name in used.filter(|&name| name != own) {
            let used = LAYERS.iter().position(|&known| known == name);
            let used = used.unwrap_or_else(|| panic!("{}: crate::{name} has no layer", path.display()));
            assert!(layer.is_none_or(|layer| used < layer), "{} imports {name}, which is above it", path.display());
        }
    }
}
