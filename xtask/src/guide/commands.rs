//! The commands of the book. A code block is one of these, by the words behind its fence:
//!
//! - `console`: lines that start with `$ ` are run by `sh` in the page's own folder; what follows is what they print (`output.rs`).
//!   With `varies` numbers may differ; `exit=1` says how the last command of the block ends; `needs=nvrtc`, `needs=cxx` or `needs=gpu`
//!   skips the block, with a warning, where that is not there.
//! - `graph,file=NAME` or any other word with `file=NAME`: written into the folder for the commands after it.
//! - `text`: something to look at, such as a diagram or an output whose command is elsewhere.
//! - anything else must be a file of the repository, which is compiled or run by tests of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::book::{Block, Book, Page};
use super::output::{self, Compare};
use crate::hardware;

/// What the commands of the book should take together at most. Slow machines take longer, which is no mistake of the book.
const LIMIT: Duration = Duration::from_secs(120);

/// Pages whose commands run at a time: most commands keep one core busy.
const AT_ONCE: usize = 2;

/// What a block does.
#[derive(Debug, PartialEq)]
enum Kind {
    Console(Console),
    File(String),
    Shown,
}

#[derive(Debug, PartialEq)]
struct Console {
    compare: Compare,
    exit: i32,
    needs: Option<Need>,
}

/// What a block needs beside a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    Nvrtc,
    Compiler,
    Gpu,
}

/// A command and what it prints.
#[derive(Debug, PartialEq)]
struct Step {
    command: String,
    expected: String,
}

/// Every block that is none of the kinds.
pub fn mistakes(book: &Book) -> Vec<String> {
    let blocks = book.pages.iter().flat_map(|page| page.blocks().into_iter().map(move |block| (page, block)));
    let wrong = blocks.filter_map(|(page, block)| {
        let reason = match kind(&block) {
            Ok(Kind::Console(_)) => steps(&block.text).err()?,
            Ok(_) => return None,
            Err(reason) => reason,
        };
        Some(format!("{}:{}: {reason}", page.file, block.line))
    });
    wrong.collect()
}

fn kind(block: &Block) -> Result<Kind, String> {
    let mut words = block.info.split(',');
    let language = words.next().unwrap_or_default();
    if language == "console" {
        return console(words).map(Kind::Console);
    }
    let file = block.info.split(',').find_map(|word| word.strip_prefix("file="));
    match file {
        Some(file) if file.is_empty() || file.contains(['/', '\\']) => {
            Err(format!("file={file}: expected a name without a folder"))
        }
        Some(file) => Ok(Kind::File(file.to_string())),
        None if language == "text" || block.included => Ok(Kind::Shown),
        None => Err(format!("a block of `{}` is neither run nor included from a file nor marked as text", block.info)),
    }
}

fn console<'a>(words: impl Iterator<Item = &'a str>) -> Result<Console, String> {
    let mut console = Console { compare: Compare::Exactly, exit: 0, needs: None };
    for word in words {
        match word.split_once('=').unwrap_or((word, "")) {
            ("varies", "") => console.compare = Compare::ButNumbers,
            ("exit", code) => console.exit = code.parse().map_err(|_| format!("`{word}`: expected a number"))?,
            ("needs", "nvrtc") => console.needs = Some(Need::Nvrtc),
            ("needs", "cxx") => console.needs = Some(Need::Compiler),
            ("needs", "gpu") => console.needs = Some(Need::Gpu),
            _ => return Err(format!("`{word}` is none of varies, exit=N, needs=nvrtc, needs=cxx, needs=gpu")),
        }
    }
    Ok(console)
}

fn steps(text: &str) -> Result<Vec<Step>, String> {
    let mut steps: Vec<Step> = Vec::new();
    let mut continues = false;
    for line in text.lines() {
        let (command, last) = (line.strip_prefix("$ "), steps.last_mut());
        match (command, last) {
            (Some(command), _) => steps.push(Step { command: command.into(), expected: String::new() }),
            (None, Some(step)) if continues => step.command = format!("{}\n{line}", step.command),
            (None, Some(step)) => step.expected.extend([line, "\n"]),
            (None, None) => return Err("a console block starts with a command: `$ deuteron ..`".into()),
        }
        continues = (continues || command.is_some()) && line.ends_with('\\');
    }
    if steps.is_empty() { Err("a console block without a command".into()) } else { Ok(steps) }
}

/// Runs the commands of a book.
pub struct Runner {
    folder: PathBuf,
    path: std::ffi::OsString,
    nvrtc: Option<PathBuf>,
    has_compiler: bool,
}

/// What became of the blocks.
#[derive(Default)]
struct Tally {
    commands: usize,
    skipped: usize,
    failures: Vec<String>,
}

impl Tally {
    fn add(&mut self, other: Tally) {
        self.commands += other.commands;
        self.skipped += other.skipped;
        self.failures.extend(other.failures);
    }
}

impl Runner {
    /// `program` is found as its own name; commands leave nothing outside of `folder`.
    pub fn new(folder: PathBuf, program: &Path, nvrtc: Option<PathBuf>) -> Result<Runner> {
        let own = program.parent().context("a program without a folder")?.to_path_buf();
        let before = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths([own].into_iter().chain(std::env::split_paths(&before)))?;
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let has_compiler = Command::new(compiler).arg("--version").output().is_ok_and(|output| output.status.success());
        Ok(Runner { folder, path, nvrtc, has_compiler })
    }

