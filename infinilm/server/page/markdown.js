// Markdown that grows. A text is cut into units (a paragraph, an item of a list, a row of a table, a line of code); each is
// shown once, and only the last one, which may still change, is shown anew. So a long answer costs no more per frame than a
// short one.

import { copy, iconButton, make } from "./dom.js";
import { Highlighter } from "./highlight.js";
import { inline } from "./inline.js";
import { formula } from "./math.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEAD = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)(?:\[([ xX])\]\s+)?/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const MATH = /^\s*(\$\$|\\\[)/;
const ROW = /^\s*\|.*\|\s*$/;
const DELIMITER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const STARTS = [FENCE, HEAD, ITEM, RULE, QUOTE, MATH];
const MAX_NESTING = 12;

const cells = line => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));

export class Markdown {
  constructor(place, nesting = 0) {
    Object.assign(this, {place, nesting});
    this.reset();
  }

  reset() {
    this.place.replaceChildren();
    this.done = "";            // the text of all units that are final
    this.open = null;          // the list, table or code block that the next unit may belong to
    this.provisional = [];     // nodes of the last unit
    this.live = null;          // of a last unit that is Markdown itself: where it begins, and its own reader
    this.wasWhole = false;
  }

  /** Show a text, of which `this.done` is mostly the beginning. `isWhole`: nothing will be added. */
  update(text, isWhole = true) {
    if (!text.startsWith(this.done) || (this.wasWhole && !(isWhole && text === this.done))) this.reset();
    this.wasWhole = isWhole;
    for (const node of this.provisional) node.remove();
    this.provisional = [];
    let at = this.done.length;
    while (at < text.length) {
      const unit = this.unit(text, at);
      const isFinal = unit.end < text.length && unit.isClosed !== false;
      const before = this.open;
      const nodes = unit.show() ?? [];
      if (!isFinal && !isWhole) {
        this.provisional = nodes;
        this.open = before;
        break;
      }
      this.live = null;
      at = unit.end;
    }
    if (at > this.done.length) this.done = text.slice(0, at);
  }

  /** The unit at a place: where it ends, whether it is known to be over, and how it is shown. */
  unit(text, at) {
    const line = lineAt(text, at), end = at + line.length + 1;
    const isComplete = end <= text.length;
    if (this.open?.kind === "code") return this.codeLine(line, Math.min(end, text.length), isComplete);
    if (!line.trim()) return {end: Math.min(end, text.length), isClosed: isComplete, show: () => this.leave()};
    const fence = line.match(FENCE);
    if (fence) return {end: Math.min(end, text.length), isClosed: isComplete, show: () => this.beginCode(fence)};
    if (MATH.test(line)) return this.math(text, at);
    if (RULE.test(line)) return {end: Math.min(end, text.length), isClosed: isComplete, show: () => this.append(make("hr"))};
    const head = line.match(HEAD);
    if (head) {
      const node = make("h" + Math.min(6, head[1].length + 2));
      return {end: Math.min(end, text.length), isClosed: isComplete, show: () => this.append(inline(head[2], node))};
    }
    if (QUOTE.test(line)) return this.quote(text, at);
    const item = line.match(ITEM);
    if (item && this.nesting < MAX_NESTING) return this.item(text, at, item);
    if (this.open?.kind === "table" && line.includes("|")) {
      return {end: Math.min(end, text.length), isClosed: isComplete, show: () => this.tableRow(line)};
    }
    const second = isComplete ? lineAt(text, end) : "";
    if (ROW.test(line) && second.includes("|") && DELIMITER.test(second)) {
      const after = end + second.length + 1;
      return {end: Math.min(after, text.length), isClosed: after <= text.length, show: () => this.beginTable(line, second)};
    }
    return this.paragraph(text, at);
  }

  /** Add a node of its own, which ends a list or a table. */
  append(node) {
    this.open = null;
    this.place.append(node);
    return [node];
  }

  /** A blank line ends a table and a paragraph; a list may go on behind it. */
  leave() { if (this.open?.kind === "table") this.open = null; }

  paragraph(text, at) {
    let end = at, line;
    do {
      line = lineAt(text, end);
      end += line.length + 1;
      const next = end < text.length ? lineAt(text, end) : "";
      if (!next.trim() || STARTS.some(start => start.test(next)) || isTable(text, end)) break;
    } while (true);
    end = Math.min(end, text.length);
    const content = text.slice(at, end).trim();
    return {end, isClosed: end < text.length, show: () => this.append(inline(content, make("p")))};
  }

  math(text, at) {
    const [whole, mark] = text.slice(at, at + 1000).match(MATH);
    const closer = mark === "$$" ? "$$" : "\\]", from = at + whole.length, close = text.indexOf(closer, from);
    const isOver = close >= 0 && !text.slice(from, close).includes("\n\n");
    const rest = isOver ? lineAt(text, close + 2) : "";
    if (!isOver || rest.trim()) {
      const paragraph = this.paragraph(text, at);
      return close < 0 && !text.slice(from).includes("\n\n") ? {...paragraph, end: text.length, isClosed: false,
        show: () => this.append(make("p", "pending", text.slice(at)))} : paragraph;
    }
    const end = Math.min(close + 2 + rest.length + 1, text.length);
    return {end, show: () => {
      const block = make("div", "formula");
      block.append(formula(text.slice(from, close), true));
      return this.append(block);
    }};
  }

