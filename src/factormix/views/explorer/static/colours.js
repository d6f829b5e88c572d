// Colours of numbers: one scale from little to much, one for what may be below or above zero.

const SEQUENCE = ["#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39",
  "#fde725"];
const LIGHT = ["#1f4e9c", "#5b8fd1", "#b4cdea", "#f4f4f2", "#f2c1a6", "#dd7350", "#a32622"];
const DARK = ["#8ab8ff", "#4d7fc4", "#2b456b", "#1b1f24", "#6e3524", "#d0603c", "#ffab8a"];

const dark = matchMedia("(prefers-color-scheme: dark)");

function table(stops) {
  const rgb = stops.map((text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)));
  return Array.from({ length: 256 }, (_, i) => {
    const place = (i / 255) * (rgb.length - 1);
    const low = Math.min(Math.floor(place), rgb.length - 2);
    return rgb[low].map((value, c) => value + (place - low) * (rgb[low + 1][c] - value));
  });
}

const TABLES = { sequence: table(SEQUENCE), light: table(LIGHT), dark: table(DARK) };

export function sequence() {
  return TABLES.sequence;
}

export function signed() {
  return dark.matches ? TABLES.dark : TABLES.light;
}

export function css([r, g, b]) {
  return `rgb(${Math.round(r)} ${Math.round(g)} ${Math.round(b)})`;
}

// The colour of a value between low and high, as CSS knows it.
export function coloured(colours, value, low, high) {
  if (!Number.isFinite(value)) return theme("--line");
  const share = high > low ? (value - low) / (high - low) : 0.5;
  return css(colours[Math.round(255 * Math.min(1, Math.max(0, share)))]);
}

export function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function onThemeChange(action) {
  dark.addEventListener("change", action);
  return () => dark.removeEventListener("change", action);
}
