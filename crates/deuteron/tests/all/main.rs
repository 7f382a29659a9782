//! Sessions, ready-made ops and kernels as users of the crate see them. `steady` is a program of its own, as it counts every allocation.

mod attention;
mod cache;
mod catalog;
mod cuda;
mod epilogues;
mod experts;
mod int8;
mod integers;
mod ladder;
mod machine_code;
mod mistakes;
mod ops;
mod products;
mod session;
mod sources;
mod states;
mod support;
mod teeth;
mod tune;
