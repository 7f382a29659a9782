//! Stored files with several processes: killed while they write, and many at once.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use deuteron_testkit::{Scratch, drill};

use super::*;

/// Set for a process that this file starts: what it is to do, its number, and where.
const TASK: &str = "DEUTERON_STORED_FILE_TASK";

/// A text that says by itself whether it is whole.
fn text(number: usize) -> String {
    let line = format!("{number}\n");
    format!("{}{line}", line.repeat(number * 7919 % 20_000))
}

/// The number of a text, if it is whole.
fn number(stored: &str) -> Option<usize> {
    let number = stored.lines().next()?.parse().ok()?;
    (stored == text(number)).then_some(number)
}

fn start(task: &str, number: usize, path: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "stored_file::processes::task_of_a_child", "--nocapture"])
        .env(TASK, format!("{task} {number} {}", path.display()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Not a test by itself: what the processes started here run.
#[test]
fn task_of_a_child() {
    let Ok(order) = std::env::var(TASK) else { return };
    let [task, number, path] = order.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    let (number, path) = (number.parse::<usize>().unwrap(), PathBuf::from(path));
    match task {
        "write" => (number..usize::MAX).for_each(|number| write(&path, &text(number)).unwrap()),
        "name" => (number..usize::MAX).for_each(|number| write_named(&path, &text(number)).unwrap()),
        "add" => (0..8).for_each(|entry| add(&path, 8 * number + entry)),
        other => panic!("no such task: {other}"),
    }
}

/// A line more, as a tuning file grows.
fn add(path: &Path, entry: usize) {
    let lock = Lock::new(path).unwrap();
    let before = read(path).unwrap().unwrap_or_default();
    lock.write(&format!("{before}{entry}\n")).unwrap();
}

#[test]
fn killed_writers_leave_no_bad_file() {
    for task in ["write", "name"] {
        let folder = Scratch::make();
        let path = folder.join("file.txt");
        let rounds = drill::times(15);
        let (mut seen, mut unfinished) = (BTreeSet::new(), 0);
        for round in 0..rounds {
            let mut child = start(task, round * 1_000_000, &path);
            // Killed within the first few files that it writes: those take about a millisecond each.
            let deadline = Instant::now() + Duration::from_secs(60);
            let started = |stored: String| number(&stored).is_some_and(|number| number / 1_000_000 == round);
            while !read(&path).unwrap().is_some_and(started) {
                assert!(Instant::now() < deadline, "nothing is written after a minute");
                sleep(Duration::from_micros(200));
            }
            sleep(Duration::from_micros((round * 7919 % 5000) as u64));
            child.kill().unwrap();
            child.wait().unwrap();
            let stored = read(&path).unwrap().unwrap();
            let number = number(&stored).unwrap_or_else(|| panic!("round {round}: {} bytes of no text", stored.len()));
            seen.insert(number);
            for entry in std::fs::read_dir(&*folder).unwrap().map(|entry| entry.unwrap().path()) {
                let name = entry.file_name().unwrap().to_string_lossy().into_owned();
                if name != "file.txt" && name != ".file.txt.lock" {
                    unfinished += 1;
                    std::fs::remove_file(entry).unwrap();
                }
            }
        }
        assert_eq!(seen.len(), rounds, "every process wrote");
        assert!(unfinished > 0, "no process died in the middle of {rounds}: the test did not test");
        drill::tried(rounds, &format!("kills while a file was stored ({unfinished} in the middle)"));
    }
}

#[test]
fn what_many_processes_add_is_all_there() {
    const PROCESSES: usize = 32;
    let rounds = if drill::is_drill() { drill::times(1) } else { 1 };
    for _ in 0..rounds {
        let folder = Scratch::make();
        let path = folder.join("within").join("file.txt");
        let children: Vec<Child> = (0..PROCESSES).map(|number| start("add", number, &path)).collect();
        for mut child in children {
            assert!(child.wait().unwrap().success());
        }
        let stored = read(&path).unwrap().unwrap();
        let mut entries: Vec<usize> = stored.lines().map(|line| line.parse().unwrap()).collect();
        entries.sort_unstable();
        assert_eq!(entries, (0..8 * PROCESSES).collect::<Vec<_>>());
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 2, "the file and its lock");
    }
    drill::tried(rounds * PROCESSES, "processes that add to one file");
}
