// Colours for code, line by line, so that a line that is complete is never looked at again. A language is a row of a table:
// what begins a comment, what quotes a text, and which words are its own.

const C_WORDS = "if else for while do switch case default break continue return goto struct enum union const static extern "
  + "sizeof typedef void int char float double long short unsigned signed bool auto true false";
const CPP_WORDS = " class public private protected virtual override final template typename namespace using new delete this "
  + "nullptr constexpr noexcept inline explicit operator friend throw try catch concept requires co_await co_return "
  + "__global__ __device__ __shared__ __host__";
const JS_WORDS = "if else for while do switch case default break continue return const let var function class extends new "
  + "this super import export from async await yield try catch finally throw typeof instanceof in of delete void null "
  + "undefined true false static get set";
const TS_WORDS = " interface type enum implements public private protected readonly abstract as is keyof namespace declare "
  + "string number boolean any unknown never";
const JVM_WORDS = "if else for while do switch case default break continue return class interface enum extends implements "
  + "new this super import package public private protected static final abstract void int long float double boolean char "
  + "byte short try catch finally throw throws instanceof null true false var record val fun object when in is as override "
  + "data sealed companion def trait match yield lazy";
const CODE = {line: "//", blocks: [["/*", "*/"]], quotes: "\"'"};
const HASH = {line: "#", quotes: "\"'"};

