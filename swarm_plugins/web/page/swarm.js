// The view of the swarm: drawn from /api/v1/state every two seconds while somebody looks.

import {
  $, Failure, announce, commandLine, counted, drawIfChanged, dropView, duration, failureOf, keep, make, onView, pollWhileShown, request,
  setText, short, shortPeer, time,
} from "./common.js";

const MOST_TICKS = 8;

let wantedPeer = "";

// -- words ------------------------------------------------------------------------------------------------------------

const span = ([start, end]) => `${start}:${end}`;

function runs(counts) {
  const found = [];
  counts.forEach((count, block) => {
    const last = found.at(-1);
    if (last !== undefined && last.count === count) last.end = block + 1;
    else found.push({ start: block, end: block + 1, count });
  });
  return found;
}

function stateOf(server) {
  if (server.quarantine) return "quarantined";
  if (!server.is_reachable && server.state === "online") return "unreachable";
  return server.ban ? "left out" : server.state;
}

function blocksOf(server) {
  const here = [server.start, server.end];
  let text = server.leaving ? `${span(server.leaving)} → ${span(here)}` : span(here);
  if (server.target && span(server.target) !== span(here)) text += ` → ${span(server.target)}`;
  return server.experts ? `experts ${span(server.experts)} of ${text}` : text;
}

function remarksOf(server) {
  const said = [];
  const reason = server.reason.replace(`peer ${server.peer} `, "");
  if (server.quarantine) said.push(["bad", `Your clients leave it out for a day: ${server.quarantine}`]);
  if (server.ban) {
    const { left_s: left, strikes, reason: why } = server.ban;
    said.push(["bad", `Left out for ${duration(Math.ceil(left))} after ${counted(strikes, "failure")}: ${why}`]);
  }
  if (server.reason && !server.is_reachable) said.push(["bad", `Not used: ${reason}`]);
  for (const [start, end, first, last] of server.needs) {
    said.push(["", `Fetches experts ${first}:${last} of blocks ${start}:${end}`]);
  }
  if (server.unkept_graphs > 0) {
    said.push(["", `Forwards run again for their backward: ${short(server.unkept_graphs)}; more --activation-bytes saves that`]);
  }
  if (server.refused_pushes > 0) {
    said.push(["", `Pushed hidden states refused, as late or not allowed: ${short(server.refused_pushes)}`]);
  }
  return said;
}

function summaryOf(model) {
  const online = model.servers.filter((one) => one.is_reachable && one.state === "online" && !one.quarantine).length;
  const others = model.servers.length - online;
  return `${counted(online, "server")} online${others > 0 ? `, ${others} not` : ""} · ${counted(model.num_blocks, "block")}`;
}

function healthOf(model) {
  const missing = model.missing_blocks.length;
  if (missing > 0) return ["bad", `${missing} of ${model.num_blocks} blocks have no server`];
  if (model.missing_experts.length > 0) return ["bad", "Some experts have no server"];
  const least = Math.min(...model.coverage);
  return ["good", least > 1 ? `Every block has ${least} servers or more` : "Every block has a server"];
}

function gapText(gap) {
  const blocks = gap.blocks[1] - gap.blocks[0] === 1 ? `Block ${gap.blocks[0]}` : `Blocks ${span(gap.blocks)}`;
  return gap.experts ? `Experts ${span(gap.experts)} of blocks ${span(gap.blocks)}` : blocks;
}

// -- the map ----------------------------------------------------------------------------------------------------------

function place(element, start, end, num) {
  element.style.left = `${(100 * start) / num}%`;
  element.style.width = `${(100 * (end - start)) / num}%`;
  return element;
}

function stepOf(num) {
  return [1, 2, 5, 10, 20, 50, 100].find((step) => num / step <= MOST_TICKS) ?? 200;
}

function ticks(num) {
  const step = stepOf(num);
  const found = [];
  for (let block = 0; block < num; block += step) {
    if (block === 0 || num - block > step / 2) found.push(place(make("span", {}, String(block)), block, block, num));
  }
  return [...found, place(make("span", {}, String(num)), num, num, num)];
}

function coverageOf(counts) {
  return runs(counts).map(({ start, end, count }) => {
    const isWide = (end - start) / counts.length >= 0.08;
    const text = count === 0 ? "gap" : `×${count}`;
    const kind = count === 0 ? "gap" : count === 1 ? "one" : "more";
    const title = `${start}:${end}: ${count === 0 ? "no server" : counted(count, "server")}`;
    return place(make("span", { className: `run ${kind}`, title }, ...(isWide ? [make(count === 0 ? "b" : "span", {}, text)] : [])), start, end, counts.length);
  });
}

