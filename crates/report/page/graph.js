// The graph before and after, side by side, moving together.

const SMALLEST = 0.05;

function showGraph() {
  if (!data.ops.length) return;
  reveal('graph');
  const panels = [...document.querySelectorAll('.panel')].map((panel) => ({ panel, side: panel.dataset.side, picture: panel.querySelector('svg') }));
  const repeats = findRepeats(data.ops);
  const expanded = new Set();
  const state = { x: 0, y: 0, scale: 1, selected: null, scene: null, pending: false };
  captions(panels);
  byId('kinds').replaceChildren(...kindLegend([...data.before, ...data.after]));

  const shown = () => panels.find(({ picture }) => picture.clientWidth) || panels[0];
  const size = () => [shown().picture.clientWidth || 600, shown().picture.clientHeight || 500];

  function rebuild() {
    state.scene = makeScene(data.ops, repeats, expanded);
    state.drawn = null;
    // Something worth reading from the start: the first operation that was taken into a kernel of another.
    const fused = state.scene.groups.after.find((group) => group.look === 'after');
    state.selected = fused ? fused.members[fused.members.length - 1] : null;
    state.asked = false;
    inspect(state.scene.nodes[state.selected]);
    const button = byId('graph-repeats');
    button.hidden = !repeats.length;
    const layers = repeats.map((repeat) => `× ${repeat.count}`).join(', ');
    button.textContent = expanded.size ? 'Collapse repeated layers' : `Expand repeated layers (${layers})`;
    start();
  }

  /** The view to begin with: as wide as it reads well, from the top. */
  function start() {
    const [width, height] = size();
    // As large as its width allows, so that nothing is cut off at the sides, down to what can be read.
    state.scale = Math.max(READABLE, Math.min(0.95, width / (state.scene.width + 24)));
    const top = state.scene.nodes[0];
    state.x = Math.min(state.scene.width / 2, top.x + 82) - width / state.scale / 2;
    if (state.scene.width * state.scale < width) state.x = (state.scene.width - width / state.scale) / 2;
    state.y = -34;
    schedule();
  }

  function fit() {
    const [width, height] = size();
    const scale = Math.min(width / (state.scene.width + 60), height / (state.scene.height + 80), 1.5);
    // Thousands of operations in a column would fit as a hair: then it fits as far as it can be seen, from the top.
    state.scale = Math.max(scale, SMALLEST);
    state.x = (state.scene.width - width / state.scale) / 2;
    state.y = scale < SMALLEST ? -40 / state.scale : (state.scene.height - height / state.scale) / 2;
    schedule();
  }

  function schedule() {
    if (state.pending) return;
    state.pending = true;
    requestAnimationFrame(draw);
  }

  /** Draws what is seen and a screen above and below, and only when the view leaves it. */
  function draw() {
    state.pending = false;
    const [width, height] = size();
    const [wide, high] = [width / state.scale, height / state.scale];
    for (const { picture } of panels) {
      picture.setAttribute('viewBox', `${state.x.toFixed(2)} ${state.y.toFixed(2)} ${wide.toFixed(2)} ${high.toFixed(2)}`);
    }
    const readable = state.scale >= READABLE;
    const last = state.drawn;
    const covered = last && last.top <= state.y && last.bottom >= state.y + high && last.readable === readable && high > last.high / 3;
    if (!covered) {
      const [top, bottom] = [state.y - high, state.y + 2 * high];
      for (const { picture, side } of panels) picture.replaceChildren(drawScene(state.scene, side, top, bottom, state.scale), drawn('g', { class: 'marks' }));
      state.drawn = { top, bottom, high, readable };
    }
    mark();
  }

  /** Outlines the selected operation and its lines, even those too long to be drawn otherwise. */
  function mark() {
    const { scene, selected } = state;
    const node = scene.nodes[selected];
    for (const { picture } of panels) {
      const marks = picture.querySelector('.marks');
      if (!marks) continue;
      marks.replaceChildren();
      if (!node) continue;
      const paths = [];
      scene.edges.forEach(([from, to], index) => {
        if (!state.asked || (from !== selected && to !== selected)) return;
        paths.push(scene.routes[index] ? scene.routes[index].path : farLine(scene.nodes[from], scene.nodes[to]));
      });
      marks.append(drawn('path', { class: 'chosen-lines', d: paths.join('') }),
        drawn('rect', { class: 'chosen-box', x: node.x - 3, y: node.y - 3, width: node.width + 6, height: node.height + 6, rx: 9 }));
    }
  }

  function hit(x, y) {
    const [at, level] = [state.x + x / state.scale, state.y + y / state.scale];
    const within = (box) => at >= box.x && at <= box.x + box.width && level >= box.y && level <= box.y + box.height;
    return { node: state.scene.nodes.findIndex(within), cluster: state.scene.groups.after.find(within) };
  }

  const tell = linkView((kernel) => {
    const index = state.scene ? state.scene.nodes.findIndex((node) => node.op && node.op.kernels[kernel.side] === kernel) : -1;
    if (index >= 0) show(index, true);
  });

  /** Selects a node for all views: its kernel of the side that is seen. */
  function select(index, follow) {
    show(index, follow);
    const node = state.scene.nodes[index];
    if (node && node.op) tell(node.op.kernels[shown().side === 'before' && !panels[1].picture.clientWidth ? 'before' : 'after']);
  }

  function show(index, follow) {
    state.selected = index;
    state.asked = true;
    const node = state.scene.nodes[index];
    inspect(node);
    if (node && follow) {
      const [width, height] = size();
      state.scale = Math.max(state.scale, 0.6);
      state.x = node.x + node.width / 2 - width / state.scale / 2;
      state.y = node.y + node.height / 2 - height / state.scale / 2;
    }
    schedule();
  }

  const expand = (node) => {
    expanded.add(node.rest.index);
    rebuild();
  };
  const view = {
    fit,
    pan(dx, dy) {
      state.x -= dx / state.scale;
      state.y -= dy / state.scale;
      schedule();
    },
    zoom(factor, x, y) {
      const scale = Math.min(4, Math.max(SMALLEST / 2, state.scale * factor));
      state.x += x / state.scale - x / scale;
      state.y += y / state.scale - y / scale;
      state.scale = scale;
      schedule();
    },
    step(by) {
      const count = state.scene.nodes.length;
      select(state.selected === null ? (by > 0 ? 0 : count - 1) : (state.selected + by + count) % count, true);
    },
    open() {
      const node = state.scene.nodes[state.selected];
      if (node && node.rest) expand(node);
    },
    hover(x, y, event) {
      const { node, cluster } = hit(x, y);
      const side = event.currentTarget.closest('.panel').dataset.side;
      const lines = node >= 0 ? describeNode(state.scene.nodes[node], side) : cluster && side === 'after' && cluster.kernel && describeKernel(cluster.kernel);
      event.currentTarget.classList.toggle('pointing', node >= 0);
      if (lines) showTip(lines, event.clientX, event.clientY);
      else hideTip();
    },
    leave: hideTip,
    pick(x, y) {
      const { node } = hit(x, y);
      if (node >= 0 && state.scene.nodes[node].rest) expand(state.scene.nodes[node]);
      else select(node >= 0 ? node : null, false);
    },
  };

  connectView(panels.map(({ picture }) => picture), view);
  const centre = () => size().map((length) => length / 2);
  byId('graph-in').addEventListener('click', () => view.zoom(ZOOM_STEP, ...centre()));
  byId('graph-out').addEventListener('click', () => view.zoom(1 / ZOOM_STEP, ...centre()));
  byId('graph-fit').addEventListener('click', fit);
  byId('graph-repeats').addEventListener('click', () => {
    if (expanded.size) expanded.clear();
    else repeats.forEach((_, index) => expanded.add(index));
    rebuild();
  });
  sides(() => { if (state.scene) schedule(); });
  rebuild();
  new ResizeObserver(schedule).observe(byId('panels'));
}

