// TeX as models write it, to MathML, which browsers set themselves. What is not known here is shown as it was written: a
// formula is right or is its source, and never something between.

import { ACCENTS, FUNCTIONS, INTEGRALS, LARGE, LETTERS, LIMITS, OPERATORS, SPACES, STYLES, UNDER } from "./symbols.js";

const SPACE = "http://www.w3.org/1998/Math/MathML";
const MAX_DEPTH = 60;
const TOKENS = /\\(?:[A-Za-z]+\*?|[\s\S])|[{}^_&~']|\d+(?:[.,]\d+)*|%[^\n]*|\s+|[\s\S]/gu;
const FENCES = {"(": "(", ")": ")", "[": "[", "]": "]", "|": "|", "/": "/", "<": "⟨", ">": "⟩", ".": ""};
const MATRICES = {matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"],
  vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], cases: ["{", ""], array: ["", ""], aligned: ["", ""], align: ["", ""],
  split: ["", ""], gathered: ["", ""], gather: ["", ""], equation: ["", ""], eqnarray: ["", ""]};
const NAMED = {form: "prefix", lspace: "0", rspace: "0.17em"};
const SIZES = /^\\(?:[bB]igg?[lrm]?|(?:display|text|script)style|limits|nolimits|left|right|middle|nonumber|notag)$/;

/** A formula as a node; one that is not understood as its source. */
export function formula(source, isDisplay) {
  try {
    const root = element("math", [new Parser(source).all()]);
    if (isDisplay) root.setAttribute("display", "block");
    return root;
  } catch (error) {
    if (!(error instanceof UnknownError)) throw error;
    const code = document.createElement("code");
    code.className = "tex";
    code.textContent = source.trim();
    return code;
  }
}

class UnknownError extends Error {}

