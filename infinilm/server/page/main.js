// The page: which conversation is open, what the buttons and keys do, and what is told.

import { Answer, answerOf, leaveAll } from "./answer.js";
import { Conversation } from "./conversation.js";
import { buildDialog } from "./dialog.js";
import { byId, fit, make, setIcon, spoken, textButton } from "./dom.js";
import { exported, imported, migrate } from "./exchange.js";
import { MessageView } from "./message.js";
import { picturesAmong, Tray } from "./pictures.js";
import { connect, server } from "./server.js";
import { changeSettings, settings, useTheme } from "./settings.js";
import { isSideShown, search, showList, toast, toggleSide } from "./sidebar.js";
import { allTalks, onTrouble, purge, save, takeLeft } from "./store.js";
import { onChange, tellChange } from "./tabs.js";

const NEAR_END = 60, DRAFTS = "infinilm.drafts";
const talks = new Map();
let current = Conversation.blank(settings.system ?? ""), trouble = "", isAtEnd = true, framed = false;
const views = new Map(), opened = new Map();  // conversations that were open stay as they are: answers may still come
const drafts = storedDrafts();
const tray = new Tray(byId("tray"), {changed: () => { keepDraft(); showSend(); }, failed: toast});

// ---- what is shown ----

/** Show the conversation as it is now. Nodes of messages that were shown before stay. */
function show() {
  const path = current.path();
  const nodes = path.map((message, index) => {
    let view = views.get(message.id);
    if (!view) {
      views.set(message.id, view = new MessageView(message, actions));
      if (unsentEdit(message) !== undefined) view.edit();
    }
    view.update(current.siblings(message), index === path.length - 1);
    return view.node;
  });
  const place = byId("messages");
  if (!nodes.length) place.replaceChildren(greeting());
  else if (nodes.length !== place.children.length || nodes.some((node, index) => node !== place.children[index]))
    place.replaceChildren(...nodes);
  document.body.classList.toggle("empty", !nodes.length);
  document.title = current.talk.title ? current.talk.title + " – infinilm" : "infinilm";
  showSend();
  stayAtEnd();
}

function greeting() {
  const node = make("div", "hello");
  node.append(make("h1", "", "What can I help with?"), make("p", "", "Conversations stay in this browser."));
  return node;
}

const runningAnswer = () => answerOf(current.path().at(-1));

function showSend() {
  const isRunning = !!runningAnswer();
  setIcon(byId("send"), isRunning ? "stop" : "send", isRunning ? "Stop" : "Send");
  byId("send").disabled = !isRunning && !byId("input").value.trim() && !tray.pictures.length;
}

/** While an answer comes: once per frame, its own node alone. */
function grow(answer) {
  if (answer.conversation !== current || framed) return;
  framed = true;
  requestAnimationFrame(() => {
    framed = false;
    if (answer.conversation !== current) return;
    if (answerOf(answer.message)) { views.get(answer.message.id)?.grow(); stayAtEnd(); }
  });
}

function stayAtEnd() {
  if (isAtEnd) byId("talk").scrollTop = byId("talk").scrollHeight;
  noteEnd();
}
function noteEnd() {
  const place = byId("talk");
  isAtEnd = place.scrollHeight - place.scrollTop - place.clientHeight < NEAR_END;
  byId("end").hidden = isAtEnd;
}

const showSide = () => showList([...talks.values()].filter(talk => !talk.deleted), current.talk.id,
  {open, remove, rename: (talk, title) => { changeTalk(talk, {title}); showSide(); show(); }});

function changeTalk(talk, fields) {
  Object.assign(talk, fields);
  save({talks: [{id: talk.id, ...fields}]}).then(() => tellChange(talk.id));
}

/** What is wrong and what is waited for stands above the field to write in. */
function showNotices() {
  const notices = [];
  if (server.state === "refused") notices.push(["error", server.message, "Enter key", () => openDialog(current.talk.system, "key")]);
  else if (server.state === "waiting" && server.message) notices.push(["busy", server.message]);
  if (trouble) notices.push(["error", `Conversations are not kept: ${trouble}.`, "Export", exportAll]);
  byId("notices").replaceChildren(...notices.map(([kind, text, label, action]) => {
    const notice = make("p", "notice " + kind);
    notice.append(make("span", "", text));
    if (label) notice.append(textButton(label, action, "small"));
    return notice;
  }));
}

// ---- the server and its models ----

const reconnect = () => connect(() => { showNotices(); if (server.state === "ready") showModels(); });
const modelOf = talk => {
  const names = server.models.map(({id}) => id), wanted = [talk.model, settings.model];
  return wanted.find(name => names.includes(name)) ?? names[0];
};
const contextOf = name => server.models.find(({id}) => id === name)?.max_model_len;

function showModels() {
  const place = byId("model");
  const names = server.models.map(({id}) => id);
  if (names.join("\n") !== [...place.options].map(option => option.value).join("\n"))
    place.replaceChildren(...names.map(name => Object.assign(make("option", "", name), {value: name})));
  place.value = modelOf(current.talk);
  place.disabled = names.length < 2;
  byId("attach").hidden = !readsPictures();
}

