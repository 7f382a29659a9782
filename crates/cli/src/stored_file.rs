//! Files that commands store for this user: their paths, checked reading, and atomic writing.

use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Error, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::output;

/// Our files have a few KB; a longer file is not one of ours.
const LONGEST: u64 = 1 << 20;

/// Where a file is: `$XDG_CONFIG_HOME/deuteron/FOLDER/NAME.EXTENSION`, or under `~/.config`. None without a home.
pub fn path(folder: &str, name: &str, extension: &str) -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let config = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")))?;
    Some(config.join("deuteron").join(folder).join(format!("{}.{extension}", file_name(name))))
}

/// A machine's name as a file name.
fn file_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c.to_ascii_lowercase() } else { '-' };
    name.chars().map(plain).collect()
}

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}; {remedy}", path.display())]
pub struct BadFile {
    path: PathBuf,
    problem: String,
    remedy: &'static str,
}

impl BadFile {
    pub fn new(path: &Path, problem: impl ToString, remedy: &'static str) -> BadFile {
        BadFile { path: path.to_path_buf(), problem: problem.to_string(), remedy }
    }
}

/// The parsed file, if there is one.
pub fn parsed<T, E: ToString>(
    path: &Path,
    remedy: &'static str,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<Option<T>, BadFile> {
    let text = read(path).map_err(|error| BadFile::new(path, error, remedy))?;
    text.map(|text| parse(&text).map_err(|error| BadFile::new(path, error, remedy))).transpose()
}

/// The parsed file, if it is usable; otherwise one warning on standard error.
pub fn or_note<T>(parsed: Result<Option<T>, BadFile>) -> Option<T> {
    parsed.unwrap_or_else(|error| {
        output::note_once(format!("ignored {error}"));
        None
    })
}

/// The contents of a file, if there is one. Below a home that is not a folder, such as `/dev/null`, there is none.
pub fn read(path: &Path) -> io::Result<Option<String>> {
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(error),
    };
    // Opening a pipe would wait for its writer.
    if !metadata.is_file() {
        return Err(Error::new(ErrorKind::InvalidData, "expected a file"));
    }
    text_of(path, LONGEST).map(Some)
}

/// A text file of at most `longest` bytes, without the mark of its encoding.
pub fn text_of(path: &Path, longest: u64) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(longest + 1).read_to_string(&mut text)?;
    if text.len() as u64 > longest {
        return Err(Error::new(ErrorKind::InvalidData, format!("expected at most {longest} bytes")));
    }
    Ok(text.strip_prefix('\u{feff}').map(String::from).unwrap_or(text))
}

/// Stores a text atomically.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    Lock::new(path)?.write(text)
}

/// A lock on a stored file, held by one process at a time, so that what it read is still valid when it writes.
pub struct Lock<'a> {
    path: &'a Path,
    /// its lock ends with it, and with the process
    _file: File,
}

impl<'a> Lock<'a> {
    /// How long to wait for other holders, which write a few KB.
    const LONGEST: Duration = Duration::from_secs(10);

    /// Makes the file's folder, and waits until no other process replaces the file.
    pub fn new(path: &'a Path) -> io::Result<Lock<'a>> {
        private_folders().create(folder_of(path))?;
        // Opening a pipe for writing alone would wait for its reader.
        let beside = beside(path, "lock");
        let file = File::options().read(true).write(true).create(true).truncate(false).open(beside)?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Lock { path, _file: file }),
                Err(TryLockError::WouldBlock) if start.elapsed() < Self::LONGEST => sleep(Duration::from_millis(2)),
                Err(TryLockError::WouldBlock) => {
                    let seconds = Self::LONGEST.as_secs();
                    let words =
                        format!("another process has held its lock for {seconds} s; end that process and try again");
                    return Err(Error::new(ErrorKind::WouldBlock, words));
                }
                // A file system without locks: the file is complete or as it was all the same.
                Err(TryLockError::Error(_)) => return Ok(Lock { path, _file: file }),
            }
        }
    }

    /// Stores a text atomically: it is first written under another name.
    pub fn write(self, text: &str) -> io::Result<()> {
        Unfinished::new(self.path)?.finish(self.path, text.as_bytes())
    }
}

