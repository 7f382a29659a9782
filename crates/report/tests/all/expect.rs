//! Expectations held against GPT-2: add and norm are fused, attention is one kernel, products stand alone.

use crate::{hostile, sample};
use deuteron_report::{Outcome, ReportError, expect};

fn told(text: &str) -> Vec<String> {
    expect(&sample::small(), text).unwrap().iter().map(ToString::to_string).collect()
}

#[test]
fn what_holds_is_silent() {
    let text = "
        # residual and norm
        fused: add, layer_norm
        fused add + layer_norm   # the same
        all fused: add, layer_norm
        fused: batched_matmul, softmax, batched_matmul
        not fused: layer_norm, matmul
        not fused: matmul, gelu
        fused: hidden, layer_norm
        not fused: layer_norm, h.3.qkv
    ";
    assert_eq!(told(text), Vec::<String>::new());
}

#[test]
fn apart_instead_of_fused() {
    let found = expect(&sample::small(), "\n\nfused: matmul, gelu").unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].line, 3);
    assert_eq!(found[0].code, "E-PLAN-004");
    assert!(matches!(&found[0].outcome, Outcome::Apart { apart: 12, places: 12, launches } if launches.len() == 2));
    assert_eq!(
        found[0].to_string(),
        "line 3: expected `fused: matmul, gelu`: got separate kernels in 12 of 12 places, first launches 6, 7 (operations #10, #11): \
         E-PLAN-004: gelu needs the whole row of 6400 columns, a tile of the product holds 128"
    );
}

#[test]
fn fused_instead_of_apart() {
    assert_eq!(
        told("not fused: add, layer_norm"),
        [
            "line 1: expected `not fused: add, layer_norm`: got one kernel, `add + layer_norm`, in launch 1 (operations #1, #2): OK: \
          one row space; the row stays in registers"
        ]
    );
}

#[test]
fn some_are_not_all() {
    let mut analysis = sample::small();
    let norm = analysis.ops.iter().rposition(|op| op.name == "layer_norm").unwrap();
    analysis.ops[norm].after = 1_000_000;
    assert!(expect(&analysis, "fused: add, layer_norm").unwrap().is_empty());
    let found = expect(&analysis, "all fused: add, layer_norm").unwrap();
    assert!(matches!(found[0].outcome, Outcome::Apart { apart: 1, places: 25, .. }), "{}", found[0]);
    assert_eq!(found[0].at[1], norm);
}

#[test]
fn a_name_that_nobody_has_is_a_violation() {
    let found = told("not fused: layernorm, gelu");
    assert_eq!(found.len(), 1);
    assert!(
        found[0].starts_with("line 1: expected `not fused: layernorm, gelu`: no operation is called `layernorm`; the graph has: layer_norm"),
        "{}",
        found[0]
    );
}

#[test]
fn operations_that_are_no_neighbours_are_a_violation() {
    let found = told("not fused: gelu, layer_norm");
    assert!(found[0].contains("no such neighbours; the graph has: "), "{}", found[0]);
    // The pair in its right order comes first.
    let found = told("fused: gelu, softmax\nfused: layer_norm, add");
    assert!(found[1].contains("the graph has: add, layer_norm"), "{}", found[1]);
}

#[test]
fn lines_that_cannot_be_read() {
    let cases = [
        ("fuse: a, b", "expected `fused:`"),
        ("fused: a", "at least two names"),
        ("fused:", "a name is missing"),
        ("fused: a,, b", "a name is missing"),
        ("fusedness: a, b", "expected `fused:`"),
    ];
    for (text, problem) in cases {
        let error = expect(&sample::small(), &format!("# first\n{text}")).unwrap_err();
        let ReportError::Expectation { line: 2, problem: found, .. } = &error else { panic!("{error}") };
        assert!(found.starts_with(problem), "{error}");
    }
    let many = format!("fused: {}", vec!["add"; 17].join(", "));
    assert!(expect(&sample::small(), &many).is_err());
}

#[test]
fn brackets_hold_a_name_together() {
    let mut analysis = sample::small();
    analysis.ops[1].name = "grad(add, add)".into();
    assert!(expect(&analysis, "fused: grad(add, add), layer_norm").unwrap().is_empty());
}

#[test]
fn malformed_graphs_do_not_matter() {
    for analysis in hostile::malformed() {
        let _ = expect(&analysis, "fused: add, layer_norm\nnot fused: add, add, add\nall fused: matmul, gelu");
    }
}

#[test]
fn a_line_that_fits_everywhere_is_refused() {
    // Each of 64 operations reads all before it: too many ways to pick twelve of them.
    let mut analysis = sample::small();
    analysis.ops.truncate(64);
    for (id, op) in analysis.ops.iter_mut().enumerate() {
        op.name = "add".into();
        op.label.clear();
        op.reads = (0..id).collect();
        op.after = id;
    }
    let text = format!("fused: {}", ["add"; 12].join(", "));
    assert!(matches!(expect(&analysis, &text), Err(ReportError::TooBroad { line: 1, .. })));
}
