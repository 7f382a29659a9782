// Repeated layers: runs of operations that are the same again and again, found by comparing the list with itself.

const LONGEST_PERIOD = 600;
const FEWEST_OPS = 40;

/** Ranges { start, period, count } of the operations that repeat, in order. */
function findRepeats(ops) {
  if (ops.length < FEWEST_OPS) return [];
  const signatures = numbered(ops.map((op, at) => signature(ops, op, at)));
  const cut = crossings(ops);
  const found = [];
  const pending = [[0, ops.length]];
  while (pending.length) {
    const [from, to] = pending.pop();
    const best = longestRepeat(signatures, from, to);
    if (!best) continue;
    const repeat = align(best, cut);
    if (!repeat) continue;
    found.push(repeat);
    pending.push([from, repeat.start], [repeat.start + repeat.period * repeat.count, to]);
  }
  return found.sort((a, b) => a.start - b.start);
}

/** What must agree for two operations to be the same one in different layers. */
function signature(ops, op, at) {
  // Not the distances of what it reads: those from backward to forward grow from layer to layer.
  const joined = at > 0 && ops[at - 1].after === op.after;
  return [op.name, op.kind, op.result, op.reads.length, joined, op.kernels.after && op.kernels.after.name].join('\u0001');
}

function numbered(texts) {
  const numbers = new Map();
  return Int32Array.from(texts, (text) => {
    if (!numbers.has(text)) numbers.set(text, numbers.size);
    return numbers.get(text);
  });
}

/** How many fused kernels a cut before each operation would go through. */
function crossings(ops) {
  const first = new Map();
  const last = new Map();
  ops.forEach((op, at) => {
    if (!first.has(op.after)) first.set(op.after, at);
    last.set(op.after, at);
  });
  const change = new Int32Array(ops.length + 2);
  for (const [launch, at] of first) {
    change[at + 1] += 1;
    change[last.get(launch) + 1] -= 1;
  }
  let open = 0;
  return change.map((step) => (open += step));
}

/** The repetition within a range that hides most operations; of equals the one with the shortest period. */
function longestRepeat(signatures, from, to) {
  let best = null;
  for (let period = 3; period <= Math.min(LONGEST_PERIOD, (to - from) / 2); period++) {
    let run = 0;
    for (let at = from; at + period <= to; at++) {
      if (at + period < to && signatures[at] === signatures[at + period]) {
        run++;
        continue;
      }
      const hidden = Math.floor(run / period) * period;
      if (hidden > (best ? best.hidden : 0)) best = { start: at - run, period, length: run + period, hidden };
      run = 0;
    }
  }
  return best && best.hidden >= 8 ? best : null;
}

/** Shifts a repetition so that its borders go between kernels, not through them. */
function align(best, cut) {
  const { start, period, length } = best;
  let choice = null;
  for (let shift = 0; shift < period; shift++) {
    const count = Math.floor((length - shift) / period);
    if (count < 2) break;
    let cost = 0;
    for (let border = 0; border <= count; border++) cost += cut[start + shift + border * period];
    if (!choice || cost < choice.cost) choice = { start: start + shift, period, count, cost };
    if (choice.cost === 0) break;
  }
  return choice;
}
