// The view of training: the runs of this key, drawn from /api/v1/progress every two seconds while somebody looks.

import {
  $, Failure, counted, drawIfChanged, drawn, failureOf, keep, make, pollWhileShown, request, setText, short, shortPeer, time,
} from "./common.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM] = [320, 120, 44, 18];

/** Three digits, also of numbers below 0 or near it. */
const number = (value) => (Math.abs(value) < 999.5 ? String(Number(value.toPrecision(3))) : `${value < 0 ? "-" : ""}${short(Math.abs(value))}`);

// -- plots ------------------------------------------------------------------------------------------------------------

function line(points, [first, last], [low, high]) {
  const x = (step) => LEFT + (last > first ? (step - first) / (last - first) : 0.5) * (WIDTH - LEFT - 6);
  const y = (value) => 6 + (high > low ? (high - value) / (high - low) : 0.5) * (HEIGHT - BOTTOM - 12);
  const at = points.map(([step, value]) => [x(step).toFixed(1), y(value).toFixed(1)]);
  const [endX, endY] = at.at(-1);
  return [
    drawn("polyline", { class: "line", points: at.map((one) => one.join(",")).join(" ") }),
    drawn("circle", { class: "end", cx: endX, cy: endY, r: 3 }),
  ];
}

function frame([first, last], [low, high]) {
  const ends = high > low ? [[high, 6], [low, HEIGHT - BOTTOM - 6]] : [[low, (HEIGHT - BOTTOM) / 2]];
  const found = ends.flatMap(([value, y]) => [
    drawn("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y, y2: y }),
    drawn("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, number(value)),
  ]);
  if (last > first) found.push(drawn("text", { x: LEFT, y: HEIGHT - 4 }, `step ${first}`));
  return [...found, drawn("text", { x: WIDTH - 2, y: HEIGHT - 4, "text-anchor": "end" }, last > first ? String(last) : `step ${last}`)];
}

/** Draws a curve; points are pairs of step and value, at least one. */
function plot(name, points) {
  const values = points.map(([, value]) => value);
  const steps = [points[0][0], points.at(-1)[0]];
  const range = [Math.min(...values), Math.max(...values)];
  const told = `${name}: ${number(values[0])} at step ${steps[0]}, ${number(values.at(-1))} at step ${steps[1]}`;
  return make("figure", { className: "plot" },
    make("figcaption", {}, make("span", { className: "label" }, name), make("strong", {}, number(values.at(-1)))),
    drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": told }, ...frame(steps, range), ...line(points, steps, range)));
}

function plotsOf(points) {
  const curves = [["Loss of a token", "loss"], ["Reward of a text", "reward"], ["Tokens/s, training", "tokens_per_s"]];
  return curves
    .map(([name, key]) => [name, points.filter((one) => one[key] !== null).map((one) => [one.step, one[key]])])
    .filter(([, found]) => found.length > 0)
    .map(([name, found]) => plot(name, found));
}

// -- runs -------------------------------------------------------------------------------------------------------------

function createRun({ run }) {
  const [session, , index] = run.split(":");
  return make("section", { className: "model" },
    make("div", { className: "head" }, make("div", {}, make("h2", { title: run }, `Run ${session.slice(0, 8)}:${index}`), make("p", { className: "summary" }))),
    make("div", { className: "plots" }));
}

function updateRun(section, one) {
  const { model, rank, started, num_steps: steps, notes, points } = one;
  const told = Object.entries(notes).filter(([, value]) => value !== "" && value.length <= 60).map(([key, value]) => ` · ${key}: ${value}`);
  setText(section.querySelector(".summary"), `${model} · rank ${rank} · ${counted(steps, "step")} · since ${time(started)}${told.join("")}`);
  drawIfChanged(section.querySelector(".plots"), points, (element) => {
    const none = make("p", { className: "hint" }, "No step yet.");
    element.replaceChildren(...(points.length > 0 ? plotsOf(points) : [none]));
  });
}

/** Names who computes the runs: servers of the swarm, or this machine. */
function drawHolders(element, servers) {
  const held = servers.map(({ peer, start, end, load }) => make("li", {},
    make("a", { href: `#swarm=${peer}`, title: peer }, shortPeer(peer)), ` ${start}:${end} · ${Math.round(100 * load)} % busy`));
  const here = make("li", {}, "This server itself");
  element.replaceChildren(...(held.length > 0 ? held : [here]));
}

async function holders() {
  const response = await request("api/v1/state");
  if (!response.ok) return [];
  const { models } = await response.json();
  const up = models.flatMap((model) => model.servers).filter((one) => one.is_reachable && !one.quarantine);
  return up.map(({ peer, start, end, load }) => ({ peer, start, end, load }));
}

// -- asking -----------------------------------------------------------------------------------------------------------

async function ask() {
  const [response, servers] = await Promise.all([request("api/v1/progress"), holders()]);
  if (!response.ok) throw await failureOf(response);
  const { runs, num_open: open } = await response.json();
  keep($("runs"), runs, (one) => one.run, createRun, updateRun);
  $("no-runs").hidden = runs.length > 0;
  $("holders").hidden = runs.length === 0;
  drawIfChanged($("holders-list"), servers, drawHolders);
  complain("");
  setText($("training-freshness"), `Live · ${time(Date.now() / 1000)}${open > 0 ? ` · ${counted(open, "call")} under way` : ""}`);
}

function complain(text) {
  setText($("training-trouble"), text);
  $("training-trouble").hidden = text === "";
  $("training-freshness").classList.toggle("live", text === "");
  if (text !== "") setText($("training-freshness"), "Not up to date");
}

pollWhileShown("training", async () => {
  try {
    await ask();
  } catch (error) {
    complain(error instanceof Failure ? `${error.message} Trying again.` : "The state of training cannot be read");
  }
});
