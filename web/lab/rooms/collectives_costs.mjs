// All algorithms of a collective compared: their times over the vector's size, and a table.

import { COLORS, button, bytes, element, seconds, shape, svg, table, width } from "../draw.mjs";


// Lines differ by more than their colours.
const DASHES = {
  naive: "2 4",
  tree: "9 4",
  recursive_doubling: "12 3 2 3",
  halving_doubling: "5 3",
  flat: "2 4",
};

const NAMES = { halving_doubling: "halving-doubling", recursive_doubling: "recursive doubling" };
export const inWords = (algorithm) => NAMES[algorithm] ?? algorithm;

/** Both axes grow by factors: lines are the formula, dots the network at the chosen size. */
export function chart({ curves, sizes, rivals }, { nbytes }) {
  const [wide, high, left, low, right] = [width(), 260, 52, 24, 8];
  const log = Math.log10;
  const values = [...Object.values(curves).flat(), ...rivals.map(({ network }) => network)];
  const bottom = Math.floor(log(Math.min(...values)));
  const top = Math.ceil(log(Math.max(...values)));
  const most = log(sizes.at(-1) / sizes[0]);
  const x = (size) => left + (log(size / sizes[0]) / most) * (wide - left - right);
  const y = (time) => high - low - ((log(time) - bottom) / (top - bottom || 1)) * (high - low - 10);
  const each = wide < 480 ? 3 : 1; // as many powers of ten as there is room for
  const line = (ends, color, dashes) =>
    shape("line", { ...ends, stroke: `var(--${color})`, "stroke-dasharray": dashes });
  const times = Array.from({ length: top - bottom + 1 }, (_, i) => 10 ** (bottom + i));
  const drawn = [
    times.map((time) => [
      line({ x1: left, x2: wide - right, y1: y(time), y2: y(time) }, "line"),
      shape("text", { x: left - 6, y: y(time) + 4, "text-anchor": "end" }, seconds(time)),
    ]),
    sizes
      .filter((size) => Number.isInteger(log(size) / each))
      .map((size) =>
        shape("text", { x: x(size), y: high - 6, "text-anchor": anchor(size, sizes) }, bytes(size)),
      ),
    line({ x1: x(nbytes), x2: x(nbytes), y1: 6, y2: high - low }, "control", "3 3"),
    rivals.map(({ name }) =>
      shape("polyline", {
        points: curves[name].map((time, i) => `${x(sizes[i])},${y(time)}`).join(" "),
        fill: "none",
        ...stroke(name),
      }),
    ),
    rivals.map(({ name, network }) => {
      const words = `${inWords(name)}: ${seconds(network)} on this network`;
      const look = { fill: COLORS[name], stroke: "var(--ink)", "stroke-width": 1.5 };
      const dot = { cx: x(nbytes), cy: y(network), r: 5, ...look };
      return shape("circle", dot, shape("title", {}, words));
    }),
  ];
  const names = rivals.map(({ name }) => name);
  const fastest = (at) => names.sort((a, b) => curves[a][at] - curves[b][at])[0];
  const label =
    `Time by the formula over the vector's size. For ${bytes(sizes[0])} ` +
    `${inWords(fastest(0))} is the fastest, for ${bytes(sizes.at(-1))} ` +
    `${inWords(fastest(sizes.length - 1))}.`;
  return [
    svg(wide, high, label, drawn),
    lineKey(rivals),
    element("p", {}, `Lines: the formula. Dots: this network, with ${bytes(nbytes)}.`),
  ];
}

const anchor = (size, sizes) => (size === sizes.at(-1) ? "end" : "middle");

const stroke = (name) => ({
  stroke: COLORS[name],
  "stroke-width": 2.5,
  "stroke-dasharray": DASHES[name],
});

function lineKey(rivals) {
  const place = { width: 40, height: 10, "aria-hidden": "true", style: "display: inline-block" };
  const items = rivals.map(({ name }) => {
    const line = shape("line", { x1: 0, x2: 36, y1: 5, y2: 5, ...stroke(name) });
    return element("li", {}, shape("svg", place, line), inWords(name));
  });
  return element("ul", { class: "key" }, items);
}

/** A row for each algorithm: what its formula counts, and what it takes. */
export function comparison({ operation, algorithm, rivals, node_of: nodeOf }, { nbytes }, set) {
  const two = nodeOf.at(-1) > 0;
  const least = Math.min(...rivals.map(({ network }) => network));
  const choose = (name) => {
    const press = () => set({ collective: `${operation} ${name}` });
    return button({ id: `choose-${name}` }, press, inWords(name));
  };
  const head = ["algorithm", "messages", "bytes", "formula", "this network"];
  const made = table(
    two ? [...head, "leaving node 0"] : head,
    rivals.map((each) => [
      choose(each.name),
      String(each.messages),
      bytes(each.nbytes),
      seconds(each.formula),
      `${seconds(each.network)}${each.network === least && rivals.length > 1 ? " (least)" : ""}`,
      ...(two ? [bytes(each.leave_node)] : []),
    ]),
    {
      caption: `${operation} of ${bytes(nbytes)}`,
      chosen: rivals.findIndex(({ name }) => name === algorithm),
    },
  );
  const note =
    "Messages and bytes are those of the critical path: the formula is " +
    "messages · α + bytes · β" +
    (two
      ? ", as if all of them went over a node's cable. On the network, messages within a node do " +
        "not, and those that leave a node at once share its cable."
      : ". It lets a rank send or receive one message at a time. On the network, any two ranks " +
        "have a line of their own: what several send to one rank arrives at once, and a sender " +
        "does not wait for the latency of its last message.");
  return [made, element("p", {}, note)];
}
