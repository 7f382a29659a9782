//! Rows of `bench/results`, and numbers as tables show them.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// One CSV file.
pub struct Rows {
    file: String,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// One row of a file.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    of: &'a Rows,
    fields: &'a [String],
}

impl Rows {
    /// Reads `bench/results/FILE`.
    pub fn read(root: &Path, file: &str) -> Result<Rows> {
        let path = root.join("bench/results").join(file);
        Self::parse(file, &fs::read_to_string(&path).with_context(|| path.display().to_string())?)
    }

    /// Whether there is a `bench/results/FILE`.
    pub fn exists(root: &Path, file: &str) -> bool {
        root.join("bench/results").join(file).exists()
    }

    /// The rows, or the sentence that stands in their place until they are measured by this command.
    pub fn read_or(root: &Path, file: &str, machine: &str, command: &str) -> Result<Result<Rows, String>> {
        if Self::exists(root, file) {
            return Self::read(root, file).map(Ok);
        }
        Ok(Err(format!("Not measured {machine} yet: `{command}` writes the rows (`{file}`) that belong here.\n")))
    }

    pub fn parse(file: &str, text: &str) -> Result<Rows> {
        let mut lines = text.lines().map(fields);
        let header = lines.next().with_context(|| format!("{file} is empty"))?;
        let rows: Vec<Vec<String>> = lines.collect();
        let bad = rows.iter().position(|row| row.len() != header.len());
        ensure!(
            bad.is_none(),
            "{file}: row {} has not the {} fields of the header",
            bad.unwrap_or(0) + 1,
            header.len()
        );
        Ok(Rows { file: file.into(), header, rows })
    }

    pub fn all(&self) -> impl Iterator<Item = Row<'_>> {
        self.rows.iter().map(|fields| Row { of: self, fields })
    }

    /// All rows with these values, in the order of the file.
    pub fn of<'a>(&'a self, keys: &'a [(&str, &str)]) -> impl Iterator<Item = Row<'a>> {
        self.all().filter(|row| keys.iter().all(|(column, value)| row.text(column).is_ok_and(|text| text == *value)))
    }

    /// The newest row of each set of values of these columns, in the order in which they were first measured.
    pub fn latest(&self, columns: &[&str]) -> Result<Vec<Row<'_>>> {
        let mut latest: Vec<(Vec<&str>, Row<'_>)> = Vec::new();
        for row in self.all() {
            let keys = columns.iter().map(|column| row.text(column)).collect::<Result<Vec<_>>>()?;
            match latest.iter_mut().find(|(known, _)| *known == keys) {
                Some((_, newest)) => *newest = row,
                None => latest.push((keys, row)),
            }
        }
        Ok(latest.into_iter().map(|(_, row)| row).collect())
    }

    /// The newest row with these values: files are appended to.
    pub fn newest(&self, keys: &[(&str, &str)]) -> Result<Row<'_>> {
        let found = self
            .all()
            .filter(|row| keys.iter().all(|(column, value)| row.text(column).is_ok_and(|text| text == *value)));
        found.last().with_context(|| format!("{} has no row with {keys:?}", self.file))
    }
}

impl<'a> Row<'a> {
    pub fn text(self, column: &str) -> Result<&'a str> {
        let index = self.of.header.iter().position(|name| name == column);
        index
            .map(|index| self.fields[index].as_str())
            .with_context(|| format!("{} has no column {column}", self.of.file))
    }

    pub fn number(self, column: &str) -> Result<f64> {
        let text = self.text(column)?;
        text.parse().with_context(|| format!("{}: {column} is `{text}`, not a number", self.of.file))
    }

    /// Nothing where the field is empty.
    pub fn measured(self, column: &str) -> Result<Option<f64>> {
        if self.text(column)?.is_empty() { Ok(None) } else { self.number(column).map(Some) }
    }
}

/// Fields of a line; those with commas are in quotes.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            c => fields.last_mut().into_iter().for_each(|field| field.push(c)),
        }
    }
    fields
}

/// Three digits.
pub fn three(value: f64) -> String {
    match value {
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v if v >= 0.9995 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

/// A ratio of times: above one, we are faster.
pub fn times(value: f64) -> String {
    format!("{value:.2}x")
}

pub fn percent(value: f64) -> String {
    format!("{:.0} %", value * 100.0)
}

/// What is not measured stays empty.
pub fn maybe(value: Option<f64>) -> String {
    value.map(three).unwrap_or_default()
}

pub fn least(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(f64::INFINITY, f64::min)
}

pub fn median(mut values: Vec<f64>) -> Result<f64> {
    ensure!(!values.is_empty(), "a median of no values");
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    Ok(if values.len() % 2 == 1 { values[half] } else { f64::midpoint(values[half - 1], values[half]) })
}

/// A Markdown table.
pub struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<const N: usize>(header: [&str; N]) -> Self {
        Self { header: header.map(String::from).into(), rows: Vec::new() }
    }

    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }

    /// The text, without columns in which nothing was measured.
    pub fn end(self) -> String {
        let is_empty = |column: usize| self.rows.iter().all(|row| row.get(column).is_none_or(String::is_empty));
        let shown: Vec<usize> =
            (0..self.header.len()).filter(|&column| self.rows.is_empty() || !is_empty(column)).collect();
        let line = |cells: &[String]| {
            let cells: Vec<&str> = shown.iter().filter_map(|&column| Some(cells.get(column)?.as_str())).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let rule = format!("|{}\n", "---|".repeat(shown.len()));
        let rows: String = self.rows.iter().map(|row| line(row)).collect();
        line(&self.header) + &rule + &rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_row_is_taken_and_what_is_missing_is_named() {
        let rows = Rows::parse("a.csv", "op,us\n\"x, y\",1\n\"x, y\",2\nz,\n").unwrap();
        assert_eq!(rows.newest(&[("op", "x, y")]).unwrap().number("us").unwrap(), 2.0);
        assert_eq!(rows.newest(&[("op", "z")]).unwrap().measured("us").unwrap(), None);
        let latest: Vec<&str> = rows.latest(&["op"]).unwrap().iter().map(|row| row.text("us").unwrap()).collect();
        assert_eq!(latest, ["2", ""]);
        let message = |error: anyhow::Error| error.to_string();
        assert_eq!(message(rows.newest(&[("op", "w")]).err().unwrap()), "a.csv has no row with [(\"op\", \"w\")]");
        let row = rows.newest(&[("op", "z")]).unwrap();
        assert_eq!(message(row.number("ms").unwrap_err()), "a.csv has no column ms");
        assert!(message(row.number("us").unwrap_err()).contains("not a number"));
        assert!(Rows::parse("a.csv", "op,us\nx\n").is_err());
    }

    #[test]
    fn a_column_without_a_value_is_left_out() {
        let mut table = Table::new(["", "torch", "ours"]);
        assert_eq!(Table::new(["a", "b"]).end(), "| a | b |\n|---|---|\n");
        table.row(["x".into(), String::new(), "1".into()]);
        table.row(["y".into(), String::new(), String::new()]);
        assert_eq!(table.end(), "|  | ours |\n|---|---|\n| x | 1 |\n| y |  |\n");
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!([1102.0, 99.96, 99.94, 9.11, 0.206].map(three), ["1102", "100", "99.9", "9.11", "0.206"]);
        assert_eq!(median(vec![3.0, 1.0, 2.0, 8.0]).unwrap(), 2.5);
    }
}
