// Draws the messages of a conversation.

import { $, copyButton, drawIfChanged, duration, keep, make, setText, shortPeer } from "./common.js";
import { chip, toText } from "./files.js";
import { drawMarkdown } from "./markdown.js";
import { shortModel } from "./models.js";

const NEAR_THE_END = 80;

function factsOf({ rate, tokens, cached, servers = [], timeToFirstToken }, model) {
  const said = model === "" ? [] : [model];
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

function button(text, className, work, id = "") {
  const made = make("button", { type: "button", className, id }, text);
  made.addEventListener("click", work);
  return made;
}

// -- questions --------------------------------------------------------------------------------------------------------

function createQuestion(message) {
  const text = make("div", { className: "text" });
  const files = make("div", { className: "files" }, ...(message.files ?? []).map((file) => chip(file)));
  const foot = make("div", { className: "foot", ariaLive: "off" });
  const article = make("article", { className: "message user" }, make("h2", { className: "away" }, "You"), files, text, foot);
  article.parts = { text, foot };
  setText(text, message.content);
  return article;
}

function updateQuestion(article, message, { isBusy, onEdit }) {
  drawIfChanged(article.parts.foot, isBusy, (foot) => {
    const actions = isBusy ? [] : [
      copyButton(() => toText(message), "the message"),
      button("Edit", "quiet edit", () => edit(article, message, onEdit)),
    ];
    foot.replaceChildren(make("div", { className: "actions" }, ...actions));
  });
}

/** Opens a message to be changed and sent again, which replaces what follows it. */
function edit(article, message, onEdit) {
  const { text, foot } = article.parts;
  const field = make("textarea", { value: message.content, rows: 3, ariaLabel: "Edit the message" });
  const close = () => {
    form.remove();
    article.classList.remove("editing");
    text.hidden = foot.hidden = false;
    foot.querySelector(".edit")?.focus();
  };
  const send = (event) => {
    event?.preventDefault();
    const content = field.value.trim();
    if (content === "" && !message.files?.length) return;
    if (onEdit(message, content)) close();
  };
  const actions = make("div", { className: "actions" }, make("span", { className: "hint" }, "Sending replaces what follows."),
    button("Cancel", "quiet", close), make("button", { type: "submit", className: "main" }, "Send"));
  const form = make("form", { className: "editor", ariaLabel: "Edit the message" }, field, actions);
  form.addEventListener("submit", send);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape") close();
  });
  article.classList.add("editing");
  text.hidden = foot.hidden = true;
  article.append(form);
  field.rows = Math.min(12, Math.max(2, field.value.split("\n").length));
  field.focus();
}

// -- answers ----------------------------------------------------------------------------------------------------------

function createAnswer() {
  const [text, under] = [make("div", { className: "text" }), make("div")];
  const thought = make("details", { className: "thought", hidden: true }, make("summary"), make("p"));
  // A screen reader reads the answer, not each figure under it.
  const foot = make("div", { className: "foot", ariaLive: "off" });
  const article = make("article", { className: "message assistant" }, make("h2", { className: "away" }, "Answer"), thought, text, under, foot);
  article.parts = { thought, text, under, foot };
  return article;
}

function drawRest(article, message, { isLast, isBusy, model, onRetry }) {
  const { thought, under, foot } = article.parts;
  const said = [];
  const isThinking = isBusy && message.content === "";
  thought.hidden = !message.thought;
  setText(thought.firstChild, isThinking ? "Thinking" : "Thoughts");
  if (isThinking && !message.thought) said.push(make("p", { className: "waiting" }, "Waiting for the first word"));
  if (message.note) said.push(make("p", { className: "note" }, message.note));
  if (message.error) said.push(make("p", { className: "notice bad", role: "alert" }, message.error));
  under.replaceChildren(...said);
  const actions = [];
  if (message.content !== "") actions.push(copyButton(() => message.content, "the answer"));
  if (isLast) {
    actions.push(button(message.error ? "Try again" : "Regenerate", message.error ? "quiet framed" : "quiet", onRetry, "again"));
  }
  foot.replaceChildren(factsOf(message.facts ?? {}, model), ...(isBusy ? [] : [make("div", { className: "actions" }, ...actions)]));
}

function updateAnswer(article, message, how) {
  drawIfChanged(article.parts.text, message.content, drawMarkdown);
  article.classList.toggle("busy", how.isBusy);
  const { note, error, facts, content, thought } = message;
  setText(article.parts.thought.lastChild, thought ?? "");
  const seen = [how.isLast, how.isBusy, how.model, content === "", !thought, note, error, facts];
  drawIfChanged(article, seen, () => drawRest(article, message, how));
}

// -- all of them ------------------------------------------------------------------------------------------------------

/** Draws a conversation; `running` is the answer on its way, or null. */
export function drawMessages({ id, messages }, running, { onEdit, onRetry }) {
  const models = new Set(messages.map((one) => one.model).filter(Boolean));
  const create = (message) => (message.role === "user" ? createQuestion(message) : createAnswer());
  keep($("messages"), messages, (message) => `${id}/${message.id}`, create, (article, message) => {
    const isBusy = message === running;
    if (message.role === "user") updateQuestion(article, message, { isBusy: running !== null, onEdit });
    else {
      // Who has answered is said where several have.
      const model = models.size > 1 && message.model ? shortModel(message.model) : "";
      updateAnswer(article, message, { isLast: message === messages.at(-1), isBusy, model, onRetry });
    }
  });
  $("welcome").hidden = messages.length > 0;
}

// -- the end ----------------------------------------------------------------------------------------------------------

function isAtEnd() {
  const area = $("scroll");
  return area.scrollHeight - area.scrollTop - area.clientHeight < NEAR_THE_END;
}

export function showEnd() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

/** Draws, and stays at the end for who is there. */
export function followEnd(work) {
  const wasAtEnd = isAtEnd();
  work();
  if (wasAtEnd) showEnd();
  offerEnd();
}

/** Shows the button that leads to the end to who is not there. */
export function offerEnd() {
  $("end").hidden = isAtEnd();
}
