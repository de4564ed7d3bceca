// The room "Does it fit, how long does it take?": a model, GPUs, and a layout upon them.

import { COLORS, bar, bytes, card, count, element, facts, percent, seconds } from "../draw.mjs";

const powers = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => 2 ** (from + i));
const days = (value) => `${Number(value.toPrecision(3)).toLocaleString("en")} days`;

const MEMORY = { ...COLORS, logits: "#56B4E9", copies: COLORS["communication buffers"] };
const TIMES = {
  compute: ["computing", COLORS.forward],
  bubble: ["the pipeline's bubble", "#999999"],
  tensor: ["tensor parallel", COLORS.tensor],
  context: ["context parallel", "#CC79A7"],
  pipeline: ["pipeline messages", COLORS.pipeline],
  data: ["data parallel", COLORS.data],
  optimizer: ["the optimizer", COLORS["optimizer states"]],
  experts: ["tokens to experts", "#E69F00"],
};

export default {
  title: "Does it fit, how long does it take?",
  about:
    "The planner of the course predicts the memory of the fullest GPU and the time of a training " +
    "step. It can also look for the fastest layout that fits.",
  lessons: [
    ["15_zero", "15 · ZeRO"],
    ["25_scaling_out", "25 · Scaling out"],
  ],
  controls,
  sentence,
  show,
};

function controls({ models, gpus, precisions, stages, recompute }) {
  const slider = (id, label, values, start, say = count) => ({
    ...{ id, label, kind: "slider", values, start, say },
  });
  const tick = (id, label, start) => ({ ...{ id, label, kind: "tick", start } });
  const choice = (id, label, values, start, say = String) => ({
    ...{ id, label, kind: "choice", values, start, say },
  });
  return [
    choice("model", "model", Object.keys(models), "llama-3-8b"),
    choice("gpu", "GPU", gpus, "h100"),
    choice("precision", "precision", precisions, "mixed"),
    slider("world_size", "GPUs", powers(0, 14), 8),
    slider("batch", "sequences a step", powers(0, 14), 512),
    slider("tensor", "tensor parallel", powers(0, 7), 1),
    slider("pipeline", "pipeline stages", powers(0, 6), 1),
    slider("context", "context parallel", powers(0, 7), 1),
    choice("stage", "data parallel", [0, 1, 2, 3], 3, (stage) => stages[stage]),
    slider("micro_batch", "sequences at once", powers(0, 3), 1),
    choice("recompute", "computed again in backward", recompute, "nothing"),
    { ...tick("sequence_parallel", "sequence parallel", false), when: ({ tensor }) => tensor > 1 },
    {
      ...slider("chunks", "chunks of a stage", [1, 2, 4], 1),
      when: ({ pipeline }) => pipeline > 1,
    },
    {
      ...slider("experts", "GPUs that share experts", powers(0, 7), 1),
      when: ({ model }) => models[model] > 0,
    },
    { id: "search", label: "Find the fastest that fits", kind: "button", ask: { search: true } },
    { ...slider("loss_chunks", "pieces of the loss", [1, 8], 1), more: true },
    {
      ...slider("replicate", "copies of the shards", powers(0, 11), 1),
      ...{ more: true, when: ({ stage }) => stage === 3 },
    },
    {
      ...tick("reshard_after_forward", "free parameters after forward", true),
      ...{ more: true, when: ({ stage }) => stage === 3 },
    },
  ];
}

const fits = (answer) => answer.total <= answer.usable;

function sentence(answer) {
  const held = bytes(answer.total);
  if (answer.set) {
    return `Found: a step takes ${seconds(answer.seconds)}, and the fullest GPU holds ${held}.`;
  }
  return fits(answer)
    ? `It fits: the fullest GPU holds ${held}, and a step takes ${seconds(answer.seconds)}.`
    : `It does not fit: the fullest GPU would hold ${held}, of ${bytes(answer.usable)} usable.`;
}

function show(answer, state) {
  const { pipeline, context, tensor } = state;
  const parts = Object.entries(answer.memory).map(([name, size]) => [name, size, MEMORY[name]]);
  const times = Object.entries(TIMES).map(([id, [name, color]]) => [name, answer.times[id], color]);
  const limits = [
    ["usable", answer.usable],
    ["the GPU's memory", answer.device],
  ];
  return element(
    "div",
    {},
    card(
      "",
      facts([
        ["fullest GPU", bytes(answer.total), fits(answer) ? "✓ fits" : "✗ does not fit"],
        ["a step", seconds(answer.seconds), `± ${percent(answer.error_of_time)}`],
        ["tokens/s on a GPU", count(answer.rate)],
        ["MFU", percent(answer.mfu)],
        ["a trillion tokens", days(answer.days)],
      ]),
    ),
    card("Memory of the fullest GPU", bar(parts, bytes, "memory", limits)),
    card(
      "Where the time of a step goes",
      bar(times, seconds, "time"),
      element("p", {}, `${seconds(answer.hidden)} more of messages are hidden behind computing.`),
    ),
    card(
      "Layout",
      `data ${answer.data} × pipeline ${pipeline} × context ${context} × tensor ${tensor}; ` +
        `${count(answer.micro_batches)} micro-batches a step; ` +
        `${Number((answer.tokens / 1e6).toPrecision(3))} million tokens a step`,
    ),
  );
}
