// The score sheets: a table that sorts by every column and filters, with the values behind each score on demand.

/** Titles of the criteria; weights, thresholds and what passes come with the data. */
const CRITERIA = [
  ['bandwidth', 'Bytes'],
  ['launch', 'Launches'],
  ['registers', 'Registers'],
  ['complexity', 'Complexity'],
  ['maintainability', 'Maintainability'],
];

const SHEET_COLUMNS = [
  { title: 'Operations', value: (sheet) => sheet.ops.join(' ') },
  { title: 'Score', number: true, value: (sheet) => sheet.score },
  { title: 'Score says', value: (sheet) => sheet.verdict },
  { title: 'Plan', value: (sheet) => (sheet.chosen ? 'fused' : 'apart') },
  { title: 'Count', number: true, value: (sheet) => sheet.count },
  { title: 'Kind', value: (sheet) => sheet.kind },
  ...CRITERIA.map(([field, title]) => ({ title, number: true, value: (sheet) => sheet.criteria[field] })),
  { title: 'Worth', number: true, value: (sheet) => sheet.worth_us },
  { title: 'Saves', number: true, value: (sheet) => sheet.gain_us },
  { title: 'Code', value: (sheet) => sheet.reason.code },
];

function showCandidates() {
  if (!data.candidates.length) return;
  reveal('candidates');
  const table = byId('sheet');
  const order = { column: null, down: false };
  const rows = data.candidates.map((sheet) => ({ sheet, text: searchText(sheet), row: null, details: null }));
  const heads = SHEET_COLUMNS.map((column, index) => element('th', { scope: 'col', class: column.number && 'number', 'aria-sort': 'none' },
    element('button', { type: 'button', onclick: () => sortBy(index) }, column.title)));
  const body = element('tbody', {});
  table.replaceChildren(element('thead', {}, element('tr', {}, heads)), body);

  function sortBy(index) {
    // Figures are most wanted from the top down, words from A to Z.
    const first = Boolean(SHEET_COLUMNS[index].number);
    order.down = order.column === index ? !order.down : first;
    order.column = index;
    heads.forEach((head, at) => head.setAttribute('aria-sort', at !== index ? 'none' : order.down ? 'descending' : 'ascending'));
    update();
  }

  function update() {
    const words = byId('find').value.toLowerCase().split(/\s+/).filter(Boolean);
    const [verdict, choice, kind] = ['by-verdict', 'by-choice', 'by-kind'].map((id) => byId(id).value);
    const only = byId('by-disagreement').checked;
    const kept = rows.filter(({ sheet, text }) => words.every((word) => text.includes(word))
      && (!verdict || sheet.verdict === verdict) && (!choice || (choice === 'fused') === sheet.chosen)
      && (!kind || sheet.kind === kind) && (!only || sheet.disagreement));
    if (order.column !== null) kept.sort((a, b) => compare(SHEET_COLUMNS[order.column].value(a.sheet), SHEET_COLUMNS[order.column].value(b.sheet), order.down));
    body.replaceChildren(...kept.flatMap((entry) => {
      entry.row ||= sheetRow(entry);
      return entry.details ? [entry.row, entry.details] : [entry.row];
    }));
    byId('shown').textContent = `${kept.length} of ${rows.length}`;
  }

  choices(byId('by-verdict'), data.candidates.map((sheet) => sheet.verdict));
  choices(byId('by-choice'), ['fused', 'apart']);
  choices(byId('by-kind'), data.candidates.map((sheet) => sheet.kind));
  for (const id of ['find', 'by-verdict', 'by-choice', 'by-kind', 'by-disagreement']) byId(id).addEventListener('input', update);
  byId('by-disagreement-field').hidden = !data.disagreements.length;
  describeScoring();
  listDisagreements();
  update();
}

function searchText(sheet) {
  const { code, text, hint } = sheet.reason;
  return [...sheet.ops, sheet.kind, sheet.verdict, code, text, hint, sheet.disagreement].join(' ').toLowerCase();
}

function choices(select, values) {
  const distinct = [...new Set(values)].sort();
  select.replaceChildren(element('option', { value: '' }, 'all'), ...distinct.map((value) => element('option', { value }, value)));
}

/** Orders numbers and words; what has no value stands at the end either way. */
function compare(a, b, down) {
  const missing = (value) => value === null || value === undefined;
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  const result = typeof a === 'number' ? a - b : String(a).localeCompare(String(b));
  return down ? -result : result;
}

function sheetRow(entry) {
  const { sheet } = entry;
  const says = sheet.verdict === 'FUSE';
  const opener = element('button', { type: 'button', class: 'opener', 'aria-expanded': 'false', onclick: toggle },
    element('span', { class: 'ops' }, sheet.ops.flatMap((name, index) => (index ? [element('span', { class: 'plus' }, ' + '), name] : [name]))),
    sheet.size && element('span', { class: 'why' }, sheet.size));
  const row = element('tr', { class: sheet.disagreement ? 'disagrees' : null, 'data-candidate': sheet.index },
    element('th', { scope: 'row' }, opener),
    element('td', { class: 'number score' }, element('span', {}, scoreText(sheet.score)), bar(sheet.score, says ? 'meter-good' : 'meter-fill')),
    element('td', {}, element('span', { class: says ? 'tag good' : 'tag' }, says ? 'fuse' : 'do not fuse')),
    element('td', {}, element('span', { class: sheet.chosen ? 'tag good solid' : 'tag' }, sheet.chosen ? 'fused' : 'apart')),
    element('td', { class: 'number' }, formatCount(sheet.count)),
    element('td', {}, sheet.kind),
    CRITERIA.map(([field]) => element('td', { class: 'number criterion', title: sheet.passes[field] ? 'passes' : 'fails' },
      `${digits(sheet.criteria[field])} ${mark(sheet, field)}`, bar(sheet.criteria[field], sheet.passes[field] ? 'meter-good' : 'meter-fill'))),
    element('td', { class: 'number' }, isNumber(sheet.worth_us) ? formatTime(sheet.worth_us) : NOTHING),
    element('td', { class: 'number' }, isNumber(sheet.gain_us) ? formatTime(sheet.gain_us) : NOTHING),
    element('td', { class: 'mono' }, sheet.reason.code));

  function toggle() {
    if (entry.details) {
      entry.details.remove();
      entry.details = null;
    } else {
      entry.details = element('tr', { class: 'details' }, element('td', { colspan: SHEET_COLUMNS.length }, sheetDetails(sheet)));
      row.after(entry.details);
      const op = data.ops[sheet.at[sheet.at.length - 1]];
      if (op) selectKernel(op.kernels.after);
    }
    opener.setAttribute('aria-expanded', String(Boolean(entry.details)));
  }
  return row;
}

