"use strict";

// Draws the curves and times of a page, and asks now and then whether there is more. Text from runs only ever gets into
// the page as text.

const POLL_MS = 5000;
const PALETTE = 8;
const charts = [];

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function runColour(number) {
  return colour("--c" + (number % PALETTE));
}

function phaseColour(number) {
  return colour("--p" + number);
}

function readable(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return size >= 100 ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : String(Number(value.toPrecision(4)));
}

function axes() {
  const line = { stroke: colour("--line"), width: 1 };
  const common = { stroke: colour("--quiet"), grid: line, ticks: { ...line, size: 5 }, font: "12px system-ui, sans-serif" };
  return [
    // whole steps only
    { ...common, size: 30, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000] },
    { ...common, size: 62, values: (plot, values) => values.map(readable) },
  ];
}

function smoothed(values, window) {
  if (window <= 1) return values;
  let sum = 0;
  return values.map((value, index) => {
    sum += value - (index >= window ? values[index - window] : 0);
    return sum / Math.min(index + 1, window);
  });
}

function frame(parent, title, name) {
  const box = element("div", "chart");
  box.append(element("h3", "", title));
  if (name && name !== title) box.append(element("div", "name", name));
  parent.append(box);
  return box;
}

// The steps of a chart; a lone one stands in the middle.
function around(made, first, last) {
  const steps = made.data[0];
  return steps.length === 1 ? [steps[0] - 0.5, steps[0] + 0.5] : [first, last];
}

// In a legend nothing stands beside a name until a step is pointed at.
function plot(box, height, series, data, scales = { x: { time: false, range: around } }) {
  const all = [{ label: "step", value: (made, step) => step ?? "" }, ...series];
  const made = new uPlot(
    {
      width: Math.max(200, box.clientWidth - 26),
      height,
      scales,
      axes: axes(),
      legend: { markers: { width: 0, fill: (made, index) => all[index].stroke } },
      series: all,
    },
    data,
    box,
  );
  charts.push({ made, box });
}

function drawCurve(parent, chart, window) {
  const box = frame(parent, chart.title, chart.name);
  const tables = chart.series.map((one) => [one.x, smoothed(one.y, window)]);
  const data = uPlot.join(tables);
  const few = chart.series.every((one) => one.x.length < 40);
  const series = chart.series.map((one) => ({
    label: one.name,
    stroke: runColour(one.colour),
    width: 1.6,
    spanGaps: true,
    points: { show: few, size: 5, fill: runColour(one.colour) },
    value: (made, value, place, index) => (index === null ? "" : readable(value)),
  }));
  plot(box, 210, series, data);
}

function drawTimes(parent, times) {
  const box = frame(parent, times.name, "seconds");
  if (!times.x.length) {
    box.append(element("p", "quiet", "No times have been logged yet."));
    return;
  }
  let below = times.x.map(() => 0);
  const stacked = times.parts.map((part) => {
    below = below.map((value, index) => value + part.y[index]);
    return { part, top: below };
  });
  // the tallest first, so that each covers the lower end of those above it
  stacked.reverse();
  const bars = uPlot.paths.bars({ size: [0.9, 60], gap: times.x.length > 200 ? 0 : 1 });
  const series = stacked.map(({ part }) => ({
    label: part.name,
    fill: phaseColour(part.colour),
    stroke: phaseColour(part.colour),
    width: 0,
    paths: bars,
    points: { show: false },
    value: (made, value, seriesIndex, index) => (index === null ? "" : readable(part.y[index]) + " s"),
  }));
  const highest = Math.max(...below);
  const scales = {
    x: { time: false, range: [times.x[0] - 0.6, times.x[times.x.length - 1] + 0.6] },
    y: { range: [0, highest * 1.05 || 1] },
  };
  plot(box, 300, series, [times.x, ...stacked.map(({ top }) => top)], scales);
}

function draw(data) {
  // the page must not jump while its charts are away
  document.body.style.minHeight = document.body.offsetHeight + "px";
  charts.splice(0).forEach(({ made }) => made.destroy());
  const curves = document.getElementById("curves");
  const times = document.getElementById("times");
  const smooth = document.getElementById("smooth");
  if (curves && data.charts) {
    curves.replaceChildren();
    data.charts.forEach((chart) => drawCurve(curves, chart, Number(smooth.value)));
  }
  if (times && data.times) {
    times.replaceChildren();
    data.times.forEach((one) => drawTimes(times, one));
  }
  document.body.style.minHeight = "";
}

let shown = null;

function redraw() {
  if (shown) draw(shown);
}

async function poll(place) {
  const known = shown ? "&since=" + encodeURIComponent(shown.version) : "";
  try {
    const answer = await fetch(place.dataset.url + known);
    const data = await answer.json();
    if (place.id === "samples") {
      document.getElementById("more").hidden = data.answers <= Number(place.dataset.known);
    } else if (data.charts || data.times) {
      if (shown) await renew();
      shown = data;
      redraw();
    }
    say("");
  } catch {
    say("foveal view does not answer any more");
  }
  setTimeout(() => poll(place), POLL_MS);
}

// The tables of the page, as the server makes them now.
async function renew() {
  const answer = await fetch(location.href);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.querySelectorAll("[data-live]").forEach((old) => {
    const made = page.getElementById(old.id);
    if (made) old.replaceChildren(...made.childNodes);
  });
}

function say(problem) {
  const status = document.getElementById("status");
  status.dataset.usual = status.dataset.usual ?? status.textContent;
  status.textContent = problem || status.dataset.usual;
}

// A picture that is damaged says so in its place.
function tell(picture) {
  picture.replaceWith(element("span", "missing", "damaged: " + picture.dataset.file));
}

function watchPictures() {
  document.querySelectorAll("img[data-file]").forEach((picture) => {
    if (picture.complete && !picture.naturalWidth) tell(picture);
    else picture.addEventListener("error", () => tell(picture));
  });
}

function start() {
  document.getElementById("smooth")?.addEventListener("change", redraw);
  document.querySelectorAll("[data-submit]").forEach((one) => one.addEventListener("change", () => one.form.submit()));
  // an address without what was left empty
  document.querySelectorAll("form.filters").forEach((form) =>
    form.addEventListener("submit", () =>
      form.querySelectorAll("input, select").forEach((field) => (field.disabled = field.value === "")),
    ),
  );
  const more = document.getElementById("more");
  if (more) more.href = location.href;
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (width !== window.innerWidth) redraw();
    width = window.innerWidth;
  });
  watchPictures();
  const written = document.getElementById("data");
  if (written) {
    shown = JSON.parse(written.textContent);
    redraw();
    return;
  }
  const place = document.querySelector("[data-url]");
  if (place) poll(place);
}

start();