function captions(panels) {
  for (const { panel, side } of panels) {
    const plan = side === 'before' ? planBefore() : data.plans.chosen;
    panel.querySelector('figcaption span').textContent = `${counted(plan.kernels, 'kernel', 'kernels')}, ${formatBytes(plan.bytes)}, ${formatTime(plan.us)}`;
  }
}

/** The choice of side by side, before or after. A narrow window has room for one. */
function sides(changed) {
  const buttons = [...document.querySelectorAll('[data-sides]')];
  const narrow = matchMedia('(max-width: 759px)');
  const choose = (choice) => {
    byId('panels').dataset.shows = choice;
    for (const button of buttons) button.setAttribute('aria-pressed', String(button.dataset.sides === choice));
    changed();
  };
  for (const button of buttons) button.addEventListener('click', () => choose(button.dataset.sides));
  const adapt = () => choose(narrow.matches ? 'after' : 'both');
  narrow.addEventListener('change', adapt);
  adapt();
}

function farLine(start, end) {
  const [x0, y0, x1, y1] = [start.x + start.width - 12, start.y + start.height, end.x + 12, end.y];
  const out = Math.max(start.x + start.width, end.x + end.width) + 60;
  return `M${x0.toFixed(1)} ${y0}C${out.toFixed(1)} ${y0 + 60} ${out.toFixed(1)} ${y1 - 60} ${x1.toFixed(1)} ${y1}`;
}