function barsOf({ num, start, end, state, leaving, target, isExperts, title }) {
  const found = [];
  if (leaving) found.push(place(make("span", { className: "bar ghost" }), ...leaving, num));
  const kind = `bar ${isExperts ? "experts " : ""}${state.replace(" ", "-")}`;
  found.push(place(make("span", { className: kind, title }), start, end, num));
  if (target) found.push(place(make("span", { className: "bar coming" }), ...target, num));
  return found;
}

function rowsOf(model) {
  const num = model.num_blocks;
  const fixed = [
    { key: "axis", label: "Block", detail: "", draw: ticks, seen: num },
    { key: "cover", label: "Coverage", detail: "servers per block", draw: coverageOf, seen: model.coverage },
  ];
  const servers = model.servers.map((server) => {
    const { peer, start, end, leaving, target } = server;
    const [state, blocks] = [stateOf(server), blocksOf(server)];
    const isUp = server.is_reachable && !server.quarantine;
    return {
      key: peer,
      label: shortPeer(peer),
      href: `#swarm=${peer}`,
      detail: `${blocks} · ${isUp ? `${Math.round(100 * server.load)} % busy` : state}`,
      draw: barsOf,
      seen: { num, start, end, leaving, target, state, isExperts: server.experts !== null, title: `${blocks}, ${state}` },
    };
  });
  return [...fixed, ...servers];
}

function createRow({ key, label, href }) {
  const name = href === undefined ? make("span", {}, label) : make("a", { href, className: "peer" }, label);
  const detail = make("small");
  const track = make("div", { className: key === "axis" || key === "cover" ? `track ${key}` : "track" });
  const row = make("div", { className: "row" }, make("div", { className: "name" }, name, detail), track);
  row.parts = { detail, track };
  return row;
}

function updateRow(row, { detail, draw, seen }, num) {
  setText(row.parts.detail, detail);
  row.parts.track.style.setProperty("--step", `${(100 * stepOf(num)) / num}%`);
  drawIfChanged(row.parts.track, seen, (track) => track.replaceChildren(...draw(seen)));
}

function drawMap(map, model) {
  keep(map, rowsOf(model), (one) => one.key, createRow, (row, one) => updateRow(row, one, model.num_blocks));
}

// -- cards ------------------------------------------------------------------------------------------------------------

function meter(label, share, text) {
  const fill = make("span", { className: share > 0.9 ? "fill high" : "fill" });
  fill.style.width = `${Math.min(100, Math.max(0, 100 * share))}%`;
  const scale = make("span", { className: "scale", ariaHidden: "true" }, fill);
  return make("div", { className: "meter" }, make("span", { className: "label" }, label), make("span", {}, text), scale);
}

function factsOf(server) {
  const distances = Object.entries(server.round_trips).map(([peer, s]) => `${shortPeer(peer)} ${duration(s)}`);
  const weights = server.quantization === "none" ? server.dtype : `${server.dtype}, ${server.quantization}`;
  const found = [
    ["Throughput", server.throughput > 0 ? `${short(server.throughput)} tokens/s a block` : ""],
    ["Weights", weights],
    ["Version", server.software],
    ["Round trip", server.round_trip_s === null ? "" : duration(server.round_trip_s)],
    ["To others", distances.join(", ")],
    ["Adapters", server.adapters.join(", ")],
  ];
  return found.filter(([, value]) => value !== "");
}

const createCard = ({ peer }) => make("li", { className: "card", id: `server-${peer}`, tabIndex: -1 });

