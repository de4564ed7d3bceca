// The room "Pipeline schedules": what each rank computes when, and five schedules compared.

import { choice, range, slider } from "../controls.mjs";
import {
  COLORS,
  bytes,
  card,
  element,
  inUnits,
  ink,
  key,
  paler,
  percent,
  seconds,
  shape,
  svg,
  table,
  width,
} from "../draw.mjs";

const NAMES = {
  naive: "naive",
  gpipe: "GPipe",
  "1f1b": "1F1B",
  interleaved: "interleaved 1F1B",
  zero_bubble: "zero bubble",
};
const milliseconds = inUnits("ms");
const megabytes = (value) => bytes(value * 1e6);
const LATENCY = [0, 1, 5, 10, 20, 50, 100, 1000];
const NETWORK = [0, 400, 200, 100, 50, 25, 10, 5, 2.5, 1, 0.5];

const row = 30; // pixels of a rank
const left = 28; // pixels for its name
const right = 70; // and for what it keeps

export default {
  title: "Pipeline schedules",
  about:
    "A model is cut into stages, a batch into micro-batches, and a schedule says which rank " +
    "computes what when. The same simulator predicts the steps of the lessons.",
  lessons: [
    ["08_layer_splitting", "8 · Layer splitting"],
    ["09_pipeline_schedules", "9 · Pipeline schedules"],
  ],
  controls,
  sentence,
  show,
};

function controls({ schedules }) {
  const link = [
    slider("latency_us", "the link's latency", LATENCY, 10, inUnits("µs")),
    slider("mb", "size of a message", [1, 2, 5, 10, 20, 50, 100, 200], 10, megabytes),
    slider("nodes", "nodes", [1, 2, 3, 4], 1),
  ];
  return [
    choice("schedule", "schedule", schedules, "1f1b", (name) => NAMES[name]),
    slider("ranks", "ranks", range(2, 8), 4),
    slider("microbatches", "micro-batches", range(1, 24), 8),
    slider("chunks", "stages a rank, if interleaved", [2, 3, 4], 2),
    slider("forward", "forward", range(1, 40), 10, milliseconds),
    slider("inputs", "backward for inputs", range(1, 40), 10, milliseconds),
    slider("weights", "backward for weights", range(1, 40), 10, milliseconds),
    slider("gbps", "link", NETWORK, 0, (value) => (value ? `${value} Gb/s` : "takes no time")),
    ...link.map((control) => ({ ...control, when: ({ gbps }) => gbps > 0 })),
  ];
}

const chosen = (answer, state) => answer.table.find(({ name }) => name === state.schedule);

const most = (kept) => String(Number(Math.max(...kept).toFixed(1)));

function sentence(answer, state) {
  const { error, time, idle, kept } = chosen(answer, state);
  if (error) return `${NAMES[state.schedule]} cannot be: ${error}.`;
  return (
    `${NAMES[state.schedule]}: a step takes ${seconds(time)}, ranks are idle for ` +
    `${percent(idle)} of it, and one keeps the activations of up to ${most(kept)} micro-batches.`
  );
}

function show(answer, state) {
  const all = card("All five, with the same numbers", comparison(answer.table, state.schedule));
  return answer.spans.length ? [picture(answer, state), all] : [all];
}

const picture = (answer, state) =>
  card(
    "What each rank computes when",
    timeline(answer, state),
    colors(answer.spans),
    element("p", {}, notes(state)),
  );

function notes({ schedule }) {
  return (
    "A box has the number of its micro-batch. At the right: of how many micro-batches the rank " +
    "keeps activations at most, each of all its layers." +
    (schedule === "interleaved" ? " Paler boxes are of a rank's later stages." : "")
  );
}

/** A row for each rank, a box for each computation. */
function timeline(answer, state) {
  const { spans } = answer;
  const { kept, time } = chosen(answer, state);
  const wide = width();
  // One scale for all, so that a faster schedule looks shorter; naive would leave the others small.
  const others = answer.table.filter(({ name, error }) => name !== "naive" && !error);
  const longest = Math.max(time, ...others.map((each) => each.time));
  const x = (moment) => left + (moment / longest) * (wide - left - right);
  const size = { x: left, width: x(time) - left, height: row - 4 };
  const drawn = spans.map((own, rank) => [
    shape("text", { x: 0, y: rank * row + 19 }, `r${rank}`),
    shape("rect", { ...size, y: rank * row + 2, class: "empty" }),
    own.map((span) => box(span, x, rank, spans.length)),
    shape("text", { x: x(time) + 6, y: rank * row + 19 }, `keeps ${most([kept[rank]])}`),
  ]);
  const label =
    `${NAMES[state.schedule]} on ${state.ranks} ranks with ${state.microbatches} micro-batches: ` +
    `boxes of forward and backward passes along ${seconds(time)}; the rest of each row is idle. ` +
    `Ranks keep ${kept.map((count) => most([count])).join(", ")}`;
  return svg(wide, spans.length * row + 2, label, drawn);
}

function box({ what, stage, microbatch, start, end }, x, rank, ranks) {
  const long = Math.max(x(end) - x(start) - 1, 0.5);
  const color = paler(COLORS[what], Math.floor(stage / ranks));
  const high = what === "forward" || what === "backward for weights" ? row - 12 : row - 4;
  const place = { x: x(start), y: rank * row + row / 2 - high / 2, width: long, height: high };
  const words =
    `${what} of micro-batch ${microbatch} through stage ${stage}, ` +
    `from ${seconds(start)} to ${seconds(end)}`;
  const middle = { x: x(start) + long / 2, y: rank * row + 19, "text-anchor": "middle" };
  const style = `fill: ${ink(color)}; pointer-events: none`;
  return [
    shape("rect", { ...place, fill: color }, shape("title", {}, words)),
    long > 7 * String(microbatch).length + 2 &&
      shape("text", { ...middle, style }, String(microbatch)),
  ];
}

function colors(spans) {
  const present = new Set(spans.flat().map(({ what }) => what));
  return key([...[...present].map((what) => [what, COLORS[what]]), ["idle", "var(--empty)"]]);
}

function comparison(rows, schedule) {
  return table(
    ["schedule", "a step", "idle", "micro-batches kept"],
    rows.map(({ name, error, time, idle, kept }) =>
      error
        ? [NAMES[name], error]
        : [NAMES[name], seconds(time), percent(idle), most(kept)],
    ),
    { chosen: rows.findIndex(({ name }) => name === schedule) },
  );
}
