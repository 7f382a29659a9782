//! Invariants of a well-formed program. The loops rely on them and do not check again.

use deuteron_graph::Dtype;

use super::scratch::{destination, sources};
use crate::cpu::program::{Access, Dst, Inst, Src, TileProgram};

/// The position of an instruction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Row,
    Strip,
}

/// Panics unless every operand is in range and every instruction is in a valid position.
pub(super) fn check(program: &TileProgram) {
    assert!(!program.flat || program.kept == 0, "a flat program keeps no rows, got {}", program.kept);
    for (arg, spec) in program.args.iter().enumerate() {
        if let Access::GatheredRow { index } = spec.access {
            let by = program.args.get(usize::from(index));
            let fits = by.is_some_and(|by| by.access == Access::PerRow && by.dtype == Dtype::I32);
            assert!(fits, "argument {arg}: expected one i32 a row at argument {index}, got {by:?}");
        }
    }
    for pass in &program.passes {
        for (stage, work) in [(Stage::Row, &pass.row), (Stage::Strip, &pass.strip)] {
            for &inst in work {
                check_sources(program, inst, stage);
                check_destination(program, inst);
                check_stage(program, inst, stage);
            }
        }
    }
}

#[track_caller]
fn in_range(inst: Inst, number: u16, count: usize) {
    assert!(usize::from(number) < count, "expected a place below {count}, got {number} in {inst:?}");
}

fn check_sources(program: &TileProgram, inst: Inst, stage: Stage) {
    for source in sources(inst).into_iter().flatten() {
        match source {
            Src::Tile(tile) => in_range(inst, tile, usize::from(program.tiles)),
            Src::Kept(kept) => in_range(inst, kept, usize::from(program.kept)),
            Src::Scalar(scalar) => in_range(inst, scalar, usize::from(program.scalars)),
            Src::Const(_) | Src::ConstInt(_) => {}
            Src::Arg(arg) => {
                in_range(inst, arg, program.args.len());
                let spec = program.args[usize::from(arg)];
                let rows = matches!(spec.access, Access::Row | Access::GatheredRow { .. });
                let words = matches!(spec.dtype, Dtype::F32 | Dtype::I32);
                assert!(rows && words, "expected rows of 32-bit lanes in place, got {spec:?} in {inst:?}");
            }
        }
        let scalar = matches!(source, Src::Scalar(_) | Src::Const(_) | Src::ConstInt(_));
        let must_be_scalar = stage == Stage::Row || matches!(inst, Inst::Keep { .. });
        assert!(!must_be_scalar || scalar, "expected scalar operands in {inst:?}");
    }
}

fn check_destination(program: &TileProgram, inst: Inst) {
    match destination(inst) {
        Some(Dst::Tile(tile)) => in_range(inst, tile, usize::from(program.tiles)),
        Some(Dst::Kept(kept)) => in_range(inst, kept, usize::from(program.kept)),
        Some(Dst::Scalar(scalar)) => in_range(inst, scalar, usize::from(program.scalars)),
        None => {}
    }
}

/// Scalars are row work, lanes are strip work; one element per row is loaded and stored in row work.
fn check_stage(program: &TileProgram, inst: Inst, stage: Stage) {
    let row = stage == Stage::Row;
    if let Some(dst) = destination(inst) {
        assert_eq!(matches!(dst, Dst::Scalar(_)), row, "expected scalars in row work and only there, got {inst:?}");
    }
    match inst {
        Inst::Load { arg, .. } | Inst::Store { arg, .. } => {
            in_range(inst, arg, program.args.len());
            let spec = program.args[usize::from(arg)];
            assert_eq!(row, spec.access == Access::PerRow, "row work moves one element per row, got {inst:?}");
            assert!(spec.access != Access::Columns, "only a partial writes columns, got {inst:?}");
            assert!(spec.written || !matches!(inst, Inst::Store { .. }), "expected a written argument in {inst:?}");
        }
        Inst::ColumnAdd { partial, .. } => {
            in_range(inst, partial, program.partials.len());
            let width = program.partials[usize::from(partial)].width;
            assert_eq!(width, if row { 1 } else { program.cols }, "width of the partial in {inst:?}");
            assert!(!program.flat || row, "a flat program has no columns to add, in {inst:?}");
        }
        Inst::Reduce { into, .. } => {
            in_range(inst, into, usize::from(program.scalars));
            assert!(!row && !program.flat, "expected a reduction in the strips of rows, got {inst:?}");
        }
        Inst::RowIndex { axis, .. } => {
            in_range(inst, axis, usize::from(program.axes));
            assert!(row, "expected row work, got {inst:?}");
        }
        Inst::ColumnIndex { .. } | Inst::Keep { .. } => assert!(!row, "expected strip work, got {inst:?}"),
        Inst::Unary { .. } | Inst::Binary { .. } | Inst::MulAdd { .. } | Inst::MulMulAdd { .. } => {}
        Inst::SubMulMulAdd { .. } | Inst::Integer { .. } => {}
        Inst::ExpSub { .. } | Inst::Compare { .. } | Inst::Select { .. } => {}
    }
}