const readsPictures = () =>
  server.models.find(({id}) => id === modelOf(current.talk))?.input_modalities?.includes("image") ?? false;

// ---- conversations ----

async function open(id) {
  toggleSide(false);
  keepDraft();
  let conversation = opened.get(id);
  if (!conversation && talks.has(id)) conversation = await new Conversation(talks.get(id)).load();
  use(conversation ?? Conversation.blank(settings.system ?? ""));
}

function use(conversation) {
  current = conversation;
  if (current.messages.size) opened.set(current.talk.id, current);
  const hash = current.messages.size ? "#" + encodeURIComponent(current.talk.id) : "";
  if (location.hash !== hash) history.pushState(null, "", hash || location.pathname + location.search);
  showDraft();
  views.clear();
  isAtEnd = true;
  show();
  showSide();
  if (server.models.length) showModels();
  fit(byId("input"));
}

function startNew() {
  toggleSide(false);
  keepDraft();
  use(Conversation.blank(settings.system ?? ""));
  byId("input").focus();
}

function remove(talk) {
  changeTalk(talk, {deleted: Date.now()});
  if (talk.id === current.talk.id) startNew();
  showSide();
  toast(`Deleted “${talk.title || "Untitled"}”`, () => { changeTalk(talk, {deleted: 0}); showSide(); }, () => destroy([talk.id]));
}

async function destroy(ids) {
  for (const id of ids) {
    for (const message of opened.get(id)?.messages.values() ?? []) answerOf(message)?.stop();
    opened.delete(id);
    talks.delete(id);
  }
  await purge(ids);
}

/** Read again what another tab changed. */
async function refresh(id) {
  const found = new Map((await allTalks()).map(talk => [talk.id, talk]));
  for (const [known, talk] of talks) {
    if (!found.has(known)) { if (known !== current.talk.id) talks.delete(known); continue; }
    const {leaf, ...others} = found.get(known);  // another tab may look at another branch
    Object.assign(talk, others);
  }
  for (const [key, talk] of found) if (!talks.has(key)) talks.set(key, key === current.talk.id ? current.talk : talk);
  if (opened.has(id)) {
    const conversation = await opened.get(id).load();
    const leaf = conversation.messages.get(conversation.talk.leaf);
    if (leaf) conversation.talk.leaf = conversation.newestLeaf(leaf).id;
  }
  if (id === current.talk.id || id === null) show();
  showSide();
}

// ---- talking ----

async function run(message, conversation = current) {
  isAtEnd = true;
  const answer = new Answer(conversation, message, {model: modelOf, reconnect, changed: grow});
  const ended = answer.run();
  redraw(conversation);
  await ended;
  redraw(conversation);
  if (conversation === current && !message.error) spoken("Answer: " + message.content.slice(0, 500));
}
const redraw = conversation => { if (conversation === current) { show(); showSide(); } };

function ask(parent, content, pictures = []) {
  const question = current.add(parent, {role: "user", content, ...(pictures.length ? {pictures} : {})});
  talks.set(current.talk.id, current.talk);
  opened.set(current.talk.id, current);
  const hash = "#" + encodeURIComponent(current.talk.id);
  if (location.hash !== hash) history.replaceState(null, "", hash);
  run(current.add(question, {role: "assistant", state: "writing"}));
}

const actions = {
  show, contextOf, unsentEdit, keepEdit,
  edit: (message, content) => ask(current.parentOf(message), content, message.pictures),
  regenerate: message => run(current.add(current.parentOf(message), {role: "assistant", state: "writing"})),
  resume: message => run(message),
  keep: message => { current.save([message]); show(); },
  answerCalls: message => run(current.add(message, {role: "assistant", state: "writing"})),
  choose: message => { current.choose(message); isAtEnd = false; show(); },
};

function send() {
  const running = runningAnswer(), content = byId("input").value.trim(), {pictures} = tray;
  if (running) { running.stop(); return; }
  if (!content && !pictures.length) return;
  byId("input").value = "";
  tray.show([]);
  keepDraft();
  fit(byId("input"));
  ask(current.path().at(-1), content, pictures);
  keepDraft();
}

function attach(files) {
  if (!files.length) return;
  if (readsPictures()) tray.add(files); else toast("This model reads no pictures");
}

// ---- drafts: what is written and not sent survives a reload ----

function storedDrafts() { try { return JSON.parse(sessionStorage.getItem(DRAFTS)) ?? {}; } catch { return {}; } }
function draftKey() { return current.messages.size ? current.talk.id : ""; }
const picturesKey = () => "pictures " + draftKey();
function keepDraft() {
  const text = byId("input").value;
  if (text) drafts[draftKey()] = text; else delete drafts[draftKey()];
  if (tray.pictures.length) drafts[picturesKey()] = tray.pictures; else delete drafts[picturesKey()];
  storeDrafts();
}
function showDraft() {
  byId("input").value = drafts[draftKey()] ?? "";
  tray.show([...drafts[picturesKey()] ?? []]);
}
const editKey = message => "edit " + message.id;
function unsentEdit(message) { return drafts[editKey(message)]; }
function keepEdit(message, text) {
  if (text === undefined) delete drafts[editKey(message)]; else drafts[editKey(message)] = text;
  storeDrafts();
}
function storeDrafts() {
  const texts = Object.fromEntries(Object.entries(drafts).filter(([, draft]) => typeof draft === "string"));
  for (const kept of [drafts, texts]) {  // there may be no room for pictures
    try { sessionStorage.setItem(DRAFTS, JSON.stringify(kept)); return; } catch { /* they hold until the page is left */ }
  }
}

