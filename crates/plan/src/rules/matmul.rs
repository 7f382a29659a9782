//! Chains of matmuls: one with its prologue and epilogue, several with one left operand, or rows multiplied by matrices that indices
//! select.

use deuteron_graph::{Dtype, NodeId, Op};

use crate::chain::{Chain, Link, Reach, Side};
use crate::machine::{MachineKind, Quantity};
use crate::rates::ridge_points;
use crate::reason::Reason;
use crate::rules::rows::{Edge, Rules};
use crate::space::matmul_size;

impl Rules<'_> {
    /// The chain of matmuls and row nodes.
    pub(super) fn matmul_chain(
        &self,
        matmuls: Vec<NodeId>,
        rows: &[NodeId],
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Chain, Reason> {
        self.check_shared_operand(&matmuls)?;
        if let Some(gather) = self.picked_operand(rows, &matmuls) {
            return self.routed_chain(matmuls[0], rows, gather, leaves);
        }
        let (before, after) = self.sides(rows, &matmuls)?;
        self.check_unread(&before, leaves)?;
        let prologue = self.prologue(before, &matmuls, leaves)?;
        let epilogue = self.epilogue(after, &matmuls, leaves)?;
        self.check_operand_positions(&prologue.nodes, &matmuls)?;
        self.chain_around(prologue, matmuls, epilogue)
    }

    /// Matmuls with a legal prologue and epilogue, if there are few enough rows for both; or if concurrent blocks compute the rows of a
    /// prologue for each other, and a cluster holds the rows of an epilogue, or of bytes blocks that meet in memory.
    pub(super) fn chain_around(&self, prologue: Side, matmuls: Vec<NodeId>, epilogue: Side) -> Result<Chain, Reason> {
        let transpose_a = matches!(self.graph.node(matmuls[0]).op, Op::Matmul { transpose_a: true, .. });
        let (_, columns, _, batch) = matmul_size(self.graph, matmuls[0], transpose_a);
        let most = self.machine.find(Quantity::ClusterColumns).unwrap_or(0.0);
        let held = matmuls.len() == 1 && batch == 1 && ((columns as f64) <= most || self.meets_in_memory(matmuls[0]));
        let made = batch == 1 && most > 1.0;
        if (prologue.reach == Reach::Rows && !made) || (epilogue.reach == Reach::Rows && !held) {
            self.check_few_rows(matmuls[0])?;
        }
        Ok(Chain { prologue, links: vec![Link::Matmul { nodes: matmuls }], epilogue })
    }

    /// Whether the blocks of a matmul can tell each other of their rows through memory, however many columns there are: sums of bytes stay in
    /// registers until then.
    fn meets_in_memory(&self, matmul: NodeId) -> bool {
        let operand = self.graph.node(matmul).inputs[0];
        let clusters = self.machine.find(Quantity::ClusterColumns).unwrap_or(0.0) > 1.0;
        clusters && self.graph.node(operand).dtype == Dtype::I8
    }

    /// Checks that only the matmuls read the results of a prologue.
    pub(super) fn check_unread(&self, before: &[NodeId], leaves: &dyn Fn(NodeId) -> bool) -> Result<(), Reason> {
        before.iter().find(|&&id| leaves(id)).map_or(Ok(()), |&value| Err(Reason::ReadElsewhere { value }))
    }

    /// Row nodes before matmuls.
    pub(super) fn prologue(
        &self,
        nodes: Vec<NodeId>,
        matmuls: &[NodeId],
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Side, Reason> {
        let reach = self.reach_of_side(&nodes, matmuls, leaves)?;
        self.check_column_sums(&nodes, false)?;
        let crossing = self.read_values(matmuls, &nodes);
        Ok(Side { nodes, reach, crossing })
    }

    /// Row nodes after matmuls.
    pub(super) fn epilogue(
        &self,
        nodes: Vec<NodeId>,
        matmuls: &[NodeId],
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Side, Reason> {
        let reach = self.reach_of_side(&nodes, matmuls, leaves)?;
        // Blocks store sums over their rows, which are added up behind the launch; so as on GPUs whose blocks meet.
        self.check_column_sums(&nodes, self.machine.find(Quantity::ClusterColumns).unwrap_or(0.0) > 1.0)?;
        let crossing = self.read_values(&nodes, matmuls);
        Ok(Side { nodes, reach, crossing })
    }

    /// Sums over rows in an epilogue, where possible.
    fn check_column_sums(&self, side: &[NodeId], can_be: bool) -> Result<(), Reason> {
        let is_sum = |id: &&NodeId| matches!(self.graph.node(**id).op, Op::ColumnSum);
        match side.iter().find(is_sum) {
            Some(&value) if !can_be => Err(Reason::NeedsAllRows { value }),
            _ => Ok(()),
        }
    }

    /// Those of `made` that `readers` read, in order.
    fn read_values(&self, readers: &[NodeId], made: &[NodeId]) -> Vec<NodeId> {
        let mut read = Vec::new();
        for &reader in readers {
            self.placement.for_reads(self.graph, reader, &mut |value| {
                read.extend(self.placement.base(value).filter(|base| made.contains(base) && !read.contains(base)));
            });
        }
        read.sort_unstable();
        read
    }

    /// The right operands of a batch of matmuls of one row, if each is a row of a table.
    fn picked_operand(&self, rows: &[NodeId], matmuls: &[NodeId]) -> Option<NodeId> {
        let &[matmul] = matmuls else { return None };
        let node = self.graph.node(matmul);
        let picked = self.placement.base(node.inputs[1]).filter(|base| rows.contains(base))?;
        let batch: usize = node.shape[..node.shape.rank() - 2].iter().product();
        let gather = self.graph.node(picked);
        let one_each = gather.shape.rows() == batch && node.shape[node.shape.rank() - 2] == 1;
        (matches!(gather.op, Op::Gather) && one_each).then_some(picked)
    }

    /// A matmul whose right operand is gathered from a table, with its epilogue. The table and the indices are in memory, and
    /// nothing else reads the gathered matrices.
    fn routed_chain(
        &self,
        node: NodeId,
        rows: &[NodeId],
        gather: NodeId,
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Chain, Reason> {
        let others: Vec<NodeId> = rows.iter().copied().filter(|&id| id != gather).collect();
        if let Some(&value) = self.feeding(&others, &[node, gather]).first() {
            return Err(Reason::NeedsAllRows { value });
        }
        if !self.read_values(&others, &[gather]).is_empty() || leaves(gather) {
            return Err(Reason::ReadElsewhere { value: gather });
        }
        let epilogue = self.epilogue(others, &[node], leaves)?;
        if epilogue.reach == Reach::Rows && !self.meets_in_memory(node) {
            self.check_few_rows(node)?;
        }
        Ok(Chain { prologue: Side::NONE, links: vec![Link::Routed { node, gather }], epilogue })
    }

    /// Several matmuls in one kernel read one left operand, over one size of rows.
    fn check_shared_operand(&self, matmuls: &[NodeId]) -> Result<(), Reason> {
        let first = self.graph.node(matmuls[0]);
        let alike = matmuls.iter().all(|&id| {
            let node = self.graph.node(id);
            node.inputs[0] == first.inputs[0]
                && node.op == first.op
                && node.shape.rank() == first.shape.rank()
                && node.shape.rows() == first.shape.rows()
        });
        if matmuls.len() > 3 || !alike {
            return Err(Reason::SeveralProducts { products: matmuls.len() });
        }
        Ok(())
    }

    /// Those of `rows` whose values the targets read, directly or through others of them, in order.
    pub(super) fn feeding(&self, rows: &[NodeId], targets: &[NodeId]) -> Vec<NodeId> {
        let mut found: Vec<NodeId> = Vec::new();
        let mut waiting: Vec<NodeId> = targets.to_vec();
        while let Some(reader) = waiting.pop() {
            self.placement.for_reads(self.graph, reader, &mut |value| {
                let base = self.placement.base(value).filter(|base| rows.contains(base) && !found.contains(base));
                found.extend(base);
                waiting.extend(base);
            });
        }
        found.sort_unstable();
        found
    }

    /// Row nodes before and after the matmuls: their operands, and all others, which may also read results of other kernels.
    /// No node can be on both sides.
    pub(super) fn sides(&self, rows: &[NodeId], matmuls: &[NodeId]) -> Result<(Vec<NodeId>, Vec<NodeId>), Reason> {
        let before = self.feeding(rows, matmuls);
        let after: Vec<NodeId> = rows.iter().copied().filter(|id| !before.contains(id)).collect();
        // What a prologue makes exists only while an operand is loaded: the other side of the matmul never sees it.
        for &id in &after {
            let mut seen = None;
            self.placement.for_reads(self.graph, id, &mut |value| {
                seen = seen.or(self.placement.base(value).filter(|base| before.contains(base)));
            });
            if let Some(value) = seen {
                return Err(Reason::ReadElsewhere { value });
            }
        }
        Ok((before, after))
    }

    /// One side of a matmul: a row kernel's rules, over the space of the matmul's operand or result.
    fn reach_of_side(
        &self,
        side: &[NodeId],
        matmuls: &[NodeId],
        leaves: &dyn Fn(NodeId) -> bool,
    ) -> Result<Reach, Reason> {
        if side.is_empty() {
            return Ok(Reach::None);
        }
        let space = self.check_rows(side, leaves)?;
        for &id in side {
            let mut problem = None;
            self.placement.for_reads(self.graph, id, &mut |value| {
                let Some(producer) = self.placement.base(value) else { return };
                if matmuls.contains(&producer) {
                    problem = problem.take().or(self.check_edge(&Edge { producer, value, consumer: id }, space).err());
                }
            });
            problem.map_or(Ok(()), Err)?;
        }
        Ok(if side.iter().any(|&id| self.is_reduction(id)) { Reach::Rows } else { Reach::Pointwise })
    }

    /// A prologue makes the left operand, in place.
    fn check_operand_positions(&self, before: &[NodeId], matmuls: &[NodeId]) -> Result<(), Reason> {
        for &matmul in matmuls {
            let node = self.graph.node(matmul);
            for (position, &input) in node.inputs.iter().enumerate() {
                let Some(base) = self.placement.base(input) else { continue };
                if before.contains(&base) && (position != 0 || self.graph.node(base).shape.rows() != node.shape.rows())
                {
                    return Err(Reason::ViewMovesData { view: input });
                }
            }
        }
        Ok(())
    }

    /// Work on whole rows beside a matmul needs few rows.
    pub(super) fn check_few_rows(&self, matmul: NodeId) -> Result<(), Reason> {
        let transpose_a = matches!(self.graph.node(matmul).op, Op::Matmul { transpose_a: true, .. });
        let (m, n, k, batch) = matmul_size(self.graph, matmul, transpose_a);
        let few = self.machine.count(Quantity::FewRows);
        let rows = m * batch;
        if rows <= few {
            return Ok(());
        }
        let element = self.graph.node(self.graph.node(matmul).inputs[0]).dtype.bytes();
        let intensity = 2.0 * (m * n * k) as f64 / ((m * k + k * n + m * n) * element).max(1) as f64;
        let (ridge, _) = ridge_points(self.machine, 8 * element as u32);
        let units = match self.machine.kind {
            MachineKind::Gpu => "tensor cores",
            MachineKind::Cpu => "vector units",
        };
        Err(Reason::WholeRows { intensity, ridge, rows, few, cols: n, units })
    }
}
