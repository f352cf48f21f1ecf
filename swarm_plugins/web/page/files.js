// Files of text that go along with a message.

import { Failure, icon, make, short } from "./common.js";

const MOST_FILES = 8;
const MOST_BYTES = 128 << 10;
const MOST_BYTES_TOGETHER = 256 << 10;

const kilobytes = (bytes) => `${short(bytes)}B`.replace(/(\d)B$/, "$1 B");

async function read(file) {
  if (file.size > MOST_BYTES) {
    throw new Failure(`“${file.name}” has ${kilobytes(file.size)}: a file may have ${kilobytes(MOST_BYTES)}`);
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name.slice(-100), text, bytes: file.size };
  } catch {
    // Said below.
  }
  throw new Failure(`“${file.name}” is not text in UTF-8, and cannot be attached`);
}

/** Returns attached files with more of them; the same files again replace the old ones. */
export async function withMore(attached, files) {
  const fresh = await Promise.all([...files].slice(0, MOST_FILES + 1).map(read));
  const all = [...attached.filter((old) => fresh.every((one) => one.name !== old.name)), ...fresh];
  const bytes = all.reduce((sum, one) => sum + one.bytes, 0);
  if (all.length > MOST_FILES) throw new Failure(`A message may have ${MOST_FILES} files`);
  if (bytes > MOST_BYTES_TOGETHER) {
    throw new Failure(`These files have ${kilobytes(bytes)} together: a message may have ${kilobytes(MOST_BYTES_TOGETHER)}`);
  }
  return all;
}

/** Returns a message as the model reads it: each file between fences longer than any in it, then the words. */
export function toText({ content, files = [] }) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name.replace(/[\p{Cc}`]/gu, " ")}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, content].filter((part) => part !== "").join("\n\n");
}

/** Makes the chip of a file: it unfolds to its text, or can be taken away. */
export function chip(file, onRemove = null) {
  const label = [make("span", { className: "file-name" }, file.name), make("small", {}, kilobytes(file.bytes))];
  if (onRemove === null) {
    return make("details", { className: "chip" }, make("summary", {}, ...label), make("pre", { tabIndex: 0, role: "group", ariaLabel: file.name }, file.text));
  }
  const button = make("button", { type: "button", className: "icon", ariaLabel: `Remove ${file.name}` }, icon("close"));
  button.addEventListener("click", onRemove);
  return make("span", { className: "chip" }, ...label, button);
}
