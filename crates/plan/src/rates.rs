//! Rates of a machine's matrix units, and the intensities above which they are the bottleneck.

use crate::machine::{Machine, Quantity};
use crate::units::Rate;

/// The rate of matmuls with operands of this many bits.
pub fn matrix_rate(machine: &Machine, bits: u32) -> Rate {
    machine.tflops(if bits <= 16 { Quantity::Matrix16Tflops } else { Quantity::Matrix32Tflops })
}

/// Flops per byte above which the matrix units, and above which the vector units, are the bottleneck.
pub fn ridge_points(machine: &Machine, bits: u32) -> (f64, f64) {
    let bytes = machine.gbps(Quantity::DramGbps).per_second;
    (matrix_rate(machine, bits).per_second / bytes, machine.tflops(Quantity::VectorTflops).per_second / bytes)
}
