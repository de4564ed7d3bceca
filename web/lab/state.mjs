// A state of the lab is its address: #ROOM?control=value&control=value.

/** The address of a room with these values. */
export function address(room, state) {
  const query = new URLSearchParams(state).toString();
  return query ? `#${room}?${query}` : `#${room}`;
}

/** The room and the values (texts) of an address: {room, texts}. */
export function parse(hash) {
  const [room, query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  return { room, texts: Object.fromEntries(new URLSearchParams(query)) };
}

/**
 * The value of each control: what the address asks for, if the control has it, or else its start.
 * Returns {state, problems}, problems being sentences.
 */
export function check(texts, controls) {
  const state = {};
  const problems = [];
  const known = new Set();
  for (const control of controls.filter((each) => each.values)) {
    known.add(control.id);
    state[control.id] = control.start;
    const text = texts[control.id];
    if (text === undefined) continue;
    const value = control.values.find((each) => String(each) === text);
    if (value === undefined) {
      const shown = control.say(control.start);
      problems.push(`“${control.label}” cannot be “${text}”: here it is ${shown}.`);
    } else {
      state[control.id] = value;
    }
  }
  for (const id of Object.keys(texts).filter((each) => !known.has(each))) {
    problems.push(`This room has nothing called “${id}”.`);
  }
  return { state, problems };
}
