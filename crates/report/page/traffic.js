// Bytes by kernel name, before and after, on one scale.

const PARTS = [['read', 'read'], ['written', 'written'], ['reread', 'read again from cache']];
const FIRST_ROWS = 10;

function showTraffic() {
  const sides = [totals(data.before), totals(data.after)];
  const most = Math.max(...sides.flat().map((row) => row.all));
  if (!(most > 0)) return;
  reveal('traffic');
  const [before, chosen] = [planBefore(), data.plans.chosen];
  const saved = before.kernels - chosen.kernels;
  byId('traffic-lead').textContent = `${formatBytes(before.bytes)} become ${formatBytes(chosen.bytes)}; ${saved >= 0
    ? `${counted(saved, 'launch is', 'launches are')} saved` : `${counted(-saved, 'launch is', 'launches are')} added`}. Bars are all launches of a kernel together.`;
  byId('traffic-legend').replaceChildren(...PARTS.map(([part, title]) => element('span', { class: `key part-${part}` }, title)),
    element('span', { class: 'key part-cached' }, 'of these, in the last-level cache'));
  byId('traffic-columns').replaceChildren(trafficColumn('Before', sides[0], most), trafficColumn('After', sides[1], most));
}

function totals(kernels) {
  const rows = new Map();
  for (const kernel of kernels) {
    const row = rows.get(kernel.name) || { name: kernel.name, kernel, launches: 0, read: 0, written: 0, reread: 0, cached: 0 };
    const count = kernel.launches.length;
    row.launches += count;
    for (const part of ['read', 'written', 'reread', 'cached']) row[part] += amount(kernel.cost[part]) * count;
    rows.set(kernel.name, row);
  }
  const list = [...rows.values()];
  for (const row of list) row.all = row.read + row.written + row.reread;
  return list.sort((a, b) => b.read + b.written - a.read - a.written);
}

function trafficColumn(title, rows, most) {
  const list = element('div', { class: 'traffic-rows' }, rows.slice(0, FIRST_ROWS).map((row) => trafficRow(row, most)));
  const more = rows.length > FIRST_ROWS && element('button', { type: 'button', class: 'quiet', onclick() {
    list.append(...rows.slice(FIRST_ROWS).map((row) => trafficRow(row, most)));
    more.remove();
  } }, `Show ${rows.length - FIRST_ROWS} more`);
  const sum = rows.reduce((total, row) => total + row.read + row.written, 0);
  return element('div', {}, element('h3', {}, title, element('span', { class: 'label' }, formatBytes(sum))), list, more);
}

function trafficRow(row, most) {
  const picture = drawn('svg', { class: 'traffic-bar', viewBox: '0 0 100 12', preserveAspectRatio: 'none', 'aria-hidden': 'true' });
  let x = 0;
  for (const [part] of PARTS) {
    const width = row[part] / most * 100;
    picture.append(drawn('rect', { class: `part-${part}`, x: x.toFixed(3), width: width.toFixed(3), height: 8 }));
    x += width;
  }
  picture.append(drawn('rect', { class: 'part-cached', y: 9.5, width: Math.min(100, row.cached / most * 100).toFixed(3), height: 2.5 }));
  const lines = [row.name, counted(row.launches, 'launch', 'launches'), `${formatBytes(row.read)} read, ${formatBytes(row.written)} written`,
    `${formatBytes(row.cached)} of them in cache`, `${formatBytes(row.reread)} read again`];
  return element('div', { class: 'traffic-row', 'data-name': row.name, ...selects(row.kernel), onpointermove: (event) => showTip(lines, event.clientX, event.clientY), onpointerleave: hideTip },
    element('span', { class: 'traffic-name' }, row.name, element('span', { class: 'label' }, `× ${formatCount(row.launches)}`)),
    element('span', { class: 'traffic-sum' }, formatBytes(row.read + row.written)), picture);
}
