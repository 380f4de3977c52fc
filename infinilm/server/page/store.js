// What the page keeps: conversations and messages in IndexedDB, each message a record of its own, so that no tab writes over
// what another wrote. A record is saved as a patch. What cannot be written (private windows, a full disk) stays in memory,
// is read from there, and is tried again with every later change: the page stays usable, and tells.
//
// talk:    {id, title, system, model, leaf, created, updated, deleted}     leaf: the last message of the branch that is shown
// message: {id, talk, parent, role, content, reasoning, calls, model, state, error, created, tokens, seconds, total}
//          pictures: of a question, addresses that hold them whole
//          calls: of tools, {id, name, arguments, result}; result: null until it was given
//          state: done, length, stopped, lost, or writing

const LEFT = "infinilm.left.";
const STORES = ["talks", "messages"];
const unsaved = {talks: new Map(), messages: new Map()};
let opening = null, reportTrouble = () => {};

export const newId = () => Date.now().toString(36) + "-" + Math.random().toString(36).slice(2, 12);

/** Name the function that hears why nothing can be kept; "": all is kept. */
export const onTrouble = report => { reportTrouble = report; };

const settled = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function openDatabase() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("infinilm", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("talks", {keyPath: "id"});
      request.result.createObjectStore("messages", {keyPath: "id"}).createIndex("talk", "talk");
    };
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      const database = request.result;
      database.onversionchange = () => { opening = null; database.close(); };  // a newer page in another tab
      database.onclose = () => { opening = null; };
      resolve(database);
    };
  });
  opening.catch(() => { opening = null; });
  return opening;
}

/** Run `work(stores)` in one transaction, which is whole or not at all. */
async function transaction(mode, work) {
  const change = (await openDatabase()).transaction(STORES, mode);
  const ended = new Promise((resolve, reject) => {
    change.oncomplete = () => resolve();
    change.onabort = change.onerror = () => reject(change.error ?? new Error("the browser gave up"));
  });
  ended.catch(() => {});  // it is awaited below, unless the work itself fails
  const result = await work(Object.fromEntries(STORES.map(name => [name, change.objectStore(name)])));
  await ended;
  return result;
}

const reason = error => error?.name === "QuotaExceededError" ? "the browser has no room left"
  : "the browser gives this page no storage";

async function read(name, request) {
  let records = [];
  try { records = await transaction("readonly", stores => settled(request(stores[name]))); }
  catch (error) { reportTrouble(reason(error)); }
  const found = new Map(records.map(record => [record.id, record]));
  for (const [id, patch] of unsaved[name]) found.set(id, {...found.get(id), ...patch});
  return [...found.values()];
}

export const allTalks = () => read("talks", store => store.getAll());
export const allMessages = () => read("messages", store => store.getAll());
export const messagesOf = async talk =>
  (await read("messages", store => store.index("talk").getAll(talk))).filter(message => message.talk === talk);

/** Keep patches of records, {talks: [..], messages: [..]}. True: they are on the disk; otherwise in memory. */
export async function save(changes) {
  for (const name of STORES)
    for (const patch of changes[name] ?? []) unsaved[name].set(patch.id, {...unsaved[name].get(patch.id), ...patch});
  const batch = STORES.flatMap(name => [...unsaved[name]].map(([id, patch]) => ({name, id, patch})));
  try {
    await transaction("readwrite", stores => Promise.all(batch.map(({name, patch}) => put(stores[name], patch))));
  } catch (error) {
    reportTrouble(reason(error));
    return false;
  }
  for (const {name, id, patch} of batch) if (unsaved[name].get(id) === patch) unsaved[name].delete(id);
  reportTrouble("");
  return true;
}

/** Leave messages where the next page finds them: the database does not write in time when a page is left. */
export function leave(messages) {
  try { localStorage.setItem(LEFT + newId(), JSON.stringify(messages)); } catch { /* what was saved last is kept */ }
}

export async function takeLeft() {
  try {
    for (const key of Object.keys(localStorage).filter(name => name.startsWith(LEFT)))
      if (await save({messages: JSON.parse(localStorage.getItem(key))})) localStorage.removeItem(key);
  } catch { /* no storage at all, which is told at the first write */ }
}

/** Texts only ever grow. Where two tabs go on from the same text, the later one becomes a branch beside the first. */
async function put(store, patch) {
  const old = await settled(store.get(patch.id));
  if (old?.content && patch.content !== undefined && !patch.content.startsWith(old.content)) {
    if (old.content.startsWith(patch.content)) return;
    patch = {...patch, id: patch.id + "~" + newId(), created: Date.now()};
  }
  await settled(store.put({...old, ...patch}));
}

/** Remove conversations for good. */
export async function purge(ids) {
  for (const id of ids) {
    unsaved.talks.delete(id);
    for (const [key, message] of unsaved.messages) if (message.talk === id) unsaved.messages.delete(key);
  }
  try {
    await transaction("readwrite", stores => Promise.all(ids.map(async id => {
      stores.talks.delete(id);
      for (const key of await settled(stores.messages.index("talk").getAllKeys(id))) stores.messages.delete(key);
    })));
  } catch (error) { reportTrouble(reason(error)); }
}
