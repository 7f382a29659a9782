//! SIGINT and SIGTERM at any moment: the command ends by the signal, at once, and what it stores is whole.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use deuteron::Machine;
use deuteron_testkit::drill;

use crate::support::Folder;

const COMMANDS: [&[&str]; 4] = [
    &["fuse", "add_act", "--rows", "64", "--cols", "64", "--device", "cpu"],
    &["check", "--cases", "1000000", "--device", "cpu"],
    &["generate", "hi", "--model", "synthetic", "--device", "cpu", "--max-tokens", "500"],
    &["bench", "add_act", "--rows", "512", "--cols", "512", "--device", "cpu"],
];

/// Whether a child would ignore SIGINT, as it does where a shell started this test in the background.
fn are_interrupts_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 << (2 - 1) != 0)
}

#[test]
fn a_signal_ends_a_command_at_once_and_leaves_whole_files() {
    let rounds = drill::times(2);
    let folder = Folder::new();
    let table = folder.path("bounds.csv");
    let (mut ended, only_terminated) = (0, are_interrupts_ignored());
    for round in 0..rounds {
        for (index, words) in COMMANDS.iter().enumerate() {
            let (number, signal) = match (round + index) % 2 {
                0 if !only_terminated => (2, "-INT"),
                _ => (15, "-TERM"),
            };
            let mut command = folder.command(words);
            if words[0] == "check" {
                command.args(["--csv", &table]);
            }
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            sleep(Duration::from_millis((round * 389 + index * 157) as u64 % 700));
            assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
            let start = Instant::now();
            let status = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status;
                }
                if start.elapsed() > Duration::from_secs(60) {
                    child.kill().unwrap();
                    panic!("{words:?} goes on after {signal}");
                }
                sleep(Duration::from_millis(2));
            };
            // A short command may have ended before.
            ended += usize::from(status.signal() == Some(number));
            assert!(status.signal() == Some(number) || status.success(), "{words:?}, {signal}: {status}");
            let stored = std::fs::read_to_string(folder.0.join("settings/deuteron/machines/cpu.toml"));
            // Before the first one is stored there is none.
            assert!(stored.is_err() || stored.is_ok_and(|text| Machine::parse(&text).is_ok()), "{words:?}, {signal}");
        }
        let output = folder.run(COMMANDS[0]);
        assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(ended >= 2 * rounds, "{ended} of {} were ended: the test did not test", COMMANDS.len() * rounds);
    assert!(!std::path::Path::new(&table).exists(), "a table is written in the end, all rows of it at once");
    drill::tried(COMMANDS.len() * rounds, &format!("signals ({ended} ended a command)"));
}
