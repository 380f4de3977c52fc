// Nodes of the page. Content is always set as text: nothing that a model or a file says is ever parsed as HTML.

export const byId = id => document.getElementById(id);

export function make(tag, className, content) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (content !== undefined) node.textContent = content;
  return node;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "use"));
  use.setAttribute("href", "#i-" + name);
  svg.setAttribute("aria-hidden", "true");
  return svg;
}

export function setIcon(button, name, label) {
  button.replaceChildren(icon(name));
  button.setAttribute("aria-label", label);
  button.title = label;
}

export function iconButton(name, label, action) {
  const button = make("button", "icon");
  button.type = "button";
  setIcon(button, name, label);
  button.onclick = action;
  return button;
}

export function textButton(label, action, className = "link") {
  const button = make("button", className, label);
  button.type = "button";
  button.onclick = action;
  return button;
}

/** Copy a text and let the button tell how it went. A page over plain HTTP has no clipboard: then by a selection. */
export async function copy(text, button) {
  const label = button.getAttribute("aria-label"), done = await written(text);
  setIcon(button, done ? "check" : "close", done ? "Copied" : "The browser does not allow it");
  setTimeout(() => setIcon(button, "copy", label), 1400);
}

async function written(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "unseen");
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** Grow a text area with its text, up to the limit that the style sets. */
export function fit(area) {
  area.style.height = "auto";
  area.style.height = area.scrollHeight + area.offsetHeight - area.clientHeight + "px";
}

export const spoken = text => { byId("spoken").textContent = text; };
