// The list of conversations: search, rename, delete. On a phone it lies beside the page, out of the way of the keyboard.

import { byId, iconButton, make, textButton } from "./dom.js";
import { allMessages } from "./store.js";

const DAY = 86400_000, UNDO = 8000, AROUND = 30;
const narrow = matchMedia("(max-width: 760px)");
let renamed = null, results = null, toastTimer = 0;

/** Show or hide it, where it does not always stand beside the page. */
export function toggleSide(shown) {
  document.body.classList.toggle("with-side", shown && narrow.matches);
  byId("side").inert = narrow.matches && !shown;
  document.querySelector("main").inert = narrow.matches && shown;
  byId("menu").setAttribute("aria-expanded", String(shown && narrow.matches));
  if (shown && narrow.matches) byId("new").focus();
}
export const isSideShown = () => document.body.classList.contains("with-side");
narrow.addEventListener("change", () => toggleSide(false));

const age = talk => {
  const days = (new Date().setHours(24, 0, 0, 0) - talk.updated) / DAY;
  return days <= 1 ? "Today" : days <= 2 ? "Yesterday" : days <= 8 ? "Last week" : "Earlier";
};

/** Show the conversations. `actions`: what happens to one: open, rename, remove. */
export function showList(talks, openId, actions) {
  if (renamed) return;  // it would be lost
  const shown = talks.filter(talk => !results || results.has(talk.id)).sort((a, b) => b.updated - a.updated);
  const place = byId("list"), nodes = [];
  let group = "", list = null;
  for (const talk of shown) {
    if (!list || (!results && age(talk) !== group)) {
      group = age(talk);
      if (!results) nodes.push(make("h2", "", group));
      nodes.push(list = make("ul"));
    }
    list.append(entry(talk, openId, actions));
  }
  if (!shown.length) nodes.push(make("p", "", results ? "Nothing found" : "Your conversations appear here."));
  place.replaceChildren(...nodes);
}

function entry(talk, openId, actions) {
  const item = make("li", talk.id === openId ? "open" : ""), name = make("button", "name");
  name.append(make("span", "title", talk.title || "Untitled"));
  const found = results?.get(talk.id);
  if (found) name.append(found.cloneNode(true));
  if (talk.id === openId) name.setAttribute("aria-current", "true");
  name.onclick = () => actions.open(talk.id);
  name.ondblclick = () => rename(item, talk, actions);
  item.append(name, iconButton("pen", "Rename", () => rename(item, talk, actions)),
    iconButton("bin", "Delete", () => actions.remove(talk)));
  return item;
}

function rename(item, talk, actions) {
  const field = make("input");
  field.value = talk.title;
  field.setAttribute("aria-label", "New name");
  renamed = talk;
  item.replaceChildren(field);
  const end = isKept => {
    if (renamed !== talk) return;
    renamed = null;
    actions.rename(talk, isKept && field.value.trim() ? field.value.trim() : talk.title);
  };
  field.onblur = () => end(true);
  field.onkeydown = event => {
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  };
  field.select();
}

/** Look for a text in titles and messages; `show` is called when it is known where it is. */
export async function search(text, talks, show) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) { results = null; show(); return; }
  const found = new Map(talks.filter(talk => talk.title.toLowerCase().includes(wanted)).map(talk => [talk.id, null]));
  for (const message of await allMessages()) {
    const at = message.content.toLowerCase().indexOf(wanted);
    if (at >= 0 && !found.get(message.talk)) found.set(message.talk, excerpt(message.content, at, wanted.length));
  }
  if (byId("search").value !== text) return;  // more was typed meanwhile
  results = found;
  show();
}

function excerpt(content, at, length) {
  const node = make("span", "excerpt"), begin = Math.max(0, at - AROUND);
  node.append((begin ? "…" : "") + content.slice(begin, at), make("mark", "", content.slice(at, at + length)),
    content.slice(at + length, at + length + 2 * AROUND));
  return node;
}

/** Tell what was done for a few seconds, with a way back; `done` is called when there is none any more. */
export function toast(text, undo, done = () => {}) {
  const place = byId("toast");
  if (place.dismiss) place.dismiss();
  const end = action => { clearTimeout(toastTimer); place.replaceChildren(); place.dismiss = null; action(); };
  place.dismiss = () => end(done);
  place.replaceChildren(make("span", "", text), ...(undo ? [textButton("Undo", () => end(undo))] : []));
  toastTimer = setTimeout(place.dismiss, UNDO);
}
