// The choice of a model and an adapter, from /v1/models.

import { $, Failure, failureOf, forgetRefusal, make, request, setText } from "./common.js";

const AGAIN_MS = 3000;

/** Fills the list of models; until the server has one, asks again. Calls `onReady` when there is a choice. */
export async function loadModels(wanted, onReady) {
  const picker = $("model");
  let names;
  try {
    const response = await request("v1/models");
    if (!response.ok) throw await failureOf(response);
    names = (await response.json()).data.map((one) => one.id);
    if (names.length === 0) throw new Failure("This server offers no model.");
  } catch (error) {
    const sentence = error instanceof Failure ? error.message : "The server’s list of models cannot be read.";
    picker.replaceChildren(make("option", {}, "No model"));
    setText($("welcome-title"), sentence);
    if (error.status === 401) offerKey(() => loadModels(wanted, onReady));
    else setTimeout(() => loadModels(wanted, onReady), AGAIN_MS);
    return;
  }
  picker.replaceChildren(...names.map((id) => make("option", { value: id, title: id }, shortModel(id))));
  picker.disabled = false;
  choose(names.includes(wanted) ? wanted : names[0]);
  $("welcome").querySelector(".give-key")?.remove();
  onReady();
}

function offerKey(retry) {
  const button = make("button", { type: "button", className: "main give-key" }, "Enter the key");
  button.addEventListener("click", () => {
    button.remove();
    forgetRefusal();
    retry();
  });
  if ($("welcome").querySelector(".give-key") === null) $("welcome").append(button);
}

/** Chooses a model, if the server has it. */
export function choose(name) {
  const picker = $("model");
  if (![...picker.options].some((one) => one.value === name) || picker.disabled) return;
  picker.value = name;
  greet();
}

/** Returns the last part of a model's name, or its adapter. */
export function shortModel(name) {
  const [base, ...adapter] = name.split(":");
  return adapter.length > 0 ? `with ${adapter.join(":")}` : base.split("/").pop();
}

export function greet() {
  setText($("welcome-title"), `Talk with ${shortModel($("model").value.split(":")[0])}`);
}
