//! Tables, numbers and progress for a terminal.

use std::io::IsTerminal;
use std::time::Duration;

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// A plain table; columns from `numbers_from` on are aligned to the right, and are never broken. On a terminal words wrap where the table
/// would be wider, and columns that do not fit are printed below, after the first column again; in a file or a pipe lines stay whole.
pub fn table(header: &[&str], rows: Vec<Vec<String>>, numbers_from: usize) -> String {
    let terminal = console::Term::stdout().size_checked().filter(|_| std::io::stdout().is_terminal());
    fitted(header, &rows, numbers_from, terminal.map(|(_, columns)| columns))
}

/// Width that borders and spaces add to each column.
const BORDER: usize = 3;

/// The minimum width of a column of names, below which the table is split instead.
const NARROWEST: usize = 16;

fn fitted(header: &[&str], rows: &[Vec<String>], numbers_from: usize, width: Option<u16>) -> String {
    let all: Vec<usize> = (0..header.len()).collect();
    let Some(width) = width else { return drawn(header, rows, numbers_from, &all, None) };
    let widths = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(String::as_str);
        cells.chain([header[column]]).map(|cell| cell.chars().count()).max().unwrap_or(0) + BORDER
    };
    // Words give way down to a limit, numbers do not.
    let least =
        |column: usize| if column < numbers_from { widths(column).min(NARROWEST + BORDER) } else { widths(column) };
    let mut parts: Vec<Vec<usize>> = vec![Vec::new()];
    let mut taken = 1;
    for column in all {
        let last = parts.len() - 1;
        if taken + least(column) > usize::from(width) && parts[last].len() > 1 {
            parts.push(vec![0]);
            taken = 1 + least(0);
        }
        taken += least(column);
        let last = parts.len() - 1;
        parts[last].push(column);
    }
    let parts: Vec<String> = parts.iter().map(|part| drawn(header, rows, numbers_from, part, Some(width))).collect();
    parts.join("\n")
}

/// Some columns as a table, at most this wide where its numbers allow it.
fn drawn(header: &[&str], rows: &[Vec<String>], numbers_from: usize, columns: &[usize], width: Option<u16>) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Disabled);
    if let Some(width) = width {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    table.set_header(columns.iter().map(|&column| header[column]));
    let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
    table.add_rows(rows.iter().map(|row| columns.iter().map(|&column| cell(row, column)).collect::<Vec<String>>()));
    for (column, shown) in columns.iter().zip(table.column_iter_mut()) {
        if *column >= numbers_from {
            shown.set_cell_alignment(CellAlignment::Right);
            shown.set_constraint(ColumnConstraint::ContentWidth);
        }
    }
    table.to_string()
}

/// A value as indented JSON on standard output.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    outln!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

/// A report as JSON if requested, otherwise as text.
pub fn report<T: Serialize>(report: &T, as_json: bool, print: impl FnOnce(&T)) -> anyhow::Result<()> {
    if as_json {
        return json(report);
    }
    print(report);
    Ok(())
}

/// Runs a function for each case, with a progress bar that shows the case's name.
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

/// Runs a function that reports its finished steps, with a progress bar.
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

/// Runs a function of unknown length, with a spinner.
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
        ms if ms <= 0.0 && ms.is_sign_negative() => milliseconds(0.0),
        ms if ms < 1.0 => format!("{:.1} us", ms * 1e3),
        ms if ms < 1000.0 => format!("{ms:.2} ms"),
        ms => format!("{:.2} s", ms / 1e3),
    }
}

/// The speed-up, and whether it exceeds the run-to-run spread; `spreads` are those of the plans compared.
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

    fn wide() -> (Vec<&'static str>, Vec<Vec<String>>) {
        let header = vec!["kernel", "size", "predicted", "registers", "occupancy"];
        let row = ["attention + reshape + linear + add", "1024x768x3072", "167.3 us", "at most 255", "19 %"];
        (header, vec![row.map(str::to_string).to_vec()])
    }

    #[test]
    fn a_table_fits_the_terminal_and_breaks_no_number() {
        let (header, rows) = wide();
        for width in [40, 60, 80, 100, 200] {
            let text = fitted(&header, &rows, 1, Some(width));
            assert!(text.lines().all(|line| line.chars().count() <= usize::from(width)), "{width}:\n{text}");
            for number in ["1024x768x3072", "167.3 us", "at most 255", "19 %", "predicted", "occupancy"] {
                assert!(text.contains(number), "{width}, {number}:\n{text}");
            }
        }
    }

    #[test]
    fn what_rounds_to_nothing_has_no_sign() {
        assert_eq!([0.0, -0.0, -1e-9, -4.9e-5].map(milliseconds), [(); 4].map(|()| "0.0 us".to_string()));
        assert_eq!((milliseconds(-6e-5), milliseconds(-1.5)), ("-0.1 us".to_string(), "-1.50 ms".to_string()));
    }

    #[test]
    fn columns_without_a_place_stand_below_behind_the_name() {
        let (header, rows) = wide();
        let narrow = fitted(&header, &rows, 1, Some(60));
        assert_eq!(narrow.matches("kernel").count(), 2, "{narrow}");
        assert_eq!(fitted(&header, &rows, 1, Some(200)).matches("kernel").count(), 1);
        let whole = fitted(&header, &rows, 1, None);
        assert!(whole.contains("attention + reshape + linear + add"), "{whole}");
    }

    #[test]
    fn a_speed_within_what_equal_runs_differ_by_is_called_so() {
        assert_eq!(speed(1.254, [0.012, 0.021]), "1.25x the speed (run-to-run spread 2 %)");
        assert_eq!(speed(1.1, [0.0, 0.009]), "1.10x the speed (run-to-run spread below 1 %)");
        assert_eq!(speed(0.96, [0.35, 0.0]), "0.96x the speed, within the noise: run-to-run spread 35 %");
        assert_eq!(speed(1.02, [0.0, 0.03]), "1.02x the speed, within the noise: run-to-run spread 3 %");
    }
}
