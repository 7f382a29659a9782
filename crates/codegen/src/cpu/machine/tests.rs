//! Machine code beside the interpreter, bit by bit, and beside what GNU `as` makes of its listing.

mod encoding;
mod programs;
