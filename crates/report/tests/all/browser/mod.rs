//! The page in a real browser. Without Chromium on the search path this says so and tests nothing.
//!
//! `REPORT_PICTURES=folder` writes pictures of every page there, for a person to look at.

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::sample;
use deuteron_testkit::chromium::{self, Browser, Window};
use serde_json::Value;

/// Functions that the checks call in the page.
const CHECKS: &str = include_str!("checks.js");

#[test]
fn pages_work_in_a_browser() {
    let Some(program) = chromium::find() else {
        // Written past the harness, which keeps what a passing test prints to itself.
        let skipped =
            "SKIPPED: no chromium on PATH; the page was not tested in a browser (install the package `chromium`)";
        writeln!(std::io::stderr(), "{skipped}").unwrap();
        return;
    };
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("browser-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let pages = [("small", sample::small()), ("large", sample::large()), ("hostile", hostile())];
    let mut browser = Browser::start(&program, &folder.join("profile"));
    for (name, analysis) in &pages {
        let page = folder.join(format!("{name}.html"));
        std::fs::write(&page, deuteron_report::html(analysis)).unwrap();
        for (width, height) in [(1280, 900), (390, 844)] {
            for dark in [false, true] {
                // Every window with the small page; two of them show what size and hostile data do to the others.
                if *name != "small" && dark == (width > 390) {
                    continue;
                }
                let case = format!("{name}-{width}-{}", if dark { "dark" } else { "light" });
                let window = Window { width, height, dark };
                take_pictures(&mut browser, &case, &page, window);
                browser.open(&page, window);
                browser.evaluate(CHECKS);
                check(&mut browser, &case, width >= 760);
                assert_eq!(browser.complaints, Vec::<String>::new(), "{case}");
            }
        }
    }
    check_tangle(&mut browser, &folder);
    check_wide(&mut browser, &folder);
    drop(browser);
    remove(&folder);
}

/// Removes what the test wrote. The browser's own processes end a little after it and may still write to its profile, so this tries again for a
/// while; a folder that stays, below `target/`, is not what the test is about.
fn remove(folder: &Path) {
    for _ in 0..20 {
        if std::fs::remove_dir_all(folder).is_ok() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// Strings that try to become markup, and references that point nowhere.
fn hostile() -> deuteron_report::Analysis {
    let mut analysis = sample::small();
    let bad = "</script><img src=x onerror=alert(1)>\u{2028}";
    analysis.graph = bad.into();
    analysis.verdict = bad.into();
    for (id, op) in analysis.ops.iter_mut().enumerate() {
        op.name = format!("{bad}{}", id % 7);
        op.reads.extend([id, id + 1, usize::MAX >> 12]);
        op.intensity = f64::NAN;
    }
    for sheet in analysis.before.iter_mut().chain(&mut analysis.after) {
        sheet.name = bad.into();
        sheet.kind = bad.into();
        sheet.cost.us *= if sheet.primitives > 4 { f64::INFINITY } else { 1.0 };
        sheet.launches.push(usize::MAX >> 12);
    }
    for sheet in &mut analysis.candidates {
        sheet.ops = vec![bad.into(); 3];
        sheet.at = vec![9_999_999];
        sheet.score = f64::NAN;
        sheet.reason.text = bad.into();
    }
    analysis.disagreements.iter_mut().for_each(|entry| entry.candidate = 1 << 40);
    analysis.notes = vec![bad.into()];
    analysis
}

/// 5,000 operations that repeat nothing and read anything: the page must not hang.
fn check_tangle(browser: &mut Browser, folder: &Path) {
    let mut analysis = sample::large();
    let pattern = analysis.ops.clone();
    analysis.ops = (0..5000)
        .map(|id| {
            let mut op = pattern[id % pattern.len()].clone();
            op.name = format!("op {}", id * 7919 % 4999);
            op.reads = (0..id.min(3)).map(|turn| (id * 31 + turn * 1009) * 7919 % id).collect();
            (op.before, op.after) = (id, id / 2);
            op
        })
        .collect();
    let page = folder.join("tangle.html");
    std::fs::write(&page, deuteron_report::html(&analysis)).unwrap();
    let start = std::time::Instant::now();
    browser.open(&page, Window { width: 1280, height: 900, dark: false });
    browser.evaluate(CHECKS);
    assert!(start.elapsed().as_secs() < 60, "the tangle took {:?}", start.elapsed());
    for script in ["check.contents()", "check.graphButtons()"] {
        assert_eq!(browser.evaluate(script), Value::from(""), "tangle: {script}");
    }
    assert_eq!(browser.complaints, Vec::<String>::new(), "tangle");
}

/// Three matmuls of one operand, as many models have, beside each other in a window of 390 pixels.
fn check_wide(browser: &mut Browser, folder: &Path) {
    let mut analysis = sample::small();
    analysis.ops.truncate(5);
    for (id, op) in analysis.ops.iter_mut().enumerate() {
        op.name = format!("op {id}");
        op.reads = match id {
            0 => vec![],
            1..=3 => vec![0],
            _ => vec![1, 2, 3],
        };
        (op.before, op.after) = (id, id);
    }
    let page = folder.join("wide.html");
    std::fs::write(&page, deuteron_report::html(&analysis)).unwrap();
    browser.open(&page, Window { width: 390, height: 844, dark: false });
    browser.evaluate(CHECKS);
    assert_eq!(browser.evaluate("check.notClipped()"), Value::from(""), "wide");
}

fn take_pictures(browser: &mut Browser, case: &str, page: &Path, window: Window) {
    let Some(folder) = std::env::var_os("REPORT_PICTURES") else { return };
    std::fs::create_dir_all(&folder).unwrap();
    let folder = Path::new(&folder);
    browser.open(page, window);
    browser.evaluate(CHECKS);
    for state in ["", "-opened"] {
        for (screen, picture) in browser.pictures().into_iter().enumerate() {
            std::fs::write(folder.join(format!("{case}{state}-{screen}.png")), picture).unwrap();
        }
        browser.evaluate("check.openEverything()");
    }
}

fn check(browser: &mut Browser, case: &str, wide: bool) {
    // Every check gives an empty text, or what is wrong.
    let checks: &[&str] = &[
        "check.noShift()",
        "check.noSidewaysScroll()",
        "check.noForeignMarkup()",
        "check.contents()",
        "check.sections()",
        "check.profile()",
        "check.linked()",
        "check.trace()",
        "check.memory()",
        "check.sorting()",
        "check.filtering()",
        "check.details()",
        "check.graphButtons()",
        "check.repeats()",
        "check.themes()",
        "check.sourceSelect()",
        "check.timelineButtons()",
        "check.contrast()",
        "check.noSidewaysScroll()",
    ];
    for script in checks {
        let answer = browser.evaluate(script);
        assert_eq!(answer, Value::from(""), "{case}: {script}");
    }
    by_hand(browser, case, wide);
}

/// What needs a real mouse and real keys.
fn by_hand(browser: &mut Browser, case: &str, wide: bool) {
    let place = browser.evaluate("check.place('.panel[data-side=after] svg')");
    let (x, y) = (place[0].as_f64().unwrap(), place[1].as_f64().unwrap());
    let look = |browser: &mut Browser| browser.evaluate("check.viewBox()").as_str().unwrap().to_string();
    let mut last = look(browser);
    let mut changed = |browser: &mut Browser, what: &str| {
        let now = look(browser);
        assert_ne!(now, last, "{case}: {what} moves the graph");
        last = now;
    };
    browser.pinch(x, y);
    changed(browser, "pinching");
    browser.drag((x, y), (x + 40.0, y + 30.0));
    changed(browser, "dragging");
    browser.wheel(x, y, -240.0);
    changed(browser, "the wheel");
    for key in ["ArrowDown", "+", "n", "0"] {
        browser.evaluate("document.querySelector('.panel[data-side=after] svg').focus()");
        browser.key(key);
        changed(browser, key);
    }
    browser.evaluate("check.place('.panel[data-side=after] svg')");
    browser.key("n");
    assert_eq!(browser.evaluate("check.inspected()"), Value::from(""), "{case}");
    if wide {
        let place = browser.evaluate("check.place('#timeline-drawing')");
        browser.point(place[0].as_f64().unwrap(), place[1].as_f64().unwrap() - 45.0);
        if !case.starts_with("hostile") {
            assert_eq!(browser.evaluate("check.tip()"), Value::from(""), "{case}: hovering the timeline");
        }
    }
}
