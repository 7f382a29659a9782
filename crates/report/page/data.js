// The data block as objects. References that point nowhere are dropped here, once, so that nothing below has to care.

const MOST_TENSORS = 6;
const data = readData();

function readData() {
  let raw = null;
  try {
    raw = JSON.parse(byId('data').textContent);
  } catch {
    // Reported below, like data that is missing.
  }
  if (!raw) {
    byId('failure').hidden = false;
    return null;
  }
  const ops = readOps(raw.ops, raw.strings);
  const before = readKernels(raw, raw.before, 'before');
  const after = readKernels(raw, raw.after, 'after');
  const launches = { before: byLaunch(before), after: byLaunch(after) };
  for (const op of ops) {
    op.kernels = { before: launches.before.get(op.before), after: launches.after.get(op.after) };
  }
  const disagreements = raw.disagreements.filter((entry) => raw.candidates[entry.candidate]);
  raw.candidates.forEach((candidate, index) => { candidate.index = index; });
  for (const entry of disagreements) raw.candidates[entry.candidate].disagreement = entry.text;
  return { ...raw, ops, before, after, launches, disagreements };
}

/** The plan that fusing starts from: `before` holds its kernels. */
function planBefore() {
  return data.plans.recomputed || data.plans.unfused;
}

function readOps(columns, strings) {
  return columns.name.map((_, id) => ({
    id,
    name: strings[columns.name[id]],
    label: strings[columns.label[id]],
    kind: strings[columns.kind[id]],
    result: strings[columns.result[id]],
    reads: [...new Set(columns.reads[id])].filter((read) => read < columns.name.length && read !== id),
    before: columns.before[id],
    after: columns.after[id],
    intensity: columns.intensity[id],
  }));
}

function readKernels(raw, list, side) {
  return list.map((kernel, index) => {
    const source = raw.sources[kernel.source];
    const lines = source ? source.lines.map((line, at) => ({ text: raw.strings[line], op: raw.strings[source.ops[at]] })) : [];
    const bytes = amount(kernel.cost.read) + amount(kernel.cost.written);
    return { ...kernel, index, side, lines, bytes, flops: amount(kernel.cost.matrix_flops) + amount(kernel.cost.vector_flops) };
  });
}

function byLaunch(kernels) {
  const map = new Map();
  for (const kernel of kernels) for (const launch of kernel.launches) map.set(launch, kernel);
  return map;
}

/** What is known of one launch of a kernel, line by line. */
function describeKernel(kernel) {
  const cost = kernel.cost;
  return [
    kernel.name,
    `${kernel.size}, ${counted(kernel.launches.length, 'launch', 'launches')}`,
    `${formatTime(cost.us)} predicted, limited by ${cost.bound}`,
    isNumber(kernel.measured_us) ? `${formatTime(kernel.measured_us)} measured` : null,
    `${formatBytes(cost.read)} read, ${formatBytes(cost.written)} written`,
    `${digits(cost.intensity)} flop/B`,
  ];
}

/** Names and types of what a kernel reads or writes, a few of them. */
function describeTensors(kernel, written) {
  const own = kernel.tensors.filter((tensor) => tensor.written === written);
  const first = own.slice(0, MOST_TENSORS).map(({ name, tensor }) => `${name}: ${tensor}`);
  const more = own.length > MOST_TENSORS ? ` and ${own.length - MOST_TENSORS} more` : '';
  return own.length ? `${written ? 'writes' : 'reads'} ${first.join(', ')}${more}` : null;
}

/** The sheet on two neighbours: the one of this very place, or the first with their names and their fate. */
function sheetFor(producer, reader) {
  const fused = producer.after === reader.after;
  return data.candidates.find((sheet) => sheet.at[0] === producer.id && sheet.at[1] === reader.id)
    || data.candidates.find((sheet) => sheet.ops.length === 2 && sheet.ops[0] === producer.name
      && sheet.ops[1] === reader.name && sheet.chosen === fused);
}
