//! The same operations on several vectors, in turn.
//!
//! A polynomial is a chain: each operation waits four cycles for the one before. A core looks for independent operations among the next hundred
//! or so, which is three vectors of a GELU. With the operations of eight vectors in turn it finds eight at once.

use super::values::{Op, Value, rename};

/// Operations on several vectors.
#[derive(Debug, Default)]
pub struct Woven {
    pub ops: Vec<Op>,
    /// For each operation the number of its vector.
    pub places: Vec<u8>,
}

/// Operations after a comparison within which its last reader must come, so that its truth value does not outlive the turn.
const NEAR: usize = 6;

/// `ops` for `count` vectors. What only constants and row scalars determine is shared.
pub fn weave(ops: &[Op], count: usize) -> Woven {
    let mut woven = Woven::default();
    let mut is_shared = vec![false; ops.len()];
    for (at, op) in ops.iter().enumerate() {
        let is_computed = matches!(op, Op::Two(..) | Op::One(..));
        is_shared[at] = op.is_leaf() || (is_computed && op.operands().all(|operand| is_shared[operand.index()]));
    }
    let mut renamed = vec![vec![Value(0); ops.len()]; count];
    let mut start = 0;
    while start < ops.len() {
        let end = end_of_turn(ops, start);
        for place in 0..count {
            for at in start..end {
                if place > 0 && is_shared[at] {
                    renamed[place][at] = renamed[0][at];
                    continue;
                }
                renamed[place][at] = Value(woven.ops.len() as u32);
                woven.ops.push(rename(ops[at], &renamed[place]));
                woven.places.push(place as u8);
            }
        }
        start = end;
    }
    woven
}

/// The end of the operations from `start` on that stay together: one, a step of a reduction, whose lanes two vectors may share, or a comparison
/// with what reads it, since there are few mask registers.
fn end_of_turn(ops: &[Op], start: usize) -> usize {
    let mut end = start + 1;
    let mut at = start;
    while at < end {
        let value = Value(at as u32);
        let last = match ops[at] {
            Op::Gathered(reduction) => {
                ops.iter().skip(at).position(|op| matches!(*op, Op::Gather(into, _) if into == reduction))
            }
            op if op.is_question() => {
                let last = ops.iter().rposition(|op| op.operands().any(|operand| operand == value));
                last.map(|last| last - at).filter(|&distance| distance <= NEAR)
            }
            _ => None,
        };
        end = end.max(last.map_or(0, |last| at + last + 1));
        at += 1;
    }
    end
}
