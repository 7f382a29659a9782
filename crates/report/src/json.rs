//! The JSON form: its schema, and reading it.

use schemars::schema_for;
use serde::Deserialize;

use crate::{Analysis, ReportError};

/// The version of the form that this crate writes and reads.
pub const VERSION: u32 = 2;

/// The longest text that [`parse`] reads, in bytes. GPT-2 XL with gradients has about 3 MB.
pub const LARGEST_INPUT: usize = 256 << 20;

/// The JSON schema of [`Analysis`], the text of `docs/analysis.schema.json`.
pub fn schema() -> String {
    format!("{:#}\n", schema_for!(Analysis).as_value())
}

/// Reads an analysis from its JSON form.
///
/// The numbers are not validated: an edited file may contain an operation that reads one that does not
/// exist, and everything in this crate handles that.
pub fn parse(text: &str) -> Result<Analysis, ReportError> {
    /// Read first, to distinguish a file of another version from a broken one.
    #[derive(Deserialize)]
    struct Version {
        schema: u64,
    }

    if text.len() > LARGEST_INPUT {
        return Err(ReportError::TooLarge { bytes: text.len(), limit: LARGEST_INPUT });
    }
    if let Ok(version) = serde_json::from_str::<Version>(text)
        && version.schema != u64::from(VERSION)
    {
        return Err(ReportError::Version { found: version.schema, expected: VERSION });
    }
    serde_json::from_str(text).map_err(|error| json_error(&error))
}

fn json_error(error: &serde_json::Error) -> ReportError {
    let message = error.to_string();
    // The place is in fields of its own; serde_json repeats it at the end of its message.
    let problem = message.rsplit_once(" at line ").map_or(message.as_str(), |(problem, _)| problem);
    let problem = match error.classify() {
        serde_json::error::Category::Data => format!("not an analysis: {problem}"),
        serde_json::error::Category::Eof => format!("the text ends too early: {problem}"),
        serde_json::error::Category::Syntax | serde_json::error::Category::Io => format!("not JSON: {problem}"),
    };
    ReportError::Json { line: error.line(), column: error.column(), problem }
}
