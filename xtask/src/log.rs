//! What commands print while others use the terminal: kept in a file and shown when they have ended.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};

use crate::succeed;

/// A file in the folder for temporary files, removed in the end.
pub struct Log(PathBuf);

impl Log {
    pub fn new() -> Result<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let log = Self(std::env::temp_dir().join(format!("deuteron-xtask-{}-{number}.log", std::process::id())));
        File::create(&log.0).with_context(|| log.0.display().to_string())?;
        Ok(log)
    }

    /// The end of the file, for a command to print to.
    pub fn end(&self) -> Result<File> {
        OpenOptions::new().append(true).open(&self.0).with_context(|| self.0.display().to_string())
    }

    pub fn line(&self, text: &str) -> Result<()> {
        Ok(writeln!(self.end()?, "{text}")?)
    }

    /// Runs a command that must succeed.
    pub fn run(&self, command: &mut Command, what: &str) -> Result<()> {
        command.stdin(Stdio::null()).stdout(self.end()?).stderr(self.end()?);
        succeed(command, what)
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.0).unwrap_or_default()).into_owned()
    }

    /// The last line that is not empty: programs say there why they failed.
    pub fn last_line(&self) -> Option<String> {
        self.text().lines().rev().map(str::trim).find(|line| !line.is_empty()).map(String::from)
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // A file that stays in the folder for temporary files does no harm.
        let _ = fs::remove_file(&self.0);
    }
}
