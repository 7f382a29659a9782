//! Grids as `machine/launch.h` reads them.

use deuteron_codegen::cuda::{Grid, Mapped, Word};

/// A grid as text.
pub fn written(grid: &Grid) -> String {
    let [x, y, z] = grid.blocks;
    let mut text = format!("grid {x} {y} {z} {} {} {}\n", grid.threads, grid.shared, grid.cluster);
    for word in &grid.words {
        let line = match word {
            Word::Number(number) => format!("n {}", *number as i64),
            Word::Argument { position, offset } | Word::Unwritten { position, offset } => {
                format!("a {position} {offset}")
            }
            Word::Workspace(offset) => format!("w {offset}"),
            Word::Persistent(offset) => format!("k {offset}"),
            Word::Fault => "f 0".to_string(),
            Word::Map(map) => {
                let position = match map.of {
                    Mapped::Argument(position) => position as i64,
                    Mapped::Workspace => -1,
                };
                let list = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
                let (sizes, strides, tile) = (list(&map.sizes), list(&map.strides), list(&map.tile.map(u64::from)));
                format!("m {position} {} {} {sizes} {strides} {tile}", map.offset, map.rank)
            }
        };
        text.push_str(&line);
        text.push('\n');
    }
    text.push_str("end\n");
    text
}
