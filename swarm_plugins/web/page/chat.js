// The view to talk: only /v1/models and /v1/chat/completions are asked.

import {
  $, Failure, announce, copyButton, drawIfChanged, duration, failureOf, forgetRefusal, keep, make, onView, request, setText,
  shortPeer,
} from "./common.js";
import { drawMarkdown } from "./markdown.js";

const STORED = "swarm.conversation";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const LONGEST_EVENT = 1 << 20;
const NEAR_THE_END = 80;
const LOST = "The answer broke off: the connection to the server is lost.";

let messages = [];
let running = null;
let models = [];
let lastId = 0;

// -- the conversation, kept in this tab -------------------------------------------------------------------------------

function store() {
  const settings = Object.fromEntries(["system", ...NUMBERS].map((name) => [name, $(name).value]));
  // An answer on its way ends with the page.
  const kept = messages.map((one) => (one === running?.message ? { ...one, error: LOST } : one));
  try {
    sessionStorage.setItem(STORED, JSON.stringify({ messages: kept, settings, model: $("model").value }));
  } catch {
    // A full store: the conversation goes on, and is lost when the page is loaded again.
  }
}

function restore() {
  try {
    const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    messages = stored.messages ?? [];
    lastId = Math.max(0, ...messages.map((one) => one.id));
    for (const [name, value] of Object.entries(stored.settings ?? {})) $(name).value = value;
    return stored.model ?? "";
  } catch {
    return "";
  }
}

// -- models -----------------------------------------------------------------------------------------------------------

async function loadModels(wanted) {
  const picker = $("model");
  try {
    const response = await request("v1/models");
    if (!response.ok) throw await failureOf(response);
    models = (await response.json()).data.map((one) => one.id);
    if (models.length === 0) throw new Failure("This server offers no model.");
  } catch (error) {
    const sentence = error instanceof Failure ? error.message : "The server’s list of models cannot be read.";
    picker.replaceChildren(make("option", {}, "No model"));
    setText($("welcome-title"), sentence);
    if (error.status === 401) offerKey(wanted);
    else setTimeout(() => loadModels(wanted), 3000);
    return;
  }
  const base = [...models].sort((one, other) => one.length - other.length)[0];
  picker.replaceChildren(...models.map((id) => {
    const isAdapter = id !== base && id.startsWith(`${base}:`);
    return make("option", { value: id }, isAdapter ? `with ${id.slice(base.length + 1)}` : id);
  }));
  picker.value = models.includes(wanted) ? wanted : models[0];
  picker.disabled = false;
  $("welcome").querySelector(".give-key")?.remove();
  greet();
  update();
}

function offerKey(wanted) {
  const button = make("button", { type: "button", className: "main give-key" }, "Enter the key");
  button.addEventListener("click", () => {
    button.remove();
    forgetRefusal();
    loadModels(wanted);
  });
  if ($("welcome").querySelector(".give-key") === null) $("welcome").append(button);
}

function greet() {
  setText($("welcome-title"), `Talk with ${$("model").value.split(":")[0].split("/").pop()}`);
}

// -- drawing ----------------------------------------------------------------------------------------------------------

function factsOf({ rate, tokens, cached, servers = [], timeToFirstToken }) {
  const said = [];
  if (rate > 0) said.push(`${rate.toFixed(1)} tokens/s`);
  if (tokens > 0) said.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (timeToFirstToken > 0) said.push(`first after ${duration(Number(timeToFirstToken.toPrecision(2)))}`);
  if (cached > 0) said.push(`${cached} cached`);
  const children = said.map((text) => make("span", {}, text));
  if (servers.length > 0) {
    const links = servers.map((peer) => make("a", { href: `#swarm=${peer}`, title: peer, className: "peer" }, shortPeer(peer)));
    children.push(make("span", {}, "by ", ...links.flatMap((link, index) => (index === 0 ? [link] : [" → ", link]))));
  }
  return make("p", { className: "facts" }, ...children);
}

function actionsOf(message, isLast) {
  const actions = make("div", { className: "actions" });
  if (message.content !== "") actions.append(copyButton(() => message.content, "the answer"));
  if (isLast) {
    const again = make("button", { type: "button", className: message.error ? "quiet framed" : "quiet" }, message.error ? "Try again" : "Regenerate");
    again.id = "again";
    again.addEventListener("click", regenerate);
    actions.append(again);
  }
  return actions;
}

