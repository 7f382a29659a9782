//! Our own matmuls, with their prologue and epilogue.
//!
//! Both are row bodies like any other, except for one kind of argument: values that are in the worker's workspace as `f32` and never in
//! memory. The *prologue* writes the left operand, the *epilogue* reads the accumulators. Both are rounded to the dtype of their node, as they would
//! be if it were stored: a fused plan gives the bits of an unfused one.

use deuteron_codegen::argument::{ArgBinding, Argument, strided_reach};
use deuteron_codegen::body::Access;
use deuteron_codegen::body::Body;
use deuteron_codegen::kernel::InPlace;
use deuteron_codegen::matmul_shape::{MatmulShape, Matrix};
use deuteron_codegen::rows::{ArgUpdate, RowArguments, reach};
use deuteron_graph::{Dtype, NodeId};

/// Maximum rows of a matmul with a prologue: its kernel reads every weight once and holds all of these rows, so the prologue
/// runs once per worker instead of once per block of columns.
pub const PROLOGUE_ROWS: usize = 8;

/// Maximum matmuls with one left operand per kernel: those of query, key and value.
pub const MAX_RIGHTS: usize = 3;

/// The inner size of bytes is below: a sum of as many products fits 32 bits.
pub const MAX_BYTES: usize = 1 << 17;

/// Matmuls of one left operand with prologue and epilogue, as bodies or in lowered form.
#[derive(Debug, Clone, PartialEq)]
pub struct Matmul<T> {
    /// storage type of the left operand
    pub left: Dtype,
    /// storage type of the right operands
    pub right: Dtype,
    /// storage type of the matmul where it is stored as it is
    pub result: Dtype,
    /// right operands, which lie alike: 1 to [`MAX_RIGHTS`]
    pub rights: usize,
    /// whether the right operand is a table of matrices, of which an index picks one for each row
    pub routed: bool,
    /// the prologue; none: the left operand is in memory
    pub prologue: Option<Prologue<T>>,
    /// the epilogue; none: the sums are stored
    pub epilogue: Option<Epilogue<T>>,
}

/// The prologue of a matmul.
#[derive(Debug, Clone, PartialEq)]
pub struct Prologue<T> {
    /// over all rows of the matmul and its inner size
    pub body: T,
    /// which of its arguments is the operand
    pub made: usize,
}

/// The epilogue of a matmul.
#[derive(Debug, Clone, PartialEq)]
pub struct Epilogue<T> {
    /// over all rows of the matmul and its columns
    pub body: T,
    /// which of its arguments are the sums, one a right operand
    pub sums: Vec<usize>,
}

/// The role of an argument of a matmul's launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// the left operand
    Left,
    /// an argument of the prologue
    Prologue(usize),
    /// a right operand
    Right(usize),
    /// `i32`: which matrix of the second operand each row takes
    Indices,
    /// the matmul of a right operand
    Result,
    /// an argument of the epilogue
    Epilogue(usize),
}

impl<T> Matmul<T> {
    /// The same matmul with another kind of prologue and epilogue.
    pub fn map<U>(self, mut make: impl FnMut(T) -> U) -> Matmul<U> {
        Matmul {
            left: self.left,
            right: self.right,
            result: self.result,
            rights: self.rights,
            routed: self.routed,
            prologue: self.prologue.map(|prologue| Prologue { body: make(prologue.body), made: prologue.made }),
            epilogue: self.epilogue.map(|epilogue| Epilogue { body: make(epilogue.body), sums: epilogue.sums }),
        }
    }
}

impl<T: RowArguments> Matmul<T> {
    /// The arguments of a launch, in order: what the left operand is or is made of, the right operands, the indices where
    /// there are any, then the results or what the epilogue reads and writes besides the sums.
    pub fn roles(&self) -> Vec<Role> {
        let mut roles = match &self.prologue {
            Some(Prologue { body, made }) => {
                (0..body.row_arguments().len()).filter(|arg| arg != made).map(Role::Prologue).collect()
            }
            None => vec![Role::Left],
        };
        roles.extend((0..self.rights).map(Role::Right));
        roles.extend(self.routed.then_some(Role::Indices));
        match &self.epilogue {
            Some(Epilogue { body, sums }) => {
                roles.extend((0..body.row_arguments().len()).filter(|arg| !sums.contains(arg)).map(Role::Epilogue));
            }
            None => roles.extend((0..self.rights).map(|_| Role::Result)),
        }
        roles
    }
}

