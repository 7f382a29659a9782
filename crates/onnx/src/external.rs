//! External data: only regular files beneath the model's folder, reached without links.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::error::{ExternalProblem, OnnxError};
use crate::schema::Tensor;

/// A tensor's place in a file beside the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalPlace {
    /// The file.
    pub path: PathBuf,
    /// Where the data begin.
    pub offset: u64,
    /// How many bytes.
    pub length: u64,
}

/// Finds a tensor's data and checks that they are there, without reading them.
pub(crate) fn locate(tensor: &Tensor, bytes: u64, folder: Option<&Path>) -> Result<ExternalPlace, OnnxError> {
    let entry = |key: &str| tensor.external.iter().find(|(name, _)| *name == key).map(|&(_, value)| value);
    let location = entry("location").unwrap_or_default();
    let wrap =
        |problem| OnnxError::External { tensor: tensor.name.to_string(), location: location.to_string(), problem };
    let number = |key: &'static str, otherwise: u64| match entry(key) {
        None => Ok(otherwise),
        Some(text) => text.parse().map_err(|_| wrap(ExternalProblem::NotANumber { key, value: text.to_string() })),
    };
    let (offset, length) = (number("offset", 0)?, number("length", bytes)?);
    if length != bytes {
        return Err(OnnxError::TensorLength { tensor: tensor.name.to_string(), expected: bytes, got: length });
    }
    let path = beneath(folder, location).map_err(wrap)?;
    let found = fs::metadata(&path)
        .map_err(|error| wrap(ExternalProblem::Unreadable { path: path.clone(), why: error.to_string() }))?;
    let end = offset.saturating_add(length);
    if found.len() < end {
        return Err(wrap(ExternalProblem::TooShort { expected: end, got: found.len() }));
    }
    Ok(ExternalPlace { path, offset, length })
}

/// The path of `location` in `folder`, every component checked: a link anywhere could lead out of the folder.
fn beneath(folder: Option<&Path>, location: &str) -> Result<PathBuf, ExternalProblem> {
    // A backslash separates components on other systems: refused, so that a path means the same everywhere.
    let relative = Path::new(location);
    if location.is_empty() || relative.is_absolute() || location.starts_with(['/', '\\']) || location.contains(':') {
        return Err(ExternalProblem::NotRelative);
    }
    if location.split(['/', '\\']).any(|component| component == "..") {
        return Err(ExternalProblem::LeavesFolder);
    }
    let mut path = folder.ok_or(ExternalProblem::NoFolder)?.to_path_buf();
    let mut last = None;
    for component in relative.components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::CurDir => continue,
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err(ExternalProblem::LeavesFolder);
            }
        }
        let found = fs::symlink_metadata(&path)
            .map_err(|error| ExternalProblem::Unreadable { path: path.clone(), why: error.to_string() })?;
        if found.file_type().is_symlink() {
            return Err(ExternalProblem::Symlink(path));
        }
        last = Some(found);
    }
    match last {
        Some(found) if found.is_file() => Ok(path),
        _ => Err(ExternalProblem::NotAFile(path)),
    }
}

/// Reads a place that was checked before.
pub(crate) fn read(place: &ExternalPlace) -> Result<Vec<u8>, OnnxError> {
    use std::io::{Read, Seek, SeekFrom};
    let failed = |error: std::io::Error| OnnxError::Unreadable { path: place.path.clone(), why: error.to_string() };
    let mut file = fs::File::open(&place.path).map_err(failed)?;
    file.seek(SeekFrom::Start(place.offset)).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(place.length).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}
