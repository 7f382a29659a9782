// Bytes of intermediates that are alive while each launch runs, over predicted time.

const MEMORY_SIZE = [1000, 160];

function showMemory() {
  const { memory } = data;
  if (!memory) return;
  const sides = [['before', 'Before', data.before], ['after', 'After', data.after]].map(([side, title, kernels]) => {
    const row = timelineRow(title, kernels, (kernel) => kernel.cost.us);
    return { side, title, row, bytes: row.launches.map((launch) => amount(memory[side][launch])) };
  });
  const most = Math.max(...sides.flatMap(({ bytes }) => bytes), 0);
  const end = Math.max(...sides.map(({ row }) => row.end));
  if (!(most > 0) || !(end > 0)) return;
  reveal('memory');
  const [width, height] = MEMORY_SIZE;
  const picture = byId('memory-drawing');
  picture.setAttribute('viewBox', `0 0 ${width} ${height}`);
  picture.replaceChildren(...sides.map(({ side, row, bytes }) => {
    const steps = bytes.map((value, index) => `H${(row.starts[index] / end * width).toFixed(2)}V${(height - value / most * (height - 6)).toFixed(2)}`);
    return drawn('path', { class: `memory-line ${side}`, d: `M0 ${height}${steps.join('')}H${(row.end / end * width).toFixed(2)}V${height}` });
  }));
  const peak = ({ bytes, row, title, side }) => {
    const at = bytes.indexOf(Math.max(...bytes));
    return element('span', { class: `key memory-${side}` }, `${title}: at most ${formatBytes(bytes[at])}, while ${row.kernels[at].name} runs`);
  };
  byId('memory-legend').replaceChildren(...sides.filter(({ bytes }) => bytes.length).map(peak));
  picture.addEventListener('pointermove', (event) => {
    const box = picture.getBoundingClientRect();
    const time = (event.clientX - box.left) / box.width * end;
    const lines = sides.map(({ title, row, bytes }) => [title, row, bytes, launchAt(row, time)]).filter(([, , , at]) => at >= 0)
      .map(([title, row, bytes, at]) => `${title}: ${formatBytes(bytes[at])} alive in ${row.kernels[at].name}`);
    showTip([formatTime(time), ...lines], event.clientX, event.clientY);
  });
  picture.addEventListener('pointerleave', hideTip);
}
