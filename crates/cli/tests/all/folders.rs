//! Folders that cannot be used: full, read-only, somebody else's, behind links, shared by many processes. Commands say what they cannot
//! store and do the rest; a file that was there is whole afterwards.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use deuteron::Machine;
use deuteron_testkit::drill;

use crate::support::Folder;

/// A user that owns nothing.
const NOBODY: u32 = 65_534;

/// A command that takes the lock of what is learnt, although kernels as short as these teach nothing.
const FUSE: [&str; 8] = ["fuse", "add_act", "--rows", "64", "--cols", "64", "--device", "cpu"];

fn error_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).to_string()
}

fn machine_file(folder: &Folder) -> PathBuf {
    folder.0.join("settings/deuteron/machines/cpu.toml")
}

/// A machine file as an earlier run left it.
fn stored_before(folder: &Folder) -> String {
    let (path, text) = (machine_file(folder), Machine::cpu().to_string());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, &text).unwrap();
    text
}

/// What a shell does before the command runs in its place.
fn after(shell: &str, command: &Command) -> Command {
    let mut limited = Command::new("sh");
    limited.arg("-c").arg(format!("{shell} ; exec \"$0\" \"$@\"")).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited
}

/// No file may grow beyond this many blocks, and a write beyond is an error, as on a full disk.
fn on_a_full_disk(blocks: usize, command: &Command) -> Output {
    after(&format!("trap '' XFSZ ; ulimit -f {blocks}"), command).output().unwrap()
}

#[test]
fn a_full_disk_costs_only_what_was_to_be_stored() {
    for blocks in [0, 1] {
        let folder = Folder::new();
        let before = stored_before(&folder);
        let output = on_a_full_disk(blocks, &folder.command(&FUSE));
        assert!(output.status.success(), "{}", error_text(&output));
        assert_eq!(fs::read_to_string(machine_file(&folder)).unwrap(), before);
        assert_eq!(fs::read_dir(machine_file(&folder).parent().unwrap()).unwrap().count(), 1, "the file alone");

        // A report that was asked for is missing, so that the command fails; the one of the last time is as it was.
        let page = folder.write("page.html", "the last one");
        let output = on_a_full_disk(blocks, &folder.command(&["analyze", "norm_act", "--html", &page]));
        assert_eq!(output.status.code(), Some(2), "{}", error_text(&output));
        assert!(error_text(&output).contains("cannot write") && error_text(&output).contains("page.html"));
        assert_eq!(fs::read_to_string(&page).unwrap(), "the last one");
    }
    drill::tried(4, "writes to a full disk");
}

#[test]
fn a_page_goes_where_it_was_asked_for() {
    let folder = Folder::new();
    let analyze = |path: &str| folder.run(&["analyze", "norm_act", "--html", path]);
    // Through a link, with the rights that the file has, and to what is no file.
    let (page, link) = (folder.write("page.html", "old"), folder.path("link.html"));
    fs::set_permissions(&page, Permissions::from_mode(0o640)).unwrap();
    symlink(&page, &link).unwrap();
    assert!(analyze(&link).status.success());
    assert!(Path::new(&link).is_symlink() && fs::read_to_string(&page).unwrap().contains("<html"));
    assert_eq!(fs::metadata(&page).unwrap().permissions().mode() & 0o777, 0o640);
    assert!(analyze("/dev/null").status.success());
    let printed = String::from_utf8(analyze("/dev/stdout").stdout).unwrap();
    assert!(printed.contains("<html"), "{printed}");
    assert_eq!(analyze(&folder.path("no/such/folder.html")).status.code(), Some(2));
    assert_eq!(analyze(&folder.path("")).status.code(), Some(2), "a folder");
    let names: Vec<_> = fs::read_dir(&*folder.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().starts_with('.')), "{names:?}");
}

