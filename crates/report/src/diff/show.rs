//! A difference as text.

use std::fmt;

use super::{CandidateChange, Change, Diff, Event, KernelChange, NumberChange, PlanChange, TextChange};
use crate::units::{bytes, digits, time};

impl fmt::Display for Diff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return writeln!(f, "no difference");
        }
        for change in &self.texts {
            writeln!(f, "{change}")?;
        }
        section(f, "plans", &self.plans)?;
        section(f, "kernels of the chosen plan", &self.kernels)?;
        section(f, "candidates", &self.candidates)?;
        section(f, "machine", &self.machine)?;
        section(f, "measured", &self.measured)
    }
}

fn section<T: fmt::Display>(f: &mut fmt::Formatter<'_>, title: &str, lines: &[T]) -> fmt::Result {
    if lines.is_empty() {
        return Ok(());
    }
    writeln!(f, "{title}")?;
    lines.iter().try_for_each(|line| writeln!(f, "  {line}"))
}

/// `146 -> 140 (-4.1 %)`
fn arrow(change: &Change, show: impl Fn(f64) -> String) -> String {
    let percent = change.percent.map(|percent| format!(" ({percent:+.1} %)")).unwrap_or_default();
    format!("{} -> {}{percent}", show(change.old), show(change.new))
}

fn list(parts: &[Option<String>]) -> String {
    parts.iter().flatten().map(String::as_str).collect::<Vec<_>>().join(", ")
}

fn count(value: f64) -> String {
    value.to_string()
}

fn amount(value: f64) -> String {
    bytes(value as u64)
}

impl fmt::Display for TextChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} -> {}", self.what, self.old, self.new)
    }
}

impl fmt::Display for PlanChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.kernels.as_ref().map(|change| format!("kernels {}", arrow(change, count))),
            self.bytes.as_ref().map(|change| format!("bytes {}", arrow(change, amount))),
            self.us.as_ref().map(|change| format!("time {}", arrow(change, time))),
            self.peak_bytes.as_ref().map(|change| format!("peak {}", arrow(change, amount))),
        ];
        write!(f, "{}: {}", self.plan, list(&parts))
    }
}

fn sign(event: Event) -> char {
    match event {
        Event::Appeared => '+',
        Event::Disappeared => '-',
        Event::Changed => '~',
    }
}

impl fmt::Display for KernelChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.launches.as_ref().map(|change| format!("launches {}", arrow(change, count))),
            self.bytes.as_ref().map(|change| format!("bytes {}", arrow(change, amount))),
            self.us.as_ref().map(|change| format!("time {}", arrow(change, time))),
            self.source.then(|| "source changed".to_string()),
        ];
        write!(f, "{} {} [{}]: {}", sign(self.event), self.name, self.size, list(&parts))
    }
}

impl fmt::Display for CandidateChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ({}", sign(self.event), self.ops.join(" + "), self.kind)?;
        if self.occurrence > 0 {
            write!(f, " {}", self.occurrence + 1)?;
        }
        write!(f, ")")?;
        let mut parts: Vec<Option<String>> = self.texts.iter().map(|change| Some(change.to_string())).collect();
        parts.push(self.score.as_ref().map(|change| format!("score {}", arrow(change, digits))));
        parts.push(self.count.as_ref().map(|change| format!("count {}", arrow(change, count))));
        let parts = list(&parts);
        if parts.is_empty() { Ok(()) } else { write!(f, ": {parts}") }
    }
}

impl fmt::Display for NumberChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.old, self.new) {
            (Some(old), Some(new)) => {
                let change = Change { old, new, percent: self.percent };
                write!(f, "~ {}: {}", self.name, arrow(&change, digits))
            }
            (Some(old), None) => write!(f, "- {}: {}", self.name, digits(old)),
            (None, Some(new)) => write!(f, "+ {}: {}", self.name, digits(new)),
            (None, None) => write!(f, "  {}", self.name),
        }
    }
}
