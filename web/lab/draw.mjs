// What rooms draw with: elements, pictures, bars, tables, numbers in words, the course's colours.

// As in minidist/instruments/plot/palette.py; tests/test_lab.py compares.
export const COLORS = {
  forward: "#56B4E9",
  backward: "#0072B2",
  "backward for inputs": "#003F66",
  "backward for weights": "#8F7CC4",
  communication: "#D55E00",
  parameters: "#0072B2",
  gradients: "#E69F00",
  "optimizer states": "#009E73",
  activations: "#CC79A7",
  other: "#999999",
  naive: "#D55E00",
  ring: "#0072B2",
  tree: "#009E73",
  recursive_doubling: "#CC79A7",
  halving_doubling: "#E69F00",
  flat: "#56B4E9",
  data: "#882255",
  pipeline: "#44AA99",
  tensor: "#999933",
};
export const RANKS = [
  ...["#0072B2", "#E69F00", "#009E73", "#CC79A7"],
  ...["#56B4E9", "#D55E00", "#F0E442", "#4B3F72"],
];

/** The writing, dark or white, that is easier to read upon a colour "#RRGGBB". */
export function ink(background) {
  const parts = [1, 3, 5].map((at) => parseInt(background.slice(at, at + 2), 16) / 255);
  const linear = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return light > 0.179 ? "#000000" : "#FFFFFF";
}

/** The colour "#RRGGBB", nearer to white by one step or several. */
export function paler(color, times) {
  const part = (at) => 255 - 0.55 ** times * (255 - parseInt(color.slice(at, at + 2), 16));
  const digits = [1, 3, 5].map((at) => Math.round(part(at)).toString(16).padStart(2, "0"));
  return `#${digits.join("")}`;
}

// ---- elements -------------------------------------------------------------------------------

/**
 * An HTML element. Its children are nodes, and texts, which are never read as HTML; a list of them
 * counts as its parts. What is false or undefined is left out, as a child or as an attribute.
 */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An element of a picture: shape("rect", {x: 1, …}, shape("title", {}, "what it is")). */
export function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (isThere(value)) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter(isThere));
  return node;
}

const isThere = (what) => what !== undefined && what !== false;

/** A button, and what it does. */
export function button(attributes, press, ...children) {
  const node = element("button", { type: "button", ...attributes }, children);
  node.addEventListener("click", press);
  return node;
}

/** A picture of so many CSS pixels. The label says in words what is seen. */
export const svg = (width, height, label, ...children) =>
  shape(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    children,
  );

/** How many CSS pixels a picture in a card can be wide. If it changes, the room is shown anew. */
export const width = () => Math.floor(document.querySelector("#result").clientWidth - 30);

/** A part of the result, with a title or without. */
export const card = (title, ...children) =>
  element("section", { class: "card" }, title !== "" && element("h3", {}, title), children);

/** Large numbers: [["a step", "27 s", "± 25 %"], …]. */
export const facts = (list) =>
  element(
    "dl",
    { class: "facts" },
    list.map(([name, value, note]) => {
      const small = note && element("small", {}, note);
      return element("div", {}, element("dt", {}, name), element("dd", {}, value, small));
    }),
  );

/** What colours mean: [["forward", "#56B4E9"], …]. */
export const key = (list) =>
  element(
    "ul",
    { class: "key" },
    list.map(([name, color]) =>
      element("li", {}, element("i", { style: `background: ${color}` }), name),
    ),
  );

/**
 * A table. `rows` are lists of cells, texts or nodes; of a short one, the last cell takes all that
 * is left. Row number `chosen` is marked.
 */
export function table(head, rows, { caption, chosen } = {}) {
  const cell = (what, i, row) => {
    if (i === 0) return element("th", { scope: "row" }, what);
    const left = i === row.length - 1 ? head.length - i : 1;
    return element("td", { colspan: left > 1 && left }, what);
  };
  const names = head.map((name) => element("th", { scope: "col" }, name));
  const body = rows.map((row, i) => {
    const mark = i === chosen ? { class: "chosen", "aria-current": "true" } : {};
    return element("tr", mark, row.map(cell));
  });
  const made = element(
    "table",
    {},
    caption && element("caption", {}, caption),
    element("thead", {}, element("tr", {}, names)),
    element("tbody", {}, body),
  );
  return element("div", { class: "wide" }, made);
}

/**
 * One bar of several parts, with its key. `parts`: [[name, value, color], …]; `format` says a
 * value in words; `limits`: [[name, value], …] are dashed lines.
 */
export function bar(parts, format, label, limits = []) {
  const seen = parts.filter(([, value]) => value > 0);
  const sum = seen.reduce((all, [, value]) => all + value, 0);
  const wide = width();
  const scale = (wide - 2) / Math.max(sum, ...limits.map(([, value]) => value));
  const drawn = [];
  const top = limits.length ? 18 : 2;
  let x = 1;
  for (const [name, value, color] of seen) {
    const long = value * scale;
    const what = shape("title", {}, `${name}: ${format(value)}`);
    const size = { x, y: top, width: Math.max(long - 1, 0.5), height: 30, fill: color };
    drawn.push(shape("rect", size, what));
    x += long;
  }
  for (const [i, [name, value]] of limits.entries()) {
    const at = value * scale;
    const line = { x1: at, x2: at, y1: 14, y2: 54, stroke: "var(--ink)", "stroke-width": 2 };
    drawn.push(shape("line", { ...line, "stroke-dasharray": "4 3" }));
    const place = { x: at, y: i % 2 ? 12 : 66, "text-anchor": at > wide / 2 ? "end" : "start" };
    drawn.push(shape("text", place, name));
  }
  const words = seen.map(([name, value]) => `${name} ${format(value)}`);
  return [
    svg(wide, limits.length ? 70 : 34, `${label}: ${words.join(", ")}`, drawn),
    key(seen.map(([, , color], i) => [words[i], color])),
  ];
}

// ---- numbers in words -----------------------------------------------------------------------

const digits = (value) => String(Number(value.toPrecision(3)));

function human(value, units) {
  const rounded = Number(value.toPrecision(3));
  const [scale, unit] = units.find(([each]) => Math.abs(rounded) < 999.5 * each) ?? units.at(-1);
  return `${digits(value / scale)} ${unit}`;
}

/** Three digits and a decimal unit, as md.plot writes them: bytes(1536) is "1.54 kB". */
export const bytes = (n) =>
  human(n, [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"]]);

/** Three digits and a unit: seconds(0.00123) is "1.23 ms". */
export const seconds = (s) =>
  s === 0 ? "0 s" : human(s, [[1e-9, "ns"], [1e-6, "µs"], [1e-3, "ms"], [1, "s"]]);

/** A number as it is, and its unit: inUnits("µs")(20) is "20 µs". */
export const inUnits = (unit) => (value) => `${value} ${unit}`;

/** A whole number with commas. */
export const count = (n) => Math.round(n).toLocaleString("en");

/** A part of a whole: percent(0.273) is "27 %". */
export const percent = (part) => `${Math.round(100 * part)} %`;

/** "1 GPU", "2 GPUs". */
export const many = (n, one, more = `${one}s`) => `${count(n)} ${n === 1 ? one : more}`;
