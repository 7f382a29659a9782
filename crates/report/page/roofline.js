// Hover and keys for the roofline. The drawing itself, with its coordinates, comes from `roofline.rs`.

function showRoofline() {
  const picture = byId('roofline-drawing');
  if (!picture) return;
  const points = [...picture.querySelectorAll('.roof-point')].map((group) => {
    const title = group.querySelector('title');
    const lines = title.textContent.split('\n');
    // The browser's own tooltip would come on top of ours.
    title.remove();
    group.setAttribute('aria-label', lines.join(', '));
    const { side, kernelIndex } = group.dataset;
    return { group, lines, kernel: data && data[side] ? data[side][Number(kernelIndex)] : null };
  });
  let current = null;

  function choose(index, x, y) {
    if (current !== null) points[current].group.classList.remove('current');
    current = index;
    if (index === null) {
      hideTip();
      return;
    }
    const { group, lines } = points[index];
    group.classList.add('current');
    const box = group.querySelector('circle').getBoundingClientRect();
    showTip(lines, x ?? box.right, y ?? box.bottom);
  }

  const tell = linkView((kernel) => {
    for (const point of points) point.group.classList.toggle('chosen', point.kernel === kernel);
  });
  const pick = (index) => {
    if (!points[index] || !points[index].kernel) return;
    tell(points[index].kernel);
    for (const [at, { group }] of points.entries()) group.classList.toggle('chosen', at === index);
  };

  points.forEach(({ group }, index) => {
    group.addEventListener('click', () => pick(index));
    group.addEventListener('pointermove', (event) => choose(index, event.clientX, event.clientY));
    group.addEventListener('pointerleave', () => choose(null));
  });
  const frame = picture.parentElement;
  frame.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && current !== null) pick(current);
    const by = { ArrowRight: 1, ArrowLeft: -1, n: 1, p: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(current === null ? (by > 0 ? 0 : points.length - 1) : (current + by + points.length) % points.length);
  });
  frame.addEventListener('blur', () => choose(null));
}
