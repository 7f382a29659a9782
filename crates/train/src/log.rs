//! The log of a run: a line of CSV for each step, and its picture.
//!
//! Columns: `step` (from 1), `tokens` (so far), `loss` (of the step's tokens, before it), `validation_loss` (after the step, empty where it was not
//! computed), `gradient_norm` (before clipping), `learning_rate`, `tokens_per_second`.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use deuteron::report::{Curve, curves_svg};

use crate::error::Error;

const HEADER: &str = "step,tokens,loss,validation_loss,gradient_norm,learning_rate,tokens_per_second";

/// A line of the log.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// from 1
    pub step: u64,
    /// so far
    pub tokens: u64,
    /// of the step's tokens, before it
    pub loss: f64,
    /// after the step, if it was computed
    pub validation_loss: Option<f64>,
    /// of the gradient, before clipping
    pub gradient_norm: f64,
    /// of the step
    pub learning_rate: f64,
    /// of the step alone
    pub tokens_per_second: f64,
}

/// An open log.
pub struct Log {
    path: PathBuf,
    file: File,
    lines: Vec<Line>,
}

impl Log {
    /// Opens a log with the lines of the first `steps` steps; later lines are removed, since those steps are repeated.
    pub fn open(path: &Path, steps: u64) -> Result<Log, Error> {
        let failed = |problem| Error::Write { path: path.to_path_buf(), problem };
        let before = if steps == 0 { String::new() } else { fs::read_to_string(path).unwrap_or_default() };
        let lines: Vec<Line> =
            before.lines().skip(1).filter_map(parsed).filter(|line: &Line| line.step <= steps).collect();
        let text: String =
            [HEADER.to_string()].into_iter().chain(lines.iter().map(printed)).map(|l| l + "\n").collect();
        let unfinished = path.with_extension("unfinished");
        fs::write(&unfinished, text).and_then(|()| fs::rename(&unfinished, path)).map_err(failed)?;
        let file = File::options().append(true).open(path).map_err(failed)?;
        Ok(Log { path: path.to_path_buf(), file, lines })
    }

    /// Adds a line.
    pub fn push(&mut self, line: Line) -> Result<(), Error> {
        self.lines.push(line);
        let text = printed(&line) + "\n";
        self.file.write_all(text.as_bytes()).map_err(|problem| Error::Write { path: self.path.clone(), problem })
    }

    /// All lines.
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// The losses over the steps, as a picture.
    pub fn curve(&self, title: &str) -> String {
        let points = |value: &dyn Fn(&Line) -> Option<f64>| {
            self.lines.iter().filter_map(|line| Some((line.step as f64, value(line)?))).collect()
        };
        let train = Curve { name: "training loss", points: points(&|line| Some(line.loss)) };
        let validation = Curve { name: "validation loss", points: points(&|line| line.validation_loss) };
        curves_svg(title, "step", &[train, validation])
    }
}

fn printed(line: &Line) -> String {
    let validation = line.validation_loss.map(|loss| loss.to_string()).unwrap_or_default();
    let Line { step, tokens, loss, gradient_norm, learning_rate, tokens_per_second, .. } = line;
    format!("{step},{tokens},{loss},{validation},{gradient_norm},{learning_rate},{tokens_per_second:.1}")
}

fn parsed(text: &str) -> Option<Line> {
    let cells: Vec<&str> = text.split(',').collect();
    let &[step, tokens, loss, validation, norm, rate, speed] = cells.as_slice() else { return None };
    Some(Line {
        step: step.parse().ok()?,
        tokens: tokens.parse().ok()?,
        loss: loss.parse().ok()?,
        validation_loss: if validation.is_empty() { None } else { Some(validation.parse().ok()?) },
        gradient_norm: norm.parse().ok()?,
        learning_rate: rate.parse().ok()?,
        tokens_per_second: speed.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use deuteron_testkit::Scratch;

    fn line(step: u64) -> Line {
        let validation_loss = step.is_multiple_of(2).then_some(3.25);
        let loss = 5.0 / step as f64;
        Line {
            step,
            tokens: 64 * step,
            loss,
            validation_loss,
            gradient_norm: 1.5,
            learning_rate: 0.1 / 3.0,
            tokens_per_second: 12.5,
        }
    }

    #[test]
    fn a_log_goes_on_after_the_step_that_it_is_opened_at() {
        let folder = Scratch::make();
        let path = folder.join("log.csv");
        let mut log = Log::open(&path, 0).unwrap();
        (1..=5).for_each(|step| log.push(line(step)).unwrap());
        let mut again = Log::open(&path, 3).unwrap();
        assert_eq!(again.lines(), [line(1), line(2), line(3)]);
        again.push(line(4)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 5);
        assert!(Log::open(&path, 0).unwrap().lines().is_empty());
    }
}
