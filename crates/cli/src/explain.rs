//! `deuteron explain`: the page of a code, or of the text form.

use anyhow::{Result, bail};
use clap::Args;
use deuteron::{PAGES, page};

use crate::Outcome;
use crate::show;

#[derive(Args)]
pub struct Arguments {
    /// E-PLAN-004; `text` for the text form of a graph; or nothing for the list of all codes
    code: Option<String>,
    /// Print {code, title, meaning, example, hint} as JSON, or an array of them
    #[arg(long)]
    json: bool,
    /// Print the JSON schema of what `analyze --json` prints
    #[arg(long, conflicts_with = "code")]
    schema: bool,
}

/// The page of the text form.
const TEXT_FORM: &str = include_str!("text-form.md");

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    if arguments.schema {
        outln!("{}", deuteron::report::schema());
        return Ok(Outcome::Good);
    }
    let Some(code) = &arguments.code else {
        match arguments.json {
            true => show::json(&PAGES)?,
            false => PAGES.iter().for_each(|page| outln!("{}  {}", page.code, page.title)),
        }
        return Ok(Outcome::Good);
    };
    if code.eq_ignore_ascii_case("text") {
        if arguments.json {
            bail!("--json is for codes; `explain text` is a page of prose");
        }
        out!("{TEXT_FORM}");
        return Ok(Outcome::Good);
    }
    let Some(page) = page(code) else {
        let last = PAGES.last().map_or("", |page| page.code);
        bail!(
            "unknown code `{code}`; expected E-PLAN-001 to {last}, `text` for the text form, or no code for the list"
        );
    };
    if arguments.json {
        show::json(page)?;
        return Ok(Outcome::Good);
    }
    outln!("{}: {}\n\n{}", page.code, page.title, show::wrapped(page.meaning));
    if !page.example.is_empty() {
        outln!("\nFor example\n  {}", page.example.replace(" ; ", "\n  "));
    }
    outln!("\nWhat to do: {}.", show::wrapped(page.hint));
    Ok(Outcome::Good)
}
