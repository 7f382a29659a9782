//! Kernels from outside: as text, as tile programs, and on an emulator.

mod emulated;
mod epilogues;
mod experts;
mod launches;
mod limits;
mod programs;
mod updates;
mod work;
