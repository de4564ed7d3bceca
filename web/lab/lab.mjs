// The lab's page: which room is open, what its controls say, and what Python answers.
//
// A room (rooms/NAME.mjs) exports
//   title, about, lessons   words, and the lessons that it belongs to
//   controls(choices)       see controls.mjs; `choices` is what answers/NAME.py offers
//   sentence(answer, state) the main result in one sentence, which screen readers read out
//   show(answer, state, set) the result as a node; set({id: value}) moves controls
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
let last; // {answer, state} that is drawn now
let asking = false;
let next; // what to ask as soon as Python has answered: only the newest

// ---- the room that the address names --------------------------------------------------------

async function open() {
  const asked = parse(location.hash);
  const found = Object.hasOwn(ROOMS, asked.room);
  room = found ? asked.room : FIRST;
  const opened = room;
  describe(ROOMS[room]);
  const offered = await python.choices(room);
  if (room !== opened) return; // another one meanwhile
  controls = complete(ROOMS[room].controls(offered));
  const { state, problems } = check(found ? asked.texts : {}, controls);
  if (asked.room && !found) problems.unshift(`The lab has no room “${asked.room}”.`);
  states[room] = state;
  part("notice").textContent = problems.join(" ");
  part("room").hidden = false;
  showState = build(part("controls"), controls, change, ask);
  showState(state);
  last = undefined;
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
  part("rooms").replaceChildren(
    ...Object.entries(ROOMS).map(([name, each]) =>
      element(
        "a",
        { href: address(name, states[name] ?? {}), "aria-current": name === room && "page" },
        each.title,
      ),
    ),
  );
}

// ---- ask and show ---------------------------------------------------------------------------

/** What the user changes, by a control or in the result. */
function change(values) {
  Object.assign(states[room], values);
  showState(states[room]);
  writeSoon();
  return ask();
}

/** Ask Python with the room's state, `extra` added. While it works, only the newest waits. */
async function ask(extra = {}) {
  next = { room, extra };
  if (asking) return;
  asking = true;
  const slow = setTimeout(() => part("result").setAttribute("aria-busy", "true"), 200);
  try {
    while (next) {
      const asked = next;
      next = undefined;
      const values = { ...shown(controls, states[asked.room]), ...asked.extra };
      const answer = await python.answer(asked.room, values);
      if (asked.room === room) take(answer);
    }
  } catch (error) {
    fail(error);
  } finally {
    clearTimeout(slow);
    part("result").removeAttribute("aria-busy");
    asking = false;
  }
}

function take(answer) {
  if (answer.set) {
    Object.assign(states[room], answer.set);
    showState(states[room]);
    writeSoon();
  }
  last = answer;
  draw();
}

function draw() {
  const sentence = part("sentence");
  sentence.classList.toggle("error", Boolean(last.error));
  if (last.error) {
    sentence.textContent = last.error;
    part("result").replaceChildren();
    return;
  }
  const state = shown(controls, states[room]);
  const focus = part("result").contains(document.activeElement) && document.activeElement.id;
  sentence.textContent = ROOMS[room].sentence(last, state);
  part("result").replaceChildren(ROOMS[room].show(last, state, change));
  if (focus) document.getElementById(focus)?.focus();
}

function fail(error) {
  part("notice").textContent = error.message;
  part("room").hidden = true;
}

// ---- the address ----------------------------------------------------------------------------

let writing;

/** Write the state into the address once the user rests: browsers allow few changes a second. */
function writeSoon() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    history.replaceState(null, "", address(room, shown(controls, states[room])));
    describe(ROOMS[room]);
  }, 200);
}

let wide = 0;
new ResizeObserver(() => {
  if (last && part("result").clientWidth !== wide) draw();
  wide = part("result").clientWidth;
}).observe(part("result"));

addEventListener("hashchange", () => open().catch(fail));
if (typeof WebAssembly === "object") open().catch(fail);