function sheetDetails(sheet) {
  const { values, criteria, reason } = sheet;
  const behind = {
    bandwidth: `${formatBytes(values.bytes_apart)} apart, ${formatBytes(values.bytes_together)} together: ${formatShare(values.bandwidth_saving)} saved; ${formatShare(values.dram_saving)} of main memory traffic`,
    launch: `${counted(values.launches_apart, 'launch', 'launches')} apart; launches are ${formatShare(values.launch_saving)} of the time of all kernels but the longest`,
    registers: `${values.registers ? `${values.registers} registers a thread, ` : ''}occupancy ${digits(values.occupancy_ratio)} of its largest part`,
    complexity: counted(values.primitives, 'primitive', 'primitives'),
    maintainability: sheet.realizable ? 'generated here' : 'no kernel for it can be generated here',
  };
  const together = isNumber(values.us_together) ? formatTime(values.us_together) : 'not priced';
  return element('div', { class: 'behind' },
    element('p', {}, element('b', {}, reason.code), ' ', prose(reason.text), reason.hint && element('span', { class: 'why' }, prose(reason.hint))),
    sheet.disagreement && element('p', { class: 'warn' }, `Score and plan disagree: ${sheet.disagreement}`),
    element('dl', {}, CRITERIA.map(([field, title]) => element('div', {},
      element('dt', {}, `${title} ${digits(criteria[field])} × ${digits(scoringOf(field).weight)} ${mark(sheet, field)}`),
      element('dd', {}, `${behind[field]} (asks for: ${scoringOf(field).asks})`))),
    element('div', {}, element('dt', {}, 'Score'), element('dd', {}, `${scoreText(sheet.score)}; the verdict is FUSE from ${digits(data.scoring.fuse_from)} where a kernel can hold them${sheet.within ? `, here within ${sheet.within.join(' + ')}` : ''}`)),
    element('div', {}, element('dt', {}, 'Time'), element('dd', {}, `${formatTime(values.us_apart)} apart, ${together} together${worth(sheet)}`)),
    element('div', {}, element('dt', {}, 'Where'), element('dd', {}, `operations ${sheet.at.map((at) => `#${at}`).join(', ')}${sheet.count > 1 ? ` and ${counted(sheet.count - 1, 'equal', 'equals')}` : ''}`))));
}

/** Weight, threshold and words of a criterion. */
function scoringOf(field) {
  return data.scoring.criteria.find(({ name }) => name === field) || { weight: NaN, asks: NOTHING };
}

/** A score with as many digits as show on which side of the threshold it is. */
function scoreText(score) {
  const from = data.scoring.fuse_from;
  if (!isNumber(score)) return digits(score);
  for (let places = 2; places < 6; places += 1) {
    const text = score.toFixed(places);
    if ((Number(text) >= from) === (score >= from)) return text;
  }
  return score.toFixed(6);
}

function mark(sheet, field) {
  return sheet.passes[field] ? '✓' : '✗';
}

function describeScoring() {
  const parts = CRITERIA.map(([field, title]) => `${title.toLowerCase()} ${digits(scoringOf(field).weight)} (${scoringOf(field).asks})`);
  byId('scoring').textContent = `The score weighs ${parts.join(', ')}; it says fuse from ${digits(data.scoring.fuse_from)}.`;
}

function worth(sheet) {
  if (!isNumber(sheet.worth_us)) return '';
  const time = formatTime(Math.abs(sheet.worth_us));
  if (sheet.chosen) return `; the best plan without it is ${time} slower`;
  return sheet.worth_us > 0 ? `; without the pin the plan is ${time} faster` : `; the best plan with it is ${time} slower`;
}

function listDisagreements() {
  if (!data.disagreements.length) return;
  const [first, rest] = [data.disagreements.slice(0, 5), data.disagreements.slice(5)];
  const list = (entries) => element('ul', { class: 'plain' }, entries.map((entry) => {
    const sheet = data.candidates[entry.candidate];
    return element('li', {}, element('b', {}, sheet.ops.join(' + ')), element('span', { class: 'why' },
      `score ${scoreText(sheet.score)} says ${sheet.verdict.toLowerCase()}, the plan ${sheet.chosen ? 'fuses' : 'keeps apart'}: ${entry.text}`));
  }));
  const more = rest.length > 0 && element('details', {}, element('summary', {}, `${rest.length} more`), list(rest));
  const title = element('h3', {}, `Where score and plan disagree (${data.disagreements.length})`);
  byId('disagreements').replaceChildren(...[title, list(first), more].filter(Boolean));
}
