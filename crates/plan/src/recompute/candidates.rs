//! Candidates for recomputation, and the cut that selects them.

use deuteron_graph::{NodeId, Op};

use super::boundary::{Boundary, Reads};
use crate::min_cut::{Network, UNLIMITED};

/// The goal of recomputation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Saving {
    /// Bytes that kernels move.
    #[default]
    Traffic,
    /// Bytes that are alive between forward and backward, whatever that moves.
    Memory,
}

/// The candidates, and their readers.
pub(super) struct Candidates<'a> {
    boundary: &'a Boundary<'a>,
    saving: Saving,
    /// For each forward value, the waves in whose row kernels it is read, or could be, were readers made again there.
    /// For the goal of memory, all of backward is one wave.
    waves: Vec<Vec<u32>>,
    /// Values with exactly one wave and no other obstacle.
    pub is_candidate: Vec<bool>,
}

impl<'a> Candidates<'a> {
    pub fn new(boundary: &'a Boundary<'a>, saving: Saving) -> Candidates<'a> {
        let count = boundary.first_backward;
        let waves = boundary.reads.iter().map(|reads| direct_waves(reads, saving)).collect();
        let mut candidates = Candidates { boundary, saving, waves, is_candidate: vec![false; count] };
        let allowed = match saving {
            Saving::Traffic => candidates.made_in_registers(),
            Saving::Memory => candidates.made_between_products(),
        };
        for id in boundary.forward().rev().filter(|&id| !boundary.is_view(id)) {
            let waves = &mut candidates.waves[id.index()];
            waves.sort_unstable();
            waves.dedup();
            if let (&[wave], true) = (waves.as_slice(), allowed[id.index()]) {
                candidates.is_candidate[id.index()] = true;
                for root in candidates.row_operands(id) {
                    candidates.waves[root.index()].push(wave);
                }
            }
        }
        candidates
    }

    /// The operands that the copy of a value needs. Tables that are gathered from are inputs; see `table_cost`.
    fn row_operands(&self, id: NodeId) -> Vec<NodeId> {
        let is_table = |root: NodeId, whole: Option<u64>| whole.is_some() && self.boundary.is_input(root);
        let operands = self.boundary.operands(id).filter(|&(root, whole)| !is_table(root, whole));
        operands.map(|(root, _)| root).filter(|&root| !self.boundary.is_free(root)).collect()
    }

    /// Bytes that the copy of a value reads from a table.
    fn table_cost(&self, id: NodeId) -> u128 {
        match self.saving {
            Saving::Traffic => self.boundary.operands(id).filter_map(|(_, whole)| whole.map(u128::from)).sum(),
            Saving::Memory => 0,
        }
    }

    fn made_in_registers(&self) -> Vec<bool> {
        let is_allowed = |id: NodeId| {
            let is_computed = !is_layout(self.boundary.op(id)) && !matches!(self.boundary.op(id), Op::RowReduce(_));
            is_computed && self.boundary.is_row_op(id) && self.boundary.reads[id.index()].whole.is_empty()
        };
        self.boundary.forward().map(is_allowed).collect()
    }

    fn made_between_products(&self) -> Vec<bool> {
        let boundary = self.boundary;
        let is_cheap = |id: NodeId| boundary.is_row_op(id) || matches!(boundary.op(id), Op::Concat { .. });
        let forward: Vec<NodeId> = boundary.forward().collect();
        let waves = boundary.waves(&forward, |id| !is_cheap(id) && !boundary.is_input(id));
        let mut allowed: Vec<bool> = forward.iter().map(|&id| is_cheap(id)).collect();
        for id in forward.into_iter().filter(|&id| !boundary.is_view(id) && is_cheap(id)) {
            for (root, _) in boundary.operands(id) {
                allowed[root.index()] &= waves[root.index()] == waves[id.index()];
            }
        }
        allowed
    }

    fn store_cost(&self, id: NodeId) -> u128 {
        if self.boundary.is_input(id) {
            return 0;
        }
        let bytes = self.boundary.bytes(id) as u128;
        let written = if self.boundary.stored[id.index()] { 0 } else { bytes };
        let alive = if self.boundary.is_output[id.index()] { 0 } else { bytes };
        match self.saving {
            Saving::Traffic => written,
            // Sums of `written` stay below 2^64: it decides between equals.
            Saving::Memory => (alive << 64) + written,
        }
    }

    fn read_cost(&self, id: NodeId) -> u128 {
        match self.saving {
            Saving::Traffic => self.boundary.bytes(id).into(),
            Saving::Memory => 0,
        }
    }

    /// For each forward value, whether it is recomputed.
    ///
    /// A value has a node for each wave that reads it, one for its buffer, and, if it is a candidate, one to be made;
    /// for others that one is the source. A node on the side of the sink is needed: `wave` needs `buffer`, and both
    /// cost unless `made` is needed as well, which needs the operands in its wave.
    pub fn cut(&self) -> Vec<bool> {
        let boundary = self.boundary;
        let mut network = Network::default();
        let (source, sink) = (network.node(), network.node());
        let mut made = vec![source; boundary.first_backward];
        let mut first_wave = vec![source; boundary.first_backward];
        for id in boundary.forward().filter(|&id| !boundary.is_view(id) && !boundary.is_free(id)) {
            let (reads, waves) = (&boundary.reads[id.index()], &self.waves[id.index()]);
            if waves.is_empty() && reads.whole.is_empty() {
                continue;
            }
            let buffer = network.node();
            let maker = if self.is_candidate[id.index()] { network.node() } else { source };
            made[id.index()] = maker;
            first_wave[id.index()] = buffer + 1 + (maker != source) as usize;
            network.edge(maker, buffer, self.store_cost(id));
            if !reads.whole.is_empty() {
                network.edge(buffer, sink, UNLIMITED);
            }
            let direct = direct_waves(reads, self.saving);
            for wave in waves {
                let reader = network.node();
                network.edge(buffer, reader, UNLIMITED);
                network.edge(maker, reader, self.read_cost(id));
                if direct.binary_search(wave).is_ok() {
                    network.edge(reader, sink, UNLIMITED);
                }
            }
        }
        for id in boundary.forward().filter(|&id| self.is_candidate[id.index()]) {
            network.edge(source, made[id.index()], self.table_cost(id));
            // A candidate has one wave, and its operands have that wave among theirs.
            let wave = self.waves[id.index()][0];
            for root in self.row_operands(id) {
                let position = self.waves[root.index()].partition_point(|&other| other < wave);
                network.edge(first_wave[root.index()] + position, made[id.index()], UNLIMITED);
            }
        }
        let cut = network.cut(source, sink);
        made.iter().map(|&node| node != source && cut.sink_side[node]).collect()
    }
}

/// Views and patterns, which readers compute themselves.
fn is_layout(op: &Op) -> bool {
    matches!(op, Op::View(_) | Op::StopGradient | Op::Const { .. } | Op::Iota { .. } | Op::Random { .. })
}

fn direct_waves(reads: &Reads, saving: Saving) -> Vec<u32> {
    match saving {
        Saving::Traffic => reads.rows.clone(),
        Saving::Memory if reads.rows.is_empty() && reads.whole.is_empty() => Vec::new(),
        Saving::Memory => vec![0],
    }
}
