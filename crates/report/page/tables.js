// The plain tables: plans, matmuls, measured, profile, pins, flips, recomputation, machine, notes.

function showPlans() {
  const titles = [
    ['naive', 'Naive', 'a kernel a primitive'],
    ['eager', 'Eager', 'a kernel a composite'],
    ['unfused', 'Unfused', 'a kernel a call'],
    ['recomputed', 'Recomputed', 'unfused, with values computed again in backward instead of kept: fusing starts here'],
    ['greedy', 'Greedy', 'neighbours merged in order'],
    ['chosen', 'Chosen', data.after.every((kernel) => kernel.realizable) ? 'the cheapest that can be generated here' : 'the cheapest; some of its kernels cannot be generated here'],
    ['conceivable', 'Conceivable', 'the cheapest if every skeleton existed'],
  ];
  const rows = titles.filter(([key]) => data.plans[key]).map(([key, title, text]) => ({ ...data.plans[key], title, text, rowClass: key === 'chosen' ? 'chosen' : null }));
  const most = Math.max(...rows.map((row) => amount(row.us)));
  const base = data.plans.unfused;
  reveal('plans');
  fillTable(byId('plans-table'), [
    { title: 'Plan', cell: (row) => [element('b', {}, row.title), element('span', { class: 'why' }, row.text)] },
    { title: 'Kernels', number: true, cell: (row) => formatCount(row.kernels) },
    { title: 'Bytes', number: true, cell: (row) => formatBytes(row.bytes) },
    { title: 'Peak memory', number: true, cell: (row) => formatBytes(row.peak_bytes) },
    { title: 'Predicted time', number: true, cell: (row) => formatTime(row.us) },
    { title: '', cell: (row) => bar(row.us / most, row.rowClass ? 'meter-good' : 'meter-fill', 'wide') },
    { title: 'Against unfused', number: true, cell: (row) => formatRatio(base.us / row.us) },
  ], rows);
}

function showMatmuls() {
  const kernels = [...data.after, ...data.before].filter((kernel) => kernel.tiles || (kernel.kind === 'matmul' && kernel.variant));
  if (!kernels.length) return;
  reveal('matmuls');
  const compiled = kernels.some((kernel) => kernel.tiles && kernel.tiles.registers_from === 'compiled');
  byId('matmuls-lead').textContent = `How each is cut, and how its tiles fill the multiprocessors. Registers are ${compiled
    ? 'those that the compiler counts' : 'the most that a kernel lets the compiler take, as nothing was compiled'}. Of cuBLASLt's kernels none of this is known.`;
  const ofTiles = (show) => (row) => (row.tiles ? show(row.tiles) : NOTHING);
  fillTable(byId('matmuls-table'), [
    { title: 'Kernel', cell: (row) => [row.name, element('span', { class: 'why' }, `${row.side}, ${row.size}, ×\u00a0${row.launches.length}`)] },
    { title: 'Computed by', cell: (row) => (row.tiles ? [row.tiles.by, element('span', { class: 'why' }, row.variant)] : row.variant) },
    { title: 'Tile', number: true, cell: ofTiles((tiles) => `${tiles.rows} × ${tiles.columns}`) },
    { title: 'Stages', number: true, cell: ofTiles((tiles) => (isNumber(tiles.stages) ? formatCount(tiles.stages) : NOTHING)) },
    { title: 'Cluster', number: true, cell: ofTiles((tiles) => formatCount(tiles.cluster)) },
    { title: 'Registers', number: true, cell: ofTiles((tiles) => `${tiles.registers_from === 'compiled' ? '' : '≤ '}${formatCount(tiles.registers)}`) },
    { title: 'Occupancy', number: true, cell: ofTiles((tiles) => formatShare(tiles.occupancy)) },
    { title: 'Waves', number: true, cell: ofTiles((tiles) => digits(tiles.waves)) },
    { title: 'Wave efficiency', number: true, cell: ofTiles((tiles) => formatShare(tiles.wave_efficiency)) },
    { title: '', cell: (row) => (row.tiles ? bar(row.tiles.wave_efficiency, 'meter-fill') : '') },
  ], kernels);
}

