// The inside of a paragraph: emphasis, code, links and formulas, as nodes.

import { make } from "./dom.js";
import { formula } from "./math.js";

const MAX_DEPTH_OF_EMPHASIS = 8;
// The first alternative that fits wins. Lengths are limited, so that marks that are never closed cost little.
const PATTERN = new RegExp([
  /\$\$(?<display>[^$]{1,4000}?)\$\$/,
  /\\\[(?<bracketed>[\s\S]{1,4000}?)\\\]/,
  /\\\((?<parens>[\s\S]{1,2000}?)\\\)/,
  /(?<![\\$])\$(?![\s$])(?<dollars>(?:[^$\n\\]|\\[^\n]){0,1000}?(?:[^\s\\$]|\\[^\s]))\$(?![\d$])/,
  /\\(?<escaped>[!-/:-@[-`{-~])/,
  /(?<!`)(?<ticks>`+)(?!`)(?<code>[\s\S]{0,4000}?[^`])\k<ticks>(?!`)/,
  /(?<stars>\*{1,3})(?![\s*])(?<starred>(?:[^*\n]|\n(?!\n)|\*(?!\k<stars>)){1,2000}?)(?<!\s)\k<stars>(?!\*)/,
  /(?<![\w_])(?<bars>_{1,2})(?![\s_])(?<barred>[^\n]{1,2000}?)(?<![\s_])\k<bars>(?![\w_])/,
  /~~(?!\s)(?<struck>[^~]{1,2000}?)(?<!\s)~~/,
  /!?\[(?<label>(?:[^\][\n]|\[[^\]\n]{0,300}\]){0,500})\]\(<?(?<address>(?:https?:\/\/|mailto:)[^\s<>()]{1,2000}(?:\([^\s<>()]{0,300}\)[^\s<>()]{0,300})?)>?(?:\s+"[^"\n]{0,300}")?\)/,
  /(?<![\w/])<?(?<url>https?:\/\/[^\s<>"'`]{0,2000}[^\s<>"'`.,;:!?)\]}*_~])>?/,
  /<br\s?\/?>/,
].map(part => part.source).join("|"), "g");

/** Append a text to a node, and return that. */
export function inline(text, parent, depth = 0) {
  if (depth > MAX_DEPTH_OF_EMPHASIS) { parent.append(text); return parent; }
  let last = 0;
  for (const found of text.matchAll(PATTERN)) {
    if (found.index > last) parent.append(text.slice(last, found.index));
    last = found.index + found[0].length;
    parent.append(piece(found.groups, depth));
  }
  if (last < text.length) parent.append(text.slice(last));
  return parent;
}

function piece({display, bracketed, parens, dollars, escaped, code, stars, starred, bars, barred, struck, label, address, url}, depth) {
  if (display ?? bracketed) return formula(display ?? bracketed, true);
  if (parens ?? dollars) return formula(parens ?? dollars, false);
  if (escaped) return escaped;
  if (code) return make("code", "", /^ .*[^ ].* $/.test(code) ? code.slice(1, -1) : code);
  if (starred) return emphasis(stars.length, starred, depth);
  if (barred) return emphasis(bars.length, barred, depth);
  if (struck) return inline(struck, make("del"), depth + 1);
  if (address) return link(address, inline(label || address, make("a"), MAX_DEPTH_OF_EMPHASIS));
  if (url) return link(url, make("a", "", url));
  return make("br");
}

function emphasis(strength, text, depth) {
  const outer = make(strength === 1 ? "em" : "strong");
  inline(text, strength === 3 ? outer.appendChild(make("em")) : outer, depth + 1);
  return outer;
}

/** A link that does not tell where it was followed. Pictures are links as well: the page loads nothing from elsewhere. */
function link(address, node) {
  return Object.assign(node, {href: address, rel: "noopener noreferrer nofollow", target: "_blank"});
}
