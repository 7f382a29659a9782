//! Group to body: nodes become expressions, operands become arguments, strides become launch data.

use std::collections::HashMap;

use deuteron_graph::{BinaryOp, Dtype, Graph, NodeId, Op, ReduceOp, Shape, UnaryOp, View};
use deuteron_plan::{Draft, GroupKind, Layout, Placed, Placement, Space, finished_sum, node_space};

use crate::body::{Access, ArgSpec, Body, Expr, ExprId, Exprs, Stage};
use crate::epilogue::{LibraryFit, Operand};
use crate::kernels::matmul::cuda as skinny;
use crate::source::{
    AppendShape, ArgBinding, Backend, Geometry, Kernel, Launch, Lowered, MatmulKernel, MatmulShape, Piece,
};
use crate::{attention, product};

/// No kernel of a target computes a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no kernel of the form `{structure}` is generated for {target}, or none that takes these operands")]
pub struct NoKernel {
    /// what the group is made of
    pub structure: &'static str,
    /// what it was to be generated for
    pub target: &'static str,
}

/// Lowers one group of a plan, if one kernel of the backend computes it.
pub fn lower(group: &Draft, backend: &Backend) -> Result<Lowered, NoKernel> {
    let (graph, placement) = (group.graph, group.placement);
    let lowered = match group.structure.kind() {
        GroupKind::Row => Some(lower_row(graph, placement, group)),
        // A GPU's matmuls are a library's, unless they have few rows.
        GroupKind::Matmul => match backend {
            Backend::Cpu => product::fit(group).map(|fit| product::lower_product(group, fit)),
            Backend::Cuda(target) => skinny::fit(group, target.arch).map(|fit| match fit {
                skinny::Fit::FewRows(fit) => skinny::lower_skinny(group, *fit),
                skinny::Fit::Library(fit) => lower_matmul(group, fit),
            }),
        },
        GroupKind::ScatterAdd => Some(lower_scatter(graph, placement, group.nodes[0])),
        GroupKind::Append => Some(lower_append(graph, placement, group.nodes[0])),
        GroupKind::Copy => Some(lower_copy(graph, placement, group.nodes[0])),
        GroupKind::Attention => attention::lower(group),
        GroupKind::Opaque => None,
    };
    let target = match backend {
        Backend::Cpu => "CPUs",
        Backend::Cuda(_) => "CUDA",
    };
    lowered.ok_or(NoKernel { structure: group.structure.name(), target })
}

/// Which node each expression and each stage of a body came from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Origins {
    /// one an expression
    pub exprs: Vec<NodeId>,
    /// one a stage
    pub stages: Vec<NodeId>,
}

fn lower_row(graph: &Graph, placement: &Placement, group: &Draft) -> Lowered {
    lower_row_with_origins(graph, placement, group).0
}

/// Lowers a group of row work as rows, even where rows do not matter. What it reads or writes of `handed` is `f32`,
/// rounded to that node's dtype, as it would be if it were stored.
pub(crate) fn lower_rows(group: &Draft, handed: &[NodeId]) -> Lowered {
    lower_space(group, handed, |_| false).0
}

/// Lowers a row group, and says for each expression and stage which node it came from.
pub(crate) fn lower_row_with_origins(graph: &Graph, placement: &Placement, group: &Draft) -> (Lowered, Origins) {
    lower_space(group, &[], |space| is_flat(graph, placement, group, space))
}

fn lower_space(group: &Draft, handed: &[NodeId], is_flat: impl Fn(Space) -> bool) -> (Lowered, Origins) {
    let (graph, placement) = (group.graph, group.placement);
    let first = node_space(graph, group.nodes[0]);
    let space = group.nodes.iter().fold(first, |s, &id| s.join(node_space(graph, id)).unwrap_or(s));
    let mut row = RowLowering {
        graph,
        placement,
        group,
        space,
        flat: is_flat(space),
        handed,
        exprs: Exprs::default(),
        args: Vec::new(),
        bindings: Vec::new(),
        axes: Vec::new(),
        stages: Vec::new(),
        row_values: 0,
        values: HashMap::new(),
        known_rounded: HashMap::new(),
    };
    let mut origins = Origins::default();
    for &id in group.nodes {
        row.node(id);
        origins.exprs.resize(row.exprs.len(), id);
        origins.stages.resize(row.stages.len(), id);
    }
    let cols = if row.flat { 0 } else { space.cols };
    let body = Body {
        cols,
        flat: row.flat,
        args: row.args,
        exprs: row.exprs.finish(),
        axes: row.axes.len() as u16,
        row_values: row.row_values,
        stages: row.stages,
    };
    let geometry = Geometry::Row { rows: space.rows, cols: space.cols, axes: row.axes };
    (Lowered { kernel: Kernel::Row(body), launch: Launch { args: row.bindings, geometry } }, origins)
}

