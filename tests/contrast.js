// How many texts of this page were judged, and which are hard to read: {text, ratio, ink, ground},
// where the contrast of a text with what is painted behind it is under 4.5. Pictures made of pixels
// are not read. A function, for Playwright's page.evaluate.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

  /** Red, green, blue and alpha, each from 0 to 1, of any colour that CSS can write. */
  const colors = new Map();
  function color(css) {
    if (!colors.has(css)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = css;
      canvas.fillRect(0, 0, 1, 1);
      colors.set(css, [...canvas.getImageData(0, 0, 1, 1).data].map((part) => part / 255));
    }
    return colors.get(css);
  }

  const over = (top, below) => {
    const mix = [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
    return [...mix, 1];
  };

  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  function contrast(one, other) {
    const [dark, bright] = [light(one), light(other)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  }

  const faded = ([r, g, b, a], opacity) => [r, g, b, a * Number(opacity)];
  const drawn = (element) => element instanceof SVGElement;
  const written = (element) => element.closest("text, foreignObject") !== null;

  /** What an element paints behind a text that stands upon it. */
  function paint(element) {
    const style = getComputedStyle(element);
    if (!drawn(element)) return faded(color(style.backgroundColor), style.opacity);
    const solid = element instanceof SVGGeometryElement && !written(element);
    if (!solid || style.fill === "none") return [0, 0, 0, 0];
    return faded(color(style.fill), style.fillOpacity * style.opacity);
  }

  // The ground of the whole page is that of its first two elements, wherever they end.
  const root = [document.body, document.documentElement].map(paint);
  const bare = root.reduceRight((below, top) => over(top, below), color("canvas"));

  function ground(element, { x, y }) {
    const there = document.elementsFromPoint(x, y); // the uppermost first
    const own = there.indexOf(element);
    const layers = own >= 0 ? there.slice(own) : ancestors(element);
    return layers.map(paint).reduceRight((below, top) => over(top, below), bare);
  }

  function ancestors(element) {
    const all = [];
    for (let each = element; each; each = each.parentElement) all.push(each);
    return all;
  }

  /** Where a text stands, or undefined if it is not seen. */
  function place(node) {
    const range = document.createRange();
    range.selectNodeContents(node);
    const seen = { opacityProperty: true, visibilityProperty: true };
    if (!node.parentElement.checkVisibility(seen)) return undefined;
    return [...range.getClientRects()].find(({ width, height }) => width > 2 && height > 2);
  }

  function judge(node, { x, y, width, height }) {
    const element = node.parentElement;
    const style = getComputedStyle(element);
    const opacity = ancestors(element).reduce((all, each) => all * getComputedStyle(each).opacity, 1);
    const behind = ground(element, { x: x + width / 2, y: y + height / 2 });
    const ink = over(faded(color(drawn(element) ? style.fill : style.color), opacity), behind);
    const hex = (rgb) => rgb.slice(0, 3).map((part) => Math.round(255 * part)).join(" ");
    const text = node.data.trim().slice(0, 40);
    return { text, ratio: contrast(ink, behind), ink: hex(ink), ground: hex(behind) };
  }

  const left = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const { data, parentElement: parent } = walk.currentNode;
    const silent = parent.closest("script, style, noscript, title, option, :disabled");
    if (data.trim() && !silent) left.add(walk.currentNode);
  }
  // What the pointer passes through would not be found at a point.
  const solid = document.createElement("style");
  solid.textContent = "* { pointer-events: auto !important }";
  document.head.append(solid);
  const judged = [];
  const height = document.documentElement.scrollHeight;
  for (let top = 0; left.size && top <= height; top += innerHeight / 2) {
    scrollTo({ top, behavior: "instant" });
    for (const node of left) {
      const box = place(node);
      if (box && box.bottom > innerHeight && top + innerHeight < height) continue; // later
      left.delete(node);
      if (box) judged.push(judge(node, box));
    }
  }
  solid.remove();
  scrollTo({ top: 0, behavior: "instant" });
  return { judged: judged.length, hard: judged.filter(({ ratio }) => ratio < 4.5) };
}
