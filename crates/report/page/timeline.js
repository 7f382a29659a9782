// The launches over time. Only what is in view is drawn, and launches too thin to tell apart become one path a kind.

const ROW = { height: 34, gap: 26, top: 22 };
const THINNEST = 2.5;

function showTimeline() {
  const rows = timelineRows();
  if (!rows.length) return;
  reveal('timeline');
  const picture = byId('timeline-drawing');
  const end = Math.max(...rows.map((row) => row.end));
  const axisAt = ROW.top + rows.length * (ROW.height + ROW.gap) - ROW.gap + 8;
  picture.style.height = `${axisAt + 24}px`;
  byId('timeline-legend').replaceChildren(...kindLegend([...data.before, ...data.after]));
  const state = { from: 0, span: end, pending: false, chosen: null };
  const width = () => picture.clientWidth || 800;

  function schedule() {
    if (state.pending) return;
    state.pending = true;
    requestAnimationFrame(draw);
  }

  function draw() {
    state.pending = false;
    const scale = width() / state.span;
    picture.setAttribute('viewBox', `0 0 ${width()} ${axisAt + 24}`);
    picture.replaceChildren(drawAxis(state, width(), axisAt), ...rows.map((row, index) => drawRow(row, ROW.top + index * (ROW.height + ROW.gap), state, scale, width())));
    if (state.chosen) {
      const { row, index } = state.chosen;
      const y = ROW.top + rows.indexOf(row) * (ROW.height + ROW.gap);
      picture.append(drawn('rect', { class: 'chosen-box', x: (row.starts[index] - state.from) * scale - 1, y: y - 2, width: Math.max(2, row.lengths[index] * scale) + 2, height: ROW.height + 4, rx: 3 }));
    }
  }

  function limit() {
    state.span = Math.min(end, Math.max(end / 1e5, state.span));
    state.from = Math.min(end - state.span, Math.max(0, state.from));
    schedule();
  }

  function hit(x, y) {
    const row = rows[Math.floor((y - ROW.top + ROW.gap / 2) / (ROW.height + ROW.gap))];
    const index = row ? launchAt(row, state.from + x / width() * state.span) : -1;
    return index >= 0 ? { row, index } : null;
  }

  const tell = linkView((kernel) => {
    const row = rows.find((one) => one.side === kernel.side);
    const index = row ? row.kernels.indexOf(kernel) : -1;
    state.chosen = index >= 0 ? { row, index } : null;
    if (state.chosen && (row.starts[index] < state.from || row.starts[index] > state.from + state.span)) state.from = row.starts[index] - state.span / 2;
    limit();
  });

  const view = {
    fit() {
      Object.assign(state, { from: 0, span: end });
      limit();
    },
    pan(dx) {
      state.from -= dx / width() * state.span;
      limit();
    },
    zoom(factor, x) {
      const at = state.from + x / width() * state.span;
      state.span = Math.min(end, Math.max(end / 1e5, state.span / factor));
      state.from = at - x / width() * state.span;
      limit();
    },
    step(by) {
      const { row, index } = state.chosen || { row: rows[0], index: by > 0 ? -1 : 0 };
      const next = (index + by + row.kernels.length) % row.kernels.length;
      state.chosen = { row, index: next };
      tell(row.kernels[next]);
      const start = row.starts[next];
      if (start < state.from || start > state.from + state.span) state.from = start - state.span / 2;
      limit();
      const box = picture.getBoundingClientRect();
      showTip(describeLaunch(row, next), box.left + (start - state.from) / state.span * box.width, box.top + ROW.top + rows.indexOf(row) * (ROW.height + ROW.gap) + ROW.height);
    },
    hover(x, y, event) {
      const found = hit(x, y);
      if (found) showTip(describeLaunch(found.row, found.index), event.clientX, event.clientY);
      else hideTip();
    },
    leave: hideTip,
    pick(x, y, event) {
      state.chosen = hit(x, y);
      schedule();
      if (!state.chosen) return;
      tell(state.chosen.row.kernels[state.chosen.index]);
      showTip(describeLaunch(state.chosen.row, state.chosen.index), event.clientX, event.clientY);
    },
  };
  connectView([picture], view);
  byId('timeline-in').addEventListener('click', () => view.zoom(ZOOM_STEP, width() / 2));
  byId('timeline-out').addEventListener('click', () => view.zoom(1 / ZOOM_STEP, width() / 2));
  byId('timeline-fit').addEventListener('click', view.fit);
  byId('timeline-export').addEventListener('click', () => saveTrace(rows));
  new ResizeObserver(schedule).observe(picture);
  draw();
}

function timelineRows() {
  const rows = [];
  for (const [title, kernels, time] of [
    ['Before, predicted', data.before, (kernel) => kernel.cost.us],
    ['After, predicted', data.after, (kernel) => kernel.cost.us],
    ['Before, measured', data.before, (kernel) => kernel.measured_us],
    ['After, measured', data.after, (kernel) => kernel.measured_us],
  ]) {
    const row = { ...timelineRow(title, kernels, time), side: kernels === data.before ? 'before' : 'after' };
    if (row.end > 0) rows.push(row);
  }
  return rows;
}

