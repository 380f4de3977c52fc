// Calls of tools in an answer, as cards: what the model called, and what the tool gave, which is written by hand here.

import { fit, icon, make } from "./dom.js";
import { Markdown } from "./markdown.js";

/** Add what a chunk tells of the calls of a message: pieces, each with the index of its call. */
export function takeCalls(message, pieces) {
  message.calls ??= [];
  for (const {index, id, function: piece} of pieces) {
    const call = message.calls[index] ??= {id, name: piece.name, arguments: "", result: null};
    call.arguments += piece.arguments ?? "";
  }
}

function parsed(text) { try { return JSON.parse(text); } catch { return undefined; } }
const isWhole = call => parsed(call.arguments) !== undefined;
const isAnswered = message => message.calls?.length > 0 && message.calls.every(call => isWhole(call) && call.result !== null);

/** What a question says: its text, or where it has pictures, its parts. */
function sentContent({content, pictures}) {
  if (!pictures) return content;
  const images = pictures.map(url => ({type: "image_url", image_url: {url}}));
  return content ? [...images, {type: "text", text: content}] : images;
}

/** A message with what its calls gave, as the server takes it. Where a result is missing, it is its text alone. */
export function sentMessages(message) {
  const {role, content, reasoning, calls} = message;
  if (role === "user") return [{role, content: sentContent(message)}];
  if (!isAnswered(message)) return content ? [{role, content}] : [];
  const made = calls.map(({id, name, arguments: text}) => ({id, type: "function", function: {name, arguments: text}}));
  const results = calls.map(({id, name, result}) => ({role: "tool", tool_call_id: id, name, content: result}));
  return [{role, content, ...(reasoning ? {reasoning_content: reasoning} : {}), tool_calls: made}, ...results];
}

const fenced = (text, language) => {
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  return `${fence}${language}\n${text}\n${fence}`;
};

class CallCard {
  constructor(call, given) {
    Object.assign(this, {call, given});
    this.node = make("section", "call");
    this.node.setAttribute("aria-label", "Call of " + call.name);
    const head = this.node.appendChild(make("div", "head"));
    head.append(icon("tool"), make("span", "", call.name));
    this.arguments = new Markdown(this.node.appendChild(make("div", "text")));
    this.rest = this.node.appendChild(make("div"));
  }

  /** `isWriting`: more of the arguments may come. `isOpen`: a result can be given. */
  update(isWriting, isOpen) {
    const {call, rest} = this, value = parsed(call.arguments);
    const hasNone = value && typeof value === "object" && !Object.keys(value).length;
    this.arguments.update(hasNone ? "" : fenced(value === undefined ? call.arguments : JSON.stringify(value, null, 2), "json"), !isWriting);
    if (call.result !== null) {
      if (rest.className === "result") return;
      rest.className = "result";
      rest.replaceChildren(make("p", "label", "Result"));
      new Markdown(rest.appendChild(make("div", "text"))).update(fenced(call.result, ""));
    } else if (!isOpen || !isWhole(call)) rest.replaceChildren();
    else if (!rest.firstChild) rest.append(this.form());
  }

  form() {
    const form = make("form"), area = form.appendChild(make("textarea"));
    area.rows = 1;
    area.placeholder = `What did ${this.call.name} give?`;
    area.setAttribute("aria-label", "Result of " + this.call.name);
    form.append(make("button", "ghost", "Give result"));
    area.oninput = () => fit(area);
    area.onkeydown = event => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); }
    };
    form.onsubmit = event => {
      event.preventDefault();
      this.call.result = area.value;
      this.given();
    };
    return form;
  }
}

/** The calls of a message, below its text. `answered` gets the message once all of its calls have results. */
export class CallCards {
  constructor(message, {changed, answered}) {
    Object.assign(this, {message, changed, answered});
    this.node = make("div", "calls");
    this.cards = [];
  }

  update(isWriting, isLast) {
    const calls = this.message.calls ?? [];
    if (calls.length < this.cards.length) { this.cards = []; this.node.replaceChildren(); }  // the answer came anew
    for (const call of calls.slice(this.cards.length)) {
      const card = new CallCard(call, () => this.give());
      this.cards.push(card);
      this.node.append(card.node);
    }
    this.cards.forEach((card, index) => {
      card.call = calls[index];
      card.update(isWriting && index === calls.length - 1, isLast && !isWriting);
    });
  }

  give() {
    this.changed(this.message);
    if (isAnswered(this.message)) this.answered(this.message);
  }
}
