// The view to talk: only /v1/models and /v1/chat/completions are asked.

import { $, Failure, announce, forgetRefusal, onView, setText } from "./common.js";
import { chip, toText, withMore } from "./files.js";
import { MOST, load, loadSettings, newConversation, onChange, remove, save, saveSettings } from "./kept.js";
import { drawMessages, followEnd, offerEnd, showEnd } from "./messages.js";
import { choose, greet, loadModels } from "./models.js";
import { drawList, startList } from "./sidebar.js";
import { asLeft, follow, newTurn } from "./stream.js";

const CURRENT = "swarm.conversation";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const TALLEST = 200;

let current = newConversation();
let running = null;
let attached = [];
let isReady = false;
let lastId = Date.now();

// -- what is kept -----------------------------------------------------------------------------------------------------

function store() {
  if (current.messages.length === 0) return;
  const messages = current.messages.map((one) => (one === running?.message ? asLeft(one) : one));
  const { isKept, gone } = save({ ...current, messages });
  sessionStorage.setItem(CURRENT, current.id);
  if (!isKept) say("This conversation cannot be kept, as this browser has no room for it: leaving it loses it.");
  else if (gone.length > 0) say(`Deleted to make room in this browser: ${gone.map((name) => `“${name}”`).join(", ")}.`);
  drawList(current.id);
}

function storeSettings() {
  saveSettings({ ...Object.fromEntries(["system", ...NUMBERS].map((name) => [name, $(name).value])), model: $("model").value });
}

/** Says a sentence above the message, until the next one; an empty text takes it away. */
function say(text) {
  setText($("said"), text);
  $("said").hidden = text === "";
}

// -- drawing ----------------------------------------------------------------------------------------------------------

function draw() {
  drawMessages(current, running?.message ?? null, { onEdit: resend, onRetry: regenerate });
}

function update() {
  const isRunning = running !== null;
  const focused = document.activeElement;
  $("stop").hidden = !isRunning;
  $("send").hidden = isRunning;
  $("send").disabled = !isReady || ($("prompt").value.trim() === "" && attached.length === 0);
  $("new").disabled = current.messages.length === 0 && !isRunning;
  $("messages").ariaBusy = String(isRunning);
  // A button that is hidden would lose the focus.
  if (isRunning && focused === $("send")) $("stop").focus();
  if (!isRunning && focused === $("stop")) $("prompt").focus();
}

function redraw() {
  draw();
  drawList(current.id);
  update();
}

// -- asking -----------------------------------------------------------------------------------------------------------

function body() {
  // Without the answer to come, and without questions whose answer has no text: templates demand turns that alternate.
  const turns = current.messages.slice(0, -1).filter((one, index, all) => toText(one) !== "" && all[index + 1]?.content !== "");
  const history = turns.map((one) => ({ role: one.role, content: toText(one) }));
  const system = $("system").value.trim();
  const wanted = { model: $("model").value, stream: true, stream_options: { include_usage: true } };
  wanted.messages = system === "" ? history : [{ role: "system", content: system }, ...history];
  for (const name of NUMBERS) {
    if ($(name).value !== "") wanted[name] = Number($(name).value);
  }
  return JSON.stringify(wanted);
}

/** Returns a number that no message of any conversation has. */
const nextId = () => (lastId += 1);

async function answer() {
  const model = $("model").value;
  const message = { role: "assistant", content: "", thought: "", id: nextId(), model, facts: {} };
  const turn = (running = newTurn(message));
  current.messages.push(message);
  Object.assign(current, { model, at: Date.now() });
  say("");
  redraw();
  store();
  forgetRefusal();
  showEnd();
  announce("Waiting for the answer");
  await follow(turn, body(), () => followEnd(draw));
  // Another conversation may have been opened meanwhile.
  if (running !== turn) return;
  running = null;
  current.at = Date.now();
  announce(message.error ? "" : message.note ?? "The answer is complete");
  followEnd(redraw);
  store();
}

function stop() {
  running?.stopper.abort();
  $("prompt").focus();
}

function ask(content, files) {
  current.messages.push({ role: "user", content, id: nextId(), ...(files?.length > 0 ? { files } : {}) });
  answer();
}

function send(event) {
  event?.preventDefault();
  const text = $("prompt").value.trim();
  if (running !== null || (text === "" && attached.length === 0) || !isReady || !areSettingsValid()) return;
  const files = attached;
  $("prompt").value = "";
  attach([]);
  fit();
  ask(text, files);
}

/** Sends a message again with another text; what followed it is gone. Returns whether it could. */
function resend(message, content) {
  if (running !== null || !isReady || !areSettingsValid()) return false;
  current.messages.splice(current.messages.indexOf(message));
  $("prompt").focus();
  ask(content, message.files);
  return true;
}

