// The server: its models, and answers as they come. Addresses are relative, so that the page works behind a prefix.

import { settings } from "./settings.js";

const PAUSE = 1000;  // ms between two looks at a server that is not ready
let attempt = null, wake = () => {};

/** What the server is like now: state "waiting", "ready" or "refused" (by the key), and why. */
export const server = {state: "waiting", message: "", models: []};

const headers = () => ({"Content-Type": "application/json",
  ...(settings.key ? {Authorization: "Bearer " + settings.key} : {})});

async function failure(response) {
  try { return (await response.json()).error.message; } catch { return "the server said " + response.status; }
}

async function whyNot(response) {
  const code = await response.json().then(body => body.error.code, () => "");
  return code === "loading" ? "The model is loading. You can write already: the answer comes when it is there."
    : "The server takes nothing now. This page goes on when it does.";
}

async function look() {
  let response;
  try { response = await fetch("v1/models", {headers: headers(), cache: "no-store"}); }
  catch { return {state: "waiting", message: "The server cannot be reached. This page goes on when it is back."}; }
  if (response.status === 401) return {state: "refused", message: "This server wants an API key."};
  if (response.status === 503) return {state: "waiting", message: await whyNot(response)};
  if (!response.ok) return {state: "waiting", message: await failure(response)};
  try {
    const {data} = await response.json(), models = data.filter(({task}) => (task ?? "generate") === "generate");
    if (data.length && !models.length) return {state: "waiting", message: "No model of this server writes text."};
    return {state: "ready", message: "", models};
  } catch { return {state: "waiting", message: "There is no infinilm at this address."}; }
}

/** Look for the models until they are there; `report` hears each change. Called again, it looks at once. */
export async function connect(report) {
  const own = attempt = {};
  wake();
  for (;;) {
    const found = await look();
    if (attempt !== own) return;
    Object.assign(server, found);
    report();
    if (server.state !== "waiting") return;  // a key that is refused is for its owner to change
    await new Promise(resolve => { wake = resolve; setTimeout(resolve, PAUSE); });
    if (attempt !== own) return;
  }
}

/** Wait until the server is ready; AbortError where the signal comes first. */
async function ready(signal) {
  while (server.state !== "ready") {
    signal.throwIfAborted();
    await new Promise(resolve => setTimeout(resolve, 100));
  }
}

/** The chunks of a chat completion. Throws what the server says of a failure; `reconnect`: it is not ready (any more). */
export async function* chunks(makeBody, signal, reconnect) {
  let response;
  for (let tries = 0; ; tries++) {
    if (tries) {
      server.state = "waiting";
      reconnect();
      await new Promise(resolve => setTimeout(resolve, PAUSE));
    }
    await ready(signal);
    try {
      response = await fetch("v1/chat/completions",
        {method: "POST", headers: headers(), body: JSON.stringify(makeBody()), signal});
    } catch (error) {
      if (signal.aborted) throw error;
      continue;
    }
    if (response.status !== 503 && response.status !== 401) break;
  }
  if (!response.ok) throw new Error(await failure(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
  throw new TypeError("the stream ended early");
}
