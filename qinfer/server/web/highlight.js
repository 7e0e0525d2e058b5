// A light touch of colour in code: comments, strings, numbers, keywords, calls. No grammar.

import { h } from "./dom.js";

const MAX_CHARS = 30_000; // beyond, plain text is quicker than colour is worth

const words = (text) => new Set(text.split(" "));
const C_WORDS = "if else for while do switch case break continue return new delete try catch finally throw this null true false void int float double char bool long short unsigned const static struct enum class public private protected import export default from extends implements interface async await yield function let var typeof instanceof in of undefined namespace template using auto virtual override final package func type map range go defer chan select fn mut impl pub trait match use mod self Self where loop crate unsafe dyn ref as val fun when object string number boolean";
const HASH_WORDS = "def class if elif else for while in is not and or return import from as with try except finally raise lambda yield pass break continue None True False async await global nonlocal assert del self match case then fi do done esac function local export echo end begin module require unless puts nil true false null";
const SQL_WORDS = "select from where and or not in is null as join left right inner outer on group by order having limit offset insert into values update set delete create table index view drop alter primary key foreign references distinct union all case when then else end count sum avg min max between like exists with";

const STRINGS = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const REST = String.raw`(?<num>\b\d[\w.]*)|(?<word>[A-Za-z_$][\w$]*)`;
const rule = (comment, strings, keywords, fold = false) => ({ pattern: new RegExp(`(?<com>${comment})|(?<str>${strings})|${REST}`, "g"), keywords: words(keywords), fold });

const C = rule(String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`, "`(?:\\\\.|[^`\\\\])*`?|" + STRINGS, C_WORDS);
const HASH = rule(String.raw`#[^\n]*`, String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|` + STRINGS, HASH_WORDS);
const SQL = rule(String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`, STRINGS, SQL_WORDS, true);
const JSON_RULE = rule("(?!)", STRINGS, "true false null");
const MARKUP = rule(String.raw`<!--[^]*?(?:-->|$)`, STRINGS, "");

const LANGUAGES = new Map();
for (const [names, language] of [
  ["js javascript jsx ts typescript tsx mjs java c h cpp c++ cc cxx hpp cs csharp go golang rust rs swift kotlin kt scala php dart css scss zig", C],
  ["py python py3 rb ruby sh bash zsh shell console yaml yml toml ini dockerfile make makefile r perl elixir julia nix cmake", HASH],
  ["sql postgres postgresql mysql sqlite", SQL],
  ["json jsonc json5", JSON_RULE],
  ["html xml svg vue", MARKUP],
]) for (const name of names.split(" ")) LANGUAGES.set(name, language);

/** Return code as a fragment, coloured if its language is known. */
export function highlight(code, name) {
  const fragment = document.createDocumentFragment();
  const language = LANGUAGES.get(name.toLowerCase());
  if (!language || code.length > MAX_CHARS) {
    fragment.append(code);
    return fragment;
  }
  let end = 0;
  for (const match of code.matchAll(language.pattern)) {
    const kind = kindOf(match, language, code);
    if (!kind) continue;
    fragment.append(code.slice(end, match.index), h("span", { class: `t-${kind}`, text: match[0] }));
    end = match.index + match[0].length;
  }
  fragment.append(code.slice(end));
  return fragment;
}

function kindOf(match, language, code) {
  const { com, str, num, word } = match.groups;
  if (com) return "com";
  if (str) return "str";
  if (num) return "num";
  if (language.keywords.has(language.fold ? word.toLowerCase() : word)) return "key";
  return code[match.index + word.length] === "(" ? "call" : null;
}