function regenerate() {
  if (running !== null || !areSettingsValid()) return;
  current.messages.pop();
  $("prompt").focus();
  answer();
}

function areSettingsValid() {
  if ($("settings").checkValidity()) return true;
  openSettings(true);
  $("settings").reportValidity();
  return false;
}

// -- conversations ----------------------------------------------------------------------------------------------------

function show(conversation) {
  if (running !== null) {
    const { message, stopper } = running;
    stopper.abort();
    running = null;
    message.note = "Stopped.";
    store();
  }
  current = conversation;
  if (current.messages.length === 0) sessionStorage.removeItem(CURRENT);
  else sessionStorage.setItem(CURRENT, current.id);
  choose(current.model);
  say("");
  redraw();
  showEnd();
  offerEnd();
}

function begin() {
  show(newConversation());
  announce("A new conversation");
  $("prompt").focus();
}

const listActions = {
  open(id) {
    const found = id === current.id ? null : load(id);
    if (found !== null) show(found);
    $("prompt").focus();
  },
  rename(id, title) {
    if (id === current.id) current.title = title;
    const found = load(id);
    if (found !== null) save({ ...found, title });
    drawList(current.id);
  },
  remove(ids) {
    if (ids.includes(current.id)) show(newConversation());
    for (const id of ids) remove(id);
    redraw();
  },
};

// -- files ------------------------------------------------------------------------------------------------------------

function attach(files) {
  attached = files;
  $("files").replaceChildren(...files.map((file) => chip(file, () => {
    attach(attached.filter((one) => one !== file));
    $("prompt").focus();
  })));
  $("files").hidden = files.length === 0;
  update();
}

async function add(files) {
  if (files.length === 0) return;
  try {
    attach(await withMore(attached, files));
    say("");
    announce(attached.length === 1 ? "One file is attached" : `${attached.length} files are attached`);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    say(error.message);
  }
  $("prompt").focus();
}

function listenForFiles() {
  $("attach").addEventListener("click", () => $("pick").click());
  $("pick").addEventListener("change", () => {
    add([...$("pick").files]);
    $("pick").value = "";
  });
  $("prompt").addEventListener("paste", (event) => {
    const { files } = event.clipboardData;
    if (files.length === 0) return;
    event.preventDefault();
    add([...files]);
  });
  const isOver = (event) => event.dataTransfer.types.includes("Files");
  $("chat").addEventListener("dragover", (event) => isOver(event) && event.preventDefault());
  $("chat").addEventListener("drop", (event) => {
    if (!isOver(event)) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
}

// -- controls ---------------------------------------------------------------------------------------------------------

function openSettings(isOpen) {
  $("settings").hidden = !isOpen;
  $("toggle").ariaExpanded = String(isOpen);
}

function fit() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + area.offsetHeight - area.clientHeight, TALLEST)}px`;
}

function editLast() {
  [...document.querySelectorAll(".message.user .edit")].at(-1)?.click();
}

function listen() {
  $("composer").addEventListener("submit", send);
  $("stop").addEventListener("click", stop);
  $("new").addEventListener("click", begin);
  $("toggle").addEventListener("click", () => openSettings($("settings").hidden));
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("settings").addEventListener("change", storeSettings);
  $("end").addEventListener("click", showEnd);
  $("scroll").addEventListener("scroll", offerEnd, { passive: true });
  window.addEventListener("pagehide", () => running !== null && store());
  $("model").addEventListener("change", () => {
    greet();
    storeSettings();
  });
  $("prompt").addEventListener("input", () => {
    fit();
    update();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "ArrowUp" && $("prompt").value === "" && running === null) {
      event.preventDefault();
      editLast();
    }
  });
  $("chat").addEventListener("keydown", (event) => {
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
  const settings = loadSettings();
  for (const name of ["system", ...NUMBERS]) $(name).value = settings[name] ?? "";
  current = load(sessionStorage.getItem(CURRENT) ?? "") ?? current;
  setText($("bound"), `Kept in this browser alone, at most ${MOST}: then the oldest makes room. The server keeps none.`);
  listen();
  listenForFiles();
  startList(listActions, () => drawList(current.id));
  onChange((id) => {
    if (id === current.id && running === null) show(load(id) ?? newConversation());
    else drawList(current.id);
  });
  redraw();
  loadModels(current.model || settings.model, () => {
    isReady = true;
    update();
  });
  onView("talk", (rest) => {
    if (rest === null) return;
    fit();
    showEnd();
    offerEnd();
  });
}
