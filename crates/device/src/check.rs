//! What every device checks when it loads a job, so that running needs no checks: each argument stays inside its buffer,
//! inputs are not written, and what is written overlaps nothing else.

use deuteron_codegen::cpu::program::Program;
use deuteron_codegen::cpu::simd::MAX_LEADING;
use deuteron_codegen::{
    Access, ArgSpec, AttentionKernel, AttentionOperand, AttentionResult, AttentionShape, BackwardOperand, Body,
    Geometry, MatmulKernel, MatmulShape, Operand, Product, Role, RowArguments, Source, Stage,
};
use deuteron_graph::Dtype;

use crate::error::DeviceError;
use crate::extent::{self, extent};
use crate::job::{Job, Place, Step};
use crate::memory::Lending;
use crate::{Inputs, States};

/// What the checks need to know of a kernel, whatever it is made of.
pub(crate) enum Form<'a> {
    Row(RowForm<'a>),
    Matmul(MatmulKernel),
    Product(ProductForm<'a>),
    Attention(AttentionKernel),
    /// attention, and what follows it; which of its arguments is the result of attention
    AttentionRow(AttentionKernel, RowForm<'a>, usize),
    /// attention, and the product whose first operand is its result
    AttentionBlock(AttentionKernel, ProductForm<'a>),
    AttentionBackward(AttentionKernel),
    ScatterAdd(Dtype),
    /// bytes of an element
    Append(usize),
    /// bytes of an element
    Copy(usize),
}

pub(crate) struct RowForm<'a> {
    pub cols: usize,
    pub flat: bool,
    pub args: &'a [ArgSpec],
    pub axes: usize,
    /// (argument, width) of its sums over rows
    pub partials: Vec<(usize, usize)>,
}

impl<'a> From<&'a Program> for RowForm<'a> {
    fn from(program: &'a Program) -> Self {
        let partials = program.partials.iter().map(|partial| (usize::from(partial.arg), partial.width));
        RowForm {
            cols: program.cols,
            flat: program.flat,
            args: &program.args,
            axes: usize::from(program.axes),
            partials: partials.collect(),
        }
    }
}

impl<'a> From<&'a Body> for RowForm<'a> {
    fn from(body: &'a Body) -> Self {
        let partials = body.stages.iter().filter_map(|stage| match *stage {
            Stage::ColumnSum { arg, width, .. } => Some((usize::from(arg), width)),
            Stage::RowReduce { .. } | Stage::Store { .. } => None,
        });
        RowForm {
            cols: body.cols,
            flat: body.flat,
            args: &body.args,
            axes: usize::from(body.axes),
            partials: partials.collect(),
        }
    }
}

/// A product of our own.
pub(crate) struct ProductForm<'a> {
    pub left: Dtype,
    pub right: Dtype,
    pub result: Dtype,
    pub routed: bool,
    pub roles: Vec<Role>,
    /// What makes the first operand, and which of its arguments that is.
    pub head: Option<(RowForm<'a>, usize)>,
    /// What follows, and which of its arguments are the sums.
    pub tail: Option<(RowForm<'a>, &'a [usize])>,
}

impl<'a, T: RowArguments> From<&'a Product<T>> for ProductForm<'a>
where
    RowForm<'a>: From<&'a T>,
{
    fn from(product: &'a Product<T>) -> Self {
        ProductForm {
            left: product.left,
            right: product.right,
            result: product.result,
            routed: product.routed,
            roles: product.roles(),
            head: product.head.as_ref().map(|head| ((&head.body).into(), head.made)),
            tail: product.tail.as_ref().map(|tail| ((&tail.body).into(), tail.sums.as_slice())),
        }
    }
}

