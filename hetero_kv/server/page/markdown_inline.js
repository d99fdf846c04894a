// Reads what stands within a paragraph of Markdown: code, emphasis, links.
//
// A span: {kind: "text", text}, {kind: "code", text}, {kind: "break"}, or {kind: "strong" | "emphasis" | "deleted" |
// "link", spans, target}, where text is SourceText.

const MARKERS = [
  { marker: "**", kind: "strong" },
  { marker: "__", kind: "strong" },
  { marker: "~~", kind: "deleted" },
  { marker: "*", kind: "emphasis" },
  { marker: "_", kind: "emphasis" },
];
const LINK = /^!?\[([^\[\]]*)\]\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/;
const PLAIN_LINK = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_]/;
const ESCAPED = /^\\[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const DEEPEST = 12;

/** The spans of a SourceText. */
export function spansOf(source, depth = 0) {
  const spans = [];
  let plainFrom = 0;
  let at = 0;
  const { text } = source;
  const add = (span, from, to) => {
    if (from > plainFrom) spans.push({ kind: "text", text: source.slice(plainFrom, from) });
    if (span) spans.push(span);
    plainFrom = to;
    at = to;
  };
  while (at < text.length) {
    const found = SPECIAL.has(text[at]) ? spanAt(source, at, depth) : null;
    if (found) add(found.span, at, found.end);
    else at += 1;
  }
  add(null, text.length, text.length);
  return spans;
}

const SPECIAL = new Set("\\`*_~[!h\n");

/** The span that begins at `at`: {span, end}, or null where the character stands for itself. */
function spanAt(source, at, depth) {
  const { text } = source;
  const character = text[at];
  if (character === "\\") {
    if (text[at + 1] === "\n") return { span: { kind: "break" }, end: at + 2 };
    return ESCAPED.test(text.slice(at, at + 2))
      ? { span: { kind: "text", text: source.slice(at + 1, at + 2) }, end: at + 2 }
      : null;
  }
  if (character === "\n") return text.slice(0, at).endsWith("  ") ? { span: { kind: "break" }, end: at + 1 } : null;
  if (character === "`") return codeAt(source, at);
  if (depth >= DEEPEST) return null;
  if (character === "[" || character === "!") return linkAt(source, at, depth);
  if (character === "h") return plainLinkAt(source, at);
  return emphasisAt(source, at, depth);
}

function codeAt(source, at) {
  const { text } = source;
  let width = 1;
  while (text[at + width] === "`") width += 1;
  for (let end = text.indexOf("`".repeat(width), at + width); end !== -1; end = text.indexOf("`".repeat(width), end)) {
    let found = width;
    while (text[end + found] === "`") found += 1;
    if (found === width) {
      const inside = source.slice(at + width, end);
      const isPadded = /^ .*[^ ].* $/s.test(inside.text);
      return { span: { kind: "code", text: isPadded ? inside.slice(1, -1) : inside }, end: end + width };
    }
    end += found;
  }
  return { span: { kind: "text", text: source.slice(at, at + width) }, end: at + width };
}

function linkAt(source, at, depth) {
  const found = LINK.exec(source.text.slice(at, at + 4000));
  if (!found) return null;
  const [whole, label, target] = found;
  const start = at + whole.indexOf("[") + 1;
  const spans = label ? spansOf(source.slice(start, start + label.length), depth + 1) : null;
  return {
    span: linkSpan(target, spans ?? [{ kind: "text", text: source.slice(at, at + whole.length) }]),
    end: at + whole.length,
  };
}

function plainLinkAt(source, at) {
  if (at > 0 && WORD.test(source.text[at - 1])) return null;
  const found = PLAIN_LINK.exec(source.text.slice(at, at + 2000));
  if (!found) return null;
  const end = at + found[0].length;
  return { span: linkSpan(found[0], [{ kind: "text", text: source.slice(at, end) }]), end };
}

/** A link, which only leads to the web or a mail address; others are their labels. */
function linkSpan(target, spans) {
  return /^(https?:\/\/|mailto:)/i.test(target) ? { kind: "link", target, spans } : { kind: "plain", spans };
}

function emphasisAt(source, at, depth) {
  const { text } = source;
  for (const { marker, kind } of MARKERS) {
    if (!text.startsWith(marker, at)) continue;
    const from = at + marker.length;
    if (!text[from] || /\s/.test(text[from])) continue;
    const isWithinWord = marker[0] === "_" && at > 0 && WORD.test(text[at - 1]);
    const end = isWithinWord ? -1 : closing(text, marker, from);
    if (end > from)
      return { span: { kind, spans: spansOf(source.slice(from, end), depth + 1) }, end: end + marker.length };
  }
  let width = 1;
  while (text[at + width] === text[at]) width += 1;
  return { span: { kind: "text", text: source.slice(at, at + width) }, end: at + width };
}

/** Where emphasis that begins at `from` ends, or -1. Code is passed over. */
function closing(text, marker, from) {
  for (let at = from; at < text.length; at++) {
    if (text[at] === "\\") {
      at += 1;
    } else if (text[at] === "`") {
      const end = text.indexOf("`", at + 1);
      if (end !== -1) at = end;
    } else if (text.startsWith(marker, at) && !/\s/.test(text[at - 1])) {
      let width = marker.length;
      while (text[at + width] === marker[0]) width += 1;
      const isOther = marker.length === 1 ? width === 2 : width < 2;
      const isWithinWord = marker[0] === "_" && WORD.test(text[at + width] ?? " ");
      if (isOther || isWithinWord) at += width - 1;
      else return at + width - marker.length;
    }
  }
  return -1;
}