function showMeasured() {
  const kernels = [...data.after, ...data.before].filter((kernel) => isNumber(kernel.measured_us) || isNumber(kernel.measured_registers));
  if (!data.measured && !kernels.length) return;
  reveal('measured');
  if (!data.measured) {
    byId('measured-lead').textContent = kernels.some((kernel) => isNumber(kernel.measured_us))
      ? 'Timed, and not held against the f64 reference.' : 'Compiled and not run: registers a thread, as estimated and as compiled.';
  } else {
    const { eager_us, unfused_us, chosen_us, speedup, verified, worst_ratio, classes } = data.measured;
    byId('measured-lead').textContent = `${formatTime(eager_us)} eager, ${formatTime(unfused_us)} unfused, ${formatTime(chosen_us)} chosen: ${formatRatio(speedup)} of unfused. ${verified
      ? 'Every output is within its bound of the f64 reference' : 'Some output is outside its bound of the f64 reference'}, the largest error at ${digits(worst_ratio)} of it.`;
    if (classes.length) {
      fillTable(byId('classes-table'), [
        { title: 'Kind', cell: (row) => element('span', { class: `key ${kindClass(row.class)}` }, row.class) },
        { title: 'Kernels', number: true, cell: (row) => formatCount(row.kernels) },
        { title: 'Predicted', number: true, cell: (row) => formatTime(row.predicted_us) },
        { title: 'Measured', number: true, cell: (row) => formatTime(row.measured_us) },
        { title: 'Median error of the model', number: true, cell: (row) => formatShare(row.median_error) },
      ], classes);
    }
  }
  if (!kernels.length) return;
  const off = (kernel) => (kernel.cost.us - kernel.measured_us) / kernel.measured_us;
  fillTable(byId('measured-table'), [
    { title: 'Kernel', cell: (row) => [row.name, element('span', { class: 'why' }, `${row.side}, ${row.size}, × ${row.launches.length}`)] },
    { title: 'Predicted', number: true, cell: (row) => formatTime(row.cost.us) },
    { title: 'Measured', number: true, cell: (row) => formatTime(row.measured_us) },
    { title: 'Model off by', number: true, cell: (row) => (isNumber(off(row)) ? `${off(row) > 0 ? '+' : ''}${digits(off(row) * 100)} %` : NOTHING) },
    { title: 'Bytes', number: true, cell: (row) => formatBytes(row.bytes) },
    { title: 'Reached', number: true, cell: (row) => formatByteRate(row.bytes / row.measured_us) },
    { title: 'Registers, estimated', number: true, cell: (row) => (row.cost.registers ? formatCount(row.cost.registers) : NOTHING) },
    { title: 'compiled', number: true, cell: (row) => formatCount(row.measured_registers) },
  ], kernels);
}

function showProfile() {
  if (!data.profiled) return;
  const { text, before_us, after_us, notes } = data.profiled;
  reveal('profile');
  byId('profile-lead').textContent = `${text} A run with no profiler watching takes ${formatTime(before_us)} before fusing and ${formatTime(after_us)} after.`;
  const kernels = [...data.after, ...data.before].filter((kernel) => kernel.counters);
  const columns = [
    ['Profiled time', 'us', formatTime],
    ['Read', 'read', formatBytes],
    ['Written', 'written', formatBytes],
    ['Missed the cache', 'missed', formatBytes],
    ['Cache hits', 'cache_hits', formatShare],
    ['Occupancy', 'occupancy', formatShare],
    ['Registers', 'registers', formatCount],
    ['Shared memory', 'shared', formatBytes],
    ['Tensor cores', 'tensor', formatShare],
    ['Issue slots', 'issue', formatShare],
    ['Instructions a cycle', 'instructions_per_cycle', digits],
  ].filter(([, key]) => kernels.some((kernel) => isNumber(kernel.counters[key])));
  fillTable(byId('profile-table'), [
    { title: 'Kernel', cell: (row) => [row.name, element('span', { class: 'why' }, `${row.side}, ${row.size}, × ${row.launches.length}`)] },
    { title: 'Time', number: true, cell: (row) => formatTime(row.measured_us) },
    { title: 'Must move', number: true, cell: (row) => formatBytes(row.bytes) },
    ...columns.map(([title, key, show]) => ({ title, number: true, cell: (row) => show(row.counters[key]) })),
  ], kernels);
  byId('profile-notes').append(...notes.map((note) => element('li', {}, note)));
}