impl ProductForm<'_> {
    /// Dtype of an argument, and whether it is written.
    fn argument(&self, role: Role) -> Option<(Dtype, bool)> {
        let of = |side: Option<&RowForm>, arg: usize| side.map(|side| (side.args[arg].dtype, side.args[arg].written));
        match role {
            Role::Left => Some((self.left, false)),
            Role::Right(_) => Some((self.right, false)),
            Role::Indices => Some((Dtype::I32, false)),
            Role::Result => Some((self.result, true)),
            Role::Head(arg) => of(self.head.as_ref().map(|(form, _)| form), arg),
            Role::Tail(arg) => of(self.tail.as_ref().map(|(form, _)| form), arg),
        }
    }
}

/// Checks every step; gives the bytes that each input must have. `form` answers none for a kernel of another device.
pub(crate) fn check(job: &Job, form: impl Fn(&Source) -> Option<Form<'_>>) -> Result<Vec<usize>, DeviceError> {
    let mut input_bytes = vec![0; job.inputs];
    for (index, step) in job.steps.iter().enumerate() {
        let form = form(&step.kernel.source).ok_or(DeviceError::ForeignKernel { step: index })?;
        check_step(index, step, &form, job, &mut input_bytes)?;
    }
    Ok(input_bytes)
}

/// Checks that every input has the bytes it must have.
pub(crate) fn check_inputs(input_bytes: &[usize], input: Inputs<'_, '_>) -> Result<(), DeviceError> {
    for (index, &expected) in input_bytes.iter().enumerate() {
        let got = input(index).len();
        if got < expected {
            return Err(DeviceError::InputSize { input: index, expected, got });
        }
    }
    Ok(())
}

/// What outputs of others must start at a multiple of: the widest vector that kernels store.
pub(crate) const OUTPUT_ALIGNMENT: usize = 16;

/// Checks that what is lent has the numbers and sizes of a job, and that outputs stand where vectors may.
pub(crate) fn check_lending(
    lending: &Lending<'_>,
    inputs: &[usize],
    states: &[usize],
    outputs: &[usize],
) -> Result<(), DeviceError> {
    let Lending { inputs: given, states: kept, outputs: results, .. } = lending;
    if given.len() != inputs.len() {
        return Err(DeviceError::InputCount { expected: inputs.len(), got: given.len() });
    }
    if kept.len() != states.len() {
        return Err(DeviceError::StateCount { expected: states.len(), got: kept.len() });
    }
    if results.len() != outputs.len() {
        return Err(DeviceError::OutputCount { expected: outputs.len(), got: results.len() });
    }
    for (input, (span, &expected)) in given.iter().zip(inputs).enumerate() {
        if span.bytes < expected {
            return Err(DeviceError::InputSize { input, expected, got: span.bytes });
        }
    }
    for (state, (span, &expected)) in kept.iter().zip(states).enumerate() {
        if span.bytes < expected {
            return Err(DeviceError::StateSize { state, expected, got: span.bytes });
        }
    }
    for (output, (span, &expected)) in results.iter().zip(outputs).enumerate() {
        let aligned = expected == 0 || span.address.is_multiple_of(OUTPUT_ALIGNMENT as u64);
        if span.bytes < expected || !aligned {
            let (alignment, got, address) = (OUTPUT_ALIGNMENT, span.bytes, span.address);
            return Err(DeviceError::OutputPlace { output, expected, alignment, got, address });
        }
    }
    Ok(())
}

/// Checks that there are as many states as the job has.
pub(crate) fn check_states(state_bytes: &[usize], states: &dyn States) -> Result<(), DeviceError> {
    let (expected, got) = (state_bytes.len(), states.count());
    if expected == got { Ok(()) } else { Err(DeviceError::StateCount { expected, got }) }
}

