"use strict";
// The slider: reads one entry per percent, writes the numbers and moves the dot on the curve.
(function () {
  const slider = document.getElementById("coverage");
  const source = document.getElementById("operating-points");
  const figure = document.getElementById("risk-figure");
  if (!slider || !source || !figure) return;
  const points = JSON.parse(source.textContent);
  const classes = source.dataset.form === "percent";
  const [left, top, width, height] = figure.dataset.box.split(" ").map(Number);
  const [xLow, xHigh, yLow, yHigh] = figure.dataset.limits.split(" ").map(Number);
  const space = "\u00a0";

  const number = (value, digits) => (value === null ? "–" : value.toFixed(digits).replace("-", "−"));
  const percent = (value) => (value === null ? "–" : number(100 * value, 1) + space + "%");
  const loss = (value) => (classes ? percent(value) : value === null ? "–" : value.toLocaleString("en-GB", { maximumSignificantDigits: 3 }).replace("-", "−"));
  const grouped = (value) => value.toLocaleString("en-GB");

  const line = figure.querySelector(".operating-point line");
  const dot = figure.querySelector(".operating-point circle");

  const show = (name, text) => {
    const cell = document.querySelector('[data-show="' + name + '"]');
    if (cell) cell.textContent = text;
  };

  function update() {
    const i = Number(slider.value) - 1;
    const aside = grouped(points.n - points.answered[i]) + " of " + grouped(points.n);
    show("coverage", percent(points.coverage[i]));
    show("risk", loss(points.risk[i]));
    show("threshold", number(points.threshold[i], 3));
    show("aside", aside);
    show("caught", percent(points.caught[i]));
    points.others.forEach((values, k) => show("other-" + k, loss(values[i])));
    points.outside.forEach((values, k) => show("outside-" + k, percent(values[i])));
    slider.setAttribute("aria-valuetext", slider.value + " % answered, " + (classes ? "error rate " : "mean squared error ") + loss(points.risk[i]));
    const x = left + (width * (points.coverage[i] - xLow)) / (xHigh - xLow);
    const inside = Math.min(Math.max((points.risk[i] - yLow) / (yHigh - yLow), 0), 1);
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    dot.setAttribute("cx", x);
    dot.setAttribute("cy", top + height * (1 - inside));
  }
  slider.addEventListener("input", update);
  update();
})();