function drawRest(article, message, isLast, isBusy) {
  const under = [];
  const isThinking = isBusy && message.content === "";
  article.parts.thought.hidden = message.thought === "";
  setText(article.parts.thought.firstChild, isThinking ? "Thinking" : "Thoughts");
  if (isThinking && message.thought === "") under.push(make("p", { className: "waiting" }, "Waiting for the first word"));
  if (message.note) under.push(make("p", { className: "note" }, message.note));
  if (message.error) under.push(make("p", { className: "notice bad", role: "alert" }, message.error));
  article.parts.under.replaceChildren(...under);
  article.parts.foot.replaceChildren(factsOf(message.facts ?? {}), ...(isBusy ? [] : [actionsOf(message, isLast)]));
}

function createMessage(message) {
  const isAnswer = message.role === "assistant";
  const [text, under] = [make("div", { className: "text" }), make("div")];
  const thought = make("details", { className: "thought", hidden: true }, make("summary"), make("p"));
  // A screen reader reads the answer, not each figure under it.
  const foot = make("div", { className: "foot", ariaLive: "off" });
  const article = make("article", { className: `message ${isAnswer ? "assistant" : "user"}` });
  article.append(make("h2", { className: "away" }, isAnswer ? "Answer" : "You"), ...(isAnswer ? [thought, text, under, foot] : [text]));
  article.parts = { thought, text, under, foot };
  return article;
}

function updateMessage(article, message) {
  if (message.role !== "assistant") {
    setText(article.parts.text, message.content);
    return;
  }
  drawIfChanged(article.parts.text, message.content, drawMarkdown);
  const isLast = message === messages.at(-1);
  const isBusy = running !== null && running.message === message;
  article.classList.toggle("busy", isBusy);
  const { note, error, facts, content, thought } = message;
  setText(article.parts.thought.lastChild, thought);
  const seen = [isLast, isBusy, content === "", thought === "", note, error, facts];
  drawIfChanged(article, seen, () => drawRest(article, message, isLast, isBusy));
}

function drawAll() {
  keep($("messages"), messages, (message) => String(message.id), createMessage, updateMessage);
  $("welcome").hidden = messages.length > 0;
}

function update() {
  const isRunning = running !== null;
  const focused = document.activeElement;
  $("stop").hidden = !isRunning;
  $("send").hidden = isRunning;
  $("send").disabled = models.length === 0 || $("prompt").value.trim() === "";
  $("new").disabled = messages.length === 0 && !isRunning;
  $("messages").ariaBusy = String(isRunning);
  // A button that is hidden would lose the focus.
  if (isRunning && focused === $("send")) $("stop").focus();
  if (!isRunning && focused === $("stop")) $("prompt").focus();
}

function followEnd(work) {
  const area = $("scroll");
  const isAtEnd = area.scrollHeight - area.scrollTop - area.clientHeight < NEAR_THE_END;
  work();
  if (isAtEnd) area.scrollTop = area.scrollHeight;
}

// -- asking -----------------------------------------------------------------------------------------------------------

function body() {
  // Without the answer to come, and without questions whose answer has no text: templates demand turns that alternate.
  const turns = messages.slice(0, -1).filter((one, index, all) => one.content !== "" && all[index + 1]?.content !== "");
  const history = turns.map(({ role, content }) => ({ role, content }));
  const system = $("system").value.trim();
  const wanted = { model: $("model").value, stream: true, stream_options: { include_usage: true } };
  wanted.messages = system === "" ? history : [{ role: "system", content: system }, ...history];
  for (const name of NUMBERS) {
    if ($(name).value !== "") wanted[name] = Number($(name).value);
  }
  return JSON.stringify(wanted);
}

