// Settings of this browser: a few small values, in localStorage. What is not set is left to the model.

const KEY = "infinilm.settings", THEME = "infinilm.theme";

const within = (low, high) => value => value >= low && value <= high;
const whole = (low, high = Number.MAX_SAFE_INTEGER) => value => Number.isInteger(value) && within(low, high)(value);

/** Sampling parameters: name, label, check, what is expected, and what holds where nothing is set. */
export const PARAMETERS = [
  ["temperature", "Temperature", within(0, 2), "a number from 0 to 2"],
  ["top_p", "Top p", within(0, 1), "a number from 0 to 1"],
  ["top_k", "Top k", whole(-1), "a whole number; -1 for all tokens"],
  ["min_p", "Min p", within(0, 1), "a number from 0 to 1"],
  ["repetition_penalty", "Repetition penalty", within(0.001, 1000), "a number above 0; 1 for none"],
  ["presence_penalty", "Presence penalty", within(-2, 2), "a number from -2 to 2"],
  ["frequency_penalty", "Frequency penalty", within(-2, 2), "a number from -2 to 2"],
  ["max_tokens", "Max tokens", whole(1), "a whole number from 1 on", "No limit"],
  ["seed", "Seed", Number.isSafeInteger, "a whole number", "New each time"],
];

function stored(name, otherwise) {
  try { return JSON.parse(localStorage.getItem(name)) ?? otherwise; } catch { return otherwise; }
}
function store(name, value) {
  try { localStorage.setItem(name, JSON.stringify(value)); } catch { /* they hold until the page is left */ }
}

export let settings = stored(KEY, {});

export function changeSettings(fields) {
  settings = {...settings, ...fields};
  for (const name of Object.keys(settings)) if (settings[name] === undefined || settings[name] === "") delete settings[name];
  store(KEY, settings);
}

/** Functions that the model may call, of their JSON; throws where it is none. */
export function readTools(text) {
  const wrong = why => new Error(`Tools: expected a JSON list of functions such as [{"name": "weather", "parameters": {}}]; ${why}`);
  let listed;
  try { listed = JSON.parse(text); } catch (error) { throw wrong(error.message); }
  if (!Array.isArray(listed)) throw wrong("this is no list");
  return listed.map((tool, index) => {
    const {type, ...own} = tool?.function ?? tool ?? {};
    if (typeof own.name !== "string" || !own.name) throw wrong(`function ${index + 1} has no name`);
    return {type: "function", function: {description: "", parameters: {type: "object", properties: {}}, ...own}};
  });
}

/** The fields of a request that the settings ask for. */
export function sampling() {
  const names = [...PARAMETERS.map(([name]) => name), "stop"];
  const fields = Object.fromEntries(names.filter(name => settings[name] !== undefined).map(name => [name, settings[name]]));
  return settings.tools ? {...fields, tools: readTools(settings.tools)} : fields;
}

export const theme = () => stored(THEME, "");
export function useTheme(name = theme()) {
  if (name) document.documentElement.dataset.theme = name; else delete document.documentElement.dataset.theme;
  store(THEME, name);
}

addEventListener("storage", event => {  // another tab changed them
  if (event.key === KEY) settings = stored(KEY, {});
  if (event.key === THEME) useTheme();
});
