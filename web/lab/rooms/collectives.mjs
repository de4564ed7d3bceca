// The room "Collectives": who sends what to whom in each step, what all hold then, how long it
// takes, and which algorithm is the fastest.

import { choice, range, slider } from "../controls.mjs";
import {
  COLORS,
  RANKS,
  bytes,
  card,
  element,
  facts,
  ink,
  key,
  many,
  seconds,
  shape,
  svg,
  table,
  width,
} from "../draw.mjs";

const GBPS = [0.05, 0.2, 1, 10, 20, 50, 100, 200, 400, 800, 3600];
const LATENCY = [0, 1, 5, 10, 20, 50, 100, 500, 4000];
const MOST_STEPS = 14; // of eight ranks in a ring
const PAUSE = 1200; // milliseconds of a step that is played

// Lines differ by more than their colours.
const DASHES = {
  naive: "2 4",
  tree: "9 4",
  recursive_doubling: "12 3 2 3",
  halving_doubling: "5 3",
  flat: "2 4",
};

const NAMES = { halving_doubling: "halving-doubling", recursive_doubling: "recursive doubling" };
const inWords = (algorithm) => NAMES[algorithm] ?? algorithm;

export default {
  title: "Collectives",
  about:
    "Ranks add up their vectors, or hand them out, by messages. Go through an algorithm step by " +
    "step, and see what it costs on one node, or on two that share a cable.",
  lessons: [
    ["02_collectives", "2 · Collectives"],
    ["03_communication", "3 · Communication"],
    ["04_networks", "4 · Networks"],
  ],
  controls,
  sentence,
  show,
};

function controls({ collectives, sizes }) {
  const speed = (value) => `${value} Gb/s`;
  const latency = (value) => `${value} µs`;
  const inFull = (name) => name.split(" ").map(inWords).join(" by ");
  const two = { when: ({ nodes }) => nodes > 1 };
  return [
    choice("collective", "collective", collectives, collectives[0], inFull),
    slider("ranks", "ranks", range(2, 8), 4),
    slider("nbytes", "size of the vector", sizes, 1e6, bytes),
    slider("gbps", "bandwidth 1/β", GBPS, 100, speed),
    slider("latency_us", "latency α", LATENCY, 10, latency),
    slider("nodes", "nodes", [1, 2], 1),
    { ...slider("cable_gbps", "1/β of a node's cable", GBPS, 10, speed), ...two },
    { ...slider("cable_latency_us", "α of a node's cable", LATENCY, 20, latency), ...two },
    { ...slider("step", "step", range(0, MOST_STEPS), 1), last: ({ steps }) => steps },
  ];
}

function sentence({ operation, algorithm, steps, step, ends, messages }, { ranks }) {
  const what =
    `${operation} by ${inWords(algorithm)} on ${ranks} ranks takes ` +
    `${seconds(ends[steps])} on this network.`;
  if (step === 0) return `${what} Before the first of ${many(steps, "step")}.`;
  const [first] = messages;
  const sizes = [...new Set(messages.map(({ nbytes }) => bytes(nbytes)))].join(" or ");
  return (
    `${what} Step ${step} of ${steps} ends after ${seconds(ends[step])}: ` +
    `${many(messages.length, "message")} of ${sizes}, ${fate(first)} where ` +
    `${messages.length > 1 ? "they arrive" : "it arrives"}.`
  );
}

const fate = ({ adds }) => (adds ? "added up" : "kept");

function show(answer, state, set) {
  keepPlaying(answer, set);
  const { steps, step } = answer;
  const when = step ? `after step ${step} of ${steps}` : "before the first step";
  return element(
    "div",
    {},
    card(
      `Who holds what ${when}`,
      player(answer, set),
      picture(answer),
      clock(answer),
      meaning(answer),
    ),
    card(step ? `The messages of step ${step}` : "Messages", letters(answer)),
    card("What each rank sends in all", sent(answer)),
    card(`All ways to ${answer.operation}, by the size of the vector`, chart(answer, state)),
    card("", comparison(answer, state, set)),
  );
}

// ---- play -----------------------------------------------------------------------------------

let now; // {step, steps, set} of what is drawn
let timer; // while it plays

/** Called with each answer: a play ends with the last step. */
function keepPlaying({ step, steps }, set) {
  now = { step, steps, set };
  if (step === steps) pause();
}

function play() {
  const start = now.step < now.steps ? now.step + 1 : 0;
  timer = setInterval(() => {
    if (location.hash.startsWith("#collectives")) now.set({ step: now.step + 1 });
    else pause(); // another room is open
  }, PAUSE);
  now.set({ step: start });
}

function pause() {
  clearInterval(timer);
  timer = undefined;
}

