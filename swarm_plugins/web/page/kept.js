// Conversations, kept in this browser: each under a key of its own, so that two tabs do not overwrite each other's.

const PREFIX = "swarm.talk.";
const MOST_CHARS = 4_000_000; // browsers keep 5 million for a page
export const MOST = 200;

const disk = (() => {
  try {
    return localStorage;
  } catch {
    return null; // forbidden by the user: nothing is kept
  }
})();
const index = new Map();

function isMessage(one) {
  return (one?.role === "user" || one?.role === "assistant") && typeof one.content === "string" && Number.isInteger(one.id);
}

/** Returns a kept conversation, or null if what is there is none. */
function parsed(text) {
  try {
    const found = JSON.parse(text);
    const isWhole = Array.isArray(found.messages) && found.messages.length > 0 && found.messages.every(isMessage);
    return isWhole && typeof found.title === "string" && Number.isFinite(found.at) ? found : null;
  } catch {
    return null;
  }
}

/** Returns how a conversation is called: as the user has said, or by how it begins. */
function nameOf({ title, messages }) {
  const [first] = messages;
  const begun = first.content.trim().split("\n")[0] || first.files?.[0]?.name || "Conversation";
  return title || (begun.length > 60 ? `${begun.slice(0, 59).trimEnd()}…` : begun);
}

function note(id, text) {
  const found = text === null ? null : parsed(text);
  if (found === null) index.delete(id);
  else index.set(id, { id, name: nameOf(found), at: found.at, chars: text.length });
}

/** Returns what the list shows, the last used conversation first. */
export function listed() {
  return [...index.values()].sort((one, other) => other.at - one.at);
}

export function newConversation() {
  // Not randomUUID: pages over plain HTTP from another machine have none.
  return { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", at: 0, model: "", messages: [] };
}

/** Returns the conversation of an id, or null. */
export function load(id) {
  const found = parsed(disk?.getItem(PREFIX + id) ?? "");
  return found === null ? null : { ...found, id };
}

/** Keeps a conversation; returns whether it is kept, and the names of old ones that had to make room. */
export function save(conversation) {
  const { id, ...rest } = conversation;
  const text = JSON.stringify(rest);
  if (disk === null || text.length > MOST_CHARS) return { isKept: false, gone: [] };
  const removed = [];
  const makeRoom = () => {
    const oldest = listed().filter((one) => one.id !== id).at(-1);
    if (oldest === undefined) return false;
    removed.push([oldest, disk.getItem(PREFIX + oldest.id)]);
    remove(oldest.id);
    return true;
  };
  note(id, text);
  const chars = () => [...index.values()].reduce((sum, one) => sum + one.chars, 0);
  while (index.size > MOST || chars() > MOST_CHARS) makeRoom();
  for (;;) {
    try {
      disk.setItem(PREFIX + id, text);
      return { isKept: true, gone: removed.map(([one]) => one.name) };
    } catch {
      // Other pages of this address share the space.
      if (makeRoom()) continue;
      for (const [one, old] of removed) put(one.id, old);
      note(id, disk.getItem(PREFIX + id));
      return { isKept: false, gone: [] };
    }
  }
}

function put(id, text) {
  disk.setItem(PREFIX + id, text);
  note(id, text);
}

export function remove(id) {
  index.delete(id);
  disk?.removeItem(PREFIX + id);
}

/** Calls a function with the id of each conversation that another tab has changed or deleted. */
export function onChange(callback) {
  window.addEventListener("storage", ({ storageArea, key, newValue }) => {
    if (storageArea !== disk || !key?.startsWith(PREFIX)) return;
    const id = key.slice(PREFIX.length);
    note(id, newValue);
    callback(id);
  });
}

// -- what is kept beside them -----------------------------------------------------------------------------------------

const SETTINGS = "swarm.settings";

export function saveSettings(settings) {
  try {
    disk?.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // No room: they hold until the page is loaded again.
  }
}

export function loadSettings() {
  try {
    return JSON.parse(disk?.getItem(SETTINGS) ?? "{}") ?? {};
  } catch {
    return {};
  }
}

for (const key of Object.keys(disk ?? {})) {
  if (key.startsWith(PREFIX)) note(key.slice(PREFIX.length), disk.getItem(key));
}
