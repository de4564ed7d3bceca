// Pictures of the room "Collectives": what each rank holds after a step, what was sent, and when.

import { RANKS, element, ink, key, many, seconds, shape, svg, width } from "../draw.mjs";

const LEFT = 54; // pixels for the names of the pieces
const ARCS = 64; // pixels for the arrows above the ranks
const HEAD = 40; // pixels for the names of ranks and nodes

/** Who holds what: columns are ranks, rows are pieces, arrows above them the messages. */
export function who(answer) {
  const { held, pieces, messages, node_of: nodeOf } = answer;
  const ranks = held.length;
  const wide = Math.min(width(), 640);
  const gap = nodeOf.at(-1) ? 14 : 0; // between the nodes
  const column = (wide - LEFT - gap) / ranks;
  const row = pieces.length > 1 ? 28 : 44;
  const top = ARCS + HEAD;
  const x = (rank) => LEFT + rank * column + nodeOf[rank] * gap;
  const middle = (rank) => x(rank) + column / 2;
  const arrived = new Set(messages.flatMap((m) => m.pieces.map((i) => `${m.receiver} ${i}`)));

  const names = held.map((_, rank) => {
    const name = column > 48 ? `rank ${rank}` : String(rank);
    return shape("text", { x: middle(rank), y: top - 6, "text-anchor": "middle" }, name);
  });
  const rows = pieces.map((_, i) => {
    const name = pieces.length > 1 ? `piece ${i}` : "vector";
    return shape("text", { x: 0, y: top + i * row + row / 2 + 4 }, name);
  });
  const cells = held.map((own, rank) =>
    own.map((values, i) => {
      const place = { x: x(rank) + 2, y: top + i * row + 2, width: column - 5, height: row - 5 };
      return cell(place, values, answer, `rank ${rank}, piece ${i}`, arrived.has(`${rank} ${i}`));
    }),
  );
  const label =
    `Columns are ranks 0 to ${ranks - 1}, rows the ${many(pieces.length, "piece")} of the ` +
    `vector. ${held.map((own, rank) => holds(own, rank, answer)).join("; ")}.`;
  const above = [nodes(nodeOf, x, column), arcs(messages, middle, ranks), names];
  return svg(wide, top + pieces.length * row + 4, label, above, rows, cells);
}

function holds(own, rank, { complete }) {
  const ready = own.filter((values) => values.length === complete).length;
  return `rank ${rank} has ${ready} of ${own.length} complete`;
}

/** A line above the ranks of each node, if there are several. */
function nodes(nodeOf, x, column) {
  if (!nodeOf.at(-1)) return [];
  return [0, 1].map((node) => {
    const [first, last] = [nodeOf.indexOf(node), nodeOf.lastIndexOf(node)];
    const [from, to] = [x(first) + 2, x(last) + column - 3];
    const y = ARCS + 16;
    return [
      shape("path", { d: `M${from},${y} H${to}`, stroke: "var(--control)", "stroke-width": 2 }),
      shape("text", { x: (from + to) / 2, y: y - 4, "text-anchor": "middle" }, `node ${node}`),
    ];
  });
}

/** An arrow for each message. Those over the nodes' cables are dashed. */
function arcs(messages, middle, ranks) {
  const foot = ARCS - 4;
  return messages.map(({ sender, receiver, crosses }) => {
    const right = receiver > sender ? 1 : -1;
    const far = Math.abs(receiver - sender) / Math.max(ranks - 1, 1);
    const inset = right > 0 ? 3 : -9; // of two in opposite directions one is within the other
    const peak = foot - 22 - 80 * far + (right > 0 ? 0 : 14); // a curve reaches half as high
    const [from, to] = [middle(sender) + inset, middle(receiver) - inset];
    const line = {
      d: `M${from},${foot} Q${(from + to) / 2},${peak} ${to},${foot - 4}`,
      fill: "none",
      stroke: "var(--ink)",
      "stroke-width": crosses ? 2.5 : 1.5,
      "stroke-dasharray": crosses && "5 3",
    };
    const slope = Math.atan2(foot - 4 - peak, (to - from) / 2);
    const edge = (turn) =>
      `${to - 9 * Math.cos(slope + turn)},${foot - 4 - 9 * Math.sin(slope + turn)}`;
    const head = { points: `${to},${foot - 4} ${edge(0.4)} ${edge(-0.4)}`, fill: "var(--ink)" };
    return shape(
      "g",
      {},
      shape("title", {}, `from rank ${sender} to rank ${receiver}`),
      shape("path", line),
      shape("polygon", head),
    );
  });
}

/** A place for each rank's values, filled if they are in the sum. What just came has a frame. */
function cell(place, values, { complete, held }, name, framed) {
  const places = complete > 1 ? held.length : 1;
  const wide = place.width / places;
  const words = values.length ? `the values of ${listed(values)}` : "nothing yet";
  const drawn = values.map((rank) => {
    const at = place.x + (places > 1 ? rank * wide : 0);
    const size = { x: at, y: place.y, width: wide, height: place.height };
    const style = `fill: ${ink(RANKS[rank])}`;
    const middle = { x: at + wide / 2, y: place.y + place.height / 2 + 4, style };
    return [
      shape("rect", { ...size, fill: RANKS[rank] }),
      wide >= 12 && shape("text", { ...middle, "text-anchor": "middle" }, String(rank)),
    ];
  });
  const frame = { ...place, style: "fill: none; stroke-width: 3px" };
  return shape(
    "g",
    {},
    shape("title", {}, `${name}: ${words}`),
    shape("rect", { ...place, class: "empty" }),
    drawn,
    framed && shape("rect", frame),
  );
}

const listed = (ranks) => `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")}`;

/** What colours, frames and dashes mean. */
export function legend({ held, complete, node_of: nodeOf }) {
  const what =
    complete > 1
      ? "Each cell has a place for each rank's values: filled, they are in the sum. "
      : "A cell shows whose values it has. ";
  const cables = nodeOf.at(-1) ? " Dashed arrows go over the nodes' cables." : "";
  const colors = held.map((_, rank) => [`values of rank ${rank}`, RANKS[rank]]);
  return [key(colors), element("p", {}, `${what}Framed: it has just arrived.${cables}`)];
}

/** A bar of time, in which each step is as long as it takes. */
export function clock({ ends, step, steps }) {
  const wide = Math.min(width(), 640);
  const x = (time) => 1 + (time / (ends[steps] || 1)) * (wide - 2);
  const boxes = ends.slice(1).map((end, i) => {
    const size = { x: x(ends[i]), width: Math.max(x(end) - x(ends[i]) - 1, 0.5) };
    const look =
      i < step
        ? { fill: "var(--accent)", "fill-opacity": i + 1 < step ? 0.5 : 1 }
        : { class: "empty" };
    const words = `step ${i + 1}: ${seconds(ends[i])} to ${seconds(end)}`;
    return shape("rect", { ...size, y: 2, height: 16, ...look }, shape("title", {}, words));
  });
  const words = `${seconds(ends[step])} of ${seconds(ends[steps])}`;
  return [
    svg(wide, 20, `Time of the steps so far: ${words}`, boxes),
    element("p", {}, `Time: ${words}`),
  ];
}
