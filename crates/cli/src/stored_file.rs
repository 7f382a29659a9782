//! Files that commands leave for this user: where they are, read with care, complete or not there.

use std::fs::{DirBuilder, File};
use std::io::{self, Error, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use crate::output;

/// Our files have some KB; one that is longer than this is none of ours.
const LONGEST: u64 = 1 << 20;

/// Where a file is: `$XDG_CONFIG_HOME/deuteron/FOLDER/NAME.EXTENSION`, or under `~/.config`. None without a home.
pub fn path(folder: &str, name: &str, extension: &str) -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let config = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")))?;
    Some(config.join("deuteron").join(folder).join(format!("{}.{extension}", file_name(name))))
}

/// A machine's name as that of a file.
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

/// What a file means, if there is one.
pub fn parsed<T, E: ToString>(
    path: &Path,
    remedy: &'static str,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<Option<T>, BadFile> {
    let text = read(path).map_err(|error| BadFile::new(path, error, remedy))?;
    text.map(|text| parse(&text).map_err(|error| BadFile::new(path, error, remedy))).transpose()
}

/// What a file means, if it can be used; if it cannot, standard error says so once.
pub fn or_note<T>(parsed: Result<Option<T>, BadFile>) -> Option<T> {
    parsed.unwrap_or_else(|error| {
        output::note_once(format!("ignored {error}"));
        None
    })
}

/// What a file holds, if there is one. Below a home that is no folder, such as `/dev/null`, there is none.
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

/// Makes the folder of a file.
pub fn make_folder_of(path: &Path) -> io::Result<()> {
    private_folders().create(path.parent().unwrap_or(Path::new(".")))
}

/// Stores a text. The file is complete or as it was: the text is written under another name first.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    private_folders().create(folder)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (mut file, unfinished) = unfinished_file(folder, &name)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    let stored = written.and_then(|()| std::fs::rename(&unfinished, path));
    if stored.is_err() {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&unfinished);
    }
    stored
}

/// A new file beside the one to be. What is there already, a link of someone else's among it, is neither written nor followed.
fn unfinished_file(folder: &Path, name: &str) -> io::Result<(File, PathBuf)> {
    /// Names that are tried: one is taken only if a process of this number was killed.
    const NAMES: usize = 64;
    let mut taken = Error::from(ErrorKind::AlreadyExists);
    for number in 0..NAMES {
        let path = folder.join(format!(".{name}.{}.{number}", std::process::id()));
        match File::options().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => taken = error,
            Err(error) => return Err(error),
        }
    }
    Err(taken)
}

/// Makes folders that only their owner can look into.
fn private_folders() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}

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
        assert_eq!(left.len(), 1, "no unfinished file stays behind");
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
