// Markdown as elements, behind three walls: the parser takes no HTML, what it writes is sanitized, and the page's policy
// runs no script but its own and loads nothing from elsewhere.

import DOMPurify from "./vendor/dompurify-3.5.0.mjs";
import MarkdownIt from "./vendor/markdown-it-15.0.3.mjs";
import { copyButton, make } from "./common.js";

const LONGEST = 200_000;
const DEEPEST = 40;
const SAFE_LINK = /^(?:https?:\/\/|mailto:)/i;
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s", "strong", "table", "tbody",
    "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "data-language", "href", "start"],
  ADD_URI_SAFE_ATTR: ["align", "data-language", "start"],
  ALLOWED_URI_REGEXP: SAFE_LINK,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

// -- the parser -------------------------------------------------------------------------------------------------------

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: DEEPEST });
const { rules } = markdown.renderer;
const escape = markdown.utils.escapeHtml;

// While "- a" arrives after a line, its first letter would make that line a heading.
markdown.disable("lheading");
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
markdown.validateLink = (url) => SAFE_LINK.test(url);

// A picture would be loaded from another host: its address is shown instead.
rules.image = (tokens, index) => {
  const { content, attrs } = tokens[index];
  const source = Object.fromEntries(attrs).src;
  return `<a href="${escape(source)}">${escape(content || source)}</a>`;
};

rules.fence = (tokens, index) => {
  const { info, content } = tokens[index];
  return `<pre data-language="${escape(info.trim().split(/\s/)[0].slice(0, 30))}"><code>${escape(content)}</code></pre>`;
};

// Below the heading of the message.
rules.heading_open = rules.heading_close = (tokens, index) => {
  const { tag, nesting } = tokens[index];
  return `<${nesting < 0 ? "/" : ""}h${Math.min(6, Number(tag[1]) + 2)}>`;
};

// The page's policy takes no style.
rules.th_open = rules.td_open = (tokens, index) => {
  const { tag, attrs } = tokens[index];
  const side = attrs?.find(([name]) => name === "style")?.[1].split(":")[1];
  return side === undefined ? `<${tag}>` : `<${tag} align="${escape(side)}">`;
};

/** Returns the HTML of each block of a text, not yet sanitized; null for what is too long or too deep to be drawn. */
function blocksOf(text) {
  if (text.length > LONGEST) return null;
  const env = {};
  const tokens = markdown.parse(text, env);
  // The parser leaves out what is deeper.
  if (tokens.some((token) => token.level >= DEEPEST - 1)) return null;
  const blocks = [];
  let begun = 0;
  tokens.forEach((token, index) => {
    if (token.level > 0 || token.nesting > 0) return;
    blocks.push(markdown.renderer.render(tokens.slice(begun, index + 1), markdown.options, env));
    begun = index + 1;
  });
  return blocks;
}

// -- elements ---------------------------------------------------------------------------------------------------------

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A" || !node.hasAttribute("href")) return;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  // A link may say another address than its own.
  node.title = node.href;
});

/** Returns elements for HTML, with nothing in them that runs, loads or styles. */
export const clean = (html) => DOMPurify.sanitize(html, ALLOWED);

function finish(fragment) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const language = pre.dataset.language ?? "";
    const code = make("pre", { tabIndex: 0, role: "group", ariaLabel: "Code" }, ...pre.childNodes);
    const copy = copyButton(() => code.textContent.replace(/\n$/, ""), "the code");
    pre.replaceWith(make("figure", { className: "code" }, make("figcaption", {}, make("span", {}, language), copy), code));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = make("div", { className: "table", tabIndex: 0, role: "group", ariaLabel: "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

/** Makes a node like another one and keeps what is alike in it, so that nothing jumps and selected text stays selected. */
function patch(old, fresh) {
  if (old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return fresh;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.data.length));
    else old.data = fresh.data;
    return old;
  }
  // A button of ours says itself what it has done.
  if (old.nodeName === "BUTTON") return old;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) old.setAttribute(name, value);
  const [had, has] = [[...old.childNodes], [...fresh.childNodes]];
  has.forEach((child, index) => (index < had.length ? patch(had[index], child) : old.append(child)));
  had.slice(has.length).forEach((child) => child.remove());
  return old;
}

/** Draws a text; drawn again with more at its end, only the blocks that differ change. */
export function drawMarkdown(element, text) {
  const blocks = blocksOf(text);
  if (blocks === null) {
    element.replaceChildren(make("p", { className: "plain" }, text));
    return;
  }
  blocks.forEach((html, index) => {
    const old = element.children[index];
    if (old?.html === html) return;
    const block = make("div", { className: "block" }, finish(clean(html)));
    if (old === undefined) element.append(block);
    (old === undefined ? block : patch(old, block)).html = html;
  });
  [...element.children].slice(blocks.length).forEach((child) => child.remove());
}
