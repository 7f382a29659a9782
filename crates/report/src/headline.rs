//! The top of the page: the key figures as markup, readable without a script.

use crate::escape::{markup, prose};
use crate::units::{NOTHING, byte_rate, bytes, digits, flop_rate, time};
use crate::{Analysis, MeasuredSheet, next_steps};

/// The verdict: its first sentence is the title of the page, the others stand beneath it.
pub(crate) fn verdict(text: &str) -> String {
    let (first, rest) = match text.split_once(". ") {
        Some((first, rest)) => (format!("{first}."), rest),
        None => (text.to_string(), ""),
    };
    let rest = if rest.is_empty() { String::new() } else { format!("\n    <p class=\"more\">{}</p>", prose(rest)) };
    format!("<h1 id=\"verdict\">{}</h1>{rest}", prose(&first))
}

/// The key figures: kernels, bytes, time, and what was measured.
pub(crate) fn figures(analysis: &Analysis) -> String {
    let (old, new) = (analysis.plans.before(), &analysis.plans.chosen);
    let mut out = pair(&Pair {
        title: "Predicted time",
        before: time(old.us),
        after: time(new.us),
        gain: ratio(old.us, new.us),
        share: new.us / old.us,
    });
    out += &pair(&Pair {
        title: "Kernels",
        before: old.kernels.to_string(),
        after: new.kernels.to_string(),
        gain: fewer(old.kernels as f64, new.kernels as f64),
        share: new.kernels as f64 / old.kernels as f64,
    });
    out += &pair(&Pair {
        title: "Bytes moved",
        before: bytes(old.bytes),
        after: bytes(new.bytes),
        gain: fewer(old.bytes as f64, new.bytes as f64),
        share: new.bytes as f64 / old.bytes as f64,
    });
    if let Some(measured) = &analysis.measured {
        out += &pair(&Pair {
            title: "Measured time",
            before: time(measured.unfused_us),
            after: time(measured.chosen_us),
            gain: ratio(measured.unfused_us, measured.chosen_us),
            share: measured.chosen_us / measured.unfused_us,
        });
    }
    out
}

/// The facts beneath the figures: how good the plan is, whether it was verified, the machine, the time planning took.
pub(crate) fn facts(analysis: &Analysis) -> String {
    let mut out = String::new();
    let search = &analysis.search;
    if analysis.optimal {
        fact(&mut out, "Plan", "good", "Optimal", &search.text);
    } else {
        let gap = if search.gap.is_finite() {
            format!("Within {} % of the best", digits(search.gap * 100.0))
        } else {
            "No bound on the gap".into()
        };
        fact(&mut out, "Plan", "plain", &gap, &search.text);
    }
    if let Some(recomputed) = &analysis.plans.recomputed {
        let unfused = &analysis.plans.unfused;
        let change = format!("{} → {} before fusing", time(unfused.us), time(recomputed.us));
        let detail = format!(
            "{} → {} kernels, {} → {} moved",
            unfused.kernels,
            recomputed.kernels,
            bytes(unfused.bytes),
            bytes(recomputed.bytes)
        );
        fact(&mut out, "Computed again", "plain", &change, &detail);
    }
    if let Some(measured) = &analysis.measured {
        let (class, text, detail) = verification(measured);
        fact(&mut out, "Results", class, text, &detail);
    }
    let machine = &analysis.machine;
    let rates = format!(
        "{} memory, {} vector, {} matrix",
        byte_rate(machine.bytes_per_us),
        flop_rate(machine.vector_flops_per_us),
        flop_rate(machine.matrix_flops_per_us)
    );
    let name = match basis(&machine.basis) {
        "" => analysis.device.clone(),
        basis => format!("{} ({basis})", analysis.device),
    };
    fact(&mut out, "Machine", "plain", &name, &rates);
    let parts = format!(
        "{} of {} parts distinct, {} groups, {} states",
        search.distinct_parts, search.parts, search.groups, search.states
    );
    fact(&mut out, "Planning", "plain", &time(analysis.planning_ms * 1e3), &parts);
    out
}

/// Where the numbers of a machine come from, if not from its profile or file.
fn basis(basis: &str) -> &'static str {
    match basis {
        "calibrated" => "calibrated on this machine",
        "learnt" => "corrected by measured runs",
        "guessed" => "estimated from another machine",
        _ => "",
    }
}

/// What to do next, as a list.
pub(crate) fn next(analysis: &Analysis) -> String {
    next_steps(analysis).iter().map(|step| format!("<li>{}</li>\n", prose(step))).collect()
}

fn verification(measured: &MeasuredSheet) -> (&'static str, &'static str, String) {
    let worst = format!("largest error {} of its bound", digits(measured.worst_ratio));
    if measured.verified { ("good", "Verified against f64", worst) } else { ("bad", "Not verified against f64", worst) }
}

fn fact(out: &mut String, title: &str, class: &str, text: &str, detail: &str) {
    let (text, detail) = (markup(text), prose(detail));
    *out += &format!("<div class=\"fact\"><dt>{title}</dt><dd class=\"{class}\">{text}</dd><dd>{detail}</dd></div>\n");
}

/// One figure, before and after.
struct Pair<'a> {
    title: &'a str,
    before: String,
    after: String,
    /// what was won, in words
    gain: String,
    /// after over before
    share: f64,
}

fn pair(pair: &Pair<'_>) -> String {
    // The longer of the two bars fills the width.
    let (before, after) = match pair.share {
        share if !share.is_finite() || share < 0.0 => (0.0, 0.0),
        share if share <= 1.0 => (100.0, share * 100.0),
        share => (100.0 / share, 100.0),
    };
    let gain = match pair.share {
        share if share > 1.0 => "loss",
        _ => "gain",
    };
    format!(
        "<div class=\"figure\"><dt>{}</dt><dd class=\"change\"><span class=\"was\">{}</span> \
         <span class=\"arrow\" aria-label=\"to\">→</span> <b>{}</b></dd><dd class=\"{gain}\">{}</dd>\
         <svg class=\"bars\" viewBox=\"0 0 100 9\" preserveAspectRatio=\"none\" aria-hidden=\"true\">\
         <rect class=\"bar-before\" width=\"{before:.1}\" height=\"3\"/>\
         <rect class=\"bar-after\" y=\"5\" width=\"{after:.1}\" height=\"4\"/></svg></div>\n",
        pair.title, pair.before, pair.after, pair.gain
    )
}

fn ratio(old: f64, new: f64) -> String {
    let ratio = old / new;
    if !ratio.is_finite() || ratio <= 0.0 {
        NOTHING.into()
    } else if (ratio - 1.0).abs() < 0.005 {
        "the same".into()
    } else if ratio > 1.0 {
        format!("{}× faster", digits(ratio))
    } else {
        format!("{}× slower", digits(1.0 / ratio))
    }
}

fn fewer(old: f64, new: f64) -> String {
    let share = (old - new) / old * 100.0;
    if !share.is_finite() {
        NOTHING.into()
    } else if old == new {
        "the same".into()
    } else if share > 0.0 {
        format!("{} % fewer", digits(share))
    } else {
        format!("{} % more", digits(-share))
    }
}
