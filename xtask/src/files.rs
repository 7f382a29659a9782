//! Files of the source tree.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::printed;

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

/// Makes a folder a copy of the tree: what git knows or would know. Files that are equal keep their time, so that cargo builds little.
pub fn copy_tree(root: &Path, tree: &Path) -> Result<()> {
    let words = ["ls-files", "--cached", "--others", "--exclude-standard"];
    let listed = printed(Command::new("git").current_dir(root).args(words))?;
    let wanted: BTreeSet<PathBuf> =
        listed.lines().map(PathBuf::from).filter(|path| root.join(path).is_file()).collect();
    ensure!(!wanted.is_empty(), "git lists no files in {}", root.display());
    if tree.is_dir() {
        for path in below(tree)? {
            if !wanted.contains(path.strip_prefix(tree)?) {
                fs::remove_file(&path)?;
            }
        }
    }
    for path in wanted {
        let (from, to) = (fs::read(root.join(&path))?, tree.join(&path));
        if fs::read(&to).ok().as_ref() != Some(&from) {
            fs::create_dir_all(to.parent().context("a file has a folder")?)?;
            fs::write(&to, from)?;
        }
    }
    Ok(())
}
