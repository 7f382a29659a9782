//! Is a result right? Run softmax in bf16, and hold every element against f64 within its own bound.
//!
//! `cargo run --release --package deuteron-guide --example verify`

use deuteron::verify::Expected;
use deuteron::{Engine, Graph, Session, Strategy, Tensor, seed};

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let graph: Graph = "graph rows ; x = input bf16[64,129] ; y = softmax x ; out y".parse()?;
    let inputs = seed::inputs(&graph, 1)?;
    let arrays = inputs.iter().map(Tensor::to_array).collect::<Result<Vec<_>, _>>()?;

    let mut session = Session::new(&Engine::cpu(), &graph, Strategy::Fused)?;
    session.run(&inputs.iter().collect::<Vec<_>>())?;
    let verification = Expected::new(&graph, &arrays)?.verify(&graph, &[session.output(0)?])?;

    let worst = verification.worst().ok_or("no output")?.comparison;
    println!("largest error {:.2e}, bound {:.2e}", worst.error, worst.bound);
    if !verification.holds() {
        return Err("an element is outside of its bound".into());
    }
    Ok(())
}