/** Yields the data of server-sent events. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    if (rest.length > LONGEST_EVENT) throw new Failure("The answer cannot be read: one of its parts is too long.");
    for (const block of blocks) {
      const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length > 0) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
    }
  }
}

function take(turn, chunk) {
  const { message, facts } = turn;
  if (chunk.error) throw new Failure(chunk.error.message ?? "The server failed, and does not say why.");
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? "";
  const thought = choice?.delta?.reasoning_content ?? "";
  if (text !== "" || thought !== "") {
    const now = performance.now();
    facts.timeToFirstToken ??= (now - turn.started) / 1000;
    turn.first ??= now;
    turn.parts += 1;
    if (now - turn.first > 300) facts.rate = ((turn.parts - 1) * 1000) / (now - turn.first);
    message.content += text;
    message.thought += thought;
  }
  if (choice?.finish_reason === "length") message.note = "The answer ends here: it has as many tokens as are allowed.";
  if (chunk.usage) facts.tokens = chunk.usage.completion_tokens;
  if (chunk.swarm) {
    const { servers, tokens_per_s: rate, cached_tokens: cached } = chunk.swarm;
    Object.assign(facts, { servers: servers ?? [], cached, rate: rate ?? facts.rate });
  }
}

async function receive(turn) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: body(),
    signal: turn.stopper.signal,
  });
  if (!response.ok) throw await failureOf(response);
  let frame = 0;
  const redraw = () => followEnd(drawAll);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    take(turn, JSON.parse(data));
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(redraw);
  }
  throw new Failure("The answer broke off: the server has ended the connection.");
}

function sentence(error) {
  if (error instanceof Failure) return error.message;
  if (error instanceof SyntaxError) return "The answer cannot be read: a part of it is not JSON.";
  return LOST;
}

async function answer() {
  const message = { role: "assistant", content: "", thought: "", id: (lastId += 1) };
  const facts = (message.facts = {});
  const turn = { message, facts, stopper: new AbortController(), started: performance.now(), parts: 0 };
  running = turn;
  messages.push(message);
  drawAll();
  update();
  store();
  forgetRefusal();
  $("scroll").scrollTop = $("scroll").scrollHeight;
  announce("Waiting for the answer");
  try {
    await receive(turn);
    if (message.content === "") message.note ??= "The answer has no text.";
  } catch (error) {
    if (turn.stopper.signal.aborted) message.note = "Stopped.";
    else message.error = sentence(error);
  } finally {
    // What cannot be read is not generated further.
    turn.stopper.abort();
  }
  // A new conversation may have begun meanwhile.
  if (running !== turn) return;
  running = null;
  announce(message.error ? "" : message.note ?? "The answer is complete");
  followEnd(drawAll);
  update();
  store();
}

function stop() {
  running?.stopper.abort();
  $("prompt").focus();
}

function regenerate() {
  if (running !== null || !areSettingsValid()) return;
  messages.pop();
  $("prompt").focus();
  answer();
}

function areSettingsValid() {
  if ($("settings").checkValidity()) return true;
  openSettings(true);
  $("settings").reportValidity();
  return false;
}

function send(event) {
  event?.preventDefault();
  const text = $("prompt").value.trim();
  if (running !== null || text === "" || models.length === 0 || !areSettingsValid()) return;
  messages.push({ role: "user", content: text, id: (lastId += 1) });
  $("prompt").value = "";
  fit();
  answer();
}

function begin() {
  running?.stopper.abort();
  running = null;
  messages = [];
  drawAll();
  update();
  store();
  announce("A new conversation");
  $("prompt").focus();
}

// -- controls ---------------------------------------------------------------------------------------------------------

function openSettings(isOpen) {
  $("settings").hidden = !isOpen;
  $("toggle").ariaExpanded = String(isOpen);
}

function fit() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 200)}px`;
}

function listen() {
  $("composer").addEventListener("submit", send);
  $("stop").addEventListener("click", stop);
  $("new").addEventListener("click", begin);
  $("toggle").addEventListener("click", () => openSettings($("settings").hidden));
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("settings").addEventListener("change", store);
  window.addEventListener("pagehide", store);
  $("model").addEventListener("change", () => {
    greet();
    store();
  });
  $("prompt").addEventListener("input", () => {
    fit();
    update();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  $("view-talk").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running !== null) stop();
  });
  for (const button of document.querySelectorAll(".try")) {
    button.addEventListener("click", () => {
      $("prompt").value = button.textContent;
      fit();
      update();
      $("prompt").focus();
    });
  }
}

if (document.body.dataset.chat === "on") {
  listen();
  const wanted = restore();
  drawAll();
  update();
  loadModels(wanted);
  onView("talk", (rest) => {
    if (rest !== null) $("scroll").scrollTop = $("scroll").scrollHeight;
  });
}
