"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const dressed = (trace) => {
    const { tone, ...rest } = trace;
    const of_tone = colour(`--tone-${tone}`);
    if (rest.type === "bar") {
      return { ...rest, marker: { color: of_tone, line: { width: 0 } } };
    }
    const fill = rest.stackgroup ? { fillcolor: `${of_tone}99` } : {};
    return { ...rest, ...fill, line: { ...rest.line, color: of_tone }, marker: { ...rest.marker, color: of_tone } };
  };

  const layout = (chart) => {
    const axis = {
      gridcolor: colour("--grid"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true,
    };
    const narrow = window.innerWidth < 600;
    const own = chart.layout;
    return {
      font: { family: "system-ui, sans-serif", size: narrow ? 11 : 12, color: colour("--text") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: narrow ? 44 : 56, r: 12, t: narrow ? 10 : 28, b: 36 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--text") },
      hovermode: "x unified",
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") } },
      legend: { orientation: "h", x: 0, y: -0.16, yanchor: "top", traceorder: "normal", font: { size: 11 } },
      dragmode: narrow ? false : "zoom",
      ...own,
      xaxis: { ...axis, ...(own.xaxis || {}) },
      yaxis: { ...axis, ...(own.yaxis || {}) },
    };
  };

  const config = {
    responsive: true, displaylogo: false, displayModeBar: window.innerWidth < 600 ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  const draw = async () => {
    for (const chart of charts) {
      const place = document.querySelector(`#${chart.id} .plot`);
      await Plotly.react(place, chart.traces.map(dressed), layout(chart), config);
    }
    document.body.dataset.drawn = charts.length;
  };

  const fail = (error) => {
    const place = document.getElementById("error");
    place.hidden = false;
    place.textContent = `The charts cannot be drawn: ${error}. The tables below each of them say the same.`;
  };

  const again = () => draw().catch(fail);
  dark.addEventListener("change", again);
  again();
})();