fn check_step(index: usize, step: &Step, form: &Form, job: &Job, input_bytes: &mut [usize]) -> Result<(), DeviceError> {
    let arguments = match form {
        Form::Row(kernel) => kernel.args.len(),
        Form::Matmul(kernel) => kernel.operands().len(),
        Form::Product(product) => product.roles.len(),
        Form::Attention(kernel) => kernel.operands().len(),
        Form::AttentionBackward(kernel) => kernel.backward_operands().count(),
        // The result of attention less on both sides.
        Form::AttentionRow(kernel, rows, _) => kernel.operands().len() + rows.args.len() - 2,
        Form::AttentionBlock(kernel, product) => kernel.operands().len() + product.roles.len() - 2,
        Form::ScatterAdd(_) => 3,
        Form::Append(_) => 4,
        // A destination at least.
        Form::Copy(_) => step.launch.args.len().max(1),
    };
    if step.places.len() != arguments || step.launch.args.len() != arguments {
        return Err(mismatch(index, 0, format!("expected {arguments} arguments, got {}", step.places.len())));
    }
    check_launch(step, form).map_err(|(argument, problem)| mismatch(index, argument, problem.into()))?;
    for (position, place) in step.places.iter().enumerate() {
        let needed = extent(form, &step.launch, position);
        let available = match *place {
            Place::Input(input) if input < job.inputs && !step.launch.args[position].written => {
                input_bytes[input] = input_bytes[input].max(needed);
                needed
            }
            Place::Output(output) => job.outputs.get(output).copied().unwrap_or(0),
            Place::Arena { offset, bytes } if offset.checked_add(bytes).is_some_and(|end| end <= job.arena) => bytes,
            // A state is written where a cache is kept in place, and nowhere else.
            Place::State(state) if !step.launch.args[position].written || in_place(step) => {
                job.states.get(state).copied().unwrap_or(0)
            }
            Place::Input(_) | Place::State(_) | Place::Arena { .. } => 0,
        };
        if needed > available {
            return Err(mismatch(index, position, format!("it touches {needed} bytes, its buffer has {available}")));
        }
        let overlapping = step.places.iter().enumerate().find(|&(other, place_of_other)| {
            let written = step.launch.args[position].written || step.launch.args[other].written;
            let kept = in_place(step) && position.min(other) == 0 && position.max(other) == 3;
            other != position && written && !kept && overlap(place, place_of_other)
        });
        if let Some((other, _)) = overlapping {
            return Err(mismatch(index, position, format!("it overlaps argument {other}, and one is written")));
        }
    }
    Ok(())
}

/// Whether the step writes into the cache that it reads.
fn in_place(step: &Step) -> bool {
    matches!(&step.launch.geometry, Geometry::Append(shape) if shape.in_place)
}

