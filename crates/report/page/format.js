// Numbers as people read them: three digits and a prefix, as `units.rs` writes them. What is no number shows as a dash.

const NOTHING = '–';
const PREFIXES = [[1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k'], [1, ''], [1e-3, 'm'], [1e-6, 'µ'], [1e-9, 'n']];

function isNumber(value) {
  return typeof value === 'number' && Number.isFinite(value);
}

/** The value for geometry: malformed figures count as nothing. */
function amount(value) {
  return isNumber(value) && value > 0 ? value : 0;
}

function digits(value) {
  if (!isNumber(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(1);
  if (size >= 99.95) return value.toFixed(0);
  if (size >= 9.995) return value.toFixed(1);
  if (size >= 0.1 || size === 0) return value.toFixed(2);
  return value.toFixed(4);
}

function prefixed(value, unit, smallest) {
  if (!isNumber(value)) return NOTHING;
  if (value === 0) return `0 ${unit}`;
  const usable = PREFIXES.filter(([scale]) => scale >= smallest);
  const [scale, prefix] = usable.find(([scale]) => Math.abs(value) >= scale * 0.9995) || usable[usable.length - 1];
  const scaled = value / scale;
  if (scale === 1 && Number.isInteger(scaled) && Math.abs(scaled) < 1e6) return `${scaled} ${prefix}${unit}`;
  return `${digits(scaled)} ${prefix}${unit}`;
}

const formatBytes = (value) => prefixed(value, 'B', 1);
const formatTime = (us) => (isNumber(us) ? prefixed(us * 1e-6, 's', 1e-9) : NOTHING);
const formatFlops = (perUs) => (isNumber(perUs) ? prefixed(perUs * 1e6, 'FLOP/s', 1) : NOTHING);
const formatByteRate = (perUs) => (isNumber(perUs) ? prefixed(perUs * 1e6, 'B/s', 1) : NOTHING);
const formatShare = (share) => (isNumber(share) ? `${digits(share * 100)} %` : NOTHING);
const formatCount = (value) => (isNumber(value) ? value.toLocaleString('en', { maximumFractionDigits: 0 }) : NOTHING);
const formatRatio = (ratio) => (isNumber(ratio) && ratio > 0 ? `${digits(ratio)}×` : NOTHING);

/** `1 launch`, `12 launches` */
function counted(count, one, many) {
  return `${formatCount(count)} ${count === 1 ? one : many}`;
}

function shorten(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
