// The room "Does it fit, how long does it take?": a model, GPUs, and a layout upon them.

import { choice, powers, slider, tick } from "../controls.mjs";
import { COLORS, bar, bytes, card, count, element, facts, percent, seconds } from "../draw.mjs";

const days = (value) => `${Number(value.toPrecision(3)).toLocaleString("en")} days`;

const MEMORY = {
  parameters: ["parameters", COLORS.parameters],
  gradients: ["gradients", COLORS.gradients],
  "optimizer states": ["optimizer states", COLORS["optimizer states"]],
  activations: ["activations", COLORS.activations],
  logits: ["logits", COLORS.forward],
  copies: ["parameters while they compute", COLORS.communication],
};
const TIMES = {
  compute: ["computing", COLORS.forward],
  bubble: ["the pipeline's bubble", COLORS.other],
  tensor: ["tensor parallel", COLORS.tensor],
  context: ["context parallel", COLORS.activations],
  pipeline: ["pipeline messages", COLORS.pipeline],
  data: ["data parallel", COLORS.data],
  optimizer: ["the optimizer", COLORS["optimizer states"]],
  experts: ["tokens to experts", COLORS.gradients],
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
  const cut = ({ tensor }) => tensor > 1;
  const piped = ({ pipeline }) => pipeline > 1;
  const sparse = ({ model }) => models[model] > 0;
  const sharded = ({ stage }) => stage === 3;
  const more = true;
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
    slider("micro_batch", "sequences of a micro-batch", powers(0, 3), 1),
    choice("recompute", "recomputed in backward", recompute, "nothing"),
    { ...tick("sequence_parallel", "sequence parallel", false), when: cut },
    { ...slider("chunks", "chunks of a rank (interleaved)", [1, 2, 4], 1), when: piped },
    { ...slider("experts", "GPUs that share experts", powers(0, 7), 1), when: sparse },
    { id: "search", label: "Find the fastest that fits", kind: "button", ask: { search: true } },
    { ...slider("loss_chunks", "pieces of the loss", [1, 8], 1), more },
    {
      ...slider("replicate", "copies of the shards (hybrid)", powers(0, 11), 1),
      more,
      when: sharded,
    },
    {
      ...tick("reshard_after_forward", "free parameters after forward", true),
      more,
      when: sharded,
    },
  ];
}

const fits = (answer) => answer.total <= answer.usable;

function sentence(answer) {
  const held = bytes(answer.total);
  if (answer.set) {
    const changed = Object.keys(answer.set).length > 0;
    const what = changed ? "Found" : "No layout that fits is clearly faster than this one";
    return `${what}: a step takes ${seconds(answer.seconds)}, and the fullest GPU holds ${held}.`;
  }
  return fits(answer)
    ? `It fits: the fullest GPU holds ${held}, and a step takes ${seconds(answer.seconds)}.`
    : `It does not fit: the fullest GPU would hold ${held}, of ${bytes(answer.usable)} usable.`;
}

function show(answer, state) {
  const { pipeline, context, tensor } = state;
  const named = (names, values) =>
    Object.entries(names).map(([id, [name, color]]) => [name, values[id] ?? 0, color]);
  const limits = [
    ["usable", answer.usable],
    ["the GPU's memory", answer.device],
  ];
  return [
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
    card("Memory of the fullest GPU", bar(named(MEMORY, answer.memory), bytes, "memory", limits)),
    card(
      "Where the time of a step goes",
      bar(named(TIMES, answer.times), seconds, "time"),
      element("p", {}, `${seconds(answer.hidden)} more of messages are hidden behind computing.`),
    ),
    card(
      "Layout",
      `data ${answer.data} × pipeline ${pipeline} × context ${context} × tensor ${tensor}; ` +
        `${count(answer.micro_batches)} micro-batches a step; ` +
        `${Number((answer.tokens / 1e6).toPrecision(3))} million tokens a step`,
    ),
  ];
}
