// Controls from their descriptions: native elements, so that keyboards and screen readers work.
//
//   { id, label, kind: "slider", values: [1, 2, 4], start: 2, say: (value) => "2 GPUs" }
//   { id, label, kind: "choice", values: ["a", "b"], start: "a", say }
//   { id, label, kind: "tick", start: false }
//   { id, label, kind: "button", ask: { search: true } }    asks once with this added
//
// Each may have `when: (state) => boolean`: if it is false, the control is not shown, and what is
// asked has its start. And `more: true`: then it stands below, under "More". A slider may have
// `last: (answer) => value`: it goes no further with what is chosen now.

import { button, count, element } from "./draw.mjs";

export const slider = (id, label, values, start, say = count) =>
  ({ id, label, kind: "slider", values, start, say });
export const choice = (id, label, values, start, say = String) =>
  ({ id, label, kind: "choice", values, start, say });
export const tick = (id, label, start) => ({ id, label, kind: "tick", start });

/** Whole numbers, both ends among them. */
export const range = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => from + i);
/** Powers of two: powers(0, 3) is [1, 2, 4, 8]. */
export const powers = (from, to) => range(from, to).map((exponent) => 2 ** exponent);

/** The same controls with all that may be left out. */
export const complete = (controls) =>
  controls.map((control) => ({
    ...(control.kind === "button" ? {} : { values: [false, true], say: String }),
    when: () => true,
    ...control,
  }));

/** The values to ask with: of a control that is not shown, its start. */
export function shown(controls, state) {
  const asked = {};
  for (const control of controls.filter((each) => each.values)) {
    asked[control.id] = control.when(state) ? state[control.id] : control.start;
  }
  return asked;
}

/**
 * Fills the form. `change({id: value})` is called when the user moves a control, `press(ask)` when
 * a button is pressed. Returns a function that shows a state, and the answer to it if there is one.
 */
export function build(form, controls, change, press) {
  const made = controls.map((control) => KINDS[control.kind](control, change, press));
  const more = made.filter((_, i) => controls[i].more).map(({ node }) => node);
  form.replaceChildren(...made.filter((_, i) => !controls[i].more).map(({ node }) => node));
  if (more.length) form.append(element("details", {}, element("summary", {}, "More"), more));
  return (state, answer) => {
    for (const [i, { node, show }] of made.entries()) {
      node.hidden = !controls[i].when(state);
      show(state[controls[i].id], answer);
    }
  };
}

const KINDS = { slider: makeSlider, choice: makeChoice, tick: makeTick, button: makeButton };

function makeSlider({ id, label, values, say, last }, change) {
  const input = element("input", { id, type: "range", min: 0, max: values.length - 1, step: 1 });
  const words = element("span", { "aria-hidden": "true" }); // the input itself says it, too
  const head = element("div", {}, element("label", { for: id }, label), words);
  input.addEventListener("input", () => change({ [id]: values[input.value] }));
  return {
    node: element("div", { class: "control" }, head, input),
    show(value, answer) {
      if (last && answer) input.max = values.indexOf(last(answer));
      input.value = values.indexOf(value);
      words.textContent = say(value);
      input.setAttribute("aria-valuetext", say(value));
    },
  };
}

function makeChoice({ id, label, values, say }, change) {
  const options = values.map((value, i) => element("option", { value: i }, say(value)));
  const select = element("select", { id }, options);
  select.addEventListener("change", () => change({ [id]: values[select.value] }));
  return {
    node: element("div", { class: "control" }, element("label", { for: id }, label), select),
    show: (value) => {
      select.value = values.indexOf(value);
    },
  };
}

function makeTick({ id, label }, change) {
  const input = element("input", { id, type: "checkbox" });
  input.addEventListener("change", () => change({ [id]: input.checked }));
  return {
    node: element("div", { class: "control" }, element("label", {}, input, label)),
    show: (value) => {
      input.checked = value;
    },
  };
}

function makeButton({ id, label, ask }, change, press) {
  return { node: button({ id, class: "main" }, () => press(ask), label), show() {} };
}
