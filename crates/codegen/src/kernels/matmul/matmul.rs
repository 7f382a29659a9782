//! Products of our own, with what makes their first operand and what follows them while their sums are hot.
//!
//! Both are row bodies like any other, but for one kind of argument: values that lie in the worker's scratch as `f32` and never in
//! memory. The *head* writes the first operand, the *tail* reads the sums. Either is rounded to the dtype of its node, as it would
//! be if it were stored: a fused plan gives the bits of an unfused one.

use deuteron_graph::Dtype;

use super::shape::{MatmulShape, Matrix};
use crate::argument::{ArgBinding, Argument};
use crate::body::{ArgSpec, Body};
use crate::cpu::program::Program;
use crate::kernels::row::reach;

/// Rows of a product, at most, that a head is made for: its kernel reads every weight once and holds all of these rows, so the head
/// runs once for each worker, and not for every block of columns.
pub const HEAD_ROWS: usize = 8;

/// One or two products of one first operand, and what stands around them, as bodies or as what the bodies became.
#[derive(Debug, Clone, PartialEq)]
pub struct Product<T> {
    /// storage type of the first operand
    pub left: Dtype,
    /// storage type of the second operands
    pub right: Dtype,
    /// storage type of the product where it is stored as it is
    pub result: Dtype,
    /// second operands, which lie alike: 1 or 2
    pub rights: usize,
    /// whether the second operand is a table of matrices, of which an index picks one for each row
    pub routed: bool,
    /// what makes the first operand; none: it lies in memory
    pub head: Option<Head<T>>,
    /// what follows; none: the sums are stored
    pub tail: Option<Tail<T>>,
}

/// What makes the first operand of a product.
#[derive(Debug, Clone, PartialEq)]
pub struct Head<T> {
    /// over all rows of the product and its inner size
    pub body: T,
    /// which of its arguments is the operand
    pub made: usize,
}

/// What follows a product.
#[derive(Debug, Clone, PartialEq)]
pub struct Tail<T> {
    /// over all rows of the product and its columns
    pub body: T,
    /// which of its arguments are the sums, one a second operand
    pub sums: Vec<usize>,
}

/// What an argument of a product's launch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// the first operand
    Left,
    /// an argument of the head
    Head(usize),
    /// a second operand
    Right(usize),
    /// `i32`: which matrix of the second operand each row takes
    Indices,
    /// the product
    Result,
    /// an argument of the tail
    Tail(usize),
}

/// Whatever has the arguments of a row kernel.
pub trait RowArguments {
    /// in the order of a launch
    fn row_arguments(&self) -> &[ArgSpec];
}

impl RowArguments for Body {
    fn row_arguments(&self) -> &[ArgSpec] {
        &self.args
    }
}

impl RowArguments for Program {
    fn row_arguments(&self) -> &[ArgSpec] {
        &self.args
    }
}

impl<T> Product<T> {
    /// The same product with another kind of head and tail.
    pub fn map<U>(self, mut make: impl FnMut(T) -> U) -> Product<U> {
        Product {
            left: self.left,
            right: self.right,
            result: self.result,
            rights: self.rights,
            routed: self.routed,
            head: self.head.map(|head| Head { body: make(head.body), made: head.made }),
            tail: self.tail.map(|tail| Tail { body: make(tail.body), sums: tail.sums }),
        }
    }
}

impl<T: RowArguments> Product<T> {
    /// The arguments of a launch, in order: what the first operand is or is made of, the second operands, the indices where
    /// there are any, then the result or what the tail reads and writes besides the sums.
    pub fn roles(&self) -> Vec<Role> {
        let mut roles = match &self.head {
            Some(Head { body, made }) => {
                (0..body.row_arguments().len()).filter(|arg| arg != made).map(Role::Head).collect()
            }
            None => vec![Role::Left],
        };
        roles.extend((0..self.rights).map(Role::Right));
        roles.extend(self.routed.then_some(Role::Indices));
        match &self.tail {
            Some(Tail { body, sums }) => {
                roles.extend((0..body.row_arguments().len()).filter(|arg| !sums.contains(arg)).map(Role::Tail));
            }
            None => roles.push(Role::Result),
        }
        roles
    }
}

/// A product with what stands around it, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredProduct {
    /// the compile-time half
    pub product: Product<Body>,
    /// the run-time half
    pub launch: ProductLaunch,
}

/// What is known of a product at run time.
#[derive(Debug, Clone, PartialEq)]
pub struct ProductLaunch {
    /// as [`Product::roles`] lists them
    pub args: Vec<ArgBinding>,
    /// the product, or each of two; its result row after row
    pub shape: MatmulShape,
    /// (divide, modulo) of each launch axis of what makes the first operand
    pub head_axes: Vec<(usize, usize)>,
    /// (divide, modulo) of each launch axis of what follows
    pub axes: Vec<(usize, usize)>,
}

impl<T: RowArguments> Product<T> {
    /// What a device has to know of the arguments of a launch.
    pub fn arguments(&self, launch: &ProductLaunch) -> Vec<Argument> {
        let ProductLaunch { args, shape, .. } = launch;
        let rows = shape.m * shape.batches();
        let elements = |role: Role, arg: &ArgBinding| match (role, &self.head, &self.tail) {
            (Role::Left, ..) => shape.reach(Matrix::A),
            // Of a table that is routed to, every matrix.
            (Role::Right(_), ..) if self.routed => match (shape.reach(Matrix::B), arg.leading.as_slice()) {
                (0, _) | (_, [] | [(0, _), ..]) => 0,
                (matrix, [(experts, stride), ..]) => (experts - 1) * stride + matrix,
            },
            (Role::Right(_), ..) => shape.reach(Matrix::B),
            (Role::Indices, ..) => shape.m,
            (Role::Result, ..) => shape.reach(Matrix::C),
            (Role::Head(at), Some(head), _) => reach(&head.body.row_arguments()[at], arg, rows, shape.k),
            (Role::Tail(at), _, Some(tail)) => reach(&tail.body.row_arguments()[at], arg, rows, shape.n),
            (Role::Head(_) | Role::Tail(_), ..) => 0,
        };
        let roles = self.roles();
        roles.iter().zip(args).map(|(&role, arg)| Argument::new(arg, elements(role, arg))).collect()
    }
}
