// An answer that is being written: chunks of the server into a message that is kept as it grows.

import { sentMessages, takeCalls } from "./calls.js";
import { sampling } from "./settings.js";
import { leave } from "./store.js";
import { chunks } from "./server.js";
import { writing } from "./tabs.js";

const SAVE = 400;  // ms: what a crash can cost at most
const running = new Map();  // by the id of the message

export const answerOf = message => running.get(message?.id);

/** Keep what came of all answers when the page is left. */
export function leaveAll() { if (running.size) leave([...running.values()].map(answer => answer.message)); }

export class Answer {
  /** `model`: what names the model of a conversation, which may be known only later; `changed` hears of every change; `reconnect`: see `chunks`. */
  constructor(conversation, message, {model, changed, reconnect}) {
    Object.assign(this, {conversation, message, model, changed, reconnect});
    this.abort = new AbortController();
    this.timer = 0;
  }

  stop() { this.abort.abort(); }

  keep() {
    clearTimeout(this.timer);
    this.timer = 0;
    return this.conversation.save([this.message]);
  }

  body(isContinued) {
    const {conversation, message} = this, past = [];
    for (let m = conversation.parentOf(message); m; m = conversation.parentOf(m)) past.unshift(m);
    const system = conversation.talk.system ? [{role: "system", content: conversation.talk.system}] : [];
    message.model = this.model(conversation.talk);
    return {
      model: message.model, stream: true,
      stream_options: {include_usage: true, continuous_usage_stats: true},  // in every chunk: an answer may be stopped
      messages: [...system, ...past.flatMap(sentMessages), ...(isContinued ? [{role: "assistant", content: this.before}] : [])],
      ...(isContinued ? {continue_final_message: true, add_generation_prompt: false} : {}),
      ...sampling(),
    };
  }

  async run() {
    const {message} = this;
    this.before = message.content;
    Object.assign(message, {state: "writing", error: "", calls: undefined});
    running.set(message.id, this);
    writing(message.id, true);
    this.keep();
    this.changed(this);
    const sent = performance.now();
    let first = 0, usage = null, end = "lost";
    try {
      for await (const chunk of chunks(() => this.body(!!this.before), this.abort.signal, this.reconnect)) {
        usage = chunk.usage ?? usage;
        const choice = chunk.choices[0];
        if (!choice) continue;
        const {content, reasoning_content: reasoning, tool_calls: calls} = choice.delta;
        if (content || reasoning || calls) first ||= performance.now();
        if (content && !message.content && message.reasoning) message.thought = (performance.now() - first) / 1000;
        message.content += content ?? "";
        message.reasoning += reasoning ?? "";
        if (calls) takeCalls(message, calls);
        if (choice.finish_reason) end = choice.finish_reason === "length" ? "length" : "done";
        this.timer ||= setTimeout(() => this.keep(), SAVE);
        this.changed(this);
      }
    } catch (error) {
      if (error.name === "AbortError") end = "stopped";
      else if (!(error instanceof TypeError)) message.error = error.message;  // a TypeError is what a lost connection is
    }
    message.state = end === "lost" && message.error ? "done" : end;
    this.count(usage, sent, first, performance.now());
    running.delete(message.id);
    writing(message.id, false);
    await this.keep();
    this.changed(this);
  }

  /** Tokens and the seconds that they took: from the first to the last, or all where that is too short to tell anything. */
  count(usage, sent, first, end) {
    if (!usage) return;
    const [tokens, start] = end - first > 100 && first ? [usage.completion_tokens - 1, first] : [usage.completion_tokens, sent];
    Object.assign(this.message, {tokens, seconds: (end - start) / 1000, total: usage.total_tokens});
  }
}