function element(tag, children, attributes = {}) {
  const node = document.createElementNS(SPACE, tag);
  node.append(...children);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
const row = children => children.length === 1 ? children[0] : element("mrow", children);
const operator = (text, attributes) => element("mo", [text], attributes);
const fence = text => operator(text, {fence: "true", stretchy: "true"});

class Parser {
  constructor(source) {
    this.tokens = (source.match(TOKENS) ?? []).filter(token => !/^(?:\s+|%.*)$/.test(token));
    this.source = source;
    this.at = 0;
    this.depth = 0;
  }

  get next() { return this.tokens[this.at]; }

  take(expected) {
    const token = this.tokens[this.at++];
    if (token === undefined || (expected !== undefined && token !== expected)) throw new UnknownError(token);
    return token;
  }

  all() {
    const lines = this.lines(() => this.next === undefined);
    if (this.next !== undefined) throw new UnknownError(this.next);
    return lines.length === 1 && lines[0].length === 1 ? row(lines[0][0]) : table(lines, "aligned");
  }

  /** Rows of cells of nodes, up to a token that ends them. */
  lines(isEnd) {
    const lines = [[[]]];
    while (!isEnd()) {
      if (this.next === undefined) throw new UnknownError("an end is missing");
      if (this.next === "&") { this.at++; lines.at(-1).push([]); continue; }
      if (this.next === "\\\\" || this.next === "\\cr") {
        this.at++;
        if (this.next === "[") while (this.take() !== "]");
        lines.push([[]]);
        continue;
      }
      if (this.next === "\\hline") { this.at++; continue; }
      lines.at(-1).at(-1).push(...this.scripted());
    }
    if (lines.length > 1 && lines.at(-1).length === 1 && !lines.at(-1)[0].length) lines.pop();
    return lines;
  }

  until(closer) {
    const nodes = [];
    while (this.next !== closer) {
      if (this.next === undefined || this.next === "&" || this.next === "\\\\") throw new UnknownError(this.next);
      nodes.push(...this.scripted());
    }
    this.at++;
    return nodes;
  }

  /** What one argument of a command is: a group, or the next thing alone. */
  argument() {
    if (this.next === "{") { this.at++; return row(this.nested(() => this.until("}"))); }
    if (this.next === undefined || "}&^_".includes(this.next)) throw new UnknownError("an argument is missing");
    return row(this.nested(() => this.atom()));
  }

  nested(work) {
    if (++this.depth > MAX_DEPTH) throw new UnknownError("too deep");
    const result = work();
    this.depth--;
    return result;
  }

  /** The characters of an argument that is text. */
  words() {
    this.take("{");
    // Spaces are no tokens, so the text is read from the source between the braces that match these.
    let place = 0;
    for (let seen = 0, m; (m = TOKENS.exec(this.source)); ) {
      if (/^(?:\s+|%.*)$/.test(m[0])) continue;
      if (seen++ === this.at - 1) { place = TOKENS.lastIndex; break; }
    }
    TOKENS.lastIndex = 0;
    let level = 1, end = place;
    for (; end < this.source.length && level; end++) level += {"{": 1, "}": -1}[this.source[end]] ?? 0;
    for (level = 1; level; ) level += {"{": 1, "}": -1}[this.take()] ?? 0;
    return this.source.slice(place, end - 1).replace(/\\([{}$%&#_ ])/g, "$1").replace(/\$|[{}]/g, "").replace(/ /g, "\u00a0");
  }

  scripted() {
    let base = null, under = null, over = null;
    const nodes = this.next === "^" || this.next === "_" || this.next === "'" ? [element("mrow", [])] : this.nested(() => this.atom());
    if (!nodes.length) return nodes;
    base = nodes.pop();
    for (;;) {
      if (/^\\(?:no)?limits$/.test(this.next)) this.at++;
      else if (this.next === "^" && (!over || over.isPrimes)) {
        this.at++;
        const raised = this.argument();
        over = over ? row([over, raised]) : raised;
      } else if (this.next === "_" && !under) { this.at++; under = this.argument(); }
      else if (this.next === "'" && !over) {
        let primes = "";
        while (this.next === "'") { this.at++; primes += "′"; }
        over = operator(primes);
        over.isPrimes = true;
      } else break;
    }
    if (!under && !over) return [...nodes, base];
    const kind = base.hasLimits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    const parts = [under, over].filter(Boolean);
    return [...nodes, element(kind[under && over ? 2 : under ? 0 : 1], [base, ...parts])];
  }

  atom() {
    const token = this.take();
    if (token === "{") return [row(this.until("}"))];
    if (token === "}" || token === "&") throw new UnknownError(token);
    if (token === "~") return [element("mspace", [], {width: SPACES.get("~")})];
    if (token[0] === "\\") return this.command(token.slice(1));
    if (/^\d/.test(token)) return [element("mn", [token])];
    if (/^[\p{L}…∞]$/u.test(token)) return [element("mi", [token])];
    if (/^[()[\]|]$/.test(token)) return [operator(token, {stretchy: "false"})];
    return [operator(token === "-" ? "−" : token === "*" ? "∗" : token)];
  }

  command(name) {
    if (LETTERS.has(name)) return [element("mi", [LETTERS.get(name)], /^[A-Z]/.test(name) ? {mathvariant: "normal"} : {})];
    if (OPERATORS.has(name)) return [operator(OPERATORS.get(name), /^[lr]?[vV]ert$|^\||angle$|floor$|ceil$/.test(name) ? {stretchy: "false"} : {})];
    if (SPACES.has(name)) return [element("mspace", [], {width: SPACES.get(name)})];
    if (LARGE.has(name)) return [limits(operator(LARGE.get(name), {largeop: "true", movablelimits: "true"}))];
    if (INTEGRALS.has(name)) return [operator(INTEGRALS.get(name), {largeop: "true"})];
    if (LIMITS.has(name)) return [limits(operator(name.replace(/^arg|^lim(?=.)/, "$& "), {...NAMED, movablelimits: "true"}))];
    if (FUNCTIONS.has(name)) return [operator(name, NAMED)];
    if (ACCENTS.has(name)) {
      const [body, mark] = [this.argument(), operator(ACCENTS.get(name), {stretchy: String(/^(?:over|wide)/.test(name))})];
      return [limitsOf(element("mover", [body, mark], {accent: "true"}), name === "overbrace")];
    }
    if (UNDER.has(name)) {
      return [limitsOf(element("munder", [this.argument(), operator(UNDER.get(name), {stretchy: "true"})]), name === "underbrace")];
    }
    if (Object.hasOwn(STYLES, name)) return [restyled(this.argument(), STYLES[name])];
    if (/^[dt]?frac$|^cfrac$/.test(name)) return [this.fraction(name)];
    if (SIZES.test("\\" + name) && !/^(?:left|right|middle)$/.test(name)) {
      return /^[bB]ig/.test(name) ? [operator(this.fenceText(), {stretchy: "true", minsize: /igg/.test(name) ? "2em" : "1.4em"})] : [];
    }
    switch (name) {
      case "binom": case "dbinom": case "tbinom": {
        const parts = [this.argument(), this.argument()];
        return [element("mrow", [fence("("), element("mfrac", parts, {linethickness: "0"}), fence(")")])];
      }
      case "sqrt": {
        if (this.next !== "[") return [element("msqrt", [this.argument()])];
        this.at++;
        const root = row(this.until("]"));
        return [element("mroot", [this.argument(), root])];
      }
      case "left": return [this.fenced()];
      case "begin": return [this.environment()];
      case "text": case "textrm": case "textbf": case "textit": case "mbox": case "texttt": return [element("mtext", [this.words()])];
      case "mathrm": case "mathit": case "operatorname": case "operatorname*": {
        const node = element("mi", [this.words()], {mathvariant: "normal"});
        return [limitsOf(node, name.endsWith("*"))];
      }
      case "overset": case "stackrel": { const over = this.argument(); return [element("mover", [this.argument(), over])]; }
      case "underset": { const under = this.argument(); return [element("munder", [this.argument(), under])]; }
      case "xrightarrow": case "xleftarrow":
        return [element("mover", [operator(name === "xrightarrow" ? "→" : "←", {stretchy: "true"}), this.argument()])];
      case "not": { const [node] = this.atom(); node.textContent += "\u0338"; return [node]; }
      case "boxed": return [element("mrow", [this.argument()], {class: "boxed"})];
      case "pmod": return [operator("("), element("mi", ["mod"]), element("mspace", [], {width: "0.3em"}), this.argument(), operator(")")];
      case "bmod": case "mod": return [operator("mod")];
      case "tag": case "tag*": return [element("mspace", [], {width: "2em"}), element("mtext", [`(${this.words()})`])];
      case "label": this.words(); return [];
      default: throw new UnknownError(name);
    }
  }

  fraction(name) {
    const node = element("mfrac", [this.argument(), this.argument()]);
    return name === "dfrac" || name === "cfrac" ? element("mstyle", [node], {displaystyle: "true"}) : node;
  }

  fenceText() {
    const token = this.take();
    const known = token[0] === "\\" ? OPERATORS.get(token.slice(1)) : FENCES[token];
    if (known === undefined) throw new UnknownError(token);
    return known;
  }

  fenced() {
    const parts = [fence(this.fenceText())];
    while (this.next !== "\\right") {
      if (this.next === "\\middle") { this.at++; parts.push(fence(this.fenceText())); continue; }
      if (this.next === undefined || this.next === "&" || this.next === "\\\\") throw new UnknownError("\\right is missing");
      parts.push(...this.scripted());
    }
    this.at++;
    parts.push(fence(this.fenceText()));
    return element("mrow", parts);
  }

  environment() {
    const name = this.words().replace("*", "");
    if (!Object.hasOwn(MATRICES, name)) throw new UnknownError(name);
    if (name === "array") this.words();  // the alignment of its columns
    const lines = this.lines(() => this.next === "\\end");
    this.at++;
    this.words();
    const [open, close] = MATRICES[name];
    const body = table(lines, name);
    return open || close ? element("mrow", [fence(open), body, fence(close)]) : body;
  }
}

function limits(node) {
  node.hasLimits = true;
  return node;
}
const limitsOf = (node, has) => has ? limits(node) : node;

function table(lines, name) {
  const kind = /^(?:align|split|eqnarray)/.test(name) ? "aligned" : name === "cases" ? "cases" : "matrix";
  const rows = lines.map(cells => element("mtr", cells.map(cell => element("mtd", [row(cell)]))));
  return element("mtable", rows, {class: kind, ...(kind === "aligned" ? {displaystyle: "true"} : {})});
}

/** All letters and digits of a node in another style. */
function restyled(node, [capital, small, digit, exceptions]) {
  for (const leaf of [node, ...node.querySelectorAll("*")]) {
    if (leaf.children.length || !leaf.textContent) continue;
    leaf.textContent = [...leaf.textContent].map(character => {
      if (exceptions[character]) return exceptions[character];
      const base = /[A-Z]/.test(character) ? capital - 65 : /[a-z]/.test(character) ? small - 97 : /\d/.test(character) ? digit && digit - 48 : 0;
      return base ? String.fromCodePoint(base + character.charCodeAt(0)) : character;
    }).join("");
  }
  return node;
}
