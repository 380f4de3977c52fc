// A conversation is a tree of messages: to edit a question or to regenerate an answer adds a branch, and nothing is destroyed.
// What is shown is the way from the first message to the `leaf` of the conversation.

import { messagesOf, newId, save } from "./store.js";
import { isMine, tellChange } from "./tabs.js";

const byAge = (a, b) => a.created - b.created || (a.id < b.id ? -1 : 1);

export class Conversation {
  constructor(talk) {
    this.talk = talk;
    this.messages = new Map();
  }

  /** One that is kept as soon as it has a message. */
  static blank(system) {
    return new Conversation({id: newId(), title: "", system, model: null, leaf: null, created: Date.now(), updated: 0});
  }

  /** Read what is kept, at first and after another tab changed it. */
  async load() {
    for (const message of await messagesOf(this.talk.id)) {
      if (isMine(message.id)) continue;  // what this tab writes is newer here than on the disk
      const known = this.messages.get(message.id);
      if (known) Object.assign(known, message); else this.messages.set(message.id, message);
    }
    return this;
  }

  parentOf(message) { return this.messages.get(message.parent); }

  siblings(message) {
    const parent = this.parentOf(message);
    return [...this.messages.values()].filter(other => this.parentOf(other) === parent).sort(byAge);
  }

  /** The newest leaf below a message; below none, that of the newest first message. */
  newestLeaf(message) {
    for (;;) {
      const children = [...this.messages.values()].filter(other => this.parentOf(other) === message);
      if (!children.length) return message;
      message = children.sort(byAge).at(-1);
    }
  }

  path() {
    const way = [];
    let message = this.messages.get(this.talk.leaf) ?? this.newestLeaf(undefined);
    for (; message && !way.includes(message); message = this.parentOf(message)) way.unshift(message);
    return way;
  }

  /** Add a message below another, or first where there is none, and show its branch. */
  add(parent, fields) {
    const message = {id: newId(), talk: this.talk.id, parent: parent?.id ?? null, content: "", reasoning: "", state: "done",
      error: "", created: Date.now(), ...fields};
    this.messages.set(message.id, message);
    if (message.role === "user" && !this.talk.title) this.talk.title = titleOf(message.content || "A picture");
    Object.assign(this.talk, {leaf: message.id, updated: Date.now()});
    this.save([message], this.talk);
    return message;
  }

  choose(message) {
    this.talk.leaf = this.newestLeaf(message).id;
    this.change({leaf: this.talk.leaf});
  }

  change(fields) {
    Object.assign(this.talk, fields);
    if (this.messages.size) this.save([], {id: this.talk.id, ...fields});
  }

  async save(messages, talk) {
    const copies = messages.map(message => ({...message}));
    await save({messages: copies, talks: talk ? [{...talk}] : []});
    tellChange(this.talk.id);
  }
}

export const titleOf = text => [...text.trim().replace(/\s+/g, " ")].slice(0, 60).join("");
