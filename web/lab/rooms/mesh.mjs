// The room "A mesh": GPUs as squares in their nodes, and who talks to whom along which axis.

import { choice, range, slider, tick } from "../controls.mjs";
import { COLORS, button, bytes, card, count, element, ink, key, many, seconds } from "../draw.mjs";

// A letter stands beside each colour.
const AXES = {
  data: { letter: "D", color: COLORS.data },
  pipeline: { letter: "P", color: COLORS.pipeline },
  context: { letter: "C", color: COLORS.activations },
  tensor: { letter: "T", color: COLORS.tensor },
};

export default {
  title: "A mesh",
  about:
    "GPUs are numbered along the axes of a mesh, fastest along the last one, and eight make a " +
    "node. Click one to see whom it talks to in a training step, and what leaves its node.",
  lessons: [
    ["12_long_sequences", "12 · Long sequences"],
    ["14_mixed_parallelism", "14 · Mixed parallelism"],
  ],
  controls,
  sentence,
  show,
};

const commas = (list) => list.join(", ");

function controls({ models, stages, attention, orders }) {
  return [
    {
      ...slider("gpu", "look at GPU", range(0, 127), 0, String),
      last: (answer) => answer.places.length - 1,
    },
    slider("gpus", "GPUs", [8, 16, 32, 64, 128], 64),
    slider("pipeline", "pipeline stages", [1, 2, 4, 8], 2),
    slider("context", "context parallel", [1, 2, 4, 8, 16], 2),
    slider("tensor", "tensor parallel", [1, 2, 4, 8, 16], 4),
    choice("outermost", "axes, the outermost first", Object.keys(orders), "data", (axis) =>
      commas(orders[axis]),
    ),
    choice("model", "model", models, "llama-3-70b"),
    slider("micro_batches", "micro-batches of a replica", [1, 2, 4, 8, 16, 32], 8),
    choice("stage", "data parallel", [0, 1, 2, 3], 1, (stage) => stages[stage]),
    {
      ...choice("attention", "keys and values along context", attention, "ring"),
      when: ({ context }) => context > 1,
    },
    {
      ...tick("sequence_parallel", "sequence parallel", false),
      when: ({ tensor }) => tensor > 1,
    },
  ];
}

const sum = (numbers) => numbers.reduce((all, each) => all + each, 0);

function sentence({ axes, orders }, { gpu, gpus, outermost }) {
  const messages = axes.flatMap(({ to }) => to);
  const across = sum(messages.filter((each) => each.across).map((each) => each.bytes));
  const all = sum(messages.map((each) => each.bytes));
  const { total, seconds: time } = orders[outermost];
  const own = across ? `${bytes(across)} of it` : "nothing";
  return (
    `GPU ${gpu} of ${gpus} sends ${bytes(all)} in a step, ${own} to another node. ` +
    (total
      ? `The node that sends most sends ${bytes(total)} to others: ${seconds(time)} by its cable.`
      : "Nothing leaves a node.")
  );
}

function show(answer, state, set) {
  return [
    card(`GPU ${state.gpu}: ${place(answer.places[state.gpu])}`, squares(answer, state, set)),
    card(`What GPU ${state.gpu} sends in a step`, talks(answer, state)),
    card("What leaves a node in a step, by the order of the axes", orders(answer, state)),
    card("This mesh in a program", element("code", {}, program(answer))),
  ];
}

function program({ axes, places }) {
  const sizes = axes.map(({ axis, size }) => `${axis}=${size}`);
  const order = Object.keys(places[0]).map((axis) => `"${axis}"`);
  return `mesh = md.mixed.mesh(${commas(sizes)}, order=[${commas(order)}])`;
}

/** "data 0, pipeline 1, context 0, tensor 3" */
const place = (coordinates) =>
  Object.entries(coordinates)
    .map(([axis, coordinate]) => `${axis} ${coordinate}`)
    .join(", ");

// ---- GPUs in their nodes --------------------------------------------------------------------

function squares(answer, { gpu }, set) {
  const nodes = [];
  for (let first = 0; first < answer.places.length; first += answer.node) {
    const ranks = answer.places.slice(first, first + answer.node).map((_, i) => first + i);
    const name = element("span", {}, `node ${nodes.length}`);
    const gpus = ranks.map((rank) => square(rank, gpu, answer, set));
    nodes.push(element("div", { class: "node" }, name, gpus));
  }
  const shown = answer.axes.filter(({ to }) => to.length);
  const note =
    `A frame is around those that GPU ${gpu} sends to: the next stage and the one before, and ` +
    "of other groups the next GPU in the ring.";
  return [
    element("div", { class: "nodes", role: "group", "aria-label": "GPUs in nodes" }, nodes),
    key(shown.map(({ axis }) => [`${AXES[axis].letter}: ${axis}`, AXES[axis].color])),
    element("p", {}, note),
  ];
}

