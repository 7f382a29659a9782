//! Files of a model's folder, and nothing outside it.

use std::fs::{File, Metadata};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use memmap2::Mmap;

/// The longest text file that is read. A tokenizer.json of GPT-2 has 1.4 MB.
const MOST_TEXT: u64 = 1 << 28;

/// What is wrong with a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// There is no such file, or it may not be read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// A folder or a device.
    #[error("is not a regular file")]
    NotAFile,
    /// A name with a path in it.
    #[error("is not a plain file name; expected a file beside config.json")]
    NotPlain,
    /// A symbolic link out of the folder.
    #[error("is a symbolic link to `{}`, outside the folder; put the file itself there", .0.display())]
    LeavesFolder(PathBuf),
    /// Longer than any file of its kind.
    #[error("has {0} bytes, which is too large for a file of its kind")]
    TooLong(u64),
    /// Text in another encoding.
    #[error("is not UTF-8 text")]
    NotUtf8,
}

/// A folder whose files may be opened by plain names.
///
/// Symbolic links must stay inside it, except in the Hugging Face cache, where `snapshots/REVISION/FILE` links to `blobs/`.
pub struct Folder {
    root: PathBuf,
    blobs: Option<PathBuf>,
}

impl Folder {
    /// The folder at a path.
    pub fn new(path: &Path) -> Result<Folder, FileError> {
        let root = path.canonicalize().map_err(unreadable)?;
        let repository = root.parent().filter(|parent| parent.ends_with("snapshots")).and_then(Path::parent);
        let blobs = repository.and_then(|repository| repository.join("blobs").canonicalize().ok());
        Ok(Folder { root, blobs })
    }

    /// Its path, with no symbolic link in it.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path of a file, for messages.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Whether there is an entry of that name.
    pub fn has(&self, name: &str) -> bool {
        is_plain(name) && self.path(name).exists()
    }

    /// A whole text file.
    pub fn text(&self, name: &str) -> Result<String, FileError> {
        let (file, metadata) = self.file(name)?;
        if metadata.len() > MOST_TEXT {
            return Err(FileError::TooLong(metadata.len()));
        }
        let mut bytes = Vec::new();
        file.take(MOST_TEXT).read_to_end(&mut bytes).map_err(unreadable)?;
        String::from_utf8(bytes).map_err(|_| FileError::NotUtf8)
    }

    /// A file mapped into memory. Pages are read on first access.
    #[expect(unsafe_code, reason = "the one memory map")]
    pub fn map(&self, name: &str) -> Result<Mmap, FileError> {
        let (file, _) = self.file(name)?;
        // SAFETY: the map is read-only and only ever given out as bytes, of which any are valid. That the file stays as it is
        // while it is mapped is the user's part: the system has no means to hold others off it. Weights are written once.
        unsafe { Mmap::map(&file) }.map_err(unreadable)
    }

    fn file(&self, name: &str) -> Result<(File, Metadata), FileError> {
        if !is_plain(name) {
            return Err(FileError::NotPlain);
        }
        let path = self.path(name).canonicalize().map_err(unreadable)?;
        let inside = |folder: &PathBuf| path.starts_with(folder);
        if !inside(&self.root) && !self.blobs.as_ref().is_some_and(inside) {
            return Err(FileError::LeavesFolder(path));
        }
        // Asked before it is opened: opening a pipe would wait for its writer.
        let metadata = path.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(FileError::NotAFile);
        }
        Ok((File::open(&path).map_err(unreadable)?, metadata))
    }
}

/// Checks for a single path component without separators or `..`.
pub fn is_plain(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let one = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    one && !name.contains(['/', '\\', ':', '\0'])
}

fn unreadable(error: std::io::Error) -> FileError {
    FileError::Unreadable(error.to_string())
}
