// Conversations from elsewhere: exported files, and what the first version of this page kept in localStorage, which was a list
// of {id, title, messages: [{role, content, reasoning, error, stopped}]}.

import { isPicture } from "./pictures.js";
import { allMessages, allTalks, save } from "./store.js";

const FORMAT = "infinilm conversations";
const OLD_KEY = "infinilm.talks";
const isText = value => typeof value === "string";
const text = value => isText(value) ? value : "";

/** A name that a content always has (FNV-1a, twice): what is brought in twice is there once, and what differs is a branch. */
function digest(content) {
  let a = 0x811c9dc5, b = 0x1b873593;
  for (let i = 0; i < content.length; i++) {
    a = Math.imul(a ^ content.charCodeAt(i), 0x01000193);
    b = Math.imul(b ^ content.charCodeAt(i), 0x85ebca6b) ^ (b >>> 13);
  }
  return (a >>> 0).toString(36) + (b >>> 0).toString(36);
}

function fromList(list, system) {
  const talks = [], messages = [];
  const now = Date.now();
  list.forEach((old, place) => {
    if (!isText(old.id) || !Array.isArray(old.messages)) throw new Error("this is no list of conversations");
    const good = old.messages.filter(m => ["user", "assistant"].includes(m?.role) && isText(m.content));
    if (!good.length) return;
    const created = (Number.parseInt(old.id) || now) - place;  // such an id begins with its time, and the newest is first
    let parent = null;
    good.forEach((m, index) => {
      const id = digest([old.id, parent, m.role, m.content].join("\0"));
      const state = !text(m.stopped) ? "done" : m.stopped.startsWith("Cut") ? "length" : "stopped";
      messages.push({id, talk: old.id, parent, role: m.role, content: m.content, reasoning: text(m.reasoning),
        error: text(m.error), state, created: created + index});
      parent = id;
    });
    talks.push({id: old.id, title: text(old.title), system, model: null, leaf: parent, created, updated: created});
  });
  return {talks, messages};
}

/** Move what an older page kept. It is removed there when it is safe here. */
export async function migrate(system) {
  let found = null;
  try {
    found = localStorage.getItem(OLD_KEY);
    if (found === null) return;
    const moved = fromList(JSON.parse(found), system);
    const known = new Set((await allTalks()).map(talk => talk.id));
    moved.talks = moved.talks.filter(talk => !known.has(talk.id));
    if (!await save(moved) || localStorage.getItem(OLD_KEY) !== found) return;
    for (const name of [OLD_KEY, "infinilm.open"]) localStorage.removeItem(name);
  } catch { /* no storage at all, which is told at the first write; or no conversations, which stay where they are */ }
}

export async function exported() {
  const talks = (await allTalks()).filter(talk => !talk.deleted), ids = new Set(talks.map(talk => talk.id));
  const messages = (await allMessages()).filter(message => ids.has(message.talk));
  return JSON.stringify({format: FORMAT, version: 1, talks, messages}, null, 1);
}

/** Add the conversations of a file; the number of new ones. Throws where it holds none. */
export async function imported(content) {
  const data = JSON.parse(content);
  const read = Array.isArray(data) ? fromList(data, "") : fromExport(data);
  const known = new Map((await allTalks()).map(talk => [talk.id, talk]));
  const fresh = read.talks.filter(talk => !known.has(talk.id) || known.get(talk.id).deleted);
  await save({talks: fresh.map(talk => ({...talk, deleted: 0})), messages: read.messages});
  return fresh.length;
}

const callOf = call => ({id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments),
  result: isText(call?.result) ? call.result : null});

function fromExport(data) {
  if (data.format !== FORMAT) throw new Error("this is no export of conversations");
  const number = value => Number.isFinite(value) ? value : 0;
  const id = value => isText(value) ? value : null;
  const talks = data.talks.filter(talk => isText(talk.id)).map(talk => ({id: talk.id, title: text(talk.title),
    system: text(talk.system), model: id(talk.model), leaf: id(talk.leaf), created: number(talk.created),
    updated: number(talk.updated)}));
  const messages = data.messages.filter(m => isText(m.id) && isText(m.talk) && ["user", "assistant"].includes(m.role))
    .map(m => ({id: m.id, talk: m.talk, parent: id(m.parent), role: m.role, content: text(m.content),
      reasoning: text(m.reasoning), model: id(m.model), state: text(m.state) || "done", error: text(m.error),
      ...(m.pictures?.some?.(isPicture) ? {pictures: m.pictures.filter(isPicture)} : {}),
      calls: Array.isArray(m.calls) ? m.calls.map(callOf) : undefined, created: number(m.created), tokens: number(m.tokens), seconds: number(m.seconds), total: number(m.total)}));
  return {talks, messages};
}