function player({ step, steps }, set) {
  const button = (id, name, disabled, press) => {
    // Not `disabled`: it keeps the focus when the last step is reached.
    const made = element("button", { type: "button", id, "aria-disabled": disabled }, name);
    made.addEventListener("click", () => disabled || press());
    return made;
  };
  const move = (to) => {
    pause();
    set({ step: to });
  };
  return element(
    "p",
    {},
    button("back", "◀ step back", step === 0, () => move(step - 1)),
    " ",
    timer
      ? button("play", "❚❚ pause", false, () => move(step))
      : button("play", "▶ play", false, play),
    " ",
    button("on", "step on ▶", step === steps, () => move(step + 1)),
  );
}

// ---- the picture: ranks are columns, pieces are rows --------------------------------------------

const LEFT = 54; // pixels for the names of the pieces
const ARCS = 64; // pixels for the arrows above the ranks
const HEAD = 40; // pixels for the names of ranks and nodes

function picture(answer) {
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

  const names = held.map((_, rank) =>
    shape("text", { x: middle(rank), y: top - 6, "text-anchor": "middle" }, nameOf(rank, column)),
  );
  const rows = pieces.map((_, i) =>
    shape(
      "text",
      { x: 0, y: top + i * row + row / 2 + 4 },
      pieces.length > 1 ? `piece ${i}` : "vector",
    ),
  );
  const cells = held.flatMap((own, rank) =>
    own.flatMap((values, i) => {
      const place = { x: x(rank) + 2, y: top + i * row + 2, width: column - 5, height: row - 5 };
      return cell(place, values, answer, `rank ${rank}, piece ${i}`, arrived.has(`${rank} ${i}`));
    }),
  );
  const label =
    `Columns are ranks 0 to ${ranks - 1}, rows the ${many(pieces.length, "piece")} of the ` +
    `vector. ${held.map((own, rank) => holds(own, rank, answer)).join("; ")}.`;
  const drawn = [...nodes(nodeOf, x, column), ...arcs(messages, middle, ranks), ...names];
  return svg(wide, top + pieces.length * row + 4, label, ...drawn, ...rows, ...cells);
}

const nameOf = (rank, column) => (column > 48 ? `rank ${rank}` : String(rank));

function holds(own, rank, { complete }) {
  const ready = own.filter((values) => values.length === complete).length;
  return `rank ${rank} has ${ready} of ${own.length} complete`;
}