    pub fn run(&self, book: &Book) -> Result<()> {
        let start = Instant::now();
        let next = Mutex::new(book.pages.iter());
        let work = || {
            let mut tally = Tally::default();
            loop {
                // The lock ends with the statement: pages run beside each other.
                let page = next.lock().expect("no thread panics while it takes a page").next();
                let Some(page) = page else { return Ok(tally) };
                let begun = Instant::now();
                self.run_page(page, &mut tally)?;
                println!("guide: {} took {:.1} s", page.file, begun.elapsed().as_secs_f64());
            }
        };
        let tallies: Vec<Result<Tally>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().expect("a thread of the guide panicked")).collect()
        });
        let mut tally = Tally::default();
        tallies.into_iter().try_for_each(|other| other.map(|other| tally.add(other)))?;
        let taken = start.elapsed();
        println!("guide: {} commands in {:.0} s", tally.commands, taken.as_secs_f64());
        if tally.skipped > 0 {
            println!("warning: {} blocks of the guide need what is not here, and were skipped", tally.skipped);
        }
        ensure!(tally.failures.is_empty(), "the guide is wrong:\n{}", tally.failures.join("\n"));
        if taken > LIMIT {
            println!(
                "warning: the commands of the guide took {} s; they should take at most {} s",
                taken.as_secs(),
                LIMIT.as_secs()
            );
        }
        Ok(())
    }

    fn run_page(&self, page: &Page, tally: &mut Tally) -> Result<()> {
        let folder = self.folder.join("run").join(page.address());
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        for block in page.blocks() {
            let console = match kind(&block).map_err(anyhow::Error::msg)? {
                Kind::Shown => continue,
                Kind::File(file) => {
                    fs::write(folder.join(file), &block.text)?;
                    continue;
                }
                Kind::Console(console) => console,
            };
            if console.needs.is_some_and(|need| !self.has(need)) {
                tally.skipped += 1;
                continue;
            }
            let steps = steps(&block.text).map_err(anyhow::Error::msg)?;
            for (index, step) in steps.iter().enumerate() {
                let exit = if index + 1 == steps.len() { console.exit } else { 0 };
                tally.commands += 1;
                if let Some(reason) = self.failure(&folder, step, exit, console.compare)? {
                    tally.failures.push(format!("{}:{}: $ {}\n{reason}", page.file, block.line, step.command));
                }
            }
        }
        Ok(())
    }

    fn has(&self, need: Need) -> bool {
        match need {
            Need::Nvrtc => self.nvrtc.is_some(),
            Need::Compiler => self.has_compiler,
            Need::Gpu => hardware::has_gpu(),
        }
    }

    fn failure(&self, folder: &Path, step: &Step, exit: i32, compare: Compare) -> Result<Option<String>> {
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!("exec 2>&1\n{}", step.command)).current_dir(folder).env("PATH", &self.path);
        // Compiled kernels are shared. What a page learns about the machine, or forgets, is its own.
        shell.env("XDG_CACHE_HOME", self.folder.join("cache")).env("XDG_CONFIG_HOME", folder.join(".config"));
        shell.envs(self.nvrtc.iter().map(|environment| ("VIRTUAL_ENV", environment)));
        let ended = shell.output().context("sh could not be started")?;
        let printed = String::from_utf8_lossy(&ended.stdout);
        let reason = match ended.status.code() {
            Some(code) if code == exit => {
                output::missing(&step.expected, &printed, compare).map(|line| format!("does not print: {line}"))
            }
            code => Some(format!("expected exit code {exit}, got {code:?}")),
        };
        Ok(reason.map(|reason| format!("{reason}\nbut:\n{printed}")))
    }
}

#[cfg(test)]
mod tests {
    use super::super::book::tests::book;
    use super::*;

    #[test]
    fn a_block_is_run_shown_written_or_an_error() {
        let wrong = |text: &str| mistakes(&book(text)).len();
        assert_eq!(
            wrong("```console,varies,exit=1,needs=cxx\n$ deuteron\n```\n\n```text\n```\n\n```graph,file=a.txt\n```\n"),
            0
        );
        assert_eq!(wrong("```toml\n{{#include ../../../xtask/Cargo.toml:1:2}}\n```\n"), 0);
        for bad in [
            "```rust\nfn main() {}\n```",
            "```\nx\n```",
            "```console\nx\n```",
            "```console,sometimes\n$ x\n```",
            "```text,file=../x\n```",
            "    x",
        ] {
            assert_eq!(wrong(bad), 1, "{bad}");
        }
    }

    #[test]
    fn a_command_may_go_on_after_a_backslash() {
        let step = |command: &str, expected: &str| Step { command: command.into(), expected: expected.into() };
        assert_eq!(steps("$ a \\\n  b\nc\n$ d\n").unwrap(), [step("a \\\n  b", "c\n"), step("d", "")]);
    }

    #[test]
    fn a_command_that_prints_something_else_or_ends_otherwise_fails() {
        let folder = std::env::temp_dir().join(format!("deuteron-guide-{}", std::process::id()));
        let runner = Runner::new(folder.clone(), Path::new("/bin/sh"), None).unwrap();
        let outcome = |text: &str| runner.run(&book(text));
        assert!(outcome("```text,file=a\nhello\n```\n\n```console\n$ cat a\nhello\n```\n").is_ok());
        assert!(outcome("```console\n$ echo hello\nbye\n```\n").unwrap_err().to_string().contains("bye"));
        assert!(outcome("```console\n$ false\n```\n").unwrap_err().to_string().contains("exit code 0"));
        assert!(
            outcome("```console,exit=1\n$ true\n```\n").is_err()
                && outcome("```console,exit=1\n$ false\n```\n").is_ok()
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
