//! Sizes and types that tests run over.

use deuteron_graph::Dtype;

/// Rows and columns around every border a kernel has: one, vector widths, strips, odd numbers.
pub const SIZES: [(usize, usize); 12] = [
    (1, 1),
    (1, 127),
    (3, 1),
    (5, 129),
    (2, 1500),
    (129, 64),
    (7, 768),
    (17, 15),
    (4, 1024),
    (3, 1025),
    (1, 4099),
    (300, 33),
];

/// Storage types of activations.
pub const FLOATS: [Dtype; 3] = Dtype::FLOATS;
