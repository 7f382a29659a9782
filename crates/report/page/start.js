// Draws the page, section by section; one that fails does not take the others with it.

const THEMES = [['auto', 'Auto', 'as the system'], ['light', 'Light', 'light'], ['dark', 'Dark', 'dark']];

function connectTheme() {
  const button = byId('theme');
  let current = 0;
  const apply = () => {
    const [theme, title, words] = THEMES[current];
    if (theme === 'auto') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = title;
    button.setAttribute('aria-label', `Theme: ${words}`);
  };
  button.addEventListener('click', () => {
    current = (current + 1) % THEMES.length;
    apply();
  });
}

function listContents() {
  const sections = [...document.querySelectorAll('main > section')].filter((section) => section.id !== 'summary' && section.getClientRects().length);
  byId('contents').replaceChildren(...sections.map((section) => {
    const title = section.querySelector('h2');
    return element('a', { href: `#${section.id}` }, title.dataset.short || title.textContent);
  }));
}

connectTheme();
document.documentElement.dataset.drawn = '';
if (data) {
  for (const show of [showGraph, showCandidates, showRoofline, showTraffic, showTimeline, showMemory, showPlans, showMatmuls, showSource, showMeasured,
    showProfile, showPins, showFlips, showRecompute, showMachine, showNotes, linkRows]) {
    try {
      show();
    } catch (error) {
      console.error(error);
    }
  }
}
listContents();
