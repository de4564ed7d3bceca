// The room "A mesh".

import { card } from "../draw.mjs";

export default {
  title: "A mesh",
  about: "",
  lessons: [
    ["14_mixed_parallelism", "14 · Mixed parallelism"],
  ],
  controls: () => [
    { id: "ranks", label: "ranks", kind: "slider", values: [2, 4, 8], start: 4, say: String },
  ],
  sentence: (answer) => `There are ${answer.ranks} ranks.`,
  show: () => card("To come"),
};