/// Purely elementwise, every operand in order or one number: row borders do not matter.
fn is_flat(graph: &Graph, placement: &Placement, group: &Draft, space: Space) -> bool {
    group.nodes.iter().all(|&id| {
        let node = graph.node(id);
        let elementwise = match node.op {
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) => true,
            Op::View(_) | Op::StopGradient | Op::Const { .. } | Op::Random { .. } => true,
            Op::RowReduce(_) | Op::ColumnSum | Op::Gather | Op::Iota { .. } => false,
            Op::Matmul { .. } | Op::ScatterAdd { .. } | Op::Append { .. } | Op::Concat { .. } => false,
            Op::Input { .. } | Op::Opaque(_) => false,
        };
        let whole = node.shape.rows() == space.rows && node.shape.cols() == space.cols;
        let operands_in_order = || {
            node.inputs.iter().all(|&input| match placement.get(input) {
                None => !matches!(graph.node(input).op, Op::Iota { .. }),
                Some(placed) if group.nodes.contains(&placed.base) => true,
                Some(placed) => match placed.layout.row_access(&node.shape) {
                    Some(access) => {
                        let single = access.column_stride == 0 && access.leading.iter().all(|&(_, stride)| stride == 0);
                        access.is_identity(space.rows, space.cols)
                            || (single && graph.node(input).shape.elements() == 1)
                    }
                    None => false,
                },
            })
        };
        elementwise && whole && operands_in_order()
    })
}

struct RowLowering<'a> {
    graph: &'a Graph,
    placement: &'a Placement,
    group: &'a Draft<'a>,
    space: Space,
    flat: bool,
    /// Nodes whose values are handed over as `f32`.
    handed: &'a [NodeId],
    exprs: Exprs,
    args: Vec<ArgSpec>,
    bindings: Vec<ArgBinding>,
    axes: Vec<(usize, usize)>,
    stages: Vec<Stage>,
    row_values: u16,
    /// Expressions of the group's own nodes.
    values: HashMap<NodeId, ExprId>,
    /// Whether an expression can only give values of a dtype, once asked.
    known_rounded: HashMap<(ExprId, Dtype), bool>,
}

