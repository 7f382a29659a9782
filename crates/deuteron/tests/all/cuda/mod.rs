//! What runs on a GPU: whole graphs, products of few rows, attention and what follows it as one launch.
//!
//! Each test needs a GPU and says so where there is none.

mod graphs;
mod one_launch;
mod products;

use deuteron::cuda::{self, Options, Search};
use deuteron::{Dtype, Engine, Error, Graph, Session, Tensor};
use deuteron_testkit::hardware;

fn open(red_zones: bool) -> Result<Engine, Error> {
    let search = Search { cuda_home: hardware::cuda_home(), environments: hardware::environments() };
    cuda::open(&Options { search, red_zones, ..Options::default() })
}

fn gpu() -> Option<Engine> {
    hardware::gpu(|| open(false))
}

/// With red zones around all memory.
fn guarded_gpu() -> Option<Engine> {
    hardware::gpu(|| open(true))
}

/// A graph whose elements are of a dtype wherever its text says `float`.
fn parsed(text: &str, dtype: Dtype) -> Graph {
    text.replace("float", &dtype.to_string()).parse().unwrap()
}

fn outputs(session: &Session) -> Vec<Tensor> {
    (0..session.graph().outputs().len()).map(|index| session.output(index).unwrap()).collect()
}