/** One GPU. A click chooses it; for the keyboard there is the slider, instead of 128 stops. */
function square(rank, chosen, { axes, places }, set) {
  const met = axes.filter((each) => rank !== chosen && talksTo(each, rank));
  const color = met.length ? AXES[met.at(-1).axis].color : undefined;
  const direct = axes.some(({ to }) => to.some((each) => each.gpu === rank));
  const along = commas(met.map(({ axis }) => axis));
  return button(
    {
      id: `gpu-${rank}`,
      class: direct ? "gpu direct" : "gpu",
      tabindex: -1,
      "aria-pressed": String(rank === chosen),
      "aria-label":
        `GPU ${rank}: ${place(places[rank])}` +
        (along && `; the chosen one talks to it along ${along}`),
      title: place(places[rank]),
      style: color && `background: ${color}; color: ${ink(color)}`,
    },
    () => set({ gpu: rank }),
    String(rank),
    element("b", {}, met.map(({ axis }) => AXES[axis].letter).join("") || "\u00a0"),
  );
}

/** Along pipeline a rank talks to its neighbours alone, along other axes to the whole group. */
const talksTo = ({ axis, group, to }, rank) =>
  axis === "pipeline" ? to.some((each) => each.gpu === rank) : group.includes(rank);

// ---- what the chosen one sends --------------------------------------------------------------

const WHAT = {
  data: ({ stage, context }) =>
    (stage > 0 ? "gradients and parameters" : "gradients") +
    (stage === 1 ? ", behind a DDP (Megatron sends two thirds of it)" : "") +
    (context > 1 ? "; GPUs along context take part, since they hold the same weights" : ""),
  pipeline: () => "activations onward, their gradients back",
  context: () => "keys and values, and their gradients",
  tensor: () => "activations, and their gradients",
};

function talks({ axes, node }, state) {
  const sent = axes.map(({ to }) => sum(to.map((each) => each.bytes)));
  const most = Math.max(...sent);
  return axes.map((each, i) => {
    const what = each.to.length
      ? [
          strip([[each.axis, sent[i]]], most),
          element("p", {}, `${where(each)}: ${WHAT[each.axis](state)}.`),
          element("p", { class: "pale" }, inside(each, node)),
        ]
      : element("p", {}, "one GPU: no messages");
    return element("div", { class: "talk" }, name(each.axis), element("div", {}, what));
  });
}

const name = (axis) => {
  const { letter, color } = AXES[axis];
  const mark = element("b", { style: `background: ${color}; color: ${ink(color)}` }, letter);
  return element("div", { class: "axis" }, mark, axis);
};

/** "188 GB to GPU 14, in its node" */
function where({ to }) {
  const words = to.map(({ gpu, bytes: size, across }) => {
    return `${bytes(size)} to GPU ${gpu}, ${across ? "in another node" : "in its node"}`;
  });
  return words.join("; ");
}

/** "Among GPUs 8 to 15, on 1 node: 640 × all_reduce, 85.9 GB together" */
function inside({ axis, group, calls }, node) {
  const nodes = new Set(group.map((rank) => Math.floor(rank / node))).size;
  const words = calls.map(
    ({ operation, times, bytes: size }) =>
      `${count(times)} × ${operation}, ${bytes(size)}${times > 1 ? " together" : ""}`,
  );
  const kind = axis === "pipeline" ? "Stages on" : "Among";
  return `${kind} ${listed(group)}, on ${many(nodes, "node")}: ${words.join("; ")}.`;
}

/** A group in words, short if it is long. */
function listed(group) {
  const step = group[1] - group[0];
  const even = group.every((rank, i) => rank === group[0] + i * step);
  if (group.length > 2 && even && step === 1) return `GPUs ${group[0]} to ${group.at(-1)}`;
  if (group.length < 6) return `GPUs ${group.join(", ")}`;
  return `${many(group.length, "GPU")} (${group.slice(0, 3).join(", ")}, …, ${group.at(-1)})`;
}

/** A bar of parts [[axis, value], …], as wide as the card if they add up to `most`. */
function strip(parts, most) {
  const seen = parts.filter(([, value]) => value > 0);
  return element(
    "div",
    { class: "strip", "aria-hidden": "true" },
    seen.map(([axis, value]) =>
      element("i", { style: `width: ${(100 * value) / most}%; background: ${AXES[axis].color}` }),
    ),
  );
}

// ---- the same mesh in other orders ----------------------------------------------------------

function orders(answer, state) {
  const every = Object.entries(answer.orders);
  const most = Math.max(...every.map(([, { total }]) => total)) || 1;
  const rows = every.map(([outermost, { bytes: parts, total, seconds: time }]) => {
    const sizes = Object.entries(parts).filter(([, size]) => size);
    const words = sizes.map(([axis, size]) => `${axis} ${bytes(size)}`);
    const chosen = outermost === state.outermost;
    return element(
      "div",
      { class: chosen ? "talk chosen" : "talk", "aria-current": chosen && "true" },
      element("div", {}, `${chosen ? "▸ " : ""}${outermost} outermost`),
      element(
        "div",
        {},
        strip(sizes, most),
        element("p", {}, total ? `${bytes(total)}, ${seconds(time)} by the cable` : "nothing"),
        words.length > 0 && element("p", { class: "pale" }, commas(words)),
      ),
    );
  });
  const note =
    "From the node that sends most, by rings. The cable is that of eight H100 with a network " +
    "card of 400 Gb/s each, at 80 %: 320 GB/s.";
  return [...rows, element("p", {}, note)];
}
