// Runs before the chat page: answers come from the test, `fake.say(..)`, piece by piece, unless `fake.isOff`.
window.fake = {bodies: [], errors: [], isOff: sessionStorage.getItem("fake.isOff") === "1"};
const realMedia = window.matchMedia;  // a machine with a mouse: on a phone Enter is a new line
window.matchMedia = query => query === "(hover: hover)" ? {matches: true} : realMedia.call(window, query);
const realFetch = window.fetch;
window.fetch = async (url, options) => {
  if (fake.isOff || !String(url).endsWith("v1/chat/completions")) return realFetch(url, options);
  fake.bodies.push(JSON.parse(options.body));
  const failure = fake.errors.shift();
  if (failure) return new Response(JSON.stringify({error: {message: failure[1]}}), {status: failure[0]});
  let stream = null, tokens = 0;
  const body = new ReadableStream({start(opened) { stream = opened; }});
  const send = text => stream.enqueue(new TextEncoder().encode(text));
  fake.chunk = (delta, reason = null) => send(`data: ${JSON.stringify({choices: [{delta, finish_reason: reason}],
    usage: {completion_tokens: ++tokens, total_tokens: 10 + tokens}})}\n\n`);
  fake.say = content => fake.chunk({content});
  fake.end = (reason = "stop") => { fake.chunk({}, reason); send("data: [DONE]\n\n"); stream.close(); };
  fake.drop = () => stream.error(new TypeError("network error"));
  options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
  return new Response(body, {headers: {"Content-Type": "text/event-stream"}});
};