impl RowLowering<'_> {
    fn node(&mut self, id: NodeId) {
        if finished_sum(self.graph, self.group.nodes, id).is_some() {
            return;
        }
        let node = self.graph.node(id);
        let operands = node.inputs.clone();
        let reader = match node.op {
            Op::RowReduce(_) | Op::ColumnSum => self.graph.node(operands[0]).shape.clone(),
            _ => node.shape.clone(),
        };
        let value = match &node.op {
            Op::Unary(op) => {
                let a = self.operand(operands[0], &reader);
                self.exprs.make(Expr::Unary(*op, a))
            }
            Op::Binary(op) => {
                let (a, b) = (self.operand(operands[0], &reader), self.operand(operands[1], &reader));
                self.exprs.make(Expr::Binary(*op, a, b))
            }
            Op::Compare(op) => {
                let (a, b) = (self.operand(operands[0], &reader), self.operand(operands[1], &reader));
                self.exprs.make(Expr::Compare(*op, a, b))
            }
            Op::Select => {
                let condition = self.operand(operands[0], &reader);
                let (a, b) = (self.operand(operands[1], &reader), self.operand(operands[2], &reader));
                self.exprs.make(Expr::Select(condition, a, b))
            }
            Op::Cast(to) => {
                let a = self.operand(operands[0], &reader);
                self.cast(a, self.graph.node(operands[0]).dtype, *to)
            }
            Op::RowReduce(op) => {
                let a = self.operand(operands[0], &reader);
                self.row_reduce(*op, a, reader.cols())
            }
            Op::ColumnSum => {
                let a = self.operand(operands[0], &reader);
                // A sum that the kernel converts is stored as what it is converted to.
                let converts = |&&other: &&NodeId| finished_sum(self.graph, self.group.nodes, other) == Some(id);
                let stored = self.group.nodes.iter().find(converts).copied().unwrap_or(id);
                let arg = self.output_arg(stored, Access::Columns);
                self.stages.push(Stage::ColumnSum { value: a, arg, width: reader.cols() });
                return;
            }
            Op::Gather => self.gathered(operands[0], operands[1], &reader),
            // A view that has a buffer of its own here repeats an inline pattern; a pattern stands for itself.
            Op::View(_) | Op::StopGradient => self.operand(operands[0], &reader),
            Op::Const { .. } | Op::Iota { .. } | Op::Random { .. } => self.pattern(id),
            Op::Input { .. } | Op::Matmul { .. } | Op::Concat { .. } => {
                unreachable!("the planner gives these kernels of their own")
            }
            Op::ScatterAdd { .. } | Op::Append { .. } | Op::Opaque(_) => {
                unreachable!("the planner gives these kernels of their own")
            }
        };
        let read = self.rounded(value, node.dtype);
        self.values.insert(id, read);
        if self.group.outputs.contains(&id) {
            let per_row = !self.flat && self.is_per_row(&node.shape);
            let arg = self.output_arg(id, if per_row { Access::PerRow } else { Access::Row });
            let value = if self.handed.contains(&id) { read } else { value };
            self.stages.push(Stage::Store { value, arg });
        }
    }

    /// A 16-bit node has the value that its dtype holds, whether it is stored or not: a maximum that is stored equals the
    /// element it came from, and a fused plan computes what the unfused one does.
    fn rounded(&mut self, value: ExprId, dtype: Dtype) -> ExprId {
        match dtype {
            Dtype::F16 | Dtype::Bf16 if !self.is_rounded(value, dtype) => self.exprs.make(Expr::Rounded(dtype, value)),
            _ => value,
        }
    }

    /// Whether an expression can only give values of the dtype.
    fn is_rounded(&mut self, value: ExprId, dtype: Dtype) -> bool {
        if let Some(&known) = self.known_rounded.get(&(value, dtype)) {
            return known;
        }
        let answer = self.find_rounded(value, dtype);
        self.known_rounded.insert((value, dtype), answer);
        answer
    }

    fn find_rounded(&mut self, value: ExprId, dtype: Dtype) -> bool {
        let holds = |bits: u32| {
            let value = f32::from_bits(bits);
            match dtype {
                Dtype::F16 => half::f16::from_f32(value).to_f32() == value,
                _ => half::bf16::from_f32(value).to_f32() == value,
            }
        };
        match self.exprs.get(value) {
            Expr::Load(arg) => self.args[arg as usize].dtype == dtype,
            Expr::Rounded(to, _) => to == dtype,
            Expr::Const(bits) => holds(bits),
            Expr::Compare(..) | Expr::Keep { .. } => true,
            Expr::Unary(UnaryOp::Neg | UnaryOp::Abs, a) => self.is_rounded(a, dtype),
            Expr::Binary(BinaryOp::Max | BinaryOp::Min, a, b) | Expr::Select(_, a, b) => {
                self.is_rounded(a, dtype) && self.is_rounded(b, dtype)
            }
            Expr::RowValue(value) => {
                let largest = self.stages.iter().find_map(|stage| match *stage {
                    Stage::RowReduce { op: ReduceOp::Max | ReduceOp::AbsMax, value: reduced, into } => {
                        (into == value).then_some(reduced)
                    }
                    _ => None,
                });
                largest.is_some_and(|reduced| self.is_rounded(reduced, dtype))
            }
            Expr::Unary(..) | Expr::Binary(..) | Expr::IntToFloat(_) | Expr::ToInt8(_) | Expr::ToFp8(_) => false,
            Expr::ConstInt(_) | Expr::ColumnIndex | Expr::RowIndex(_) => false,
        }
    }

    /// One element a row, in a space of several columns. In a space of one column it is a row like any other.
    fn is_per_row(&self, shape: &Shape) -> bool {
        shape.cols() == 1 && self.space.cols != 1
    }

    fn cast(&mut self, a: ExprId, from: Dtype, to: Dtype) -> ExprId {
        match (from, to) {
            (Dtype::I32, Dtype::F32 | Dtype::F16 | Dtype::Bf16) => self.exprs.make(Expr::IntToFloat(a)),
            (Dtype::F32 | Dtype::F16 | Dtype::Bf16, Dtype::I8) => self.exprs.make(Expr::ToInt8(a)),
            (Dtype::F32 | Dtype::F16 | Dtype::Bf16, Dtype::F8e4m3) => self.exprs.make(Expr::ToFp8(a)),
            // Lanes are f32 whatever the storage type: rounding happens in the store.
            _ => a,
        }
    }

    fn row_reduce(&mut self, op: ReduceOp, value: ExprId, cols: usize) -> ExprId {
        if cols == 1 && self.space.cols != 1 {
            // One number a row, in a kernel whose rows are longer: there is nothing to sweep over.
            return match op {
                ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Max => value,
                ReduceOp::AbsMax => self.exprs.make(Expr::Unary(UnaryOp::Abs, value)),
                ReduceOp::ArgMax => self.exprs.make(Expr::ConstInt(0)),
            };
        }
        let into = self.row_values;
        self.row_values += 1;
        let stored = if op == ReduceOp::Mean { ReduceOp::Sum } else { op };
        self.stages.push(Stage::RowReduce { op: stored, value, into });
        let result = self.exprs.make(Expr::RowValue(into));
        if op != ReduceOp::Mean {
            return result;
        }
        let inverse = self.exprs.constant((1.0 / cols as f64) as f32);
        self.exprs.make(Expr::Binary(BinaryOp::Mul, result, inverse))
    }

    /// The value of an operand at the reader's (row, column).
    fn operand(&mut self, id: NodeId, reader: &Shape) -> ExprId {
        let Some(placed) = self.placement.get(id) else { return self.pattern(id) };
        if let Some(&value) = self.values.get(&placed.base) {
            return value;
        }
        let layout = placed.layout.clone();
        let base = placed.base;
        self.load(base, &layout, reader)
    }

    fn load(&mut self, base: NodeId, layout: &Layout, reader: &Shape) -> ExprId {
        let access = layout.row_access(reader).expect("placement gave rows that are contiguous");
        let identity =
            self.flat && access.is_identity(self.space.rows, self.space.cols) && layout.shape.elements() != 1;
        let class = if identity || (access.column_stride == 1) { Access::Row } else { Access::PerRow };
        let leading = if self.flat { Vec::new() } else { access.leading };
        let (dtype, handed_in) = (self.graph.node(base).dtype, self.handed.contains(&base));
        let arg = self.read_arg(
            ArgBinding {
                base,
                dtype: if handed_in { Dtype::F32 } else { dtype },
                written: false,
                offset: access.offset,
                leading,
                table_rows: 0,
            },
            class,
        );
        let load = self.exprs.make(Expr::Load(arg));
        if handed_in { self.rounded(load, dtype) } else { load }
    }

    fn gathered(&mut self, table: NodeId, indices: NodeId, reader: &Shape) -> ExprId {
        let placed = self.placement.get(indices).expect("indices are placed");
        let mut layout = placed.layout.clone();
        let base = placed.base;
        let mut dims = layout.shape.to_vec();
        dims.push(1);
        layout.shape = Shape::new(dims);
        layout.strides.push(0);
        let load = self.load(base, &layout, reader);
        let Expr::Load(index) = self.exprs.get(load) else { unreachable!("load returns a load") };
        let table_place = self.placement.get(table).expect("a table is placed").clone();
        let rows = table_place.layout.shape[0];
        let arg = self.read_arg(
            ArgBinding {
                base: table_place.base,
                dtype: self.graph.node(table).dtype,
                written: false,
                offset: table_place.layout.offset,
                leading: vec![(rows, table_place.layout.strides[0])],
                table_rows: rows,
            },
            Access::GatheredRow { index },
        );
        self.exprs.make(Expr::Load(arg))
    }

    /// Constants, indices and random masks, which no buffer holds.
    fn pattern(&mut self, id: NodeId) -> ExprId {
        let node = self.graph.node(id);
        match &node.op {
            Op::Const { value, dtype: Dtype::I32 } => self.exprs.make(Expr::ConstInt(*value as i32)),
            // A constant of a narrow dtype is rounded to it, as it would be if it were stored.
            Op::Const { value, dtype } => self.exprs.constant(match dtype {
                Dtype::F16 => half::f16::from_f64(*value).to_f32(),
                Dtype::Bf16 => half::bf16::from_f64(*value).to_f32(),
                _ => *value as f32,
            }),
            Op::Iota { axis, shape } => self.iota(*axis, shape),
            Op::Random { drop, offset, .. } => {
                let seed = self.operand(node.inputs[0], &Shape::scalar());
                // Exact: drop is in [0, 1), so the product is below 2^32.
                let threshold = (drop * 4_294_967_296.0).floor() as u32;
                self.exprs.make(Expr::Keep { seed, offset: *offset, threshold })
            }
            Op::View(View::Broadcast(_) | View::Reshape(_) | View::Transpose(_) | View::Slice { .. })
            | Op::StopGradient => self.pattern(node.inputs[0]),
            _ => unreachable!("only patterns are inline"),
        }
    }

    fn iota(&mut self, axis: usize, shape: &Shape) -> ExprId {
        if axis + 1 == shape.rank() {
            return match shape.cols() {
                1 => self.exprs.make(Expr::ConstInt(0)),
                _ => self.exprs.make(Expr::ColumnIndex),
            };
        }
        let leading = shape.leading();
        let coordinate = (leading[axis + 1..].iter().product::<usize>().max(1), leading[axis].max(1));
        let known = self.axes.iter().position(|&other| other == coordinate);
        let position = known.unwrap_or_else(|| {
            self.axes.push(coordinate);
            self.axes.len() - 1
        });
        self.exprs.make(Expr::RowIndex(position as u16))
    }

    fn read_arg(&mut self, binding: ArgBinding, access: Access) -> u16 {
        let arg = ArgSpec { dtype: binding.dtype, access, written: false };
        let known = (0..self.args.len()).find(|&i| self.args[i] == arg && self.bindings[i] == binding);
        known.unwrap_or_else(|| {
            self.args.push(arg);
            self.bindings.push(binding);
            self.args.len() - 1
        }) as u16
    }

    fn output_arg(&mut self, id: NodeId, access: Access) -> u16 {
        let node = self.graph.node(id);
        let leading = match access {
            _ if self.flat => Vec::new(),
            Access::Row => vec![(self.space.rows, self.space.cols)],
            Access::PerRow => vec![(self.space.rows, 1)],
            Access::Columns | Access::GatheredRow { .. } => Vec::new(),
        };
        let dtype = if self.handed.contains(&id) { Dtype::F32 } else { node.dtype };
        self.args.push(ArgSpec { dtype, access, written: true });
        self.bindings.push(ArgBinding { base: id, dtype, written: true, offset: 0, leading, table_rows: 0 });
        (self.args.len() - 1) as u16
    }
}

