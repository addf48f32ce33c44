// From each host to each: a cell a pair. Cells are (from, to, weight, text, is bad); of a measure that is no quantity a
// weight is the number of one of its steps, from good to bad.
"use strict";
(() => {
  const { data, byId, colour, bytes, tip, tooltip, axisLook, draw } = charts;
  if (!data.pairs) return;
  const { hosts, charts: measures } = data.pairs;
  let chosen = 0;

  const cellHeight = hosts.length <= 16 ? 38 : hosts.length <= 32 ? 24 : 13;
  const FEW = 12;
  const LABEL_WIDTH = 66;
  const HOT = 0.75;
  const STEP_INKS = ["ok-soft", "span-data", "span-open", "span-open"];

  const shownNumber = (value, unit) =>
    unit === "B/s" ? `${bytes(value)}/s` : `${Number(value.toPrecision(3))} ${unit}`;
  // Colours span a factor of two at least: what differs by less is noise, and shall not look like a fault. Where it is
  // known what is usual, they span a tenth of it: one pair a thousand times as slow would else make all others alike.
  const extent = ({ cells, up, usual }) => {
    if (usual && up) return [usual / 10, usual];
    const weights = cells.map(([, , weight]) => weight);
    const [low, high] = [Math.min(...weights), Math.max(...weights)];
    return up ? [Math.min(low, high / 2), high] : [low, Math.max(high, low * 2)];
  };

  const within = (measure, weight) => {
    const [low, high] = extent(measure);
    return measure.steps.length ? weight : Math.min(Math.max(weight, low), high);
  };

  const gutter = Math.min(170, 20 + Math.max(...hosts.map((name) => name.length)) * 7);
  const cellWidth = () => (byId("pairs-chart").clientWidth - gutter - 24) / hosts.length;

  // A word or a sign in each cell, so that colour is not all that tells; none where it would not fit.
  const label = ({ steps, unit }, [, , weight, , isBad]) => {
    if (steps.length) return isBad ? "✗" : "✓";
    if (cellWidth() < LABEL_WIDTH) return isBad ? "✗" : "";
    return `${isBad ? "✗ " : ""}${shownNumber(weight, unit)}`;
  };
  const isHot = (measure, weight) => {
    const [low, high] = extent(measure);
    const share = high > low ? (within(measure, weight) - low) / (high - low) : 0;
    return !measure.steps.length && (measure.up ? 1 - share : share) > HOT;
  };

  const stepMap = ({ steps, cells }) => {
    const present = new Set(cells.map(([, , weight]) => weight));
    const pieces = steps.map((name, value) => ({ value, label: name, color: colour(STEP_INKS[value] ?? "error") }));
    return { type: "piecewise", pieces: pieces.filter(({ value }) => present.has(value)) };
  };
  const rangeMap = (measure) => {
    const { unit, up, usual } = measure;
    const [low, high] = extent(measure);
    const [least, most] = usual && up ? ["≤ ", "≥ "] : ["", ""];
    const inks = ["ok-soft", "span-data", "error"].map(colour);
    return {
      type: "continuous",
      min: low,
      max: high > low ? high : low + 1,
      text: [`${most}${shownNumber(high, unit)}`, `${least}${shownNumber(low, unit)}`],
      inRange: { color: up ? inks.reverse() : inks },
    };
  };

  const hostAxis = (name, width, more) => ({
    ...axisLook(),
    type: "category",
    data: hosts,
    name,
    splitLine: { show: false },
    ...more,
    axisLabel: { ...axisLook().axisLabel, width, overflow: "truncate", rotate: name === "to" ? 45 : 0 },
  });

  const options = () => {
    const measure = measures[chosen];
    const map = measure.steps.length ? stepMap(measure) : rangeMap(measure);
    return {
      grid: { left: gutter, right: 24, top: 10, bottom: gutter * 0.7 + 60 },
      tooltip: tooltip(({ dataIndex }) => {
        const [source, target, , text] = measure.cells[dataIndex];
        return tip(`${hosts[source]} to ${hosts[target]}`, text);
      }),
      xAxis: hostAxis("to", gutter - 10, {}),
      yAxis: hostAxis("from", gutter - 10, { inverse: true }),
      visualMap: { ...map, orient: "horizontal", left: "center", bottom: 4, textStyle: { color: colour("dim") } },
      series: [
        {
          type: "heatmap",
          data: measure.cells.map(([source, target, weight, , isBad]) => ({
            value: [target, source, within(measure, weight)],
            label: { color: colour(isBad || isHot(measure, weight) ? "sheet" : "ink") },
          })),
          label: {
            show: true,
            fontSize: cellHeight < 20 ? 8 : 11,
            formatter: ({ dataIndex }) => label(measure, measure.cells[dataIndex]),
          },
          itemStyle: { borderColor: colour("sheet"), borderWidth: 1 },
        },
      ],
    };
  };

  byId("pairs-chart").style.maxWidth =
    `${hosts.length * Math.max(cellHeight * 1.6, hosts.length <= FEW ? 84 : 0) + 200}px`;
  const { paint } = draw("pairs-chart", hosts.length * cellHeight + 190, options);
  byId("pairs-of").addEventListener("change", (event) => {
    chosen = Number(event.target.value);
    paint();
  });
})();
