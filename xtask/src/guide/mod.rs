//! `cargo xtask guide`: builds the book of `docs/guide` as HTML, and runs every command that it prints.
//!
//! The book has the layout of mdBook. It is rendered here, over a Markdown parser of four crates, because mdBook as a library brings
//! 110 crates that take a minute to build, which is half of what the guide may cost in CI.

mod book;
#[cfg(test)]
mod browser;
mod commands;
mod html;
mod links;
mod output;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::{bundle, hardware, root};
use book::Book;
use commands::Runner;

/// Where the book is, and where its pages go.
const SOURCE: &str = "docs/guide";
const BUILT: &str = "target/guide";

/// The longest that building the pages may take.
const LIMIT: Duration = Duration::from_secs(10);

/// Builds the book and runs its commands. `words` are those after `guide`.
pub fn run(words: &[&str]) -> Result<()> {
    let root = root()?;
    match words {
        ["--pages"] => pages(&root).map(drop),
        ["--bless", files @ ..] => {
            let runner = runner(&root, hardware::nvrtc(&root).ok())?;
            runner.bless(&pages(&root)?, files)
        }
        [] => check(&root, hardware::nvrtc(&root).ok()),
        _ => anyhow::bail!("expected nothing, --pages or --bless after `guide`, got {}", words.join(" ")),
    }
}

/// Builds the pages, then runs the commands with the debug build of `deuteron`, which finds NVRTC in that Python environment.
pub fn check(root: &Path, nvrtc: Option<PathBuf>) -> Result<()> {
    let book = pages(root)?;
    runner(root, nvrtc)?.run(&book)
}

fn runner(root: &Path, nvrtc: Option<PathBuf>) -> Result<Runner> {
    let built = bundle::executables(root, &["build", "--package", "deuteron-cli", "--bin", "deuteron"])?;
    let (_, program) = built.into_iter().next().context("cargo built no deuteron")?;
    Runner::new(root.join(BUILT), &program, nvrtc)
}

fn pages(root: &Path) -> Result<Book> {
    let (start, before) = (Instant::now(), worked());
    let book = Book::read(root, &root.join(SOURCE).join("src"))?;
    let others = links::documents(root)?;
    let of_book = [links::mistakes(&book), links::unlinked_terms(&book), commands::mistakes(&book)];
    let of_others = [links::mistakes(&others), commands::undeclared(&others)];
    let mistakes = [of_book.concat(), of_others.concat()].concat();
    ensure!(mistakes.is_empty(), "guide and documents have {} mistakes:\n  {}", mistakes.len(), mistakes.join("\n  "));
    let folder = root.join(BUILT).join("html");
    html::write(&book, &folder)?;
    let taken = start.elapsed();
    println!(
        "guide: {} pages in {:.1} s: {}",
        book.pages.len(),
        taken.as_secs_f64(),
        folder.join("index.html").display()
    );
    // On a machine that is busy with something else, only the time on a core counts.
    let worked = worked().zip(before).map_or(taken, |(now, before)| now.saturating_sub(before));
    ensure!(worked < LIMIT, "the book must build in {} s, took {:.1} s", LIMIT.as_secs(), worked.as_secs_f64());
    Ok(book)
}

/// How long this thread has run on a core, where the system says so.
fn worked() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_no_work() {
        let Some(before) = worked() else { return };
        std::thread::sleep(Duration::from_millis(200));
        assert!(worked().unwrap() - before < Duration::from_millis(100));
        let start = Instant::now();
        while worked().unwrap() - before < Duration::from_millis(5) {
            assert!(start.elapsed() < Duration::from_secs(60), "work is not counted");
        }
    }
}