fn lower_matmul(group: &Draft, fit: LibraryFit) -> Lowered {
    let (graph, placement) = (group.graph, group.placement);
    let (shape, [a, b]) = lower_matmul_shape(graph, placement, fit.matmul);
    let kernel = MatmulKernel { dtype: fit.dtype, epilogue: fit.epilogue };
    let read = |value: NodeId| {
        let placed = placement.get(value).expect("operands of a product are placed");
        whole(graph, placed.base, placed.layout.offset, false)
    };
    let args = kernel.operands().iter().map(|operand| match operand {
        Operand::A => a.clone(),
        Operand::B => b.clone(),
        Operand::Bias => read(fit.bias.expect("the epilogue has a bias")),
        Operand::Residual => read(fit.residual.expect("the epilogue has a residual")),
        Operand::C => whole(graph, fit.result, 0, true),
    });
    let launch = Launch { args: args.collect(), geometry: Geometry::Matmul(shape) };
    Lowered { kernel: Kernel::Matmul(kernel), launch }
}

/// Sizes and strides of a product whose result is contiguous, and its operands.
pub(crate) fn lower_matmul_shape(
    graph: &Graph,
    placement: &Placement,
    product: NodeId,
) -> (MatmulShape, [ArgBinding; 2]) {
    let node = graph.node(product);
    let Op::Matmul { transpose_a, transpose_b } = node.op else { unreachable!("a matmul group holds a matmul") };
    let place = |operand: usize| placement.get(node.inputs[operand]).expect("operands of a product are placed");
    let (a, b) = (place(0), place(1));
    let rank = node.shape.rank();
    let (m, n) = (node.shape[rank - 2], node.shape[rank - 1]);
    let a_rank = a.layout.shape.rank();
    let k = a.layout.shape[if transpose_a { a_rank - 2 } else { a_rank - 1 }];
    let matrix = |layout: &Layout, transposed: bool| {
        let rank = layout.strides.len();
        let (row, column) = (layout.strides[rank - 2], layout.strides[rank - 1]);
        if transposed { (column, row) } else { (row, column) }
    };
    let own = Layout::contiguous(&node.shape);
    let batch_stride =
        |layout: &Layout, axis: usize| if layout.strides.len() == rank { layout.strides[axis] } else { 0 };
    let batch = (0..rank - 2)
        .map(|axis| [node.shape[axis], batch_stride(&a.layout, axis), batch_stride(&b.layout, axis), own.strides[axis]])
        .collect();
    let (a_matrix, b_matrix) = (matrix(&a.layout, transpose_a), matrix(&b.layout, transpose_b));
    let shape = MatmulShape { m, n, k, batch, a: a_matrix, b: b_matrix, c: (n, 1) };
    let read = |placed: &Placed| whole(graph, placed.base, placed.layout.offset, false);
    (merge_batch_into_rows(shape), [read(a), read(b)])
}