  quote(text, at) {
    let end = at;
    for (let line; end < text.length && QUOTE.test(line = lineAt(text, end)); ) end += line.length + 1;
    end = Math.min(end, text.length);
    const content = text.slice(at, end).split("\n").map(line => line.replace(QUOTE, "")).join("\n");
    return {end, isClosed: end < text.length, show: () => this.nested(at, content, () => this.append(make("blockquote")))};
  }

  /** An item with all that is indented below it. */
  item(text, at, [marker, , bullet, , tick]) {
    const indent = marker.match(/^\s*\S+\s?/)[0].length;
    let end = at + lineAt(text, at).length + 1, isBlank = false;
    while (end < text.length) {
      const line = lineAt(text, end), depth = line.match(/^ */)[0].length;
      if (line.trim()) {
        const isInside = depth >= Math.min(indent, 2);
        if (!isInside && (isBlank || STARTS.some(start => start.test(line)) || isTable(text, end))) break;
        isBlank = false;
      } else {
        isBlank = true;
      }
      end += line.length + 1;
    }
    end = Math.min(end, text.length);
    const [first, ...others] = text.slice(at, end).split("\n");
    const content = [first.slice(marker.length), ...others.map(line => line.slice(Math.min(indent, line.match(/^ */)[0].length)))]
      .join("\n").trimEnd();
    return {end, isClosed: end < text.length, show: () => this.nested(at, content, () => this.listItem(bullet, tick))};
  }

  listItem(bullet, tick) {
    const isOrdered = /\d/.test(bullet), added = [];
    if (this.open?.kind !== "list" || this.open.isOrdered !== isOrdered) {
      const list = make(isOrdered ? "ol" : "ul");
      if (isOrdered && Number.parseInt(bullet) !== 1) list.start = Number.parseInt(bullet);
      added.push(...this.append(list));
      this.open = {kind: "list", isOrdered, node: list};
    }
    const item = this.open.node.appendChild(make("li"));
    if (tick) {
      const box = Object.assign(make("input"), {type: "checkbox", inert: true, checked: tick !== " "});
      box.setAttribute("aria-label", tick === " " ? "Open" : "Done");
      item.classList.add("task");
      item.append(box);
    }
    return [item, ...added];
  }

  /** A unit that is Markdown itself; while it grows, its own reader goes on with it. `begin` adds its node. */
  nested(at, content, begin) {
    const nodes = begin(), own = nodes[0];
    if (this.live?.at !== at) this.live = {at, reader: new Markdown(make("div", "body"), this.nesting + 1)};
    own.append(this.live.reader.place);
    this.live.reader.update(content, false);
    return nodes;
  }

  beginCode([, indent, mark, language]) {
    const block = make("div", "block"), bar = block.appendChild(make("div", "bar")), pre = block.appendChild(make("pre"));
    const code = pre.appendChild(make("code"));
    pre.tabIndex = 0;
    bar.append(make("span", "", language), iconButton("copy", "Copy the code", event => copy(code.textContent, event.currentTarget)));
    const nodes = this.append(block);
    this.open = {kind: "code", indent: indent.length, mark, code, highlighter: new Highlighter(language)};
    return nodes;
  }

  codeLine(line, end, isComplete) {
    const {mark, indent, code, highlighter} = this.open;
    const isEnd = line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
    if (isEnd) return {end, isClosed: isComplete, show: () => { this.open = null; }};
    return {end, isClosed: isComplete, show: () => {
      const reader = highlighter.copy();
      const nodes = reader.line(line.slice(Math.min(indent, line.match(/^ */)[0].length)))
        .map(part => part instanceof Node ? part : document.createTextNode(part));
      if (code.hasChildNodes()) nodes.unshift(document.createTextNode("\n"));
      code.append(...nodes);
      this.open = {...this.open, highlighter: reader};
      return nodes;
    }};
  }

  beginTable(line, delimiter) {
    const holder = make("div", "table"), table = holder.appendChild(make("table"));
    const sides = cells(delimiter).map(cell => /^:-*:$/.test(cell) ? "middle" : /:$/.test(cell) ? "right" : "");
    const head = table.appendChild(make("thead")).appendChild(make("tr"));
    for (const [index, cell] of cells(line).entries()) inline(cell, head.appendChild(make("th", sides[index])));
    holder.tabIndex = 0;
    const nodes = this.append(holder);
    this.open = {kind: "table", node: table.appendChild(make("tbody")), sides};
    return nodes;
  }

  tableRow(line) {
    const row = this.open.node.appendChild(make("tr"));
    for (const [index, side] of this.open.sides.entries()) inline(cells(line)[index] ?? "", row.appendChild(make("td", side)));
    return [row];
  }
}

function lineAt(text, at) {
  const end = text.indexOf("\n", at);
  return text.slice(at, end < 0 ? text.length : end);
}

function isTable(text, at) {
  const line = lineAt(text, at);
  if (!ROW.test(line)) return false;
  const second = lineAt(text, at + line.length + 1);
  return second.includes("|") && DELIMITER.test(second);
}
