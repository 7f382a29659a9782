//! Links of the book and of all other documents: pages, anchors and files of the repository must exist. What is on other hosts is not
//! asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};
use pulldown_cmark::{Event, Tag, TagEnd};

use super::book::{Book, Page};
use crate::files;

/// The page of terms.
const GLOSSARY: &str = "glossary.md";

/// The anchor of a heading, as mdBook and GitHub make it.
pub fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|c| match c {
        c if c.is_alphanumeric() || c == '_' || c == '-' => Some(c.to_ascii_lowercase()),
        c if c.is_whitespace() => Some('-'),
        _ => None,
    });
    kept.collect()
}

/// Anchors of a page in the order of its headings; a second one of a name gets `-1`.
pub fn anchors(page: &Page) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut heading: Option<String> = None;
    for event in page.parser() {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(text) | Event::Code(text) => heading.iter_mut().for_each(|heading| heading.push_str(&text)),
            Event::End(TagEnd::Heading(_)) => {
                let name = anchor(&heading.take().unwrap_or_default());
                let count = counts.entry(name.clone()).or_default();
                anchors.push(if *count == 0 { name } else { format!("{name}-{count}") });
                *count += 1;
            }
            _ => {}
        }
    }
    anchors
}

/// Whether an address is on another host.
pub fn is_elsewhere(address: &str) -> bool {
    address.starts_with("https://") || address.starts_with("http://")
}

/// A path without `..`, relative to where it starts.
pub fn resolved(folder: &Path, path: &str) -> PathBuf {
    let mut out = PathBuf::new();
    for part in folder.join(path).components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            part => out.push(part),
        }
    }
    out
}

/// Folders with documents, beside those in the root. Pages of the book are checked with the book.
const FOLDERS: [&str; 5] = ["docs", "bench", "crates", "python", "fuzz"];

/// The documents outside of the book, with paths below the root as names.
pub fn documents(root: &Path) -> Result<Book> {
    let book = Path::new("docs/guide/src");
    let mut paths: Vec<PathBuf> = fs::read_dir(root)?.flatten().map(|entry| entry.path()).collect();
    for folder in FOLDERS {
        paths.extend(files::below(&root.join(folder))?);
    }
    let is_built = |path: &Path| {
        path.components()
            .any(|part| part.as_os_str() == "target" || part.as_os_str().to_string_lossy().starts_with('.'))
    };
    paths.retain(|path| path.strip_prefix(root).is_ok_and(|path| !path.starts_with(book) && !is_built(path)));
    paths.retain(|path| files::has_extension(path, &["md"]));
    paths.sort();
    let page = |path: &PathBuf| -> Result<Page> {
        let file = path.strip_prefix(root)?.to_string_lossy().into_owned();
        let text = fs::read_to_string(path).with_context(|| file.clone())?;
        Ok(Page { title: file.clone(), part: None, depth: 0, file, text, included: Vec::new() })
    };
    let pages = paths.iter().map(page).collect::<Result<_>>()?;
    Ok(Book { root: root.into(), folder: root.into(), pages })
}

/// Every dead link, with its page.
pub fn mistakes(book: &Book) -> Vec<String> {
    let known: BTreeMap<PathBuf, BTreeSet<String>> = book
        .pages
        .iter()
        .map(|page| (resolved(&book.folder, &page.file), anchors(page).into_iter().collect()))
        .collect();
    let mut mistakes = Vec::new();
    for page in &book.pages {
        for event in page.parser() {
            let (Event::Start(Tag::Link { dest_url, .. }) | Event::Start(Tag::Image { dest_url, .. })) = event else {
                continue;
            };
            if let Some(reason) = mistake(&resolved(&book.folder, &page.file), &known, &dest_url) {
                mistakes.push(format!("{}: {dest_url}: {reason}", page.file));
            }
        }
    }
    mistakes
}

/// Terms of the glossary that no other page links to.
pub fn unlinked_terms(book: &Book) -> Vec<String> {
    let is_glossary = |page: &&Page| page.file == GLOSSARY;
    let others = book.pages.iter().filter(|page| !is_glossary(page));
    let linked: BTreeSet<String> = others
        .flat_map(|page| page.parser())
        .filter_map(|event| match event {
            Event::Start(Tag::Link { dest_url, .. }) => {
                dest_url.strip_prefix(GLOSSARY)?.strip_prefix('#').map(String::from)
            }
            _ => None,
        })
        .collect();
    // The first heading is the page's title.
    let terms = book.pages.iter().filter(is_glossary).flat_map(|page| anchors(page).into_iter().skip(1));
    let missing = terms.filter(|term| !linked.contains(term));
    missing.map(|term| format!("{GLOSSARY}: no other page links to #{term}")).collect()
}

fn mistake(page: &Path, known: &BTreeMap<PathBuf, BTreeSet<String>>, address: &str) -> Option<&'static str> {
    if is_elsewhere(address) {
        return None;
    }
    let (file, anchor) = address.split_once('#').map_or((address, None), |(file, anchor)| (file, Some(anchor)));
    let file = if file.is_empty() { page.to_path_buf() } else { resolved(page.parent()?, file) };
    match (known.get(&file), anchor) {
        (Some(anchors), Some(anchor)) => (!anchors.contains(anchor)).then_some("the page has no such heading"),
        (Some(_), None) => None,
        (None, _) => (!file.exists()).then_some("no such file"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::book::tests::book;
    use super::*;

    #[test]
    fn dead_links_are_found() {
        let text = "# Page `a`, b\n\n## Twice\n\n## Twice\n\n[1](page.md#page-a-b) [2](#twice-1) [3](../../../README.md) [4](https://example.org)\n";
        assert_eq!(mistakes(&book(text)), Vec::<String>::new());
        let text = "# Page\n\n[1](other.md) [2](#nothing) ![3](../../../no.svg) [4](page.md#pages)\n";
        assert_eq!(mistakes(&book(text)).len(), 4);
    }

    #[test]
    fn terms_without_a_link_are_found() {
        let mut book = book("[1](glossary.md#one)\n");
        let text = "# Glossary\n\n## One\n\n## Two\n\n[2](#two) [2](glossary.md#two)\n".to_string();
        let page =
            Page { title: "Glossary".into(), part: None, depth: 0, file: GLOSSARY.into(), text, included: vec![] };
        book.pages.push(page);
        assert_eq!(unlinked_terms(&book), ["glossary.md: no other page links to #two"]);
    }

    #[test]
    fn documents_outside_of_the_book_are_checked() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut documents = documents(&root).unwrap();
        let files: Vec<&str> = documents.pages.iter().map(|page| page.file.as_str()).collect();
        for file in ["README.md", "docs/trust.md", "docs/python/numerics.md", "bench/README.md"] {
            assert!(files.contains(&file), "{files:?}");
        }
        assert!(!files.iter().any(|file| file.starts_with("docs/guide/src")), "{files:?}");
        assert_eq!(mistakes(&documents), Vec::<String>::new());
        let readme = documents.pages.iter_mut().find(|page| page.file == "README.md").unwrap();
        readme.text = "# A\n\n[1](docs/trust.md#no-such-heading) [2](docs/none.md) [3](#a) [4](docs/trust.md)\n".into();
        assert_eq!(mistakes(&documents).len(), 2);
    }
}
