// Layered layout of clusters: rank by longest path, order by barycentre, place by least squares.
//
// A cluster is a fused kernel; its operations lie inside it in rows of their own. Lines that pass a rank get a lane in
// it, so they run between clusters and not behind them. Lines over more than LONGEST_LINE ranks have no lane: a
// gradient reads what was computed thousands of ranks above, and such lanes would be all there is to see.

const LONGEST_LINE = 16;
const GAP = { row: 30, column: 26, inner: 16, lane: 12 };
const HULL = { pad: 12, head: 20 };
const SWEEPS = 6;
const MIDDLE_PULL = 0.06;

/** Places nodes ({ width, height, cluster }) and gives { clusters, lanes, width, height }. Edges are [from, to]. */
function layOut(nodes, edges) {
  const clusters = gather(nodes, edges);
  const between = edges.filter(([from, to]) => nodes[from].home !== nodes[to].home);
  rank(clusters, nodes, between);
  const lanes = new Map();
  const rows = makeRows(clusters, nodes, between, lanes);
  for (let sweep = 0; sweep < SWEEPS; sweep++) reorder(rows, sweep % 2 === 0);
  pack(rows);
  for (let sweep = 0; sweep < SWEEPS + 2; sweep++) straighten(rows, sweep % 2 === 0);
  return settle(rows, clusters, nodes, lanes);
}

/** Clusters with their nodes in inner rows; a cluster of one has no hull. */
function gather(nodes, edges) {
  const byKey = new Map();
  nodes.forEach((node, index) => {
    if (!byKey.has(node.cluster)) byKey.set(node.cluster, { key: node.cluster, members: [], preceding: new Set(), following: new Set() });
    node.home = byKey.get(node.cluster);
    node.home.members.push(index);
    node.depth = 0;
  });
  // Producers come first in the list, so one pass finds the longest path; a line against the order is left out.
  const inner = edges.filter(([from, to]) => nodes[from].home === nodes[to].home && from < to).sort((a, b) => a[1] - b[1]);
  for (const [from, to] of inner) nodes[to].depth = Math.max(nodes[to].depth, nodes[from].depth + 1);
  const clusters = [...byKey.values()];
  for (const cluster of clusters) arrange(cluster, nodes);
  return clusters;
}

function arrange(cluster, nodes) {
  const levels = [];
  for (const index of cluster.members) (levels[nodes[index].depth] ||= []).push(nodes[index]);
  cluster.levels = levels.filter(Boolean);
  const hull = cluster.members.length > 1 ? HULL : { pad: 0, head: 0 };
  const widths = cluster.levels.map((level) => level.reduce((sum, node) => sum + node.width + GAP.inner, -GAP.inner));
  cluster.width = Math.max(...widths) + 2 * hull.pad;
  let y = hull.head + hull.pad;
  cluster.levels.forEach((level, depth) => {
    let x = -widths[depth] / 2;
    for (const node of level) {
      node.inside = { x, y };
      node.isFirst = depth === 0;
      node.isLast = depth === cluster.levels.length - 1;
      x += node.width + GAP.inner;
    }
    y += Math.max(...level.map((node) => node.height)) + GAP.inner;
  });
  cluster.height = y - GAP.inner + hull.pad;
}

function rank(clusters, nodes, between) {
  for (const [from, to] of between) {
    nodes[to].home.preceding.add(nodes[from].home);
    nodes[from].home.following.add(nodes[to].home);
  }
  const open = new Map(clusters.map((cluster) => [cluster, cluster.preceding.size]));
  const ready = clusters.filter((cluster) => !cluster.preceding.size);
  const order = [];
  let search = 0;
  while (order.length < clusters.length) {
    // A circle can only come from a damaged file: it is opened at its first cluster.
    while (!ready.length) {
      const next = clusters[search++];
      if (open.get(next) > 0) {
        open.set(next, 0);
        ready.push(next);
      }
    }
    const cluster = ready.pop();
    order.push(cluster);
    cluster.rank = 0;
    for (const producer of cluster.preceding) if (producer.rank !== undefined && producer !== cluster) cluster.rank = Math.max(cluster.rank, producer.rank + 1);
    for (const reader of cluster.following) {
      const left = open.get(reader) - 1;
      if (left < 0) continue;
      open.set(reader, left);
      if (left === 0) ready.push(reader);
    }
  }
  // What reads nothing stands just above its first reader.
  for (const cluster of clusters) {
    if (cluster.preceding.size || !cluster.following.size) continue;
    cluster.rank = Math.max(0, Math.min(...[...cluster.following].map((reader) => reader.rank)) - 1);
  }
}

