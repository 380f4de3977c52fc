// The dialog of the settings.

import { byId, make } from "./dom.js";
import { changeSettings, PARAMETERS, readTools, settings, theme, useTheme } from "./settings.js";

export const SHORTCUTS = [["Enter", "Send"], ["Shift + Enter", "New line"], ["Esc", "Stop the answer"],
  ["Ctrl + K", "Search"], ["Ctrl + Shift + O", "New conversation"], ["Ctrl + ,", "Settings"], ["/", "Write"],
  ["↑", "Edit the last question"]];

const MODELS_OWN = "Model’s own";

function buildFields() {
  for (const [name, label, , , otherwise] of PARAMETERS) {
    const holder = make("label", "", label), field = holder.appendChild(make("input"));
    Object.assign(field, {id: name, inputMode: "decimal", autocomplete: "off", placeholder: otherwise ?? MODELS_OWN});
    byId("fields").append(holder);
  }
  const holder = make("label", "wide", "Stop texts, one in each line"), area = holder.appendChild(make("textarea"));
  Object.assign(area, {id: "stop", rows: 2, placeholder: "None"});
  byId("fields").append(holder);
  for (const [keys, what] of SHORTCUTS) {
    const term = make("dt");
    for (const key of keys.split(" + ")) term.append(make("kbd", "", key));
    byId("shortcuts").append(term, make("dd", "", what));
  }
}

/** The values of the fields; throws where one is wrong, with its field. */
function fieldValues() {
  const values = {key: byId("key").value.trim() || undefined};
  for (const [name, label, check, expected] of PARAMETERS) {
    const text = byId(name).value.trim().replace(",", ".");
    if (text && !check(Number(text))) throw Object.assign(new Error(`${label}: expected ${expected}, got ${text}`), {field: byId(name)});
    values[name] = text ? Number(text) : undefined;
  }
  const lines = byId("stop").value.split("\n").filter(Boolean);
  values.stop = lines.length ? lines : undefined;
  values.tools = byId("tools").value.trim() || undefined;
  try { if (values.tools) readTools(values.tools); }
  catch (error) { throw Object.assign(error, {field: byId("tools")}); }
  return values;
}

/** Build the dialog; `saved` gets the system message when it is left. Returns what opens it. */
export function buildDialog(saved) {
  buildFields();
  const dialog = byId("dialog");
  byId("cancel").onclick = () => dialog.close();
  dialog.onclick = event => { if (event.target === dialog) dialog.close(); };
  byId("reset").onclick = () => { for (const field of byId("fields").querySelectorAll("input, textarea")) field.value = ""; };
  byId("theme").onchange = event => useTheme(event.target.value);
  dialog.querySelector("form").onsubmit = event => {
    try {
      const values = fieldValues(), system = byId("system").value.trim();
      changeSettings({...values, ...(byId("default_system").checked ? {system} : {})});
      saved(system);
    } catch (error) {
      if (!error.field) throw error;
      event.preventDefault();
      byId("wrong").textContent = error.message;
      error.field.setAttribute("aria-invalid", "true");
      error.field.focus();
    }
  };
  return (system, focus = "system") => {
    byId("system").value = system;
    byId("default_system").checked = false;
    byId("key").value = settings.key ?? "";
    for (const [name] of PARAMETERS) {
      byId(name).value = settings[name] ?? "";
      byId(name).removeAttribute("aria-invalid");
    }
    byId("stop").value = (settings.stop ?? []).join("\n");
    byId("tools").value = settings.tools ?? "";
    byId("tools").removeAttribute("aria-invalid");
    byId("wrong").textContent = "";
    for (const choice of byId("theme").querySelectorAll("input")) choice.checked = choice.value === theme();
    dialog.showModal();
    byId(focus).focus();
    if (focus === "system") dialog.querySelector(".scroll").scrollTop = 0;
  };
}
