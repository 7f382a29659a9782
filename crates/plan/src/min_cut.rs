//! Minimum cuts of directed networks, by push-relabel.
//!
//! Only the cut is needed, not the flow: the method stops when no more flow can reach the sink, and leaves the rest where it
//! is. The node farthest from the sink is processed first, so flow that arrives at a node on several paths leaves it at once: a chain
//! of any length is one sweep. Of all minimum cuts it returns the one closest to the sink, which is unique. No recursion.

/// An unlimited capacity. A `u128` holds a count of bytes in its upper bits, and a tie breaker in the lower ones.
pub(crate) const UNLIMITED: u128 = u128::MAX / 8;

/// A directed network. Nodes are numbers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Network {
    nodes: usize,
    /// In pairs: edge `e ^ 1` is edge `e` backwards.
    targets: Vec<usize>,
    capacities: Vec<u128>,
}

/// A minimum cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Sum of the capacities that are cut.
    pub capacity: u128,
    /// For each node, whether it is on the side of the sink. As few as possible are.
    pub sink_side: Vec<bool>,
}

impl Network {
    /// A new node.
    pub fn node(&mut self) -> usize {
        self.nodes += 1;
        self.nodes - 1
    }

    /// A new edge. One without capacity is left out.
    pub fn edge(&mut self, from: usize, to: usize, capacity: u128) {
        if capacity > 0 {
            self.targets.extend([to, from]);
            self.capacities.extend([capacity, 0]);
        }
    }

    /// The minimum cut closest to the sink. What leaves `source` must sum to less than [`UNLIMITED`].
    pub fn cut(self, source: usize, sink: usize) -> Cut {
        let mut preflow = Preflow::new(self, source, sink);
        preflow.run();
        let height = preflow.distances();
        let sink_side = height.iter().map(|&height| height < preflow.nodes).collect();
        Cut { capacity: preflow.excess[sink], sink_side }
    }
}

struct Preflow {
    nodes: usize,
    source: usize,
    sink: usize,
    targets: Vec<usize>,
    residual: Vec<u128>,
    /// The edges of a node are `around[starts[node]..starts[node + 1]]`.
    starts: Vec<usize>,
    around: Vec<usize>,
    excess: Vec<u128>,
    /// At most the distance to the sink; `nodes` where the sink is out of reach.
    height: Vec<usize>,
    /// The next edge of each node to try.
    cursor: Vec<usize>,
    /// For each height the nodes with excess, and all nodes. Entries of nodes that moved since are stale.
    active: Vec<Vec<usize>>,
    members: Vec<Vec<usize>>,
    /// For each height, how many nodes it has.
    count: Vec<usize>,
    /// Edges looked at for new heights since the distances were exact.
    work: usize,
}

impl Preflow {
    fn new(network: Network, source: usize, sink: usize) -> Preflow {
        let (nodes, edges) = (network.nodes, network.targets.len());
        let mut starts = vec![0; nodes + 1];
        (0..edges).for_each(|edge| starts[network.targets[edge ^ 1] + 1] += 1);
        (0..nodes).for_each(|node| starts[node + 1] += starts[node]);
        let mut next = starts.clone();
        let mut around = vec![0; edges];
        for edge in 0..edges {
            let from = network.targets[edge ^ 1];
            around[next[from]] = edge;
            next[from] += 1;
        }
        Preflow {
            nodes,
            source,
            sink,
            targets: network.targets,
            residual: network.capacities,
            starts,
            around,
            excess: vec![0; nodes],
            height: vec![0; nodes],
            cursor: vec![0; nodes],
            active: vec![Vec::new(); nodes],
            members: vec![Vec::new(); nodes],
            count: vec![0; nodes],
            work: 0,
        }
    }

    fn run(&mut self) {
        for position in self.starts[self.source]..self.starts[self.source + 1] {
            let edge = self.around[position];
            let amount = std::mem::take(&mut self.residual[edge]);
            self.residual[edge ^ 1] += amount;
            self.excess[self.targets[edge]] += amount;
        }
        let mut top = self.measure();
        loop {
            let Some(node) = self.active[top].pop() else {
                match top.checked_sub(1) {
                    Some(below) => top = below,
                    None => return,
                }
                continue;
            };
            if self.height[node] == top && self.excess[node] > 0 {
                top = self.discharge(node);
            }
            // Distances that fell far behind cost more than measuring them again.
            if self.work > 4 * self.around.len() {
                top = self.measure();
            }
        }
    }

    /// Pushes a node's excess towards the sink, lifting it as needed. Returns the height to continue from.
    fn discharge(&mut self, node: usize) -> usize {
        loop {
            while self.cursor[node] < self.starts[node + 1] {
                let edge = self.around[self.cursor[node]];
                let target = self.targets[edge];
                if self.residual[edge] > 0 && self.height[node] == self.height[target] + 1 {
                    let amount = self.excess[node].min(self.residual[edge]);
                    self.residual[edge] -= amount;
                    self.residual[edge ^ 1] += amount;
                    self.excess[node] -= amount;
                    if self.excess[target] == 0 && target != self.sink {
                        self.active[self.height[target]].push(target);
                    }
                    self.excess[target] += amount;
                    if self.excess[node] == 0 {
                        return self.height[node];
                    }
                }
                self.cursor[node] += 1;
            }
            let before = self.height[node];
            self.lift(node);
            if self.height[node] >= self.nodes {
                return before;
            }
        }
    }

