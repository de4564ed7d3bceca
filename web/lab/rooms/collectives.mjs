// The room "Collectives": who sends what to whom in each step, what all hold then, how long it
// takes, and which algorithm is the fastest. The two files beside it draw that.

import { choice, range, slider } from "../controls.mjs";
import { button, bytes, card, element, facts, inUnits, many, seconds, table } from "../draw.mjs";
import { chart, comparison, inWords } from "./collectives_costs.mjs";
import { clock, legend, who } from "./collectives_pieces.mjs";

const GBPS = [0.05, 0.2, 1, 10, 20, 50, 100, 200, 400, 800, 3600];
const LATENCY = [0, 1, 5, 10, 20, 50, 100, 500, 4000];
const MOST_STEPS = 14; // of eight ranks in a ring
const PAUSE = 1200; // milliseconds of a step that is played
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
  const [speed, latency] = ["Gb/s", "µs"].map(inUnits);
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
  const sent = answer.sent.map((nbytes, rank) => [`rank ${rank}`, bytes(nbytes)]);
  return [
    card(`Who holds what ${when}`, player(answer, set), who(answer), clock(answer), legend(answer)),
    card(step ? `The messages of step ${step}` : "Messages", arrivals(answer)),
    card("What each rank sends in all", facts(sent)),
    card(`All ways to ${answer.operation}, by the size of the vector`, chart(answer, state)),
    card("", comparison(answer, state, set)),
  ];
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
  // Not `disabled`: it keeps the focus when the last step is reached.
  const key = (id, name, disabled, press) =>
    button({ id, "aria-disabled": disabled }, () => disabled || press(), name);
  const move = (to) => {
    pause();
    set({ step: to });
  };
  return element(
    "p",
    {},
    key("back", "◀ step back", step === 0, () => move(step - 1)),
    " ",
    timer
      ? key("play", "❚❚ pause", false, () => move(step))
      : key("play", "▶ play", false, play),
    " ",
    key("on", "step on ▶", step === steps, () => move(step + 1)),
  );
}

// ---- the messages of a step -----------------------------------------------------------------

function arrivals({ messages, pieces, node_of: nodeOf }) {
  if (!messages.length) return element("p", {}, "None yet: each rank has what it begins with.");
  const name = (own) => (own.length > 1 ? `${own[0]} to ${own.at(-1)}` : String(own[0]));
  const columns = [
    ["from → to", ({ sender, receiver }) => `${sender} → ${receiver}`],
    ...(pieces.length > 1 ? [["pieces", (message) => name(message.pieces)]] : []),
    ["bytes", ({ nbytes }) => bytes(nbytes)],
    ["at the receiver", fate],
    ...(nodeOf.at(-1) ? [["over", ({ crosses }) => (crosses ? "cables" : "a line")]] : []),
  ];
  return table(
    columns.map(([title]) => title),
    messages.map((message) => columns.map(([, say]) => say(message))),
  );
}
