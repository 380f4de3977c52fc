// What tabs tell each other: that a conversation changed, and which answer a tab is writing now.

const BEAT = 2000, GONE = 5000;  // ms: how often a tab says that it writes, and when one that said nothing has gone
const channel = "BroadcastChannel" in window ? new BroadcastChannel("infinilm") : null;
const elsewhere = new Map(), mine = new Set();
let hear = () => {};

/** Name the function that hears which conversation another tab changed; null: several, or what is written there. */
export const onChange = listener => { hear = listener; };
export const tellChange = talk => channel?.postMessage({changed: talk});

/** Whether another tab writes this answer now. */
export const isElsewhere = id => Date.now() - (elsewhere.get(id) ?? 0) < GONE;

export const isMine = id => mine.has(id);

/** Say that this tab writes an answer, or no longer does. */
export function writing(id, isWriting) {
  if (isWriting) mine.add(id); else mine.delete(id);
  channel?.postMessage(isWriting ? {writing: [...mine]} : {ended: id});
}

function tellMine() { if (mine.size) channel?.postMessage({writing: [...mine]}); }

if (channel) {
  channel.onmessage = ({data}) => {
    if (data.ask) tellMine();
    if (data.writing) {
      const known = data.writing.every(isElsewhere);
      for (const id of data.writing) elsewhere.set(id, Date.now());
      if (!known) hear(null);
    }
    if (data.ended) { elsewhere.delete(data.ended); hear(null); }
    if (data.changed) hear(data.changed);
  };
  setInterval(() => {
    tellMine();
    for (const id of elsewhere.keys()) if (!isElsewhere(id)) { elsewhere.delete(id); hear(null); }
  }, BEAT);
  channel.postMessage({ask: true});
  addEventListener("pagehide", () => { for (const id of mine) channel.postMessage({ended: id}); });
}
