//! The pages in a real browser, in a narrow and in a wide window. Without Chromium on the search path this says so and tests nothing.

use std::fs;
use std::io::Write;
use std::path::Path;

use super::{SOURCE, book::Book, html};
use deuteron_testkit::chromium::{self, Browser, Window};

/// Widths in pixels: a telephone's, and a screen's.
const WIDTHS: [u32; 2] = [390, 1280];

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
fn pages_fit_narrow_and_wide_windows() {
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
        for width in WIDTHS {
            let wrong = overflow(&mut browser, &pages.join(page.address()), width);
            mistakes.extend(wrong.map(|wrong| format!("{} is {wrong}", page.address())));
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
            assert!(overflow(&mut browser, &page, width).is_some(), "{name} fits {width}");
        }
    }
    let complaints = std::mem::take(&mut browser.complaints);
    drop(browser);
    remove(&folder);
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
    assert_eq!(complaints, Vec::<String>::new());
}

/// What is wrong with a page in a window, if anything is.
fn overflow(browser: &mut Browser, page: &Path, width: u32) -> Option<String> {
    browser.open(page, Window { width, height: 900, dark: false });
    let answer = browser.evaluate(OVERFLOW);
    let wrong = answer.as_str().unwrap_or("not a page").to_string();
    (!wrong.is_empty()).then_some(wrong)
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
