// What all charts share: their data, colours, tooltips, drawing. Apache ECharts draws them. Texts of the job reach the
// page as text nodes and as text of SVG only.
"use strict";
const charts = (() => {
  const data = JSON.parse(document.getElementById("chart-data").textContent);
  const byId = (id) => document.getElementById(id);
  const PAPER_WIDTH = 680;
  const drawn = [];

  // Colours are those of the page, resolved by the browser for the theme in use.
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const colour = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };

  const bytes = (count) => {
    let unit = 0;
    while (Math.abs(count) >= 1024 && unit < 5) {
      count /= 1024;
      unit += 1;
    }
    return `${Number(count.toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
  };

  const tip = (title, ...lines) => {
    const box = document.createElement("div");
    box.className = "tip";
    const head = document.createElement("b");
    head.textContent = title;
    box.append(head);
    for (const line of lines.filter(Boolean)) {
      const part = document.createElement("span");
      part.textContent = line;
      box.append(part);
    }
    return box;
  };
  const tooltip = (formatter, trigger = "item") => ({
    trigger,
    confine: true,
    enterable: false,
    backgroundColor: colour("sheet"),
    borderColor: colour("line"),
    extraCssText: "max-width: 30rem; white-space: normal",
    formatter,
  });
  const axisLook = () => ({
    axisLine: { lineStyle: { color: colour("line") } },
    axisTick: { lineStyle: { color: colour("line") } },
    axisLabel: { color: colour("dim"), fontFamily: "inherit" },
    splitLine: { lineStyle: { color: colour("line") } },
    nameTextStyle: { color: colour("dim") },
  });

  const draw = (id, height, options) => {
    const place = byId(id);
    place.closest(".chart-block").hidden = false;
    place.style.height = `${height}px`;
    const chart = echarts.init(place, null, { renderer: "svg" });
    const paint = () => chart.setOption({ animation: false, ...options() }, { notMerge: true });
    drawn.push({ chart, paint });
    new ResizeObserver(() => chart.resize()).observe(place);
    paint();
    return { chart, paint };
  };
  document.addEventListener("repaint", () => drawn.forEach(({ paint }) => paint()));
  document.addEventListener("paper", () =>
    drawn.forEach(({ chart, paint }) => {
      chart.resize({ width: PAPER_WIDTH });
      paint();
    }),
  );
  document.addEventListener("screen", () =>
    drawn.forEach(({ chart, paint }) => {
      chart.resize({ width: "auto" });
      paint();
    }),
  );

  return { data, byId, colour, bytes, tip, tooltip, axisLook, draw };
})();
