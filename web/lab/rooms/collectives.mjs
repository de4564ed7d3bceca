// The room "Collectives".

import { card } from "../draw.mjs";

export default {
  title: "Collectives",
  about: "",
  lessons: [
    ["02_collectives", "2 · Collectives"],
    ["03_communication", "3 · Communication"],
    ["04_networks", "4 · Networks"],
  ],
  controls: () => [
    { id: "ranks", label: "ranks", kind: "slider", values: [2, 4, 8], start: 4, say: String },
  ],
  sentence: (answer) => `There are ${answer.ranks} ranks.`,
  show: () => card("To come"),
};
