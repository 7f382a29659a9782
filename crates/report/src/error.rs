//! Errors in text given to this crate.

use thiserror::Error;

/// Text that could not be read as an analysis or as a list of expectations.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ReportError {
    /// The text is too long.
    #[error("the analysis has {bytes} bytes; at most {limit} are read")]
    TooLarge {
        /// length of the text
        bytes: usize,
        /// the longest text that is read
        limit: usize,
    },
    /// The text is not JSON, or not the JSON of an analysis.
    #[error("line {line}, column {column}: {problem}")]
    Json {
        /// line, from 1
        line: usize,
        /// column, from 1; 0 where the line ended too early
        column: usize,
        /// what is wrong there
        problem: String,
    },
    /// The analysis has another format version.
    #[error("the analysis has format {found}, but this version reads format {expected}: run `analyze` again")]
    Version {
        /// its version
        found: u64,
        /// the version that is read
        expected: u32,
    },
    /// A line of expectations does not follow the format.
    #[error("expectations, line {line}: {problem}, in `{text}`")]
    Expectation {
        /// line, from 1
        line: usize,
        /// the line
        text: String,
        /// what is wrong with it
        problem: String,
    },
    /// A line of expectations matches the graph in too many ways to check.
    #[error(
        "expectations, line {line}: `{text}` matches the graph in too many ways: name fewer operations, or use labels"
    )]
    TooBroad {
        /// line, from 1
        line: usize,
        /// the line
        text: String,
    },
}
