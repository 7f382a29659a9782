//! The commands of the book. A code block is one of these, by the words behind its fence:
//!
//! - `console`: lines that start with `$ ` are run by `sh` in the page's own folder; what follows is what they print (`output.rs`).
//!   With `varies` numbers may differ, which a prediction for a named machine may not; `exit=1` says how the last command of the block ends; `needs=nvrtc`, `needs=cxx` or `needs=gpu`
//!   skips the block, with a warning, where that is not there.
//! - `graph,file=NAME` or any other word with `file=NAME`: written into the folder for the commands after it.
//! - `python` that starts with `>>> `: run by `python/tests/test_docs.py`, which has the package.
//! - `sh,unrun=REASON`: commands that are not run, such as those that need a network or a GPU.
//! - `text`: something to look at, such as a diagram or an output whose command is elsewhere; no commands. With `bars`, rows of `#` are drawn.
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

/// Programs whose commands a block must not hold without being run or saying why not.
const PROGRAMS: [&str; 11] =
    ["cargo", "cd", "deuteron", "docker", "export", "git", "ncu", "nsys", "pip", "python", "python3"];

/// Blocks of documents outside of the book that hold commands which nothing runs and that do not say why. The README's are tested against the
/// binary in `crates/cli/tests/all/story.rs`.
pub fn undeclared(documents: &Book) -> Vec<String> {
    let pages = documents.pages.iter().filter(|page| page.file != "README.md");
    let blocks = pages.flat_map(|page| page.blocks().into_iter().map(move |block| (page, block)));
    let wrong = blocks.filter_map(|(page, block)| {
        let language = block.info.split(',').next().unwrap_or_default();
        let is_shell = ["", "text", "console", "sh", "bash"].contains(&language);
        let reason = undeclared_commands(&block).filter(|_| is_shell)?;
        Some(format!("{}:{}: {reason}", page.file, block.line))
    });
    wrong.collect()
}

fn undeclared_commands(block: &Block) -> Option<String> {
    let is_declared = block.info.split(',').any(|word| word.strip_prefix("unrun=").is_some_and(|why| !why.is_empty()));
    let first = |line: &str| line.trim_start_matches("$ ").split_whitespace().next().unwrap_or_default().to_string();
    let command = block.text.lines().map(first).find(|word| PROGRAMS.contains(&word.as_str()))?;
    let advice = "mark the block as `console`, or say why it is not run, as in `sh,unrun=needs-a-GPU`";
    (!is_declared).then(|| format!("nothing runs the command of `{command}`: {advice}"))
}

/// Every block that is none of the kinds.
pub fn mistakes(book: &Book) -> Vec<String> {
    let blocks = book.pages.iter().flat_map(|page| page.blocks().into_iter().map(move |block| (page, block)));
    let wrong = blocks.filter_map(|(page, block)| {
        let reason = match kind(&block) {
            Ok(Kind::Console(console)) => match steps(&block.text) {
                Ok(steps) => masked_prediction(&console, &steps)?,
                Err(reason) => reason,
            },
            Ok(_) => return None,
            Err(reason) => reason,
        };
        Some(format!("{}:{}: {reason}", page.file, block.line))
    });
    wrong.collect()
}

/// Machines that predictions need nothing of this computer for.
const PROFILES: [&str; 4] = ["a100", "h100", "h200", "rtx4090"];

/// A prediction for a named machine is the same everywhere: a block with `varies` would hide that its numbers are old.
fn masked_prediction(console: &Console, steps: &[Step]) -> Option<String> {
    let is_prediction = |step: &Step| {
        let words: Vec<&str> = step.command.split_whitespace().collect();
        words.starts_with(&["deuteron", "analyze"])
            && words.windows(2).any(|pair| pair[0] == "--device" && PROFILES.contains(&pair[1]))
    };
    let masked = console.compare == Compare::ButNumbers && steps.iter().any(is_prediction);
    masked.then(|| "a prediction for a named machine does not vary: compare its numbers".into())
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
        None if language == "sh" || language == "text" && !block.included => match undeclared_commands(block) {
            Some(reason) => Err(reason),
            None => Ok(Kind::Shown),
        },
        None if block.included => Ok(Kind::Shown),
        None if block.info == "python" && block.text.starts_with(">>> ") => Ok(Kind::Shown),
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
    renewals: Vec<Renewal>,
}