/// Writes a file that the user named. An existing file is kept until the new one is complete; pipes and devices are written directly.
pub fn write_named(path: &Path, text: &str) -> io::Result<()> {
    // A link stays a link: what it leads to is replaced.
    let place = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let before = std::fs::symlink_metadata(&place).ok();
    if before.as_ref().is_some_and(|before| !before.is_file()) {
        return std::fs::write(path, text);
    }
    // A folder that nothing can be added to may have files that can be written.
    let Ok(unfinished) = Unfinished::new(&place) else { return std::fs::write(path, text) };
    if let Some(before) = before {
        // Who may read it is no part of what was asked for.
        let _ = unfinished.file.set_permissions(before.permissions());
    }
    unfinished.finish(&place, text.as_bytes())
}

/// A new temporary file in the folder of the final one.
struct Unfinished {
    file: File,
    path: PathBuf,
}

impl Unfinished {
    /// Existing files and links are neither written nor followed.
    fn new(path: &Path) -> io::Result<Unfinished> {
        /// Names to try: one is taken only if a process with this id was killed.
        const NAMES: usize = 64;
        let mut taken = Error::from(ErrorKind::AlreadyExists);
        for number in 0..NAMES {
            let path = beside(path, &format!("{}.{number}", std::process::id()));
            match File::options().write(true).create_new(true).open(&path) {
                Ok(file) => return Ok(Unfinished { file, path }),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => taken = error,
                Err(error) => return Err(error),
            }
        }
        Err(taken)
    }

    /// Renames a file to its final name once its bytes are on the disk.
    fn finish(mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let written = self.file.write_all(bytes).and_then(|()| self.file.sync_all());
        let stored = written.and_then(|()| std::fs::rename(&self.path, path));
        if stored.is_err() {
            // The first error is the one to report.
            let _ = std::fs::remove_file(&self.path);
        }
        stored
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A hidden file in the same folder.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    folder_of(path).join(format!(".{name}.{suffix}"))
}

/// Creates folders that only their owner can read.
fn private_folders() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}

#[cfg(test)]
mod processes;

#[cfg(test)]
mod tests {
    use super::*;
    use deuteron_testkit::Scratch;

    #[test]
    #[cfg(unix)]
    fn a_link_at_an_unfinished_name_is_not_followed() {
        let folder = Scratch::make();
        let (path, victim) = (folder.join("name.txt"), folder.join("victim"));
        std::fs::write(&victim, "untouched").unwrap();
        for name in [format!(".name.txt.{}", std::process::id()), format!(".name.txt.{}.0", std::process::id())] {
            std::os::unix::fs::symlink(&victim, folder.join(name)).unwrap();
        }
        write(&path, "text").unwrap();
        assert_eq!(read(&path).unwrap().as_deref(), Some("text"));
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "untouched");
        assert!(!path.is_symlink());
    }

    #[test]
    #[cfg(unix)]
    fn a_pipe_in_place_of_a_file_does_not_block() {
        let folder = Scratch::make();
        let path = folder.join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert!(read(&path).unwrap_err().to_string().contains("expected a file"));
    }

    #[test]
    fn the_mark_of_an_encoding_is_no_text_and_long_files_are_refused() {
        let folder = Scratch::make();
        let path = folder.join("marked.txt");
        std::fs::write(&path, "\u{feff}text").unwrap();
        assert_eq!(text_of(&path, 7).unwrap(), "text");
        assert!(text_of(&path, 6).unwrap_err().to_string().contains("at most 6 bytes"));
    }

    #[test]
    fn a_text_is_read_as_it_was_stored() {
        let folder = Scratch::make();
        let path = folder.join("within").join("name.txt");
        assert!(read(&path).unwrap().is_none());
        for text in ["first", "", "second\n"] {
            write(&path, text).unwrap();
            assert_eq!(read(&path).unwrap().as_deref(), Some(text));
        }
        let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 2, "no unfinished file stays behind, only the lock's");
        std::fs::write(&path, "x".repeat(LONGEST as usize + 1)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("at most"));
        assert!(write(&path.join("below"), "").is_err(), "a file is no folder");
    }

    #[test]
    fn every_machine_has_a_file_name() {
        assert_eq!(file_name("h200"), "h200");
        assert_eq!(file_name("NVIDIA H200 / SXM"), "nvidia-h200---sxm");
    }
}
