// Checks that run in the page. Each gives '' or says what is wrong.

window.check = (() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector) => document.querySelector(selector);
  const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const shown = (id) => !one(`#${id}`).hidden && one(`#${id}`).getClientRects().length > 0;
  const rows = () => all('#sheet tbody tr[data-candidate]').map((row) => row.dataset.candidate).join();
  const set = (selector, value) => {
    const input = one(selector);
    if (input.type === 'checkbox') input.checked = value;
    else input.value = value;
    input.dispatchEvent(new Event('input', { bubbles: true }));
  };
  const viewBox = async () => {
    await frame();
    return one('.panel[data-side=after] svg').getAttribute('viewBox');
  };

  return {
    viewBox,

    /** For pictures: everything that opens is open. */
    async openEverything() {
      one('#graph-repeats').click();
      one('#graph-fit').click();
      one('.opener').click();
      for (let click = 0; click < 12; click++) one('#timeline-in').click();
      await frame();
    },

    noSidewaysScroll() {
      const { scrollWidth, clientWidth } = document.documentElement;
      if (scrollWidth <= clientWidth) return '';
      const wide = all('main *').filter((node) => node.getBoundingClientRect().right > clientWidth + 1 && !node.closest('.scroll, svg, nav'));
      return `the page is ${scrollWidth} wide in a window of ${clientWidth}: ${wide.slice(0, 3).map((node) => node.outerHTML.slice(0, 120)).join(' | ')}`;
    },

    /** What moved by itself while the page was drawn; 0.1 is what a reader begins to notice. */
    async noShift() {
      let moved = 0;
      new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) moved += entry.value;
      }).observe({ type: 'layout-shift', buffered: true });
      await frame();
      return moved < 0.02 ? '' : `the layout shifted by ${moved}`;
    },

    noForeignMarkup() {
      return all('img, iframe, object, embed').length ? 'foreign elements' : '';
    },

    contents() {
      const links = all('#contents a').map((link) => link.getAttribute('href').slice(1));
      const sections = all('main > section').map((section) => section.id).filter((id) => id !== 'summary' && shown(id));
      return links.join() === sections.join() ? '' : `links ${links} but sections ${sections}`;
    },

    sections() {
      const wanted = ['graph', 'candidates', 'roofline', 'next', 'traffic', 'timeline', 'memory', 'plans', 'matmuls', 'source', 'pins', 'flips', 'machine', 'notes'];
      const missing = wanted.filter((id) => !shown(id));
      return missing.length ? `missing sections: ${missing}` : '';
    },

    /** Counters of both plans, with the columns that some kernel has and no others. */
    profile() {
      const profiled = one('#profile-table tbody');
      if (!profiled) return shown('profile') ? 'a profile without a table' : '';
      const titles = all('#profile-table thead th').map((cell) => cell.textContent).join();
      const wanted = 'Kernel,Time,Must move,Profiled time,Read,Written,Cache hits,Occupancy,Registers,Tensor cores,Issue slots';
      if (titles !== wanted) return `columns ${titles}`;
      const sides = all('#profile-table tbody .why').map((cell) => cell.textContent.split(',')[0]);
      if (!sides.includes('before') || !sides.includes('after')) return 'a plan is missing';
      return one('#profile-notes').children.length ? '' : 'notes are missing';
    },

    /** A row, a point, a bar and a node of one kernel select each other. */
    async linked() {
      if (document.title.includes('img')) return '';
      const name = () => { const row = one('.traffic-row.selected'); return row && row.dataset.name; };
      const chosen = () => one('.roof-point.chosen');
      const row = all('#traffic-columns > :nth-child(2) .traffic-row').find((one) => one.textContent.includes('+'));
      row.click();
      await frame();
      if (name() !== row.dataset.name) return 'a row does not select itself';
      if (!chosen() || !chosen().getAttribute('aria-label').startsWith(row.dataset.name)) return 'a row does not select its point';
      if (!one('#timeline-drawing .chosen-box')) return 'a row does not select its bar';
      if (!one('#inspector').textContent.includes(row.dataset.name)) return 'a row does not select its node';
      if (!/writes .*\.out: bf16\[/.test(one('#inspector').textContent)) return `no tensor names: ${one('#inspector').textContent}`;
      const other = all('.roof-point.roof-after').find((point) => !point.classList.contains('chosen'));
      other.dispatchEvent(new MouseEvent('click', { bubbles: true }));
      await frame();
      if (!other.getAttribute('aria-label').startsWith(name())) return `a point selects ${name()}`;
      if (!one('#inspector').textContent.includes(name())) return 'a point does not select its node';
      one('.panel[data-side=after] svg').dispatchEvent(new KeyboardEvent('keydown', { key: 'n', bubbles: true }));
      await frame();
      const after = all('#inspector .inspected b').pop();
      return after && name() === after.textContent ? '' : `a node in ${after && after.textContent} selects ${name()}`;
    },

    /** At the start no operation is cut off at the sides while there is room to show it at a readable size. */
    async notClipped() {
      one('#graph-repeats').click();
      one('#graph-repeats').click();
      const [left, , width] = (await viewBox()).split(' ').map(Number);
      const boxes = all('.panel[data-side=after] .box').map((box) => [Number(box.getAttribute('x')), Number(box.getAttribute('x')) + Number(box.getAttribute('width'))]);
      const scale = one('.panel[data-side=after] svg').clientWidth / width;
      const cut = boxes.filter(([from, to]) => from < left || to > left + width);
      return cut.length && scale > 0.45 ? `${cut.length} operations are cut off at scale ${scale.toFixed(2)}` : '';
    },

    /** Both plans' memory, each with its peak in words. */
    memory() {
      const words = one('#memory-legend').textContent;
      if (all('#memory-drawing .memory-line').length !== 2) return 'a plan is missing';
      return words.includes('Before: at most') && words.includes('After: at most') && !words.includes('undefined') ? '' : words;
    },

    /** What is saved for Perfetto holds every launch of both plans. */
    async trace() {
      const kept = URL.createObjectURL;
      let saved = null;
      URL.createObjectURL = (blob) => { saved = blob; return kept.call(URL, blob); };
      one('#timeline-export').click();
      URL.createObjectURL = kept;
      if (!saved) return 'nothing is saved';
      const { traceEvents } = JSON.parse(await saved.text());
      const tracks = traceEvents.filter((event) => event.ph === 'M').map((event) => event.args.name);
      const slices = traceEvents.filter((event) => event.ph === 'X');
      if (!tracks.includes('After, predicted')) return `tracks ${tracks}`;
      return slices.length && slices.every((slice) => slice.dur >= 0 && slice.ts >= 0 && slice.name) ? '' : 'slices without times';
    },

    sorting() {
      const buttons = all('#sheet thead button');
      if (buttons.length < 13) return 'columns are missing';
      for (const [index, button] of buttons.entries()) {
        button.click();
        const first = rows();
        const sorted = button.parentElement.getAttribute('aria-sort');
        button.click();
        if (sorted === 'none' || sorted === button.parentElement.getAttribute('aria-sort')) return `column ${index} does not turn`;
        const values = new Set(all(`#sheet tbody tr[data-candidate] > :nth-child(${index + 1})`).map((cell) => cell.textContent));
        if (values.size > 2 && first === rows()) return `column ${index} does not sort`;
      }
      buttons[4].click();
      const counts = all('#sheet tbody tr[data-candidate] > :nth-child(5)').map((cell) => Number(cell.textContent.replace(/,/g, '')));
      return counts.every((count, at) => !at || counts[at - 1] >= count) ? '' : `counts are not in order: ${counts}`;
    },

    filtering() {
      const count = () => all('#sheet tbody tr[data-candidate]').length;
      const before = count();
      set('#find', 'no such operation anywhere');
      if (count()) return 'the search keeps what it should not';
      set('#find', '');
      if (count() !== before) return 'the search does not let go';
      set('#by-choice', 'fused');
      const fused = count();
      set('#by-choice', 'apart');
      if (fused + count() !== before || !fused || !count()) return `of ${before}, ${fused} are fused and ${count()} apart`;
      set('#by-choice', '');
      if (shown('by-disagreement-field')) {
        set('#by-disagreement', true);
        const some = count();
        set('#by-disagreement', false);
        if (!some || some >= before) return 'disagreements are not filtered';
      }
      return count() === before ? '' : 'filters stay on';
    },

    details() {
      const opener = one('.opener');
      opener.click();
      if (!one('#sheet .details dl')) return 'no details';
      opener.click();
      return one('#sheet .details') ? 'details stay open' : '';
    },

    async graphButtons() {
      const start = await viewBox();
      one('#graph-in').click();
      const near = await viewBox();
      if (near === start || Number(near.split(' ')[2]) >= Number(start.split(' ')[2])) return `zoom in: ${start} to ${near}`;
      one('#graph-fit').click();
      const whole = await viewBox();
      if (whole === near) return 'fit does nothing';
      if (!all('.panel[data-side=after] .hull').length) return 'no fused groups are drawn';
      one('[data-sides=before]').click();
      if (one('.panel[data-side=after]').getClientRects().length) return 'the choice of side does nothing';
      one('[data-sides=after]').click();
      await frame();
      return one('.panel[data-side=after]').getClientRects().length ? '' : 'after is not shown';
    },

    async repeats() {
      const button = one('#graph-repeats');
      if (button.hidden) return document.title.includes('img') ? '' : 'no repeated layers were found';
      const started = performance.now();
      button.click();
      await frame();
      one('#graph-fit').click();
      await frame();
      const taken = performance.now() - started;
      // Generous, since machines may have other work: what goes over all pairs of operations takes minutes.
      if (taken > 10000) return `expanding took ${taken.toFixed(0)} ms`;
      if (all('.panel[data-side=after] .rest').length) return 'a summary stays';
      button.click();
      one('#graph-fit').click();
      await frame();
      return all('.panel[data-side=after] .rest').length ? '' : 'the summary does not come back';
    },

    themes() {
      const grounds = new Set();
      for (let click = 0; click < 3; click++) {
        one('#theme').click();
        grounds.add(getComputedStyle(document.documentElement).backgroundColor);
      }
      return grounds.size === 2 ? '' : `grounds: ${[...grounds].join(' and ')}`;
    },

    sourceSelect() {
      const select = one('#source-select');
      const first = one('#source-lines').textContent;
      const other = all('option', select).find((option) => option.value !== select.value);
      select.value = other.value;
      select.dispatchEvent(new Event('input'));
      if (one('#source-lines').textContent === first) return 'the source does not change';
      const chip = one('#source-ops button');
      chip.click();
      const dimmed = all('.line.dim').length;
      chip.click();
      return dimmed && !all('.line.dim').length ? '' : 'choosing an operation does nothing';
    },

    async timelineButtons() {
      const marks = () => all('#timeline-drawing .axis text').map((text) => text.textContent).join();
      const start = marks();
      one('#timeline-in').click();
      await frame();
      const near = marks();
      one('#timeline-fit').click();
      await frame();
      return start && near !== start && marks() === start ? '' : `axis: ${start} / ${near} / ${marks()}`;
    },

    /** Text against the ground beneath it, by the formula of WCAG; AA asks for 4.5. */
    contrast() {
      const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
      const known = new Map();
      const colour = (text) => {
        if (!known.has(text)) known.set(text, painted(text));
        return known.get(text);
      };
      const painted = (text) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = text;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
      };
      const light = ([red, green, blue]) => [red, green, blue].reduce((sum, part, index) => {
        const share = part / 255;
        return sum + [0.2126, 0.7152, 0.0722][index] * (share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4);
      }, 0);
      const ground = (node) => {
        for (let at = node; at; at = at.parentElement) {
          const found = colour(getComputedStyle(at).backgroundColor);
          if (found[3] > 200) return found;
        }
        return colour(getComputedStyle(document.documentElement).backgroundColor);
      };
      for (const node of all('h1, h2, h3, h4, p, dt, dd, th, td, a, button, .tag, .why, .hint, .label, .from, .place, code, .key, .traffic-sum, b, figcaption span')) {
        if (!node.getClientRects().length || !node.textContent.trim()) continue;
        const [front, back] = [light(colour(getComputedStyle(node).color)), light(ground(node))];
        const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
        if (ratio < 4.5) return `contrast ${ratio.toFixed(2)}: ${node.outerHTML.slice(0, 160)}`;
      }
      return '';
    },

    async place(selector) {
      const node = one(selector);
      node.scrollIntoView({ block: 'center', behavior: 'instant' });
      // Scrolling hides the tooltip a frame later.
      await frame();
      const box = node.getBoundingClientRect();
      return [box.left + box.width / 2, box.top + box.height / 2];
    },

    async inspected() {
      await frame();
      if (!one('#inspector h3')) return 'nothing is inspected';
      return one('.panel[data-side=after] .chosen-box') ? '' : 'the operation is not marked';
    },

    async tip() {
      await frame();
      return one('#tip').hidden ? 'no tooltip' : '';
    },
  };
})();
''
