// What the graph shows: the visible operations and the summaries of repeated ones, laid out, and as drawn shapes.

const BOX = { width: 164, height: 40 };
// Below this scale letters cannot be read, so boxes are drawn as one path.
const READABLE = 0.42;

/** The scene for the repeats whose positions are in `expanded`; the others show once, with a summary of the rest. */
function makeScene(ops, repeats, expanded) {
  const scene = { nodes: [], frames: [], nodeOf: new Array(ops.length) };
  const hidden = new Map();
  repeats.forEach((repeat, index) => {
    const rest = [repeat.start + repeat.period, repeat.start + repeat.period * repeat.count];
    if (!expanded.has(index)) hidden.set(rest[0], { index, repeat, from: rest[0], to: rest[1] });
  });
  for (let id = 0; id < ops.length; id++) {
    const rest = hidden.get(id);
    if (!rest) {
      scene.nodeOf[id] = scene.nodes.length;
      scene.nodes.push({ op: ops[id], cluster: `launch ${ops[id].after}`, ...BOX });
      continue;
    }
    scene.nodeOf.fill(scene.nodes.length, rest.from, rest.to);
    scene.nodes.push({ rest, cluster: `rest ${rest.index}`, width: BOX.width + 24, height: BOX.height + 14 });
    scene.frames.push({ ...rest, members: [] });
    id = rest.to - 1;
  }
  scene.edges = collectEdges(ops, scene);
  Object.assign(scene, layOut(scene.nodes, scene.edges));
  scene.routes = scene.edges.map(([from, to]) => route(scene, from, to));
  for (const frame of scene.frames) placeFrame(frame, scene);
  scene.groups = { before: beforeGroups(scene), after: scene.clusters.filter((cluster) => cluster.members.length > 1) };
  for (const cluster of scene.groups.after) {
    const ops = cluster.members.map((member) => scene.nodes[member].op);
    cluster.kernel = ops[0].kernels.after;
    // A kernel of several parts that was one before is no gain: it shows as it did before.
    cluster.look = ops.some((op) => op.before !== ops[0].before) ? 'after' : 'before';
  }
  return scene;
}

function collectEdges(ops, scene) {
  const seen = new Set();
  const edges = [];
  for (let id = 0; id < ops.length; id++) {
    for (const read of ops[id].reads) {
      const [from, to] = [scene.nodeOf[read], scene.nodeOf[id]];
      const key = from * scene.nodes.length + to;
      if (from === to || seen.has(key)) continue;
      seen.add(key);
      edges.push([from, to]);
    }
  }
  return edges;
}

/** Fused groups of the unfused plan: rare, but an operation may need more than one. */
function beforeGroups(scene) {
  const groups = new Map();
  for (const node of scene.nodes) {
    if (!node.op) continue;
    if (!groups.has(node.op.before)) groups.set(node.op.before, []);
    groups.get(node.op.before).push(node);
  }
  return [...groups.values()].filter((nodes) => nodes.length > 1).map((nodes) => {
    const box = around(nodes, 7);
    return { ...box, kernel: nodes[0].op.kernels.before };
  });
}

function around(boxes, pad) {
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (const box of boxes) {
    left = Math.min(left, box.x);
    top = Math.min(top, box.y);
    right = Math.max(right, box.x + box.width);
    bottom = Math.max(bottom, box.y + box.height);
  }
  return { x: left - pad, y: top - pad, width: right - left + 2 * pad, height: bottom - top + 2 * pad };
}

/** A frame holds the repetition that is shown and the summary of the others. */
function placeFrame(frame, scene) {
  const { start, period } = frame.repeat;
  const clusters = new Set();
  for (let id = start; id < start + period; id++) clusters.add(scene.nodes[scene.nodeOf[id]].home);
  clusters.add(scene.nodes[scene.nodeOf[frame.from]].home);
  const box = around([...clusters], 14);
  Object.assign(frame, box, { y: box.y - 16, height: box.height + 16 });
}

