// The list of conversations.

import { $, announce, icon, keep, make, setText } from "./common.js";
import { listed } from "./kept.js";

const FEW = 8;
const narrow = matchMedia("(max-width: 60rem)");
let actions = {};

// -- the list ---------------------------------------------------------------------------------------------------------

function iconButton(name, className, work) {
  const made = make("button", { type: "button", className: `icon ${className}` }, icon(name));
  made.addEventListener("click", work);
  return made;
}

function createItem({ id }) {
  const open = make("button", { type: "button", className: "open" });
  const item = make("li", {}, open);
  open.addEventListener("click", () => {
    actions.open(id);
    if (narrow.matches) openList(false);
  });
  item.append(iconButton("rename", "rename", () => rename(item, id)), iconButton("delete", "delete", () => forget(id, item.name)));
  return item;
}

function updateItem(item, { name }, isCurrent) {
  const [open, ...others] = item.querySelectorAll("button");
  item.name = name;
  setText(open, name);
  open.title = name;
  if (isCurrent) open.setAttribute("aria-current", "true");
  else open.removeAttribute("aria-current");
  others.forEach((one, index) => (one.ariaLabel = `${["Rename", "Delete"][index]} “${name}”`));
}

export function drawList(current) {
  const all = listed();
  const wanted = $("find").value.trim().toLowerCase();
  const shown = all.filter((one) => one.name.toLowerCase().includes(wanted));
  $("find").hidden = all.length < FEW && wanted === "";
  $("forget").hidden = all.length === 0;
  $("nothing").hidden = shown.length > 0;
  setText($("nothing"), all.length > 0 ? "None of them is called so." : "No conversation yet.");
  keep($("conversations"), shown, (one) => one.id, createItem, (item, one) => updateItem(item, one, one.id === current));
}

// -- rename and delete ------------------------------------------------------------------------------------------------

function rename(item, id) {
  if (item.querySelector("input") !== null) return;
  const field = make("input", { value: item.name, maxLength: 80, ariaLabel: "New name" });
  const buttons = [...item.children];
  let isOver = false;
  const end = (isMeant) => {
    if (isOver) return;
    isOver = true;
    const isFocused = item.contains(document.activeElement);
    field.remove();
    for (const one of buttons) one.hidden = false;
    if (isFocused) buttons[1].focus();
    if (isMeant && field.value.trim() !== item.name) actions.rename(id, field.value.trim());
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" || event.key === "Escape") {
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter");
    }
  });
  field.addEventListener("blur", () => end(true));
  for (const one of buttons) one.hidden = true;
  item.append(field);
  field.select();
  field.focus();
}

/** Asks before something is deleted; returns whether it may be. */
function confirm(title, action) {
  const dialog = $("confirm");
  setText($("confirm-title"), title);
  setText($("confirm-yes"), action);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => (dialog.onclose = () => resolve(dialog.returnValue === "yes")));
}

async function forget(id, name) {
  if (!(await confirm(`Delete “${name}”?`, "Delete"))) return;
  actions.remove([id]);
  announce(`Deleted “${name}”`);
  $("list").focus();
}

async function forgetAll() {
  const all = listed();
  if (!(await confirm(all.length === 1 ? "Delete the conversation?" : `Delete all ${all.length} conversations?`, "Delete all"))) return;
  actions.remove(all.map((one) => one.id));
  announce("Deleted all conversations");
  $("list").focus();
}

// -- open and close ---------------------------------------------------------------------------------------------------

/** Shows or hides the list; where it lies over the conversation, that cannot be used meanwhile. */
export function openList(isOpen) {
  $("list").hidden = !isOpen;
  $("list-toggle").ariaExpanded = String(isOpen);
  const isOver = isOpen && narrow.matches;
  $("shade").hidden = !isOver;
  $("chat").inert = isOver;
  if (isOver) ($("list").querySelector("[aria-current]") ?? $("list")).focus();
}

/** Makes the list work: `open`, `rename` and `remove` say what its buttons do, `redraw` draws it again. */
export function startList(given, redraw) {
  actions = given;
  $("list-toggle").addEventListener("click", () => openList($("list").hidden));
  $("shade").addEventListener("click", () => openList(false));
  $("find").addEventListener("input", redraw);
  $("forget").addEventListener("click", forgetAll);
  $("list").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !narrow.matches) return;
    openList(false);
    $("list-toggle").focus();
  });
  narrow.addEventListener("change", () => openList(!narrow.matches));
  openList(!narrow.matches);
}
