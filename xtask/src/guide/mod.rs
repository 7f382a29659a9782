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
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::{bundle, hardware, root};
use book::Book;
use commands::Runner;

/// Where the book is, and where its pages go.
const SOURCE: &str = "docs/guide";
const BUILT: &str = "target/guide";

/// Builds the book and runs its commands. `words` are those after `guide`.
pub fn run(words: &[&str]) -> Result<()> {
    let root = root()?;
    match words {
        ["--pages"] => pages(&root).map(drop),
        [] => check(&root, hardware::nvrtc(&root).ok()),
        _ => anyhow::bail!("expected nothing or --pages after `guide`, got {}", words.join(" ")),
    }
}

/// Builds the pages, then runs the commands with the debug build of `deuteron`, which finds NVRTC in that Python environment.
pub fn check(root: &Path, nvrtc: Option<PathBuf>) -> Result<()> {
    let book = pages(root)?;
    let built = bundle::executables(root, &["build", "--package", "deuteron-cli", "--bin", "deuteron"])?;
    let (_, program) = built.into_iter().next().context("cargo built no deuteron")?;
    Runner::new(root.join(BUILT), &program, nvrtc)?.run(&book)
}

fn pages(root: &Path) -> Result<Book> {
    let start = Instant::now();
    let book = Book::read(root, &root.join(SOURCE).join("src"))?;
    let others = links::documents(root)?;
    let mistakes = [links::mistakes(&book), commands::mistakes(&book), links::mistakes(&others)].concat();
    ensure!(mistakes.is_empty(), "guide and documents have {} mistakes:\n  {}", mistakes.len(), mistakes.join("\n  "));
    let folder = root.join(BUILT).join("html");
    html::write(&book, &folder)?;
    let seconds = start.elapsed().as_secs_f64();
    println!("guide: {} pages in {seconds:.1} s: {}", book.pages.len(), folder.join("index.html").display());
    Ok(book)
}
