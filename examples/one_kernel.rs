//! LayerNorm and GELU as one kernel on the CPU: build a graph, plan it, run it.
//!
//! `cargo run --release --package deuteron-guide --example one_kernel`

use deuteron::{Dtype, Engine, Gelu, Graph, Session, Strategy, Tensor};

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (rows, cols) = (4, 8);
    let mut graph = Graph::new("norm_gelu");
    let x = graph.input("x", Dtype::F32, [rows, cols])?;
    let w = graph.weight("w", Dtype::F32, [cols])?;
    let b = graph.weight("b", Dtype::F32, [cols])?;
    let normed = graph.layer_norm(x, w, b, 1e-5)?;
    let y = graph.gelu(normed.y, Gelu::Tanh)?;
    graph.output("y", y)?;

    let mut session = Session::new(&Engine::cpu(), &graph, Strategy::Fused)?;
    println!("{}", session.plan().explain());

    let values: Vec<f32> = (0..rows * cols).map(|i| i as f32 / 8.0).collect();
    let x = Tensor::from_f32(Dtype::F32, [rows, cols], &values)?;
    let (w, b) = (Tensor::filled(Dtype::F32, [cols], 1.0)?, Tensor::filled(Dtype::F32, [cols], 0.0)?);
    session.run(&[&x, &w, &b])?;
    // Every row counts up, so every normalised row is the same.
    println!("{:.3?}", &session.output(0)?.to_array()?.values[..cols]);
    Ok(())
}
