//! The JSON form: its schema is the checked-in one, it reads back, and errors say where.

use crate::sample;
use deuteron_report::{LARGEST_INPUT, ReportError, VERSION, parse, schema};

const SCHEMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/analysis.schema.json");

#[test]
fn the_schema_is_the_checked_in_one() {
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(SCHEMA, schema()).unwrap();
    }
    let stored = std::fs::read_to_string(SCHEMA).unwrap_or_default();
    // As values: the order of fields depends on features of serde_json that another crate may switch on.
    let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap_or_default();
    assert!(
        value(&stored) == value(&schema()),
        "docs/analysis.schema.json does not describe `Analysis`: run `UPDATE_SCHEMA=1 cargo test -p deuteron-report` and \
         look at the difference; a field that went or changed its meaning needs a new `VERSION`"
    );
}

#[test]
fn an_analysis_reads_back() {
    for analysis in [sample::small(), sample::large()] {
        let text = serde_json::to_string_pretty(&analysis).unwrap();
        assert!(parse(&text).unwrap() == analysis);
    }
}

#[test]
fn errors_have_a_place_and_a_sentence() {
    let cases = [
        ("", 1, 0, "the text ends too early"),
        ("{\n  \"schema\": 2,\n  oops\n}", 3, 3, "not JSON: key must be a string"),
        ("{\"schema\": 2}", 1, 13, "not an analysis: missing field `graph`"),
        ("{\n\"schema\": \"one\"}", 2, 15, "not an analysis: invalid type: string \"one\", expected u32"),
        ("[]", 1, 2, "not an analysis"),
        ("nul\u{0}", 1, 4, "not JSON"),
    ];
    for (text, line, column, problem) in cases {
        let error = parse(text).unwrap_err();
        let ReportError::Json { line: found_line, column: found_column, problem: found } = &error else {
            panic!("{text:?}: {error}")
        };
        assert_eq!((*found_line, *found_column), (line, column), "{text:?}: {error}");
        assert!(found.starts_with(problem), "{text:?}: {error}");
        assert!(!found.contains(" at line "), "{error}");
    }
}

#[test]
fn another_version_is_said_so() {
    let text = serde_json::to_string(&sample::small()).unwrap().replacen("\"schema\":2", "\"schema\":7", 1);
    assert_eq!(parse(&text), Err(ReportError::Version { found: 7, expected: VERSION }));
    assert_eq!(parse("{\"schema\": 1}"), Err(ReportError::Version { found: 1, expected: VERSION }));
}

#[test]
fn too_much_is_refused_before_it_is_read() {
    let text = " ".repeat(LARGEST_INPUT + 1);
    assert_eq!(parse(&text), Err(ReportError::TooLarge { bytes: LARGEST_INPUT + 1, limit: LARGEST_INPUT }));
}

#[test]
fn damaged_text_is_an_error() {
    // Every cut and many changed letters: an error or an analysis, never a panic.
    let text = serde_json::to_string(&sample::analysis(sample::Shape {
        layers: 1,
        backward: false,
        lines: 2,
        measured: true,
        variants: 1,
        candidates: 2,
    }))
    .unwrap();
    for at in (0..text.len()).step_by(61) {
        assert!(parse(&text[..at]).is_err());
        for letter in ["{", "\"", "-", "9e999", "\\u0000"] {
            let _ = parse(&format!("{}{letter}{}", &text[..at], &text[at + 1..]));
        }
    }
    let deep = "[".repeat(100_000);
    assert!(parse(&deep).is_err());
}