function showPins() {
  if (!data.pins.length) return;
  reveal('pins');
  fillTable(byId('pins-table'), [
    { title: 'Pin', cell: (row) => [element('span', { class: 'tag' }, row.kind), ` ${row.ops.join(' + ')}`] },
    { title: 'Places', number: true, cell: (row) => formatCount(row.places) },
    { title: 'Price', number: true, cell: (row) => formatTime(row.price_us) },
    { title: 'In words', cell: (row) => row.text },
  ], data.pins);
}

function showFlips() {
  if (!data.flips.length) return;
  reveal('flips');
  const sheet = (row) => data.candidates[row.candidate];
  fillTable(byId('flips-table'), [
    { title: 'Fusion', cell: (row) => (sheet(row) ? sheet(row).ops.join(' + ') : `candidate ${row.candidate}`) },
    { title: 'Change', cell: (row) => row.what },
    { title: 'From', cell: (row) => row.from },
    { title: 'To', cell: (row) => row.to },
    { title: 'In words', cell: (row) => row.text },
  ], data.flips);
}

function showRecompute() {
  const sheet = data.recompute;
  if (!sheet) return;
  reveal('recompute');
  byId('recompute-lead').textContent = sheet.text;
  const rows = [
    ['Kept from forward to backward', sheet.kept_bytes_before, sheet.kept_bytes, formatBytes],
    ['Peak memory', sheet.peak_bytes_before, sheet.peak_bytes, formatBytes],
    ['Predicted time', sheet.us_before, sheet.us, formatTime],
  ];
  fillTable(byId('recompute-table'), [
    { title: '', cell: ([title]) => title },
    { title: 'All stored', number: true, cell: ([, old, , show]) => show(old) },
    { title: 'Chosen', number: true, cell: ([, , now, show]) => show(now) },
    { title: '', cell: ([, old, now]) => bar(now / old, 'meter-good', 'wide') },
    { title: 'Chosen of all', number: true, cell: ([, old, now]) => formatShare(now / old) },
  ], rows);
  const again = sheet.again.map(([name, count]) => `${name} × ${formatCount(count)}`).join(', ');
  byId('recompute-again').textContent = again ? `Computed again: ${again}.` : '';
}

function showMachine() {
  const { machine } = data;
  reveal('machine');
  byId('machine-lead').textContent = `${machine.name} (${machine.kind}). Memory ${formatByteRate(machine.bytes_per_us)}; vector units ${formatFlops(machine.vector_flops_per_us)}, limiting above ${digits(machine.vector_ridge)} flop/B; matrix units ${formatFlops(machine.matrix_flops_per_us)}, above ${digits(machine.matrix_ridge)} flop/B.`;
  if (!machine.numbers.length) return;
  const exact = (value) => (isNumber(value) ? value.toLocaleString('en', { maximumFractionDigits: 4 }) : NOTHING);
  fillTable(byId('machine-table'), [
    { title: 'Number', cell: (row) => element('span', { class: 'mono' }, row.name) },
    { title: 'Value', number: true, cell: (row) => exact(row.value) },
    { title: 'Origin', cell: (row) => row.origin },
  ], machine.numbers);
}

function showNotes() {
  if (!data.notes.length) return;
  reveal('notes');
  byId('notes-list').append(...data.notes.map((note) => element('li', {}, note)));
}