/** Rows of items: clusters, and lanes for lines that pass. Lines from one node share their lanes. */
function makeRows(clusters, nodes, between, lanes) {
  const rows = [];
  const addItem = (rankOf, item) => {
    (rows[rankOf] ||= []).push(item);
    return item;
  };
  for (const cluster of clusters) {
    cluster.item = addItem(cluster.rank, { width: cluster.width, cluster, above: [], below: [] });
  }
  const link = (upper, lower) => {
    if (upper.below.includes(lower)) return;
    upper.below.push(lower);
    lower.above.push(upper);
  };
  for (const [from, to] of between) {
    const start = nodes[from].home;
    const end = nodes[to].home;
    const span = end.rank - start.rank;
    if (span < 1 || span > LONGEST_LINE) continue;
    if (!lanes.has(from)) lanes.set(from, []);
    const chain = lanes.get(from);
    for (let step = chain.length; step < span - 1; step++) {
      chain.push(addItem(start.rank + step + 1, { width: GAP.lane, above: [], below: [] }));
      link(step ? chain[step - 1] : start.item, chain[step]);
    }
    link(span > 1 ? chain[span - 2] : start.item, end.item);
  }
  return Array.from(rows, (row) => row || []);
}

function reorder(rows, downwards) {
  rows.forEach((row) => row.forEach((item, index) => { item.order = index; }));
  const sequence = downwards ? rows : [...rows].reverse();
  for (const row of sequence) {
    for (const item of row) {
      const others = downwards ? item.above : item.below;
      item.wish = others.length ? others.reduce((sum, other) => sum + other.order, 0) / others.length : item.order;
    }
    row.sort((a, b) => a.wish - b.wish);
    row.forEach((item, index) => { item.order = index; });
  }
}

function pack(rows) {
  for (const row of rows) {
    let x = 0;
    for (const item of row) {
      item.x = x + item.width / 2;
      x += item.width + GAP.column;
    }
    for (const item of row) item.x -= (x - GAP.column) / 2;
  }
}

/** Moves every item of a row as near to its neighbours as the order allows: pooled averages, the least squares. */
function straighten(rows, downwards) {
  for (const row of downwards ? rows : [...rows].reverse()) {
    const blocks = [];
    let offset = 0;
    row.forEach((item, index) => {
      if (index) offset += (row[index - 1].width + item.width) / 2 + GAP.column;
      item.offset = offset;
      let block = { count: 1, ...wish(item, downwards) };
      block.sum -= block.weight * offset;
      while (blocks.length && blocks.at(-1).sum / blocks.at(-1).weight > block.sum / block.weight) {
        const left = blocks.pop();
        block = { count: left.count + block.count, weight: left.weight + block.weight, sum: left.sum + block.sum };
      }
      blocks.push(block);
    });
    let index = 0;
    for (const { count, weight, sum } of blocks) {
      for (const end = index + count; index < end; index++) row[index].x = sum / weight + row[index].offset;
    }
  }
}

/** Where an item wants to be, and how much: among what it is joined to. */
function wish(item, downwards) {
  const others = downwards ? item.above : item.below;
  // A weak pull to the middle: without it a thousand ranks drift aside, a little each.
  let [weight, sum] = [MIDDLE_PULL, 0];
  for (const other of others.length ? others : [...item.above, ...item.below]) {
    // Lanes should be straight, so lines between lanes pull hardest.
    const pull = item.cluster || other.cluster ? 1 : 6;
    weight += pull;
    sum += pull * other.x;
  }
  return { weight, sum };
}

function settle(rows, clusters, nodes, lanes) {
  let [left, right, y] = [Infinity, -Infinity, 0];
  for (const row of rows) {
    const height = Math.max(20, ...row.map((item) => (item.cluster ? item.cluster.height : 0)));
    for (const item of row) {
      item.top = y;
      item.bottom = y + height;
      left = Math.min(left, item.x - item.width / 2);
      right = Math.max(right, item.x + item.width / 2);
    }
    y += height + GAP.row;
  }
  for (const cluster of clusters) {
    cluster.x = cluster.item.x - cluster.width / 2 - left;
    cluster.y = cluster.item.top;
    cluster.bottom = cluster.item.bottom;
    for (const index of cluster.members) {
      const node = nodes[index];
      node.x = cluster.item.x - left + node.inside.x;
      node.y = cluster.y + node.inside.y;
    }
  }
  for (const chain of lanes.values()) for (const lane of chain) lane.x -= left;
  return { clusters, lanes, width: Math.max(1, right - left), height: Math.max(1, y - GAP.row) };
}
