//! Standard output and standard error of a command.
//!
//! Everything goes through here: `println!` panics where nothing can be written, which would hide the outcome of the command. An
//! error is kept instead, and [`finish`] returns it to the caller, which sets the exit code.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::sync::{Mutex, PoisonError};

/// `print!` that keeps an error for the end of the command.
macro_rules! out {
    ($($text:tt)*) => { $crate::output::write(format_args!($($text)*)) };
}

/// `println!` that keeps an error for the end of the command.
macro_rules! outln {
    () => { $crate::output::write(format_args!("\n")) };
    ($($text:tt)*) => { $crate::output::write_line(format_args!($($text)*)) };
}

/// `eprintln!` that ignores errors of standard error.
macro_rules! errln {
    ($($text:tt)*) => { $crate::output::write_error(format_args!($($text)*)) };
}

thread_local! {
    /// The first error of this command's output. A command prints from the thread that runs it.
    static FIRST_ERROR: RefCell<Option<io::Error>> = const { RefCell::new(None) };
}

/// Prints a text, unless an earlier one could not be printed.
pub fn write(text: Arguments<'_>) {
    if !is_lost() {
        keep(io::stdout().lock().write_fmt(text));
    }
}

/// The same with the end of a line.
pub fn write_line(text: Arguments<'_>) {
    write(format_args!("{text}\n"));
}

/// Prints a text at once, though its line may not be complete.
pub fn write_now(text: &str) {
    write(format_args!("{text}"));
    if !is_lost() {
        keep(io::stdout().flush());
    }
}

/// Whether something could not be printed; nothing after it is printed either.
pub fn is_lost() -> bool {
    FIRST_ERROR.with_borrow(Option::is_some)
}

/// Keeps the first error.
pub fn keep(printed: io::Result<()>) {
    if let Err(error) = printed {
        FIRST_ERROR.with_borrow_mut(|first| {
            first.get_or_insert(error);
        });
    }
}

/// Ends a command's output: an error if some of it was lost. A closed pipe, as after `head`, is not an error.
pub fn finish() -> io::Result<()> {
    if !is_lost() {
        keep(io::stdout().flush());
    }
    match FIRST_ERROR.take() {
        Some(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// A line on standard error. A failure to write it is ignored: the exit code still states the outcome.
pub fn write_error(text: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// A note on standard error, once per process.
pub fn note_once(text: String) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(text.clone()) {
        errln!("note: {text}");
    }
}
