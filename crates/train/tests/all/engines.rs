//! The same on a GPU, where there is one.

use deuteron::Engine;
use deuteron::cuda::{self, Search};
use deuteron_testkit::hardware;

use crate::{curve, step};

fn gpu() -> Option<Engine> {
    let search = Search { cuda_home: hardware::cuda_home(), environments: hardware::environments() };
    hardware::gpu(|| cuda::open(&cuda::Options { search, ..cuda::Options::default() }))
}

#[test]
fn gradients_on_a_gpu_are_those_of_f64() {
    let Some(engine) = gpu() else { return };
    step::gradients(&engine);
}

#[test]
fn steps_on_a_gpu_are_those_of_f64() {
    let Some(engine) = gpu() else { return };
    step::optimizers(&engine);
    step::states(&engine);
}

#[test]
fn a_curve_on_a_gpu_is_as_near_to_f64_as_pytorchs_own() {
    let Some(engine) = gpu() else { return };
    curve::check(&engine);
    curve::check_long(&engine);
}
