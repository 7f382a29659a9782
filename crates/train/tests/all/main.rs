//! Training: its graphs against f64, its curve against PyTorch's, and runs that stop and go on.

mod curve;
mod engines;
mod runs;
mod step;
mod support;
