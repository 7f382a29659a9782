//! Devices from outside: the real compiler, the cache of kernels, and a GPU where there is one.

mod attention;
mod bytes;
mod cache;
mod cpu;
mod cuda;
mod experts;
mod hopper;
mod mma;
mod nvrtc;
mod skinny;
mod strips;
mod support;
