//! An analysis as plain data ([`Analysis`]), as a page ([`html`]) and as a picture of the roofline ([`roofline_svg`]); and
//! curves of numbers as a picture ([`curves_svg`]).
//!
//! It knows no graphs and no machines: `deuteron` fills in the data, and this crate shows it ([`html`],
//! [`roofline_svg`]), reads it back ([`parse`], [`schema`]), compares two analyses ([`diff`]) and checks one against
//! the expectations of a user ([`expect`]). All of it is pure: the same analysis gives the same bytes.
//!
//! An analysis may come from an edited file, so nothing here trusts its numbers: indices may be out of range,
//! figures may be infinite, and every string may contain markup.
#![forbid(unsafe_code)]

mod curve;
mod data;
mod diff;
mod digest;
mod error;
mod escape;
mod expect;
mod headline;
mod json;
mod neighbours;
mod next;
mod page;
mod roofline;
mod score;
mod sheet;
mod units;

pub use curve::{Curve, curves_svg};
pub use diff::{CandidateChange, Change, Diff, Event, KernelChange, NumberChange, PlanChange, TextChange, diff};
pub use digest::Sha256;
pub use error::ReportError;
pub use expect::{Outcome, Violation, expect};
pub use json::{LARGEST_INPUT, VERSION, parse, schema};
pub use neighbours::distance;
pub use next::{next_steps, refusals};
pub use page::html;
pub use roofline::roofline_svg;
pub use score::{change_of_bytes, score_text};
pub use sheet::*;