/// The command as a user who owns nothing: to root nothing is read-only. The program is copied to where that user may run it.
fn as_nobody(folder: &Folder, words: &[&str]) -> Command {
    let command = folder.command(words);
    if fs::metadata(&*folder.0).unwrap().uid() != 0 {
        return command;
    }
    let program = folder.0.join("deuteron");
    if !program.exists() {
        fs::copy(command.get_program(), &program).unwrap();
        fs::set_permissions(&*folder.0, Permissions::from_mode(0o755)).unwrap();
    }
    let mut other = Command::new(program);
    other.args(words).uid(NOBODY).gid(NOBODY);
    for (name, value) in command.get_envs() {
        other.env(name, value.unwrap_or_default());
    }
    other
}

fn is_used_without_storing(folder: &Folder, what: &str) {
    let output = as_nobody(folder, &FUSE).output().unwrap();
    assert!(output.status.success(), "{what}: {}", error_text(&output));
    assert!(error_text(&output).contains("not stored"), "{what}: {}", error_text(&output));
    assert!(!error_text(&output).contains("panicked"), "{what}: {}", error_text(&output));
}

#[test]
fn folders_that_cannot_be_written_cost_only_what_was_to_be_stored() {
    // Read-only, with a file in it and without; and somebody else's.
    for (with_file, mode) in [(true, 0o555), (false, 0o555), (true, 0o700)] {
        let folder = Folder::new();
        let before = stored_before(&folder);
        let (file, machines) = (machine_file(&folder), machine_file(&folder).parent().unwrap().to_path_buf());
        if !with_file {
            fs::remove_file(&file).unwrap();
        }
        fs::set_permissions(&machines, Permissions::from_mode(mode)).unwrap();
        let is_root = fs::metadata(&machines).unwrap().uid() == 0;
        if mode == 0o555 || is_root {
            is_used_without_storing(&folder, &format!("mode {mode:o}"));
        }
        fs::set_permissions(&machines, Permissions::from_mode(0o700)).unwrap();
        assert_eq!(fs::read_dir(&machines).unwrap().count(), usize::from(with_file));
        if with_file {
            assert_eq!(fs::read_to_string(&file).unwrap(), before);
        }
        if is_root {
            // Given to somebody who is not the one who runs it.
            chown(&machines, Some(1), Some(1)).unwrap();
            is_used_without_storing(&folder, "of another user");
        }
    }
}

#[test]
fn a_link_to_a_folder_is_followed_and_one_to_nowhere_is_not() {
    let folder = Folder::new();
    let elsewhere = folder.0.join("elsewhere");
    fs::create_dir_all(&elsewhere).unwrap();
    fs::create_dir_all(folder.0.join("settings")).unwrap();
    symlink(&elsewhere, folder.0.join("settings/deuteron")).unwrap();
    let output = folder.run(&FUSE);
    assert!(output.status.success() && error_text(&output).is_empty(), "{}", error_text(&output));
    assert!(elsewhere.join("learnt").is_dir(), "the link is followed");
    fs::remove_dir_all(&elsewhere).unwrap();
    let output = folder.run(&FUSE);
    assert!(output.status.success() && error_text(&output).contains("not stored"), "{}", error_text(&output));
}

#[test]
fn commands_at_once_take_turns_at_what_is_learnt() {
    let processes = if drill::is_drill() { 32 } else { 6 };
    let rounds = if drill::is_drill() { drill::times(1) } else { 1 };
    for _ in 0..rounds {
        let folder = Folder::new();
        let start = |_| folder.command(&FUSE).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let children: Vec<Child> = (0..processes).map(start).collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success() && error_text(&output).is_empty(), "{}", error_text(&output));
        }
        let left: Vec<_> = fs::read_dir(folder.0.join("settings/deuteron/learnt")).unwrap().collect();
        assert_eq!(left.len(), 1, "the lock alone: {left:?}");
    }
    drill::tried(rounds * processes, "commands that learn at once");
}
