//! Lowering of row work to a body: nodes become expressions, operands become arguments, strides become launch data.

use std::collections::HashMap;

use deuteron_graph::{
    BinaryOp, CompareOp, Dtype, Graph, NodeId, Op, ReduceOp, Shape, UnaryOp, View, keep_threshold, round_to_odd,
};
use deuteron_plan::{Draft, Layout, Placement, Space, finished_sum, node_space};

use crate::argument::ArgBinding;
use crate::body::{Access, ArgSpec, Body, Expr, ExprId, Exprs, IntegerOp, Stage};

/// Row work, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredRows {
    /// the compile-time half
    pub body: Body,
    /// the run-time half
    pub launch: RowLaunch,
}

/// The run-time parameters of row work: rows, strides, buffers.
#[derive(Debug, Clone, PartialEq)]
pub struct RowLaunch {
    /// in the order of the body's arguments
    pub args: Vec<ArgBinding>,
    /// rows; elements over columns of a flat body
    pub rows: usize,
    /// columns
    pub cols: usize,
    /// (divide, modulo) of each launch axis
    pub axes: Vec<(usize, usize)>,
}

/// Which node each expression and each stage of a body came from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Origins {
    /// one an expression
    pub exprs: Vec<NodeId>,
    /// one a stage
    pub stages: Vec<NodeId>,
}

/// Lowers a group of row work as rows, even where rows do not matter. What it reads or writes of `handed` is `f32`,
/// rounded to that node's dtype, as it would be if it were stored.
pub fn lower_rows(group: &Draft, handed: &[NodeId]) -> LoweredRows {
    lower_space(group, handed, |_| false).0
}

/// Lowers a row group, with the origin of each expression and stage.
pub fn lower_with_origins(group: &Draft) -> (LoweredRows, Origins) {
    lower_space(group, &[], |space| is_flat(group.graph, group.placement, group, space))
}