/// A matmul with prologue and epilogue, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredMatmul {
    /// the compile-time half
    pub product: Matmul<Body>,
    /// the run-time half
    pub launch: MatmulLaunch,
}

/// The run-time parameters of a matmul.
#[derive(Debug, Clone, PartialEq)]
pub struct MatmulLaunch {
    /// as [`Matmul::roles`] lists them
    pub args: Vec<ArgBinding>,
    /// the matmul, or each of several; its result row after row
    pub shape: MatmulShape,
    /// (divide, modulo) of each launch axis of the prologue
    pub prologue_axes: Vec<(usize, usize)>,
    /// (divide, modulo) of each launch axis of the epilogue
    pub axes: Vec<(usize, usize)>,
}

impl<T: RowArguments> Matmul<T> {
    /// Results of the epilogue whose elements lie where those of an operand of it do, one for one, and whose operand is read nowhere else: by
    /// positions in the launch. A kernel that reads each such element before the same thread stores it can have them in one place.
    pub fn updates(&self, launch: &MatmulLaunch, wanted: &[InPlace]) -> Vec<ArgUpdate> {
        let Some(epilogue) = &self.epilogue else { return Vec::new() };
        let (args, roles, specs) = (&launch.args, self.roles(), epilogue.body.row_arguments());
        let only = |base: NodeId| {
            let mut positions = (0..args.len()).filter(|&position| args[position].base == base);
            let by_rows = |&position: &usize| match roles[position] {
                Role::Epilogue(arg) => specs[arg].access == Access::Row,
                _ => false,
            };
            positions.next().filter(|_| positions.next().is_none()).filter(by_rows)
        };
        let found = wanted.iter().filter_map(|&InPlace { operand, result }| {
            let (operand, result) = (only(operand)?, only(result)?);
            let (read, stored) = (&args[operand], &args[result]);
            let alike = read.dtype == stored.dtype && read.offset == stored.offset && read.leading == stored.leading;
            (alike && !read.written && stored.written).then_some(ArgUpdate { operand, result })
        });
        found.collect()
    }

    /// The arguments of a launch, as a device needs them.
    pub fn arguments(&self, launch: &MatmulLaunch) -> Vec<Argument> {
        let MatmulLaunch { args, shape, .. } = launch;
        let rows = shape.m.saturating_mul(shape.batches());
        let elements = |role: Role, arg: &ArgBinding| match (role, &self.prologue, &self.epilogue) {
            // Of rows that are routed, choices may share some.
            (Role::Left, ..) if self.routed => match shape.m * shape.k {
                0 => 0,
                _ => strided_reach(arg.leading.iter().copied(), shape.k),
            },
            (Role::Left, ..) => shape.reach(Matrix::A),
            // Of a table that is routed to, every matrix.
            (Role::Right(_), ..) if self.routed => match (shape.reach(Matrix::B), arg.leading.as_slice()) {
                (0, _) | (_, [] | [(0, _), ..]) => 0,
                (matrix, [(experts, stride), ..]) => strided_reach([(*experts, *stride)], matrix),
            },
            (Role::Right(_), ..) => shape.reach(Matrix::B),
            (Role::Indices, ..) => shape.m,
            (Role::Result, ..) => shape.reach(Matrix::C),
            (Role::Prologue(at), Some(prologue), _) => reach(&prologue.body.row_arguments()[at], arg, rows, shape.k),
            (Role::Epilogue(at), _, Some(epilogue)) => reach(&epilogue.body.row_arguments()[at], arg, rows, shape.n),
            (Role::Prologue(_) | Role::Epilogue(_), ..) => 0,
        };
        let roles = self.roles();
        roles.iter().zip(args).map(|(&role, arg)| Argument::new(arg, elements(role, arg))).collect()
    }
}
