//! Files of the source tree.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// What a folder holds, by name; nothing of the folders inside.
pub fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let read = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut paths = read.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
    paths.sort();
    Ok(paths)
}

/// All files below a folder.
pub fn below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in entries(folder)? {
        if path.is_dir() { files.extend(below(&path)?) } else { files.push(path) }
    }
    Ok(files)
}

/// Whether a file's name ends so.
pub fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension().is_some_and(|extension| extensions.iter().any(|known| extension == *known))
}