    /// Lifts it just above the lowest node it can push to. If a height becomes empty, the sink is unreachable from above.
    fn lift(&mut self, node: usize) {
        let (start, end) = (self.starts[node], self.starts[node + 1]);
        self.work += end - start;
        let before = self.height[node];
        let open = self.around[start..end].iter().filter(|&&edge| self.residual[edge] > 0);
        let lowest = open.map(|&edge| self.height[self.targets[edge]]).min().unwrap_or(self.nodes);
        self.count[before] -= 1;
        self.cursor[node] = start;
        if self.count[before] > 0 && lowest + 1 < self.nodes {
            self.place(node, lowest + 1);
            return;
        }
        self.height[node] = self.nodes;
        if self.count[before] > 0 {
            return;
        }
        for height in before + 1..self.nodes {
            if self.count[height] == 0 {
                break;
            }
            for member in std::mem::take(&mut self.members[height]) {
                if self.height[member] == height {
                    self.height[member] = self.nodes;
                }
            }
            self.count[height] = 0;
        }
    }

    fn place(&mut self, node: usize, height: usize) {
        self.height[node] = height;
        self.count[height] += 1;
        self.members[height].push(node);
    }

    /// Makes all heights exact. Returns the greatest one of a node with excess.
    fn measure(&mut self) -> usize {
        let distances = self.distances();
        self.active.iter_mut().chain(&mut self.members).for_each(Vec::clear);
        self.count.fill(0);
        self.work = 0;
        let mut top = 0;
        for (node, &distance) in distances.iter().enumerate() {
            self.cursor[node] = self.starts[node];
            self.height[node] = self.nodes;
            if distance == self.nodes || node == self.source {
                continue;
            }
            self.place(node, distance);
            if self.excess[node] > 0 && node != self.sink {
                self.active[distance].push(node);
                top = top.max(distance);
            }
        }
        top
    }

    /// For each node the number of edges to the sink on which more can flow, or `nodes` if there is no way.
    fn distances(&self) -> Vec<usize> {
        let mut distances = vec![self.nodes; self.nodes];
        distances[self.sink] = 0;
        let mut queue = vec![self.sink];
        let mut next = 0;
        while let Some(&node) = queue.get(next) {
            next += 1;
            for &edge in &self.around[self.starts[node]..self.starts[node + 1]] {
                let from = self.targets[edge];
                if self.residual[edge ^ 1] > 0 && distances[from] == self.nodes {
                    distances[from] = distances[node] + 1;
                    queue.push(from);
                }
            }
        }
        distances
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use deuteron_reference::Generator;
    use deuteron_testkit::effort::cpu_time;

    /// Every set of nodes that holds the sink and not the source, by the capacity into it; the smallest of the
    /// cheapest.
    fn every_cut(nodes: usize, edges: &[(usize, usize, u128)]) -> Cut {
        let mut best: Option<(u128, u32, Cut)> = None;
        for bits in 0..1u32 << (nodes - 2) {
            let sink_side: Vec<bool> =
                (0..nodes).map(|node| node == 1 || node > 1 && bits >> (node - 2) & 1 == 1).collect();
            let crossing = edges.iter().filter(|(from, to, _)| !sink_side[*from] && sink_side[*to]);
            let capacity = crossing.map(|(_, _, capacity)| capacity).sum();
            let size = bits.count_ones();
            if best.as_ref().is_none_or(|(least, smallest, _)| (capacity, size) < (*least, *smallest)) {
                best = Some((capacity, size, Cut { capacity, sink_side }));
            }
        }
        best.unwrap().2
    }

    fn cut(nodes: usize, edges: &[(usize, usize, u128)]) -> Cut {
        let mut network = Network::default();
        (0..nodes).for_each(|_| assert!(network.node() < nodes));
        edges.iter().for_each(|&(from, to, capacity)| network.edge(from, to, capacity));
        network.cut(0, 1)
    }

    #[test]
    fn small_networks_agree_with_every_cut_there_is() {
        let mut generator = Generator::new(1);
        for case in 0..4000 {
            let nodes = 2 + generator.below(9);
            let mut edges = Vec::new();
            for _ in 0..generator.below(4 * nodes) {
                let (from, to) = (generator.below(nodes), generator.below(nodes));
                // Few different capacities make many ties; what leaves the source is limited.
                let unlimited = from != 0 && generator.chance(0.2);
                let capacity = if unlimited { 1 << 40 } else { generator.below(4) as u128 };
                if from != to {
                    edges.push((from, to, capacity));
                }
            }
            assert_eq!(cut(nodes, &edges), every_cut(nodes, &edges), "case {case}: {edges:?}");
        }
    }

    #[test]
    fn among_equals_the_cut_next_to_the_sink_is_taken() {
        let chain = cut(4, &[(0, 2, 5), (2, 3, 5), (3, 1, 5)]);
        assert_eq!(chain, Cut { capacity: 5, sink_side: vec![false, true, false, false] });
    }

    /// Small streams join along a chain whose end is far away; many of its edges are narrow.
    #[test]
    fn long_chains_take_no_time() {
        let length = 40_000;
        for narrow in [usize::MAX, 7, 1000] {
            let cut = || {
                let mut network = Network::default();
                let (source, sink) = (network.node(), network.node());
                let links: Vec<usize> = (0..length).map(|_| network.node()).collect();
                for (position, &link) in links.iter().enumerate() {
                    network.edge(source, link, 1);
                    let width = if position % narrow == narrow - 1 { 5 } else { UNLIMITED };
                    network.edge(link, links.get(position + 1).copied().unwrap_or(sink), width);
                }
                network.cut(source, sink)
            };
            let time = cpu_time(cut);
            assert!(time.as_secs_f64() < 1.0, "{narrow}: {time:?}");
            let cut = cut();
            let expected = if narrow > length { length } else { 5.min(narrow) + (length % narrow) };
            assert_eq!(cut.capacity, expected as u128, "{narrow}");
        }
    }
}
