// One kernel is selected in all views at once: the graph, the rows of tables, the roofline, the timeline and the source.

const selection = { kernel: null, views: [] };

/** `show(kernel)` is called whenever another view selects a kernel; the function that is returned selects one for this view. */
function linkView(show) {
  selection.views.push(show);
  return (kernel) => selectKernel(kernel, show);
}

function selectKernel(kernel, from) {
  if (!kernel) return;
  selection.kernel = kernel;
  for (const show of selection.views) if (show !== from) show(kernel);
}

/** Attributes that make a row of a table, or of bars, one that selects its kernel. */
function selects(kernel) {
  const select = () => selectKernel(kernel);
  return { 'data-kernel': `${kernel.side} ${kernel.index}`, tabindex: 0, onclick: select, onkeydown(event) {
    if (event.key !== 'Enter' && event.key !== ' ') return;
    event.preventDefault();
    select();
  } };
}

/** Rows of a kernel by name stand for all of that name. */
function linkRows() {
  linkView((kernel) => {
    for (const row of document.querySelectorAll('[data-kernel]')) {
      const [side, index] = row.dataset.kernel.split(' ');
      const own = data[side][Number(index)];
      const chosen = own === kernel || (row.dataset.name !== undefined && side === kernel.side && row.dataset.name === kernel.name);
      row.classList.toggle('selected', chosen);
      if (chosen) row.setAttribute('aria-current', 'true');
      else row.removeAttribute('aria-current');
    }
  });
}