const TABLE = [
  ["c h", {...CODE, words: C_WORDS}],
  ["cpp c++ cc cxx hpp cuda cu", {...CODE, words: C_WORDS + CPP_WORDS}],
  ["js javascript jsx mjs node", {...CODE, blocks: [["/*", "*/"], ["`", "`"]], words: JS_WORDS}],
  ["ts typescript tsx", {...CODE, blocks: [["/*", "*/"], ["`", "`"]], words: JS_WORDS + TS_WORDS}],
  ["java kotlin kt scala groovy dart", {...CODE, words: JVM_WORDS}],
  ["cs csharp", {...CODE, words: JVM_WORDS + " using namespace string object bool decimal foreach async await get set out ref "
    + "params virtual readonly const struct delegate event where select from"}],
  ["go golang", {...CODE, blocks: [["/*", "*/"], ["`", "`"]], words: "break case chan const continue default defer else "
    + "fallthrough for func go goto if import interface map package range return select struct switch type var nil true false "
    + "string int int64 float64 bool byte rune error any"}],
  ["rust rs", {...CODE, quotes: "\"", words: "as async await break const continue crate dyn else enum extern false fn for if "
    + "impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while "
    + "i32 i64 u8 u32 u64 usize f32 f64 bool str String Vec Option Result Some None Ok Err"}],
  ["swift", {...CODE, quotes: "\"", words: "actor as async await break case catch class continue default defer do else enum "
    + "extension false for func guard if import in init inout is let nil override private protocol public return self static "
    + "struct super switch throw throws true try var where while Int String Double Bool"}],
  ["php", {...CODE, words: "abstract array as break case catch class const continue default echo else elseif extends final fn "
    + "for foreach function if implements interface namespace new null private protected public return static switch this "
    + "throw true false try use while"}],
  ["py python python3 pycon", {...HASH, blocks: [["\"\"\"", "\"\"\""], ["'''", "'''"]], words: "and as assert async await break "
    + "case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal "
    + "not or pass raise return self True try while with yield print len range int str float list dict set tuple bool"}],
  ["rb ruby", {...HASH, words: "alias and begin break case class def defined do else elsif end ensure false for if in module "
    + "next nil not or puts raise require rescue return self super then true unless until when while yield"}],
  ["sh bash shell zsh console", {...HASH, words: "if then else elif fi for while until do done case esac in function return "
    + "local export readonly set source exit echo cd sudo"}],
  ["ps1 powershell", {...HASH, blocks: [["<#", "#>"]], words: "if else elseif foreach for while function param return switch try "
    + "catch finally throw in begin process end"}],
  ["dockerfile docker", {...HASH, words: "FROM RUN CMD COPY ADD ENV ARG WORKDIR EXPOSE ENTRYPOINT USER VOLUME LABEL AS"}],
  ["makefile make cmake", {...HASH, words: "if else endif ifeq ifneq include define endef foreach function set"}],
  ["yaml yml", {...HASH, words: "true false null yes no on off", key: /^(\s*(?:- )?)([\w./-]+)(?=:(\s|$))/}],
  ["toml ini conf cfg properties", {...HASH, words: "true false", key: /^(\s*)([\w.-]+|\[[^\]]*\]+)(?=\s*=|$)/}],
  ["json jsonc json5", {...CODE, words: "true false null", key: /()("(?:[^"\\]|\\.)*")(?=\s*:)/}],
  ["sql postgres mysql sqlite", {line: "--", blocks: [["/*", "*/"]], quotes: "\"'", folds: true, words: "add all alter and any as "
    + "asc begin between by case check column commit constraint create cross default delete desc distinct drop else end exists "
    + "foreign from full group having if in index inner insert into is join key left like limit not null on or order outer "
    + "primary references returning right rollback select set table then transaction union unique update using values view when "
    + "where with int integer text varchar boolean timestamp date count sum avg min max"}],
  ["lua", {line: "--", blocks: [["[[", "]]"]], quotes: "\"'", words: "and break do else elseif end false for function goto if in "
    + "local nil not or repeat return then true until while print"}],
  ["hs haskell", {line: "--", blocks: [["{-", "-}"]], quotes: "\"", words: "case class data deriving do else if import in "
    + "instance let module newtype of then type where"}],
  ["r", {...HASH, words: "if else for while repeat function return next break TRUE FALSE NULL NA in library"}],
  ["julia jl", {...HASH, quotes: "\"", blocks: [["\"\"\"", "\"\"\""]], words: "abstract begin break catch const continue do else "
    + "elseif end export false finally for function if import in let macro module mutable nothing return struct true try using "
    + "where while"}],
  ["css scss less", {...CODE, line: null, words: "important media supports keyframes import", key: /([{;]\s*|^\s*)(--?[\w-]+|[a-z-]+)(?=\s*:)/}],
  ["html xml svg vue xhtml", {line: null, blocks: [["<!--", "-->"]], quotes: "\"'", words: "", key: /(<\/?)([\w:-]+)/}],
];

const LANGUAGES = new Map();
for (const [names, row] of TABLE) {
  const words = new Set(row.words.split(" "));
  for (const name of names.split(" ")) LANGUAGES.set(name, {blocks: [], key: null, folds: false, ...row, words});
}

const TOKEN = /[A-Za-z_$@][\w$]*|\d[\w.]*/y;

/** Lines of a language as nodes; it knows in what block of several lines the last line ended. */
export class Highlighter {
  constructor(name) {
    this.name = name.toLowerCase();
    this.language = LANGUAGES.get(this.name);
    this.end = null;  // what ends the block that is open
  }

  copy() { return Object.assign(Object.create(Highlighter.prototype), this); }

  line(text) {
    if (this.name === "diff" || this.name === "patch") return [part({"+": "added", "-": "removed", "@": "key"}[text[0]], text)];
    return this.language ? [...this.parts(text)] : [text];
  }

  *parts(text) {
    const {line, blocks, quotes, words, key, folds} = this.language;
    let at = 0, plain = "";
    const found = key && !this.end ? text.match(key) : null;
    const keyAt = found ? found.index + found[1].length : -1;
    const upTo = (closer, from) => {
      const end = text.indexOf(closer, from);
      this.end = end < 0 ? closer : null;
      return end < 0 ? text.length : end + closer.length;
    };
    while (at < text.length) {
      let kind = "", to = at + 1;
      const block = blocks.find(([opener]) => text.startsWith(opener, at));
      if (this.end) {
        kind = isQuote(this.end) ? "string" : "comment";
        to = upTo(this.end, at);
      } else if (block) {
        kind = isQuote(block[1]) ? "string" : "comment";
        to = upTo(block[1], at + block[0].length);
      } else if (at === keyAt) {
        kind = "key";
        to = at + found[2].length;
      } else if (line && text.startsWith(line, at) && (line !== "#" || at === 0 || /\s/.test(text[at - 1]))) {
        kind = "comment";
        to = text.length;
      } else if (quotes.includes(text[at])) {
        kind = "string";
        for (to = at + 1; to < text.length && text[to] !== text[at]; to++) if (text[to] === "\\") to++;
        to = Math.min(to + 1, text.length);
      } else {
        TOKEN.lastIndex = at;
        const token = TOKEN.exec(text)?.[0];
        if (token) {
          to = at + token.length;
          if (/\d/.test(token[0])) kind = "number";
          else if (words.has(folds ? token.toLowerCase() : token)) kind = "word";
          else if (token[0] === "@" || token[0] === "$") kind = "key";
          else if (text[to] === "(") kind = "call";
        }
      }
      const content = text.slice(at, to);
      at = to;
      if (!kind) { plain += content; continue; }
      if (plain) yield plain;
      plain = "";
      yield part(kind, content);
    }
    if (plain) yield plain;
  }
}

const isQuote = closer => /^["'`]/.test(closer);

function part(kind, content) {
  if (!kind) return content;
  const node = document.createElement("span");
  node.className = "c-" + kind;
  node.textContent = content;
  return node;
}
