//! Models on any engine: what the transformers library says, and what the f64 reference says.

mod parity;
mod synthetic;

use deuteron::Engine;
use deuteron::cuda::{self, Search};
use deuteron_testkit::hardware;

fn gpu() -> Option<Engine> {
    let search = Search { cuda_home: hardware::cuda_home(), environments: hardware::environments() };
    hardware::gpu(|| cuda::open(&cuda::Options { search, ..cuda::Options::default() }))
}
