//! The pages in a real browser, in a narrow and in a wide window, light and dark. Without Chromium on the search path this says so and tests nothing.

use std::fs;
use std::io::Write;
use std::path::Path;

use super::{SOURCE, book::Book, html};
use deuteron_testkit::chromium::{self, Browser, Window};

/// Widths in pixels: a telephone's, and a screen's.
const WIDTHS: [u32; 2] = [390, 1280];

/// The least contrast of text, that of the accessibility guidelines at level AAA.
const CONTRAST: f64 = 7.0;

/// Empty, or by how much the page is wider than its window, and what makes it so: elements that reach beyond it and are in nothing that
/// scrolls by itself.
const OVERFLOW: &str = "(() => {
  const window = document.documentElement.clientWidth;
  const wide = [document.documentElement, document.body].map((node) => node.scrollWidth);
  if (Math.max(...wide) <= window) return '';
  const beyond = [...document.querySelectorAll('body *')].filter(
    (node) => node.getBoundingClientRect().right > window + 1 && !node.closest('pre, .frame, nav, details'),
  );
  const shown = beyond.slice(0, 3).map((node) => node.outerHTML.slice(0, 120)).join(' | ');
  return `${Math.max(...wide)} wide in a window of ${window}: ${shown}`;
})()";

#[test]
fn pages_fit_narrow_and_wide_windows_light_and_dark() {
    let root = crate::root().unwrap();
    let book = Book::read(&root, &root.join(SOURCE).join("src")).unwrap();
    let Some(program) = chromium::find() else {
        // Past the harness, which keeps what a passing test prints to itself.
        let count = book.pages.len();
        writeln!(std::io::stderr(), "warning: no chromium on PATH: {count} pages of the guide are not opened").unwrap();
        return;
    };
    let folder = std::env::temp_dir().join(format!("deuteron-guide-pages-{}", std::process::id()));
    let pages = folder.join("html");
    fs::create_dir_all(&folder).unwrap();
    html::write(&book, &pages).unwrap();
    let mut browser = Browser::start(&program, &folder.join("profile"));
    let mut mistakes = Vec::new();
    for page in &book.pages {
        for (width, dark) in WIDTHS.into_iter().flat_map(|width| [(width, false), (width, true)]) {
            let wrong = overflow(&mut browser, &pages.join(page.address()), width, dark);
            let theme = if dark { "dark" } else { "light" };
            mistakes.extend(wrong.map(|wrong| format!("{} ({theme}) is {wrong}", page.address())));
            let (text, back) = colours(&mut browser);
            let contrast = contrast(text, back);
            if contrast < CONTRAST || dark != (luminance(back) < 0.5) {
                mistakes.push(format!("{} ({theme}) has text {text:?} on {back:?}", page.address()));
            }
        }
    }
    // It can fail: a word that nothing breaks, and a table without its frame.
    let cases =
        [("word", "<code style=\"white-space: pre\">", "</code>"), ("line", "<table><tr><td>", "</td></tr></table>")];
    for (name, before, after) in cases {
        let text = fs::read_to_string(pages.join("index.html")).unwrap();
        let word = "M".repeat(200);
        let page = pages.join(format!("{name}.html"));
        let unbroken = format!("<main><style>* {{ overflow-wrap: normal !important }}</style>{before}{word}{after}");
        fs::write(&page, text.replace("<main>", &unbroken)).unwrap();
        for width in WIDTHS {
            assert!(overflow(&mut browser, &page, width, false).is_some(), "{name} fits {width}");
        }
    }
    let complaints = std::mem::take(&mut browser.complaints);
    drop(browser);
    remove(&folder);
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
    assert_eq!(complaints, Vec::<String>::new());
}

/// What is wrong with a page in a window, if anything is.
fn overflow(browser: &mut Browser, page: &Path, width: u32, dark: bool) -> Option<String> {
    browser.open(page, Window { width, height: 900, dark });
    let answer = browser.evaluate(OVERFLOW);
    let wrong = answer.as_str().unwrap_or("not a page").to_string();
    (!wrong.is_empty()).then_some(wrong)
}

/// Red, green and blue of the text and of what is behind it, as the page shows them.
fn colours(browser: &mut Browser) -> ([u32; 3], [u32; 3]) {
    let mut colour = |name: &str| {
        let style = browser.evaluate(&format!("getComputedStyle(document.documentElement).{name}"));
        let parts = style.as_str().unwrap_or_default();
        let numbers = parts.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok());
        let all: Vec<u32> = numbers.collect();
        [all[0], all[1], all[2]]
    };
    (colour("color"), colour("backgroundColor"))
}

/// Relative luminance, from 0 to 1.
fn luminance(colour: [u32; 3]) -> f64 {
    let linear = |part: u32| {
        let part = f64::from(part) / 255.0;
        if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
    };
    0.2126 * linear(colour[0]) + 0.7152 * linear(colour[1]) + 0.0722 * linear(colour[2])
}

fn contrast(one: [u32; 3], other: [u32; 3]) -> f64 {
    let (one, other) = (luminance(one), luminance(other));
    (one.max(other) + 0.05) / (one.min(other) + 0.05)
}

/// The browser's own processes end a little after it and may still write to its profile.
fn remove(folder: &Path) {
    for _ in 0..20 {
        if fs::remove_dir_all(folder).is_ok() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}