/// Batches that share b and follow each other in a and c are more rows of one product.
fn merge_batch_into_rows(mut shape: MatmulShape) -> MatmulShape {
    while let Some(&[size, a, b, c]) = shape.batch.last() {
        let follows = a == shape.a.0 * shape.m && c == shape.c.0 * shape.m;
        if b != 0 || !follows {
            break;
        }
        shape.m *= size;
        shape.batch.pop();
    }
    shape
}

fn lower_scatter(graph: &Graph, placement: &Placement, id: NodeId) -> Lowered {
    let node = graph.node(id);
    let operand = |position: usize| {
        let placed = placement.get(node.inputs[position]).expect("operands of a scatter are placed");
        whole(graph, placed.base, placed.layout.offset, false)
    };
    let count = graph.node(node.inputs[0]).shape.elements();
    let geometry = Geometry::ScatterAdd { count, cols: node.shape[1], rows: node.shape[0] };
    let args = vec![operand(0), operand(1), whole(graph, id, 0, true)];
    Lowered { kernel: Kernel::ScatterAdd(node.dtype), launch: Launch { args, geometry } }
}

fn lower_append(graph: &Graph, placement: &Placement, id: NodeId) -> Lowered {
    let node = graph.node(id);
    let place = |operand: usize| placement.get(node.inputs[operand]).expect("operands of an append are placed");
    let read = |operand: usize| whole(graph, place(operand).base, place(operand).layout.offset, false);
    let Op::Append { batch } = node.op else { unreachable!("an append group holds an append") };
    let (rows, axis) = (&place(1).layout, node.shape.rank() - 2);
    let geometry = Geometry::Append(AppendShape {
        leading: (0..axis).map(|i| (node.shape[i], rows.strides[i])).collect(),
        batch,
        rows: rows.shape[axis],
        stride: rows.strides[axis],
        capacity: node.shape[axis],
        cols: node.shape.cols(),
        in_place: false,
    });
    let args = vec![read(0), read(1), read(2), whole(graph, id, 0, true)];
    Lowered { kernel: Kernel::Append(node.dtype.bytes()), launch: Launch { args, geometry } }
}