function drawCard(card, server) {
  const state = stateOf(server);
  const { free_kv_tokens: free, total_kv_tokens: total } = server;
  const cache = total > 0 ? `${short(free)} of ${short(total)} free` : `${short(free)} free`;
  const children = [
    make("div", { className: "head" },
      make("h4", { className: "peer", title: server.peer }, shortPeer(server.peer)),
      make("span", { className: `pill ${state.replace(" ", "-")}` }, state)),
    make("p", { className: "blocks" }, server.experts ? "Holds " : "Blocks ", make("strong", {}, blocksOf(server))),
    ...(server.is_reachable ? [meter("Load", server.load, `${Math.round(100 * server.load)} %`), meter("Cache (tokens)", total > 0 ? 1 - free / total : 0, cache)] : []),
    make("dl", {}, ...factsOf(server).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
  ];
  const remarks = remarksOf(server);
  if (remarks.length > 0) {
    children.push(make("ul", { className: "remarks" }, ...remarks.map(([kind, text]) => make("li", { className: kind }, text))));
  }
  card.replaceChildren(...children);
}

// -- models -----------------------------------------------------------------------------------------------------------

function createModel(model) {
  const title = make("h2", {}, model.model);
  const commit = make("span", { className: "commit", title: model.version }, model.version.slice(0, 14));
  const map = make("div", { className: "map" });
  const section = make("section", { className: "model" },
    make("div", { className: "head" }, make("div", {}, title, make("p", { className: "summary" })), make("span", { className: "pill" })),
    make("div", { className: "gaps" }),
    make("figure", { ariaLabel: `Which server holds which blocks of ${model.model}` }, map),
    make("h3", {}, "Servers"),
    make("ul", { className: "cards" }),
    make("h3", {}, "Join with a server of your own"),
    make("div", { className: "join" }));
  section.parts = { commit, map };
  return section;
}

function updateModel(section, model) {
  const [kind, health] = healthOf(model);
  const find = (name) => section.querySelector(name);
  const pill = find(".pill");
  if (pill.textContent !== health && pill.textContent !== "") announce(`${model.model}: ${health}`);
  setText(pill, health);
  pill.className = `pill ${kind}`;
  drawIfChanged(find(".summary"), summaryOf(model), (element, text) => {
    element.replaceChildren(`${text} · version `, section.parts.commit);
  });
  keep(find(".gaps"), model.gaps, (gap) => gap.command, (gap) => make("div", { className: "notice bad gap" },
    make("p", {}, make("strong", {}, `${gapText(gap)}: no server.`), " Serve them with"),
    commandLine(gap.command, `the command for ${gapText(gap).toLowerCase()}`)));
  drawMap(section.parts.map, model);
  keep(find(".cards"), model.servers, (server) => server.peer, createCard, (card, server) => drawIfChanged(card, server, drawCard));
  keep(find(".join"), [model.join], (join) => join, (join) => commandLine(join, "the command to join"));
}

function showPeer() {
  const card = wantedPeer === "" ? null : $(`server-${wantedPeer}`);
  if (card === null) return;
  wantedPeer = "";
  card.scrollIntoView({ block: "center" });
  card.focus();
}

function show(state) {
  $("skeleton").hidden = true;
  keep($("models"), state.models, (model) => model.version, createModel, updateModel);
  $("empty").hidden = state.models.length > 0 || state.surveyed_at === null;
  if (!$("empty").hidden && $("empty").querySelector(".command") === null) {
    const command = `swarm serve MODEL --initial-peers ${state.initial_peers[0] ?? "ADDRESS"}`;
    $("empty").append(commandLine(command, "the command to serve a model"));
  }
  complain(state.error, state.surveyed_at);
  showPeer();
}

function complain(error, surveyedAt = null) {
  const since = surveyedAt === null ? "" : ` What you see is from ${time(surveyedAt)}.`;
  const text = error === "" ? "" : `${error.replace(/[.?]?$/, (end) => end || ".")}${since} Trying again.`;
  setText($("trouble"), text);
  $("trouble").hidden = text === "";
  $("view-swarm").classList.toggle("old", text !== "");
  setText($("freshness"), text !== "" ? "Not up to date" : `Live · ${time(surveyedAt)}`);
  $("freshness").classList.toggle("live", text === "");
}

// -- asking -----------------------------------------------------------------------------------------------------------

let lastSurvey = null;

async function ask() {
  const response = await request("api/v1/state");
  if (response.status === 404) {
    dropView("swarm");
    return;
  }
  if (!response.ok && response.status !== 503) throw await failureOf(response);
  const state = await response.json();
  lastSurvey = state.surveyed_at;
  $("trust").hidden = false;
  show(state);
}

async function refresh() {
  try {
    await ask();
  } catch (error) {
    complain(error instanceof Failure ? error.message : "The state of the swarm cannot be read", lastSurvey);
  }
}

onView("swarm", (rest) => {
  wantedPeer = rest ?? "";
  if (rest !== null) showPeer();
});

// Once also while another view is shown: whether there is a swarm at all.
pollWhileShown("swarm", refresh)();
