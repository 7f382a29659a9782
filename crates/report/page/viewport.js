// Panning and zooming by wheel, fingers, buttons and keys, for one or more pictures that move together.
//
// The wheel and a single finger belong to the page until the picture is clicked or focused: scrolling past it must
// not get stuck. With Ctrl, and with two fingers, it zooms at once.

const ZOOM_STEP = 1.35;

/**
 * Connects pictures to `view`, which has pan(dx, dy) in pixels, zoom(factor, x, y) about a point in pixels, fit(),
 * step(by), hover(x, y, event), leave() and pick(x, y).
 */
function connectView(pictures, view) {
  for (const picture of pictures) connectPicture(picture, view);
  document.addEventListener('pointerdown', (event) => {
    for (const picture of pictures) if (!picture.contains(event.target)) picture.classList.remove('active');
  });
}

function connectPicture(picture, view) {
  const pointers = new Map();
  let moved = 0;
  const place = (event) => {
    const box = picture.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  picture.addEventListener('wheel', (event) => {
    const active = picture.classList.contains('active') || event.ctrlKey || event.metaKey;
    if (!active) return;
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    view.zoom(Math.exp(-event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.002)), ...place(event));
  }, { passive: false });

  picture.addEventListener('pointerdown', (event) => {
    if (event.button) return;
    pointers.set(event.pointerId, place(event));
    moved = 0;
    if (event.pointerType === 'mouse') picture.classList.add('active');
  });

  picture.addEventListener('pointermove', (event) => {
    const [x, y] = place(event);
    const last = pointers.get(event.pointerId);
    if (!last) {
      view.hover(x, y, event);
      return;
    }
    const distance = spread(pointers);
    pointers.set(event.pointerId, [x, y]);
    moved += Math.abs(x - last[0]) + Math.abs(y - last[1]);
    if (moved > 4 && !picture.hasPointerCapture(event.pointerId)) picture.setPointerCapture(event.pointerId);
    if (pointers.size === 2 && distance > 0) {
      const [[x0, y0], [x1, y1]] = [...pointers.values()];
      view.zoom(spread(pointers) / distance, (x0 + x1) / 2, (y0 + y1) / 2);
    }
    view.pan((x - last[0]) / pointers.size, (y - last[1]) / pointers.size);
    view.leave();
  });

  const release = (event) => {
    const known = pointers.delete(event.pointerId);
    if (known && event.type === 'pointerup' && moved <= 4) {
      picture.classList.add('active');
      picture.focus({ preventScroll: true });
      view.pick(...place(event), event);
    }
  };
  picture.addEventListener('pointerup', release);
  picture.addEventListener('pointercancel', release);
  picture.addEventListener('pointerleave', () => view.leave());
  picture.addEventListener('focus', () => picture.classList.add('active'));
  picture.addEventListener('blur', () => {
    picture.classList.remove('active');
    view.leave();
  });
  picture.addEventListener('keydown', (event) => onKey(event, picture, view));
}

function spread(pointers) {
  if (pointers.size !== 2) return 0;
  const [[x0, y0], [x1, y1]] = [...pointers.values()];
  return Math.hypot(x1 - x0, y1 - y0);
}

function onKey(event, picture, view) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { width, height } = picture.getBoundingClientRect();
  const actions = {
    ArrowLeft: () => view.pan(60, 0),
    ArrowRight: () => view.pan(-60, 0),
    ArrowUp: () => view.pan(0, 60),
    ArrowDown: () => view.pan(0, -60),
    '+': () => view.zoom(ZOOM_STEP, width / 2, height / 2),
    '=': () => view.zoom(ZOOM_STEP, width / 2, height / 2),
    '-': () => view.zoom(1 / ZOOM_STEP, width / 2, height / 2),
    0: () => view.fit(),
    n: () => view.step(1),
    p: () => view.step(-1),
    Enter: () => view.open && view.open(),
  };
  const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action) return;
  event.preventDefault();
  action();
}
