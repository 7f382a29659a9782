//! Nsight Compute as a separate process, which runs this command again under its profiler.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};
use deuteron::profile::ncu;

/// The counters read.
pub struct Watched {
    /// the table that `ncu` wrote
    pub table: String,
    /// metrics that it does not know
    pub unknown: Vec<&'static str>,
}

/// Finds `ncu` on the path or in the toolkit's folder.
pub fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let home =
        ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(|home| Path::new(&home).join("bin"));
    let folders = std::env::split_paths(&path).chain(home).chain([PathBuf::from("/usr/local/cuda/bin")]);
    folders.map(|folder| folder.join("ncu")).find(|program| program.is_file())
}

/// Runs this very command again under `ncu`, with more words at its end.
pub fn watch(ncu: &Path, more: &[&str]) -> Result<Watched> {
    let program = std::env::current_exe().context("cannot find the program that runs")?;
    // All words of the process: from Python, the first of them name the script.
    let words = std::env::args_os().skip(1).chain(more.iter().map(OsString::from));
    let command: Vec<OsString> = std::iter::once(program.into_os_string()).chain(words).collect();
    watch_command(ncu, &command)
}

/// Runs a command under `ncu`. Metrics that it does not know are left out the second time.
fn watch_command(ncu: &Path, command: &[OsString]) -> Result<Watched> {
    let folder = LogFolder::make()?;
    let log = folder.0.join("table.csv");
    let mut unknown: Vec<&'static str> = Vec::new();
    loop {
        let metrics: Vec<&'static str> = ncu::METRICS.into_iter().filter(|metric| !unknown.contains(metric)).collect();
        // A table of an earlier run must not be taken for this one's.
        let _ = std::fs::remove_file(&log);
        let done = Command::new(ncu)
            .args(ncu::arguments(&log.to_string_lossy(), &metrics))
            .args(command)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot start {}", ncu.display()))?;
        let table = std::fs::read_to_string(&log).unwrap_or_default();
        let said =
            [&String::from_utf8_lossy(&done.stdout), &String::from_utf8_lossy(&done.stderr), table.as_str()].join("\n");
        let new = ncu::unknown(&said, &metrics);
        if !new.is_empty() && new.len() < metrics.len() {
            unknown.extend(new);
            continue;
        }
        if !done.status.success() {
            bail!("{} ended with {}: {}", ncu.display(), done.status, complaint(&said));
        }
        return Ok(Watched { table, unknown });
    }
}

/// A new temporary folder for a table, removed on drop; never an existing file or link.
struct LogFolder(PathBuf);

impl LogFolder {
    fn make() -> Result<LogFolder> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("deuteron-ncu-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(LogFolder(folder))
    }
}

impl Drop for LogFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The error lines of its output, or the last lines.
fn complaint(said: &str) -> String {
    let lines = || said.lines().map(str::trim).filter(|line| !line.is_empty());
    let errors: Vec<&str> = lines().filter(|line| line.contains("ERR") || line.starts_with("error")).take(3).collect();
    let last: Vec<&str> = lines().rev().take(3).collect();
    match errors.is_empty() {
        true => last.into_iter().rev().collect::<Vec<_>>().join("; "),
        false => errors.join("; "),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use deuteron_testkit::Scratch;

    use super::*;

    /// A script in the place of `ncu`: `$log` is where the table goes, `$metrics` what is asked for, and the rest the command.
    fn script(folder: &Scratch, body: &str) -> PathBuf {
        let path = folder.join("ncu");
        let head = "#!/bin/sh\nwhile [ \"$1\" != --log-file ]; do shift; done\nlog=$2; metrics=$4; shift 4\n";
        std::fs::write(&path, format!("{head}{body}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn the_command_runs_under_it_and_its_table_is_read() {
        let folder = Scratch::make();
        let ncu = script(&folder, "\"$@\" > $log");
        let watched = watch_command(&ncu, &["echo".into(), "a table".into()]).unwrap();
        assert_eq!((watched.table.as_str(), watched.unknown.len()), ("a table\n", 0));
    }

    #[test]
    fn a_metric_that_is_not_known_is_left_out_the_second_time() {
        let folder = Scratch::make();
        let body = "case $metrics in *tensor*) echo '==ERROR== Failed to find metric \
                    sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active'; exit 1;; esac\necho $metrics > $log";
        let watched = watch_command(&script(&folder, body), &["true".into()]).unwrap();
        assert_eq!(watched.unknown.len(), 1);
        assert!(watched.table.contains("dram__bytes_read") && !watched.table.contains("tensor"), "{}", watched.table);
    }

    #[test]
    fn a_refusal_is_passed_on() {
        let folder = Scratch::make();
        let denied = "echo '==PROF== Connected'; echo '==ERROR== ERR_NVGPUCTRPERM - no permission' >&2; exit 9";
        let error = watch_command(&script(&folder, denied), &["true".into()]).err().unwrap().to_string();
        assert!(error.contains("ERR_NVGPUCTRPERM") && !error.contains("Connected"), "{error}");
    }
}
