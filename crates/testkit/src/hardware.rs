//! What a test may find of the machine it runs on.

use std::fmt::Display;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// The GPU that a test needs, or a loud word that the test is skipped. A test that calls this is counted by `cargo xtask
/// test` as one that needs a GPU.
pub fn gpu<T, E: Display>(open: impl FnOnce() -> Result<T, E>) -> Option<T> {
    match open() {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("a test").to_string();
            // Past the capture of the test harness: a skipped test must not look like one that ran.
            let _ = writeln!(std::io::stderr(), "skipped: needs a GPU: {test} ({})", first_line(&error.to_string()));
            None
        }
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default().trim_end_matches("; looked in:")
}

/// The root of a CUDA toolkit, if one is named.
pub fn cuda_home() -> Option<PathBuf> {
    folder("CUDA_HOME").or_else(|| folder("CUDA_PATH"))
}

/// Places that may hold CUDA's libraries as Python packages: environments that are named, then those of the Python on
/// the path.
pub fn environments() -> Vec<PathBuf> {
    let named = ["DEUTERON_NVRTC_ENV", "VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folder);
    named.chain(python_folders().iter().cloned()).collect()
}

/// Asked once per process: a hundred tests look for a GPU, and Python takes longer to start than most of them to run.
fn python_folders() -> &'static [PathBuf] {
    const ASK: &str = "import site; print('\\n'.join([*site.getsitepackages(), site.getusersitepackages()]))";
    static FOLDERS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    FOLDERS.get_or_init(|| {
        let answer = Command::new("python3").args(["-c", ASK]).output();
        let text = answer.map(|answer| String::from_utf8_lossy(&answer.stdout).into_owned()).unwrap_or_default();
        text.lines().map(PathBuf::from).collect()
    })
}

fn folder(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
