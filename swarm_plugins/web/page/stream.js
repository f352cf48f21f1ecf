// One answer of /v1/chat/completions, as it arrives.

import { Failure, failureOf, request } from "./common.js";

const LONGEST_EVENT = 1 << 20;
const LOST = "The answer broke off: the connection to the server is lost.";

/** An answer on its way: what the server has said so far, and the switch that ends it. */
export function newTurn(message) {
  return { message, facts: message.facts, stopper: new AbortController(), started: performance.now(), parts: 0 };
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

async function receive(turn, body, redraw) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body,
    signal: turn.stopper.signal,
  });
  if (!response.ok) throw await failureOf(response);
  let frame = 0;
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

/** Asks, and writes what comes into the turn's message; how it ended, too. */
export async function follow(turn, body, redraw) {
  const { message, stopper } = turn;
  try {
    await receive(turn, body, redraw);
    if (message.content === "") message.note ??= "The answer has no text.";
  } catch (error) {
    if (stopper.signal.aborted) message.note = "Stopped.";
    else message.error = sentence(error);
  } finally {
    // What cannot be read is not generated further.
    stopper.abort();
  }
}

/** Returns a message as it is if the page goes away now: an answer on its way ends with it. */
export const asLeft = (message) => ({ ...message, error: LOST });
