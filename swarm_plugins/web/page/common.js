// What both views share: elements, requests with a key, copying, and which view is shown.

export const $ = (id) => document.getElementById(id);

/** Makes an element; strings become text, never HTML. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Makes an element of a drawing. */
export function drawn(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Makes an icon of icons.svg, in the color of the text. */
export function icon(name) {
  return drawn("svg", { class: "glyph", "aria-hidden": "true" }, drawn("use", { href: `page/icons.svg#${name}` }));
}

/** Formats seconds since 1970 as a local time. */
export const time = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

/** Returns a number with its noun. */
export const counted = (number, noun) => (number === 1 ? `1 ${noun}` : `${number} ${noun}s`);

/** Changes a text only if it differs, so that nothing is drawn, selected or read aloud anew. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Makes the children of an element those of a list, keeping elements whose key stays. */
export function keep(parent, items, keyOf, create, update = () => {}) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const key = keyOf(item);
    let child = old.get(key);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = key;
    }
    old.delete(key);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, item);
  });
  for (const child of old.values()) child.remove();
}

/** Draws what has changed since the last time, and nothing else. */
export function drawIfChanged(element, seen, draw) {
  const signature = JSON.stringify(seen);
  if (element.signature === signature) return;
  element.signature = signature;
  draw(element, seen);
}

export function announce(text) {
  setText($("announcer"), text);
}

export const shortPeer = (peer) => (peer.length > 8 ? `…${peer.slice(-8)}` : peer);

/** Three digits: 46.6 k. */
export function short(number) {
  for (const unit of ["", " k", " M"]) {
    if (number < 999.5) return `${Number(number.toPrecision(3))}${unit}`;
    number /= 1000;
  }
  return `${Number(number.toPrecision(3))} G`;
}

/** Two units: 84 ms, 1.5 s. */
export function duration(seconds) {
  return seconds < 1 ? `${short(seconds * 1000)} ms` : `${short(seconds)} s`;
}

// -- requests ---------------------------------------------------------------------------------------------------------

/** A request that failed, with one sentence that says why. */
export class Failure extends Error {
  constructor(text, status = 0) {
    const begun = text.replace(/^[a-z]+(?= )/, (word) => word[0].toUpperCase() + word.slice(1));
    super(/[.?!]$/.test(begun) ? begun : `${begun}.`);
    this.status = status;
  }
}

const KEY = "swarm.key";
const LONGEST_MS = 45_000; // a survey of the swarm may take 30 s
let asking = null;
let isDeclined = false;

function askForKey(isWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-wrong").hidden = !isWrong;
    $("key").value = "";
    let isGiven = false;
    $("key-form").onsubmit = () => {
      isGiven = true;
      sessionStorage.setItem(KEY, $("key").value.trim());
    };
    $("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      asking = null;
      isDeclined = !isGiven;
      resolve(isGiven);
    };
    dialog.showModal();
  });
  return asking;
}

/** Asks again for a key that was not given. */
export function forgetRefusal() {
  isDeclined = false;
}

/** Returns the key of this tab, unless it is one that no request can carry. */
function storedKey() {
  const key = sessionStorage.getItem(KEY);
  return /^[!-~]+$/.test(key ?? "") ? key : null;
}

/** Sends a request with the key of this tab; asks for one if the server wants it. Without a signal, it has a deadline. */
export async function request(path, options = {}) {
  for (;;) {
    const key = storedKey();
    const headers = { ...options.headers, ...(key === null ? {} : { Authorization: `Bearer ${key}` }) };
    let response;
    try {
      response = await fetch(path, { signal: AbortSignal.timeout(LONGEST_MS), ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The server of this page does not answer. Is it still running?");
    }
    if (response.status !== 401) return response;
    if (storedKey() !== key) continue;
    if (isDeclined || !(await askForKey(key !== null))) throw new Failure("This server asks for an API key.", 401);
  }
}

/** Returns why a response is not what was asked for, in the words of the server if it has any. */
export async function failureOf(response) {
  let said = "";
  try {
    const { error } = await response.json();
    said = typeof error === "string" ? error : error.message;
  } catch {
    // Not JSON, or without a message: the status is all there is.
  }
  return new Failure(said || `The server answered with status ${response.status}.`, response.status);
}

// -- copying ----------------------------------------------------------------------------------------------------------

/** Returns whether a text has been copied. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages that come over plain HTTP from another machine have no clipboard of their own.
    const area = make("textarea", { value: text, className: "away", ariaHidden: "true" });
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return isCopied;
  }
}

/** Makes a button that copies a text and says so. */
export function copyButton(text, what) {
  const button = make("button", { type: "button", className: "quiet copy", ariaLabel: `Copy ${what}` }, "Copy");
  button.addEventListener("click", async () => {
    const isCopied = await copy(typeof text === "function" ? text() : text);
    button.textContent = isCopied ? "Copied" : "Not copied";
    announce(isCopied ? `Copied ${what}` : `The browser does not copy ${what}: select it by hand`);
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
}

/** Makes a line of a terminal that can be copied. */
export function commandLine(command, what) {
  return make("div", { className: "command" }, make("code", {}, command), copyButton(command, what));
}

// -- views ------------------------------------------------------------------------------------------------------------

const EVERY_MS = 2000;
const watchers = [];
const TITLES = { talk: "Talk · swarm", swarm: "Swarm", training: "Training · swarm" };
const { chat, training } = document.body.dataset;
const views = [...(chat === "on" ? ["talk"] : []), "swarm", ...(training === "on" ? ["training"] : [])];
let shown = "";
let rest = "";

/** Calls a function whenever a view is shown or hidden: with the rest of the address, or null. */
export function onView(name, callback) {
  watchers.push([name, callback]);
  if (shown !== "") callback(shown === name ? rest : null);
}

/** Asks every two seconds while a view is shown and the page is visible; returns a function that asks at once. */
export function pollWhileShown(name, ask) {
  let isShown = false;
  let isAsking = false;
  let timer = 0;
  async function poll() {
    clearTimeout(timer);
    if (isAsking) return;
    isAsking = true;
    try {
      await ask();
    } finally {
      isAsking = false;
      clearTimeout(timer);
      if (isShown && !document.hidden) timer = setTimeout(poll, EVERY_MS);
    }
  }
  document.addEventListener("visibilitychange", () => {
    if (isShown && !document.hidden) poll();
  });
  onView(name, (rest) => {
    isShown = rest !== null;
    if (isShown) poll();
  });
  return poll;
}

/** Removes a view that this server does not have. */
export function dropView(name) {
  if (views.length < 2 || !views.includes(name)) return;
  views.splice(views.indexOf(name), 1);
  route();
}

function route() {
  const [wanted, peer = ""] = location.hash.slice(1).split("=");
  const next = views.includes(wanted) ? wanted : views.includes(shown) ? shown : views[0];
  for (const link of document.querySelectorAll("nav a")) {
    const name = link.hash.slice(1);
    link.hidden = views.length < 2 || !views.includes(name);
    if (name === next) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const name of Object.keys(TITLES)) $(`view-${name}`).hidden = name !== next;
  document.body.dataset.view = next;
  document.title = TITLES[next];
  shown = next;
  rest = peer;
  for (const [name, callback] of watchers) callback(name === next ? rest : null);
}

window.addEventListener("hashchange", route);
route();
