// Draws states of the lab's rooms at random, as their controls offer them, and asks Pyodide.
//
//   node tests/ask_pyodide.mjs build/site/lab 50 0
//
// asks each room 50 times (0 is the seed), and prints a JSON list of [room, asked, answer], the
// last two being texts: exactly what went in and came out. Ends with an error if an answer sets a
// control to a value that it does not have.

import { readFileSync } from "node:fs";
import { resolve } from "node:path";

const [folder, many, seed] = process.argv.slice(2);
const lab = resolve(folder);

const { loadPyodide } = await import(`${lab}/pyodide/pyodide.mjs`);
const { complete, shown } = await import(`${lab}/controls.mjs`);

let drawn = Number(seed);
function random() {
  drawn = (Math.imul(drawn, 1664525) + 1013904223) >>> 0;
  return drawn / 2 ** 32;
}

const one = (values) => values[Math.floor(random() * values.length)];

/** What is asked in a state that is near the start, or far from it; one time in five, by a button. */
function draw(controls) {
  const moved = random();
  const state = {};
  for (const { id, values, start } of controls.filter((each) => each.values)) {
    state[id] = random() < moved ? one(values) : start;
  }
  const buttons = controls.filter((each) => each.kind === "button");
  const pressed = buttons.length && random() < 0.2 ? one(buttons).ask : {};
  return { ...shown(controls, state), ...pressed };
}

const python = await loadPyodide({ indexURL: `${lab}/pyodide/` });
const zip = new Uint8Array(readFileSync(`${lab}/lab.zip`));
python.unpackArchive(zip, "zip", { extractDir: "/lab" });
python.runPython("import sys; sys.path.insert(0, '/lab')");
const answers = python.pyimport("answers");

const told = [];
for (const room of answers.ROOMS) {
  const { default: page } = await import(`${lab}/rooms/${room}.mjs`);
  const controls = complete(page.controls(JSON.parse(answers.choices(room))));
  for (let i = 0; i < many; i++) {
    const asked = JSON.stringify(draw(controls));
    const answer = answers.answer(room, asked);
    for (const [id, value] of Object.entries(JSON.parse(answer).set ?? {})) {
      const offered = controls.find((each) => each.id === id)?.values;
      if (!offered?.includes(value)) throw new Error(`${room} has no ${id}=${value}: ${asked}`);
    }
    told.push([room, asked, answer]);
  }
}
console.log(JSON.stringify(told));