function describeNode(node, side) {
  if (node.rest) {
    const { repeat, from, to } = node.rest;
    return [`${repeat.count - 1} more layers like the one shown`, `${formatCount(to - from)} operations`, 'Click to expand'];
  }
  const { op } = node;
  const kernel = op.kernels[side];
  return [op.label ? `${op.name} (${op.label})` : op.name, `${op.result}, ${digits(op.intensity)} flop/B`,
    ...(kernel ? [`in ${kernel.name}`, ...describeKernel(kernel).slice(2)] : [])];
}

/** What is known of a node, beneath the graph: its kernels, and why its neighbours share them or not. */
function inspect(node) {
  const box = byId('inspector');
  if (!node || node.rest) {
    const text = node ? `${node.rest.repeat.count - 1} more layers like the one shown. Enter expands them.` : 'Select an operation to see its kernels, what they cost and why its neighbours share them or not.';
    box.replaceChildren(element('p', { class: 'hint' }, text));
    return;
  }
  const { op } = node;
  const kernel = (title, sheet) => sheet && element('div', { class: 'inspected' }, element('h4', {}, title),
    [...describeKernel(sheet), describeTensors(sheet, false), describeTensors(sheet, true)].filter(Boolean).map((line, index) => element(index ? 'span' : 'b', { class: index ? null : kindClass(sheet.kind) }, line)));
  const neighbours = [...op.reads.map((read) => [data.ops[read], op]), ...data.ops.filter((other) => other.reads.includes(op.id)).map((reader) => [op, reader])];
  const reasons = neighbours.slice(0, 6).map(([producer, reader]) => {
    const sheet = sheetFor(producer, reader);
    const fused = producer.after === reader.after;
    return element('li', {}, element('span', { class: fused ? 'tag good' : 'tag' }, fused ? 'fused' : 'apart'),
      ` ${producer.name} → ${reader.name}`, sheet && element('span', { class: 'why' }, `${sheet.reason.code}: ${sheet.reason.text}`));
  });
  box.replaceChildren(
    element('h3', {}, op.name, op.label && element('span', { class: 'label' }, op.label), element('span', { class: 'label' }, `${op.result} · ${op.kind} · ${digits(op.intensity)} flop/B · #${op.id}`)),
    element('div', { class: 'inspection' }, kernel('Before', op.kernels.before), kernel('After', op.kernels.after),
      reasons.length > 0 && element('div', { class: 'inspected wide' }, element('h4', {}, 'Neighbours'), element('ul', {}, reasons))));
}