// ---- export, import, settings ----

async function exportAll() {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([await exported()], {type: "application/json"}));
  link.download = "conversations.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function importFile() {
  try {
    const count = await imported(await byId("file").files[0].text());
    toast(count === 1 ? "1 conversation was added" : `${count} conversations were added`);
    byId("dialog").close();
  } catch { byId("wrong").textContent = "This file holds no conversations that were exported here."; }
  byId("file").value = "";
  await refresh(current.talk.id);
  tellChange(current.talk.id);
}

const openDialog = buildDialog(system => { current.change({system}); reconnect(); });

// ---- buttons and keys ----

byId("new").onclick = startNew;
byId("menu").onclick = () => toggleSide(true);
byId("shade").onclick = () => toggleSide(false);
byId("settings").onclick = () => openDialog(current.talk.system);
byId("export").onclick = exportAll;
byId("import").onclick = () => byId("file").click();
byId("file").onchange = importFile;
byId("model").onchange = event => {
  changeSettings({model: event.target.value});
  current.change({model: event.target.value});
  showModels();
};
byId("attach").onclick = () => byId("pictures").click();
byId("pictures").onchange = event => { attach([...event.target.files]); event.target.value = ""; };
byId("input").onpaste = event => {  // what office programs copy is a text, too
  if (event.clipboardData.getData("text/plain")) return;
  const files = picturesAmong(event.clipboardData);
  if (files.length) event.preventDefault();
  attach(files);
};
addEventListener("dragover", event => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
addEventListener("drop", event => {
  if (!event.dataTransfer.types.includes("Files")) return;  // a text, for a field
  event.preventDefault();
  attach(picturesAmong(event.dataTransfer));
});
byId("search").oninput = event => search(event.target.value, [...talks.values()], showSide);
byId("end").onclick = () => { isAtEnd = true; stayAtEnd(); };
byId("talk").onscroll = noteEnd;
byId("form").onsubmit = event => { event.preventDefault(); send(); };
byId("input").oninput = () => { fit(byId("input")); keepDraft(); showSend(); };
byId("input").onkeydown = event => {  // on a phone Enter is a new line: there is a button
  const isSent = event.key === "Enter" && !event.shiftKey && !event.isComposing && matchMedia("(hover: hover)").matches;
  if (isSent) {
    event.preventDefault();
    if (!runningAnswer()) send();
  }
  if (event.key === "ArrowUp" && !byId("input").value) {
    const question = current.path().filter(message => message.role === "user").at(-1);
    if (question && !runningAnswer()) { event.preventDefault(); views.get(question.id).edit(); }
  }
};

addEventListener("keydown", event => {
  const control = event.ctrlKey || event.metaKey, key = event.key.toLowerCase();
  const isTyping = /^(?:input|textarea|select)$/i.test(event.target.tagName);
  if (byId("dialog").open) return;
  if (control && key === "k") { toggleSide(true); byId("search").focus(); }
  else if (control && event.shiftKey && key === "o") startNew();
  else if (control && key === ",") openDialog(current.talk.system);
  else if (key === "/" && !isTyping) byId("input").focus();
  else if (key === "escape" && isSideShown()) { toggleSide(false); byId("menu").focus(); }
  else if (key === "escape" && event.target === byId("search")) {
    byId("search").value = "";
    search("", [], showSide);
    byId("input").focus();
  } else if (key === "escape") { runningAnswer()?.stop(); return; }
  else return;
  event.preventDefault();
});

addEventListener("popstate", () => open(decodeURIComponent(location.hash.slice(1))));
addEventListener("pagehide", () => { leaveAll(); keepDraft(); });
addEventListener("focus", () => { if (server.state === "refused") reconnect(); });  // another tab may have the key now
new ResizeObserver(stayAtEnd).observe(byId("messages"));

// ---- the beginning ----

onTrouble(text => { if (text !== trouble) { trouble = text; showNotices(); } });
onChange(refresh);
useTheme();
toggleSide(false);
showDraft();
show();
reconnect();
await takeLeft();
await migrate(settings.system ?? "");
for (const talk of await allTalks()) if (!talks.has(talk.id)) talks.set(talk.id, talk);
await destroy([...talks.values()].filter(talk => talk.deleted && Date.now() - talk.deleted > 60_000).map(talk => talk.id));
if (current.messages.size) showSide(); else await open(decodeURIComponent(location.hash.slice(1)));
document.body.classList.add("ready");
byId("input").focus();
