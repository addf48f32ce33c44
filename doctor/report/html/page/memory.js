// Memory by step: a line a rank. Lines are (rank, named by a finding, points of (step, bytes)).
"use strict";
(() => {
  const { data, byId, colour, bytes, tip, tooltip, axisLook, draw } = charts;
  if (!data.memory) return;
  let chosen = 0;

  const FEW = 8;
  const MOST_IN_TIP = 10;
  const PALETTE = ["span-call", "span-open", "ok", "unknown", "info", "warning", "span-evaluation", "span-save"];

  // A power of two that parts `most` bytes by four to eight lines.
  const stepOfBytes = (most) => 2 ** Math.max(0, Math.floor(Math.log2(Math.max(most, 1))) - 2);

  // How each line looks: named ranks stand out among others; without them a few lines have a colour each.
  const looks = (lines) => {
    const named = lines.filter(([, isNamed]) => isNamed).length;
    const few = lines.length <= FEW;
    return lines.map(([, isNamed], index) => {
      const standsOut = Boolean(isNamed) && named < lines.length;
      return {
        ink: colour(standsOut ? "error" : few && !named ? PALETTE[index] : "span-call"),
        width: standsOut ? 2.5 : 1.5,
        opacity: standsOut || few ? 1 : 0.4,
        hasName: standsOut ? named <= FEW : few && !named,
        depth: standsOut ? 5 : 2,
      };
    });
  };

  const line = ([rank, isNamed, points], { ink, width, opacity, hasName, depth }) => ({
    type: "line",
    name: `rank ${rank}${isNamed ? " (named by a finding)" : ""}`,
    data: points,
    showSymbol: points.length < 3,
    symbolSize: 4,
    z: depth,
    lineStyle: { width, opacity, color: ink },
    itemStyle: { color: ink },
    endLabel: { show: hasName, formatter: `rank ${rank}`, color: colour("ink") },
    labelLayout: { hideOverlap: true },
  });

  const limitLine = (limit) => ({
    silent: true,
    symbol: "none",
    data: [{ yAxis: limit }],
    lineStyle: { color: colour("error"), type: "dashed" },
    label: { formatter: `all there is: ${bytes(limit)}`, position: "insideEndBottom", color: colour("error") },
  });

  const pointTip = (points) => {
    const sorted = [...points].sort((one, other) => other.value[1] - one.value[1]);
    const rows = sorted.slice(0, MOST_IN_TIP).map(({ seriesName, value }) => `${seriesName}: ${bytes(value[1])}`);
    const rest = sorted.length > MOST_IN_TIP ? `and ${sorted.length - MOST_IN_TIP} more with less` : "";
    return tip(`step ${points[0].value[0]}`, ...rows, rest);
  };

  const stepAxis = () => ({
    ...axisLook(),
    type: "value",
    name: "step",
    nameLocation: "middle",
    nameGap: 28,
    minInterval: 1,
    min: "dataMin",
    max: "dataMax",
    splitLine: { show: false },
  });
  const byteAxis = (highest, limit) => ({
    ...axisLook(),
    type: "value",
    min: 0,
    max: limit ?? undefined,
    interval: stepOfBytes(highest),
    axisLabel: { ...axisLook().axisLabel, formatter: bytes },
  });

  const options = () => {
    const { lines, limit } = data.memory[chosen];
    const highest = limit ?? Math.max(...lines.map(([, , points]) => Math.max(...points.map(([, value]) => value))));
    const look = looks(lines);
    const series = lines.map((one, index) => line(one, look[index]));
    if (limit !== null) series[0].markLine = limitLine(limit);
    return {
      grid: { left: 74, right: 70, top: 22, bottom: 44 },
      tooltip: tooltip(pointTip, "axis"),
      xAxis: stepAxis(),
      yAxis: byteAxis(highest, limit),
      series,
    };
  };

  const { paint } = draw("memory-chart", 320, options);
  byId("memory-of").addEventListener("change", (event) => {
    chosen = Number(event.target.value);
    paint();
  });
})();