function timelineRow(title, kernels, time) {
  const launches = kernels.flatMap((kernel) => kernel.launches.map((launch) => ({ launch, kernel }))).sort((a, b) => a.launch - b.launch);
  const row = { title, kernels: launches.map(({ kernel }) => kernel), launches: launches.map(({ launch }) => launch) };
  row.starts = new Float64Array(launches.length);
  row.lengths = Float64Array.from(row.kernels, (kernel) => amount(time(kernel)));
  row.end = 0;
  row.lengths.forEach((length, index) => {
    row.starts[index] = row.end;
    row.end += length;
  });
  return row;
}

/** The rows as a trace in the form of Chrome, which Perfetto opens: a track a row, times in microseconds. */
function traceOf(rows) {
  const named = rows.map((row, track) => ({ ph: 'M', name: 'thread_name', pid: 1, tid: track + 1, args: { name: row.title } }));
  const slices = rows.flatMap((row, track) => row.kernels.map((kernel, index) => ({
    ph: 'X', name: kernel.name, cat: kernel.kind, pid: 1, tid: track + 1, ts: row.starts[index], dur: row.lengths[index],
    args: { launch: row.launches[index], size: kernel.size, read: kernel.cost.read, written: kernel.cost.written, predicted_us: kernel.cost.us, measured_us: kernel.measured_us, bound: kernel.cost.bound },
  })));
  return JSON.stringify({ displayTimeUnit: 'ns', traceEvents: [...named, ...slices] });
}

function saveTrace(rows) {
  const address = URL.createObjectURL(new Blob([traceOf(rows)], { type: 'application/json' }));
  element('a', { href: address, download: 'deuteron.trace.json' }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** The launch that runs at a time, by halving. */
function launchAt(row, time) {
  if (time < 0 || time > row.end) return -1;
  let [low, high] = [0, row.starts.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (row.starts[middle] <= time) low = middle;
    else high = middle - 1;
  }
  return low;
}

function describeLaunch(row, index) {
  const kernel = row.kernels[index];
  return [kernel.name, `launch ${row.launches[index]}, from ${formatTime(row.starts[index])}`, ...describeKernel(kernel).slice(1)];
}

function drawRow(row, y, state, scale, width) {
  const group = drawn('g', {}, drawn('text', { class: 'row-title', x: 0, y: y - 7 }, `${row.title}: ${formatTime(row.end)}, ${counted(row.kernels.length, 'launch', 'launches')}`));
  group.append(drawn('rect', { class: 'row-ground', x: 0, y, width, height: ROW.height }));
  const first = Math.max(0, launchAt(row, Math.max(0, state.from)));
  const thin = new Map();
  if (state.from > row.end) return group;
  for (let index = first; index < row.starts.length && row.starts[index] < state.from + state.span; index++) {
    const kernel = row.kernels[index];
    const x = Math.max(-2, (row.starts[index] - state.from) * scale);
    const right = Math.min(width + 2, (row.starts[index] + row.lengths[index] - state.from) * scale);
    const kind = kindClass(kernel.kind);
    if (right - x < THINNEST) {
      // Half a pixel at least: a launch must not vanish.
      thin.set(kind, `${thin.get(kind) || ''}M${x.toFixed(2)} ${y}h${Math.max(0.5, right - x).toFixed(2)}v${ROW.height}h${-Math.max(0.5, right - x).toFixed(2)}z`);
      continue;
    }
    group.append(drawn('rect', { class: `launch ${kind}`, x: x.toFixed(2), y, width: Math.max(0.5, right - x - 0.75).toFixed(2), height: ROW.height }));
    const letters = Math.floor((right - x - 10) / 6.6);
    if (letters >= 4) group.append(drawn('text', { class: 'launch-name', x: (x + 6).toFixed(1), y: y + ROW.height / 2 + 4 }, shorten(kernel.name, letters)));
  }
  for (const [kind, path] of thin) group.append(drawn('path', { class: `launch ${kind}`, d: path }));
  return group;
}

function drawAxis(state, width, y) {
  const rough = state.span / Math.max(2, width / 110);
  const decade = 10 ** Math.floor(Math.log10(rough));
  const step = decade * ([1, 2, 5, 10].find((factor) => factor * decade >= rough) || 10);
  const group = drawn('g', { class: 'axis' }, drawn('path', { d: `M0 ${y}H${width}` }));
  for (let mark = Math.ceil(state.from / step); mark * step <= state.from + state.span; mark++) {
    const x = (mark * step - state.from) / state.span * width;
    const anchor = x < 20 ? 'start' : x > width - 30 ? 'end' : 'middle';
    group.append(drawn('path', { d: `M${x.toFixed(1)} ${y}v4` }), drawn('text', { x: x.toFixed(1), y: y + 17, 'text-anchor': anchor }, formatTime(mark * step).replace(/\.0+(?=\D)/, '')));
  }
  return group;
}
