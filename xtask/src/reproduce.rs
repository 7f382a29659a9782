//! A release is built twice, in two folders of different names, and both programs must have the same bytes.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::drill::Outcome;
use crate::{files, program, succeed};

/// The program of a release.
const PROGRAM: &str = "release/deuteron";

pub fn run(root: &Path) -> Result<Outcome> {
    let base = root.join("target").join("reproduce");
    let mut built = Vec::new();
    for folder in ["one", "another-folder"] {
        let folder = base.join(folder);
        files::copy_tree(root, &folder.join("tree"))?;
        let target = folder.join("target");
        if target.exists() {
            fs::remove_dir_all(&target)?;
        }
        let mut command = Command::new(program());
        command.current_dir(folder.join("tree")).args(["build", "--release", "--locked", "--package", "deuteron-cli"]);
        succeed(command.env("CARGO_TARGET_DIR", &target).env_remove("RUSTFLAGS"), "cargo build --release")?;
        built.push(fs::read(target.join(PROGRAM))?);
    }
    let [one, other] = [&built[0], &built[1]];
    ensure!(!one.is_empty(), "{PROGRAM} is empty");
    let first = one.iter().zip(other).position(|(one, other)| one != other);
    let note = match (first, one.len() == other.len()) {
        (None, true) => format!("builds with the same {} bytes", one.len()),
        (first, _) => format!("builds that differ from byte {}", first.unwrap_or(one.len().min(other.len()))),
    };
    println!("{note}");
    Ok(Outcome::Ran { count: 2, failures: usize::from(one != other), note })
}