/** The line from one node to another as a path; nothing where it is too long to draw. */
function route(scene, from, to) {
  const [start, end] = [scene.nodes[from], scene.nodes[to]];
  if (start.home === end.home) return innerRoute(start, end);
  const span = end.home.rank - start.home.rank;
  if (span < 1 || span > LONGEST_LINE) return null;
  let { path, x, y } = leave(start);
  const chain = scene.lanes.get(from) || [];
  for (let step = 0; step < span - 1; step++) {
    path += bend(x, y, chain[step].x, chain[step].top) + `V${chain[step].bottom.toFixed(1)}`;
    [x, y] = [chain[step].x, chain[step].bottom];
  }
  const arrival = arrive(end);
  return { from, to, path: path + bend(x, y, arrival.x, arrival.y) + arrival.path, top: start.y, bottom: end.y + end.height };
}

function bend(x0, y0, x1, y1) {
  const middle = ((y0 + y1) / 2).toFixed(1);
  return Math.abs(x0 - x1) < 0.5 ? `V${y1.toFixed(1)}` : `C${x0.toFixed(1)} ${middle} ${x1.toFixed(1)} ${middle} ${x1.toFixed(1)} ${y1.toFixed(1)}`;
}

/** Out of the lowest operations straight down, out of others along the right side of their kernel. */
function leave(node) {
  const home = node.home;
  if (node.isLast) {
    const x = node.x + node.width / 2;
    return { path: `M${x.toFixed(1)} ${node.y + node.height}V${home.bottom.toFixed(1)}`, x, y: home.bottom };
  }
  const [x, y] = [home.x + home.width - 4, node.y + node.height / 2];
  return { path: `M${(node.x + node.width).toFixed(1)} ${y}H${(x - 4).toFixed(1)}Q${x.toFixed(1)} ${y} ${x.toFixed(1)} ${y + 5}V${home.bottom.toFixed(1)}`, x, y: home.bottom };
}

/** Into the highest operations from above, into others along the left side of their kernel. */
function arrive(node) {
  const home = node.home;
  if (node.isFirst) return { x: node.x + node.width / 2, y: home.y, path: `V${node.y}` };
  const [x, y] = [home.x + 4, node.y + node.height / 2];
  return { x, y: home.y, path: `V${y - 5}Q${x.toFixed(1)} ${y} ${(x + 4).toFixed(1)} ${y}H${node.x.toFixed(1)}` };
}

function innerRoute(start, end) {
  const [x0, y0] = [start.x + start.width / 2, start.y + start.height];
  const [x1, y1] = [end.x + end.width / 2, end.y];
  const top = Math.min(start.y, end.y);
  const bottom = Math.max(start.y, end.y) + BOX.height;
  if (end.depth - start.depth === 1) return { path: `M${x0.toFixed(1)} ${y0}` + bend(x0, y0, x1, y1), top, bottom };
  const side = start.home.x + start.home.width - 3;
  return { path: `M${(start.x + start.width).toFixed(1)} ${start.y + 20}H${side.toFixed(1)}V${end.y + 20}H${(end.x + end.width).toFixed(1)}`, top, bottom };
}

// ---- drawing ----

/** Draws what lies between two heights of the scene, for one side. */
function drawScene(scene, side, top, bottom, scale) {
  const near = (box) => box.y < bottom && box.y + box.height > top;
  const layer = drawn('g', { class: scale < READABLE ? 'far' : 'near' });
  for (const frame of scene.frames.filter(near)) layer.append(drawFrame(frame));
  for (const group of scene.groups[side].filter(near)) layer.append(drawHull(group, side));
  const lines = scene.routes.filter((line) => line && line.top < bottom && line.bottom > top);
  layer.append(drawn('path', { class: 'lines', d: lines.map((line) => line.path).join('') }));
  layer.append(drawn('path', { class: 'ports', d: ports(scene, near) }));
  if (side === 'after') for (const group of scene.groups.after.filter(near)) layer.append(drawHullName(group));
  const nodes = scene.nodes.filter(near);
  if (scale < READABLE) {
    for (const [kind, path] of mergedBoxes(nodes, side)) layer.append(drawn('path', { class: `boxes ${kind}`, d: path }));
    for (const node of nodes) if (node.rest) layer.append(drawRest(node));
  } else {
    for (const node of nodes) layer.append(node.rest ? drawRest(node) : drawOp(node, side));
  }
  return layer;
}

