//! `deuteron completions` and `deuteron man`: completion scripts and manual pages, generated from the help texts.

use anyhow::{Context, Result, bail};
use clap::{Args, Command};
use clap_complete::Shell;

use crate::Outcome;

#[derive(Args)]
pub struct Shells {
    /// For bash: `deuteron completions bash > ~/.local/share/bash-completion/completions/deuteron`
    shell: Shell,
}

#[derive(Args)]
pub struct Pages {
    /// A subcommand, such as analyze [default: the whole command]; read it with `deuteron man analyze | man -l -`
    command: Option<String>,
}

/// Prints the completions of a shell.
pub fn complete(arguments: &Shells, mut command: Command) -> Result<Outcome> {
    let mut script = Vec::new();
    let name = command.get_name().to_string();
    clap_complete::generate(arguments.shell, &mut command, name, &mut script);
    out!("{}", String::from_utf8(script).context("a shell's completions are text")?);
    Ok(Outcome::Good)
}

/// Prints a manual page.
pub fn manual(arguments: &Pages, mut command: Command) -> Result<Outcome> {
    // Until then subcommands do not know what they are part of.
    command.build();
    let page = match &arguments.command {
        None => command,
        Some(name) => {
            let all: Vec<&str> =
                command.get_subcommands().map(Command::get_name).filter(|name| *name != "help").collect();
            let Some(found) = command.find_subcommand(name).filter(|found| found.get_name() != "help") else {
                bail!("`{name}` is no subcommand; expected one of {}", all.join(", "));
            };
            found.clone()
        }
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(page).render(&mut text)?;
    out!("{}", String::from_utf8(text).context("a manual page is text")?);
    Ok(Outcome::Good)
}