/// The launch says of every argument what the kernel says: all later checks read the one and the loops use the other.
fn check_launch(step: &Step, form: &Form) -> Result<(), (usize, &'static str)> {
    let last = step.launch.args.len().saturating_sub(1);
    for (position, arg) in step.launch.args.iter().enumerate() {
        let (dtype_bytes, written) = match form {
            Form::Row(kernel) => (kernel.args[position].dtype.bytes(), kernel.args[position].written),
            Form::ScatterAdd(_) if position == 0 => (4, false),
            Form::Matmul(kernel) => (kernel.operand_dtype(kernel.operands()[position]).bytes(), position == last),
            Form::Product(product) => match product.argument(product.roles[position]) {
                Some((dtype, written)) => (dtype.bytes(), written),
                None => return Err((position, "its product has no such argument")),
            },
            Form::Attention(kernel) => (kernel.operand_dtype(kernel.operands()[position]).bytes(), position == last),
            Form::AttentionBackward(kernel) => match kernel.backward_operands().nth(position) {
                Some(BackwardOperand::Operand(operand)) => (kernel.operand_dtype(operand).bytes(), false),
                Some(BackwardOperand::Gradient(_)) => (kernel.dtype.bytes(), true),
                Some(BackwardOperand::ResultGradient) | None => (kernel.dtype.bytes(), false),
            },
            Form::AttentionBlock(kernel, _) if position + 1 < kernel.operands().len() => {
                (kernel.operand_dtype(kernel.operands()[position]).bytes(), false)
            }
            Form::AttentionBlock(kernel, product) => {
                match product.argument(product.roles[position + 2 - kernel.operands().len()]) {
                    Some((dtype, written)) => (dtype.bytes(), written),
                    None => return Err((position, "its product has no such argument")),
                }
            }
            Form::AttentionRow(kernel, ..) if position + 1 < kernel.operands().len() => {
                (kernel.operand_dtype(kernel.operands()[position]).bytes(), false)
            }
            Form::AttentionRow(kernel, rows, sums) => {
                let spec = rows.args[tail_argument(position, kernel.operands().len() - 1, *sums)];
                (spec.dtype.bytes(), spec.written)
            }
            Form::ScatterAdd(dtype) => (dtype.bytes(), position == last),
            Form::Append(_) if position == 2 => (4, false),
            Form::Append(bytes) => (*bytes, position == last),
            Form::Copy(bytes) => (*bytes, position == last),
        };
        if arg.dtype.bytes() != dtype_bytes || arg.written != written {
            return Err((position, "its dtype and direction are not those of the kernel"));
        }
    }
    match (form, &step.launch.geometry) {
        (Form::Row(kernel), Geometry::Row { cols, axes, .. }) => check_row(step, kernel, *cols, axes),
        (Form::Matmul(_), Geometry::Matmul(_)) => Ok(()),
        (Form::Product(product), Geometry::Product { shape, head_axes, axes }) => {
            check_product(product, shape, [head_axes, axes])?;
            check_routed(product, shape, step)?;
            let deep = step.launch.args.iter().position(|arg| arg.leading.len() > MAX_LEADING);
            deep.map_or(Ok(()), |position| Err((position, "its leading axes are too many")))
        }
        (Form::Attention(kernel), Geometry::Attention(shape))
        | (Form::AttentionBackward(kernel), Geometry::AttentionBackward(shape)) => {
            let shared = matches!(form, Form::AttentionBackward(_)) && kernel.group != 1;
            let mixed = matches!(form, Form::AttentionBackward(_)) && kernel.kv != kernel.dtype;
            let stores = kernel.result == AttentionResult::Probabilities;
            match kernel.sized(shape, 0).refusal() {
                None if stores && matches!(form, Form::AttentionBackward(_)) => {
                    Err((0, "probabilities have no values"))
                }
                None if stores && kernel.dropout.is_some() => Err((0, "probabilities that are stored are not dropped")),
                None if mixed => Err((0, "a gradient's keys and values are stored as its queries")),
                None if shared => Err((0, "gradients of keys are those of one head each")),
                None => Ok(()),
                Some(problem) => Err((0, problem)),
            }
        }
        (Form::AttentionRow(kernel, rows, sums), Geometry::AttentionRows { shape, axes }) => {
            if let Some(problem) = kernel.sized(shape, 0).refusal() {
                return Err((0, problem));
            }
            if kernel.result == AttentionResult::Probabilities {
                return Err((0, "probabilities have no values"));
            }
            let simple = |spec: &ArgSpec| matches!(spec.access, Access::Row | Access::PerRow);
            let known = rows.args.get(*sums).is_some_and(|spec| spec.dtype == kernel.dtype && !spec.written);
            if !known || rows.flat || !rows.partials.is_empty() || !rows.args.iter().all(simple) {
                return Err((0, "what follows attention is not row work"));
            }
            check_axes(rows, rows.cols, axes)?;
            if kernel.joined(shape, rows.cols).is_none() {
                return Err((0, "its heads do not lie in rows of what follows"));
            }
            let first = kernel.operands().len() - 1;
            let deep = step.launch.args[first..].iter().position(|arg| arg.leading.len() > MAX_LEADING);
            deep.map_or(Ok(()), |position| Err((position + first, "its leading axes are too many")))
        }
        (Form::AttentionBlock(kernel, product), Geometry::AttentionBlock { attention, product: shape, axes }) => {
            if let Some(problem) = kernel.sized(attention, 0).refusal() {
                return Err((0, problem));
            }
            check_projection(kernel, product, attention, shape)?;
            check_product(product, shape, [&[], axes])?;
            let first = kernel.operands().len() - 1;
            let deep = step.launch.args[first..].iter().position(|arg| arg.leading.len() > MAX_LEADING);
            deep.map_or(Ok(()), |position| Err((position + first, "its leading axes are too many")))
        }
        (Form::ScatterAdd(_), Geometry::ScatterAdd { count, rows, .. }) => {
            // Positions and rows share one 64-bit key.
            let fits = |number: usize| number <= u32::MAX as usize;
            if fits(*count) && fits(*rows) { Ok(()) } else { Err((0, "it has more than 2^32 positions or rows")) }
        }
        (Form::Append(_), Geometry::Append(shape)) => {
            let same = step.places[0] == step.places[3] && step.launch.args[0].offset == step.launch.args[3].offset;
            let state = matches!(step.places[3], Place::State(_));
            match () {
                () if shape.batch >= shape.leading.len() || shape.rows > shape.capacity => {
                    Err((1, "its rows are not those of the cache"))
                }
                () if shape.in_place && !(same && state) => Err((3, "it is not the cache that is kept in place")),
                () => Ok(()),
            }
        }
        (Form::Copy(_), Geometry::Copy(pieces)) => {
            // The last argument is the destination.
            let known = pieces.iter().all(|piece| piece.source < last);
            if known { Ok(()) } else { Err((last, "its pieces come from arguments that are no sources")) }
        }
        _ => Err((0, "its sizes are those of another kind of kernel")),
    }
}

