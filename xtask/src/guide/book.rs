//! The book as it is read: pages in the order of `SUMMARY.md`, with the files that they include, and their code blocks.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

use crate::files;

pub struct Book {
    /// root of the repository
    pub root: PathBuf,
    /// folder of the pages
    pub folder: PathBuf,
    pub pages: Vec<Page>,
}

pub struct Page {
    /// as the summary has it
    pub title: String,
    /// title of the part that starts with this page
    pub part: Option<String>,
    /// how deep it is in the summary
    pub depth: usize,
    /// file below the folder, such as `step-1.md`
    pub file: String,
    /// Markdown, includes in their places
    pub text: String,
    /// code blocks whose text is a file of the repository, by their order
    pub included: Vec<bool>,
}

/// A code block of a page.
pub struct Block {
    pub line: usize,
    /// what follows the fence: `console,varies`
    pub info: String,
    pub text: String,
    /// whether its text is a file of the repository
    pub included: bool,
}

impl Book {
    /// Reads the pages that `SUMMARY.md` lists. Every Markdown file of the folder must be listed.
    pub fn read(root: &Path, folder: &Path) -> Result<Book> {
        let summary = fs::read_to_string(folder.join("SUMMARY.md")).context("docs/guide/src/SUMMARY.md")?;
        let mut pages = Vec::new();
        let mut part = None;
        for line in summary.lines().filter(|line| !line.trim().is_empty() && *line != "# Summary") {
            if let Some(title) = line.strip_prefix("# ") {
                part = Some(title.to_string());
                continue;
            }
            let depth = (line.len() - line.trim_start().len()) / 2;
            let entry = line.trim().trim_start_matches("- ").strip_prefix('[').and_then(|rest| rest.strip_suffix(')'));
            let (title, file) =
                entry.and_then(|rest| rest.split_once("](")).with_context(|| format!("SUMMARY.md: {line}"))?;
            let text = fs::read_to_string(folder.join(file)).with_context(|| format!("SUMMARY.md lists {file}"))?;
            let (text, included) = with_includes(root, folder, &text).with_context(|| file.to_string())?;
            pages.push(Page { title: title.into(), part: part.take(), depth, file: file.into(), text, included });
        }
        for path in files::below(folder)?.iter().filter(|path| files::has_extension(path, &["md"])) {
            let file = path.strip_prefix(folder)?.to_string_lossy().into_owned();
            ensure!(file == "SUMMARY.md" || pages.iter().any(|page| page.file == file), "{file} is not in SUMMARY.md");
        }
        Ok(Book { root: root.into(), folder: folder.into(), pages })
    }
}

impl Page {
    /// Its name as HTML.
    pub fn address(&self) -> String {
        address(&self.file)
    }

    pub fn parser(&self) -> Parser<'_> {
        Parser::new_ext(&self.text, options())
    }

    pub fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let mut open = false;
        for (event, range) in self.parser().into_offset_iter() {
            match event {
                Event::Start(Tag::CodeBlock(kind)) => {
                    let info = match kind {
                        CodeBlockKind::Fenced(info) => info.to_string(),
                        CodeBlockKind::Indented => String::new(),
                    };
                    let line = self.text[..range.start].lines().count() + 1;
                    let included = self.included.get(blocks.len()).copied().unwrap_or_default();
                    blocks.push(Block { line, info, text: String::new(), included });
                    open = true;
                }
                Event::Text(text) if open => blocks.last_mut().into_iter().for_each(|block| block.text.push_str(&text)),
                Event::End(TagEnd::CodeBlock) => open = false,
                _ => {}
            }
        }
        blocks
    }
}

/// The address of a page by its file: `README.md` is the first one.
pub fn address(file: &str) -> String {
    match file.strip_suffix("README.md") {
        Some(folder) => format!("{folder}index.html"),
        None => file.strip_suffix(".md").map_or(file.to_string(), |stem| format!("{stem}.html")),
    }
}

fn options() -> Options {
    Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH
}

/// Text with `{{#include FILE}}` and `{{#include FILE:FIRST:LAST}}` (lines) replaced, as mdBook does; and for each code block whether it is such a file.
fn with_includes(root: &Path, folder: &Path, text: &str) -> Result<(String, Vec<bool>)> {
    let (mut out, mut included, mut open) = (String::new(), Vec::new(), false);
    for line in text.lines() {
        if line.starts_with("```") {
            open = !open;
            if open {
                included.push(false);
            }
        }
        match line.strip_prefix("{{#include ").and_then(|rest| rest.strip_suffix("}}")) {
            Some(what) => {
                ensure!(open, "{line} stands outside of a code block");
                included.pop();
                included.push(true);
                out.push_str(&included_text(root, folder, what)?);
            }
            None => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    Ok((out, included))
}

fn included_text(root: &Path, folder: &Path, what: &str) -> Result<String> {
    let mut words = what.split(':');
    let path = folder
        .join(words.next().unwrap_or_default())
        .canonicalize()
        .with_context(|| format!("{what} does not exist"))?;
    ensure!(path.starts_with(root), "{what} is outside of the repository");
    let text = fs::read_to_string(&path)?;
    let count = text.lines().count();
    let number = |word: Option<&str>, otherwise| word.map_or(Ok(otherwise), str::parse);
    let (first, last) = (number(words.next(), 1)?, number(words.next(), count)?);
    if first == 0 || first > last || last > count {
        bail!("{what}: the file has {count} lines");
    }
    Ok(text.lines().skip(first - 1).take(last - first + 1).flat_map(|line| [line, "\n"]).collect())
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A book of one page.
    pub fn book(text: &str) -> Book {
        let root = crate::root().unwrap();
        let folder = root.join("docs/guide/src");
        let (text, included) = with_includes(&root, &folder, text).unwrap();
        let page = Page { title: "Page".into(), part: None, depth: 0, file: "page.md".into(), text, included };
        Book { root, folder, pages: vec![page] }
    }

    #[test]
    fn lines_of_a_file_are_included() {
        let book = book("```toml\n{{#include ../../../xtask/Cargo.toml:1:2}}\n```\n\n```text\nx\n```\n");
        let blocks = book.pages[0].blocks();
        assert_eq!(blocks[0].text, "[package]\nname = \"xtask\"\n");
        assert!(blocks[0].included && !blocks[1].included);
        assert_eq!((blocks[1].line, blocks[1].info.as_str(), blocks[1].text.as_str()), (6, "text", "x\n"));
    }

    #[test]
    fn an_include_that_is_not_there_is_an_error() {
        let root = crate::root().unwrap();
        let error = |what: &str| included_text(&root, &root, what).unwrap_err().to_string();
        assert!(error("nothing.rs").contains("does not exist"));
        assert!(error("xtask/Cargo.toml:5:100000").contains("lines"));
        assert!(error("xtask/Cargo.toml:0:1").contains("lines"));
    }

    #[test]
    fn addresses_are_those_of_mdbook() {
        assert_eq!(
            ["README.md", "step-1.md", "a/README.md"].map(address),
            ["index.html", "step-1.html", "a/index.html"]
        );
    }
}