/// What happens to a block in which only numbers changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outdated {
    Fails,
    IsRenewed,
}

/// A command that does not print what its block says.
struct Failure {
    reason: String,
    /// what the block should say, if only numbers differ
    renewed: Option<String>,
}

/// A block of a page as it is, and as it would be with the numbers that its commands print now.
struct Renewal {
    file: String,
    before: String,
    after: String,
}

impl Renewal {
    fn new(page: &Page, block: &Block, steps: &[Step], expected: &[String]) -> Renewal {
        let fence = |text: &str| format!("```{}\n{text}```\n", block.info);
        let lines = steps.iter().zip(expected).map(|(step, expected)| format!("$ {}\n{expected}", step.command));
        Renewal { file: page.file.clone(), before: fence(&block.text), after: fence(&lines.collect::<String>()) }
    }

    /// Writes it into its page; how many blocks it changed.
    fn write(&self, folder: &Path) -> Result<usize> {
        let path = folder.join(&self.file);
        let text = fs::read_to_string(&path).with_context(|| self.file.clone())?;
        let count = text.matches(&self.before).count();
        fs::write(&path, text.replace(&self.before, &self.after))?;
        Ok(count)
    }
}

impl Tally {
    fn add(&mut self, other: Tally) {
        self.commands += other.commands;
        self.skipped += other.skipped;
        self.failures.extend(other.failures);
        self.renewals.extend(other.renewals);
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

    /// Runs all commands; each must print what its block says.
    pub fn run(&self, book: &Book) -> Result<()> {
        let tally = self.tally(book, &[], Outdated::Fails)?;
        ensure!(tally.failures.is_empty(), "the guide is wrong:\n{}", tally.failures.join("\n"));
        Ok(())
    }

    /// Runs the commands of these pages, or of all if none is named, and writes numbers that are compared and changed into the pages.
    pub fn bless(&self, book: &Book, files: &[&str]) -> Result<()> {
        let unknown = files.iter().find(|file| book.pages.iter().all(|page| page.file != **file));
        ensure!(unknown.is_none(), "no page {}: expected names such as step-3.md", unknown.unwrap_or(&""));
        let tally = self.tally(book, files, Outdated::IsRenewed)?;
        let mut written = 0;
        for renewal in &tally.renewals {
            written += renewal.write(&book.folder)?;
        }
        println!("guide: numbers of {written} blocks are new");
        ensure!(tally.failures.is_empty(), "more than numbers changed; mend by hand:\n{}", tally.failures.join("\n"));
        Ok(())
    }

    /// What becomes of the blocks of some pages, or of all if none is named.
    fn tally(&self, book: &Book, files: &[&str], outdated: Outdated) -> Result<Tally> {
        let start = Instant::now();
        let chosen = book.pages.iter().filter(|page| files.is_empty() || files.contains(&page.file.as_str()));
        let next = Mutex::new(chosen);
        let work = || {
            let mut tally = Tally::default();
            loop {
                // The lock ends with the statement: pages run beside each other.
                let page = next.lock().expect("no thread panics while it takes a page").next();
                let Some(page) = page else { return Ok(tally) };
                let begun = Instant::now();
                self.run_page(page, outdated, &mut tally)?;
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
        if taken > LIMIT {
            println!(
                "warning: the commands of the guide took {} s; they should take at most {} s",
                taken.as_secs(),
                LIMIT.as_secs()
            );
        }
        Ok(tally)
    }

    fn run_page(&self, page: &Page, outdated: Outdated, tally: &mut Tally) -> Result<()> {
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
            let mut expected = Vec::new();
            for (index, step) in steps.iter().enumerate() {
                let exit = if index + 1 == steps.len() { console.exit } else { 0 };
                tally.commands += 1;
                let failure = self.failure(&folder, step, exit, &console)?;
                let renewed = failure.as_ref().and_then(|failure| failure.renewed.clone());
                match failure {
                    Some(failure) if outdated == Outdated::Fails || renewed.is_none() => {
                        let reason = failure.reason;
                        tally.failures.push(format!("{}:{}: $ {}\n{reason}", page.file, block.line, step.command));
                    }
                    _ => {}
                }
                expected.push(renewed.unwrap_or_else(|| step.expected.clone()));
            }
            let changed = steps.iter().zip(&expected).any(|(step, expected)| step.expected != *expected);
            tally.renewals.extend(changed.then(|| Renewal::new(page, &block, &steps, &expected)));
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

    fn failure(&self, folder: &Path, step: &Step, exit: i32, console: &Console) -> Result<Option<Failure>> {
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!("exec 2>&1\n{}", step.command)).current_dir(folder).env("PATH", &self.path);
        // Compiled kernels are shared. What a page learns about the machine, or forgets, is its own.
        shell.env("XDG_CACHE_HOME", self.folder.join("cache")).env("XDG_CONFIG_HOME", folder.join(".config"));
        // Pages show what a CPU prints.
        if console.needs != Some(Need::Gpu) {
            shell.env("CUDA_VISIBLE_DEVICES", "");
        }
        shell.envs(self.nvrtc.iter().map(|environment| ("VIRTUAL_ENV", environment)));
        let ended = shell.output().context("sh could not be started")?;
        let printed = String::from_utf8_lossy(&ended.stdout);
        let (reason, renewed) = match ended.status.code() {
            Some(code) if code == exit => {
                let line = output::missing(&step.expected, &printed, console.compare);
                (line.map(|line| format!("does not print: {line}")), output::renewed(&step.expected, &printed))
            }
            code => (Some(format!("expected exit code {exit}, got {code:?}")), None),
        };
        Ok(reason.map(|reason| Failure { reason: format!("{reason}\nbut:\n{printed}"), renewed }))
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
        assert_eq!(wrong("```sh,unrun=needs-a-GPU\nncu x\n```\n\n```text\nx: deuteron\n```\n"), 0);
        assert_eq!(wrong("```python\n>>> 1\n1\n\n```\n"), 0);
        assert_eq!(wrong("```toml\n{{#include ../../../xtask/Cargo.toml:1:2}}\n```\n"), 0);
        for bad in [
            "```rust\nfn main() {}\n```",
            "```\nx\n```",
            "```text\ndeuteron ops\n```",
            "```sh\ncargo build\n```",
            "```sh,unrun=\ncargo build\n```",
            "```python\nx = 1\n```",
            "```console\nx\n```",
            "```console,sometimes\n$ x\n```",
            "```text,file=../x\n```",
            "    x",
        ] {
            assert_eq!(wrong(bad), 1, "{bad}");
        }
    }

    #[test]
    fn commands_of_other_documents_are_declared() {
        let wrong = |text: &str| undeclared(&book(text)).len();
        assert_eq!(wrong("```sh\npip install x\n```\n\n```console\n$ deuteron ops\n```\n\n```text\ncargo x\n```\n"), 3);
        assert_eq!(wrong("```sh,unrun=downloads\npip install x\n```\n\n```text\nx\n```\n\n```python\nx = 1\n```\n"), 0);
    }

    #[test]
    fn a_prediction_for_a_named_machine_is_compared() {
        let wrong = |info: &str, command: &str| mistakes(&book(&format!("```{info}\n$ {command}\n```\n"))).len();
        assert_eq!(wrong("console,varies", "deuteron analyze gpt2 --device h200"), 1);
        assert_eq!(wrong("console", "deuteron analyze gpt2 --device h200"), 0);
        assert_eq!(wrong("console,varies", "deuteron analyze gpt2 --device cpu"), 0);
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

    #[test]
    fn changed_numbers_are_written_into_their_page_and_changed_words_are_not() {
        let folder = std::env::temp_dir().join(format!("deuteron-guide-bless-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let runner = Runner::new(folder.clone(), Path::new("/bin/sh"), None).unwrap();
        let blessed = |text: &str| {
            let mut book = book(text);
            book.folder = folder.clone();
            fs::write(folder.join("page.md"), text).unwrap();
            let outcome = runner.bless(&book, &["page.md"]).map_err(|error| error.to_string());
            (outcome, fs::read_to_string(folder.join("page.md")).unwrap())
        };
        let page = "A 1.\n\n```console\n$ echo a 1; echo b 2\na 7\n...\n```\n";
        let (outcome, text) = blessed(page);
        assert_eq!((outcome, text.as_str()), (Ok(()), page.replace("a 7", "a 1").as_str()));
        let page = "```console\n$ echo a 1\nb 7\n```\n";
        let (outcome, text) = blessed(page);
        assert!(outcome.unwrap_err().contains("does not print: b 7") && text == page);
        assert!(runner.bless(&book(page), &["none.md"]).unwrap_err().to_string().contains("none.md"));
        fs::remove_dir_all(folder).unwrap();
    }
}