/** A line above the ranks of each node, if there are several. */
function nodes(nodeOf, x, column) {
  if (!nodeOf.at(-1)) return [];
  return [0, 1].flatMap((node) => {
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
  const drawn = values.flatMap((rank) => {
    const at = place.x + (places > 1 ? rank * wide : 0);
    const size = { x: at, y: place.y, width: wide, height: place.height };
    const filled = shape("rect", { ...size, fill: RANKS[rank] });
    if (wide < 12) return [filled];
    const style = `fill: ${ink(RANKS[rank])}`;
    const middle = { x: at + wide / 2, y: place.y + place.height / 2 + 4, style };
    return [filled, shape("text", { ...middle, "text-anchor": "middle" }, String(rank))];
  });
  const frame = { ...place, style: "fill: none; stroke-width: 3px" };
  return shape(
    "g",
    {},
    shape("title", {}, `${name}: ${words}`),
    shape("rect", { ...place, class: "empty" }),
    ...drawn,
    ...(framed ? [shape("rect", frame)] : []),
  );
}

const listed = (ranks) => `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")}`;

function meaning({ held, complete, node_of: nodeOf }) {
  const what =
    complete > 1
      ? "Each cell has a place for each rank's values: filled, they are in the sum. "
      : "A cell shows whose values it has. ";
  const cables = nodeOf.at(-1) ? " Dashed arrows go over the nodes' cables." : "";
  const colors = held.map((_, rank) => [`values of rank ${rank}`, RANKS[rank]]);
  return element(
    "div",
    {},
    key(colors),
    element("p", {}, `${what}Framed: it has just arrived.${cables}`),
  );
}

/** A bar of time, in which each step is as long as it takes. */
function clock({ ends, step, steps }) {
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
  return element(
    "div",
    {},
    svg(wide, 20, `Time of the steps so far: ${words}`, ...boxes),
    element("p", {}, `Time: ${words}`),
  );
}

// ---- messages and bytes -----------------------------------------------------------------------

function letters({ messages, pieces, node_of: nodeOf }) {
  if (!messages.length) return element("p", {}, "None yet: each rank has what it begins with.");
  const two = nodeOf.at(-1) > 0;
  const name = (own) => (own.length > 1 ? `${own[0]} to ${own.at(-1)}` : String(own[0]));
  return table(
    [
      ...["from → to", ...(pieces.length > 1 ? ["pieces"] : [])],
      ...["bytes", "at the receiver", ...(two ? ["over"] : [])],
    ],
    messages.map((message) => [
      `${message.sender} → ${message.receiver}`,
      ...(pieces.length > 1 ? [name(message.pieces)] : []),
      bytes(message.nbytes),
      fate(message),
      ...(two ? [message.crosses ? "cables" : "a line"] : []),
    ]),
  );
}

const sent = (answer) => facts(answer.sent.map((nbytes, rank) => [`rank ${rank}`, bytes(nbytes)]));

// ---- all algorithms compared ------------------------------------------------------------------

/** Both axes grow by factors: lines are the formula, dots the network at the chosen size. */
function chart({ curves, sizes, rivals }, { nbytes }) {
  const [wide, high, left, low, right] = [width(), 260, 52, 24, 8];
  const log = Math.log10;
  const values = [...Object.values(curves).flat(), ...rivals.map(({ network }) => network)];
  const bottom = Math.floor(log(Math.min(...values)));
  const top = Math.ceil(log(Math.max(...values)));
  const most = log(sizes.at(-1) / sizes[0]);
  const x = (size) => left + (log(size / sizes[0]) / most) * (wide - left - right);
  const y = (time) => high - low - ((log(time) - bottom) / (top - bottom || 1)) * (high - low - 10);
  const each = wide < 480 ? 3 : 1; // as many powers of ten as there is room for
  const grid = (attributes) => shape("line", { ...attributes, stroke: "var(--line)" });
  const times = Array.from({ length: top - bottom + 1 }, (_, i) => 10 ** (bottom + i));
  const drawn = [
    ...times.flatMap((time) => [
      grid({ x1: left, x2: wide - right, y1: y(time), y2: y(time) }),
      shape("text", { x: left - 6, y: y(time) + 4, "text-anchor": "end" }, seconds(time)),
    ]),
    ...sizes
      .filter((size) => Number.isInteger(log(size) / each))
      .map((size) =>
        shape("text", { x: x(size), y: high - 6, "text-anchor": anchor(size, sizes) }, bytes(size)),
      ),
    shape("line", {
      ...{ x1: x(nbytes), x2: x(nbytes), y1: 6, y2: high - low },
      ...{ stroke: "var(--control)", "stroke-dasharray": "3 3" },
    }),
    ...rivals.map(({ name }) =>
      shape("polyline", {
        ...{ points: curves[name].map((time, i) => `${x(sizes[i])},${y(time)}`).join(" ") },
        ...{ fill: "none", ...stroke(name) },
      }),
    ),
    ...rivals.map(({ name, network }) =>
      shape(
        "circle",
        {
          ...{ cx: x(nbytes), cy: y(network), r: 5 },
          ...{ fill: COLORS[name], stroke: "var(--ink)", "stroke-width": 1.5 },
        },
        shape("title", {}, `${inWords(name)}: ${seconds(network)} on this network`),
      ),
    ),
  ];
  const names = rivals.map(({ name }) => name);
  const fastest = (at) => names.sort((a, b) => curves[a][at] - curves[b][at])[0];
  const label =
    `Time by the formula over the vector's size. For ${bytes(sizes[0])} ` +
    `${inWords(fastest(0))} is the fastest, for ${bytes(sizes.at(-1))} ` +
    `${inWords(fastest(sizes.length - 1))}.`;
  return element(
    "div",
    {},
    svg(wide, high, label, ...drawn),
    lineKey(rivals),
    element(
      "p",
      {},
      `Lines: the formula. Dots: this network, with ${bytes(nbytes)}.`,
    ),
  );
}

const anchor = (size, sizes) => (size === sizes.at(-1) ? "end" : "middle");

const stroke = (name) => ({
  ...{ stroke: COLORS[name], "stroke-width": 2.5, "stroke-dasharray": DASHES[name] },
});

const lineKey = (rivals) =>
  element(
    "ul",
    { class: "key" },
    ...rivals.map(({ name }) =>
      element(
        "li",
        {},
        shape(
          "svg",
          { width: 40, height: 10, "aria-hidden": "true", style: "display: inline-block" },
          shape("line", { x1: 0, x2: 36, y1: 5, y2: 5, ...stroke(name) }),
        ),
        inWords(name),
      ),
    ),
  );

function comparison({ operation, algorithm, rivals, node_of: nodeOf }, { nbytes }, set) {
  const two = nodeOf.at(-1) > 0;
  const least = Math.min(...rivals.map(({ network }) => network));
  const choose = (name) => {
    const button = element("button", { type: "button", id: `choose-${name}` }, inWords(name));
    button.addEventListener("click", () => set({ collective: `${operation} ${name}` }));
    return button;
  };
  const made = table(
    [
      ...["algorithm", "messages", "bytes", "formula", "this network"],
      ...(two ? ["leaving node 0"] : []),
    ],
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
  return element("div", {}, made, element("p", {}, note));
}
