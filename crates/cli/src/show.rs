//! Tables, numbers and progress for a terminal.

use std::io::IsTerminal;
use std::time::Duration;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// A plain table; columns from `numbers_from` on are aligned to the right.
pub fn table(header: &[&str], rows: Vec<Vec<String>>, numbers_from: usize) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Disabled);
    // On a terminal cells wrap where the table would be wider; in a file or a pipe lines stay whole.
    if let Some((_, columns)) = console::Term::stdout().size_checked().filter(|_| std::io::stdout().is_terminal()) {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(columns);
    }
    table.set_header(header.to_vec());
    table.add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        if index >= numbers_from {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A value as indented JSON on standard output.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    outln!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

/// A report as JSON if that is wanted, and else in words.
pub fn report<T: Serialize>(report: &T, as_json: bool, print: impl FnOnce(&T)) -> anyhow::Result<()> {
    if as_json {
        return json(report);
    }
    print(report);
    Ok(())
}

/// Does something for each case, with a bar that shows the case's name.
pub fn each<C, R>(
    cases: &[C],
    name: impl Fn(&C) -> &'static str,
    mut work: impl FnMut(&C) -> anyhow::Result<R>,
) -> anyhow::Result<Vec<R>> {
    let bar = progress(Some(cases.len() as u64));
    let done = cases.iter().map(|case| {
        bar.set_message(name(case));
        let result = work(case);
        bar.inc(1);
        result
    });
    let results = done.collect();
    bar.finish_and_clear();
    results
}

/// Does something that tells how many of all its steps are done, with a bar.
pub fn counted<R>(message: &'static str, work: impl FnOnce(&mut dyn FnMut(usize, usize)) -> R) -> R {
    let bar = progress(Some(1));
    bar.set_message(message);
    let result = work(&mut |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    result
}

/// Does something of unknown length, with a spinner.
pub fn spinning<R>(message: &'static str, work: impl FnOnce() -> R) -> R {
    let bar = progress(None);
    bar.set_message(message);
    let result = work();
    bar.finish_and_clear();
    result
}

/// A bar of `length` steps, or a spinner if there is no length. Hidden unless standard error is a terminal.
pub fn progress(length: Option<u64>) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = match length {
        Some(length) => ProgressBar::new(length),
        None => ProgressBar::new_spinner(),
    };
    let template = if length.is_some() {
        "{wide_bar} {pos}/{len} {msg}, {elapsed} so far, about {eta} left"
    } else {
        "{spinner} {msg}, {elapsed} so far"
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// A time with the unit that suits it.
pub fn milliseconds(ms: f64) -> String {
    match ms {
        // What rounds to nothing has no sign.
        ms if ms <= -5e-5 => format!("-{}", milliseconds(-ms)),
        ms if ms < 0.0 => milliseconds(0.0),
        ms if ms < 1.0 => format!("{:.1} us", ms * 1e3),
        ms if ms < 1000.0 => format!("{ms:.2} ms"),
        ms => format!("{:.2} s", ms / 1e3),
    }
}

/// What was won, and whether it is more than the run-to-run spread; `spreads` are those of the plans that are compared.
pub fn speed(speedup: f64, spreads: impl IntoIterator<Item = f64>) -> String {
    let spread = spreads.into_iter().fold(0.0, f64::max);
    let noise = match spread {
        spread if spread < 0.01 => "run-to-run spread below 1 %".to_string(),
        spread => format!("run-to-run spread {:.0} %", 100.0 * spread),
    };
    if (speedup - 1.0).abs() <= spread {
        format!("{speedup:.2}x the speed, within the noise: {noise}")
    } else {
        format!("{speedup:.2}x the speed ({noise})")
    }
}

/// A long name keeps its beginning and its end.
pub fn shorten(name: &str, longest: usize) -> String {
    let chars: Vec<char> = name.chars().collect();
    if chars.len() <= longest {
        return name.to_string();
    }
    let kept = longest.saturating_sub(4);
    let (head, tail) = (kept * 3 / 5, kept - kept * 3 / 5);
    let (head, tail): (String, String) = (chars[..head].iter().collect(), chars[chars.len() - tail..].iter().collect());
    format!("{head} .. {tail}")
}

/// Words in lines of at most 100 characters.
pub fn wrapped(text: &str) -> String {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        if !lines[last].is_empty() && lines[last].len() + word.len() >= 100 {
            lines.push(word.to_string());
        } else {
            let space = if lines[last].is_empty() { "" } else { " " };
            lines[last] += &format!("{space}{word}");
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_within_what_equal_runs_differ_by_is_called_so() {
        assert_eq!(speed(1.254, [0.012, 0.021]), "1.25x the speed (run-to-run spread 2 %)");
        assert_eq!(speed(1.1, [0.0, 0.009]), "1.10x the speed (run-to-run spread below 1 %)");
        assert_eq!(speed(0.96, [0.35, 0.0]), "0.96x the speed, within the noise: run-to-run spread 35 %");
        assert_eq!(speed(1.02, [0.0, 0.03]), "1.02x the speed, within the noise: run-to-run spread 3 %");
    }
}
