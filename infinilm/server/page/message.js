// One message as it is shown. Its node stays as long as the conversation is open, and changes with it.

import { answerOf } from "./answer.js";
import { CallCards } from "./calls.js";
import { byId, copy, fit, icon, iconButton, make, textButton } from "./dom.js";
import { Markdown } from "./markdown.js";
import { gallery } from "./pictures.js";
import { isElsewhere } from "./tabs.js";

const NOTES = {length: "Cut off by the limit of tokens.", stopped: "Stopped.", lost: "The rest of this answer did not arrive."};

export class MessageView {
  /**
   * `actions`: what its buttons do (edit, regenerate, resume, choose, keep, answerCalls), and where an edit is kept that
   * is not sent.
   */
  constructor(message, actions) {
    Object.assign(this, {message, actions});
    this.node = make("article", "message " + message.role);
    this.node.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
    this.text = make("div", "text");
    this.foot = make("div", "foot");
    if (message.role === "assistant") {
      this.thought = make("details", "thought");
      this.thought.hidden = true;
      const summary = this.thought.appendChild(make("summary"));
      this.summary = summary.appendChild(make("span"));
      summary.append(icon("right"));
      this.thoughtText = new Markdown(this.thought.appendChild(make("div", "text")));
      this.answer = new Markdown(this.text);
      this.calls = new CallCards(message, {changed: actions.keep, answered: actions.answerCalls});
      this.node.append(this.thought);
    }
    if (message.pictures) this.node.append(gallery(message.pictures));
    this.node.append(...[this.text, this.calls?.node, this.foot].filter(Boolean));
  }

  /** What changes while an answer comes. */
  grow() {
    const {message} = this, isWriting = this.isWriting;
    this.node.classList.toggle("writing", isWriting);
    this.node.classList.toggle("waiting", isWriting && !message.content && !message.reasoning && !message.calls);
    if (message.reasoning) {
      this.thought.hidden = false;
      const isThinking = isWriting && !message.content && !message.calls;
      this.thought.classList.toggle("busy", isThinking);
      const seconds = Math.round(message.thought ?? 0);
      this.summary.textContent = isThinking ? "Thinking" : seconds ? `Thought for ${seconds} s` : "Thoughts";
      this.thoughtText.update(message.reasoning, !isWriting);
    }
    this.answer.update(message.content, !isWriting);
    this.calls.update(isWriting, this.isLast);
  }

  get isWriting() { return !!answerOf(this.message) || (this.message.state === "writing" && isElsewhere(this.message.id)); }

  /** Everything, in its place: `siblings` are the branches at this message, itself among them. */
  update(siblings, isLast) {
    const {message, actions} = this;
    this.isLast = isLast;
    if (this.isEdited) { this.showBranches(siblings); return; }
    if (message.role === "user") this.text.textContent = message.content; else this.grow();
    const tools = make("div", "tools");
    const add = (...button) => tools.append(iconButton(...button));
    if (message.role === "user") add("pen", "Edit", () => this.edit());
    if (message.content) add("copy", "Copy", event => copy(message.content, event.currentTarget));
    if (message.role === "assistant" && (message.content || message.calls) && !this.isWriting) add("again", "Regenerate", () => actions.regenerate(message));
    const told = this.told();
    if (told) tools.append(make("span", "told", told));
    this.tools = tools;
    this.foot.replaceChildren(...[this.note(isLast), tools].filter(Boolean));
    this.showBranches(siblings);
  }

  showBranches(siblings) {
    this.tools?.querySelector(".branches")?.remove();
    if (siblings.length < 2 || this.isEdited) return;
    const place = siblings.indexOf(this.message), branches = make("span", "branches");
    const step = (name, label, other) => {
      const button = iconButton(name, label, () => this.actions.choose(siblings[other]));
      button.disabled = !siblings[other];
      return button;
    };
    branches.append(step("left", "Previous version", place - 1), make("span", "", `${place + 1} / ${siblings.length}`),
      step("right", "Next version", place + 1));
    this.tools.prepend(branches);
  }

  told() {
    const {role, tokens, seconds, total, model} = this.message;
    if (role === "user" || this.isWriting) return "";
    const speed = tokens > 1 && seconds > 0 ? (tokens / seconds).toFixed(1) + " tokens/s" : "";
    const limit = this.actions.contextOf(model);
    const used = total ? `${total}${limit ? " of " + limit : ""} tokens of the context` : "";
    return [speed, used].filter(Boolean).join(" · ");
  }

  /** Why an answer is not whole, and the way on. */
  note(isLast) {
    const {message, actions} = this;
    if (message.role === "user" || answerOf(message)) return null;
    if (this.isWriting) return make("p", "note", "Another tab is writing this answer.");
    const why = message.error || NOTES[message.state === "writing" ? "lost" : message.state];
    if (!why) return null;
    const note = make("p", message.error ? "note error" : "note", why);
    if (isLast && message.calls) note.append(textButton("Try again", () => actions.regenerate(message), "small"));
    else if (isLast && message.content) note.append(textButton("Continue", () => actions.resume(message), "small"));
    else if (isLast) note.append(textButton("Try again", () => actions.resume(message), "small"));
    return note;
  }

  /** Edit a question in its place. What is sent becomes a branch; until then nothing changes. */
  edit() {
    const form = make("form", "edit"), area = form.appendChild(make("textarea"));
    area.rows = 1;
    area.value = this.actions.unsentEdit(this.message) ?? this.message.content;
    area.setAttribute("aria-label", "Edit the message");
    const cancel = textButton("Cancel", () => this.leave(), "ghost"), send = make("button", "main", "Send");
    form.append(cancel, send);
    form.onsubmit = event => {
      event.preventDefault();
      const content = area.value.trim();
      if (!content && !this.message.pictures) return;
      this.leave();
      if (content !== this.message.content) this.actions.edit(this.message, content);
    };
    area.oninput = () => { fit(area); this.actions.keepEdit(this.message, area.value); };
    area.onkeydown = event => {
      if (event.key === "Escape") { event.stopPropagation(); this.leave(); }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); }
    };
    this.isEdited = true;
    this.node.classList.add("edited");
    this.text.replaceChildren(form);
    this.foot.replaceChildren();
    fit(area);
    area.focus();
  }

  leave() {
    this.isEdited = false;
    this.actions.keepEdit(this.message, undefined);
    this.node.classList.remove("edited");
    this.actions.show();
    byId("input").focus();
  }
}
