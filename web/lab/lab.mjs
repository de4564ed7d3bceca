// The lab's page: which room is open, what its controls say, and what Python answers.
//
// A room (rooms/NAME.mjs) exports
//   title, about, lessons   words, and the lessons that it belongs to
//   controls(choices)       see controls.mjs; `choices` is what answers/NAME.py offers
//   sentence(answer, state) the main result in one sentence, which screen readers read out
//   show(answer, state, set) the result, a list of nodes; set({id: value}) moves controls
// If an element of the result has the focus, the one of the same id has it when the result is
// drawn anew.

import { build, complete, shown } from "./controls.mjs";
import { element } from "./draw.mjs";
import * as python from "./python.mjs";
import collectives from "./rooms/collectives.mjs";
import mesh from "./rooms/mesh.mjs";
import planner from "./rooms/planner.mjs";
import schedules from "./rooms/schedules.mjs";
import { address, check, parse } from "./state.mjs";

const ROOMS = { planner, schedules, collectives, mesh };
const FIRST = "planner";

const part = (id) => document.querySelector(`#${id}`);

const states = {}; // of each room: {id: value}
let room; // the name of the one that is open
let controls = [];
let showState; // puts the controls where the state says
let last; // {answer, values} that is drawn now
let asking = false;
let next; // what to ask as soon as Python has answered: only the newest
let writing; // the timer of writeSoon

// ---- the room that the address names --------------------------------------------------------

async function open() {
  const asked = parse(location.hash);
  const known = Object.hasOwn(ROOMS, asked.room);
  const opened = known ? asked.room : FIRST;
  if (room !== opened) part("room").hidden = true; // its controls would change the new room
  room = opened;
  last = next = undefined;
  clearTimeout(writing);
  describe(ROOMS[room]);
  const offered = await python.choices(room);
  if (room !== opened) return; // another one meanwhile
  controls = complete(ROOMS[room].controls(offered));
  const { state, problems } = check(known ? asked.texts : {}, controls);
  if (asked.room && !known) problems.unshift(`The lab has no room “${asked.room}”.`);
  states[room] = state;
  part("notice").textContent = problems.join(" ");
  part("room").hidden = false;
  keepingFocus(() => {
    showState = build(part("controls"), controls, change, ask);
    part("controls").append(element("a", { id: "start", href: address(room, {}) }, "Start values"));
  });
  showState(state);
  await ask();
}

function describe({ title, about, lessons }) {
  document.title = `${title} · minidist lab`;
  part("title").textContent = title;
  part("about").textContent = about;
  const links = lessons.map(([file, name]) =>
    element("a", { href: `../notebooks/${file}.html` }, name),
  );
  part("lessons").replaceChildren(
    lessons.length > 1 ? "Lessons: " : "Lesson: ",
    ...links.flatMap((link, i) => (i ? [", ", link] : [link])),
  );
  const rooms = Object.entries(ROOMS).map(([name, each]) => {
    const href = address(name, states[name] ?? {});
    const current = name === room && "page";
    return element("a", { id: `to-${name}`, href, "aria-current": current }, each.title);
  });
  keepingFocus(() => part("rooms").replaceChildren(...rooms));
}

/** What has the focus is drawn anew: then its successor, of the same id, has it. */
function keepingFocus(draw) {
  const { id } = document.activeElement;
  draw();
  if (id) document.getElementById(id)?.focus({ preventScroll: true });
}

// ---- ask and show ---------------------------------------------------------------------------

/** What the user changes, by a control or in the result. */
function change(values) {
  Object.assign(states[room], values);
  part("notice").textContent = "";
  showState(states[room]);
  writeSoon();
  return ask();
}

/** Ask Python with the room's state, `extra` added. While it works, only the newest waits. */
async function ask(extra = {}) {
  next = { room, extra, values: shown(controls, states[room]) };
  if (asking) return;
  asking = true;
  try {
    while (next) {
      const asked = next;
      next = undefined;
      const slow = setTimeout(wait, 200);
      const reply = python.answer(asked.room, { ...asked.values, ...asked.extra });
      const answer = await reply.finally(() => clearTimeout(slow));
      if (asked.room === room) take(answer, asked.values);
    }
  } catch (error) {
    fail(error);
  } finally {
    asking = false;
  }
}

function wait() {
  part("result").setAttribute("aria-busy", "true");
  part("sentence").textContent = "Python is computing …";
}

function take(answer, values) {
  if (answer.set) {
    Object.assign(values, answer.set);
    Object.assign(states[room], answer.set);
    writeSoon();
  }
  if (!answer.error) showState(states[room], answer);
  last = { answer, values };
  draw();
}

function draw() {
  const { answer, values } = last;
  const sentence = part("sentence");
  sentence.classList.toggle("error", Boolean(answer.error));
  sentence.textContent = answer.error
    ? asSentence(answer.error)
    : ROOMS[room].sentence(answer, values);
  const drawn = answer.error ? [] : ROOMS[room].show(answer, values, change);
  keepingFocus(() => part("result").replaceChildren(...drawn));
  part("result").removeAttribute("aria-busy");
}

/** "8 ranks …" and "no layout …", as Python's errors are written, as sentences. */
const asSentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function fail(error) {
  part("notice").textContent = error.message;
  part("room").hidden = true;
}

// ---- the address ----------------------------------------------------------------------------

/** Write the state into the address once the user rests: browsers allow few changes a second. */
function writeSoon() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    const now = address(room, shown(controls, states[room]));
    history.replaceState(null, "", now);
    part(`to-${room}`).href = now;
  }, 200);
}

let wide = 0;
new ResizeObserver(() => {
  if (last && part("result").clientWidth !== wide) draw();
  wide = part("result").clientWidth;
}).observe(part("result"));

if (typeof WebAssembly === "object") {
  const start = () => open().catch(fail);
  addEventListener("hashchange", start);
  start();
}
