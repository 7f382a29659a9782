//! Pages as HTML: a list of all pages beside the text, light or dark as the reader's system is, nothing from the network.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pulldown_cmark::{CodeBlockKind, CowStr, Event, Tag, TagEnd, html};

use super::book::{Book, Page, address};
use super::links;

const STYLE: &str = include_str!("style.css");

/// Where files of the repository are, for readers of the pages alone.
const REPOSITORY: &str = "https://github.com/deuteron/deuteron/blob/main";

/// Writes all pages into a folder that is made anew.
pub fn write(book: &Book, folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    fs::write(folder.join("style.css"), STYLE)?;
    for (name, file) in pictures(book) {
        fs::copy(&file, folder.join(name)).with_context(|| file.display().to_string())?;
    }
    for (index, page) in book.pages.iter().enumerate() {
        let path = folder.join(page.address());
        fs::write(&path, whole(book, index)).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn whole(book: &Book, index: usize) -> String {
    let page = &book.pages[index];
    let neighbour = |index: Option<usize>, word: &str, class: &str| {
        let page = index.and_then(|index| book.pages.get(index));
        page.map(|page| {
            format!("<a class=\"{class}\" href=\"{}\">{word}: {}</a>", page.address(), escaped(&page.title))
        })
        .unwrap_or_default()
    };
    let (before, after) =
        (neighbour(index.checked_sub(1), "Previous", "before"), neighbour(Some(index + 1), "Next", "next"));
    let (title, list, body) = (escaped(&page.title), list(book, index), body(book, page));
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, \
         initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n<title>{title} - Deuteron</title>\n<link rel=\"stylesheet\" \
         href=\"style.css\">\n</head>\n<body>\n<details class=\"menu\"><summary>Deuteron: {title}</summary>{list}</details>\n<nav \
         class=\"side\">{list}</nav>\n<main>\n{body}\n<footer>{before}{after}</footer>\n</main>\n</body>\n</html>\n"
    )
}

/// The list of all pages.
fn list(book: &Book, current: usize) -> String {
    let mut out = String::new();
    for (index, page) in book.pages.iter().enumerate() {
        if let Some(part) = &page.part {
            out.push_str(&format!("<p class=\"part\">{}</p>", escaped(part)));
        }
        let here = if index == current { " aria-current=\"page\"" } else { "" };
        let (depth, address, title) = (page.depth, page.address(), escaped(&page.title));
        out.push_str(&format!("<a class=\"depth{depth}\" href=\"{address}\"{here}>{title}</a>"));
    }
    out
}

/// The text of a page. Headings get their anchors, links their addresses, tables and blocks a frame that scrolls.
fn body(book: &Book, page: &Page) -> String {
    let mut anchors = links::anchors(page).into_iter();
    let mut block: Option<(String, String)> = None;
    let events = page.parser().filter_map(|event| match event {
        Event::Start(Tag::CodeBlock(kind)) => {
            let info = if let CodeBlockKind::Fenced(info) = kind { info.to_string() } else { String::new() };
            block = Some((info, String::new()));
            None
        }
        Event::Text(text) if block.is_some() => {
            block.iter_mut().for_each(|(_, code)| code.push_str(&text));
            None
        }
        Event::End(TagEnd::CodeBlock) => block.take().map(|(info, code)| Event::Html(code_block(&info, &code).into())),
        Event::Start(Tag::Heading { level, classes, attrs, .. }) => {
            Some(Event::Start(Tag::Heading { level, id: anchors.next().map(CowStr::from), classes, attrs }))
        }
        Event::Start(Tag::Link { link_type, dest_url, title, id }) => {
            Some(Event::Start(Tag::Link { link_type, dest_url: target(book, &dest_url).into(), title, id }))
        }
        Event::Start(Tag::Image { link_type, dest_url, title, id }) => {
            Some(Event::Start(Tag::Image { link_type, dest_url: picture(&dest_url).into(), title, id }))
        }
        event => Some(event),
    });
    let events: Vec<Event<'_>> = events.collect();
    let framed = events.into_iter().flat_map(|event| match event {
        Event::Start(Tag::Table(_)) => vec![Event::Html("<div class=\"frame\">".into()), event],
        Event::End(TagEnd::Table) => vec![event, Event::Html("</div>".into())],
        event => vec![event],
    });
    let mut out = String::new();
    html::push_html(&mut out, framed);
    out
}

fn code_block(info: &str, code: &str) -> String {
    let mut words = info.split(',');
    let language = words.next().unwrap_or_default();
    let file = info.split(',').find_map(|word| word.strip_prefix("file="));
    let name = file.map(|file| format!("<p class=\"file\">{}</p>", escaped(file))).unwrap_or_default();
    let reason = info.split(',').find_map(|word| word.strip_prefix("unrun="));
    let reason =
        reason.map(|why| format!("<p class=\"file\">not run by the tests: {}</p>", escaped(&why.replace('-', " "))));
    let name = name + &reason.unwrap_or_default();
    let mut lines = String::new();
    let mut continues = false;
    let has_bars = info.split(',').any(|word| word == "bars");
    for line in code.lines() {
        if let Some((label, length)) = bar(line).filter(|_| has_bars) {
            lines.push_str(&format!("{}{}\n", escaped(label), drawn(length)));
            continue;
        }
        let is_command = language == "console" && (continues || line.starts_with("$ "));
        continues = is_command && line.ends_with('\\');
        let line = escaped(line);
        lines.push_str(&if is_command { format!("<b>{line}</b>\n") } else { format!("{line}\n") });
    }
    format!("{name}<pre class=\"{}\"><code>{lines}</code></pre>\n", escaped(language))
}

/// A line that ends with a bar of `#`: what is before it, and how long it is.
fn bar(line: &str) -> Option<(&str, usize)> {
    let label = line.trim_end_matches('#');
    let length = line.len() - label.len();
    (length > 0 && label.ends_with(' ')).then_some((label, length))
}

/// A bar of so many characters' width.
fn drawn(length: usize) -> String {
    format!(
        "<svg class=\"bar\" style=\"width:{length}ch\" aria-hidden=\"true\"><rect width=\"100%\" height=\"100%\"/></svg>"
    )
}

/// Files of the repository that pages show, by their names in the folder of pages.
fn pictures(book: &Book) -> BTreeMap<String, PathBuf> {
    let shown = book.pages.iter().flat_map(|page| page.parser()).filter_map(|event| match event {
        Event::Start(Tag::Image { dest_url, .. }) if !links::is_elsewhere(&dest_url) => {
            Some((picture(&dest_url), links::resolved(&book.folder, &dest_url)))
        }
        _ => None,
    });
    shown.collect()
}

/// A picture lies beside the pages.
fn picture(address: &str) -> String {
    if links::is_elsewhere(address) {
        return address.to_string();
    }
    address.rsplit('/').next().unwrap_or(address).to_string()
}

/// Where a link goes: another page, or a file of the repository.
fn target(book: &Book, link: &str) -> String {
    if links::is_elsewhere(link) || link.starts_with('#') {
        return link.to_string();
    }
    let (file, anchor) = link.split_at(link.find('#').unwrap_or(link.len()));
    if book.pages.iter().any(|page| page.file == file) {
        return address(file) + anchor;
    }
    let path = links::resolved(&book.folder, file);
    let inside = path.strip_prefix(&book.root).map_or(file.to_string(), |path| path.to_string_lossy().into_owned());
    format!("{REPOSITORY}/{inside}{anchor}")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::book::tests::book;
    use super::*;

    #[test]
    fn pictures_lie_beside_the_pages() {
        let book = book("![Bars](../../pictures/ops.svg)\n");
        assert!(body(&book, &book.pages[0]).contains("<img src=\"ops.svg\" alt=\"Bars\""));
        let files: Vec<(String, PathBuf)> = pictures(&book).into_iter().collect();
        assert_eq!(files, [("ops.svg".to_string(), book.root.join("docs/pictures/ops.svg"))]);
    }

    #[test]
    fn bars_are_drawn_where_a_block_says_so() {
        let text = "eager  2.0 MB ####\n";
        let drawn = code_block("text,bars", text);
        assert!(drawn.contains("eager  2.0 MB <svg") && drawn.contains("width:4ch") && !drawn.contains('#'), "{drawn}");
        assert!(code_block("text", text).contains("2.0 MB ####"));
    }

    #[test]
    fn links_go_to_pages_and_to_the_repository() {
        let book = book(
            "# A <b>\n\n[1](page.md#a-b) [2](../../../README.md)\n\n| a |\n|---|\n| 1 |\n\n```console,varies\n$ deuteron \\\n  ops\n<out>\n```\n",
        );
        let body = body(&book, &book.pages[0]);
        assert!(
            body.contains("href=\"page.html#a-b\"") && body.contains(&format!("{REPOSITORY}/README.md\"")),
            "{body}"
        );
        assert!(body.contains("<div class=\"frame\"><table>"), "{body}");
        assert!(body.contains("<b>$ deuteron \\</b>\n<b>  ops</b>\n&lt;out&gt;\n"), "{body}");
        let page = whole(&book, 0);
        assert!(page.contains("aria-current=\"page\"") && !page.contains("class=\"next\""), "{page}");
    }
}