/// The first operand of one product is what attention gives, and nothing beyond it.
fn check_projection(
    kernel: &AttentionKernel,
    product: &ProductForm,
    attention: &AttentionShape,
    shape: &MatmulShape,
) -> Result<(), (usize, &'static str)> {
    let alone = product.roles.first() == Some(&Role::Left) && product.head.is_none() && !product.routed;
    let rights = product.roles.iter().filter(|role| matches!(role, Role::Right(_))).count();
    let given = extent::attention(kernel, attention, AttentionOperand::O);
    match () {
        () if !alone || rights != 1 || !shape.batch.is_empty() => Err((0, "what follows attention is not one product")),
        () if product.left != kernel.dtype => Err((0, "its product is of another dtype than attention")),
        () if extent::matmul(Operand::A, shape) > given => Err((0, "its product reads beyond what attention gives")),
        () => Ok(()),
    }
}

/// What stands around a product reads and writes rows, hands over `f32`, and writes nothing before the product.
fn check_product(
    product: &ProductForm,
    shape: &MatmulShape,
    [head_axes, axes]: [&[(usize, usize)]; 2],
) -> Result<(), (usize, &'static str)> {
    let simple = |form: &RowForm| {
        // What follows a routed product takes rows of tables too; their indices are arguments of theirs.
        let of_rows = |spec: &ArgSpec| match spec.access {
            Access::Row | Access::PerRow => true,
            Access::GatheredRow { index } => product.routed && usize::from(index) < form.args.len(),
            Access::Columns => false,
        };
        !form.flat && form.partials.is_empty() && form.args.iter().all(of_rows)
    };
    if let Some((form, made)) = &product.head {
        let hands = |(arg, spec): (usize, &ArgSpec)| match arg == *made {
            true => *spec == ArgSpec { dtype: Dtype::F32, access: Access::Row, written: true },
            false => !spec.written,
        };
        let is_head = *made < form.args.len() && simple(form) && form.args.iter().enumerate().all(hands);
        if !is_head || !shape.batch.is_empty() {
            return Err((0, "what makes its first operand is not row work with one result"));
        }
        check_axes(form, shape.k, head_axes)?;
    }
    if let Some((form, sums)) = &product.tail {
        let known = |&sum: &usize| form.args.get(sum).is_some_and(|spec| spec.dtype == Dtype::F32 && !spec.written);
        if !sums.iter().all(known) || !simple(form) {
            return Err((0, "what follows the product is not elementwise"));
        }
        check_axes(form, shape.n, axes)?;
    }
    Ok(())
}

