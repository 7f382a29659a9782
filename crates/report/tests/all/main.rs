//! The report from outside: its JSON form, what is held against it, its page, and the page in a browser.

mod browser;
mod diff;
mod expect;
mod hostile;
mod json;
mod page;
mod sample;