fn lower_space(group: &Draft, handed: &[NodeId], is_flat: impl Fn(Space) -> bool) -> (LoweredRows, Origins) {
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
    debug_assert_eq!(body.verify(), Ok(()));
    let launch = RowLaunch { args: row.bindings, rows: space.rows, cols: space.cols, axes: row.axes };
    (LoweredRows { body, launch }, origins)
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
    /// Nodes whose values are passed as `f32`.
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
        let graph = self.graph;
        let node = graph.node(id);
        let operands = &node.inputs;
        let reader = match node.op {
            Op::RowReduce(_) | Op::ColumnSum => &graph.node(operands[0]).shape,
            _ => &node.shape,
        };
        let value = match &node.op {
            Op::Unary(op) => {
                let a = self.operand(operands[0], reader);
                self.exprs.make(Expr::Unary(*op, a))
            }
            Op::Binary(op) => {
                let (a, b) = (self.operand(operands[0], reader), self.operand(operands[1], reader));
                if node.dtype == Dtype::I32 {
                    self.integer(*op, a, b)
                } else {
                    self.exprs.make(Expr::Binary(*op, a, b))
                }
            }
            Op::Compare(op) => {
                let (a, b) = (self.operand(operands[0], reader), self.operand(operands[1], reader));
                self.exprs.make(Expr::Compare(*op, a, b))
            }
            Op::Select => {
                let condition = self.operand(operands[0], reader);
                let (a, b) = (self.operand(operands[1], reader), self.operand(operands[2], reader));
                self.exprs.make(Expr::Select(condition, a, b))
            }
            Op::Cast(to) => {
                let a = self.operand(operands[0], reader);
                self.cast(a, self.graph.node(operands[0]).dtype, *to)
            }
            Op::RowReduce(op) => {
                let a = self.operand(operands[0], reader);
                self.row_reduce(*op, a, reader.cols())
            }
            Op::ColumnSum => {
                let a = self.operand(operands[0], reader);
                // A sum that the kernel converts is stored as what it is converted to.
                let converts = |&&other: &&NodeId| finished_sum(self.graph, self.group.nodes, other) == Some(id);
                let stored = self.group.nodes.iter().find(converts).copied().unwrap_or(id);
                let arg = self.output_arg(stored, Access::Columns);
                self.stages.push(Stage::ColumnSum { value: a, arg, width: reader.cols() });
                return;
            }
            Op::Gather => self.gathered(operands[0], operands[1], reader),
            // A view that has a buffer of its own here repeats an inline pattern; a pattern stands for itself.
            Op::View(_) | Op::StopGradient => self.operand(operands[0], reader),
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
            Expr::Integer(..) | Expr::FloatToInt(_) => false,
        }
    }

    /// Arithmetic of `i32`; the larger and the smaller of two are picked.
    fn integer(&mut self, op: BinaryOp, a: ExprId, b: ExprId) -> ExprId {
        let mut picked = |compare: CompareOp| {
            let is_first = self.exprs.make(Expr::Compare(compare, a, b));
            self.exprs.make(Expr::Select(is_first, a, b))
        };
        let op = match op {
            BinaryOp::Max => return picked(CompareOp::Gt),
            BinaryOp::Min => return picked(CompareOp::Lt),
            BinaryOp::Add => IntegerOp::Add,
            BinaryOp::Sub => IntegerOp::Sub,
            BinaryOp::Mul => IntegerOp::Mul,
            BinaryOp::Div => unreachable!("a graph divides floats only"),
        };
        self.exprs.make(Expr::Integer(op, a, b))
    }

    /// One element per row, in a space of several columns. In a space of one column it is a row like any other.
    fn is_per_row(&self, shape: &Shape) -> bool {
        shape.cols() == 1 && self.space.cols != 1
    }

    fn cast(&mut self, a: ExprId, from: Dtype, to: Dtype) -> ExprId {
        match (from, to) {
            (Dtype::I32, Dtype::F32 | Dtype::F16 | Dtype::Bf16) => self.exprs.make(Expr::IntToFloat(a)),
            (Dtype::F32 | Dtype::F16 | Dtype::Bf16, Dtype::I32) => self.exprs.make(Expr::FloatToInt(a)),
            (Dtype::F32 | Dtype::F16 | Dtype::Bf16, Dtype::I8) => self.exprs.make(Expr::ToInt8(a)),
            (Dtype::F32 | Dtype::F16 | Dtype::Bf16, Dtype::F8e4m3) => self.exprs.make(Expr::ToFp8(a)),
            // Lanes are f32 whatever the storage type: rounding happens in the store.
            _ => a,
        }
    }

    fn row_reduce(&mut self, op: ReduceOp, value: ExprId, cols: usize) -> ExprId {
        if cols == 1 && self.space.cols != 1 {
            // One number per row, in a kernel whose rows are longer: there is nothing to sweep over.
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
        let placement = self.placement;
        let Some(placed) = placement.get(id) else { return self.pattern(id) };
        if let Some(&value) = self.values.get(&placed.base) {
            return value;
        }
        self.load(placed.base, &placed.layout, reader)
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

    /// Constants, indices and random masks, which are in no buffer.
    fn pattern(&mut self, id: NodeId) -> ExprId {
        let node = self.graph.node(id);
        match &node.op {
            Op::Const { value, dtype: Dtype::I32 } => self.exprs.make(Expr::ConstInt(*value as i32)),
            // A constant of a narrow dtype is rounded to it, as it would be if it were stored.
            Op::Const { value, dtype } => self.exprs.constant(match dtype {
                Dtype::F16 => half::f16::from_f32(round_to_odd(*value)).to_f32(),
                Dtype::Bf16 => half::bf16::from_f32(round_to_odd(*value)).to_f32(),
                _ => *value as f32,
            }),
            Op::Iota { axis, shape } => self.iota(*axis, shape),
            Op::Random { drop, offset, .. } => {
                let seed = self.operand(node.inputs[0], &Shape::scalar());
                self.exprs.make(Expr::Keep { seed, offset: *offset, threshold: keep_threshold(*drop) })
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