/// The argument of what follows, by its position in the launch, where `first` arguments are others' and `sums` is handed in.
pub(crate) fn tail_argument(position: usize, first: usize, sums: usize) -> usize {
    position - first + usize::from(position - first >= sums)
}

/// A routed product has one table of matrices of bytes, each by columns, and no head; what follows may pick from tables.
fn check_routed(product: &ProductForm, shape: &MatmulShape, step: &Step) -> Result<(), (usize, &'static str)> {
    let bytes = (product.left, product.right) == (Dtype::I8, Dtype::I8) && shape.b.0 == 1;
    let alone = product.head.is_none() && shape.batch.is_empty() && product.roles.get(1) == Some(&Role::Right(0));
    let rows = (shape.k <= 1 || shape.a.1 == 1) && product.roles.get(2) == Some(&Role::Indices);
    if !product.routed {
        return Ok(());
    }
    if !(bytes && alone && rows && step.launch.args[1].leading.len() == 1) {
        return Err((1, "it is not a table of matrices of bytes"));
    }
    let gathered = |arg: usize| {
        let spec = product.tail.as_ref().map(|(form, _)| form.args[arg]);
        spec.is_some_and(|spec| matches!(spec.access, Access::GatheredRow { .. }))
    };
    let other = product.roles.iter().zip(&step.launch.args).position(|(&role, arg)| {
        let is_table = arg.leading.len() == 1 && arg.leading[0].0 == arg.table_rows;
        matches!(role, Role::Tail(of_tail) if gathered(of_tail)) && !is_table
    });
    other.map_or(Ok(()), |position| Err((position, "its leading axes are not those of a table")))
}

fn check_axes(kernel: &RowForm, cols: usize, axes: &[(usize, usize)]) -> Result<(), (usize, &'static str)> {
    if !kernel.flat && kernel.cols != cols {
        return Err((0, "its columns are not those of the kernel"));
    }
    if axes.len() != kernel.axes || axes.iter().any(|&(divide, modulo)| divide == 0 || modulo == 0) {
        return Err((0, "its axes are not those of the kernel"));
    }
    Ok(())
}

fn check_row(step: &Step, kernel: &RowForm, cols: usize, axes: &[(usize, usize)]) -> Result<(), (usize, &'static str)> {
    check_axes(kernel, cols, axes)?;
    for &(arg, _) in &kernel.partials {
        let spec = kernel.args.get(arg);
        if !spec.is_some_and(|spec| spec.access == Access::Columns && spec.written) {
            return Err((arg, "it is no argument for column sums"));
        }
    }
    for (position, (arg, spec)) in step.launch.args.iter().zip(kernel.args).enumerate() {
        let gathered = matches!(spec.access, Access::GatheredRow { .. });
        let is_table = arg.leading.len() == 1 && arg.leading[0].0 == arg.table_rows;
        if arg.leading.len() > MAX_LEADING || (gathered && !is_table) {
            return Err((position, "its leading axes are not those of a table or of rows"));
        }
    }
    Ok(())
}

fn overlap(a: &Place, b: &Place) -> bool {
    match (*a, *b) {
        (Place::Arena { offset: x, bytes: n }, Place::Arena { offset: y, bytes: m }) => x < y + m && y < x + n,
        (a, b) => a == b,
    }
}

pub(crate) fn mismatch(step: usize, argument: usize, problem: String) -> DeviceError {
    DeviceError::Job { step, argument, problem }
}
