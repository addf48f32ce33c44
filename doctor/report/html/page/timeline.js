// Where each rank was: a lane a rank, what it did as bars, what happened as marks.
"use strict";
(() => {
  const { data, byId, colour, tip, tooltip, axisLook, draw } = charts;
  if (!data.timeline) return;
  // Times are milliseconds after `origin`; spans are (lane, begin, end, kind, text), marks (lane, at, kind, text, place).
  const { lanes, spans, marks, kinds, markKinds, names, texts, origin, first, focus, end } = data.timeline;
  const at = (millis) => origin + millis;

  const height = lanes.length <= 12 ? 34 : lanes.length <= 32 ? 26 : lanes.length <= 72 ? 18 : 13;
  const letters = height < 16 ? 9 : height < 20 ? 11 : 12;

  const DAY = 86400000;
  const pad = (number, width = 2) => String(number).padStart(width, "0");
  const clock = (time, withMillis = true) => {
    const moment = new Date(time);
    if (Number.isNaN(moment.getTime())) return "unknown";
    const text = [moment.getUTCHours(), moment.getUTCMinutes(), moment.getUTCSeconds()]
      .map((part) => pad(part))
      .join(":");
    return withMillis ? `${text}.${pad(moment.getUTCMilliseconds(), 3)}` : text;
  };
  const day = (time) => {
    const moment = new Date(time);
    return `${moment.getUTCFullYear()}-${pad(moment.getUTCMonth() + 1)}-${pad(moment.getUTCDate())}`;
  };
  const tick = (time, shown) => (shown < 2 * DAY ? clock(time, shown < 6000) : day(time));
  const seconds = (millis) => `${(millis / 1000).toFixed(Math.abs(millis) < 10000 ? 3 : 1)} s`;

  // What is shown: all, from a little before it began, or what the buttons and the slider say.
  const room = (width) => Math.max(500, width);
  const whole = [at(-room(end * 0.01)), at(end + room(end * 0.01))];
  const fromFirst = [at(focus - room((end - focus) * 0.02)), at(end + room((end - focus) * 0.02))];
  const LEAST_SHOWN = 50;
  let view = fromFirst;
  const scaled = (factor) => {
    const middle = (view[0] + view[1]) / 2;
    const half = Math.max(LEAST_SHOWN, (view[1] - view[0]) * factor) / 2;
    return [Math.max(middle - half, whole[0]), Math.min(middle + half, whole[1])];
  };
  const shifted = (share) => {
    const width = view[1] - view[0];
    const low = Math.min(Math.max(view[0] + share * width, whole[0]), whole[1] - width);
    return [low, low + width];
  };
  const VIEWS = {
    focus: () => fromFirst,
    all: () => whole,
    closer: () => scaled(0.5),
    wider: () => scaled(2),
    earlier: () => shifted(-0.3),
    later: () => shifted(0.3),
  };

  const spanTip = ([lane, begin, until, kind, text]) => {
    const times = `${clock(at(begin))} to ${clock(at(until))}, ${seconds(until - begin)}`;
    return tip(lanes[lane][0], `${names[kinds[kind]]}: ${texts[text]}`, times);
  };
  const markTip = ([lane, moment, kind, text, place]) => {
    const since = first === null ? "" : ` (${moment < first ? "" : "+"}${seconds(moment - first)})`;
    return tip(lanes[lane][0], `${names[markKinds[kind]]}: ${texts[text]}`, clock(at(moment)) + since, texts[place]);
  };

  const renderSpan = ({ dataIndex, coordSys }, api) => {
    const [lane, begin, until, kind, text] = spans[dataIndex];
    const [left, middle] = api.coord([at(begin), lane]);
    const [right] = api.coord([at(until), lane]);
    const bar = shapes.bar(kinds[kind], left, right, middle, height, coordSys);
    const hasRoom = bar && kinds[kind] === "still" && bar.shape.width >= 90 && height >= 18;
    return hasRoom ? shapes.labelled(bar, texts[text]) : bar;
  };
  const renderMark = ({ dataIndex, coordSys }, api) => {
    const [lane, moment, kind] = marks[dataIndex];
    const [x, y] = api.coord([at(moment), lane]);
    if (x < coordSys.x - 1 || x > coordSys.x + coordSys.width + 1) return undefined;
    return { ...shapes.mark(markKinds[kind], x, y), z2: 10 - kind };
  };
  const told = new Set([...spans, ...marks].map(([lane]) => lane));
  const silent = lanes.map((_, lane) => lane).filter((lane) => !told.has(lane));
  const renderSilent = ({ dataIndex, coordSys }, api) => {
    const [, y] = api.coord([at(0), silent[dataIndex]]);
    return shapes.words("nothing tells the time", coordSys.x + 8, y, { fill: colour("dim") });
  };

  const timeAxis = (isNarrow) => ({
    ...axisLook(),
    type: "value",
    position: "top",
    min: whole[0],
    max: whole[1],
    splitNumber: isNarrow ? 3 : 6,
    axisLabel: {
      ...axisLook().axisLabel,
      hideOverlap: true,
      showMinLabel: false,
      showMaxLabel: false,
      formatter: (time) => tick(time, view[1] - view[0]),
    },
  });
  const laneAxis = (gutter) => ({
    ...axisLook(),
    type: "category",
    inverse: true,
    data: lanes.map(([name]) => name),
    axisTick: { show: false },
    splitLine: { show: true, interval: 0, lineStyle: { color: colour("line") } },
    axisLabel: {
      interval: 0,
      width: gutter - 14,
      overflow: "truncate",
      fontSize: letters,
      color: colour("ink"),
      formatter: (name, lane) => (lanes[lane][1] ? `{blamed|▸ ${name}}` : name),
      rich: { blamed: { color: colour("error"), fontWeight: "bold", fontSize: letters } },
    },
  });
  const zoom = () => {
    const shown = { filterMode: "none", startValue: view[0], endValue: view[1] };
    const slider = {
      height: 20,
      bottom: 16,
      showDetail: false,
      brushSelect: false,
      borderColor: colour("line"),
      fillerColor: "rgba(120, 150, 190, 0.18)",
      handleStyle: { color: colour("sheet"), borderColor: colour("dim") },
      moveHandleStyle: { color: colour("line") },
    };
    return [
      { ...shown, type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false },
      { ...shown, ...slider, type: "slider" },
    ];
  };
  const beginning = () => ({
    silent: true,
    symbol: "none",
    data: first === null ? [] : [{ xAxis: at(first) }],
    lineStyle: { color: colour("error"), type: "dashed", width: 1.5 },
    label: { show: false },
  });
  const series = () => [
    {
      type: "custom",
      renderItem: renderSpan,
      encode: { x: [1, 2], y: 0 },
      data: spans.map(([lane, begin, until]) => [lane, at(begin), at(until)]),
    },
    {
      type: "custom",
      renderItem: renderMark,
      z: 5,
      encode: { x: 1, y: 0 },
      data: marks.map(([lane, moment]) => [lane, at(moment)]),
      markLine: beginning(),
    },
    { type: "custom", renderItem: renderSilent, encode: { x: 1, y: 0 }, data: silent.map((lane) => [lane, whole[0]]) },
  ];
  const TIPS = [(index) => spanTip(spans[index]), (index) => markTip(marks[index]), () => ""];
  const options = () => {
    const isNarrow = byId("timeline-chart").clientWidth < 560;
    // Those to blame bear a mark and are bold, which is wider in some fonts.
    const lengthOf = ([name, isBlamed]) => (isBlamed ? name.length * 1.15 + 2 : name.length);
    const gutter = isNarrow ? 92 : Math.min(230, 24 + Math.max(...lanes.map(lengthOf)) * 7);
    return {
      grid: { left: gutter, right: 18, top: 26, bottom: 62 },
      tooltip: tooltip(({ seriesIndex, dataIndex }) => TIPS[seriesIndex](dataIndex)),
      xAxis: timeAxis(isNarrow),
      yAxis: laneAxis(gutter),
      dataZoom: zoom(),
      series: series(),
    };
  };

  const { chart, paint } = draw("timeline-chart", lanes.length * height + 90, options);
  chart.on("datazoom", () => {
    const { startValue, endValue } = chart.getOption().dataZoom[0];
    if (startValue !== undefined) view = [startValue, endValue];
  });

  const buttons = [...document.querySelectorAll("#timeline [data-view]")];
  const press = (name) => {
    for (const button of buttons.filter((one) => one.hasAttribute("aria-pressed"))) {
      button.setAttribute("aria-pressed", String(button.dataset.view === name));
    }
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      view = VIEWS[button.dataset.view]();
      paint();
      press(button.dataset.view);
    });
  }
  if (focus === 0) {
    buttons.find((button) => button.dataset.view === "focus").hidden = true;
    press("all");
  }

  const present = new Set([...spans.map((span) => kinds[span[3]]), ...marks.map((mark) => markKinds[mark[2]])]);
  for (const kind of [...kinds, ...markKinds].filter((one) => present.has(one))) {
    const entry = document.createElement("li");
    entry.append(shapes.swatch(kind), names[kind]);
    byId("timeline-legend").append(entry);
  }
})();
