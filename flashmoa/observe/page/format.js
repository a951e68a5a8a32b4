// Times and numbers for readers, and elements with text in them.

const SVG = "http://www.w3.org/2000/svg";

const MINUTES = 600;

// A time that is not known is null, or missing.
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) < 0.9995) return `${(value * 1000).toFixed(0)} ms`;
  if (value < MINUTES) return `${value.toFixed(2)} s`;
  return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
}

function count(value) {
  return Number(value).toLocaleString("en");
}

// Where an axis has ticks, at least `gap` apart: at multiples of 1, 2 or 5 times a power of ten,
// in long runs of whole minutes.
function ticks(from, to, gap) {
  const power = 10 ** Math.floor(Math.log10(gap));
  const steps = [1, 2, 5, 10].map((n) => n * power);
  const whole = [15, 30, 60, 120, 300, 600, 1200, 1800, 3600];
  const nice = gap > 10 && to >= MINUTES ? whole : steps;
  const step = nice.find((n) => n >= gap * 0.999) ?? 3600 * Math.ceil(gap / 3600);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let n = Math.ceil(from / step - 1e-9); n * step <= to + step * 1e-9; n++) {
    found.push({ at: n * step, label: moment(n * step, digits, to >= MINUTES) });
  }
  return found;
}

function moment(at, digits, long) {
  if (!long) return `${at.toFixed(digits)} s`;
  const rest = (at % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  return `${Math.floor(at / 60)}:${rest}`;
}

// Texts are set as text, never as markup: names and answers may contain anything.
function element(name, text, attributes = {}) {
  return filled(document.createElement(name), text, attributes);
}

function shape(name, attributes, text) {
  return filled(document.createElementNS(SVG, name), text, attributes);
}

function filled(node, text, attributes) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
