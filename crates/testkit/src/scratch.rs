//! A folder for a test.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// An empty folder that is removed with its value.
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new one.
    pub fn make() -> Scratch {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("deuteron-test-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder to write to");
        Scratch(path)
    }
}

impl Deref for Scratch {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
