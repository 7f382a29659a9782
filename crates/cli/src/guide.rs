//! `deuteron guide`: exercises of the guide, and their checkers.

use std::fs;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use deuteron_guide::{ALL, Exercise, Takes, Verdict, Workshop};

use crate::Outcome;
use crate::emulate::{Folder, toolchain};
use crate::show;

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// List the exercises
    List,
    /// Check an answer to an exercise
    Check {
        /// Its number, such as 1.2
        exercise: String,
        /// A number, or the file of a graph in text form or of CUDA source; `deuteron guide list` says which
        answer: String,
    },
}

pub fn run(arguments: &Arguments) -> Result<Outcome> {
    match &arguments.what {
        What::List => {
            let row = |exercise: &Exercise| {
                vec![exercise.number.into(), takes(exercise.takes).into(), exercise.question.into()]
            };
            outln!("{}", show::table(&["exercise", "answer", "question"], ALL.iter().map(row).collect(), 9));
            Ok(Outcome::Good)
        }
        What::Check { exercise, answer } => check(exercise, answer),
    }
}

fn takes(takes: Takes) -> &'static str {
    match takes {
        Takes::Number => "a number",
        Takes::Graph => "a file: a graph in text form",
        Takes::Source => "a file: CUDA source",
    }
}

fn check(number: &str, answer: &str) -> Result<Outcome> {
    let last = ALL.last().map_or("", |exercise| exercise.number);
    let unknown =
        || format!("there is no exercise `{number}`; expected 1.1 to {last}, `deuteron guide list` lists them");
    let exercise = Exercise::find(number).with_context(unknown)?;
    let answer = match exercise.takes {
        Takes::Number => answer.to_string(),
        takes => fs::read_to_string(answer)
            .with_context(|| format!("{answer}: exercise {number} takes {}", self::takes(takes)))?,
    };
    let needs_workshop = exercise.takes == Takes::Source;
    let tools = needs_workshop.then(|| Ok::<_, anyhow::Error>((toolchain()?, Folder::new()?))).transpose()?;
    let workshop = tools.as_ref().map(|(toolchain, folder)| Workshop { toolchain, folder: folder.path() });
    let Verdict { right, text } = exercise.check(&answer, workshop)?;
    outln!("{number} {}: {text}", if right { "right" } else { "wrong" });
    Ok(Outcome::of(right))
}
