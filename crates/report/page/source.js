// Kernel sources, each line beside its operation.

const TONES = 8;

function showSource() {
  const kernels = [...data.after, ...data.before].filter((kernel) => kernel.lines.length);
  if (!kernels.length) return;
  reveal('source');
  const select = byId('source-select');
  for (const [title, side] of [['After', 'after'], ['Before', 'before']]) {
    const options = kernels.map((kernel, index) => (kernel.side === side ? element('option', { value: index }, `${kernel.name}  [${kernel.size}]  × ${kernel.launches.length}`) : null)).filter(Boolean);
    if (options.length) select.append(element('optgroup', { label: title }, options));
  }
  // A fused kernel is what a reader comes for.
  const first = kernels.findIndex((kernel) => new Set(kernel.lines.map((line) => line.op)).size > 2);
  select.value = String(Math.max(0, first));
  const show = () => listSource(kernels[Number(select.value)]);
  const tell = linkView((kernel) => {
    const index = kernels.indexOf(kernel);
    if (index < 0) return;
    select.value = String(index);
    show();
  });
  select.addEventListener('input', () => {
    show();
    tell(kernels[Number(select.value)]);
  });
  show();
}

function listSource(kernel) {
  const names = [...new Set(kernel.lines.map((line) => line.op))].filter(Boolean);
  const tone = new Map(names.map((name, index) => [name, `tone-${index % TONES}`]));
  const box = byId('source-lines');
  let last = '';
  box.replaceChildren(element('div', { class: 'listing' }, kernel.lines.map(({ text, op }, index) => {
    const label = op && op !== last ? op : '';
    last = op;
    return element('div', { class: `line ${tone.get(op) || ''}`, 'data-line-op': op || null },
      element('span', { class: 'place' }, String(index + 1)), element('span', { class: 'from', title: op || null }, label), element('code', {}, text || ' '));
  })));
  box.scrollTo(0, 0);
  byId('source-ops').replaceChildren(...names.map((name) => element('button', { type: 'button', class: `key ${tone.get(name)}`, 'aria-pressed': 'false', onclick: emphasise }, name)));

  /** Dims the lines of all other operations. */
  function emphasise(event) {
    const pressed = event.currentTarget.getAttribute('aria-pressed') !== 'true';
    for (const button of byId('source-ops').children) button.setAttribute('aria-pressed', String(pressed && button === event.currentTarget));
    const name = event.currentTarget.textContent;
    for (const line of box.querySelectorAll('.line')) line.classList.toggle('dim', pressed && line.dataset.lineOp !== name);
  }
}
