// Reads the blocks of Markdown: headings, paragraphs, lists, quotes, code and tables.
//
// A block: {kind, …} where text is SourceText. Kinds: heading {level, text}, paragraph {text}, code {language, text},
// quote {blocks}, list {isOrdered, start, items: [blocks]}, table {aligned, head: [text], rows: [[text]]}, rule.

import { SourceText } from "./source_text.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}(?=\S)|[ \t]*$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
// Deeper ones are text: nobody writes them, and they would exhaust the stack.
const DEEPEST = 12;

/** The blocks of a SourceText. */
export const blocksOf = (source) => blocksOfLines(source.lines(), 0);

const isBlank = (line) => line.text.trim() === "";
const indentOf = (line) => line.text.length - line.text.trimStart().length;

function blocksOfLines(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const reader = READERS.find((each) => each.begins(lines, at, depth));
    const [block, next] = reader.read(lines, at, depth);
    blocks.push(block);
    at = next;
  }
  return blocks;
}

/** Whether another kind of block than a paragraph begins at a line. */
const interrupts = (lines, at, depth) =>
  READERS.some((each) => each.read !== readParagraph && each.read !== readTable && each.begins(lines, at, depth));

function readCode(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at].text);
  const indent = indentOf(lines[at]);
  const inside = [];
  let next = at + 1;
  const isEnd = (text) => {
    const trimmed = text.trim();
    return trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length) && indentOf({ text }) < 4;
  };
  while (next < lines.length && !isEnd(lines[next].text)) {
    inside.push(lines[next].slice(Math.min(indent, indentOf(lines[next]))));
    next += 1;
  }
  return [{ kind: "code", language, text: SourceText.joined(inside) }, next + 1];
}

function readHeading(lines, at) {
  const [marker, hashes] = HEADING.exec(lines[at].text);
  const line = lines[at].slice(marker.length);
  const end = line.text.replace(/(?:^|\s)#+\s*$/, "").length;
  return [{ kind: "heading", level: hashes.length, text: line.slice(0, end).trimmed() }, at + 1];
}

function readQuote(lines, at, depth) {
  const inside = [];
  let next = at;
  while (next < lines.length && QUOTE.test(lines[next].text)) {
    inside.push(lines[next].slice(QUOTE.exec(lines[next].text)[0].length));
    next += 1;
  }
  return [{ kind: "quote", blocks: blocksOfLines(inside, depth + 1) }, next];
}

function readList(lines, at, depth) {
  const kindOf = (marker) => (/\d/.test(marker) ? marker.at(-1) : marker);
  const [, , marker] = ITEM.exec(lines[at].text);
  const items = [];
  let next = at;
  while (next < lines.length) {
    const found = ITEM.exec(lines[next].text);
    if (!found || kindOf(found[2]) !== kindOf(marker) || RULE.test(lines[next].text)) break;
    const isEmpty = found[0].length === lines[next].text.length;
    const width = isEmpty ? found[1].length + found[2].length + 1 : found[0].length;
    const inside = [lines[next].slice(Math.min(width, lines[next].text.length))];
    next += 1;
    while (next < lines.length) {
      const line = lines[next];
      const isInside = isBlank(line)
        ? next + 1 < lines.length && !isBlank(lines[next + 1]) && indentOf(lines[next + 1]) >= Math.min(width, 2)
        : indentOf(line) >= Math.min(width, 2) ||
          (!isBlank(lines[next - 1]) && !ITEM.test(line.text) && !interrupts(lines, next, depth));
      if (!isInside) break;
      inside.push(line.slice(Math.min(width, indentOf(line))));
      next += 1;
    }
    items.push(blocksOfLines(inside, depth + 1));
    // A list whose items stand apart goes on behind blank lines.
    let ahead = next;
    while (ahead < lines.length && isBlank(lines[ahead])) ahead += 1;
    if (ahead < lines.length && ITEM.test(lines[ahead].text)) next = ahead;
  }
  const start = Number.parseInt(marker, 10);
  return [{ kind: "list", isOrdered: /\d/.test(marker), start: Number.isNaN(start) ? 1 : start, items }, next];
}

/** The cells of a row of a table. */
function cellsOf(line) {
  const cells = [];
  let start = 0;
  let isCode = false;
  const { text } = line;
  for (let at = 0; at <= text.length; at++) {
    if (text[at] === "`") isCode = !isCode;
    if (at < text.length && (text[at] !== "|" || isCode || text[at - 1] === "\\")) continue;
    cells.push(line.slice(start, at).trimmed());
    start = at + 1;
  }
  if (cells.length > 1 && cells[0].text === "") cells.shift();
  if (cells.length > 1 && cells.at(-1).text === "") cells.pop();
  return cells;
}

function beginsTable(lines, at) {
  return (
    at + 1 < lines.length &&
    lines[at].text.includes("|") &&
    TABLE_RULE.test(lines[at + 1].text) &&
    cellsOf(lines[at]).length === cellsOf(lines[at + 1]).length
  );
}

function readTable(lines, at) {
  const head = cellsOf(lines[at]);
  const aligned = cellsOf(lines[at + 1]).map(({ text }) =>
    text.endsWith(":") ? (text.startsWith(":") ? "center" : "right") : "left",
  );
  const rows = [];
  let next = at + 2;
  while (next < lines.length && !isBlank(lines[next]) && lines[next].text.includes("|")) {
    rows.push(cellsOf(lines[next]).slice(0, head.length));
    next += 1;
  }
  return [{ kind: "table", aligned, head, rows }, next];
}

function readParagraph(lines, at, depth) {
  let next = at + 1;
  while (next < lines.length && !isBlank(lines[next]) && !interrupts(lines, next, depth) && !beginsTable(lines, next)) {
    next += 1;
  }
  const text = SourceText.joined(lines.slice(at, next).map((line) => line.slice(indentOf(line))));
  return [{ kind: "paragraph", text }, next];
}

const READERS = [
  { begins: (lines, at) => FENCE.test(lines[at].text), read: readCode },
  { begins: (lines, at) => HEADING.test(lines[at].text), read: readHeading },
  { begins: (lines, at) => RULE.test(lines[at].text), read: (lines, at) => [{ kind: "rule" }, at + 1] },
  { begins: (lines, at, depth) => depth < DEEPEST && QUOTE.test(lines[at].text), read: readQuote },
  { begins: (lines, at, depth) => depth < DEEPEST && ITEM.test(lines[at].text), read: readList },
  { begins: beginsTable, read: readTable },
  { begins: () => true, read: readParagraph },
];