fn lower_copy(graph: &Graph, placement: &Placement, id: NodeId) -> Lowered {
    let node = graph.node(id);
    let own = Layout::contiguous(&node.shape);
    let axis = if let Op::Concat { axis } = node.op { axis } else { 0 };
    let is_concat = matches!(node.op, Op::Concat { .. });
    let mut args = Vec::new();
    let mut pieces = Vec::new();
    let mut start = 0;
    for &input in &node.inputs {
        let placed = placement.get(input).expect("what is copied is placed");
        // A view may exist only as a copy because strides cannot express it: then the order of elements is its
        // operand's, and the destination is contiguous.
        let seen = match (&node.op, is_concat) {
            (Op::View(view), false) => placed.layout.view(view).unwrap_or_else(|| placed.layout.clone()),
            _ => placed.layout.clone(),
        };
        let to = if is_concat { own.strides.clone() } else { seen.shape.strides() };
        pieces.push(Piece {
            source: args.len(),
            dims: seen.shape.to_vec(),
            from: seen.strides.clone(),
            from_offset: seen.offset,
            to,
            to_offset: if is_concat { start * own.strides[axis] } else { 0 },
        });
        if is_concat {
            start += seen.shape[axis];
        }
        args.push(whole(graph, placed.base, 0, false));
    }
    args.push(whole(graph, id, 0, true));
    Lowered { kernel: Kernel::Copy(node.dtype.bytes()), launch: Launch { args, geometry: Geometry::Copy(pieces) } }
}

pub(crate) fn whole(graph: &Graph, base: NodeId, offset: usize, written: bool) -> ArgBinding {
    ArgBinding { base, dtype: graph.node(base).dtype, written, offset, leading: Vec::new(), table_rows: 0 }
}
