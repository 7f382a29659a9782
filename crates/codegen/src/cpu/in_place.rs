//! Whether a result of a tile program may overwrite the operand that it updates.

use super::program::{Inst, Src, TileProgram};
use super::simd::sources;

/// Whether a flat program has read all of an operand's strip before it stores the result's, so that both may be one memory.
///
/// Instructions run in order over one strip after another; each reads an element before it writes the one at the same place. A store
/// that is folded into the instruction that makes its tile moves past nothing that touches an argument. Tiles are copies: what was
/// loaded before the store stays valid after it.
pub fn reads_before_storing(program: &TileProgram, operand: u16, result: u16) -> bool {
    let [pass] = program.passes.as_slice() else { return false };
    let reads = |&inst: &Inst| {
        let loads = matches!(inst, Inst::Load { arg, .. } if arg == operand);
        loads || sources(inst).contains(&Some(Src::Arg(operand)))
    };
    let stores = |inst: &Inst| matches!(*inst, Inst::Store { arg, .. } if arg == result);
    let first = pass.strip.iter().position(stores);
    program.flat && first.is_some_and(|first| !pass.strip[first + 1..].iter().any(reads))
}

#[cfg(test)]
mod tests {
    use deuteron_graph::{BinaryOp, Dtype};

    use super::*;
    use crate::cpu::program::{Access, ArgSpec, Dst, Pass};

    /// Arguments 0 and 1 are read, 2 and 3 written.
    fn program(dtype: Dtype, flat: bool, passes: &[&[Inst]]) -> TileProgram {
        let arg = |written: bool| ArgSpec { dtype, access: Access::Row, written };
        let passes = passes.iter().map(|strip| Pass { row: Vec::new(), strip: strip.to_vec() });
        TileProgram {
            cols: 0,
            flat,
            args: [false, false, true, true].map(arg).to_vec(),
            tiles: 4,
            kept: 0,
            scalars: 0,
            partials: Vec::new(),
            axes: 0,
            passes: passes.collect(),
        }
    }

    fn add(to: u16, a: Src, b: Src) -> Inst {
        Inst::Binary { op: BinaryOp::Add, dst: Dst::Tile(to), a, b }
    }

    fn store(arg: u16, tile: u16) -> Inst {
        Inst::Store { arg, a: Src::Tile(tile) }
    }

    #[test]
    fn an_operand_that_is_read_after_the_store_is_not_updated_in_place() {
        let (w, g) = (Src::Arg(0), Src::Arg(1));
        let before: [Inst; 4] = [add(0, w, g), add(1, w, Src::Tile(0)), store(2, 0), store(3, 1)];
        let after: [Inst; 4] = [add(0, w, g), store(2, 0), add(1, w, g), store(3, 1)];
        assert!(reads_before_storing(&program(Dtype::F32, true, &[&before]), 0, 2));
        assert!(reads_before_storing(&program(Dtype::F32, true, &[&before]), 0, 3));
        assert!(!reads_before_storing(&program(Dtype::F32, true, &[&after]), 0, 2));
        assert!(reads_before_storing(&program(Dtype::F32, true, &[&after]), 0, 3));
        assert!(!reads_before_storing(&program(Dtype::F32, true, &[&after]), 1, 2));
        let stored = [add(0, g, g), store(2, 0), Inst::Store { arg: 3, a: w }];
        assert!(!reads_before_storing(&program(Dtype::F32, true, &[&stored]), 0, 2), "stored as it lies");
        assert!(reads_before_storing(&program(Dtype::F32, true, &[&stored]), 0, 3));
    }

    #[test]
    fn what_was_loaded_before_the_store_is_a_copy() {
        let load = |to: u16, arg: u16| Inst::Load { dst: Dst::Tile(to), arg };
        let copied = [load(0, 0), add(1, Src::Tile(0), Src::Tile(0)), store(2, 1), store(3, 0)];
        let again = [load(0, 0), store(2, 0), load(1, 0), store(3, 1)];
        assert!(reads_before_storing(&program(Dtype::Bf16, true, &[&copied]), 0, 2));
        assert!(!reads_before_storing(&program(Dtype::Bf16, true, &[&again]), 0, 2));
    }

    #[test]
    fn only_one_sweep_over_elements_updates_in_place() {
        let strip: [Inst; 2] = [add(0, Src::Arg(0), Src::Arg(1)), store(2, 0)];
        assert!(reads_before_storing(&program(Dtype::F32, true, &[&strip]), 0, 2));
        assert!(!reads_before_storing(&program(Dtype::F32, false, &[&strip]), 0, 2), "rows");
        assert!(!reads_before_storing(&program(Dtype::F32, true, &[&strip, &[]]), 0, 2), "two passes");
        assert!(!reads_before_storing(&program(Dtype::F32, true, &[&strip]), 0, 3), "never stored");
        assert!(!reads_before_storing(&program(Dtype::F32, true, &[]), 0, 2), "nothing at all");
    }
}
