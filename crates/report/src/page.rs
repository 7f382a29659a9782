//! The page: one file that needs no other, and no network.
//!
//! The words and figures that matter most are markup, so they show without a script; the rest is drawn by the scripts
//! in `page/` from the data block. The policy in the page's head lets in exactly those scripts and that style sheet.

use crate::Analysis;
use crate::data;
use crate::digest::source_hash;
use crate::escape::{markup, script_json};
use crate::headline::{facts, figures, next, verdict};
use crate::roofline;

const TEMPLATE: &str = include_str!("../page/index.html");
const ICON: &str = include_str!("../page/icon.svg");

/// The style sheet, in order.
const STYLES: [&str; 3] =
    [include_str!("../page/theme.css"), include_str!("../page/layout.css"), include_str!("../page/charts.css")];

/// The scripts, in order: each uses only those before it.
const SCRIPTS: [&str; 17] = [
    include_str!("../page/format.js"),
    include_str!("../page/elements.js"),
    include_str!("../page/data.js"),
    include_str!("../page/selection.js"),
    include_str!("../page/repeats.js"),
    include_str!("../page/layers.js"),
    include_str!("../page/scene.js"),
    include_str!("../page/viewport.js"),
    include_str!("../page/graph.js"),
    include_str!("../page/candidates.js"),
    include_str!("../page/roofline.js"),
    include_str!("../page/traffic.js"),
    include_str!("../page/timeline.js"),
    include_str!("../page/memory.js"),
    include_str!("../page/source.js"),
    include_str!("../page/tables.js"),
    include_str!("../page/start.js"),
];

/// The analysis as one self-contained page: verdict, graph before and after, score sheets, roofline, traffic, timeline,
/// plans, sources and what was measured. Sections without data are left out.
///
/// Every string of the analysis is escaped. The page loads nothing: its policy forbids it.
pub fn html(analysis: &Analysis) -> String {
    // Functions of one script are private to the page, and strict.
    let script = format!("(() => {{\n'use strict';\n{}}})();\n", SCRIPTS.concat());
    let style = STYLES.concat();
    let roofline = roofline::embedded(analysis);
    fill(TEMPLATE, |name| match name {
        "script_hash" => source_hash(&script),
        "style_hash" => source_hash(&style),
        "style" => style.clone(),
        "script" => script.clone(),
        "icon" => percent_encoded(ICON),
        "graph" => markup(&analysis.graph),
        "device" => markup(&analysis.device),
        "verdict" => verdict(&analysis.verdict),
        "facts" => facts(analysis),
        "figures" => figures(analysis),
        "next" => next(analysis),
        "roofline" => roofline.clone(),
        "data" => script_json(&data::to_json(analysis)),
        _ => String::new(),
    })
}

/// Replaces every `{{name}}` of the template in one pass: inserted text is not searched again.
fn fill(template: &str, value: impl Fn(&str) -> String) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((text, after)) = rest.split_once("{{") {
        out.push_str(text);
        let Some((name, after)) = after.split_once("}}") else {
            out.push_str("{{");
            rest = after;
            continue;
        };
        out.push_str(&value(name));
        rest = after;
    }
    out + rest
}

/// A picture as it may stand in a `data:` address.
fn percent_encoded(text: &str) -> String {
    let mut out = String::new();
    for byte in text.trim().bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'/' | b'=' | b':' | b' ' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_filled_in_is_not_a_template() {
        let out = fill("a {{x}} b {{y}} c {{", |name| if name == "x" { "{{y}}".into() } else { "2".into() });
        assert_eq!(out, "a {{y}} b 2 c {{");
    }

    #[test]
    fn scripts_cannot_end_their_element() {
        for text in SCRIPTS.iter().chain(&STYLES) {
            assert!(!text.contains("</script") && !text.contains("</style") && !text.contains("<!--"));
        }
    }
}
