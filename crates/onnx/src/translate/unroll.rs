//! `Loop` and `Scan`: bodies written out step by step, where the number of steps is known.

use deuteron_graph::Shape;

use super::call::{Results, axis_of};
use super::scope::Scope;
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::error::OnnxError;
use crate::ir::{Id, Kind};
use crate::limits::MAX_STEPS;
use crate::schema::{Dim, GraphProto, ValueInfo};
use crate::weight::shape_of;

/// One operand of a `Scan` that is read slice by slice, or one result that is written so.
#[derive(Clone, Copy)]
struct Track {
    axis: i64,
    is_backward: bool,
}

impl Track {
    /// Which slice a step reads or writes.
    fn place(self, step: usize, steps: usize) -> usize {
        if self.is_backward { steps - 1 - step } else { step }
    }
}

impl<'a> Translator<'a, '_> {
    pub(super) fn unroll(&mut self, call: &Call<'a, '_>) -> Results {
        let (depth, opset) = (self.scopes.len(), self.opset);
        let results = self.unrolled(call);
        self.scopes.truncate(depth);
        self.opset = opset;
        match results {
            // It may be analysed by the shapes that the file states of its own results.
            Err(Problem::Failed(OnnxError::UnknownShape { node, op, why, .. })) => {
                Err(Problem::Opaque(format!("its body cannot be unrolled ({op} at `{node}`: {why})")))
            }
            results => results,
        }
    }

    fn unrolled(&mut self, call: &Call<'a, '_>) -> Results {
        let Some(reader) = call.attribute("body").and_then(|attribute| attribute.graph) else {
            return Err(Problem::Refused("a body expected, got none".to_string()));
        };
        self.descend()?;
        self.spend(reader.len() / 64)?;
        let body = GraphProto::read(reader)?;
        // What the body's tensors hold is the same in all steps.
        self.scopes.push(Scope::default());
        self.note_infos(&body);
        self.initializers(&body)?;
        match call.node.op {
            "Loop" => self.iterate(call, &body),
            _ if call.opset < 9 => self.scan_batch(call, &body),
            _ => self.scan(call, &body),
        }
    }

    /// The results of a body with its inputs bound in order.
    pub(super) fn step(
        &mut self,
        call: &Call<'a, '_>,
        body: &GraphProto<'a>,
        inputs: &[Id],
    ) -> Result<Vec<Id>, Problem> {
        self.spend(body.inputs.len() + body.outputs.len())?;
        let values = body.inputs.iter().map(|input| input.name).zip(inputs.iter().copied()).collect();
        self.scopes.push(Scope { values, ..Scope::default() });
        self.run(&body.nodes)?;
        let mut results = Vec::with_capacity(body.outputs.len());
        for output in &body.outputs {
            let undefined = || OnnxError::Undefined { reader: call.node.label(), value: output.name.to_string() };
            results.push(self.lookup(output.name).ok_or_else(undefined)?);
        }
        self.scopes.pop();
        Ok(results)
    }

    fn check_ports(body: &GraphProto, inputs: usize, least_outputs: usize) -> Result<(), Problem> {
        if body.inputs.len() == inputs && body.outputs.len() >= least_outputs {
            return Ok(());
        }
        let (got, given) = (body.inputs.len(), body.outputs.len());
        Err(Problem::Refused(format!(
            "a body of {inputs} inputs and at least {least_outputs} outputs expected, got {got} and {given}"
        )))
    }

    /// A loop until its count is reached or its condition fails, both known.
    fn iterate(&mut self, call: &Call<'a, '_>, body: &GraphProto<'a>) -> Results {
        let (count, condition) = (call.optional(0), call.optional(1));
        let mut carried = Vec::new();
        for position in 2..call.operands() {
            carried.push(call.input(position)?);
        }
        Self::check_ports(body, carried.len() + 2, carried.len() + 1)?;
        let unknown = |what: &str| Problem::Opaque(format!("its {what} depends on the input"));
        let most = match count {
            Some(count) => Some(self.scalar(count).ok_or_else(|| unknown("number of steps"))?),
            None => None,
        };
        let holds = |this: &mut Self, condition: Id| -> Result<bool, Problem> {
            Ok(this.scalar(condition).ok_or_else(|| unknown("condition"))? != 0.0)
        };
        let mut continues = condition.map_or(Ok(true), |condition| holds(self, condition))?;
        let tracks = &body.outputs[carried.len() + 1..];
        let mut rows: Vec<Vec<Id>> = vec![Vec::new(); tracks.len()];
        let mut steps = 0;
        while continues && most.is_none_or(|most| (steps as f64) < most) {
            // Without a condition the count alone ends it, so one that is too large is refused before the work.
            let known = most.filter(|_| condition.is_none()).unwrap_or(0.0);
            if steps >= MAX_STEPS || known > MAX_STEPS as f64 {
                return Err(Self::too_long(known.max(steps as f64 + 1.0)));
            }
            let number = self.ir.known_scalar(steps as f64, Element::I64);
            let truth = self.ir.known_scalar(1.0, Element::Bool);
            let inputs = [&[number, truth], &carried[..]].concat();
            let results = self.step(call, body, &inputs)?;
            // Where no condition is given, that of the body is not looked at.
            continues = condition.is_none() || holds(self, results[0])?;
            carried = results[1..=carried.len()].to_vec();
            rows.iter_mut().zip(&results[carried.len() + 1..]).for_each(|(rows, &row)| rows.push(row));
            steps += 1;
        }
        let track = Track { axis: 0, is_backward: false };
        for (rows, info) in rows.iter().zip(tracks) {
            carried.push(self.stacked(rows, track, info)?);
        }
        Ok(carried)
    }

    fn too_long(steps: f64) -> Problem {
        Problem::Opaque(format!("it takes at least {steps} steps, and at most {MAX_STEPS} are unrolled"))
    }

    /// States that pass from step to step, and operands that are read slice by slice.
    fn scan(&mut self, call: &Call<'a, '_>, body: &GraphProto<'a>) -> Results {
        let operands = self.scan_operands(call, 0)?;
        let scanned = Self::scanned(call, operands.len())?;
        let states = operands.len() - scanned;
        let reads = Self::tracks(call, ["scan_input_axes", "scan_input_directions"], scanned)?;
        Self::check_ports(body, operands.len(), states)?;
        let names = ["scan_output_axes", "scan_output_directions"];
        let writes = Self::tracks(call, names, body.outputs.len() - states)?;
        self.scan_of(call, body, &operands, &reads, &writes)
    }

    /// As up to opset 8: every operand has a first axis of batches, each of which is scanned on its own.
    fn scan_batch(&mut self, call: &Call<'a, '_>, body: &GraphProto<'a>) -> Results {
        if call.optional(0).is_some() {
            return Err(Problem::Opaque("its sequences have different lengths".to_string()));
        }
        let operands = self.scan_operands(call, 1)?;
        let scanned = Self::scanned(call, operands.len())?;
        let states = operands.len() - scanned;
        Self::check_ports(body, operands.len(), states)?;
        let reads = Self::tracks(call, ["", "directions"], scanned)?;
        let writes = vec![Track { axis: 0, is_backward: false }; body.outputs.len() - states];
        let batches = self.ir.shape(operands[0]).first().copied().unwrap_or(0);
        let fits = batches > 0 && operands.iter().all(|&id| self.ir.shape(id).first() == Some(&batches));
        if !fits {
            let got = self.ir.shapes(&operands);
            return Err(Problem::Refused(format!("operands with the same first axis expected, got {got}")));
        }
        let mut rows: Vec<Vec<Id>> = vec![Vec::new(); body.outputs.len()];
        for batch in 0..batches {
            let mut own = Vec::with_capacity(operands.len());
            for &operand in &operands {
                own.push(self.slice_of(operand, 0, batch)?);
            }
            let results = self.scan_of(call, body, &own, &reads, &writes)?;
            rows.iter_mut().zip(results).for_each(|(rows, row)| rows.push(row));
        }
        let track = Track { axis: 0, is_backward: false };
        rows.iter().zip(&body.outputs).map(|(rows, info)| self.stacked(rows, track, info)).collect()
    }

    fn scan_operands(&self, call: &Call, from: usize) -> Result<Vec<Id>, Problem> {
        (from..call.operands()).map(|position| call.input(position)).collect()
    }

    fn scanned(call: &Call, operands: usize) -> Result<usize, Problem> {
        let count = call.int("num_scan_inputs", 0);
        let fits = usize::try_from(count).ok().filter(|count| (1..=operands).contains(count));
        fits.ok_or_else(|| Problem::Refused(format!("num_scan_inputs from 1 to {operands} expected, got {count}")))
    }

    /// Axis and direction of each scanned operand or result.
    fn tracks(call: &Call, names: [&str; 2], count: usize) -> Result<Vec<Track>, Problem> {
        let [axes, directions] = names.map(|name| call.ints(name).map_or_else(|| vec![0; count], <[i64]>::to_vec));
        let fits =
            axes.len() == count && directions.len() == count && directions.iter().all(|way| (0..=1).contains(way));
        if !fits {
            return Err(Problem::Refused(format!(
                "{count} axes and directions of 0 or 1 expected, got {axes:?} and {directions:?}"
            )));
        }
        Ok(axes.into_iter().zip(directions).map(|(axis, way)| Track { axis, is_backward: way == 1 }).collect())
    }

    fn scan_of(
        &mut self,
        call: &Call<'a, '_>,
        body: &GraphProto<'a>,
        operands: &[Id],
        reads: &[Track],
        writes: &[Track],
    ) -> Results {
        let (states, scanned) = operands.split_at(operands.len() - reads.len());
        let mut sizes = Vec::with_capacity(scanned.len());
        for (&operand, read) in scanned.iter().zip(reads) {
            let shape = self.ir.shape(operand);
            let axis = axis_of(read.axis, shape.rank())?;
            sizes.push((axis, shape[axis]));
        }
        let steps = sizes.first().map_or(0, |&(_, size)| size);
        if sizes.iter().any(|&(_, size)| size != steps) {
            let got = self.ir.shapes(scanned);
            return Err(Problem::Refused(format!("scanned axes of one size expected, got {got}")));
        }
        if steps > MAX_STEPS {
            return Err(Self::too_long(steps as f64));
        }
        let mut carried = states.to_vec();
        let mut rows: Vec<Vec<Id>> = vec![Vec::new(); writes.len()];
        for step in 0..steps {
            let mut inputs = carried.clone();
            for ((&operand, read), &(axis, _)) in scanned.iter().zip(reads).zip(&sizes) {
                inputs.push(self.slice_of(operand, axis, read.place(step, steps))?);
            }
            let results = self.step(call, body, &inputs)?;
            let (states, written) = results.split_at(carried.len());
            rows.iter_mut().zip(written).for_each(|(rows, &row)| rows.push(row));
            carried = states.to_vec();
        }
        for ((rows, &write), info) in rows.iter().zip(writes).zip(&body.outputs[states.len()..]) {
            carried.push(self.stacked(rows, write, info)?);
        }
        Ok(carried)
    }

    /// One index of an axis, without that axis.
    fn slice_of(&mut self, x: Id, axis: usize, start: usize) -> Result<Id, Problem> {
        let slice = self.ir.push(Kind::Slice { axis, start, length: 1 }, &[x])?;
        let mut dims = self.ir.shape(slice).to_vec();
        dims.remove(axis);
        Ok(self.ir.reshape(slice, dims)?)
    }

    /// What the steps gave, joined along a new axis.
    fn stacked(&mut self, rows: &[Id], track: Track, info: &ValueInfo) -> Result<Id, Problem> {
        let Some(&first) = rows.first() else { return self.nothing(track, info) };
        let axis = axis_of(track.axis, self.ir.shape(first).rank() + 1)?;
        let mut parts = Vec::with_capacity(rows.len());
        for &row in rows {
            let mut dims = self.ir.shape(row).to_vec();
            dims.insert(axis.min(dims.len()), 1);
            parts.push(self.ir.reshape(row, dims)?);
        }
        if track.is_backward {
            parts.reverse();
        }
        Ok(self.ir.push(Kind::Concat { axis }, &parts)?)
    }

    /// What no step gave: its shape is known only if the body states it.
    fn nothing(&mut self, track: Track, info: &ValueInfo) -> Result<Id, Problem> {
        let unknown =
            || Problem::Opaque("it runs zero steps, and its body does not state the shapes of its results".to_string());
        let element = info.element.and_then(Element::from_number).ok_or_else(unknown)?;
        let size = |dim: &Dim| if let Dim::Size(size) = dim { Some(*size) } else { None };
        let mut sizes: Vec<i64> =
            info.dims.as_ref().and_then(|dims| dims.iter().map(size).collect()).ok_or_else(unknown)?;
        let axis = axis_of(track.axis, sizes.len() + 1)?;
        sizes.insert(axis, 0);
        let shape: Shape = shape_of(info.name, &sizes)?;
        Ok(self.ir.known(Constant::dense(shape, Vec::new(), element == Element::Bool), element))
    }
}
