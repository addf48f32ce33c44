// How bars and marks of the chart by time look: shapes as well as colours, in the chart and in its legend.
"use strict";
const shapes = (() => {
  const { colour } = charts;
  const LABEL_FONT = "12px system-ui, sans-serif";
  const LETTER = 6.4;

  // Corners of each mark around its middle.
  const MARKS = {
    first: {
      ink: "error",
      corners: [
        [0, -8],
        [8, 0],
        [0, 8],
        [-8, 0],
      ],
    },
    evidence: {
      ink: "warning",
      corners: [
        [0, -6],
        [6, 5],
        [-6, 5],
      ],
    },
    error: {
      ink: "error",
      corners: [
        [-5, -5],
        [5, -5],
        [5, 5],
        [-5, 5],
      ],
    },
    message: { ink: "dim", corners: null },
  };
  // Where a bar lies in its lane, as shares of the lane's height: from, to.
  const PLACES = { log: [0, 1], call: [0.72, 0.96], open: [0.72, 0.96] };
  const placeOf = (kind) => PLACES[kind] ?? [0, 0.66];
  const isStuck = (kind) => kind === "open" || kind === "still";

  const hatch = () => ({
    symbol: "rect",
    color: colour("sheet"),
    dashArrayX: [1, 0],
    dashArrayY: [2, 5],
    rotation: Math.PI / 4,
  });

  // A bar within `frame`, or nothing where it is out of sight.
  const bar = (kind, left, right, middle, laneHeight, frame) => {
    const x = Math.max(left, frame.x);
    const width = Math.min(Math.max(right, left + (kind === "call" ? 4 : 2)), frame.x + frame.width) - x;
    if (width <= 0) return undefined;
    const full = laneHeight - 4;
    const [from, to] = placeOf(kind);
    const shape = {
      x,
      y: middle - full / 2 + from * full,
      width,
      height: (to - from) * full,
      r: kind === "log" ? 0 : 2,
    };
    const style = { fill: colour(`span-${kind}`), ...(isStuck(kind) ? { decal: hatch() } : {}) };
    return { type: "rect", shape, style };
  };

  const words = (text, x, y, style) => ({
    type: "text",
    silent: true,
    style: { text, x, y, verticalAlign: "middle", fill: colour("ink"), font: LABEL_FONT, ...style },
  });

  // A bar that says itself what it is, where there is room.
  const labelled = (rect, text) => {
    const { x, y, width, height } = rect.shape;
    const label = words(text, x + 6, y + height / 2, {
      backgroundColor: rect.style.fill,
      padding: [1, 3],
      width: Math.min(width - 14, text.length * LETTER),
      overflow: "truncate",
    });
    return { type: "group", children: [rect, label] };
  };

  const mark = (kind, x, y) => {
    const { ink, corners } = MARKS[kind];
    const style = { fill: colour(ink), stroke: colour("sheet"), lineWidth: 1.5 };
    if (corners === null) return { type: "circle", shape: { cx: x, cy: y, r: 2.5 }, style };
    return { type: "polygon", shape: { points: corners.map(([right, down]) => [x + right, y + down]) }, style };
  };

  const SVG = "http://www.w3.org/2000/svg";
  const svg = (name, attributes, ...children) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };

  const markSwatch = ({ ink, corners }) => {
    const fill = `var(--${ink})`;
    if (corners === null) return [svg("circle", { cx: 7, cy: 7, r: 2.5, fill })];
    return [svg("polygon", { points: corners.map(([x, y]) => `${7 + x * 0.85},${7 + y * 0.85}`).join(" "), fill })];
  };
  const barSwatch = (kind) => {
    const [from, to] = placeOf(kind);
    const height = 14 * Math.min(to - from, 0.7);
    const box = { x: 0, y: 7 - height / 2, width: 14, height, rx: 2, fill: `var(--span-${kind})` };
    const stripes = { d: "M2 12L6 2M8 12L12 2", stroke: "var(--sheet)", "stroke-width": 1.5 };
    return [svg("rect", box), ...(isStuck(kind) ? [svg("path", stripes)] : [])];
  };
  const swatch = (kind) => {
    const parts = MARKS[kind] ? markSwatch(MARKS[kind]) : barSwatch(kind);
    return svg("svg", { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" }, ...parts);
  };

  return { bar, labelled, mark, words, swatch };
})();
