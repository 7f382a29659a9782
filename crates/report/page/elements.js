// Elements, built from text and never from markup: what the analysis says cannot become an element.

const SVG = 'http://www.w3.org/2000/svg';

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat()) {
    if (child !== undefined && child !== null && child !== false) node.append(child);
  }
  return node;
}

function element(tag, attributes, ...children) {
  return put(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes, ...children) {
  return put(document.createElementNS(SVG, tag), attributes, children);
}

/** A sentence as children of an element: what stands between backticks is code. */
function prose(text) {
  const parts = String(text || '').split('`');
  if (parts.length % 2 === 0) return [text];
  return parts.map((part, index) => (index % 2 ? element('code', {}, part) : part)).filter((part) => part !== '');
}

function byId(id) {
  return document.getElementById(id);
}

/** Shows a section that has something to show. */
function reveal(id) {
  byId(id).hidden = false;
}

/** A bar of a share, drawn as a picture so that it needs no style of its own. */
function bar(share, kind, shape) {
  const width = Math.min(1, amount(share)) * 100;
  return drawn('svg', { class: shape ? `meter ${shape}` : 'meter', viewBox: '0 0 100 6', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
    drawn('rect', { class: 'meter-ground', width: 100, height: 6 }),
    drawn('rect', { class: kind || 'meter-fill', width: width.toFixed(1), height: 6 }));
}

// ---- the one tooltip ----

const tip = byId('tip');

/** Shows lines of text beside a point of the window; the first line is the title. */
function showTip(lines, x, y) {
  tip.replaceChildren(...lines.filter(Boolean).map((line, index) => element(index ? 'div' : 'b', {}, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth - 8 ? x - 14 - width : x + 14;
  const top = y + 14 + height > innerHeight - 8 ? y - 14 - height : y + 14;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}

addEventListener('scroll', hideTip, { passive: true });
addEventListener('keydown', (event) => { if (event.key === 'Escape') hideTip(); });

// ---- tables ----

/** Fills a table. A column is { title, number, cell(row), sort(row) }; `sort` makes its header a button. */
function fillTable(table, columns, rows) {
  const head = element('tr', {}, columns.map((column) => element('th', { scope: 'col', class: column.number && 'number' }, column.title)));
  const body = rows.map((row) => element('tr', { class: row.rowClass, ...(row.side && row.launches ? selects(row) : {}) },
    columns.map((column, index) => element(index ? 'td' : 'th', { class: column.number && 'number', scope: index ? null : 'row' }, column.cell(row)))));
  table.replaceChildren(element('thead', {}, head), element('tbody', {}, body));
}

// ---- colours ----

const KINDS = ['row', 'matmul', 'attention', 'copy', 'scatter_add', 'opaque'];

/** The class that gives a kind of kernel its colour. */
function kindClass(kind) {
  return `kind-${KINDS.includes(kind) ? kind : 'other'}`;
}

function kindLegend(kernels) {
  const kinds = [...new Set(kernels.map((kernel) => kernel.kind))].sort();
  return kinds.map((kind) => element('span', { class: `key ${kindClass(kind)}` }, kind || 'unnamed'));
}
