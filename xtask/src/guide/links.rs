//! Links of the book: pages, anchors and files of the repository must exist. What is on other hosts is not asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use pulldown_cmark::{Event, Tag, TagEnd};

use super::book::{Book, Page};

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

/// Every dead link, with its page.
pub fn mistakes(book: &Book) -> Vec<String> {
    let known: BTreeMap<&str, BTreeSet<String>> =
        book.pages.iter().map(|page| (page.file.as_str(), anchors(page).into_iter().collect())).collect();
    let mut mistakes = Vec::new();
    for page in &book.pages {
        for event in page.parser() {
            let (Event::Start(Tag::Link { dest_url, .. }) | Event::Start(Tag::Image { dest_url, .. })) = event else {
                continue;
            };
            if let Some(reason) = mistake(book, page, &known, &dest_url) {
                mistakes.push(format!("{}: {dest_url}: {reason}", page.file));
            }
        }
    }
    mistakes
}

fn mistake(book: &Book, page: &Page, known: &BTreeMap<&str, BTreeSet<String>>, address: &str) -> Option<&'static str> {
    if is_elsewhere(address) {
        return None;
    }
    let (file, anchor) = address.split_once('#').map_or((address, None), |(file, anchor)| (file, Some(anchor)));
    let file = if file.is_empty() { page.file.as_str() } else { file };
    match (known.get(file), anchor) {
        (Some(anchors), Some(anchor)) => (!anchors.contains(anchor)).then_some("the page has no such heading"),
        (Some(_), None) => None,
        (None, _) => (!resolved(&book.folder, file).exists()).then_some("no such file"),
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
}