function mergedBoxes(nodes, side) {
  const paths = new Map();
  for (const node of nodes) {
    if (node.rest) continue;
    const kernel = node.op.kernels[side];
    const kind = kindClass(kernel ? kernel.kind : node.op.kind);
    paths.set(kind, `${paths.get(kind) || ''}M${node.x.toFixed(1)} ${node.y}h${node.width}v${node.height}h${-node.width}z`);
  }
  return paths;
}

/** Short stubs where a line is too long to be drawn. */
function ports(scene, near) {
  let path = '';
  scene.edges.forEach(([from, to], index) => {
    if (scene.routes[index]) return;
    const [start, end] = [scene.nodes[from], scene.nodes[to]];
    if (near(start)) path += `M${(start.x + start.width - 12).toFixed(1)} ${start.y + start.height}v7`;
    if (near(end)) path += `M${(end.x + 12).toFixed(1)} ${end.y - 7}v7`;
  });
  return path;
}

function drawOp(node, side) {
  const kernel = node.op.kernels[side];
  const middle = node.x + node.width / 2 + 2;
  return drawn('g', { class: `op ${kindClass(kernel ? kernel.kind : node.op.kind)}`, 'data-op': node.op.id },
    drawn('rect', { class: 'box', x: node.x, y: node.y, width: node.width, height: node.height, rx: 6 }),
    drawn('rect', { class: 'stripe', x: node.x, y: node.y + 6, width: 3.5, height: node.height - 12, rx: 1.75 }),
    drawn('text', { class: 'name', x: middle, y: node.y + 17 }, shorten(node.op.name, 20)),
    drawn('text', { class: 'type', x: middle, y: node.y + 31 }, shorten(node.op.label ? `${node.op.label}: ${node.op.result}` : node.op.result, 26)));
}

function drawHull(group, side) {
  return drawn('g', { class: `hull ${group.look || side} ${kindClass(group.kernel ? group.kernel.kind : '')}` },
    drawn('rect', { x: group.x, y: group.y, width: group.width, height: group.height, rx: 10 }));
}

/** The name of a fused kernel, over the lines that enter it. */
function drawHullName(group) {
  const { name, kind } = group.kernel || { name: 'fused', kind: '' };
  const most = Math.max(8, Math.floor((group.width - 18) / 7.5));
  return drawn('text', { class: `hull-name ${group.look} ${kindClass(kind)}`, x: group.x + 12, y: group.y + 18 }, shorten(name, most));
}

function drawFrame(frame) {
  return drawn('g', { class: 'frame' },
    drawn('rect', { x: frame.x, y: frame.y, width: frame.width, height: frame.height, rx: 14 }),
    drawn('text', { x: frame.x + 12, y: frame.y + 18 }, `layer × ${frame.repeat.count}`));
}

function drawRest(node) {
  const { from, to, repeat } = node.rest;
  const sheet = (shift) => drawn('rect', { class: 'box', x: node.x + shift, y: node.y + shift, width: node.width - 8, height: node.height - 8, rx: 6 });
  const middle = node.x + (node.width - 8) / 2;
  return drawn('g', { class: 'rest' }, sheet(8), sheet(4), sheet(0),
    drawn('text', { class: 'name', x: middle, y: node.y + 20 }, `${repeat.count - 1} more like it`),
    drawn('text', { class: 'type', x: middle, y: node.y + 35 }, `${formatCount(to - from)} operations · expand`));
}
